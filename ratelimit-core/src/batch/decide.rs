//! [`decide`]: all checks of a batch, or none. Every store that steps in Rust calls it.

use alloc::vec::Vec;

use super::{Batch, Check, Now};
use crate::algorithms::{Algorithm, Step, Write};
use crate::decision::{Account, Decision, Verdict};
use crate::op::Op;
use crate::record::Standing;
use crate::refusal::Refusal;
use crate::reservation::{Reservation, ReservationId};
use crate::timestamp::Timestamp;

/// Where [`decide`] reads the states of a batch and writes the next ones. Positions are those of
/// [`Batch::checks`].
pub trait States<S> {
    /// The state of the check at this position.
    fn get(&self, position: usize) -> Option<&S>;

    /// Applies a write to the state of the check at this position. [`decide`] calls it after it has
    /// stepped all checks.
    fn put(&mut self, position: usize, write: Write<S>);

    /// The reservation that the check at this position has under the batch's id. Called only for a
    /// batch with an id.
    fn reservation(&self, position: usize) -> Option<Reservation>;

    /// A hash of the limits and keys of all checks of the batch. Called only for a batch with an id
    /// and several checks.
    fn fingerprint(&self) -> u64;

    /// Writes the reservation that the check at this position has under the batch's id, until
    /// `expires`.
    fn put_reservation(&mut self, position: usize, reservation: Reservation, expires: Timestamp);
}

/// The step of each check, before it is known whether all of them admit; what it charges; and, if
/// the batch has an id, its new reservation and when that expires.
type Steps<S> = Vec<(Step<S>, Charge, Option<(Timestamp, Reservation)>)>;

/// What a step charges, where that is not the cost of its decision.
#[derive(Clone, Copy, Default)]
struct Charge {
    forgiven: u64,
    /// Only told of a limit that warns.
    charged: Option<u64>,
}

impl Charge {
    /// That of a check that charges nothing.
    fn none<A: Algorithm>(check: &Check<'_, A>) -> Self {
        Self { forgiven: 0, charged: check.limit.warns_at_percent().map(|_| 0) }
    }
}

/// What a check knows about the id of its batch.
enum IdState {
    /// Nothing: the operation is new.
    New,
    /// The operation was done before: it charges nothing more.
    Done,
    /// A reservation to settle or renew.
    Reserved(Reservation),
    /// No live reservation to settle or renew.
    Unknown,
}

/// Decides a batch: steps every check, then writes all of them or none.
///
/// Every store that steps in Rust calls it, with states that no other thread changes meanwhile
/// (under a lock, or before a compare-and-set).
///
/// # Errors
/// A request that no state could satisfy. Then nothing was written.
#[inline]
pub fn decide<A: Algorithm>(
    batch: &Batch<'_, A>,
    now: Timestamp,
    states: &mut impl States<A::State>,
) -> Result<Verdict, Refusal> {
    batch.validate()?;
    // Given times end as well, but the states that they leave outlive them.
    if now == Timestamp::MAX && batch.now == Now::Store {
        return Err(Refusal::EndOfTime { now_us: now.as_us() });
    }
    if let [check] = batch.checks
        && batch.id.is_none()
        && !batch.denied_elsewhere
        && !batch.has_standings()
    {
        let state = states.get(0);
        let Step { decision, mut write } = batch.step(check, state, now)?;
        let charge = batch.charge(check, 0, state, now);
        let account = account(check, (&decision, write.after(state)), now, charge);
        if batch.op != Op::Peek {
            batch.annotate(check, &mut write);
            states.put(0, write);
        }
        return Ok(Verdict::one(decision).with_accounts(account.map(|account| (0, account))));
    }

    decide_several(batch, now, states)
}

