//! The sliding window counter: two fixed windows, the previous one weighted by its overlap.
//!
//! Source: Cloudflare, "How we built rate limiting capable of scaling to millions of domains" (2017). A span of one
//! window's length that ends now overlaps the current window and a part of the previous one. The algorithm assumes
//! that the previous window admitted its requests evenly, so of them count
//!
//! ```text
//! floor(previous · overlap / window)
//! ```
//!
//! A request fits if the sum of this, of the current window's count and of its own cost is at most the limit. A key
//! takes two counts, and nothing jumps at a window's boundary. In return the count is an estimate: real requests are
//! not spread evenly.
//!
//! `sliding_counter.lua` in `ratelimit-redis` is the same algorithm in Lua.

use crate::algorithm::{Algorithm, ChargesAttempts, Step, Write};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// A count in any span of one window's length, estimated from two aligned windows.
///
/// ```
/// use ratelimit_core::{Algorithm, SlidingCounter, SlidingCounterState, Timestamp};
///
/// let counter = SlidingCounter::new("100/m".parse()?)?;
/// let state = SlidingCounterState { start: Timestamp::ZERO, previous: 0, current: 80 };
/// // A quarter into the next minute, three quarters of the 80 still count.
/// let at = Timestamp::from_us(75_000_000).expect("a time");
/// assert_eq!(counter.step(Some(&state), at, 0).decision.remaining, 40);
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingCounter {
    limit: u64,
    window_us: u64,
}

/// What [`SlidingCounter`] keeps for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingCounterState {
    /// When the current window began.
    pub start: Timestamp,
    /// What the previous window admitted.
    pub previous: u64,
    /// What the current window has admitted.
    pub current: u64,
}

impl SlidingCounter {
    /// The count of the rate in any span of the rate's period.
    ///
    /// # Errors
    /// None today; a `Result` so that all algorithms are built alike.
    pub fn new(rate: Rate) -> Result<Self, ConfigError> {
        Ok(Self { limit: rate.count(), window_us: rate.period_us() })
    }

    /// The length of a window in microseconds.
    #[must_use]
    pub const fn window_us(&self) -> u64 {
        self.window_us
    }

    fn aligned(&self, timestamp: Timestamp) -> Timestamp {
        Timestamp::saturating_from_us(timestamp.as_us() - timestamp.as_us() % self.window_us)
    }

    /// The two windows that count at `now`.
    fn windows(&self, state: Option<&SlidingCounterState>, now: Timestamp) -> SlidingCounterState {
        let start = self.aligned(now);
        let empty = SlidingCounterState { start, previous: 0, current: 0 };
        let Some(state) = state else { return empty };
        // The start is aligned again: the state may have been written for windows of another length. A count written
        // under a larger limit counts up to this one.
        let written = self.aligned(state.start);
        let (previous, current) = (state.previous.min(self.limit), state.current.min(self.limit));
        if written >= start {
            // The current window, or a later one because the clock went back.
            SlidingCounterState { start: written, previous, current }
        } else if written.as_us() + self.window_us == start.as_us() {
            SlidingCounterState { start, previous: current, current: 0 }
        } else {
            empty
        }
    }

    /// How much of the previous window overlaps.
    fn overlap_us(&self, windows: SlidingCounterState, now: Timestamp) -> u64 {
        self.window_us - now.saturating_us_since(windows.start)
    }

    /// What counts of the previous window.
    fn weighted(&self, windows: SlidingCounterState, now: Timestamp) -> u64 {
        let overlap_us = self.overlap_us(windows, now);
        multiplied_divided(windows.previous, overlap_us, self.window_us).0
    }

    /// What counts of both windows.
    fn used(&self, windows: SlidingCounterState, now: Timestamp) -> u64 {
        self.weighted(windows, now) + windows.current
    }

    /// When at most `room` of a window's `count` will count, in the next window, which begins at `start_us`.
    fn faded_us(&self, start_us: u64, count: u64, room: u64) -> u64 {
        if count <= room {
            return start_us;
        }
        // count · overlap / window < room + 1 holds up to this overlap.
        let (overlap_us, rest) = multiplied_divided(room + 1, self.window_us, count);
        start_us + self.window_us - (overlap_us - u64::from(rest == 0))
    }

