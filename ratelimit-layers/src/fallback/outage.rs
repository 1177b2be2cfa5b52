//! [`Outage`]: decisions without the store, by the choice of each limit.

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};
use std::num::NonZeroU64;
use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::algorithm::{InMemory, Share};
use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{
    Account, Algorithm, Clock, ConfigError, Decision, ErrorKind, Limit, Limits, OnOutage, Source,
    StoreError, SyncStore, Timestamp, Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};

use super::breaker::Breakers;
use super::counts::OutageCounts;
use super::error::FallbackError;
use super::journal::Journal;
use super::known_ids::{KnownBy, KnownIds, Noted};
use crate::OnDrop;
use crate::bounded::BoundedMap;
use crate::observed::LimitOutcome;

/// The most limits whose shares are kept. More than a service has, so that only limits that are
/// gone make room for new ones.
const MOST_SHARES: usize = 1_024;

#[derive(Debug)]
pub(super) struct Outage<A: InMemory, C> {
    pub(super) local: MemoryStore<A, C>,
    /// By the limit and its numbers, so that a request computes none. They are of these `nodes`.
    pub(super) shares: BoundedMap<Arc<LocalShare<A>>>,
    /// How many nodes share each local limit, if that was said.
    pub(super) nodes: Option<NonZeroU64>,
    /// Whether a node admits at least one of a limit that is smaller than their number.
    pub(super) at_least_one: bool,
    pub(super) ids: KnownIds,
    pub(super) counts: OutageCounts,
    /// What is to be charged on recovery, if anything.
    pub(super) journal: Option<Journal<A>>,
}

/// A limit, and this node's share of it.
#[derive(Debug)]
pub(super) struct LocalShare<A> {
    of: Limit<A>,
    pub(super) limit: Limit<A>,
}

/// The place of a limit's share. Where requests have numbers of their own, limits of one state
/// differ in what a key may have, and in how long it takes to recover.
fn place_of<A: Algorithm>(limit: &Limit<A>) -> u128 {
    let algorithm = limit.algorithm();
    let full_us = algorithm.filled(Timestamp::ZERO).decision.reset_after_us;
    let numbers = [algorithm.capacity(), algorithm.debt(), full_us];
    let hash = BuildHasherDefault::<DefaultHasher>::default().hash_one(numbers);
    u128::from(limit.fingerprint()) << 64 | u128::from(hash)
}

pub(super) fn no_shares<A>() -> BoundedMap<Arc<LocalShare<A>>> {
    BoundedMap::new(MOST_SHARES)
}

/// The share of one of as many nodes as can share a limit, which are fewer than these.
fn share_of_fewer<A: InMemory + Share + Clone + PartialEq + 'static>(
    limit: &Limit<A>,
    nodes: NonZeroU64,
) -> Result<Limit<A>, ConfigError> {
    let (mut share, mut fits, mut too_many) = (limit.share(NonZeroU64::MIN)?, 1, nodes.get());
    while let Some(half) = NonZeroU64::new(fits + (too_many - fits) / 2)
        && half.get() > fits
    {
        match limit.share(half) {
            Ok(smaller) => (share, fits) = (smaller, half.get()),
            Err(_) => too_many = half.get(),
        }
    }
    Ok(share)
}

