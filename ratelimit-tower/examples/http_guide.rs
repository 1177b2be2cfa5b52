//! The snippets of the guide's chapter on HTTP and their variations, each run by a test.
//!
//! `cargo test -p ratelimit-tower --example http_guide --all-features`

#![allow(clippy::unused_async, reason = "the handlers of axum are async")]
#![cfg_attr(test, allow(clippy::expect_used))]

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Extension;
use axum::middleware::Next;
use axum::response::IntoResponse;
use axum::routing::{get, post};
use http::header::{HeaderName, HeaderValue};
use http::{Request, Response, StatusCode};
use ratelimit_core::{
    AnyAlgorithm, Concurrency, ConfigError, FixedWindow, Gcra, Limits, Numbers, RateLimiter, Store,
};
use ratelimit_layers::Reload;
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{
    Advice, BusyWait, Charge, Checked, Choice, ClientAddress, Decisions, Fields, Grpc, Hold,
    IdentifyError, Meter, OnStoreError, ProxyHeader, RateLimitLayer, Rejection, Unit, WaitError,
    WaitLayer, Waiter, XRateLimit, extension, header, matched_route, optional, path_param,
    unauthorized,
};

/// A customer, as authentication leaves it in the extensions of a request.
#[derive(Clone)]
struct Customer {
    name: String,
    pays: bool,
}

type Layer = RateLimitLayer<MemoryStore<AnyAlgorithm>>;
type Error = Box<dyn std::error::Error>;

fn identify() -> Result<Layer, ConfigError> {
    let limits = Limits::builder()
        .limit("address", Gcra::per_second(10).burst(20))
        .by(["ip"])
        .limit("customer", FixedWindow::per_day(5_000))
        .by(["customer"])
        .build()?;
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    Ok(RateLimitLayer::new(limiter)
        .by("ip", ClientAddress::behind(["10.0.0.0/8"], ProxyHeader::XForwardedFor)?)
        .by("customer", extension(|customer: &Customer| Some(customer.name.as_str().into()))))
}

fn keys(layer: Layer) -> Layer {
    let api_key = header(HeaderName::from_static("x-api-key"));
    let or_401 = unauthorized(api_key.clone(), HeaderValue::from_static("Bearer"));
    layer
        .by("key", or_401) // a request without the header: 401
        .by("trial", optional(api_key)) // limits by "trial" apply where it was sent
        .by("route", matched_route()) // such as /users/{id}
        .by("tenant", path_param("tenant"))
}

fn by_plan(
    free: Limits<AnyAlgorithm>,
    paid: Limits<AnyAlgorithm>,
    store: MemoryStore<AnyAlgorithm>,
) -> RateLimitLayer<Arc<MemoryStore<AnyAlgorithm>>> {
    let store = Arc::new(store);
    let free = Arc::new(RateLimiter::new(free, store.clone()));
    let paid = Arc::new(RateLimiter::new(paid, store));
    RateLimitLayer::choosing(move |request| match request.extensions.get::<Customer>() {
        _ if request.uri.path() == "/health" => Choice::Exempt,
        Some(customer) if customer.pays => Choice::Limited(paid.clone()),
        Some(_) => Choice::Limited(free.clone()),
        None => Choice::Refused(IdentifyError::not_wired("authentication did not run")),
    })
    .by("customer", extension(|customer: &Customer| Some(customer.name.as_str().into())))
}

fn by_numbers(layer: Layer, numbers: HashMap<String, Arc<Numbers>>) -> Layer {
    layer.numbers_of(move |request| {
        let customer = request.extensions.get::<Customer>()?;
        numbers.get(&customer.name).cloned()
    })
}

fn by_route(layer_for_searches: Layer, layer_for_all: Layer) -> Router {
    Router::new()
        .route("/search", get(|| async { "found" }))
        .route_layer(
            layer_for_searches.cost_of(|request| if request.uri.query().is_some() { 5 } else { 1 }),
        )
        .route("/", get(|| async { "hello" }))
        .layer(layer_for_all)
}

