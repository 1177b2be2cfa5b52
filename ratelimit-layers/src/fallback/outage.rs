//! [`Outage`]: decisions without the store, by the choice of each limit.

use std::num::NonZeroU64;
use std::time::Duration;

use ratelimit_core::{
    Algorithm, Batch, Check, Clock, ConfigError, Decision, InMemory, Limit, Now, OnOutage, Op,
    Share, Source, SyncStore, Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};

use super::counts::{Counts, Outcome};
use super::error::FallbackError;
use super::journal::Journal;
use super::known_ids::{KnownIds, Noted};
use super::report::Report;

/// Why the store did not decide.
#[derive(Debug)]
pub(super) enum Cause<E> {
    /// The breaker is open: the store was not asked.
    BreakerOpen { retry_after: Duration },
    /// The store failed.
    Failed { error: E, undetermined: bool, retry_after: Duration },
    /// The store did not answer in time.
    TimedOut { deadline: Duration, retry_after: Duration },
    /// The id of the request was decided without the store before.
    KnownId,
}

impl<E> Cause<E> {
    /// Whether the store may have done what it was asked.
    pub(super) const fn undetermined(&self) -> bool {
        match self {
            Self::Failed { undetermined, .. } => *undetermined,
            Self::TimedOut { .. } => true,
            Self::BreakerOpen { .. } | Self::KnownId => false,
        }
    }

    /// How long until the store may be asked again.
    const fn retry_after(&self) -> Duration {
        match self {
            Self::BreakerOpen { retry_after }
            | Self::Failed { retry_after, .. }
            | Self::TimedOut { retry_after, .. } => *retry_after,
            Self::KnownId => Duration::ZERO,
        }
    }

    /// The error of an operation that only the store can do.
    pub(super) fn into_error(self, op: Op) -> FallbackError<E> {
        match self {
            Self::BreakerOpen { retry_after } => FallbackError::BreakerOpen { op, retry_after },
            Self::Failed { error, .. } => FallbackError::Store(error),
            Self::TimedOut { deadline, .. } => FallbackError::TimedOut { deadline },
            Self::KnownId => FallbackError::BreakerOpen { op, retry_after: Duration::ZERO },
        }
    }
}

#[derive(Debug)]
pub(super) struct Outage<A: InMemory, C> {
    pub(super) local: MemoryStore<A, C>,
    /// How many nodes share each local limit, if that was said.
    pub(super) nodes: Option<NonZeroU64>,
    pub(super) ids: KnownIds,
    pub(super) counts: Counts,
    /// What is to be charged on recovery, if anything.
    pub(super) journal: Option<Journal<A>>,
}

impl<A: InMemory + Share + Clone, C: Clock> Outage<A, C> {
    /// Decides a batch without the store.
    pub(super) fn decide<E>(
        &self,
        batch: &Batch<'_, A>,
        cause: Cause<E>,
        report: &Report,
    ) -> Result<Verdict, FallbackError<E>> {
        batch.validate()?;
        let op = batch.operation();
        let known = matches!(cause, Cause::KnownId);
        let choices: Vec<OnOutage> =
            batch.checks().iter().map(|check| choice(check.limit)).collect::<Result<_, _>>()?;
        let asks = matches!(op, Op::Acquire | Op::Peek);
        let closed = choices.contains(&OnOutage::Closed);
        // A forced charge or a refund whose outcome is unknown may have been made, and no caller learns it from a verdict.
        let only_store = match op {
            Op::Acquire | Op::Peek => false,
            Op::Force | Op::Refund => closed || cause.undetermined(),
            Op::Reset | Op::Settle | Op::Renew => true,
        };
        if only_store && !known {
            return Err(cause.into_error(op));
        }
        let refuses = asks && closed && !known;
        let noted = if refuses || op == Op::Peek { Noted::Known } else { self.ids.note(batch) };
        // What is settled later would be settled in the store.
        let is_unrecorded = noted == Noted::Full && batch.is_settled_once() && op == Op::Acquire;
        if noted == Noted::Full && !is_unrecorded {
            return Err(FallbackError::Ids { most: self.ids.most() });
        }
        let undetermined = cause.undetermined();
        let decided = self.decide_by(batch, &choices, refuses, cause.retry_after());
        let is_kept = |verdict: &Verdict| verdict.allowed() && !verdict.is_unrecorded();
        if noted == Noted::New && !decided.as_ref().is_ok_and(is_kept) {
            self.ids.forget(batch);
        }
        let verdict = decided?;
        if op == Op::Acquire {
            for ((check, choice), decision) in
                batch.checks().iter().zip(&choices).zip(verdict.decisions())
            {
                let (limit, outcome) =
                    (check.limit.name(), Outcome::of(check.limit, decision, verdict.allowed()));
                self.counts.count(limit, *choice, outcome, undetermined);
                report.decided(limit, *choice, outcome);
            }
        }
        // What the store may have charged is not charged once more.
        if !undetermined {
            self.note_charges(batch, &choices, &verdict);
        }
        let verdict = if is_unrecorded { verdict.unrecorded() } else { verdict };
        Ok(verdict.with_source(Source::Fallback))
    }

