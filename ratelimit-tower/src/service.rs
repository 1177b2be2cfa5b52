//! [`RateLimitService`], which a [`RateLimitLayer`](crate::RateLimitLayer) makes.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use derive_where::derive_where;
use http::{Request, Response};
use pin_project_lite::pin_project;
use ratelimit_core::algorithm::Quota;
use ratelimit_core::{AnyAlgorithm, Store};
use tower_service::Service;

use crate::caller::Values;
use crate::fields::AnswerFields;
use crate::gate::{Admitted, Gate};
use crate::mode::{Awaited, Grant, LayerMode};
use crate::rejection::{Answer, ProblemJson, Rejection};
use crate::{BoxFuture, take_ready};

/// A service behind limits. See [`RateLimitLayer`](crate::RateLimitLayer).
///
/// A struct names the layer and the service by the store, and by what else is not the default:
///
/// ```
/// use http::{Response, StatusCode};
/// use ratelimit_core::AnyAlgorithm;
/// use ratelimit_memory::MemoryStore;
/// use ratelimit_tower::{RateLimitLayer, RateLimitService, Rejection};
///
/// struct Api<Svc> {
///     limits: RateLimitLayer<MemoryStore>,
///     service: RateLimitService<Svc, MemoryStore>,
/// }
///
/// type Plain = fn(&Rejection) -> Response<String>;
///
/// struct PlainApi<Svc> {
///     limits: RateLimitLayer<MemoryStore, AnyAlgorithm, Plain>,
///     service: RateLimitService<Svc, MemoryStore, AnyAlgorithm, Plain>,
/// }
///
/// # use ratelimit_core::{Gcra, Limits, RateLimiter};
/// # use tower_layer::Layer;
/// # fn example(limiter: RateLimiter<MemoryStore>) {
/// let plain: Plain = |rejection| {
///     let mut response = Response::new("come back later".to_owned());
///     *response.status_mut() = rejection.status;
///     response
/// };
/// let limits = RateLimitLayer::new(limiter);
/// let api = Api { service: limits.layer("a service"), limits };
/// let limits = api.limits.clone().answer(plain);
/// let plain_api = PlainApi { service: limits.layer("a service"), limits };
/// # let (_, _) = (api.service, plain_api.service);
/// # }
/// ```
#[derive_where(Clone, Debug; Svc)]
pub struct RateLimitService<Svc, S, A = AnyAlgorithm, R = ProblemJson, M = Awaited> {
    pub(crate) inner: Svc,
    #[derive_where(skip(Debug))]
    pub(crate) shared: Arc<Shared<S, A, R, M>>,
}

/// What clones of a service share.
pub(crate) struct Shared<S, A, R, M> {
    pub(crate) gate: Gate<S, A>,
    pub(crate) answer: R,
    pub(crate) mode: M,
}

impl<Svc, S, A, R, M, ReqBody, ResBody> Service<Request<ReqBody>>
    for RateLimitService<Svc, S, A, R, M>
where
    Svc: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store<A> + 'static,
    A: Quota + 'static,
    R: Answer<ResBody> + 'static,
    M: LayerMode<S, A>,
    ResBody: 'static,
{
    type Response = Response<<M::Grant as Grant>::Body<ResBody>>;
    type Error = Svc::Error;
    type Future = ResponseFuture<Svc, M::Grant, ReqBody, ResBody>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let Shared { gate, answer, mode } = &*self.shared;
        let mut values = Values::new();
        let decided = match gate.arrive(&mut parts, &mut values) {
            Err(rejection) => Err(rejection),
            Ok(None) => Ok((gate.undecided(), mode.exempt())),
            Ok(Some((limiter, terms, later))) => {
                let now = match later {
                    None => M::decide_now(gate, &limiter, gate.caller(&values), &terms),
                    Some(_) => None,
                };
                let Some(decided) = now else {
                    let (shared, limiter) = (self.shared.clone(), limiter.into_owned());
                    // Captures each value once: beyond 1 kB the allocator leaves its fast path.
                    let decision = Box::pin(async move {
                        let answer =
                            |rejection: Box<Rejection>| Box::new(rejection.answer(&shared.answer));
                        if let Some(later) = later {
                            match later.await {
                                Ok(found) => values = found,
                                Err(error) => return Err(answer(shared.gate.unidentified(error))),
                            }
                        }
                        let caller = shared.gate.caller(&values);
                        let decided =
                            shared.mode.decide(&shared.gate, &limiter, caller, terms).await;
                        decided.map_err(answer)
                    });
                    let request = Request::from_parts(parts, body);
                    let then = Some((take_ready(&mut self.inner), request));
                    return ResponseFuture { state: ResponseState::Deciding { decision, then } };
                };
                decided
            }
        };
        let request = Request::from_parts(parts, body);
        let state = match decided {
            Ok(admitted) => ResponseState::responding(&mut self.inner, request, admitted),
            Err(rejection) => ResponseState::Answered { response: Some(rejection.answer(answer)) },
        };
        ResponseFuture { state }
    }
}

