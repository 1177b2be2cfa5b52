//! Limits read from a document, so that they can change without a new build.
//!
//! `cargo run -p ratelimit-memory --example policy_document`

use ratelimit_core::{AnyAlgorithm, Limits, RateLimiter};
use ratelimit_memory::MemoryStore;

const DOCUMENT: &str = r#"
    [[limit]]
    name = "burst"
    key = ["ip"]
    algorithm = "gcra"
    rate = "10/s"
    burst = 20
"#;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let limits: Limits<AnyAlgorithm> = toml::from_str(DOCUMENT)?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    assert_eq!(limiter.check_now(&[("ip", "192.0.2.7")])?.remaining(), 19);

    // A mistake is named, with what is accepted.
    let mistaken = DOCUMENT.replace("10/s", "10 per second");
    if let Err(error) = toml::from_str::<Limits<AnyAlgorithm>>(&mistaken) {
        println!("{error}");
    }
    Ok(())
}

#[test]
fn it_runs() -> Result<(), Box<dyn std::error::Error>> {
    main()
}
