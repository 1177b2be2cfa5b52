//! What a store in memory says of the states that its decisions leave.

use std::thread;
use std::time::Duration;

use ratelimit_core::{
    Algorithm, Batch, Check, Clock, Limit, ManualClock, Now, Op, Policy, ReservationId, Snapshot,
    SnapshotStore, SyncStore, Timestamp,
};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::block_on;

use crate::common::Chance;

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);
const KEYS: [&str; 3] = ["alice", "bob", "carol"];

fn limit(name: &str, words: &str) -> Limit<Policy> {
    Limit::new(name, words.parse().expect(words)).expect("a name")
}

/// Limits whose states lie in buckets, in shards, and with an id also among the reservations.
fn limits() -> Vec<Limit<Policy>> {
    let words = [
        "gcra 5/s burst 7",
        "gcra 3/s burst 4 count attempts",
        "token-bucket 5/s burst 7",
        "fixed-window 5/s",
        "first-request-window 5/2s",
        "sliding-counter 5/s",
        "bucketed-window bucket 250ms rates 5/s, 9/3s",
        "sliding-log 5/s",
        "window-log 5/s",
        "concurrency 5/2s",
    ];
    words.iter().enumerate().map(|(n, words)| limit(&format!("l{n}"), words)).collect()
}

/// Random batches of a store and of a twin that does not tell: they decide alike, and the states told are those that the
/// store has from then on.
#[test]
fn the_states_told_are_those_that_the_decision_left() {
    let clock = ManualClock::new(BEGIN);
    let build = || MemoryStore::<Policy, _>::builder().shards(4).clock(clock.clone()).build();
    let (store, twin) = (build(), build());
    let (limits, mut chance) = (limits(), Chance(16));
    let (mut charged, mut denied, mut refused) = (0, 0, 0);
    for n in 0..20_000 {
        clock.advance(Duration::from_micros(chance.below(20_000)));
        let mut checks: Vec<Check<'_, Policy>> = Vec::new();
        for _ in 0..chance.below(4) {
            let limit = &limits[usize::try_from(chance.below(10)).expect("small")];
            let key = KEYS[usize::try_from(chance.below(3)).expect("small")];
            let is_new =
                |check: &Check<'_, Policy>| (check.limit.name(), check.key) != (limit.name(), key);
            if checks.iter().all(is_new) {
                checks.push(Check { limit, key, cost: chance.below(4) });
            }
        }
        let mut batch = Batch::new(&checks).expect("distinct");
        batch = match chance.below(12) {
            0 => batch.op(Op::Peek),
            1 => batch.op(Op::Refund),
            2 => batch.op(Op::Force),
            3 => batch.op(Op::Reset),
            4 => batch.id(ReservationId::new(u128::from(chance.below(50)))),
            5 => batch.id(ReservationId::new(u128::from(chance.below(50)))).op(Op::Settle),
            6 => batch.now(Now::At(clock.now().saturating_add_us(chance.below(9_000)))),
            _ => batch,
        };
        let due = twin.apply_now(&batch).map_err(|error| error.to_string());
        let got = block_on(store.apply_with_snapshot(&batch)).map_err(|error| error.to_string());
        let left = match (got, due) {
            (Ok((got, left)), Ok(due)) => {
                assert_eq!(got, due, "{n}: {batch:?}");
                if got.allowed() {
                    charged += 1;
                } else {
                    denied += 1;
                }
                left.expect("the store is not full")
            }
            (got, due) => {
                assert_eq!(got.err(), due.err(), "{n}: {batch:?}");
                refused += 1;
                continue;
            }
        };
        let now = match batch.time() {
            Now::Store => clock.now(),
            Now::At(now) => now,
        };
        let states = checks.iter().map(|check| store.state(check.limit.name(), check.key));
        assert_eq!(left, Snapshot { now, states: states.collect() }, "{n}: {batch:?}");
    }
    assert!(charged > 5_000 && denied > 1_000 && refused > 500, "{charged} {denied} {refused}");
}

/// Another key's refund changes a shared state, and a place that becomes free ends its use.
#[test]
fn a_state_that_keys_share_in_a_full_store_is_not_told() {
    let clock = ManualClock::new(BEGIN);
    let store = MemoryStore::<Policy, _>::builder().capacity(1).clock(clock).build();
    let limit = limit("l", "gcra 1/h burst 1");
    let tells = |key| {
        let check = Check { limit: &limit, key, cost: 1 };
        block_on(store.apply_with_snapshot(&Batch::one(&check))).expect("decides").1.is_some()
    };
    assert!(tells("alice"));
    assert!(!tells("bob"));
    assert!(tells("alice"));
}

/// While other threads charge the same keys, by calls that tell and by calls that do not.
#[test]
fn the_states_told_belong_to_the_verdict_while_others_charge() {
    let store = MemoryStore::<Policy, _>::builder().clock(ManualClock::new(BEGIN)).build();
    let (first, second) =
        (limit("first", "gcra 3000/h burst 3000"), limit("second", "fixed-window 2900/h"));
    thread::scope(|scope| {
        for thread in 0..4 {
            let (store, first, second) = (&store, &first, &second);
            scope.spawn(move || {
                for n in 0..1_000 {
                    let checks =
                        [first, second].map(|limit| Check { limit, key: "alice", cost: 1 });
                    let batch = Batch::new(&checks).expect("distinct");
                    if (thread + n) % 2 == 0 {
                        let _ = store.apply_now(&batch).expect("decides");
                        continue;
                    }
                    let told = block_on(store.apply_with_snapshot(&batch)).expect("decides");
                    let (verdict, Snapshot { now, states }) = (told.0, told.1.expect("not full"));
                    for ((check, state), decision) in
                        checks.iter().zip(states).zip(verdict.decisions())
                    {
                        let looks = check.limit.algorithm().step(state.as_ref(), now, 0).decision;
                        assert_eq!(looks.remaining, decision.remaining);
                    }
                }
            });
        }
    });
}
