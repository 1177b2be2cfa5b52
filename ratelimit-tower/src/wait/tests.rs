use std::convert::Infallible;

use ratelimit_core::{Clock, Gcra, Limits, Timestamp};
use ratelimit_memory::MemoryStore;
use tokio::task::JoinSet;
use tower::{Service, ServiceExt, service_fn};
use tower_layer::Layer;

use super::*;

/// The store's clock is tokio's, which the tests pause.
#[derive(Clone, Debug)]
struct TokioClock(Instant);

impl Clock for TokioClock {
    fn now(&self) -> Timestamp {
        let us = 1_000_000_000 + u64::try_from(self.0.elapsed().as_micros()).unwrap();
        Timestamp::saturating_from_us(us)
    }
}

/// One request per second, after a burst of two.
fn waiter() -> Waiter<MemoryStore<Policy, TokioClock>> {
    let limits = Limits::builder().limit("api", Gcra::per_second(1).burst(2)).build().unwrap();
    let store = MemoryStore::builder().clock(TokioClock(Instant::now())).build();
    Waiter::new(RateLimiter::new(limits, store))
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn a_request_waits_as_long_as_the_limit_says_and_no_longer() {
    let (waiter, start) = (waiter(), Instant::now());
    for waited_s in [0, 0, 1, 2] {
        waiter.until_allowed("a", 10 * SECOND).await.unwrap();
        let elapsed = start.elapsed();
        assert!(
            elapsed >= waited_s * SECOND && elapsed < waited_s * SECOND + SECOND / 10,
            "{elapsed:?}"
        );
    }
    waiter.until_allowed("b", Duration::ZERO).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn callers_are_served_in_the_order_in_which_they_came() {
    let waiter = waiter();
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    for nth in 0..20 {
        let (waiter, served) = (waiter.clone(), served.clone());
        tasks.spawn(async move {
            waiter.until_allowed("a", 60 * SECOND).await.unwrap();
            served.lock().unwrap().push(nth);
        });
        tokio::task::yield_now().await; // the task has taken its place
    }
    tasks.join_all().await;
    assert_eq!(*served.lock().unwrap(), (0..20).collect::<Vec<_>>());
    assert!(waiter.shared.queues.0.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_would_be_too_long_is_refused_at_once_and_charges_nothing() {
    let (waiter, start) = (waiter(), Instant::now());
    waiter.until_n_allowed("a", 2, SECOND).await.unwrap();
    let refused = waiter.until_n_allowed("a", 2, SECOND).await;
    let Err(WaitError::TooLong { verdict: Some(verdict), .. }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(verdict.retry_after(), Some(2 * SECOND));
    assert_eq!(start.elapsed(), Duration::ZERO);
    // Exactly the maximum is not too long.
    waiter.until_allowed("a", SECOND).await.unwrap();
    let never = waiter.until_n_allowed("a", 3, Duration::MAX).await;
    assert!(matches!(never, Err(WaitError::Never { .. })));
}

#[tokio::test(start_paused = true)]
async fn those_behind_give_up_after_their_own_maximum() {
    let waiter = waiter();
    waiter.until_n_allowed("a", 2, SECOND).await.unwrap();
    let (first, start) = (waiter.clone(), Instant::now());
    let first = tokio::spawn(async move { first.until_n_allowed("a", 2, 10 * SECOND).await });
    tokio::task::yield_now().await;
    let behind = waiter.until_allowed("a", SECOND).await;
    assert!(matches!(behind, Err(WaitError::TooLong { verdict: None, .. })), "{behind:?}");
    assert!(start.elapsed() >= SECOND && start.elapsed() < 2 * SECOND);
    first.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_is_dropped_charges_nothing_and_lets_the_next_one_go() {
    let waiter = waiter();
    waiter.until_n_allowed("a", 2, SECOND).await.unwrap();
    let dropped = waiter.clone();
    let dropped = tokio::spawn(async move { dropped.until_n_allowed("a", 2, 10 * SECOND).await });
    tokio::task::yield_now().await;
    let (next, start) = (waiter.clone(), Instant::now());
    let next = tokio::spawn(async move { next.until_allowed("a", 10 * SECOND).await });
    tokio::task::yield_now().await;
    dropped.abort();
    next.await.unwrap().unwrap();
    assert!(start.elapsed() < SECOND + SECOND / 10, "{:?}", start.elapsed());
    assert!(waiter.shared.queues.0.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn jitter_lengthens_waits_and_never_beyond_the_maximum() {
    for _ in 0..50 {
        let (waiter, start) = (waiter().jitter(5 * SECOND), Instant::now());
        waiter.until_n_allowed("a", 2, SECOND).await.unwrap();
        waiter.until_allowed("a", 3 * SECOND).await.unwrap();
        assert!(start.elapsed() >= SECOND && start.elapsed() <= 3 * SECOND + SECOND / 100);
    }
}

#[test]
fn the_queues_of_different_callers_are_different() {
    let limits = Limits::builder()
        .limit("ip", Gcra::per_second(1))
        .by(["ip"])
        .limit("user", Gcra::per_second(1))
        .by(["user"])
        .build()
        .unwrap();
    let limiter = RateLimiter::<_, Policy>::new(limits, MemoryStore::new());
    let queue = |ip: &str, user: &str| queue_of(&limiter, &[("ip", ip), ("user", user)]);
    assert_eq!(queue("a", "b"), queue("a", "b"));
    assert_ne!(queue("1:b", ""), queue("", "1:b"));
    assert_ne!(queue("a", "b"), queue_of(&limiter, &[("ip", "a")]));
}

#[tokio::test(start_paused = true)]
async fn a_client_behind_the_layer_waits_before_each_request() {
    let sent = service_fn(|request: &'static str| async move { Ok::<_, Infallible>(request) });
    let layer = WaitLayer::new(waiter(), |_: &&str| "api", 2 * SECOND);
    let (mut service, start) = (layer.layer(sent), Instant::now());
    for waited_s in [0, 0, 1, 2] {
        let response = service.ready().await.unwrap().call("hello").await.unwrap();
        assert_eq!((response, start.elapsed().as_secs()), ("hello", waited_s));
    }
    // Three at once behind an exhausted limit: the third would wait for three seconds.
    let calls = (0..3).map(|_| layer.layer(sent).oneshot("hello"));
    let mut results = Vec::new();
    for call in calls.map(tokio::spawn).collect::<Vec<_>>() {
        results.push(call.await.unwrap().is_ok());
    }
    assert_eq!(results.iter().filter(|ok| **ok).count(), 2, "{results:?}");
}
