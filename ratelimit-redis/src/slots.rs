//! Splits a batch whose keys lie in several slots of a cluster, and runs its parts concurrently.

use std::future::Future;
use std::sync::Arc;

use futures_util::future::join_all;
use ratelimit_core::{
    Algorithm, Batch, Check, Decision, ErrorKind, Op, Refusal, Reservation, ReservationGroup,
    States, StoreError, Timestamp, Verdict, Write, decide,
};

use crate::connection::{Connection, slot};
use crate::deadline::Deadline;
use crate::error::RedisError;
use crate::reservation::group;
use crate::store::{CrossSlot, Inner};

/// The checks of a batch whose keys lie in one slot.
pub(crate) struct InSlot<'a, A> {
    checks: Vec<Check<'a, A>>,
    /// Their positions in the batch.
    positions: Vec<usize>,
    /// The group that reservations of the whole batch record.
    group: Option<Arc<ReservationGroup>>,
}

impl<C: Connection> Inner<C> {
    /// The parts of a batch that no single server can decide; `None`, almost always, if one can.
    pub(crate) fn parts<'a, A: Algorithm>(
        &self,
        batch: &Batch<'a, A>,
    ) -> Result<Option<Vec<InSlot<'a, A>>>, RedisError> {
        let checks = batch.checks();
        if checks.len() < 2 || !self.connection.is_cluster() {
            return Ok(None);
        }
        let group = group(&self.keys, batch);
        let mut parts: Vec<(u16, InSlot<'a, A>)> = Vec::new();
        for (position, check) in checks.iter().enumerate() {
            let slot = slot::of(&self.keys.shared(check.key));
            let known = parts.iter_mut().find(|(of, _)| *of == slot);
            if let Some((_, part)) = known {
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
            [one, other, ..] if self.cross_slot == CrossSlot::Refuse => {
                let key = |part: &InSlot<'_, A>| self.keys.shared(part.checks[0].key);
                Err(RedisError::CrossSlot { first: key(one), other: key(other) })
            }
            _ => Ok(Some(parts)),
        }
    }
}

impl<'a, A: Algorithm> InSlot<'a, A> {
    /// The batch reduced to these checks.
    pub(crate) fn batch<'p>(&'p self, whole: &'p Batch<'a, A>) -> Result<Batch<'p, A>, RedisError> {
        // A subset of distinct checks is distinct.
        let part =
            Batch::new(&self.checks).map_err(|error| RedisError::Config(error.to_string()))?;
        let part = part.op(whole.operation()).now(whole.time()).metadata(whole.metadata_given());
        let part = self.group.as_ref().map_or(part, |group| part.in_group(group));
        Ok(whole.reservation_id().map_or(part, |id| part.id(id)))
    }

    /// The checks that `keep` accepts; `None` if there are none.
    pub(crate) fn only(&self, keep: impl Fn(&Check<'a, A>) -> bool) -> Option<Self> {
        let kept = || self.checks.iter().zip(&self.positions).filter(|(check, _)| keep(check));
        kept().next()?;
        let (checks, positions) = kept().map(|(check, position)| (*check, *position)).unzip();
        Some(Self { checks, positions, group: self.group.clone() })
    }

    pub(crate) fn positions(&self) -> &[usize] {
        &self.positions
    }

    /// The decisions that the checks show if nothing is done.
    async fn untouched(
        &self,
        store: &impl SingleSlot<A>,
        whole: &Batch<'a, A>,
        deadline: Deadline,
    ) -> Result<Vec<Decision>, RedisError> {
        let free = |check: &Check<'a, A>| Check { cost: 0, ..*check };
        let checks = self.checks.iter().map(free).collect();
        let peeking = InSlot { checks, positions: self.positions.clone(), group: None };
        let batch =
            Batch::new(&peeking.checks).map_err(|error| RedisError::Config(error.to_string()))?;
        let shown = store.apply_in_slot(&batch.op(Op::Peek).now(whole.time()), deadline).await?;
        let decisions = shown.decisions().iter().zip(&self.checks);
        Ok(decisions.map(|(shown, check)| Decision { cost: check.cost, ..*shown }).collect())
    }
}

