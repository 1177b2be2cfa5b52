//! Costs that are known after the response: reserved, settled by status, bytes or the handler's
//! word, however the request ends.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Extension;
use axum::{Router, routing::get};
use futures_util::StreamExt;
use futures_util::stream;
use http::{Extensions, Request, Response, StatusCode};
use http_body_util::BodyExt;
use ratelimit_core::store::Op;
use ratelimit_core::{AnyAlgorithm, ErrorKind, LimitCosts, ManualClock, RateLimiter};
use ratelimit_tower::{
    BusyWait, Charge, Choice, Fields, Held, Hold, Meter, ProblemJson, RateLimitLayer, Reserving,
    XRateLimit,
};
use tower::util::BoxCloneSyncService;
use tower::{Layer, ServiceExt, service_fn};

use crate::harness::{Faulty, Manual, Rows, by_ip, layer, limiter, limits, request, send, store};
use crate::reloading::Log;

/// A hundred per caller; the clock stands still.
const BUDGET: Rows = &[("budget", "gcra 100/m burst 100", "ip")];

type Reserves = RateLimitLayer<Manual, AnyAlgorithm, ProblemJson, Reserving>;

/// A limiter, and layers of it that reserve ten.
struct Budget(Arc<RateLimiter<Manual>>);

impl Budget {
    fn new() -> Self {
        Self(Arc::new(limiter(BUDGET)))
    }

    fn layer(&self, charge: Charge) -> Reserves {
        by_ip(self.0.clone()).cost(10).reserve(charge)
    }

    /// What is charged. A store in memory has settled when a request ends.
    async fn read_charged(&self) -> u64 {
        100 - self.0.peek(&[("ip", "192.0.2.7")], 0).await.unwrap().remaining()
    }
}

/// What a body of two chunks and seven bytes does then.
#[derive(Clone, Copy)]
enum Then {
    Ends,
    Fails,
    Hangs,
}

type Answers = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

/// A service that answers with this status, after the handler has seen the extensions.
fn handles(
    status: u16,
    then: Then,
    handler: impl Fn(&Extensions) + Clone + Send + Sync + 'static,
) -> Answers {
    BoxCloneSyncService::new(service_fn(move |request: Request<Body>| {
        handler(request.extensions());
        let end = match then {
            Then::Ends => stream::empty().boxed(),
            Then::Fails => stream::iter([Err("the body failed")]).boxed(),
            Then::Hangs => stream::pending().boxed(),
        };
        let chunks = stream::iter([Ok("abc"), Ok("four")]).chain(end);
        let response = Response::builder().status(status).body(Body::from_stream(chunks));
        async { Ok(response.unwrap()) }
    }))
}

fn answers(status: u16, then: Then) -> Answers {
    handles(status, then, |_| {})
}

/// Sets the cost of a request, as its handler does.
fn meters(cost: u64) -> Answers {
    handles(200, Then::Ends, move |extensions| extensions.get::<Meter>().unwrap().set(cost))
}

fn free() -> impl Fn(StatusCode) -> bool + Send + Sync + 'static {
    |status| status == 304 || status.is_server_error()
}

