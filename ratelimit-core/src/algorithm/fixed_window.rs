//! The fixed window counter, aligned to the clock: a count that starts at 0 in every window.
//!
//! Source: the Redis pattern of one counter per client and second or hour ("Pattern: Rate limiter 1" of the `INCR`
//! documentation). Windows are `[k · window, (k + 1) · window)` since the Unix epoch, the same for all keys. A caller
//! can get up to twice the limit within one window's length, half before and half after a boundary.
//! [`Gcra`](crate::Gcra) and [`SlidingLog`](crate::SlidingLog) have no such boundary.
//!
//! `fixed_window.lua` in `ratelimit-redis` is the same algorithm in Lua.

use crate::algorithm::{Algorithm, ChargesAttempts, Recovery, Step};
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;
use crate::window::{WindowLimit, WindowState};

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
    window: WindowLimit,
}

/// What [`FixedWindow`] keeps for a key.
pub type FixedWindowState = WindowState<true>;

impl FixedWindow {
    /// The count of the rate per window of the rate's period.
    ///
    /// # Errors
    /// None today; a `Result` so that all algorithms are built alike.
    pub fn new(rate: Rate) -> Result<Self, ConfigError> {
        Ok(Self { window: WindowLimit { limit: rate.count(), window_us: rate.period_us() } })
    }

    /// The length of a window in microseconds.
    #[must_use]
    pub const fn window_us(&self) -> u64 {
        self.window.window_us
    }

    fn aligned(&self, timestamp: Timestamp) -> Timestamp {
        Timestamp::saturating_from_us(timestamp.as_us() - timestamp.as_us() % self.window_us())
    }

    /// The window of a request at `now`, with its count.
    fn window(&self, state: Option<&FixedWindowState>, now: Timestamp) -> FixedWindowState {
        let current = self.aligned(now);
        match state {
            // A later window, because the clock went back, counts as the current one. The start is aligned again: the
            // state may have been written for windows of another length, and is past when these are.
            Some(state) if now.as_us() < state.ends_us && self.aligned(state.start) >= current => {
                self.window.read(*state, self.aligned(state.start))
            }
            _ => self.window.begun(current),
        }
    }

    /// A refund or a forced charge.
    fn changed(
        &self,
        state: Option<&FixedWindowState>,
        now: Timestamp,
        cost: u64,
        change: impl Fn(u64) -> u64,
    ) -> Step<FixedWindowState> {
        self.window.changed(state, (now, cost), |state| self.window(state, now), change)
    }
}

impl Algorithm for FixedWindow {
    type State = FixedWindowState;

    fn capacity(&self) -> u64 {
        self.window.limit
    }

    fn step(
        &self,
        state: Option<&FixedWindowState>,
        now: Timestamp,
        cost: u64,
    ) -> Step<FixedWindowState> {
        self.window.step(self.window(state, now), now, cost)
    }

    fn refund(
        &self,
        state: Option<&FixedWindowState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<FixedWindowState>> {
        Some(self.changed(state, now, cost, |count| count.saturating_sub(cost)))
    }

    fn force(
        &self,
        state: Option<&FixedWindowState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<FixedWindowState>> {
        let charge = cost.min(self.window.limit - self.window(state, now).count);
        Some(self.changed(state, now, cost, |count| count.saturating_add(charge)))
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
