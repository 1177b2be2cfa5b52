//! Whole requests, by every call that a limiter has: at the store's own time, where each has its
//! own path, and at a given one.

use std::sync::Arc;

use ratelimit_core::store::Op;
use ratelimit_core::{AnyAlgorithm, Clock, ManualClock, RateLimiter, Record, Timestamp, Verdict};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_testkit::{AskedRequest, RequestHarness, TestCaller, try_requests};

type Store = MemoryStore<AnyAlgorithm, ManualClock>;

async fn replace_record<C: Clock>(
    limiter: &RateLimiter<Arc<MemoryStore<AnyAlgorithm, C>>>,
    (caller, limit): (&TestCaller, &str),
    record: Option<Record<AnyAlgorithm>>,
) -> Result<(), MemoryError> {
    match record {
        Some(record) => limiter.replace_record(caller, limit, record).await.map(drop),
        None => limiter.clear_record(caller, limit).await.map(drop),
    }
}

/// A store on a clock that follows the requests.
struct ByItsClock(ManualClock);

impl RequestHarness for ByItsClock {
    type Store = Store;

    const CASES: u32 = 1_024;
    const RECORDS: bool = true;

    fn store(&self) -> Store {
        MemoryStore::builder().capacity(1_000).clock(self.0.clone()).build()
    }

    async fn replace_record(
        &self,
        limiter: &RateLimiter<Arc<Store>>,
        caller: &TestCaller,
        limit: &str,
        record: Option<Record<AnyAlgorithm>>,
    ) -> Result<(), MemoryError> {
        replace_record(limiter, (caller, limit), record).await
    }

    async fn ask(
        &self,
        limiter: &RateLimiter<Arc<Store>>,
        asked: &AskedRequest,
    ) -> Result<Verdict, MemoryError> {
        self.0.set(asked.at);
        let (caller, cost) = (&asked.caller, asked.costs.uniform());
        let plain = asked.id.is_none() && asked.metadata.is_empty() && !asked.has_numbers();
        let is_sync = asked.costs.get("l0").is_multiple_of(2) == asked.at.as_us().is_multiple_of(2);
        match (asked.op, cost.filter(|_| plain), is_sync) {
            (Op::Acquire, Some(1), true) => limiter.check_now(caller),
            (Op::Acquire, Some(1), false) => limiter.check(caller).await,
            (Op::Acquire, Some(cost), true) => limiter.check_n_now(caller, cost),
            (Op::Acquire, Some(cost), false) => limiter.check_n(caller, cost).await,
            (op, _, true) => asked.to(limiter).apply_now(op),
            (op, _, false) => asked.to(limiter).apply(op).await,
        }
    }
}

/// The times are given: no state lies in a bucket.
struct AtGivenTimes;

impl RequestHarness for AtGivenTimes {
    type Store = MemoryStore;

    const CASES: u32 = 128;
    const RECORDS: bool = true;

    fn store(&self) -> MemoryStore {
        MemoryStore::new()
    }

    async fn replace_record(
        &self,
        limiter: &RateLimiter<Arc<MemoryStore>>,
        caller: &TestCaller,
        limit: &str,
        record: Option<Record<AnyAlgorithm>>,
    ) -> Result<(), MemoryError> {
        replace_record(limiter, (caller, limit), record).await
    }

    async fn ask(
        &self,
        limiter: &RateLimiter<Arc<MemoryStore>>,
        asked: &AskedRequest,
    ) -> Result<Verdict, MemoryError> {
        asked.to(limiter).at(asked.at).apply_now(asked.op)
    }
}

#[test]
fn a_limiter_says_of_each_limit_by_name_what_its_algorithm_decides() {
    let by_its_clock =
        ByItsClock(ManualClock::new(Timestamp::saturating_from_us(1_795_218_389_000_000)));
    try_requests(&by_its_clock).unwrap_or_else(|failure| panic!("{failure}"));
    try_requests(&AtGivenTimes).unwrap_or_else(|failure| panic!("{failure}"));
}