/// Answers 401 to a request without a key.
async fn authenticate(mut request: Request<Body>, next: Next) -> Response<Body> {
    let key = request.headers().get("x-api-key").and_then(|key| key.to_str().ok());
    let Some(name) = key.map(str::to_owned) else {
        return StatusCode::UNAUTHORIZED.into_response();
    };
    request.extensions_mut().insert(Customer { name, pays: false });
    next.run(request).await
}

fn in_order(per_address: Layer, per_customer: Layer, other_routes: Router) -> Router {
    let authentication = axum::middleware::from_fn(authenticate);
    Router::new()
        .route("/", get(|| async { "hello" }))
        .merge(other_routes) // before the layers, which cover what is there
        .layer(per_customer) // third: it needs the customer
        .layer(authentication) // second: it refuses with 401
        .layer(per_address) // first: it limits what authentication refuses, too
}

type Shared = Checked<RateLimitLayer<Arc<MemoryStore<AnyAlgorithm>>>>;

fn one_policy(
    limits: Limits<AnyAlgorithm>,
    store: MemoryStore<AnyAlgorithm>,
) -> Result<(Reload<MemoryStore<AnyAlgorithm>>, Shared, Shared), ConfigError> {
    let reload = Reload::new(limits, store);
    let all = RateLimitLayer::reloading(reload.part(["address"])?)
        .by("ip", ClientAddress::peer())
        .checked()?;
    let searches = RateLimitLayer::reloading(reload.part(["search.*"])?)
        .by("free", extension(|c: &Customer| (!c.pays).then(|| c.name.as_str().into())))
        .by("paid", extension(|c: &Customer| c.pays.then(|| c.name.as_str().into())))
        .checked()?;
    reload.check_parts()?; // each limit is in one
    Ok((reload, all, searches))
}

/// As a document would have it.
fn plans() -> Result<Limits<AnyAlgorithm>, ConfigError> {
    Limits::builder()
        .limit("address", Gcra::per_day(1).burst(9))
        .by(["ip"])
        .limit("search.free", Gcra::per_day(1).burst(1))
        .by(["free"])
        .limit("search.paid", Gcra::per_day(1).burst(2))
        .by(["paid"])
        .build()
}

fn fields(layer: Layer) -> Layer {
    layer.fields(
        Fields::new()
            .x_ratelimit(XRateLimit::UnixTime)
            .partition_key(*b"a secret of exactly 32 bytes ...")
            .unit("bandwidth", Unit::ContentBytes),
    )
}

fn answers(
    layer: Layer,
) -> RateLimitLayer<
    MemoryStore<AnyAlgorithm>,
    AnyAlgorithm,
    impl Fn(&Rejection) -> Response<Body> + Clone,
> {
    layer.on_store_error(OnStoreError::Admit).answer(|rejection: &Rejection| {
        let mut response = Response::new(Body::from("come back later\n"));
        *response.status_mut() = rejection.status;
        response
    })
}

fn grpc(
    limiter: RateLimiter<MemoryStore<AnyAlgorithm>>,
) -> RateLimitLayer<MemoryStore<AnyAlgorithm>, AnyAlgorithm, Grpc> {
    RateLimitLayer::new(limiter).by("ip", ClientAddress::peer()).answer(Grpc)
}

fn bytes(bandwidth: RateLimiter<MemoryStore<AnyAlgorithm>>) -> Router {
    let layer = RateLimitLayer::new(bandwidth)
        .by("ip", ClientAddress::peer())
        .fields(Fields::new().unit("bandwidth", Unit::ContentBytes))
        .cost(64 * 1024) // reserved when the request arrives
        .reserve(Charge::body_bytes().free(|status| status == 304 || status.is_server_error()));
    Router::new().route("/download", get(|| async { "a file" })).layer(layer)
}

fn tokens(budget: RateLimiter<MemoryStore<AnyAlgorithm>>) -> Router {
    async fn complete(Extension(meter): Extension<Meter>) -> &'static str {
        meter.add(17); // once more for each piece that is sent
        "seventeen tokens"
    }
    let layer = RateLimitLayer::new(budget).by("ip", ClientAddress::peer()).cost(4_000);
    Router::new().route("/complete", post(complete)).layer(layer.reserve(Charge::estimate()))
}

