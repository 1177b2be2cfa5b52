//! The laws for an algorithm of one's own: see [`algorithm_conformance!`](crate::algorithm_conformance).

use std::cell::RefCell;
use std::fmt;

use proptest::test_runner::{
    Config, FileFailurePersistence, RngAlgorithm, TestCaseError, TestError, TestRng, TestRunner,
};
use ratelimit_core::{Algorithm, InMemory, Timestamp};

use crate::capability::{Able, Capability};
use crate::harness::Harness;
use crate::law::{Law, Violation};
use crate::suite::announce;
use crate::trace::words::raw;
use walk::{Path, Walk, paths};

mod laws;
mod macros;
mod shortcuts;
mod stores;
pub(crate) mod walk;

pub use stores::Reference;

/// The outcome of a law on a walk: kept, or how it was broken.
pub(crate) type Kept = Result<(), String>;

/// A limit by an algorithm, and how it is written.
#[derive(Clone, Debug)]
pub struct Instance<A> {
    /// What stands for it where a law fails, such as `WeekendBudget(100)`. No two of a harness are the same.
    pub words: String,
    /// The limit.
    pub algorithm: A,
}

impl<A> Instance<A> {
    /// This limit, written so.
    pub fn new(words: impl Into<String>, algorithm: A) -> Self {
        Self { words: words.into(), algorithm }
    }
}

/// What the laws have to know of an algorithm.
///
/// [`algorithm_conformance!`](crate::algorithm_conformance) makes one of a list of limits. Write one where there is
/// more to say: a bound over time, or how long it takes to recover.
///
/// ```
/// use ratelimit_core::{FixedWindow, Timestamp};
/// use ratelimit_testkit::{AlgorithmHarness, Instance, algorithm_conformance};
///
/// struct Windows;
///
/// impl AlgorithmHarness for Windows {
///     type Algorithm = FixedWindow;
///
///     fn limits() -> Vec<Instance<FixedWindow>> {
///         ["1/s", "3/250ms", "7/5m"]
///             .map(|rate| Instance::new(rate, FixedWindow::new(rate.parse().unwrap()).unwrap()))
///             .into()
///     }
///
///     /// No window admits more than the limit.
///     fn excess(limit: &FixedWindow, admitted: &[(Timestamp, u64)], at: Timestamp, cost: u64) -> Option<String> {
///         use ratelimit_core::Algorithm;
///         let window = |at: Timestamp| at.as_us() / limit.window_us();
///         let same = admitted.iter().filter(|(earlier, _)| window(*earlier) == window(at));
///         let total = same.map(|(_, cost)| cost).sum::<u64>() + cost;
///         (total > limit.capacity()).then(|| format!("{total} in one window"))
///     }
/// }
///
/// algorithm_conformance!(windows, Windows);
/// # fn main() {}
/// ```
pub trait AlgorithmHarness: 'static {
    /// The algorithm.
    type Algorithm: InMemory + 'static;

    /// How many walks each law is tried on.
    const CASES: u32 = 256;

    /// The limits that the laws are tried on: those at which it could go wrong, such as a limit of 1, a time that is no
    /// whole number of another, the largest that it takes. With one only, nothing is changed to another.
    fn limits() -> Vec<Instance<Self::Algorithm>>;

    /// How a request would break the bound of the algorithm if it was admitted, with what was admitted before, oldest
    /// first: `None`, as by default, if it would not, or if no bound is known. A request from before the last one is
    /// told as made with it. Where attempts are counted, one that was denied is told as admitted at cost 0.
    fn excess(
        limit: &Self::Algorithm,
        admitted: &[(Timestamp, u64)],
        at: Timestamp,
        cost: u64,
    ) -> Option<String> {
        let _ = (limit, admitted, at, cost);
        None
    }

    /// The longest that a limit takes to recover from empty, in microseconds. By default the limit is asked itself, of
    /// keys that are drained at one go, by force, and by a hundred charges in a row, at ten times: say it where an
    /// algorithm of several windows takes longer to be drained.
    fn recovers_within_us(limit: &Self::Algorithm) -> Option<u64> {
        let _ = limit;
        None
    }
}

