//! The smallest limiter: five logins per minute and caller.
//!
//! `cargo run -p ratelimit-memory --example smallest`

use ratelimit_core::{Gcra, Limits, RateLimiter};
use ratelimit_memory::MemoryStore;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());

    for _ in 0..6 {
        let verdict = limiter.check_now("alice")?;
        if verdict.allowed() {
            println!("welcome; {} attempts left", verdict.remaining());
        } else if let Some(wait) = verdict.retry_after() {
            println!("come back in {wait:.1?}");
        }
    }
    Ok(())
}

#[test]
fn it_runs() -> Result<(), Box<dyn std::error::Error>> {
    main()
}
