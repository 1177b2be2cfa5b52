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
use crate::trace::{Scope, Shape, changes, one_limit, traces, twice};

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
}

impl Property {
    /// All of them.
    pub const ALL: [Self; 16] = [
        Self::NeverAdmitsMoreThanItsBound,
        Self::ManyTasksAreAdmittedExactlyTheLimit,
        Self::NoFalseDenial,
        Self::RetryAfterIsHonest,
        Self::ADenialChargesNothing,
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
            Self::ADenialChargesNothing => Law::DenialChargesNothing,
            Self::ExpiredIsAbsent => Law::ExpiredIsAbsent,
            Self::TimeGoingBackMintsNothing => Law::TimeGoingBack,
            Self::AllOrNothing => Law::AllOrNothing,
            Self::CostZeroIsAPeek => Law::CostZeroIsAPeek,
            Self::NothingLeaks => Law::NothingLeaks,
            Self::OneAnswerEverywhere
            | Self::OneAnswerAfterALimitWasChanged
            | Self::EverySmallTraceAgreesWithTheOracle
            | Self::DifferentKeysNeverMeet => Law::OneAnswerEverywhere,
            Self::ChangingALimitIsSafe => Law::ChangingALimit,
            Self::TwoNamesOneMachine => Law::TwoNamesOneMachine,
        }
    }

    /// Whether it has a meaning for limits of this scope.
    #[must_use]
    pub fn applies(self, scope: Scope) -> bool {
        match (self, scope) {
            (Self::TwoNamesOneMachine, Scope::One(kind)) => kind.is_bucket(),
            (Self::TwoNamesOneMachine | Self::EverySmallTraceAgreesWithTheOracle, Scope::Mixed) => {
                false
            }
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
    let any = || traces(scope, Shape::ANY);
    let charges = || traces(scope, Shape::CHARGES_ONLY);
    let short = || traces(scope, Shape::SHORT);
    match property {
        Property::NeverAdmitsMoreThanItsBound => {
            trial.on(&charges(), laws::never_admits_more_than_its_bound)
        }
        Property::NoFalseDenial => trial.on(&charges(), laws::no_false_denial),
        Property::RetryAfterIsHonest => trial.on(&any(), laws::retry_after_is_honest),
        Property::ADenialChargesNothing => trial.on(&any(), laws::a_denial_charges_nothing),
        Property::ExpiredIsAbsent => trial.on(&twice(scope), laws::expired_is_absent),
        Property::TimeGoingBackMintsNothing => {
            trial.on(&short(), laws::time_going_back_mints_nothing)
        }
        Property::AllOrNothing => trial.on(&any(), laws::all_or_nothing),
        Property::CostZeroIsAPeek => trial.on(&any(), laws::cost_zero_is_a_peek),
        Property::NothingLeaks => trial.on(&traces(scope, Shape::FORWARD), laws::nothing_leaks),
        Property::OneAnswerEverywhere => {
            trial.on(&traces(scope, Shape::TO_THE_END), laws::one_answer_everywhere)
        }
        Property::OneAnswerAfterALimitWasChanged => {
            trial.on(&changes(scope), laws::one_answer_after_a_limit_was_changed)
        }
        Property::DifferentKeysNeverMeet => {
            trial.on(&strangers(one_limit(scope)), laws::different_keys_never_meet)
        }
        Property::ChangingALimitIsSafe => trial.on(&changes(scope), laws::changing_a_limit_is_safe),
        Property::TwoNamesOneMachine => trial.on(&any(), laws::two_names_one_machine),
        Property::ManyTasksAreAdmittedExactlyTheLimit => {
            pairs(scope).iter().try_for_each(|kinds| {
                trial.once(kinds, |subject| {
                    laws::many_tasks_are_admitted_exactly_the_limit(subject, kinds)
                })
            })
        }
        Property::EverySmallTraceAgreesWithTheOracle => trial.once(&scope, |subject| {
            let kinds = match scope {
                Scope::One(kind) => vec![kind],
                Scope::Mixed => vec![],
            };
            harness.block_on(laws::every_small_trace_agrees_with_the_oracle(subject, &kinds))
        }),
    }
}

/// The kinds of limits that tasks compete for together.
fn pairs(scope: Scope) -> Vec<[Kind; 2]> {
    match scope {
        Scope::One(kind) => vec![[kind, kind]],
        Scope::Mixed => Kind::ALL.windows(2).map(|pair| [pair[0], pair[1]]).collect(),
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
/// It expands to a module of that name, with a module for each algorithm and one for batches over
/// several of them, and in each a test for every law: `name::gcra::a_denial_charges_nothing`. See
/// [`Harness`](crate::Harness) for the second argument.
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

            $crate::__tests!($name, gcra, One(Gcra));
            $crate::__tests!($name, token_bucket, One(TokenBucket));
            $crate::__tests!($name, fixed_window, One(FixedWindow));
            $crate::__tests!($name, first_request_window, One(FirstRequestWindow));
            $crate::__tests!($name, window_log, One(WindowLog));
            $crate::__tests!($name, bucketed_window, One(BucketedWindow));
            $crate::__tests!($name, sliding_counter, One(SlidingCounter));
            $crate::__tests!($name, sliding_log, One(SlidingLog));
            $crate::__tests!($name, concurrency, One(Concurrency));
            $crate::__tests!($name, mixed, Mixed);
        }
    };
}

