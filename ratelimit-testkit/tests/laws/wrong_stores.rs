//! Every law catches a store that breaks it, and the sound store passes on the same cases.

use ratelimit_testkit::wrong::{Flaw, Fold, OwnTimeFlaw, WrongHarness, WrongInRealTime};
use ratelimit_testkit::{AlgorithmKind, Harness, Property, Scope, try_same};

/// Enough cases to catch every flaw, with some margin.
const CASES: u32 = 64;

const GCRA: Scope = Scope::One(AlgorithmKind::Gcra);
const BUCKET: Scope = Scope::One(AlgorithmKind::TokenBucket);
const FIXED: Scope = Scope::One(AlgorithmKind::FixedWindow);
const FIRST: Scope = Scope::One(AlgorithmKind::FirstRequestWindow);
const LOG: Scope = Scope::One(AlgorithmKind::SlidingLog);
const LIST: Scope = Scope::One(AlgorithmKind::WindowLog);
const LEASES: Scope = Scope::One(AlgorithmKind::Concurrency);
const INCR_FIRST: Scope = Scope::Attempts(AlgorithmKind::FirstRequestWindow);
const INCR_FIXED: Scope = Scope::Attempts(AlgorithmKind::FixedWindow);
const PUSH_FIRST: Scope = Scope::Attempts(AlgorithmKind::WindowLog);
const ADD_FIRST: Scope = Scope::Attempts(AlgorithmKind::SlidingLog);
const DRAINED: Scope = Scope::Attempts(AlgorithmKind::Gcra);

/// Checks that the flaw breaks each of the properties in each of the scopes, and that the failure names the
/// property's own law.
fn caught(flaw: Flaw, by: &[Property], on: &[Scope]) {
    for property in by {
        for scope in on {
            let outcome = try_same(&WrongHarness(Some(flaw)), *property, *scope, CASES);
            let Err(failure) = outcome else {
                panic!("{property:?} on {scope:?} does not catch {flaw:?}")
            };
            assert_eq!(failure.violation.law, property.law(), "{flaw:?}: {failure}");
        }
    }
}

#[test]
fn one_too_many_is_caught_by_the_bound() {
    let by = [
        Property::NeverAdmitsMoreThanItsBound,
        Property::ManyTasksAreAdmittedExactlyTheLimit,
        Property::EverySmallTraceAgreesWithTheOracle,
    ];
    caught(Flaw::OffByOne, &by, &[GCRA, BUCKET, FIXED, FIRST, LOG, LIST, LEASES]);
    // `current > 10` before INCR admits an eleventh request, also where denied requests are counted.
    caught(Flaw::OffByOne, &by, &[INCR_FIRST, INCR_FIXED, PUSH_FIRST, ADD_FIRST, DRAINED]);
}

#[test]
fn a_get_then_set_race_is_caught_by_many_tasks() {
    let by = [Property::ManyTasksAreAdmittedExactlyTheLimit];
    caught(Flaw::ReadThenWrite, &by, &[GCRA, BUCKET, FIXED, FIRST, LOG, Scope::Mixed]);
}

#[test]
fn an_llen_before_the_rpush_is_caught_by_many_tasks() {
    let by = [Property::ManyTasksAreAdmittedExactlyTheLimit];
    caught(Flaw::ReadThenWrite, &by, &[LIST, LEASES, PUSH_FIRST]);
}

#[test]
fn a_lost_ttl_is_caught_by_nothing_leaks() {
    let by = [Property::NothingLeaks];
    caught(Flaw::LosesTheTtl, &by, &[GCRA, BUCKET, FIXED, FIRST, LOG, LIST, LEASES]);
    caught(Flaw::LosesTheTtl, &by, &[INCR_FIRST, PUSH_FIRST, ADD_FIRST]);
}

#[test]
fn a_sweep_without_the_hour_of_grace_is_caught_by_nothing_leaks() {
    let by = [Property::NothingLeaks];
    caught(Flaw::SweepsWithoutGrace, &by, &[GCRA, BUCKET, FIXED, FIRST, LOG, LIST, LEASES]);
}

