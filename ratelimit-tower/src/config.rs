//! What the layers have in common: who asks, which limits apply, and what is told.

use std::borrow::{Borrow, Cow};
use std::collections::BTreeSet;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use http::HeaderMap;
use http::request::Parts;
use ratelimit_core::{
    ConfigError, ErrorKind, NamedDecision, OnOutage, Quota, RateLimiter, Source, Store, StoreError,
    Verdict,
};

use crate::caller::{Caller, CallerFound, Sources, Values};
use crate::fields::{Entry, Fields, PolicyField, Told, write_retry_after};
use crate::identify::IdentifyError;
use crate::log::Log;
use crate::rejection::Rejection;

/// The limits for one request, which a [chooser](crate::RateLimitLayer::choosing) returns.
pub enum Choice<S, A> {
    /// These limits apply.
    Limited(Arc<RateLimiter<S, A>>),
    /// No limit applies, such as to a health check.
    Exempt,
    /// The request is refused: what the choice depends on is missing.
    Refused(IdentifyError),
}

impl<S, A> fmt::Debug for Choice<S, A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limited(_) => f.write_str("Limited"),
            Self::Exempt => f.write_str("Exempt"),
            Self::Refused(error) => f.debug_tuple("Refused").field(error).finish(),
        }
    }
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

pub(crate) enum Limiters<S, A> {
    One(Arc<RateLimiter<S, A>>),
    Chosen(Arc<Chooser<S, A>>),
}

impl<S, A> Clone for Limiters<S, A> {
    fn clone(&self) -> Self {
        match self {
            Self::One(limiter) => Self::One(limiter.clone()),
            Self::Chosen(choose) => Self::Chosen(choose.clone()),
        }
    }
}

/// How much a request costs when it arrives.
#[derive(Clone)]
pub(crate) enum Cost {
    Fixed(u64),
    ByRequest(Arc<dyn Fn(&Parts) -> u64 + Send + Sync>),
}

/// Has new limits checked against these sources before they are taken, and checks those in force.
pub(crate) type Require = dyn Fn(&Sources) -> Result<(), ConfigError> + Send + Sync;

pub(crate) struct Config<S, A> {
    pub(crate) limiters: Limiters<S, A>,
    /// Where the limits are replaced while they are in use.
    pub(crate) require: Option<Arc<Require>>,
    pub(crate) sources: Sources,
    pub(crate) cost: Cost,
    pub(crate) fields: Fields,
    pub(crate) on_store_error: OnStoreError,
    /// The shadow limits whose lack of a source was logged. All clones of a layer log it once.
    unwired: Arc<Mutex<BTreeSet<Box<str>>>>,
    /// All clones of a layer share it, as they do the next.
    log: Arc<Log>,
    hold_time: Arc<HoldTime>,
}

/// For how long requests hold their places: a running mean in microseconds, to which each adds an eighth of its difference, as TCP
/// measures its round trips (Jacobson, "Congestion Avoidance and Control", 1988). 0 until a request has ended.
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

    fn us(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|us| *us > 0)
    }
}

impl<S, A> Clone for Config<S, A> {
    fn clone(&self) -> Self {
        Self {
            limiters: self.limiters.clone(),
            require: self.require.clone(),
            sources: self.sources.clone(),
            cost: self.cost.clone(),
            fields: self.fields.clone(),
            on_store_error: self.on_store_error,
            unwired: self.unwired.clone(),
            log: self.log.clone(),
            hold_time: self.hold_time.clone(),
        }
    }
}

impl<S, A: Quota> Config<S, A> {
    pub(crate) fn new(limiters: Limiters<S, A>) -> Self {
        Self {
            limiters,
            require: None,
            sources: Sources::default(),
            cost: Cost::Fixed(1),
            fields: Fields::new(),
            on_store_error: OnStoreError::default(),
            unwired: Arc::default(),
            log: Arc::default(),
            hold_time: Arc::default(),
        }
    }

    /// What a limit wants and no source has: the limit would never apply, without a sign of it. A shadow limit refuses
    /// nothing; the log tells of it once.
    fn lacks(&self, limiter: &RateLimiter<S, A>) -> Option<ConfigError> {
        let mut unwired = limiter.limits().iter().filter(|limit| !self.sources.has_all_of(limit));
        unwired.find_map(|limit| {
            let error = self.sources.check(limit).err()?;
            if !limit.is_shadow() {
                return Some(error);
            }
            let mut told = self.unwired.lock().unwrap_or_else(PoisonError::into_inner);
            if told.insert(limit.name().into()) {
                tracing::warn!(%error, "a shadow limit is never tried");
            }
            None
        })
    }
}

/// What decides the requests of a service: a configuration, and what is computed once of it.
pub(crate) struct Gate<S, A> {
    config: Config<S, A>,
    /// The identifier that the one limiter wants and no source has.
    lacks: Option<ConfigError>,
    /// The `RateLimit-Policy` of each limit of the one limiter.
    policies: Vec<Option<PolicyField>>,
}

