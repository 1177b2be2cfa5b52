//! Whole requests over the reference store: what a limiter makes of limits, identifiers and
//! options.

use std::sync::Arc;

use ratelimit_core::{RateLimiter, Refusal, Verdict};
use ratelimit_testkit::{AskedRequest, PureStore, RequestHarness, try_requests};

struct Pure;

impl RequestHarness for Pure {
    type Store = PureStore;

    const CASES: u32 = 512;

    fn store(&self) -> PureStore {
        PureStore::new()
    }

    async fn ask(
        &self,
        limiter: &RateLimiter<Arc<PureStore>>,
        asked: &AskedRequest,
    ) -> Result<Verdict, Refusal> {
        asked.to(limiter).at(asked.at).apply(asked.op).await
    }
}

#[test]
fn a_limiter_says_of_each_limit_by_name_what_its_algorithm_decides() {
    try_requests(&Pure).unwrap_or_else(|failure| panic!("{failure}"));
}
