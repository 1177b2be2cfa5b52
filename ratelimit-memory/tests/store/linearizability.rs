//! Concurrent runs, each checked for an order that explains all verdicts: see the testkit's
//! `ConcurrentRun`.

use std::cell::Cell;
use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, Limit, ManualClock, Record};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::{ConcurrentRun, Linearized};

use crate::common::{BEGIN, Hooked, MIXED, limit};

/// Yields after some readings of the clock, so that a decision uses an old one.
fn yields_at_times() {
    thread_local!(static READINGS: Cell<u32> = const { Cell::new(0) });
    let readings = READINGS.get().wrapping_mul(747_796_405).wrapping_add(2_891_336_453);
    READINGS.set(readings);
    if readings >> 30 == 0 {
        std::thread::yield_now();
    }
}

fn limits(all: &[&str]) -> Vec<Limit<AnyAlgorithm>> {
    all.iter().enumerate().map(|(n, words)| limit(&format!("l{n}"), words)).collect()
}

/// Checks that all histories of a run are linearizable, in a store that sees the clock as it is,
/// and in one that sees it late.
fn linearize(run: &ConcurrentRun<'_, AnyAlgorithm>) -> [Linearized; 2] {
    let builder = || MemoryStore::builder().capacity(1 << 16).shards(4);
    let clock = ManualClock::new(BEGIN);
    let store = builder().clock(clock.clone()).build();
    let late = builder().clock(Hooked(clock.clone(), yields_at_times)).build();
    let seen = [run.run(&store, &clock), run.run(&late, &clock)];
    let seen = seen.map(|seen| seen.unwrap_or_else(|error| panic!("{error}")));
    assert_eq!((store.overflowed(), late.overflowed()), (0, 0));
    let requests = run.threads * run.rounds * run.requests;
    assert!(seen.iter().all(|seen| seen.requests == requests));
    // A history may be too long to check, but not every other one.
    assert!(seen.iter().all(|seen| seen.undecided * 100 <= run.rounds), "{seen:?}");
    seen
}

/// Checks the same by two, four and eight threads, on few keys and on many.
fn all_explained(run: &ConcurrentRun<'_, AnyAlgorithm>) {
    for (threads, requests) in [(2, 12), (4, 8), (8, 5)] {
        for keys in [1, 3, 24] {
            let drawn = run.seed + (threads * 1_000 + keys) as u64;
            let seen = linearize(&ConcurrentRun { threads, requests, keys, seed: drawn, ..*run });
            assert!(seen.iter().all(|seen| seen.admitted * 4 > seen.requests), "{seen:?}");
        }
    }
}

#[test]
fn one_limit_in_buckets_is_linearizable() {
    let (single, denies) = (limits(&["gcra 10/s burst 5"]), limits(&["gcra 1/h burst 4"]));
    let run = |limits| ConcurrentRun {
        reservations: false,
        batch: 1,
        rounds: 150,
        ..ConcurrentRun::new(limits)
    };
    all_explained(&run(&single));
    for threads in [2, 4, 8] {
        linearize(&ConcurrentRun { threads, keys: 1, ..run(&denies) });
    }
}

#[test]
fn batches_and_reservations_in_buckets_are_linearizable() {
    // The last limit's states no longer fit into a bucket once enough has been charged.
    let limits = limits(&[
        "gcra 10/s burst 5",
        "gcra 1000/s burst 3",
        "gcra 3/s burst 2",
        "gcra 1/30d burst 4",
    ]);
    all_explained(&ConcurrentRun { rounds: 100, ..ConcurrentRun::new(&limits) });
}

#[test]
fn states_that_expire_all_the_time_are_linearizable() {
    let limits = limits(&["gcra 1000000/s burst 3", "gcra 3/us burst 40"]);
    let step = Duration::from_micros(4);
    all_explained(&ConcurrentRun { step, rounds: 150, ..ConcurrentRun::new(&limits) });
}

/// Threads that also change each other's records, which end at times: on every path, as with
/// records in place of requests.
#[test]
fn changes_of_records_are_linearizable() {
    let numbers = |words: &str| Record::numbers(words.parse().expect(words));
    let end = |ms: u64| BEGIN.saturating_add_us(1_000 * ms);
    for words in [
        &["gcra 10/s burst 5"][..],
        &["fixed-window 4/s"],
        &["gcra 10/s burst 5", "gcra 3/s burst 2"],
        &["gcra 10/s burst 5", "sliding-counter 5/s"],
    ] {
        let limits: Vec<_> = limits(words).into_iter().map(Limit::overridable).collect();
        let more = words[0].replacen("10/s", "20/s", 1).replacen("4/s", "9/s", 1);
        let mut records =
            vec![Record::blocked().forever(), Record::exempt().forever(), numbers(&more).forever()];
        records.extend((1..8).map(|n| numbers(&more).until(end(2_000 * n))));
        records.extend((1..8).map(|n| Record::blocked().until(end(2_000 * n))));
        for (threads, requests) in [(2, 12), (8, 5)] {
            for batch in [1, 2] {
                let run = ConcurrentRun {
                    threads,
                    requests,
                    batch,
                    rounds: 40,
                    ..ConcurrentRun::new(&limits)
                };
                let clock = ManualClock::new(BEGIN);
                let store = MemoryStore::builder().shards(4).clock(clock.clone()).build();
                let seen = run.run_with_records(&store, &clock, &records);
                let seen = seen.unwrap_or_else(|error| panic!("{error}"));
                assert!(seen.admitted > 100 && seen.undecided * 20 <= run.rounds, "{seen:?}");
            }
        }
    }
}

#[test]
fn every_algorithm_is_linearizable_by_itself() {
    for words in MIXED {
        let limits = limits(&[words]);
        for threads in [2, 8] {
            let (requests, rounds) = (24 / threads + 2, 60);
            linearize(&ConcurrentRun { threads, requests, rounds, ..ConcurrentRun::new(&limits) });
        }
    }
}

#[test]
fn all_algorithms_in_one_batch_are_linearizable() {
    all_explained(&ConcurrentRun { rounds: 60, ..ConcurrentRun::new(&limits(&MIXED)) });
}
