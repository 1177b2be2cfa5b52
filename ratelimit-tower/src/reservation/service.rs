//! [`ReservationService`], which a [`ReservationLayer`](super::ReservationLayer) makes.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use http::{Request, Response, StatusCode};
use pin_project_lite::pin_project;
use ratelimit_core::{Quota, Reserved, Store};
use tower_service::Service;

use super::{Charge, Meter, Pending};
use crate::BoxFuture;
use crate::body::SettledBody;
use crate::config::{Arrival, Asked, Config, Told};
use crate::rejection::{Answer, Rejection};

/// A service whose requests reserve their cost. See [`ReservationLayer`](super::ReservationLayer).
pub struct ReservationService<Svc, S, A, R> {
    inner: Svc,
    shared: Arc<Shared<S, A, R>>,
}

struct Shared<S, A, R> {
    config: Config<S, A>,
    answer: R,
    charge: Charge,
}

impl<Svc, S, A, R> ReservationService<Svc, S, A, R> {
    pub(super) fn new(inner: Svc, config: Config<S, A>, answer: R, charge: Charge) -> Self {
        Self { inner, shared: Arc::new(Shared { config, answer, charge }) }
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
    told: Option<Told<S, A>>,
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
        let arrival = self.shared.config.arrive(&mut parts);
        let shared = self.shared.clone();
        let decision = Box::pin(async move {
            let asked = match arrival {
                Arrival::Exempt => return Ok(Admitted { told: None, pending: None }),
                Arrival::Refused(rejection) => return Err(rejection),
                Arrival::Identified(asked) => asked,
                Arrival::Identifying(limiter, cost, found) => {
                    let caller = found.await.map_err(Rejection::unidentified)?;
                    Asked { limiter, caller, cost }
                }
            };
            reserve(&shared.config, asked).await
        });
        // The service that is ready is called; its clone has to become ready first.
        let clone = self.inner.clone();
        let ready = std::mem::replace(&mut self.inner, clone);
        let request = Request::from_parts(parts, body);
        let state = State::Reserving { decision, then: Some((ready, request)) };
        ReservationFuture { state, shared: self.shared.clone() }
    }
}

async fn reserve<S: Store<A> + 'static, A: Quota + 'static>(
    config: &Config<S, A>,
    asked: Asked<S, A>,
) -> Result<Admitted<S, A>, Rejection> {
    match asked.limiter.reserve_owned(asked.caller.clone(), asked.cost).await {
        Ok(Reserved::Granted(reservation)) => {
            let verdict = reservation.verdict().clone();
            let pending = Pending { reservation, meter: Meter::default(), counts_bytes: false };
            let told = config.judge(asked, Ok(verdict))?;
            Ok(Admitted { told: Some(told), pending: Some(pending) })
        }
        Ok(Reserved::Denied(verdict)) => {
            let told = config.judge(asked, Ok(verdict))?;
            Ok(Admitted { told: Some(told), pending: None })
        }
        Err(error) => {
            let told = config.judge(asked, Err(error))?;
            Ok(Admitted { told: Some(told), pending: None })
        }
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
                    match (ready!(decision.as_mut().poll(cx)), then.take()) {
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
                    let response = ready!(response.poll(cx));
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
            told.write(&self.config.fields, response.headers_mut());
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
