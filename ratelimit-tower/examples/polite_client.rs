//! A client that stays inside the limit of someone else's API: it waits before it sends, and obeys
//! a denial.
//!
//! `cargo run -p ratelimit-tower --example polite_client --features axum`

#![cfg_attr(test, allow(clippy::expect_used))]

use std::error::Error;
use std::io;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use ratelimit_core::{AnyAlgorithm, ConfigError, Gcra, Limits, RateLimiter};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_tower::{ClientAddress, RateLimitLayer, WaitLayer, WaitServiceError, Waiter};
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer, Service, ServiceExt, service_fn};

/// Someone else's API: fifty requests per second, five at once.
async fn api() -> Result<SocketAddr, Box<dyn Error>> {
    let limits =
        Limits::builder().limit("api", Gcra::per_second(50).burst(5)).by(["ip"]).build()?;
    let limiter = RateLimiter::<_, AnyAlgorithm>::new(limits, MemoryStore::new());
    let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());
    let app = Router::new().route("/", get(|| async { "data\n" })).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
    Ok(address)
}

type Answer = Response<Incoming>;
type Failure = WaitServiceError<io::Error, MemoryError>;

async fn send(api: SocketAddr) -> io::Result<Answer> {
    let stream = TokioIo::new(TcpStream::connect(api).await?);
    let handshake = hyper::client::conn::http1::handshake(stream).await;
    let (mut client, connection) = handshake.map_err(io::Error::other)?;
    tokio::spawn(connection);
    let request = Request::get("/").header("host", api.to_string()).body(Empty::<Bytes>::new());
    client.send_request(request.map_err(io::Error::other)?).await.map_err(io::Error::other)
}

/// A client that sends a request when its own limit allows it, and never before the time that the
/// API has asked for. Its limit is a little less than the API's, because requests may travel at
/// different speeds.
fn polite()
-> Result<impl Service<SocketAddr, Response = Answer, Error = Failure> + Clone, ConfigError> {
    let limits = Limits::builder().limit("api", Gcra::per_second(45).burst(4)).build()?;
    let waiter = Waiter::new(RateLimiter::<_, AnyAlgorithm>::new(limits, MemoryStore::new()));
    let by_api = |api: &SocketAddr| api.to_string();
    let layer =
        WaitLayer::new(waiter, by_api, Duration::from_secs(30)).adopt_answers().heed_answers();
    Ok(layer.layer(service_fn(send)))
}

/// Sends a request, and once more if the API denies it all the same: the client waits before it
/// does.
async fn send_politely<C>(client: &C, api: SocketAddr) -> Result<Answer, C::Error>
where
    C: Service<SocketAddr, Response = Answer> + Clone,
{
    let answer = client.clone().oneshot(api).await?;
    match answer.status() {
        StatusCode::TOO_MANY_REQUESTS => client.clone().oneshot(api).await,
        _ => Ok(answer),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let (api, client) = (api().await?, polite()?);
    for nth in 1..=20 {
        println!("{nth}: {}", send_politely(&client, api).await?.status());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_polite_client_gets_all_its_answers_and_a_hasty_one_does_not()
    -> Result<(), Box<dyn Error>> {
        let (server, client) = (api().await?, polite()?);
        for _ in 0..12 {
            assert_eq!(send_politely(&client, server).await?.status(), StatusCode::OK);
        }
        // Fifty at once are more than a burst of five and what comes back while they are sent.
        let hasty = api().await?;
        let mut requests = tokio::task::JoinSet::new();
        for _ in 0..50 {
            requests.spawn(async move { send(hasty).await.expect("an answer").status() });
        }
        assert!(requests.join_all().await.contains(&StatusCode::TOO_MANY_REQUESTS));
        Ok(())
    }
}
