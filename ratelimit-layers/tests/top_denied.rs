//! The keys that are denied most are listed, whatever other keys come, in bounded memory.

#![allow(clippy::expect_used, missing_docs, reason = "tests")]

use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;
use ratelimit_core::{
    Batch, Check, FixedWindow, Limit, Limits, ManualClock, Op, RateLimiter, SyncStore, Timestamp,
};
use ratelimit_layers::TopDenied;
use ratelimit_memory::MemoryStore;

type Counting = TopDenied<MemoryStore<FixedWindow, ManualClock>>;

fn counting(keys: usize) -> Counting {
    let clock = ManualClock::new(Timestamp::ZERO);
    TopDenied::new(MemoryStore::builder().clock(clock).build(), keys)
}

fn limit(name: &str, count: &str) -> Limit<FixedWindow> {
    let window = FixedWindow::new(count.parse().expect("a rate")).expect("a limit");
    Limit::new(name, window).expect("a name")
}

fn ask(store: &Counting, limit: &Limit<FixedWindow>, key: &str) -> bool {
    let check = Check { limit, key, cost: 1 };
    store.apply_now(&Batch::one(&check)).expect("decides").allowed()
}

#[test]
fn only_denials_are_counted_and_only_for_the_limit_that_denied() {
    let store = counting(100);
    let (strict, wide) = (limit("strict", "1/h"), limit("wide", "100/h"));
    for _ in 0..4 {
        let checks = [&strict, &wide].map(|limit| Check { limit, key: "bob", cost: 1 });
        let _ = store.apply_now(&Batch::new(&checks).expect("distinct")).expect("decides");
        let peek = Batch::one(&checks[0]).op(Op::Peek);
        let _ = store.apply_now(&peek).expect("decides");
    }
    let top = store.top(10);
    assert_eq!(top.len(), 1);
    assert_eq!((&*top[0].limit, &*top[0].key, top[0].count, top[0].over), ("strict", "bob", 3, 0));
    store.forget();
    assert!(store.top(10).is_empty());
}

#[test]
fn a_caller_that_only_a_shadow_limit_would_have_denied_is_not_listed() {
    let limits = Limits::new([limit("shadow", "1/h").shadow(), limit("live", "3/h")]);
    let limiter = RateLimiter::new(limits.expect("limits"), counting(100));
    for nth in 0..5 {
        assert_eq!(limiter.check_now("bob").expect("decides").allowed(), nth < 3);
    }
    let top = limiter.store().top(10);
    let listed: Vec<_> = top.iter().map(|denied| (&*denied.limit, denied.count)).collect();
    assert_eq!(listed, [("live", 2)]);
}

#[test]
fn a_flood_of_other_keys_does_not_hide_the_most_denied_one() {
    let store = counting(160);
    let limit = limit("l", "1/h");
    for n in 0..20_000_u32 {
        let other = format!("other-{n}");
        let key = if n % 20 == 0 { "mallory" } else { &other };
        ask(&store, &limit, key);
        ask(&store, &limit, key);
    }
    let top = store.top(1_000);
    assert!(top.len() <= 160, "{}", top.len());
    assert_eq!(&*top[0].key, "mallory");
    // Denied at every second request but the first, twice each time.
    let denied = 2 * 1_000 - 1;
    assert!(top[0].count - top[0].over <= denied && denied <= top[0].count, "{:?}", top[0]);
}

#[test]
fn long_keys_are_cut_but_counted_apart() {
    let store = counting(100);
    let limit = limit("l", "1/h");
    for end in ["a", "b"] {
        let key = "ä".repeat(100_000) + end;
        ask(&store, &limit, &key);
        assert!(!ask(&store, &limit, &key));
    }
    let top = store.top(10);
    assert_eq!(top.len(), 2);
    assert!(top.iter().all(|denied| denied.key.len() == 128 && denied.count == 1));
}

#[test]
fn denials_of_one_key_by_several_threads_are_all_counted() {
    let (store, limit) = (counting(16), limit("l", "1/h"));
    assert!(ask(&store, &limit, "a"));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..250).for_each(|_| assert!(!ask(&store, &limit, "a"))));
        }
    });
    let top = store.top(2);
    assert_eq!((top.len(), top[0].count, top[0].over), (1, 1_000, 0));
}

proptest! {
    #[test]
    fn a_count_is_never_too_low_and_too_high_by_at_most_over(keys in vec(0..60_u8, 0..600)) {
        let store = counting(32);
        let limit = limit("l", "1/h");
        let mut due = HashMap::new();
        for key in keys {
            let key = format!("k{key}");
            if !ask(&store, &limit, &key) {
                *due.entry(key).or_insert(0_u64) += 1;
            }
        }
        let top = store.top(usize::MAX);
        for denied in &top {
            let count = due.get(&*denied.key).copied().unwrap_or(0);
            prop_assert!(denied.count - denied.over <= count && count <= denied.count, "{:?}", denied);
        }
        // While there is room, every denial is counted, and no other.
        if due.len() <= 2 {
            prop_assert_eq!(top.iter().map(|d| d.count).sum::<u64>(), due.values().sum::<u64>());
        }
    }
}