/// The list of tests: which laws there are for which scope.
#[doc(hidden)]
#[macro_export]
macro_rules! __tests {
    // Two names, one machine: of the two that it names.
    ($name:ident, gcra, $($scope:tt)+) => {
        $crate::__tests!(@small $name, gcra, [$($scope)+], [
            (two_names_one_machine, TwoNamesOneMachine)
        ]);
    };
    ($name:ident, token_bucket, $($scope:tt)+) => {
        $crate::__tests!(@small $name, token_bucket, [$($scope)+], [
            (two_names_one_machine, TwoNamesOneMachine)
        ]);
    };
    // Batches of several limits are too many to enumerate.
    ($name:ident, mixed, $($scope:tt)+) => {
        $crate::__tests!(@all $name, mixed, [$($scope)+], []);
    };
    ($name:ident, $module:ident, $($scope:tt)+) => {
        $crate::__tests!(@small $name, $module, [$($scope)+], []);
    };
    (@small $name:ident, $module:ident, $scope:tt, [$($more:tt)*]) => {
        $crate::__tests!(@all $name, $module, $scope, [
            (every_small_trace_agrees_with_the_oracle, EverySmallTraceAgreesWithTheOracle)
            $($more)*
        ]);
    };
    (@all $name:ident, $module:ident, $scope:tt, [$($more:tt)*]) => {
        mod $module {
            $crate::__tests!(@each $name, $module, $scope, [
                (never_admits_more_than_its_bound, NeverAdmitsMoreThanItsBound)
                (many_tasks_are_admitted_exactly_the_limit, ManyTasksAreAdmittedExactlyTheLimit)
                (no_false_denial, NoFalseDenial)
                (retry_after_is_honest, RetryAfterIsHonest)
                (a_denial_charges_nothing, ADenialChargesNothing)
                (expired_is_absent, ExpiredIsAbsent)
                (time_going_back_mints_nothing, TimeGoingBackMintsNothing)
                (all_or_nothing, AllOrNothing)
                (cost_zero_is_a_peek, CostZeroIsAPeek)
                (nothing_leaks, NothingLeaks)
                (one_answer_everywhere, OneAnswerEverywhere)
                (one_answer_after_a_limit_was_changed, OneAnswerAfterALimitWasChanged)
                (different_keys_never_meet, DifferentKeysNeverMeet)
                (changing_a_limit_is_safe, ChangingALimitIsSafe)
                $($more)*
            ]);
        }
    };
    (@each $name:ident, $module:ident, $scope:tt, [$(($test:ident, $property:ident))*]) => { $(
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
    ([One($kind:ident)]) => {
        $crate::Scope::One($crate::Kind::$kind)
    };
    ([Mixed]) => {
        $crate::Scope::Mixed
    };
}
