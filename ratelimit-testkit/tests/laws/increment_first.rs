//! The suite for increment-first stores uses only what such a store supports: limits whose attempts it can
//! charge before it reads, no refunds and no states.

use std::time::Duration;

use ratelimit_core::{Algorithm, Batch, Limit, Op, Policy, PolicyState, Refusal, Store, Verdict};
use ratelimit_testkit::{
    AlgorithmKind, Capability, Harness, PureStore, Refused, StoreClock, conformance,
};

/// A store as one on transactions without branches would be.
struct IncrementFirstStore(PureStore);

impl Store<Policy> for IncrementFirstStore {
    type Error = Refused;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Refused> {
        let op = batch.operation();
        let does =
            matches!(op, Op::Acquire | Op::Peek | Op::Reset) && batch.reservation_id().is_none();
        let other = batch.checks().iter().find(|check| {
            let policy = check.limit.algorithm();
            !does
                || !policy.charges_denials()
                || !AlgorithmKind::INCREMENT_FIRST.contains(&AlgorithmKind::of(policy))
        });
        match other {
            Some(check) => {
                Err(Refused(Refusal::Unsupported { limit: check.limit.name().to_owned(), op }))
            }
            None => self.0.decide(batch).map_err(Refused),
        }
    }
}

struct IncrementFirst;

impl Harness for IncrementFirst {
    type Store = IncrementFirstStore;

    const CASES: u32 = 32;
    const SMALL_TRACE_REQUESTS: u32 = 2;
    const LACKS: &'static [Capability] =
        &[Capability::Refund, Capability::Force, Capability::Reservations, Capability::States];

    fn new() -> Self {
        Self
    }

    fn store(&self) -> IncrementFirstStore {
        IncrementFirstStore(PureStore::new())
    }

    fn clock(&self, store: &IncrementFirstStore) -> StoreClock {
        store.0.clock().into()
    }

    async fn state(
        &self,
        _: &IncrementFirstStore,
        _: &Limit<Policy>,
        _: &str,
    ) -> Option<PolicyState> {
        None
    }

    async fn leaks(&self, _: &IncrementFirstStore, _: Duration) -> Vec<String> {
        Vec::new()
    }
}

conformance!(increment_first, IncrementFirst, attempts);

#[test]
fn increment_first_expands_to_a_module_per_algorithm_and_one_for_batches() {
    let this = std::env::current_exe().expect("a test binary");
    let listed = std::process::Command::new(this).arg("--list").output().expect("a list of tests");
    let listed = String::from_utf8(listed.stdout).expect("names");
    let modules: std::collections::BTreeSet<&str> = listed
        .lines()
        .filter_map(|line| {
            line.strip_prefix("increment_first::increment_first::")?.split("::").next()
        })
        .collect();
    let due = [
        "bucketed_window_attempts",
        "first_request_window_attempts",
        "fixed_window_attempts",
        "mixed_attempts",
        "sliding_log_attempts",
        "window_log_attempts",
    ];
    assert!(modules.iter().eq(&due), "{modules:?}");
}
