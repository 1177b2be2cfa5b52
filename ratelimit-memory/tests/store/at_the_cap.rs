//! The behaviour of a full store.

use std::time::Duration;

use crate::common::Chance;
use ratelimit_core::{
    Algorithm, Attempts, Batch, Check, Clock, Compact, Concurrency, Decision, FixedWindow, Gcra,
    InMemory, Limit, Limits, ManualClock, Op, Policy, Rate, RateLimiter, ReservationId, SlidingLog,
    Step, SyncStore, Timestamp, TokenBucket, WindowLog, Write,
};
use ratelimit_memory::MemoryStore;

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

fn store<A: InMemory>(capacity: usize) -> (MemoryStore<A, ManualClock>, ManualClock) {
    let clock = ManualClock::new(BEGIN);
    (MemoryStore::builder().capacity(capacity).clock(clock.clone()).build(), clock)
}

/// A peek reports what an acquire of that cost would, even for a key that finds no place and would use the
/// shared state.
fn peeks_what_it_would_acquire(policy: Policy) {
    let limits = Limits::new([Limit::new("l", policy).expect("a name")]).expect("limits");
    let limiter = RateLimiter::new(limits, store(1).0);
    assert!(limiter.check_now("held").expect("decides").allowed());
    assert!(limiter.check_now("shares").expect("decides").allowed());
    let peeked = limiter.peek_now("shares too", 1).expect("decides").allowed();
    let acquired = limiter.check_now("shares too").expect("decides").allowed();
    assert_eq!((peeked, acquired), (false, false));
}

#[test]
fn a_peek_at_a_full_store_reports_the_shared_state_for_limits_in_buckets() {
    let rate = "1/h".parse().expect("a rate");
    peeks_what_it_would_acquire(Gcra::new(rate, 1).expect("a limit").into());
}

#[test]
fn a_peek_at_a_full_store_reports_the_shared_state_for_limits_in_shards() {
    let rate = "1/h".parse().expect("a rate");
    peeks_what_it_would_acquire(FixedWindow::new(rate).expect("a limit").into());
}

/// 5,000 of 100,000 states are idle, and all others are live: new keys soon find the idle states' places,
/// though not each at its first call, and never a live state's place.
#[test]
fn idle_states_among_many_live_ones_are_found_within_a_round_of_the_table() {
    let (store, clock) = store::<Gcra>(100_000);
    let limit = |rate: &str| {
        Limit::new("l", Gcra::new(rate.parse().expect("a rate"), 1).expect("a limit"))
            .expect("a name")
    };
    let (short, long) = (limit("1/s"), limit("1/d"));
    let ask = |limit: &Limit<Gcra>, key: String| {
        let check = Check { limit, key: &key, cost: 1 };
        store.apply_now(&Batch::one(&check)).expect("decides").allowed()
    };
    assert!((0..95_000).all(|n| ask(&long, format!("live {n}"))));
    assert!((0..5_000).all(|n| ask(&short, format!("idle {n}"))));
    clock.advance(Duration::from_secs(10));
    assert_eq!(store.len(), 100_000);
    let calls = (0..20_000)
        .filter(|n| {
            ask(&long, format!("new {n}"));
            store.state("l", &format!("new {n}")).is_some()
        })
        .count();
    // All idle states have been replaced, and no live one.
    assert_eq!((calls, store.len()), (5_000, 100_000));
    assert!(!(0..95_000).any(|n| ask(&long, format!("live {n}"))));
}

/// The state of a [`Kind`]: all is denied until it expires. The states of `Plain` are compact; a state of
/// `Entry` has one entry.
#[derive(Clone, Copy, Debug)]
enum Either {
    Plain(Compact),
    Entry,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Plain,
    Entry,
}

const HOUR_US: u64 = 3_600_000_000;

impl Algorithm for Kind {
    type State = Either;

    fn capacity(&self) -> u64 {
        1
    }

