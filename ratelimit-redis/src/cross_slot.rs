//! The cross-slot protocol: decides a batch whose keys lie in several slots of a cluster, and so on several
//! servers.
//!
//! [`split`] sorts the checks by slot. An acquire or an extension is all or nothing, so it takes two waves: [`lua`] and
//! [`cas`] say how. An attempt is charged whatever the other checks decide, so [`multi`] takes one. In every other
//! operation [each](Across::each) slot does its part.

use std::collections::BTreeSet;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use ratelimit_core::store::{Batch, Check, Op, ReservationGroup};
use ratelimit_core::{Algorithm, Decision, ErrorKind, Refusal, StoreError, Verdict};

use crate::concurrent::all;
use crate::connection::{Connection, slot};
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};
use crate::mode::Mode;
use crate::reservation;
use crate::store::{CrossSlot, RedisStore, SingleSlot, refuse_unsupported};

mod cas;
mod lua;
mod multi;

/// A batch whose keys lie in several slots, so that no single server decides it.
pub(crate) struct Across<'b, A, M, C> {
    store: &'b RedisStore<M, C>,
    whole: &'b Batch<'b, A>,
    parts: Vec<InSlot<'b, A>>,
    deadline: Deadline,
}

/// The checks of a batch whose keys lie in one slot.
struct InSlot<'a, A> {
    checks: Vec<Check<'a, A>>,
    /// Their positions in the batch.
    positions: Vec<usize>,
    /// The group that reservations of the whole batch record.
    group: Option<Arc<ReservationGroup>>,
}

/// The parts of a batch that no single server can decide; `None`, almost always, if one can.
pub(crate) fn split<'b, A: Algorithm, M, C: Connection>(
    store: &'b RedisStore<M, C>,
    whole: &'b Batch<'b, A>,
    deadline: Deadline,
) -> Result<Option<Across<'b, A, M, C>>> {
    let (inner, checks) = (&store.inner, whole.checks());
    if checks.len() < 2 || !inner.connection.is_cluster() {
        return Ok(None);
    }
    let group = reservation::group(&inner.keys, whole);
    let mut parts: Vec<(u16, InSlot<'b, A>)> = Vec::new();
    for (position, check) in checks.iter().enumerate() {
        let slot = slot::of(&inner.keys.shared(check.key));
        if let Some((_, part)) = parts.iter_mut().find(|(of, _)| *of == slot) {
            part.checks.push(*check);
            part.positions.push(position);
        } else {
            let group = group.clone();
            let part = InSlot { checks: vec![*check], positions: vec![position], group };
            parts.push((slot, part));
        }
    }
    let parts: Vec<_> = parts.into_iter().map(|(_, part)| part).collect();
    match &parts[..] {
        [_] => Ok(None),
        [one, other, ..] if inner.cross_slot == CrossSlot::Refuse => {
            let key = |part: &InSlot<'_, A>| inner.keys.shared(part.checks[0].key);
            Err(RedisError::CrossSlot { first: key(one), other: key(other) })
        }
        _ => Ok(Some(Across { store, whole, parts, deadline })),
    }
}

/// A number of the server that decides a batch on a cluster, or of the combination of servers.
pub(crate) fn server_of<A: Algorithm, M, C: Connection>(
    store: &RedisStore<M, C>,
    batch: &Batch<'_, A>,
) -> Option<u64> {
    let (inner, checks) = (&store.inner, batch.checks());
    if !inner.connection.is_cluster() {
        return None;
    }
    let of = |check: &Check<'_, A>| inner.connection.server_of(&inner.keys.shared(check.key));
    let first = of(checks.first()?);
    if checks.iter().all(|check| check.key == checks[0].key) {
        return first;
    }
    let all: BTreeSet<_> = checks.iter().map(of).collect();
    if all.len() == 1 {
        return first;
    }
    let mut hasher = DefaultHasher::new();
    all.hash(&mut hasher);
    Some(hasher.finish())
}

