//! Costs that are known after the response: renewed, extended, shared by layers. What each response
//! costs, however it ends, the oracle says.

use std::convert::Infallible;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Extension;
use axum::{Router, routing::get};
use futures_util::stream;
use http::{Extensions, Request, Response};
use http_body_util::BodyExt;
use ratelimit_core::store::Op;
use ratelimit_core::{AnyAlgorithm, ErrorKind, LimitCosts, Limits, ManualClock, RateLimiter};
use ratelimit_tower::{
    Charge, Choice, Decisions, Held, Hold, Meter, ProblemJson, RateLimitLayer, Reserving,
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
        100 - self.0.request(&[("ip", "192.0.2.7")]).cost(0).peek().await.unwrap().remaining()
    }
}

type Answers = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

/// A service that answers with this status and seven bytes, after the handler has seen the
/// extensions.
fn handles(status: u16, handler: impl Fn(&Extensions) + Clone + Send + Sync + 'static) -> Answers {
    BoxCloneSyncService::new(service_fn(move |request: Request<Body>| {
        handler(request.extensions());
        let response = Response::builder().status(status).body(Body::from("seven b"));
        async { Ok(response.unwrap()) }
    }))
}

/// One at a time, each for half a minute.
const BUSY: Rows = &[("busy", "concurrency 1/30s", "ip")];

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
        let cost = LimitCosts::from(1).with("bytes", 1_000);
        let layer = by_ip(limiter.clone()).cost_of(move |_| cost.clone());
        let layer = layer.reserve(Charge::body_bytes());
        let answer = send(&layer.layer(slow(&clock, slow_by)), request("/")).await;
        assert_eq!(answer.body.len() as u64, 10_000 * slow_by.body_min);
        layer.settlements().wait().await;
        let left = limiter.request(&[("ip", "192.0.2.7")]).cost(0).peek().await.unwrap();
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
    let upgrades = handles(101, move |extensions| {
        *keeps.lock().unwrap() = Some(extensions.get::<Hold>().unwrap().keep());
    });
    let [inner, outer] = layers.clone();
    let app = Router::new().route_service("/", upgrades).layer(inner).layer(outer);
    assert_eq!(send(&app, request("/")).await.status, 101);
    let status = async |layer: &RateLimitLayer<_, _, _, _>| {
        send(&layer.layer(handles(200, |_| {})), request("/")).await.status
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
    let service = exempt.layer(handles(200, |extensions| {
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
    let service = layer.layer(handles(200, |_| {}));
    let response = service.oneshot(request("/")).await.unwrap();
    assert_eq!(layer.settlements().len(), 1);
    drop(response.into_body().collect().await);
    layer.settlements().wait().await;
    assert_eq!(
        limiter.request(&[("ip", "192.0.2.7")]).cost(0).peek().await.unwrap().remaining(),
        97
    );
}

#[tokio::test]
async fn layers_inside_each_other_extend_and_settle_what_is_theirs() {
    async fn handler(
        Extension(meter): Extension<Meter>,
        Extension(hold): Extension<Hold>,
    ) -> String {
        meter.add_of("tokens", 7);
        let total = LimitCosts::from(1).with("tokens", 50);
        let extended = hold.extend(total).await.unwrap().unwrap();
        let misspelt = hold.extend(LimitCosts::from(1).with("tokesn", 50)).await.unwrap_err();
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
        let left = tokens.request(&[("ip", "192.0.2.7")]).cost(0).peek().await.unwrap().remaining();
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
    let left =
        async || large.request(&[("ip", "192.0.2.7")]).cost(0).peek().await.unwrap().remaining();
    let inner = by_ip(large.clone()).reserve(Charge::estimate().unmetered());
    let app = Router::new().route("/", get(handler)).layer(inner).layer(small);
    assert_eq!(send(&app, request("/")).await.status, 200);
    assert_eq!(left().await, 99);
}

#[tokio::test]
async fn an_algorithm_that_cannot_reserve_is_a_500() {
    let layer = layer(&[("log", "sliding-log 10/m", "ip")]).reserve(Charge::estimate());
    let service = layer.layer(handles(200, |_| {}));
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
    let left = limiter.request(&[("ip", "192.0.2.7")]).cost(0).peek().await.unwrap().remaining();
    assert_eq!((body.len(), left), (45, 100 - 45));
    assert_eq!(log.count("a reservation was not settled"), 1);
}

#[tokio::test]
async fn a_layer_reserves_what_is_left_down_to_a_minimum_and_tells_the_service() {
    let budget = Budget::new();
    let layer = by_ip(budget.0.clone())
        .cost(70)
        .tell_handlers()
        .reserve(Charge::estimate())
        .down_to(|_| 20);
    let told = |Extension(decisions): Extension<Decisions>| async move {
        decisions.by_name("budget").map_or(0, |budget| budget.cost).to_string()
    };
    let app = Router::new().route("/", get(told)).layer(layer);
    for (due, charged) in [("70", 70), ("30", 100)] {
        assert_eq!(send(&app, request("/")).await.body, due);
        assert_eq!(budget.read_charged().await, charged);
    }
    let denied = send(&app, request("/")).await;
    // In 12 s there are the 20 again.
    assert_eq!((denied.status, &*denied.field("retry-after")), (429, "12"));
    assert_eq!(budget.read_charged().await, 100);
}

#[tokio::test]
async fn a_handler_hears_of_a_warning_that_only_the_settlement_crosses() {
    let limits = Limits::builder().limit("budget", "gcra 100/m burst 100").by(["ip"]);
    let limits = limits.warn_at_percent(80).build().unwrap();
    let limiter = Arc::new(RateLimiter::new(limits, store(&ManualClock::default())));
    let warnings: Arc<Mutex<Vec<String>>> = Arc::default();
    for (used, due) in [(70, &[][..]), (8, &[]), (15, &["budget of 100, 7 left"]), (5, &[])] {
        let told = warnings.clone();
        let handler = move |extensions: &Extensions| {
            let decisions = extensions.get::<Decisions>().unwrap();
            assert_eq!(decisions.warned().count(), 0, "the estimate crosses nothing");
            extensions.get::<Meter>().unwrap().set(used);
            let told = told.clone();
            extensions.get::<Hold>().unwrap().on_settled(move |decisions| {
                let limit = |name: &str| {
                    let limit = decisions.by_name(name).unwrap();
                    format!("{name} of {}, {} left", limit.limit, limit.remaining)
                };
                told.lock().unwrap().extend(decisions.warned().map(limit));
            });
        };
        let layer = by_ip(limiter.clone()).tell_handlers().reserve(Charge::estimate());
        assert_eq!(send(&layer.layer(handles(200, handler)), request("/")).await.status, 200);
        assert_eq!(std::mem::take(&mut *warnings.lock().unwrap()), due);
    }
}