    fn step(&self, state: Option<&Either>, now: Timestamp, cost: u64) -> Step<Either> {
        let own = matches!(
            (self, state),
            (Self::Plain, Some(Either::Plain(_))) | (Self::Entry, Some(Either::Entry))
        );
        let left = u64::from(!own);
        let charged = if cost <= left { cost } else { 0 };
        let decision = Decision {
            allowed: cost <= left,
            cost,
            limit: 1,
            remaining: left - charged,
            retry_after_us: (cost <= left).then_some(0),
            replenish_after_us: 0,
            reset_after_us: 0,
        };
        let state = match self {
            Self::Plain => Either::Plain(Compact { at: now, span_us: HOUR_US, extra: 0 }),
            Self::Entry => Either::Entry,
        };
        let expires = now.saturating_add_us(HOUR_US);
        let write = if charged == 0 { Write::Keep } else { Write::Put { state, expires } };
        Step { decision, write }
    }
}

impl InMemory for Kind {
    fn is_compact(&self) -> bool {
        matches!(self, Self::Plain)
    }

    fn to_compact(state: &Either) -> Option<Compact> {
        match state {
            Either::Plain(compact) => Some(*compact),
            Either::Entry => None,
        }
    }

    fn from_compact(compact: Compact) -> Option<Either> {
        Some(Either::Plain(compact))
    }

    fn entries_in(state: &Either) -> usize {
        usize::from(matches!(state, Either::Entry))
    }

    /// More than a step ever adds: the method returns an upper bound.
    fn entries_per_step(&self) -> usize {
        if matches!(self, Self::Entry) { 2 } else { 0 }
    }
}

/// The limit was changed to one that keeps entries, and there is room for the entries that it needs, but not
/// for the most that it could need: the charge is written all the same.
#[test]
fn a_charge_that_changes_the_algorithm_is_written_where_entries_are_scarce() {
    let store: MemoryStore<Kind, _> =
        MemoryStore::builder().capacity(100).entries(2).clock(ManualClock::new(BEGIN)).build();
    let plain = Limit::new("l", Kind::Plain).expect("a name");
    let entry = Limit::new("l", Kind::Entry).expect("a name");
    let ask = |limit: &Limit<Kind>| {
        let check = Check { limit, key: "a", cost: 1 };
        store.apply_now(&Batch::one(&check).op(Op::Acquire)).expect("decides").allowed()
    };
    assert!(ask(&plain) && !ask(&plain));
    assert!(ask(&entry));
    assert!(!ask(&entry), "what was admitted was not charged");
}

/// An algorithm whose steps add more entries than it announces.
#[derive(Clone, Copy, Debug)]
struct Liar;

impl Algorithm for Liar {
    type State = usize;

    fn capacity(&self) -> u64 {
        100
    }

    fn step(&self, state: Option<&usize>, _: Timestamp, cost: u64) -> Step<usize> {
        let decision = Decision {
            allowed: true,
            cost,
            limit: 100,
            remaining: 1,
            retry_after_us: Some(0),
            replenish_after_us: 0,
            reset_after_us: 0,
        };
        let state = state.map_or(1, |entries| entries + 3);
        Step { decision, write: Write::Put { state, expires: Timestamp::MAX } }
    }
}

impl InMemory for Liar {
    fn entries_in(state: &usize) -> usize {
        *state
    }

    fn entries_per_step(&self) -> usize {
        1
    }
}

#[test]
fn entries_that_an_algorithm_did_not_announce_are_counted() {
    let (store, _) = store::<Liar>(10);
    let limit = Limit::new("l", Liar).expect("a name");
    for expected in [1, 4, 7] {
        let check = Check { limit: &limit, key: "a", cost: 1 };
        let _ = store.apply_now(&Batch::one(&check)).expect("decides");
        assert_eq!(store.entry_count(), expected);
    }
}

/// Every policy that has a state to share, of a limit of `count`.
fn shared_policies(count: u64) -> Vec<Policy> {
    let rate = Rate::per_us(count, 3_600_000_000).expect("a rate");
    vec![
        Gcra::new(rate, count).expect("a limit").into(),
        TokenBucket::new(rate, count).expect("a limit").into(),
        FixedWindow::new(rate).expect("a limit").into(),
        SlidingLog::new(rate).expect("a limit").into(),
        WindowLog::new(rate).expect("a limit").into(),
        Attempts::new(FixedWindow::new(rate).expect("a limit")).into(),
    ]
}

