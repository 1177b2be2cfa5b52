//! [`Identify`]: where the identifiers of a request come from.
//!
//! A limit whose identifiers are absent does not apply. That is right for an optional identifier
//! and wrong for a misspelt one, so the layer compares the names, and refuses with 500 if no source
//! provides an identifier.

use std::borrow::Cow;
use std::fmt;
use std::future::Future;

use compact_str::{CompactString, ToCompactString};
use derive_where::derive_where;
use http::StatusCode;
use http::header::{HeaderName, HeaderValue};
use http::request::Parts;

use crate::BoxFuture;

#[cfg(feature = "axum")]
pub(crate) mod axum;

/// The value of one identifier, such as an address or a user's name. A short one is kept without an
/// allocation.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
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

/// Why a request has no identifier, or is refused otherwise before a limit decides. It is never
/// unlimited.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IdentifyError {
    /// The service is at fault: an extension is missing, or a look-up failed. The answer is 500,
    /// and the reason is logged; clients do not see it.
    #[error("{0}")]
    NotWired(Cow<'static, str>),
    /// The client did not send what identifies it.
    #[error("{what}")]
    Missing {
        /// What is missing, for the client.
        what: Cow<'static, str>,
        /// The `WWW-Authenticate` field of a 401. Without one, the answer is 400.
        challenge: Option<HeaderValue>,
    },
    /// The client is known, and its request is refused: a customer has not paid (402), or is
    /// blocked (403).
    #[error("{what}")]
    Refused {
        /// Why, for the client.
        what: Cow<'static, str>,
        /// The status of the answer.
        status: StatusCode,
    },
}

impl IdentifyError {
    /// The service is at fault; the text, which goes to the log, names the remedy.
    #[must_use]
    pub fn not_wired(what: impl Into<Cow<'static, str>>) -> Self {
        Self::NotWired(what.into())
    }

    /// The client did not send this; the answer is 400.
    #[must_use]
    pub fn missing(what: impl Into<Cow<'static, str>>) -> Self {
        Self::Missing { what: what.into(), challenge: None }
    }

    /// The request is refused with this status, and the text is for the client.
    ///
    /// ```
    /// use http::StatusCode;
    /// use ratelimit_tower::IdentifyError;
    ///
    /// let unpaid = IdentifyError::refused(StatusCode::PAYMENT_REQUIRED, "the subscription has ended");
    /// ```
    #[must_use]
    pub fn refused(status: StatusCode, what: impl Into<Cow<'static, str>>) -> Self {
        Self::Refused { what: what.into(), status }
    }
}

/// An identifier, or why there is none. `None` means that the request has none and needs none:
/// limits that count by it do not apply, and a request to which no limit applies is refused.
pub type Identified = Result<Option<Identifier>, IdentifyError>;

/// What [`Identify::identify`] returns.
#[derive_where(Debug)]
#[non_exhaustive]
pub enum Identification {
    /// The identifier is known.
    Now(Identified),
    /// The identifier has to be waited for.
    Later(#[derive_where(skip)] BoxFuture<'static, Identified>),
}

/// A source of an identifier: one of these, or a function.
///
/// | source | identifies by |
/// |---|---|
/// | [`ClientAddress`](crate::ClientAddress) | the address of the client |
/// | [`header`] | a header, such as an API key |
/// | [`extension`] | what an earlier layer left, such as an authenticated user |
/// | [`path_param`](crate::path_param), [`matched_route`](crate::matched_route) | axum's routes |
/// | [`method`] | the method |
/// | [`from_fn`], [`from_async_fn`] | a function |
/// | [`optional`], [`unauthorized`] | another source, where a request may lack it, or is answered with 401 |
#[diagnostic::on_unimplemented(
    message = "`{Self}` is no source of an identifier",
    note = "use `ClientAddress`, `header(..)`, `extension(..)`, `from_fn(..)` or another source of this crate"
)]
pub trait Identify: Send + Sync + 'static {
    /// The identifier of this request.
    fn identify(&self, request: &mut Parts) -> Identification;
}

