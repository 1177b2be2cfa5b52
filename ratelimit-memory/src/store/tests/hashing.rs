//! How often a call hashes its keys, by the counter of the hasher.

use super::*;
use crate::hash::HASHED;

/// Fails unless the call hashes so many keys, the first time and when they are known.
fn hashes(expected: usize, what: &str, call: impl Fn()) {
    for _ in 0..2 {
        HASHED.set(0);
        call();
        assert_eq!(HASHED.get(), expected, "{what}");
    }
}

#[test]
fn a_key_is_hashed_once_per_call() {
    for (words, capacity) in [
        ("gcra 1/h burst 3", 10_000),
        ("gcra 7/h burst 3", 10_000),
        ("fixed-window 3/h", 10_000),
        ("gcra 1/h burst 3", 1),
        ("fixed-window 3/h", 1),
    ] {
        let (store, _): (Memory<AnyAlgorithm>, _) =
            build_store(|builder| builder.capacity(capacity));
        let limits = ["a", "b", "c"].map(|name| limit_in_words(name, words));
        let limit = &limits[0];
        let keys = ["d", "e", "f", "g", "h", "i", "j", "k", "l", "m", "n"];
        for count in 1..6 {
            let checks: Vec<_> =
                keys[..count].iter().map(|key| Check { limit, key, cost: 1 }).collect();
            let batch = Batch::new(&checks).expect("distinct");
            for op in [Op::Acquire, Op::Peek, Op::Force, Op::Refund, Op::Reset] {
                hashes(count, words, || drop(store.apply_now(&batch.op(op))));
                hashes(count, words, || drop(store.apply_now(&batch.op(op).now(Now::At(NOW)))));
            }
            let reserved = batch.id(ReservationId::new(count as u128));
            hashes(count, words, || drop(store.apply_now(&reserved)));
        }
        let checks = limits.each_ref().map(|limit| Check { limit, key: "limits", cost: 1 });
        let several = Batch::new(&checks).expect("distinct");
        hashes(1, "limits of a key", || drop(store.apply_now(&several)));
        hashes(1, "a key", || drop(store.acquire_now(limit, "key", 1)));
        hashes(11, "keys", || store.acquire_each_now(limit, &keys, 1, |_, decided| drop(decided)));
    }
}
