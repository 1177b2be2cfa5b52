//! How often a call hashes its keys, by the counter of the hasher.

use ratelimit_core::{FixedWindow, Gcra, ManualClock, ReservationId};

use super::*;
use crate::hash::HASHED;

const NOW: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

/// Fails unless the call hashes so many keys.
#[track_caller]
fn hashes(expected: usize, what: &str, call: impl FnOnce()) {
    HASHED.set(0);
    call();
    assert_eq!(HASHED.get(), expected, "{what}");
}

/// Every operation on new and known keys, one by one and in batches, in a store of so many keys.
fn every_key_is_hashed_once<A: InMemory>(algorithm: impl Fn() -> A, capacity: usize) {
    let clock = ManualClock::new(NOW);
    let builder = MemoryStore::builder().capacity(capacity).shards(4).clock(clock);
    let store: MemoryStore<A, ManualClock> = builder.build();
    let limits = ["a", "b", "c"].map(|name| Limit::new(name, algorithm()).expect("a name"));
    let limit = &limits[0];
    for n in 0..40 {
        let key = &n.to_string();
        for what in ["a new key", "a known key", "a denied key"] {
            hashes(1, what, || _ = store.acquire_now(limit, key, 2).expect("decides"));
        }
        let check = Check { limit, key, cost: 1 };
        let one = Batch::one(&check);
        for op in [Op::Peek, Op::Acquire, Op::Force, Op::Refund, Op::Reset] {
            hashes(1, "an operation", || _ = store.apply_now(&one.op(op)).expect("decides"));
            let then = one.op(op).now(Now::At(NOW));
            hashes(1, "at a given time", || _ = store.apply_now(&then).expect("decides"));
        }
        // An error of a full store counts as well.
        let reserved = one.id(ReservationId::new(n));
        hashes(1, "a reservation", || drop(store.apply_now(&reserved)));
        hashes(1, "a settlement", || drop(store.apply_now(&reserved.op(Op::Settle))));

        let new = format!("several limits {n}");
        let checks = limits.each_ref().map(|limit| Check { limit, key: &new, cost: 1 });
        let batch = Batch::new(&checks).expect("distinct");
        hashes(1, "limits of a new key", || _ = store.apply_now(&batch).expect("decides"));
        hashes(1, "limits of a known key", || _ = store.apply_now(&batch).expect("decides"));
        let keys: [String; 11] = std::array::from_fn(|place| format!("several keys {n} {place}"));
        for count in 2..6 {
            let checks: Vec<_> =
                keys[..count].iter().map(|key| Check { limit, key, cost: 1 }).collect();
            let batch = Batch::new(&checks).expect("distinct");
            hashes(count, "a batch", || _ = store.apply_now(&batch).expect("decides"));
            let reserved = batch.id(ReservationId::new(1_000 + n));
            hashes(count, "a batch with an id", || drop(store.apply_now(&reserved)));
        }
        let keys = keys.each_ref().map(String::as_str);
        hashes(keys.len(), "keys by themselves", || {
            store.acquire_each_now(limit, &keys, 1, |_, decided| _ = decided.expect("decides"));
        });
    }
    assert_eq!(store.overflowed() > 0, capacity < 100);
}

#[test]
fn a_key_of_a_cuckoo_table_is_hashed_once_per_call() {
    let fast = || Gcra::new("1/h".parse().expect("a rate"), 3).expect("a limit");
    let fractional = || Gcra::new("7/h".parse().expect("a rate"), 3).expect("a limit");
    for capacity in [10, 10_000] {
        every_key_is_hashed_once(fast, capacity);
        every_key_is_hashed_once(fractional, capacity);
    }
}

#[test]
fn a_key_of_a_shard_is_hashed_once_per_call() {
    let window = || FixedWindow::new("3/h".parse().expect("a rate")).expect("a limit");
    for capacity in [10, 10_000] {
        every_key_is_hashed_once(window, capacity);
        every_key_is_hashed_once(|| Policy::from(window()), capacity);
    }
}
