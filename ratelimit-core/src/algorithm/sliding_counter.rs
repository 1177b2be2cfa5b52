//! The sliding counter: two fixed windows, the older one weighed by how much of it is still in view.
//!
//! Source: the "approximated sliding window" that Cloudflare described in 2017. A stretch of one window's
//! length that ends now overlaps the current window and a part of the one before. What the older
//! one admitted is taken as spread evenly, so that of it counts
//!
//! ```text
//! floor(previous · overlap / window)
//! ```
//!
//! and a request fits if this, what the current window has admitted, and its own cost are at most
//! the limit. Two numbers a key, and no jump at the boundary; the price is that the older window
//! was not really even.
//!
//! The Lua twin of this file is `sliding_counter.lua` in `ratelimit-redis`.

use crate::algorithm::{Algorithm, ChargesAttempts, Step, Write};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// So many in any stretch of one window's length, as estimated from two aligned windows.
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
    /// What was admitted in the window before it.
    pub previous: u64,
    /// What has been admitted in it.
    pub current: u64,
}

impl SlidingCounter {
    /// The rate's number in any stretch of the rate's period.
    ///
    /// # Errors
    /// None for any [`Rate`] today; a `Result` so that all algorithms are built alike.
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

    /// The two windows that a request at `now` looks at.
    fn windows(&self, state: Option<&SlidingCounterState>, now: Timestamp) -> SlidingCounterState {
        let start = self.aligned(now);
        let empty = SlidingCounterState { start, previous: 0, current: 0 };
        let Some(state) = state else { return empty };
        // The start is aligned anew, because it may have been written for another window, and what
        // was admitted under a larger limit counts as no more than this one's.
        let written = self.aligned(state.start);
        let (previous, current) = (state.previous.min(self.limit), state.current.min(self.limit));
        if written >= start {
            // Of this window, or of a later one: the clock went back, and the state's counts.
            SlidingCounterState { start: written, previous, current }
        } else if written.as_us() + self.window_us == start.as_us() {
            SlidingCounterState { start, previous: current, current: 0 }
        } else {
            empty
        }
    }

    /// How much of the window before is in view.
    fn overlap_us(&self, windows: SlidingCounterState, now: Timestamp) -> u64 {
        self.window_us - now.saturating_us_since(windows.start)
    }

    /// What counts of the window before.
    fn weighed(&self, windows: SlidingCounterState, now: Timestamp) -> u64 {
        let overlap_us = self.overlap_us(windows, now);
        multiplied_divided(windows.previous, overlap_us, self.window_us).0
    }

    /// What counts of both windows.
    fn used(&self, windows: SlidingCounterState, now: Timestamp) -> u64 {
        self.weighed(windows, now) + windows.current
    }

    /// When at most `room` of a window's `count` will count, in the window that begins at `start_us`
    /// after it.
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
            // Not in this window.
            None => self.faded_us(start_us + self.window_us, windows.current, room),
        })
    }

    /// When nothing will count any more.
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
        Decision {
            allowed: retry_after_us == Some(0),
            cost,
            limit: self.limit,
            remaining: self.limit.saturating_sub(used),
            retry_after_us,
            reset_after_us: match used {
                0 => 0,
                _ => self.empty_us(windows).saturating_sub(now.as_us()),
            },
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

    /// Takes the cost off the current window; what is past stays.
    fn refund(
        &self,
        state: Option<&SlidingCounterState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<SlidingCounterState>> {
        let windows = self.windows(state, now);
        Some(self.admitted(now, cost, windows, windows.current.saturating_sub(cost)))
    }

    /// Takes it off the window that it was charged in, if that is still the current one.
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
    /// The current window counts up to the limit, whatever overlaps of the previous one: with that the estimate
    /// may lie above the limit.
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

/// `a · b / c` rounded down, and what is left over, exactly.
#[expect(clippy::cast_possible_truncation, reason = "callers have a ≤ c or b ≤ c, all below 2^52")]
fn multiplied_divided(a: u64, b: u64, c: u64) -> (u64, u64) {
    let (product, c) = (u128::from(a) * u128::from(b), u128::from(c));
    ((product / c) as u64, (product % c) as u64)
}
