//! [`RateLimitService`], which a [`RateLimitLayer`](crate::RateLimitLayer) makes.

use std::fmt;
use std::future::Future;
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response};
use pin_project_lite::pin_project;
use ratelimit_core::{Quota, RateLimiter, Store, SyncStore, Verdict};
use tower_service::Service;

use crate::BoxFuture;
use crate::caller::Caller;
use crate::config::{Arrival, Asked, Config, Told};
use crate::layer::{Awaited, Immediate};
use crate::rejection::{Answer, Rejection};

/// A service behind limits. See [`RateLimitLayer`](crate::RateLimitLayer).
pub struct RateLimitService<Svc, S, A, R, M = Awaited> {
    inner: Svc,
    shared: Arc<Shared<S, A, R>>,
    mode: PhantomData<fn() -> M>,
}

/// What clones of a service share.
struct Shared<S, A, R> {
    config: Config<S, A>,
    answer: R,
}

impl<Svc, S, A, R, M> RateLimitService<Svc, S, A, R, M> {
    pub(crate) fn new(inner: Svc, config: Config<S, A>, answer: R) -> Self {
        Self { inner, shared: Arc::new(Shared { config, answer }), mode: PhantomData }
    }
}

impl<Svc: Clone, S, A, R, M> Clone for RateLimitService<Svc, S, A, R, M> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: self.shared.clone(), mode: PhantomData }
    }
}

impl<Svc: fmt::Debug, S, A, R, M> fmt::Debug for RateLimitService<Svc, S, A, R, M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RateLimitService").field("inner", &self.inner).finish_non_exhaustive()
    }
}

mod sealed {
    pub trait Sealed {}
    impl Sealed for super::Awaited {}
    impl Sealed for super::Immediate {}
}

/// How the store is asked: [`Awaited`] or [`Immediate`].
pub trait Mode<S: Store<A>, A: Quota>: sealed::Sealed + 'static {
    /// The decision, if there is no need to wait for it.
    #[doc(hidden)]
    #[allow(private_interfaces, reason = "the trait is sealed")]
    fn decide(
        limiter: &RateLimiter<S, A>,
        caller: &Caller,
        cost: u64,
    ) -> Option<Result<Verdict, S::Error>>;
}

impl<S: Store<A>, A: Quota> Mode<S, A> for Awaited {
    #[allow(private_interfaces, reason = "the trait is sealed")]
    fn decide(_: &RateLimiter<S, A>, _: &Caller, _: u64) -> Option<Result<Verdict, S::Error>> {
        None
    }
}

impl<S: SyncStore<A>, A: Quota> Mode<S, A> for Immediate {
    #[allow(private_interfaces, reason = "the trait is sealed")]
    fn decide(
        limiter: &RateLimiter<S, A>,
        caller: &Caller,
        cost: u64,
    ) -> Option<Result<Verdict, S::Error>> {
        Some(limiter.check_n_now(caller, cost))
    }
}

impl<Svc, S, A, R, M, ReqBody, ResBody> Service<Request<ReqBody>>
    for RateLimitService<Svc, S, A, R, M>
where
    Svc: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store<A> + 'static,
    A: Quota + 'static,
    R: Answer<ResBody> + 'static,
    M: Mode<S, A>,
{
    type Response = Response<ResBody>;
    type Error = Svc::Error;
    type Future = ResponseFuture<Svc, S, A, R, ReqBody, ResBody>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let config = &self.shared.config;
        let (told, rejected) = match config.arrive(&mut parts) {
            Arrival::Exempt => (None, None),
            Arrival::Refused(rejection) => (None, Some(rejection)),
            Arrival::Identified(asked) => {
                let Some(decided) = M::decide(&asked.limiter, &asked.caller, asked.cost) else {
                    let deciding = decide(self.shared.clone(), asked);
                    return self.deciding(Box::pin(deciding), Request::from_parts(parts, body));
                };
                match config.judge(asked, decided) {
                    Ok(told) => (Some(told), None),
                    Err(rejection) => (None, Some(rejection)),
                }
            }
            Arrival::Identifying(limiter, cost, found) => {
                let shared = self.shared.clone();
                let deciding = async move {
                    let caller = found.await.map_err(Rejection::unidentified)?;
                    decide(shared, Asked { limiter, caller, cost }).await
                };
                return self.deciding(Box::pin(deciding), Request::from_parts(parts, body));
            }
        };
        let state = match rejected {
            Some(rejection) => {
                State::Answered { response: Some(rejection.answer(&self.shared.answer)) }
            }
            None => State::Responding {
                response: self.inner.call(Request::from_parts(parts, body)),
                told,
            },
        };
        ResponseFuture { state, shared: self.shared.clone() }
    }
}

