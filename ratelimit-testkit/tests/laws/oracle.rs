//! The oracle agrees with the pure step, which other stores are compared with.

use std::time::Duration;

use ratelimit_core::algorithm::AnyState;
use ratelimit_core::{AnyAlgorithm, Limit};
use ratelimit_testkit::{
    Capability, Harness, NaiveStore, Property, StoreClock, conformance, failed_once, regression,
};

/// The oracle has neither a clock nor states, only histories, so comparisons of stored states do
/// not apply. Nor does it support reservations.
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

    async fn state(&self, _: &NaiveStore, _: &Limit<AnyAlgorithm>, _: &str) -> Option<AnyState> {
        None
    }

    async fn leaks(&self, _: &NaiveStore, _: Duration) -> Vec<String> {
        Vec::new()
    }
}

conformance!(oracle, Oracle);

#[test]
fn cases_that_failed_once() {
    for (property, case) in failed_once() {
        if property == Property::Agrees && !case.contains(" under ") {
            regression::<Oracle>(property, &case);
        }
    }
}
