//! The facade over the memory store: several limits and identifiers, async, sync, and behind a store that is
//! chosen at run time.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::{
    DynSnapshotStore, DynStore, ErrorKind, FixedWindow, Gcra, Identifiers, Limit, Limits,
    ManualClock, Policy, Rate, RateLimiter, ReservationId, Store, StoreError, Timestamp, Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_testkit::block_on;

fn rate(text: &str) -> Rate {
    text.parse().expect("a rate")
}

fn limits() -> Limits<Policy> {
    let gcra = Gcra::new("1/s".parse().expect("a rate"), 3).expect("a limit");
    let daily = FixedWindow::new("5/d".parse().expect("a rate")).expect("a limit");
    let both = FixedWindow::new("2/h".parse().expect("a rate")).expect("a limit");
    let by = |limit: Limit<Policy>, identifier_names: &[&str]| {
        limit.by(identifier_names).expect("plain kinds")
    };
    Limits::new([
        by(Limit::new("burst", gcra.into()).expect("a name"), &["ip"]),
        by(Limit::new("daily", daily.into()).expect("a name"), &["user"]),
        by(Limit::new("pair", both.into()).expect("a name"), &["ip", "user"]),
    ])
    .expect("three limits")
}

fn store() -> (MemoryStore<Policy, ManualClock>, ManualClock) {
    let clock = ManualClock::new(Timestamp::ZERO);
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
    let decisions: Vec<_> = denied.decisions().iter().map(|d| (d.allowed, d.remaining)).collect();
    // The pair's limit denies. The others would have admitted, and are uncharged.
    assert_eq!(decisions, [(true, 1), (true, 3), (false, 0)]);
    assert_eq!((denied.allowed(), denied.limit(), denied.remaining()), (false, 2, 0));
    assert_eq!(denied.retry_after(), Some(Duration::from_secs(3600)));

    clock.advance(Duration::from_secs(3600));
    assert!(limiter.check_now(&alice).expect("decides").allowed());
    // Another address makes another pair, of the same user.
    let elsewhere = [("ip", "192.0.2.2"), ("user", "alice")];
    assert_eq!(limiter.peek_now(&elsewhere, 0).expect("decides").decisions()[1].remaining, 2);
    // Without a user only the address is limited.
    let unlimited = [("ip", "192.0.2.1")];
    assert_eq!(limiter.peek_now(&unlimited, 0).expect("decides").decisions().len(), 1);
}

/// Asks in every way about a caller to whom no limit applies or who lacks a required identifier.
fn all_ways<C: Identifiers + Sync + ?Sized>(
    limiter: &RateLimiter<MemoryStore<Policy, ManualClock>>,
    caller: &C,
) -> Vec<Result<Verdict, MemoryError>> {
    let id = ReservationId::new(7);
    let mut results = vec![
        limiter.check_now(caller),
        limiter.check_n_now(caller, 2),
        limiter.peek_now(caller, 1),
        limiter.force_now(caller, 1),
        limiter.refund_now(caller, 1),
        limiter.reset_now(caller),
        limiter.reserve_now(caller, id, 1),
        limiter.commit_now(caller, id, 1),
        limiter.renew_now(caller, id),
        block_on(limiter.check(caller)),
        block_on(limiter.check_n(caller, 2)),
        block_on(limiter.peek(caller, 1)),
        block_on(limiter.request(caller).metadata(b"who").acquire()),
    ];
    limiter.check_each_now(&[caller, caller], |_, decided| results.push(decided));
    results
}

fn one_limit(required: bool) -> Limits<Policy> {
    let limit = Limit::new("burst", Gcra::new(rate("1/s"), 5).expect("a limit").into());
    let limit = limit.and_then(|limit| limit.by(["ip"])).expect("a limit");
    Limits::new([if required { limit.required() } else { limit }]).expect("one")
}

fn refusals(results: Vec<Result<Verdict, MemoryError>>) -> Vec<String> {
    assert_eq!(results.len(), 15);
    let refused = results.into_iter().map(|decided| decided.expect_err("is not unlimited"));
    refused
        .map(|error| {
            assert_eq!(error.kind(), ErrorKind::Invalid);
            error.to_string()
        })
        .collect()
}

