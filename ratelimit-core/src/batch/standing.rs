//! What records make of the checks of a batch: how each [stands](Standing). Decided here alone, so
//! that every store agrees.

use alloc::vec::Vec;

use super::decide::decide_without_charge;
use super::{Batch, Check};
use crate::algorithms::{Algorithm, Step, Write};
use crate::decision::Decision;
use crate::in_memory::{Compact, InMemory, through_states};
use crate::limit::Limit;
use crate::op::Op;
use crate::record::{Record, Standing};
use crate::refusal::Refusal;
use crate::timestamp::Timestamp;

impl<'a, A: Algorithm> Batch<'a, A> {
    /// The checks, each with the limit that decides where it stands so.
    #[doc(hidden)]
    #[must_use]
    pub fn checks_by<'p>(&self, standings: &'p [Standing<A>]) -> Vec<Check<'p, A>>
    where
        'a: 'p,
    {
        let by = |(check, standing): (&Check<'p, A>, &'p Standing<A>)| match standing {
            Standing::Numbers(limit, _) => Check { limit, ..*check },
            _ => *check,
        };
        self.checks.iter().zip(standings).map(by).collect()
    }

    /// The same checks, standing so. They are those that [`checks_by`](Self::checks_by) returns.
    #[doc(hidden)]
    #[must_use]
    pub const fn standing_so(mut self, standings: &'a [Standing<A>]) -> Self {
        self.standings = standings;
        self
    }

    /// Whether a check looks for a record of its caller.
    #[doc(hidden)]
    #[inline]
    #[must_use]
    pub fn is_overridable(&self) -> bool {
        self.checks.iter().any(|check| check.limit.is_overridable())
    }

    /// Refuses a check that looks for records, for a store that keeps none.
    ///
    /// # Errors
    /// [`Refusal::NoRecords`].
    pub fn without_records(&self) -> Result<(), Refusal> {
        let check = self.checks.iter().find(|check| check.limit.is_overridable());
        check.map_or(Ok(()), |check| Err(Refusal::NoRecords { limit: check.limit.name().into() }))
    }

    /// Whether records were looked for.
    #[inline]
    pub(crate) const fn has_standings(&self) -> bool {
        !self.standings.is_empty()
    }

    /// How the check at this position stands.
    #[doc(hidden)]
    #[must_use]
    pub fn standing(&self, position: usize) -> &'a Standing<A> {
        self.standings.get(position).unwrap_or(&Standing::Policy)
    }

    /// Whether the check at this position charges no attempt: its caller is blocked or exempt.
    #[doc(hidden)]
    #[must_use]
    pub fn is_spared(&self, position: usize) -> bool {
        matches!(self.standing(position), Standing::Blocked(_) | Standing::Exempt)
    }

    /// The step of a check that its caller's record decides, without a charge.
    pub(super) fn step_by_record(
        &self,
        position: usize,
        state: Option<&A::State>,
        now: Timestamp,
    ) -> Option<Step<A::State>> {
        let check = &self.checks[position];
        let decision = match (self.standing(position), self.op) {
            (Standing::Blocked(until), Op::Acquire | Op::Peek | Op::Extend) => {
                decide_blocked(check, state, now, *until)
            }
            (Standing::Exempt, Op::Acquire | Op::Peek | Op::Extend | Op::Force) => {
                decide_without_charge(check, state, now)
            }
            _ => return None,
        };
        Some(Step { decision, write: Write::Keep })
    }

    /// A step of this cost on this state, at the numbers of a record: a denial waits for the end of
    /// that, if it is not over before, and then for what decides from there on.
    pub(super) fn beyond_record(
        &self,
        position: usize,
        mut step: Step<A::State>,
        (state, now, cost): (Option<&A::State>, Timestamp, u64),
    ) -> Step<A::State> {
        let Standing::Numbers(_, Some((end, policy))) = self.standing(position) else {
            return step;
        };
        let rest_us = end.saturating_us_since(now);
        let wait_us = step.decision.retry_after_us;
        if step.decision.allowed || wait_us.is_some_and(|wait_us| wait_us < rest_us) {
            return step;
        }
        let then = policy.step(step.write.after(state), *end, cost).decision;
        let more_us = if then.allowed { Some(0) } else { then.retry_after_us };
        step.decision.retry_after_us = more_us.map(|more_us| rest_us.saturating_add(more_us));
        step
    }
}

