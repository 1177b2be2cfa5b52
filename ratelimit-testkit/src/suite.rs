//! Running a property on a harness, and [`conformance!`](crate::conformance), which writes the tests.

use std::cell::RefCell;
use std::fmt;

use proptest::strategy::Strategy;
use proptest::test_runner::{
    Config, FileFailurePersistence, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner,
};

use crate::harness::Harness;
use crate::law::{Law, Violation};
use crate::laws::strangers::strangers;
use crate::laws::{self, Kept, Subject};
use crate::seeds::Kind;
use crate::trace::{Scope, Shape, attempts, changes, holds, one_limit, traces, twice};

/// A property: a law, or a special case of one, as a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Property {
    /// [`laws::never_admits_more_than_its_bound`]
    NeverAdmitsMoreThanItsBound,
    /// [`laws::many_tasks_are_admitted_exactly_the_limit`]
    ManyTasksAreAdmittedExactlyTheLimit,
    /// [`laws::no_false_denial`]
    NoFalseDenial,
    /// [`laws::retry_after_is_honest`]
    RetryAfterIsHonest,
    /// [`laws::a_denial_charges_nothing`]
    ADenialChargesNothing,
    /// [`laws::every_attempt_is_charged`], of limits that count attempts.
    EveryAttemptIsCharged,
    /// [`laws::expired_is_absent`]
    ExpiredIsAbsent,
    /// [`laws::time_going_back_mints_nothing`]
    TimeGoingBackMintsNothing,
    /// [`laws::all_or_nothing`]
    AllOrNothing,
    /// [`laws::cost_zero_is_a_peek`]
    CostZeroIsAPeek,
    /// [`laws::nothing_leaks`]
    NothingLeaks,
    /// [`laws::one_answer_everywhere`]
    OneAnswerEverywhere,
    /// [`laws::one_answer_after_a_limit_was_changed`]
    OneAnswerAfterALimitWasChanged,
    /// [`laws::every_small_trace_agrees_with_the_oracle`]
    EverySmallTraceAgreesWithTheOracle,
    /// [`laws::different_keys_never_meet`]
    DifferentKeysNeverMeet,
    /// [`laws::changing_a_limit_is_safe`]
    ChangingALimitIsSafe,
    /// [`laws::two_names_one_machine`], of buckets only.
    TwoNamesOneMachine,
    /// [`laws::a_hold_is_settled_once`], of limits whose charges can be held.
    AHoldIsSettledOnce,
    /// [`laws::holds_agree`], of limits whose charges can be held.
    HoldsAgree,
    /// [`laws::nothing_leaks`], of limits whose charges can be held.
    HoldsLeakNothing,
}

impl Property {
    /// All of them.
    pub const ALL: [Self; 20] = [
        Self::NeverAdmitsMoreThanItsBound,
        Self::ManyTasksAreAdmittedExactlyTheLimit,
        Self::NoFalseDenial,
        Self::RetryAfterIsHonest,
        Self::ADenialChargesNothing,
        Self::EveryAttemptIsCharged,
        Self::ExpiredIsAbsent,
        Self::TimeGoingBackMintsNothing,
        Self::AllOrNothing,
        Self::CostZeroIsAPeek,
        Self::NothingLeaks,
        Self::OneAnswerEverywhere,
        Self::OneAnswerAfterALimitWasChanged,
        Self::EverySmallTraceAgreesWithTheOracle,
        Self::DifferentKeysNeverMeet,
        Self::ChangingALimitIsSafe,
        Self::TwoNamesOneMachine,
        Self::AHoldIsSettledOnce,
        Self::HoldsAgree,
        Self::HoldsLeakNothing,
    ];

