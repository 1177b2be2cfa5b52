use std::convert::Infallible;
use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};

use http::Response;
use ratelimit_core::{Limits, OnOutage, Record, TokioClock};
use ratelimit_layers::Fallback;
use ratelimit_memory::{MemoryError, MemoryStore};
use tokio::task::{JoinHandle, yield_now};
use tower::{Service, ServiceExt, service_fn};
use tower_layer::Layer;

use super::*;

/// Counts the calls of a store.
#[derive(Clone)]
struct Counted(Arc<MemoryStore<AnyAlgorithm, TokioClock>>, Arc<AtomicU64>);

impl Store<AnyAlgorithm> for Counted {
    type Error = MemoryError;

    fn apply(
        &self,
        batch: &Batch<'_, AnyAlgorithm>,
    ) -> impl Future<Output = Result<Verdict, MemoryError>> + Send {
        self.1.fetch_add(1, Ordering::Relaxed);
        self.0.apply(batch)
    }
}

type Paused = Waiter<MemoryStore<AnyAlgorithm, TokioClock>>;

/// One request per second, after a burst of two.
fn waiter() -> Paused {
    limited_by("api", "gcra 1/s burst 2")
}

fn limited_by(name: &str, words: &str) -> Paused {
    let limits = Limits::builder().limit(name, words).build().unwrap();
    let store = MemoryStore::builder().clock(TokioClock::default()).build();
    Waiter::new(RateLimiter::new(limits, store))
}

/// A service whose answers have this status and this field.
fn answering(
    status: u16,
    field: &'static str,
    value: &'static str,
) -> impl Service<(), Response = Response<()>, Error = Infallible, Future: Send> + Copy + Send + 'static
{
    service_fn(move |()| async move {
        Ok(Response::builder().status(status).header(field, value).body(()).unwrap())
    })
}

const SECOND: Duration = Duration::from_secs(1);

/// The same, whose burst is used up.
async fn used_up() -> Paused {
    let waiter = waiter();
    waiter.until_n_allowed("a", 2, SECOND).await.unwrap();
    waiter
}

/// A wait of a minute at most, which has taken its place. It ends with the time at which it was
/// admitted.
async fn enqueue(waiter: &Paused, cost: u64) -> JoinHandle<Instant> {
    let waiter = waiter.clone();
    let waits = tokio::spawn(async move {
        waiter.until_n_allowed("a", cost, 60 * SECOND).await.unwrap();
        Instant::now()
    });
    yield_now().await;
    waits
}

#[track_caller]
fn assert_passed(start: Instant, seconds: Range<u32>) {
    let (passed, range) = (start.elapsed(), seconds.start * SECOND..seconds.end * SECOND);
    assert!(range.contains(&passed), "{passed:?}");
}

