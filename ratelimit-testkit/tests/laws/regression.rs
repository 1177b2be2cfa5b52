//! A failure shows its case in the words of a policy document, and the text can be pasted as a test.

use ratelimit_testkit::wrong::{Flaw, Fold};
use ratelimit_testkit::{AlgorithmKind, Failure, Harness, Property, Scope, regression, try_same};

harnesses! {
    Sound has None, lacks &[];
    WaitsOneShort has Some(Flaw::WaitsOneShort), lacks &[];
    Outlives has Some(Flaw::OutlivesItsWindow), lacks &[];
    CutsKeys has Some(Flaw::FoldsKeys(Fold::HashTag)), lacks &[];
    ChargesAgain has Some(Flaw::ChargesAgain), lacks &[];
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
    let message = again.expect_err("it fails again");
    let message = message.downcast_ref::<String>().expect("a message");
    assert!(message.contains(&property.law().to_string()), "{message}");
    regression::<Sound>(property, &case);
    failure.to_string()
}

#[test]
fn a_trace_is_shown_in_the_words_of_its_policy_and_can_be_pasted() {
    for kind in AlgorithmKind::ALL {
        let message = pasted::<WaitsOneShort>(Property::RetryAfterIsHonest, Scope::One(kind));
        assert!(message.contains(&format!("limit l0: {kind} ")), "{message}");
        // No internal name of the policy types may show.
        for internal in ["Refill", "token_units", "window_us", "Entries", "Ask {", "Request {"] {
            assert!(!message.contains(internal), "{message}");
        }
        assert!(
            message.contains("regression::<Harness>(Property::RetryAfterIsHonest, r"),
            "{message}"
        );
    }
}

#[test]
fn cases_of_two_traces_keys_and_ids_can_be_pasted() {
    let message =
        pasted::<Outlives>(Property::ExpiredIsAbsent, Scope::One(AlgorithmKind::FixedWindow));
    assert!(message.contains("\nthen\n"), "{message}");
    let message =
        pasted::<CutsKeys>(Property::DifferentKeysNeverMeet, Scope::One(AlgorithmKind::Gcra));
    assert!(message.contains("\nkey \""), "{message}");
    let message = pasted::<ChargesAgain>(Property::ReservationsAgree, Scope::Mixed);
    assert!(message.contains(" under 0000"), "{message}");
}

#[test]
fn a_text_that_is_not_a_case_is_refused() {
    let unread = std::panic::catch_unwind(|| {
        regression::<Sound>(Property::NoFalseDenial, "limit l0: leaky 10/s");
    });
    let message = unread.expect_err("it is no policy");
    let message = message.downcast_ref::<String>().expect("a message");
    assert!(message.contains("accepted are gcra"), "{message}");
}
