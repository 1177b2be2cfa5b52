//! The oracle keeps the laws that other stores must keep.

use std::time::Duration;

use ratelimit_core::{Limit, Policy, PolicyState};
use ratelimit_testkit::{
    AlgorithmKind, Capability, Harness, NaiveStore, Property, Scope, StoreClock, conformance,
    regression,
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

/// Checks that the oracle keeps these properties on a case that an earlier oracle failed.
fn keeps(properties: &[Property], cases: &[&str]) {
    for property in properties {
        for case in cases {
            regression::<Oracle>(*property, case);
        }
    }
}

#[test]
fn a_sliding_counter_keeps_the_windows_that_it_has_seen_when_time_goes_back() {
    keeps(
        &[
            Property::NeverAdmitsMoreThanItsBound,
            Property::NoFalseDenial,
            Property::RetryAfterIsHonest,
            Property::ADenialChargesNothing,
            Property::TimeGoingBackMintsNothing,
            Property::AllOrNothing,
            Property::CostZeroIsAPeek,
            Property::OneAnswerEverywhere,
        ],
        &[
            "limit l0: sliding-counter 2/3us
             at 0 acquire 2 of \"a\"
             at 2 acquire 1 of \"a\"
             at 4 acquire 1 of \"a\"
             at 3 acquire 1 of \"a\"",
            "limit l0: sliding-counter 4/250ms
             at 62500 acquire 1 of \"a\"
             at 250001 acquire 4 of \"a\"
             at 250000 acquire 1 of \"a\"",
            "limit l0: sliding-counter 3/s
             at 666666 force 1 of \"b\"
             at 1333332 acquire 3 of \"b\"
             at 999999 acquire 1 of \"b\"",
            "limit l0: sliding-counter 3/s
             at 333333 acquire 3 of \"a\"
             at 999999 acquire 1 of \"a\"
             at 1999998 acquire 3 of \"a\"
             at 1666665 acquire 1 of \"a\"",
            "limit l0: sliding-counter 3/s
             at 333333 acquire 1 of \"a\"
             at 666666 acquire 1 of \"a\"
             at 1333332 acquire 2 of \"a\"
             at 1435332 acquire 4 of \"a\"
             at 768666 acquire 1 of \"a\"",
            "limit l0: sliding-counter 1/s
             at 1795218390999999 acquire 1 of \"a\"
             at 1795218391000000 acquire 1 of \"a\"
             at 1795218391000001 acquire 1 of \"a\"
             at 1795218391000000 acquire 1 of \"a\"",
            "limit l0: sliding-counter 1000/250ms
             at 1795218390000001 acquire 1 of \"a\"
             at 1795218389999999 acquire 1 of \"b\"",
            "limit l0: fixed-window 3/s
             limit l1: sliding-counter 4/250ms
             at 0 force 1 of \"a\" in l1
             at 333333 acquire 1 of \"a\" in l0",
        ],
    );
}

#[test]
fn a_bucket_with_ticks_of_a_second_refills_at_whole_ticks() {
    for bucket in ["gcra", "token-bucket"] {
        let limit = format!("limit l0: {bucket} 1000000007/30d burst 1000000007");
        let charges = format!(
            "{limit}
             at 0 acquire 1 of \"a\"
             at 1 acquire 1 of \"b\"
             at 1 force 1 of \"a\""
        );
        keeps(&[Property::OneAnswerEverywhere, Property::RetryAfterIsHonest], &[&charges]);
    }
}

#[test]
fn a_bucketed_window_waits_for_the_longest_of_its_windows() {
    keeps(
        &[Property::RetryAfterIsHonest, Property::OneAnswerEverywhere],
        &[
            "limit l0: bucketed-window bucket 200ms rates 1/1s, 2/3s
             at 0 acquire 1 of \"a\"",
            "limit l0: bucketed-window bucket 200ms rates 1/1s, 2/3s
             limit l1: gcra 1/s burst 1
             at 0 acquire 1 of \"a\" in l0",
        ],
    );
}

#[test]
fn an_attempt_before_the_latest_one_is_charged_to_the_latest_bucket() {
    keeps(
        &[Property::EveryAttemptIsCharged, Property::OneAnswerEverywhere],
        &["limit l0: gcra 10/s burst 20
           limit l1: bucketed-window bucket 200ms rates 1/1s, 2/3s count attempts
           at 0 acquire 1 of \"a\" in l1
           at 1000000 acquire 1 of \"a\" in l0
           at 1000000 acquire 1 of \"a\" in l1
           at 999999 acquire 1 of \"a\" in l1"],
    );
}

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
    let listed: Vec<&str> =
        listed.lines().filter(|line| line.starts_with("oracle::oracle::")).collect();
    let one = AlgorithmKind::ALL.map(|kind| (snake_case(&format!("{kind:?}")), Scope::One(kind)));
    let attempts = AlgorithmKind::ATTEMPTS
        .map(|kind| (snake_case(&format!("{kind:?}Attempts")), Scope::Attempts(kind)));
    let mixed = [("mixed".to_owned(), Scope::Mixed)];
    let mut due = Vec::new();
    for (module, scope) in one.into_iter().chain(attempts).chain(mixed) {
        for property in Property::ALL.into_iter().filter(|property| property.applies(scope)) {
            due.push(format!(
                "oracle::oracle::{module}::{}: test",
                snake_case(&format!("{property:?}"))
            ));
        }
    }
    for test in &due {
        assert!(listed.contains(&test.as_str()), "the macro does not write {test}");
    }
    assert_eq!(listed.len(), due.len(), "the macro writes more than there is");
}
