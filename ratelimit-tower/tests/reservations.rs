//! Costs that are known after the response: reserved, settled by status, bytes or the handler's word, however the request ends.
#![cfg(feature = "tokio")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::extract::Extension;
use axum::{Router, routing::get};
use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{BodyExt, Full};
use ratelimit_core::{
    Batch, Concurrency, Gcra, Limits, ManualClock, Policy, RateLimiter, SlidingLog, Store, Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_tower::{
    BusyWait, Charge, Choice, ClientAddress, Fields, Held, Hold, Meter, PeerAddress,
    RateLimitLayer, ReservationLayer, XRateLimit,
};
use tower::{Layer, Service, ServiceExt, service_fn};

type Limiter = Arc<RateLimiter<MemoryStore<Policy, ManualClock>>>;

/// A hundred per caller; the clock stands still.
fn limiter() -> Limiter {
    let limits = Limits::builder().limit("budget", Gcra::per_minute(100).burst(100)).by(["ip"]);
    let store = MemoryStore::builder().clock(ManualClock::default()).build();
    Arc::new(RateLimiter::new(limits.build().unwrap(), store))
}

/// Reserves ten.
fn layer(
    limiter: &Limiter,
    charge: Charge,
) -> ReservationLayer<MemoryStore<Policy, ManualClock>, Policy, ratelimit_tower::ProblemJson> {
    let layer = RateLimitLayer::new(limiter.clone()).by("ip", ClientAddress::peer());
    layer.cost(10).reserve(charge)
}

fn request() -> Request<()> {
    let mut request = Request::new(());
    let peer: SocketAddr = "192.0.2.7:80".parse().unwrap();
    request.extensions_mut().insert(PeerAddress(peer));
    request
}

/// What is charged. A store in memory has settled when a request ends.
async fn charged(limiter: &Limiter) -> u64 {
    100 - limiter.peek(&[("ip", "192.0.2.7")], 0).await.unwrap().remaining()
}

/// A body of these chunks. It ends, fails, or never ends.
struct Chunks {
    chunks: Vec<&'static str>,
    then: Then,
}

#[derive(Clone, Copy)]
enum Then {
    Ends,
    Fails,
    Hangs,
}

impl Body for Chunks {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        match (self.chunks.pop(), self.then) {
            (Some(chunk), _) => Poll::Ready(Some(Ok(Frame::data(chunk.into())))),
            (None, Then::Ends) => Poll::Ready(None),
            (None, Then::Fails) => Poll::Ready(Some(Err("the body failed"))),
            (None, Then::Hangs) => Poll::Pending,
        }
    }
}

impl From<Bytes> for Chunks {
    fn from(_: Bytes) -> Self {
        Self { chunks: Vec::new(), then: Then::Ends }
    }
}

/// A service that answers with this status and a body of seven bytes.
fn answers(
    status: u16,
    then: Then,
) -> impl Service<Request<()>, Response = Response<Chunks>, Error = Infallible, Future: Send> + Clone
{
    service_fn(move |_: Request<()>| async move {
        let mut response = Response::new(Chunks { chunks: vec!["four", "abc"], then });
        *response.status_mut() = StatusCode::from_u16(status).unwrap();
        Ok(response)
    })
}

fn free() -> impl Fn(StatusCode) -> bool + Send + Sync + 'static {
    |status| status == 304 || status.is_server_error()
}

#[tokio::test]
async fn a_response_costs_what_its_status_says() {
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
        let limiter = limiter();
        let shown = format!("{charge:?} {status}");
        let service = layer(&limiter, charge).layer(answers(status, Then::Ends));
        let response = service.oneshot(request()).await.unwrap();
        assert_eq!(response.headers()["ratelimit"].to_str().unwrap(), r#""budget";r=90;t=1"#);
        drop(response.into_body().collect().await);
        assert_eq!(charged(&limiter).await, cost, "{shown}");
    }
}

#[tokio::test]
async fn the_estimate_is_charged_until_the_body_has_ended() {
    let limiter = limiter();
    let service = layer(&limiter, Charge::by_status(|_| 1)).layer(answers(200, Then::Ends));
    let mut body = service.oneshot(request()).await.unwrap().into_body();
    for _ in 0..2 {
        body.frame().await.unwrap().unwrap();
        assert_eq!(charged(&limiter).await, 10);
    }
    assert!(body.frame().await.is_none());
    assert_eq!(charged(&limiter).await, 1); // before the body is dropped
}

