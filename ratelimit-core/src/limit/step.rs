//! How a limit steps: as its algorithm does. One that counts attempts also charges what that
//! denies.
//!
//! Charging a denial breaks the law that a denial charges nothing, so a policy must ask for it.

use alloc::format;

use super::Limit;
use crate::algorithms::{Algorithm, Step};
use crate::error::ConfigError;
use crate::in_memory::{Compact, InMemory, step_compact, through_states};
use crate::timestamp::Timestamp;

impl<A: Algorithm> Limit<A> {
    /// The same limit, charging every attempt, admitted or denied: a caller that retries stays
    /// denied. It keeps the states of the same limit that counts what it admits.
    ///
    /// Source: the increment-first patterns of Redis (`INCR`, `RPUSH` or `ZADD` in `MULTI`), which
    /// write before they read because a transaction cannot branch.
    ///
    /// # The rule: attempts fill, never overfill
    ///
    /// An attempt that fits is charged as usual. An attempt that does not fit is charged as far as
    /// there is room, which leaves a full limit as of now. A state never owes more than its
    /// capacity, unless a larger limit wrote it. In particular:
    ///
    /// - Buckets drain to 0 left.
    /// - Both fixed windows and the window log count up to the limit. A full window log adds no
    ///   entry.
    /// - The sliding counter's current window counts up to the limit. With the overlap of the
    ///   previous window, its estimate may exceed the limit.
    /// - The sliding log adds `min(cost, limit)` at its time and drops the oldest entries, the last
    ///   one in part, until it is exactly full.
    /// - The bucketed window does the same per bucket: from the newest back, each bucket keeps as
    ///   much as every window that contains it has room for.
    ///
    /// In a batch that another limit denies, the attempt is still charged. A cost of 0 and a peek
    /// charge nothing. No charge can be reserved.
    ///
    /// ```
    /// use ratelimit_core::algorithm::Write;
    /// use ratelimit_core::{FixedWindow, Limit, Timestamp};
    ///
    /// let attempts = Limit::new("login", FixedWindow::per_minute(3).build()?)?.count_attempts()?;
    /// let denied = attempts.step(None, Timestamp::ZERO, 4);
    /// assert!(!denied.decision.allowed);
    /// let Write::Put { state, .. } = denied.write else { unreachable!() };
    /// assert!(!attempts.step(Some(&state), Timestamp::ZERO, 1).decision.allowed);
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// An algorithm that [cannot charge](Algorithm::fill) a denied request, such as a limit on
    /// concurrency or a [`Stack`](crate::Stack); or one with a [debt](Algorithm::debt).
    pub fn count_attempts(mut self) -> Result<Self, ConfigError> {
        let kind = self.algorithm.state_kind();
        let refused = if self.algorithm.fill(None, Timestamp::ZERO, 0).is_none() {
            let named = kind.split(['/', '(']).next().filter(|name| !name.is_empty());
            let named = named.unwrap_or("its algorithm");
            format!(
                "count = \"attempts\" has no meaning for {named}, which cannot charge a denied \
                 request; leave it out"
            )
        } else if self.algorithm.debt() > 0 {
            "debt has no meaning with count = \"attempts\": denied requests would be owed; leave one \
             of them out"
                .into()
        } else {
            self.counts_attempts = true;
            return Ok(self);
        };
        Err(ConfigError::new(refused).in_limit(&*self.name))
    }

    /// Whether it charges every attempt.
    #[inline]
    #[must_use]
    pub const fn counts_attempts(&self) -> bool {
        self.counts_attempts
    }

    /// How long a charge can be settled, or a lease lasts, in microseconds, as by its
    /// [algorithm](Algorithm::reservation_us). `None` if no charge can be reserved. A limit that
    /// counts attempts has none: denied requests are charged too, so there is nothing to settle.
    #[must_use]
    pub fn reservation_us(&self) -> Option<u64> {
        if self.counts_attempts { None } else { self.algorithm.reservation_us() }
    }

