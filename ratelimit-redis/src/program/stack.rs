//! The programs of a stack: those of its limits.

use ratelimit_core::algorithm::{StackState, StackedState};
use ratelimit_core::{Stack, Timestamp};

use super::{LuaProgram, Stored, Twin};

impl<A: LuaProgram> LuaProgram for Stack<A> {
    fn twins(&self) -> impl IntoIterator<Item = Twin> {
        let limits = self.limits().iter().enumerate();
        limits.flat_map(|(n, limit)| {
            let twins = limit.twins().into_iter();
            twins.map(move |twin| Twin { place: format!("/{n}{}", twin.place), ..twin })
        })
    }

    /// The time when a state stops mattering is not stored; it follows from the limit's recovery.
    fn decode(&self, stored: &[Option<Stored>]) -> Option<StackState<A::State>> {
        let mut rest = stored;
        let mut states = Vec::with_capacity(self.limits().len());
        for limit in self.limits() {
            let (own, others) = rest.split_at_checked(limit.twins().into_iter().count())?;
            rest = others;
            if own.iter().all(Option::is_none) {
                states.push(None);
                continue;
            }
            let state = limit.decode(own)?;
            let reset_us = limit.step(Some(&state), Timestamp::ZERO, 0).decision.reset_after_us;
            states.push(Some(StackedState {
                state,
                expires: Timestamp::saturating_from_us(reset_us),
            }));
        }
        Some(StackState { states })
    }
}
