//! A service that is tested in memory, on a clock that the test moves, and runs on Redis.
//!
//! `cargo run -p ratelimit-redis --example service_in_tests -- redis://127.0.0.1:6379` runs it;
//! `cargo test -p ratelimit-redis --example service_in_tests` tests it on both.

use ratelimit_core::{ConfigError, Gcra, Limit, Limits, RateLimiter, Store};
use ratelimit_redis::RedisStore;

/// The service. It is written for any store.
struct Login<S> {
    limiter: RateLimiter<S, Gcra>,
}

impl<S: Store<Gcra>> Login<S> {
    fn new(store: S) -> Result<Self, ConfigError> {
        let login = Limit::new("login", Gcra::per_minute(5).build()?)?;
        Ok(Self { limiter: RateLimiter::new(Limits::new([login])?, store) })
    }

    async fn log_in(&self, user: &str) -> Result<&'static str, S::Error> {
        let verdict = self.limiter.check(user).await?;
        Ok(if verdict.allowed() { "200 OK" } else { "429 Too Many Requests" })
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let Some(url) = std::env::args().nth(1) else {
        return Err("give the URL of a Redis, such as redis://127.0.0.1:6379".into());
    };
    let service = Login::new(RedisStore::connect(&url).await?)?;
    println!("{}", service.log_in("alice").await?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::error::Error;
    use std::time::Duration;

    use ratelimit_core::ManualClock;
    use ratelimit_memory::MemoryStore;
    use ratelimit_servers::RedisServer;

    use super::*;

    /// What the service promises, in any store.
    async fn the_sixth_login_of_a_minute_is_refused<S: Store<Gcra>>(
        service: &Login<S>,
    ) -> Result<(), S::Error> {
        for _ in 0..5 {
            assert_eq!(service.log_in("alice").await?, "200 OK");
        }
        assert_eq!(service.log_in("alice").await?, "429 Too Many Requests");
        assert_eq!(service.log_in("bob").await?, "200 OK");
        Ok(())
    }

    #[tokio::test]
    async fn in_memory() -> Result<(), Box<dyn Error>> {
        let clock = ManualClock::default();
        let service = Login::new(MemoryStore::builder().clock(clock.clone()).build())?;
        the_sixth_login_of_a_minute_is_refused(&service).await?;

        clock.advance(Duration::from_secs(12)); // no test waits for real time
        assert_eq!(service.log_in("alice").await?, "200 OK");
        Ok(())
    }

    #[tokio::test]
    async fn on_redis() -> Result<(), Box<dyn Error>> {
        let server = RedisServer::start()?; // a process of its own, ended with the value
        let service = Login::new(RedisStore::connect(&server.url()).await?)?;
        the_sixth_login_of_a_minute_is_refused(&service).await?;
        Ok(())
    }
}
