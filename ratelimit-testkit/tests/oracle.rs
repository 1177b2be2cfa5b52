//! The oracle and the pure store keep the laws that the others are held to.

use std::time::Duration;

use ratelimit_core::{Limit, Policy, PolicyState};
use ratelimit_testkit::{Harness, NaiveStore, conformance};

/// The oracle has no clock and no states, only histories: law 9 and the stored states say nothing of
/// it.
struct Oracle;

impl Harness for Oracle {
    type Store = NaiveStore;

    const CASES: u32 = 64;
    const SMALL_TRACE_REQUESTS: u32 = 3;
    const TELLS_STATES: bool = false;

    fn new() -> Self {
        Self
    }

    fn store(&self) -> NaiveStore {
        NaiveStore::new()
    }

    async fn state(&self, _: &NaiveStore, _: &Limit<Policy>, _: &str) -> Option<PolicyState> {
        None
    }

    async fn leaks(&self, _: &NaiveStore, _: Duration) -> Vec<String> {
        Vec::new()
    }
}

conformance!(oracle, Oracle);
