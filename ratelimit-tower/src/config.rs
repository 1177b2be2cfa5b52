//! What the layers have in common: who asks, which limits apply, and what is told.

use std::fmt;
use std::sync::Arc;

use http::HeaderMap;
use http::request::Parts;
use ratelimit_core::{
    ErrorKind, NamedDecision, OnOutage, Quota, RateLimiter, Source, Store, StoreError, Verdict,
};
use smallvec::SmallVec;

use crate::caller::{Caller, CallerFound, Sources};
use crate::fields::{Entry, Fields, write_retry_after};
use crate::identify::IdentifyError;
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

pub(crate) struct Config<S, A> {
    pub(crate) limiters: Limiters<S, A>,
    pub(crate) sources: Sources,
    pub(crate) cost: Cost,
    pub(crate) fields: Fields,
    pub(crate) on_store_error: OnStoreError,
}

impl<S, A> Clone for Config<S, A> {
    fn clone(&self) -> Self {
        Self {
            limiters: self.limiters.clone(),
            sources: self.sources.clone(),
            cost: self.cost.clone(),
            fields: self.fields.clone(),
            on_store_error: self.on_store_error,
        }
    }
}

/// What is known of a request when it arrives.
pub(crate) enum Arrival<S, A> {
    Exempt,
    Refused(Rejection),
    Identified(Asked<S, A>),
    /// The caller is waited for.
    Identifying(Arc<RateLimiter<S, A>>, u64, crate::BoxFuture<Result<Caller, IdentifyError>>),
}

/// Who asks which limits, at what cost.
pub(crate) struct Asked<S, A> {
    pub(crate) limiter: Arc<RateLimiter<S, A>>,
    pub(crate) caller: Caller,
    pub(crate) cost: u64,
}

impl<S: Store<A>, A: Quota + 'static> Config<S, A> {
    pub(crate) fn new(limiters: Limiters<S, A>) -> Self {
        Self {
            limiters,
            sources: Sources::default(),
            cost: Cost::Fixed(1),
            fields: Fields::new(),
            on_store_error: OnStoreError::default(),
        }
    }

    /// Who asks, and which limits.
    pub(crate) fn arrive(&self, request: &mut Parts) -> Arrival<S, A> {
        let limiter = match &self.limiters {
            Limiters::One(limiter) => limiter.clone(),
            Limiters::Chosen(choose) => match choose(request) {
                Choice::Limited(limiter) => limiter,
                Choice::Exempt => return Arrival::Exempt,
                Choice::Refused(error) => return Arrival::Refused(Rejection::unidentified(error)),
            },
        };
        // A limit whose identifier no source has would never apply, without a sign of it. A shadow limit refuses nothing.
        let enforced = limiter.limits().iter().filter(|limit| !limit.is_shadow());
        if let Some(lacks) = self.sources.lacks(enforced) {
            return Arrival::Refused(Rejection::misconfigured(&lacks));
        }
        let cost = match &self.cost {
            Cost::Fixed(cost) => *cost,
            Cost::ByRequest(cost) => cost(request),
        };
        match self.sources.identify(request) {
            CallerFound::Now(Ok(caller)) => Arrival::Identified(Asked { limiter, caller, cost }),
            CallerFound::Now(Err(error)) => Arrival::Refused(Rejection::unidentified(error)),
            CallerFound::Later(found) => Arrival::Identifying(limiter, cost, found),
        }
    }

    /// What a decision means for the request: admitted, with what is told of it, or refused.
    pub(crate) fn judge(
        &self,
        asked: Asked<S, A>,
        decided: Result<Verdict, S::Error>,
    ) -> Result<Told<S, A>, Rejection> {
        match decided {
            Ok(verdict) => {
                log_shadow_denials(&asked.limiter, &verdict);
                let allowed = verdict.allowed();
                let told =
                    Told { limiter: asked.limiter, caller: asked.caller, verdict: Some(verdict) };
                if allowed { Ok(told) } else { Err(told.rejection(&self.fields)) }
            }
            Err(error) => self.judge_error(asked, &error),
        }
    }

    #[cold]
    fn judge_error(&self, asked: Asked<S, A>, error: &S::Error) -> Result<Told<S, A>, Rejection> {
        match error.kind() {
            // The client did not send an identifier that it may lack, and without it no limit applies.
            ErrorKind::Invalid if asked.caller.lacks_some() => {
                let what = "the request lacks what its rate limits are kept by";
                Err(Rejection::unidentified(IdentifyError::missing(what)))
            }
            ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::CrossSlot => {
                Err(Rejection::misconfigured(error))
            }
            _ if self.on_store_error == OnStoreError::Admit => {
                tracing::warn!(%error, "the store of a rate limit cannot decide; the request is admitted");
                Ok(Told { limiter: asked.limiter, caller: asked.caller, verdict: None })
            }
            _ => {
                tracing::warn!(%error, "the store of a rate limit cannot decide; the request is refused");
                let limits = asked.limiter.limits().iter();
                let applies = limits
                    .filter(|limit| !limit.is_shadow() && limit.key_for(&asked.caller).is_some());
                let names = applies.map(|limit| limit.name().into()).collect();
                Err(Rejection::reduced_capacity(names, None, HeaderMap::new()))
            }
        }
    }
}

