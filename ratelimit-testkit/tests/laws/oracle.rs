//! The oracle agrees with the pure step, which other stores are compared with.

use std::time::Duration;

use ratelimit_core::algorithm::PolicyState;
use ratelimit_core::{Limit, Policy};
use ratelimit_testkit::{
    Capability, Harness, NaiveStore, Property, StoreClock, conformance, regression,
};

/// The oracle has neither a clock nor states, only histories, so comparisons of stored states do not
/// apply. Nor does it support reservations.
struct Oracle;

impl Harness for Oracle {
    type Store = NaiveStore;

    const SMALL_TRACE_REQUESTS: u32 = 3;
    const LACKS: &'static [Capability] =
        &[Capability::Reservations, Capability::States, Capability::Changes];

    fn new() -> Self {
        Self
    }

    fn store(&self) -> NaiveStore {
        NaiveStore::new()
    }

    fn clock(&self, store: &NaiveStore) -> StoreClock {
        store.clock().into()
    }

    async fn state(&self, _: &NaiveStore, _: &Limit<Policy>, _: &str) -> Option<PolicyState> {
        None
    }

    async fn leaks(&self, _: &NaiveStore, _: Duration) -> Vec<String> {
        Vec::new()
    }
}

conformance!(oracle, Oracle);

/// Cases that an earlier oracle failed, each under the rule.
const FAILED_ONCE: &str = r#"
    # a sliding counter keeps the windows that it has seen when time goes back
    limit l0: sliding-counter 3/s
    at 333333 acquire 1 of "a"
    at 666666 acquire 1 of "a"
    at 1333332 acquire 2 of "a"
    at 1435332 acquire 4 of "a"
    at 768666 acquire 1 of "a"

    # a sliding counter keeps a window whose first charge comes back
    limit l0: sliding-counter 1/s
    at 1795218390999999 acquire 1 of "a"
    at 1795218391000000 acquire 1 of "a"
    at 1795218391000001 acquire 1 of "a"
    at 1795218391000000 acquire 1 of "a"

    # a bucket with ticks of a second refills at whole ticks
    limit l0: gcra 1000000007/30d burst 1000000007
    at 0 acquire 1 of "a"
    at 1 acquire 1 of "b"
    at 1 force 1 of "a"

    # a bucketed window waits for the longest of its windows
    limit l0: bucketed-window bucket 200ms rates 1/1s, 2/3s
    at 0 acquire 1 of "a"

    # an attempt before the latest one is charged to the latest bucket
    limit l0: gcra 10/s burst 20
    limit l1: bucketed-window bucket 200ms rates 1/1s, 2/3s count attempts
    at 0 acquire 1 of "a" in l1
    at 1000000 acquire 1 of "a" in l0
    at 1000000 acquire 1 of "a" in l1
    at 999999 acquire 1 of "a" in l1
"#;

#[test]
fn cases_that_failed_once() {
    for case in FAILED_ONCE.split("\n\n") {
        regression::<Oracle>(Property::Agrees, case);
    }
}