#[tokio::test]
async fn a_response_costs_what_its_status_or_its_bytes_say() {
    let by_status = || Charge::by_status(|status| if status.is_success() { 3 } else { 1 });
    for (charge, status, cost) in [
        (Charge::estimate(), 200, 10),
        (Charge::estimate(), 500, 10),
        (Charge::estimate().free(free()), 500, 0),
        (Charge::estimate().free(free()), 304, 0),
        (Charge::estimate().free(free()), 404, 10),
        (by_status(), 200, 3),
        (by_status(), 404, 1),
        (by_status().free(free()), 304, 0),
        (Charge::body_bytes(), 200, 7),
        (Charge::body_bytes().free(free()), 500, 0),
    ] {
        let (budget, shown) = (Budget::new(), format!("{charge:?} {status}"));
        let answer =
            send(&budget.layer(charge).layer(answers(status, Then::Ends)), request("/")).await;
        assert_eq!(answer.field("ratelimit"), r#""budget";r=90;t=1"#);
        assert_eq!(budget.read_charged().await, cost, "{shown}");
    }
}

#[tokio::test]
async fn the_estimate_is_charged_until_the_body_has_ended_and_bytes_until_the_client_goes_away() {
    let budget = Budget::new();
    let service = budget.layer(Charge::by_status(|_| 1)).layer(answers(200, Then::Ends));
    let mut body = service.oneshot(request("/")).await.unwrap().into_body();
    for _ in 0..2 {
        body.frame().await.unwrap().unwrap();
        assert_eq!(budget.read_charged().await, 10);
    }
    assert!(body.frame().await.is_none());
    assert_eq!(budget.read_charged().await, 1); // before the body is dropped

    let service = budget.layer(Charge::body_bytes()).layer(answers(200, Then::Hangs));
    let mut body = service.oneshot(request("/")).await.unwrap().into_body();
    body.frame().await.unwrap().unwrap();
    drop(body);
    assert_eq!(budget.read_charged().await, 1 + 3);
    send(&budget.layer(Charge::body_bytes()).layer(answers(200, Then::Fails)), request("/")).await;
    assert_eq!(budget.read_charged().await, 1 + 3 + 7);
}

#[tokio::test]
async fn a_body_that_knows_its_last_frame_settles_with_it() {
    let budget = Budget::new();
    let full = service_fn(|_: Request<Body>| async {
        Ok::<_, Infallible>(Response::new(Body::from("seven b")))
    });
    let service = budget.layer(Charge::body_bytes()).layer(full);
    let mut body = service.oneshot(request("/")).await.unwrap().into_body();
    assert_eq!(budget.read_charged().await, 10);
    body.frame().await.unwrap().unwrap();
    assert!(http_body::Body::is_end_stream(&body));
    assert_eq!(budget.read_charged().await, 7);
}

#[tokio::test]
async fn the_handlers_word_goes_before_status_and_bytes() {
    let budget = Budget::new();
    let adds = handles(500, Then::Ends, |extensions| {
        let meter: &Meter = extensions.get().unwrap();
        meter.add(20);
        meter.add(5);
    });
    send(&budget.layer(Charge::body_bytes().free(free())).layer(adds), request("/")).await;
    assert_eq!(budget.read_charged().await, 25);
    // Nothing at all; and above the estimate, down to nothing left.
    // A denied request reserves nothing.
    for (cost, status, charged) in [(0, 200, 25), (1_000, 200, 100), (7, 429, 100)] {
        let answer =
            send(&budget.layer(Charge::estimate()).layer(meters(cost)), request("/")).await;
        assert_eq!((answer.status, budget.read_charged().await), (status, charged));
    }
}

#[tokio::test]
async fn a_handler_that_fails_panics_or_is_abandoned_is_settled() {
    let budget = Budget::new();
    let failing = service_fn(|_: Request<Body>| async { Err::<Response<Body>, _>("it failed") });
    for (charge, charged) in [(Charge::estimate().free(free()), 0), (Charge::body_bytes(), 10)] {
        let service = budget.layer(charge).layer(failing);
        assert!(service.oneshot(request("/")).await.is_err());
        assert_eq!(budget.read_charged().await, charged);
    }

    let hanging = service_fn(|request: Request<Body>| async move {
        request.extensions().get::<Meter>().unwrap().set(2);
        std::future::pending::<Result<Response<Body>, Infallible>>().await
    });
    let service = budget.layer(Charge::estimate()).layer(hanging);
    let call = tokio::spawn(service.oneshot(request("/")));
    tokio::task::yield_now().await; // it begins
    assert_eq!(budget.read_charged().await, 20); // the estimate, while it runs
    call.abort();
    assert!(call.await.is_err());
    assert_eq!(budget.read_charged().await, 12);

    let panicking = service_fn(|_: Request<Body>| async {
        assert!(std::hint::black_box(false), "as a handler may");
        Ok::<_, Infallible>(Response::new(Body::empty()))
    });
    let layer = budget.layer(Charge::body_bytes());
    assert!(tokio::spawn(layer.layer(panicking).oneshot(request("/"))).await.is_err());
    layer.settlements().wait().await;
    assert_eq!(budget.read_charged().await, 22);
}

/// One at a time, each for half a minute.
const BUSY: Rows = &[("busy", "concurrency 1/30s", "ip")];

#[tokio::test(start_paused = true)]
async fn a_place_is_held_until_the_body_has_ended_and_a_denial_does_not_tell_the_end_of_a_lease() {
    let x = || Fields::new().x_ratelimit(XRateLimit::Seconds);
    let hint = BusyWait::Hint(Duration::from_millis(1_500));
    for (fields, told) in [
        (x(), None),
        (x().busy_wait(hint), Some("2")),
        (x().busy_wait(BusyWait::Estimated), Some("4")),
    ] {
        let layer = layer(BUSY).fields(fields).reserve(Charge::estimate());
        let service = layer.layer(answers(200, Then::Hangs));
        let first = service.clone().oneshot(request("/")).await.unwrap();
        assert_eq!(first.headers()["ratelimit-policy"], r#""busy";q=1;qu="concurrent-requests""#);
        tokio::time::sleep(Duration::from_secs(4)).await;
        drop(first);
        let second = service.clone().oneshot(request("/")).await.unwrap();
        assert_eq!(second.status(), 200);
        let denied = service.oneshot(request("/")).await.unwrap();
        assert_eq!(denied.status(), 429);
        let field = |name| denied.headers().get(name).map(|value| value.to_str().unwrap());
        assert_eq!((field("retry-after"), field("x-ratelimit-reset")), (told, told));
        let item = told.map_or(String::new(), |told| format!(";t={told}"));
        assert_eq!(field("ratelimit"), Some(&*format!("\"busy\";r=0{item}")));
    }

    // The wait for another limit that denies as well is known.
    let rows: Rows = &[BUSY[0], ("burst", "gcra 6/m burst 1", "ip")];
    let layer = layer(rows).reserve(Charge::estimate());
    let service = layer.layer(answers(200, Then::Hangs));
    let _first = service.clone().oneshot(request("/")).await.unwrap();
    let denied = service.oneshot(request("/")).await.unwrap();
    assert_eq!(denied.headers()["retry-after"], "10");
    assert_eq!(denied.headers()["ratelimit"], r#""busy";r=0, "burst";r=0;t=10"#);
}

/// How long a handler takes, and then its body, of a chunk per minute.
#[derive(Clone, Copy)]
struct Slow {
    handler_min: u64,
    body_min: u64,
}

/// A service of which each minute passes on both clocks.
fn slow(clock: &ManualClock, Slow { handler_min, body_min }: Slow) -> Answers {
    const MINUTE: Duration = Duration::from_secs(60);
    let clock = clock.clone();
    BoxCloneSyncService::new(service_fn(move |_: Request<Body>| {
        let clock = clock.clone();
        async move {
            let pass = move || {
                clock.advance(MINUTE);
                tokio::time::sleep(MINUTE)
            };
            for _ in 0..handler_min {
                pass().await;
            }
            let chunks = stream::unfold((0, pass), move |(nth, pass)| async move {
                pass().await;
                let chunk = Ok::<_, Infallible>("x".repeat(10_000));
                (nth < body_min).then_some((chunk, (nth + 1, pass)))
            });
            Ok(Response::new(Body::from_stream(chunks)))
        }
    }))
}

#[tokio::test(start_paused = true)]
async fn what_lives_longer_than_its_reservation_is_renewed_and_settled_at_its_cost() {
    const BYTES: Rows = &[("bytes", "fixed-window 1000000/30d", "ip")];
    for (rows, slow_by, renewals) in [
        (BYTES, Slow { handler_min: 0, body_min: 20 }, 0),
        (BYTES, Slow { handler_min: 0, body_min: 60 }, 2),
        (BYTES, Slow { handler_min: 75, body_min: 60 }, 6),
        (
            &[BYTES[0], ("places", "concurrency 1/5m", "ip")],
            Slow { handler_min: 9, body_min: 9 },
            11,
        ),
    ] {
        let (clock, renewed) = (ManualClock::default(), Arc::new(AtomicU64::new(0)));
        let counts = renewed.clone();
        let store = Faulty::new(&clock, move |_, op| {
            // Each second renewal fails: it is repeated after an eighth of the life.
            let is_away = op == Op::Renew && counts.fetch_add(1, Ordering::Relaxed) % 2 == 1;
            is_away.then_some(ErrorKind::Unavailable)
        });
        let limiter = Arc::new(RateLimiter::new(limits(rows), store));
        let cost = LimitCosts::from(1).of("bytes", 1_000);
        let layer = by_ip(limiter.clone()).cost_of(move |_| cost.clone());
        let layer = layer.reserve(Charge::body_bytes());
        let answer = send(&layer.layer(slow(&clock, slow_by)), request("/")).await;
        assert_eq!(answer.body.len() as u64, 10_000 * slow_by.body_min);
        layer.settlements().wait().await;
        let left = limiter.peek(&[("ip", "192.0.2.7")], 0).await.unwrap();
        let left = limiter.named(&left).by_name("bytes").unwrap().remaining;
        assert_eq!(left, 1_000_000 - 10_000 * slow_by.body_min);
        let after = renewed.load(Ordering::Relaxed);
        assert_eq!(after, renewals);
        // And never again.
        tokio::time::sleep(Duration::from_secs(10_000)).await;
        assert_eq!(renewed.load(Ordering::Relaxed), after);
    }
}

/// The handler of an upgraded connection answers with 101, and keeps its places for longer.
#[tokio::test(start_paused = true)]
async fn what_is_held_is_renewed_in_all_layers_until_it_is_let_go_also_after_an_outage() {
    let clock = ManualClock::default();
    let layers = [(); 2].map(|()| {
        // The first renewal fails.
        let is_away = AtomicBool::new(true);
        let away_once = move |_, op| {
            let fails = op == Op::Renew && is_away.swap(false, Ordering::Relaxed);
            fails.then_some(ErrorKind::Unavailable)
        };
        let limiter = RateLimiter::new(limits(BUSY), Faulty::new(&clock, away_once));
        by_ip(limiter).reserve(Charge::estimate())
    });
    let held: Arc<Mutex<Option<Held>>> = Arc::default();
    let keeps = held.clone();
    let upgrades = handles(101, Then::Ends, move |extensions| {
        *keeps.lock().unwrap() = Some(extensions.get::<Hold>().unwrap().keep());
    });
    let [inner, outer] = layers.clone();
    let app = Router::new().route_service("/", upgrades).layer(inner).layer(outer);
    assert_eq!(send(&app, request("/")).await.status, 101);
    let status = async |layer: &RateLimitLayer<_, _, _, _>| {
        send(&layer.layer(answers(200, Then::Ends)), request("/")).await.status
    };
    // For longer than a lease, no other request is admitted.
    for _ in 0..10 {
        clock.advance(Duration::from_secs(10));
        tokio::time::sleep(Duration::from_millis(10_001)).await;
        assert_eq!([status(&layers[0]).await, status(&layers[1]).await], [429, 429]);
    }
    held.lock().unwrap().take();
    for layer in &layers {
        layer.settlements().wait().await;
        assert_eq!(status(layer).await, 200);
    }
}

#[tokio::test]
async fn a_handler_finds_its_extensions_also_where_nothing_is_reserved() {
    let exempt = RateLimitLayer::<Manual>::choosing(|_| Choice::Exempt).reserve(Charge::estimate());
    let service = exempt.layer(handles(200, Then::Ends, |extensions| {
        extensions.get::<Meter>().unwrap().add(1);
        drop(extensions.get::<Hold>().unwrap().keep());
    }));
    assert_eq!(send(&service, request("/")).await.status, 200);
}

#[tokio::test]
async fn layers_inside_each_other_share_a_meter_unless_one_is_unmetered() {
    async fn handler(Extension(meter): Extension<Meter>) -> &'static str {
        meter.add(17);
        "four"
    }
    let [inner, outer, bytes] = [(); 3].map(|()| Budget::new());
    let app = Router::new()
        .route("/", get(handler))
        .layer(inner.layer(Charge::estimate()))
        .layer(outer.layer(Charge::estimate()))
        .layer(bytes.layer(Charge::body_bytes().unmetered()));
    send(&app, request("/")).await;
    for (budget, cost) in [(inner, 17), (outer, 17), (bytes, 4)] {
        assert_eq!(budget.read_charged().await, cost);
    }
}

#[tokio::test(start_paused = true)]
async fn the_settlements_of_a_store_that_is_waited_for_can_be_waited_for() {
    let limiter = Arc::new(RateLimiter::new(limits(BUDGET), Faulty::slow()));
    let layer = by_ip(limiter.clone()).cost(10).reserve(Charge::by_status(|_| 3));
    let service = layer.layer(answers(200, Then::Ends));
    let response = service.oneshot(request("/")).await.unwrap();
    assert_eq!(layer.settlements().len(), 1);
    drop(response.into_body().collect().await);
    layer.settlements().wait().await;
    assert_eq!(limiter.peek(&[("ip", "192.0.2.7")], 0).await.unwrap().remaining(), 97);
}

#[tokio::test]
async fn layers_inside_each_other_extend_and_settle_what_is_theirs() {
    async fn handler(
        Extension(meter): Extension<Meter>,
        Extension(hold): Extension<Hold>,
    ) -> String {
        meter.add_of("tokens", 7);
        let total = LimitCosts::from(1).of("tokens", 50);
        let extended = hold.extend(total).await.unwrap().unwrap();
        let misspelt = hold.extend(LimitCosts::from(1).of("tokesn", 50)).await.unwrap_err();
        format!("{} {misspelt}", extended.remaining())
    }
    let tokens = Arc::new(limiter(&[("tokens", "gcra 100/m burst 100", "ip")]));
    // A client that tells a cost of 0 reserves 1.
    let inner = by_ip(tokens.clone()).cost(0).reserve(Charge::estimate());
    let outer = layer(&[("places", "concurrency 1/30s", "ip")]).reserve(Charge::estimate());
    let app = Router::new().route("/", get(handler)).layer(inner).layer(outer);
    for nth in 1..=3 {
        let answer = send(&app, request("/")).await;
        let body = String::from_utf8(answer.body.to_vec()).unwrap();
        let left = 100 - 7 * (nth - 1) - 50;
        let says = "the total has a cost of \"tokesn\", and no limit has this name";
        assert_eq!((answer.status, body), (200, format!("{left} {says}")));
        let left = tokens.peek(&[("ip", "192.0.2.7")], 0).await.unwrap().remaining();
        assert_eq!(left, 100 - 7 * nth);
    }
}

#[tokio::test]
async fn an_extension_that_one_layer_denies_is_asked_of_none_within_it() {
    async fn handler(Extension(meter): Extension<Meter>, Extension(hold): Extension<Hold>) {
        assert!(!hold.extend(50).await.unwrap().unwrap().allowed());
        meter.set(1);
    }
    let small = layer(&[("small", "gcra 9/m burst 9", "ip")]).reserve(Charge::estimate());
    let large = Arc::new(limiter(&[("large", "gcra 100/m burst 100", "ip")]));
    let left = async || large.peek(&[("ip", "192.0.2.7")], 0).await.unwrap().remaining();
    let inner = by_ip(large.clone()).reserve(Charge::estimate().unmetered());
    let app = Router::new().route("/", get(handler)).layer(inner).layer(small);
    assert_eq!(send(&app, request("/")).await.status, 200);
    assert_eq!(left().await, 99);
}

#[tokio::test]
async fn an_algorithm_that_cannot_reserve_is_a_500() {
    let layer = layer(&[("log", "sliding-log 10/m", "ip")]).reserve(Charge::estimate());
    let service = layer.layer(answers(200, Then::Ends));
    assert_eq!(send(&service, request("/")).await.status, 500);
}

#[tokio::test]
async fn a_response_that_outlives_its_reservation_pays_what_is_missing_and_is_logged() {
    const ROWS: Rows = &[("budget", "fixed-window 100/360d", "ip")];
    let (log, clock) = (Log::default(), ManualClock::default());
    let _guards = log.listens();
    let limiter = Arc::new(RateLimiter::new(limits(ROWS), store(&clock)));
    let layer = by_ip(limiter.clone()).cost(10).reserve(Charge::body_bytes());
    let bytes = get(async || Body::from(vec![0; 45]));
    let app = Router::new().route("/", bytes).layer(layer);
    let response = app.oneshot(request("/")).await.unwrap();
    clock.advance(Duration::from_secs(3_660));
    let body = response.into_body().collect().await.unwrap().to_bytes();
    let left = limiter.peek(&[("ip", "192.0.2.7")], 0).await.unwrap().remaining();
    assert_eq!((body.len(), left), (45, 100 - 45));
    assert_eq!(log.count("a reservation was not settled"), 1);
}