fn parallel() -> Result<Router, Error> {
    let busy = Concurrency::new("4/30s".parse()?)?; // four at once; a lost one ends after 30 s
    let limits = Limits::builder().limit("parallel", busy).by(["ip"]).build()?;
    let layer =
        RateLimitLayer::new(RateLimiter::<_, AnyAlgorithm>::new(limits, MemoryStore::new()));
    let layer = layer.by("ip", ClientAddress::peer()).reserve(Charge::estimate());
    Ok(Router::new().route("/report", get(|| async { "a long report" })).layer(layer))
}

fn connections(layer: Layer) -> Router {
    async fn chat(Extension(hold): Extension<Hold>, request: Request<Body>) -> StatusCode {
        let place = hold.keep();
        tokio::spawn(async move {
            let connection = hyper::upgrade::on(request).await;
            // … until the connection ends
            drop((connection, place));
        });
        StatusCode::SWITCHING_PROTOCOLS // with the fields of its protocol
    }
    let layer = layer.fields(Fields::new().busy_wait(BusyWait::Estimated));
    Router::new().route("/chat", get(chat)).layer(layer.reserve(Charge::estimate()))
}

async fn search(Extension(decisions): Extension<Decisions>) -> String {
    match decisions.by_name("burst") {
        Some(burst) => format!("{} of {} left\n", burst.remaining, burst.limit),
        None => "not limited\n".to_owned(),
    }
}

fn seen_by_handlers(layer: Layer) -> Router {
    Router::new().route("/search", get(search)).layer(layer.tell_handlers())
}

async fn wait<S: Store<AnyAlgorithm>>(limiter: RateLimiter<S>) -> Result<(), WaitError<S::Error>> {
    let waiter = Waiter::new(limiter).jitter(Duration::from_millis(50));
    waiter.until_allowed("api.example.com", Duration::from_secs(30)).await?;
    // … send the request
    Ok(())
}

fn client<S: Store<AnyAlgorithm>>(
    waiter: Waiter<S>,
) -> WaitLayer<S, impl Fn(&Request<Body>) -> String, Response<Body>> {
    let by_host = |request: &Request<Body>| request.uri().host().unwrap_or_default().to_owned();
    WaitLayer::new(waiter, by_host, Duration::from_secs(30)).heed_answers()
}

