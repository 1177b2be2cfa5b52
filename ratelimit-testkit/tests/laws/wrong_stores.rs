//! Every wrong store is caught by the property that names its law, and the sound store passes on
//! the same cases.

use ratelimit_core::store::Op;
use ratelimit_testkit::{AlgorithmKind, Property, Scope, try_same};

use crate::wrong::{Flaw, Fold, WrongHarness};

use AlgorithmKind as Kind;
use Property::ManyTasksAreAdmittedExactlyTheLimit as ManyTasks;
use Property::{
    Agrees, AgreesAfterAChange, DecidesByItsOwnClock, IdentifiersNeverMeet, KeepsWhatMatters,
};
use Scope::{Mixed, Reservations};

/// Enough cases to catch every flaw, with some margin.
const CASES: u32 = 64;

const GCRA: Scope = Scope::One(Kind::Gcra);
const FIXED: Scope = Scope::One(Kind::FixedWindow);
const FIRST: Scope = Scope::One(Kind::FirstRequestWindow);
const LOG: Scope = Scope::One(Kind::SlidingLog);
const LIST: Scope = Scope::One(Kind::WindowLog);
const LEASES: Scope = Scope::One(Kind::Concurrency);
const INCR_FIRST: Scope = Scope::Attempts(Kind::FirstRequestWindow);
const INCR_FIXED: Scope = Scope::Attempts(Kind::FixedWindow);
const PUSH_FIRST: Scope = Scope::Attempts(Kind::WindowLog);
const ADD_FIRST: Scope = Scope::Attempts(Kind::SlidingLog);
const DRAINED: Scope = Scope::Attempts(Kind::Gcra);

/// Each flaw, the property that catches it, and limits on which it does.
const CAUGHT: &[(Flaw, Property, &[Scope])] = &[
    (Flaw::OffByOne, Agrees, &[GCRA, FIXED, FIRST, LOG, LIST, LEASES]),
    (Flaw::OffByOne, Agrees, &[INCR_FIRST, INCR_FIXED, PUSH_FIRST, ADD_FIRST, DRAINED]),
    (Flaw::OffByOne, ManyTasks, &[GCRA, FIXED, LOG, LEASES, INCR_FIRST, DRAINED]),
    (Flaw::ExtendsTheWindow, Agrees, &[FIRST, INCR_FIRST]),
    (Flaw::ChargesTheSiblings, Agrees, &[GCRA, FIXED, LOG, Mixed]),
    (Flaw::OutlivesItsWindow, Agrees, &[GCRA, FIXED, FIRST, LOG]),
    (Flaw::MintsWhenTimeGoesBack, Agrees, &[GCRA, FIXED, FIRST, LOG]),
    (Flaw::MintsWhenTimeGoesBack, DecidesByItsOwnClock, &[GCRA, FIXED, FIRST, LOG, LEASES]),
    (Flaw::WaitsOneShort, Agrees, &[GCRA, FIXED, FIRST, LOG, Mixed]),
    (Flaw::KeepsTheOldLimit, AgreesAfterAChange, &[GCRA, FIXED, FIRST, LOG, Mixed]),
    (Flaw::KnowsNamesOnly, AgreesAfterAChange, &[GCRA, FIXED, FIRST, LOG, LIST, LEASES]),
    (Flaw::KnowsNamesOnly, AgreesAfterAChange, &[INCR_FIRST, INCR_FIXED, PUSH_FIRST, ADD_FIRST]),
    (Flaw::KnowsNamesOnly, AgreesAfterAChange, &[DRAINED, Mixed, Reservations]),
    (Flaw::GrantsASecondBurst, AgreesAfterAChange, &[GCRA, FIXED, FIRST, LOG, LIST, LEASES]),
    (Flaw::GrantsASecondBurst, AgreesAfterAChange, &[INCR_FIRST, INCR_FIXED, DRAINED, Mixed]),
    (Flaw::WarnsAgain, Agrees, &[GCRA, FIXED, LEASES, Reservations]),
    (Flaw::ChargesAgain, Agrees, &[GCRA, FIXED, LEASES, Reservations]),
    (Flaw::ReleasesAnyLease, Agrees, &[LEASES]),
    (Flaw::ForgetsRenewals, Agrees, &[LEASES]),
    (Flaw::ReadThenWrite(Op::Acquire), ManyTasks, &[GCRA, LOG, LIST, LEASES, PUSH_FIRST, Mixed]),
    (Flaw::ReadThenWrite(Op::Refund), ManyTasks, &[Mixed]),
    (Flaw::ReadThenWrite(Op::Force), ManyTasks, &[Mixed]),
    (Flaw::SharesNumbers, ManyTasks, &[GCRA, FIXED, FIRST, LOG, LIST, LEASES, DRAINED]),
    (Flaw::ReadsTheClockFirst, ManyTasks, &[GCRA, FIRST, LOG, LIST, LEASES, DRAINED]),
    (Flaw::ForgetsDebt, Agrees, &[FIXED]),
    (Flaw::ExtendsAgain, Agrees, &[GCRA, FIXED, Reservations]),
    (Flaw::ReturnsWhatFlowedBack, Agrees, &[Reservations]),
    (Flaw::ChargesTheFirstCost, Agrees, &[Mixed]),
    (Flaw::ChargesTheFirstFew(16), Agrees, &[Mixed, Reservations]),
    (Flaw::ForgivesInSilence, Agrees, &[GCRA, FIXED]),
    (Flaw::LosesTheTtl, KeepsWhatMatters, &[GCRA, FIXED, LOG, LIST, LEASES, INCR_FIRST]),
    (Flaw::SweepsWithoutGrace, KeepsWhatMatters, &[GCRA, FIXED, LOG, LIST, LEASES]),
    (Flaw::OwnClockStands, DecidesByItsOwnClock, &[GCRA, FIXED, LOG, LEASES, DRAINED, Mixed]),
    (Flaw::KeepsDenials(Op::Reset), DecidesByItsOwnClock, &[GCRA, FIXED, LOG, LEASES, DRAINED]),
    (Flaw::KeepsDenials(Op::Refund), DecidesByItsOwnClock, &[GCRA, FIXED, LOG, LEASES]),
    (Flaw::KeepsDenials(Op::Force), DecidesByItsOwnClock, &[GCRA]),
    (Flaw::KeepsDenials(Op::Settle), DecidesByItsOwnClock, &[GCRA, FIXED, LEASES]),
    (Flaw::FoldsKeys(Fold::HashTag), IdentifiersNeverMeet, &[GCRA, LOG]),
    (Flaw::FoldsKeys(Fold::Case), IdentifiersNeverMeet, &[GCRA]),
    (Flaw::FoldsKeys(Fold::Colons), IdentifiersNeverMeet, &[GCRA]),
    (Flaw::FoldsKeys(Fold::Trimmed), IdentifiersNeverMeet, &[GCRA]),
    (Flaw::FoldsKeys(Fold::NulTerminated), IdentifiersNeverMeet, &[GCRA]),
    (Flaw::FoldsKeys(Fold::CutAt(16)), IdentifiersNeverMeet, &[GCRA]),
    (Flaw::FoldsKeys(Fold::CutAt(128)), IdentifiersNeverMeet, &[GCRA]),
    (Flaw::FoldsKeys(Fold::CutAt(1_000)), IdentifiersNeverMeet, &[GCRA]),
    (Flaw::FoldsNames(Fold::CutAt(63)), IdentifiersNeverMeet, &[GCRA]),
    (Flaw::JoinsKeys("_"), IdentifiersNeverMeet, &[GCRA]),
    (Flaw::JoinsKeys("-"), IdentifiersNeverMeet, &[GCRA]),
];

