//! A store with few capabilities is tested on those that it has. A store is caught if it lacks what its harness
//! claims, or supports what its harness says it lacks.

use std::process::Command;

use ratelimit_testkit::wrong::{Flaw, WrongHarness};
use ratelimit_testkit::{
    AlgorithmKind, Capability, Harness, Property, Scope, conformance, try_same,
};

const GCRA: Capability = Capability::Algorithm(AlgorithmKind::Gcra);
const NOTHING_BACK: &[Capability] = &[
    Capability::Refund,
    Capability::Force,
    Capability::Reset,
    Capability::Reservations,
    Capability::Metadata,
];
const ONE_BY_ONE: &[Capability] = &[Capability::Attempts, Capability::Batches];
const SMALL: &[Capability] = &[Capability::SeveralKeys, Capability::States, GCRA];

harnesses! {
    NothingBack has Some(Flaw::Cannot(NOTHING_BACK)), lacks NOTHING_BACK;
    OneByOne has Some(Flaw::Cannot(ONE_BY_ONE)), lacks ONE_BY_ONE;
    Little has Some(Flaw::Cannot(SMALL)), lacks SMALL;
    // This store supports what its harness says it lacks.
    Modest has None,
        lacks &[Capability::Refund, Capability::Reservations, Capability::PastTimes, GCRA];
}

conformance!(nothing_back, NothingBack);
conformance!(one_by_one, OneByOne);
conformance!(little, Little);

const CLAIMS: Property = Property::ItCanDoWhatItClaims;

/// The failure that a false claim produces.
fn failure_message<H: Harness>(harness: &H, scope: Scope) -> String {
    match try_same(harness, CLAIMS, scope, 1) {
        Ok(()) => panic!("{scope:?} passes"),
        Err(failure) => failure.to_string(),
    }
}

#[test]
fn a_store_that_lacks_what_it_claims_is_caught() {
    let log = Scope::One(AlgorithmKind::WindowLog);
    let gcra = Scope::One(AlgorithmKind::Gcra);
    for (flaw, scope, says) in [
        (Flaw::Cannot(&[Capability::Refund]), gcra, "lack refund in its harness"),
        (Flaw::Cannot(&[Capability::Force]), log, "lack force in its harness"),
        (Flaw::Cannot(&[Capability::Reset]), Scope::MixedAttempts, "lack reset in its harness"),
        (Flaw::Cannot(&[Capability::Reservations]), gcra, "acquire"),
        (
            Flaw::Cannot(&[Capability::Attempts]),
            Scope::Attempts(AlgorithmKind::Gcra),
            "count attempts",
        ),
        (Flaw::Cannot(&[Capability::Batches]), gcra, "1 of \"b\" in l1"),
        (Flaw::Cannot(&[Capability::SeveralKeys]), gcra, "1 of \"c\", 1 of \"d\""),
        (Flaw::Cannot(&[Capability::PastTimes]), gcra, "under gcra"),
        (Flaw::Cannot(&[Capability::States]), gcra, "lacks a look at its states"),
        (Flaw::Cannot(&[GCRA]), gcra, "under gcra 3/h burst 3"),
        (Flaw::Cannot(&[Capability::Metadata]), log, "lacks metadata"),
    ] {
        let message = failure_message(&WrongHarness(Some(flaw)), scope);
        assert!(message.contains(says), "{flaw:?}: {message}");
    }
}

#[test]
fn a_store_that_supports_what_it_claims_to_lack_is_caught() {
    for (scope, says) in [
        (Scope::One(AlgorithmKind::Gcra), "lacks gcra"),
        (Scope::One(AlgorithmKind::FixedWindow), "lacks refund"),
        (Scope::Mixed, "lacks gcra"),
    ] {
        let message = failure_message(&Modest, scope);
        assert!(message.contains(says) && message.contains("lacks it no more"), "{message}");
    }
}

/// The output of this test binary for the tests of this name in this file.
fn printed(tests: &str) -> String {
    let this = std::env::current_exe().expect("a test binary");
    let tests = format!("capabilities::{tests}");
    let output = Command::new(this).arg(tests).output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn each_skipped_test_says_so_by_its_name() {
    for (test, says) in [
        ("nothing_back::gcra::reservations_agree", "the store lacks reservations"),
        ("one_by_one::mixed::every_attempt_is_charged", "the store lacks batches"),
        ("one_by_one::gcra_attempts::no_false_denial", "the store lacks attempts"),
        ("one_by_one::mixed::retry_after_is_honest", "the store lacks batches"),
        ("one_by_one::gcra::all_or_nothing", "the store lacks batches"),
        ("little::gcra::no_false_denial", "the store lacks gcra"),
        ("little::token_bucket::two_names_one_machine", "the store lacks gcra"),
        (
            "little::fixed_window::one_answer_after_a_limit_was_changed",
            "the store lacks a look at its states",
        ),
    ] {
        assert_eq!(printed(test), format!("capabilities::{test} is skipped: {says}\n"));
    }
    let lines = printed("nothing_back::gcra::it_can_do_what_it_claims");
    assert!(
        lines.contains(
            "the store lacks refund, force, reset, reservations, metadata, and no law here asks for it"
        ),
        "{lines}"
    );
    assert_eq!(printed("nothing_back::gcra::no_false_denial"), "");
}