impl<'a, A: Algorithm> InSlot<'a, A> {
    /// The batch reduced to these checks.
    fn batch<'p>(&'p self, whole: &'p Batch<'a, A>) -> Result<Batch<'p, A>> {
        // A subset of distinct checks is distinct.
        let part = Batch::new(&self.checks)?
            .op(whole.operation())
            .now(whole.time())
            .metadata(whole.metadata_given());
        let part = self.group.as_ref().map_or(part, |group| part.in_group(group));
        let part = whole.reservation_id().map_or(part, |id| part.id(id));
        Ok(if whole.is_settled_once() { part.settled_once() } else { part })
    }

    /// All checks of these parts, for [`join`].
    fn of_all(parts: &[Self]) -> Self {
        let checks = in_order(parts, parts.iter().map(|part| part.checks.iter().copied()));
        let positions = in_order(parts, parts.iter().map(|part| part.positions.iter().copied()));
        Self { checks, positions, group: None }
    }

    /// The checks that `keep` accepts; `None` if there are none.
    fn only(&self, keep: impl Fn(&Check<'a, A>) -> bool) -> Option<Self> {
        let selected = || self.checks.iter().zip(&self.positions).filter(|(check, _)| keep(check));
        selected().next()?;
        let (checks, positions) = selected().map(|(check, position)| (*check, *position)).unzip();
        Some(Self { checks, positions, group: self.group.clone() })
    }
}

impl<A: Algorithm, M: Mode, C: Connection> Across<'_, A, M, C>
where
    RedisStore<M, C>: SingleSlot<A>,
{
    /// Runs each slot's part independently: for every operation except an all-or-nothing acquire.
    pub(crate) async fn each(&self) -> Result<Verdict> {
        let Self { store, whole, parts, deadline } = self;
        let settles = whole.operation().needs_id();
        if !settles {
            // Before anything is done.
            refuse_unsupported(whole)?;
        }
        let known = match whole.reservation_id() {
            None => vec![true; parts.len()],
            // An earlier request under the id in one slot may refuse the whole batch.
            Some(id) => {
                let known = self.knows_id().await?;
                // As on one server, no lease of a renewal may have ended.
                let has_lease = |part: &InSlot<'_, A>| {
                    part.checks.iter().any(|check| check.limit.algorithm().has_leases())
                };
                let lease_has_ended = whole.operation() == Op::Renew
                    && parts.iter().zip(&known).any(|(part, known)| !known && has_lease(part));
                if settles && (lease_has_ended || !known.contains(&true)) {
                    return Err(Refusal::UnknownReservation { id }.into());
                }
                known
            }
        };
        let of_part = async |(part, known): (&InSlot<'_, A>, &bool)| {
            if !known {
                return self.untouched(part).await;
            }
            store.apply_in_slot(&part.batch(whole)?, *deadline).await
        };
        let verdicts = self.all_of(parts.iter().zip(&known).map(of_part)).await?;
        Ok(join(parts, &verdicts))
    }

    /// The decisions that the checks of a part show if nothing is done.
    async fn untouched(&self, part: &InSlot<'_, A>) -> Result<Verdict> {
        let free: Vec<_> = part.checks.iter().map(|check| Check { cost: 0, ..*check }).collect();
        let batch = Batch::new(&free)?.op(Op::Peek).now(self.whole.time());
        let shown = self.store.apply_in_slot(&batch, self.deadline).await?;
        let decisions = shown.decisions().iter().zip(&part.checks);
        let decisions =
            decisions.map(|(shown, check)| Decision { cost: check.cost, ..*shown }).collect();
        Ok(Verdict::several(decisions).with_accounts(shown.accounts()))
    }

    /// Charges the attempts of a batch on which this is the verdict, a denial, each slot on its own.
    async fn charge_attempts(&self, verdict: Verdict) -> Result<Verdict> {
        let attempts = |check: &Check<'_, A>| check.limit.algorithm().charges_denials();
        let parts: Vec<_> = self.parts.iter().filter_map(|part| part.only(attempts)).collect();
        if parts.is_empty() {
            return Ok(verdict);
        }
        let charging = parts.iter().map(async |part| {
            let batch = part.batch(self.whole)?.denied_elsewhere();
            self.store.apply_in_slot(&batch, self.deadline).await
        });
        let charged = all_of_requests(charging).await?;
        let mut decisions = verdict.decisions().to_vec();
        for (part, charged) in parts.iter().zip(charged) {
            for (position, decision) in part.positions.iter().zip(charged.decisions()) {
                decisions[*position] = *decision;
            }
        }
        Ok(Verdict::several(decisions).with_accounts(verdict.accounts()))
    }

    /// Whether the slot of each part knows the batch's id.
    async fn knows_id(&self) -> Result<Vec<bool>> {
        let trying = self.parts.iter().map(async |part| {
            let part = part.batch(self.whole)?;
            match self.store.try_in_slot(&part, self.deadline).await {
                Ok(()) => Ok(true),
                // As on one server: an error only if no slot has a reservation.
                Err(RedisError::Refused(Refusal::UnknownReservation { .. })) => Ok(false),
                // A read-only question does not remove a corrupt value, and the batch fails as long as the
                // value is there. Running the part in this slot removes the value and is refused. If the
                // value has disappeared meanwhile, the part is done as requested, and under an id not twice.
                Err(RedisError::Corrupt { .. }) if self.whole.operation() != Op::Peek => {
                    self.store.apply_in_slot(&part, self.deadline).await.map(|_| true)
                }
                Err(error) => Err(error),
            }
        });
        all_of_lookups(&self.parts, trying).await
    }
}