impl<A: InMemory> Limit<A> {
    /// [Steps](Self::step_compact) a compact state where the caller
    /// [stands by](Self::stands_by) this record, for an acquire or a peek. Returns `None` as well
    /// where the verdict has to tell that nothing was charged, for a warning, and for a denial at
    /// the numbers of a record that ends.
    #[doc(hidden)]
    pub fn step_compact_by(
        &self,
        record: &Record<A>,
        state: Option<Compact>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<Compact>> {
        if let Some(numbers) = record.algorithm() {
            let step = self.step_compact_at(numbers, state, now, cost)?;
            return Some(step).filter(|step| record.tells_wait(&step.decision));
        }
        if self.warns_at_percent().is_some() {
            return None;
        }
        let check = Check { limit: self, key: "", cost };
        through_states::<A>(state, |state| {
            let decision = if record.is_blocked() {
                decide_blocked(&check, state, now, record.end())
            } else {
                decide_without_charge(&check, state, now)
            };
            Step { decision, write: Write::Keep }
        })
    }
}

/// The denial of a blocked caller. It is exact about waits, as every decision is: where the state
/// would still deny when the block ends, they are longer.
fn decide_blocked<A: Algorithm>(
    check: &Check<'_, A>,
    state: Option<&A::State>,
    now: Timestamp,
    until: Option<Timestamp>,
) -> Decision {
    let shown = decide_without_charge(check, state, now);
    let rest_us = until.map(|until| until.saturating_us_since(now));
    let wait_us = |cost| {
        let own_us = check.limit.algorithm().step(state, now, cost).decision.retry_after_us;
        rest_us.zip(own_us).map(|(rest_us, own_us)| rest_us.max(own_us))
    };
    Decision {
        allowed: false,
        remaining: 0,
        retry_after_us: wait_us(check.cost),
        replenish_after_us: wait_us(1).unwrap_or_default(),
        reset_after_us: shown.reset_after_us.max(rest_us.unwrap_or_default()),
        ..shown
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;
    use crate::batch::decide;
    use crate::limit::Limit;
    use crate::record::Record;
    use crate::store_traits::Snapshot;
    use crate::{Gcra, Verdict};

    const NOW: Timestamp = Timestamp::saturating_from_us(1_000_000_000);

    /// The verdict on a caller that has used `used` of 10 per 10 s, under a record.
    fn decided(
        record: &Record<Gcra>,
        op: Op,
        used: u64,
        cost: u64,
    ) -> (Verdict, Snapshot<crate::algorithm::GcraState>) {
        let algorithm: Gcra = "1/s burst 10".parse().expect("a limit");
        let limit = Limit::new("api", algorithm).expect("a name").overridable();
        let mut states = Snapshot { now: NOW, states: vec![None] };
        let used = [Check { limit: &limit, key: "alice", cost: used }];
        let _ = decide(&Batch::distinct(&used), NOW, &mut states).expect("decided");
        let (standings, check) = ([limit.standing(Some(record), NOW)], Check { cost, ..used[0] });
        let batch = Batch::one(&check).op(op);
        let checks = batch.checks_by(&standings);
        let batch = batch.with_checks(&checks).standing_so(&standings);
        let verdict = decide(&batch, NOW, &mut states).expect("decided");
        (verdict, states)
    }

    #[test]
    fn the_wait_of_a_blocked_caller_is_exact_also_where_its_state_denies_for_longer() {
        let until = NOW.saturating_add_us(3_000_000);
        let blocked = Record::blocked().until(until);
        for (used, cost, due) in [
            (0, 1, Some(3_000_000)),
            (10, 1, Some(3_000_000)),
            (10, 5, Some(5_000_000)),
            (0, 11, None),
        ] {
            let (verdict, _) = decided(&blocked, Op::Acquire, used, cost);
            let told = verdict.summary();
            assert_eq!((told.allowed, told.remaining, told.retry_after_us), (false, 0, due));
            assert_eq!(told.replenish_after_us, 3_000_000, "{used} {cost}");
        }
        let (verdict, _) = decided(&Record::blocked().forever(), Op::Peek, 0, 1);
        assert_eq!((verdict.allowed(), verdict.summary().retry_after_us), (false, None));
        // From its end on it is as none.
        let (verdict, _) = decided(&Record::blocked().until(NOW), Op::Acquire, 0, 1);
        assert_eq!((verdict.allowed(), verdict.remaining()), (true, 9));
    }

    #[test]
    fn only_what_asks_or_charges_is_decided_by_a_block_or_an_exemption() {
        for (record, op, allowed, left) in [
            (Record::blocked(), Op::Acquire, false, 4),
            (Record::blocked(), Op::Force, true, 2),
            (Record::blocked(), Op::Refund, true, 6),
            (Record::blocked(), Op::Reset, true, 10),
            (Record::exempt(), Op::Acquire, true, 4),
            (Record::exempt(), Op::Peek, true, 4),
            (Record::exempt(), Op::Force, true, 4),
            (Record::exempt(), Op::Refund, true, 6),
            (Record::exempt(), Op::Adopt, true, 2),
            (Record::numbers("5/s burst 50".parse().expect("numbers")), Op::Acquire, true, 3),
        ] {
            let (verdict, states) = decided(&record.forever(), op, 6, 2);
            let algorithm: Gcra = "1/s burst 10".parse().expect("a limit");
            let state = states.states[0].as_ref();
            let shown = algorithm.step(state, NOW, 0).decision.remaining;
            assert_eq!((verdict.allowed(), shown), (allowed, left), "{op}");
        }
    }
}
