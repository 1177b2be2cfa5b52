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

use alloc::format;

use crate::algorithms::{Algorithm, ChargesAttempts, MaybeStep, Step, Write, undone_by_refund};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::timestamp::{MAX_INTEGER, Timestamp};

/// A count in any span of one window's length, estimated from two aligned windows.
///
/// ```
/// use ratelimit_core::{Algorithm, SlidingCounter, Timestamp};
/// use ratelimit_core::algorithm::SlidingCounterState;
///
/// // Cloudflare's example: 42 in the last minute, and 18 in this one, of which a quarter has passed.
/// let counter = SlidingCounter::new("50/m".parse()?)?;
/// let [start, at] = [60_000_000, 75_000_000].map(Timestamp::saturating_from_us);
/// let state = SlidingCounterState { start, previous: 42, current: 18, window_us: 60_000_000 };
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
    /// The length of the windows that the state was written with, in microseconds.
    pub window_us: u64,
}

impl SlidingCounter {
    /// The count of the rate in any span of the rate's period.
    ///
    /// # Errors
    /// A window of 2^51 microseconds (71 years) or more: the end of the next window would not be exact.
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

    /// The two windows that count at `now`.
    fn windows(&self, state: Option<&SlidingCounterState>, now: Timestamp) -> SlidingCounterState {
        let start = now.aligned(self.window_us);
        let empty =
            SlidingCounterState { start, previous: 0, current: 0, window_us: self.window_us };
        let Some(state) = state else { return empty };
        // Windows of another length are past when they are for the limit that counted in them.
        if now.as_us() >= self.until_us(Some(state)) {
            return empty;
        }
        // The start is aligned again, for the same reason. A count written under a larger limit counts up to this one.
        let written = state.start.aligned(self.window_us);
        let (previous, current) = (state.previous.min(self.limit), state.current.min(self.limit));
        if written >= start {
            // The current window, or a later one because the clock went back.
            SlidingCounterState { start: written, previous, current, ..empty }
        } else if written.as_us() + self.window_us == start.as_us() {
            SlidingCounterState { previous: current, ..empty }
        } else {
            empty
        }
    }

    /// When windows of another length are past; never for this one's.
    fn until_us(&self, state: Option<&SlidingCounterState>) -> u64 {
        state.filter(|state| state.window_us != self.window_us).map_or(u64::MAX, |it| empty_us(*it))
    }

    /// The windows of the limit that wrote the state, as it counts them at `now`; this limit's if there are none.
    fn held(&self, state: Option<&SlidingCounterState>, now: Timestamp) -> SlidingCounterState {
        match state {
            Some(state) if state.window_us > 0 && now.as_us() < self.until_us(Some(state)) => {
                Self { limit: MAX_INTEGER, window_us: state.window_us }.windows(Some(state), now)
            }
            _ => self.windows(None, now),
        }
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

    /// The decision on windows that count until `until_us` at most.
    fn decision(
        &self,
        (now, cost): (Timestamp, u64),
        windows: SlidingCounterState,
        until_us: u64,
        retry_after_us: Option<u64>,
    ) -> Decision {
        let used = self.used(windows, now);
        let remaining = self.limit.saturating_sub(used);
        let wait_us = |us: u64| us.min(until_us).saturating_sub(now.as_us());
        Decision {
            allowed: retry_after_us == Some(0),
            cost,
            limit: self.limit,
            remaining,
            retry_after_us,
            replenish_after_us: self.fits_us(windows, remaining + 1).map_or(0, wait_us),
            reset_after_us: if used == 0 { 0 } else { wait_us(empty_us(windows)) },
        }
    }

    /// A refund or a forced charge. Another limit may have written the state, and count more, or for longer: the charge
    /// or refund then counts in the windows of that limit.
    fn changed(
        &self,
        state: Option<&SlidingCounterState>,
        (now, cost): (Timestamp, u64),
        windows: SlidingCounterState,
        change: impl Fn(u64) -> u64,
    ) -> Step<SlidingCounterState> {
        // Nor is there a change where the windows of the limit that wrote the state have nothing to give.
        let held = self.held(state, now);
        let stays = |current| change(current) == current;
        if stays(windows.current) || stays(held.current) {
            let until_us = self.until_us(state);
            let decision = self.decision((now, cost), windows, until_us, Some(0));
            return Step { decision, write: Write::Keep };
        }
        let current = change(held.current).min(MAX_INTEGER);
        // A charge of a later window of this limit counts there, and for the other limit still in its own.
        let start = if current > held.current { held.start.max(windows.start) } else { held.start };
        let write = written(SlidingCounterState { start, current, ..held }, now);
        let left = write.after(state);
        let (after, until_us) = (self.windows(left, now), self.until_us(left));
        Step { decision: self.decision((now, cost), after, until_us, Some(0)), write }
    }
}

impl Algorithm for SlidingCounter {
    type State = SlidingCounterState;

