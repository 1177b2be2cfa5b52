//! Two keys that a line cannot tell apart. They share a state, which is rare and said in the documentation; but
//! what is counted stays right.

use ratelimit_core::{Batch, Check, Gcra, Limit, ManualClock, Op, SyncStore, Tick};

use super::*;

const BEGIN: Tick = Tick::saturating_from_us(1_795_218_392_123_456);
const LIMITS: usize = 10;

type Memory = MemoryStore<Gcra, ManualClock>;

fn limits() -> Vec<Limit<Gcra>> {
    let gcra = Gcra::new("1/h".parse().expect("a rate"), 1).expect("a limit");
    (0..LIMITS)
        .map(|n| Limit::new(&format!("{}-limit", n * 7_919), gcra).expect("a name"))
        .collect()
}

fn asked(store: &Memory, op: Op, limits: &[&Limit<Gcra>], caller: &str) {
    let checks: Vec<_> =
        limits.iter().map(|limit| Check { limit: *limit, key: caller, cost: 1 }).collect();
    let batch = Batch::new(&checks).expect("distinct").op(op);
    store.apply_now(&batch).expect("decides");
}

/// A caller, and two limits that meet for it in this store while it is empty. Tests have small segments, which
/// tell keys apart by fewer bits: so there are some.
fn two_that_meet<'l>(
    store: &Memory,
    limits: &'l [Limit<Gcra>],
) -> Option<(String, [&'l Limit<Gcra>; 2])> {
    let lines = store.lines.as_ref()?;
    (0_u64..).find_map(|caller| {
        let caller = caller.to_string();
        let known_by = |limit: &Limit<Gcra>| {
            let hash = store.key(limit.name(), limit.fingerprint(), &caller).hash;
            let route = lines.route(Address::new(hash));
            (route.tag(), route.ids())
        };
        let all: Vec<_> = limits.iter().map(known_by).collect();
        let pairs = (0..LIMITS).flat_map(|first| (0..first).map(move |second| (first, second)));
        let (first, second) = pairs.into_iter().find(|(a, b)| all[*a] == all[*b])?;
        Some((caller, [&limits[first], &limits[second]]))
    })
}

#[test]
fn two_keys_that_meet_are_counted_as_what_they_are() {
    let clock = ManualClock::new(BEGIN);
    let limits = limits();
    let store: Memory = MemoryStore::builder().capacity(64).shards(1).clock(clock.clone()).build();
    let (caller, both) = two_that_meet(&store, &limits).expect("some do");
    asked(&store, Op::Acquire, &both, &caller);
    assert_eq!(store.len(), counted(&store));
    asked(&store, Op::Reset, &both, &caller);
    assert_eq!(store.len(), counted(&store), "after a reset of both");
}
