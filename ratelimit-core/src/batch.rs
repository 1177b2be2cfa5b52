//! [`Batch`]: several checks decided as one, all or nothing; and [`decide`], which every store calls.

use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::algorithm::{Algorithm, Compact, Step, Write, stepped_fast};
use crate::decision::{Decision, Verdict};
use crate::error::ConfigError;
use crate::limit::Limit;
use crate::op::{Now, Op};
use crate::refusal::Refusal;
use crate::reservation::{Reservation, ReservationGroup, ReservationId};
use crate::timestamp::Timestamp;

/// One limit asked about one key.
#[derive(Debug)]
pub struct Check<'a, A> {
    /// The limit.
    pub limit: &'a Limit<A>,
    /// Whom it is kept for.
    pub key: &'a str,
    /// What the request costs this limit.
    pub cost: u64,
}

impl<A> Clone for Check<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Check<'_, A> {}

/// Several checks that are decided together: all are charged or none is.
///
/// ```
/// use ratelimit_core::{Batch, Check, Gcra, Limit};
/// let limit = Limit::new("burst", Gcra::new("10/s".parse()?, 20)?)?;
/// let check = Check { limit: &limit, key: "alice", cost: 1 };
/// assert_eq!(Batch::one(&check).checks().len(), 1);
/// assert!(Batch::new(&[check, check]).is_err()); // a key named twice
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Debug)]
pub struct Batch<'a, A> {
    checks: &'a [Check<'a, A>],
    op: Op,
    now: Now,
    id: Option<ReservationId>,
    metadata: &'a [u8],
    denied_elsewhere: bool,
    group: Option<&'a Arc<ReservationGroup>>,
}

impl<A> Clone for Batch<'_, A> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<A> Copy for Batch<'_, A> {}

impl<'a, A: Algorithm> Batch<'a, A> {
    /// These checks, to be acquired at the store's time.
    ///
    /// # Errors
    /// The same limit and key named twice: the second would not see what the first charged.
    pub fn new(checks: &'a [Check<'a, A>]) -> Result<Self, ConfigError> {
        for (place, check) in checks.iter().enumerate() {
            let same = |other: &&Check<'_, A>| {
                other.key == check.key && other.limit.name() == check.limit.name()
            };
            if checks[..place].iter().any(|other| same(&other)) {
                return Err(ConfigError::new(format!(
                    "a batch names the key {:?} twice; name it once, with the cost of both",
                    check.key
                ))
                .in_limit(check.limit.name()));
            }
        }
        Ok(Self::distinct(checks))
    }

    /// A single check, to be acquired at the store's time.
    #[must_use]
    pub const fn one(check: &'a Check<'a, A>) -> Self {
        Self::distinct(core::slice::from_ref(check))
    }

    /// Checks whose limits are already known to have different names.
    pub(crate) const fn distinct(checks: &'a [Check<'a, A>]) -> Self {
        Self {
            checks,
            op: Op::Acquire,
            now: Now::Store,
            id: None,
            metadata: &[],
            denied_elsewhere: false,
            group: None,
        }
    }

    /// The same checks for another operation.
    #[must_use]
    pub const fn op(mut self, op: Op) -> Self {
        self.op = op;
        self
    }

    /// The same checks at another time.
    #[must_use]
    pub const fn now(mut self, now: Now) -> Self {
        self.now = now;
        self
    }

    /// The same checks under an id: they are done once, however often they are sent, and what is
    /// acquired can be settled and renewed.
    #[must_use]
    pub const fn id(mut self, id: ReservationId) -> Self {
        self.id = Some(id);
        self
    }

    /// The same checks with what is to be kept of the caller, where an algorithm keeps any.
    #[must_use]
    pub const fn metadata(mut self, metadata: &'a [u8]) -> Self {
        self.metadata = metadata;
        self
    }

    /// The same operation on other checks, all of them distinct: a part of these, or several of these as one. For stores
    /// that decide a batch in parts.
    #[must_use]
    pub const fn with_checks<'p>(&self, checks: &'p [Check<'p, A>]) -> Batch<'p, A>
    where
        'a: 'p,
    {
        Batch { checks, ..*self }
    }

    /// The same checks as a part of a larger batch that another part denies: only limits that count attempts are
    /// charged. For stores that decide a batch in parts.
    #[must_use]
    pub const fn denied_elsewhere(mut self) -> Self {
        self.denied_elsewhere = true;
        self
    }

    /// The same checks as a part of a larger batch with an id, whose [group](Self::reservation_group) this is. For stores
    /// that decide a batch in parts.
    #[must_use]
    pub const fn in_group(mut self, group: &'a Arc<ReservationGroup>) -> Self {
        self.group = Some(group);
        self
    }

    /// What a hold of this batch keeps of the other checks: nothing if there are none, or no id. `fingerprint` is what
    /// [`States::fingerprint`] says.
    #[must_use]
    pub fn reservation_group(
        &self,
        fingerprint: impl FnOnce() -> u64,
    ) -> Option<Arc<ReservationGroup>> {
        if let Some(group) = self.group {
            return Some(group.clone());
        }
        if self.id.is_none() || self.checks.len() < 2 {
            return None;
        }
        let names: Vec<_> = self.checks.iter().map(|check| check.limit.name()).collect();
        let limits = names.join(",").into();
        Some(Arc::new(ReservationGroup { limits, fingerprint: fingerprint() }))
    }

    /// The checks.
    #[must_use]
    pub const fn checks(&self) -> &'a [Check<'a, A>] {
        self.checks
    }

    /// What is to be done.
    #[must_use]
    pub const fn operation(&self) -> Op {
        self.op
    }

    /// Whose clock decides.
    #[must_use]
    pub const fn time(&self) -> Now {
        self.now
    }
}

