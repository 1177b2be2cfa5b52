//! What a full store says and does.
#![cfg(not(loom))]
#![allow(clippy::expect_used, reason = "tests")]

use std::time::Duration;

use ratelimit_core::{
    Algorithm, Batch, Check, Decision, FixedWindow, Gcra, Limit, Limits, ManualClock, Op, Policy,
    RateLimiter, Small, Step, SyncStore, Tick, Write,
};
use ratelimit_memory::MemoryStore;

const BEGIN: Tick = Tick::saturating_from_us(1_795_218_392_123_456);

fn store<A: Algorithm>(capacity: usize) -> (MemoryStore<A, ManualClock>, ManualClock) {
    let clock = ManualClock::new(BEGIN);
    (MemoryStore::builder().capacity(capacity).clock(clock.clone()).build(), clock)
}

/// A peek says what an acquire of that cost would be told: also of a key for which there is no place, and that
/// would share a bucket.
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
fn a_peek_at_a_full_store_tells_of_the_shared_bucket_for_states_in_lines() {
    let rate = "1/h".parse().expect("a rate");
    peeks_what_it_would_acquire(Gcra::new(rate, 1).expect("a limit").into());
}

#[test]
fn a_peek_at_a_full_store_tells_of_the_shared_bucket_for_states_in_shards() {
    let rate = "1/h".parse().expect("a rate");
    peeks_what_it_would_acquire(FixedWindow::new(rate).expect("a limit").into());
}

/// 5,000 of 100,000 states are idle, all others are live: new keys find the idle ones' places soon, though not
/// each at its first call, and nobody else's.
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
    // All idle states have given way, and no live one.
    assert_eq!((calls, store.len()), (5_000, 100_000));
    assert!(!(0..95_000).any(|n| ask(&long, format!("live {n}"))));
}

/// What [`Doubled`] and [`Plain`] keep: a time until which all is denied. Told small by the one, and with an
/// entry by the other.
#[derive(Clone, Copy, Debug)]
enum Either {
    Plain(Small),
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

    fn step(&self, state: Option<&Either>, now: Tick, cost: u64) -> Step<Either> {
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
            reset_after_us: 0,
        };
        let state = match self {
            Self::Plain => Either::Plain(Small { at: now, span_us: HOUR_US, extra: 0 }),
            Self::Entry => Either::Entry,
        };
        let expires = now.saturating_add_us(HOUR_US);
        let write = if charged == 0 { Write::Keep } else { Write::Put { state, expires } };
        Step { decision, write }
    }

    fn is_small(&self) -> bool {
        matches!(self, Self::Plain)
    }

    fn to_small(state: &Either) -> Option<Small> {
        match state {
            Either::Plain(small) => Some(*small),
            Either::Entry => None,
        }
    }

    fn from_small(small: Small) -> Option<Either> {
        Some(Either::Plain(small))
    }

    fn entries_in(state: &Either) -> usize {
        usize::from(matches!(state, Either::Entry))
    }

    /// More than it ever is: it says the most.
    fn entries_a_step(&self) -> usize {
        if matches!(self, Self::Entry) { 2 } else { 0 }
    }
}

/// The limit was changed to one that keeps entries, and there is room for what it needs, but not for the most
/// that it could need: the charge is written all the same.
#[test]
fn a_charge_of_a_changed_limit_is_written_where_entries_are_tight() {
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

/// An algorithm that has more entries after a step than it said is counted all the same.
#[derive(Clone, Copy, Debug)]
struct Liar;

impl Algorithm for Liar {
    type State = usize;

    fn capacity(&self) -> u64 {
        100
    }

    fn step(&self, state: Option<&usize>, _: Tick, cost: u64) -> Step<usize> {
        let decision = Decision {
            allowed: true,
            cost,
            limit: 100,
            remaining: 1,
            retry_after_us: Some(0),
            reset_after_us: 0,
        };
        let state = state.map_or(1, |entries| entries + 3);
        Step { decision, write: Write::Put { state, expires: Tick::MAX } }
    }

    fn entries_in(state: &usize) -> usize {
        *state
    }

    fn entries_a_step(&self) -> usize {
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