impl<A: Algorithm, M, C> Across<'_, A, M, C> {
    /// Runs the requests of the parts concurrently.
    async fn all_of<T>(
        &self,
        futures: impl IntoIterator<Item = impl Future<Output = Result<T>> + Send>,
    ) -> Result<Vec<T>> {
        match self.whole.operation() {
            Op::Peek => all_of_lookups(&self.parts, futures).await,
            _ => all_of_requests(futures).await,
        }
    }
}

/// Runs read-only requests concurrently, one for each part. Nothing is charged, whatever fails. Of
/// several refusals the error is that of the first check, as on one server.
async fn all_of_lookups<A: Algorithm, T>(
    parts: &[InSlot<'_, A>],
    futures: impl IntoIterator<Item = impl Future<Output = Result<T>> + Send>,
) -> Result<Vec<T>> {
    let answers = all(futures).await;
    // A refusal names a limit, of which another part may have an earlier check.
    let place = |(part, error): &(&InSlot<'_, A>, &RedisError)| match error {
        RedisError::Refused(refusal) => {
            let mut checks = part.checks.iter().zip(&part.positions);
            let refused = checks.find(|(check, _)| refusal.limit() == Some(check.limit.name()));
            refused.map(|(_, position)| *position)
        }
        _ => None,
    };
    let answered = parts.iter().zip(&answers);
    let errors = answered.filter_map(|(part, answer)| Some((part, answer.as_ref().err()?)));
    match errors.min_by_key(place) {
        Some((_, error)) => Err(error.clone().of_a_lookup()),
        None => Ok(answers.into_iter().flatten().collect()),
    }
}

/// What the parts have for each of their checks, in the order of the batch.
fn in_order<A, T>(
    parts: &[InSlot<'_, A>],
    of_parts: impl IntoIterator<Item = impl IntoIterator<Item = T>>,
) -> Vec<T> {
    let of_parts = parts.iter().zip(of_parts);
    let all = of_parts.flat_map(|(part, of_part)| part.positions.iter().zip(of_part));
    let mut all: Vec<_> = all.collect();
    all.sort_by_key(|(position, _)| **position);
    all.into_iter().map(|(_, of_check)| of_check).collect()
}

/// Joins the verdicts of the parts into the batch's.
fn join<A>(parts: &[InSlot<'_, A>], verdicts: &[Verdict]) -> Verdict {
    let decided = verdicts.iter().map(|verdict| {
        let decisions = verdict.decisions().iter().enumerate();
        decisions.map(|(nth, decision)| (*decision, verdict.account(nth)))
    });
    let (decisions, accounts): (_, Vec<_>) = in_order(parts, decided).into_iter().unzip();
    Verdict::several(decisions).with_accounts(accounts.into_iter().enumerate())
}

/// Runs requests concurrently. The error says whether any of them may have been done.
async fn all_of_requests<T>(
    futures: impl IntoIterator<Item = impl Future<Output = Result<T>> + Send>,
) -> Result<Vec<T>> {
    let results = all(futures).await;
    match worst(&results) {
        Some(error) if results.iter().any(Result::is_ok) => Err(error.in_part()),
        Some(error) => Err(error),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

/// The error that matters most: one after which a request may have been done, otherwise the first.
fn worst<T>(results: &[Result<T>]) -> Option<RedisError> {
    let errors = || results.iter().filter_map(|result| result.as_ref().err());
    let in_doubt = errors().find(|error| error.kind() == ErrorKind::Indeterminate);
    in_doubt.or_else(|| errors().next()).cloned()
}
