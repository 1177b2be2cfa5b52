//! [`Attempts`]: every attempt is charged, admitted or not.

use crate::algorithm::{Algorithm, ChargesAttempts, KeepsEntries, Small, Step, WindowEntry};
use crate::hold::Hold;
use crate::tick::Tick;

/// An algorithm that charges every attempt, whether it is admitted or not.
///
/// Source: the Redis patterns that add first and look afterwards (INCR, RPUSH or ZADD in MULTI), because a
/// transaction cannot branch. Whoever keeps trying stays out: an attempt that is denied uses the
/// window up as one that is admitted does. Windows count on beyond their limit; buckets are drained,
/// and owe nothing.
///
/// An attempt counts, at the most, as one more than the capacity. In a batch that another limit
/// denies, an attempt is charged all the same. A cost of 0 and a peek charge nothing.
///
/// ```
/// use ratelimit_core::{Algorithm, Attempts, FixedWindow, Tick, Write};
///
/// let attempts = Attempts::new(FixedWindow::new("3/m".parse()?)?);
/// let denied = attempts.step(None, Tick::ZERO, 4);
/// assert!(!denied.decision.allowed);
/// let Write::Put { state, .. } = denied.write else { unreachable!() };
/// assert!(!attempts.step(Some(&state), Tick::ZERO, 1).decision.allowed);
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

    /// What decides whether an attempt is admitted.
    #[must_use]
    pub const fn algorithm(&self) -> &A {
        &self.0
    }
}

impl<A: ChargesAttempts> Algorithm for Attempts<A> {
    type State = A::State;

    fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    fn step(&self, state: Option<&A::State>, now: Tick, cost: u64) -> Step<A::State> {
        let step = self.0.step(state, now, cost);
        if step.decision.allowed {
            return step;
        }
        let write = self.0.overcharge(state, now, cost.min(self.capacity() + 1));
        // The wait is from what this very attempt leaves.
        let decision = self.0.step(write.after(state), now, cost).decision;
        Step { decision, write }
    }

    fn step_in_place(&self, state: &mut A::State, now: Tick, cost: u64) -> Step<()> {
        let step = self.0.step_in_place(state, now, cost);
        if step.decision.allowed {
            return step;
        }
        let Step { decision, write } = self.step(Some(state), now, cost);
        Step { decision, write: write.map(|next| *state = next) }
    }

    fn entries_in(state: &A::State) -> usize {
        A::entries_in(state)
    }

    fn entries_a_step(&self) -> usize {
        self.0.entries_a_step()
    }

    fn refund(&self, state: Option<&A::State>, now: Tick, cost: u64) -> Option<Step<A::State>> {
        self.0.refund(state, now, cost)
    }

    fn force(&self, state: Option<&A::State>, now: Tick, cost: u64) -> Option<Step<A::State>> {
        self.0.force(state, now, cost)
    }

    fn charged_at(&self, state: Option<&A::State>, now: Tick) -> Tick {
        self.0.charged_at(state, now)
    }

    fn undo(
        &self,
        state: Option<&A::State>,
        now: Tick,
        hold: &Hold,
        charged: &A::State,
    ) -> Option<Step<A::State>> {
        self.0.undo(state, now, hold, charged)
    }

    fn charges_denials(&self) -> bool {
        true
    }

    fn metadata_bytes(&self) -> Option<usize> {
        self.0.metadata_bytes()
    }

    fn is_small(&self) -> bool {
        self.0.is_small()
    }

    fn to_small(state: &A::State) -> Option<Small> {
        A::to_small(state)
    }

    fn from_small(small: Small) -> Option<A::State> {
        A::from_small(small)
    }

    #[inline]
    fn has_quick_step(&self) -> bool {
        self.0.has_quick_step()
    }

    /// Of what is admitted: a denial is charged, too.
    #[inline]
    fn step_quick(&self, state: Small, now: Tick, cost: u64) -> Option<Step<Small>> {
        self.0.step_quick(state, now, cost).filter(|step| step.decision.allowed)
    }

    fn annotate(&self, state: &mut A::State, metadata: &[u8]) {
        self.0.annotate(state, metadata);
    }
}

impl<A: ChargesAttempts + KeepsEntries> KeepsEntries for Attempts<A> {
    fn entries_of<'s>(&self, state: &'s A::State, now: Tick) -> &'s [WindowEntry] {
        self.0.entries_of(state, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithm::{BucketedWindow, SlidingLog};
    use crate::rate::Rate;
    use crate::tick::MAX_INTEGER;

    /// Keeps trying at the largest cost, and says what the state comes to.
    fn tried<A: ChargesAttempts>(algorithm: A, total: impl Fn(&A::State) -> u64) -> u64 {
        let attempts = Attempts::new(algorithm);
        let mut state = None;
        for us in [0, 0, 1, 2_000_000] {
            let at = Tick::from_us(us).expect("a test's time");
            let step = attempts.step(state.as_ref(), at, u64::MAX);
            assert!(!step.decision.allowed);
            state = step.write.after(state.as_ref()).cloned();
        }
        total(&state.expect("attempts are charged"))
    }

    #[test]
    fn what_is_charged_beyond_the_largest_limit_stays_exact() {
        let largest = Rate::new(MAX_INTEGER, 60_000_000).expect("a rate");
        let log = SlidingLog::new(largest).expect("a limit");
        let sum = tried(log, |state| state.entries.iter().map(|entry| entry.cost).sum());
        assert_eq!(sum, MAX_INTEGER);
        let window = BucketedWindow::new(1_000_000, &[largest]).expect("a limit");
        let sum = tried(window, |state| state.buckets.iter().map(|bucket| bucket.count).sum());
        assert_eq!(sum, MAX_INTEGER);
    }
}
