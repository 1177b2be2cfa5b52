//! An endpoint that streams tokens, and charges the tokens that it sent: an estimate is reserved when the request arrives,
//! and settled when the stream ends, or when the client goes away.
//!
//! `cargo run -p ratelimit-tower --example token_stream --features axum`, then `curl -N http://127.0.0.1:3000/complete`

#![cfg_attr(test, allow(clippy::expect_used))]

use std::convert::Infallible;
use std::error::Error;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use axum::Router;
use axum::body::Body;
use axum::extract::Extension;
use axum::routing::get;
use bytes::Bytes;
use http_body::Frame;
use ratelimit_core::{Clock, ConfigError, FixedWindow, Limits, Policy, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{Charge, ClientAddress, Fields, Meter, RateLimitLayer};
use tokio::net::TcpListener;

/// What a request may cost at most; it is reserved until the real cost is known.
const ESTIMATE: u64 = 1_000;

type Limiter<C> = Arc<RateLimiter<MemoryStore<Policy, C>>>;

/// A budget of ten thousand tokens per address and day.
fn limiter<C: Clock>(store: MemoryStore<Policy, C>) -> Result<Limiter<C>, ConfigError> {
    let budget = FixedWindow::per_day(10_000);
    let limits = Limits::builder().limit("tokens", budget).by(["ip"]).build()?;
    Ok(Arc::new(RateLimiter::new(limits, store)))
}

/// The tokens of an answer, one per frame. Each is counted when it is handed to the connection.
struct Tokens {
    left: u32,
    meter: Meter,
}

impl http_body::Body for Tokens {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.left -= 1;
        self.meter.add(1);
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(b"token ")))))
    }
}

async fn complete(Extension(meter): Extension<Meter>) -> Body {
    meter.set(0); // nothing was sent yet
    Body::new(Tokens { left: 17, meter })
}

fn app<C: Clock + 'static>(limiter: Limiter<C>) -> Router {
    let layer = RateLimitLayer::new(limiter)
        .by("ip", ClientAddress::peer())
        .fields(Fields::new())
        .cost(ESTIMATE)
        .reserve(Charge::estimate());
    Router::new().route("/complete", get(complete)).layer(layer)
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let listener = TcpListener::bind("127.0.0.1:3000").await?;
    println!("listening on http://{}", listener.local_addr()?);
    let app = app(limiter(MemoryStore::new())?);
    Ok(axum::serve(listener, app.into_make_service_with_connect_info::<SocketAddr>()).await?)
}

#[cfg(test)]
mod tests {
    use http::{Request, StatusCode};
    use http_body_util::{BodyExt, Empty};
    use hyper_util::rt::TokioIo;
    use ratelimit_core::ManualClock;
    use tokio::net::TcpStream;

    use super::*;

    #[tokio::test]
    async fn a_stream_costs_the_tokens_that_were_sent() -> Result<(), Box<dyn Error>> {
        let store = MemoryStore::builder().clock(ManualClock::default()).build();
        let limiter = limiter(store)?;
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        let service = app(limiter.clone()).into_make_service_with_connect_info::<SocketAddr>();
        tokio::spawn(async move { axum::serve(listener, service).await });

        let stream = TokioIo::new(TcpStream::connect(address).await?);
        let (mut client, connection) = hyper::client::conn::http1::handshake(stream).await?;
        tokio::spawn(connection);
        let request = Request::get("/complete").header("host", address.to_string());
        let response = client.send_request(request.body(Empty::<Bytes>::new())?).await?;
        assert_eq!(response.status(), StatusCode::OK);
        let body = response.into_body().collect().await?.to_bytes();
        assert_eq!(body.len(), 17 * b"token ".len());

        // A store on Redis settles by a task of its own once the body has ended.
        let caller = [("ip", "127.0.0.1")];
        while limiter.peek(&caller, 0).await?.remaining() != 10_000 - 17 {
            tokio::task::yield_now().await;
        }
        Ok(())
    }
}