    /// Decides a request of this cost at `now`, and returns what to write: the
    /// [step](Algorithm::step) of its algorithm, or the charge of a denied attempt if it
    /// [counts them](Self::count_attempts). The wait of a denied attempt counts its own charge.
    #[inline]
    pub fn step(&self, state: Option<&A::State>, now: Timestamp, cost: u64) -> Step<A::State> {
        if self.counts_attempts {
            step_attempt(&self.algorithm, state, now, cost)
        } else {
            self.algorithm.step(state, now, cost)
        }
    }
}

#[cold]
fn step_attempt<A: Algorithm>(
    algorithm: &A,
    state: Option<&A::State>,
    now: Timestamp,
    cost: u64,
) -> Step<A::State> {
    let step = algorithm.step(state, now, cost);
    if step.decision.allowed {
        return step;
    }
    let charge = cost.min(algorithm.capacity());
    let Some(Step { write, .. }) = algorithm.fill(state, now, charge) else { return step };
    // A state that another limit wrote may look emptier once it is charged.
    let after = algorithm.step(write.after(state), now, cost).decision;
    let decision = if after.allowed { step.decision } else { after };
    Step { decision, write }
}

impl<A: InMemory> Limit<A> {
    /// [Steps](Self::step) a state that the store owns, and writes the next state over it.
    #[inline]
    pub fn step_in_place(&self, state: &mut A::State, now: Timestamp, cost: u64) -> Step<()> {
        if self.counts_attempts {
            self.step_attempt_in_place(state, now, cost)
        } else {
            self.algorithm.step_in_place(state, now, cost)
        }
    }

    #[cold]
    fn step_attempt_in_place(&self, state: &mut A::State, now: Timestamp, cost: u64) -> Step<()> {
        let step = self.algorithm.step_in_place(state, now, cost);
        if step.decision.allowed {
            return step;
        }
        step_attempt(&self.algorithm, Some(state), now, cost).map(|next| *state = next)
    }

    /// [Steps](Self::step) a compact state: decodes it, steps, and encodes the next state.
    ///
    /// Returns `None` if either state has no compact form.
    #[doc(hidden)]
    #[inline]
    pub fn step_compact(
        &self,
        state: Option<Compact>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<Compact>> {
        through_states::<A>(state, |state| self.step(state, now, cost))
    }

    /// The same at other numbers, which have this limit's states.
    #[inline]
    pub(crate) fn step_compact_at(
        &self,
        numbers: &A,
        state: Option<Compact>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<Compact>> {
        if self.counts_attempts {
            through_states::<A>(state, |state| step_attempt(numbers, state, now, cost))
        } else {
            step_compact(numbers, state, now, cost)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::algorithms::{BucketedWindow, FixedWindow, SlidingCounter, SlidingLog};
    use crate::rate::Rate;
    use crate::timestamp::MAX_INTEGER;

    /// Charges the largest cost again and again, and returns the last state.
    fn fill_by_attempts<A: Algorithm>(algorithm: A) -> A::State {
        let attempts = Limit::new("attempts", algorithm).and_then(Limit::count_attempts);
        let (attempts, mut state) = (attempts.expect("counts attempts"), None);
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
        let log = fill_by_attempts(SlidingLog::new(largest).expect("a limit"));
        assert_eq!((log.entries.len(), log.entries[0].cost), (1, MAX_INTEGER));
        let window = fill_by_attempts(BucketedWindow::new(1_000_000, &[largest]).expect("a limit"));
        assert_eq!((window.buckets.len(), window.buckets[0].count), (1, MAX_INTEGER));
        assert_eq!(
            fill_by_attempts(FixedWindow::new(largest).expect("a limit")).count,
            MAX_INTEGER
        );
        assert_eq!(
            fill_by_attempts(SlidingCounter::new(largest).expect("a limit")).current,
            MAX_INTEGER
        );
    }
}