#[tokio::test(start_paused = true)]
async fn callers_are_served_in_the_order_in_which_they_came_also_if_they_are_held_back() {
    for (held_s, first_s) in [(&[][..], 1), (&[3, 20, 5], 20)] {
        let (waiter, start) = (used_up().await, Instant::now());
        let mut waits = Vec::new();
        for _ in 0..10 {
            waits.push(enqueue(&waiter, 1).await);
        }
        for held_s in held_s {
            waiter.hold_back("a", *held_s * SECOND);
        }
        let mut last = start + first_s * SECOND;
        for waits in waits {
            let served = waits.await.unwrap();
            assert!(served >= last, "{:?}", served - start);
            last = served;
        }
        assert!(waiter.queues.lock().queues.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn each_caller_waits_by_its_own_numbers() {
    let limits = Limits::builder().limit("api", "gcra 1/s burst 2");
    let limits = limits.accepts_up_to("gcra 100/s burst 200").build().unwrap();
    let numbers = |words| Arc::new(limits.parse_numbers([("api", words)]).unwrap());
    let (gold, slow) = (numbers("10/s burst 20"), numbers("1/m burst 2"));
    let store: MemoryStore<AnyAlgorithm, _> =
        MemoryStore::builder().clock(TokioClock::default()).build();
    let waiter = Waiter::new(RateLimiter::new(limits, store)).numbers_of(move |caller| {
        match &*caller.bare()? {
            "gold" => Some(gold.clone()),
            "slow" => Some(slow.clone()),
            _ => None,
        }
    });
    for (caller, next_ms) in [("gold", 200), ("other", 2_000), ("slow", 120_000)] {
        let start = Instant::now();
        let burst = if caller == "gold" { 20 } else { 2 };
        waiter.until_n_allowed(caller, burst, SECOND).await.unwrap();
        assert_eq!(start.elapsed(), Duration::ZERO, "{caller}");
        let next = waiter.until_n_allowed(caller, 2, Duration::MAX).await.unwrap();
        assert_eq!((start.elapsed().as_millis(), next.limit), (next_ms, burst), "{caller}");
        // Above the capacity of its own numbers, no wait is long enough.
        let never = waiter.until_n_allowed(caller, burst + 1, Duration::MAX).await;
        assert!(matches!(never, Err(WaitError::Never { .. })), "{caller}: {never:?}");
    }
    // What a service says remains is no more than the caller's own capacity.
    tokio::time::sleep(60 * SECOND).await;
    let headers = [(http::HeaderName::from_static("ratelimit"), r#""api";r=15"#.parse().unwrap())];
    let advice = Advice::from_headers(&headers.into_iter().collect());
    let adopted = waiter.adopt("gold", &advice).await.unwrap().expect("it is named");
    assert_eq!((adopted.limit(), adopted.remaining()), (20, 15));
}

#[tokio::test(start_paused = true)]
async fn a_wait_without_an_end_says_what_would_end_it() {
    let says = async |waiter: &Paused, cost, due: &str| {
        let never = waiter.until_n_allowed("a", cost, Duration::MAX).await;
        let said = never.expect_err("no end").to_string();
        assert!(said.contains(due), "{said:?} lacks {due:?}");
    };
    says(&waiter(), 3, "above the capacity").await;
    says(&limited_by("api", "gcra 0/s"), 1, "a rate of 0").await;
    says(&limited_by("api", "fixed-window 0/d"), 1, "a rate of 0").await;
    let limits = Limits::builder().limit("api", "gcra 1/s burst 2").overridable().build().unwrap();
    let store = MemoryStore::builder().clock(TokioClock::default()).build();
    let limiter = RateLimiter::new(limits, store);
    limiter.set_record("a", "api", Record::blocked().forever()).await.unwrap();
    says(&Waiter::new(limiter), 1, "a record blocks it for ever").await;
}

#[tokio::test(start_paused = true)]
async fn those_behind_give_up_after_their_own_maximum_and_at_once_above_the_capacity() {
    let (waiter, start) = (used_up().await, Instant::now());
    let first = enqueue(&waiter, 2).await;
    let never = waiter.until_n_allowed("a", 3, Duration::MAX).await;
    assert!(matches!(never, Err(WaitError::Never { .. })), "{never:?}");
    assert_eq!(start.elapsed(), Duration::ZERO);
    let behind = waiter.until_allowed("a", SECOND).await;
    assert!(matches!(behind, Err(WaitError::TooLong { verdict: None, .. })), "{behind:?}");
    assert_passed(start, 1..2);
    first.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_is_dropped_charges_nothing_and_lets_the_next_one_go_in_time() {
    for held_s in [0, 2] {
        let (waiter, start) = (used_up().await, Instant::now());
        waiter.hold_back("a", held_s * SECOND);
        let dropped = enqueue(&waiter, 2).await;
        let next = enqueue(&waiter, 1).await;
        dropped.abort();
        next.await.unwrap();
        assert_passed(start, held_s.max(1)..held_s.max(1) + 1);
        assert!(waiter.queues.lock().queues.is_empty());
    }
}

#[tokio::test(start_paused = true)]
async fn jitter_lengthens_waits_and_never_beyond_the_maximum() {
    for _ in 0..50 {
        let (waiter, start) = (used_up().await.jitter(5 * SECOND), Instant::now());
        waiter.until_allowed("a", 3 * SECOND).await.unwrap();
        assert!(start.elapsed() >= SECOND && start.elapsed() <= 3 * SECOND + SECOND / 100);
    }
}

#[test]
fn the_queues_of_different_callers_are_different() {
    let limits = Limits::builder().limit("ip", "gcra 1/s").by(["ip"]);
    let limits = limits.limit("user", "gcra 1/s").by(["user"]).build().unwrap();
    let waiter = Waiter::<_, AnyAlgorithm>::new(RateLimiter::new(limits, MemoryStore::new()));
    let queue = |ip: &str, user: &str| waiter.queue_of(&[("ip", ip), ("user", user)]);
    assert_eq!(queue("a", "b"), queue("a", "b"));
    assert_ne!(queue("1:b", ""), queue("", "1:b"));
    assert_ne!(queue("a", ""), waiter.queue_of(&[("ip", "a")]));
}

#[tokio::test(start_paused = true)]
async fn a_queue_that_is_held_back_waits_until_then_and_others_do_not() {
    let (waiter, start) = (waiter(), Instant::now());
    waiter.hold_back("a", 5 * SECOND);
    waiter.until_allowed("b", Duration::ZERO).await.unwrap();
    let refused = waiter.until_n_allowed("a", 2, 4 * SECOND).await;
    assert!(matches!(refused, Err(WaitError::HeldBack { wait, .. }) if wait == 5 * SECOND));
    assert_eq!(start.elapsed(), Duration::ZERO);
    // Exactly the maximum is not too long, and both tokens are still there.
    waiter.until_n_allowed("a", 2, 5 * SECOND).await.unwrap();
    assert_passed(start, 5..6);
}

#[tokio::test(start_paused = true)]
async fn nothing_is_held_back_for_longer_than_a_day_and_holds_that_are_over_are_forgotten() {
    let (waiter, start) = (waiter(), Instant::now());
    waiter.hold_back("a", Duration::MAX);
    waiter.until_allowed("a", Duration::MAX).await.unwrap();
    assert_passed(start, 86_400..86_401);
    for nth in 0..10_000 {
        waiter.hold_back(&*format!("caller {nth}"), SECOND);
        tokio::time::advance(SECOND / 10).await;
    }
    let queues = waiter.queues.lock().queues.len();
    assert!(queues <= 128, "{queues}"); // ten of them last
}

#[tokio::test(start_paused = true)]
async fn by_choice_a_denial_that_tells_a_wait_holds_back_the_requests_that_follow() {
    const RETRY: &str = "retry-after";
    for (status, field, value, waited_s) in [
        (429, RETRY, "7", 7),
        (503, RETRY, "7", 7),
        (429, "ratelimit", r#""burst";r=0;t=4"#, 4),
        (429, "retry-after-ms", "2500", 2),
        // As GitHub denies.
        (403, RETRY, "7", 7),
        (403, "ratelimit", "limit=9, remaining=0, reset=4", 4),
        (403, "ratelimit", "limit=9, remaining=1, reset=4", 0),
        // Not a denial, or nothing to wait for.
        (200, RETRY, "7", 0),
        (500, RETRY, "7", 0),
        (429, "x-other", "7", 0),
    ] {
        let denied = answering(status, field, value);
        let layer = || WaitLayer::new(waiter(), |(): &()| "api", 10 * SECOND);
        for (layer, expected_s) in [(layer(), 0), (layer().heed_answers(), waited_s)] {
            let start = Instant::now();
            for _ in 0..2 {
                let response = layer.layer(denied).oneshot(()).await.unwrap();
                assert_eq!(response.status(), status);
            }
            assert_eq!(start.elapsed().as_secs(), expected_s, "{status} {field}: {value}");
        }
    }
}

/// A limit of all callers, and one for each of them.
fn shared_and_own_limits(words: &str) -> Limits<AnyAlgorithm> {
    let limits = Limits::builder().limit("all", words).by(["service"]);
    limits.limit("user", "gcra 1000/s").by(["user"]).build().unwrap()
}

/// The cost of a request that a user sends to the only service.
async fn send<S: Store<AnyAlgorithm, Error: std::fmt::Debug>>(
    waiter: &Waiter<S>,
    user: u64,
    cost: u64,
) {
    let caller = [("service", "one".to_owned()), ("user", user.to_string())];
    waiter.until_n_allowed(&caller, cost, 60 * SECOND).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn callers_of_a_shared_limit_ask_one_at_a_time() {
    let start = Instant::now();
    let store = MemoryStore::builder().clock(TokioClock::default()).build();
    let store = Counted(Arc::new(store), Arc::default());
    let waiter =
        Waiter::new(RateLimiter::new(shared_and_own_limits("gcra 100/s burst 1"), store.clone()));
    futures_util::future::join_all((0..200).map(|user| send(&waiter, user, 1))).await;
    assert_passed(start, 1..3); // no slower than the limit
    let calls = store.1.load(Ordering::Relaxed);
    assert!(calls <= 2 * 200, "{calls} calls for 200 admissions");
    assert!(waiter.queues.lock().queues.is_empty());
}

/// Each of the light callers waits at a limit of its own as well.
#[tokio::test(start_paused = true)]
async fn a_request_of_the_whole_burst_is_not_starved_by_light_ones_of_other_callers() {
    for own in ["gcra 1000/s", "gcra 2/s burst 1"] {
        let limits = Limits::builder().limit("all", "gcra 10/s burst 10").by(["service"]);
        let limits = limits.limit("user", own).by(["user"]).build().unwrap();
        let store = MemoryStore::builder().clock(TokioClock::default()).build();
        let waiter = Waiter::new(RateLimiter::new(limits, store));
        let light = |user| {
            let waiter = waiter.clone();
            async move {
                loop {
                    send(&waiter, user, 1).await;
                }
            }
        };
        let _light: tokio::task::JoinSet<()> = (0..20).map(light).collect();
        tokio::time::sleep(2 * SECOND).await;
        let start = Instant::now();
        let heavy = [("service", "one")];
        waiter.until_n_allowed(&heavy, 10, 60 * SECOND).await.unwrap();
        assert_passed(start, 0..5);
    }
}

#[tokio::test(start_paused = true)]
async fn one_who_waits_at_its_own_limit_or_is_held_back_does_not_keep_others_waiting() {
    let limits = Limits::builder().limit("all", "gcra 1/s burst 1").by(["service"]);
    let limits = limits.limit("user", "gcra 1/h burst 1").by(["user"]).build().unwrap();
    let store = MemoryStore::builder().clock(TokioClock::default()).build();
    let waiter = Waiter::new(RateLimiter::new(limits, store));
    send(&waiter, 0, 1).await;
    let slow = [("service", "one"), ("user", "0")];
    let waits = waiter.until_allowed(&slow, 3 * 3_600 * SECOND);
    let held = [("service", "one"), ("user", "1")];
    let others = async {
        for user in 2..6 {
            let start = Instant::now();
            send(&waiter, user, 1).await;
            assert_passed(start, 0..3);
            waiter.hold_back(&held, 7_200 * SECOND);
        }
    };
    let (slow, held, ()) = tokio::join!(waits, waiter.until_allowed(&held, 9_000 * SECOND), others);
    slow.unwrap();
    held.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_limit_that_grants_leases_is_refused_at_the_start_and_by_each_wait() {
    let waiter = limited_by("places", "concurrency 2/2s");
    let said = waiter.clone().checked().unwrap_err().to_string();
    assert!(said.contains("\"places\"") && said.contains("reserve"), "{said}");
    for _ in 0..6 {
        let refused = waiter.until_allowed("a", 60 * SECOND).await;
        assert!(matches!(&refused, Err(WaitError::Unsuitable(_))), "{refused:?}");
        let layer = WaitLayer::new(waiter.clone(), |(): &()| "a", SECOND);
        let refused = layer.layer(answering(200, "x-other", "7")).oneshot(()).await;
        assert!(matches!(&refused, Err(WaitServiceError::Wait(WaitError::Unsuitable(_)))));
    }
    assert!(waiter.limiter.request("a").cost(2).peek().await.unwrap().allowed());
    super::tests::waiter().checked().unwrap();
}

/// As of four processes over one store.
#[tokio::test(start_paused = true)]
async fn a_hold_is_shared_by_all_waiters_over_a_store() {
    let clock = TokioClock::default();
    let store = Arc::new(MemoryStore::<AnyAlgorithm, _>::builder().clock(clock).build());
    let process = |name: &str| {
        let limits = Limits::builder().limit("api", "gcra 100/s").build().unwrap();
        let waiter = Waiter::new(RateLimiter::new(limits, store.clone()));
        waiter.shared_holds(name).unwrap()
    };
    let told = WaitLayer::new(process("holds"), |(): &()| "a", SECOND).heed_answers();
    told.layer(answering(429, "retry-after", "7")).oneshot(()).await.unwrap();
    // The longest counts.
    process("holds").hold_back_all("a", 3 * SECOND).await.unwrap();
    let (start, others) = (Instant::now(), process("holds"));
    others.until_allowed("b", Duration::ZERO).await.unwrap();
    process("other").until_allowed("a", Duration::ZERO).await.unwrap();
    let refused = others.until_allowed("a", 6 * SECOND).await;
    assert!(matches!(refused, Err(WaitError::HeldBack { .. })), "{refused:?}");
    let _ = futures_util::future::join_all((0..3).map(async |_| {
        process("holds").until_allowed("a", 8 * SECOND).await.unwrap();
        assert_passed(start, 7..8);
    }))
    .await;
    assert!(limited_by("api", "gcra 1/s").shared_holds("api").is_err());
}

#[tokio::test(start_paused = true)]
async fn holds_are_shared_over_a_fallback() {
    let limits = Limits::builder().limit("api", "gcra 100/s").on_outage(OnOutage::Open);
    let limits = limits.build().unwrap();
    let store = MemoryStore::builder().clock(TokioClock::default()).build();
    let store = Fallback::builder().build(store, &limits).unwrap();
    let waiter = Waiter::new(RateLimiter::new(limits, store)).shared_holds("holds").unwrap();
    waiter.hold_back_all("a", 7 * SECOND).await.unwrap();
    let start = Instant::now();
    waiter.until_allowed("a", 8 * SECOND).await.unwrap();
    assert_passed(start, 7..8);
}

#[test]
fn callers_of_several_limits_are_held_back_under_different_keys() {
    let waiter = Waiter::<_, AnyAlgorithm>::new(RateLimiter::new(
        shared_and_own_limits("gcra 1/s"),
        MemoryStore::new(),
    ));
    let key = |service: &str, user: &str| waiter.hold_key(&[("service", service), ("user", user)]);
    assert_ne!(key("a", "1:b"), key("a1:1", "b"));
    assert_ne!(key("a", "-"), waiter.hold_key(&[("service", "a")]));
    assert_eq!(limited_by("api", "gcra 1/s").hold_key("a"), "a");
}

#[tokio::test(start_paused = true)]
async fn what_an_answer_says_remains_is_adopted_and_never_more() {
    const REMAINING: &str = "x-ratelimit-remaining-requests";
    // A limiter without a limit of the name changes nothing.
    for (name, told, left) in
        [("requests", "3", 3), ("requests", "50", 8), ("requests", "x", 8), ("api", "3", 8)]
    {
        let waiter = limited_by(name, "gcra 1/s burst 9");
        let layer = WaitLayer::new(waiter.clone(), |(): &()| "a", SECOND).adopt_answers();
        layer.layer(answering(200, REMAINING, told)).oneshot(()).await.unwrap();
        assert_eq!(
            waiter.limiter.request("a").cost(0).peek().await.unwrap().remaining(),
            left,
            "{told}"
        );
    }
}

/// As in a `select!` or `join!` whose task does other work: the first future is kept, and never
/// polled again.
#[tokio::test(start_paused = true)]
async fn a_wait_that_is_kept_and_not_polled_holds_others_back_for_a_second() {
    let (waiter, start) = (used_up().await, Instant::now());
    let mut kept: Vec<_> =
        (0..3).map(|_| Box::pin(waiter.until_allowed("a", 60 * SECOND))).collect();
    for kept in &mut kept {
        let _ = futures_util::poll!(kept.as_mut());
    }
    let others = [enqueue(&waiter, 1).await, enqueue(&waiter, 1).await];
    for other in others {
        other.await.unwrap();
    }
    // One second for the first, which would have gone on after one; both are admitted, one per
    // second.
    assert_passed(start, 2..5);
    drop(kept);
    assert!(waiter.queues.lock().queues.is_empty());
}
