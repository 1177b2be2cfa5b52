//! A count in one window: the common part of the fixed window, the first-request window and the
//! window log.
//!
//! A count above the limit is owed: each following window begins with what is left of it once the
//! limit has been taken off.

use crate::algorithms::{Step, Write};
use crate::decision::Decision;
use crate::timestamp::Timestamp;

/// What [`FixedWindow`](crate::FixedWindow) (`ALIGNED`) and
/// [`FirstRequestWindow`](crate::FirstRequestWindow) keep for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowState<const ALIGNED: bool> {
    /// When the window began: aligned to the clock, or with its first request.
    pub start: Timestamp,
    /// What the window has admitted, and what it began with because it was owed.
    pub count: u64,
    /// When the count is gone, by the limit that it was written with: when the window ends, or a
    /// later one that pays the last of what is owed. In microseconds since the Unix epoch; it may
    /// lie past [`Timestamp::MAX`], but below 2^53.
    pub ends_us: u64,
}

/// At most a number per window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WindowLimit {
    pub(crate) limit: u64,
    /// The most that a window counts: the limit and what may be owed.
    pub(crate) most: u64,
    pub(crate) window_us: u64,
}

impl WindowLimit {
    /// A window of this length, with nothing counted.
    pub(crate) const fn begin<const ALIGNED: bool>(self, start: Timestamp) -> WindowState<ALIGNED> {
        self.counting(start, 0)
    }

    /// When a count of a window that began then is gone: at its end for up to the limit, and a
    /// length later for each limit more.
    pub(crate) const fn gone_us(self, start: Timestamp, count: u64) -> u64 {
        let windows = if count <= self.limit { 1 } else { count.div_ceil(self.limit) };
        start.as_us() + windows * self.window_us
    }

    /// The window with this count.
    pub(crate) const fn counting<const ALIGNED: bool>(
        self,
        start: Timestamp,
        count: u64,
    ) -> WindowState<ALIGNED> {
        WindowState { start, count, ends_us: self.gone_us(start, count) }
    }

    /// The decision that leaves this window.
    pub(crate) fn decision<const ALIGNED: bool>(
        self,
        (now, cost): (Timestamp, u64),
        window: WindowState<ALIGNED>,
        fits: bool,
    ) -> Decision {
        let wait_us = |count| self.gone_us(window.start, count).min(window.ends_us) - now.as_us();
        let reset_after_us = if window.count == 0 { 0 } else { wait_us(window.count) };
        let remaining = self.limit.saturating_sub(window.count);
        let excess = |cost: u64| window.count + cost - self.limit;
        Decision {
            allowed: fits,
            cost,
            limit: self.limit,
            remaining,
            retry_after_us: if fits {
                Some(0)
            } else {
                (cost <= self.limit).then(|| wait_us(excess(cost)))
            },
            // The whole window comes back at once.
            replenish_after_us: match window.count {
                0 => 0,
                _ => wait_us(excess(remaining + 1)),
            },
            reset_after_us,
        }
    }

    pub(crate) fn step<const ALIGNED: bool>(
        self,
        window: WindowState<ALIGNED>,
        now: Timestamp,
        cost: u64,
    ) -> Step<WindowState<ALIGNED>> {
        let fits = cost <= self.limit.saturating_sub(window.count);
        if cost == 0 || !fits {
            return Step { decision: self.decision((now, cost), window, fits), write: Write::Keep };
        }
        let after = WindowState { count: window.count + cost, ..self.begin(window.start) };
        Step { decision: self.decision((now, cost), after, true), write: after.put() }
    }
}

impl<const ALIGNED: bool> WindowState<ALIGNED> {
    pub(crate) fn put(self) -> Write<Self> {
        Write::until(self, self.ends_us)
    }
}