#[tokio::test]
async fn a_body_that_knows_its_last_frame_settles_with_it() {
    let limiter = limiter();
    let layer = layer(&limiter, Charge::body_bytes()).layer(service_fn(|_: Request<()>| async {
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::from("seven b")))
    }));
    let mut body = layer.oneshot(request()).await.unwrap().into_body();
    assert_eq!(charged(&limiter).await, 10);
    body.frame().await.unwrap().unwrap();
    assert!(body.is_end_stream());
    assert_eq!(charged(&limiter).await, 7);
}

#[tokio::test]
async fn a_client_that_goes_away_pays_for_what_was_sent() {
    let limiter = limiter();
    let service = layer(&limiter, Charge::body_bytes()).layer(answers(200, Then::Hangs));
    let mut body = service.oneshot(request()).await.unwrap().into_body();
    body.frame().await.unwrap().unwrap();
    drop(body);
    assert_eq!(charged(&limiter).await, 3);

    let failing = layer(&limiter, Charge::body_bytes()).layer(answers(200, Then::Fails));
    let body = failing.oneshot(request()).await.unwrap().into_body();
    assert!(body.collect().await.is_err());
    assert_eq!(charged(&limiter).await, 3 + 7);
}

#[tokio::test]
async fn the_handlers_word_goes_before_status_and_bytes() {
    let limiter = limiter();
    let handler = service_fn(|request: Request<()>| async move {
        let meter: Meter = request.extensions().get().cloned().unwrap();
        meter.add(20);
        meter.add(5);
        Ok::<_, Infallible>(Response::new(Chunks { chunks: vec!["x"], then: Then::Ends }))
    });
    let service = layer(&limiter, Charge::body_bytes()).layer(handler);
    drop(service.oneshot(request()).await.unwrap().into_body().collect().await);
    assert_eq!(charged(&limiter).await, 25);

    // Above the estimate, down to nothing left; and nothing at all.
    let set = |cost: u64| {
        service_fn(move |request: Request<()>| async move {
            request.extensions().get::<Meter>().unwrap().set(cost);
            let failed = Chunks { chunks: Vec::new(), then: Then::Ends };
            Ok::<_, Infallible>(Response::new(failed))
        })
    };
    drop(layer(&limiter, Charge::estimate()).layer(set(0)).oneshot(request()).await);
    assert_eq!(charged(&limiter).await, 25);
    drop(layer(&limiter, Charge::estimate()).layer(set(1_000)).oneshot(request()).await);
    assert_eq!(charged(&limiter).await, 100);
}

#[tokio::test]
async fn a_handler_that_fails_panics_or_is_abandoned_is_settled() {
    let limiter = limiter();
    let failing = service_fn(|_: Request<()>| async { Err::<Response<Chunks>, _>("it failed") });
    let free_of_errors = Charge::estimate().free(free());
    assert!(layer(&limiter, free_of_errors).layer(failing).oneshot(request()).await.is_err());
    assert_eq!(charged(&limiter).await, 0);
    assert!(layer(&limiter, Charge::body_bytes()).layer(failing).oneshot(request()).await.is_err());
    assert_eq!(charged(&limiter).await, 10);

    let hanging = service_fn(|request: Request<()>| async move {
        request.extensions().get::<Meter>().unwrap().set(2);
        std::future::pending::<Result<Response<Chunks>, Infallible>>().await
    });
    let call = tokio::spawn(layer(&limiter, Charge::estimate()).layer(hanging).oneshot(request()));
    tokio::task::yield_now().await; // it begins
    assert_eq!(charged(&limiter).await, 20); // the estimate, while it runs
    call.abort();
    assert!(call.await.is_err());
    assert_eq!(charged(&limiter).await, 12);

    let panicking = service_fn(|_: Request<()>| async {
        assert!(std::hint::black_box(false), "as a handler may");
        Ok::<_, Infallible>(Response::new(Chunks { chunks: Vec::new(), then: Then::Ends }))
    });
    let layer = layer(&limiter, Charge::body_bytes());
    assert!(tokio::spawn(layer.layer(panicking).oneshot(request())).await.is_err());
    layer.settlements().idle().await;
    assert_eq!(charged(&limiter).await, 22);
}

