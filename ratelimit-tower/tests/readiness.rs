//! The contract of `poll_ready`: the service that is called is the one that was ready.
#![allow(missing_docs, clippy::unwrap_used, clippy::panic, reason = "tests")]

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::task::{Context, Poll};

use bytes::Bytes;
use http::{Request, Response};
use ratelimit_core::{Batch, Gcra, Limits, Policy, RateLimiter, Store, Verdict};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_tower::{ClientAddress, PeerAddress, RateLimitLayer};
use tower::{Layer, Service, ServiceExt};

/// A service that must be ready before each call, and whose clones are not.
#[derive(Default)]
struct Strict {
    is_ready: bool,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self { is_ready: false }
    }
}

impl Service<Request<()>> for Strict {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<()>) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "called without being ready");
        ready(Ok(Response::new(Body::from(Bytes::new()))))
    }
}

type Body = http_body_util::Full<Bytes>;

/// A store that decides after others have run.
struct Slow(MemoryStore<Policy>);

impl Store<Policy> for Slow {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        tokio::task::yield_now().await;
        self.0.apply(batch).await
    }
}

fn limits() -> Limits<Policy> {
    Limits::builder().limit("burst", Gcra::per_day(20).burst(20)).by(["ip"]).build().unwrap()
}

fn request() -> Request<()> {
    let mut request = Request::new(());
    let peer: SocketAddr = "192.0.2.7:80".parse().unwrap();
    request.extensions_mut().insert(PeerAddress(peer));
    request
}

/// Sends 25 requests, several at once by one service and by its clones; of these, 20 are admitted.
async fn twenty_of_25_are_admitted<S>(mut service: S)
where
    S: Service<Request<()>, Response: Status, Error = Infallible, Future: Send + 'static>,
    S: Clone,
    S::Response: Send + 'static,
{
    let mut calls = Vec::new();
    for _ in 0..12 {
        calls.push(tokio::spawn(service.ready().await.unwrap().call(request())));
        let mut clone = service.clone();
        calls.push(tokio::spawn(clone.ready().await.unwrap().call(request())));
    }
    // Made ready, and another call is in between.
    let mut early = service.clone();
    early.ready().await.unwrap();
    calls.push(tokio::spawn(early.call(request())));
    let mut admitted = 0;
    for call in calls {
        admitted += usize::from(call.await.unwrap().unwrap().is_ok());
    }
    assert_eq!(admitted, 20);
}

trait Status {
    fn is_ok(&self) -> bool;
}

impl<B> Status for Response<B> {
    fn is_ok(&self) -> bool {
        self.status() == 200
    }
}

#[tokio::test]
async fn the_service_that_was_ready_is_called_in_every_mode() {
    let slow = RateLimitLayer::new(RateLimiter::new(limits(), Slow(MemoryStore::new())));
    twenty_of_25_are_admitted(slow.by("ip", ClientAddress::peer()).layer(Strict::default())).await;
    let now = RateLimitLayer::new(RateLimiter::new(limits(), MemoryStore::new())).immediate();
    twenty_of_25_are_admitted(now.by("ip", ClientAddress::peer()).layer(Strict::default())).await;
    let reserving = RateLimitLayer::new(RateLimiter::new(limits(), Slow(MemoryStore::new())))
        .by("ip", ClientAddress::peer())
        .reserve(ratelimit_tower::Charge::estimate());
    twenty_of_25_are_admitted(reserving.layer(Strict::default())).await;
}

#[tokio::test]
async fn a_denied_request_does_not_reach_the_service() {
    let limiter = RateLimiter::new(limits(), MemoryStore::new());
    let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer()).cost(21).immediate();
    let never = tower::service_fn(|_: Request<()>| async {
        assert!(std::hint::black_box(false), "the service was called");
        Ok::<_, Infallible>(Response::new(Body::default()))
    });
    let answer = layer.layer(never).oneshot(request()).await.unwrap();
    assert_eq!(answer.status(), 429);
}
