//! [`ReservationService`], which a [`ReservationLayer`](super::ReservationLayer) makes.

use std::fmt;
use std::future::{Future, ready};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{self, Context, Poll};
use std::time::Duration;

use http::{Request, Response, StatusCode};
use pin_project_lite::pin_project;
use ratelimit_core::{Limit, Quota, RateLimiter, Reservation as Core, Reserved, Store};
use tower_service::Service;

use super::open::{Counted, Life, Owned, Reservation};
use super::{Charge, Hold, Meter, Open, ReservationLayer, Settlements};
use crate::body::SettledBody;
use crate::caller::{Caller, Values};
use crate::config::{Arrival, Gate};
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
    settlements: Settlements,
    /// Whether the log says that a connection was upgraded without a [`Hold`].
    said_unheld: AtomicBool,
}

impl<Svc, S: Store<A>, A: Quota + 'static, R> ReservationService<Svc, S, A, R> {
    pub(super) fn new(inner: Svc, layer: ReservationLayer<S, A, R>) -> Self {
        let ReservationLayer { config, answer, charge, settlements } = layer;
        let (gate, said_unheld) = (Gate::new(config), false.into());
        let shared = Shared { gate, answer, charge, settlements, said_unheld };
        Self { inner, shared: Arc::new(shared) }
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
    granted: Option<Granted<S, A>>,
}

type Granted<S, A> = (Owned<S, A>, Life);

/// What is known of a request that the service answers.
struct Underway<S, A>
where
    S: Store<A> + 'static,
    A: Quota + 'static,
{
    told: Option<Told>,
    reservation: Option<Arc<Reservation<S, A>>>,
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
            Arrival::Exempt => Box::pin(ready(Ok(Admitted { told: None, granted: None }))),
            Arrival::Refused(rejection) => Box::pin(ready(Err(rejection))),
            Arrival::Identified(asked) => {
                let limiter = asked.limiter.into_owned();
                Box::pin(async move { shared.reserve(limiter, asked.values, asked.cost).await })
            }
            Arrival::Identifying(limiter, cost, found) => Box::pin(async move {
                let values = found.await.map_err(|error| shared.gate.unidentified(error))?;
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
        let sources = Counted::new(self.gate.sources().clone(), self.settlements.one());
        let caller = Caller { sources, values };
        let reserved = limiter.reserve_owned(caller.clone(), cost).await;
        let decided = match &reserved {
            Ok(Reserved::Granted(reservation)) => Ok(reservation.verdict()),
            Ok(Reserved::Denied(verdict)) => Ok(verdict),
            Err(error) => Err(error),
        };
        let told = self.gate.judge(&limiter, &caller, decided)?;
        let granted = match reserved {
            Ok(Reserved::Granted(reservation)) => Some((reservation, life(&limiter))),
            _ => None,
        };
        Ok(Admitted { told, granted })
    }

    /// Gives the handler its extensions. A request without a reservation has them too, so that a handler can rely on them.
    fn begin<B>(&self, admitted: Admitted<S, A>, request: &mut Request<B>) -> Underway<S, A> {
        let Admitted { told, granted } = admitted;
        let extensions = request.extensions_mut();
        let meter = extensions.get_or_insert_default::<Meter>();
        let meter = (!self.charge.unmetered).then(|| meter.clone());
        let hold = extensions.get_or_insert_default::<Hold>();
        let reservation = granted.map(|(owned, life)| {
            Arc::new(Reservation::new(owned, meter, life, self.gate.hold_time()))
        });
        if let Some(reservation) = &reservation {
            hold.also(reservation);
        }
        Underway { told, reservation }
    }
}

/// How long a reservation of these limits lives: as long as the shortest of their leases.
fn life<S: Store<A>, A: Quota>(limiter: &RateLimiter<S, A>) -> Life {
    let algorithms = || limiter.limits().iter().map(Limit::algorithm);
    let shortest_us = algorithms().filter_map(A::reservation_us).min();
    Life {
        length: Duration::from_micros(shortest_us.unwrap_or(Core::LIFE_US)),
        is_lease: algorithms().any(A::has_leases),
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
        Responding { #[pin] response: F, underway: Option<Underway<S, A>> },
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
                            let underway = Some(this.shared.begin(admitted, &mut request));
                            State::Responding { response: service.call(request), underway }
                        }
                        (Err(rejection), _) => {
                            this.state.set(State::Done);
                            let answer = rejection.answer(&this.shared.answer);
                            return Poll::Ready(Ok(answer.map(SettledBody::from)));
                        }
                        (Ok(_), None) => State::Done,
                    }
                }
                StateProjection::Responding { response, underway } => {
                    let response = task::ready!(response.poll(cx));
                    let underway = underway.take();
                    this.state.set(State::Done);
                    return Poll::Ready(this.shared.settle(response, underway));
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
        underway: Option<Underway<S, A>>,
    ) -> Result<Response<SettledBody<B>>, E> {
        let Underway { told, reservation } =
            underway.unwrap_or(Underway { told: None, reservation: None });
        // An error of the service is a 500 that another layer makes.
        let status = response.as_ref().map_or(StatusCode::INTERNAL_SERVER_ERROR, Response::status);
        if let Some(reservation) = &reservation {
            let estimate = reservation.estimate();
            reservation.set_cost(match &response {
                Ok(_) => self.charge.of(status, estimate),
                Err(_) if self.charge.is_free(status) => (0, false),
                Err(_) => (estimate, false),
            });
        }
        if let Some(reservation) = &reservation
            && status == StatusCode::SWITCHING_PROTOCOLS
            && reservation.is_lease()
            && Arc::strong_count(reservation) == 1
            && !self.said_unheld.swap(true, Ordering::Relaxed)
        {
            tracing::warn!(
                "a connection is upgraded and its place given back; keep the place by the extension `Hold`"
            );
        }
        let mut response = response?;
        if let Some(told) = told {
            told.add_to(&mut response);
        }
        let reservation = reservation.map(|reservation| -> Arc<dyn Open> { reservation });
        Ok(response.map(|body| SettledBody::new(body, reservation)))
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
