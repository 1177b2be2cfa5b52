//! gRPC statuses, read by tonic's own types.
#![cfg(feature = "grpc")]
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::unused_async,
    reason = "tests"
)]

use std::convert::Infallible;
use std::net::SocketAddr;

use http::header::{HeaderName, HeaderValue};
use http::{Request, Response, StatusCode};
use ratelimit_core::{Gcra, Limits, ManualClock, Policy, RateLimiter};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{ClientAddress, Grpc, PeerAddress, RateLimitLayer, header};
use tonic::body::Body;
use tonic::{Code, Status};
use tonic_types::StatusExt;
use tower::{Layer, ServiceExt, service_fn};

fn limiter() -> RateLimiter<MemoryStore<Policy, ManualClock>> {
    let limits = Limits::builder().limit("burst", Gcra::per_minute(40).burst(1)).by(["ip"]);
    let store = MemoryStore::builder().clock(ManualClock::default()).build();
    RateLimiter::new(limits.build().unwrap(), store)
}

fn request() -> Request<()> {
    let mut request = Request::new(());
    let peer: SocketAddr = "192.0.2.7:80".parse().unwrap();
    request.extensions_mut().insert(PeerAddress(peer));
    request
}

async fn ok(_: Request<()>) -> Result<Response<Body>, Infallible> {
    Ok(Response::new(Body::default()))
}

#[tokio::test]
async fn a_denial_is_resource_exhausted_with_the_exact_wait() {
    let layer = RateLimitLayer::new(limiter()).by("ip", ClientAddress::peer()).answer(Grpc);
    let service = layer.layer(service_fn(ok));
    let admitted = service.clone().oneshot(request()).await.unwrap();
    assert!(Status::from_header_map(admitted.headers()).is_none());
    let denied = service.oneshot(request()).await.unwrap();
    assert_eq!(denied.status(), StatusCode::OK);
    assert_eq!(denied.headers()["content-type"], "application/grpc");
    let status = Status::from_header_map(denied.headers()).unwrap();
    assert_eq!(status.code(), Code::ResourceExhausted);
    let info = status.get_details_retry_info().unwrap();
    assert_eq!(info.retry_delay, Some(std::time::Duration::from_millis(1_500)));
    assert_eq!(status.get_error_details_vec().len(), 1);
}

#[tokio::test]
async fn other_rejections_are_their_own_codes() {
    let key = || header(HeaderName::from_static("x-api-key"));
    let layer = || RateLimitLayer::new(limiter()).answer(Grpc);
    let challenge = HeaderValue::from_static("Bearer");
    for (layer, code) in [
        (layer(), Code::Internal),
        (layer().by("ip", key()), Code::InvalidArgument),
        (layer().by("ip", key().unauthorized(challenge)), Code::Unauthenticated),
    ] {
        let refused = layer.layer(service_fn(ok)).oneshot(request()).await.unwrap();
        assert_eq!(refused.status(), StatusCode::OK);
        let status = Status::from_header_map(refused.headers()).unwrap();
        assert_eq!(status.code(), code);
        assert!(status.get_details_retry_info().is_none());
    }
}
