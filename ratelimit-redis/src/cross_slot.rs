//! The cross-slot protocol: decides a batch whose keys lie in several slots of a cluster, and so on
//! several servers.
//!
//! [`split`] sorts the checks by slot. An acquire or an extension is all or nothing, so it takes
//! two waves:
//!
//! 1. Ask every slot. If one denies, that is the verdict, and nothing has been written but
//!    attempts.
//! 2. Charge every slot. If one denies or has changed by now, another client came in between: the
//!    store takes back what the others charged and starts again, a bounded number of times.
//!
//! Asking first costs an admitted request one round trip more than charging at once and returning
//! the excess. In return a denied request writes nothing and blocks no capacity meanwhile. In every
//! other operation [each](Across::each) slot does its part.

use std::collections::BTreeSet;
use std::future::Future;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use ratelimit_core::store::{Batch, Check, Op, ReservationGroup, Snapshot};
use ratelimit_core::{Account, Algorithm, Decision, ErrorKind, Refusal, StoreError, Verdict};

use crate::concurrent::all;
use crate::connection::{Connection, slot};
use crate::deadline::Deadline;
use crate::error::{RedisError, Result};
use crate::records::TRIES;
use crate::reservation;
use crate::rounds::Rounds;
use crate::store::{CrossSlot, InSlot, Mode, RedisStore, refuse_unsupported};

/// How many rounds a batch gets when other clients interfere.
const ROUNDS: usize = 32;

/// A batch whose keys lie in several slots, so that no single server decides it.
pub(crate) struct Across<'b, A, M, C> {
    store: &'b RedisStore<M, C>,
    whole: &'b Batch<'b, A>,
    parts: Vec<Part<'b, A>>,
    deadline: Deadline,
}

