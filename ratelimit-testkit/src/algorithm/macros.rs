//! [`algorithm_conformance!`](crate::algorithm_conformance), which writes the tests.

/// Writes the tests that hold a custom algorithm to the laws, alone and in a store:
///
/// ```
/// use ratelimit_core::{Algorithm, Decision, Timestamp};
/// use ratelimit_core::algorithm::{InMemory, Step, Write};
/// use ratelimit_testkit::algorithm_conformance;
///
/// /// A fixed number of admissions, once and for all.
/// pub struct OnceEver(pub u64);
///
/// impl Algorithm for OnceEver {
///     type State = u64;
///     fn capacity(&self) -> u64 { self.0 }
///     fn step(&self, state: Option<&u64>, _now: Timestamp, cost: u64) -> Step<u64> {
///         let used = state.copied().unwrap_or(0);
///         let left = self.0.saturating_sub(used);
///         let allowed = cost <= left;
///         let charged = if allowed { cost } else { 0 };
///         let write = match charged {
///             0 => Write::Keep,
///             _ => Write::Put { state: used + charged, expires: Timestamp::MAX },
///         };
///         let decision = Decision {
///             allowed, cost, limit: self.0, remaining: left - charged,
///             retry_after_us: allowed.then_some(0), replenish_after_us: 0, reset_after_us: 0,
///         };
///         Step { decision, write }
///     }
/// }
/// impl InMemory for OnceEver {}
///
/// // Limits of 1, of 10, and of as many as there can be.
/// algorithm_conformance!(once_ever, OnceEver, [OnceEver(1), OnceEver(10), OnceEver(u64::MAX)]);
/// # fn main() {}
/// ```
///
/// The macro expands to a module of that name with a test per law, such as
/// `once_ever::a_denial_charges_nothing`. Its submodule `in_the_reference_store` tests batches, ids
/// and concurrent tasks.
///
/// `algorithm_conformance!(name, MyHarness);` takes an
/// [`AlgorithmHarness`](crate::AlgorithmHarness) instead, which can state more. After either form,
/// `on MyStoreHarness` replaces the reference store by your own, a
/// [`Harness<OnceEver>`](crate::Harness), in the submodule `in_its_store`:
///
/// ```
/// # use ratelimit_core::FixedWindow;
/// # use ratelimit_testkit::{Reference, algorithm_conformance};
/// algorithm_conformance!(
///     windows,
///     FixedWindow,
///     [FixedWindow::new("3/s".parse().unwrap()).unwrap(), FixedWindow::new("7/5m".parse().unwrap()).unwrap()],
///     on Reference
/// );
/// # fn main() {}
/// ```
///
/// A test that does not apply to the algorithm, such as one of reservations where charges cannot be
/// reserved, reports itself as skipped on standard error, by its name. A failing test prints its
/// case as a call of [`algorithm_regression`](crate::algorithm_regression): paste it as a named
/// test. Until the case is fixed, its seed under `proptest-regressions/` of the calling crate tries
/// it first.
#[macro_export]
macro_rules! algorithm_conformance {
    ($name:ident, $algorithm:ty, [$($limit:expr),+ $(,)?] $(, on $harness:ty)?) => {
        mod $name {
            #[allow(unused_imports, reason = "the limits may be named by a path")]
            use super::*;

            /// The limits on which the laws are tried.
            pub(super) struct Limits;

            impl $crate::AlgorithmHarness for Limits {
                type Algorithm = $algorithm;

                fn limits() -> ::std::vec::Vec<$crate::Instance<$algorithm>> {
                    ::std::vec![$( $crate::Instance::new(stringify!($limit), $limit) ),+]
                }
            }

            $crate::__algorithm_tests!($name, Limits $(, $harness)?);
        }
    };
    ($name:ident, $limits:ty $(, on $harness:ty)?) => {
        mod $name {
            #[allow(unused_imports, reason = "the harness may be named by a path")]
            use super::*;
            type Limits = $limits;

            $crate::__algorithm_tests!($name, Limits $(, $harness)?);
        }
    };
}

/// The tests of an algorithm alone and in a store.
#[doc(hidden)]
#[macro_export]
macro_rules! __algorithm_tests {
    ($name:ident, $limits:ident) => {
        $crate::__algorithm_tests!(@alone $name, $limits);
        mod in_the_reference_store {
            type Harnessed = $crate::Reference;
            $crate::__algorithm_tests!(@kept $name, in_the_reference_store);
        }
    };
    ($name:ident, $limits:ident, $harness:ty) => {
        type Harnessed = $harness;
        $crate::__algorithm_tests!(@alone $name, $limits);
        mod in_its_store {
            type Harnessed = super::Harnessed;
            $crate::__algorithm_tests!(@kept $name, in_its_store);
        }
    };
    (@alone $name:ident, $limits:ident) => {
        $crate::__algorithm_test!(test_algorithm::<[$limits]>, AlgorithmProperty, $name, "", [
            (never_admits_more_than_its_bound, NeverAdmitsMoreThanItsBound)
            (refunds_and_forced_charges_are_exact, RefundsAndForcedChargesAreExact)
            (what_is_left_is_what_fits, WhatIsLeftIsWhatFits)
            (retry_after_is_honest, RetryAfterIsHonest)
            (a_denial_charges_nothing, ADenialChargesNothing)
            (expired_is_absent, ExpiredIsAbsent)
            (time_going_back_mints_nothing, TimeGoingBackMintsNothing)
            (never_panics, NeverPanics)
            (cost_zero_is_a_peek, CostZeroIsAPeek)
            (entries_and_metadata_are_accounted_for, EntriesAndMetadataAreAccountedFor)
            (a_step_depends_on_nothing_else, AStepDependsOnNothingElse)
            (shortcuts_agree_with_the_step, ShortcutsAgreeWithTheStep)
            (changing_a_limit_is_safe, ChangingALimitIsSafe)
            (another_limit_forgives_nothing, AnotherLimitForgivesNothing)
            (settlements_create_nothing, SettlementsCreateNothing)
            (a_reservation_is_settled_once, AReservationIsSettledOnce)
        ]);
    };
    (@kept $name:ident, $module:ident) => {
        $crate::__algorithm_test!(test_algorithm_on::<[super::Limits, Harnessed]>, Property, $name, concat!("/", stringify!($module)), [
            (it_agrees, Agrees)
            (it_agrees_after_a_change, AgreesAfterAChange)
            (many_tasks_are_admitted_exactly_the_limit, ManyTasksAreAdmittedExactlyTheLimit)
            (it_keeps_what_matters_and_no_longer, KeepsWhatMatters)
            (it_decides_by_its_own_clock, DecidesByItsOwnClock)
        ]);
    };
}

/// Tests of these properties by this function.
#[doc(hidden)]
#[macro_export]
macro_rules! __algorithm_test {
    ($try:ident::<$of:tt>, $properties:ident, $name:ident, $module:expr, [$($test:tt)*]) => {
        $( $crate::__algorithm_test!(@one $try, $of, $properties, $name, $module, $test); )*
    };
    (@one $try:ident, [$($of:ty),+], $properties:ident, $name:ident, $module:expr, ($test:ident, $property:ident)) => {
        #[test]
        fn $test() {
            $crate::$try::<$($of),+>(
                $crate::$properties::$property,
                concat!(module_path!(), "::", stringify!($test)),
                concat!(
                    env!("CARGO_MANIFEST_DIR"), "/proptest-regressions/",
                    stringify!($name), $module, "/", stringify!($test), ".txt",
                ),
            );
        }
    };
}
