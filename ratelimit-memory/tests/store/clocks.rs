//! Clocks that go back, or are read too early: no state is lost or freed by that, and no capacity is minted.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use ratelimit_core::{
    Algorithm, Batch, Check, Clock, Decision, FixedWindow, Gcra, InMemory, Limit, ManualClock, Op,
    Policy, SlidingLog, SyncStore, Timestamp, Write,
};
use ratelimit_memory::MemoryStore;

use crate::common::Chance;

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);
const MINUTE_US: u64 = 60_000_000;
const HOUR_US: u64 = 60 * MINUTE_US;

fn gcra(rate: &str, burst: u64) -> Gcra {
    Gcra::new(rate.parse().expect("a rate"), burst).expect("a limit")
}

fn before_begin(us: u64) -> Timestamp {
    Timestamp::saturating_from_us(BEGIN.as_us() - us)
}

fn ask<A: InMemory, C: Clock>(
    store: &MemoryStore<A, C>,
    limit: &Limit<A>,
    key: &str,
    op: Op,
) -> Decision {
    let check = Check { limit, key, cost: 1 };
    *store.apply_now(&Batch::one(&check).op(op)).expect("decides").summary()
}

#[test]
fn states_from_before_a_clock_was_set_back_still_count() {
    let clock = ManualClock::new(BEGIN);
    let store = MemoryStore::builder().capacity(10_000).clock(clock.clone()).build();
    let limit = Limit::new("l", gcra("3/d", 3)).expect("a name");
    let keys: Vec<_> = (0..1_000).map(|n| format!("key {n}")).collect();
    for key in &keys {
        assert!((0..3).all(|_| ask(&store, &limit, key, Op::Acquire).allowed));
    }
    let states = || keys.iter().map(|key| store.state("l", key)).collect::<Vec<_>>();
    let written = states();
    assert!(written.iter().all(Option::is_some));
    // Less than an hour, an hour, and more: the store counts time from an hour before it was built.
    for back_us in [1, MINUTE_US, HOUR_US - 1, HOUR_US, HOUR_US + 1, 5 * HOUR_US, 10_000 * HOUR_US]
    {
        clock.set(before_begin(back_us));
        for key in &keys {
            let denied = ask(&store, &limit, key, Op::Acquire);
            assert!(!denied.allowed && denied.remaining == 0, "{back_us}: {denied:?}");
            // A third of a day after the write, as seen from now.
            assert_eq!(denied.retry_after_us, Some(8 * HOUR_US + back_us));
        }
        // New keys sweep in passing.
        for n in 0..1_000 {
            ask(&store, &limit, &format!("unknown {n}"), Op::Peek);
        }
        assert_eq!((store.len(), states()), (keys.len(), written.clone()), "{back_us}");
    }
    clock.set(BEGIN.saturating_add_us(8 * HOUR_US));
    for key in &keys {
        assert!(ask(&store, &limit, key, Op::Acquire).allowed);
        assert!(!ask(&store, &limit, key, Op::Acquire).allowed);
    }
}

#[test]
fn states_written_while_a_clock_is_set_back_count_and_expire() {
    for back_us in [MINUTE_US, HOUR_US, HOUR_US + 1, 30 * HOUR_US] {
        let clock = ManualClock::new(BEGIN);
        let store = MemoryStore::builder().capacity(10_000).clock(clock.clone()).build();
        let limit = Limit::new("l", gcra("1/h", 1)).expect("a name");
        clock.set(before_begin(back_us));
        let keys: Vec<_> = (0..500).map(|n| format!("key {n}")).collect();
        assert!(keys.iter().all(|key| ask(&store, &limit, key, Op::Acquire).allowed));
        assert!(!keys.iter().any(|key| ask(&store, &limit, key, Op::Acquire).allowed));
        assert_eq!((store.len(), store.overflowed()), (500, 0));
        clock.advance(Duration::from_secs(3_600));
        assert!(keys.iter().all(|key| ask(&store, &limit, key, Op::Acquire).allowed));
        clock.advance(Duration::from_secs(3_600));
        for n in 0..5_000 {
            ask(&store, &limit, &format!("unknown {n}"), Op::Peek);
        }
        assert_eq!(store.len(), 0, "{back_us}");
    }
}