/// A decision, to be told in the fields of a response.
pub(crate) struct Told<S, A> {
    limiter: Arc<RateLimiter<S, A>>,
    caller: Caller,
    /// None if the store could not decide.
    verdict: Option<Verdict>,
}

impl<S, A: Quota + 'static> Told<S, A> {
    /// Adds the fields.
    pub(crate) fn write(&self, fields: &Fields, headers: &mut HeaderMap) {
        let Some(verdict) = &self.verdict else { return };
        if !fields.tells(verdict.allowed()) {
            return;
        }
        let decisions = self.limiter.named(verdict);
        // Without shadow limits, which a client need not know.
        let entries: SmallVec<[_; 2]> =
            decisions.map(|decided| self.entry(&decided, fields)).collect();
        fields.write(&entries, headers);
    }

    fn entry<'a>(&self, decided: &NamedDecision<'a, A>, fields: &'a Fields) -> Entry<'a> {
        let limit = decided.configured();
        let partition_key = || fields.partition_key_of(limit.name(), &limit.key_for(&self.caller)?);
        Entry {
            partition_key: if fields.has_partition_keys() { partition_key() } else { None },
            ..Entry::new(limit, decided.decision(), fields)
        }
    }

    /// The rejection of a request that was denied.
    #[cold]
    fn rejection(&self, fields: &Fields) -> Rejection {
        let Some(verdict) = &self.verdict else {
            return Rejection::reduced_capacity(Vec::new(), None, HeaderMap::new());
        };
        let denied = self.limiter.named(verdict).filter(|decided| !decided.allowed);
        let names = denied.clone().map(|decided| decided.name().into()).collect::<Vec<Box<str>>>();
        let (retry_after, mut headers) = (verdict.retry_after(), HeaderMap::new());
        tracing::debug!(limits = ?names, ?retry_after, "a request is denied");
        if let Some(wait_us) = verdict.summary().retry_after_us {
            write_retry_after(wait_us, &mut headers);
        }
        // During an outage a limit that closes has counted nothing that a field could tell. One of another choice still
        // denies by a count of its own.
        let mut closes =
            denied.map(|decided| decided.configured().outage() == Some(OnOutage::Closed));
        if verdict.source() == Source::Fallback && closes.any(|closes| closes) {
            return Rejection::reduced_capacity(names, retry_after, headers);
        }
        self.write(fields, &mut headers);
        Rejection::denied(names, retry_after, headers)
    }
}

/// A shadow limit refuses nothing. What it would have denied is for the log.
fn log_shadow_denials<S, A: Quota>(limiter: &RateLimiter<S, A>, verdict: &Verdict) {
    if verdict.shadow_decisions().any(|decision| !decision.allowed) {
        let shadow = limiter.named(verdict);
        for denied in shadow.shadow().filter(|decided| !decided.allowed) {
            tracing::info!(limit = denied.name(), "a shadow limit would deny a request");
        }
    }
}