/// Where [`decide`] finds the states of a batch and leaves what becomes of them. Positions are those
/// of [`Batch::checks`].
pub trait States<S> {
    /// The state of the check at this position.
    fn get(&self, position: usize) -> Option<&S>;

    /// Does to the state of the check at this position what `write` says. [`decide`] calls it once all checks have
    /// been stepped.
    fn put(&mut self, position: usize, write: Write<S>);

    /// What is held under the batch's id by the check at this position. Asked only of a batch with
    /// an id.
    fn reservation(&self, position: usize) -> Option<Reservation>;

    /// A number that stands for the limits and keys of all checks of the batch, and differs for any others. Asked only
    /// of a batch with an id and several checks.
    fn fingerprint(&self) -> u64;

    /// Replaces what is held under the batch's id by the check at this position, until `expires`.
    fn put_reservation(&mut self, position: usize, reservation: Reservation, expires: Timestamp);
}

/// As many checks as a batch has, as a rule.
const FEW: usize = 4;

/// What each check comes to, as long as the others agree; of a few without an allocation.
struct Outcomes<S> {
    few: [Option<Step<S>>; FEW],
    more: Vec<Step<S>>,
    /// What is to be held from now on, and until when: of each, if the batch has an id.
    reservations: Vec<Option<(Reservation, Timestamp)>>,
}

impl<S> Outcomes<S> {
    fn new() -> Self {
        Self { few: core::array::from_fn(|_| None), more: Vec::new(), reservations: Vec::new() }
    }

    fn steps(&self) -> impl Iterator<Item = &Step<S>> {
        self.few.iter().flatten().chain(&self.more)
    }

    /// Notes what the check at this position comes to: one after the other.
    #[inline]
    fn note(&mut self, position: usize, step: Step<S>) {
        match self.few.get_mut(position) {
            Some(place) => *place = Some(step),
            None => self.more.push(step),
        }
    }
}

/// What the id of a batch says to a check.
enum Named {
    /// Nothing yet: the operation is new.
    New,
    /// It has been done: nothing more is charged.
    Done,
    /// There is a charge to settle or renew.
    Held(Reservation),
    /// There is none, or none any more.
    Unknown,
}

/// Decides a batch: steps every check, then writes all of them or none.
///
/// The one place that knows what all or nothing means; each store that steps in Rust calls it, with
/// the states held still (under its lock, or before a compare-and-set).
///
/// # Errors
/// A request that cannot be. Then nothing was written.
#[inline]
pub fn decide<A: Algorithm>(
    batch: &Batch<'_, A>,
    now: Timestamp,
    states: &mut impl States<A::State>,
) -> Result<Verdict, Refusal> {
    batch.validate()?;
    if let [check] = batch.checks
        && batch.id.is_none()
        && !batch.denied_elsewhere
    {
        let Step { decision, mut write } = batch.step(check, states.get(0), now)?;
        if batch.op != Op::Peek {
            batch.annotate(check, &mut write);
            states.put(0, write);
        }
        return Ok(Verdict::one(decision));
    }

    decide_several(batch, now, states)
}

