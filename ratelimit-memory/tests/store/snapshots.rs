//! What a store in memory says of the states that its decisions leave.

use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Now, Op, Snapshot, SnapshotStore};
use ratelimit_core::{Clock, Policy, ReservationId, SyncStore};
use ratelimit_testkit::block_on;

use crate::common::{MIXED, Memory, limit, store};

/// Random batches of a store and of a twin that does not tell: they decide alike, and the states told are those that the
/// store has from then on.
#[test]
fn the_states_told_are_those_that_the_decision_left() {
    let (store, clock): (Memory, _) = store(|builder| builder.shards(4));
    let (twin, twins_clock): (Memory, _) = self::store(|builder| builder.shards(4));
    // Of the last two, a key may owe.
    let words = MIXED.into_iter().chain(["gcra 3/s burst 2 debt 3", "gcra 5/s burst 3 debt 2"]);
    let limits: Vec<_> =
        words.enumerate().map(|(n, words)| limit(&format!("l{n}"), words)).collect();
    let mut random = fastrand::Rng::with_seed(16);
    let (mut charged, mut denied, mut refused) = (0, 0, 0);
    for n in 0..20_000 {
        clock.advance(Duration::from_micros(random.u64(..20_000)));
        twins_clock.set(clock.now());
        let mut checks: Vec<Check<'_, Policy>> = Vec::new();
        for _ in 0..random.u64(..4) {
            let limit = random.choice(&limits).expect("some");
            let key = random.choice(["alice", "bob", "carol"]).expect("some");
            let is_new =
                |check: &Check<'_, Policy>| (check.limit.name(), check.key) != (limit.name(), key);
            if checks.iter().all(is_new) {
                checks.push(Check { limit, key, cost: random.u64(..4) });
            }
        }
        let mut batch = Batch::new(&checks).expect("distinct");
        let id = ReservationId::new(u128::from(random.u64(..50)));
        batch = match random.u64(..12) {
            0 => batch.op(Op::Peek),
            1 => batch.op(Op::Refund),
            2 => batch.op(Op::Force),
            3 => batch.op(Op::Reset),
            4 => batch.id(id),
            5 => batch.id(id).op(Op::Settle),
            6 => batch.now(Now::At(clock.now().saturating_add_us(random.u64(..9_000)))),
            _ => batch,
        };
        let due = twin.apply_now(&batch);
        let (got, left) = match block_on(store.apply_with_snapshot(&batch)) {
            Ok((verdict, left)) => (Ok(verdict), left),
            Err(error) => (Err(error), None),
        };
        assert_eq!(got, due, "{n}: {batch:?}");
        let Ok(verdict) = got else {
            refused += 1;
            continue;
        };
        *(if verdict.allowed() { &mut charged } else { &mut denied }) += 1;
        let now = match batch.time() {
            Now::Store => clock.now(),
            Now::At(now) => now,
        };
        let states = checks.iter().map(|check| store.state(check.limit.name(), check.key));
        assert_eq!(left, Some(Snapshot { now, states: states.collect() }), "{n}: {batch:?}");
    }
    assert!(charged > 5_000 && denied > 1_000 && refused > 500, "{charged} {denied} {refused}");
}

/// Another key's refund changes a shared state, and a place that becomes free ends its use.
#[test]
fn a_state_that_keys_share_in_a_full_store_is_not_told() {
    let (store, _clock): (Memory, _) = store(|builder| builder.capacity(1));
    let limit = limit("l", "gcra 1/h burst 1");
    let tells = |key| {
        let check = Check { limit: &limit, key, cost: 1 };
        block_on(store.apply_with_snapshot(&Batch::one(&check))).expect("decides").1.is_some()
    };
    assert_eq!(["alice", "bob", "alice"].map(tells), [true, false, true]);
}
