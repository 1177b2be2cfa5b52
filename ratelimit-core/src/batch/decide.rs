//! [`decide`]: all checks of a batch, or none. Every store that steps in Rust calls it.

use alloc::vec::Vec;

use super::{Batch, Check};
use crate::algorithm::{Algorithm, Step, Write};
use crate::decision::{Decision, Verdict};
use crate::op::Op;
use crate::refusal::Refusal;
use crate::reservation::{Reservation, ReservationId};
use crate::timestamp::Timestamp;

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

/// What a check has, said of its cost.
fn untouched<A: Algorithm>(
    check: &Check<'_, A>,
    state: Option<&A::State>,
    now: Timestamp,
) -> Decision {
    check.limit.algorithm().step(state, now, 0).costing(check.cost).decision
}

impl<A: Algorithm> Batch<'_, A> {
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
}
