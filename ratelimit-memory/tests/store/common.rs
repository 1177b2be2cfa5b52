//! Helpers of several of these tests.

use ratelimit_core::algorithm::InMemory;
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    AnyAlgorithm, Clock, Limit, Limits, ManualClock, RateLimiter, SyncStore, Timestamp, Verdict,
};
use ratelimit_memory::{Builder, MemoryStore};
pub(crate) use ratelimit_testkit::limit_in_words as limit;

pub(crate) const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);
pub(crate) const HOUR_US: u64 = 3_600_000_000;

/// A limit of every algorithm, and one that counts attempts.
pub(crate) const MIXED: [&str; 11] = [
    "gcra 10/s burst 5",
    "token-bucket 7/2s burst 4",
    "fixed-window 4/s",
    "first-request-window 4/s",
    "window-log 4/s",
    "sliding-log 5/s",
    "sliding-counter 5/s",
    "bucketed-window bucket 250ms rates 5/s, 8/2s",
    "concurrency 3/700ms",
    "lockout 4/s block 300ms factor 2 longest 1s forget 3s",
    "fixed-window 4/s count attempts",
];

pub(crate) type Memory<A = AnyAlgorithm> = MemoryStore<A, ManualClock>;
pub(crate) type Limiter = RateLimiter<Memory>;

pub(crate) fn algorithm(words: &str) -> AnyAlgorithm {
    words.parse().expect(words)
}

/// A store on a clock that stands at [`BEGIN`].
pub(crate) fn store<A: InMemory>(
    build: impl FnOnce(Builder<ManualClock>) -> Builder<ManualClock>,
) -> (Memory<A>, ManualClock) {
    let clock = ManualClock::new(BEGIN);
    (build(MemoryStore::builder().clock(clock.clone())).build(), clock)
}

/// A clock that does something between its reading and the use that is made of it.
#[derive(Clone)]
pub(crate) struct Hooked<F>(pub(crate) ManualClock, pub(crate) F);

impl<F: Fn() + Send + Sync> Clock for Hooked<F> {
    fn now(&self) -> Timestamp {
        let now = self.0.now();
        (self.1)();
        now
    }
}

/// Decides one check of the same limit and cost 1 per key.
pub(crate) fn ask_all(
    store: &Memory,
    limit: &Limit<AnyAlgorithm>,
    keys: &[String],
    op: Op,
) -> Verdict {
    let checks: Vec<_> = keys.iter().map(|key| Check { limit, key, cost: 1 }).collect();
    store.apply_now(&Batch::new(&checks).expect("distinct").op(op)).expect("decides")
}

/// A limiter by these limits, in a store on a clock that stands at [`BEGIN`].
pub(crate) fn limiter<const N: usize>(
    limits: [Limit<AnyAlgorithm>; N],
    build: impl FnOnce(Builder<ManualClock>) -> Builder<ManualClock>,
) -> (Limiter, ManualClock) {
    let (store, clock) = store(build);
    (RateLimiter::new(Limits::new(limits).expect("limits"), store), clock)
}

/// One check that the store decides.
pub(crate) fn ask<A: InMemory, C: Clock>(
    store: &MemoryStore<A, C>,
    (limit, key): (&Limit<A>, &str),
    op: Op,
    cost: u64,
) -> Verdict {
    store.apply_now(&Batch::one(&Check { limit, key, cost }).op(op)).expect("decides")
}