    /// The law that it tries.
    #[must_use]
    pub const fn law(self) -> Law {
        match self {
            Self::NeverAdmitsMoreThanItsBound | Self::ManyTasksAreAdmittedExactlyTheLimit => {
                Law::Safety
            }
            Self::NoFalseDenial => Law::NoFalseDenial,
            Self::RetryAfterIsHonest => Law::HonestRetry,
            Self::ADenialChargesNothing | Self::EveryAttemptIsCharged => Law::DenialChargesNothing,
            Self::ExpiredIsAbsent => Law::ExpiredIsAbsent,
            Self::TimeGoingBackMintsNothing => Law::TimeGoingBack,
            Self::AllOrNothing => Law::AllOrNothing,
            Self::CostZeroIsAPeek => Law::CostZeroIsAPeek,
            Self::NothingLeaks | Self::HoldsLeakNothing => Law::NothingLeaks,
            Self::OneAnswerEverywhere
            | Self::OneAnswerAfterALimitWasChanged
            | Self::EverySmallTraceAgreesWithTheOracle
            | Self::DifferentKeysNeverMeet
            | Self::HoldsAgree => Law::OneAnswerEverywhere,
            Self::ChangingALimitIsSafe => Law::ChangingALimit,
            Self::TwoNamesOneMachine => Law::TwoNamesOneMachine,
            Self::AHoldIsSettledOnce => Law::SettledOnce,
        }
    }

    /// Whether it has a meaning for limits of this scope.
    #[must_use]
    pub fn applies(self, scope: Scope) -> bool {
        let (one, kind) = match scope {
            Scope::One(kind) | Scope::Attempts(kind) => (true, Some(kind)),
            Scope::Mixed | Scope::MixedAttempts => (false, None),
        };
        match self {
            Self::TwoNamesOneMachine => kind.is_some_and(Kind::is_bucket),
            Self::EverySmallTraceAgreesWithTheOracle => one,
            Self::ADenialChargesNothing | Self::AllOrNothing => {
                matches!(scope, Scope::One(_) | Scope::Mixed)
            }
            Self::EveryAttemptIsCharged => !matches!(scope, Scope::One(_)),
            Self::AHoldIsSettledOnce | Self::HoldsAgree | Self::HoldsLeakNothing => match scope {
                Scope::One(kind) => Kind::HOLDS.contains(&kind),
                scope => scope == Scope::Mixed,
            },
            _ => true,
        }
    }
}

/// A property that does not hold: how, and on what.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The law, and how it was broken.
    pub violation: Violation,
    /// The smallest case that was found, for a person.
    pub case: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n\non the case\n{}", self.violation, self.case)
    }
}

/// How many cases are tried to make a failing one smaller: enough, and an end on a slow server.
const MAX_SHRINK_ITERS: u32 = 4_096;

/// The body of a test: makes a harness and panics if the property does not hold for it.
///
/// Cases that have failed once are kept in the file `regressions`, to be tried first from then on. How
/// many new ones there are is up to the harness, or to `PROPTEST_CASES` in the environment.
///
/// # Panics
/// If the property does not hold.
pub fn test<H: Harness>(property: Property, scope: Scope, regressions: &'static str) {
    let persistence = FileFailurePersistence::Direct(regressions);
    let more = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    let config = Config {
        cases: more.unwrap_or(H::CASES),
        failure_persistence: Some(Box::new(persistence)),
        max_shrink_iters: MAX_SHRINK_ITERS,
        ..Config::default()
    };
    if let Err(failure) = try_property(&H::new(), property, scope, TestRunner::new(config)) {
        panic!("{failure}\n(kept in {regressions})");
    }
}

/// Tries a property on the same `cases` cases every time.
///
/// # Errors
/// The case on which the property does not hold.
pub fn try_same<H: Harness>(
    harness: &H,
    property: Property,
    scope: Scope,
    cases: u32,
) -> Result<(), Failure> {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    try_property(harness, property, scope, TestRunner::new_with_rng(config, rng))
}

