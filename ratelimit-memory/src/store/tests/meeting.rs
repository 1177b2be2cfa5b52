//! Two keys that a bucket cannot tell apart. They share a state, as the crate's documentation says, but all
//! counts stay right.

use std::collections::HashMap;

use ratelimit_core::{Batch, Check, Gcra, Limit, ManualClock, Op, SyncStore, Timestamp};

use super::*;

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

type Memory = MemoryStore<Gcra, ManualClock>;

fn apply(store: &Memory, op: Op, limit: &Limit<Gcra>, callers: &[String; 2]) {
    let checks = callers.each_ref().map(|key| Check { limit, key, cost: 1 });
    let batch = Batch::new(&checks).expect("distinct").op(op);
    let _ = store.apply_now(&batch).expect("decides");
}

/// Finds two callers that meet in this store while it is empty. The small segments of tests tell keys apart by
/// only 41 bits, so there are some among two million callers.
fn two_that_meet(store: &Memory, limit: &Limit<Gcra>) -> Option<[String; 2]> {
    let table = store.table.as_ref()?;
    let mut known = HashMap::new();
    (0_u64..).find_map(|caller| {
        let hash = store.hash(limit, &caller.to_string());
        let route = table.route(Address::new(hash));
        let other: u64 = known.insert((route.tag(), route.ids()), caller)?;
        Some([other, caller].map(|caller| caller.to_string()))
    })
}

#[test]
fn two_keys_that_a_bucket_cannot_tell_apart_count_as_one_state() {
    let clock = ManualClock::new(BEGIN);
    let gcra = Gcra::new("1/h".parse().expect("a rate"), 1).expect("a limit");
    let limit = Limit::new("limit", gcra).expect("a name");
    let store: Memory = MemoryStore::builder().capacity(64).shards(1).clock(clock.clone()).build();
    let both = two_that_meet(&store, &limit).expect("some do");
    apply(&store, Op::Acquire, &limit, &both);
    assert_eq!(store.len(), counted(&store));
    apply(&store, Op::Reset, &limit, &both);
    assert_eq!(store.len(), counted(&store), "after a reset of both");
}