/// New keys of one limit in one batch are charged to the limit's one shared state, all or none. The verdict is
/// the one that a single key would get for the sum of their costs.
#[test]
fn a_batch_of_new_keys_at_a_full_store_is_decided_as_the_sum_of_its_costs() {
    for (keys, burst) in
        [(2, 1), (2, 2), (3, 5), (64, 64), (65, 64), (66, 64), (200, 1), (200, 250)]
    {
        for policy in shared_policies(burst) {
            let (wide, wide_clock) = store::<Policy>(1);
            let (alone, alone_clock) = store::<Policy>(1);
            let limit = Limit::new("l", policy).expect("a name");
            for store in [&wide, &alone] {
                let check = Check { limit: &limit, key: "held", cost: 1 };
                assert!(store.apply_now(&Batch::one(&check)).expect("decides").allowed());
            }
            let names: Vec<String> = (0..keys).map(|n| format!("new {n}")).collect();
            let checks: Vec<_> =
                names.iter().map(|key| Check { limit: &limit, key, cost: 1 }).collect();
            let batch = Batch::new(&checks).expect("distinct");
            for turn in 0..3 {
                let sum = Check { limit: &limit, key: "sum", cost: keys };
                let expected = *alone.apply_now(&Batch::one(&sum)).expect("decides").summary();
                let peeked = wide.apply_now(&batch.op(Op::Peek)).expect("decides");
                let verdict = wide.apply_now(&batch).expect("decides");
                let about = format!("{keys} keys, {policy:?}, turn {turn}");
                assert_eq!(verdict.decisions().len(), checks.len());
                for decision in verdict.decisions() {
                    assert_eq!(decision, &Decision { cost: 1, ..expected }, "{about}");
                }
                assert_eq!(peeked.allowed(), verdict.allowed(), "{about}");
                assert_eq!(verdict.allowed(), turn == 0 && keys <= burst, "{about}");
                let later = Duration::from_micros(700 * (turn + 1));
                wide_clock.advance(later);
                alone_clock.advance(later);
            }
            assert_eq!((wide.len(), wide.overflowed()), (1, 6 * keys));
        }
    }
}

/// Two limits under one name are two checks of one shared state.
#[test]
fn limits_that_share_a_name_share_the_state_within_a_batch() {
    let (store, _) = store::<Gcra>(1);
    let rate = "5/h".parse().expect("a rate");
    let limits: Vec<_> = (0..6)
        .map(|_| Limit::new("l", Gcra::new(rate, 5).expect("a limit")).expect("a name"))
        .collect();
    let ask = |checks: &[Check<'_, Gcra>]| {
        store.apply_now(&Batch::new(checks).expect("distinct")).expect("decides")
    };
    let names: Vec<String> = (0..6).map(|n| format!("new {n}")).collect();
    assert!(ask(&[Check { limit: &limits[0], key: "held", cost: 1 }]).allowed());
    let checks: Vec<_> =
        limits.iter().zip(&names).map(|(limit, key)| Check { limit, key, cost: 1 }).collect();
    assert!(!ask(&checks).allowed());
    assert!(ask(&checks[..5]).allowed());
    assert!(!ask(&checks[5..]).allowed());
}