#[tokio::test]
async fn a_denied_request_reserves_nothing() {
    let limiter = limiter();
    assert!(limiter.check_n(&[("ip", "192.0.2.7")], 95).await.unwrap().allowed());
    let service = layer(&limiter, Charge::estimate()).layer(answers(200, Then::Ends));
    let denied = service.oneshot(request()).await.unwrap();
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(denied.headers()["retry-after"], "3");
    drop(denied);
    assert_eq!(charged(&limiter).await, 95);
}

#[tokio::test]
async fn a_concurrency_limit_holds_its_place_until_the_body_has_ended() {
    let busy = Limits::builder().limit("busy", Concurrency::new("1/1h".parse().unwrap()).unwrap());
    let store = MemoryStore::<Policy>::new();
    let limiter = RateLimiter::new(busy.by(["ip"]).build().unwrap(), store);
    let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());
    let service = layer.reserve(Charge::estimate()).layer(answers(200, Then::Ends));
    let first = service.clone().oneshot(request()).await.unwrap();
    let policy = first.headers()["ratelimit-policy"].to_str().unwrap();
    assert_eq!(policy, r#""busy";q=1;qu="concurrent-requests""#);
    let second = service.clone().oneshot(request()).await.unwrap();
    assert_eq!(second.status(), StatusCode::TOO_MANY_REQUESTS);
    drop(first.into_body().collect().await);
    assert_eq!(service.oneshot(request()).await.unwrap().status(), StatusCode::OK);
}

/// One at a time, each for half a minute.
fn one_at_a_time(
    fields: Fields,
    clock: &ManualClock,
) -> RateLimitLayer<MemoryStore<Policy, ManualClock>> {
    let busy = Concurrency::new("1/30s".parse().unwrap()).unwrap();
    let limits = Limits::builder().limit("busy", busy).by(["ip"]).build().unwrap();
    let limiter = RateLimiter::new(limits, MemoryStore::builder().clock(clock.clone()).build());
    RateLimitLayer::new(limiter).by("ip", ClientAddress::peer()).fields(fields)
}

