//! Clocks that go back, or are read too early: no state is lost or freed by that, and no capacity
//! is minted.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{Clock, ManualClock, SyncStore, Timestamp};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::PureStore;

use crate::common::{BEGIN, HOUR_US, Hooked, Memory, ask, limit, store};

fn before_begin(us: u64) -> Timestamp {
    Timestamp::saturating_from_us(BEGIN.as_us() - us)
}

/// Less than an hour, an hour, and more: the store counts time from an hour before it was built.
const BACK_US: [u64; 6] = [1, HOUR_US - 1, HOUR_US, HOUR_US + 1, 5 * HOUR_US, 10_000 * HOUR_US];

#[test]
fn states_written_while_a_clock_is_set_back_count_and_expire() {
    for back_us in BACK_US {
        let (store, clock): (Memory, _) = store(|builder| builder.capacity(10_000));
        let limit = limit("l", "gcra 1/h");
        clock.set(before_begin(back_us));
        let keys: Vec<_> = (0..500).map(|n| format!("key {n}")).collect();
        let acquire = |key: &String| ask(&store, (&limit, key), Op::Acquire, 1).allowed();
        for _ in 0..2 {
            assert!(keys.iter().all(|key| acquire(key) && !acquire(key)));
            assert_eq!((store.len(), store.overflowed()), (500, 0));
            clock.advance(Duration::from_secs(3_600));
        }
        (0..5_000).for_each(|n| _ = ask(&store, (&limit, &format!("new {n}")), Op::Peek, 1));
        assert_eq!(store.len(), 0, "{back_us}");
    }
}

/// By a clock that goes back and forth by hours, decisions and states are those of the algorithm on
/// a map that never forgets, while new keys sweep in passing.
#[test]
fn decisions_by_a_wandering_clock_are_the_algorithms() {
    let (store, clock): (Memory, _) = store(|builder| builder);
    // None of these states expires before the clock has come to its end.
    let words =
        ["gcra 1/2d burst 4", "gcra 1/30d burst 3", "fixed-window 40/30d", "sliding-log 9/30d"];
    let limits = words.map(|words| limit(&words.replace([' ', '/'], "-"), words));
    let (pure, mut random) = (PureStore::new(), fastrand::Rng::with_seed(11));
    pure.clock().set(BEGIN);
    for turn in 0..20_000 {
        if random.u8(..4) == 0 {
            let back_us =
                [random.u64(..40 * HOUR_US), *random.choice(&BACK_US[..5]).expect("some")];
            clock.set(before_begin(random.choice(back_us).expect("some")));
            pure.clock().set(clock.now());
        }
        let (limit, key) = (random.choice(&limits).expect("some"), ["a", "b", "c"][turn % 3]);
        let op = *[Op::Peek, Op::Reset].get(random.usize(..40) / 8).unwrap_or(&Op::Acquire);
        let check = Check { limit, key, cost: 1 };
        let batch = Batch::one(&check).op(op);
        assert_eq!(
            store.apply_now(&batch).ok(),
            pure.decide(&batch).ok(),
            "turn {turn}: {batch:?}"
        );
        assert_eq!(store.state(limit, key), pure.state(limit, key), "turn {turn}");
        let _ = ask(&store, (limit, &format!("new {turn}")), Op::Peek, 1);
    }
    let kept = |limit| ["a", "b", "c"].map(|key| pure.state(limit, key).is_some());
    let kept = limits.iter().flat_map(kept).filter(|is_kept| *is_kept).count();
    assert_eq!(store.len(), kept);
}

type Hook = Box<dyn FnOnce() + Send>;

/// One request reads the time shortly before a state expires; before it reads the state, this has
/// expired, and a request that read the time later has freed it. By the earlier time the state
/// would still count, so the store must not decide by it any more.
#[test]
fn a_state_freed_at_a_later_time_is_not_ignored_at_an_earlier_one() {
    let (time, meanwhile) = (ManualClock::new(BEGIN), Arc::new(Mutex::new(None::<Hook>)));
    let hook = Arc::clone(&meanwhile);
    let interrupted = move || {
        let meanwhile = hook.lock().expect("no panic").take();
        if let Some(meanwhile) = meanwhile {
            meanwhile();
        }
    };
    let clock = Hooked(time.clone(), interrupted);
    let store = MemoryStore::builder().capacity(1_000).clock(clock).build();
    let (store, limit) = (Arc::new(store), limit("l", "gcra 1/s"));
    let acquire = || ask(&store, (&limit, "a"), Op::Acquire, 1).allowed();
    assert!(acquire());
    time.set(BEGIN.saturating_add_us(999_999));
    let (later, others, other_limit) = (time.clone(), Arc::clone(&store), limit.clone());
    let free_it = move || {
        later.set(BEGIN.saturating_add_us(1_000_000));
        (0..10_000).for_each(|n| _ = ask(&others, (&other_limit, &n.to_string()), Op::Peek, 1));
        assert_eq!(others.len(), 0);
    };
    *meanwhile.lock().expect("no panic") = Some(Box::new(free_it));
    // The request may be admitted, by the later time, or denied, by the earlier: the state that it
    // leaves must agree.
    let allowed = acquire();
    assert!(store.is_empty() != allowed);
    time.set(BEGIN.saturating_add_us(1_999_999));
    assert!(!(allowed && acquire()), "two within a second at 1/s");
}
