//! Checks of one batch that share a state, because the store has no room for states of their own: they are decided as
//! one check of the sum of their costs, admitted together or not at all, with a wait after which the sum fits.

use ratelimit_core::algorithm::{InMemory, Write};
use ratelimit_core::store::{Batch, Check, Op, Reservation, States, decide};
use ratelimit_core::{Clock, Decision, Refusal, Timestamp, Verdict};
use smallvec::SmallVec;

use super::{Location, LockedBatch};

/// One check, or several that share a state.
struct MergedCheck<'b, A> {
    /// Their positions in the batch.
    positions: SmallVec<[usize; 2]>,
    /// The first check, with the sum of all costs.
    check: Check<'b, A>,
}

/// The states of a batch, by its parts.
struct MergedStates<'p, 'b, T, A> {
    batch: &'p Batch<'b, A>,
    all: Vec<MergedCheck<'b, A>>,
    states: &'p mut T,
}

impl<'b, A: InMemory, C: Clock> LockedBatch<'_, 'b, A, C> {
    /// Decides the batch as [`decide`] does, and checks that share a state together.
    pub(super) fn decide_parts(&mut self, now: Timestamp) -> Result<Verdict, Refusal> {
        let batch = self.batch;
        let parts = if self.overflow.is_some() { self.parts() } else { Vec::new() };
        if parts.is_empty() || parts.len() == batch.checks().len() {
            return decide(batch, now, self);
        }
        batch.validate()?;
        let checks: Vec<_> = parts.iter().map(|part| part.check).collect();
        let merged = batch.with_checks(&checks);
        let group = batch.reservation_group(|| self.fingerprint());
        let merged = group.as_ref().map_or(merged, |group| merged.in_group(group));
        let mut states = MergedStates { batch, all: parts, states: self };
        let verdict = decide(&merged, now, &mut states)?;
        let mut decisions: Vec<Option<Decision>> = vec![None; batch.checks().len()];
        let mut accounts = Vec::new();
        for ((nth, part), decision) in states.all.iter().enumerate().zip(verdict.decisions()) {
            for position in &part.positions {
                accounts.push((*position, verdict.account(nth)));
                let cost = batch.checks()[*position].cost;
                decisions[*position] = Some(Decision { cost, ..*decision });
            }
        }
        Ok(Verdict::several(decisions.into_iter().flatten().collect()).with_accounts(accounts))
    }

    fn parts(&self) -> Vec<MergedCheck<'b, A>> {
        let mut parts: Vec<MergedCheck<'b, A>> = Vec::new();
        for (position, check) in self.batch.checks().iter().enumerate() {
            let shared = |at: usize| {
                let located = &self.located[at];
                (located.location == Location::Overflow).then_some(located.hash)
            };
            let own = shared(position);
            let same =
                |part: &&mut MergedCheck<'b, A>| own.is_some() && shared(part.positions[0]) == own;
            if let Some(part) = parts.iter_mut().find(same) {
                part.positions.push(position);
                part.check.cost = match self.batch.operation() {
                    // Of one state no more remains than of the least.
                    Op::Adopt => part.check.cost.min(check.cost),
                    _ => part.check.cost.saturating_add(check.cost),
                };
            } else {
                parts.push(MergedCheck {
                    positions: SmallVec::from_elem(position, 1),
                    check: *check,
                });
            }
        }
        parts
    }
}

impl<A: InMemory, T: States<A::State>> States<A::State> for MergedStates<'_, '_, T, A> {
    fn get(&self, part: usize) -> Option<&A::State> {
        self.states.get(self.all[part].positions[0])
    }

    fn put(&mut self, part: usize, write: Write<A::State>) {
        self.states.put(self.all[part].positions[0], write);
    }

    /// The reservation of the first check, with the sum of all costs.
    fn reservation(&self, part: usize) -> Option<Reservation> {
        let mut all = self.all[part].positions.iter().map(|at| self.states.reservation(*at));
        all.next()?.and_then(|first| {
            all.try_fold(first, |sum, next| {
                let next = next?;
                let settled = sum.settled.zip(next.settled).map(|(a, b)| a.saturating_add(b));
                Some(Reservation { cost: sum.cost.saturating_add(next.cost), settled, ..sum })
            })
        })
    }

    fn fingerprint(&self) -> u64 {
        self.states.fingerprint()
    }

    /// Each check's reservation has the check's own costs.
    fn put_reservation(&mut self, part: usize, reservation: Reservation, expires: Timestamp) {
        for position in self.all[part].positions.clone() {
            let charged = self.batch.checks()[position].cost;
            let cost = match self.batch.operation() {
                Op::Settle | Op::Renew => {
                    self.states.reservation(position).map_or(charged, |own| own.cost)
                }
                Op::Extend => {
                    self.states.reservation(position).map_or(charged, |own| own.cost.max(charged))
                }
                _ => charged,
            };
            let settled = reservation.settled.map(|_| charged);
            let own = Reservation { cost, settled, ..reservation.clone() };
            self.states.put_reservation(position, own, expires);
        }
    }
}