/// What is known of a request when it arrives.
pub(crate) enum Arrival<'g, S, A> {
    Exempt,
    Refused(Rejection),
    Identified(Asked<'g, S, A>),
    /// The caller is waited for.
    Identifying(Arc<RateLimiter<S, A>>, u64, crate::BoxFuture<Result<Values, IdentifyError>>),
}

/// Who asks which limits, at what cost.
pub(crate) struct Asked<'g, S, A> {
    /// Borrowed, unless it was chosen: counting references takes longer than the rest of an arrival.
    pub(crate) limiter: Cow<'g, Arc<RateLimiter<S, A>>>,
    pub(crate) values: Values,
    pub(crate) cost: u64,
}

impl<S: Store<A>, A: Quota + 'static> Gate<S, A> {
    pub(crate) fn new(config: Config<S, A>) -> Self {
        if let Some(require) = &config.require
            && let Err(error) = require(&config.sources)
        {
            tracing::error!(%error, "a rate limit is configured wrongly; requests are refused");
        }
        let (lacks, policies) = match &config.limiters {
            Limiters::One(limiter) => {
                let policy = |limit| PolicyField::new(limit, &config.fields);
                (config.lacks(limiter), limiter.limits().iter().map(policy).collect())
            }
            Limiters::Chosen(_) => (None, Vec::new()),
        };
        Self { config, lacks, policies }
    }

    /// Who asks, and which limits.
    #[inline]
    pub(crate) fn arrive(&self, request: &mut Parts) -> Arrival<'_, S, A> {
        let config = &self.config;
        let (limiter, lacks) = match &config.limiters {
            Limiters::One(limiter) => {
                (Cow::Borrowed(limiter), self.lacks.as_ref().map(Cow::Borrowed))
            }
            Limiters::Chosen(choose) => match choose(request) {
                Choice::Limited(limiter) => {
                    let lacks = config.lacks(&limiter).map(Cow::Owned);
                    (Cow::Owned(limiter), lacks)
                }
                Choice::Exempt => return Arrival::Exempt,
                Choice::Refused(error) => return Arrival::Refused(self.unidentified(error)),
            },
        };
        if let Some(lacks) = lacks {
            return Arrival::Refused(self.misconfigured(&*lacks));
        }
        let cost = match &config.cost {
            Cost::Fixed(cost) => *cost,
            Cost::ByRequest(cost) => cost(request),
        };
        match config.sources.identify(request) {
            CallerFound::Now(Ok(values)) => Arrival::Identified(Asked { limiter, values, cost }),
            CallerFound::Now(Err(error)) => Arrival::Refused(self.unidentified(error)),
            CallerFound::Later(found) => Arrival::Identifying(limiter.into_owned(), cost, found),
        }
    }

    /// The caller with these identifiers.
    pub(crate) const fn caller(&self, values: Values) -> Caller<&Sources> {
        Caller { sources: &self.config.sources, values }
    }

    /// The sources, for the caller of a reservation that outlives the request.
    #[cfg(feature = "tokio")]
    pub(crate) const fn sources(&self) -> &Sources {
        &self.config.sources
    }

    /// Where to tell for how long a place was held, if that is of use.
    #[cfg(feature = "tokio")]
    pub(crate) fn hold_time(&self) -> Option<Arc<HoldTime>> {
        self.config.fields.tells_hold_time().then(|| self.config.hold_time.clone())
    }

    /// The service is at fault. The reason is for the log.
    #[cold]
    fn misconfigured(&self, reason: &dyn fmt::Display) -> Rejection {
        self.config.log.misconfigured(reason);
        Rejection::misconfigured()
    }

    /// The request has no identifier.
    #[cold]
    pub(crate) fn unidentified(&self, error: IdentifyError) -> Rejection {
        match error {
            IdentifyError::NotWired(reason) => self.misconfigured(&reason),
            IdentifyError::Missing { status, what, challenge } => {
                Rejection::unidentified(status, what, challenge)
            }
        }
    }

    /// What a decision means for the request: admitted, with what is told of it, or refused.
    #[inline]
    pub(crate) fn judge<P: Borrow<Sources>>(
        &self,
        limiter: &RateLimiter<S, A>,
        caller: &Caller<P>,
        decided: Result<&Verdict, &S::Error>,
    ) -> Result<Option<Told>, Rejection> {
        match decided {
            Ok(verdict) => {
                self.log_shadow_denials(limiter, verdict);
                if verdict.allowed() {
                    Ok(self.tell(limiter, caller, verdict))
                } else {
                    Err(self.deny(limiter, caller, verdict))
                }
            }
            Err(error) => self.judge_error(limiter, caller, error),
        }
    }

    #[cold]
    fn judge_error<P: Borrow<Sources>>(
        &self,
        limiter: &RateLimiter<S, A>,
        caller: &Caller<P>,
        error: &S::Error,
    ) -> Result<Option<Told>, Rejection> {
        match error.kind() {
            // The client did not send an identifier that it may lack, and without it no limit applies.
            ErrorKind::Invalid if caller.lacks_some() => {
                let what = "the request lacks what its rate limits are kept by";
                Err(self.unidentified(IdentifyError::missing(what)))
            }
            ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::CrossSlot => {
                Err(self.misconfigured(error))
            }
            _ => {
                let admits = self.config.on_store_error == OnStoreError::Admit;
                let first = limiter.limits().iter().next().map_or("", |limit| limit.name());
                self.config.log.undecided(first, error, admits);
                if admits {
                    return Ok(None);
                }
                let limits = limiter.limits().iter();
                let applies =
                    limits.filter(|limit| !limit.is_shadow() && limit.key_for(caller).is_some());
                let names = applies.map(|limit| limit.name().into()).collect();
                Err(Rejection::reduced_capacity(names, None, HeaderMap::new()))
            }
        }
    }

    /// The fields that describe the verdict, if the answer has any.
    #[inline]
    fn tell<'a, P: Borrow<Sources>>(
        &'a self,
        limiter: &'a RateLimiter<S, A>,
        caller: &Caller<P>,
        verdict: &'a Verdict,
    ) -> Option<Told> {
        let fields = &self.config.fields;
        if !fields.tells(verdict.allowed()) {
            return None;
        }
        let entry = |decided: NamedDecision<'a, A>| {
            let limit = decided.configured();
            let mut entry = Entry::new(limit, decided.decision(), fields);
            if limit.algorithm().has_leases() {
                entry = entry.busy(self.busy_wait_us(&decided));
            }
            let place = limiter.limits().iter().position(|other| std::ptr::eq(other, limit));
            let policy = place.and_then(|place| self.policies.get(place)?.as_ref());
            entry.policy = policy.and_then(|policy| policy.of(&entry));
            if fields.has_partition_keys() {
                let key = limit.key_for(caller);
                entry.partition_key =
                    key.and_then(|key| fields.partition_key_of(limit.name(), &key));
            }
            entry
        };
        // Without shadow limits, which a client need not know.
        let mut decisions = limiter.named(verdict);
        if verdict.decisions().len() == 1 {
            return fields.tell(&[entry(decisions.next()?)]);
        }
        fields.tell(&decisions.map(entry).collect::<Vec<_>>())
    }

    /// The rejection of a request that limits denied.
    #[cold]
    fn deny<P: Borrow<Sources>>(
        &self,
        limiter: &RateLimiter<S, A>,
        caller: &Caller<P>,
        verdict: &Verdict,
    ) -> Rejection {
        let denied = limiter.named(verdict).filter(|decided| !decided.allowed);
        let names = denied.clone().map(|decided| decided.name().into()).collect::<Vec<Box<str>>>();
        // During an outage a limit that closes has counted nothing that a field could tell. One of another choice still
        // denies by a count of its own.
        let closes = verdict.source() == Source::Fallback
            && denied
                .clone()
                .any(|decided| decided.configured().outage() == Some(OnOutage::Closed));
        let is_busy = denied.clone().any(|decided| decided.configured().algorithm().has_leases());
        let wait_us = if is_busy && !closes {
            self.wait_of_busy_us(limiter.named(verdict))
        } else {
            verdict.summary().retry_after_us
        };
        let (retry_after, mut headers) = (wait_us.map(Duration::from_micros), HeaderMap::new());
        tracing::debug!(limits = ?names, ?retry_after, "a request is denied");
        if let Some(wait_us) = wait_us {
            write_retry_after(wait_us, &mut headers);
        }
        if closes {
            return Rejection::reduced_capacity(names, retry_after, headers);
        }
        if let Some(told) = self.tell(limiter, caller, verdict) {
            told.write_to(&mut headers);
        }
        Rejection::denied(names, retry_after, headers)
    }

    /// How long a request is to wait for the place that this limit denied, if that is told.
    fn busy_wait_us(&self, denied: &NamedDecision<'_, A>) -> Option<u64> {
        self.config.fields.busy_wait_us(self.config.hold_time.us(), denied.cost, denied.limit)
    }

    /// The longest wait of these decisions, of which one has denied a place. `None` if that is never, or not known.
    fn wait_of_busy_us<'a>(
        &self,
        decisions: impl Iterator<Item = NamedDecision<'a, A>>,
    ) -> Option<u64>
    where
        A: 'a,
    {
        let mut longest_us = None;
        for decided in decisions {
            let mut wait_us = Some(decided.retry_after_us?).filter(|wait_us| *wait_us > 0);
            if decided.configured().algorithm().has_leases() && wait_us.is_some() {
                wait_us = self.busy_wait_us(&decided);
            }
            longest_us = longest_us.max(wait_us);
        }
        longest_us
    }

    /// A shadow limit refuses nothing. What it would have denied is for the log.
    fn log_shadow_denials(&self, limiter: &RateLimiter<S, A>, verdict: &Verdict) {
        if verdict.shadow_decisions().any(|decision| !decision.allowed) {
            let shadow = limiter.named(verdict);
            for denied in shadow.shadow().filter(|decided| !decided.allowed) {
                self.config.log.shadow_denial(denied.name());
            }
        }
    }
}
