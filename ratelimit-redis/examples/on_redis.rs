//! The smallest limiter, on Redis: nothing but the store differs from the one in memory.
//!
//! `cargo run -p ratelimit-redis --example on_redis -- redis://127.0.0.1:6379`

use ratelimit_core::{Gcra, Limits, RateLimiter};
use ratelimit_redis::RedisStore;

async fn log_in(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
    let limiter = RateLimiter::new(limits, RedisStore::connect(url).await?);

    let verdict = limiter.check("alice").await?;
    if !verdict.allowed() {
        println!("come back in {:.1?}", verdict.retry_after().unwrap_or_default());
    }
    Ok(())
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    match std::env::args().nth(1) {
        Some(url) => log_in(&url).await,
        None => Err("give the URL of a Redis, such as redis://127.0.0.1:6379".into()),
    }
}

#[tokio::test]
async fn it_runs() -> Result<(), Box<dyn std::error::Error>> {
    let server = ratelimit_servers::RedisServer::shared()?;
    for _ in 0..6 {
        log_in(&server.url()).await?;
    }
    Ok(())
}