/// How a mode runs a batch that one server can decide.
pub(crate) trait SingleSlot<A: Algorithm> {
    /// Runs a batch whose keys all lie on one server.
    fn apply_in_slot(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> impl Future<Output = Result<Verdict, RedisError>> + Send;

    /// Checks whether that would be refused, and writes nothing.
    fn try_in_slot(
        &self,
        batch: &Batch<'_, A>,
        deadline: Deadline,
    ) -> impl Future<Output = Result<(), RedisError>> + Send;
}

/// Runs each slot's part independently: for every operation except an all-or-nothing acquire.
pub(crate) async fn each<A: Algorithm>(
    store: &impl SingleSlot<A>,
    whole: &Batch<'_, A>,
    parts: &[InSlot<'_, A>],
    deadline: Deadline,
) -> Result<Verdict, RedisError> {
    let settles = matches!(whole.operation(), Op::Settle | Op::Renew);
    if !settles {
        // Refuses what no state allows before anything is done.
        let _ = decide(whole, Timestamp::ZERO, &mut Nothing)?;
    }
    let known = match whole.reservation_id() {
        None => vec![true; parts.len()],
        // An earlier request under the id in one slot may refuse the whole batch.
        Some(id) => {
            let known = known(store, whole, parts, deadline).await?;
            if settles && !known.contains(&true) {
                return Err(Refusal::UnknownReservation { id }.into());
            }
            known
        }
    };
    let of_part = async |(part, known): (&InSlot<'_, A>, &bool)| {
        if !known {
            return part.untouched(store, whole, deadline).await;
        }
        Ok(store.apply_in_slot(&part.batch(whole)?, deadline).await?.decisions().to_vec())
    };
    let doing = parts.iter().zip(&known).map(of_part);
    let decisions = match whole.operation() {
        Op::Peek => asked(doing).await?,
        _ => done(doing).await?,
    };
    Ok(together(parts, &decisions))
}

/// Whether the slot of each part knows the batch's id.
async fn known<A: Algorithm>(
    store: &impl SingleSlot<A>,
    whole: &Batch<'_, A>,
    parts: &[InSlot<'_, A>],
    deadline: Deadline,
) -> Result<Vec<bool>, RedisError> {
    let trying = parts.iter().map(async |part| {
        let part = part.batch(whole)?;
        match store.try_in_slot(&part, deadline).await {
            Ok(()) => Ok(true),
            // As on one server: an error only if no slot has a reservation.
            Err(RedisError::Refused(Refusal::UnknownReservation { .. })) => Ok(false),
            // A read-only question does not remove a corrupt value, and the batch fails as long as the
            // value is there. Running the part in this slot removes the value and is refused. If the
            // value has disappeared meanwhile, the part is done as requested, and under an id not twice.
            Err(RedisError::Corrupt { .. }) if whole.operation() != Op::Peek => {
                store.apply_in_slot(&part, deadline).await.map(|_| true)
            }
            Err(error) => Err(error.of_a_lookup()),
        }
    });
    join_all(trying).await.into_iter().collect()
}

/// An empty state: what is refused on it is refused on any state.
struct Nothing;

impl<S> States<S> for Nothing {
    fn get(&self, _position: usize) -> Option<&S> {
        None
    }

    fn put(&mut self, _position: usize, _write: Write<S>) {}

    fn reservation(&self, _position: usize) -> Option<Reservation> {
        None
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_reservation(
        &mut self,
        _position: usize,
        _reservation: Reservation,
        _expires: Timestamp,
    ) {
    }
}

/// Joins the decisions of the parts into the batch's verdict.
pub(crate) fn together<A>(parts: &[InSlot<'_, A>], decisions: &[Vec<Decision>]) -> Verdict {
    let mut all: Vec<(usize, Decision)> = Vec::new();
    for (part, decisions) in parts.iter().zip(decisions) {
        all.extend(part.positions.iter().copied().zip(decisions.iter().copied()));
    }
    all.sort_unstable_by_key(|(position, _)| *position);
    Verdict::several(all.into_iter().map(|(_, decision)| decision).collect())
}

/// Runs read-only requests concurrently. Nothing is charged, whatever fails.
pub(crate) async fn asked<T>(
    futures: impl IntoIterator<Item = impl Future<Output = Result<T, RedisError>>>,
) -> Result<Vec<T>, RedisError> {
    let answers = join_all(futures).await.into_iter();
    answers.collect::<Result<_, _>>().map_err(RedisError::of_a_lookup)
}

/// Runs requests concurrently. The error says whether any of them may have been done.
pub(crate) async fn done<T>(
    futures: impl IntoIterator<Item = impl Future<Output = Result<T, RedisError>>>,
) -> Result<Vec<T>, RedisError> {
    let results = join_all(futures).await;
    match worst(&results) {
        Some(error) if results.iter().any(Result::is_ok) => Err(error.in_part()),
        Some(error) => Err(error),
        None => Ok(results.into_iter().flatten().collect()),
    }
}

/// The error that matters most: one after which a request may have been done, otherwise the first.
pub(crate) fn worst<T>(results: &[Result<T, RedisError>]) -> Option<RedisError> {
    let errors = || results.iter().filter_map(|result| result.as_ref().err());
    let in_doubt = errors().find(|error| error.kind() == ErrorKind::Indeterminate);
    in_doubt.or_else(|| errors().next()).cloned()
}
