//! A count in one window: the common part of the fixed window, the first-request window and the window log.
//!
//! Another limit may have written the state, and count more in it, or for longer. This limit then counts up to its own
//! number, and until the earlier of both ends. An acquire takes the window over. A refund or a forced charge counts in the
//! window as it was written.

use crate::algorithm::{Step, Write};
use crate::decision::Decision;
use crate::timestamp::{MAX_INTEGER, Timestamp};

/// What [`FixedWindow`](crate::FixedWindow) (`ALIGNED`) and [`FirstRequestWindow`](crate::FirstRequestWindow) keep for a
/// key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowState<const ALIGNED: bool> {
    /// When the window began: aligned to the clock, or with its first request.
    pub start: Timestamp,
    /// What the window has admitted.
    pub count: u64,
    /// When the window ends, by the length that it was written with, in microseconds since the Unix epoch. It may lie
    /// past [`Timestamp::MAX`], but below 2^53.
    pub ends_us: u64,
}

/// At most a number per window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WindowLimit {
    pub(crate) limit: u64,
    pub(crate) window_us: u64,
}

impl WindowLimit {
    /// A window of this length, with nothing counted.
    pub(crate) const fn begun<const ALIGNED: bool>(self, start: Timestamp) -> WindowState<ALIGNED> {
        WindowState { start, count: 0, ends_us: start.as_us() + self.window_us }
    }

    /// A window that began at `start`, as this limit reads what was written of it.
    pub(crate) fn read<const ALIGNED: bool>(
        self,
        written: WindowState<ALIGNED>,
        start: Timestamp,
    ) -> WindowState<ALIGNED> {
        let own = self.begun(start);
        let (count, ends_us) = (written.count.min(self.limit), own.ends_us.min(written.ends_us));
        WindowState { count, ends_us, ..own }
    }

    /// The decision that leaves this window.
    pub(crate) fn decision<const ALIGNED: bool>(
        self,
        (now, cost): (Timestamp, u64),
        window: WindowState<ALIGNED>,
        fits: bool,
    ) -> Decision {
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

    pub(crate) fn step<const ALIGNED: bool>(
        self,
        window: WindowState<ALIGNED>,
        now: Timestamp,
        cost: u64,
    ) -> Step<WindowState<ALIGNED>> {
        let fits = cost <= self.limit - window.count;
        if cost == 0 || !fits {
            return Step { decision: self.decision((now, cost), window, fits), write: Write::Keep };
        }
        let after = WindowState { count: window.count + cost, ..self.begun(window.start) };
        Step { decision: self.decision((now, cost), after, true), write: put(after) }
    }

    /// A refund or a forced charge in the window that `read` finds in a state.
    pub(crate) fn changed<const ALIGNED: bool>(
        self,
        state: Option<&WindowState<ALIGNED>>,
        (now, cost): (Timestamp, u64),
        read: impl Fn(Option<&WindowState<ALIGNED>>) -> WindowState<ALIGNED>,
        change: impl Fn(u64) -> u64,
    ) -> Step<WindowState<ALIGNED>> {
        let window = read(state);
        let count = change(window.count);
        let write = match state.filter(|state| now.as_us() < state.ends_us) {
            _ if count == window.count => Write::Keep,
            None => put(WindowState { count, ..window }),
            Some(state) => match change(state.count).min(MAX_INTEGER) {
                0 => Write::Remove,
                count => put(WindowState { count, ..*state }),
            },
        };
        let after = read(write.after(state));
        Step { decision: self.decision((now, cost), after, true), write }
    }
}

fn put<const ALIGNED: bool>(state: WindowState<ALIGNED>) -> Write<WindowState<ALIGNED>> {
    Write::Put { state, expires: Timestamp::saturating_from_us(state.ends_us) }
}
