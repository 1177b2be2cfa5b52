//! [`Config`]: what is set of a layer.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use derive_where::derive_where;
use http::request::Parts;
use ratelimit_core::algorithm::Quota;
use ratelimit_core::{ConfigError, LimitCosts, Numbers, RateLimiter};

use crate::caller::Sources;
use crate::fields::Fields;
use crate::identify::IdentifyError;
use crate::log::Log;

/// The limits for one request, which a [chooser](crate::RateLimitLayer::choosing) returns.
#[derive_where(Debug)]
#[non_exhaustive]
pub enum Choice<S, A> {
    /// These limits apply.
    Limited(#[derive_where(skip)] Arc<RateLimiter<S, A>>),
    /// No limit applies, such as to a health check.
    Exempt,
    /// The request is refused: what the choice depends on is missing, or the client may not, with a
    /// [status](IdentifyError::refused) such as 402 or 403.
    Refused(IdentifyError),
}

/// What happens to a request that the store cannot decide.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum OnStoreError {
    /// It is refused with 503.
    #[default]
    Refuse,
    /// It is admitted without a limit, and a warning is logged.
    Admit,
}

/// Chooses the limits of a request.
type Chooser<S, A> = dyn Fn(&Parts) -> Choice<S, A> + Send + Sync;

#[derive_where(Clone)]
pub(crate) enum Limiters<S, A> {
    One(Arc<RateLimiter<S, A>>),
    Chosen(Arc<Chooser<S, A>>),
}

/// How much a request costs when it arrives.
#[derive(Clone)]
pub(crate) enum Cost {
    Fixed(u64),
    ByRequest(Arc<CostsOf>),
}

/// The costs of a request.
pub(crate) type CostsOf = dyn Fn(&Parts) -> LimitCosts + Send + Sync;

/// The numbers of a request, where they are not those of the limits.
pub(crate) type NumbersOf<A> = dyn Fn(&Parts) -> Option<Arc<Numbers<A>>> + Send + Sync;

/// Has new limits checked before they are taken, and checks those in force: against these sources,
/// and whether the layer reserves.
pub(crate) type Require = dyn Fn(&Sources, bool) -> Result<(), ConfigError> + Send + Sync;

#[derive_where(Clone)]
pub(crate) struct Config<S, A> {
    pub(crate) limiters: Limiters<S, A>,
    /// Where the limits are replaced while they are in use.
    pub(crate) require: Option<Arc<Require>>,
    pub(crate) sources: Sources,
    /// Whether costs are reserved and settled.
    pub(crate) reserves: bool,
    pub(crate) cost: Cost,
    /// The least that is reserved, if it need not be all of the cost.
    #[cfg(feature = "tokio")]
    pub(crate) least: Option<Arc<CostsOf>>,
    pub(crate) numbers: Option<Arc<NumbersOf<A>>>,
    pub(crate) fields: Fields,
    /// Whether requests have the decisions as an extension.
    pub(crate) tells_handlers: bool,
    pub(crate) on_store_error: OnStoreError,
    /// All clones of a layer share it, as they do the next.
    pub(crate) log: Arc<Log>,
    pub(crate) hold_time: Arc<HoldTime>,
}

/// For how long requests hold their places: a running mean in microseconds, to which each adds an
/// eighth of its difference, as TCP measures its round trips (Jacobson, "Congestion Avoidance and
/// Control", 1988). 0 until a request has ended.
#[derive(Default)]
pub(crate) struct HoldTime(AtomicU64);

impl HoldTime {
    #[cfg(feature = "tokio")]
    pub(crate) fn add(&self, held: std::time::Duration) {
        let held_us = u64::try_from(held.as_micros()).unwrap_or(u64::MAX).max(1);
        let mean = |mean_us: u64| match mean_us {
            0 => held_us,
            _ => (mean_us - mean_us / 8).saturating_add(held_us / 8).max(1),
        };
        // The function always has an answer.
        let _before =
            self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |us| Some(mean(us)));
    }

    pub(crate) fn us(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|us| *us > 0)
    }
}

impl<S, A: Quota> Config<S, A> {
    pub(crate) fn new(limiters: Limiters<S, A>) -> Self {
        Self {
            limiters,
            require: None,
            sources: Sources::default(),
            reserves: false,
            cost: Cost::Fixed(1),
            #[cfg(feature = "tokio")]
            least: None,
            numbers: None,
            fields: Fields::new(),
            tells_handlers: false,
            on_store_error: OnStoreError::default(),
            log: Arc::default(),
            hold_time: Arc::default(),
        }
    }

    /// Checks what is required of limits that are replaced while they are in use.
    pub(crate) fn require(&self) -> Result<(), ConfigError> {
        let require = self.require.as_ref();
        require.map_or(Ok(()), |require| require(&self.sources, self.reserves))
    }

    /// What a limit wants and no source has: the limit would never apply, and nothing would show
    /// it. A shadow limit refuses nothing; the log reports it once.
    pub(crate) fn lacks(&self, limiter: &RateLimiter<S, A>) -> Option<ConfigError> {
        let names = self.sources.names();
        limiter.limits().iter().find_map(|limit| {
            let error = limit.check_identifiers(&names).err()?;
            if !limit.is_shadow() {
                return Some(error);
            }
            if let Some(requests) = self.log.unwired.count_request(limit.name()) {
                tracing::warn!(%error, requests, "a shadow limit is never tried");
            }
            None
        })
    }
}
