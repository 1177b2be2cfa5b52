//! Many threads and many keys on the table of compact states.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use ratelimit_core::{
    Batch, Check, Clock, FixedWindow, Gcra, Limit, Limits, ManualClock, Now, Op, Policy,
    RateLimiter, SyncStore, Timestamp,
};
use ratelimit_memory::MemoryStore;

use crate::common::Chance;

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

fn gcra(rate: &str, burst: u64) -> Gcra {
    Gcra::new(rate.parse().expect("a rate"), burst).expect("a limit")
}

fn limit(rate: &str, burst: u64) -> Limit<Gcra> {
    Limit::new("l", gcra(rate, burst)).expect("a name")
}

fn store<A: ratelimit_core::InMemory>(
    capacity: usize,
) -> (MemoryStore<A, ManualClock>, ManualClock) {
    let clock = ManualClock::new(BEGIN);
    (MemoryStore::builder().capacity(capacity).clock(clock.clone()).build(), clock)
}

/// Single checks, batches, requests at a given time (which move a key to the shards), and forced charges and
/// refunds of cost 0, from `threads` threads on `keys` keys while time stands still: each key is admitted
/// exactly its burst.
fn admitted_exactly(threads: u64, keys: usize, rounds: u64) {
    const BURST: u64 = 40;
    let (store, _clock) = store::<Gcra>(1 << 20);
    let limit = limit("1/h", BURST);
    let names: Vec<String> = (0..keys).map(|n| format!("key {n}")).collect();
    let admitted: Vec<AtomicU64> = names.iter().map(|_| AtomicU64::new(0)).collect();
    let ask = |key: usize, op: Op, cost: u64, now: Now| {
        let check = Check { limit: &limit, key: &names[key], cost };
        let verdict = store.apply_now(&Batch::one(&check).op(op).now(now)).expect("decides");
        if verdict.allowed() && op == Op::Acquire {
            admitted[key].fetch_add(cost, Ordering::Relaxed);
        }
    };
    std::thread::scope(|scope| {
        for thread in 0..threads {
            let (store, limit, names, admitted) = (&store, &limit, &names, &admitted);
            scope.spawn(move || {
                let mut chance = Chance(thread);
                for _ in 0..rounds {
                    let key = usize::try_from(chance.below(keys as u64)).expect("small");
                    match chance.below(40) {
                        0 => ask(key, Op::Acquire, 1, Now::At(BEGIN)),
                        1 => ask(key, Op::Peek, 1, Now::Store),
                        2 => ask(key, Op::Refund, 0, Now::Store),
                        3 => {
                            let other = (key + 1) % keys;
                            let check = |key: usize| Check { limit, key: &names[key], cost: 1 };
                            let checks = [check(key), check(other)];
                            let batch = Batch::new(&checks).expect("distinct");
                            if store.apply_now(&batch).expect("decides").allowed() {
                                admitted[key].fetch_add(1, Ordering::Relaxed);
                                admitted[other].fetch_add(1, Ordering::Relaxed);
                            }
                        }
                        n => ask(key, Op::Acquire, 1 + n % 2, Now::Store),
                    }
                }
            });
        }
    });
    // The rest of each burst is admitted one by one.
    for key in 0..keys {
        (0..BURST).for_each(|_| ask(key, Op::Acquire, 1, Now::Store));
    }
    let wrong = admitted.iter().filter(|count| count.load(Ordering::Relaxed) != BURST).count();
    assert_eq!((wrong, store.len(), store.overflowed()), (0, keys, 0), "{threads} threads");
}

#[test]
fn every_key_is_admitted_exactly_its_burst_by_two_to_eight_threads() {
    for threads in [2, 4, 8] {
        admitted_exactly(threads, 2, 20_000);
        admitted_exactly(threads, 5_000, 60_000);
    }
}

