//! A gateway to a language model: each caller has a budget of input, of output and of requests.
//!
//! - The input is counted when the request arrives, and an estimate of the output is reserved.
//! - A stream that is longer than its estimate grows the reservation before it goes on, and stops
//!   where the budget ends.
//! - When the stream ends, or when the client leaves, the request costs the tokens that were
//!   sent.
//!
//! `cargo run -p ratelimit-tower --example gateway --features axum`, then
//! `curl -N -H 'x-input-tokens: 12' 'http://127.0.0.1:3000/complete?tokens=600'`

#![cfg_attr(test, allow(clippy::expect_used))]

use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::extract::{Extension, Query, State};
use axum::http::StatusCode;
use axum::routing::get;
use bytes::Bytes;
use http::Request;
use http::request::Parts;
use http_body::Frame;
use http_body_util::{BodyExt, Empty};
use hyper_util::rt::TokioIo;
use ratelimit_core::{AnyAlgorithm, Clock, ConfigError, Gcra, LimitCosts, Limits, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{Charge, ClientAddress, Fields, Hold, Meter, ModelFields, RateLimitLayer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// How much output is reserved at first, and each time that a stream goes on.
const STEP: u64 = 256;

type Limiter<C> = Arc<RateLimiter<MemoryStore<AnyAlgorithm, C>>>;
type BoxError = Box<dyn Error + Send + Sync>;

/// Budgets of a minute. What the last stream used beyond its reservation is owed.
fn limiter<C: Clock>(store: MemoryStore<AnyAlgorithm, C>) -> Result<Limiter<C>, ConfigError> {
    let limits = Limits::builder()
        .limit("input-tokens", Gcra::per_minute(40_000).debt(4_000))
        .by(["ip"])
        .limit("output-tokens", Gcra::per_minute(1_000).debt(100))
        .by(["ip"])
        .limit("requests", Gcra::per_minute(50))
        .by(["ip"])
        .build()?;
    Ok(Arc::new(RateLimiter::new(limits, store)))
}

/// The tokens of the input, which a gateway would count with the model's tokenizer.
fn input_tokens(request: &Parts) -> u64 {
    let given = request.headers.get("x-input-tokens").and_then(|value| value.to_str().ok());
    given.and_then(|count| count.parse().ok()).unwrap_or(1)
}

fn costs(input: u64, output: u64) -> LimitCosts {
    LimitCosts::from(1).with("input-tokens", input).with("output-tokens", output)
}

/// A stream to the client. Dropping it tells the task that fills it.
struct Tokens(mpsc::Receiver<Bytes>);

impl http_body::Body for Tokens {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(cx).map(|token| token.map(|token| Ok(Frame::data(token))))
    }
}

#[derive(serde::Deserialize)]
struct Ask {
    tokens: u64,
}

/// Asks the model, and passes on what it answers.
async fn complete(
    State(model): State<SocketAddr>,
    Extension(meter): Extension<Meter>,
    Extension(hold): Extension<Hold>,
    Query(Ask { tokens }): Query<Ask>,
    request: Request<Body>,
) -> Result<Body, StatusCode> {
    let (parts, _) = request.into_parts();
    let answer = get_body(model, &format!("/?tokens={tokens}")).await;
    let answer = answer.map_err(|_| StatusCode::BAD_GATEWAY)?;
    let (sender, tokens) = mpsc::channel(1);
    meter.add_of("output-tokens", 0); // nothing was sent yet
    tokio::spawn(pass_on(answer, sender, meter, hold, input_tokens(&parts)));
    Ok(Body::new(Tokens(tokens)))
}

/// Sends one token after the other, as long as the budget and the client last.
async fn pass_on(
    mut answer: hyper::body::Incoming,
    client: mpsc::Sender<Bytes>,
    meter: Meter,
    hold: Hold,
    input: u64,
) {
    let (mut sent, mut reserved) = (0, STEP);
    while let Some(Ok(frame)) = answer.frame().await {
        let Ok(token) = frame.into_data() else { continue };
        if sent == reserved {
            match hold.extend(costs(input, reserved + STEP)).await {
                Ok(Some(verdict)) if verdict.allowed() => reserved += STEP,
                // The stream ends where the budget ends, or where the store fails.
                _ => return,
            }
        }
        if client.send(token).await.is_err() {
            return; // the client is gone
        }
        sent += 1;
        meter.add_of("output-tokens", 1);
    }
}

async fn get_body(to: SocketAddr, path: &str) -> Result<hyper::body::Incoming, BoxError> {
    let stream = TokioIo::new(TcpStream::connect(to).await?);
    let (mut client, connection) = hyper::client::conn::http1::handshake(stream).await?;
    tokio::spawn(connection);
    let request = Request::get(path).header("host", to.to_string()).body(Empty::<Bytes>::new())?;
    Ok(client.send_request(request).await?.into_body())
}

fn gateway<C: Clock + 'static>(limiter: Limiter<C>, model: SocketAddr) -> Router {
    let layer = RateLimitLayer::new(limiter)
        .by("ip", ClientAddress::peer())
        .fields(Fields::new().model_fields(ModelFields::Anthropic))
        .cost_of(|request| costs(input_tokens(request), STEP))
        .reserve(Charge::estimate());
    Router::new().route("/complete", get(complete)).layer(layer).with_state(model)
}

