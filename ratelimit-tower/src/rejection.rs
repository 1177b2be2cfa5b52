//! [`Rejection`] and [`Answer`]: the response to a request that is not admitted.

use std::borrow::Cow;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue};
use http::{Response, StatusCode};
use serde::Serialize;

/// Why a request is not admitted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// A limit denied it: 429.
    QuotaExceeded,
    /// A limit denied it whose denials mean [abnormal usage](crate::Fields::abnormal_usage): 429.
    AbnormalUsage,
    /// The store could not decide, or the policy for an outage refuses: 503.
    ReducedCapacity,
    /// The client did not send what identifies it: 400 or 401.
    Unidentified,
    /// It is [refused](crate::IdentifyError::refused) with a status of its own, such as 402 or 403.
    Refused,
    /// The service is configured wrongly: 500. The log has the reason, the response does not.
    Misconfigured,
}

impl Reason {
    /// Whether limits denied the request, or would have.
    const fn is_denial(self) -> bool {
        matches!(self, Self::QuotaExceeded | Self::AbnormalUsage | Self::ReducedCapacity)
    }
}

/// An extension of an answer: limits denied the request. The fields of the answer are theirs alone,
/// whatever layers are around.
#[derive(Clone, Copy)]
pub(crate) struct LimitDenial;

/// A request that is not admitted, for an [`Answer`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Rejection {
    /// Why the request is not admitted.
    pub reason: Reason,
    /// The status of the answer.
    pub status: StatusCode,
    /// The names of the limits that denied the request, or that could not be decided, as clients
    /// know them: without [hidden](crate::Fields::hide) ones.
    pub violated_policies: Vec<Box<str>>,
    /// How long until the same request is admitted. `None` if that is never, or not known.
    pub retry_after: Option<Duration>,
    /// Details for the client beside the reason, such as the header that it did not send.
    pub detail: Option<Cow<'static, str>>,
    /// The fields that the layer adds to the answer, unless the answer has fields of these names:
    /// `Retry-After`, `RateLimit`, `RateLimit-Policy`, `WWW-Authenticate`.
    pub headers: HeaderMap,
}

impl Rejection {
    /// Boxed, because few requests have one and every decision would move it.
    pub(crate) fn new(reason: Reason) -> Box<Self> {
        let status = match reason {
            Reason::QuotaExceeded | Reason::AbnormalUsage => StatusCode::TOO_MANY_REQUESTS,
            Reason::ReducedCapacity => StatusCode::SERVICE_UNAVAILABLE,
            Reason::Unidentified | Reason::Refused => StatusCode::BAD_REQUEST,
            Reason::Misconfigured => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Box::new(Self {
            reason,
            status,
            violated_policies: Vec::new(),
            retry_after: None,
            detail: None,
            headers: HeaderMap::new(),
        })
    }

    /// The answer, with its fields.
    pub(crate) fn answer<B>(self, answer: &impl Answer<B>) -> Response<B> {
        let mut response = answer.answer(&self);
        if self.reason.is_denial() {
            response.extensions_mut().insert(LimitDenial);
        }
        // A field that the answer has by itself replaces that of the layer.
        let own = std::mem::replace(response.headers_mut(), self.headers);
        response.headers_mut().extend(own);
        response
    }
}

/// Makes the answer to a request that is not admitted.
///
/// [`ProblemJson`] is the default and [`Grpc`](crate::Grpc) serves tonic. A function or closure is
/// an answer, too:
///
/// ```
/// use http::Response;
/// use ratelimit_tower::Rejection;
///
/// let plain = |rejection: &Rejection| {
///     let mut response = Response::new(format!("sorry: {}", rejection.status));
///     *response.status_mut() = rejection.status;
///     response
/// };
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` makes no answer with a body of type `{B}`",
    note = "`ProblemJson` needs a body that is `From<Bytes>`, as axum's is, and `Grpc` one that is `Default`, as tonic's is",
    note = "for any other body, pass `.answer(|rejection: &Rejection| -> Response<YourBody> {{ … }})`"
)]
pub trait Answer<B>: Send + Sync {
    /// The answer. The layer adds [`Rejection::headers`].
    fn answer(&self, rejection: &Rejection) -> Response<B>;
}

impl<B, F: Fn(&Rejection) -> Response<B> + Send + Sync> Answer<B> for F {
    fn answer(&self, rejection: &Rejection) -> Response<B> {
        self(rejection)
    }
}

/// Answers with `application/problem+json` (RFC 9457) and the problem types of the `RateLimit`
/// draft.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProblemJson;

/// The members of a problem, in the order of RFC 9457.
#[derive(Serialize)]
struct ProblemBody<'a> {
    r#type: &'static str,
    title: &'a str,
    status: u16,
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<&'a str>,
    #[serde(rename = "violated-policies", skip_serializing_if = "<[_]>::is_empty")]
    violated_policies: &'a [Box<str>],
}

impl<B: From<Bytes>> Answer<B> for ProblemJson {
    fn answer(&self, rejection: &Rejection) -> Response<B> {
        let (kind, title) = match rejection.reason {
            Reason::QuotaExceeded => (
                "https://iana.org/assignments/http-problem-types#quota-exceeded",
                "Request cannot be satisfied as assigned quota has been exceeded",
            ),
            Reason::AbnormalUsage => (
                "https://iana.org/assignments/http-problem-types#abnormal-usage-detected",
                "Request not satisfied due to detection of abnormal request pattern",
            ),
            Reason::ReducedCapacity => (
                "https://iana.org/assignments/http-problem-types#temporary-reduced-capacity",
                "Request cannot be satisfied due to temporary server capacity constraints",
            ),
            Reason::Unidentified | Reason::Refused | Reason::Misconfigured => {
                ("about:blank", rejection.status.canonical_reason().unwrap_or("Error"))
            }
        };
        let problem = ProblemBody {
            r#type: kind,
            title,
            status: rejection.status.as_u16(),
            detail: rejection.detail.as_deref(),
            violated_policies: &rejection.violated_policies,
        };
        // Writing strings and numbers to memory cannot fail.
        let body = serde_json::to_vec(&problem).unwrap_or_default();
        let mut response = Response::new(B::from(Bytes::from(body)));
        *response.status_mut() = rejection.status;
        let json = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(CONTENT_TYPE, json);
        response
    }
}