/// Asks the store.
async fn decide<S: Store<A>, A: Quota + 'static, R>(
    shared: Arc<Shared<S, A, R>>,
    asked: Asked<S, A>,
) -> Result<Told<S, A>, Rejection> {
    let decided = asked.limiter.request(&asked.caller).cost(asked.cost).acquire().await;
    shared.config.judge(asked, decided)
}

type Deciding<S, A> = BoxFuture<Result<Told<S, A>, Rejection>>;

impl<Svc: Clone, S, A, R, M> RateLimitService<Svc, S, A, R, M> {
    /// Waits for the decision with the service that is ready, and leaves a clone in its place, which has to become ready first.
    fn deciding<ReqBody, ResBody>(
        &mut self,
        decision: Deciding<S, A>,
        request: Request<ReqBody>,
    ) -> ResponseFuture<Svc, S, A, R, ReqBody, ResBody>
    where
        Svc: Service<Request<ReqBody>, Response = Response<ResBody>>,
    {
        let clone = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, clone);
        let state = State::Deciding { decision, then: Some((ready, request)) };
        ResponseFuture { state, shared: self.shared.clone() }
    }
}

pin_project! {
    /// The response of a [`RateLimitService`].
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<Svc, S, A, R, ReqBody, ResBody>
    where
        Svc: Service<Request<ReqBody>>,
    {
        #[pin]
        state: State<Svc, Svc::Future, S, A, ReqBody, ResBody>,
        shared: Arc<Shared<S, A, R>>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<Svc, F, S, A, ReqBody, ResBody> {
        /// The decision is waited for, and this service is called then.
        Deciding { decision: Deciding<S, A>, then: Option<(Svc, Request<ReqBody>)> },
        /// The service answers.
        Responding { #[pin] response: F, told: Option<Told<S, A>> },
        /// The layer has answered.
        Answered { response: Option<Response<ResBody>> },
    }
}

impl<Svc, S, A, R, ReqBody, ResBody> Future for ResponseFuture<Svc, S, A, R, ReqBody, ResBody>
where
    Svc: Service<Request<ReqBody>, Response = Response<ResBody>>,
    A: Quota + 'static,
    R: Answer<ResBody>,
{
    type Output = Result<Response<ResBody>, Svc::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProjection::Deciding { decision, then } => {
                    let decided = ready!(decision.as_mut().poll(cx));
                    match (decided, then.take()) {
                        (Ok(told), Some((mut service, request))) => {
                            State::Responding { response: service.call(request), told: Some(told) }
                        }
                        (Err(rejection), _) => State::Answered {
                            response: Some(rejection.answer(&this.shared.answer)),
                        },
                        // It was taken when the decision was ready, and this state left.
                        (Ok(_), None) => return Poll::Pending,
                    }
                }
                StateProjection::Responding { response, told } => {
                    let mut response = ready!(response.poll(cx))?;
                    if let Some(told) = told.take() {
                        told.write(&this.shared.config.fields, response.headers_mut());
                    }
                    return Poll::Ready(Ok(response));
                }
                StateProjection::Answered { response } => {
                    // Polled again after it was ready: a future need not answer then.
                    let Some(response) = response.take() else { return Poll::Pending };
                    return Poll::Ready(Ok(response));
                }
            };
            this.state.set(next);
        }
    }
}

impl<Svc, S, A, R, ReqBody, ResBody> fmt::Debug for ResponseFuture<Svc, S, A, R, ReqBody, ResBody>
where
    Svc: Service<Request<ReqBody>>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