    fn decide_by<E>(
        &self,
        batch: &Batch<'_, A>,
        choices: &[OnOutage],
        refuses: bool,
        retry_after: Duration,
    ) -> Result<Verdict, FallbackError<E>> {
        let checks = || batch.checks().iter().zip(choices);
        let local = || checks().filter(|(_, choice)| **choice == OnOutage::Local);
        let shares: Vec<Limit<A>> =
            local().map(|(check, _)| self.share_of(check.limit)).collect::<Result<_, _>>()?;
        let local_checks: Vec<_> = local()
            .zip(&shares)
            .map(|((check, _), limit)| Check { limit, key: check.key, cost: check.cost })
            .collect();
        let locally = if local_checks.is_empty() {
            Verdict::several(Vec::new())
        } else {
            let part = batch.with_checks(&local_checks);
            let part = if refuses { part.denied_elsewhere() } else { part };
            self.local.apply_now(&part).map_err(|error| match error {
                MemoryError::Refused(refusal) => FallbackError::Refused(refusal),
                error => FallbackError::Local(error),
            })?
        };
        let charged = !refuses && locally.allowed() && batch.operation() == Op::Acquire;
        let wait_us = u64::try_from(retry_after.as_micros()).unwrap_or(u64::MAX).max(1);
        let mut local_decisions = locally.decisions().iter();
        let decisions = checks().map(|(check, choice)| match choice {
            OnOutage::Local => local_decisions.next().copied(),
            OnOutage::Closed if refuses => Some(closed(check, wait_us)),
            // An id that was decided without the store had no closed limit then.
            OnOutage::Open | OnOutage::Closed => Some(open(check, charged)),
        });
        let verdict = Verdict::several(decisions.flatten().collect());
        Ok(if locally.is_unrecorded() { verdict.unrecorded() } else { verdict })
    }

    /// This node's share of a limit.
    pub(super) fn share_of(&self, limit: &Limit<A>) -> Result<Limit<A>, ConfigError> {
        share(limit, self.nodes)
    }

    /// Keeps what is to be charged to the store on recovery. What was charged under an id is not: it may still be settled.
    fn note_charges(&self, batch: &Batch<'_, A>, choices: &[OnOutage], verdict: &Verdict) {
        let Some(journal) = &self.journal else { return };
        if batch.reservation_id().is_some() || !verdict.allowed() {
            return;
        }
        for (check, choice) in batch.checks().iter().zip(choices) {
            match batch.operation() {
                _ if *choice != OnOutage::Local => {}
                Op::Acquire | Op::Force => {
                    journal.add(check.limit, check.key, check.cost, batch.time());
                }
                Op::Refund => journal.take_off(check.limit.name(), check.key, check.cost),
                Op::Peek | Op::Reset | Op::Settle | Op::Renew => {}
            }
        }
    }

    /// How much of a key's local charges still counts.
    pub(super) fn counts_still(&self, limit: &Limit<A>, key: &str, now: Now) -> u64 {
        let Ok(share) = self.share_of(limit) else { return 0 };
        let check = Check { limit: &share, key, cost: 0 };
        let peek = Batch::one(&check).op(Op::Peek).now(now);
        let left = self.local.apply_now(&peek).map(|verdict| verdict.remaining());
        left.map_or(0, |left| share.algorithm().capacity().saturating_sub(left))
    }
}

/// What a limit says about outages.
pub(super) fn choice<A: Algorithm>(limit: &Limit<A>) -> Result<OnOutage, ConfigError> {
    limit.outage().ok_or_else(|| {
        ConfigError::new(
            "it does not say what becomes of requests while its store is away, and there is no default; give it \
             on_outage = \"open\", \"closed\" or \"local\" (Limit::on_outage)",
        )
        .in_limit(limit.name())
    })
}

/// A node's share of a limit.
pub(super) fn share<A: Share>(
    limit: &Limit<A>,
    nodes: Option<NonZeroU64>,
) -> Result<Limit<A>, ConfigError> {
    let nodes = nodes.ok_or_else(|| {
        ConfigError::new(
            "it is local during an outage, and this node's share is not known; give the number of nodes that share it: \
             Fallback::builder().nodes(n)",
        )
        .in_limit(limit.name())
    })?;
    limit.share(nodes)
}

/// The decision of a limit that is open during an outage: it shows its capacity.
fn open<A: InMemory>(check: &Check<'_, A>, charged: bool) -> Decision {
    let limit = check.limit.algorithm().capacity();
    Decision {
        allowed: true,
        cost: check.cost,
        limit,
        remaining: if charged { limit.saturating_sub(check.cost) } else { limit },
        retry_after_us: Some(0),
        replenish_after_us: 0,
        reset_after_us: 0,
    }
}

/// The decision of a limit that is closed during an outage, until the store may be asked again.
fn closed<A: InMemory>(check: &Check<'_, A>, wait_us: u64) -> Decision {
    Decision {
        allowed: false,
        cost: check.cost,
        limit: check.limit.algorithm().capacity(),
        remaining: 0,
        retry_after_us: Some(wait_us),
        replenish_after_us: wait_us,
        reset_after_us: wait_us,
    }
}
