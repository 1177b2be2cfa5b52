//! Several callers in one call are decided through a layer as without it, and reach the store in one call.
#![allow(clippy::expect_used, reason = "tests")]

use std::sync::atomic::{AtomicUsize, Ordering};

use ratelimit_core::{
    Batch, Gcra, Limit, Limits, ManualClock, RateLimiter, Store, SyncStore, Timestamp, Verdict,
};
use ratelimit_layers::TopDenied;
use ratelimit_memory::{MemoryError, MemoryStore};

/// A store that counts the keys that reach it one by one, and several at once.
#[derive(Debug)]
struct Doors {
    store: MemoryStore<Gcra, ManualClock>,
    at_once: AtomicUsize,
    one: AtomicUsize,
}

impl Store<Gcra> for Doors {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Gcra>) -> Result<Verdict, MemoryError> {
        self.apply_now(batch)
    }
}

impl SyncStore<Gcra> for Doors {
    fn apply_now(&self, batch: &Batch<'_, Gcra>) -> Result<Verdict, MemoryError> {
        self.store.apply_now(batch)
    }

    fn acquire_now(
        &self,
        limit: &Limit<Gcra>,
        key: &str,
        cost: u64,
    ) -> Result<Verdict, MemoryError> {
        self.one.fetch_add(1, Ordering::Relaxed);
        self.store.acquire_now(limit, key, cost)
    }

    fn acquire_each_now(
        &self,
        limit: &Limit<Gcra>,
        keys: &[&str],
        cost: u64,
        told: impl FnMut(usize, Result<Verdict, MemoryError>),
    ) {
        self.at_once.fetch_add(keys.len(), Ordering::Relaxed);
        self.store.acquire_each_now(limit, keys, cost, told);
    }
}

fn doors() -> Doors {
    let clock = ManualClock::new(Timestamp::ZERO);
    let store = MemoryStore::builder().clock(clock).build();
    Doors { store, at_once: AtomicUsize::new(0), one: AtomicUsize::new(0) }
}

fn limits() -> Limits<Gcra> {
    let gcra = Gcra::new("1/h".parse().expect("a rate"), 1).expect("a limit");
    Limits::new([Limit::new("one", gcra).expect("a name")]).expect("limits")
}

/// Asks about ten callers in one call and about one more by itself: all are decided as without a layer, and reach the
/// store as they were asked.
fn forwards<S: SyncStore<Gcra>>(layer: S) -> RateLimiter<S, Gcra> {
    let limiter = RateLimiter::new(limits(), layer);
    let callers = ["a", "b", "c", "a", "d", "e", "f", "a", "g", "b"];
    let mut allowed = [false; 10];
    limiter.check_each_now::<str>(&callers, |place, said| {
        allowed[place] = said.is_ok_and(|verdict| verdict.allowed());
    });
    assert_eq!(allowed, [true, true, true, false, true, true, true, false, true, false]);
    assert!(limiter.check_now("eleven").is_ok_and(|verdict| verdict.allowed()));
    limiter
}

fn reached(doors: &Doors) -> (usize, usize) {
    (doors.at_once.load(Ordering::Relaxed), doors.one.load(Ordering::Relaxed))
}

#[test]
fn top_denied_forwards_several_keys_in_one_call() {
    let limiter = forwards(TopDenied::new(doors(), 100));
    assert_eq!(reached(limiter.store().store()), (10, 1));
    let mut denied: Vec<_> =
        limiter.store().top(10).into_iter().map(|denied| (denied.key, denied.count)).collect();
    denied.sort();
    assert_eq!(denied, [("a".into(), 2), ("b".into(), 1)]);
}
