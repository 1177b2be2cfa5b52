//! [`WaitLayer`]: a client that waits before each request.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::{Response, StatusCode};
use ratelimit_core::{Algorithm, Identifiers, Policy, Store};
use tower_layer::Layer;
use tower_service::Service;

use super::{WaitError, Waiter};
use crate::fields::advice::Advice;
use crate::{BoxFuture, take_ready};

/// Makes the requests of a client wait until its own limits admit them, such as those of an API of another service.
///
/// It limits requests of any type. The function tells by which key a request is limited.
///
/// ```
/// # use std::time::Duration;
/// # use ratelimit_core::*;
/// # use http::Request;
/// use ratelimit_tower::{WaitLayer, Waiter};
///
/// # fn example<S: Store<Policy> + 'static>(limiter: RateLimiter<S>) {
/// let by_host = |request: &Request<String>| request.uri().host().unwrap_or_default().to_owned();
/// let layer = WaitLayer::new(Waiter::new(limiter), by_host, Duration::from_secs(30));
/// # }
/// ```
pub struct WaitLayer<S, F, A = Policy, H = IgnoreAnswers> {
    waiter: Waiter<S, A>,
    caller: F,
    max_wait: Duration,
    hold_back: H,
}

impl<S: Store<A>, F, A: Algorithm> WaitLayer<S, F, A> {
    /// A layer that waits for at most this long per request.
    #[must_use]
    pub const fn new(waiter: Waiter<S, A>, caller: F, max_wait: Duration) -> Self {
        Self { waiter, caller, max_wait, hold_back: IgnoreAnswers }
    }
}

impl<S: Store<A>, F, A: Algorithm, H> WaitLayer<S, F, A, H> {
    /// The same layer, which heeds what the other service answers: after a 429 or 503 that tells a wait, in `Retry-After` or in the
    /// `RateLimit` fields, the following requests of the same key [wait until then](Waiter::hold_back).
    ///
    /// The denied response itself is handed on. A retry around this layer sends the request again when its turn comes.
    ///
    /// It is off by default, because the key decides who waits. If all requests to a host have one key and the service limits one route
    /// of it, one denial holds back the requests to all routes.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ratelimit_core::*;
    /// # use http::Request;
    /// use ratelimit_tower::{WaitLayer, Waiter};
    ///
    /// # fn example<S: Store<Policy> + 'static>(waiter: Waiter<S>) {
    /// let by_host = |request: &Request<String>| request.uri().host().unwrap_or_default().to_owned();
    /// let layer = WaitLayer::new(waiter, by_host, Duration::from_secs(30)).heed_answers();
    /// # }
    /// ```
    #[must_use]
    pub fn heed_answers(self) -> WaitLayer<S, F, A, HeedAnswers> {
        self.hold_back_by(HeedAnswers)
    }

    /// The same layer, where this function tells from a response for how long the following requests of the same key are held back:
    /// for responses that are not HTTP, or rules of another service.
    #[must_use]
    pub fn hold_back_by<H2>(self, hold_back: H2) -> WaitLayer<S, F, A, H2> {
        let Self { waiter, caller, max_wait, .. } = self;
        WaitLayer { waiter, caller, max_wait, hold_back }
    }
}

/// Tells from a response for how long the following requests of the same key are held back: [`HeedAnswers`], [`IgnoreAnswers`], or a
/// function.
#[diagnostic::on_unimplemented(
    message = "`{Self}` does not tell from `{Response}` for how long requests are held back",
    note = "`heed_answers()` needs responses of the type `http::Response`; for others, pass \
            `.hold_back_by(|response: &YourResponse| -> Option<Duration> {{ … }})`"
)]
pub trait HoldBack<Response>: Send + Sync {
    /// For how long; `None` for not at all.
    fn hold_back(&self, response: &Response) -> Option<Duration>;
}

impl<Response, H> HoldBack<Response> for H
where
    H: Fn(&Response) -> Option<Duration> + Send + Sync,
{
    fn hold_back(&self, response: &Response) -> Option<Duration> {
        self(response)
    }
}

/// No response holds requests back.
#[derive(Clone, Copy, Debug, Default)]
pub struct IgnoreAnswers;

impl<Response> HoldBack<Response> for IgnoreAnswers {
    fn hold_back(&self, _: &Response) -> Option<Duration> {
        None
    }
}

/// A 429 or 503 holds requests back for as long as its [`Advice`] says.
#[derive(Clone, Copy, Debug, Default)]
pub struct HeedAnswers;

impl<B> HoldBack<Response<B>> for HeedAnswers {
    fn hold_back(&self, response: &Response<B>) -> Option<Duration> {
        match response.status() {
            StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                Advice::from_headers(response.headers()).wait()
            }
            _ => None,
        }
    }
}

impl<S, F: Clone, A, H: Clone> Clone for WaitLayer<S, F, A, H> {
    fn clone(&self) -> Self {
        Self {
            waiter: self.waiter.clone(),
            caller: self.caller.clone(),
            max_wait: self.max_wait,
            hold_back: self.hold_back.clone(),
        }
    }
}

impl<S, F, A, H> fmt::Debug for WaitLayer<S, F, A, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitLayer").field("max_wait", &self.max_wait).finish_non_exhaustive()
    }
}

impl<Svc, S, F: Clone, A, H: Clone> Layer<Svc> for WaitLayer<S, F, A, H> {
    type Service = WaitService<Svc, S, F, A, H>;

    fn layer(&self, inner: Svc) -> Self::Service {
        WaitService { inner, shared: Arc::new(self.clone()) }
    }
}

/// A service that waits before each request. See [`WaitLayer`].
pub struct WaitService<Svc, S, F, A = Policy, H = IgnoreAnswers> {
    inner: Svc,
    shared: Arc<WaitLayer<S, F, A, H>>,
}

impl<Svc: Clone, S, F, A, H> Clone for WaitService<Svc, S, F, A, H> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: self.shared.clone() }
    }
}

impl<Svc: fmt::Debug, S, F, A, H> fmt::Debug for WaitService<Svc, S, F, A, H> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitService").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// The error of a [`WaitService`].
#[derive(Debug, thiserror::Error)]
pub enum WaitServiceError<E, W> {
    /// The request was not sent.
    #[error(transparent)]
    Wait(WaitError<W>),
    /// The inner service's error.
    #[error(transparent)]
    Inner(E),
}

impl<Svc, S, F, A, H, C, Request> Service<Request> for WaitService<Svc, S, F, A, H>
where
    Svc: Service<Request> + Clone + Send + 'static,
    Svc::Future: Send,
    Request: Send + 'static,
    S: Store<A> + 'static,
    A: Algorithm + 'static,
    F: Fn(&Request) -> C + Send + Sync + 'static,
    C: Identifiers + Send + Sync + 'static,
    H: HoldBack<Svc::Response> + 'static,
{
    type Response = Svc::Response;
    type Error = WaitServiceError<Svc::Error, S::Error>;
    type Future = BoxFuture<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(WaitServiceError::Inner)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        let mut ready = take_ready(&mut self.inner);
        let shared = self.shared.clone();
        Box::pin(async move {
            let caller = (shared.caller)(&request);
            let waited = shared.waiter.until_allowed(&caller, shared.max_wait).await;
            waited.map_err(WaitServiceError::Wait)?;
            let response = ready.call(request).await.map_err(WaitServiceError::Inner)?;
            if let Some(wait) = shared.hold_back.hold_back(&response) {
                shared.waiter.hold_back(&caller, wait);
            }
            Ok(response)
        })
    }
}
