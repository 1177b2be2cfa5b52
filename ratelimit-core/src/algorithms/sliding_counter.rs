//! The sliding window counter: two fixed windows, the previous one weighted by its overlap.
//!
//! Source: Cloudflare, "How we built rate limiting capable of scaling to millions of domains"
//! (2017). A span of one window's length that ends now overlaps the current window and a part of
//! the previous one. The algorithm assumes that the previous window admitted its requests evenly,
//! so of them count
//!
//! ```text
//! floor(previous · overlap / window)
//! ```
//!
//! A request fits if the sum of this, of the current window's count and of its own cost is at most
//! the limit. A key takes two counts, and nothing jumps at a window's boundary. In return the count
//! is an estimate: real requests are not spread evenly.
//!
//! `sliding_counter.lua` in `ratelimit-redis` is the same algorithm in Lua.

use alloc::borrow::Cow;
use alloc::format;

use crate::algorithms::{Algorithm, MaybeStep, Step, Write, undone_by_refund};
use crate::builder::{per, without_burst};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::{Rate, kind_of_window};
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// A count in any span of one window's length, estimated from two aligned windows.
///
/// ```
/// use ratelimit_core::{Algorithm, SlidingCounter, Timestamp};
/// use ratelimit_core::algorithm::SlidingCounterState;
///
/// // Cloudflare's example: 42 in the last minute, and 18 in this one, of which a quarter has passed.
/// let counter = SlidingCounter::new("50/m".parse()?)?;
/// let [start, at] = [60_000_000, 75_000_000].map(Timestamp::saturating_from_us);
/// let state = SlidingCounterState { start, previous: 42, current: 18 };
/// // 42 · 0.75 + 18 = 49.5
/// assert_eq!(counter.step(Some(&state), at, 0).decision.remaining, 1);
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
    /// A window of 2^51 microseconds (71 years) or more: the end of the next window would not be
    /// exact.
    pub fn new(rate: Rate) -> Result<Self, ConfigError> {
        let window_us = rate.period_us();
        if window_us >= 1 << 51 {
            return Err(ConfigError::new(format!(
                "a window of {window_us} µs is too long for a sliding counter, which also counts the window before; \
                 write less than 2^51 µs (71 years), or use sliding-log"
            )));
        }
        Ok(Self { limit: rate.count(), window_us })
    }

    /// The length of a window in microseconds.
    #[must_use]
    pub const fn window_us(&self) -> u64 {
        self.window_us
    }

    /// The two windows that count at `now`, as they were written.
    fn windows(&self, state: Option<&SlidingCounterState>, now: Timestamp) -> SlidingCounterState {
        let start = now.aligned(self.window_us);
        match state {
            // The current window, or a later one because the clock went back.
            Some(state) if state.start >= start => *state,
            Some(state) if state.start.as_us() + self.window_us == start.as_us() => {
                SlidingCounterState { start, previous: state.current, current: 0 }
            }
            _ => SlidingCounterState { start, previous: 0, current: 0 },
        }
    }

    /// The windows as this limit counts them: a count written under a larger limit counts up to
    /// this one.
    fn cap_counts(&self, windows: SlidingCounterState) -> SlidingCounterState {
        let (previous, current) =
            (windows.previous.min(self.limit), windows.current.min(self.limit));
        SlidingCounterState { previous, current, ..windows }
    }

    /// What counts of both windows: of the previous one, as much as overlaps.
    fn used(&self, windows: SlidingCounterState, now: Timestamp) -> u64 {
        let overlap_us = self.window_us - now.saturating_us_since(windows.start);
        multiplied_divided(windows.previous, overlap_us, self.window_us).0 + windows.current
    }

    /// When `cost` will fit, if it ever does.
    fn fits_us(&self, windows: SlidingCounterState, cost: u64) -> Option<u64> {
        let start_us = windows.start.as_us();
        let room = self.limit.checked_sub(cost)?;
        Some(match room.checked_sub(windows.current) {
            Some(room) => faded_us(start_us, self.window_us, windows.previous, room),
            // It fits in the next window at the earliest.
            None => faded_us(start_us + self.window_us, self.window_us, windows.current, room),
        })
    }

    fn decision(
        &self,
        (now, cost): (Timestamp, u64),
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

    /// A refund or a forced charge. Another limit may count more in the windows, and goes on to do
    /// so.
    fn change(
        &self,
        state: Option<&SlidingCounterState>,
        (now, cost): (Timestamp, u64),
        change: impl Fn(u64) -> u64,
    ) -> Step<SlidingCounterState> {
        let held = self.windows(state, now);
        let windows = self.cap_counts(held);
        let changed = change(windows.current);
        let write = if changed == windows.current {
            Write::Keep
        } else {
            let current = held.current - windows.current + changed;
            self.write(SlidingCounterState { current, ..held }, now)
        };
        let left = self.cap_counts(self.windows(write.after(state), now));
        Step { decision: self.decision((now, cost), left, Some(0)), write }
    }

    /// When nothing of these windows will count.
    fn empty_us(&self, windows: SlidingCounterState) -> u64 {
        let SlidingCounterState { start, previous, current } = windows;
        match current {
            0 => faded_us(start.as_us(), self.window_us, previous, 0),
            current => {
                faded_us(start.as_us().saturating_add(self.window_us), self.window_us, current, 0)
            }
        }
    }

    fn write(&self, state: SlidingCounterState, now: Timestamp) -> Write<SlidingCounterState> {
        let ends_us = self.empty_us(state);
        if ends_us > now.as_us() && (state.previous, state.current) != (0, 0) {
            Write::until(state, ends_us)
        } else {
            Write::Remove
        }
    }
}

