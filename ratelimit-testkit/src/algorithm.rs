//! The laws for custom algorithms: see [`algorithm_conformance!`](crate::algorithm_conformance).

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use proptest::test_runner::TestRunner;
use ratelimit_core::algorithm::InMemory;
use ratelimit_core::{Algorithm, Limit, Timestamp};

use crate::capability::Able;
use crate::harness::{Harness, StoreClock};
use crate::law::{Failure, Law, LawResult};
use crate::pure::PureStore;
use crate::suite::{Property, announce, announce_lacking, config, guard, same, try_drawn, try_on};
use crate::trace::Trace;
use crate::trace::made::{Instance, Pool, TraceShape};
use walk::Walk;

mod beside;
mod laws;
mod macros;
mod shortcuts;
pub(crate) mod walk;

/// The harness of the reference store: a map and the pure step.
#[derive(Clone, Copy, Debug, Default)]
pub struct Reference;

impl<A: Algorithm> Harness<A> for Reference {
    type Store = PureStore<A>;

    fn new() -> Self {
        Self
    }

    fn store(&self) -> PureStore<A> {
        PureStore::new()
    }

    fn clock(&self, store: &PureStore<A>) -> StoreClock {
        store.clock().into()
    }

    async fn state(&self, store: &PureStore<A>, limit: &Limit<A>, key: &str) -> Option<A::State> {
        store.state(limit, key)
    }

    /// The reference store keeps expired states on purpose.
    async fn leaks(&self, _: &PureStore<A>, _: Duration) -> Vec<String> {
        Vec::new()
    }
}

/// What the laws need to know about an algorithm.
///
/// [`algorithm_conformance!`](crate::algorithm_conformance) builds one from a list of limits. Write
/// one by hand to state a bound over time or a recovery time.
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
    /// The algorithm under test. The text of its state shows whether it keeps the caller's
    /// metadata.
    type Algorithm: InMemory<State: fmt::Debug> + 'static;

    /// The number of walks on which each law is tried.
    const CASES: u32 = 256;

    /// The limits on which the laws are tried. Choose those that are most likely to go wrong: a
    /// limit of 1, a duration that does not divide another, the largest and the slowest limit that
    /// the algorithm accepts. With a single limit, the law on changing a limit has nothing to
    /// change to.
    fn limits() -> Vec<Instance<Self::Algorithm>>;

    /// Says how a request would break the algorithm's bound if it were admitted, given the requests
    /// admitted before, oldest first.
    ///
    /// Returns `None` if the bound holds or if no bound is known (the default). A request with a
    /// time before the last admitted one appears with the time of that one. Where attempts are
    /// counted, a denied attempt appears as admitted at cost 0.
    fn excess(
        limit: &Self::Algorithm,
        admitted: &[(Timestamp, u64)],
        at: Timestamp,
        cost: u64,
    ) -> Option<String> {
        let _ = (limit, admitted, at, cost);
        None
    }

    /// The longest time that a limit takes to recover from empty, in microseconds.
    ///
    /// By default the testkit measures it at ten times, on keys drained by one charge, by one
    /// forced charge and by a hundred charges in a row. Override it for an algorithm of several
    /// windows that takes longer to drain.
    fn recovers_within_us(limit: &Self::Algorithm) -> Option<u64> {
        let _ = limit;
        None
    }

    /// The times at which the algorithm is most likely to go wrong, in any order: the ends of a
    /// leap year's February, the days on which clocks change. None by default.
    ///
    /// Walks and traces begin at these times and shortly before them, and go on to the next ones, a
    /// microsecond before and after included. So every law is tried there, in a store as well:
    /// charges, expiry, and settlements of reservations across them. Without them a step that is
    /// wrong on one day in four years passes.
    #[must_use]
    fn unkind_times() -> Vec<Timestamp> {
        Vec::new()
    }

    /// The limits, as traces are made of them.
    #[doc(hidden)]
    #[allow(private_interfaces, reason = "of the testkit alone")]
    fn pool(able: Able) -> Pool<Self::Algorithm> {
        let mut unkind_us: Vec<_> = Self::unkind_times().iter().map(|at| at.as_us()).collect();
        unkind_us.sort_unstable();
        Pool {
            make: Rc::new(Self::limits),
            unkind_us: unkind_us.into(),
            some: [1, 4],
            changed: false,
            reserves: false,
            alone: false,
            able,
        }
    }
}

