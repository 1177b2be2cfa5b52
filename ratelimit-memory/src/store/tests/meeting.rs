//! Two keys that a bucket cannot tell apart. They share a state, as the crate's documentation says,
//! but all counts stay right.

use std::collections::HashMap;

use super::*;

/// Finds two callers that meet in this store while it is empty. The small segments of tests tell
/// keys apart by only 41 bits, so there are some among two million callers.
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
    let (limit, (store, _clock)) = (limit(1), store(64));
    let both = two_that_meet(&store, &limit).expect("some do");
    let checks = both.each_ref().map(|key| Check { limit: &limit, key, cost: 1 });
    for op in [Op::Acquire, Op::Reset] {
        let _ = store.apply_now(&Batch::new(&checks).expect("distinct").op(op)).expect("decides");
        assert_eq!(store.len(), count_states(&store), "after {op} of both");
    }
}
