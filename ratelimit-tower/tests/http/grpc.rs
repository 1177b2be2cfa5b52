//! gRPC statuses, read by tonic's own types.

use std::time::Duration;

use http::header::HeaderValue;
use ratelimit_tower::{Grpc, RateLimitLayer, header, unauthorized};
use tonic::{Code, Status};
use tonic_types::StatusExt;

use crate::harness::{API_KEY, Rows, hello, layer, limiter, request, send};

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
