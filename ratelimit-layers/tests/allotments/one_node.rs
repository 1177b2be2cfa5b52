//! One process with allotments admits what it would admit without.

use std::time::Duration;

use proptest::prelude::*;
use ratelimit_core::{Batch, Check, Limit, ManualClock, Op, Policy, Source, Store, SyncStore};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::block_on;

use crate::{BEGIN, greedy, limit};

/// A request of one or two limits about one or two keys, after a pause.
#[derive(Clone, Debug)]
struct Request {
    pause_us: u64,
    op: Op,
    /// Which limits, with their keys and costs.
    checks: Vec<(usize, usize, u64)>,
}

fn limits() -> [Limit<Policy>; 3] {
    let words = [
        ("second", "fixed-window 30/s"),
        ("short", "fixed-window 9/250ms"),
        ("day", "fixed-window 400/d"),
    ];
    words.map(|(name, words)| limit(name, words))
}

fn request() -> impl Strategy<Value = Request> {
    let op = prop_oneof![
        24 => Just(Op::Acquire),
        1 => Just(Op::Peek),
        1 => Just(Op::Force),
        1 => Just(Op::Refund),
        1 => Just(Op::Reset),
    ];
    let pause_us =
        prop_oneof![6 => Just(0), 6 => 0..5_000_u64, 1 => 0..300_000_u64, 1 => 0..2_000_000_u64];
    let check = (0..3_usize, 0..2_usize, 1..4_u64);
    let checks = prop_oneof![
        4 => Just(vec![(0, 0, 1)]),
        2 => prop::collection::vec(check.clone(), 1),
        2 => prop::collection::vec(check, 2),
    ];
    (pause_us, op, checks).prop_map(|(pause_us, op, mut checks)| {
        checks.dedup_by_key(|(limit, key, _)| (*limit, *key));
        Request { pause_us, op, checks }
    })
}

const KEYS: [&str; 2] = ["alice", "bob"];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]

    #[test]
    fn one_node_admits_what_the_store_alone_admits(
        requests in prop::collection::vec(request(), 1..120),
        lifetime_ms in 1..2_000_u64,
        divisor in 1..4_u64,
    ) {
        let (limits, clock) = (limits(), ManualClock::new(BEGIN));
        let memory = || MemoryStore::builder().shards(1).clock(clock.clone()).build();
        let lifetime = Duration::from_millis(lifetime_ms);
        let store = greedy(&clock).divisor(divisor).lifetime(lifetime).build(memory());
        let plain: MemoryStore<Policy, ManualClock> = memory();
        for Request { pause_us, op, checks } in requests {
            clock.advance(Duration::from_micros(pause_us));
            let check = |(limit, key, cost): &(usize, usize, u64)| {
                Check { limit: &limits[*limit], key: KEYS[*key], cost: *cost }
            };
            // A reset of one limit of a batch leaves the others charged with what was drawn beside it.
            let all = (0..limits.len()).flat_map(|limit| (0..KEYS.len()).map(move |key| (limit, key, 1)));
            let checks: Vec<_> = match op {
                Op::Reset => all.collect::<Vec<_>>().iter().map(check).collect(),
                _ => checks.iter().map(check).collect(),
            };
            let batch = Batch::new(&checks).expect("distinct").op(op);
            let said = block_on(store.apply(&batch)).expect("decides");
            let due = plain.apply_now(&batch).expect("decides");
            prop_assert_eq!(said.allowed(), due.allowed(), "{:?}", batch);
            if said.source() == Source::Allotment {
                prop_assert!(op == Op::Acquire && said.allowed());
            }
        }
        // And the store is charged what was admitted.
        block_on(store.give_back());
        for limit in &limits {
            for key in KEYS {
                let check = Check { limit, key, cost: 0 };
                let peek = Batch::one(&check).op(Op::Peek);
                let left = store.store().apply_now(&peek).expect("decides");
                let due = plain.apply_now(&peek).expect("decides");
                prop_assert_eq!(left.summary(), due.summary());
            }
        }
    }
}

#[test]
fn a_hot_key_is_served_without_calls_and_its_remaining_falls_one_by_one() {
    let (limit, clock) = (limit("day", "fixed-window 1000/d"), ManualClock::new(BEGIN));
    let memory: MemoryStore<Policy, _> = MemoryStore::builder().clock(clock.clone()).build();
    let store = greedy(&clock).divisor(8).build(memory);
    for n in 1..=1_000 {
        let verdict = block_on(crate::ask(&store, &limit, "alice", 1));
        assert!(verdict.allowed());
        assert_eq!((verdict.limit(), verdict.remaining()), (1_000, 1_000 - n));
    }
    assert!(!block_on(crate::ask(&store, &limit, "alice", 1)).allowed());
    let counts = store.counts();
    assert_eq!(counts.served + counts.asked, 1_001);
    assert!(counts.asked < 60, "{counts:?}");
    assert_eq!((counts.given_back, counts.forfeited, counts.slots), (0, 0, 1));
}
