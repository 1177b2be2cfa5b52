//! The layer in front of axum routes: who is limited, by what, and what clients are told.
#![cfg(feature = "axum")]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::routing::get;
use http::header::{HeaderName, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body_util::BodyExt;
use ratelimit_core::{
    Batch, Decision, ErrorKind, Gcra, Limit, Limits, ManualClock, OnOutage, Policy, RateLimiter,
    Refusal, Source, Store, StoreError, Verdict,
};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{
    Advice, Choice, ClientAddress, Fields, IdentifyError, OnStoreError, RateLimitLayer, Rejection,
    Unit, XRateLimit, extension, from_async_fn, header, matched_route, method, optional,
    path_param,
};
use rfc9651::parse_list;
use tower::ServiceExt;

mod rfc9651;

type Manual = MemoryStore<Policy, ManualClock>;

fn store(clock: &ManualClock) -> Manual {
    MemoryStore::builder().clock(clock.clone()).build()
}

/// Two requests per identifier, one more every ten seconds.
fn limiter(identifier: &str) -> RateLimiter<Manual> {
    let gcra = Gcra::per_minute(6).burst(2);
    let limits = Limits::builder().limit("burst", gcra).by([identifier]).build().unwrap();
    RateLimiter::new(limits, store(&ManualClock::default()))
}

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

fn request(path: &str) -> Request<Body> {
    let mut request = Request::get(path).body(Body::empty()).unwrap();
    let peer: SocketAddr = "192.0.2.7:4711".parse().unwrap();
    request.extensions_mut().insert(ConnectInfo(peer));
    request
}

fn with_key(path: &str, key: &str) -> Request<Body> {
    let mut request = request(path);
    request.headers_mut().insert(API_KEY, key.parse().unwrap());
    request
}

async fn send(app: &Router, request: Request<Body>) -> Response<Body> {
    app.clone().oneshot(request).await.unwrap()
}

async fn status(app: &Router, request: Request<Body>) -> u16 {
    send(app, request).await.status().as_u16()
}

fn hello() -> Router {
    Router::new().route("/", get(|| async { "hello" }))
}

fn text<'a>(response: &'a Response<Body>, name: &str) -> &'a str {
    response.headers().get(name).map_or("", |value| value.to_str().unwrap())
}

async fn json(response: Response<Body>) -> serde_json::Value {
    serde_json::from_slice(&response.into_body().collect().await.unwrap().to_bytes()).unwrap()
}

