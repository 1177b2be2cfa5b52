use std::convert::Infallible;
use std::sync::Mutex;

use http::Response;
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
    assert!(waiter.shared.queues.lock().turns.is_empty());
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
async fn a_cost_above_the_capacity_is_refused_before_its_turn() {
    let (waiter, start) = (waiter(), Instant::now());
    waiter.until_n_allowed("a", 2, SECOND).await.unwrap();
    let first = waiter.clone();
    let first = tokio::spawn(async move { first.until_n_allowed("a", 2, 10 * SECOND).await });
    tokio::task::yield_now().await; // it waits in front
    let never = waiter.until_n_allowed("a", 3, 60 * SECOND).await;
    assert!(matches!(never, Err(WaitError::Never { .. })), "{never:?}");
    assert_eq!(start.elapsed(), Duration::ZERO);
    first.await.unwrap().unwrap();
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
    assert!(waiter.shared.queues.lock().turns.is_empty());
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

#[tokio::test(start_paused = true)]
async fn a_queue_that_is_held_back_waits_until_then_and_others_do_not() {
    let (waiter, start) = (waiter(), Instant::now());
    waiter.hold_back("a", 5 * SECOND);
    // Answers come in any order: one that asks for less shortens nothing.
    waiter.hold_back("a", SECOND);
    waiter.until_allowed("b", Duration::ZERO).await.unwrap();
    assert_eq!(start.elapsed(), Duration::ZERO);
    waiter.until_allowed("a", 10 * SECOND).await.unwrap();
    assert!(start.elapsed() >= 5 * SECOND && start.elapsed() < 6 * SECOND, "{:?}", start.elapsed());
    // It is over.
    waiter.until_allowed("a", Duration::ZERO).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_is_held_back_for_too_long_is_refused_at_once_and_charges_nothing() {
    let (waiter, start) = (waiter(), Instant::now());
    waiter.hold_back("a", 5 * SECOND);
    let refused = waiter.until_n_allowed("a", 2, 4 * SECOND).await;
    assert!(matches!(refused, Err(WaitError::HeldBack { wait, .. }) if wait == 5 * SECOND));
    assert_eq!(start.elapsed(), Duration::ZERO);
    // Exactly the maximum is not too long, and both tokens are still there.
    waiter.until_n_allowed("a", 2, 5 * SECOND).await.unwrap();
    assert!(start.elapsed() < 6 * SECOND);
}

#[tokio::test(start_paused = true)]
async fn those_who_wait_already_are_held_back_too_and_keep_their_order() {
    let (waiter, start) = (waiter(), Instant::now());
    waiter.until_n_allowed("a", 2, SECOND).await.unwrap();
    let served = Arc::new(Mutex::new(Vec::new()));
    let mut tasks = JoinSet::new();
    for nth in 0..10 {
        let (waiter, served) = (waiter.clone(), served.clone());
        tasks.spawn(async move {
            waiter.until_allowed("a", 60 * SECOND).await.unwrap();
            served.lock().unwrap().push((nth, Instant::now()));
        });
        tokio::task::yield_now().await; // the task has taken its place
    }
    waiter.hold_back("a", 3 * SECOND);
    tasks.spawn({
        let waiter = waiter.clone();
        async move { waiter.hold_back("a", 20 * SECOND) }
    });
    tasks.join_all().await;
    let served = served.lock().unwrap();
    assert!(served.iter().map(|(nth, _)| *nth).eq(0..10), "{served:?}");
    assert!(served[0].1 - start >= 20 * SECOND, "{served:?}");
    assert!(waiter.shared.queues.lock().turns.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_dropped_wait_that_was_held_back_lets_the_next_one_go_in_time() {
    let (waiter, start) = (waiter(), Instant::now());
    waiter.hold_back("a", 2 * SECOND);
    let first = waiter.clone();
    let first = tokio::spawn(async move { first.until_allowed("a", 60 * SECOND).await });
    tokio::task::yield_now().await;
    let next = waiter.clone();
    // Both tokens are there: the dropped one has charged none.
    let next = tokio::spawn(async move { next.until_n_allowed("a", 2, 60 * SECOND).await });
    tokio::task::yield_now().await;
    first.abort();
    next.await.unwrap().unwrap();
    assert!(start.elapsed() >= 2 * SECOND && start.elapsed() < 3 * SECOND, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_held_back_for_longer_than_a_day() {
    let (waiter, start) = (waiter(), Instant::now());
    waiter.hold_back("a", Duration::MAX);
    waiter.until_allowed("a", Duration::MAX).await.unwrap();
    let day = 24 * 60 * 60 * SECOND;
    assert!(start.elapsed() >= day && start.elapsed() < day + SECOND, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn holds_that_are_over_are_forgotten() {
    let waiter = waiter();
    for nth in 0..10_000 {
        waiter.hold_back(&*format!("caller {nth}"), SECOND);
        tokio::time::advance(SECOND / 10).await;
    }
    let holds = waiter.shared.queues.lock().holds.len();
    assert!(holds <= 128, "{holds}"); // ten of them last
}

/// Answers each request as it says.
fn answers(status: u16, field: &'static str, value: &'static str) -> Response<()> {
    Response::builder().status(status).header(field, value).body(()).unwrap()
}

#[tokio::test(start_paused = true)]
async fn by_choice_a_denial_that_tells_a_wait_holds_back_the_requests_that_follow() {
    const RETRY: &str = "retry-after";
    for (status, field, value, waited_s) in [
        (429, RETRY, "7", 7),
        (503, RETRY, "7", 7),
        (429, "ratelimit", r#""burst";r=0;t=4"#, 4),
        // Not a denial, or nothing to wait for.
        (200, RETRY, "7", 0),
        (500, RETRY, "7", 0),
        (429, "x-other", "7", 0),
    ] {
        for heeds in [false, true] {
            let denied = service_fn(move |(): ()| async move {
                Ok::<_, Infallible>(answers(status, field, value))
            });
            let layer = WaitLayer::new(waiter(), |(): &()| "api", 10 * SECOND);
            let start = Instant::now();
            for _ in 0..2 {
                let response = if heeds {
                    layer.clone().heed_answers().layer(denied).oneshot(()).await
                } else {
                    layer.layer(denied).oneshot(()).await
                };
                assert_eq!(response.unwrap().status(), status);
            }
            let expected_s = if heeds { waited_s } else { 0 };
            assert_eq!(start.elapsed().as_secs(), expected_s, "{status} {field}: {value}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_function_tells_for_how_long_other_responses_hold_back() {
    let busy = service_fn(|(): ()| async { Ok::<_, Infallible>("busy: 3") });
    let wait = |text: &&str| text.strip_prefix("busy: ")?.parse().ok().map(Duration::from_secs);
    let layer = WaitLayer::new(waiter(), |(): &()| "api", 2 * SECOND).hold_back_by(wait);
    layer.layer(busy).oneshot(()).await.unwrap();
    let refused = layer.layer(busy).oneshot(()).await.unwrap_err();
    assert!(matches!(refused, WaitServiceError::Wait(WaitError::HeldBack { .. })), "{refused:?}");
}
