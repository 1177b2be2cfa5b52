//! Reservations of connections that are upgraded.
#![cfg(all(feature = "tokio", feature = "axum"))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::net::SocketAddr;

use axum::Router;
use axum::body::Body;
use axum::extract::Extension;
use axum::routing::get;
use http::header::{CONNECTION, UPGRADE};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Empty};
use hyper::body::Bytes;
use hyper_util::rt::TokioIo;
use ratelimit_core::{Concurrency, Limits, Policy, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{Charge, ClientAddress, Hold, ProblemJson, RateLimitLayer, ReservationLayer};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

type Layer = ReservationLayer<MemoryStore<Policy>, Policy, ProblemJson>;

/// So many at once from one address, for up to an hour.
fn at_once(count: u64) -> Layer {
    let busy = Concurrency::new(format!("{count}/1h").parse().unwrap()).unwrap();
    let limits = Limits::builder().limit("busy", busy).by(["ip"]).build().unwrap();
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    RateLimitLayer::new(limiter).by("ip", ClientAddress::peer()).reserve(Charge::estimate())
}

async fn serve(app: Router) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
    address
}

type Client = hyper::client::conn::http1::SendRequest<Empty<Bytes>>;

async fn client(address: SocketAddr) -> Client {
    let stream = TcpStream::connect(address).await.unwrap();
    let (client, connection) =
        hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    client
}

/// The status, once the whole response is there.
async fn ask(client: &mut Client, path: &str) -> StatusCode {
    let request = Request::get(path).header("host", "here").body(Empty::new()).unwrap();
    let response = client.send_request(request).await.unwrap();
    let status = response.status();
    response.into_body().collect().await.unwrap();
    status
}

/// Upgrades, and echoes until the client goes away.
async fn echo(Extension(hold): Extension<Hold>, request: Request<Body>) -> Response<Body> {
    let place = hold.keep();
    tokio::spawn(async move {
        let mut connection = TokioIo::new(hyper::upgrade::on(request).await.unwrap());
        let mut byte = [0];
        while connection.read_exact(&mut byte).await.is_ok() {
            connection.write_all(&byte).await.unwrap();
        }
        drop(place);
    });
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    response.headers_mut().insert(CONNECTION, "upgrade".parse().unwrap());
    response.headers_mut().insert(UPGRADE, "echo".parse().unwrap());
    response
}

#[tokio::test]
async fn an_upgraded_connection_that_is_held_keeps_the_places_of_all_layers_until_it_ends() {
    let layers = [at_once(1), at_once(1)];
    let [inner, outer] = layers.clone();
    let app = Router::new().route("/", get(|| async { "hello" })).route("/echo", get(echo));
    let address = serve(app.layer(inner).layer(outer)).await;

    let mut upgraded = TcpStream::connect(address).await.unwrap();
    let request =
        "GET /echo HTTP/1.1\r\nhost: here\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
    upgraded.write_all(request.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(upgraded.read_u8().await.unwrap());
    }
    assert!(head.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&head));
    upgraded.write_all(b"!").await.unwrap();
    assert_eq!(upgraded.read_u8().await.unwrap(), b'!');

    let mut client = client(address).await;
    assert_eq!(ask(&mut client, "/").await, StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(layers.each_ref().map(|layer| layer.settlements().count()), [1, 1]);
    drop(upgraded);
    for layer in &layers {
        layer.settlements().idle().await;
    }
    assert_eq!(ask(&mut client, "/").await, StatusCode::OK);
}
