//! [`Checked`]: a layer that was checked, and changes no more.

use std::ops::Deref;

use tower_layer::Layer;

/// A layer whose limits suit it, as [`checked`](crate::RateLimitLayer::checked) has found. It is
/// put before a service as the layer is.
///
/// It does not change any more, so nothing escapes the check. What would change it does not
/// compile:
///
/// ```compile_fail
/// # use ratelimit_core::*;
/// use ratelimit_tower::{Charge, ClientAddress, RateLimitLayer};
///
/// # fn example<S: Store<AnyAlgorithm> + 'static>(limiter: RateLimiter<S>) -> Result<(), ConfigError> {
/// let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());
/// let layer = layer.checked()?.reserve(Charge::estimate()); // checked too early
/// # Ok(())
/// # }
/// ```
///
/// The check comes last:
///
#[cfg_attr(feature = "tokio", doc = "```")]
#[cfg_attr(not(feature = "tokio"), doc = "```ignore")]
/// # use ratelimit_core::*;
/// use ratelimit_tower::{Charge, ClientAddress, RateLimitLayer};
///
/// # fn example<S: Store<AnyAlgorithm> + 'static>(limiter: RateLimiter<S>) -> Result<(), ConfigError> {
/// let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());
/// let layer = layer.reserve(Charge::estimate()).checked()?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Checked<L>(L);

impl<L> Checked<L> {
    pub(crate) const fn new(layer: L) -> Self {
        Self(layer)
    }
}

impl<L> Deref for Checked<L> {
    type Target = L;

    fn deref(&self) -> &L {
        &self.0
    }
}

impl<Svc, L: Layer<Svc>> Layer<Svc> for Checked<L> {
    type Service = L::Service;

    fn layer(&self, inner: Svc) -> Self::Service {
        self.0.layer(inner)
    }
}
