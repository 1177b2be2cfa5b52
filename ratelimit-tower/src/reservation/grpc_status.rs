//! The status of HTTP that the code of a gRPC response stands for.

use http::header::{CONTENT_TYPE, HeaderMap};
use http::{Response, StatusCode};

/// Whether the code of a response comes in its trailers.
pub(super) fn is_in_trailers<B>(response: &Response<B>) -> bool {
    let kind = response.headers().get(CONTENT_TYPE);
    let is_grpc = kind.is_some_and(|kind| kind.as_bytes().starts_with(b"application/grpc"));
    is_grpc && of_fields(response.headers()).is_none()
}

/// The status of a response, by its code where it has one.
pub(super) fn status_of<B>(response: &Response<B>) -> StatusCode {
    of_fields(response.headers()).unwrap_or_else(|| response.status())
}

/// What `grpc-status` stands for: the mapping of `google/rpc/code.proto`. 499 is no status of
/// HTTP's own: the client left.
pub(super) fn of_fields(fields: &HeaderMap) -> Option<StatusCode> {
    let code: u16 = fields.get("grpc-status")?.to_str().ok()?.parse().ok()?;
    let status = match code {
        0 => 200,
        1 => 499,
        3 | 9 | 11 => 400,
        4 => 504,
        5 => 404,
        6 | 10 => 409,
        7 => 403,
        8 => 429,
        12 => 501,
        14 => 503,
        16 => 401,
        _ => 500,
    };
    StatusCode::from_u16(status).ok()
}
