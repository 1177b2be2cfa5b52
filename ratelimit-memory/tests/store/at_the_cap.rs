//! The behaviour of a full store.

use std::time::Duration;

use ratelimit_core::algorithm::{InMemory, SlidingLogState, Step};
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    Algorithm, Clock, Decision, Limit, Policy, ReservationId, SlidingLog, SyncStore, Timestamp,
};

use crate::common::{Memory, ask, ask_all, limit, store};

/// The limit was changed to one that keeps entries, and there is room for the entries that a batch needs, but not
/// for the most that it could need: the charge is written all the same.
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

/// New keys of one limit in one batch are charged to the limit's one shared state, all or none. The verdict is
/// the one that a single key would get for the sum of their costs, and a peek says beforehand whether it allows.
#[test]
fn a_batch_of_new_keys_at_a_full_store_is_decided_as_the_sum_of_its_costs() {
    for (keys, burst) in
        [(1, 1), (2, 1), (2, 2), (3, 5), (64, 64), (65, 64), (66, 64), (200, 1), (200, 250)]
    {
        for algorithm in [
            "gcra N/h",
            "token-bucket N/h",
            "fixed-window N/h",
            "sliding-log N/h",
            "window-log N/h",
            "fixed-window N/h count attempts",
        ] {
            let words = algorithm.replace('N', &burst.to_string());
            let [(wide, wide_clock), (alone, alone_clock)]: [(Memory, _); 2] =
                std::array::from_fn(|_| store(|builder| builder.capacity(1)));
            let limit = limit("l", &words);
            for store in [&wide, &alone] {
                assert!(ask(store, (&limit, "held"), Op::Acquire, 1).allowed());
            }
            let names: Vec<String> = (0..keys).map(|n| format!("new {n}")).collect();
            for turn in 0..3 {
                let expected = *ask(&alone, (&limit, "sum"), Op::Acquire, keys).summary();
                let peeked = ask_all(&wide, &limit, &names, Op::Peek);
                let verdict = ask_all(&wide, &limit, &names, Op::Acquire);
                let each = Decision { cost: 1, ..expected };
                assert_eq!(verdict.decisions(), vec![each; names.len()], "{words}, turn {turn}");
                assert_eq!(peeked.allowed(), verdict.allowed(), "{words}, turn {turn}");
                assert_eq!(verdict.allowed(), turn == 0 && keys <= burst, "{words}, turn {turn}");
                wide_clock.advance(Duration::from_micros(700));
                alone_clock.advance(Duration::from_micros(700));
            }
            assert_eq!((wide.len(), wide.overflowed()), (1, 6 * keys));
        }
    }
}

/// A batch of keys with states of their own and keys that use the shared state is all or nothing.
#[test]
fn a_batch_of_existing_and_new_keys_at_a_full_store_is_all_or_nothing() {
    let (store, _): (Memory, _) = store(|builder| builder.capacity(2));
    let (limit, other) = (limit("l", "gcra 5/h"), limit("other", "gcra 3/h"));
    let check = |limit, key| Check { limit, key, cost: 1 };
    let ask = |checks: &[Check<'_, Policy>], op| {
        let batch = Batch::new(checks).expect("distinct").op(op);
        let verdict = store.apply_now(&batch).expect("decides");
        verdict.decisions().iter().map(|it| (it.allowed, it.remaining)).collect::<Vec<_>>()
    };
    let mixed = [
        check(&limit, "a"),
        check(&limit, "new 0"),
        check(&other, "new 0"),
        check(&limit, "new 1"),
        check(&other, "a"),
    ];
    assert_eq!(ask(&[mixed[0], mixed[4]], Op::Acquire), [(true, 4), (true, 2)]);
    for (op, left) in [
        (Op::Acquire, [(true, 3), (true, 3), (true, 2), (true, 3), (true, 1)]),
        (Op::Acquire, [(true, 2), (true, 1), (true, 1), (true, 1), (true, 0)]),
        // The last key has nothing left: no key is charged, and all others report what they have.
        (Op::Acquire, [(true, 2), (false, 1), (true, 1), (false, 1), (false, 0)]),
        // A refund gives back what the batch charged.
        (Op::Refund, [(true, 3), (true, 3), (true, 2), (true, 3), (true, 1)]),
    ] {
        assert_eq!(ask(&mixed, op), left, "{op}");
    }
    assert_eq!(store.len(), 2);
}