/// [`decide`] for all batches but those of one plain check.
#[inline(never)]
fn decide_several<A: Algorithm>(
    batch: &Batch<'_, A>,
    now: Timestamp,
    states: &mut impl States<A::State>,
) -> Result<Verdict, Refusal> {
    let mut steps = batch.step_all(now, states)?;
    let all_allowed =
        !batch.denied_elsewhere && steps.iter().all(|(step, ..)| step.decision.allowed);
    let mut decisions = Vec::with_capacity(batch.checks.len());
    let mut accounts = Vec::new();
    // All code of the algorithms runs before the first write, so a panic there charges nothing.
    for ((position, check), (step, charge, reservation)) in
        batch.checks.iter().enumerate().zip(&mut steps)
    {
        if all_allowed {
            batch.annotate(check, &mut step.write);
        } else if check.limit.counts_attempts() && !batch.is_spared(position) {
            batch.annotate(check, &mut step.write);
            if step.decision.allowed {
                let after = step.write.after(states.get(position));
                let algorithm = check.limit.algorithm();
                step.decision.retry_after_us =
                    algorithm.step(after, now, check.cost).decision.retry_after_us;
            }
        } else {
            step.write = Write::Keep;
            *reservation = None;
            if step.decision.allowed {
                // Nothing is charged, so a limit that would have admitted shows what it has.
                step.decision = decide_without_charge(check, states.get(position), now);
            }
        }
        decisions.push(step.decision);
        let after = (&step.decision, step.write.after(states.get(position)));
        accounts.extend(account(check, after, now, *charge).map(|account| (position, account)));
    }
    if batch.op != Op::Peek {
        for (position, (step, _, reservation)) in steps.into_iter().enumerate() {
            states.put(position, step.write);
            if let Some((expires, reservation)) = reservation {
                states.put_reservation(position, reservation, expires);
            }
        }
    }
    Ok(Verdict::several(decisions).with_accounts(accounts))
}

/// What a decision leaves beside itself, if that can be anything: the key owes nothing while some
/// remains.
#[inline]
fn account<A: Algorithm>(
    check: &Check<'_, A>,
    (decision, after): (&Decision, Option<&A::State>),
    now: Timestamp,
    Charge { forgiven, charged }: Charge,
) -> Option<Account> {
    let algorithm = check.limit.algorithm();
    let may_owe = decision.remaining == 0 && algorithm.debt() > 0;
    if !may_owe && forgiven == 0 && charged.is_none() {
        return None;
    }
    let owed = if may_owe { algorithm.owed(after, now) } else { 0 };
    Some(Account { owed, forgiven, charged })
}