/// By a clock that goes back and forth by hours, decisions and states are those of the algorithm on a map that
/// never forgets.
#[test]
fn decisions_by_a_wandering_clock_are_the_algorithms() {
    let clock = ManualClock::new(BEGIN);
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let fixed = FixedWindow::new("40/30d".parse().expect("a rate")).expect("a limit");
    let log = SlidingLog::new("9/30d".parse().expect("a rate")).expect("a limit");
    // None of these states expires before the clock has come to its end.
    let policies = [gcra("1/2d", 4).into(), gcra("1/30d", 3).into(), fixed.into(), log.into()];
    let named = policies.into_iter().enumerate();
    let named = named.map(|(n, policy): (_, Policy)| Limit::new(&format!("l{n}"), policy));
    let limits: Vec<_> = named.map(|limit| limit.expect("a name")).collect();
    let mut known = HashMap::new();
    let mut chance = Chance(11);
    for turn in 0..20_000 {
        if chance.below(4) == 0 {
            clock.set(before_begin(40 * HOUR_US).saturating_add_us(chance.below(41 * HOUR_US)));
        }
        let n = usize::try_from(chance.below(4)).expect("small");
        let (limit, key) = (&limits[n], ["a", "b", "c"][turn % 3]);
        let op = if chance.below(5) == 0 { Op::Peek } else { Op::Acquire };
        let state = known.get(&(n, key));
        let due = limit.algorithm().step(state, clock.now(), 1);
        let decision = ask(&store, limit, key, op);
        assert_eq!(decision, due.decision, "turn {turn}: {op} of {key} in {n}");
        if let (Op::Acquire, Write::Put { state, .. }) = (op, due.write) {
            known.insert((n, key), state);
        }
        if turn % 50 == 0 {
            for ((n, key), state) in &known {
                assert_eq!(store.state(limits[*n].name(), key).as_ref(), Some(state));
            }
        }
        // Now and then a key is reset.
        if chance.below(40) == 0 {
            ask(&store, limit, key, Op::Reset);
            known.remove(&(n, key));
        }
    }
}

type Hook = Box<dyn FnOnce() + Send>;

/// A clock whose reader is delayed between reading it and using the reading.
#[derive(Clone, Default)]
struct Interrupted {
    time: ManualClock,
    meanwhile: Arc<Mutex<Option<Hook>>>,
}

impl Clock for Interrupted {
    fn now(&self) -> Timestamp {
        let now = self.time.now();
        let meanwhile = self.meanwhile.lock().expect("no panic").take();
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
        now
    }
}

/// One request reads the time shortly before a state expires; before it reads the state, this has expired, and
/// a request that read the time later has freed it. By the earlier time the state would still count, so the
/// store must not decide by it any more.
#[test]
fn a_state_freed_at_a_later_time_is_not_ignored_at_an_earlier_one() {
    let clock = Interrupted::default();
    clock.time.set(BEGIN);
    let store = MemoryStore::builder().capacity(1_000).clock(clock.clone()).build();
    let store = Arc::new(store);
    let limit = Limit::new("l", gcra("1/s", 1)).expect("a name");
    assert!(ask(&store, &limit, "a", Op::Acquire).allowed);
    clock.time.set(BEGIN.saturating_add_us(999_999));
    let (time, others, other_limit) = (clock.time.clone(), Arc::clone(&store), limit.clone());
    let free_it = move || {
        time.set(BEGIN.saturating_add_us(1_000_000));
        for n in 0..10_000 {
            ask(&others, &other_limit, &n.to_string(), Op::Peek);
        }
        assert_eq!(others.len(), 0);
    };
    *clock.meanwhile.lock().expect("no panic") = Some(Box::new(free_it));
    // The request may be admitted, by the later time, or denied, by the earlier: the state that it leaves must
    // agree.
    let decision = ask(&store, &limit, "a", Op::Acquire);
    assert!(store.is_empty() != decision.allowed);
    clock.time.set(BEGIN.saturating_add_us(1_999_999));
    let next = ask(&store, &limit, "a", Op::Acquire);
    assert!(
        !(decision.allowed && next.allowed),
        "two within a second at 1/s: {decision:?}, {next:?}"
    );
}

#[test]
fn a_manual_clock_adds_up_concurrent_advances_and_never_goes_back() {
    let clock = ManualClock::new(BEGIN);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let mut last = clock.now();
                for _ in 0..50_000 {
                    clock.advance(Duration::from_micros(1));
                    let now = clock.now();
                    assert!(last < now);
                    last = now;
                }
            });
        }
    });
    assert_eq!(clock.now(), BEGIN.saturating_add_us(200_000));
}
