//! How a layer reserves, and settles with the response.

use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::{Extensions, Response, StatusCode};
use ratelimit_core::algorithm::Quota;
use ratelimit_core::store::Reservation as Core;
use ratelimit_core::{Limit, LimitCosts, RateLimiter, Reserved, Store};
use tokio::runtime::Handle;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

use super::open::{Counted, OpenReservation, Settled};
use super::{Hold, Meter, Reserving, SettledBody, grpc_status};
use crate::caller::IdentifiedCaller;
use crate::decisions::Decisions;
use crate::fields::BusyWait;
use crate::gate::{Deciding, Gate, Terms};
use crate::mode::{GateResult, Grant, LayerMode, Sealed};

#[allow(private_interfaces, reason = "in methods that the documentation hides")]
impl<S: Store<A> + 'static, A: Quota + 'static> LayerMode<S, A> for Reserving {
    type Grant = Underway;

    fn exempt(&self) -> Underway {
        Underway { mode: self.clone(), reservation: None }
    }

    async fn decide(
        &self,
        gate: &Gate<S, A>,
        limiter: &Arc<RateLimiter<S, A>>,
        caller: IdentifiedCaller<'_>,
        terms: Terms<A>,
    ) -> GateResult<Underway> {
        let counted = Counted {
            sources: caller.sources.clone(),
            values: caller.values.clone(),
            _token: self.settlements.0.token(),
        };
        let estimate = terms.costs.clone().max(&LimitCosts::from(1));
        let numbers = terms.numbers.clone();
        let reserved = match &terms.least {
            None => limiter.reserve_by(numbers, counted, estimate).await,
            Some(least) => {
                limiter.reserve_up_to_by(numbers, counted, estimate, least.clone()).await
            }
        };
        let decided = match &reserved {
            Ok(Reserved::Granted(reservation)) => Ok(reservation.verdict()),
            Ok(Reserved::Denied(verdict)) => Ok(verdict),
            Err(failed) => Err(&failed.error),
        };
        let admitted = gate.judge(Deciding::new(limiter, &terms), caller, decided)?;
        let mut underway = LayerMode::<S, A>::exempt(self);
        if let Ok(Reserved::Granted(owned)) = reserved {
            let log = gate.config.log.clone();
            let first = limiter.limits().iter().next().map_or("", Limit::name).to_owned();
            owned.on_error(move |error| {
                if let Some(requests) = log.unsettled.count_request(&first) {
                    tracing::warn!(%error, requests, "a reservation was not settled");
                }
            });
            let told: Arc<OnceLock<Box<Settled>>> = Arc::default();
            let (of, numbers, tells) = (limiter.clone(), terms.numbers.clone(), told.clone());
            owned.on_settled(move |verdict| {
                if let Some(told) = tells.get() {
                    let deciding = Deciding { limiter: &of, numbers: numbers.as_deref() };
                    told(&Decisions::from_named(deciding.named(verdict)));
                }
            });
            let algorithms = || limiter.limits().iter().map(Limit::algorithm);
            let tells_hold_time = gate.config.fields.busy_wait == BusyWait::Estimated;
            let shortest_us = algorithms().filter_map(A::reservation_us).min();
            let life = Duration::from_micros(shortest_us.unwrap_or(Core::LIFE_US));
            let runtime = Handle::try_current().ok().filter(|_| !owned.verdict().is_unrecorded());
            underway.reservation = Some(Arc::new_cyclic(|open| OpenReservation {
                settles: Mutex::new(Box::new(owned)),
                by_handler: OnceLock::new(),
                by_response: Meter::default(),
                told,
                is_lease: algorithms().any(A::has_leases),
                since: tells_hold_time.then(|| (Instant::now(), gate.config.hold_time.clone())),
                _renewals: runtime.map(|runtime| {
                    let log = gate.config.log.clone();
                    let renewals = OpenReservation::renewals(open.clone(), life, log);
                    AbortOnDropHandle::new(runtime.spawn(renewals))
                }),
            }));
        }
        Ok((admitted, underway))
    }
}

/// What is known of a request that the service answers. No reservation if it is exempt, or if the
/// store could not decide.
pub struct Underway {
    mode: Reserving,
    reservation: Option<Arc<OpenReservation>>,
}

impl Sealed for Reserving {}
impl Sealed for Underway {}

impl Grant for Underway {
    type Body<B> = SettledBody<B>;

    /// Gives the handler its extensions. A request without a reservation has them too, so that a
    /// handler can rely on them.
    fn begin(&mut self, request: &mut Extensions) {
        let meter = request.get_or_insert_default::<Meter>().clone();
        let hold = request.get_or_insert_default::<Hold>();
        if let Some(reservation) = &self.reservation {
            if !self.mode.charge.unmetered {
                reservation.by_handler.get_or_init(|| meter);
            }
            hold.0.push(Arc::downgrade(reservation));
        }
    }

    /// The response, whose body settles the reservation.
    fn end<B, E>(self, response: Result<Response<B>, E>) -> Result<Response<SettledBody<B>>, E> {
        let Self { mode, reservation } = self;
        // An error of the service is a 500 that another layer makes.
        let status =
            response.as_ref().map_or(StatusCode::INTERNAL_SERVER_ERROR, grpc_status::status_of);
        let (cost, counts_bytes) = mode.charge.cost_for(status, response.is_err());
        if let Some(reservation) = &reservation {
            cost.inspect(|cost| reservation.by_response.set(*cost));
            if status == StatusCode::SWITCHING_PROTOCOLS
                && reservation.is_lease
                && Arc::strong_count(reservation) == 1
                && !mode.said_unheld.swap(true, Ordering::Relaxed)
            {
                tracing::warn!(
                    "a connection is upgraded and its place given back; keep the place by the extension `Hold`"
                );
            }
        }
        let response = response?;
        let by_trailers = grpc_status::is_in_trailers(&response).then_some(mode.charge);
        Ok(response.map(|body| SettledBody { body, reservation, counts_bytes, by_trailers }))
    }
}
