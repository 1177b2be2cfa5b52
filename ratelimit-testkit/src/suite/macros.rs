//! [`conformance!`](crate::conformance), which writes the tests.

/// Writes the tests that hold a backend to the laws: `conformance!(name, Harness);`
///
/// The macro expands to a module of that name. It has a submodule per algorithm, one per algorithm that counts
/// attempts and one for batches over several algorithms. Each has a test per law:
/// `name::gcra::a_denial_charges_nothing`, `name::gcra_attempts::every_attempt_is_charged`. See
/// [`Harness`](crate::Harness) for the second argument.
///
/// `conformance!(name, Harness, attempts);` is for a store that only charges attempts
/// [increment-first](crate::AlgorithmKind::INCREMENT_FIRST): it tests these algorithms only, and batches over
/// several of them.
///
/// `conformance!(name, Harness, mixed);` and `conformance!(name, Harness, mixed_attempts);` test batches over several algorithms only:
/// for another way to a store that is tested as a whole elsewhere, such as by another client.
///
/// A failing test prints its case as a call of [`regression`](crate::regression): paste it as a named test. Until the case
/// is fixed, its seed under `proptest-regressions/` of the calling crate tries it first.
#[macro_export]
macro_rules! conformance {
    ($name:ident, $harness:ty) => {
        mod $name {
            #[allow(unused_imports, reason = "the harness may be named by a path")]
            use super::*;
            type Harnessed = $harness;

            $crate::__tests!($name, gcra, [One(Gcra)], [each keys admissions small buckets reservations]);
            $crate::__tests!($name, token_bucket, [One(TokenBucket)],
                [each keys admissions small buckets reservations]);
            $crate::__tests!($name, fixed_window, [One(FixedWindow)],
                [each keys admissions small reservations]);
            $crate::__tests!($name, first_request_window, [One(FirstRequestWindow)],
                [each keys admissions small]);
            $crate::__tests!($name, window_log, [One(WindowLog)], [each keys admissions small]);
            $crate::__tests!($name, bucketed_window, [One(BucketedWindow)],
                [each keys admissions small]);
            $crate::__tests!($name, sliding_counter, [One(SlidingCounter)],
                [each keys admissions small]);
            $crate::__tests!($name, sliding_log, [One(SlidingLog)], [each keys admissions small]);
            $crate::__tests!($name, concurrency, [One(Concurrency)], [each keys admissions small reservations]);
            $crate::__tests!($name, mixed, [Mixed], [each admissions attempts reservations]);
            $crate::__tests!($name, gcra_attempts, [Attempts(Gcra)], [each attempts small buckets]);
            $crate::__tests!($name, token_bucket_attempts, [Attempts(TokenBucket)],
                [each attempts small buckets]);
            $crate::__tests!($name, sliding_counter_attempts, [Attempts(SlidingCounter)],
                [each attempts small]);
            $crate::__tests!(@increment_first $name, [each attempts small]);
        }
    };
    ($name:ident, $harness:ty, attempts) => {
        mod $name {
            #[allow(unused_imports, reason = "the harness may be named by a path")]
            use super::*;
            type Harnessed = $harness;

            $crate::__tests!(@increment_first $name, [each keys attempts small]);
            $crate::__tests!($name, mixed_attempts, [MixedAttempts], [each attempts]);
        }
    };
    ($name:ident, $harness:ty, mixed) => {
        mod $name {
            #[allow(unused_imports, reason = "the harness may be named by a path")]
            use super::*;
            type Harnessed = $harness;

            $crate::__tests!($name, mixed, [Mixed], [each admissions attempts reservations]);
        }
    };
    ($name:ident, $harness:ty, mixed_attempts) => {
        mod $name {
            #[allow(unused_imports, reason = "the harness may be named by a path")]
            use super::*;
            type Harnessed = $harness;

            $crate::__tests!($name, mixed_attempts, [MixedAttempts], [each attempts]);
        }
    };
}

/// A module of tests: for these limits, the sets of laws that apply to them.
#[doc(hidden)]
#[macro_export]
macro_rules! __tests {
    (@increment_first $name:ident, $sets:tt) => {
        $crate::__tests!($name, fixed_window_attempts, [Attempts(FixedWindow)], $sets);
        $crate::__tests!($name, first_request_window_attempts, [Attempts(FirstRequestWindow)],
            $sets);
        $crate::__tests!($name, window_log_attempts, [Attempts(WindowLog)], $sets);
        $crate::__tests!($name, bucketed_window_attempts, [Attempts(BucketedWindow)], $sets);
        $crate::__tests!($name, sliding_log_attempts, [Attempts(SlidingLog)], $sets);
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
            (decides_by_its_own_clock, DecidesByItsOwnClock)
            (it_can_do_what_it_claims, ItCanDoWhatItClaims)
        ]);
    };
    // Once per way to keep a state: a limit that counts attempts keeps its states as one that does not.
    (keys, $($of:tt)+) => {
        $crate::__test!($($of)+, [(similar_keys_never_meet, SimilarKeysNeverMeet)]);
    };
    // For limits that count admissions.
    (admissions, $($of:tt)+) => {
        $crate::__test!($($of)+, [
            (a_denial_charges_nothing, ADenialChargesNothing)
            (all_or_nothing, AllOrNothing)
        ]);
    };
    // For limits that count attempts.
    (attempts, $($of:tt)+) => {
        $crate::__test!($($of)+, [(every_attempt_is_charged, EveryAttemptIsCharged)]);
    };
    // For limits whose charges can be reserved.
    (reservations, $($of:tt)+) => {
        $crate::__test!($($of)+, [
            (a_reservation_is_settled_once, AReservationIsSettledOnce)
            (reservations_agree, ReservationsAgree)
            (reservations_leak_nothing, ReservationsLeakNothing)
        ]);
    };
    // Batches of several limits are too many to enumerate.
    (small, $($of:tt)+) => {
        $crate::__test!($($of)+, [
            (every_small_trace_agrees_with_the_oracle, EverySmallTraceAgreesWithTheOracle)
        ]);
    };
    // For the two buckets that the law compares.
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
                concat!(module_path!(), "::", stringify!($test)),
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
        $crate::Scope::$scope($crate::AlgorithmKind::$kind)
    };
    ([$scope:ident]) => {
        $crate::Scope::$scope
    };
}
