//! [`Grpc`]: rejections as gRPC statuses.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::{Response, StatusCode};
use prost::Message;

use crate::rejection::{Answer, Reason, Rejection};

const GRPC_STATUS: HeaderName = HeaderName::from_static("grpc-status");
const GRPC_MESSAGE: HeaderName = HeaderName::from_static("grpc-message");
const GRPC_STATUS_DETAILS: HeaderName = HeaderName::from_static("grpc-status-details-bin");

/// Answers with a gRPC status, for tonic: `RESOURCE_EXHAUSTED` with a `google.rpc.RetryInfo` in `grpc-status-details-bin` where a limit
/// denied, `UNAVAILABLE` in an outage, `UNAUTHENTICATED` or `INVALID_ARGUMENT` where the client sent no identifier, and `INTERNAL`
/// where the service is at fault.
///
/// The HTTP status is 200, as gRPC demands, and the body is empty.
#[derive(Clone, Copy, Debug, Default)]
pub struct Grpc;

impl<B: Default> Answer<B> for Grpc {
    fn answer(&self, rejection: &Rejection) -> Response<B> {
        let (code, message) = match rejection.reason() {
            Reason::QuotaExceeded => (8, "rate limit exceeded"),
            Reason::ReducedCapacity => (14, "temporarily reduced capacity"),
            Reason::Unidentified if rejection.status() == StatusCode::UNAUTHORIZED => {
                (16, "the caller is not identified")
            }
            Reason::Unidentified => (3, "the caller is not identified"),
            Reason::Misconfigured => (13, "internal error"),
        };
        let mut response = Response::new(B::default());
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(GRPC_STATUS, HeaderValue::from(code));
        headers.insert(GRPC_MESSAGE, HeaderValue::from_static(message));
        if let Some(wait) = rejection.retry_after().filter(|_| code == 8) {
            let status = Status { code, message: message.into(), details: vec![retry_info(wait)] };
            let details = STANDARD_NO_PAD.encode(status.encode_to_vec());
            if let Ok(details) = HeaderValue::try_from(details) {
                headers.insert(GRPC_STATUS_DETAILS, details);
            }
        }
        response
    }
}

fn retry_info(wait: std::time::Duration) -> Any {
    let retry_delay = Duration {
        seconds: i64::try_from(wait.as_secs()).unwrap_or(i64::MAX),
        nanos: i32::try_from(wait.subsec_nanos()).unwrap_or(0),
    };
    let info = RetryInfo { retry_delay: Some(retry_delay) };
    Any { type_url: "type.googleapis.com/google.rpc.RetryInfo".into(), value: info.encode_to_vec() }
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
struct Status {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo`.
#[derive(Clone, Copy, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<Duration>,
}

/// `google.protobuf.Duration`.
#[derive(Clone, Copy, PartialEq, Message)]
struct Duration {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
}
