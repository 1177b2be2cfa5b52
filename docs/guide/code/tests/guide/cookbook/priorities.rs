use ratelimit_core::{AnyAlgorithm, ConfigError, Gcra, Limits, RateLimiter, Store, Verdict};

fn limits() -> Result<Limits<AnyAlgorithm>, ConfigError> {
    Limits::builder()
        .limit("all", Gcra::per_second(100))
        .by(["backend"])
        .limit("batch", Gcra::per_second(60)) // leaves 40 per second to the others
        .by(["backend"])
        .when("priority", "batch")
        .build()
}

async fn check<S: Store<AnyAlgorithm>>(
    limiter: &RateLimiter<S>,
    priority: &str, // "interactive" or "batch"
) -> Result<Verdict, S::Error> {
    limiter.check(&[("backend", "search"), ("priority", priority)]).await
}

mod tests {
    use std::time::Duration;

    use ratelimit_core::ManualClock;
    use ratelimit_memory::MemoryStore;

    use super::*;
    use crate::Error;

    #[tokio::test]
    async fn batch_work_leaves_forty_per_second() -> Result<(), Error> {
        let clock = ManualClock::default();
        let store = MemoryStore::builder().clock(clock.clone()).build();
        let limiter = RateLimiter::new(limits()?, store);
        for _ in 0..10 {
            let mut admitted = [0, 0];
            for _ in 0..1_000 {
                admitted[0] += u32::from(check(&limiter, "batch").await?.allowed());
            }
            for _ in 0..1_000 {
                admitted[1] += u32::from(check(&limiter, "interactive").await?.allowed());
            }
            assert_eq!(admitted, [60, 40]);
            clock.advance(Duration::from_secs(1));
        }
        Ok(())
    }
}