/// Writes the list of properties: of an algorithm by itself, and of a store that keeps its states.
macro_rules! properties {
    (
        $( $(#[$doc:meta])* $alone:ident by $law:ident = $module:ident::$function:ident, )+
        ; $( $(#[$store_doc:meta])* $kept:ident by $store_law:ident = $store_function:ident, )+
    ) => {
        /// A property of an algorithm: one of its laws, or a special case of one, as a test.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum AlgorithmProperty {
            $( $(#[$doc])* $alone, )+
            $( $(#[$store_doc])* $kept, )+
        }

        impl AlgorithmProperty {
            /// All that are tried on the algorithm by itself.
            pub const ALONE: &'static [Self] = &[$(Self::$alone),+];
            /// All that are tried on a store that keeps its states.
            pub const KEPT: &'static [Self] = &[$(Self::$kept),+];

            /// The law that it tries.
            #[must_use]
            pub const fn law(self) -> Law {
                match self {
                    $( Self::$alone => Law::$law, )+
                    $( Self::$kept => Law::$store_law, )+
                }
            }

            /// Tries it on a walk.
            fn alone<T: AlgorithmHarness>(self, walk: &mut Walk<'_, T::Algorithm>) -> Kept {
                match self {
                    $( Self::$alone => $module::$function::<T>(walk), )+
                    $( Self::$kept => unreachable!("{} is of a store", stringify!($kept)), )+
                }
            }

            /// Tries it on a store.
            fn kept<T: AlgorithmHarness, H: Harness<T::Algorithm>>(
                self,
                harness: &H,
                runner: TestRunner,
            ) -> Result<(), (Violation, String)> {
                match self {
                    $( Self::$alone => unreachable!("{} is of no store", stringify!($alone)), )+
                    $( Self::$kept => stores::$store_function::<T, H>(harness, self.law(), runner), )+
                }
            }
        }
    };
}

properties! {
    /// Law 1: no more than the capacity at one moment, nor than [`AlgorithmHarness::excess`] says.
    NeverAdmitsMoreThanItsBound by Safety = laws::never_admits_more_than_its_bound,
    /// Law 1: a refund gives back its cost at the most, and a forced charge takes its cost or all there is.
    RefundsAndForcedChargesAreExact by Safety = laws::refunds_and_forced_charges_are_exact,
    /// Law 2: what is told to be left is what fits.
    WhatIsLeftIsWhatFits by NoFalseDenial = laws::what_is_left_is_what_fits,
    /// Law 3: `retry_after` and `reset_after` come true at the microsecond.
    RetryAfterIsHonest by HonestRetry = laws::retry_after_is_honest,
    /// Law 4: a denial writes nothing; or, where attempts are counted, charges.
    ADenialChargesNothing by DenialChargesNothing = laws::a_denial_charges_nothing,
    /// Law 5: a state that has expired decides as none does.
    ExpiredIsAbsent by ExpiredIsAbsent = laws::expired_is_absent,
    /// Law 6: a clock that goes back mints nothing.
    TimeGoingBackMintsNothing by TimeGoingBack = laws::time_going_back_mints_nothing,
    /// Law 6: whatever is asked, at whatever time and cost, nothing panics.
    NeverPanics by TimeGoingBack = laws::never_panics,
    /// Law 8: cost 0 writes nothing and shows what there is.
    CostZeroIsAPeek by CostZeroIsAPeek = laws::cost_zero_is_a_peek,
    /// Law 9: a state grows by no more entries than announced, and metadata change no decision.
    EntriesAndMetadataAreAccountedFor by NothingLeaks = shortcuts::entries_and_metadata_are_accounted_for,
    /// Law 10: the same state, time and cost come to the same.
    AStepDependsOnNothingElse by OneAnswerEverywhere = shortcuts::a_step_depends_on_nothing_else,
    /// Law 10: steps in place, small and quick ones say what the step says.
    ShortcutsAgreeWithTheStep by OneAnswerEverywhere = shortcuts::shortcuts_agree_with_the_step,
    /// Law 11: what another limit has left mints nothing and locks for no longer than a recovery.
    ChangingALimitIsSafe by ChangingALimit = laws::changing_a_limit_is_safe,
    /// Law 13: what is held is settled, renewed and taken back for what it is.
    AReservationIsSettledOnce by SettledOnce = shortcuts::a_reservation_is_settled_once,
    ;
    /// Law 10: the store says what the pure step says, to batches of several limits and keys, with ids and without.
    OneAnswerEverywhere by OneAnswerEverywhere = one_answer_everywhere,
    /// Law 1: many tasks at once are admitted as much as one after the other.
    ManyTasksAreAdmittedAsOne by Safety = many_tasks_are_admitted_as_one,
    /// Law 9: whatever is written goes away by itself.
    NothingLeaks by NothingLeaks = nothing_leaks,
    /// Law 14: at the store's own time it decides as at that time, and what was charged counts.
    DecidesByItsOwnClock by OwnClock = decides_by_its_own_clock,
}

/// A property of an algorithm that does not hold: how, and on what.
#[derive(Clone, Debug)]
pub struct AlgorithmFailure {
    /// The law, and how it was broken.
    pub violation: Violation,
    /// The smallest walk that was found, in words that [`algorithm_regression`] reads; of a store, what was asked.
    pub case: String,
    property: AlgorithmProperty,
}

impl fmt::Display for AlgorithmFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}\n\non the case\n{}", self.violation, self.case)?;
        if AlgorithmProperty::ALONE.contains(&self.property) {
            write!(
                f,
                "\nTo keep it as a test, with your harness:\n\n\
                 ratelimit_testkit::algorithm_regression::<Harness>(AlgorithmProperty::{:?}, {});\n",
                self.property,
                raw(&self.case)
            )?;
        }
        Ok(())
    }
}

/// The configuration of a test that keeps its failures there.
fn config(cases: u32, regressions: &'static str) -> Config {
    let more = std::env::var("PROPTEST_CASES").ok().and_then(|cases| cases.parse().ok());
    Config {
        cases: more.unwrap_or(cases),
        failure_persistence: Some(Box::new(FileFailurePersistence::Direct(regressions))),
        ..Config::default()
    }
}

/// The body of a test that [`algorithm_conformance!`](crate::algorithm_conformance) writes. Where the property has no
/// meaning for the algorithm, it says so on standard error, by the name of the test.
///
/// # Panics
/// If the property does not hold.
pub fn test_algorithm<T: AlgorithmHarness>(
    property: AlgorithmProperty,
    name: &'static str,
    regressions: &'static str,
) {
    let limits = T::limits();
    let any = |of: fn(&T::Algorithm) -> bool| limits.iter().any(|limit| of(&limit.algorithm));
    let lacking = match property {
        AlgorithmProperty::AReservationIsSettledOnce
            if !any(|limit| limit.reservation_us().is_some()) =>
        {
            Some("its charges cannot be held")
        }
        AlgorithmProperty::ChangingALimitIsSafe if limits.len() == 1 => {
            Some("there is only one limit, and none to change it to")
        }
        AlgorithmProperty::RefundsAndForcedChargesAreExact
            if !any(|limit| {
                let now = Timestamp::ZERO;
                limit.refund(None, now, 0).is_some() || limit.force(None, now, 0).is_some()
            }) =>
        {
            Some("it has neither refunds nor forced charges")
        }
        _ => None,
    };
    if let Some(lacking) = lacking {
        let name = name.split_once("::").map_or(name, |(_, name)| name);
        announce(&format!("{name} is skipped: {lacking}"));
        return;
    }
    let runner = TestRunner::new(config(T::CASES, regressions));
    if let Err(failure) = try_algorithm::<T>(property, runner) {
        panic!("{failure}\n(kept in {regressions})");
    }
}

/// The body of a test of a store of such limits.
///
/// # Panics
/// If the property does not hold.
pub fn test_algorithm_on<T: AlgorithmHarness, H: Harness<T::Algorithm>>(
    property: AlgorithmProperty,
    name: &'static str,
    regressions: &'static str,
) {
    let lacking = Able::of::<T::Algorithm, H>().lacking();
    if property == AlgorithmProperty::OneAnswerEverywhere && !lacking.is_empty() {
        let lacking: Vec<_> = lacking.iter().map(Capability::to_string).collect();
        let name = name.split_once("::").map_or(name, |(_, name)| name);
        announce(&format!(
            "{name}: the store lacks {}, and no law here asks for it",
            lacking.join(", ")
        ));
    }
    let runner = TestRunner::new(config(H::CASES, regressions));
    if let Err((violation, case)) = property.kept::<T, H>(&H::new(), runner) {
        let failure = AlgorithmFailure { violation, case, property };
        panic!("{failure}\n(kept in {regressions})");
    }
}

/// Tries a property of an algorithm by itself on the same `cases` walks every time.
///
/// # Errors
/// The walk on which the property does not hold.
pub fn try_same_algorithm<T: AlgorithmHarness>(
    property: AlgorithmProperty,
    cases: u32,
) -> Result<(), AlgorithmFailure> {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    try_algorithm::<T>(property, TestRunner::new_with_rng(config, rng))
}

/// Tries a property of an algorithm by itself on the walks that the runner makes up.
///
/// # Errors
/// The smallest walk found on which the property does not hold.
pub fn try_algorithm<T: AlgorithmHarness>(
    property: AlgorithmProperty,
    mut runner: TestRunner,
) -> Result<(), AlgorithmFailure> {
    let (limits, log) = (T::limits(), RefCell::default());
    // The log is that of the walk that was tried last, and what is told last is of the smallest that fails.
    let failing: RefCell<String> = RefCell::default();
    let outcome = runner.run(&paths(), |path| {
        failing_on::<T>(property, &limits, path, &log).map_err(|told| {
            failing.replace(log.borrow().clone());
            TestCaseError::fail(told)
        })
    });
    let told = match outcome {
        Ok(()) => return Ok(()),
        Err(TestError::Abort(reason) | TestError::Fail(reason, _)) => reason.to_string(),
    };
    let violation = Violation { law: property.law(), told };
    Err(AlgorithmFailure { violation, case: failing.into_inner(), property })
}

/// Tries a property on one walk. A panic breaks it.
fn failing_on<T: AlgorithmHarness>(
    property: AlgorithmProperty,
    limits: &[Instance<T::Algorithm>],
    path: Path,
    log: &RefCell<String>,
) -> Kept {
    let tried = std::panic::AssertUnwindSafe(|| {
        let mut walk = Walk::new(limits, path, log);
        property.alone::<T>(&mut walk)
    });
    std::panic::catch_unwind(tried).unwrap_or_else(|panic| {
        let told = panic.downcast_ref::<String>().map(String::as_str);
        let told = told.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("it panics: {}", told.unwrap_or("without a message")))
    })
}

/// Tries a property of a store of such limits on the same `cases` cases every time.
///
/// # Errors
/// The case on which the property does not hold.
pub fn try_same_algorithm_on<T: AlgorithmHarness, H: Harness<T::Algorithm>>(
    harness: &H,
    property: AlgorithmProperty,
    cases: u32,
) -> Result<(), AlgorithmFailure> {
    let config = Config { cases, failure_persistence: None, ..Config::default() };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let tried = property.kept::<T, H>(harness, TestRunner::new_with_rng(config, rng));
    tried.map_err(|(violation, case)| AlgorithmFailure { violation, case, property })
}

/// The body of a test that was made of an [`AlgorithmFailure`]: tries a property on a walk in words.
///
/// # Panics
/// If the property does not hold for the walk, or if the words cannot be read.
pub fn algorithm_regression<T: AlgorithmHarness>(property: AlgorithmProperty, case: &str) {
    let (limits, log) = (T::limits(), RefCell::default());
    let path = walk::read(case, &limits).unwrap_or_else(|error| panic!("{error}"));
    if let Err(told) = failing_on::<T>(property, &limits, path, &log) {
        let violation = Violation { law: property.law(), told };
        panic!("{}", AlgorithmFailure { violation, case: case.to_owned(), property });
    }
}
