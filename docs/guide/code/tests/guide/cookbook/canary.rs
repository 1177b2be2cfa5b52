use std::sync::Arc;

use ratelimit_core::{AnyAlgorithm, Limits, RateLimiter, Store};

struct Canary<S> {
    current: RateLimiter<Arc<S>>,
    next: RateLimiter<Arc<S>>,
    percent: u64,
}

impl<S: Store<AnyAlgorithm>> Canary<S> {
    fn new(store: S, [current, next]: [Limits<AnyAlgorithm>; 2], percent: u64) -> Self {
        let store = Arc::new(store); // one, so that a customer who changes keeps its states
        let [current, next] = [current, next].map(|limits| RateLimiter::new(limits, store.clone()));
        Self { current, next, percent }
    }

    /// The limiter of a customer: the same in every process (FNV-1a of its id).
    fn limiter_of(&self, customer: &str) -> &RateLimiter<Arc<S>> {
        let hash = customer.bytes().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
        });
        if hash % 100 < self.percent { &self.next } else { &self.current }
    }
}

mod tests {
    use ratelimit_core::{Gcra, ManualClock};
    use ratelimit_memory::MemoryStore;

    use super::*;
    use crate::Error;

    #[test]
    fn five_in_a_hundred_customers_have_the_next_policy() -> Result<(), Error> {
        let limits = |burst| Limits::builder().limit("api", Gcra::per_second(10).burst(burst));
        let policies = [limits(20).build()?, limits(5).build()?];
        let store = MemoryStore::builder().clock(ManualClock::default()).build();
        let mut canary = Canary::new(store, policies, 5);
        let mut chosen = Vec::new();
        for nth in 0..10_000 {
            let customer = format!("customer-{nth}");
            let verdict = canary.limiter_of(&customer).check_now(&customer)?;
            assert!(verdict.limit() == 20 || verdict.remaining() == 4);
            chosen.extend((verdict.limit() == 5).then_some(customer));
        }
        assert!((400..=600).contains(&chosen.len()), "{}", chosen.len());
        // Back at the current policy, what they have used stays used.
        canary.percent = 0;
        let told = canary.limiter_of(&chosen[0]).check_now(&chosen[0])?;
        assert_eq!(told.remaining(), 18);
        Ok(())
    }
}
