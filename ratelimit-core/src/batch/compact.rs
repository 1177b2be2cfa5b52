//! [`decide_compact`]: a plain batch decided on compact states alone, without an allocation per
//! state.

use alloc::vec::Vec;

use super::Batch;
use crate::algorithms::{Step, Write};
use crate::decision::Verdict;
use crate::in_memory::{Compact, InMemory, step_compact, stepped_fast};
use crate::op::Op;
use crate::timestamp::Timestamp;

/// Where [`decide_compact`] reads the [`Compact`] states of a batch and notes the writes.
pub trait CompactStates {
    /// The state of the check at this position: the same on every call. `None` ends the attempt.
    fn get(&mut self, position: usize) -> Option<Compact>;

    /// Notes the write to the state of the check at this position, in place of an earlier one.
    /// `None` ends the attempt.
    fn note(&mut self, position: usize, write: Write<Compact>) -> Option<()>;
}

/// Decides a [plain](Batch::is_plain) batch as [`decide`](crate::store::decide) does, for a store
/// that has found compact states of all checks.
///
/// The store then applies the last write that was noted for each check. Returns `None`, and decides
/// nothing, if the batch is not plain, a state has no compact form, a limit with a
/// [debt](crate::Algorithm::debt) has nothing left, or `now` is the last moment.
#[inline]
pub fn decide_compact<A: InMemory>(
    batch: &Batch<'_, A>,
    now: Timestamp,
    states: &mut impl CompactStates,
) -> Option<Verdict> {
    if !batch.is_plain() || batch.has_standings() || now == Timestamp::MAX {
        return None;
    }
    let mut decisions = Vec::with_capacity(batch.checks.len());
    let mut all_allowed = true;
    for (position, check) in batch.checks.iter().enumerate() {
        let (algorithm, state) = (check.limit.algorithm(), states.get(position)?);
        let Step { decision, write } = match stepped_fast(algorithm, state, now, check.cost) {
            Some(step) => step,
            None => step_compact(algorithm, Some(state), now, check.cost)?,
        };
        if decision.remaining == 0 && algorithm.debt() > 0 {
            // What is owed, `decide` tells.
            return None;
        }
        all_allowed &= decision.allowed;
        decisions.push(decision);
        if batch.op != Op::Peek {
            states.note(position, write)?;
        }
    }
    if !all_allowed {
        for ((position, check), decision) in batch.checks.iter().enumerate().zip(&mut decisions) {
            if check.limit.counts_attempts() {
                let state = states.get(position)?;
                let step = check.limit.step_compact(Some(state), now, check.cost)?;
                if step.decision.allowed {
                    let after = match step.write.after(Some(&state)) {
                        Some(after) => Some(A::from_compact(*after)?),
                        None => None,
                    };
                    let again = check.limit.algorithm().step(after.as_ref(), now, check.cost);
                    decision.retry_after_us = again.decision.retry_after_us;
                } else {
                    *decision = step.decision;
                    if batch.op != Op::Peek {
                        states.note(position, step.write)?;
                    }
                }
                continue;
            }
            states.note(position, Write::Keep)?;
            if decision.allowed {
                // Nothing is charged, so a limit that would have admitted shows what it has.
                let algorithm = check.limit.algorithm();
                let step = step_compact(algorithm, Some(states.get(position)?), now, 0)?;
                *decision = step.costing(check.cost).decision;
            }
        }
    }
    Some(Verdict::several(decisions))
}