fn advice<B>(response: &Response<B>) -> Option<Duration> {
    let advice = Advice::from_headers(response.headers());
    for limit in &advice.limits {
        println!("{}: {} left", limit.name, limit.remaining);
    }
    advice.wait()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Error> {
    let limits = || Limits::builder().limit("a", Gcra::per_second(10)).by(["ip"]).build();
    let limiter = || Ok::<_, ConfigError>(RateLimiter::new(limits()?, MemoryStore::new()));
    let _identified = keys(identify()?);
    let _by_plan = by_plan(limits()?, limits()?, MemoryStore::new());
    let _by_numbers = by_numbers(identify()?, HashMap::new());
    let _by_route = by_route(identify()?, fields(identify()?));
    let _answers = (answers(identify()?), grpc(limiter()?));
    let _one_policy = one_policy(plans()?, MemoryStore::new())?;
    let _in_order = in_order(identify()?, identify()?, Router::new());
    let _after = (bytes(limiter()?), tokens(limiter()?), parallel()?, connections(identify()?));
    let per_host = Limits::builder().limit("api", Gcra::per_second(10)).build()?;
    wait(RateLimiter::new(per_host.clone(), MemoryStore::new())).await?;
    let _seen = seen_by_handlers(identify()?);
    let _client = client(Waiter::new(RateLimiter::new(per_host, MemoryStore::new())));
    println!("{:?}", advice(&Response::new(())));
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use axum::extract::ConnectInfo;
    use tower::ServiceExt;

    use super::*;

    #[tokio::test]
    async fn handlers_see_what_is_left() {
        let limits = Limits::builder().limit("burst", Gcra::per_minute(6).burst(3)).by(["ip"]);
        let limiter = RateLimiter::new(limits.build().expect("limits"), MemoryStore::new());
        let app = seen_by_handlers(RateLimitLayer::new(limiter).by("ip", ClientAddress::peer()));
        let answer = app.oneshot(request("/search")).await.expect("an answer");
        let body = axum::body::to_bytes(answer.into_body(), 99).await.expect("a body");
        assert_eq!(&body[..], b"2 of 3 left\n");
    }

    fn request(path: &str) -> Request<Body> {
        let mut request = Request::new(Body::empty());
        *request.uri_mut() = path.parse().expect("a path");
        let peer: SocketAddr = "192.0.2.7:80".parse().expect("an address");
        request.extensions_mut().insert(ConnectInfo(peer));
        request.extensions_mut().insert(Customer { name: "alice".into(), pays: false });
        request
    }

    #[test]
    fn the_guide_runs() -> Result<(), Error> {
        main()
    }

    #[tokio::test]
    async fn what_authentication_refuses_and_no_route_has_is_limited() -> Result<(), Error> {
        let other = Router::new().route("/other", get(|| async { "" }));
        let per_address = || {
            let limits = Limits::builder().limit("a", Gcra::per_day(1).burst(2)).by(["ip"]);
            let limiter = RateLimiter::<_, AnyAlgorithm>::new(limits.build()?, MemoryStore::new());
            Ok::<_, Error>(RateLimitLayer::new(limiter).by("ip", ClientAddress::peer()))
        };
        for path in ["/", "/other", "/nowhere"] {
            let app = in_order(per_address()?, identify()?, other.clone());
            for wanted in [401, 401, 429] {
                assert_eq!(app.clone().oneshot(request(path)).await?.status(), wanted, "{path}");
            }
        }
        // A router that is merged into a limited one brings its own 404.
        let unlimited = Router::new().layer(per_address()?).merge(other);
        for _ in 0..9 {
            assert_eq!(unlimited.clone().oneshot(request("/nowhere")).await?.status(), 404);
        }
        Ok(())
    }

    #[tokio::test]
    async fn layers_and_plans_share_one_policy() -> Result<(), Error> {
        let (reload, all, searches) = one_policy(plans()?, MemoryStore::new())?;
        let app = Router::new().route("/", get(|| async { "" })).layer(searches).layer(all);
        for (pays, wanted) in [(false, 200), (false, 429), (true, 200), (true, 200), (true, 429)] {
            let mut request = request("/");
            request.extensions_mut().insert(Customer { name: "bob".into(), pays });
            assert_eq!(app.clone().oneshot(request).await?.status(), wanted);
        }
        let misspelt = Limits::builder().limit("address", Gcra::per_day(1)).by(["pi"]).build()?;
        assert!(reload.replace(misspelt).is_err());
        Ok(())
    }

    #[tokio::test]
    async fn a_customer_has_its_numbers() -> Result<(), Error> {
        let limits = Limits::builder().limit("customer", Gcra::per_day(1)).by(["customer"]);
        let limits = limits.accepts_up_to(Gcra::per_day(9)).build()?;
        let bobs = Arc::new(limits.numbers([("customer", Gcra::per_day(2))])?);
        let layer = RateLimitLayer::new(RateLimiter::new(limits, MemoryStore::new()));
        let layer = layer.by("customer", extension(|of: &Customer| Some(of.name.as_str().into())));
        let layer = by_numbers(layer, HashMap::from([("bob".to_owned(), bobs)]));
        let app = Router::new().route("/", get(|| async { "" })).layer(layer);
        for (name, wanted) in [("bob", 200), ("bob", 200), ("bob", 429), ("eve", 200), ("eve", 429)]
        {
            let mut request = request("/");
            request.extensions_mut().insert(Customer { name: name.into(), pays: true });
            assert_eq!(app.clone().oneshot(request).await?.status(), wanted);
        }
        Ok(())
    }

    #[tokio::test]
    async fn both_limits_of_the_first_layer_are_told() -> Result<(), Error> {
        let app = Router::new().route("/", get(|| async { "" })).layer(fields(identify()?));
        let response = app.oneshot(request("/")).await?;
        assert_eq!(response.status(), StatusCode::OK);
        let advice = Advice::from_headers(response.headers());
        let names: Vec<_> = advice.limits.iter().map(|limit| limit.name.as_str()).collect();
        assert_eq!(names, ["address", "customer"]);
        assert!(advice.limits.iter().all(|limit| limit.partition_key.is_some()));
        assert!(response.headers().contains_key("x-ratelimit-reset"));
        Ok(())
    }
}