/// Tries a property on the cases that the runner makes up.
///
/// # Errors
/// The smallest case found on which the property does not hold.
pub fn try_property<H: Harness>(
    harness: &H,
    property: Property,
    scope: Scope,
    runner: TestRunner,
) -> Result<(), Failure> {
    let trial = Trial { harness, law: property.law(), runner };
    let any = || traces(scope, Shape::ANY.on::<H>());
    let charges = || traces(scope, Shape::CHARGES_ONLY.on::<H>());
    let forward = Shape::FORWARD.on::<H>();
    match property {
        Property::NeverAdmitsMoreThanItsBound => {
            trial.on(&charges(), laws::never_admits_more_than_its_bound)
        }
        Property::NoFalseDenial => trial.on(&charges(), laws::no_false_denial),
        Property::RetryAfterIsHonest => trial.on(&any(), laws::retry_after_is_honest),
        Property::ADenialChargesNothing => trial.on(&any(), laws::a_denial_charges_nothing),
        Property::EveryAttemptIsCharged => {
            trial.on(&attempts(scope, Shape::ANY.on::<H>()), laws::every_attempt_is_charged)
        }
        Property::ExpiredIsAbsent => trial.on(&twice(scope, forward), laws::expired_is_absent),
        Property::TimeGoingBackMintsNothing if !H::GOES_BACK => Ok(()),
        Property::TimeGoingBackMintsNothing => {
            let short = traces(scope, Shape::SHORT.on::<H>());
            trial.on(&short, laws::time_going_back_mints_nothing)
        }
        Property::AllOrNothing => trial.on(&any(), laws::all_or_nothing),
        Property::CostZeroIsAPeek => trial.on(&any(), laws::cost_zero_is_a_peek),
        Property::NothingLeaks => trial.on(&traces(scope, forward), laws::nothing_leaks),
        Property::OneAnswerEverywhere => {
            let to_the_end = traces(scope, Shape::TO_THE_END.on::<H>());
            trial.on(&to_the_end, laws::one_answer_everywhere)
        }
        Property::OneAnswerAfterALimitWasChanged => {
            trial.on(&changes(scope), laws::one_answer_after_a_limit_was_changed)
        }
        Property::DifferentKeysNeverMeet => {
            trial.on(&strangers(one_limit(scope)), laws::different_keys_never_meet)
        }
        Property::ChangingALimitIsSafe => trial.on(&changes(scope), laws::changing_a_limit_is_safe),
        // A store that holds nothing breaks none of these.
        Property::AHoldIsSettledOnce | Property::HoldsAgree | Property::HoldsLeakNothing
            if !H::HOLDS =>
        {
            Ok(())
        }
        Property::AHoldIsSettledOnce => {
            trial.on(&holds(scope, H::GOES_BACK), laws::a_hold_is_settled_once)
        }
        Property::HoldsAgree => trial.on(&holds(scope, H::GOES_BACK), laws::holds_agree),
        Property::HoldsLeakNothing => trial.on(&holds(scope, false), laws::nothing_leaks),
        Property::TwoNamesOneMachine => trial.on(&any(), laws::two_names_one_machine),
        Property::ManyTasksAreAdmittedExactlyTheLimit => {
            pairs(scope).into_iter().try_for_each(|pair| {
                trial.once(&pair, |subject| {
                    laws::many_tasks_are_admitted_exactly_the_limit(subject, pair)
                })
            })
        }
        Property::EverySmallTraceAgreesWithTheOracle => trial.once(&scope, |subject| {
            harness.block_on(laws::every_small_trace_agrees_with_the_oracle(subject, scope))
        }),
    }
}

/// The limits that tasks compete for together.
fn pairs(scope: Scope) -> Vec<[Scope; 2]> {
    match scope {
        Scope::One(_) | Scope::Attempts(_) => vec![[scope, scope]],
        Scope::Mixed | Scope::MixedAttempts => {
            let admissions = |single: &Scope| matches!(single, Scope::One(_));
            let (admissions, attempts): (Vec<_>, Vec<_>) =
                scope.singles().into_iter().partition(admissions);
            // Attempts beside each other, and one beside what counts what is admitted.
            let most = if admissions.is_empty() { attempts.len() } else { 1 };
            let all: Vec<_> =
                admissions.into_iter().chain(attempts.into_iter().take(most)).collect();
            all.windows(2).map(|pair| [pair[0], pair[1]]).collect()
        }
    }
}

struct Trial<'h, H> {
    harness: &'h H,
    law: Law,
    runner: TestRunner,
}

