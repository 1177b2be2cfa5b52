//! The cap on the entries of logs: the count is exact, the cap is never exceeded, and no key's
//! limit is reset for it. And calls of every kind, after which all counts are exact, and the states
//! are those that were told.

use ratelimit_core::store::Snapshot;
use ratelimit_core::{ErrorKind, StoreError};
use ratelimit_testkit::block_on;

use super::*;

/// The cap of these tests. Two of the entries are for shared states.
const MOST: usize = 32;
const OWN: usize = 30;

fn store() -> (Memory<AnyAlgorithm>, ManualClock) {
    build_store(|builder| builder.entries(MOST))
}

fn ask(
    (store, limit): (&Memory<AnyAlgorithm>, &Limit<AnyAlgorithm>),
    key: &str,
    op: Op,
    cost: u64,
) -> Result<u64, MemoryError> {
    let verdict = store.apply_now(&Batch::one(&Check { limit, key, cost }).op(op));
    verdict.map(|verdict| if verdict.allowed() { verdict.remaining() } else { u64::MAX })
}

/// All that is counted is there, and no more than the caps.
fn is_exact(store: &Memory<AnyAlgorithm>) {
    let in_shard =
        |shard: &Mutex<Shard<_>>| lock(shard).states().map(AnyAlgorithm::entries_in).sum::<usize>();
    let reservations =
        store.reservations.iter().map(|shard| lock(shard).states().count()).sum::<usize>();
    assert_eq!(store.capacity.entries.used(), store.shards.iter().map(in_shard).sum::<usize>());
    assert_eq!((store.len(), store.reservations()), (count_states(store), reservations));
    has_bounds(store);
}

fn has_bounds(store: &Memory<AnyAlgorithm>) {
    assert!(store.entry_count() <= store.capacity.most_entries());
    assert!(store.len() <= store.capacity.keys.most);
    assert!(store.reservations() <= store.capacity.reservations.most);
}

#[test]
fn a_key_that_finds_no_room_for_an_entry_gets_an_error_and_is_charged_nothing() {
    let full = MemoryError::Entries { most: MOST };
    assert_eq!(full.kind(), ErrorKind::Unavailable);
    assert_eq!(
        full.to_string(),
        "the logs of the store are full with 32 entries; give the store more entries, or use limits \
         that keep none, such as gcra or sliding-counter"
    );
    for words in ["sliding-log 100/h", "window-log 100/h", "sliding-log 100/h count attempts"] {
        let (limit, (store, clock)) = (limit_in_words("l", words), store());
        let on = (&store, &limit);
        for _ in 0..OWN {
            ask(on, "a", Op::Acquire, 1).expect("room");
            clock.advance(Duration::from_micros(1));
        }
        let before = ask(on, "a", Op::Peek, 1);
        assert_eq!(ask(on, "a", Op::Acquire, 1), Err(full.clone()), "{words}");
        assert_eq!(ask(on, "a", Op::Peek, 1), before);
        is_exact(&store);
        // Denials and refunds need no room.
        if words == "sliding-log 100/h" {
            assert_eq!(ask(on, "a", Op::Acquire, 71), Ok(u64::MAX));
            assert_eq!(ask(on, "a", Op::Refund, 1), Ok(71));
            // One more entry, and then another charge of the same moment.
            assert_eq!([70, 69].map(Ok), [(); 2].map(|()| ask(on, "a", Op::Acquire, 1)));
            assert_eq!(store.entry_count(), OWN);
        }
        ask(on, "a", Op::Reset, 1).expect("decides");
        assert_eq!(store.entry_count(), 0);
    }
}

#[test]
fn new_keys_share_a_bounded_state_and_other_keys_keep_their_limits() {
    let (limit, (store, clock)) = (limit_in_words("l", "window-log 5/h"), store());
    let acquire = |key: String| ask((&store, &limit), &key, Op::Acquire, 1);
    (0..OWN).for_each(|n| _ = acquire((n % 6).to_string()).expect("room"));
    (0..2).for_each(|n| _ = acquire(format!("new {n}")).expect("shared room"));
    assert_eq!(acquire("new 2".into()), Err(MemoryError::Entries { most: MOST }));
    assert_eq!((store.entry_count(), store.overflowed(), store.len()), (MOST, 3, 6));
    assert!((0..6).all(|n| acquire(n.to_string()) == Ok(u64::MAX)));
    is_exact(&store);
    // Expired states make room, even shared ones.
    clock.advance(HOUR);
    for n in 0..1_000 {
        acquire(format!("later {n}")).expect("room");
        clock.advance(HOUR / 6);
    }
    assert_eq!(store.overflowed(), 3);
    is_exact(&store);
}