#[test]
fn a_clock_that_is_read_before_the_lock_is_caught_by_many_tasks() {
    let by = [Property::ManyTasksAreAdmittedExactlyTheLimit];
    caught(Flaw::ReadsTheClockFirst, &by, &[GCRA, BUCKET, FIRST, LOG, LIST, LEASES, DRAINED]);
}

#[test]
fn a_state_that_vanishes_early_on_a_running_clock_is_caught_by_law_14() {
    for scope in [GCRA, BUCKET, FIRST, LOG, LIST, LEASES, DRAINED] {
        let (harness, property) =
            (WrongInRealTime(Some(Flaw::SweepsEarly)), Property::DecidesByItsOwnClock);
        let failure = try_same(&harness, property, scope, 1).expect_err("it is wrong");
        assert!(failure.violation.message.contains("vanish too early"), "{scope:?}: {failure}");
    }
}

#[test]
fn a_denial_that_charges_a_sibling_is_caught_by_laws_4_and_7() {
    let by = [Property::ADenialChargesNothing, Property::AllOrNothing];
    caught(Flaw::ChargesTheSiblings, &by, &[GCRA, BUCKET, FIXED, FIRST, LOG, Scope::Mixed]);
}

#[test]
fn a_window_that_every_request_extends_is_caught_by_no_false_denial() {
    let by = [Property::NoFalseDenial, Property::EverySmallTraceAgreesWithTheOracle];
    caught(Flaw::ExtendsTheWindow, &by, &[FIRST, INCR_FIRST]);
}

#[test]
fn attempts_that_go_free_are_caught_by_law_4() {
    let by = [Property::EveryAttemptIsCharged, Property::OneAnswerEverywhere];
    caught(Flaw::ForgetsTheDenied, &by, &[INCR_FIRST, INCR_FIXED, PUSH_FIRST, ADD_FIRST, DRAINED]);
    caught(Flaw::ForgetsTheDenied, &by, &[Scope::MixedAttempts]);
    caught(Flaw::ForgetsTheDenied, &[Property::EveryAttemptIsCharged], &[Scope::Mixed]);
}

#[test]
fn a_window_that_counts_attempts_beyond_its_limit_is_caught_by_law_4() {
    caught(Flaw::Overfills, &[Property::EveryAttemptIsCharged], &[INCR_FIRST, INCR_FIXED]);
}

#[test]
fn a_charge_made_again_under_its_id_is_caught_by_law_13() {
    let by = [Property::AReservationIsSettledOnce, Property::ReservationsAgree];
    caught(Flaw::ChargesAgain, &by, &[GCRA, BUCKET, FIXED, LEASES, Scope::Mixed]);
}

#[test]
fn a_second_settlement_is_caught_by_law_13() {
    let by = [Property::AReservationIsSettledOnce, Property::ReservationsAgree];
    caught(Flaw::SettlesAgain, &by, &[GCRA, BUCKET, FIXED, LEASES, Scope::Mixed]);
}

#[test]
fn a_settlement_of_half_a_reservation_is_caught_by_law_13() {
    let by = [Property::AReservationIsSettledOnce];
    caught(Flaw::SettlesHalf, &by, &[GCRA, BUCKET, FIXED, LEASES, Scope::Mixed]);
}

#[test]
fn a_settlement_that_mints_is_caught_by_law_13() {
    let by = [Property::AReservationIsSettledOnce];
    caught(Flaw::GivesBackWhatIsPast, &by, &[FIXED]);
    caught(Flaw::RenewsTheCharge, &by, &[FIXED]);
}

#[test]
fn a_release_of_anothers_lease_is_caught_by_law_13() {
    let by = [Property::AReservationIsSettledOnce, Property::ReservationsAgree];
    caught(Flaw::ReleasesAnyLease, &by, &[LEASES]);
}

#[test]
fn a_lease_that_never_ends_is_caught_by_law_13() {
    let by =
        [Property::AReservationIsSettledOnce, Property::ReservationsAgree, Property::NoFalseDenial];
    caught(Flaw::LeasesNeverEnd, &by, &[LEASES]);
}

