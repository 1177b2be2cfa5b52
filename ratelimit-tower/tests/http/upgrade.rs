//! Reservations of connections that are upgraded.

use axum::body::Body;
use axum::extract::Extension;
use axum::routing::get;
use http::header::{CONNECTION, UPGRADE};
use http::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use ratelimit_tower::{Charge, Hold, PeerAddress};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::harness::{hello, layer, request, statuses};

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
    let one_at_a_time = || layer(&[("busy", "concurrency 1/1h", "ip")]).reserve(Charge::estimate());
    let layers = [one_at_a_time(), one_at_a_time()];
    let [inner, outer] = layers.clone();
    let app = hello().route("/echo", get(echo)).layer(inner).layer(outer);
    let PeerAddress(peer) = *request("/").extensions().get().unwrap();
    let served = app.clone().layer(axum::Extension(PeerAddress(peer)));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move { axum::serve(listener, served).await });

    let mut upgraded = TcpStream::connect(address).await.unwrap();
    let request_line =
        "GET /echo HTTP/1.1\r\nhost: here\r\nconnection: upgrade\r\nupgrade: echo\r\n\r\n";
    upgraded.write_all(request_line.as_bytes()).await.unwrap();
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(upgraded.read_u8().await.unwrap());
    }
    assert!(head.starts_with(b"HTTP/1.1 101 "), "{}", String::from_utf8_lossy(&head));
    upgraded.write_all(b"!").await.unwrap();
    assert_eq!(upgraded.read_u8().await.unwrap(), b'!');

    assert_eq!(statuses(&app, [request("/")]).await, [429]);
    assert_eq!(layers.each_ref().map(|layer| layer.settlements().len()), [1, 1]);
    drop(upgraded);
    for layer in &layers {
        layer.settlements().wait().await;
    }
    assert_eq!(statuses(&app, [request("/")]).await, [200]);
}