/// Leases that share a state are granted together or not at all, and renewed and released by their ids, whether
/// they were granted at the same moment or not.
#[test]
fn leases_that_share_a_state_are_renewed_and_released_by_their_ids() {
    // Four of the entries are for shared states.
    let (store, clock): (Memory, _) = store(|builder| builder.entries(64).capacity(1_000));
    let (lease, filler) = (limit("lease", "concurrency 4/10s"), limit("filler", "gcra 1/d"));
    let reserved = |id, keys: &[&str], op, cost| {
        let checks: Vec<_> = keys.iter().map(|key| Check { limit: &lease, key, cost }).collect();
        let batch = Batch::new(&checks).expect("distinct").op(op).id(ReservationId::new(id));
        let verdict = store.apply_now(&batch).expect("decides");
        assert!(verdict.decisions().iter().all(|it| it.remaining == verdict.remaining()));
        (verdict.allowed(), verdict.remaining())
    };
    let peek = |cost| {
        let verdict = ask(&store, (&lease, "unknown"), Op::Peek, cost);
        (verdict.allowed(), verdict.retry_after().map(|wait| wait.as_secs()))
    };
    let log = limit("log", "sliding-log 1/d");
    assert!((0..60).all(|n| ask(&store, (&log, &n.to_string()), Op::Acquire, 1).allowed()));
    assert_eq!(reserved(7, &["a", "b"], Op::Acquire, 1), (true, 2));
    clock.advance(Duration::from_secs(1));
    assert_eq!(reserved(8, &["c"], Op::Acquire, 1), (true, 1));
    // Ids that are sent again change nothing.
    assert!(reserved(7, &["a", "b"], Op::Acquire, 1).0);
    assert_eq!(reserved(9, &["d", "e"], Op::Acquire, 1), (false, 1));
    assert_eq!(reserved(9, &["d"], Op::Acquire, 1), (true, 0));
    // From here on there is no place for a key either, and nothing expires.
    let fill = |n| ask(&store, (&filler, &format!("filler {n}")), Op::Acquire, 1).allowed();
    assert!((store.len()..1_000).all(fill));
    clock.advance(Duration::from_secs(1));
    // The leases of the first second expire first.
    assert_eq!([1, 2, 3].map(peek), [(false, Some(8)), (false, Some(8)), (false, Some(9))]);
    for (id, key) in [(8, "c"), (9, "d")] {
        let _ = reserved(id, &[key], Op::Renew, 1);
    }
    assert_eq!([1, 2, 3].map(peek), [(false, Some(8)), (false, Some(8)), (false, Some(10))]);
    clock.advance(Duration::from_secs(1));
    let _ = reserved(7, &["a", "b"], Op::Renew, 1);
    assert_eq!([1, 3].map(peek), [(false, Some(9)), (false, Some(10))]);
    let _ = reserved(7, &["a", "b"], Op::Settle, 0);
    assert_eq!([2, 3].map(peek), [(true, Some(0)), (false, Some(9))]);
    for (id, key) in [(8, "c"), (9, "d")] {
        let _ = reserved(id, &[key], Op::Settle, 0);
    }
    assert_eq!((peek(4), store.len()), ((true, Some(0)), 1_000));
}

/// Reservations of keys that share a state are settled at the costs of each, and repeated as they were.
#[test]
fn reservations_that_share_a_state_are_settled_once() {
    let (store, _): (Memory, _) = store(|builder| builder.capacity(1).reservations(9));
    let limit = limit("l", "gcra 9/d");
    let _ = ask(&store, (&limit, "held"), Op::Acquire, 1);
    let reserved = |op, costs: [u64; 2]| {
        let checks = [("a", costs[0]), ("b", costs[1])].map(|(key, cost)| Check {
            limit: &limit,
            key,
            cost,
        });
        let batch = Batch::new(&checks).expect("distinct").op(op).id(ReservationId::new(7));
        store.apply_now(&batch).map(|verdict| verdict.remaining()).ok()
    };
    assert_eq!([(); 2].map(|()| reserved(Op::Acquire, [4, 2])), [Some(3); 2]);
    assert_eq!([(); 2].map(|()| reserved(Op::Settle, [1, 2])), [Some(6); 2]);
    assert_eq!(reserved(Op::Settle, [3, 1]), None, "at other costs");
    assert_eq!(ask(&store, (&limit, "c"), Op::Peek, 0).remaining(), 6);
}

/// A key is admitted at most twice its limit within any time, whether it finds a place always, never or at
/// times: once by the shared state, and once by its own.
#[test]
fn a_key_at_a_full_store_is_admitted_at_most_twice_its_limit() {
    const BURST: u64 = 4;
    const TOKEN_US: u64 = 1_000_000;
    let limit = limit("l", "gcra 1/s burst 4");
    let mut random = fastrand::Rng::with_seed(11);
    for round in 0..200 {
        let (store, clock): (Memory, _) = store(|builder| builder.capacity(1 + round % 3));
        let mut admitted: Vec<Vec<u64>> = vec![Vec::new(); 6];
        for _ in 0..300 {
            let key = random.usize(..6);
            let name = key.to_string();
            let op = if random.u8(..16) == 0 { Op::Reset } else { Op::Acquire };
            // A reset is deliberate: it starts the key's limit again.
            if op == Op::Reset && store.state("l", &name).is_none() {
                continue;
            }
            let verdict = ask(&store, (&limit, &name), op, 1);
            if op == Op::Reset {
                admitted[key].clear();
            } else if verdict.allowed() {
                admitted[key].push(clock.now().as_us());
            }
            let pauses = [0, 0, 0, TOKEN_US / 3, 2 * TOKEN_US, 5 * TOKEN_US];
            clock.advance(Duration::from_micros(random.choice(pauses).expect("some")));
        }
        for times in &admitted {
            for (first, begin) in times.iter().enumerate() {
                for (last, end) in times.iter().enumerate().skip(first) {
                    let bound = BURST + (end - begin) / TOKEN_US;
                    let count = (last - first + 1) as u64;
                    assert!(count <= 2 * bound, "{count} in {} us", end - begin);
                }
            }
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
