//! The layer in front of axum routes: who is limited, by what, and what clients receive.

use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::extract::connect_info::MockConnectInfo;
use axum::routing::get;
use http::header::HeaderValue;
use http::{Request, Response, StatusCode};
use ratelimit_core::{AnyAlgorithm, ErrorKind, Limits, ManualClock, RateLimiter};
use ratelimit_tower::{
    Advice, ClientAddress, Fields, IdentifyError, OnStoreError, RateLimitLayer, Rejection,
    XRateLimit, extension, from_async_fn, from_fn, header, matched_route, method, path_param,
    unauthorized,
};

use crate::harness::{
    API_KEY, BURST, Faulty, Rows, by_ip, hello, layer, limiter, limits, request, send, statuses,
    store, with_key,
};

/// Two requests per key.
const BY_KEY: Rows = &[("burst", "gcra 6/m burst 2", "key")];

#[tokio::test]
async fn what_is_not_wired_is_a_500_and_never_unlimited() {
    let layer = || RateLimitLayer::new(limiter(BURST));
    let by_extension = extension(|user: &String| Some(user.as_str().into()));
    let failing = from_async_fn(|_| async { Err(IdentifyError::not_wired("it is away")) });
    for app in [
        hello().layer(layer()),
        hello().layer(layer().by("IP", ClientAddress::peer())),
        hello().layer(layer().by("ip", by_extension)),
        hello().layer(layer().by("ip", path_param("tenant"))),
        hello().layer(layer().by("ip", failing)),
    ] {
        let answer = send(&app, request("/")).await;
        assert_eq!((answer.status, &answer.problem()["type"]), (500, &"about:blank".into()));
        assert_eq!(answer.problem().get("detail"), None); // clients are not told
    }
    let refused = layer().by("IP", ClientAddress::peer()).checked().unwrap_err().to_string();
    assert!(refused.contains("\"burst\"") && refused.contains("did you mean \"IP\""), "{refused}");
}

#[tokio::test]
async fn what_the_client_did_not_send_is_a_400_or_a_401_by_choice() {
    let layer = || RateLimitLayer::new(limiter(BY_KEY));
    let app = hello().layer(layer().by("key", header(API_KEY)));
    let refused = send(&app, request("/")).await;
    assert_eq!(refused.status, 400);
    assert!(refused.problem()["detail"].as_str().unwrap().contains("x-api-key"));
    let requests = ["", "a", "a", "a", "b"].map(with_key);
    assert_eq!(statuses(&app, requests).await, [400, 200, 200, 429, 200]);
    let bearer = unauthorized(header(API_KEY), HeaderValue::from_static("Bearer"));
    let refused = send(&hello().layer(layer().by("key", bearer)), request("/")).await;
    assert_eq!((refused.status, &*refused.field("www-authenticate")), (401, "Bearer"));
}

/// Two logins per address, and five requests of other kinds.
fn logins() -> Limits<AnyAlgorithm> {
    let limits = Limits::builder()
        .limit("login", "gcra 6/m burst 2")
        .by(["ip"])
        .when("method", "POST")
        .when("path", "/login*")
        .limit("others", "gcra 6/m burst 5")
        .by(["ip"])
        .when_not("path", ["/login*", "/health"]);
    limits.build().unwrap()
}

#[tokio::test]
async fn a_limit_with_conditions_applies_to_the_requests_that_meet_them() {
    let route = || get(|| async {}).post(|| async {});
    let app = ["/login", "/login/sso", "/health", "/"];
    let app = app.into_iter().fold(Router::new(), |app, path| app.route(path, route()));
    let limiter = || RateLimiter::new(logins(), store(&ManualClock::default()));
    let with = |limiter: RateLimiter<_>| by_ip(limiter).by("method", method());
    let path = || from_fn(|request| Ok(Some(request.uri.path().into())));
    let allowing = app.clone().layer(with(limiter().allow_unlimited()).by("path", path()));
    for (method, path, due) in [
        ("POST", "/login", 200),
        ("POST", "/login/sso", 200),
        ("POST", "/login", 429),
        ("GET", "/login", 200),
        ("GET", "/health", 200),
        ("GET", "/", 200),
    ] {
        let mut request = request(path);
        *request.method_mut() = method.parse().unwrap();
        let answer = send(&allowing, request).await;
        assert_eq!(answer.status, due, "{method} {path}");
        // Fields tell of the limits that apply.
        let told = answer.field("ratelimit");
        assert_eq!(told.contains("login"), method == "POST", "{method} {path}: {told}");
    }
    // A request that the policy leaves out is not unlimited by mistake.
    let strict = app.clone().layer(with(limiter()).by("path", path()));
    assert_eq!(statuses(&strict, [request("/"), request("/health")]).await, [200, 500]);
    // Neither is one of a layer that lacks the identifier of a condition.
    let without = with(limiter().allow_unlimited());
    assert_eq!(statuses(&app.layer(without.clone()), [request("/")]).await, [500]);
    let refused = without.checked().unwrap_err().to_string();
    let says = "limit \"login\": its condition names \"path\", which no request has";
    assert!(refused.contains(says), "{refused}");
}

