//! Requests through a layer to a service that answers at once. Both layers identify the caller by
//! axum's `ConnectInfo`.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::net::SocketAddr;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Request, Response, StatusCode};
use ratelimit_core::{AnyAlgorithm, Gcra, Limits, Rate, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{ClientAddress, Fields, RateLimitLayer};
use tower_governor::GovernorLayer;
use tower_governor::governor::GovernorConfigBuilder;
use tower_governor::key_extractor::PeerIpKeyExtractor;
use tower_layer::Layer;
use tower_service::Service;

use crate::measure::Fallible;

/// Answers at once.
#[derive(Clone)]
struct Answers;

impl Service<Request<Body>> for Answers {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Ready<Result<Response<Body>, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Request<Body>) -> Self::Future {
        ready(Ok(Response::new(Body::empty())))
    }
}

/// Sends one request of this caller, and tells the status.
pub(crate) type RequestSender = Box<dyn FnMut(SocketAddr) -> Option<StatusCode>>;

/// A request without a layer.
pub(crate) fn bare() -> RequestSender {
    through(Answers)
}

fn through<S>(mut service: S) -> RequestSender
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + 'static,
{
    Box::new(move |peer| {
        let mut request = Request::new(Body::empty());
        request.extensions_mut().insert(ConnectInfo(peer));
        let mut context = Context::from_waker(Waker::noop());
        let Poll::Ready(Ok(())) = service.poll_ready(&mut context) else { return None };
        match pin!(service.call(request)).poll(&mut context) {
            Poll::Ready(Ok(response)) => Some(response.status()),
            _ => None,
        }
    })
}

/// An outcome that every request of a measurement has, and the limit that makes it so.
pub(crate) struct RequestOutcome {
    pub(crate) name: &'static str,
    burst: u32,
    seconds_per_token: u64,
    pub(crate) status: StatusCode,
}

/// Charges outlast the run, so every measured decision is about a caller that the store knows.
pub(crate) const OUTCOMES: [RequestOutcome; 2] = [
    RequestOutcome {
        name: "allowed",
        burst: 10_000_000,
        seconds_per_token: 1,
        status: StatusCode::OK,
    },
    RequestOutcome {
        name: "denied",
        burst: 1,
        seconds_per_token: 10_000,
        status: StatusCode::TOO_MANY_REQUESTS,
    },
];

/// Our layer.
pub(crate) fn ours(
    outcome: &RequestOutcome,
    tells: bool,
    immediate: bool,
) -> Fallible<RequestSender> {
    let rate = Rate::new(1, Duration::from_secs(outcome.seconds_per_token))?;
    let gcra = Gcra::new(rate, u64::from(outcome.burst))?;
    let limits = Limits::builder().limit("burst", gcra).by(["ip"]).build()?;
    let limiter = RateLimiter::<_, AnyAlgorithm>::new(limits, MemoryStore::new());
    let fields = if tells { Fields::new() } else { Fields::new().without_draft() };
    let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer()).fields(fields);
    Ok(if immediate {
        through(layer.immediate().layer(Answers))
    } else {
        through(layer.layer(Answers))
    })
}

/// `tower_governor`.
pub(crate) fn governor(outcome: &RequestOutcome, tells: bool) -> Fallible<RequestSender> {
    let mut config = GovernorConfigBuilder::default();
    let mut config = config.key_extractor(PeerIpKeyExtractor);
    config.per_second(outcome.seconds_per_token).burst_size(outcome.burst);
    let wrong = "tower_governor refuses the benchmark's limit";
    Ok(if tells {
        through(GovernorLayer::new(config.use_headers().finish().ok_or(wrong)?).layer(Answers))
    } else {
        through(GovernorLayer::new(config.finish().ok_or(wrong)?).layer(Answers))
    })
}
