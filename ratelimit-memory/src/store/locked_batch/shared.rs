//! Checks of one batch that share a state, because the store has no room for states of their own:
//! they are decided as one check of the sum of their costs, admitted together or not at all, with a
//! wait after which the sum fits.

use ratelimit_core::algorithm::{InMemory, Write};
use ratelimit_core::store::{Batch, Check, Op, Reservation, Standing, States, decide};
use ratelimit_core::{Clock, Decision, Refusal, Timestamp, Verdict};

use super::{Located, Location, LockedBatch};

/// The states of a batch by its parts: a part is one check, or several that share a state.
struct MergedStates<'p, 'b, T, A> {
    batch: &'p Batch<'b, A>,
    /// The part of each check.
    parts: Vec<usize>,
    states: &'p mut T,
}

impl<A: InMemory, C: Clock> LockedBatch<'_, '_, A, C> {
    /// Decides the batch as [`decide`] does, and checks that share a state together.
    pub(super) fn decide_parts(&mut self, now: Timestamp) -> Result<Verdict, Refusal> {
        let batch = self.batch;
        let records = self.store.records.read_several(batch, self.hashes);
        let standings = records.map(|records| records.standings(batch, self.hashes, now));
        let standings = standings.unwrap_or_default();
        let by_records;
        let batch = if standings.is_empty() {
            *batch
        } else {
            by_records = batch.checks_by(&standings);
            batch.with_checks(&by_records).standing_so(&standings)
        };
        if self.count(Location::Overflow) < 2 {
            return decide(&batch, now, self);
        }
        batch.validate()?;
        let (parts, checks) = self.parts(&batch);
        let merged_standings = merged_standings(&batch, &parts, checks.len());
        let merged = batch.with_checks(&checks).standing_so(&merged_standings);
        let group = batch.reservation_group(|| self.fingerprint());
        let merged = group.as_ref().map_or(merged, |group| merged.in_group(group));
        let mut states = MergedStates { batch: &batch, parts, states: self };
        let verdict = decide(&merged, now, &mut states)?;
        let decided = states.parts.iter().zip(batch.checks());
        let decisions = decided
            .map(|(part, check)| Decision { cost: check.cost, ..verdict.decisions()[*part] });
        let accounts = states.parts.iter().map(|part| verdict.account(*part));
        Ok(Verdict::several(decisions.collect()).with_accounts(accounts.enumerate()))
    }

    /// The part of each check, and each part as one check: its first one, with the sum of all
    /// costs.
    fn parts<'p>(&self, batch: &Batch<'p, A>) -> (Vec<usize>, Vec<Check<'p, A>>) {
        let (mut parts, mut merged) = (Vec::new(), Vec::<Check<'p, A>>::new());
        for (own, check) in self.located.iter().zip(batch.checks()) {
            let shares_with = |other: &Located<A::State>| {
                own.location == Location::Overflow
                    && (other.location, other.hash) == (own.location, own.hash)
            };
            let same = self.located[..parts.len()].iter().position(shares_with);
            let part = same.map_or(merged.len(), |position| parts[position]);
            if let Some(sum) = merged.get_mut(part) {
                sum.cost = match self.batch.operation() {
                    // Of one state no more remains than of the least.
                    Op::Adopt => sum.cost.min(check.cost),
                    _ => sum.cost.saturating_add(check.cost),
                };
            } else {
                merged.push(*check);
            }
            parts.push(part);
        }
        (parts, merged)
    }
}

/// How the parts stand. Checks that share a state are denied together if one of them is blocked,
/// and are exempt if all are; the numbers are those of the first.
fn merged_standings<A: InMemory>(
    batch: &Batch<'_, A>,
    parts: &[usize],
    count: usize,
) -> Vec<Standing<A>> {
    let standings_of = |part: usize| {
        let positions = parts.iter().enumerate().filter(move |(_, own)| **own == part);
        positions.map(|(position, _)| batch.standing(position))
    };
    let merged = |part| {
        let blocked = standings_of(part).find_map(|standing| match standing {
            Standing::Blocked(until) => Some(Standing::Blocked(*until)),
            _ => None,
        });
        let exempt = || standings_of(part).all(|standing| matches!(standing, Standing::Exempt));
        blocked.unwrap_or_else(|| if exempt() { Standing::Exempt } else { Standing::Policy })
    };
    (0..count).map(merged).collect()
}

impl<T, A> MergedStates<'_, '_, T, A> {
    /// The positions of a part's checks in the batch.
    fn positions(&self, part: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.parts.len()).filter(move |position| self.parts[*position] == part)
    }

    /// The position of its first check. Every part has one.
    fn first(&self, part: usize) -> usize {
        self.positions(part).next().unwrap_or_default()
    }
}

impl<A: InMemory, T: States<A::State>> States<A::State> for MergedStates<'_, '_, T, A> {
    fn get(&self, part: usize) -> Option<&A::State> {
        self.states.get(self.first(part))
    }

    fn put(&mut self, part: usize, write: Write<A::State>) {
        self.states.put(self.first(part), write);
    }

    /// The reservation of the first check, with the sum of all costs.
    fn reservation(&self, part: usize) -> Option<Reservation> {
        let mut all = self.positions(part).map(|position| self.states.reservation(position));
        all.next()?.and_then(|first| {
            all.try_fold(first, |sum, next| {
                let next = next?;
                let settled = sum.settled.zip(next.settled).map(|(a, b)| a.saturating_add(b));
                let cost = sum.cost.saturating_add(next.cost);
                let counts = sum.counts.saturating_add(next.counts);
                Some(Reservation { cost, counts, settled, ..sum })
            })
        })
    }

    fn fingerprint(&self) -> u64 {
        self.states.fingerprint()
    }

    /// Each check's reservation has the check's own costs, and of what counts its part.
    fn put_reservation(&mut self, part: usize, reservation: Reservation, expires: Timestamp) {
        let mut counting = reservation.counts;
        for position in self.positions(part).collect::<Vec<_>>() {
            let charged = self.batch.checks()[position].cost;
            let reserved = self.states.reservation(position).map(|own| own.cost);
            let cost = match (self.batch.operation(), reserved) {
                (Op::Settle | Op::Renew, Some(reserved)) => reserved,
                (Op::Extend, Some(reserved)) => reserved.max(charged),
                _ => charged,
            };
            let settled = reservation.settled.map(|_| charged);
            let counts = counting.min(cost);
            counting -= counts;
            let own = Reservation { cost, counts, settled, ..reservation.clone() };
            self.states.put_reservation(position, own, expires);
        }
    }
}
