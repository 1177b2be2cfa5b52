//! A count in one window: the common part of the fixed window, the first-request window and the
//! window log.
//!
//! A count above the limit is owed: each following window begins with what is left of it once the
//! limit has been taken off.

use crate::algorithms::{Step, Write};
use crate::calendar::Calendar;
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
    /// lie past [`Timestamp::MAX`], but below 2^53. Later windows of a calendar count as long as
    /// its [longest](Calendar::longest_us), so that the state alone tells when its own one ends.
    pub ends_us: u64,
}

/// When windows begin and end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Windows {
    /// All are so many microseconds long. The aligned ones begin at the multiples of that.
    Length(u64),
    /// They begin by a calendar.
    Calendar(&'static Calendar),
}

impl Windows {
    /// The length of the longest window.
    pub(crate) const fn longest_us(self) -> u64 {
        match self {
            Self::Length(us) => us,
            Self::Calendar(calendar) => calendar.longest_us(),
        }
    }

    /// When the aligned window that contains this moment begins.
    pub(crate) fn start(self, at: Timestamp) -> Timestamp {
        match self {
            Self::Length(us) => at.aligned(us),
            Self::Calendar(calendar) => calendar.window(at).start,
        }
    }

    /// When the last of so many windows ends, the first of which began then.
    fn end_us(self, start: Timestamp, windows: u64) -> u64 {
        match self {
            Self::Length(us) => start.as_us() + windows * us,
            // No count is owed for more windows than that.
            Self::Calendar(calendar) => {
                let first = calendar.window(start);
                match i64::try_from(windows) {
                    Ok(1) => first.end_us,
                    windows => calendar.start_us(first.number + windows.unwrap_or_default()),
                }
            }
        }
    }

    /// From how many windows before that of `start` a charge was made: 0 if it was made in that
    /// window, `None` if in a later one.
    pub(crate) fn between(self, made: Timestamp, start: Timestamp, now: Timestamp) -> Option<u64> {
        match self {
            Self::Length(us) => {
                start.checked_since(made.aligned(us)).map(|since| since.as_us() / us)
            }
            Self::Calendar(calendar) => {
                let current = calendar.window(now);
                let before_us = calendar.start_us(current.number - 1);
                match start.as_us() {
                    _ if made >= start => (made.as_us() < current.end_us).then_some(0),
                    // Two windows pay all that may be owed. Before a clock that went back, the
                    // scripts on Redis know no windows.
                    later if later >= current.end_us => Some(2),
                    _ => Some(if made.as_us() >= before_us { 1 } else { 2 }),
                }
            }
        }
    }

    /// Whether so many windows are over at `now` since the one that began with `start` that nothing
    /// can be owed, whichever limit wrote the state. The end in a state of a calendar may be later,
    /// because it counts the longest windows.
    pub(crate) fn have_paid_all(self, start: Timestamp, now: Timestamp) -> bool {
        match self {
            Self::Length(_) => false,
            Self::Calendar(_) => self.over(start, now).is_some_and(|over| over > 1),
        }
    }

    /// How many windows are over at `now` since the one that began with `start`; `None` if that is
    /// not over.
    pub(crate) fn over(self, start: Timestamp, now: Timestamp) -> Option<u64> {
        match self {
            Self::Length(us) => (now.as_us() >= start.as_us() + us)
                .then(|| now.aligned(us).saturating_us_since(start) / us),
            Self::Calendar(calendar) => {
                let current = calendar.window(now);
                let over = || current.number - calendar.window_by_rule(start).number;
                (start < current.start).then(|| u64::try_from(over()).unwrap_or(0))
            }
        }
    }
}

/// At most a number per window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct WindowLimit {
    pub(crate) limit: u64,
    /// The most that a window counts: the limit and what may be owed.
    pub(crate) most: u64,
    pub(crate) windows: Windows,
}

impl WindowLimit {
    /// A window that began then, with nothing counted.
    pub(crate) fn begin<const ALIGNED: bool>(self, start: Timestamp) -> WindowState<ALIGNED> {
        WindowState { start, count: 0, ends_us: self.windows.end_us(start, 1) }
    }

    /// How many windows pay for a count.
    const fn paying(self, count: u64) -> u64 {
        if count <= self.limit { 1 } else { count.div_ceil(self.limit) }
    }

    /// When a count of a window that began then is gone: at its end for up to the limit, and a
    /// window later for each limit more.
    pub(crate) fn gone_us(self, start: Timestamp, count: u64) -> u64 {
        self.windows.end_us(start, self.paying(count))
    }

    /// When the window of this state ends.
    fn end_us<const ALIGNED: bool>(self, of: &WindowState<ALIGNED>, now: Timestamp) -> u64 {
        match self.windows {
            Windows::Length(us) => of.start.as_us() + us,
            Windows::Calendar(calendar) => {
                let (current, start_us) = (calendar.window(now), of.start.as_us());
                if of.start >= current.start && start_us < current.end_us {
                    return current.end_us;
                }
                let longest_us = calendar.longest_us();
                let windows = of.ends_us.saturating_sub(start_us).div_ceil(longest_us);
                of.ends_us - windows.saturating_sub(1) * longest_us
            }
        }
    }

    /// Whether a charge was made in the window of this state.
    pub(crate) fn contains<const ALIGNED: bool>(
        self,
        of: &WindowState<ALIGNED>,
        now: Timestamp,
        made: Timestamp,
    ) -> bool {
        match self.windows {
            Windows::Length(us) => made.aligned(us) == of.start,
            Windows::Calendar(_) => of.start <= made && made.as_us() < self.end_us(of, now),
        }
    }

    /// The window of this state with this count.
    pub(crate) fn counting<const ALIGNED: bool>(
        self,
        of: &WindowState<ALIGNED>,
        now: Timestamp,
        count: u64,
    ) -> WindowState<ALIGNED> {
        let later = self.paying(count) - 1;
        let ends_us = self.end_us(of, now) + later * self.windows.longest_us();
        WindowState { start: of.start, count, ends_us }
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
        let after = self.counting(&window, now, window.count + cost);
        Step { decision: self.decision((now, cost), after, true), write: self.put(after) }
    }

    /// Puts a state, until its count is gone.
    pub(crate) fn put<const ALIGNED: bool>(
        self,
        state: WindowState<ALIGNED>,
    ) -> Write<WindowState<ALIGNED>> {
        let expires_us = match self.windows {
            Windows::Length(_) => state.ends_us,
            Windows::Calendar(_) => state.ends_us.min(self.gone_us(state.start, state.count)),
        };
        Write::until(state, expires_us)
    }
}