impl<A: InMemory + Share + Clone + PartialEq + 'static, C: Clock> Outage<A, C> {
    /// What a limit says about outages, if this node can keep it.
    pub(super) fn choice(&self, limit: &Limit<A>) -> Result<OnOutage, ConfigError> {
        let undeclared = "it does not declare what happens while its store is unreachable, and there is no default; give it \
                          on_outage = \"open\", \"closed\" or \"local\" (Limit::on_outage)";
        let refused = || ConfigError::new(undeclared).in_limit(limit.name());
        let choice = limit.outage().ok_or_else(refused)?;
        if choice == OnOutage::Local {
            self.nodes(limit)?;
        }
        Ok(choice)
    }

    fn nodes(&self, limit: &Limit<A>) -> Result<NonZeroU64, ConfigError> {
        let unknown = "it is local during an outage, and this node's share is not known; give the number of nodes that share \
                       it: Fallback::builder().nodes(n)";
        self.nodes.ok_or_else(|| ConfigError::new(unknown).in_limit(limit.name()))
    }

    /// This node's share of a limit.
    pub(super) fn share_of(&self, limit: &Limit<A>) -> Result<Arc<LocalShare<A>>, ConfigError> {
        let place = place_of(limit);
        let known = self.shares.values.get(&place).map(|known| Arc::clone(&known));
        if let Some(known) = known.filter(|known| known.of == *limit) {
            return Ok(known);
        }
        let nodes = self.nodes(limit)?;
        let share = match limit.share(nodes) {
            Err(_) if self.at_least_one => share_of_fewer(limit, nodes)?,
            share => share?,
        };
        let share = Arc::new(LocalShare { of: limit.clone(), limit: share });
        if self.shares.values.insert(place, Arc::clone(&share)).is_none() {
            self.shares.make_room(place, |_| false);
        }
        Ok(share)
    }

    /// Checks that every limit has a choice that this node can keep.
    pub(super) fn validate(&self, limits: &Limits<A>) -> Result<(), ConfigError> {
        for limit in limits {
            if self.choice(limit)? == OnOutage::Local {
                let _share = self.share_of(limit)?;
            }
        }
        Ok(())
    }

    /// Decides a batch without the store, which was not asked because the batch's id `is_known`
    /// here, or which is unreachable (`away`).
    pub(super) fn decide<E: StoreError>(
        &self,
        batch: &Batch<'_, A>,
        is_known: bool,
        away: FallbackError<E>,
        breakers: &Breakers,
    ) -> Result<Verdict, FallbackError<E>> {
        batch.validate()?;
        let op = batch.operation();
        // The store may have done what it was asked.
        let undetermined = away.kind() == ErrorKind::Indeterminate;
        let choices = batch.checks().iter().map(|check| self.choice(check.limit));
        let choices: Vec<OnOutage> = choices.collect::<Result<_, _>>()?;
        let refuses = choices.contains(&OnOutage::Closed) && !is_known;
        // A forced charge or a refund whose outcome is unknown may have been made, and no caller
        // learns it from a verdict.
        let only_store = match op {
            Op::Acquire | Op::Peek => false,
            Op::Force | Op::Refund | Op::Adopt => {
                refuses || undetermined || self.ids.known_by(batch) == Some(KnownBy::Store)
            }
            Op::Reset | Op::Settle | Op::Renew | Op::Extend => !is_known,
        };
        if only_store {
            // Repeated, it would be done once more. Without room, it may be.
            if undetermined && !is_known && !op.needs_id() {
                let _ = self.ids.note(batch, KnownBy::Store);
            }
            return Err(away);
        }
        let retry_after = match away {
            FallbackError::BreakerOpen { retry_after, .. } => retry_after,
            _ => breakers.pause(),
        };
        let noted = if refuses || op == Op::Peek {
            Noted::Known
        } else {
            self.ids.note(batch, KnownBy::Local)
        };
        // What is settled later would be settled in the store.
        let is_unrecorded = noted == Noted::Full && batch.is_settled_once() && op == Op::Acquire;
        if noted == Noted::Full && !is_unrecorded {
            return Err(FallbackError::Ids { most: self.ids.most });
        }
        let forgets = OnDrop(|| {
            if noted == Noted::New {
                self.ids.forget(batch);
            }
        });
        // A panic of code of others forgets the id as well.
        let verdict = self.decide_by(batch, &choices, refuses, retry_after)?;
        if verdict.allowed() && !verdict.is_unrecorded() {
            std::mem::forget(forgets);
        }
        if op == Op::Acquire {
            for ((check, choice), decision) in
                batch.checks().iter().zip(&choices).zip(verdict.decisions())
            {
                let limit = check.limit.name();
                let outcome = LimitOutcome::new(check.limit, decision, verdict.allowed());
                self.counts.count(limit, *choice, outcome, undetermined);
                breakers.tell(|observer, store| {
                    observer.decided_without_store(store, limit, *choice, outcome);
                });
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
        let checks = batch.checks();
        let local = || (0..checks.len()).filter(|at| choices[*at] == OnOutage::Local);
        let shares = local().map(|at| self.share_of(checks[at].limit));
        let shares: Vec<_> = shares.collect::<Result<_, _>>()?;
        let local_checks = local().zip(&shares);
        let local_checks =
            local_checks.map(|(at, share)| Check { limit: &share.limit, ..checks[at] });
        let local_checks: Vec<_> = local_checks.collect();
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
        let is_charged = !refuses && locally.allowed() && batch.operation() == Op::Acquire;
        let wait_us = u64::try_from(retry_after.as_micros()).unwrap_or(u64::MAX).max(1);
        let mut local_decisions = locally.decisions().iter();
        let decisions = checks.iter().zip(choices).map(|(check, choice)| {
            if *choice == OnOutage::Local {
                return local_decisions.next().copied();
            }
            // An id that was decided without the store had no closed limit then. An open one shows
            // its capacity.
            let allowed = *choice == OnOutage::Open || !refuses;
            let limit = check.limit.algorithm().capacity();
            let used = if is_charged { check.cost } else { 0 };
            let (remaining, wait_us) =
                if allowed { (limit.saturating_sub(used), 0) } else { (0, wait_us) };
            Some(Decision {
                allowed,
                cost: check.cost,
                limit,
                remaining,
                retry_after_us: Some(wait_us),
                replenish_after_us: wait_us,
                reset_after_us: wait_us,
            })
        });
        let accounts = local().enumerate().map(|(nth, at)| (at, locally.account(nth)));
        // What is not limited is not charged: it warns of nothing.
        let unlimited = (0..checks.len()).filter(|at| {
            choices[*at] != OnOutage::Local && checks[*at].limit.warns_at_percent().is_some()
        });
        let uncharged = Account { charged: Some(0), ..Account::default() };
        let accounts = accounts.chain(unlimited.map(|at| (at, uncharged)));
        let verdict = Verdict::several(decisions.flatten().collect()).with_accounts(accounts);
        Ok(if locally.is_unrecorded() { verdict.unrecorded() } else { verdict })
    }

    /// Keeps what is to be charged to the store on recovery. What was charged under an id is not:
    /// it may still be settled.
    fn note_charges(&self, batch: &Batch<'_, A>, choices: &[OnOutage], verdict: &Verdict) {
        let Some(journal) = &self.journal else { return };
        if batch.reservation_id().is_some() || !verdict.allowed() {
            return;
        }
        for (check, choice) in batch.checks().iter().zip(choices) {
            match batch.operation() {
                _ if *choice != OnOutage::Local => {}
                Op::Acquire | Op::Force => {
                    let counts =
                        |limit: &Limit<A>, key: &str, now| self.counts_still(limit, key, now) > 0;
                    journal.add(check.limit, check.key, (check.cost, batch.time()), counts);
                }
                Op::Refund => journal.take_off(check.limit, check.key, check.cost),
                Op::Peek | Op::Reset | Op::Settle | Op::Renew | Op::Extend | Op::Adopt => {}
            }
        }
    }

    /// How much of a key's local charges still counts.
    pub(super) fn counts_still(&self, limit: &Limit<A>, key: &str, now: Now) -> u64 {
        let Ok(share) = self.share_of(limit) else { return 0 };
        let check = Check { limit: &share.limit, key, cost: 0 };
        let peek = Batch::one(&check).op(Op::Peek).now(now);
        let left = self.local.apply_now(&peek).map(|verdict| verdict.remaining());
        left.map_or(0, |left| share.limit.algorithm().capacity().saturating_sub(left))
    }
}

#[cfg(test)]
mod tests {
    use ratelimit_core::AnyAlgorithm;

    use super::*;
    use crate::Fallback;

    #[test]
    fn the_shares_of_limits_that_come_and_go_are_bounded() {
        let limit = |n: usize| {
            let algorithm: AnyAlgorithm = "gcra 60/m burst 60".parse().expect("an algorithm");
            Limit::new(&format!("l{n}"), algorithm).expect("a name").on_outage(OnOutage::Local)
        };
        let limits = Limits::new([limit(0)]).expect("one");
        let settings = Fallback::builder().nodes(NonZeroU64::MIN);
        let fallback =
            settings.build(MemoryStore::<AnyAlgorithm>::new(), &limits).expect("a choice");
        let outage = &fallback.inner.outage;
        for n in 0..MOST_SHARES + 9 {
            let _ = outage.share_of(&limit(n)).expect("a share");
        }
        assert_eq!(outage.shares.values.len(), MOST_SHARES);
    }
}