#[test]
fn a_request_to_which_no_limit_applies_is_an_error_that_names_the_identifiers() {
    let misspelt = [("IP", "192.0.2.1")];
    for limits in [one_limit(false), limits()] {
        let limiter = RateLimiter::new(limits, store().0);
        for message in refusals(all_ways(&limiter, &misspelt)) {
            assert!(message.contains("no limit applies"), "{message}");
            assert!(message.contains("identifier \"IP\""), "{message}");
            assert!(message.contains("wants \"ip\""), "{message}");
            assert!(message.contains("allow_unlimited()"), "{message}");
        }
        for message in refusals(all_ways(&limiter, "a bare key")) {
            assert!(message.contains("which has a bare key"), "{message}");
        }
        let nothing: [(&str, &str); 0] = [];
        for message in refusals(all_ways(&limiter, &nothing)) {
            assert!(message.contains("which has no identifier"), "{message}");
        }
        assert!(limiter.store().is_empty());
    }
}

#[test]
fn with_allow_unlimited_a_request_to_which_no_limit_applies_is_admitted() {
    for limits in [one_limit(false), limits()] {
        let limiter = RateLimiter::new(limits, store().0).allow_unlimited();
        for decided in all_ways(&limiter, "a bare key") {
            assert!(decided.is_ok_and(|verdict| verdict.allowed() && verdict.is_unlimited()));
        }
        // A limit that applies still limits.
        let ip = [("ip", "192.0.2.1")];
        assert!(!limiter.check_n_now(&ip, 99).expect("decides").is_unlimited());
    }
}

#[test]
fn a_request_without_the_identifiers_of_a_required_limit_is_an_error() {
    let user = Limit::new("user", Gcra::new(rate("1/s"), 5).expect("a limit").into());
    let user = user.and_then(|limit| limit.by(["user"])).expect("a limit").required();
    let limits = limits().iter().cloned().chain([user]).collect::<Vec<_>>();
    let several = Limits::new(limits).expect("four limits");
    for (limits, caller) in
        [(several, [("ip", "192.0.2.1")]), (one_limit(true), [("user", "alice")])]
    {
        let limiter = RateLimiter::new(limits, store().0).allow_unlimited();
        for message in refusals(all_ways(&limiter, &caller)) {
            assert!(message.contains("is required and wants"), "{message}");
            assert!(message.contains(&format!("identifier {:?}", caller[0].0)), "{message}");
        }
        assert!(limiter.store().is_empty());
    }
}

/// The same calls, for any store.
async fn story<S: Store<Policy>>(limiter: &RateLimiter<S>) -> Result<Vec<u64>, S::Error> {
    let who = [("ip", "192.0.2.1")];
    let at = Timestamp::saturating_from_us(5);
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
fn a_store_decides_alike_async_sync_and_behind_any_pointer() {
    let expected = [2, 0, 1, 0, 0, 0, 3, 3];
    assert_eq!(block_on(story(&RateLimiter::new(limits(), store().0))), Ok(expected.to_vec()));
    assert_eq!(
        block_on(story(&RateLimiter::new(limits(), Arc::new(store().0)))),
        Ok(expected.to_vec())
    );
    let chosen: Arc<dyn DynStore<Policy>> = Arc::new(store().0);
    let limiter = RateLimiter::new(limits(), chosen);
    assert_eq!(block_on(story(&limiter)).expect("decides"), expected);
    let chosen: Arc<dyn DynSnapshotStore<Policy>> = Arc::new(store().0);
    let limiter = RateLimiter::new(limits(), chosen);
    assert_eq!(block_on(story(&limiter)).expect("decides"), expected);
}

#[test]
fn an_erased_error_keeps_its_kind_and_its_message() {
    struct OnlySteps;
    impl ratelimit_core::Algorithm for OnlySteps {
        type State = ();
        fn capacity(&self) -> u64 {
            1
        }
        fn step(&self, _: Option<&()>, now: Timestamp, cost: u64) -> ratelimit_core::Step<()> {
            let gcra = Gcra::new("1/s".parse().expect("a rate"), 1).expect("a limit");
            ratelimit_core::Algorithm::step(&gcra, None, now, cost).map(drop)
        }
    }
    impl ratelimit_core::InMemory for OnlySteps {}
    let limits = Limits::new([Limit::new("steps", OnlySteps).expect("a name")]).expect("one");
    let chosen: Arc<dyn DynStore<OnlySteps>> = Arc::new(MemoryStore::<OnlySteps>::new());
    let error = block_on(RateLimiter::new(limits, chosen).refund("a", 1)).expect_err("has none");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("steps") && error.to_string().contains("refund"), "{error}");
}
