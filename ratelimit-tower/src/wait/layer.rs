//! [`WaitLayer`]: a client that waits before each request.

use std::fmt;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use ratelimit_core::{Algorithm, Identifiers, Policy, Store};
use tower_layer::Layer;
use tower_service::Service;

use super::{WaitError, Waiter};
use crate::BoxFuture;

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
pub struct WaitLayer<S, F, A = Policy> {
    waiter: Waiter<S, A>,
    caller: F,
    max_wait: Duration,
}

impl<S: Store<A>, F, A: Algorithm> WaitLayer<S, F, A> {
    /// A layer that waits for at most this long per request.
    #[must_use]
    pub const fn new(waiter: Waiter<S, A>, caller: F, max_wait: Duration) -> Self {
        Self { waiter, caller, max_wait }
    }
}

impl<S, F: Clone, A> Clone for WaitLayer<S, F, A> {
    fn clone(&self) -> Self {
        Self { waiter: self.waiter.clone(), caller: self.caller.clone(), max_wait: self.max_wait }
    }
}

impl<S, F, A> fmt::Debug for WaitLayer<S, F, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WaitLayer").field("max_wait", &self.max_wait).finish_non_exhaustive()
    }
}

impl<Svc, S, F: Clone, A> Layer<Svc> for WaitLayer<S, F, A> {
    type Service = WaitService<Svc, S, F, A>;

    fn layer(&self, inner: Svc) -> Self::Service {
        WaitService { inner, shared: Arc::new(self.clone()) }
    }
}

/// A service that waits before each request. See [`WaitLayer`].
pub struct WaitService<Svc, S, F, A = Policy> {
    inner: Svc,
    shared: Arc<WaitLayer<S, F, A>>,
}

impl<Svc: Clone, S, F, A> Clone for WaitService<Svc, S, F, A> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: self.shared.clone() }
    }
}

impl<Svc: fmt::Debug, S, F, A> fmt::Debug for WaitService<Svc, S, F, A> {
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

impl<Svc, S, F, A, C, Request> Service<Request> for WaitService<Svc, S, F, A>
where
    Svc: Service<Request> + Clone + Send + 'static,
    Svc::Future: Send,
    Request: Send + 'static,
    S: Store<A> + 'static,
    A: Algorithm + 'static,
    F: Fn(&Request) -> C + Send + Sync + 'static,
    C: Identifiers + Send + Sync + 'static,
{
    type Response = Svc::Response;
    type Error = WaitServiceError<Svc::Error, S::Error>;
    type Future = BoxFuture<Result<Self::Response, Self::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx).map_err(WaitServiceError::Inner)
    }

    fn call(&mut self, request: Request) -> Self::Future {
        // The service that is ready is called; its clone has to become ready first.
        let clone = self.inner.clone();
        let mut ready = std::mem::replace(&mut self.inner, clone);
        let shared = self.shared.clone();
        Box::pin(async move {
            let caller = (shared.caller)(&request);
            let waited = shared.waiter.until_allowed(&caller, shared.max_wait).await;
            waited.map_err(WaitServiceError::Wait)?;
            ready.call(request).await.map_err(WaitServiceError::Inner)
        })
    }
}
