//! Programs of algorithms that contain others: stacks, policies.

use ratelimit_core::algorithm::{PolicyState, StackState, StackedState};
use ratelimit_core::{Policy, Stack, Timestamp};

use super::{LuaProgram, Stored, Twin};

impl<A: LuaProgram> LuaProgram for Stack<A> {
    fn twins(&self) -> Vec<Twin> {
        let limits = self.limits().iter().enumerate();
        let placed = |(n, limit): (usize, &A)| {
            let twins = limit.twins().into_iter();
            twins.map(move |twin| Twin { place: format!("/{n}{}", twin.place), ..twin })
        };
        limits.flat_map(placed).collect()
    }

    /// The time when a state stops mattering is not stored; it follows from the limit's recovery.
    fn decode(&self, stored: &[Option<Stored>]) -> Option<StackState<A::State>> {
        let mut rest = stored;
        let mut states = Vec::with_capacity(self.limits().len());
        for limit in self.limits() {
            let (own, others) = rest.split_at_checked(limit.twins().len())?;
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

/// Dispatches to the algorithms of a policy.
macro_rules! for_policy {
    ($($variant:ident)+) => {
        impl LuaProgram for Policy {
            fn twins(&self) -> Vec<Twin> {
                match self { $( Self::$variant(algorithm) => algorithm.twins(), )+ }
            }

            fn decode(&self, stored: &[Option<Stored>]) -> Option<PolicyState> {
                match self { $(
                    Self::$variant(algorithm) => algorithm.decode(stored).map(Into::into),
                )+ }
            }
        }
    };
}

for_policy!(
    Gcra
    TokenBucket
    FixedWindow
    FirstRequestWindow
    WindowLog
    BucketedWindow
    SlidingCounter
    SlidingLog
    Concurrency
);