/// [`decide`] for all but one single check.
#[inline(never)]
fn decide_several<A: Algorithm>(
    batch: &Batch<'_, A>,
    now: Timestamp,
    states: &mut impl States<A::State>,
) -> Result<Verdict, Refusal> {
    // Filled where it lies: to hand it over would be to copy it.
    let mut outcomes = Outcomes::new();
    batch.outcomes(now, states, &mut outcomes)?;
    let all_allowed = !batch.denied_elsewhere && outcomes.steps().all(|step| step.decision.allowed);
    let mut decisions = Vec::with_capacity(batch.checks.len());
    // The algorithms' code runs to its end before the first write: a panic there charges nothing.
    let Outcomes { few, more, reservations } = &mut outcomes;
    let steps = few.iter_mut().flatten().chain(&mut *more);
    for ((position, check), step) in batch.checks.iter().enumerate().zip(steps) {
        if all_allowed {
            batch.annotate(check, &mut step.write);
        } else if check.limit.algorithm().charges_denials() {
            batch.annotate(check, &mut step.write);
            if step.decision.allowed {
                let after = step.write.after(states.get(position));
                step.decision.retry_after_us =
                    check.limit.algorithm().wait_us(after, now, check.cost);
            }
        } else {
            step.write = Write::Keep;
            if let Some(reservation) = reservations.get_mut(position) {
                *reservation = None;
            }
            if step.decision.allowed {
                // Nothing is charged, so the limits that would have admitted show what they have.
                step.decision = untouched(check, states.get(position), now);
            }
        }
        decisions.push(step.decision);
    }
    if batch.op != Op::Peek {
        for (position, step) in few.iter_mut().flatten().chain(more).enumerate() {
            states.put(position, core::mem::replace(&mut step.write, Write::Keep));
            if let Some((reservation, expires)) =
                reservations.get_mut(position).and_then(Option::take)
            {
                states.put_reservation(position, reservation, expires);
            }
        }
    }
    Ok(Verdict::several(decisions))
}

/// Where [`decide_compact`] finds the states of a batch, each as a [`Compact`] one, and leaves what may become of them.
pub trait CompactStates {
    /// The state of the check at this position: the same whenever it is asked for. `None` ends the attempt.
    fn get(&mut self, position: usize) -> Option<Compact>;

    /// Notes what becomes of the state of the check at this position, in place of what has been noted before.
    /// `None` ends the attempt.
    fn note(&mut self, position: usize, write: Write<Compact>) -> Option<()>;
}

/// [`decide`] for a store that has found small states of all checks, of what is plainly acquired or peeked at.
/// What was noted last of each is then to be written. `None`, and nothing has been decided, where it takes more.
#[inline]
pub fn decide_compact<A: Algorithm>(
    batch: &Batch<'_, A>,
    now: Timestamp,
    states: &mut impl CompactStates,
) -> Option<Verdict> {
    if !batch.is_plain() {
        return None;
    }
    let mut decisions = Vec::with_capacity(batch.checks.len());
    let mut all_allowed = true;
    for (position, check) in batch.checks.iter().enumerate() {
        let (algorithm, state) = (check.limit.algorithm(), states.get(position)?);
        let Step { decision, write } = match stepped_fast(algorithm, state, now, check.cost) {
            Some(step) => step,
            None => algorithm.step_compact(Some(state), now, check.cost)?,
        };
        all_allowed &= decision.allowed;
        decisions.push(decision);
        if batch.op != Op::Peek {
            states.note(position, write)?;
        }
    }
    if !all_allowed {
        for ((position, check), decision) in batch.checks.iter().enumerate().zip(&mut decisions) {
            let algorithm = check.limit.algorithm();
            if algorithm.charges_denials() {
                if decision.allowed {
                    let state = states.get(position)?;
                    let write = algorithm.step_compact(Some(state), now, check.cost)?.write;
                    let after = match write.after(Some(&state)) {
                        Some(after) => Some(A::from_compact(*after)?),
                        None => None,
                    };
                    decision.retry_after_us = algorithm.wait_us(after.as_ref(), now, check.cost);
                }
                continue;
            }
            states.note(position, Write::Keep)?;
            if decision.allowed {
                // As in `untouched`.
                let step = algorithm.step_compact(Some(states.get(position)?), now, 0)?;
                *decision = step.costing(check.cost).decision;
            }
        }
    }
    Some(Verdict::several(decisions))
}

