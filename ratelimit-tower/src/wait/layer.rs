//! [`WaitLayer`]: a client that waits before each request.

use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use derive_where::derive_where;
use http::{Response, StatusCode};
use ratelimit_core::{Algorithm, AnyAlgorithm, Identifiers, Store};
use tower_layer::Layer;
use tower_service::Service;

use super::{WaitError, Waiter};
use crate::fields::advice::Advice;
use crate::log::LogLines;
use crate::{BoxFuture, take_ready};

/// Makes the requests of a client wait until its own limits admit them, such as those of an API of
/// another service.
///
/// It limits requests of any type. The function returns the key of a request.
///
/// [`heed_answers`](Self::heed_answers) and [`adopt_answers`](Self::adopt_answers) are for services
/// whose response is an [`http::Response`]. One with a response of its own, such as
/// `reqwest::Client`, is converted below the layer:
/// `client.map_response(http::Response::<reqwest::Body>::from)`, by `tower::ServiceExt`.
///
/// ```
/// # use std::time::Duration;
/// # use ratelimit_core::*;
/// # use http::{Request, Response};
/// use ratelimit_tower::{WaitLayer, Waiter};
///
/// # fn example<S: Store<AnyAlgorithm> + 'static>(limiter: RateLimiter<S>) {
/// let by_host = |request: &Request<String>| request.uri().host().unwrap_or_default().to_owned();
/// let layer = WaitLayer::new(Waiter::new(limiter), by_host, Duration::from_secs(30));
/// # let _: WaitLayer<_, _, Response<String>> = layer;
/// # }
/// ```
#[derive_where(Clone; F)]
#[derive_where(Debug)]
pub struct WaitLayer<S, F, Res, A = AnyAlgorithm> {
    waiter: Waiter<S, A>,
    #[derive_where(skip(Debug))]
    caller: F,
    max_wait: Duration,
    #[derive_where(skip(Debug))]
    hold_back: Option<Arc<HoldBack<Res>>>,
    #[derive_where(skip(Debug))]
    adopts: Option<fn(&Res) -> Advice>,
    #[derive_where(skip(Debug))]
    unadopted: Arc<LogLines>,
    #[derive_where(skip(Debug))]
    unshared: Arc<LogLines>,
}

/// Tells from a response for how long the following requests of the same key are held back.
type HoldBack<Res> = dyn Fn(&Res) -> Option<Duration> + Send + Sync;

impl<S: Store<A>, F, Res, A: Algorithm> WaitLayer<S, F, Res, A> {
    /// A layer that waits for at most this long per request.
    #[must_use]
    pub fn new(waiter: Waiter<S, A>, caller: F, max_wait: Duration) -> Self {
        let (unadopted, unshared) = Default::default();
        Self { waiter, caller, max_wait, hold_back: None, adopts: None, unadopted, unshared }
    }

    /// The same layer, where this function returns, from a response, for how long later requests of
    /// the same key are delayed: for responses that are not HTTP, or rules of another service.
    #[must_use]
    pub fn hold_back_by(
        mut self,
        hold_back: impl Fn(&Res) -> Option<Duration> + Send + Sync + 'static,
    ) -> Self {
        self.hold_back = Some(Arc::new(hold_back));
        self
    }
}

impl<S: Store<A>, F, B, A: Algorithm> WaitLayer<S, F, Response<B>, A> {
    /// The same layer, which heeds the answers of the other service: after a 429 or 503 with a
    /// wait, in `Retry-After` or in the fields that [`Advice`] reads, and after a 403 with one,
    /// which GitHub answers, later requests of the same key [wait until then](Waiter::hold_back).
    /// With [shared holds](Waiter::shared_holds), those of other processes do so too; if the store
    /// cannot, the log says so, at most once per second.
    ///
    /// The denied response itself is handed on. A retry around this layer sends the request again
    /// when its turn comes.
    ///
    /// It is off by default, because the key decides who waits. If all requests to a host have one
    /// key and the service limits one route of it, one denial holds back the requests to all
    /// routes.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use ratelimit_core::*;
    /// # use http::{Request, Response};
    /// use ratelimit_tower::{WaitLayer, Waiter};
    ///
    /// # fn example<S: Store<AnyAlgorithm> + 'static>(waiter: Waiter<S>) {
    /// let by_host = |request: &Request<String>| request.uri().host().unwrap_or_default().to_owned();
    /// let layer = WaitLayer::new(waiter, by_host, Duration::from_secs(30)).heed_answers();
    /// # let _: WaitLayer<_, _, Response<String>> = layer;
    /// # }
    /// ```
    #[must_use]
    pub fn heed_answers(self) -> Self {
        self.hold_back_by(|response| match response.status() {
            StatusCode::TOO_MANY_REQUESTS
            | StatusCode::SERVICE_UNAVAILABLE
            | StatusCode::FORBIDDEN => Advice::from_headers(response.headers()).wait(),
            _ => None,
        })
    }

    /// The same layer, which [adopts](Waiter::adopt) what the answers of the other service say
    /// remains, before it hands them on. If the store cannot, the log says so, at most once per
    /// second.
    #[must_use]
    pub fn adopt_answers(mut self) -> Self {
        self.adopts = Some(|response| Advice::from_headers(response.headers()));
        self
    }
}

impl<Svc, S, F: Clone, Res, A> Layer<Svc> for WaitLayer<S, F, Res, A> {
    type Service = WaitService<Svc, S, F, Res, A>;

    fn layer(&self, inner: Svc) -> Self::Service {
        WaitService { inner, shared: Arc::new(self.clone()) }
    }
}

/// A service that waits before each request. See [`WaitLayer`].
#[derive_where(Clone, Debug; Svc)]
pub struct WaitService<Svc, S, F, Res, A = AnyAlgorithm> {
    inner: Svc,
    #[derive_where(skip(Debug))]
    shared: Arc<WaitLayer<S, F, Res, A>>,
}

/// The error of a [`WaitService`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitServiceError<E, W> {
    /// The request was not sent.
    #[error(transparent)]
    Wait(WaitError<W>),
    /// The inner service's error.
    #[error(transparent)]
    Inner(E),
}

impl<Svc, S, F, Res, A, C, Request> Service<Request> for WaitService<Svc, S, F, Res, A>
where
    Svc: Service<Request, Response = Res, Future: Send> + Clone + Send + 'static,
    Request: Send + 'static,
    Res: Send + 'static,
    S: Store<A> + 'static,
    A: Algorithm + 'static,
    F: Fn(&Request) -> C + Send + Sync + 'static,
    C: Identifiers + Send + Sync + 'static,
{
    type Response = Res;
    type Error = WaitServiceError<Svc::Error, S::Error>;
    type Future = BoxFuture<'static, Result<Res, Self::Error>>;

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
            let told = shared.hold_back.as_ref().and_then(|told_by| told_by(&response));
            if let Some(wait) = told
                && let Err(error) = shared.waiter.hold_back_all(&caller, wait).await
                && let Some(requests) = shared.unshared.count_request("")
            {
                tracing::warn!(%error, requests, "other processes are not told to hold back requests");
            }
            if let Some(advice) = shared.adopts.map(|advice_of| advice_of(&response))
                && let Err(error) = shared.waiter.adopt(&caller, &advice).await
                && let Some(requests) = shared.unadopted.count_request("")
            {
                tracing::warn!(%error, requests, "what another service says remains is not adopted");
            }
            Ok(response)
        })
    }
}