/// An admitted request and what it holds, or the answer to one that is refused.
type Deciding<G, B> = BoxFuture<'static, Result<(Admitted, G), Box<Response<B>>>>;

pin_project! {
    /// The response of a [`RateLimitService`].
    #[must_use = "futures do nothing unless polled"]
    pub struct ResponseFuture<Svc, G, ReqBody, ResBody>
    where
        Svc: Service<Request<ReqBody>>,
    {
        #[pin]
        state: ResponseState<Svc, Svc::Future, G, ReqBody, ResBody>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum ResponseState<Svc, F, G, ReqBody, ResBody> {
        /// The decision is waited for, and this service is called then.
        Deciding { decision: Deciding<G, ResBody>, then: Option<(Svc, Request<ReqBody>)> },
        /// The service answers. Dropped now, a reservation is settled at the estimate.
        Responding { #[pin] response: F, told: Option<AnswerFields>, grant: Option<G> },
        /// The layer has answered, or the future has.
        Answered { response: Option<Response<ResBody>> },
    }
}

impl<Svc, G, ReqBody, ResBody> ResponseState<Svc, Svc::Future, G, ReqBody, ResBody>
where
    Svc: Service<Request<ReqBody>>,
    G: Grant,
{
    /// Calls the service, which is ready.
    fn responding(
        service: &mut Svc,
        mut request: Request<ReqBody>,
        (Admitted { told, decisions }, mut grant): (Admitted, G),
    ) -> Self {
        if let Some(decisions) = decisions {
            decisions.add_to(request.extensions_mut());
        }
        grant.begin(request.extensions_mut());
        Self::Responding { response: service.call(request), told, grant: Some(grant) }
    }
}

impl<Svc, G, ReqBody, ResBody> Future for ResponseFuture<Svc, G, ReqBody, ResBody>
where
    Svc: Service<Request<ReqBody>, Response = Response<ResBody>>,
    G: Grant,
{
    type Output = Result<Response<G::Body<ResBody>>, Svc::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProjection::Deciding { decision, then } => {
                    match (ready!(decision.as_mut().poll(cx)), then.take()) {
                        (Ok(admitted), Some((mut service, request))) => {
                            ResponseState::responding(&mut service, request, admitted)
                        }
                        (decided, _) => ResponseState::Answered {
                            response: decided.err().map(|answer| *answer),
                        },
                    }
                }
                StateProjection::Responding { response, told, grant } => {
                    let mut response = ready!(response.poll(cx));
                    if let (Ok(response), Some(told)) = (&mut response, told.take()) {
                        told.add_to(response);
                    }
                    // Polled again after it was ready: a future need not answer then.
                    let Some(grant) = grant.take() else { return Poll::Pending };
                    return Poll::Ready(grant.end(response));
                }
                StateProjection::Answered { response } => {
                    let Some(response) = response.take() else { return Poll::Pending };
                    return Poll::Ready(Ok(response.map(G::Body::from)));
                }
            };
            this.state.set(next);
        }
    }
}