/// A batch of keys with states of their own and keys that use the shared state is all or nothing.
#[test]
fn a_batch_of_existing_and_new_keys_at_a_full_store_is_all_or_nothing() {
    let (store, _) = store::<Gcra>(2);
    let rate = "5/h".parse().expect("a rate");
    let limit = Limit::new("l", Gcra::new(rate, 5).expect("a limit")).expect("a name");
    let other = Limit::new("other", Gcra::new(rate, 3).expect("a limit")).expect("a name");
    let check = |limit, key| Check { limit, key, cost: 1 };
    let ask = |checks: &[Check<'_, Gcra>], op| {
        let batch = Batch::new(checks).expect("distinct").op(op);
        let verdict = store.apply_now(&batch).expect("decides");
        verdict.decisions().iter().map(|it| (it.allowed, it.remaining)).collect::<Vec<_>>()
    };
    assert_eq!(ask(&[check(&limit, "a"), check(&other, "a")], Op::Acquire), [(true, 4), (true, 2)]);
    let mixed = [
        check(&limit, "a"),
        check(&limit, "new 0"),
        check(&other, "new 0"),
        check(&limit, "new 1"),
        check(&other, "a"),
    ];
    assert_eq!(ask(&mixed, Op::Acquire), [(true, 3), (true, 3), (true, 2), (true, 3), (true, 1)]);
    assert_eq!(ask(&mixed, Op::Acquire), [(true, 2), (true, 1), (true, 1), (true, 1), (true, 0)]);
    // The last key has nothing left: no key is charged, and all others report what they have.
    assert_eq!(
        ask(&mixed, Op::Acquire),
        [(true, 2), (false, 1), (true, 1), (false, 1), (false, 0)]
    );
    assert_eq!(ask(&mixed[..1], Op::Peek), [(true, 1)]);
    // A refund gives back what the batch charged.
    assert_eq!(ask(&mixed, Op::Refund), [(true, 3), (true, 3), (true, 2), (true, 3), (true, 1)]);
    assert_eq!(store.len(), 2);
}

/// Leases that share a state are granted together or not at all, but renewed and released one by one, whether
/// they were granted at the same moment or not.
#[test]
fn leases_that_share_a_state_are_renewed_and_released_one_by_one() {
    let clock = ManualClock::new(BEGIN);
    // Four of the entries are for shared states.
    let builder = MemoryStore::builder().entries(64).capacity(1_000).clock(clock.clone());
    let store: MemoryStore<Policy, _> = builder.build();
    let rate = |text: &str| text.parse::<Rate>().expect("a rate");
    let lease = Concurrency::new(rate("4/10s")).expect("a limit").into();
    let lease = Limit::<Policy>::new("lease", lease).expect("a name");
    let filler = Limit::new("filler", Gcra::new(rate("1/d"), 1).expect("a limit").into());
    let filler = filler.expect("a name");
    let ask = |id, keys: &[&str], op, cost| {
        let checks: Vec<_> = keys.iter().map(|key| Check { limit: &lease, key, cost }).collect();
        let batch = Batch::new(&checks).expect("distinct").op(op).id(ReservationId::new(id));
        store.apply_now(&batch).expect("decides")
    };
    let peek = |cost| {
        let check = Check { limit: &lease, key: "unknown", cost };
        let verdict = store.apply_now(&Batch::one(&check).op(Op::Peek)).expect("decides");
        (verdict.allowed(), verdict.retry_after().map(|wait| wait.as_secs()))
    };
    let log = SlidingLog::new(rate("1/d")).expect("a limit").into();
    let log = Limit::<Policy>::new("log", log).expect("a name");
    for n in 0..60 {
        assert!(store.acquire_now(&log, &n.to_string(), 1).expect("room").allowed());
    }
    let verdict = ask(7, &["a", "b"], Op::Acquire, 1);
    assert_eq!((verdict.allowed(), verdict.remaining()), (true, 2));
    clock.advance(Duration::from_secs(1));
    assert_eq!(ask(8, &["c"], Op::Acquire, 1).remaining(), 1);
    // Ids that are sent again change nothing.
    assert!(ask(7, &["a", "b"], Op::Acquire, 1).allowed());
    let verdict = ask(9, &["d", "e"], Op::Acquire, 1);
    assert!(
        !verdict.allowed()
            && verdict.decisions().iter().all(|it| (it.allowed, it.remaining) == (false, 1))
    );
    assert!(ask(9, &["d"], Op::Acquire, 1).allowed());
    // From here on there is no place for a key either, and nothing expires.
    for n in store.len()..1_000 {
        let key = format!("filler {n}");
        assert!(store.acquire_now(&filler, &key, 1).expect("room").allowed());
    }
    clock.advance(Duration::from_secs(1));
    // The leases of the first second expire first.
    assert_eq!([1, 2, 3].map(peek), [(false, Some(8)), (false, Some(8)), (false, Some(9))]);
    for (id, key) in [(8, "c"), (9, "d")] {
        let _ = ask(id, &[key], Op::Renew, 1);
    }
    assert_eq!([1, 2, 3].map(peek), [(false, Some(8)), (false, Some(8)), (false, Some(10))]);
    let _ = ask(7, &["a", "b"], Op::Settle, 0);
    assert_eq!([2, 3].map(peek), [(true, Some(0)), (false, Some(10))]);
    for (id, key) in [(8, "c"), (9, "d")] {
        let _ = ask(id, &[key], Op::Settle, 0);
    }
    assert_eq!(peek(4), (true, Some(0)));
    assert_eq!(store.len(), 1_000);
}

