//! [`conformance!`](crate::conformance), which writes the tests.

/// Writes the tests that hold a backend to the laws: `conformance!(name, Harness);`
///
/// The macro expands to a module of that name, with a test per algorithm of whole histories, such
/// as `name::agrees_on::gcra`, and one for each thing that such histories cannot show. See
/// [`Harness`](crate::Harness) for the second argument.
///
/// `conformance!(name, Harness, batches);` tries batches over several algorithms only, which need
/// every command of a store: for another way to a store that is tested as a whole elsewhere, such
/// as by another client.
///
/// A failing test prints its case as a call of [`regression`](crate::regression): paste it as a
/// named test. Until the case is fixed, its seed under `proptest-regressions/` of the calling crate
/// tries it first.
#[macro_export]
macro_rules! conformance {
    ($name:ident, $harness:ty) => {
        mod $name {
            #[allow(unused_imports, reason = "the harness may be named by a path")]
            use super::*;
            type Harnessed = $harness;

            mod agrees_on {
                type Harnessed = super::Harnessed;
                $crate::__each_algorithm!([$crate::__tests] $name, [Agrees, AgreesAfterAChange],);
                $crate::__tests!($name, [Agrees, AgreesAfterAChange], [
                    batches [Mixed]
                    reservations [Reservations]
                ]);
            }
            $crate::__tests!($name, [ManyTasksAreAdmittedExactlyTheLimit], [
                many_tasks_are_admitted_exactly_the_limit [singles]
                many_tasks_are_admitted_exactly_both_limits [Mixed]
            ]);
            $crate::__tests!($name, [DecidesByItsOwnClock], [
                it_decides_by_its_own_clock [singles]
                it_decides_batches_by_its_own_clock [Mixed]
                it_decides_reservations_by_its_own_clock [Reservations]
            ]);
            $crate::__tests!($name, [KeepsWhatMatters], [
                it_keeps_what_matters_and_no_longer [all]
            ]);
            $crate::__tests!($name, [IdentifiersNeverMeet], [
                two_identifiers_never_meet [singles]
            ]);
            $crate::__tests!($name, [ItCanDoWhatItClaims], [
                it_can_do_what_it_claims [singles]
            ]);
        }
    };
    ($name:ident, $harness:ty, batches) => {
        mod $name {
            #[allow(unused_imports, reason = "the harness may be named by a path")]
            use super::*;
            type Harnessed = $harness;

            $crate::__tests!($name, [Agrees, AgreesAfterAChange], [
                it_agrees_on_batches [Mixed]
                it_agrees_on_reservations [Reservations]
            ]);
            $crate::__tests!($name, [ManyTasksAreAdmittedExactlyTheLimit], [
                many_tasks_are_admitted_exactly_both_limits [Mixed]
            ]);
            $crate::__tests!($name, [DecidesByItsOwnClock], [
                it_decides_batches_by_its_own_clock [Mixed]
            ]);
            $crate::__tests!($name, [KeepsWhatMatters], [
                it_keeps_what_matters_and_no_longer [Mixed]
            ]);
        }
    };
}

/// Tests of these properties, each on the limits that stand beside its name.
#[doc(hidden)]
#[macro_export]
macro_rules! __tests {
    ($name:ident, $properties:tt, [$($test:ident $scope:tt)+]) => {
        $( $crate::__tests!(@one $name, $properties, $test, $scope); )+
    };
    ($name:ident, $properties:tt, $($test:ident: $kind:ident),+) => {
        $( $crate::__tests!(@one $name, $properties, $test, [of($kind)]); )+
    };
    (@one $name:ident, [$($property:ident),+], $test:ident, $scope:tt) => {
        #[test]
        fn $test() {
            $crate::test::<Harnessed>(
                &[$($crate::Property::$property),+],
                &$crate::__tests!(@scopes $scope),
                concat!(module_path!(), "::", stringify!($test)),
                concat!(
                    env!("CARGO_MANIFEST_DIR"), "/proptest-regressions/",
                    stringify!($name), "/", stringify!($test), ".txt",
                ),
            );
        }
    };
    (@scopes [of($kind:ident)]) => { $crate::Scope::for_kind($crate::AlgorithmKind::$kind) };
    (@scopes [Mixed]) => { [$crate::Scope::Mixed] };
    (@scopes [Reservations]) => { [$crate::Scope::Reservations] };
    (@scopes [$all:ident]) => { $crate::Scope::$all() };
}
