//! The laws hold for the built-in algorithms and for a custom one. Stacks of them are tried in
//! memory.

use ratelimit_core::algorithm::{InMemory, Step, Write};
use ratelimit_core::{Algorithm, AnyAlgorithm, Decision, Lockout, Timestamp};
use ratelimit_testkit::{AlgorithmHarness, AlgorithmKind, Instance, algorithm_conformance};

/// A charge at the beginning of a sliding counter's window fades until the end of the next one.
fn recovers_within_us(algorithm: &AnyAlgorithm) -> Option<u64> {
    match algorithm {
        AnyAlgorithm::SlidingCounter(counter) => Some(2 * counter.window_us()),
        // A window may be remembered for longer than the block that it begins.
        AnyAlgorithm::Lockout(lockout) => {
            Some((lockout.longest_us() + lockout.forget_us()).max(lockout.window_us()))
        }
        _ => None,
    }
}

/// Writes a harness of these limits, with the recovery of their algorithms. What they admit over
/// time, the oracle counts.
macro_rules! harness {
    ($harness:ident of $algorithm:ty, $limits:expr) => {
        pub(super) struct $harness;

        impl AlgorithmHarness for $harness {
            type Algorithm = $algorithm;

            fn limits() -> Vec<Instance<$algorithm>> {
                $limits
            }

            fn recovers_within_us(limit: &$algorithm) -> Option<u64> {
                recovers_within_us(&(*limit).into())
            }
        }
    };
}

/// The laws for each algorithm by its own type, on the seeds of its kind.
macro_rules! alone {
    ($($name:ident: $algorithm:ident),+) => { $(
        mod $name {
            use super::*;
            use ratelimit_core::$algorithm;

            harness!(Seeds of $algorithm, {
                let own = |algorithm: AnyAlgorithm| match algorithm {
                    AnyAlgorithm::$algorithm(limit) => Instance::new(algorithm.to_string(), limit),
                    other => unreachable!("{other}"),
                };
                AlgorithmKind::$algorithm.seeds().into_iter().map(own).collect()
            });

            algorithm_conformance!(alone, Seeds);
        }
    )+ };
}

ratelimit_testkit::__each_algorithm!([alone]);

// Windows of calendars, at the times at which those go wrong.
algorithm_conformance!(calendars, ratelimit_testkit::Calendars);

// Limits that count attempts, and some that do not, of any algorithm.
harness!(AnyAlgorithms of AnyAlgorithm, {
    let attempts = AlgorithmKind::ATTEMPTS.iter().flat_map(|kind| kind.seeds());
    let attempts = attempts.filter(|algorithm| algorithm.debt() == 0);
    let attempts = attempts.map(|algorithm| Instance::from(algorithm).count_attempts());
    let others = AlgorithmKind::ALL.iter().filter_map(|kind| kind.seeds().pop());
    attempts.chain(others.map(Instance::from)).collect()
});

algorithm_conformance!(any_algorithm, AnyAlgorithms);

// The ends of the range, at which a store's clock would reach the end of time.
harness!(LargestLockouts of Lockout, {
    let words = [
        "2/4503599627370495us block 1us factor 2 longest 26062d forget 26062d",
        "3/4503599627370495us block 1us factor 4503599627370495 longest 1d forget 52123d",
        "4503599627370495/s block 1s factor 1000000 longest 1d forget 52123d",
    ];
    words.map(|words| Instance::new(words, words.parse().expect("a lockout"))).into()
});

algorithm_conformance!(largest_lockouts, LargestLockouts);

/// A fixed number of admissions, once and for all.
struct OnceEver(u64);

impl Algorithm for OnceEver {
    type State = u64;

    fn capacity(&self) -> u64 {
        self.0
    }

    fn step(&self, state: Option<&u64>, _now: Timestamp, cost: u64) -> Step<u64> {
        let used = state.copied().unwrap_or_default();
        let left = self.0.saturating_sub(used);
        let allowed = cost <= left;
        let charged = if allowed { cost } else { 0 };
        let write = match charged {
            0 => Write::Keep,
            _ => Write::Put { state: used + charged, expires: Timestamp::MAX },
        };
        let (limit, remaining) = (self.0, left - charged);
        let retry_after_us = allowed.then_some(0);
        let decision = Decision {
            allowed,
            cost,
            limit,
            remaining,
            retry_after_us,
            replenish_after_us: 0,
            reset_after_us: 0,
        };
        Step { decision, write }
    }
}

impl InMemory for OnceEver {}

algorithm_conformance!(once_ever, OnceEver, [OnceEver(1), OnceEver(10), OnceEver(u64::MAX)]);
