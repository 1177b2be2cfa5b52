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

use crate::caller::{Caller, Sources, Values};
use crate::config::{Arrival, Config, Gate};
use crate::fields::Told;
use crate::layer::{Awaited, Immediate};
use crate::rejection::{Answer, Rejection};
use crate::{BoxFuture, take_ready};

/// A service behind limits. See [`RateLimitLayer`](crate::RateLimitLayer).
pub struct RateLimitService<Svc, S, A, R, M = Awaited> {
    inner: Svc,
    shared: Arc<Shared<S, A, R>>,
    mode: PhantomData<fn() -> M>,
}

/// What clones of a service share.
struct Shared<S, A, R> {
    gate: Gate<S, A>,
    answer: R,
}

impl<Svc, S: Store<A>, A: Quota + 'static, R, M> RateLimitService<Svc, S, A, R, M> {
    pub(crate) fn new(inner: Svc, config: Config<S, A>, answer: R) -> Self {
        let shared = Shared { gate: Gate::new(config), answer };
        Self { inner, shared: Arc::new(shared), mode: PhantomData }
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
        caller: &Caller<&Sources>,
        cost: u64,
    ) -> Option<Result<Verdict, S::Error>>;
}

impl<S: Store<A>, A: Quota> Mode<S, A> for Awaited {
    #[allow(private_interfaces, reason = "the trait is sealed")]
    fn decide(
        _: &RateLimiter<S, A>,
        _: &Caller<&Sources>,
        _: u64,
    ) -> Option<Result<Verdict, S::Error>> {
        None
    }
}

impl<S: SyncStore<A>, A: Quota> Mode<S, A> for Immediate {
    #[allow(private_interfaces, reason = "the trait is sealed")]
    fn decide(
        limiter: &RateLimiter<S, A>,
        caller: &Caller<&Sources>,
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
        let Shared { gate, answer } = &*self.shared;
        let told = match gate.arrive(&mut parts) {
            Arrival::Exempt => Ok(None),
            Arrival::Refused(rejection) => Err(rejection),
            Arrival::Identified(asked) => {
                let caller = gate.caller(asked.values);
                if let Some(decided) = M::decide(&asked.limiter, &caller, asked.cost) {
                    gate.judge(&asked.limiter, &caller, decided.as_ref())
                } else {
                    let (limiter, values) = (asked.limiter.into_owned(), caller.values);
                    let deciding = decide(self.shared.clone(), limiter, values, asked.cost);
                    return self.deciding(Box::pin(deciding), Request::from_parts(parts, body));
                }
            }
            Arrival::Identifying(limiter, cost, found) => {
                let shared = self.shared.clone();
                let deciding = async move {
                    match found.await {
                        Ok(values) => decide(shared, limiter, values, cost).await,
                        Err(error) => Err((shared.gate.unidentified(error), shared)),
                    }
                };
                return self.deciding(Box::pin(deciding), Request::from_parts(parts, body));
            }
        };
        ResponseFuture {
            state: match told {
                Ok(told) => {
                    let response = self.inner.call(Request::from_parts(parts, body));
                    State::Responding { response, told }
                }
                Err(rejection) => State::Answered { response: Some(rejection.answer(answer)) },
            },
        }
    }
}

/// Asks the store.
async fn decide<S: Store<A>, A: Quota + 'static, R>(
    shared: Arc<Shared<S, A, R>>,
    limiter: Arc<RateLimiter<S, A>>,
    values: Values,
    cost: u64,
) -> Decided<S, A, R> {
    let caller = shared.gate.caller(values);
    let decided = limiter.request(&caller).cost(cost).acquire().await;
    let judged = shared.gate.judge(&limiter, &caller, decided.as_ref());
    judged.map_err(|rejection| (rejection, shared))
}

/// What is told of an admitted request; a rejection, with what makes its answer.
type Decided<S, A, R> = Result<Option<Told>, (Rejection, Arc<Shared<S, A, R>>)>;
type Deciding<S, A, R> = BoxFuture<Decided<S, A, R>>;

impl<Svc: Clone, S, A, R, M> RateLimitService<Svc, S, A, R, M> {
    /// Waits for the decision with the service that is ready.
    fn deciding<ReqBody, ResBody>(
        &mut self,
        decision: Deciding<S, A, R>,
        request: Request<ReqBody>,
    ) -> ResponseFuture<Svc, S, A, R, ReqBody, ResBody>
    where
        Svc: Service<Request<ReqBody>, Response = Response<ResBody>>,
    {
        let then = Some((take_ready(&mut self.inner), request));
        ResponseFuture { state: State::Deciding { decision, then } }
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
        state: State<Svc, Svc::Future, S, A, R, ReqBody, ResBody>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<Svc, F, S, A, R, ReqBody, ResBody> {
        /// The decision is waited for, and this service is called then.
        Deciding { decision: Deciding<S, A, R>, then: Option<(Svc, Request<ReqBody>)> },
        /// The service answers.
        Responding { #[pin] response: F, told: Option<Told> },
        /// The layer has answered.
        Answered { response: Option<Response<ResBody>> },
    }
}

impl<Svc, S, A, R, ReqBody, ResBody> Future for ResponseFuture<Svc, S, A, R, ReqBody, ResBody>
where
    Svc: Service<Request<ReqBody>, Response = Response<ResBody>>,
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
                            State::Responding { response: service.call(request), told }
                        }
                        (Err((rejection, shared)), _) => {
                            State::Answered { response: Some(rejection.answer(&shared.answer)) }
                        }
                        // It was taken when the decision was ready, and this state left.
                        (Ok(_), None) => return Poll::Pending,
                    }
                }
                StateProjection::Responding { response, told } => {
                    let mut response = ready!(response.poll(cx))?;
                    if let Some(told) = told.take() {
                        told.add_to(&mut response);
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
