//! A service with two limits, in memory or on Redis; replicas on one Redis share them.
//!
//! ```console
//! $ cargo run -p ratelimit-tower --example service --features axum
//! $ cargo run -p ratelimit-tower --example service --features axum -- --redis redis://127.0.0.1:6379 --port 3001
//! $ curl -i http://127.0.0.1:3000/search -H 'x-api-key: alice'
//! ```
//!
//! `cargo test -p ratelimit-tower --example service --all-features` runs it over real sockets.

#![cfg_attr(test, allow(clippy::expect_used))]

use std::error::Error;
use std::net::SocketAddr;
use std::sync::Arc;

use axum::{Router, routing::get};
use http::header::HeaderName;
use ratelimit_core::{AnyAlgorithm, ConfigError, DynStore, Gcra, Limits, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_redis::RedisStore;
use ratelimit_tower::{
    Charge, ClientAddress, Fields, ProxyHeader, RateLimitLayer, XRateLimit, header,
};
use tokio::net::TcpListener;

/// A store that is chosen at run time.
type AnyStore = Arc<dyn DynStore<AnyAlgorithm>>;

fn app(store: &AnyStore) -> Result<Router, ConfigError> {
    // All requests of an address, and the searches of a customer: two limits of two routers.
    let per_address =
        Limits::builder().limit("burst", Gcra::per_second(10).burst(20)).by(["ip"]).build()?;
    let per_customer =
        Limits::builder().limit("searches", Gcra::per_day(5).burst(5)).by(["customer"]).build()?;

    // The reverse proxy runs on this machine and appends to X-Forwarded-For.
    let address = ClientAddress::behind(["127.0.0.0/8", "::1"], ProxyHeader::XForwardedFor)?;
    let all = RateLimitLayer::new(RateLimiter::new(per_address, store.clone()))
        .by("ip", address)
        .fields(Fields::new().x_ratelimit(XRateLimit::Seconds))
        .checked()?;

    // A search that fails costs nothing.
    let searches = RateLimitLayer::new(RateLimiter::new(per_customer, store.clone()))
        .by("customer", header(HeaderName::from_static("x-api-key")))
        .reserve(Charge::estimate().free(|status| status.is_server_error()))
        .checked()?;

    Ok(Router::new()
        .route("/search", get(|| async { "found\n" }))
        .route_layer(searches)
        .route("/", get(|| async { "hello\n" }))
        .layer(all))
}

async fn serve(listener: TcpListener, store: AnyStore) -> Result<(), Box<dyn Error>> {
    let service = app(&store)?.into_make_service_with_connect_info::<SocketAddr>();
    Ok(axum::serve(listener, service).await?)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let option = |name: &str| {
        let place = arguments.iter().position(|argument| argument == name)?;
        arguments.get(place + 1).map(String::as_str)
    };
    let store: AnyStore = match option("--redis") {
        Some(url) => Arc::new(RedisStore::connect(url).await?),
        None => Arc::new(MemoryStore::new()),
    };
    let port: u16 = option("--port").unwrap_or("3000").parse()?;
    let listener = TcpListener::bind(("127.0.0.1", port)).await?;
    println!("listening on http://{}", listener.local_addr()?);
    serve(listener, store).await
}

#[cfg(test)]
mod tests {
    use http::{Request, Response, StatusCode};
    use http_body_util::{BodyExt, Empty};
    use hyper::body::Bytes;
    use hyper_util::rt::TokioIo;
    use ratelimit_core::ManualClock;
    use ratelimit_servers::RedisServer;
    use ratelimit_tower::Advice;
    use tokio::net::TcpStream;
    use tokio::task::JoinSet;

    use super::*;

    /// A replica of the service on a free port.
    async fn replica(store: AnyStore) -> Result<SocketAddr, Box<dyn Error>> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let service = app(&store)?.into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async move { axum::serve(listener, service).await });
        Ok(address)
    }

    async fn get(
        server: SocketAddr,
        path: &str,
        headers: &[(&str, &str)],
    ) -> Result<Response<Bytes>, Box<dyn Error>> {
        let stream = TokioIo::new(TcpStream::connect(server).await?);
        let (mut client, connection) = hyper::client::conn::http1::handshake(stream).await?;
        tokio::spawn(connection);
        let mut request = Request::get(path).header("host", server.to_string());
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = client.send_request(request.body(Empty::<Bytes>::new())?).await?;
        let (parts, body) = response.into_parts();
        Ok(Response::from_parts(parts, body.collect().await?.to_bytes()))
    }

    /// What the service promises, by any number of replicas.
    async fn five_searches_a_day_by_all_replicas_together(
        replicas: &[SocketAddr],
    ) -> Result<(), Box<dyn Error>> {
        let alice = [("x-api-key", "alice")];
        for (nth, replica) in (0..5).zip(replicas.iter().cycle()) {
            let response = get(*replica, "/search", &alice).await?;
            assert_eq!(response.status(), StatusCode::OK);
            let told = Advice::from_headers(response.headers()).limits;
            assert_eq!((&*told[0].name, told[0].remaining), ("searches", 4 - nth));
            assert_eq!(told[1].name, "burst");
        }
        for replica in replicas {
            let response = get(*replica, "/search", &alice).await?;
            assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
            assert_eq!(response.headers()["content-type"], "application/problem+json");
            let problem: serde_json::Value = serde_json::from_slice(response.body())?;
            assert_eq!(problem["violated-policies"], serde_json::json!(["searches"]));
            let wait = Advice::from_headers(response.headers()).wait().expect("a wait");
            assert!(wait.as_secs() >= 1 && wait.as_secs() <= 86_400, "{wait:?}");
        }
        let bob = get(replicas[0], "/search", &[("x-api-key", "bob")]).await?;
        assert_eq!((bob.status(), &bob.body()[..]), (StatusCode::OK, &b"found\n"[..]));
        let anonymous = get(replicas[0], "/search", &[]).await?;
        assert_eq!(anonymous.status(), StatusCode::BAD_REQUEST);
        Ok(())
    }

    #[tokio::test]
    async fn in_memory() -> Result<(), Box<dyn Error>> {
        let replica = replica(Arc::new(MemoryStore::new())).await?;
        five_searches_a_day_by_all_replicas_together(&[replica]).await
    }

    #[tokio::test]
    async fn two_replicas_share_a_limit_on_redis() -> Result<(), Box<dyn Error>> {
        let server = RedisServer::start()?; // a process of its own, ended with the value
        let mut replicas = Vec::new();
        for _ in 0..2 {
            let store = RedisStore::connect(&server.url()).await?;
            replicas.push(replica(Arc::new(store)).await?);
        }
        five_searches_a_day_by_all_replicas_together(&replicas).await
    }

    #[tokio::test]
    async fn replicas_that_are_asked_at_once_admit_exactly_the_limit() -> Result<(), Box<dyn Error>>
    {
        let server = RedisServer::start()?;
        let mut replicas = Vec::new();
        for _ in 0..2 {
            let store = RedisStore::connect(&server.url()).await?;
            replicas.push(replica(Arc::new(store)).await?);
        }
        let mut requests = JoinSet::new();
        for (nth, replica) in (0..40).zip(replicas.into_iter().cycle()) {
            requests.spawn(async move {
                // Each from an address of its own, so that only the customer's limit denies.
                let address = format!("192.0.2.{nth}");
                let headers = [("x-api-key", "alice"), ("x-forwarded-for", &*address)];
                get(replica, "/search", &headers).await.expect("an answer").status()
            });
        }
        let statuses = requests.join_all().await;
        let of = |wanted: StatusCode| statuses.iter().filter(|status| **status == wanted).count();
        assert_eq!((of(StatusCode::OK), of(StatusCode::TOO_MANY_REQUESTS)), (5, 35));
        Ok(())
    }

    #[tokio::test]
    async fn a_spoofed_header_changes_nothing() -> Result<(), Box<dyn Error>> {
        let clock = ManualClock::default(); // it stands still, so that nothing flows back
        let replica = replica(Arc::new(MemoryStore::builder().clock(clock).build())).await?;
        for nth in 0..25 {
            // The proxy appends the client's address to what the client sent.
            let sent = format!("203.0.113.{nth}, 192.0.2.7");
            let forwarded = format!("for=203.0.113.{nth}");
            let headers = [("x-forwarded-for", sent.as_str()), ("forwarded", forwarded.as_str())];
            let response = get(replica, "/", &headers).await?;
            let denied = response.status() == StatusCode::TOO_MANY_REQUESTS;
            assert_eq!(denied, nth >= 20, "request {nth}");
        }
        let other = get(replica, "/", &[("x-forwarded-for", "192.0.2.8")]).await?;
        assert_eq!(other.status(), StatusCode::OK);
        assert_eq!(other.headers()["x-ratelimit-remaining"], "19");
        Ok(())
    }
}
