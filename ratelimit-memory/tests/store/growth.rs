//! Several keys per call, by several threads, while the table grows from nothing.

use std::sync::atomic::{AtomicU64, Ordering};

use ratelimit_core::{
    Batch, Check, Gcra, Limit, ManualClock, Now, Op, SyncStore, Timestamp, Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);
const BURST: u64 = 5;
const KEYS: usize = 30_000;

type Memory = MemoryStore<Gcra, ManualClock>;

/// Asks about eleven keys at a time, some of them twice. Now and then it peeks at one, and charges one at a
/// given time, which moves its state to the shards. All threads use the same order, but begin at different
/// keys.
fn ask_about_all(store: &Memory, names: &[String], admitted: &[AtomicU64], thread: usize) {
    let rate = "1/h".parse().expect("a rate");
    let limit = Limit::new("l", Gcra::new(rate, BURST).expect("a limit")).expect("a name");
    for turn in 0..KEYS / 8 {
        let begin = turn * 8 + thread * 3;
        let key = |place: usize| (begin + [0, 1, 2, 0, 3, 4, 0, 5, 6, 7, 1][place]) % KEYS;
        let admit = |place: usize, decided: Result<Verdict, MemoryError>| {
            if decided.expect("decides").allowed() {
                admitted[key(place)].fetch_add(1, Ordering::Relaxed);
            }
        };
        if turn % 7 == 0 {
            let check = Check { limit: &limit, key: &names[key(3)], cost: 1 };
            let _ = store.apply_now(&Batch::one(&check).op(Op::Peek)).expect("decides");
            admit(3, store.apply_now(&Batch::one(&check).now(Now::At(BEGIN))));
        }
        let keys: [&str; 11] = std::array::from_fn(|place| &*names[key(place)]);
        let mut next = 0;
        store.acquire_each_now(&limit, &keys, 1, |place, decided| {
            assert_eq!(place, next);
            next += 1;
            admit(place, decided);
        });
        assert_eq!(next, 11);
    }
}

#[test]
fn every_key_is_admitted_exactly_its_burst_while_segments_split() {
    let names: Vec<String> = (0..KEYS).map(|n| format!("key {n}")).collect();
    for threads in [2, 5] {
        let store: Memory =
            MemoryStore::builder().capacity(1 << 20).clock(ManualClock::new(BEGIN)).build();
        let admitted: Vec<AtomicU64> = names.iter().map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (store, names, admitted) = (&store, &names, &admitted);
                scope.spawn(move || ask_about_all(store, names, admitted, thread));
            }
        });
        let most = admitted.iter().map(|count| count.load(Ordering::Relaxed)).max();
        assert!(most <= Some(BURST), "{most:?} by {threads} threads");
        // The rest of each burst is admitted one by one.
        for thread in 0..5 {
            ask_about_all(&store, &names, &admitted, thread);
        }
        let wrong = admitted.iter().filter(|count| count.load(Ordering::Relaxed) != BURST).count();
        assert_eq!((wrong, store.len(), store.overflowed()), (0, KEYS, 0), "{threads} threads");
    }
}

/// Asks in batches of three to five keys, and about each key alone.
fn ask_in_batches(store: &Memory, names: &[String], admitted: &[AtomicU64], thread: usize) {
    let rate = "1/h".parse().expect("a rate");
    let limit = Limit::new("l", Gcra::new(rate, BURST).expect("a limit")).expect("a name");
    let mut place = thread * 3;
    for turn in 0..KEYS / 4 {
        let width = 3 + (turn + thread) % 3;
        let keys: Vec<usize> = (place..place + width).map(|place| place % KEYS).collect();
        let check = |key: &usize| Check { limit: &limit, key: &names[*key], cost: 1 };
        let checks: Vec<_> = keys.iter().map(check).collect();
        let batch = Batch::new(&checks).expect("distinct");
        if store.apply_now(&batch).expect("decides").allowed() {
            for key in keys {
                admitted[key].fetch_add(1, Ordering::Relaxed);
            }
        }
        place += width;
    }
}

#[test]
fn every_key_of_batches_is_admitted_exactly_its_burst_while_segments_split() {
    let names: Vec<String> = (0..KEYS).map(|n| format!("key {n}")).collect();
    let limit = Limit::new("l", Gcra::new("1/h".parse().expect("a rate"), BURST).expect("a limit"));
    let limit = limit.expect("a name");
    for threads in [2, 4] {
        let store: Memory =
            MemoryStore::builder().capacity(1 << 20).clock(ManualClock::new(BEGIN)).build();
        let admitted: Vec<AtomicU64> = names.iter().map(|_| AtomicU64::new(0)).collect();
        std::thread::scope(|scope| {
            for thread in 0..threads {
                let (store, names, admitted) = (&store, &names, &admitted);
                scope.spawn(move || ask_in_batches(store, names, admitted, thread));
            }
        });
        // The rest of each burst is admitted one by one, and no more.
        let left = |name: &String| {
            let ask = |_: &u64| store.acquire_now(&limit, name, 1).expect("decides").allowed();
            (0..=BURST).filter(ask).count() as u64
        };
        let exact = |(name, admitted): (&String, &AtomicU64)| {
            admitted.load(Ordering::Relaxed) + left(name) == BURST
        };
        let wrong = names.iter().zip(&admitted).filter(|both| !exact(*both)).count();
        assert_eq!((wrong, store.len(), store.overflowed()), (0, KEYS, 0), "{threads} threads");
    }
}