#[test]
fn a_lease_that_comes_back_is_caught_by_law_13() {
    let by = [Property::AReservationIsSettledOnce, Property::ReservationsAgree];
    caught(Flaw::RenewsWhatIsOver, &by, &[LEASES, GCRA]);
}

#[test]
fn a_lease_renewed_by_another_reservation_of_its_batch_is_caught_by_law_13() {
    caught(Flaw::RenewsByAnother, &[Property::AReservationIsSettledOnce], &[Scope::Mixed]);
}

#[test]
fn a_drawn_id_that_is_remembered_is_caught_by_law_13() {
    let by = [Property::AReservationIsSettledOnce];
    caught(Flaw::RemembersDrawnIds, &by, &[GCRA, BUCKET, FIXED, Scope::Mixed]);
}

#[test]
fn a_reservation_without_an_end_is_caught_by_nothing_leaks() {
    let by = [Property::ReservationsLeakNothing];
    caught(Flaw::ReservesForEver, &by, &[GCRA, BUCKET, FIXED, LEASES, Scope::Mixed]);
}

#[test]
fn a_denial_that_charges_the_caller_is_caught_by_law_4() {
    caught(Flaw::ChargesTheDenied, &[Property::ADenialChargesNothing], &[GCRA, BUCKET, FIXED, LOG]);
}

#[test]
fn a_batch_charged_in_part_is_caught_by_all_or_nothing() {
    caught(Flaw::ChargesOnlyTheFirst, &[Property::AllOrNothing], &[GCRA, LOG, Scope::Mixed]);
}

#[test]
fn a_state_that_outlives_its_window_is_caught_by_expired_is_absent() {
    caught(
        Flaw::OutlivesItsWindow,
        &[Property::ExpiredIsAbsent],
        &[GCRA, BUCKET, FIXED, FIRST, LOG],
    );
}

#[test]
fn a_boundary_that_still_counts_is_caught_by_no_false_denial() {
    let by = [Property::NoFalseDenial, Property::ExpiredIsAbsent, Property::RetryAfterIsHonest];
    caught(Flaw::CountsTheBoundary, &by, &[FIXED, FIRST, LOG]);
}

#[test]
fn a_clock_that_mints_when_it_goes_back_is_caught_by_law_6() {
    let by = [Property::TimeGoingBackMintsNothing, Property::NeverAdmitsMoreThanItsBound];
    caught(Flaw::MintsWhenTimeGoesBack, &by, &[GCRA, BUCKET, FIXED, FIRST, LOG]);
}

#[test]
fn a_wait_in_milliseconds_is_caught_by_honest_retry() {
    let by = [Property::RetryAfterIsHonest];
    caught(Flaw::WaitsInMilliseconds, &by, &[GCRA, BUCKET, FIXED, FIRST, LOG]);
}

#[test]
fn a_wait_one_microsecond_short_is_caught_by_honest_retry() {
    let by = [Property::RetryAfterIsHonest];
    caught(Flaw::WaitsOneShort, &by, &[GCRA, BUCKET, FIXED, FIRST, LOG, Scope::Mixed]);
}

#[test]
fn keys_that_collide_are_caught_by_different_keys_never_meet() {
    caught(Flaw::FoldsKeys(Fold::HashTag), &[Property::DifferentKeysNeverMeet], &[GCRA, LOG]);
}

#[test]
fn a_peek_that_charges_is_caught_by_law_8() {
    caught(Flaw::PeekCharges, &[Property::CostZeroIsAPeek], &[GCRA, BUCKET, FIXED, FIRST, LOG]);
}

#[test]
fn a_change_that_mints_is_caught_by_laws_10_and_11() {
    let by = [Property::ChangingALimitIsSafe, Property::OneAnswerAfterALimitWasChanged];
    caught(Flaw::AddsOldAndNew, &by, &[GCRA, BUCKET, FIXED, FIRST, LOG, Scope::Mixed]);
}