/// Checks that a property catches the stores of a harness, and that the failure names the
/// property's own law.
fn check_is_caught(harness: WrongHarness, property: Property, scope: Scope) {
    let outcome = try_same(&harness, property, scope, CASES);
    let Err(failure) = outcome else {
        panic!("{property:?} on {scope:?} does not catch {harness:?}")
    };
    assert_eq!(failure.law, property.law(), "{harness:?}: {failure}");
}

#[test]
fn each_flaw_is_caught_by_the_property_that_names_its_law() {
    for (flaw, property, scopes) in CAUGHT {
        for scope in *scopes {
            check_is_caught(WrongHarness::with_flaw(Some(*flaw)), *property, *scope);
        }
    }
}

#[test]
fn flaws_on_a_clock_that_runs_are_caught_there() {
    let rows = [
        (Flaw::OwnClockStands, DecidesByItsOwnClock, &[GCRA, FIXED, LIST, INCR_FIXED, Mixed][..]),
        (Flaw::ReadThenWrite(Op::Acquire), ManyTasks, &[GCRA, LIST, Mixed]),
        (Flaw::SweepsEarly, KeepsWhatMatters, &[GCRA, FIRST, LOG, LIST, LEASES, DRAINED]),
    ];
    for (flaw, property, scopes) in rows {
        for scope in scopes {
            check_is_caught(
                WrongHarness { flaw: Some(flaw), in_real_time: true },
                property,
                *scope,
            );
        }
    }
}

#[test]
fn the_sound_store_passes_on_the_same_cases_and_by_a_clock_that_runs() {
    let on_a_clock_that_runs = [DecidesByItsOwnClock, KeepsWhatMatters, ManyTasks];
    for (in_real_time, properties, cases) in
        [(false, &Property::ALL[..], CASES), (true, &on_a_clock_that_runs, 1)]
    {
        for property in properties {
            for scope in Scope::all() {
                let sound = WrongHarness::<0> { in_real_time, flaw: None };
                let outcome = try_same(&sound, *property, scope, cases);
                outcome.unwrap_or_else(|failure| panic!("{property:?} on {scope:?}: {failure}"));
            }
        }
    }
}
