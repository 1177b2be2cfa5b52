//! The fixed window that begins with the first request: a count that lives for one period.
//!
//! Source: the Redis pattern `INCR` with `EXPIRE` ("Pattern: Rate limiter 2" of the `INCR` documentation). The first
//! request creates the counter, and the expiry of the counter ends the window. Each key has its own windows
//! `[first, first + window)`; the next one begins with the next request. As with any fixed window, a caller can get up
//! to twice the limit within one window's length: half at the end of one window and half at the start of the next.
//!
//! `first_request_window.lua` in `ratelimit-redis` is the same algorithm in Lua.

use crate::algorithm::{Algorithm, ChargesAttempts, Step, Write};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::timestamp::{MAX_INTEGER, Timestamp};

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
    limit: u64,
    window_us: u64,
}

/// What [`FirstRequestWindow`] keeps for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FirstRequestState {
    /// When the first request of the window came.
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

impl FirstRequestWindow {
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

    /// The window of a request at `now`. A request before its start, because the clock went back, counts in it too.
    fn window(&self, state: Option<&FirstRequestState>, now: Timestamp) -> Window {
        match state {
            // A window of another length is past when it ends, or when one of this length would. A state written under
            // a larger limit counts up to this one.
            Some(state)
                if now.as_us() < state.ends_us
                    && now.as_us() < state.start.as_us() + self.window_us =>
            {
                let own = self.begun(state.start);
                let ends_us = own.ends_us.min(state.ends_us);
                Window { count: state.count.min(self.limit), ends_us, ..own }
            }
            _ => self.begun(now),
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

    fn written(&self, Window { start, count, .. }: Window) -> Write<FirstRequestState> {
        let ends_us = start.as_us() + self.window_us;
        let expires = Timestamp::saturating_from_us(ends_us);
        Write::Put { state: FirstRequestState { start, count, ends_us }, expires }
    }

    /// A refund or a forced charge. Another limit may have written the state, and count more, or for longer: the charge
    /// or refund then counts in the window of that limit.
    fn changed(
        &self,
        state: Option<&FirstRequestState>,
        (now, cost): (Timestamp, u64),
        window: Window,
        change: impl Fn(u64) -> u64,
    ) -> Step<FirstRequestState> {
        let count = change(window.count);
        let write = match state.filter(|state| now.as_us() < state.ends_us) {
            _ if count == window.count => Write::Keep,
            None => self.written(Window { count, ..window }),
            Some(state) => match change(state.count).min(MAX_INTEGER) {
                0 => Write::Remove,
                count => Write::Put {
                    state: FirstRequestState { count, ..*state },
                    expires: Timestamp::saturating_from_us(state.ends_us),
                },
            },
        };
        let after = self.window(write.after(state), now);
        Step { decision: self.decision(now, cost, after, true), write }
    }
}

impl Algorithm for FirstRequestWindow {
    type State = FirstRequestState;

    fn capacity(&self) -> u64 {
        self.limit
    }

    fn step(
        &self,
        state: Option<&FirstRequestState>,
        now: Timestamp,
        cost: u64,
    ) -> Step<FirstRequestState> {
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
        state: Option<&FirstRequestState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<FirstRequestState>> {
        let window = self.window(state, now);
        Some(self.changed(state, (now, cost), window, |count| count.saturating_sub(cost)))
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
        let window = self.window(state, now);
        let charge = cost.min(self.limit - window.count);
        Some(self.changed(state, (now, cost), window, |count| count.saturating_add(charge)))
    }
}

impl InMemory for FirstRequestWindow {}

impl ChargesAttempts for FirstRequestWindow {}
