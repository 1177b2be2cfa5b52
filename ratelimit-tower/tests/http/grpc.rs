//! gRPC statuses, read by tonic's own types.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::stream;
use http::header::{HeaderMap, HeaderValue};
use http::{Request, Response};
use http_body::Frame;
use http_body_util::StreamBody;
use ratelimit_tower::{Charge, Grpc, RateLimitLayer, header, unauthorized};
use tonic::{Code, Status};
use tonic_types::StatusExt;
use tower::{Layer, service_fn};

use crate::harness::{API_KEY, Rows, by_ip, hello, layer, limiter, request, send};

#[tokio::test]
async fn a_denial_tells_the_exact_wait_and_other_rejections_are_their_own_codes() {
    let rows: Rows = &[("burst", "gcra 40/m burst 1", "ip")];
    let unwired = || RateLimitLayer::new(limiter(rows));
    let bearer = HeaderValue::from_static("Bearer");
    let wait = Duration::from_millis(1_500);
    for (layer, code, wait) in [
        (layer(rows), None, None),
        (layer(rows), Some(Code::ResourceExhausted), Some(wait)),
        (unwired(), Some(Code::Internal), None),
        (unwired().by("ip", header(API_KEY)), Some(Code::InvalidArgument), None),
        (
            unwired().by("ip", unauthorized(header(API_KEY), bearer)),
            Some(Code::Unauthenticated),
            None,
        ),
    ] {
        let app = hello().layer(layer.answer(Grpc));
        if wait.is_some() {
            send(&app, request("/")).await;
        }
        let answer = send(&app, request("/")).await;
        assert_eq!(answer.status, 200);
        let status = Status::from_header_map(&answer.headers);
        assert_eq!(status.as_ref().map(Status::code), code);
        if let Some(status) = status {
            assert_eq!(answer.field("content-type"), "application/grpc");
            let info = status.get_details_retry_info();
            assert_eq!(info.and_then(|info| info.retry_delay), wait);
            assert_eq!(status.get_error_details_vec().len(), usize::from(wait.is_some()));
        }
    }
}

/// The end of a call, as tonic sends it: in the header where nothing was sent before, or in the
/// trailers.
fn ends(code: Code, in_trailers: bool) -> Response<Body> {
    let status = Status::new(code, "").into_http::<Body>();
    if !in_trailers {
        return status;
    }
    let trailers: HeaderMap = status
        .headers()
        .clone()
        .into_iter()
        .filter_map(|(name, value)| Some((name?, value)))
        .collect();
    let frames = [Frame::data(Bytes::from_static(b"seven b")), Frame::trailers(trailers)];
    let body = StreamBody::new(stream::iter(frames.map(Ok::<_, Infallible>)));
    Response::builder().header("content-type", "application/grpc").body(Body::new(body)).unwrap()
}

#[tokio::test]
async fn a_call_costs_what_its_code_stands_for_in_the_header_or_in_the_trailers() {
    let free = || Charge::estimate().free(|status| status == 404 || status.is_server_error());
    let by_status = || Charge::by_status(|status| u64::from(status.as_u16() / 100));
    let bytes = || Charge::body_bytes().free(|status| status == 503);
    for (charge, code, header, trailers) in [
        (free(), Code::Ok, 10, 10),
        (free(), Code::NotFound, 0, 0),
        (free(), Code::Internal, 0, 0),
        (free(), Code::Unavailable, 0, 0),
        (free(), Code::PermissionDenied, 10, 10),
        (by_status(), Code::Ok, 2, 2),
        (by_status(), Code::ResourceExhausted, 4, 4),
        (by_status(), Code::Unknown, 5, 5),
        (bytes(), Code::Internal, 0, 7),
        (bytes(), Code::Unavailable, 0, 0),
    ] {
        for (in_trailers, cost) in [(false, header), (true, trailers)] {
            let limiter = Arc::new(limiter(&[("budget", "gcra 100/m burst 100", "ip")]));
            let service =
                service_fn(move |_: Request<Body>| async move { Ok(ends(code, in_trailers)) });
            let layer = by_ip(limiter.clone()).cost(10).reserve(charge.clone());
            send(&layer.layer(service), request("/")).await;
            let left =
                limiter.request(&[("ip", "192.0.2.7")]).cost(0).peek().await.unwrap().remaining();
            assert_eq!(100 - left, cost, "{code:?} {charge:?} {in_trailers}");
        }
    }
}
