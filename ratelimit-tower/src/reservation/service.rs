//! [`ReservationService`], which a [`ReservationLayer`](super::ReservationLayer) makes.

use std::fmt;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{self, Context, Poll};

use http::{Request, Response, StatusCode};
use pin_project_lite::pin_project;
use ratelimit_core::{Quota, RateLimiter, Reserved, Store};
use tower_service::Service;

use super::{Charge, Meter, Pending};
use crate::body::SettledBody;
use crate::caller::Values;
use crate::config::{Arrival, Config, Gate};
use crate::fields::Told;
use crate::rejection::{Answer, Rejection};
use crate::{BoxFuture, take_ready};

/// A service whose requests reserve their cost. See [`ReservationLayer`](super::ReservationLayer).
pub struct ReservationService<Svc, S, A, R> {
    inner: Svc,
    shared: Arc<Shared<S, A, R>>,
}

struct Shared<S, A, R> {
    gate: Gate<S, A>,
    answer: R,
    charge: Charge,
}

impl<Svc, S: Store<A>, A: Quota + 'static, R> ReservationService<Svc, S, A, R> {
    pub(super) fn new(inner: Svc, config: Config<S, A>, answer: R, charge: Charge) -> Self {
        Self { inner, shared: Arc::new(Shared { gate: Gate::new(config), answer, charge }) }
    }
}

impl<Svc: Clone, S, A, R> Clone for ReservationService<Svc, S, A, R> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), shared: self.shared.clone() }
    }
}

impl<Svc: fmt::Debug, S, A, R> fmt::Debug for ReservationService<Svc, S, A, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReservationService").field("inner", &self.inner).finish_non_exhaustive()
    }
}

/// What the request is admitted with. No reservation if it is exempt, or if the store could not decide.
struct Admitted<S, A>
where
    S: Store<A> + 'static,
    A: Quota + 'static,
{
    told: Option<Told>,
    pending: Option<Pending<S, A>>,
}

impl<Svc, S, A, R, ReqBody, ResBody> Service<Request<ReqBody>> for ReservationService<Svc, S, A, R>
where
    Svc: Service<Request<ReqBody>, Response = Response<ResBody>> + Clone,
    S: Store<A> + 'static,
    A: Quota + 'static,
    R: Answer<ResBody> + 'static,
{
    type Response = Response<SettledBody<ResBody>>;
    type Error = Svc::Error;
    type Future = ReservationFuture<Svc, S, A, R, ReqBody>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<ReqBody>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let shared = self.shared.clone();
        let decision: Reserving<S, A> = match self.shared.gate.arrive(&mut parts) {
            Arrival::Exempt => Box::pin(ready(Ok(Admitted { told: None, pending: None }))),
            Arrival::Refused(rejection) => Box::pin(ready(Err(rejection))),
            Arrival::Identified(asked) => {
                let limiter = asked.limiter.into_owned();
                Box::pin(async move { shared.reserve(limiter, asked.values, asked.cost).await })
            }
            Arrival::Identifying(limiter, cost, found) => Box::pin(async move {
                let values = found.await.map_err(Rejection::unidentified)?;
                shared.reserve(limiter, values, cost).await
            }),
        };
        let request = Request::from_parts(parts, body);
        let state =
            State::Reserving { decision, then: Some((take_ready(&mut self.inner), request)) };
        ReservationFuture { state, shared: self.shared.clone() }
    }
}

impl<S: Store<A> + 'static, A: Quota + 'static, R> Shared<S, A, R> {
    async fn reserve(
        &self,
        limiter: Arc<RateLimiter<S, A>>,
        values: Values,
        cost: u64,
    ) -> Result<Admitted<S, A>, Rejection> {
        let caller = self.gate.owned_caller(values);
        let reserved = limiter.reserve_owned(caller.clone(), cost).await;
        let decided = match &reserved {
            Ok(Reserved::Granted(reservation)) => Ok(reservation.verdict()),
            Ok(Reserved::Denied(verdict)) => Ok(verdict),
            Err(error) => Err(error),
        };
        let told = self.gate.judge(&limiter, &caller, decided)?;
        let pending = match reserved {
            Ok(Reserved::Granted(reservation)) => {
                Some(Pending { reservation, meter: Meter::default(), counts_bytes: false })
            }
            _ => None,
        };
        Ok(Admitted { told, pending })
    }
}

