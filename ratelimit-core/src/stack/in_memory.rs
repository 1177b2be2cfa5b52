//! How a store in memory steps a [`Stack`]: in place, and without an allocation for a few limits.

use super::{Stack, StackedState, latest};
use crate::algorithms::{Step, Write};
use crate::decision::Decision;
use crate::in_memory::{InMemory, stepped_fast, stepped_in_place};
use crate::timestamp::Timestamp;

/// The most limits that are stepped without an allocation.
const FEW: usize = 8;

/// Steps one limit, by its fast step if that handles the request.
#[inline]
fn step_limit<A: InMemory>(
    limit: &A,
    kept: Option<&StackedState<A::State>>,
    now: Timestamp,
    cost: u64,
) -> Step<A::State> {
    let fast = || {
        let compact = A::to_compact(&kept?.state)?;
        stepped_fast(limit, compact, now, cost)?.try_map(A::from_compact)
    };
    fast().unwrap_or_else(|| limit.step(kept.map(|stacked| &stacked.state), now, cost))
}

impl<A: InMemory> InMemory for Stack<A> {
    /// Steps all limits before it writes, so that a limit that panics leaves all of them as they
    /// were.
    fn step_in_place(&self, state: &mut Self::State, now: Timestamp, cost: u64) -> Step<()> {
        if state.states.len() != self.limits.len() || self.limits.len() > FEW {
            // Another number of limits wrote this state. It must find it unchanged if nothing is
            // written now.
            return stepped_in_place(self, state, now, cost);
        }
        let mut writes: [Write<A::State>; FEW] = [const { Write::Keep }; FEW];
        let mut decision = Decision::OF_NONE;
        for (position, (limit, kept)) in self.limits.iter().zip(&state.states).enumerate() {
            let step = step_limit(limit, kept.as_ref(), now, cost);
            if !step.decision.allowed {
                let decisions =
                    self.each(Some(state), |limit, state| limit.step(state, now, cost).decision);
                let decision = self.denial(Some(state), now, decisions);
                return Step { decision, write: Write::Keep };
            }
            decision.add(position, &step.decision);
            writes[position] = step.write;
        }
        let mut written = false;
        for (kept, write) in state.states.iter_mut().zip(writes) {
            written |= !matches!(write, Write::Keep);
            match write {
                Write::Keep => {}
                Write::Put { state, expires } => *kept = Some(StackedState { state, expires }),
                Write::Remove => *kept = None,
            }
        }
        let write = match latest(&state.states) {
            _ if !written => Write::Keep,
            None => Write::Remove,
            Some(expires) => Write::Put { state: (), expires },
        };
        Step { decision, write }
    }

    fn entries_in(state: &Self::State) -> usize {
        state.states.iter().flatten().map(|stacked| A::entries_in(&stacked.state)).sum()
    }

    fn entries_per_step(&self) -> usize {
        self.limits.iter().map(InMemory::entries_per_step).sum()
    }
}