/// The checks of a batch whose keys lie in one slot.
struct Part<'a, A> {
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
    let mut parts: Vec<(u16, Part<'b, A>)> = Vec::new();
    for (position, check) in checks.iter().enumerate() {
        let slot = slot::of(&inner.keys.shared(check.key));
        if let Some((_, part)) = parts.iter_mut().find(|(of, _)| *of == slot) {
            part.checks.push(*check);
            part.positions.push(position);
        } else {
            let group = group.clone();
            let part = Part { checks: vec![*check], positions: vec![position], group };
            parts.push((slot, part));
        }
    }
    let parts: Vec<_> = parts.into_iter().map(|(_, part)| part).collect();
    match &parts[..] {
        [_] => Ok(None),
        [one, other, ..] if inner.cross_slot == CrossSlot::Refuse => {
            let key = |part: &Part<'_, A>| inner.keys.shared(part.checks[0].key);
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

/// Decides a batch whose keys all lie in one slot, by the records of its callers.
pub(crate) async fn decide<A: Algorithm, M: Mode<A>, C: Connection>(
    store: &RedisStore<M, C>,
    batch: &Batch<'_, A>,
    deadline: Deadline,
    mut left: Option<&mut Option<Snapshot<A::State>>>,
) -> Result<Verdict> {
    for _ in 0..TRIES {
        let looked = M::look(store, batch)?;
        let checks = looked.checks(batch);
        let ruled = looked.ruled(batch, &checks);
        let left = left.as_deref_mut();
        match M::decide(store, &ruled, &looked.premises, deadline, left).await {
            Err(error) if error.is_stale() => {}
            decided => return decided,
        }
    }
    Err(RedisError::Contended { attempts: TRIES })
}

impl<'a, A: Algorithm> Part<'a, A> {
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

impl<A: Algorithm, M: Mode<A>, C: Connection> Across<'_, A, M, C> {
    /// Runs the batch.
    pub(crate) async fn apply(mut self) -> Result<Verdict> {
        match self.whole.operation() {
            Op::Acquire | Op::Peek => self.by_records().await,
            Op::Extend => {
                let unknown = self.unknown_to().await?;
                if let Some(refusal) = self.unknown_to_all(&unknown) {
                    return Err(refusal.into());
                }
                let mut known = unknown.iter().map(Option::is_none);
                let parts = std::mem::take(&mut self.parts).into_iter();
                let (known, mut parts) = parts.partition(|_| known.next().unwrap_or_default());
                self.parts = known;
                let mut verdicts = self.all_untouched(&parts).await?;
                // A blocked caller extends nothing.
                if verdicts.iter().any(|shown| !shown.allowed()) {
                    verdicts.extend(self.all_untouched(&self.parts).await?);
                    parts.append(&mut self.parts);
                    return Ok(join(&parts, &verdicts));
                }
                verdicts.push(self.by_records().await?);
                parts.push(Part::of_all(&self.parts));
                Ok(join(&parts, &verdicts))
            }
            _ => self.each().await,
        }
    }

    /// [`in_waves`](Self::in_waves), again if a record has changed since the store looked.
    async fn by_records(&self) -> Result<Verdict> {
        let (mut charged, mut attempts) = (false, 0);
        loop {
            attempts += 1;
            match self.in_waves(&mut charged).await {
                Err(error) if error.is_stale() => {
                    // An attempt counts once: if it stays charged, there is no other try.
                    if attempts == TRIES || (charged && self.counts_attempts()) {
                        return Err(RedisError::Contended { attempts }.after(charged));
                    }
                }
                decided => return decided.map_err(|error| error.after(charged)),
            }
        }
    }

    fn counts_attempts(&self) -> bool {
        self.whole.checks().iter().any(|check| check.limit.counts_attempts())
    }

    /// Asks every slot, and then charges every slot. Notes whether a charge of a round may remain.
    async fn in_waves(&self, charged: &mut bool) -> Result<Verdict> {
        let Self { store, whole, parts, deadline } = self;
        let is_peek = whole.operation() == Op::Peek;
        let asking = if is_peek { *deadline } else { deadline.to_charge() };
        let batches = parts.iter().map(|part| part.batch(whole)).collect::<Result<Vec<_>>>()?;
        let looked = batches.iter().map(|batch| M::look(store, batch));
        let looked = looked.collect::<Result<Vec<_>>>()?;
        let checks: Vec<_> =
            looked.iter().zip(&batches).map(|(looked, batch)| looked.checks(batch)).collect();
        let batches = looked.iter().zip(&batches).zip(&checks);
        let batches: Vec<_> =
            batches.map(|((looked, batch), checks)| looked.ruled(batch, checks)).collect();
        let ask = || {
            batches.iter().zip(&looked).map(|(batch, looked)| {
                M::would_decide(store, batch, &looked.premises, asking, true)
            })
        };
        if is_peek {
            return self.joined(&mut all_of_lookups(&self.parts, ask()).await?);
        }
        let turn = M::take_turns(store, whole, asking).await;
        let has_waited = turn.iter().any(|taken| taken.has_waited);
        let rounds = Rounds::new(ROUNDS, asking, &store.inner.peer);
        let mut rounds = rounds.after_others(has_waited);
        let counts_attempts = self.counts_attempts();
        // The verdict of the last round, if a slot denied in it.
        let mut denied = None;
        // What the last round decided on, if others changed it meanwhile.
        let mut before: Option<Vec<_>> = None;
        let mut may_charge = rounds.may_charge();
        loop {
            let asked = all_of_lookups(&self.parts, ask()).await;
            let mut slots = asked.map_err(|error| rounds.explain(error))?;
            if !slots.iter().all(|slot| slot.verdict().allowed()) {
                // Charging the attempts takes the turn itself.
                drop(turn);
                return self.charge_attempts(self.joined(&mut slots)?).await;
            }
            if let Some(before) = before.take() {
                let mut both = slots.iter().zip(&before);
                may_charge = if both.any(|(slot, before)| slot.has_changed_since(before)) {
                    rounds.another()
                } else {
                    rounds.another_after_expiry(2 * whole.checks().len())
                };
            }
            if !may_charge {
                return denied.ok_or_else(|| rounds.contended());
            }
            let made = all(slots.iter_mut().map(InSlot::charge)).await;
            if made.iter().all(|made| matches!(made, Ok(true))) {
                return self.joined(&mut slots);
            }
            rounds.begin();
            let back = deadline.to_give_back();
            let done = slots.iter_mut().zip(&made).filter(|(_, made)| made.is_ok());
            let undone = all(done.map(|(slot, _)| slot.take_back(back))).await;
            *charged |= undone.iter().any(|undone| !matches!(undone, Ok(true)));
            let (error, stale) = match worst(&made) {
                Some(error) if error.is_stale() => (None, Some(error)),
                error => (error.map(|error| rounds.explain(error)), None),
            };
            if let Some(error) = error.or_else(|| worst(&undone)).or(stale) {
                return Err(error);
            }
            let is_denied = slots.iter().any(|slot| !slot.verdict().allowed());
            denied = is_denied.then(|| self.joined(&mut slots)).transpose()?;
            // An attempt counts once: if it stays charged, there is no other round.
            if (*charged && counts_attempts) || (is_denied && !rounds.another()) {
                return denied.ok_or_else(|| rounds.contended());
            }
            may_charge = rounds.is_in_time();
            if !is_denied {
                before = Some(slots);
                rounds.pause().await;
            }
        }
    }

    /// The verdict of what each slot decides. If one denies, those that allow report what they
    /// decide in a denied batch.
    fn joined(&self, slots: &mut [M::InSlot<'_, C>]) -> Result<Verdict> {
        let is_denied = !slots.iter().all(|slot| slot.verdict().allowed());
        let verdicts = slots.iter_mut().map(|slot| match slot.verdict() {
            verdict if is_denied && verdict.allowed() => slot.denied(),
            verdict => Ok(verdict.clone()),
        });
        Ok(join(&self.parts, &verdicts.collect::<Result<Vec<_>>>()?))
    }

    /// Runs each slot's part independently: for every operation except an all-or-nothing acquire.
    async fn each(&self) -> Result<Verdict> {
        let Self { store, whole, parts, deadline } = self;
        let settles = whole.operation().needs_id();
        if !settles {
            // Before anything is done.
            refuse_unsupported(whole)?;
        }
        let unknown = match whole.reservation_id() {
            None => parts.iter().map(|_| None).collect(),
            // An earlier request under the id in one slot may refuse the whole batch.
            Some(_) => self.unknown_to().await?,
        };
        if let Some(refusal) = self.unknown_to_all(&unknown).filter(|_| settles) {
            return Err(refusal.into());
        }
        let of_part = async |(part, unknown): (&Part<'_, A>, &Option<Refusal>)| {
            if unknown.is_some() {
                return self.untouched(part).await;
            }
            decide(store, &part.batch(whole)?, *deadline, None).await
        };
        let verdicts = self.all_of(parts.iter().zip(&unknown).map(of_part)).await?;
        Ok(join(parts, &verdicts))
    }

    async fn all_untouched(&self, parts: &[Part<'_, A>]) -> Result<Vec<Verdict>> {
        all_of_lookups(parts, parts.iter().map(|part| self.untouched(part))).await
    }

    /// The decisions that the checks of a part show if nothing is done.
    async fn untouched(&self, part: &Part<'_, A>) -> Result<Verdict> {
        let free: Vec<_> = part.checks.iter().map(|check| Check { cost: 0, ..*check }).collect();
        let batch = Batch::new(&free)?.op(Op::Peek).now(self.whole.time());
        let shown = decide(self.store, &batch, self.deadline, None).await?;
        let decisions = shown.decisions().iter().zip(&part.checks);
        let decisions =
            decisions.map(|(shown, check)| Decision { cost: check.cost, ..*shown }).collect();
        let accounts = part.checks.iter().enumerate().map(|(nth, check)| {
            let charged = check.limit.warns_at_percent().map(|_| 0);
            (nth, Account { charged, ..shown.account(nth) })
        });
        Ok(Verdict::several(decisions).with_accounts(accounts))
    }

    /// Charges the attempts of a batch on which this is the verdict, a denial, each slot on its
    /// own.
    async fn charge_attempts(&self, verdict: Verdict) -> Result<Verdict> {
        let attempts = |check: &Check<'_, A>| check.limit.counts_attempts();
        let parts: Vec<_> = self.parts.iter().filter_map(|part| part.only(attempts)).collect();
        if parts.is_empty() {
            return Ok(verdict);
        }
        let charging = parts.iter().map(async |part| {
            let batch = part.batch(self.whole)?.denied_elsewhere();
            decide(self.store, &batch, self.deadline, None).await
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

    /// The refusal of each part whose slot does not know the batch's id.
    async fn unknown_to(&self) -> Result<Vec<Option<Refusal>>> {
        let trying = self.parts.iter().map(async |part| {
            let part = part.batch(self.whole)?;
            match M::would_decide(self.store, &part, &[], self.deadline, false).await {
                Ok(_) => Ok(None),
                // As on one server: an error only if no slot has a reservation.
                Err(RedisError::Refused(unknown @ Refusal::UnknownReservation { .. })) => {
                    Ok(Some(unknown))
                }
                // A read-only question does not remove a corrupt value, and the batch fails as long
                // as the value is there. Running the part in this slot removes the value and is
                // refused. If the value has disappeared meanwhile, the part is done as requested,
                // and under an id not twice.
                Err(RedisError::Corrupt { .. }) if self.whole.operation() != Op::Peek => {
                    decide(self.store, &part, self.deadline, None).await.map(|_| None)
                }
                Err(error) => Err(error),
            }
        });
        all_of_lookups(&self.parts, trying).await
    }

    /// The refusal of the whole batch by what is [unknown](Self::unknown_to) to its slots: none
    /// knows the id, or, as on one server, a lease of a renewal has ended.
    fn unknown_to_all(&self, unknown: &[Option<Refusal>]) -> Option<Refusal> {
        let renews = self.whole.operation() == Op::Renew;
        let checks = self.whole.checks().iter().enumerate();
        // The place of the limit that a refusal names, and whether that has no leases to end.
        let place = |refusal: &&Refusal| {
            let mut checks = checks.clone();
            let named = checks.find(|(_, check)| refusal.limit() == Some(check.limit.name()));
            let has_lease = |check: &Check<'_, A>| check.limit.algorithm().has_leases();
            let lives_on = !named.is_some_and(|(_, check)| renews && has_lease(check));
            (lives_on, named.map(|(position, _)| position))
        };
        let first = unknown.iter().flatten().min_by_key(place)?;
        let refuses = unknown.iter().all(Option::is_some) || !place(&first).0;
        refuses.then(|| first.clone())
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

/// Runs read-only requests of these parts concurrently. Nothing is charged, whatever fails. Of
/// several refusals the error is that of the first check, as on one server.
async fn all_of_lookups<A: Algorithm, T>(
    parts: &[Part<'_, A>],
    futures: impl IntoIterator<Item = impl Future<Output = Result<T>> + Send>,
) -> Result<Vec<T>> {
    let answers = all(futures).await;
    // A refusal names a limit, of which another part may have an earlier check.
    let place = |(part, error): &(&Part<'_, A>, &RedisError)| match error {
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
    parts: &[Part<'_, A>],
    of_parts: impl IntoIterator<Item = impl IntoIterator<Item = T>>,
) -> Vec<T> {
    let of_parts = parts.iter().zip(of_parts);
    let all = of_parts.flat_map(|(part, of_part)| part.positions.iter().zip(of_part));
    let mut all: Vec<_> = all.collect();
    all.sort_by_key(|(position, _)| **position);
    all.into_iter().map(|(_, of_check)| of_check).collect()
}

/// Joins the verdicts of the parts into the batch's.
fn join<A>(parts: &[Part<'_, A>], verdicts: &[Verdict]) -> Verdict {
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
