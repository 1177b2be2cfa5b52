//! A store with few capabilities is tested on those that it has. A store is caught if it lacks what
//! its harness claims, or supports what its harness says it lacks. A failure's case can be pasted
//! as a test.

use std::process::Command;

use ratelimit_testkit::{
    AlgorithmKind, Capability, Harness, Property, Scope, conformance, regression, try_same,
};

use crate::wrong::{Flaw, WrongHarness};

const GCRA: Capability = Capability::Algorithm(AlgorithmKind::Gcra);
const ONE_BY_ONE: &[Capability] =
    &[Capability::Attempts, Capability::Batches, Capability::SeveralKeys, Capability::States];

type IncrementFirst = WrongHarness<1>;
type OneByOne = WrongHarness<2>;
/// Its store supports what it says that the store lacks.
type Modest = WrongHarness<3>;
type Sound = WrongHarness;
type WaitsOneShort = WrongHarness<4>;
type KeepsTheOldLimit = WrongHarness<5>;
type ChargesAgain = WrongHarness<6>;

/// By the number of a harness: the flaw of its stores by default, and what it says that they lack.
pub(crate) const CLAIMS: [(Option<Flaw>, &[Capability]); 7] = [
    (None, &[]),
    (Some(Flaw::Cannot(Capability::INCREMENT_FIRST)), Capability::INCREMENT_FIRST),
    (Some(Flaw::Cannot(ONE_BY_ONE)), ONE_BY_ONE),
    (None, &[Capability::Refund, Capability::Reservations, Capability::PastTimes, GCRA]),
    (Some(Flaw::WaitsOneShort), &[]),
    (Some(Flaw::KeepsTheOldLimit), &[]),
    (Some(Flaw::ChargesAgain), &[]),
];

conformance!(increment_first, IncrementFirst);
conformance!(one_by_one, OneByOne);

fn claims_failure<H: Harness>(harness: &H, scope: Scope) -> String {
    let outcome = try_same(harness, Property::ItCanDoWhatItClaims, scope, 1);
    outcome.err().map_or_else(|| panic!("{scope:?} passes"), |failure| failure.to_string())
}

#[test]
fn a_store_that_lacks_what_it_claims_is_caught() {
    let (log, gcra) = (Scope::One(AlgorithmKind::WindowLog), Scope::One(AlgorithmKind::Gcra));
    let attempts = Scope::Attempts(AlgorithmKind::Gcra);
    for (lacks, scope, says) in [
        (&[Capability::Refund], gcra, "lack Refund in its harness"),
        (&[Capability::Force], log, "lack Force in its harness"),
        (&[Capability::Reset], attempts, "lack Reset in its harness"),
        (&[Capability::Reservations], gcra, "acquire"),
        (&[Capability::Attempts], attempts, "count attempts"),
        (&[Capability::Admissions], gcra, "under gcra"),
        (&[Capability::Batches], gcra, "1 of \"b\" in l1"),
        (&[Capability::SeveralKeys], gcra, "1 of \"c\", 1 of \"d\""),
        (&[Capability::PastTimes], gcra, "under gcra"),
        (&[Capability::States], gcra, "lacks States"),
        (&[GCRA], gcra, "under gcra 3/h burst 3"),
        (&[Capability::Metadata], log, "lacks Metadata"),
    ] {
        let message = claims_failure(&Sound::with_flaw(Some(Flaw::Cannot(lacks))), scope);
        assert!(message.contains(says), "{lacks:?}: {message}");
    }
}

#[test]
fn a_store_that_supports_what_it_claims_to_lack_is_caught() {
    for (kind, says) in [
        (AlgorithmKind::Gcra, "lacks Algorithm(Gcra)"),
        (AlgorithmKind::FixedWindow, "lacks Refund"),
    ] {
        let message = claims_failure(&Modest::new(), Scope::One(kind));
        assert!(message.contains(says) && message.contains("lacks it no more"), "{message}");
    }
}

/// The output of this test binary for the tests of this name in this file.
fn output_of_tests(tests: &str) -> String {
    let this = std::env::current_exe().expect("a test binary");
    let output =
        Command::new(this).arg(format!("capabilities::{tests}")).output().expect("it runs");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stderr).expect("text")
}

#[test]
fn each_skipped_test_says_so_by_its_name() {
    for (test, says) in [
        ("increment_first::agrees_on::gcra", "Algorithm(Gcra)"),
        ("one_by_one::agrees_on::batches", "Batches"),
        ("increment_first::agrees_on::reservations", "Reservations"),
    ] {
        let line = format!("capabilities::{test} is skipped: the store lacks {says}\n");
        assert!(output_of_tests(test).contains(&line), "{}", output_of_tests(test));
    }
    let lines = output_of_tests("increment_first::it_can_do_what_it_claims");
    assert!(
        lines.contains("the store lacks [Refund, Force, Reservations, Admissions, Changes"),
        "{lines}"
    );
    assert_eq!(output_of_tests("one_by_one::two_identifiers_never_meet"), "");
}

/// Checks that a failure's case fails again when it is pasted, and passes in a sound store.
fn paste_case<H: Harness>(property: Property, scope: Scope) -> String {
    let failure = try_same(&H::new(), property, scope, 256).expect_err("it is wrong");
    if !failure.case.is_empty() {
        let case = failure.case.clone();
        let again = std::panic::catch_unwind(|| regression::<H>(property, &case));
        let message = again.expect_err("it fails again");
        let message = message.downcast_ref::<String>().expect("a message");
        assert!(message.contains(&property.law().to_string()), "{message}");
        regression::<Sound>(property, &case);
    }
    failure.to_string()
}

#[test]
fn a_case_is_shown_in_words_and_can_be_pasted() {
    let message = paste_case::<WaitsOneShort>(Property::Agrees, Scope::Mixed);
    assert!(message.contains("regression::<MyHarness>(Property::Agrees, r"), "{message}");
    for internal in ["Refill", "token_units", "window_us", "Entries", "Ask {", "Request {"] {
        assert!(!message.contains(internal), "{message}");
    }
    let message = paste_case::<KeepsTheOldLimit>(Property::AgreesAfterAChange, Scope::Mixed);
    assert!(message.matches("limit l0: ").count() > 1, "{message}");
    let message = paste_case::<ChargesAgain>(Property::Agrees, Scope::Reservations);
    assert!(message.contains(" under 0000"), "{message}");
    // The smallest traces are no text to paste, and are named all the same.
    for kind in AlgorithmKind::ALL {
        let message = paste_case::<WaitsOneShort>(Property::Agrees, Scope::One(kind));
        assert!(message.contains(&format!("limit tiny: {kind} ")), "{message}");
    }
}
