//! Calls reclaim expired states, without a thread: a few at every call, and all of them after enough calls.

use std::time::Duration;

use ratelimit_core::{
    Attempts, Batch, Check, FirstRequestWindow, FixedWindow, Gcra, InMemory, Limit, ManualClock,
    Op, Policy, SlidingLog, SyncStore, Timestamp,
};
use ratelimit_memory::MemoryStore;

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);
/// The most that a call may free: a few buckets of four slots, and a few slots of shards.
const MOST_FREED: usize = 32;
/// The number of keys that do not expire.
const LIVE: usize = 100;

fn rate(text: &str) -> ratelimit_core::Rate {
    text.parse().expect("a rate")
}

/// Fills a store with keys that expire after a second and some that do not, and checks that calls free the
/// former. `calls` calls are made per expired key, each by `call`.
fn reclaimed<A: InMemory>(
    [short, long]: [A; 2],
    expired: usize,
    calls: usize,
    call: impl Fn(&MemoryStore<A, ManualClock>, &Limit<A>, usize),
) {
    let clock = ManualClock::new(BEGIN);
    let store = MemoryStore::builder().shards(16).clock(clock.clone()).build();
    let limit = Limit::new("short", short).expect("a name");
    let stays = Limit::new("long", long).expect("a name");
    let acquire = |limit: &Limit<A>, key: &str| {
        let check = Check { limit, key, cost: 1 };
        store.apply_now(&Batch::one(&check)).expect("decides").allowed()
    };
    assert!((0..LIVE).all(|n| acquire(&stays, &n.to_string())));
    assert!((0..expired).all(|n| acquire(&limit, &n.to_string())));
    assert_eq!((store.len(), store.overflowed()), (LIVE + expired, 0));
    clock.advance(Duration::from_secs(1));
    let (mut most, mut last) = (0, 0);
    for n in 0..calls * expired {
        let before = store.len();
        call(&store, &stays, n);
        let freed = before.saturating_sub(store.len());
        most = most.max(freed);
        last = if freed > 0 { n } else { last };
    }
    println!("at most {most} at a call, all {expired} within {last} calls");
    assert!((1..=MOST_FREED).contains(&most), "{most} at one call");
    assert_eq!(store.len(), LIVE);
    assert!((0..LIVE).all(|n| store.state("long", &n.to_string()).is_some()));
}

fn peek_at_an_unknown_key<A: InMemory>(
    store: &MemoryStore<A, ManualClock>,
    limit: &Limit<A>,
    n: usize,
) {
    let check = Check { limit, key: &format!("unknown {n}"), cost: 1 };
    let _ = store.apply_now(&Batch::one(&check).op(Op::Peek)).expect("decides");
}

fn peek_at_three<A: InMemory>(store: &MemoryStore<A, ManualClock>, limit: &Limit<A>, n: usize) {
    let keys = [0, 1, 2].map(|other| format!("unknown {n} {other}"));
    let checks: Vec<_> = keys.iter().map(|key| Check { limit, key, cost: 1 }).collect();
    let batch = Batch::new(&checks).expect("distinct");
    let _ = store.apply_now(&batch.op(Op::Peek)).expect("decides");
}

fn gcra(text: &str) -> Gcra {
    Gcra::new(rate(text), 1).expect("a limit")
}

#[test]
fn new_keys_reclaim_expired_states_in_buckets() {
    for expired in [1_000, 30_000] {
        reclaimed([gcra("1/s"), gcra("1/d")], expired, 1, peek_at_an_unknown_key);
    }
}

#[test]
fn new_keys_reclaim_expired_states_in_shards() {
    let log = |text| Policy::from(SlidingLog::new(rate(text)).expect("a limit"));
    reclaimed([log("1/s"), log("1/d")], 20_000, 1, peek_at_an_unknown_key);
    let first = |text| Policy::from(FirstRequestWindow::new(rate(text)).expect("a limit"));
    reclaimed([first("1/s"), first("1/d")], 20_000, 1, peek_at_an_unknown_key);
}

#[test]
fn batches_reclaim_expired_states_anywhere() {
    let log = |text| Policy::from(SlidingLog::new(rate(text)).expect("a limit"));
    reclaimed([log("1/s"), log("1/d")], 10_000, 1, peek_at_three);
    // These calls sweep only their own buckets, wherever these are.
    reclaimed([gcra("1/s"), gcra("1/d")], 10_000, 4, peek_at_three);
}

#[test]
fn new_keys_reclaim_expired_attempts_and_windows_in_buckets() {
    // The window of `BEGIN` ends within a second, and the day's does not.
    let window = |text| FixedWindow::new(rate(text)).expect("a limit");
    let attempts = |text| Policy::from(Attempts::new(window(text)));
    reclaimed([attempts("1/s"), attempts("1/d")], 10_000, 1, peek_at_an_unknown_key);
}

/// A stream of new keys, each of which lives for a second: the store holds little more than the live ones.
#[test]
fn a_stream_of_new_keys_keeps_few_expired_ones() {
    let clock = ManualClock::new(BEGIN);
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let limit = Limit::new("l", gcra("1/s")).expect("a name");
    let mut most = 0;
    for n in 0..200_000_u64 {
        let check = Check { limit: &limit, key: &n.to_string(), cost: 1 };
        assert!(store.apply_now(&Batch::one(&check)).expect("decides").allowed());
        clock.advance(Duration::from_micros(200));
        most = store.len().max(most);
    }
    // Five thousand live at a time.
    println!("{most} at the most");
    assert!((5_000..15_000).contains(&most), "{most}");
}