    fn capacity(&self) -> u64 {
        self.limit
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        let windows = self.windows(state, now);
        let until_us = self.until_us(state);
        let keep = |retry_after_us| {
            let decision = self.decision((now, cost), windows, until_us, retry_after_us);
            Step { decision, write: Write::Keep }
        };
        if cost > self.limit.saturating_sub(self.used(windows, now)) {
            let fits_us = self.fits_us(windows, cost).map(|us| us.min(until_us));
            return keep(fits_us.map(|us| us - now.as_us()));
        }
        if cost == 0 {
            return keep(Some(0));
        }
        let after = SlidingCounterState { current: windows.current + cost, ..windows };
        let decision = self.decision((now, cost), after, u64::MAX, Some(0));
        Step { decision, write: written(after, now) }
    }

    /// Takes the cost off the current window; the previous one stays as it is.
    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let windows = self.windows(state, now);
        Some(self.changed(state, (now, cost), windows, |current| current.saturating_sub(cost)))
    }

    undone_by_refund!(|state| state.start);

    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let windows = self.windows(state, now);
        let charge = cost.min(self.limit.saturating_sub(self.used(windows, now)));
        Some(self.changed(state, (now, cost), windows, |current| current.saturating_add(charge)))
    }
}

impl InMemory for SlidingCounter {}

impl ChargesAttempts for SlidingCounter {
    /// Counts up to the limit in the current window, whatever the previous one adds: the estimate may exceed the
    /// limit.
    fn fill(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Write<Self::State> {
        let windows = self.windows(state, now);
        let charge = cost.min(self.limit - windows.current);
        self.changed(state, (now, cost), windows, |current| current.saturating_add(charge)).write
    }
}

/// When at most `room` of a window's `count` will count, in the next window, which begins at `start_us`.
fn faded_us(start_us: u64, window_us: u64, count: u64, room: u64) -> u64 {
    if count <= room {
        return start_us;
    }
    // count · overlap / window < room + 1 holds up to this overlap.
    let (overlap_us, rest) = multiplied_divided(room + 1, window_us, count);
    start_us.saturating_add(window_us) - overlap_us.saturating_sub(u64::from(rest == 0))
}

/// When nothing of these windows will count.
fn empty_us(windows: SlidingCounterState) -> u64 {
    let SlidingCounterState { start, previous, current, window_us } = windows;
    match current {
        0 => faded_us(start.as_us(), window_us, previous, 0),
        current => faded_us(start.as_us().saturating_add(window_us), window_us, current, 0),
    }
}

fn written(state: SlidingCounterState, now: Timestamp) -> Write<SlidingCounterState> {
    let ends_us = empty_us(state);
    if ends_us > now.as_us() && (state.previous, state.current) != (0, 0) {
        Write::until(state, ends_us)
    } else {
        Write::Remove
    }
}

/// `a · b / c`, rounded down, and the remainder, exactly.
#[expect(clippy::cast_possible_truncation, reason = "callers have a ≤ c or b ≤ c, all below 2^52")]
fn multiplied_divided(a: u64, b: u64, c: u64) -> (u64, u64) {
    let (product, c) = (u128::from(a) * u128::from(b), u128::from(c));
    ((product / c) as u64, (product % c) as u64)
}