impl<F: Fn(&mut Parts) -> Identification + Send + Sync + 'static> Identify for F {
    fn identify(&self, request: &mut Parts) -> Identification {
        self(request)
    }
}

/// Identifies by a header. A request without it is answered with 400, or 401 in [`unauthorized`].
///
/// A value that is no text (bytes beyond visible ASCII) counts as missing. If the client sends the
/// header several times, the first value counts.
#[must_use]
pub fn header(name: HeaderName) -> impl Identify + Clone {
    move |request: &mut Parts| {
        let value = request.headers.get(&name).and_then(|value| value.to_str().ok());
        let value = value.filter(|value| !value.is_empty()).map(|value| Some(value.into()));
        let missing = || IdentifyError::missing(format!("the request has no header {name}"));
        Identification::Now(value.ok_or_else(missing))
    }
}

/// Identifies by an extension of the request that an earlier layer inserted, such as the user that
/// authentication found.
///
/// A request without the extension is answered with 500, because the layer that inserts it does not
/// run before. If the layer lets anonymous requests pass, it inserts a value that says so, and the
/// function returns `None`.
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
pub fn extension<T, F>(identifier: F) -> impl Identify
where
    T: Send + Sync + 'static,
    F: Fn(&T) -> Option<Identifier> + Send + Sync + 'static,
{
    from_fn(move |request| match request.extensions.get::<T>() {
        Some(value) => Ok(identifier(value)),
        None => Err(IdentifyError::not_wired(format!(
            "the request has no extension {}; add the layer that inserts it outside of this one",
            std::any::type_name::<T>()
        ))),
    })
}

/// Identifies by the method: `GET`, `POST`.
///
/// All methods beyond those of RFC 9110 and `PATCH` are one identifier, `*`: a client that invents
/// methods gets no limit of its own for each.
#[must_use]
pub fn method() -> impl Identify {
    const REGISTERED: [&str; 9] =
        ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "CONNECT", "TRACE"];
    from_fn(|request| {
        let method = request.method.as_str();
        Ok(Some(if REGISTERED.contains(&method) { method } else { "*" }.into()))
    })
}

/// Identifies by what this function finds in the request.
#[must_use]
pub fn from_fn<F>(identify: F) -> impl Identify
where
    F: Fn(&Parts) -> Identified + Send + Sync + 'static,
{
    move |request: &mut Parts| Identification::Now(identify(request))
}

/// Identifies by what this function waits for, such as a look-up in a database. The future owns
/// what it needs of the request.
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
pub fn from_async_fn<F, T>(identify: F) -> impl Identify
where
    F: Fn(&Parts) -> T + Send + Sync + 'static,
    T: Future<Output = Identified> + Send + 'static,
{
    move |request: &mut Parts| Identification::Later(Box::pin(identify(request)))
}

/// The same source, for requests that may lack it: where the client did not send it, limits that
/// count by it do not apply. Another limit must apply then. A source that is not wired stays an
/// error.
#[must_use]
pub fn optional(source: impl Identify) -> impl Identify {
    where_missing(source, |_| Ok(None))
}

/// The same source; a request that lacks it is answered with 401 and this challenge, such as
/// `Bearer`.
#[must_use]
pub fn unauthorized(source: impl Identify, challenge: HeaderValue) -> impl Identify {
    where_missing(source, move |what| {
        Err(IdentifyError::Missing { what, challenge: Some(challenge.clone()) })
    })
}

/// The same source, with another answer where the client did not send the identifier.
fn where_missing<F>(source: impl Identify, instead: F) -> impl Identify
where
    F: Fn(Cow<'static, str>) -> Identified + Clone + Send + Sync + 'static,
{
    move |request: &mut Parts| {
        let instead = instead.clone();
        let lenient = move |found| match found {
            Err(IdentifyError::Missing { what, .. }) => instead(what),
            found => found,
        };
        match source.identify(request) {
            Identification::Now(found) => Identification::Now(lenient(found)),
            Identification::Later(found) => {
                Identification::Later(Box::pin(async move { lenient(found.await) }))
            }
        }
    }
}
