//! [`Gate`]: identifies the caller, finds the limits that apply, and prepares the response.
//!
//! A response future carries header fields, not a decision: counting references to the limiter, the
//! sources and the configuration took longer than deciding. So [`Gate`] borrows what a decision
//! needs. It checks the sources and writes `RateLimit-Policy` when the layer is built, and writes
//! `RateLimit` when the store has decided.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, Once};
use std::time::Duration;

use derive_where::derive_where;
use http::StatusCode;
use http::header::WWW_AUTHENTICATE;
use http::request::Parts;
use ratelimit_core::algorithm::Quota;
use ratelimit_core::{
    Algorithm, ConfigError, ErrorKind, Identifiers, LimitCosts, Limits, NamedDecision,
    NamedDecisions, Numbers, OnOutage, RateLimiter, Request, Source, Store, StoreError, Verdict,
};

use crate::caller::{IdentifiedCaller, Later, Values};
use crate::config::{Choice, Config, Cost, Limiters, OnStoreError};
use crate::decisions::Decisions;
use crate::fields::{AnswerFields, BusyWait, FieldEntry, PolicyField, write_retry_after};
use crate::identify::IdentifyError;
use crate::rejection::{Reason, Rejection};

/// What decides the requests of a service: a configuration, and what is computed once of it.
pub(crate) struct Gate<S, A> {
    pub(crate) config: Config<S, A>,
    /// The identifier that the one limiter wants and no source has.
    lacks: Option<ConfigError>,
    /// The `RateLimit-Policy` of each limit of the one limiter.
    policies: Vec<Option<PolicyField>>,
}

/// Which limits are asked, on which terms, and what of the caller is waited for. The limiter is
/// borrowed, unless it was chosen: counting references takes longer than the rest of an arrival.
pub(crate) type Asked<'g, S, A> = (Cow<'g, Arc<RateLimiter<S, A>>>, Terms<A>, Option<Later>);

/// What a request costs, and the numbers that it has of its own.
pub(crate) struct Terms<A> {
    pub(crate) costs: LimitCosts,
    pub(crate) numbers: Option<Arc<Numbers<A>>>,
    /// The least that a layer reserves, if it need not be all of the costs.
    #[cfg(feature = "tokio")]
    pub(crate) least: Option<LimitCosts>,
}

/// The limits that decide a request: those of a limiter, some at the request's own numbers.
#[derive_where(Clone, Copy)]
pub(crate) struct Deciding<'d, S, A> {
    pub(crate) limiter: &'d RateLimiter<S, A>,
    pub(crate) numbers: Option<&'d Numbers<A>>,
}

impl<'d, S, A: Algorithm> Deciding<'d, S, A> {
    pub(crate) fn new(limiter: &'d RateLimiter<S, A>, terms: &'d Terms<A>) -> Self {
        Self { limiter, numbers: terms.numbers.as_deref() }
    }

    /// The request of a caller, at the cost 1.
    pub(crate) fn request<'c, C: Identifiers + ?Sized>(self, caller: &'c C) -> Request<'c, S, A, C>
    where
        'd: 'c,
    {
        let request = self.limiter.request(caller);
        self.numbers.map_or(request, |numbers| request.numbers(numbers))
    }

    /// The capacity of the limit that decides in place of this one of the policy.
    #[cfg(feature = "tokio")]
    pub(crate) fn capacity(self, of_policy: &'d ratelimit_core::Limit<A>) -> u64 {
        let limit = self.numbers.map_or(of_policy, |numbers| numbers.limit_of(of_policy));
        limit.algorithm().capacity()
    }

    /// Each decision with the limit that made it.
    pub(crate) fn named(self, verdict: &'d Verdict) -> NamedDecisions<'d, A> {
        let named = self.limiter.named(verdict);
        match self.numbers {
            Some(numbers) => named.numbers(numbers),
            None => named,
        }
    }
}

/// What an admitted request leaves for its handler, and for its answer.
pub(crate) struct Admitted {
    pub(crate) told: Option<AnswerFields>,
    pub(crate) decisions: Option<Decisions>,
}