impl<H: Harness> Trial<'_, H> {
    /// Tries a law on the cases of a strategy, each in a fresh store.
    #[allow(clippy::needless_pass_by_value, reason = "a law is a function")]
    fn on<S: Strategy>(
        mut self,
        strategy: &S,
        law: impl AsyncFn(&Subject<'_, H>, &S::Value) -> Kept,
    ) -> Result<(), Failure> {
        // A shrinking failure is told by its latest, smallest case.
        let told: RefCell<Option<Violation>> = RefCell::default();
        let outcome = self.runner.run(strategy, |case| {
            let store = self.harness.store();
            let subject = Subject { law: self.law, harness: self.harness, store: &store };
            self.harness.block_on(law(&subject, &case)).map_err(|violation| {
                let reason = violation.to_string();
                told.replace(Some(violation));
                TestCaseError::fail(reason)
            })
        });
        let broken = |told: String| Violation { law: self.law, told };
        match outcome {
            Ok(()) => Ok(()),
            Err(TestError::Abort(reason)) => {
                Err(Failure { violation: broken(reason.to_string()), case: "none".to_owned() })
            }
            Err(TestError::Fail(reason, case)) => {
                let last = told.into_inner().filter(|last| last.to_string() == reason.message());
                let violation = last.unwrap_or_else(|| broken(reason.to_string()));
                Err(Failure { violation, case: format!("{case:?}") })
            }
        }
    }

    /// Tries a law that makes up its own cases.
    fn once(
        &self,
        case: &impl fmt::Debug,
        law: impl FnOnce(&Subject<'_, H>) -> Kept,
    ) -> Result<(), Failure> {
        let store = self.harness.store();
        let subject = Subject { law: self.law, harness: self.harness, store: &store };
        law(&subject).map_err(|violation| Failure { violation, case: format!("{case:?}") })
    }
}

/// Writes the tests that hold a backend to the laws: `conformance!(name, Harness);`
///
/// It expands to a module of that name, with a module for each algorithm, one for each that counts
/// attempts and one for batches over several of them, and in each a test for every law:
/// `name::gcra::a_denial_charges_nothing`, `name::gcra_attempts::every_attempt_is_charged`. See
/// [`Harness`](crate::Harness) for the second argument.
///
/// `conformance!(name, Harness, attempts);` is for a store that can do no more than charge attempts
/// [blindly](crate::Kind::BLIND): of these algorithms only, and batches over several of them.
///
/// Cases that have failed are kept under `proptest-regressions/` of the calling crate and are to be
/// committed.
#[macro_export]
macro_rules! conformance {
    ($name:ident, $harness:ty) => {
        mod $name {
            #[allow(unused_imports, reason = "the harness may be named by a path")]
            use super::*;
            type Harnessed = $harness;

            $crate::__tests!($name, gcra, [One(Gcra)], [each admissions small buckets holds]);
            $crate::__tests!($name, token_bucket, [One(TokenBucket)],
                [each admissions small buckets holds]);
            $crate::__tests!($name, fixed_window, [One(FixedWindow)],
                [each admissions small holds]);
            $crate::__tests!($name, first_request_window, [One(FirstRequestWindow)],
                [each admissions small]);
            $crate::__tests!($name, window_log, [One(WindowLog)], [each admissions small]);
            $crate::__tests!($name, bucketed_window, [One(BucketedWindow)],
                [each admissions small]);
            $crate::__tests!($name, sliding_counter, [One(SlidingCounter)],
                [each admissions small]);
            $crate::__tests!($name, sliding_log, [One(SlidingLog)], [each admissions small]);
            $crate::__tests!($name, concurrency, [One(Concurrency)], [each admissions small holds]);
            $crate::__tests!($name, mixed, [Mixed], [each admissions attempts holds]);
            $crate::__tests!($name, gcra_attempts, [Attempts(Gcra)], [each attempts small buckets]);
            $crate::__tests!($name, token_bucket_attempts, [Attempts(TokenBucket)],
                [each attempts small buckets]);
            $crate::__tests!($name, sliding_counter_attempts, [Attempts(SlidingCounter)],
                [each attempts small]);
            $crate::__tests!(@blind $name);
        }
    };
    ($name:ident, $harness:ty, attempts) => {
        mod $name {
            #[allow(unused_imports, reason = "the harness may be named by a path")]
            use super::*;
            type Harnessed = $harness;

            $crate::__tests!(@blind $name);
            $crate::__tests!($name, mixed_attempts, [MixedAttempts], [each attempts]);
        }
    };
}

/// A module of tests: of these limits, the sets of laws that have a meaning for them.
#[doc(hidden)]
#[macro_export]
macro_rules! __tests {
    (@blind $name:ident) => {
        $crate::__tests!($name, fixed_window_attempts, [Attempts(FixedWindow)],
            [each attempts small]);
        $crate::__tests!($name, first_request_window_attempts, [Attempts(FirstRequestWindow)],
            [each attempts small]);
        $crate::__tests!($name, window_log_attempts, [Attempts(WindowLog)], [each attempts small]);
        $crate::__tests!($name, bucketed_window_attempts, [Attempts(BucketedWindow)],
            [each attempts small]);
        $crate::__tests!($name, sliding_log_attempts, [Attempts(SlidingLog)],
            [each attempts small]);
    };
    ($name:ident, $module:ident, $scope:tt, [$($set:ident)+]) => {
        mod $module {
            $( $crate::__set!($set, $name, $module, $scope); )+
        }
    };
}

/// The sets of laws.
#[doc(hidden)]
#[macro_export]
macro_rules! __set {
    (each, $($of:tt)+) => {
        $crate::__test!($($of)+, [
            (never_admits_more_than_its_bound, NeverAdmitsMoreThanItsBound)
            (many_tasks_are_admitted_exactly_the_limit, ManyTasksAreAdmittedExactlyTheLimit)
            (no_false_denial, NoFalseDenial)
            (retry_after_is_honest, RetryAfterIsHonest)
            (expired_is_absent, ExpiredIsAbsent)
            (time_going_back_mints_nothing, TimeGoingBackMintsNothing)
            (cost_zero_is_a_peek, CostZeroIsAPeek)
            (nothing_leaks, NothingLeaks)
            (one_answer_everywhere, OneAnswerEverywhere)
            (one_answer_after_a_limit_was_changed, OneAnswerAfterALimitWasChanged)
            (different_keys_never_meet, DifferentKeysNeverMeet)
            (changing_a_limit_is_safe, ChangingALimitIsSafe)
        ]);
    };
    // Of what counts what it admits.
    (admissions, $($of:tt)+) => {
        $crate::__test!($($of)+, [
            (a_denial_charges_nothing, ADenialChargesNothing)
            (all_or_nothing, AllOrNothing)
        ]);
    };
    // Of what counts attempts.
    (attempts, $($of:tt)+) => {
        $crate::__test!($($of)+, [(every_attempt_is_charged, EveryAttemptIsCharged)]);
    };
    // Of what can be held, to be settled later.
    (holds, $($of:tt)+) => {
        $crate::__test!($($of)+, [
            (a_hold_is_settled_once, AHoldIsSettledOnce)
            (holds_agree, HoldsAgree)
            (holds_leak_nothing, HoldsLeakNothing)
        ]);
    };
    // Batches of several limits are too many to enumerate.
    (small, $($of:tt)+) => {
        $crate::__test!($($of)+, [
            (every_small_trace_agrees_with_the_oracle, EverySmallTraceAgreesWithTheOracle)
        ]);
    };
    // Of the two that it names.
    (buckets, $($of:tt)+) => {
        $crate::__test!($($of)+, [(two_names_one_machine, TwoNamesOneMachine)]);
    };
}

/// The tests of a set.
#[doc(hidden)]
#[macro_export]
macro_rules! __test {
    ($name:ident, $module:ident, $scope:tt, [$(($test:ident, $property:ident))*]) => { $(
        #[test]
        fn $test() {
            $crate::test::<super::Harnessed>(
                $crate::Property::$property,
                $crate::__scope!($scope),
                concat!(
                    env!("CARGO_MANIFEST_DIR"), "/proptest-regressions/",
                    stringify!($name), "/", stringify!($module), "/", stringify!($test), ".txt",
                ),
            );
        }
    )* };
}

/// A scope as [`conformance!`] writes it.
#[doc(hidden)]
#[macro_export]
macro_rules! __scope {
    ([$scope:ident($kind:ident)]) => {
        $crate::Scope::$scope($crate::Kind::$kind)
    };
    ([$scope:ident]) => {
        $crate::Scope::$scope
    };
}