/// What a check has, said of its cost.
fn untouched<A: Algorithm>(
    check: &Check<'_, A>,
    state: Option<&A::State>,
    now: Timestamp,
) -> Decision {
    check.limit.algorithm().step(state, now, 0).costing(check.cost).decision
}

impl<A: Algorithm> Batch<'_, A> {
    /// Refuses what no state could make possible. [`decide`] does so; a store that decides elsewhere
    /// does so before.
    ///
    /// # Errors
    /// What is wrong with the request.
    #[inline]
    pub fn validate(&self) -> Result<(), Refusal> {
        if matches!(self.op, Op::Settle | Op::Renew) && self.id.is_none() {
            return Err(Refusal::NoId { op: self.op });
        }
        if self.id.is_none() && self.metadata.is_empty() {
            return Ok(());
        }
        self.validate_more()
    }

    /// What is said of ids and metadata, if there are any.
    fn validate_more(&self) -> Result<(), Refusal> {
        let reservations = matches!(self.op, Op::Acquire | Op::Settle | Op::Renew);
        for check in self.checks {
            let (algorithm, limit) = (check.limit.algorithm(), || check.limit.name().into());
            match algorithm.metadata_bytes() {
                Some(most) if most < self.metadata.len() => {
                    let bytes = self.metadata.len();
                    return Err(Refusal::Metadata { limit: limit(), bytes, most });
                }
                _ => {}
            }
            if self.id.is_some() && reservations {
                if algorithm.reservation_us().is_none() {
                    return Err(Refusal::CannotReserve { limit: limit() });
                }
                if self.op == Op::Acquire && check.cost == 0 {
                    return Err(Refusal::HoldsNothing { limit: limit() });
                }
            }
        }
        Ok(())
    }

    fn outcomes(
        &self,
        now: Timestamp,
        states: &impl States<A::State>,
        outcomes: &mut Outcomes<A::State>,
    ) -> Result<(), Refusal> {
        let Some(id) = self.id else {
            for (position, check) in self.checks.iter().enumerate() {
                let state = states.get(position);
                // Straight to where it lies: what a function returns is copied there.
                let step = match self.op {
                    Op::Acquire | Op::Peek => check.limit.algorithm().step(state, now, check.cost),
                    _ => self.step(check, state, now)?,
                };
                outcomes.note(position, step);
            }
            return Ok(());
        };
        let group = self.reservation_group(|| states.fingerprint());
        let mut known = !matches!(self.op, Op::Settle | Op::Renew);
        for (position, check) in self.checks.iter().enumerate() {
            let algorithm = check.limit.algorithm();
            let life_us = algorithm.reservation_us().unwrap_or(Reservation::LIFE_US);
            let known_as = states
                .reservation(position)
                .filter(|reservation| reservation.is_live(now, life_us));
            if let Some(reservation) = &known_as
                && reservation.group != group
            {
                let name = check.limit.name();
                let reserved =
                    reservation.group.as_ref().map_or(name, |group| &group.limits).into();
                return Err(Refusal::OtherChecks { limit: name.into(), id, reserved });
            }
            let named = self.named(check, id, known_as)?;
            known |= !matches!(named, Named::Unknown);
            let state = states.get(position);
            let at = algorithm.charged_at(state, now);
            let (step, left) = match named {
                Named::Done | Named::Unknown => {
                    let decision = untouched(check, state, now);
                    (Step { decision, write: Write::Keep }, None)
                }
                Named::New => {
                    // What is acquired waits to be settled; all else has been settled by being done.
                    let settled = (self.op != Op::Acquire).then_some(check.cost);
                    let new = Reservation {
                        settled,
                        group: group.clone(),
                        ..Reservation::new(at, check.cost)
                    };
                    (self.step(check, state, now)?, Some(new))
                }
                Named::Held(reservation) if self.op == Op::Renew => {
                    let step = algorithm.renew(state, now, &reservation).costing(check.cost);
                    let moved = matches!(step.write, Write::Put { .. });
                    let timestamp = if moved { at } else { reservation.timestamp };
                    (
                        step,
                        Some(Reservation {
                            timestamp,
                            since: at.max(reservation.since),
                            ..reservation
                        }),
                    )
                }
                Named::Held(reservation) => {
                    let step = algorithm.settle(state, now, &reservation, check.cost).ok_or_else(
                        || Refusal::CannotReserve { limit: check.limit.name().into() },
                    )?;
                    (step, Some(Reservation { settled: Some(check.cost), ..reservation }))
                }
            };
            let expiring = |reservation: Reservation| {
                let expires = reservation.since.saturating_add_us(life_us);
                (reservation, expires)
            };
            outcomes.note(position, step);
            outcomes.reservations.push(left.map(expiring));
        }
        if known { Ok(()) } else { Err(Refusal::UnknownReservation { id }) }
    }

    /// What the id says to a check that knows it as this.
    fn named(
        &self,
        check: &Check<'_, A>,
        id: ReservationId,
        known_as: Option<Reservation>,
    ) -> Result<Named, Refusal> {
        let settling = matches!(self.op, Op::Settle | Op::Renew);
        let holding = settling || matches!(self.op, Op::Acquire | Op::Peek);
        let limit = || check.limit.name().into();
        match known_as {
            None if settling => Ok(Named::Unknown),
            None => Ok(Named::New),
            Some(Reservation { settled: Some(at), .. }) => {
                // The same once more is how a lost answer is asked for again.
                let same = at == check.cost && !matches!(self.op, Op::Acquire | Op::Renew);
                if same {
                    Ok(Named::Done)
                } else {
                    Err(Refusal::Settled { limit: limit(), id, at })
                }
            }
            Some(reservation) if settling => Ok(Named::Held(reservation)),
            Some(reservation) if holding && reservation.cost == check.cost => Ok(Named::Done),
            Some(reservation) if holding => {
                Err(Refusal::Held { limit: limit(), id, at: reservation.cost })
            }
            Some(_) => Err(Refusal::Pending { limit: limit(), id }),
        }
    }

    #[inline]
    fn step(
        &self,
        check: &Check<'_, A>,
        state: Option<&A::State>,
        now: Timestamp,
    ) -> Result<Step<A::State>, Refusal> {
        let algorithm = check.limit.algorithm();
        let step = match self.op {
            Op::Acquire | Op::Peek => Some(algorithm.step(state, now, check.cost)),
            Op::Refund => algorithm.refund(state, now, check.cost),
            Op::Force => algorithm.force(state, now, check.cost),
            Op::Reset => {
                let decision = untouched(check, None, now);
                Some(Step { decision, write: Write::Remove })
            }
            // Never without an id, and with one not here.
            Op::Settle | Op::Renew => None,
        };
        step.ok_or_else(|| Refusal::Unsupported { limit: check.limit.name().into(), op: self.op })
    }

    /// Adds the caller's metadata to what the write charges.
    #[inline]
    fn annotate(&self, check: &Check<'_, A>, write: &mut Write<A::State>) {
        let charges = matches!(self.op, Op::Acquire | Op::Force);
        if let (true, false, Write::Put { state, .. }) = (charges, self.metadata.is_empty(), write)
        {
            check.limit.algorithm().annotate(state, self.metadata);
        }
    }

    /// Whether it is a part of a larger batch: [denied elsewhere](Self::denied_elsewhere), or [in its
    /// group](Self::in_group).
    #[inline]
    #[must_use]
    pub const fn is_part(&self) -> bool {
        self.denied_elsewhere || self.group.is_some()
    }

    /// Whether it acquires or peeks, and there is no more to it than checks and a time: no id, and no metadata.
    #[inline]
    #[must_use]
    pub const fn is_plain(&self) -> bool {
        matches!(self.op, Op::Acquire | Op::Peek)
            && self.id.is_none()
            && self.metadata.is_empty()
            && !self.is_part()
    }

    /// The id under which the batch is done.
    #[must_use]
    pub const fn reservation_id(&self) -> Option<ReservationId> {
        self.id
    }

    /// What is to be kept of the caller.
    #[must_use]
    pub const fn metadata_given(&self) -> &[u8] {
        self.metadata
    }
}