#[test]
fn a_lease_needs_an_entry_until_its_release_and_a_repeated_id_needs_none() {
    let (limit, (store, clock)) = (limit_in_words("l", "concurrency 100/h"), store());
    let lease = |id: usize, op: Op, cost: u64| {
        clock.advance(Duration::from_micros(1));
        let check = Check { limit: &limit, key: "a", cost };
        store.apply_now(&Batch::one(&check).op(op).id(ReservationId::new(id as u128)))
    };
    assert!((0..OWN).all(|id| lease(id, Op::Acquire, 1).expect("room").allowed()));
    assert_eq!(lease(OWN, Op::Acquire, 1), Err(MemoryError::Entries { most: MOST }));
    assert!(lease(7, Op::Acquire, 1).expect("done already").allowed());
    // A renewed lease becomes the newest: one entry goes, and one comes.
    assert!(lease(3, Op::Renew, 1).expect("held").allowed());
    let _ = lease(5, Op::Settle, 0).expect("held");
    assert!(lease(OWN, Op::Acquire, 1).expect("room").allowed());
    assert_eq!(store.entry_count(), OWN);
    is_exact(&store);
}

/// All kinds of limits under the same names, all operations, alone and in batches, with ids and
/// without, at the store's time and at a given one. Some of these requests are invalid.
fn anything(
    clock: &ManualClock,
    seed: u64,
    calls: usize,
    mut decide: impl FnMut(&Batch<'_, AnyAlgorithm>),
) {
    let words = [
        "sliding-log 9/h",
        "window-log 9/h",
        "concurrency 9/h",
        "gcra 9/h",
        "gcra 1/d burst 30",
        "gcra 5/h burst 3 debt 2",
        "sliding-log 3/h count attempts",
        "fixed-window 9/h",
        "bucketed-window bucket 1s rates 9/s, 20/10s",
    ];
    let ops = [Op::Force, Op::Refund, Op::Reset, Op::Peek, Op::Settle, Op::Renew];
    let mut random = fastrand::Rng::with_seed(seed);
    let mut next = |bound| random.usize(..bound);
    for _ in 0..calls {
        let names = &["x", "y", "z"][..=next(3)];
        let on =
            names.iter().map(|name| (limit_in_words(name, words[next(9)]), next(20).to_string()));
        let (on, cost) = (on.collect::<Vec<_>>(), next(4) as u64);
        let checks: Vec<_> = on.iter().map(|(limit, key)| Check { limit, key, cost }).collect();
        let op = ops.get(next(9)).copied().unwrap_or(Op::Acquire);
        let mut batch = Batch::new(&checks).expect("distinct").op(op);
        if next(3) == 0 {
            batch = batch.id(ReservationId::new(next(20) as u128));
        }
        if next(8) == 0 {
            batch = batch.now(Now::At(clock.now().saturating_add_us(next(9_000) as u64)));
        }
        decide(&batch);
        clock.advance(Duration::from_secs(next(60) as u64));
    }
}

fn small_store() -> (Memory<AnyAlgorithm>, ManualClock) {
    build_store(|builder| builder.capacity(20).entries(12).reservations(30))
}

#[test]
fn all_counts_are_exact_after_every_operation() {
    let (store, clock) = small_store();
    let mut refused = 0;
    anything(&clock, 0, 20_000, |batch| {
        let answer = store.apply_now(batch);
        refused += usize::from(matches!(answer, Err(MemoryError::Entries { .. })));
        is_exact(&store);
    });
    assert!(refused > 100 && store.overflowed() > 10, "{refused}, {}", store.overflowed());
}

#[test]
fn no_count_drifts_under_concurrent_operations_of_every_kind() {
    for round in 0..6 {
        let (store, clock) = small_store();
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (store, clock) = (&store, &clock);
                scope.spawn(move || {
                    anything(clock, round * 8 + thread, 8_000, |batch| {
                        _ = store.apply_now(batch);
                        has_bounds(store);
                    });
                });
            }
        });
        assert!(store.overflowed() > 0, "the store was too small");
        is_exact(&store);
    }
}

/// A store that tells the states and a twin that does not decide alike, and the states told are
/// those that the store has from then on.
#[test]
fn the_states_told_are_those_that_the_decision_left() {
    let [(store, clock), (twin, twins_clock)] = [(); 2].map(|()| build_store(|builder| builder));
    let (mut allowed, mut denied, mut refused) = (0, 0, 0);
    anything(&clock, 16, 20_000, |batch| {
        twins_clock.set(clock.now());
        let due = twin.apply_now(batch);
        let told = block_on(store.apply_with_snapshot(batch));
        *match &due {
            Ok(verdict) if verdict.allowed() => &mut allowed,
            Ok(_) => &mut denied,
            Err(_) => &mut refused,
        } += 1;
        let states = batch.checks().iter().map(|it| store.state(it.limit, it.key)).collect();
        let left = Snapshot { now: time_of(batch.time(), clock.now()), states };
        assert_eq!(told, due.map(|verdict| (verdict, Some(left))), "{batch:?}");
    });
    assert!(allowed > 5_000 && denied > 200 && refused > 500, "{allowed} {denied} {refused}");
}

/// Another key's refund changes a shared state, and a place that becomes free ends its use.
#[test]
fn a_state_that_keys_share_in_a_full_store_is_not_told() {
    let (store, _clock) = build_store(|builder| builder.capacity(1));
    let limit = limit_in_words("l", "gcra 1/h burst 1");
    let tells = |key| {
        let check = Check { limit: &limit, key, cost: 1 };
        block_on(store.apply_with_snapshot(&Batch::one(&check))).expect("decides").1.is_some()
    };
    assert_eq!(["alice", "bob", "alice"].map(tells), [true, false, true]);
}
