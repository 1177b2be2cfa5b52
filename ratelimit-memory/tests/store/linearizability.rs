//! Concurrent runs, each checked for an order that explains all verdicts: see the testkit's `ConcurrentRun`.

use std::cell::Cell;
use std::time::Duration;

use ratelimit_core::{
    Attempts, BucketedWindow, Clock, Concurrency, FirstRequestWindow, FixedWindow, Gcra, InMemory,
    Limit, ManualClock, Policy, Rate, SlidingCounter, SlidingLog, Timestamp, TokenBucket,
    WindowLog,
};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::{ConcurrentRun, Linearized};

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

/// A clock that sometimes yields after it has been read, so that a decision uses an old reading.
#[derive(Clone)]
struct Slow(ManualClock);

thread_local!(static READINGS: Cell<u32> = const { Cell::new(0) });

impl Clock for Slow {
    fn now(&self) -> Timestamp {
        let now = self.0.now();
        let readings = READINGS.get().wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
        READINGS.set(readings);
        if readings >> 30 == 0 {
            std::thread::yield_now();
        }
        now
    }
}

fn rate(text: &str) -> Rate {
    text.parse().expect("a rate")
}

fn gcra(text: &str, burst: u64) -> Gcra {
    Gcra::new(rate(text), burst).expect("a limit")
}

fn named<A: InMemory>(limits: impl IntoIterator<Item = A>) -> Vec<Limit<A>> {
    let named = limits.into_iter().enumerate();
    named.map(|(n, limit)| Limit::new(&format!("l{n}"), limit).expect("a name")).collect()
}

/// Checks that all histories of a run are linearizable, in a store that sees the clock as it is, and in one
/// that sees it late.
fn explained<A: InMemory<State: PartialEq>>(run: &ConcurrentRun<'_, A>) -> Linearized {
    let builder = || MemoryStore::builder().capacity(1 << 16).shards(4);
    let clock = ManualClock::new(BEGIN);
    let store = builder().clock(clock.clone()).build();
    let seen = run.run(&store, &clock).unwrap_or_else(|error| panic!("{error}"));
    let late = builder().clock(Slow(clock.clone())).build();
    let seen_late = run.run(&late, &clock).unwrap_or_else(|error| panic!("late: {error}"));
    assert_eq!((store.overflowed(), late.overflowed()), (0, 0));
    let requests = seen.requests + seen_late.requests;
    assert_eq!(requests, 2 * run.threads * run.rounds * run.requests);
    Linearized {
        requests,
        admitted: seen.admitted + seen_late.admitted,
        overlapping: seen.overlapping + seen_late.overlapping,
        undecided: seen.undecided + seen_late.undecided,
    }
}

/// Checks the same by two, four and eight threads, on few keys and on many.
fn all_explained<A: InMemory<State: PartialEq>>(run: &ConcurrentRun<'_, A>) {
    for (threads, requests) in [(2, 12), (4, 8), (8, 5)] {
        for keys in [1, 3, 24] {
            let drawn = run.seed + (threads * 1_000 + keys) as u64;
            let run = ConcurrentRun { threads, requests, keys, seed: drawn, ..*run };
            let seen = explained(&run);
            println!("{threads} threads, {keys} keys: {seen:?}");
            // A history may be too long to check, but not every other one.
            assert!(seen.undecided * 100 <= run.rounds, "{seen:?}");
            assert!(seen.admitted * 4 > seen.requests, "{seen:?}");
        }
    }
}

#[test]
fn one_limit_in_buckets_is_linearizable() {
    let limits = named([gcra("10/s", 5)]);
    let run =
        ConcurrentRun { reservations: false, batch: 1, rounds: 150, ..ConcurrentRun::new(&limits) };
    all_explained(&run);
}

#[test]
fn one_limit_that_denies_nearly_everything_is_linearizable() {
    let limits = named([gcra("1/h", 4)]);
    let run =
        ConcurrentRun { reservations: false, batch: 1, rounds: 150, ..ConcurrentRun::new(&limits) };
    for threads in [2, 4, 8] {
        let seen = explained(&ConcurrentRun { threads, keys: 1, ..run });
        assert_eq!(seen.undecided, 0);
    }
}

#[test]
fn batches_and_reservations_in_buckets_are_linearizable() {
    // The last limit's states no longer fit into a bucket once enough has been charged.
    let limits = named([gcra("10/s", 5), gcra("1000/s", 3), gcra("3/s", 2), gcra("1/30d", 4)]);
    all_explained(&ConcurrentRun { rounds: 100, ..ConcurrentRun::new(&limits) });
}

#[test]
fn states_that_expire_all_the_time_are_linearizable() {
    let limits = named([gcra("1000000/s", 3), gcra("3/us", 40)]);
    let step = Duration::from_micros(4);
    all_explained(&ConcurrentRun { step, rounds: 150, ..ConcurrentRun::new(&limits) });
}

#[test]
fn windows_in_buckets_are_linearizable() {
    let window = |text: &str| Policy::from(FixedWindow::new(rate(text)).expect("a limit"));
    let limits = named([window("4/s"), window("3/250ms"), window("9/2s")]);
    all_explained(&ConcurrentRun { rounds: 100, ..ConcurrentRun::new(&limits) });
}

/// A limit of every algorithm.
fn mixed() -> Vec<Limit<Policy>> {
    let buckets = BucketedWindow::new(250_000, &[rate("5/s"), rate("8/2s")]).expect("a limit");
    let lease = Concurrency::new(rate("3/700ms")).expect("a limit");
    let fixed = FixedWindow::new(rate("4/s")).expect("a limit");
    named([
        Policy::from(gcra("10/s", 5)),
        TokenBucket::new(rate("7/2s"), 4).expect("a limit").into(),
        fixed.into(),
        FirstRequestWindow::new(rate("4/s")).expect("a limit").into(),
        WindowLog::new(rate("4/s")).expect("a limit").into(),
        SlidingLog::new(rate("5/s")).expect("a limit").into(),
        SlidingCounter::new(rate("5/s")).expect("a limit").into(),
        buckets.into(),
        lease.into(),
        Attempts::new(fixed).into(),
    ])
}

#[test]
fn every_algorithm_is_linearizable_by_itself() {
    for limit in mixed() {
        let limits = [limit];
        for threads in [2, 8] {
            let (requests, rounds) = (24 / threads + 2, 60);
            let run = ConcurrentRun { threads, requests, rounds, ..ConcurrentRun::new(&limits) };
            let seen = explained(&run);
            assert!(seen.undecided * 100 <= run.rounds, "{}: {seen:?}", limits[0].name());
        }
    }
}

#[test]
fn all_algorithms_in_one_batch_are_linearizable() {
    let limits = mixed();
    all_explained(&ConcurrentRun { rounds: 60, ..ConcurrentRun::new(&limits) });
}