#[tokio::test]
async fn a_denied_client_is_told_when_to_come_back_and_is_admitted_then() {
    let clock = ManualClock::default();
    let limits = Limits::builder().limit("burst", Gcra::per_minute(6).burst(2)).by(["ip"]);
    let limiter = RateLimiter::new(limits.build().unwrap(), store(&clock));
    let app = hello().layer(RateLimitLayer::new(limiter).by("ip", ClientAddress::peer()));

    let first = send(&app, request("/")).await;
    assert_eq!(first.status(), StatusCode::OK);
    assert_eq!(text(&first, "ratelimit-policy"), r#""burst";q=2;w=20"#);
    let told = parse_list(text(&first, "ratelimit")).unwrap();
    assert_eq!((told[0].name(), told[0].integer("r")), ("burst", Some(1)));
    assert!(!first.headers().contains_key("retry-after"));
    send(&app, request("/")).await;

    clock.advance(Duration::from_millis(1));
    let denied = send(&app, request("/")).await;
    assert_eq!(denied.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(text(&denied, "retry-after"), "10"); // 9.999 s, rounded up
    assert_eq!(text(&denied, "ratelimit"), r#""burst";r=0;t=10"#);
    assert_eq!(text(&denied, "content-type"), "application/problem+json");
    let wait = Advice::from_headers(denied.headers()).wait().unwrap();
    let problem = json(denied).await;
    assert_eq!(problem["type"], "https://iana.org/assignments/http-problem-types#quota-exceeded");
    assert_eq!(problem["status"], 429);
    assert_eq!(problem["violated-policies"], serde_json::json!(["burst"]));

    clock.advance(wait);
    assert_eq!(status(&app, request("/")).await, 200);
}

#[tokio::test]
async fn both_modes_and_a_boxed_store_decide_alike() {
    let by_ip = |layer: RateLimitLayer<Manual>| layer.by("ip", ClientAddress::peer());
    let awaited = hello().layer(by_ip(RateLimitLayer::new(limiter("ip"))));
    let immediate = hello().layer(by_ip(RateLimitLayer::new(limiter("ip"))).immediate());
    let limits = limiter("ip").limits().clone();
    let boxed: Arc<dyn ratelimit_core::DynStore<Policy>> = Arc::new(store(&ManualClock::default()));
    let boxed = RateLimitLayer::new(RateLimiter::new(limits, boxed));
    let boxed = hello().layer(boxed.by("ip", ClientAddress::peer()));
    for nth in 0..4 {
        let mut answers = Vec::new();
        for app in [&awaited, &immediate, &boxed] {
            let response = send(app, request("/")).await;
            answers.push((response.status(), response.headers().get("ratelimit").cloned()));
        }
        assert!(answers.iter().all(|answer| *answer == answers[0]), "{answers:?}");
        assert_eq!(answers[0].0 == 200, nth < 2);
    }
}

#[tokio::test]
async fn what_is_not_wired_is_a_500_and_never_unlimited() {
    let layer = || RateLimitLayer::new(limiter("ip"));
    let no_source = hello().layer(layer());
    let misspelt = hello().layer(layer().by("IP", ClientAddress::peer()));
    let by_extension = extension(|user: &String| Some(user.as_str().into()));
    let no_extension = hello().layer(layer().by("ip", by_extension));
    let no_parameter = hello().layer(layer().by("ip", path_param("tenant")));
    for app in [no_source, misspelt, no_extension, no_parameter] {
        let answer = send(&app, request("/")).await;
        assert_eq!(answer.status(), StatusCode::INTERNAL_SERVER_ERROR);
        let problem = json(answer).await;
        assert_eq!(problem["type"], "about:blank");
        assert_eq!(problem.get("detail"), None); // clients are not told
    }
    let without_peer = Request::get("/").body(Body::empty()).unwrap();
    let app = hello().layer(layer().by("ip", ClientAddress::peer()).immediate());
    assert_eq!(status(&app, without_peer).await, 500);

    let refused = layer().by("IP", ClientAddress::peer()).checked().unwrap_err().to_string();
    assert!(refused.contains("\"burst\"") && refused.contains("did you mean \"IP\""), "{refused}");
    assert!(layer().by("ip", ClientAddress::peer()).checked().is_ok());
}

#[tokio::test]
async fn what_the_client_did_not_send_is_a_400_or_a_401_by_choice() {
    let layer = || RateLimitLayer::new(limiter("key"));
    let app = hello().layer(layer().by("key", header(API_KEY)));
    let refused = send(&app, request("/")).await;
    assert_eq!(refused.status(), StatusCode::BAD_REQUEST);
    assert!(json(refused).await["detail"].as_str().unwrap().contains("x-api-key"));
    assert_eq!(status(&app, with_key("/", "")).await, 400);
    for (key, wanted) in [("a", 200), ("a", 200), ("a", 429), ("b", 200)] {
        assert_eq!(status(&app, with_key("/", key)).await, wanted);
    }
    let challenge = HeaderValue::from_static("Bearer");
    let app = hello().layer(layer().by("key", header(API_KEY).unauthorized(challenge)));
    let refused = send(&app, request("/")).await;
    assert_eq!(
        (refused.status(), text(&refused, "www-authenticate")),
        (StatusCode::UNAUTHORIZED, "Bearer")
    );
}

#[tokio::test]
async fn a_request_that_may_lack_an_identifier_still_needs_a_limit() {
    let limits = Limits::builder()
        .limit("key", Gcra::per_minute(6).burst(1))
        .by(["key"])
        .limit("ip", Gcra::per_minute(6).burst(2))
        .by(["ip"])
        .build()
        .unwrap();
    let both = RateLimiter::new(limits, store(&ManualClock::default()));
    let layer = RateLimitLayer::new(both).by("key", optional(header(API_KEY)));
    let app = hello().layer(layer.by("ip", ClientAddress::peer()));
    let anonymous = send(&app, request("/")).await;
    assert_eq!(anonymous.status(), StatusCode::OK);
    assert_eq!(text(&anonymous, "ratelimit-policy"), r#""ip";q=2;w=20"#);
    assert_eq!(status(&app, with_key("/", "a")).await, 200);
    let denied = json(send(&app, with_key("/", "a")).await).await;
    assert_eq!(denied["violated-policies"], serde_json::json!(["key", "ip"]));

    let layer = RateLimitLayer::new(limiter("key")).by("key", optional(header(API_KEY)));
    assert_eq!(status(&hello().layer(layer), request("/")).await, 400);
}

#[tokio::test]
async fn routes_parameters_methods_and_functions_identify() {
    let app = |layer: RateLimitLayer<Manual>| {
        let route = || get(|| async { "" }).post(|| async { "" });
        Router::new().route("/{tenant}/a", route()).route("/{tenant}/b", route()).layer(layer)
    };
    let layer = || RateLimitLayer::new(limiter("x"));
    let used = |path: &str| [request(path), request(path)];
    // Two requests to /one/a use up what other/same denotes, and the last is another identifier.
    for (layer, same, other) in [
        (layer().by("x", path_param("tenant")), "/one/b", "/two/a"),
        (layer().by("x", matched_route()), "/two/a", "/one/b"),
        (
            layer().by(
                "x",
                from_async_fn(|request| {
                    let last = request.uri.path().chars().last();
                    async move {
                        tokio::task::yield_now().await;
                        Ok(last.map(|c| c.to_string().into()))
                    }
                }),
            ),
            "/two/a",
            "/one/b",
        ),
    ] {
        let app = app(layer);
        for request in used("/one/a") {
            assert_eq!(status(&app, request).await, 200);
        }
        assert_eq!(status(&app, request(same)).await, 429, "{same}");
        assert_eq!(status(&app, request(other)).await, 200, "{other}");
    }
    let app = app(layer().by("x", method()));
    for request in used("/one/a") {
        assert_eq!(status(&app, request).await, 200);
    }
    assert_eq!(status(&app, request("/one/a")).await, 429);
    let mut post = request("/one/a");
    *post.method_mut() = http::Method::POST;
    assert_eq!(status(&app, post).await, 200);
    // A client that invents methods has one limit for all of them.
    for (invented, wanted) in [("BREW", 405), ("PROPFIND", 405), ("get", 429), ("BREW2", 429)] {
        let mut request = request("/one/a");
        *request.method_mut() = invented.parse().unwrap();
        assert_eq!(status(&app, request).await, wanted, "{invented}");
    }

    let failing =
        from_async_fn(|_| async { Err(IdentifyError::not_wired("the database is away")) });
    assert_eq!(status(&hello().layer(layer().by("x", failing)), request("/")).await, 500);
}

#[derive(Clone)]
struct Customer {
    pays: bool,
}

#[tokio::test]
async fn limits_are_chosen_per_request_and_exempt_ones_say_so() {
    let clock = ManualClock::default();
    let shared = Arc::new(store(&clock));
    let plan = |name: &str, burst: u64| {
        let gcra = Gcra::per_minute(6).burst(burst);
        let limits = Limits::builder().limit(name, gcra).by(["ip"]).build().unwrap();
        Arc::new(RateLimiter::<_, Policy>::new(limits, shared.clone()))
    };
    let (free, paid) = (plan("free", 1), plan("paid", 3));
    let layer =
        RateLimitLayer::choosing(move |request| match request.extensions.get::<Customer>() {
            _ if request.uri.path() == "/health" => Choice::Exempt,
            Some(customer) if customer.pays => Choice::Limited(paid.clone()),
            Some(_) => Choice::Limited(free.clone()),
            None => Choice::Refused(IdentifyError::not_wired("no customer")),
        });
    let app = hello().route("/health", get(|| async { "well" }));
    let app = app.layer(layer.by("ip", ClientAddress::peer()));
    let of = |pays: bool| {
        let mut request = request("/");
        request.extensions_mut().insert(Customer { pays });
        request
    };
    for (pays, wanted) in
        [(false, 200), (false, 429), (true, 200), (true, 200), (true, 200), (true, 429)]
    {
        assert_eq!(status(&app, of(pays)).await, wanted);
    }
    for _ in 0..5 {
        let healthy = send(&app, request("/health")).await;
        assert_eq!((healthy.status(), text(&healthy, "ratelimit")), (StatusCode::OK, ""));
    }
    assert_eq!(status(&app, request("/")).await, 500);
}

#[tokio::test]
async fn a_cost_is_fixed_or_told_by_the_request() {
    let layer = || RateLimitLayer::new(limiter("ip")).by("ip", ClientAddress::peer());
    let app = hello().layer(layer().cost(2));
    assert_eq!(status(&app, request("/")).await, 200);
    assert_eq!(status(&app, request("/")).await, 429);
    let app = hello().layer(layer().cost_of(|request| request.uri.query().map_or(1, |_| 3)));
    let never = send(&app, request("/?expensive")).await;
    assert_eq!(never.status(), StatusCode::TOO_MANY_REQUESTS);
    assert!(!never.headers().contains_key("retry-after")); // it never fits
    assert_eq!(status(&app, request("/")).await, 200);
}

#[tokio::test]
async fn a_custom_answer_gets_the_fields_unless_it_has_them() {
    let plain = |rejection: &Rejection| {
        let mut response = Response::new(Body::from(format!("{:?}", rejection.reason())));
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        response.headers_mut().insert("ratelimit", HeaderValue::from_static("mine"));
        response
    };
    let layer = RateLimitLayer::new(limiter("ip")).by("ip", ClientAddress::peer()).cost(3);
    let answer = send(&hello().layer(layer.clone().answer(plain)), request("/")).await;
    assert_eq!(answer.status(), StatusCode::IM_A_TEAPOT);
    assert_eq!(text(&answer, "ratelimit"), "mine");
    assert_eq!(text(&answer, "ratelimit-policy"), r#""burst";q=2;w=20"#);

    let quiet = Fields::new().only_on_denials();
    let app = hello().layer(layer.cost(2).fields(quiet));
    assert!(!send(&app, request("/")).await.headers().contains_key("ratelimit"));
    assert!(send(&app, request("/")).await.headers().contains_key("ratelimit"));
}

#[tokio::test]
async fn nested_layers_are_all_told_and_a_denial_by_the_one_that_denied() {
    let named = |name: &str, burst: u64| {
        let gcra = Gcra::per_minute(6).burst(burst);
        let limits = Limits::builder().limit(name, gcra).by(["ip"]).build().unwrap();
        let limiter = RateLimiter::<_, Policy>::new(limits, store(&ManualClock::default()));
        let fields = Fields::new().x_ratelimit(XRateLimit::Seconds);
        RateLimitLayer::new(limiter).by("ip", ClientAddress::peer()).fields(fields)
    };
    let app = hello().layer(named("inner", 1)).layer(named("outer", 5));
    let told = |response: &Response<Body>| -> Vec<_> {
        let lines = response.headers().get_all("ratelimit").iter();
        let lists = lines.flat_map(|line| parse_list(line.to_str().unwrap()).unwrap());
        lists.map(|item| (item.name().to_owned(), item.integer("r").unwrap())).collect()
    };
    let both = |inner, outer| vec![("inner".to_owned(), inner), ("outer".to_owned(), outer)];
    assert_eq!(told(&send(&app, request("/")).await), both(0, 4));
    let denied = send(&app, request("/")).await;
    assert_eq!(told(&denied), [("inner".to_owned(), 0)]);
    assert_eq!(
        (text(&denied, "x-ratelimit-remaining"), text(&denied, "ratelimit-policy")),
        ("0", r#""inner";q=1;w=10"#)
    );
}

#[tokio::test]
async fn the_policy_field_is_that_of_the_window_which_the_decision_tells() {
    let clock = ManualClock::default();
    let windows: Policy = "bucketed-window bucket 1s rates 2/1s, 3/10s".parse().unwrap();
    let limits = Limits::new([Limit::new("steps", windows).unwrap().by(["ip"]).unwrap()]);
    let limiter = RateLimiter::new(limits.unwrap(), store(&clock));
    let app = hello().layer(RateLimitLayer::new(limiter).by("ip", ClientAddress::peer()));
    for policy in
        [r#""steps";q=2;w=1"#, r#""steps";q=2;w=1"#, r#""steps";q=3;w=10"#, r#""steps";q=3;w=10"#]
    {
        assert_eq!(text(&send(&app, request("/")).await, "ratelimit-policy"), policy);
        clock.advance(Duration::from_secs(2));
    }
}

#[tokio::test]
async fn limits_that_are_chosen_per_request_tell_the_same_fields() {
    let limits = Limits::builder()
        .limit("daily", Gcra::per_day(9))
        .by(["key"])
        .limit("burst", Gcra::per_minute(6).burst(2))
        .by(["ip"])
        .limit("bytes", Gcra::per_minute(60).burst(4_000))
        .by(["ip"])
        .build()
        .unwrap();
    let limiter = || Arc::new(RateLimiter::new(limits.clone(), store(&ManualClock::default())));
    let app = |layer: RateLimitLayer<Manual>| {
        let layer = layer.by("ip", ClientAddress::peer()).by("key", optional(header(API_KEY)));
        hello().layer(layer.fields(Fields::new().unit("bytes", Unit::ContentBytes)))
    };
    let chosen = limiter();
    let apps = [
        app(RateLimitLayer::new(limiter())),
        app(RateLimitLayer::choosing(move |_| Choice::Limited(chosen.clone()))),
    ];
    for app in &apps {
        let some = send(app, request("/")).await;
        let told = r#""burst";q=2;w=20, "bytes";q=4000;qu="content-bytes";w=4000"#;
        assert_eq!(text(&some, "ratelimit-policy"), told);
        assert_eq!(text(&some, "ratelimit"), r#""burst";r=1;t=10, "bytes";r=3999;t=1"#);
        let all = send(app, with_key("/", "alice")).await;
        assert_eq!(text(&all, "ratelimit-policy"), format!(r#""daily";q=9;w=86400, {told}"#));
    }
}

/// A store that answers with an error of this kind.
struct Broken(ErrorKind);

#[derive(Debug, thiserror::Error)]
#[error("the store is broken")]
struct BrokenError(ErrorKind);

impl StoreError for BrokenError {
    fn kind(&self) -> ErrorKind {
        self.0
    }
}

impl From<Refusal> for BrokenError {
    fn from(refusal: Refusal) -> Self {
        Self(refusal.kind())
    }
}

impl Store<Policy> for Broken {
    type Error = BrokenError;

    async fn apply(&self, _: &Batch<'_, Policy>) -> Result<Verdict, BrokenError> {
        Err(BrokenError(self.0))
    }
}

#[tokio::test]
async fn an_outage_is_a_503_and_admits_only_by_choice() {
    let layer = |kind| {
        let limiter = RateLimiter::new(limiter("ip").limits().clone(), Broken(kind));
        RateLimitLayer::new(limiter).by("ip", ClientAddress::peer())
    };
    let outages = [ErrorKind::Unavailable, ErrorKind::Indeterminate, ErrorKind::Contended];
    for kind in outages {
        let refused = send(&hello().layer(layer(kind)), request("/")).await;
        assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
        let problem = json(refused).await;
        let outage = "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity";
        assert_eq!(problem["type"], outage);
        assert_eq!(problem["violated-policies"], serde_json::json!(["burst"]));
        let open = layer(kind).on_store_error(OnStoreError::Admit);
        let admitted = send(&hello().layer(open), request("/")).await;
        assert_eq!((admitted.status(), text(&admitted, "ratelimit")), (StatusCode::OK, ""));
    }
    // What the service does wrong is no outage.
    for kind in [ErrorKind::Unsupported, ErrorKind::Invalid, ErrorKind::CrossSlot] {
        let open = layer(kind).on_store_error(OnStoreError::Admit);
        assert_eq!(status(&hello().layer(open), request("/")).await, 500);
    }
}

#[tokio::test]
async fn a_shadow_limit_refuses_nothing_and_is_not_told() {
    let limits = Limits::<Policy>::new([
        Limit::<Policy>::new("stricter", Gcra::new("6/m".parse().unwrap(), 1).unwrap().into())
            .and_then(|limit| limit.by(["ip"]))
            .unwrap()
            .shadow(),
        limiter("ip").limits().as_slice()[0].clone(),
    ]);
    let limiter = RateLimiter::new(limits.unwrap(), store(&ManualClock::default()));
    let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());
    for layer in [hello().layer(layer.clone().immediate()), hello().layer(layer)] {
        let first = send(&layer, request("/")).await;
        assert_eq!(text(&first, "ratelimit-policy"), r#""burst";q=2;w=20"#);
        let second = send(&layer, request("/")).await;
        // The second mode shares the states of the first.
        let third = send(&layer, request("/")).await;
        let statuses = [first.status(), second.status(), third.status()].map(|s| s.as_u16());
        assert!(statuses == [200, 200, 429] || statuses == [429; 3], "{statuses:?}");
        assert_eq!(json(third).await["violated-policies"], serde_json::json!(["burst"]));
    }
}

/// A store that is away, with a fallback that denies.
struct DenyingFallback;

impl Store<Policy> for DenyingFallback {
    type Error = Refusal;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Refusal> {
        let denied = |_| Decision {
            allowed: false,
            cost: 1,
            limit: 2,
            remaining: 0,
            retry_after_us: Some(5_000_000),
            replenish_after_us: 5_000_000,
            reset_after_us: 5_000_000,
        };
        let decisions = batch.checks().iter().map(denied).collect();
        Ok(Verdict::several(decisions).with_source(Source::Fallback))
    }
}

#[tokio::test]
async fn a_limit_that_closes_in_an_outage_is_a_503_and_one_that_counts_locally_a_429() {
    for (on_outage, wanted) in [(OnOutage::Closed, 503), (OnOutage::Local, 429)] {
        let limit = limiter("ip").limits().as_slice()[0].clone().on_outage(on_outage);
        let limiter = RateLimiter::new(Limits::new([limit]).unwrap(), DenyingFallback);
        let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());
        let answer = send(&hello().layer(layer), request("/")).await;
        assert_eq!(answer.status(), wanted);
        assert_eq!(text(&answer, "retry-after"), "5");
        assert_eq!(answer.headers().contains_key("ratelimit"), wanted == 429);
        assert_eq!(json(answer).await["violated-policies"], serde_json::json!(["burst"]));
    }
}