/// What is wrong with the service, on standard error, once per process where no subscriber of
/// `tracing` hears it: clients get a 500 without the reason.
fn say_unheard(reason: &dyn fmt::Display) {
    static SAID: Once = Once::new();
    if !tracing::dispatcher::has_been_set() {
        SAID.call_once(|| {
            eprintln!("a rate limit is configured wrongly; requests are refused: {reason}");
        });
    }
}

/// What a caller may lack, so that an enforced limit does not apply to it; `None` is the bare key.
fn wanted_identifiers<'l, A: Algorithm>(
    limits: &'l Limits<A>,
    caller: IdentifiedCaller<'_>,
) -> Vec<Option<&'l str>> {
    let enforced = limits.iter().filter(|limit| !limit.is_shadow());
    let wanted = enforced.flat_map(|limit| {
        let bare = (limit.identifier_names().len() == 0).then_some(None);
        let counted = limit.identifier_names().map(Some).chain(bare);
        let counted = counted.filter(move |_| limit.is_met_by(&caller));
        let conditions = limit.conditions().iter().filter(|one| !one.excludes());
        counted.chain(conditions.map(|one| Some(one.identifier())))
    });
    wanted.collect()
}

impl<S: Store<A>, A: Quota + 'static> Gate<S, A> {
    pub(crate) fn new(config: Config<S, A>) -> Self {
        if let Err(error) = config.require() {
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

    /// Who asks, and which limits; `None` for none.
    #[inline]
    pub(crate) fn arrive(
        &self,
        request: &mut Parts,
        values: &mut Values,
    ) -> Result<Option<Asked<'_, S, A>>, Box<Rejection>> {
        let config = &self.config;
        let (limiter, lacks) = match &config.limiters {
            Limiters::One(limiter) => (Cow::Borrowed(limiter), self.lacks.clone()),
            Limiters::Chosen(choose) => match choose(request) {
                Choice::Limited(limiter) => {
                    let lacks = config.lacks(&limiter);
                    (Cow::Owned(limiter), lacks)
                }
                Choice::Exempt => return Ok(None),
                Choice::Refused(error) => return Err(self.unidentified(error)),
            },
        };
        if let Some(lacks) = lacks {
            return Err(self.reject_misconfigured(&lacks));
        }
        let costs = match &config.cost {
            Cost::Fixed(cost) => LimitCosts::from(*cost),
            Cost::ByRequest(costs) => costs(request),
        };
        let numbers = config.numbers.as_ref().and_then(|numbers| numbers(request));
        let terms = Terms {
            costs,
            numbers,
            #[cfg(feature = "tokio")]
            least: config.least.as_ref().map(|least| least(request)),
        };
        match config.sources.identify(request, values) {
            Ok(later) => Ok(Some((limiter, terms, later))),
            Err(error) => Err(self.unidentified(error)),
        }
    }

    /// A request is admitted that no limit has decided.
    pub(crate) fn undecided(&self) -> Admitted {
        let decisions = self.config.tells_handlers.then(Decisions::default);
        Admitted { told: None, decisions }
    }

    /// The caller with these identifiers.
    pub(crate) const fn caller<'a>(&'a self, values: &'a Values) -> IdentifiedCaller<'a> {
        IdentifiedCaller { sources: &self.config.sources, values }
    }

    /// The service is at fault. The reason is for the log.
    #[cold]
    fn reject_misconfigured(&self, reason: &dyn fmt::Display) -> Box<Rejection> {
        if let Some(requests) = self.config.log.misconfigured.count_request("") {
            tracing::error!(%reason, requests, "a rate limit is configured wrongly; the request is refused");
            say_unheard(reason);
        }
        Rejection::new(Reason::Misconfigured)
    }

    /// The request has no identifier.
    #[cold]
    pub(crate) fn unidentified(&self, error: IdentifyError) -> Box<Rejection> {
        let (what, challenge) = match error {
            IdentifyError::NotWired(reason) => return self.reject_misconfigured(&reason),
            IdentifyError::Missing { what, challenge } => (what, challenge),
            IdentifyError::Refused { what, status } => {
                let mut rejection = Rejection::new(Reason::Refused);
                (rejection.status, rejection.detail) = (status, Some(what));
                return rejection;
            }
        };
        let mut rejection = Rejection::new(Reason::Unidentified);
        if let Some(challenge) = challenge {
            rejection.status = StatusCode::UNAUTHORIZED;
            rejection.headers.insert(WWW_AUTHENTICATE, challenge);
        }
        rejection.detail = Some(what);
        rejection
    }

    /// What a decision means for the request: admitted, with its fields, or refused.
    #[inline]
    pub(crate) fn judge(
        &self,
        deciding: Deciding<'_, S, A>,
        caller: IdentifiedCaller<'_>,
        decided: Result<&Verdict, &S::Error>,
    ) -> Result<Admitted, Box<Rejection>> {
        match decided {
            Ok(verdict) => {
                self.log_shadow_denials(deciding, verdict);
                if verdict.allowed() {
                    let told = self.tell(deciding, caller, verdict);
                    let tells_handlers = self.config.tells_handlers;
                    let decisions =
                        tells_handlers.then(|| Decisions::from_named(deciding.named(verdict)));
                    Ok(Admitted { told, decisions })
                } else {
                    Err(self.deny(deciding, caller, verdict))
                }
            }
            Err(error) => self.judge_error(deciding, caller, error),
        }
    }

    #[cold]
    fn judge_error(
        &self,
        deciding: Deciding<'_, S, A>,
        caller: IdentifiedCaller<'_>,
        error: &S::Error,
    ) -> Result<Admitted, Box<Rejection>> {
        let wanted = wanted_identifiers(deciding.limiter.limits(), caller);
        match (error.kind(), caller.lacking(&wanted)) {
            // The client did not send an identifier that it may lack, and without it no limit
            // applies.
            (ErrorKind::Invalid, Some(lacking)) => {
                let what = format!("the request lacks {lacking}, by which its rate limits count");
                Err(self.unidentified(IdentifyError::missing(what)))
            }
            (ErrorKind::Invalid | ErrorKind::Unsupported | ErrorKind::CrossSlot, _) => {
                Err(self.reject_misconfigured(error))
            }
            _ => {
                let admits = self.config.on_store_error == OnStoreError::Admit;
                let first =
                    deciding.limiter.limits().iter().next().map_or("", |limit| limit.name());
                if let Some(requests) = self.config.log.undecided.count_request(first) {
                    tracing::warn!(%error, admits, requests, "the store of a rate limit cannot decide");
                }
                if admits {
                    return Ok(self.undecided());
                }
                let limits = deciding.limiter.limits().as_slice();
                let request = deciding.limiter.request(&caller);
                let applies = request.applicable().map(|position| limits[position].name());
                let mut rejection = Rejection::new(Reason::ReducedCapacity);
                rejection.violated_policies = self.known_to_clients(applies);
                Err(rejection)
            }
        }
    }

    /// The fields that describe the verdict, if the answer has any.
    #[inline]
    fn tell<'a>(
        &'a self,
        deciding: Deciding<'a, S, A>,
        #[cfg_attr(not(feature = "partition-key"), allow(unused, reason = "for the partition"))]
        caller: IdentifiedCaller<'_>,
        verdict: &'a Verdict,
    ) -> Option<AnswerFields> {
        let fields = &self.config.fields;
        if !fields.tells(verdict.allowed()) {
            return None;
        }
        let entry = |decided: NamedDecision<'a, A>| {
            let limit = decided.configured();
            let mut entry = FieldEntry::new(limit, decided.decision(), fields);
            if limit.algorithm().has_leases() {
                entry = entry.busy(self.busy_wait_us(&decided));
            }
            let limits = deciding.limiter.limits();
            // None for a limit at the numbers of a request.
            let position = limits.iter().position(|other| std::ptr::eq(other, limit));
            let policy = position.and_then(|position| self.policies.get(position)?.as_ref());
            entry.policy = policy.and_then(|policy| policy.value_for(&entry));
            #[cfg(feature = "partition-key")]
            if fields.partition_secret.is_some() {
                let key = limit.key_for(&caller);
                entry.partition_key =
                    key.and_then(|key| fields.partition_key_of(limit.name(), &key));
            }
            entry
        };
        // Without shadow limits, which a client need not know, and hidden ones.
        let is_known = |decided: &NamedDecision<'_, A>| fields.name_of(decided.name()).is_some();
        let mut decisions = deciding.named(verdict).filter(is_known);
        if verdict.decisions().len() == 1 {
            return fields.tell(&[entry(decisions.next()?)]);
        }
        fields.tell(&decisions.map(entry).collect::<Vec<_>>())
    }

    /// The rejection of a request that limits denied.
    #[cold]
    fn deny(
        &self,
        deciding: Deciding<'_, S, A>,
        caller: IdentifiedCaller<'_>,
        verdict: &Verdict,
    ) -> Box<Rejection> {
        let denied = || deciding.named(verdict).filter(|decided| !decided.allowed);
        // During an outage a limit that closes has counted nothing that a field could tell. One of
        // another choice still denies by a count of its own.
        let closes = verdict.source() == Source::Fallback
            && denied().any(|decided| decided.configured().outage() == Some(OnOutage::Closed));
        let fields = &self.config.fields;
        // The longest of the waits; none if that is never, or not known. A limit that counts
        // attempts may have let this one pass, and be full of it.
        let longest_us = deciding.named(verdict).try_fold(None, |longest_us, decided| {
            let wait_us = Some(decided.retry_after_us?);
            let limit = decided.configured();
            let is_closed = closes && limit.outage() == Some(OnOutage::Closed);
            let is_busy = !decided.allowed && !is_closed && limit.algorithm().has_leases();
            Some(longest_us.max(if is_busy { self.busy_wait_us(&decided) } else { wait_us }))
        });
        let longest_us = longest_us.flatten().filter(|wait_us| *wait_us > 0);
        let (reason, wait_us, told) = if closes {
            (Reason::ReducedCapacity, longest_us, None)
        } else {
            // All of a window's quota comes back at its end, to all of its callers.
            let is_end = |decided: NamedDecision<'_, A>| {
                decided.retry_after_us == longest_us
                    && longest_us == Some(decided.reset_after_us)
                    && !decided.configured().algorithm().has_leases()
            };
            let is_end = deciding.named(verdict).any(is_end);
            let wait_us = longest_us.map(|us| if is_end { fields.with_jitter(us) } else { us });
            let is_abnormal = denied().any(|decided| fields.is_abnormal(decided.configured()));
            let reason = if is_abnormal { Reason::AbnormalUsage } else { Reason::QuotaExceeded };
            (reason, wait_us, self.tell(deciding, caller, verdict))
        };
        let mut rejection = Rejection::new(reason);
        let names = || denied().map(|decided| decided.name());
        rejection.violated_policies = self.known_to_clients(names());
        rejection.retry_after = wait_us.map(Duration::from_micros);
        if let Some(wait_us) = wait_us {
            write_retry_after(wait_us, &mut rejection.headers);
        }
        if let Some(told) = told {
            told.write_to(&mut rejection.headers);
        }
        let (limits, retry_after) = (names().collect::<Vec<_>>(), rejection.retry_after);
        tracing::debug!(?limits, ?retry_after, "a request is denied");
        rejection
    }

    /// The names by which clients know these limits.
    fn known_to_clients<'a>(&self, limits: impl Iterator<Item = &'a str>) -> Vec<Box<str>> {
        limits.filter_map(|limit| self.config.fields.name_of(limit).map(Into::into)).collect()
    }

    /// The wait for the place that this limit denied, if it is known.
    fn busy_wait_us(&self, denied: &NamedDecision<'_, A>) -> Option<u64> {
        match self.config.fields.busy_wait {
            BusyWait::Untold => None,
            BusyWait::Hint(wait) => u64::try_from(wait.as_micros()).ok(),
            BusyWait::Estimated => {
                let hold_us = self.config.hold_time.us()?;
                Some(hold_us.saturating_mul(denied.cost.max(1)).div_ceil(denied.limit.max(1)))
            }
        }
    }

    /// A shadow limit refuses nothing. What it would have denied is for the log.
    fn log_shadow_denials(&self, deciding: Deciding<'_, S, A>, verdict: &Verdict) {
        if verdict.shadow_decisions().any(|decision| !decision.allowed) {
            let shadow = deciding.named(verdict);
            for denied in shadow.shadow().filter(|decided| !decided.allowed) {
                let limit = denied.name();
                if let Some(requests) = self.config.log.shadow.count_request(limit) {
                    tracing::info!(limit, requests, "a shadow limit would deny a request");
                }
            }
        }
    }
}
