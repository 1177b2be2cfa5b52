//! A failure shows its case in the words of a policy document, and the text can be pasted as a test.
#![allow(clippy::panic, clippy::expect_used, reason = "tests")]

use std::time::Duration;

use ratelimit_core::{Limit, Policy, PolicyState};
use ratelimit_testkit::wrong::{Flaw, Fold, WrongHarness, WrongStore};
use ratelimit_testkit::{
    AlgorithmKind, Failure, Harness, Property, Scope, StoreClock, regression, try_same,
};

/// Harnesses of stores with one flaw each.
macro_rules! harness {
    ($($harness:ident has $flaw:expr;)+) => { $(
        struct $harness;

        impl Harness for $harness {
            type Store = WrongStore;

            fn new() -> Self {
                Self
            }

            fn store(&self) -> WrongStore {
                WrongHarness($flaw).store()
            }

            fn clock(&self, store: &WrongStore) -> StoreClock {
                WrongHarness($flaw).clock(store)
            }

            async fn state(
                &self,
                store: &WrongStore,
                limit: &Limit<Policy>,
                key: &str,
            ) -> Option<PolicyState> {
                WrongHarness($flaw).state(store, limit, key).await
            }

            async fn leaks(&self, store: &WrongStore, within: Duration) -> Vec<String> {
                WrongHarness($flaw).leaks(store, within).await
            }
        }
    )+ };
}

harness! {
    Sound has None;
    WaitsOneShort has Some(Flaw::WaitsOneShort);
    Outlives has Some(Flaw::OutlivesItsWindow);
    CutsKeys has Some(Flaw::FoldsKeys(Fold::HashTag));
    ChargesAgain has Some(Flaw::ChargesAgain);
}

fn failure<H: Harness>(property: Property, scope: Scope) -> Failure {
    match try_same(&H::new(), property, scope, 256) {
        Ok(()) => panic!("{property:?} does not catch it"),
        Err(failure) => failure,
    }
}

/// Checks that a failure's case fails again when it is pasted, and passes in a sound store.
fn pasted<H: Harness>(property: Property, scope: Scope) -> String {
    let failure = failure::<H>(property, scope);
    let case = failure.case.clone();
    let again = std::panic::catch_unwind(|| regression::<H>(property, &case));
    let told = again.expect_err("it fails again");
    let told = told.downcast_ref::<String>().expect("a message");
    assert!(told.contains(&property.law().to_string()), "{told}");
    regression::<Sound>(property, &case);
    failure.to_string()
}

#[test]
fn a_trace_is_shown_in_the_words_of_its_policy_and_can_be_pasted() {
    for kind in AlgorithmKind::ALL {
        let told = pasted::<WaitsOneShort>(Property::RetryAfterIsHonest, Scope::One(kind));
        assert!(told.contains(&format!("limit l0: {kind} ")), "{told}");
        // No internal name of the policy types may show.
        for internal in ["Refill", "token_units", "window_us", "Entries", "Ask {", "Request {"] {
            assert!(!told.contains(internal), "{told}");
        }
        assert!(told.contains("regression::<Harness>(Property::RetryAfterIsHonest, r"), "{told}");
    }
}

#[test]
fn cases_of_two_traces_keys_and_ids_can_be_pasted() {
    let told =
        pasted::<Outlives>(Property::ExpiredIsAbsent, Scope::One(AlgorithmKind::FixedWindow));
    assert!(told.contains("\nthen\n"), "{told}");
    let told =
        pasted::<CutsKeys>(Property::DifferentKeysNeverMeet, Scope::One(AlgorithmKind::Gcra));
    assert!(told.contains("\nkey \""), "{told}");
    let told = pasted::<ChargesAgain>(Property::ReservationsAgree, Scope::Mixed);
    assert!(told.contains(" under 0000"), "{told}");
}

#[test]
fn a_text_that_is_not_a_case_is_refused() {
    let unread = std::panic::catch_unwind(|| {
        regression::<Sound>(Property::NoFalseDenial, "limit l0: leaky 10/s");
    });
    let told = unread.expect_err("it is no policy");
    let told = told.downcast_ref::<String>().expect("a message");
    assert!(told.contains("accepted are gcra"), "{told}");
}
