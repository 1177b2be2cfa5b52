//! [`Grpc`]: rejections as gRPC statuses.

use http::{Response, StatusCode};
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt};

use crate::rejection::{Answer, Reason, Rejection};

/// Answers with a gRPC status, for tonic: `RESOURCE_EXHAUSTED` with a `google.rpc.RetryInfo` in
/// `grpc-status-details-bin` where a limit denied, `UNAVAILABLE` in an outage, `PERMISSION_DENIED`
/// for a refusal with 402 or 403, `UNAUTHENTICATED` or `INVALID_ARGUMENT` where the client sent no
/// identifier, and `INTERNAL` where the service is at fault.
///
/// The HTTP status is 200, as gRPC demands, and the body is empty.
#[derive(Clone, Copy, Debug, Default)]
pub struct Grpc;

impl<B: Default> Answer<B> for Grpc {
    fn answer(&self, rejection: &Rejection) -> Response<B> {
        let (code, message) = match rejection.reason {
            Reason::QuotaExceeded | Reason::AbnormalUsage => {
                (Code::ResourceExhausted, "rate limit exceeded")
            }
            Reason::ReducedCapacity => (Code::Unavailable, "temporarily reduced capacity"),
            Reason::Unidentified if rejection.status == StatusCode::UNAUTHORIZED => {
                (Code::Unauthenticated, "the caller is not identified")
            }
            Reason::Unidentified => (Code::InvalidArgument, "the caller is not identified"),
            Reason::Refused => (refused_by(rejection.status), "the request is refused"),
            Reason::Misconfigured => (Code::Internal, "internal error"),
        };
        let wait = rejection.retry_after.filter(|_| code == Code::ResourceExhausted);
        let status = match wait {
            None => Status::new(code, message),
            wait => Status::with_error_details(code, message, ErrorDetails::with_retry_info(wait)),
        };
        status.into_http()
    }
}

/// The code for a refusal with this status: the mapping of `google/rpc/code.proto`, backwards.
const fn refused_by(status: StatusCode) -> Code {
    match status.as_u16() {
        401 => Code::Unauthenticated,
        402 | 403 => Code::PermissionDenied,
        404 => Code::NotFound,
        429 => Code::ResourceExhausted,
        503 => Code::Unavailable,
        500..=599 => Code::Internal,
        _ => Code::InvalidArgument,
    }
}
