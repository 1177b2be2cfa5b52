//! [`Identify`]: where the identifiers of a request come from.

use std::borrow::Cow;
use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;

use compact_str::{CompactString, ToCompactString};
use http::header::{HeaderName, HeaderValue};
use http::request::Parts;
use http::{Method, StatusCode};

#[cfg(feature = "axum")]
pub(crate) mod axum;

/// The value of one identifier, such as an address or a user's name. A short one is kept without an allocation.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Identifier(CompactString);

impl Identifier {
    /// The text that this value displays.
    #[must_use]
    pub fn display(value: impl fmt::Display) -> Self {
        Self(value.to_compact_string())
    }

    /// The text.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Identifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.as_str().fmt(f)
    }
}

impl From<&str> for Identifier {
    fn from(text: &str) -> Self {
        Self(text.into())
    }
}

impl From<String> for Identifier {
    fn from(text: String) -> Self {
        Self(text.into())
    }
}

/// Why a request has no identifier. Either way it is refused, and never unlimited.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentifyError {
    /// The service is at fault: an extension is missing, or a look-up failed. The answer is 500, and the reason is logged;
    /// clients do not see it.
    #[error("{0}")]
    NotWired(Cow<'static, str>),
    /// The client did not send what identifies it.
    #[error("{what}")]
    Missing {
        /// The status of the answer, such as 400 or 401.
        status: StatusCode,
        /// What is missing, for the client.
        what: Cow<'static, str>,
        /// The `WWW-Authenticate` field of a 401.
        challenge: Option<HeaderValue>,
    },
}

impl IdentifyError {
    /// The service is at fault; the text goes to the log and says what to do.
    #[must_use]
    pub fn not_wired(what: impl Into<Cow<'static, str>>) -> Self {
        Self::NotWired(what.into())
    }

    /// The client did not send this; the answer is 400.
    #[must_use]
    pub fn missing(what: impl Into<Cow<'static, str>>) -> Self {
        Self::Missing { status: StatusCode::BAD_REQUEST, what: what.into(), challenge: None }
    }

    /// The client did not say who it is; the answer is 401 with this challenge in `WWW-Authenticate`.
    #[must_use]
    pub fn unauthorized(what: impl Into<Cow<'static, str>>, challenge: HeaderValue) -> Self {
        let status = StatusCode::UNAUTHORIZED;
        Self::Missing { status, what: what.into(), challenge: Some(challenge) }
    }
}

/// An identifier, or why there is none. `None` means that the request has none and needs none: limits that are kept by it do not
/// apply, and a request to which no limit applies is refused.
pub type Identified = Result<Option<Identifier>, IdentifyError>;

/// What [`Identify::identify`] returns.
pub enum Found {
    /// The identifier is known.
    Now(Identified),
    /// The identifier has to be waited for.
    Later(Pin<Box<dyn Future<Output = Identified> + Send>>),
}

impl fmt::Debug for Found {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Now(found) => f.debug_tuple("Now").field(found).finish(),
            Self::Later(_) => f.write_str("Later"),
        }
    }
}

/// A source of an identifier.
///
/// | source | identifies by |
/// |---|---|
/// | [`ClientAddress`](crate::ClientAddress) | the address of the client |
/// | [`header`] | a header, such as an API key |
/// | [`extension`] | what an earlier layer left, such as an authenticated user |
/// | [`path_param`](crate::path_param), [`matched_route`](crate::matched_route) | axum's routes |
/// | [`method`] | the method |
/// | [`from_fn`], [`from_async_fn`] | a function |
/// | [`optional`] | another source, where a request may lack it |
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no source of an identifier",
    note = "use `ClientAddress`, `header(..)`, `extension(..)`, `from_fn(..)` or another source of this crate"
)]
pub trait Identify: Send + Sync + 'static {
    /// The identifier of this request.
    fn identify(&self, request: &mut Parts) -> Found;
}

/// Identifies by a header. A request without it is answered with 400, or 401 after [`unauthorized`](Header::unauthorized).
///
/// A value that is no text (bytes beyond visible ASCII) counts as missing. If the client sends the header several times, the first
/// value counts.
#[must_use]
pub const fn header(name: HeaderName) -> Header {
    Header { name, challenge: None }
}

/// See [`header`].
#[derive(Clone, Debug)]
pub struct Header {
    name: HeaderName,
    challenge: Option<HeaderValue>,
}

impl Header {
    /// The same source; a request without the header is answered with 401 and this challenge, such as `Bearer`.
    #[must_use]
    pub fn unauthorized(mut self, challenge: HeaderValue) -> Self {
        self.challenge = Some(challenge);
        self
    }
}

impl Identify for Header {
    fn identify(&self, request: &mut Parts) -> Found {
        let value = request.headers.get(&self.name).and_then(|value| value.to_str().ok());
        Found::Now(match value {
            Some(value) if !value.is_empty() => Ok(Some(value.into())),
            _ => {
                let what = format!("the request has no header {}", self.name);
                Err(match &self.challenge {
                    Some(challenge) => IdentifyError::unauthorized(what, challenge.clone()),
                    None => IdentifyError::missing(what),
                })
            }
        })
    }
}

