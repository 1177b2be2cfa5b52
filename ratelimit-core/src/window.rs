//! A count in one window: the common part of the fixed window, the first-request window and the window log.
//!
//! An acquire takes over a window that another limit has written: it ends by this limit's length.

use crate::algorithms::{Step, Write};
use crate::decision::Decision;
use crate::timestamp::Timestamp;

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
            retry_after_us: if fits { Some(0) } else { (cost <= self.limit).then_some(end_us) },
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
        Step { decision: self.decision((now, cost), after, true), write: after.put() }
    }
}

impl<const ALIGNED: bool> WindowState<ALIGNED> {
    pub(crate) fn put(self) -> Write<Self> {
        Write::until(self, self.ends_us)
    }
}
