//! The oracle keeps the laws that other stores must keep.
#![allow(clippy::expect_used, reason = "tests")]

use std::time::Duration;

use ratelimit_core::{Limit, Policy, PolicyState};
use ratelimit_testkit::{
    AlgorithmKind, Capability, Harness, NaiveStore, Property, Scope, StoreClock, conformance,
};

/// The oracle has neither a clock nor states, only histories, so law 9 and comparisons of stored states do not
/// apply. Nor does it support reservations.
struct Oracle;

impl Harness for Oracle {
    type Store = NaiveStore;

    const CASES: u32 = 64;
    const SMALL_TRACE_REQUESTS: u32 = 3;
    const LACKS: &'static [Capability] = &[Capability::Reservations, Capability::States];

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

/// Turns `ADenialChargesNothing` into `a_denial_charges_nothing`.
fn snake_case(name: &str) -> String {
    let mut snake = String::new();
    for c in name.chars() {
        if c.is_uppercase() && !snake.is_empty() {
            snake.push('_');
        }
        snake.extend(c.to_lowercase());
    }
    snake
}

#[test]
fn the_macro_writes_a_test_for_every_law_and_algorithm() {
    let this = std::env::current_exe().expect("a test binary");
    let listed = std::process::Command::new(this).arg("--list").output().expect("a list of tests");
    let listed = String::from_utf8(listed.stdout).expect("names");
    let listed: Vec<&str> = listed.lines().filter(|line| line.starts_with("oracle::")).collect();
    let one = AlgorithmKind::ALL.map(|kind| (snake_case(&format!("{kind:?}")), Scope::One(kind)));
    let attempts = AlgorithmKind::ATTEMPTS
        .map(|kind| (snake_case(&format!("{kind:?}Attempts")), Scope::Attempts(kind)));
    let mixed = [("mixed".to_owned(), Scope::Mixed)];
    let mut due = Vec::new();
    for (module, scope) in one.into_iter().chain(attempts).chain(mixed) {
        for property in Property::ALL.into_iter().filter(|property| property.applies(scope)) {
            due.push(format!("oracle::{module}::{}: test", snake_case(&format!("{property:?}"))));
        }
    }
    for test in &due {
        assert!(listed.contains(&test.as_str()), "the macro does not write {test}");
    }
    assert_eq!(listed.len(), due.len(), "the macro writes more than there is");
}