/// Identifies by an extension of the request that an earlier layer inserted, such as the user that authentication found.
///
/// A request without the extension is answered with 500, because the layer that inserts it does not run before. If the layer lets
/// anonymous requests pass, it inserts a value that says so, and the function returns `None`.
///
/// ```
/// use ratelimit_tower::extension;
///
/// #[derive(Clone)]
/// struct User { name: String }
///
/// let by_user = extension(|user: &User| Some(user.name.as_str().into()));
/// ```
#[must_use]
pub fn extension<T, F>(identifier: F) -> Extension<T, F>
where
    T: Send + Sync + 'static,
    F: Fn(&T) -> Option<Identifier> + Send + Sync + 'static,
{
    Extension { identifier, of: PhantomData }
}

/// See [`extension`].
#[derive(Clone, Copy)]
pub struct Extension<T, F> {
    identifier: F,
    of: PhantomData<fn(&T)>,
}

impl<T, F> fmt::Debug for Extension<T, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Extension<{}>", std::any::type_name::<T>())
    }
}

impl<T, F> Identify for Extension<T, F>
where
    T: Send + Sync + 'static,
    F: Fn(&T) -> Option<Identifier> + Send + Sync + 'static,
{
    fn identify(&self, request: &mut Parts) -> Found {
        Found::Now(match request.extensions.get::<T>() {
            Some(value) => Ok((self.identifier)(value)),
            None => Err(IdentifyError::not_wired(format!(
                "the request has no extension {}; add the layer that inserts it outside of this one",
                std::any::type_name::<T>()
            ))),
        })
    }
}

/// Identifies by the method: `GET`, `POST`.
///
/// All methods beyond those of RFC 9110 and `PATCH` are one identifier, `*`: a client that invents methods gets no limit of its own
/// for each.
#[must_use]
pub fn method() -> impl Identify {
    const REGISTERED: [Method; 9] = [
        Method::GET,
        Method::HEAD,
        Method::POST,
        Method::PUT,
        Method::PATCH,
        Method::DELETE,
        Method::OPTIONS,
        Method::CONNECT,
        Method::TRACE,
    ];
    from_fn(|request| {
        let known = REGISTERED.contains(&request.method);
        Ok(Some(if known { request.method.as_str() } else { "*" }.into()))
    })
}

/// Identifies by what this function finds in the request.
#[must_use]
pub fn from_fn<F>(identify: F) -> FromFn<F>
where
    F: Fn(&Parts) -> Identified + Send + Sync + 'static,
{
    FromFn { identify }
}

/// See [`from_fn`].
#[derive(Clone, Copy)]
pub struct FromFn<F> {
    identify: F,
}

impl<F> fmt::Debug for FromFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FromFn")
    }
}

impl<F: Fn(&Parts) -> Identified + Send + Sync + 'static> Identify for FromFn<F> {
    fn identify(&self, request: &mut Parts) -> Found {
        Found::Now((self.identify)(request))
    }
}

/// Identifies by what this function waits for, such as a look-up in a database. The future owns what it needs of the request.
///
/// ```
/// use ratelimit_tower::{IdentifyError, from_async_fn};
///
/// async fn tenant_of(host: Option<String>) -> Result<String, std::io::Error> {
/// #   Ok(host.unwrap_or_default())
/// }
///
/// let by_tenant = from_async_fn(|request| {
///     let host = request.uri.host().map(str::to_owned);
///     async move {
///         let tenant = tenant_of(host).await;
///         tenant.map(|name| Some(name.into())).map_err(|e| IdentifyError::not_wired(e.to_string()))
///     }
/// });
/// ```
#[must_use]
pub fn from_async_fn<F, T>(identify: F) -> FromAsyncFn<F>
where
    F: Fn(&Parts) -> T + Send + Sync + 'static,
    T: Future<Output = Identified> + Send + 'static,
{
    FromAsyncFn { identify }
}

/// See [`from_async_fn`].
#[derive(Clone, Copy)]
pub struct FromAsyncFn<F> {
    identify: F,
}

impl<F> fmt::Debug for FromAsyncFn<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("FromAsyncFn")
    }
}

impl<F, T> Identify for FromAsyncFn<F>
where
    F: Fn(&Parts) -> T + Send + Sync + 'static,
    T: Future<Output = Identified> + Send + 'static,
{
    fn identify(&self, request: &mut Parts) -> Found {
        Found::Later(Box::pin((self.identify)(request)))
    }
}

/// The same source, for requests that may lack it: where the client did not send it, limits that are kept by it do not apply.
/// Another limit must apply then. A source that is not wired stays an error.
#[must_use]
pub const fn optional<I: Identify>(source: I) -> Optional<I> {
    Optional { source }
}

/// See [`optional`].
#[derive(Clone, Copy, Debug)]
pub struct Optional<I> {
    source: I,
}

impl<I: Identify> Identify for Optional<I> {
    fn identify(&self, request: &mut Parts) -> Found {
        fn lenient(found: Identified) -> Identified {
            match found {
                Err(IdentifyError::Missing { .. }) => Ok(None),
                found => found,
            }
        }
        match self.source.identify(request) {
            Found::Now(found) => Found::Now(lenient(found)),
            Found::Later(found) => Found::Later(Box::pin(async move { lenient(found.await) })),
        }
    }
}
