use std::time::Duration;

use ratelimit_core::{
    AnyAlgorithm, ConfigError, Gcra, Limits, ManualClock, RateLimiter, Timestamp,
};
use ratelimit_memory::{MemoryError, MemoryStore};

struct Worker {
    clock: ManualClock,
    limiter: RateLimiter<MemoryStore<AnyAlgorithm, ManualClock>>,
}

impl Worker {
    fn new() -> Result<Self, ConfigError> {
        let limits = Limits::builder().limit("address", Gcra::per_minute(60).burst(10)).build()?;
        let clock = ManualClock::default(); // no clock of the system
        let store = MemoryStore::builder().capacity(100_000).clock(clock.clone()).build();
        Ok(Self { clock, limiter: RateLimiter::new(limits, store) })
    }

    /// The status for a request, and its `Retry-After`; `now_ms` is `Date.now()`.
    fn decide(&self, address: &str, now_ms: u64) -> Result<(u16, Option<u64>), MemoryError> {
        self.clock.set(Timestamp::saturating_from_us(now_ms.saturating_mul(1_000)));
        let verdict = self.limiter.check_now(address)?;
        let seconds = |wait: Duration| wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
        let wait = verdict.retry_after().map(seconds);
        Ok(if verdict.allowed() { (200, None) } else { (429, wait) })
    }
}

mod tests {
    use super::*;
    use crate::Error;

    #[test]
    fn it_decides_at_the_time_that_it_is_given() -> Result<(), Error> {
        let (worker, now_ms) = (Worker::new()?, 1_795_392_000_000);
        for _ in 0..10 {
            assert_eq!(worker.decide("192.0.2.7", now_ms)?, (200, None));
        }
        assert_eq!(worker.decide("192.0.2.7", now_ms)?, (429, Some(1)));
        assert_eq!(worker.decide("192.0.2.7", now_ms + 999)?, (429, Some(1)));
        assert_eq!(worker.decide("192.0.2.7", now_ms + 1_000)?, (200, None));
        assert_eq!(worker.decide("192.0.2.8", now_ms)?, (200, None));
        Ok(())
    }
}