#[test]
fn an_ignored_change_is_caught_by_laws_10_and_11() {
    let by = [Property::ChangingALimitIsSafe, Property::OneAnswerAfterALimitWasChanged];
    caught(Flaw::KeepsTheOldLimit, &by, &[GCRA, BUCKET, FIXED, FIRST, LOG, Scope::Mixed]);
}

#[test]
fn an_interval_in_milliseconds_is_caught_by_laws_1_10_and_12() {
    let by = [
        Property::NeverAdmitsMoreThanItsBound,
        Property::OneAnswerEverywhere,
        Property::TwoNamesOneMachine,
    ];
    caught(Flaw::RoundsTheInterval, &by, &[GCRA]);
}

/// Checks that law 14 catches the clock, where it can be set and where it runs, and checks the message.
fn own_clock_caught(flaw: Flaw, says: &str) {
    fn failure_message<H: Harness>(harness: &H, flaw: Flaw, scope: Scope) -> String {
        let property = Property::DecidesByItsOwnClock;
        let outcome = try_same(harness, property, scope, CASES);
        let Err(failure) = outcome else { panic!("{scope:?} does not catch {flaw:?}") };
        assert_eq!(failure.violation.law, property.law());
        failure.to_string()
    }
    for scope in [GCRA, BUCKET, FIXED, FIRST, LOG, LIST, LEASES, DRAINED, Scope::Mixed] {
        let set = failure_message(&WrongHarness(Some(flaw)), flaw, scope);
        assert!(set.contains(says), "{flaw:?} on {scope:?}: {set}");
    }
    for scope in [GCRA, FIXED, LIST, INCR_FIXED, Scope::Mixed, Scope::MixedAttempts] {
        let ran = failure_message(&WrongInRealTime(Some(flaw)), flaw, scope);
        assert!(ran.contains(says), "{flaw:?} on {scope:?}: {ran}");
    }
}

#[test]
fn states_cleared_at_the_stores_own_time_are_caught_by_law_14() {
    own_clock_caught(Flaw::ForgetsByItsOwnClock, "at the store's own time does not count");
}

#[test]
fn a_clock_that_stands_still_is_caught_by_law_14() {
    own_clock_caught(Flaw::OwnClockStands, "the store's own clock: stands still");
}

#[test]
fn a_clock_at_half_speed_is_caught_by_law_14() {
    own_clock_caught(Flaw::OwnClockAtHalfSpeed, "the store's own clock: runs slow");
}

#[test]
fn a_clock_at_double_speed_is_caught_by_law_14() {
    own_clock_caught(Flaw::OwnClockAtDoubleSpeed, "the store's own clock: runs fast");
}

#[test]
fn a_clock_of_whole_seconds_is_caught_by_law_14() {
    own_clock_caught(Flaw::OwnClockInSeconds, "the store's own clock: ");
}

#[test]
fn peeks_by_another_clock_are_caught_by_law_14() {
    own_clock_caught(Flaw::PeeksByAnotherClock, "the store's own clock: ");
}

#[test]
fn separate_accounts_per_clock_are_caught_by_law_14() {
    caught(Flaw::KeepsTimesApart, &[Property::DecidesByItsOwnClock], &[GCRA, FIXED, LOG, LEASES]);
}

#[test]
fn reservations_that_the_stores_own_time_forgets_are_caught_by_law_14() {
    let by = [Property::DecidesByItsOwnClock];
    caught(Flaw::HoldsNothingByItsOwnClock, &by, &[GCRA, BUCKET, FIXED, LEASES, Scope::Mixed]);
}

/// The scopes of flaws at the store's own time: each algorithm, attempts, and batches over several of them.
const AT_ITS_OWN_TIME: [Scope; 10] =
    [GCRA, BUCKET, FIXED, FIRST, LOG, LIST, LEASES, DRAINED, Scope::Mixed, Scope::MixedAttempts];

