//! The fixed window that begins with the first request: a count that lives for one period.
//!
//! Source: the Redis pattern `INCR` with `EXPIRE` ("Pattern: Rate limiter 2" of the `INCR` documentation). The first
//! request creates the counter, and the expiry of the counter ends the window. Each key has its own windows
//! `[first, first + window)`; the next one begins with the next request. As with any fixed window, a caller can get up
//! to twice the limit within one window's length: half at the end of one window and half at the start of the next.
//!
//! `first_request_window.lua` in `ratelimit-redis` is the same algorithm in Lua.

use crate::algorithm::{Algorithm, ChargesAttempts, Step};
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;
use crate::window::{WindowLimit, WindowState};

/// A count per window, which begins with the first request that it admits.
///
/// ```
/// use ratelimit_core::{Algorithm, FirstRequestWindow, Timestamp};
///
/// let window = FirstRequestWindow::new("100/m".parse()?)?;
/// let at = Timestamp::from_us(45_000_000).expect("a time");
/// let decision = window.step(None, at, 1).decision;
/// assert_eq!((decision.remaining, decision.reset_after_us), (99, 60_000_000));
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstRequestWindow {
    window: WindowLimit,
}

/// What [`FirstRequestWindow`] keeps for a key.
pub type FirstRequestState = WindowState<false>;

impl FirstRequestWindow {
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

    /// The window of a request at `now`. A request before its start, because the clock went back, counts in it too.
    fn window(&self, state: Option<&FirstRequestState>, now: Timestamp) -> FirstRequestState {
        // A window of another length is past when it ends, or when one of this length would.
        let counts = |state: &&FirstRequestState| {
            now.as_us() < state.ends_us && now.as_us() < state.start.as_us() + self.window_us()
        };
        match state.filter(counts) {
            Some(state) => self.window.read(*state, state.start),
            None => self.window.begun(now),
        }
    }

    /// A refund or a forced charge.
    fn changed(
        &self,
        state: Option<&FirstRequestState>,
        now: Timestamp,
        cost: u64,
        change: impl Fn(u64) -> u64,
    ) -> Step<FirstRequestState> {
        self.window.changed(state, (now, cost), |state| self.window(state, now), change)
    }
}

impl Algorithm for FirstRequestWindow {
    type State = FirstRequestState;

    fn capacity(&self) -> u64 {
        self.window.limit
    }

    fn step(
        &self,
        state: Option<&FirstRequestState>,
        now: Timestamp,
        cost: u64,
    ) -> Step<FirstRequestState> {
        self.window.step(self.window(state, now), now, cost)
    }

    fn refund(
        &self,
        state: Option<&FirstRequestState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<FirstRequestState>> {
        Some(self.changed(state, now, cost, |count| count.saturating_sub(cost)))
    }

    /// Takes the charge off its window, if that is still the current one.
    fn undo(
        &self,
        state: Option<&FirstRequestState>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &FirstRequestState,
    ) -> Option<Step<FirstRequestState>> {
        let same = state.is_some_and(|state| state.start == charged.start);
        if same { self.refund(state, now, reservation.cost) } else { None }
    }

    fn force(
        &self,
        state: Option<&FirstRequestState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<FirstRequestState>> {
        let charge = cost.min(self.window.limit - self.window(state, now).count);
        Some(self.changed(state, now, cost, |count| count.saturating_add(charge)))
    }
}

impl InMemory for FirstRequestWindow {}

impl ChargesAttempts for FirstRequestWindow {}