#[tokio::test]
async fn routes_parameters_methods_and_functions_identify() {
    let last_letter = from_async_fn(|request| {
        let last = request.uri.path().chars().last();
        async move {
            tokio::task::yield_now().await;
            Ok(last.map(|letter| letter.to_string().into()))
        }
    });
    let layer = || RateLimitLayer::new(limiter(&[("burst", "gcra 6/m burst 2", "x")]));
    // Two requests to /one/a use up its limit. Then:
    for (layer, then) in [
        (layer().by("x", path_param("tenant")), "GET /one/b 429, GET /two/a 200"),
        (layer().by("x", matched_route()), "GET /two/a 429, GET /one/b 200"),
        (layer().by("x", last_letter), "GET /two/a 429, GET /one/b 200"),
        (layer().by("x", method()), "GET /two/b 429, POST /one/a 200"),
        // A client that invents methods has one limit for all of them.
        (layer().by("x", method()), "BREW /one/a 405, get /one/a 405, BREW2 /one/a 429"),
    ] {
        let route = || get(|| async { "" }).post(|| async { "" });
        let app = Router::new().route("/{tenant}/a", route()).route("/{tenant}/b", route());
        let app = app.layer(layer);
        for row in format!("GET /one/a 200, GET /one/a 200, {then}").split(", ") {
            let words: Vec<_> = row.split(' ').collect();
            let mut request = request(words[1]);
            *request.method_mut() = words[0].parse().unwrap();
            assert_eq!(send(&app, request).await.status.to_string(), words[2], "{row}");
        }
    }
}

#[tokio::test]
async fn the_peer_of_axum_is_read_also_where_a_test_mocks_it() {
    let app = || hello().layer(layer(BURST));
    let [first, second]: [SocketAddr; 2] =
        ["192.0.2.1:80", "192.0.2.2:80"].map(|a| a.parse().unwrap());
    let from = |peer: Option<SocketAddr>| {
        let mut request = Request::get("/").body(Body::empty()).unwrap();
        peer.map(|peer| request.extensions_mut().insert(ConnectInfo(peer)));
        request
    };
    let mocked = app().layer(MockConnectInfo(first));
    let requests = [None, None, None, Some(second)].map(from);
    assert_eq!(statuses(&mocked, requests).await, [200, 200, 429, 200]);
    assert_eq!(statuses(&app(), [from(None), from(Some(first))]).await, [500, 200]);
}

#[tokio::test]
async fn a_nested_service_hides_its_routes_from_a_layer_outside_and_a_nested_router_does_not() {
    let routes = || Router::new().route("/a", get(|| async {})).route("/b", get(|| async {}));
    let layer = || {
        let limiter = limiter(&[("burst", "gcra 6/m burst 1", "route")]);
        RateLimitLayer::new(limiter).by("route", matched_route())
    };
    for (app, second) in [
        (Router::new().nest("/api", routes()).layer(layer()), 200),
        (Router::new().nest_service("/api", routes().layer(layer())), 200),
        // All that is below is one route, `*`.
        (Router::new().nest_service("/api", routes()).layer(layer()), 429),
    ] {
        let requests = ["/api/a", "/api/b"].map(request);
        assert_eq!(statuses(&app, requests).await, [200, second]);
    }
}

