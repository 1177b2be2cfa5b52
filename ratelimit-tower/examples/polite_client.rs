//! A client that stays inside the limit of someone else's API: it waits before it sends, and obeys a denial.
//!
//! `cargo run -p ratelimit-tower --example polite_client --features axum`

#![cfg_attr(test, allow(clippy::expect_used))]

use std::error::Error;
use std::net::SocketAddr;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use hyper::body::{Bytes, Incoming};
use hyper_util::rt::TokioIo;
use ratelimit_core::{Gcra, Limits, Policy, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{Advice, ClientAddress, RateLimitLayer, Waiter};
use tokio::net::{TcpListener, TcpStream};

/// Someone else's API: fifty requests per second, five at once.
async fn api() -> Result<SocketAddr, Box<dyn Error>> {
    let limits =
        Limits::builder().limit("api", Gcra::per_second(50).burst(5)).by(["ip"]).build()?;
    let limiter = RateLimiter::<_, Policy>::new(limits, MemoryStore::new());
    let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());
    let app = Router::new().route("/", get(|| async { "data\n" })).layer(layer);
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
    Ok(address)
}

async fn send(api: SocketAddr) -> Result<Response<Incoming>, Box<dyn Error>> {
    let stream = TokioIo::new(TcpStream::connect(api).await?);
    let (mut client, connection) = hyper::client::conn::http1::handshake(stream).await?;
    tokio::spawn(connection);
    let request = Request::get("/").header("host", api.to_string());
    Ok(client.send_request(request.body(Empty::<Bytes>::new())?).await?)
}

/// The client's own limit: a little less than the API's, because requests may travel at different speeds.
fn waiter() -> Result<Waiter<MemoryStore<Policy>>, Box<dyn Error>> {
    let limits = Limits::builder().limit("api", Gcra::per_second(45).burst(4)).build()?;
    Ok(Waiter::new(RateLimiter::<_, Policy>::new(limits, MemoryStore::new())))
}

/// Sends a request when the limit allows it. If the API denies it all the same, waits for as long as the API says.
async fn politely(
    waiter: &Waiter<MemoryStore<Policy>>,
    api: SocketAddr,
) -> Result<Response<Incoming>, Box<dyn Error>> {
    loop {
        waiter.until_allowed("api.example.com", Duration::from_secs(30)).await?;
        let response = send(api).await?;
        if response.status() != StatusCode::TOO_MANY_REQUESTS {
            return Ok(response);
        }
        let wait = Advice::from_headers(response.headers()).wait();
        tokio::time::sleep(wait.unwrap_or(Duration::from_secs(1))).await;
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let (api, waiter) = (api().await?, waiter()?);
    for nth in 1..=20 {
        println!("{nth}: {}", politely(&waiter, api).await?.status());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_polite_client_gets_all_its_answers_and_a_hasty_one_does_not()
    -> Result<(), Box<dyn Error>> {
        let (server, waiter) = (api().await?, waiter()?);
        for _ in 0..12 {
            assert_eq!(politely(&waiter, server).await?.status(), StatusCode::OK);
        }
        // Fifty at once are more than a burst of five and what comes back while they are sent.
        let hasty = api().await?;
        let mut denied = 0;
        for response in futures(hasty).await {
            denied += u32::from(response == StatusCode::TOO_MANY_REQUESTS);
        }
        assert!(denied > 0);
        Ok(())
    }

    async fn futures(api: SocketAddr) -> Vec<StatusCode> {
        let mut requests = tokio::task::JoinSet::new();
        for _ in 0..50 {
            requests.spawn(async move { send(api).await.expect("an answer").status() });
        }
        requests.join_all().await
    }
}
