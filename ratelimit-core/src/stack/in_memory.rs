//! How a store in memory steps a [`Stack`]: in place, and without an allocation for a few limits.

use alloc::vec::Vec;

use super::{Stack, StackState, StackedState};
use crate::algorithm::{Step, Write};
use crate::decision::{Decision, summarise};
use crate::in_memory::{Compact, InMemory, stepped_fast, stepped_in_place};
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// The most limits that are stepped without an allocation.
const FEW: usize = 8;

impl<A: InMemory> Stack<A> {
    /// [Steps in place](InMemory::step_in_place) by the limits' fast steps, in two thirds of the instructions: between
    /// the steps and the writes it keeps compact states alone. Returns `None`, and writes nothing, if a limit has no
    /// fast step of its state, or if the stack has more than [`FEW`] limits.
    #[inline]
    fn fast_in_place(
        &self,
        state: &mut StackState<A::State>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<()>> {
        if self.limits.len() > FEW {
            return None;
        }
        let mut next: [Option<StackedState<A::State>>; FEW] = [const { None }; FEW];
        let mut summary = Decision::OF_NONE;
        for (place, (limit, kept)) in self.limits.iter().zip(&state.states).enumerate() {
            let kept = A::to_compact(&kept.as_ref()?.state)?;
            let Step { decision, write } = stepped_fast(limit, kept, now, cost)?;
            if !decision.allowed {
                let decisions =
                    self.each(Some(state), |limit, state| limit.decision(state, now, cost));
                let decision = self.denied(Some(state), now, decisions);
                return Some(Step { decision, write: Write::Keep });
            }
            let Write::Put { state, .. } = write else { return None };
            let expires = state.at.saturating_add_us(state.span_us);
            next[place] = Some(StackedState { state: A::from_compact(state)?, expires });
            summary.add(place, &decision);
        }
        // The limits' code has run by now: if it panics, nothing has been written.
        let mut latest = Timestamp::ZERO;
        for (kept, next) in state.states.iter_mut().zip(next) {
            latest = latest.max(next.as_ref().map_or(Timestamp::ZERO, |next| next.expires));
            *kept = next;
        }
        Some(Step { decision: summary, write: Write::Put { state: (), expires: latest } })
    }
}

/// Applies a write to the state of one limit. Returns whether it changed anything.
#[inline]
fn put<S>(kept: &mut Option<StackedState<S>>, write: Write<S>) -> bool {
    match write {
        Write::Keep => return false,
        Write::Put { state, expires } => *kept = Some(StackedState { state, expires }),
        Write::Remove => *kept = None,
    }
    true
}

/// Steps one limit in place. Returns whether it wrote anything.
fn step_in<A: InMemory>(
    limit: &A,
    kept: &mut Option<StackedState<A::State>>,
    now: Timestamp,
    cost: u64,
) -> bool {
    let Some(stacked) = kept else { return put(kept, limit.step(None, now, cost).write) };
    match limit.step_in_place(&mut stacked.state, now, cost).write {
        Write::Keep => return false,
        Write::Put { expires, .. } => stacked.expires = expires,
        Write::Remove => *kept = None,
    }
    true
}

#[deny(clippy::missing_trait_methods)]
impl<A: InMemory> InMemory for Stack<A> {
    fn decision(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Decision {
        let decisions = || self.each(state, |limit, state| limit.decision(state, now, cost));
        let joined = summarise(decisions());
        if joined.allowed { joined } else { self.denied(state, now, decisions()) }
    }

    /// Steps all limits before it writes. Only the last limit that keeps entries steps in place. It does so before the
    /// other states are written, so that a limit that panics leaves all of them as they were.
    fn step_in_place(&self, state: &mut Self::State, now: Timestamp, cost: u64) -> Step<()> {
        if state.states.len() != self.limits.len() {
            // Another number of limits wrote this state. It must find it unchanged if nothing is written now.
            return stepped_in_place(self, state, now, cost);
        }
        if let Some(step) = self.fast_in_place(state, now, cost) {
            return step;
        }
        let in_place = self.limits.iter().rposition(|limit| limit.entries_per_step() > 0);
        let mut few: [Option<Step<A::State>>; FEW] = [const { None }; FEW];
        let mut more = Vec::new();
        let decisions = self.limits.iter().enumerate().map(|(place, limit)| {
            let own = Self::state_of(Some(state), place);
            let step = match in_place {
                Some(last) if last == place => None,
                _ => Some(limit.step(own, now, cost)),
            };
            // Copied before the step is stored: reading it back in larger words than it was written in stalls the
            // processor (measured: a sixth of a decision).
            let decision = step.as_ref().map(|step| step.decision);
            match few.get_mut(place) {
                Some(kept) => *kept = step,
                None => more.push(step),
            }
            decision.unwrap_or_else(|| limit.decision(own, now, cost))
        });
        let decision = summarise(decisions);
        if !decision.allowed {
            let steps = few.iter().chain(&more);
            let decisions =
                self.limits.iter().zip(steps).enumerate().map(|(place, (limit, step))| {
                    let known = step.as_ref().map(|step| step.decision);
                    let own = Self::state_of(Some(state), place);
                    known.unwrap_or_else(|| limit.decision(own, now, cost))
                });
            let decision = self.denied(Some(state), now, decisions);
            return Step { decision, write: Write::Keep };
        }
        let mut written = in_place
            .is_some_and(|place| step_in(&self.limits[place], &mut state.states[place], now, cost));
        for (kept, step) in state.states.iter_mut().zip(few.into_iter().chain(more)) {
            if let Some(step) = step {
                written |= put(kept, step.write);
            }
        }
        let latest = state.states.iter().flatten().map(|stacked| stacked.expires).max();
        let write = match latest {
            _ if !written => Write::Keep,
            None => Write::Remove,
            Some(expires) => Write::Put { state: (), expires },
        };
        Step { decision, write }
    }

    fn settle_in_place(
        &self,
        _state: &mut Self::State,
        _now: Timestamp,
        _reservation: &Reservation,
        _cost: u64,
    ) -> Option<Step<()>> {
        None
    }

    fn entries_in(state: &Self::State) -> usize {
        state.states.iter().flatten().map(|stacked| A::entries_in(&stacked.state)).sum()
    }

    fn entries_per_step(&self) -> usize {
        self.limits.iter().map(InMemory::entries_per_step).sum()
    }

    /// `false`: a stack keeps a state per limit.
    fn is_compact(&self) -> bool {
        false
    }

    fn to_compact(_state: &Self::State) -> Option<Compact> {
        None
    }

    fn from_compact(_compact: Compact) -> Option<Self::State> {
        None
    }

    fn has_fast_step(&self) -> bool {
        false
    }

    fn step_fast(&self, _state: Compact, _now: Timestamp, _cost: u64) -> Option<Step<Compact>> {
        None
    }
}