/// The reservation once `more` is charged to it. It lives longer, unless it is a lease, which is
/// moved to live longer.
fn extend_reservation<A: Algorithm>(
    reservation: Reservation,
    (state, check, more): (Option<&A::State>, &Check<'_, A>, u64),
    (now, at): (Timestamp, Timestamp),
) -> Reservation {
    let algorithm = check.limit.algorithm();
    if algorithm.has_leases() {
        return reservation;
    }
    let since = at.max(reservation.since);
    if more == 0 {
        return Reservation { since, ..reservation };
    }
    let Reservation { timestamp, counts, terms, .. } =
        algorithm.record(state, now, more, Some(&reservation));
    Reservation { timestamp, counts, terms, since, cost: check.cost, ..reservation }
}

/// The decision of a check that charges nothing, for its cost.
pub(super) fn decide_without_charge<A: Algorithm>(
    check: &Check<'_, A>,
    state: Option<&A::State>,
    now: Timestamp,
) -> Decision {
    check.limit.algorithm().step(state, now, 0).costing(check.cost).decision
}

impl<A: Algorithm> Batch<'_, A> {
    /// Steps every check, and looks up the reservations of a batch with an id.
    fn step_all(
        &self,
        now: Timestamp,
        states: &impl States<A::State>,
    ) -> Result<Steps<A::State>, Refusal> {
        let checks = self.checks.iter().enumerate();
        let Some(id) = self.id else {
            let step = |(position, _): (usize, &Check<'_, A>)| {
                let (step, charge, _) = self.step_new(position, states.get(position), now)?;
                Ok((step, charge, None))
            };
            return checks.map(step).collect();
        };
        let mut steps = Vec::with_capacity(self.checks.len());
        let group = self.reservation_group(|| states.fingerprint());
        let mut known = !self.op.needs_id();
        // If one lease of the batch has ended, another caller may have its place: the renewal is
        // refused even if the other checks still hold theirs.
        let mut ended_lease = None;
        for (position, check) in checks {
            let algorithm = check.limit.algorithm();
            let life_us = check.limit.reservation_us().unwrap_or(Reservation::LIFE_US);
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
            let about = self.id_state(check, id, known_as)?;
            let is_known = !matches!(about, IdState::Unknown);
            known |= is_known;
            if !is_known && self.op == Op::Renew && algorithm.has_leases() {
                ended_lease = ended_lease.or(Some(check.limit.name()));
            }
            let state = states.get(position);
            let at = algorithm.charged_at(state, now);
            let (step, charge, left) = match about {
                IdState::Done | IdState::Unknown => {
                    // A blocked caller extends nothing, also where its own lease has ended.
                    let by_record = match self.op {
                        Op::Extend => self.step_by_record(position, state, now),
                        _ => None,
                    };
                    let step = by_record.unwrap_or_else(|| {
                        let decision = decide_without_charge(check, state, now);
                        Step { decision, write: Write::Keep }
                    });
                    (step, Charge::none(check), None)
                }
                IdState::New => {
                    let (step, charge, is_spared) = self.step_new(position, state, now)?;
                    // An acquired charge can be settled later; any other operation counts as
                    // settled.
                    let new = if self.op != Op::Acquire {
                        Reservation::new(at, check.cost).settled_at(check.cost, now, life_us, false)
                    } else if is_spared {
                        // Nothing is charged, so nothing can be given back.
                        Reservation { counts: 0, ..Reservation::new(at, check.cost) }
                    } else if step.decision.allowed {
                        algorithm.record(state, now, check.cost, None)
                    } else {
                        Reservation::new(at, check.cost)
                    };
                    (step, charge, Some(Reservation { group: group.clone(), ..new }))
                }
                IdState::Reserved(reservation) if self.op == Op::Renew => {
                    let step = algorithm.renew(state, now, &reservation).costing(check.cost);
                    let moved = matches!(step.write, Write::Put { .. });
                    let timestamp = if moved { at } else { reservation.timestamp };
                    let since = at.max(reservation.since);
                    (
                        step,
                        Charge::none(check),
                        Some(Reservation { timestamp, since, ..reservation }),
                    )
                }
                IdState::Reserved(reservation) if self.op == Op::Extend => {
                    let (step, charge, left) =
                        self.extend(position, state, (now, at), reservation)?;
                    (step, charge, Some(left))
                }
                IdState::Reserved(reservation) => {
                    let (step, charge) = self.settle(position, state, now, &reservation)?;
                    let once = self.settled_once;
                    (step, charge, Some(reservation.settled_at(check.cost, now, life_us, once)))
                }
            };
            steps.push((step, charge, left.map(|left| (left.ends(life_us), left))));
        }
        if known && ended_lease.is_none() {
            return Ok(steps);
        }
        let first = || self.checks.first().map(|check| check.limit.name());
        let limit = ended_lease.or_else(first).map(Into::into);
        Err(Refusal::UnknownReservation { limit, id })
    }

    /// The step of a check that was not done before; what it charges; and whether that is nothing
    /// because its caller's record decided.
    fn step_new(
        &self,
        position: usize,
        state: Option<&A::State>,
        now: Timestamp,
    ) -> Result<(Step<A::State>, Charge, bool), Refusal> {
        let check = &self.checks[position];
        if let Some(step) = self.step_by_record(position, state, now) {
            return Ok((step, Charge::none(check), true));
        }
        let step = self.step(check, state, now)?;
        let step = self.beyond_record(position, step, (state, now, check.cost));
        Ok((step, self.charge(check, 0, state, now), false))
    }

    /// The extension of a reservation, what it charges, and what is reserved then. What a record
    /// does not charge stays out of the reservation.
    fn extend(
        &self,
        position: usize,
        state: Option<&A::State>,
        (now, at): (Timestamp, Timestamp),
        reservation: Reservation,
    ) -> Result<(Step<A::State>, Charge, Reservation), Refusal> {
        let check = &self.checks[position];
        let algorithm = check.limit.algorithm();
        let more = check.cost.saturating_sub(reservation.cost);
        if more > 0 && algorithm.has_leases() {
            let limit = check.limit.name().into();
            return Err(Refusal::Unsupported { limit, op: self.op });
        }
        let (step, more, charge) = if let Some(step) = self.step_by_record(position, state, now) {
            (step, 0, Charge::none(check))
        } else {
            let step = algorithm.step(state, now, more).costing(check.cost);
            let step = self.beyond_record(position, step, (state, now, more));
            (step, more, self.charge(check, reservation.cost, state, now))
        };
        let left = extend_reservation(reservation, (state, check, more), (now, at));
        Ok((step, charge, left))
    }

    /// The settlement of a reservation, and what it charges. An exempt caller is charged no more
    /// than was reserved.
    fn settle(
        &self,
        position: usize,
        state: Option<&A::State>,
        now: Timestamp,
        reservation: &Reservation,
    ) -> Result<(Step<A::State>, Charge), Refusal> {
        let (check, is_exempt) =
            (&self.checks[position], matches!(self.standing(position), Standing::Exempt));
        let most = if is_exempt { reservation.cost } else { u64::MAX };
        let step = check.limit.algorithm().settle(state, now, reservation, check.cost.min(most));
        let step =
            step.ok_or_else(|| Refusal::CannotReserve { limit: check.limit.name().into() })?;
        let charge = if is_exempt {
            Charge::none(check)
        } else {
            self.charge(check, reservation.cost, state, now)
        };
        Ok((step.costing(check.cost), charge))
    }

    /// What the check knows about the id, from its live reservation.
    fn id_state(
        &self,
        check: &Check<'_, A>,
        id: ReservationId,
        known_as: Option<Reservation>,
    ) -> Result<IdState, Refusal> {
        let settling = self.op.needs_id();
        let reserving = settling || matches!(self.op, Op::Acquire | Op::Peek);
        let limit = || check.limit.name().into();
        match known_as {
            None if settling => Ok(IdState::Unknown),
            None => Ok(IdState::New),
            Some(Reservation { settled: Some(at), .. }) => {
                // A client that lost the answer repeats the same request.
                let same =
                    at == check.cost && !matches!(self.op, Op::Acquire | Op::Renew | Op::Extend);
                if same {
                    Ok(IdState::Done)
                } else {
                    Err(Refusal::Settled { limit: limit(), id, at })
                }
            }
            Some(reservation) if settling => Ok(IdState::Reserved(reservation)),
            Some(reservation) if reserving && reservation.cost == check.cost => Ok(IdState::Done),
            Some(reservation) if reserving => {
                Err(Refusal::Reserved { limit: limit(), id, at: reservation.cost })
            }
            Some(_) => Err(Refusal::Pending { limit: limit(), id }),
        }
    }

    /// What the check charges beyond `reserved`. A forced charge, or a settlement, may leave a part
    /// of it out. A lease ends at any cost.
    #[inline]
    fn charge(
        &self,
        check: &Check<'_, A>,
        reserved: u64,
        state: Option<&A::State>,
        now: Timestamp,
    ) -> Charge {
        let algorithm = check.limit.algorithm();
        let more = check.cost.saturating_sub(reserved);
        let forgiven = match self.op {
            Op::Settle if algorithm.has_leases() => 0,
            Op::Force | Op::Settle if more > 0 => algorithm.forgiven(state, now, more),
            _ => 0,
        };
        let charged = check.limit.warns_at_percent().and_then(|_| match self.op {
            Op::Acquire | Op::Peek | Op::Force => None,
            Op::Settle if algorithm.has_leases() => Some(0),
            Op::Settle | Op::Extend => Some(more),
            Op::Adopt => {
                let remaining = algorithm.step(state, now, 0).decision.remaining;
                Some(remaining.saturating_sub(check.cost))
            }
            Op::Refund | Op::Reset | Op::Renew => Some(0),
        });
        Charge { forgiven, charged }
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
            Op::Acquire | Op::Peek => Some(check.limit.step(state, now, check.cost)),
            Op::Refund => algorithm.refund(state, now, check.cost),
            Op::Force => algorithm.force(state, now, check.cost),
            Op::Adopt => {
                let remaining = algorithm.step(state, now, 0).decision.remaining;
                let more = remaining.saturating_sub(check.cost);
                algorithm.force(state, now, more).map(|step| step.costing(check.cost))
            }
            Op::Reset => {
                let decision = decide_without_charge(check, None, now);
                Some(Step { decision, write: Write::Remove })
            }
            // `validate` refuses them without an id, and `step_all` does them with one.
            Op::Settle | Op::Renew | Op::Extend => None,
        };
        step.ok_or_else(|| Refusal::Unsupported { limit: check.limit.name().into(), op: self.op })
    }

    /// Adds the caller's metadata to a write that charges.
    #[inline]
    fn annotate(&self, check: &Check<'_, A>, write: &mut Write<A::State>) {
        let charges = matches!(self.op, Op::Acquire | Op::Force);
        if let (true, false, Write::Put { state, .. }) = (charges, self.metadata.is_empty(), write)
        {
            check.limit.algorithm().annotate(state, self.metadata);
        }
    }
}