/// Checks that a property catches a flaw at the store's own time, where the clock can be set and where it runs.
fn own_time_caught(flaw: OwnTimeFlaw, property: Property, on: &[Scope]) {
    fn broken<H: Harness>(harness: &H, property: Property, scope: Scope, flaw: Flaw) {
        let outcome = try_same(harness, property, scope, CASES);
        let Err(failure) = outcome else {
            panic!("{property:?} on {scope:?} does not catch {flaw:?}")
        };
        assert_eq!(failure.violation.law, property.law(), "{flaw:?}: {failure}");
    }
    let flaw = Flaw::AtItsOwnTime(flaw);
    for scope in on {
        broken(&WrongHarness(Some(flaw)), property, *scope, flaw);
        broken(&WrongInRealTime(Some(flaw)), property, *scope, flaw);
    }
}

#[test]
fn a_shared_key_at_the_stores_own_time_is_caught_by_law_14() {
    own_time_caught(OwnTimeFlaw::OneKey, Property::DecidesByItsOwnClock, &AT_ITS_OWN_TIME);
}

#[test]
fn a_cost_of_one_for_every_request_at_the_stores_own_time_is_caught_by_law_14() {
    own_time_caught(OwnTimeFlaw::EveryCostIsOne, Property::DecidesByItsOwnClock, &AT_ITS_OWN_TIME);
}

#[test]
fn a_batch_charged_in_part_at_the_stores_own_time_is_caught_by_law_14() {
    own_time_caught(OwnTimeFlaw::OnlyTheFirst, Property::DecidesByItsOwnClock, &AT_ITS_OWN_TIME);
}

#[test]
fn a_refund_of_nothing_at_the_stores_own_time_is_caught_by_law_14() {
    own_time_caught(OwnTimeFlaw::RefundsNothing, Property::DecidesByItsOwnClock, &AT_ITS_OWN_TIME);
}

#[test]
fn a_reset_of_nothing_at_the_stores_own_time_is_caught_by_law_14() {
    own_time_caught(OwnTimeFlaw::ResetsNothing, Property::DecidesByItsOwnClock, &AT_ITS_OWN_TIME);
}

#[test]
fn a_state_forgotten_now_and_then_at_the_stores_own_time_is_caught_by_law_14() {
    let flaw = OwnTimeFlaw::ForgetsNowAndThen;
    own_time_caught(flaw, Property::DecidesByItsOwnClock, &AT_ITS_OWN_TIME);
}

#[test]
fn a_denial_forced_through_at_the_stores_own_time_is_caught_by_law_14() {
    own_time_caught(OwnTimeFlaw::ForcesTheDenied, Property::DecidesByItsOwnClock, &AT_ITS_OWN_TIME);
}

#[test]
fn a_get_then_set_race_at_the_stores_own_time_is_caught_by_many_tasks() {
    let property = Property::ManyTasksAreAdmittedExactlyTheLimit;
    own_time_caught(OwnTimeFlaw::ReadThenWrite, property, &AT_ITS_OWN_TIME);
}