type Reserving<S, A> = BoxFuture<Result<Admitted<S, A>, Rejection>>;

pin_project! {
    /// The response of a [`ReservationService`].
    #[must_use = "futures do nothing unless polled"]
    pub struct ReservationFuture<Svc, S, A, R, ReqBody>
    where
        Svc: Service<Request<ReqBody>>,
        S: Store<A>,
        S: 'static,
        A: Quota,
        A: 'static,
    {
        #[pin]
        state: State<Svc, Svc::Future, S, A, ReqBody>,
        shared: Arc<Shared<S, A, R>>,
    }
}

pin_project! {
    #[project = StateProjection]
    enum State<Svc, F, S, A, ReqBody>
    where
        S: Store<A>,
        S: 'static,
        A: Quota,
        A: 'static,
    {
        /// The reservation is waited for, and this service is called then.
        Reserving { decision: Reserving<S, A>, then: Option<(Svc, Request<ReqBody>)> },
        /// The service answers. Dropped now, the reservation is settled at the estimate.
        Responding { #[pin] response: F, admitted: Option<Admitted<S, A>> },
        /// The future has answered.
        Done,
    }
}

impl<Svc, S, A, R, ReqBody, ResBody> Future for ReservationFuture<Svc, S, A, R, ReqBody>
where
    Svc: Service<Request<ReqBody>, Response = Response<ResBody>>,
    S: Store<A> + 'static,
    A: Quota + 'static,
    R: Answer<ResBody>,
{
    type Output = Result<Response<SettledBody<ResBody>>, Svc::Error>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        loop {
            let next = match this.state.as_mut().project() {
                StateProjection::Reserving { decision, then } => {
                    match (task::ready!(decision.as_mut().poll(cx)), then.take()) {
                        (Ok(admitted), Some((mut service, mut request))) => {
                            if let Some(pending) = &admitted.pending {
                                request.extensions_mut().insert(pending.meter.clone());
                            }
                            let response = service.call(request);
                            State::Responding { response, admitted: Some(admitted) }
                        }
                        (Err(rejection), _) => {
                            this.state.set(State::Done);
                            let answer = rejection.answer(&this.shared.answer);
                            return Poll::Ready(Ok(answer.map(SettledBody::from)));
                        }
                        (Ok(_), None) => State::Done,
                    }
                }
                StateProjection::Responding { response, admitted } => {
                    let response = task::ready!(response.poll(cx));
                    let admitted = admitted.take();
                    this.state.set(State::Done);
                    return Poll::Ready(this.shared.settle(response, admitted));
                }
                // Polled again after it was ready: a future need not answer then.
                StateProjection::Done => return Poll::Pending,
            };
            this.state.set(next);
        }
    }
}

impl<S: Store<A> + 'static, A: Quota + 'static, R> Shared<S, A, R> {
    /// The response, whose body settles the reservation.
    fn settle<B, E>(
        &self,
        response: Result<Response<B>, E>,
        admitted: Option<Admitted<S, A>>,
    ) -> Result<Response<SettledBody<B>>, E> {
        let Admitted { told, mut pending } =
            admitted.unwrap_or(Admitted { told: None, pending: None });
        // An error of the service is a 500 that another layer makes.
        let status = response.as_ref().map_or(StatusCode::INTERNAL_SERVER_ERROR, Response::status);
        if let Some(pending) = &mut pending {
            let estimate = pending.reservation.cost();
            let (cost, counts_bytes) = match &response {
                Ok(_) => self.charge.of(status, estimate),
                Err(_) if self.charge.is_free(status) => (0, false),
                Err(_) => (estimate, false),
            };
            pending.reservation.set_cost(cost);
            pending.counts_bytes = counts_bytes;
        }
        let mut response = response?;
        if let Some(told) = told {
            told.add_to(response.headers_mut());
        }
        let settlement = pending.map(|pending| -> Box<dyn super::Settlement> { Box::new(pending) });
        Ok(response.map(|body| SettledBody::new(body, settlement)))
    }
}

impl<Svc, S, A, R, ReqBody> fmt::Debug for ReservationFuture<Svc, S, A, R, ReqBody>
where
    Svc: Service<Request<ReqBody>>,
    S: Store<A>,
    A: Quota,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReservationFuture").finish_non_exhaustive()
    }
}