/// The limit that a harness names so.
pub(crate) fn find_limit<T: AlgorithmHarness>(
    text: &str,
) -> Result<Instance<T::Algorithm>, String> {
    let named = T::limits().into_iter().find(|limit| limit.text == text);
    named.ok_or_else(|| "it names no limit of the harness".to_owned())
}

/// Writes the properties of an algorithm.
macro_rules! properties {
    ($( $(#[$doc:meta])* $alone:ident by $law:ident = $module:ident::$function:ident, )+) => {
        /// A property of an algorithm alone: a law, or a special case of one, as a test.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum AlgorithmProperty {
            $( $(#[$doc])* $alone, )+
        }

        impl AlgorithmProperty {
            /// All properties.
            pub const ALL: &'static [Self] = &[$(Self::$alone),+];

            /// The law that the property tries.
            #[must_use]
            pub const fn law(self) -> Law {
                match self {
                    $( Self::$alone => Law::$law, )+
                }
            }

            /// Tries the property on a walk.
            fn holds_on<T: AlgorithmHarness>(self, walk: &mut Walk<'_, T::Algorithm>) -> LawResult {
                match self {
                    $( Self::$alone => $module::$function::<T>(walk), )+
                }
            }
        }
    };
}

properties! {
    /// Law 1: no moment admits more than the capacity, and no stretch of time more than
    /// [`AlgorithmHarness::excess`] allows.
    NeverAdmitsMoreThanItsBound by Safety = laws::never_admits_more_than_its_bound,
    /// Law 1: a refund returns at most its cost; a forced charge takes its cost or everything that
    /// is left.
    RefundsAndForcedChargesAreExact by Safety = laws::refunds_and_forced_charges_are_exact,
    /// Law 2: exactly the reported remaining units fit.
    WhatIsLeftIsWhatFits by NoFalseDenial = laws::what_is_left_is_what_fits,
    /// Law 3: `retry_after` and `reset_after` are exact to the microsecond.
    RetryAfterIsHonest by HonestRetry = laws::retry_after_is_honest,
    /// Law 4: a denial writes nothing or, where attempts are counted, charges the attempt.
    ADenialChargesNothing by DenialChargesNothing = laws::a_denial_charges_nothing,
    /// Law 5: an expired state decides as an absent one.
    ExpiredIsAbsent by ExpiredIsAbsent = laws::expired_is_absent,
    /// Law 6: a clock that goes back creates no capacity.
    TimeGoingBackMintsNothing by TimeGoingBack = laws::time_going_back_mints_nothing,
    /// Law 6: no state, time or cost causes a panic.
    NeverPanics by TimeGoingBack = laws::never_panics,
    /// Law 8: cost 0 writes nothing and reports the current state.
    CostZeroIsAPeek by CostZeroIsAPeek = laws::cost_zero_is_a_peek,
    /// Law 9: a state grows by no more entries than announced and expires when it stops mattering;
    /// metadata is kept, and changes no decision.
    EntriesAndMetadataAreAccountedFor by NothingLeaks = shortcuts::entries_and_metadata_are_accounted_for,
    /// Law 10: the same state, time and cost always give the same step.
    AStepDependsOnNothingElse by OneAnswerEverywhere = shortcuts::a_step_depends_on_nothing_else,
    /// Law 10: the in-place, compact and fast steps and what is owed agree with the general step.
    ShortcutsAgreeWithTheStep by OneAnswerEverywhere = shortcuts::shortcuts_agree_with_the_step,
    /// Law 11: a state left by another limit creates no capacity and blocks no longer than one
    /// recovery.
    ChangingALimitIsSafe by ChangingALimit = laws::changing_a_limit_is_safe,
    /// Law 11: refunds, forced charges and settlements of another limit forgive nothing that this
    /// one charged.
    AnotherLimitForgivesNothing by ChangingALimit = beside::another_limit_forgives_nothing,
    /// Laws 11 and 13: a settlement returns no more than was charged and still counts, also of a
    /// reservation that was extended, and after the limit has changed.
    SettlementsCreateNothing by SettledOnce = beside::settlements_create_nothing,
    /// Law 13: a reservation is settled, renewed and refunded for exactly what it charged.
    AReservationIsSettledOnce by SettledOnce = shortcuts::a_reservation_is_settled_once,
}

fn failure(property: AlgorithmProperty, message: String, case: String) -> Failure {
    let again = format!("algorithm_regression::<MyHarness>(AlgorithmProperty::{property:?}");
    Failure { law: property.law(), message, case, again }
}

/// The body of a test that [`algorithm_conformance!`](crate::algorithm_conformance) writes.
///
/// A property that does not apply to the algorithm is reported as skipped on standard error, under
/// the name of the test.
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
        | AlgorithmProperty::SettlementsCreateNothing
            if !limits.iter().any(Instance::can_reserve) =>
        {
            Some("its charges cannot be reserved")
        }
        AlgorithmProperty::ChangingALimitIsSafe
        | AlgorithmProperty::AnotherLimitForgivesNothing
            if limits.len() == 1 =>
        {
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
        announce(name, &format!(" is skipped: {lacking}"));
        return;
    }
    let runner = TestRunner::new(config(T::CASES, regressions));
    if let Err(failure) = try_algorithm::<T>(property, runner) {
        panic!("{failure}\n(kept in {regressions})");
    }
}

/// The body of a test of a store that keeps limits of this algorithm.
///
/// # Panics
/// If the property does not hold.
pub fn test_algorithm_on<T: AlgorithmHarness + 'static, H: Harness<T::Algorithm> + 'static>(
    property: Property,
    name: &'static str,
    regressions: &'static str,
) {
    if property == Property::Agrees {
        announce_lacking(name, Able::for_store::<T::Algorithm, H>());
    }
    guard::run(move || {
        let runner = TestRunner::new(config(H::CASES, regressions));
        if let Err(failure) = try_on::<T, H>(&H::new(), property, runner) {
            panic!("{failure}\n(kept in {regressions})");
        }
    });
}

/// Tries a property of an algorithm alone on the same `cases` walks every time.
///
/// # Errors
/// The walk on which the property does not hold.
pub fn try_same_algorithm<T: AlgorithmHarness>(
    property: AlgorithmProperty,
    cases: u32,
) -> Result<(), Failure> {
    try_algorithm::<T>(property, same(cases))
}

/// Tries a property of an algorithm alone on walks that the runner generates.
///
/// # Errors
/// The smallest walk found on which the property does not hold.
pub(crate) fn try_algorithm<T: AlgorithmHarness>(
    property: AlgorithmProperty,
    runner: TestRunner,
) -> Result<(), Failure> {
    let walks_of = Pool { some: [1, 2], alone: true, ..T::pool(Able::ALONE) };
    let walks = walks_of.traces(TraceShape { requests: 30, ..TraceShape::ANY });
    let unkind_us = &walks_of.unkind_us;
    let outcome = try_drawn(runner, &walks, &|trace| failing_on::<T>(property, trace, unkind_us));
    outcome.map_err(|(message, case)| failure(property, message, case))
}

/// Tries a property on one walk. A panic counts as a broken property.
fn failing_on<T: AlgorithmHarness>(
    property: AlgorithmProperty,
    trace: &Trace<T::Algorithm>,
    unkind_us: &[u64],
) -> LawResult {
    let tried =
        std::panic::AssertUnwindSafe(|| property.holds_on::<T>(&mut Walk::new(trace, unkind_us)));
    std::panic::catch_unwind(tried).unwrap_or_else(|panic| {
        let message = panic.downcast_ref::<String>().map(String::as_str);
        let message = message.or_else(|| panic.downcast_ref::<&str>().copied());
        Err(format!("it panics: {}", message.unwrap_or("without a message")))
    })
}

/// Tries a property of a store of such limits on the same `cases` cases every time.
///
/// # Errors
/// The case on which the property does not hold.
pub fn try_same_algorithm_on<T: AlgorithmHarness, H: Harness<T::Algorithm>>(
    harness: &H,
    property: Property,
    cases: u32,
) -> Result<(), Failure> {
    try_on::<T, H>(harness, property, same(cases))
}

/// The body of a regression test made from a [`Failure`]: tries a property on a walk given as text.
///
/// # Panics
/// If the property does not hold for the walk, or if the text cannot be parsed.
pub fn algorithm_regression<T: AlgorithmHarness>(property: AlgorithmProperty, case: &str) {
    let trace = Trace::read(case, find_limit::<T>).unwrap_or_else(|error| panic!("{error}"));
    let unkind_us = T::pool(Able::ALONE).unkind_us;
    if let Err(message) = failing_on::<T>(property, &trace, &unkind_us) {
        panic!("{}", failure(property, message, case.to_owned()));
    }
}