impl Algorithm for SlidingCounter {
    type State = SlidingCounterState;

    fn capacity(&self) -> u64 {
        self.limit
    }

    fn is_within(&self, max: &Self) -> bool {
        self.window_us == max.window_us && self.limit <= max.limit
    }

    fn state_kind(&self) -> Cow<'static, str> {
        kind_of_window("sliding-counter", self.window_us)
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        let held = self.windows(state, now);
        let windows = self.cap_counts(held);
        let keep = |retry_after_us| {
            let decision = self.decision((now, cost), windows, retry_after_us);
            Step { decision, write: Write::Keep }
        };
        if cost > self.limit.saturating_sub(self.used(windows, now)) {
            return keep(self.fits_us(windows, cost).map(|us| us - now.as_us()));
        }
        if cost == 0 {
            return keep(Some(0));
        }
        let after = SlidingCounterState { current: held.current + cost, ..held };
        let decision = self.decision((now, cost), self.cap_counts(after), Some(0));
        Step { decision, write: self.write(after, now) }
    }

    /// Takes the cost off the current window; the previous one stays as it is.
    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        Some(self.change(state, (now, cost), |current| current.saturating_sub(cost)))
    }

    undone_by_refund!(|state| state.start);

    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let windows = self.cap_counts(self.windows(state, now));
        let charge = cost.min(self.limit.saturating_sub(self.used(windows, now)));
        Some(self.change(state, (now, cost), |current| current.saturating_add(charge)))
    }

    /// Counts up to the limit in the current window, whatever the previous one adds: the estimate
    /// may exceed the limit.
    fn fill(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let windows = self.cap_counts(self.windows(state, now));
        let charge = cost.min(self.limit - windows.current);
        Some(self.change(state, (now, cost), |current| current.saturating_add(charge)))
    }
}

impl InMemory for SlidingCounter {}

/// When at most `room` of a window's `count` will count, in the next window, which begins at
/// `start_us`.
fn faded_us(start_us: u64, window_us: u64, count: u64, room: u64) -> u64 {
    if count <= room {
        return start_us;
    }
    // count · overlap / window < room + 1 holds up to this overlap.
    let (overlap_us, rest) = multiplied_divided(room + 1, window_us, count);
    start_us.saturating_add(window_us) - overlap_us.saturating_sub(u64::from(rest == 0))
}

/// `a · b / c`, rounded down, and the remainder, exactly.
#[expect(clippy::cast_possible_truncation, reason = "callers have a ≤ c or b ≤ c, all below 2^52")]
fn multiplied_divided(a: u64, b: u64, c: u64) -> (u64, u64) {
    let (product, c) = (u128::from(a) * u128::from(b), u128::from(c));
    ((product / c) as u64, (product % c) as u64)
}

per!(SlidingCounter);
without_burst!(SlidingCounter = "sliding-counter" by window_us);