/// Stands in for a model: a frame for each token.
async fn model(Query(Ask { tokens }): Query<Ask>) -> Body {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        for _ in 0..tokens {
            if sender.send(Bytes::from_static(b"token ")).await.is_err() {
                return;
            }
        }
    });
    Body::new(Tokens(receiver))
}

async fn serve(app: Router, at: &str) -> Result<SocketAddr, BoxError> {
    let listener = TcpListener::bind(at).await?;
    let address = listener.local_addr()?;
    let service = app.into_make_service_with_connect_info::<SocketAddr>();
    tokio::spawn(async move { axum::serve(listener, service).await });
    Ok(address)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), BoxError> {
    let model = serve(Router::new().route("/", get(model)), "127.0.0.1:0").await?;
    let address = serve(gateway(limiter(MemoryStore::new())?, model), "127.0.0.1:3000").await?;
    println!("listening on http://{address}");
    std::future::pending().await
}

#[cfg(test)]
mod tests {
    use ratelimit_core::ManualClock;

    use super::*;

    /// What remains of input, output and requests, once the last request is settled.
    async fn settles_at(limiter: &Limiter<ManualClock>, due: [u64; 3]) {
        let left = || async {
            let caller = [("ip", "127.0.0.1")];
            let verdict = limiter.request(&caller).cost(0).peek().await.expect("decides");
            limiter.named(&verdict).map(|limit| limit.remaining).collect::<Vec<_>>()
        };
        while left().await != due {
            tokio::task::yield_now().await;
        }
    }

    #[tokio::test]
    async fn a_request_costs_what_was_sent_and_a_stream_stops_where_the_budget_ends() {
        let limiter =
            limiter(MemoryStore::builder().clock(ManualClock::default()).build()).expect("limits");
        let model = serve(Router::new().route("/", get(model)), "127.0.0.1:0").await;
        let app = gateway(limiter.clone(), model.expect("a port"));
        let gateway = serve(app, "127.0.0.1:0").await.expect("a port");
        let ask =
            async |tokens: u64| get_body(gateway, &format!("/complete?tokens={tokens}")).await;

        // Longer than its estimate.
        let body = ask(300).await.expect("answers").collect().await.expect("all of it").to_bytes();
        assert_eq!(body.len(), 300 * b"token ".len());
        settles_at(&limiter, [39_999, 700, 49]).await;

        // The client goes away after the first token, and pays for the tokens in flight.
        let mut aborted = ask(1_000_000).await.expect("answers");
        aborted.frame().await.expect("a token").expect("is sent");
        drop(aborted);
        let caller = [("ip", "127.0.0.1")];
        while limiter.request(&caller).cost(0).peek().await.expect("decides").decisions()[1]
            .remaining
            < 512
        {
            tokio::task::yield_now().await;
        }

        // The budget ends in mid-stream.
        let left = limiter.request(&caller).cost(0).peek().await.expect("decides").decisions()[1]
            .remaining;
        let body = ask(5_000).await.expect("answers").collect().await.expect("it ends").to_bytes();
        let sent = (body.len() / b"token ".len()) as u64;
        assert_eq!(sent, left - left % STEP);
        settles_at(&limiter, [39_997, left % STEP, 47]).await;
    }
}