/// Charges `count` distinct keys in a row, most of them only once, and some keys that must keep their states.
fn distinct_keys(count: usize, capacity: usize, live: bool) {
    let (store, clock) = store::<Gcra>(capacity);
    // The latter have used up a whole day's burst; the others expire at once, or do not.
    let matter = limit("3/d", 3);
    let others = if live { limit("1/d", 1) } else { limit("1000/s", 1) };
    let ask = |limit: &Limit<Gcra>, key: &str, cost| {
        let check = Check { limit, key, cost };
        store.apply_now(&Batch::one(&check)).expect("decides")
    };
    let important: Vec<String> = (0..500).map(|n| format!("matters {n}")).collect();
    assert!(important.iter().all(|key| ask(&matter, key, 3).allowed()));
    for n in 0..count {
        let verdict = ask(&others, &n.to_string(), 1);
        assert!(verdict.allowed() || live, "{n}");
        if n % 8 == 0 {
            clock.advance(Duration::from_millis(1));
        }
        assert!(store.len() <= capacity);
    }
    assert!(!important.iter().any(|key| ask(&matter, key, 3).allowed()));
    let states = important.iter().filter(|key| store.state("l", key).is_some()).count();
    assert_eq!(states, 500);
    let expected = if live { count + 500 - capacity } else { 0 };
    assert_eq!(store.overflowed(), expected as u64);
}

#[test]
fn expired_keys_are_replaced_by_a_stream_of_new_ones() {
    distinct_keys(300_000, 5_000, false);
}

#[test]
fn live_keys_are_never_replaced_and_new_ones_share_a_state() {
    distinct_keys(30_000, 20_000, true);
}

#[test]
fn a_state_too_large_for_a_bucket_moves_to_a_shard_and_back() {
    let (store, clock) = store::<Gcra>(1 << 10);
    // A burst of a month, at a day per token: after twelve days' worth of charges the span is too long for a
    // bucket.
    let limits = Limits::new([limit("1/d", 30)]).expect("limits");
    let limiter = RateLimiter::new(limits, store);
    for n in 1..=30 {
        let verdict = limiter.check_now("a").expect("decides");
        assert!(verdict.allowed());
        assert_eq!((verdict.remaining(), limiter.store().len()), (30 - n, 1));
    }
    assert!(!limiter.check_now("a").expect("decides").allowed());
    for n in 0..25 {
        clock.advance(Duration::from_secs(86_400));
        assert_eq!(limiter.peek_now("a", 1).expect("decides").remaining(), n);
    }
    assert!(limiter.check_now("a").expect("decides").allowed());
    assert_eq!(limiter.peek_now("a", 1).expect("decides").remaining(), 23);
    assert_eq!(limiter.store().len(), 1);
}

#[test]
fn changing_the_algorithm_of_a_limit_resets_it() {
    let (store, clock) = store::<Policy>(100);
    let window = FixedWindow::new("2/d".parse().expect("a rate")).expect("a limit");
    let identifier_names: [Policy; 2] = [gcra("2/d", 2).into(), window.into()];
    let limits = identifier_names.map(|policy| Limit::new("l", policy).expect("a name"));
    for turn in 0..20 {
        let check = Check { limit: &limits[turn % 2], key: "a", cost: 2 };
        let verdict = store.apply_now(&Batch::one(&check)).expect("decides");
        assert!(verdict.allowed(), "turn {turn}: what another algorithm wrote says nothing");
        assert!(!store.apply_now(&Batch::one(&check)).expect("decides").allowed());
        assert_eq!(store.len(), 1);
        clock.advance(Duration::from_secs(1));
    }
}

#[test]
fn charges_at_a_given_time_and_at_the_stores_time_add_up() {
    let (store, clock) = store::<Gcra>(100);
    let limit = limit("1/h", 10);
    let mut due: HashMap<&str, u64> = HashMap::new();
    let mut chance = Chance(3);
    for turn in 0..2_000 {
        let key = ["a", "b", "c"][turn % 3];
        let now = if chance.below(3) == 0 { Now::At(clock.now()) } else { Now::Store };
        let op = match chance.below(10) {
            0 => Op::Reset,
            1 | 2 => Op::Refund,
            3 => Op::Peek,
            _ => Op::Acquire,
        };
        let check = Check { limit: &limit, key, cost: 1 };
        let verdict = store.apply_now(&Batch::one(&check).op(op).now(now)).expect("decides");
        let used = due.entry(key).or_default();
        match op {
            Op::Acquire => *used += u64::from(*used < 10),
            Op::Refund => *used = used.saturating_sub(1),
            Op::Reset => *used = 0,
            _ => {}
        }
        if op != Op::Peek {
            assert_eq!(verdict.remaining(), 10 - *used, "turn {turn}: {op} of {key}");
        }
        let held = due.values().filter(|used| **used > 0).count();
        assert_eq!(store.len(), held, "turn {turn}: {op} of {key}");
    }
}
