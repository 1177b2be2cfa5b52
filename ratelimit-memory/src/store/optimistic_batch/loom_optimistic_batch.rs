//! Loom models of a batch of two keys beside a thread that charges both.
//!
//! That thread uses snapshots from before the threads begin, and not the store: loom compares an access only
//! with the last one before it, and a lookup of that thread would hide the batch's access.

use ratelimit_core::SyncStore;
use ratelimit_core::algorithm::Compact;
use ratelimit_core::store::{Check, Op};

use super::*;
use crate::store::loom_store::{LoomStore, model, race, small_limit, small_store};

const SECOND_US: u64 = 1_000_000;

fn table(store: &LoomStore) -> &CuckooTable {
    store.table.as_ref().expect("small states")
}

/// The remaining capacity of each key that a batch over both reports.
fn left(store: &LoomStore, op: Op, costs: [u64; 2]) -> [u64; 2] {
    let (limit, [here, there]) = (small_limit(3), costs);
    let checks = [("a", here), ("b", there)].map(|(key, cost)| Check { limit: &limit, key, cost });
    let batch = Batch::new(&checks).expect("distinct").op(op);
    let verdict = store.apply_now(&batch).expect("decides");
    [0, 1].map(|position| verdict.decisions()[position].remaining)
}

/// Another thread charges two keys once more beside this batch. The batch reports both as they were at one
/// moment: `before` that charge, or after it.
fn is_of_one_moment(op: Op, costs: [u64; 2], before: [u64; 2]) {
    model(move || {
        let store = small_store(8);
        left(&store, Op::Acquire, [1, 1]);
        let addresses = ["a", "b"].map(|key| Address::new(store.hash(&small_limit(3), key)));
        let seen = addresses.map(|at| table(&store).route(at).find().expect("there").parts());
        let charges = move |store: &LoomStore| {
            let twice = Compact { at: store.clock.now(), span_us: 2 * SECOND_US, extra: 0 };
            let twice = table(store).pack(twice).expect("fits");
            let bucket = |position: usize| table(store).route(addresses[position]).buckets()[0];
            let seen = [0, 1].map(|position| bucket(position).seen(seen[position]));
            // Unless the batch is charging one of them, or has charged it.
            if let [Some(mut here), Some(mut there)] = seen.each_ref().map(|seen| seen.try_lock()) {
                here.set(twice);
                there.set(twice);
            }
        };
        let (left, ()) = race(&store, |store| left(store, op, costs), charges);
        let after = before.map(|left| left - 1);
        assert!(left == before || left == after, "{left:?}");
    });
}

#[test]
fn loom_a_peek_at_two_keys_sees_both_of_two_charges_or_neither() {
    is_of_one_moment(Op::Peek, [1, 1], [1, 1]);
}

#[test]
fn loom_an_uncharged_key_is_read_at_the_moment_of_the_charge_of_the_other() {
    is_of_one_moment(Op::Acquire, [0, 1], [2, 1]);
}
