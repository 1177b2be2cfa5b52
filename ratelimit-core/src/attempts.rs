//! [`Attempts`]: an algorithm that charges every request, admitted or denied.
//!
//! Charging a denial breaks the law that a denial charges nothing, so a policy must ask for it by name. As a type, it also
//! lets the compiler check that `RedisStore<Multi>` serves nothing else.

use core::convert::identity;

use crate::algorithms::{
    Algorithm, ChargesAttempts, KeepsEntries, MaybeStep, Step, WindowEntry, forwards,
};
use crate::in_memory::{Compact, InMemory, stepped_in_place};
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// An algorithm that charges every attempt, admitted or denied: a caller that retries stays denied.
///
/// Source: the increment-first patterns of Redis (`INCR`, `RPUSH` or `ZADD` in `MULTI`), which write before they read
/// because a transaction cannot branch.
///
/// # The rule: attempts fill, never overfill
///
/// An attempt that fits is charged as usual. An attempt that does not fit is charged as far as there is room, which
/// leaves a full limit as of now. A state never owes more than its capacity, unless a larger limit wrote it. In particular:
///
/// - Buckets drain to 0 left.
/// - Both fixed windows and the window log count up to the limit. A full window log adds no entry.
/// - The sliding counter's current window counts up to the limit. With the overlap of the previous window, its estimate
///   may exceed the limit.
/// - The sliding log adds `min(cost, limit)` at its time and drops the oldest entries, the last one in part, until it is
///   exactly full.
/// - The bucketed window does the same per bucket: from the newest back, each bucket keeps as much as every window that
///   contains it has room for.
///
/// In a batch that another limit denies, the attempt is still charged. A cost of 0 and a peek charge nothing.
///
/// ```
/// use ratelimit_core::{Algorithm, Attempts, FixedWindow, Timestamp};
/// use ratelimit_core::algorithm::Write;
///
/// let attempts = Attempts::new(FixedWindow::new("3/m".parse()?)?);
/// let denied = attempts.step(None, Timestamp::ZERO, 4);
/// assert!(!denied.decision.allowed);
/// let Write::Put { state, .. } = denied.write else { unreachable!() };
/// assert!(!attempts.step(Some(&state), Timestamp::ZERO, 1).decision.allowed);
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attempts<A>(A);

impl<A> Attempts<A> {
    /// The same limit, charged by attempts.
    #[must_use]
    pub const fn new(algorithm: A) -> Self {
        Self(algorithm)
    }

    /// The algorithm that admits or denies an attempt.
    #[must_use]
    pub const fn algorithm(&self) -> &A {
        &self.0
    }
}

macro_rules! admitting {
    ($attempts:expr, |$algorithm:ident| $call:expr) => {{
        let $algorithm = &$attempts.0;
        $call
    }};
}

#[deny(clippy::missing_trait_methods)]
impl<A: ChargesAttempts> Algorithm for Attempts<A> {
    type State = A::State;

    // The wait is that of the wrapped algorithm, without the charge of this attempt.
    forwards!(admitting, identity);

    fn step(&self, state: Option<&A::State>, now: Timestamp, cost: u64) -> Step<A::State> {
        let step = self.0.step(state, now, cost);
        if step.decision.allowed {
            return step;
        }
        let write = self.0.fill(state, now, cost.min(self.capacity()));
        // The wait counts the charge of this attempt. A state that another limit wrote may look emptier once it is charged.
        let filled = self.0.step(write.after(state), now, cost).decision;
        let decision = if filled.allowed { step.decision } else { filled };
        Step { decision, write }
    }

    /// `None`: denied requests are charged too, so there is nothing to settle.
    fn reservation_us(&self) -> Option<u64> {
        None
    }

    fn settle(
        &self,
        _state: Option<&A::State>,
        _now: Timestamp,
        _reservation: &Reservation,
        _cost: u64,
    ) -> MaybeStep<Self> {
        None
    }

    fn charges_denials(&self) -> bool {
        true
    }

    fn annotate(&self, state: &mut A::State, metadata: &[u8]) {
        self.0.annotate(state, metadata);
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: ChargesAttempts + InMemory> InMemory for Attempts<A> {
    fn step_in_place(&self, state: &mut A::State, now: Timestamp, cost: u64) -> Step<()> {
        let step = self.0.step_in_place(state, now, cost);
        if step.decision.allowed {
            return step;
        }
        stepped_in_place(self, state, now, cost)
    }

    fn entries_in(state: &A::State) -> usize {
        A::entries_in(state)
    }

    fn entries_per_step(&self) -> usize {
        self.0.entries_per_step()
    }

    fn is_compact(&self) -> bool {
        self.0.is_compact()
    }

    fn to_compact(state: &A::State) -> Option<Compact> {
        A::to_compact(state)
    }

    fn from_compact(compact: Compact) -> Option<A::State> {
        A::from_compact(compact)
    }

    #[inline]
    fn has_fast_step(&self) -> bool {
        self.0.has_fast_step()
    }

    /// Returns `None` for denied requests, because they are charged.
    #[inline]
    fn step_fast(&self, state: Compact, now: Timestamp, cost: u64) -> Option<Step<Compact>> {
        self.0.step_fast(state, now, cost).filter(|step| step.decision.allowed)
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: ChargesAttempts + KeepsEntries> KeepsEntries for Attempts<A> {
    fn entries_of<'s>(&self, state: &'s A::State, now: Timestamp) -> &'s [WindowEntry] {
        self.0.entries_of(state, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::{BucketedWindow, FixedWindow, SlidingCounter, SlidingLog};
    use crate::rate::Rate;
    use crate::timestamp::MAX_INTEGER;

    /// Keeps trying at the largest cost and returns the last state.
    fn tried<A: ChargesAttempts>(algorithm: A) -> A::State {
        let attempts = Attempts::new(algorithm);
        let mut state = None;
        for us in [0, 0, 1, 2_000_000] {
            let at = Timestamp::from_us(us).expect("a test's time");
            let step = attempts.step(state.as_ref(), at, u64::MAX);
            assert!(!step.decision.allowed);
            assert_eq!((step.decision.remaining, step.decision.retry_after_us), (0, None));
            state = step.write.after(state.as_ref()).cloned();
        }
        state.expect("attempts are charged")
    }

    #[test]
    fn the_largest_limits_fill_exactly() {
        let largest = Rate::per_us(MAX_INTEGER, 60_000_000).expect("a rate");
        let log = tried(SlidingLog::new(largest).expect("a limit"));
        assert_eq!((log.entries.len(), log.entries[0].cost), (1, MAX_INTEGER));
        let window = tried(BucketedWindow::new(1_000_000, &[largest]).expect("a limit"));
        assert_eq!((window.buckets.len(), window.buckets[0].count), (1, MAX_INTEGER));
        assert_eq!(tried(FixedWindow::new(largest).expect("a limit")).count, MAX_INTEGER);
        assert_eq!(tried(SlidingCounter::new(largest).expect("a limit")).current, MAX_INTEGER);
    }
}
