//! The facade over the memory store: several limits and identifiers, awaited, at once, and behind a store
//! that is chosen at run time.
#![cfg(not(loom))]
#![allow(clippy::expect_used, reason = "tests")]

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::{
    DynStore, ErrorKind, FixedWindow, Gcra, Limit, Limits, ManualClock, Policy, RateLimiter, Store,
    StoreError, Tick,
};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::block_on;

fn limits() -> Limits<Policy> {
    let gcra = Gcra::new("1/s".parse().expect("a rate"), 3).expect("a limit");
    let daily = FixedWindow::new("5/d".parse().expect("a rate")).expect("a limit");
    let both = FixedWindow::new("2/h".parse().expect("a rate")).expect("a limit");
    let by = |limit: Limit<Policy>, kinds: &[&str]| limit.by(kinds).expect("plain kinds");
    Limits::new([
        by(Limit::new("burst", gcra.into()).expect("a name"), &["ip"]),
        by(Limit::new("daily", daily.into()).expect("a name"), &["user"]),
        by(Limit::new("pair", both.into()).expect("a name"), &["ip", "user"]),
    ])
    .expect("three limits")
}

fn store() -> (MemoryStore<Policy, ManualClock>, ManualClock) {
    let clock = ManualClock::new(Tick::ZERO);
    (MemoryStore::builder().clock(clock.clone()).build(), clock)
}

#[test]
fn several_limits_of_several_identifiers_are_charged_all_or_none() {
    let (store, clock) = store();
    let limiter = RateLimiter::new(limits(), store);
    let alice = [("ip", "192.0.2.1"), ("user", "alice")];
    let request = limiter.request(&alice);
    assert_eq!(request.applicable().collect::<Vec<_>>(), [0, 1, 2]);

    assert!(limiter.check_n_now(&alice, 2).expect("decides").allowed());
    let denied = limiter.check_now(&alice).expect("decides");
    let said: Vec<_> = denied.decisions().iter().map(|d| (d.allowed, d.remaining)).collect();
    // The pair is full. The others would have admitted, and show what they have.
    assert_eq!(said, [(true, 1), (true, 3), (false, 0)]);
    assert_eq!((denied.allowed(), denied.limit(), denied.remaining()), (false, 2, 0));
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(3600)));

    clock.advance(Duration::from_secs(3600));
    assert!(limiter.check_now(&alice).expect("decides").allowed());
    // From another address it is another pair, and the same user.
    let elsewhere = [("ip", "192.0.2.2"), ("user", "alice")];
    assert_eq!(limiter.peek_now(&elsewhere, 0).expect("decides").decisions()[1].remaining, 2);
    // Without a user only the address is limited.
    let nobody = [("ip", "192.0.2.1")];
    assert_eq!(limiter.peek_now(&nobody, 0).expect("decides").decisions().len(), 1);
    assert!(limiter.check_now("a bare key").expect("decides").is_unlimited());
}

/// The same story, whatever the store.
async fn story<S: Store<Policy>>(limiter: &RateLimiter<S>) -> Result<Vec<u64>, S::Error> {
    let who = [("ip", "192.0.2.1")];
    let at = Tick::saturating_from_us(5);
    Ok(vec![
        limiter.check(&who).await?.remaining(),
        limiter.check_n(&who, 2).await?.remaining(),
        limiter.refund(&who, 1).await?.remaining(),
        limiter.peek(&who, 1).await?.remaining(),
        limiter.force(&who, 7).await?.remaining(),
        limiter.request(&who).at(at).peek().await?.remaining(),
        limiter.reset(&who).await?.remaining(),
        limiter.peek(&who, 0).await?.remaining(),
    ])
}

#[test]
fn awaited_and_behind_any_pointer_it_is_the_same_store() {
    let told = [2, 0, 1, 0, 0, 0, 3, 3];
    assert_eq!(block_on(story(&RateLimiter::new(limits(), store().0))), Ok(told.to_vec()));
    assert_eq!(
        block_on(story(&RateLimiter::new(limits(), Arc::new(store().0)))),
        Ok(told.to_vec())
    );
    let chosen: Arc<dyn DynStore<Policy>> = Arc::new(store().0);
    let limiter = RateLimiter::new(limits(), chosen);
    assert_eq!(block_on(story(&limiter)).expect("decides"), told);
}

#[test]
fn an_erased_error_keeps_its_kind_and_its_words() {
    struct OnlySteps;
    impl ratelimit_core::Algorithm for OnlySteps {
        type State = ();
        fn capacity(&self) -> u64 {
            1
        }
        fn step(&self, _: Option<&()>, now: Tick, cost: u64) -> ratelimit_core::Step<()> {
            let gcra = Gcra::new("1/s".parse().expect("a rate"), 1).expect("a limit");
            ratelimit_core::Algorithm::step(&gcra, None, now, cost).map(drop)
        }
    }
    let limits = Limits::new([Limit::new("steps", OnlySteps).expect("a name")]).expect("one");
    let chosen: Arc<dyn DynStore<OnlySteps>> = Arc::new(MemoryStore::<OnlySteps>::new());
    let error = block_on(RateLimiter::new(limits, chosen).refund("a", 1)).expect_err("has none");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("steps") && error.to_string().contains("refund"), "{error}");
}
