//! [`Attempts`]: every attempt is charged, admitted or not.

use crate::algorithm::{Algorithm, ChargesAttempts, KeepsEntries, Step, WindowEntry};
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

    fn refund(&self, state: Option<&A::State>, now: Tick, cost: u64) -> Option<Step<A::State>> {
        self.0.refund(state, now, cost)
    }

    fn force(&self, state: Option<&A::State>, now: Tick, cost: u64) -> Option<Step<A::State>> {
        self.0.force(state, now, cost)
    }

    fn charges_denials(&self) -> bool {
        true
    }

    fn metadata_bytes(&self) -> Option<usize> {
        self.0.metadata_bytes()
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
