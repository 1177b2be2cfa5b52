//! [`LayerMode`]: how the layer asks the store, and what an admitted request holds until it is
//! answered.
//!
//! Modes are types. The future of a store cannot be named, so it is boxed; a [`SyncStore`] decides
//! in `call`, and the response future then holds only the inner service's future. Settling with the
//! body needs a wrapper around it, so only a layer that reserves changes the type of the body.
#![allow(private_bounds, private_interfaces, reason = "in methods that the documentation hides")]

use std::future::Future;
use std::sync::Arc;

use http::{Extensions, Response};
use ratelimit_core::algorithm::Quota;
use ratelimit_core::{RateLimiter, Store, SyncStore};

use crate::caller::IdentifiedCaller;
use crate::gate::{Admitted, Deciding, Gate, Terms};
use crate::rejection::Rejection;

/// An admitted request, and what it holds.
pub(crate) type GateResult<G> = Result<(Admitted, G), Box<Rejection>>;

/// How a layer asks its store: [`Awaited`], [`Immediate`] or [`Reserving`](crate::Reserving). No
/// other type is one.
///
/// ```
/// # use ratelimit_core::{AnyAlgorithm, Store};
/// use ratelimit_tower::{LayerMode, ProblemJson, RateLimitLayer, RateLimitService};
/// use tower_layer::Layer;
///
/// fn limited<S, M, Svc>(
///     layer: &RateLimitLayer<S, AnyAlgorithm, ProblemJson, M>,
///     service: Svc,
/// ) -> RateLimitService<Svc, S, AnyAlgorithm, ProblemJson, M>
/// where
///     S: Store<AnyAlgorithm> + 'static,
///     M: LayerMode<S, AnyAlgorithm> + Clone,
/// {
///     layer.layer(service)
/// }
/// ```
pub trait LayerMode<S: Store<A>, A: Quota + 'static>: Sealed + Send + Sync + 'static {
    /// What an admitted request holds.
    type Grant: Grant;

    /// What a request holds that no limit decided.
    #[doc(hidden)]
    fn exempt(&self) -> Self::Grant;

    /// The decision, if there is no need to wait for it.
    #[doc(hidden)]
    #[inline]
    #[must_use]
    fn decide_now(
        _: &Gate<S, A>,
        _: &RateLimiter<S, A>,
        _: IdentifiedCaller<'_>,
        _: &Terms<A>,
    ) -> Option<GateResult<Self::Grant>> {
        None
    }

    /// Asks the store.
    #[doc(hidden)]
    fn decide(
        &self,
        gate: &Gate<S, A>,
        limiter: &Arc<RateLimiter<S, A>>,
        caller: IdentifiedCaller<'_>,
        terms: Terms<A>,
    ) -> impl Future<Output = GateResult<Self::Grant>> + Send {
        let grant = self.exempt();
        async move {
            let deciding = Deciding::new(limiter, &terms);
            let decided = deciding.request(&caller).costs(&terms.costs).check().await;
            Ok((gate.judge(deciding, caller, decided.as_ref())?, grant))
        }
    }
}

/// What an admitted request holds until it is answered: nothing, or a reservation. No other type
/// is one.
pub trait Grant: Sealed + Send + 'static {
    /// The body of the answer.
    type Body<B>: From<B>;

    /// The request goes to the service.
    #[doc(hidden)]
    fn begin(&mut self, request: &mut Extensions);

    /// The service has answered, or failed.
    ///
    /// # Errors
    /// That of the service.
    #[doc(hidden)]
    fn end<B, E>(self, response: Result<Response<B>, E>) -> Result<Response<Self::Body<B>>, E>;
}

pub(crate) use sealed::Sealed;

mod sealed {
    /// A type of this crate.
    pub trait Sealed {}
}

impl Sealed for () {}
impl Sealed for Awaited {}
impl Sealed for Immediate {}

/// Nothing is held.
impl Grant for () {
    type Body<B> = B;

    fn begin(&mut self, _: &mut Extensions) {}

    fn end<B, E>(self, response: Result<Response<B>, E>) -> Result<Response<B>, E> {
        response
    }
}

/// The store is awaited: any [`Store`].
#[derive(Clone, Copy, Debug)]
pub struct Awaited;

/// The store decides without waiting: a [`SyncStore`]. No future is boxed, unless an identifier is
/// waited for.
#[derive(Clone, Copy, Debug)]
pub struct Immediate;

impl<S: Store<A>, A: Quota + 'static> LayerMode<S, A> for Awaited {
    type Grant = ();

    fn exempt(&self) {}
}

impl<S: SyncStore<A>, A: Quota + 'static> LayerMode<S, A> for Immediate {
    type Grant = ();

    fn exempt(&self) {}

    #[inline]
    fn decide_now(
        gate: &Gate<S, A>,
        limiter: &RateLimiter<S, A>,
        caller: IdentifiedCaller<'_>,
        terms: &Terms<A>,
    ) -> Option<GateResult<()>> {
        let deciding = Deciding::new(limiter, terms);
        let decided = match (terms.costs.uniform(), &terms.numbers) {
            (Some(cost), None) => limiter.check_n_now(&caller, cost),
            (Some(cost), Some(_)) => deciding.request(&caller).cost(cost).check_now(),
            (None, _) => deciding.request(&caller).costs(&terms.costs).check_now(),
        };
        Some(gate.judge(deciding, caller, decided.as_ref()).map(|admitted| (admitted, ())))
    }
}
