//! The behaviour of a full store.

use std::time::Duration;

use ratelimit_core::algorithm::{InMemory, SlidingLogState, Step};
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    Algorithm, AnyAlgorithm, Clock, Decision, Limit, ReservationId, SlidingLog, SyncStore,
    Timestamp,
};
use ratelimit_testkit::{Admissions, PureStore};

use crate::common::{MIXED, Memory, algorithm, ask, limit, store};

/// The limit was changed to one that keeps entries, and there is room for the entries that a batch
/// needs, but not for the most that it could need: the charge is written all the same.
#[test]
fn a_charge_that_changes_the_algorithm_is_written_where_entries_are_scarce() {
    // One of the entries is for shared states.
    let (store, _): (Memory, _) = store(|builder| builder.entries(3));
    let (before, after) = (limit("l", "gcra 1/h"), limit("l", "sliding-log 1/h"));
    let log = limit("log", "sliding-log 9/h");
    for limit in [&before, &log] {
        assert!(ask(&store, (limit, "a"), Op::Acquire, 1).allowed());
    }
    // The second charge of one moment needs no entry.
    let checks = [&after, &log].map(|limit| Check { limit, key: "a", cost: 1 });
    assert!(store.apply_now(&Batch::new(&checks).expect("distinct")).expect("room").allowed());
    assert!(!ask(&store, (&after, "a"), Op::Acquire, 1).allowed());
    assert_eq!(store.entry_count(), 2);
}

/// A log that announces no entries.
#[derive(Clone, Copy, Debug)]
struct Liar(SlidingLog);

impl Algorithm for Liar {
    type State = SlidingLogState;

    fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        self.0.step(state, now, cost)
    }
}

impl InMemory for Liar {
    fn entries_in(state: &Self::State) -> usize {
        state.entries.len()
    }
}

#[test]
fn entries_that_an_algorithm_did_not_announce_are_counted() {
    let (store, clock): (Memory<Liar>, _) = store(|builder| builder);
    let log = SlidingLog::new("100/h".parse().expect("a rate")).expect("a limit");
    let limit = Limit::new("l", Liar(log)).expect("a name");
    for expected in [1, 2, 3] {
        let _ = ask(&store, (&limit, "a"), Op::Acquire, 1);
        assert_eq!(store.entry_count(), expected);
        clock.advance(Duration::from_micros(1));
    }
}

/// New keys at a full store share one state per limit: a batch is decided, all or nothing, as one
/// that asks this state for the sum of their costs, and a key with a state of its own for its own.
/// Reservations and leases are repeated, renewed and settled in the same way.
#[test]
fn keys_that_share_a_state_are_decided_as_one_of_the_sum_of_their_costs() {
    for words in MIXED {
        let (store, clock): (Memory, _) =
            store(|builder| builder.capacity(1).reservations(100_000));
        let limits =
            [limit("own", "gcra 1/m burst 900"), limit("l", words), limit("m", "gcra 9/s")];
        let mut pure = PureStore::new();
        pure.clock().set(clock.now());
        let half = Check { limit: &limits[0], key: "own", cost: 450 };
        let decided =
            [store.apply_now(&Batch::one(&half)).ok(), pure.decide(&Batch::one(&half)).ok()];
        assert_eq!(decided[0], decided[1]);
        let mut random = fastrand::Rng::with_seed(7);
        let mut below = |bound: usize| random.usize(..bound);
        // Each has an id of its own.
        let sets: Vec<Vec<(usize, String)>> = (0..6)
            .map(|set| {
                let new =
                    (0..if set == 0 { 200 } else { 1 + below(3) }).map(|n| (1, n.to_string()));
                let others = (0..below(3)).map(|n| (2, n.to_string()));
                new.chain(others).chain((set % 3 == 0).then(|| (0, "own".into()))).collect()
            })
            .collect();
        let (mut allowed, mut denied, mut settled) = (0, 0, vec![0; sets.len()]);
        for turn in 0..2_000 {
            let (set, cost) = (below(sets.len()), below(3) as u64);
            let ops = [Op::Peek, Op::Refund, Op::Force, Op::Adopt, Op::Renew, Op::Extend];
            let settles = [Op::Settle; 4];
            let op = *ops.iter().chain(&settles).nth(below(16)).unwrap_or(&Op::Acquire);
            let has_id = op.needs_id() || op != Op::Adopt && below(4) == 0;
            // What has been settled is not reserved again under its id.
            let id = has_id.then(|| ReservationId::new((settled[set] * sets.len() + set) as u128));
            let (mut checks, mut sums) = (Vec::new(), Vec::<Check<'_, AnyAlgorithm>>::new());
            for (limit, key) in &sets[set] {
                let check = Check { limit: &limits[*limit], key, cost };
                checks.push(check);
                match sums.iter_mut().find(|sum| sum.limit.name() == check.limit.name()) {
                    // Of one state no more remains than of the least.
                    Some(_) if op == Op::Adopt => {}
                    Some(sum) => sum.cost += cost,
                    None => {
                        sums.push(Check { key: if *limit == 0 { key } else { "shared" }, ..check });
                    }
                }
            }
            let batch = |checks| {
                let batch = Batch::new(checks).expect("distinct").op(op);
                id.map_or(batch, |id| batch.id(id))
            };
            pure.clock().set(clock.now());
            let next = pure.clone();
            let due = next.decide(&batch(&sums));
            let has = |store: &PureStore, limit| store.state(limit, "shared").is_some();
            // One caller's refund does not free all others: see below.
            if op != Op::Settle
                && limits.iter().any(|limit| has(&pure, limit) && !has(&next, limit))
            {
                continue;
            }
            let got = store.apply_now(&batch(&checks));
            let pure_settles = due.is_ok();
            let due = due.map(|due| {
                *if due.allowed() { &mut allowed } else { &mut denied } += 1;
                let of = |check: &Check<'_, AnyAlgorithm>| {
                    let part = sums.iter().position(|sum| sum.limit.name() == check.limit.name());
                    Decision { cost, ..due.decisions()[part.expect("a part")] }
                };
                checks.iter().map(of).collect::<Vec<_>>()
            });
            let got = got.map(|got| got.decisions().to_vec());
            assert_eq!(
                got.ok(),
                due.ok(),
                "{words}, turn {turn}: {op} of {cost} each under {id:?}: {sums:?}"
            );
            settled[set] += usize::from(op == Op::Settle && pure_settles);
            pure = next;
            clock.advance(Duration::from_micros([0, 700, 100_000, 3_000_000][below(4)]));
        }
        assert!(allowed > 500 && denied > 100, "{words}: {allowed} {denied}");
        assert_eq!(store.len(), 1);
    }
}