/// A key is admitted at most twice its limit within any time, whether it finds a place always, never or at
/// times: once by the shared state, and once by its own.
#[test]
fn a_key_at_a_full_store_is_admitted_at_most_twice_its_limit() {
    const BURST: u64 = 4;
    const TOKEN_US: u64 = 1_000_000;
    let mut chance = Chance(11);
    for round in 0..200 {
        let (store, clock) = store::<Gcra>(1 + round % 3);
        let rate = Rate::per_us(1, TOKEN_US).expect("a rate");
        let limit = Limit::new("l", Gcra::new(rate, BURST).expect("a limit")).expect("a name");
        let mut admitted: Vec<Vec<u64>> = vec![Vec::new(); 6];
        for _ in 0..300 {
            let key = usize::try_from(chance.below(6)).expect("small");
            let check = Check { limit: &limit, key: &key.to_string(), cost: 1 };
            let op = if chance.below(16) == 0 { Op::Reset } else { Op::Acquire };
            // A reset is deliberate: it starts the key's limit again.
            if op == Op::Reset && store.state("l", check.key).is_none() {
                continue;
            }
            let verdict = store.apply_now(&Batch::one(&check).op(op)).expect("decides");
            if op == Op::Reset {
                admitted[key].clear();
            } else if verdict.allowed() {
                admitted[key].push(clock.now().as_us());
            }
            let pauses = [0, 0, 0, TOKEN_US / 3, 2 * TOKEN_US, 5 * TOKEN_US];
            let pause = pauses[usize::try_from(chance.below(6)).expect("small")];
            clock.advance(Duration::from_micros(pause));
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
    let (store, _clock) = store::<Gcra>(1);
    let rate = Rate::per_us(1, TOKEN_US).expect("a rate");
    let limit = Limit::new("l", Gcra::new(rate, BURST).expect("a limit")).expect("a name");
    let admitted = |key: &str, times: u64| {
        (0..times).filter(|_| store.acquire_now(&limit, key, 1).expect("decides").allowed()).count()
    };
    assert_eq!((admitted("held", 1), admitted("new", 10)), (1, 4));
    let check = Check { limit: &limit, key: "held", cost: 1 };
    let _ = store.apply_now(&Batch::one(&check).op(Op::Reset)).expect("decides");
    assert_eq!((admitted("new", 10), store.len()), (4, 1));
}

#[test]
fn a_batch_at_a_full_store_that_sweeps_its_own_key_counts_it_once() {
    for keys in 3..40 {
        let clock = ManualClock::new(BEGIN);
        let store: MemoryStore<FixedWindow, _> =
            MemoryStore::builder().capacity(keys).shards(1).clock(clock.clone()).build();
        let limit = |us| {
            let window = FixedWindow::new(Rate::per_us(5, us).expect("a rate")).expect("a limit");
            Limit::new("l", window).expect("a name")
        };
        let (long, short) = (limit(HOUR_US), limit(1_000));
        for n in 0..keys {
            let limit = if n == keys - 2 { &short } else { &long };
            assert!(store.acquire_now(limit, &n.to_string(), 1).expect("room").allowed());
        }
        clock.advance(Duration::from_secs(1));
        let own = (keys - 2).to_string();
        let checks = [own.as_str(), "new"].map(|key| Check { limit: &long, key, cost: 1 });
        let _ = store.apply_now(&Batch::new(&checks).expect("distinct")).expect("decides");
        let all = (0..keys).map(|n| n.to_string()).chain(["new".to_owned()]);
        assert_eq!(
            store.len(),
            all.filter(|key| store.state("l", key).is_some()).count(),
            "{keys}"
        );
    }
}
