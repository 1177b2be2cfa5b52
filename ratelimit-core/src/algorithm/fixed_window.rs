//! The fixed window counter, aligned to the clock: a count that starts at 0 in every window.
//!
//! Source: the Redis pattern of one counter per client and second or hour ("Pattern: Rate limiter 1" of the `INCR`
//! documentation). Windows are `[k · window, (k + 1) · window)` since the Unix epoch, the same for all keys. A caller
//! can get up to twice the limit within one window's length, half before and half after a boundary.
//! [`Gcra`](crate::Gcra) and [`SlidingLog`](crate::SlidingLog) have no such boundary.
//!
//! `fixed_window.lua` in `ratelimit-redis` is the same algorithm in Lua.

use crate::algorithm::{Algorithm, ChargesAttempts, Recovery, Step, Write};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::timestamp::{MAX_INTEGER, Timestamp};

/// A count per window, with windows aligned to the clock.
///
/// ```
/// use ratelimit_core::{Algorithm, FixedWindow, Timestamp};
///
/// let window = FixedWindow::new("100/m".parse()?)?;
/// let at = Timestamp::from_us(45_000_000).expect("a time");
/// let decision = window.step(None, at, 1).decision;
/// assert_eq!((decision.remaining, decision.reset_after_us), (99, 15_000_000));
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedWindow {
    limit: u64,
    window_us: u64,
}

/// What [`FixedWindow`] keeps for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FixedWindowState {
    /// When the window began.
    pub start: Timestamp,
    /// What the window has admitted.
    pub count: u64,
    /// When the window ends, by the length that it was written with, in microseconds since the Unix epoch. It may lie
    /// past [`Timestamp::MAX`], but below 2^53.
    pub ends_us: u64,
}

/// A request's window, as this limit sees it.
#[derive(Clone, Copy)]
struct Window {
    start: Timestamp,
    /// At most the limit.
    count: u64,
    ends_us: u64,
}

impl FixedWindow {
    /// The count of the rate per window of the rate's period.
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

    /// The window of a request at `now`, with its count.
    fn window(&self, state: Option<&FixedWindowState>, now: Timestamp) -> Window {
        let current = self.aligned(now);
        match state {
            // A later window, because the clock went back, counts as the current one. The start is aligned again: the
            // state may have been written for windows of another length, and is past when these are. A state written
            // under a larger limit counts up to this one.
            Some(state) if now.as_us() < state.ends_us && self.aligned(state.start) >= current => {
                let own = self.begun(self.aligned(state.start));
                let ends_us = own.ends_us.min(state.ends_us);
                Window { count: state.count.min(self.limit), ends_us, ..own }
            }
            _ => self.begun(current),
        }
    }

    /// A window of this limit's length, with nothing counted.
    const fn begun(&self, start: Timestamp) -> Window {
        Window { start, count: 0, ends_us: start.as_us() + self.window_us }
    }

    fn decision(&self, now: Timestamp, cost: u64, window: Window, fits: bool) -> Decision {
        let end_us = window.ends_us - now.as_us();
        let reset_after_us = if window.count == 0 { 0 } else { end_us };
        Decision {
            allowed: fits,
            cost,
            limit: self.limit,
            remaining: self.limit - window.count,
            retry_after_us: match fits {
                true => Some(0),
                false if cost > self.limit => None,
                false => Some(end_us),
            },
            // The whole window comes back at once.
            replenish_after_us: reset_after_us,
            reset_after_us,
        }
    }

    fn written(&self, Window { start, count, .. }: Window) -> Write<FixedWindowState> {
        let ends_us = start.as_us() + self.window_us;
        let expires = Timestamp::saturating_from_us(ends_us);
        Write::Put { state: FixedWindowState { start, count, ends_us }, expires }
    }

    /// A refund or a forced charge. Another limit may have written the state, and count more, or for longer: the charge
    /// or refund then counts in the window of that limit.
    fn changed(
        &self,
        state: Option<&FixedWindowState>,
        (now, cost): (Timestamp, u64),
        window: Window,
        change: impl Fn(u64) -> u64,
    ) -> Step<FixedWindowState> {
        let count = change(window.count);
        let write = match state.filter(|state| now.as_us() < state.ends_us) {
            _ if count == window.count => Write::Keep,
            None => self.written(Window { count, ..window }),
            Some(state) => match change(state.count).min(MAX_INTEGER) {
                0 => Write::Remove,
                count => Write::Put {
                    state: FixedWindowState { count, ..*state },
                    expires: Timestamp::saturating_from_us(state.ends_us),
                },
            },
        };
        let after = self.window(write.after(state), now);
        Step { decision: self.decision(now, cost, after, true), write }
    }
}

impl Algorithm for FixedWindow {
    type State = FixedWindowState;

    fn capacity(&self) -> u64 {
        self.limit
    }

    fn step(
        &self,
        state: Option<&FixedWindowState>,
        now: Timestamp,
        cost: u64,
    ) -> Step<FixedWindowState> {
        let window = self.window(state, now);
        if cost > self.limit - window.count {
            let decision = self.decision(now, cost, window, false);
            return Step { decision, write: Write::Keep };
        }
        if cost == 0 {
            return Step { decision: self.decision(now, cost, window, true), write: Write::Keep };
        }
        let after = Window { count: window.count + cost, ..self.begun(window.start) };
        Step { decision: self.decision(now, cost, after, true), write: self.written(after) }
    }

    fn refund(
        &self,
        state: Option<&FixedWindowState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<FixedWindowState>> {
        let window = self.window(state, now);
        Some(self.changed(state, (now, cost), window, |count| count.saturating_sub(cost)))
    }

    fn force(
        &self,
        state: Option<&FixedWindowState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<FixedWindowState>> {
        let window = self.window(state, now);
        let charge = cost.min(self.limit - window.count);
        Some(self.changed(state, (now, cost), window, |count| count.saturating_add(charge)))
    }

    fn recovery(&self) -> Option<Recovery> {
        Some(Recovery::AtReset)
    }

    /// One hour.
    fn reservation_us(&self) -> Option<u64> {
        Some(Reservation::LIFE_US)
    }

    /// In the window that the charge counts in, if the clock is behind it.
    fn charged_at(&self, state: Option<&FixedWindowState>, now: Timestamp) -> Timestamp {
        self.window(state, now).start.max(now)
    }

    /// Charges what a higher cost adds. Returns what a lower cost leaves if the window of the charge is still the
    /// current one: the charges of a past window no longer count.
    fn settle(
        &self,
        state: Option<&FixedWindowState>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<FixedWindowState>> {
        let counts = self.aligned(reservation.timestamp) == self.window(state, now).start;
        match cost.checked_sub(reservation.cost) {
            Some(missing) => self.force(state, now, missing),
            None if counts => self.refund(state, now, reservation.cost - cost),
            None => self.refund(state, now, 0),
        }
        .map(|step| step.costing(cost))
    }
}

impl InMemory for FixedWindow {}

impl ChargesAttempts for FixedWindow {}