/// A key is admitted at most twice its limit within any time, whether it finds a place always,
/// never or at times: once by the shared state, and once by its own.
#[test]
fn a_key_at_a_full_store_is_admitted_at_most_twice_its_limit() {
    let limit = limit("l", "gcra 1/s burst 4");
    let mut random = fastrand::Rng::with_seed(11);
    for round in 0..200 {
        let (store, clock): (Memory, _) = store(|builder| builder.capacity(1 + round % 3));
        let mut admitted = [(); 6].map(|()| Admissions::new(algorithm("gcra 2/s burst 8")));
        for _ in 0..300 {
            let key = random.usize(..6);
            let (name, now) = (key.to_string(), [clock.now(); 2]);
            let op = if random.u8(..16) == 0 { Op::Reset } else { Op::Acquire };
            // A reset is deliberate: it starts the key's limit again.
            if op == Op::Reset && store.state(&limit, &name).is_none() {
                continue;
            }
            let verdict = ask(&store, (&limit, &name), op, 1);
            if op == Op::Reset {
                admitted[key].allow(now, 8);
            } else if verdict.allowed() {
                admitted[key].add(now, 1);
            }
            let pauses_us = [0, 0, 0, 333_333, 2_000_000, 5_000_000];
            clock.advance(Duration::from_micros(random.choice(pauses_us).expect("some")));
        }
        for key in admitted {
            key.check().expect("twice the limit");
        }
    }
    // The bound is reached.
    let (store, _): (Memory, _) = store(|builder| builder.capacity(1));
    let admitted = |key: &str, times: u64| {
        (0..times).filter(|_| ask(&store, (&limit, key), Op::Acquire, 1).allowed()).count()
    };
    assert_eq!((admitted("held", 1), admitted("new", 10)), (1, 4));
    let _ = ask(&store, (&limit, "held"), Op::Reset, 1);
    assert_eq!((admitted("new", 10), store.len()), (4, 1));
}

#[test]
fn a_reset_or_refund_at_a_full_store_frees_no_other_caller() {
    for op in [Op::Reset, Op::Refund] {
        let (store, _): (Memory, _) = store(|builder| builder.capacity(1));
        let limit = limit("l", "gcra 1/h burst 4");
        let admitted = |key: &str| ask(&store, (&limit, key), Op::Acquire, 1).allowed();
        assert!(admitted("held"));
        assert!((0..4).all(|_| admitted("alice")) && !admitted("alice"));
        // It shares her state.
        let _ = ask(&store, (&limit, "mallory"), op, 4);
        assert!(!admitted("alice"), "{op}");
    }
}