    /// When `cost` will fit, if it ever does.
    fn fits_us(&self, windows: SlidingCounterState, cost: u64) -> Option<u64> {
        let start_us = windows.start.as_us();
        let room = self.limit.checked_sub(cost)?;
        Some(match room.checked_sub(windows.current) {
            Some(room) => self.faded_us(start_us, windows.previous, room),
            // It fits in the next window at the earliest.
            None => self.faded_us(start_us + self.window_us, windows.current, room),
        })
    }

    /// When nothing will count.
    fn empty_us(&self, windows: SlidingCounterState) -> u64 {
        let start_us = windows.start.as_us();
        match windows.current {
            0 => self.faded_us(start_us, windows.previous, 0),
            current => self.faded_us(start_us + self.window_us, current, 0),
        }
    }

    fn decision(
        &self,
        now: Timestamp,
        cost: u64,
        windows: SlidingCounterState,
        retry_after_us: Option<u64>,
    ) -> Decision {
        let used = self.used(windows, now);
        let remaining = self.limit.saturating_sub(used);
        let wait_us = |us: u64| us.saturating_sub(now.as_us());
        Decision {
            allowed: retry_after_us == Some(0),
            cost,
            limit: self.limit,
            remaining,
            retry_after_us,
            replenish_after_us: self.fits_us(windows, remaining + 1).map_or(0, wait_us),
            reset_after_us: if used == 0 { 0 } else { wait_us(self.empty_us(windows)) },
        }
    }

    fn admitted(
        &self,
        now: Timestamp,
        cost: u64,
        windows: SlidingCounterState,
        current: u64,
    ) -> Step<SlidingCounterState> {
        let state = SlidingCounterState { current, ..windows };
        let write = if current == windows.current {
            Write::Keep
        } else if self.used(state, now) == 0 {
            Write::Remove
        } else {
            Write::Put { state, expires: Timestamp::saturating_from_us(self.empty_us(state)) }
        };
        Step { decision: self.decision(now, cost, state, Some(0)), write }
    }
}

impl Algorithm for SlidingCounter {
    type State = SlidingCounterState;

    fn capacity(&self) -> u64 {
        self.limit
    }

    fn step(
        &self,
        state: Option<&SlidingCounterState>,
        now: Timestamp,
        cost: u64,
    ) -> Step<SlidingCounterState> {
        let windows = self.windows(state, now);
        if cost > self.limit.saturating_sub(self.used(windows, now)) {
            let retry_after_us = self.fits_us(windows, cost).map(|us| us - now.as_us());
            let decision = self.decision(now, cost, windows, retry_after_us);
            return Step { decision, write: Write::Keep };
        }
        self.admitted(now, cost, windows, windows.current + cost)
    }

    /// Takes the cost off the current window; the previous one stays as it is.
    fn refund(
        &self,
        state: Option<&SlidingCounterState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<SlidingCounterState>> {
        let windows = self.windows(state, now);
        Some(self.admitted(now, cost, windows, windows.current.saturating_sub(cost)))
    }

    /// Takes the charge off its window, if that is still the current one.
    fn undo(
        &self,
        state: Option<&SlidingCounterState>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &SlidingCounterState,
    ) -> Option<Step<SlidingCounterState>> {
        let same = state.is_some_and(|state| state.start == charged.start);
        if same { self.refund(state, now, reservation.cost) } else { None }
    }

    fn force(
        &self,
        state: Option<&SlidingCounterState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<SlidingCounterState>> {
        let windows = self.windows(state, now);
        let left = self.limit.saturating_sub(self.used(windows, now));
        Some(self.admitted(now, cost, windows, windows.current + cost.min(left)))
    }
}

impl InMemory for SlidingCounter {}

impl ChargesAttempts for SlidingCounter {
    /// Counts up to the limit in the current window, whatever the previous one adds: the estimate may exceed the
    /// limit.
    fn fill(
        &self,
        state: Option<&SlidingCounterState>,
        now: Timestamp,
        cost: u64,
    ) -> Write<SlidingCounterState> {
        let windows = self.windows(state, now);
        let current = self.limit.min(windows.current.saturating_add(cost));
        self.admitted(now, cost, windows, current).write
    }
}

/// `a · b / c`, rounded down, and the remainder, exactly.
#[expect(clippy::cast_possible_truncation, reason = "callers have a ≤ c or b ≤ c, all below 2^52")]
fn multiplied_divided(a: u64, b: u64, c: u64) -> (u64, u64) {
    let (product, c) = (u128::from(a) * u128::from(b), u128::from(c));
    ((product / c) as u64, (product % c) as u64)
}
