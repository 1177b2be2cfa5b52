//! The contract of `poll_ready`: the service that is called is the one that was ready.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll};

use axum::body::Body;
use http::{Request, Response};
use ratelimit_core::RateLimiter;
use ratelimit_tower::Charge;
use tower::{Layer, Service, ServiceExt};

use crate::harness::{Faulty, Rows, by_ip, layer, limits, request};

/// A service that must be ready before each call, and whose clones are not. They count their calls
/// together.
#[derive(Default)]
struct Strict {
    is_ready: bool,
    calls: Arc<AtomicU64>,
}

impl Clone for Strict {
    fn clone(&self) -> Self {
        Self { is_ready: false, calls: self.calls.clone() }
    }
}

impl Service<Request<Body>> for Strict {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.is_ready = true;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        assert!(std::mem::take(&mut self.is_ready), "called without being ready");
        self.calls.fetch_add(1, Ordering::Relaxed);
        ready(Ok(Response::new(Body::empty())))
    }
}

const TWENTY: Rows = &[("burst", "gcra 20/d burst 20", "ip")];

/// Sends 25 requests, several at once by one service and by its clones; of these, 20 are admitted
/// and reach the service.
async fn twenty_of_25_are_admitted<L, S, B>(layer: L)
where
    L: Layer<Strict, Service = S>,
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone,
    S::Future: Send + 'static,
    B: Send + 'static,
{
    let strict = Strict::default();
    let mut service = layer.layer(strict.clone());
    let mut calls = Vec::new();
    for _ in 0..12 {
        calls.push(tokio::spawn(service.ready().await.unwrap().call(request("/"))));
        let mut clone = service.clone();
        calls.push(tokio::spawn(clone.ready().await.unwrap().call(request("/"))));
    }
    // Made ready, and another call is in between.
    let mut early = service.clone();
    early.ready().await.unwrap();
    calls.push(tokio::spawn(early.call(request("/"))));
    let mut admitted = 0;
    for call in calls {
        admitted += usize::from(call.await.unwrap().unwrap().status() == 200);
    }
    assert_eq!((admitted, strict.calls.load(Ordering::Relaxed)), (20, 20));
}

#[tokio::test(start_paused = true)]
async fn the_service_that_was_ready_is_called_in_every_mode() {
    let slow = || by_ip(RateLimiter::new(limits(TWENTY), Faulty::slow()));
    twenty_of_25_are_admitted(slow()).await;
    twenty_of_25_are_admitted(layer(TWENTY).immediate()).await;
    twenty_of_25_are_admitted(slow().reserve(Charge::estimate())).await;
}