#[tokio::test(start_paused = true)]
async fn a_denied_client_is_not_told_to_wait_for_the_end_of_a_lease() {
    let x = || Fields::new().x_ratelimit(XRateLimit::Seconds);
    let hint = BusyWait::Hint(Duration::from_millis(1_500));
    for (fields, told) in [
        (x(), None),
        (x().busy_wait(hint), Some("2")),
        (x().busy_wait(BusyWait::Estimated), Some("4")),
    ] {
        let layer = one_at_a_time(fields, &ManualClock::default());
        let service = layer.reserve(Charge::estimate()).layer(answers(200, Then::Hangs));
        let first = service.clone().oneshot(request()).await.unwrap();
        tokio::time::sleep(Duration::from_secs(4)).await;
        drop(first);
        let second = service.clone().oneshot(request()).await.unwrap();
        let denied = service.oneshot(request()).await.unwrap();
        assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
        let field = |name| denied.headers().get(name).map(|value| value.to_str().unwrap());
        assert_eq!((field("retry-after"), field("x-ratelimit-reset")), (told, told));
        let item = told.map_or(String::new(), |told| format!(";t={told}"));
        assert_eq!(field("ratelimit"), Some(&*format!("\"busy\";r=0{item}")));
        drop(second);
    }

    // The wait for another limit that denies as well is known.
    let busy = Concurrency::new("1/30s".parse().unwrap()).unwrap();
    let limits = Limits::builder().limit("busy", busy).by(["ip"]);
    let limits = limits.limit("burst", Gcra::per_minute(6).burst(1)).by(["ip"]).build().unwrap();
    let store = MemoryStore::builder().clock(ManualClock::default()).build();
    let layer = RateLimitLayer::new(RateLimiter::<_, Policy>::new(limits, store));
    let layer = layer.by("ip", ClientAddress::peer()).reserve(Charge::estimate());
    let service = layer.layer(answers(200, Then::Hangs));
    let _first = service.clone().oneshot(request()).await.unwrap();
    let denied = service.oneshot(request()).await.unwrap();
    assert_eq!(denied.headers()["retry-after"], "10");
    assert_eq!(denied.headers()["ratelimit"], r#""busy";r=0, "burst";r=0;t=10"#);
}

#[tokio::test(start_paused = true)]
async fn what_is_held_is_renewed_until_it_is_let_go() {
    let clock = ManualClock::default();
    let layer = one_at_a_time(Fields::new(), &clock).reserve(Charge::estimate());
    let settlements = layer.settlements().clone();
    let held: Arc<Mutex<Option<Held>>> = Arc::default();
    let keeps = held.clone();
    let service = layer.layer(service_fn(move |request: Request<()>| {
        *keeps.lock().unwrap() = Some(request.extensions().get::<Hold>().unwrap().keep());
        async { Ok::<_, Infallible>(Response::new(Chunks { chunks: vec![], then: Then::Ends })) }
    }));
    drop(service.clone().oneshot(request()).await.unwrap());
    for _ in 0..10 {
        clock.advance(Duration::from_secs(10));
        tokio::time::sleep(Duration::from_millis(10_001)).await;
        assert_eq!(service.clone().oneshot(request()).await.unwrap().status(), 429);
    }
    held.lock().unwrap().take();
    settlements.idle().await;
    assert_eq!(service.oneshot(request()).await.unwrap().status(), 200);
}

#[tokio::test]
async fn a_handler_finds_its_extensions_also_where_nothing_is_reserved() {
    let exempt = RateLimitLayer::<MemoryStore<Policy>>::choosing(|_| Choice::Exempt);
    let service = exempt.reserve(Charge::estimate()).layer(service_fn(|request: Request<()>| {
        request.extensions().get::<Meter>().unwrap().add(1);
        drop(request.extensions().get::<Hold>().unwrap().keep());
        async { Ok::<_, Infallible>(Response::new(Chunks { chunks: vec![], then: Then::Ends })) }
    }));
    assert_eq!(service.oneshot(request()).await.unwrap().status(), 200);
}

#[tokio::test]
async fn layers_inside_each_other_share_a_meter_unless_one_is_unmetered() {
    async fn handler(Extension(meter): Extension<Meter>) -> &'static str {
        meter.add(17);
        "four"
    }
    let (inner, outer, bytes) = (limiter(), limiter(), limiter());
    let app = Router::new()
        .route("/", get(handler))
        .layer(layer(&inner, Charge::estimate()))
        .layer(layer(&outer, Charge::estimate()))
        .layer(layer(&bytes, Charge::body_bytes().unmetered()));
    let response = app.oneshot(request().map(|()| axum::body::Body::empty())).await.unwrap();
    drop(response.into_body().collect().await);
    for (limiter, cost) in [(&inner, 17), (&outer, 17), (&bytes, 4)] {
        assert_eq!(charged(limiter).await, cost);
    }
}

/// A memory store that must be waited for.
struct Slow(MemoryStore<Policy, ManualClock>);

impl Store<Policy> for Slow {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        tokio::time::sleep(Duration::from_secs(1)).await;
        self.0.apply(batch).await
    }
}

#[tokio::test(start_paused = true)]
async fn the_settlements_of_a_store_that_is_waited_for_can_be_waited_for() {
    let limits = limiter().limits().clone();
    let store = Slow(MemoryStore::builder().clock(ManualClock::default()).build());
    let limiter = Arc::new(RateLimiter::new(limits, store));
    let layer = RateLimitLayer::new(limiter.clone()).by("ip", ClientAddress::peer()).cost(10);
    let layer = layer.reserve(Charge::by_status(|_| 3));
    let service = layer.layer(answers(200, Then::Ends));
    let response = service.oneshot(request()).await.unwrap();
    assert_eq!(layer.settlements().count(), 1);
    drop(response.into_body().collect().await);
    layer.settlements().idle().await;
    assert_eq!(limiter.peek(&[("ip", "192.0.2.7")], 0).await.unwrap().remaining(), 97);
}

#[tokio::test]
async fn an_algorithm_that_cannot_reserve_is_a_500() {
    let log = SlidingLog::new("10/m".parse().unwrap()).unwrap();
    let limits = Limits::builder().limit("log", log).by(["ip"]).build().unwrap();
    let limiter = RateLimiter::<_, Policy>::new(limits, MemoryStore::new());
    let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());
    let service = layer.reserve(Charge::estimate()).layer(answers(200, Then::Ends));
    let refused = service.oneshot(request()).await.unwrap();
    assert_eq!(refused.status(), StatusCode::INTERNAL_SERVER_ERROR);
}
