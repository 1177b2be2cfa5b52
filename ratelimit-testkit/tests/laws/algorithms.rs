//! The laws hold for the built-in algorithms, for wrappers around them, and for a custom algorithm.

use ratelimit_core::{
    Algorithm, Attempts, BucketedWindow, Concurrency, Decision, FirstRequestWindow, FixedWindow,
    Gcra, InMemory, Policy, Rate, SlidingCounter, SlidingLog, Stack, Step, Timestamp, TokenBucket,
    WindowLog, Write,
};
use ratelimit_testkit::{AlgorithmHarness, Instance, algorithm_conformance};

fn rate(text: &str) -> Rate {
    text.parse().expect("a rate")
}

fn gcra(text: &str, burst: u64) -> Gcra {
    Gcra::new(rate(text), burst).expect("a limit")
}

fn tokens(text: &str, burst: u64) -> TokenBucket {
    TokenBucket::new(rate(text), burst).expect("a limit")
}

fn fixed(text: &str) -> FixedWindow {
    FixedWindow::new(rate(text)).expect("a limit")
}

fn first(text: &str) -> FirstRequestWindow {
    FirstRequestWindow::new(rate(text)).expect("a limit")
}

fn list(text: &str) -> WindowLog {
    WindowLog::new(rate(text)).expect("a limit")
}

fn buckets(bucket_us: u64, rates: &[&str]) -> BucketedWindow {
    let rates: Vec<_> = rates.iter().map(|text| rate(text)).collect();
    BucketedWindow::new(bucket_us, &rates).expect("a limit")
}

fn counter(text: &str) -> SlidingCounter {
    SlidingCounter::new(rate(text)).expect("a limit")
}

fn log(text: &str) -> SlidingLog {
    SlidingLog::new(rate(text)).expect("a limit")
}

fn leases(text: &str) -> Concurrency {
    Concurrency::new(rate(text)).expect("a limit")
}

fn stack<A: InMemory>(limits: impl IntoIterator<Item = A>) -> Stack<A> {
    Stack::new(limits).expect("a stack")
}

algorithm_conformance!(
    gcra_alone,
    Gcra,
    [gcra("1/s", 1), gcra("3/s", 4), gcra("2/3us", 3), gcra("1000003/30d", 1_000_003)]
);
algorithm_conformance!(
    token_bucket_alone,
    TokenBucket,
    [tokens("1/s", 1), tokens("3/s", 4), tokens("2/3us", 3)]
);
algorithm_conformance!(
    fixed_window_alone,
    FixedWindow,
    [fixed("1/s"), fixed("7/5m"), fixed("2/3us"), fixed("5/d")]
);
algorithm_conformance!(
    first_request_window_alone,
    FirstRequestWindow,
    [first("1/s"), first("7/5m"), first("2/3us")]
);
algorithm_conformance!(window_log_alone, WindowLog, [list("1/s"), list("7/5m"), list("2/3us")]);
algorithm_conformance!(
    bucketed_window_alone,
    BucketedWindow,
    [buckets(1_000, &["4/4ms", "6/12ms"]), buckets(1, &["2/3us"])]
);
/// The sliding counter, which takes two windows to recover from a charge at the beginning of the first.
struct Counters;

impl AlgorithmHarness for Counters {
    type Algorithm = Policy;

    fn limits() -> Vec<Instance<Policy>> {
        let counters = ["1/s", "7/5m", "5/7us"].map(|rate| Policy::from(counter(rate)));
        let tries = Policy::from(Attempts::new(counter("5/7us")));
        let all = counters.into_iter().chain([tries]);
        all.map(|policy| Instance::new(policy.to_string(), policy)).collect()
    }

    fn recovers_within_us(limit: &Policy) -> Option<u64> {
        match limit {
            Policy::SlidingCounter(counter) => Some(2 * counter.window_us()),
            Policy::SlidingCounterAttempts(counter) => Some(2 * counter.algorithm().window_us()),
            _ => None,
        }
    }
}

algorithm_conformance!(sliding_counter_alone, Counters);
algorithm_conformance!(sliding_log_alone, SlidingLog, [log("1/s"), log("7/5m"), log("4/8us")]);
algorithm_conformance!(
    concurrency_alone,
    Concurrency,
    [leases("1/s"), leases("3/30s"), leases("3/6us")]
);
algorithm_conformance!(
    attempts_alone,
    Policy,
    [
        Attempts::new(gcra("3/s", 4)).into(),
        Attempts::new(fixed("7/5m")).into(),
        Attempts::new(first("2/3us")).into(),
        Attempts::new(list("3/s")).into(),
        Attempts::new(buckets(1_000, &["4/4ms", "6/12ms"])).into(),
        Attempts::new(log("4/8us")).into(),
    ]
);
algorithm_conformance!(
    stack_alone,
    Stack<Gcra>,
    [stack([gcra("10/s", 10), gcra("120/m", 12)]), stack([gcra("3/s", 4), gcra("1/s", 9)])]
);
algorithm_conformance!(
    mixed_stack_alone,
    Stack<Policy>,
    [
        stack([Policy::from(gcra("3/s", 4)), fixed("7/5m").into(), log("4/8us").into()]),
        stack([Policy::from(first("3/s")), leases("3/30s").into()]),
    ]
);

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