#[tokio::test]
async fn a_custom_answer_gets_the_fields_unless_it_has_them() {
    let plain = |rejection: &Rejection| {
        let mut response = Response::new(Body::from(format!("{:?}", rejection.reason)));
        *response.status_mut() = StatusCode::IM_A_TEAPOT;
        response.headers_mut().insert("ratelimit", HeaderValue::from_static("mine"));
        response
    };
    let answer = send(&hello().layer(layer(BURST).cost(3).answer(plain)), request("/")).await;
    assert_eq!((answer.status, &*answer.field("ratelimit")), (418, "mine"));
    assert_eq!(answer.field("ratelimit-policy"), r#""burst";q=2;w=20"#);
    let app = hello().layer(layer(BURST).cost(2).fields(Fields::new().only_on_denials()));
    assert_eq!(send(&app, request("/")).await.field("ratelimit"), "");
    assert_ne!(send(&app, request("/")).await.field("ratelimit"), "");
}

#[tokio::test]
async fn nested_layers_are_all_told_and_a_denial_by_the_one_that_denied() {
    let named = |name, words| {
        layer(&[(name, words, "ip")]).fields(Fields::new().x_ratelimit(XRateLimit::Seconds))
    };
    let inner = named("inner", "gcra 6/m burst 1");
    let app = hello().layer(inner).layer(named("outer", "gcra 6/m burst 5"));
    let both = send(&app, request("/")).await;
    assert_eq!(both.field("ratelimit"), r#""inner";r=0;t=10, "outer";r=4;t=10"#);
    assert_eq!(Advice::from_headers(&both.headers).limits.len(), 2);
    let denied = send(&app, request("/")).await;
    assert_eq!(denied.field("ratelimit"), r#""inner";r=0;t=10"#);
    assert_eq!(denied.field("ratelimit-policy"), r#""inner";q=1;w=10"#);
    assert_eq!(denied.field("x-ratelimit-remaining"), "0");
}

#[tokio::test]
async fn of_nested_layers_the_older_fields_are_those_of_the_one_with_the_least_left() {
    let all = [(5, 1), (5, 4), (9, 1), (9, 7)];
    for (inner, outer) in all.iter().flat_map(|one| all.map(|other| (*one, other))) {
        let named = |name, (burst, cost): (u64, u64)| {
            let fields = Fields::new().x_ratelimit(XRateLimit::Seconds);
            layer(&[(name, &format!("gcra 6/m burst {burst}"), "ip")]).cost(cost).fields(fields)
        };
        let app = hello().layer(named("inner", inner)).layer(named("outer", outer));
        let told = send(&app, request("/")).await;
        let told = ["limit", "remaining"].map(|name| told.field(&format!("x-ratelimit-{name}")));
        // The first of equal ones is the inner.
        let (burst, cost) = [inner, outer].into_iter().min_by_key(|(b, c)| b - c).unwrap();
        assert_eq!(told, [burst, burst - cost].map(|n| n.to_string()), "{inner:?} in {outer:?}");
    }
}

#[tokio::test]
async fn the_policy_field_is_that_of_the_window_which_the_decision_tells() {
    let clock = ManualClock::default();
    let limits = limits(&[("steps", "bucketed-window bucket 1s rates 2/1s, 3/10s", "ip")]);
    let app = hello().layer(by_ip(RateLimiter::new(limits, store(&clock))));
    for told in ["q=2;w=1", "q=2;w=1", "q=3;w=10", "q=3;w=10"] {
        let policy = send(&app, request("/")).await.field("ratelimit-policy");
        assert_eq!(policy, format!(r#""steps";{told}"#));
        clock.advance(Duration::from_secs(2));
    }
}

#[tokio::test]
async fn an_outage_is_a_503_and_admits_only_by_choice_and_no_other_error_does() {
    for (kind, refused, admitted) in [
        (ErrorKind::Unavailable, 503, 200),
        (ErrorKind::Indeterminate, 503, 200),
        (ErrorKind::Contended, 503, 200),
        // What the service does wrong is no outage.
        (ErrorKind::Unsupported, 500, 500),
        (ErrorKind::Invalid, 500, 500),
        (ErrorKind::CrossSlot, 500, 500),
    ] {
        let away = Faulty::new(&ManualClock::default(), move |_, _| Some(kind));
        let layer = by_ip(RateLimiter::new(limits(BURST), away));
        let answer = send(&hello().layer(layer.clone()), request("/")).await;
        assert_eq!(answer.status, refused);
        if refused == 503 {
            let kind = answer.problem()["type"].to_string();
            assert!(kind.ends_with("#temporary-reduced-capacity\""), "{kind}");
            assert_eq!(answer.violated_limits(), ["burst"]);
        }
        let open = hello().layer(layer.on_store_error(OnStoreError::Admit));
        let answer = send(&open, request("/")).await;
        assert_eq!((answer.status, &*answer.field("ratelimit")), (admitted, ""));
    }
}