#[test]
fn every_fold_of_keys_is_caught_by_similar_keys_never_meet() {
    let mut wrong = Vec::new();
    for fold in Fold::ALL {
        let (flaw, property) = (Flaw::FoldsKeys(fold), Property::SimilarKeysNeverMeet);
        match try_same(&WrongHarness(Some(flaw)), property, GCRA, CASES) {
            Ok(()) => wrong.push(format!("{fold:?} is not caught")),
            Err(failure) => {
                assert_eq!(failure.violation.law, property.law());
                if !failure.violation.message.contains(alike(fold)) {
                    wrong.push(format!("{fold:?} is reported as another: {failure}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// The law's description of keys that are folded in this way.
fn alike(fold: Fold) -> &'static str {
    match fold {
        // Keys of several groups are alike in this way.
        Fold::Punctuation
        | Fold::LettersAndDigits
        | Fold::CutAt(16)
        | Fold::Controls
        | Fold::QuestionMarks
        | Fold::UpToFourBytes
        | Fold::LowBytes
        | Fold::Unquoted
        | Fold::Times31
        | Fold::SumOfBytes => "alike in: ",
        Fold::HashTag => "{",
        Fold::Case | Fold::AsciiCase => "alike in: the case of letters",
        Fold::Accents => "alike in: accents",
        Fold::Colons => "alike in: the sign between two parts: ':' and '_'",
        Fold::Nfc | Fold::Nfd => "the normalisation of Unicode (NFC, NFD)",
        Fold::Nfkc | Fold::Nfkd => "normalisation of Unicode",
        Fold::FullWidthDigits => "full-width digits",
        Fold::TrailingZeros => "the zeros at the end of an address",
        Fold::LeadingZeros => "the zeros that numbers begin with",
        Fold::Addresses => "of an address",
        Fold::MappedAddresses => "within one of IPv6",
        Fold::Numbers => "the spelling of a number",
        Fold::Trimmed | Fold::PaddedWithSpaces => "white space at the ends",
        Fold::Spaces => "space",
        Fold::NulTerminated => "what follows a NUL",
        Fold::FirstLine => "a line break",
        Fold::CutAt(_) => "the first",
        Fold::EndOf(_) => "the last",
        Fold::EndsAndLength(_) => "both ends",
        Fold::ZeroWidth => "characters of no width",
        Fold::PercentDecoded => "percent-encoding",
        Fold::PlusIsSpace => "a plus for a space",
        Fold::Unescaped => "escapes",
        Fold::Paths => "paths",
        Fold::Fnv32 => "FNV-1a",
        Fold::Crc32 => "CRC-32",
    }
}

#[test]
fn folded_limit_names_are_caught_by_similar_keys_never_meet() {
    let by = [Property::SimilarKeysNeverMeet];
    caught(Flaw::FoldsLimits, &by, &[GCRA, LOG, Scope::Mixed]);
    caught(Flaw::JoinsNameAndKey, &by, &[GCRA, LOG, Scope::MixedAttempts]);
}

#[test]
fn a_reset_by_a_pattern_is_caught_by_similar_keys_never_meet() {
    caught(Flaw::ResetsByPattern, &[Property::SimilarKeysNeverMeet], &[GCRA, FIXED, LIST]);
}

/// Checks that the sound store keeps every law in this scope, on the cases that catch the others.
fn sound(scope: Scope) {
    for property in Property::ALL.into_iter().filter(|property| property.applies(scope)) {
        let outcome = try_same(&WrongHarness(None), property, scope, CASES);
        assert!(outcome.is_ok(), "{property:?} on {scope:?}: {outcome:?}");
    }
}

#[test]
fn the_sound_gcra_passes_on_the_same_cases() {
    sound(GCRA);
}

#[test]
fn the_sound_token_bucket_passes_on_the_same_cases() {
    sound(BUCKET);
}

#[test]
fn the_sound_fixed_window_passes_on_the_same_cases() {
    sound(FIXED);
}

#[test]
fn the_sound_first_request_window_passes_on_the_same_cases() {
    sound(FIRST);
}

#[test]
fn the_sound_sliding_log_passes_on_the_same_cases() {
    sound(LOG);
}

#[test]
fn the_sound_window_log_passes_on_the_same_cases() {
    sound(LIST);
}

#[test]
fn the_sound_leases_pass_on_the_same_cases() {
    sound(LEASES);
}

#[test]
fn sound_attempts_pass_on_the_same_cases() {
    for scope in [INCR_FIRST, INCR_FIXED, PUSH_FIRST, ADD_FIRST, DRAINED, Scope::MixedAttempts] {
        sound(scope);
    }
}

#[test]
fn the_sound_mix_passes_on_the_same_cases() {
    sound(Scope::Mixed);
}

#[test]
fn the_sound_store_decides_by_a_clock_that_runs() {
    for scope in
        AlgorithmKind::ALL.map(Scope::One).into_iter().chain([Scope::Mixed, Scope::MixedAttempts])
    {
        let outcome = try_same(&WrongInRealTime(None), Property::DecidesByItsOwnClock, scope, 1);
        assert!(outcome.is_ok(), "{scope:?}: {outcome:?}");
    }
}
