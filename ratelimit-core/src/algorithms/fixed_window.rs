//! The two fixed window counters: a count that starts at 0 in every window.
//!
//! Source: the Redis documentation of `INCR`. In its "Pattern: Rate limiter 1" there is a counter
//! per client and second or hour: windows are `[k · window, (k + 1) · window)` since the Unix
//! epoch, the same for all keys. In its "Pattern: Rate limiter 2" the first request creates the
//! counter, and the expiry of the counter ends the window: each key has its own windows `[first,
//! first + window)`, and the next one begins with the next request.
//!
//! Under both a caller can get up to twice the limit within one window's length, half before and
//! half after the end of a window. [`Gcra`](crate::Gcra) and [`SlidingLog`](crate::SlidingLog) have
//! no such boundary.
//!
//! Windows that are aligned to the clock may also be the days, weeks, months or years of a
//! [`Calendar`](crate::algorithm::Calendar): `fixed_window/by_calendar.rs` builds such limits.
//!
//! # Debt
//!
//! A forced charge or a settlement above its reservation may count up to `debt` more than the limit
//! of a window that is aligned to the clock. The next windows pay what is owed: each begins with
//! the count of the one before, less the limit. So an interval that touches `n` windows admits at
//! most `n · limit + debt`.
//!
//! `fixed_window.lua` and `first_request_window.lua` in `ratelimit-redis` are the same algorithms
//! in Lua.

use alloc::borrow::Cow;
use alloc::format;

use crate::algorithms::{Algorithm, MaybeStep, Recovery, Step, Write};
use crate::builder::{owing, per, without_burst};
use crate::calendar::Calendar;
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::{Rate, beside_nothing, kind_of_window};
use crate::reservation::Reservation;
use crate::timestamp::{MAX_INTEGER, Timestamp};
use crate::window::{WindowLimit, WindowState, Windows};

mod by_calendar;

#[cfg(feature = "calendar")]
pub use by_calendar::{Anchor, CalendarBuilder};

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
pub type FixedWindow = CountedWindow<true>;

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
pub type FirstRequestWindow = CountedWindow<false>;

/// What [`FixedWindow`] keeps for a key.
pub type FixedWindowState = WindowState<true>;

/// What [`FirstRequestWindow`] keeps for a key.
pub type FirstRequestState = WindowState<false>;

/// [`FixedWindow`] if `ALIGNED`, or [`FirstRequestWindow`]: they differ in when a window begins.
/// The charges of a window that is aligned to the clock can be settled, because the time of a
/// charge tells its window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CountedWindow<const ALIGNED: bool> {
    window: WindowLimit,
}

impl<const ALIGNED: bool> CountedWindow<ALIGNED> {
    /// The count of the rate per window of the rate's period.
    ///
    /// # Errors
    /// None today; a `Result` so that all algorithms are built alike.
    pub fn new(rate: Rate) -> Result<Self, ConfigError> {
        let limit = rate.count();
        let windows = Windows::Length(rate.period_us());
        Ok(Self { window: WindowLimit { limit, most: limit, windows } })
    }

    /// The length of a window in microseconds; if the windows are those of a calendar, a length
    /// that [none is longer than](Calendar::longest_us).
    #[must_use]
    pub const fn window_us(&self) -> u64 {
        self.window.windows.longest_us()
    }

    /// When the window of a first request at this time begins.
    fn begin(&self, first: Timestamp) -> Timestamp {
        if ALIGNED { self.window.windows.start(first) } else { first }
    }

    /// The state, if what it counts is not gone.
    fn live<'s>(
        &self,
        state: Option<&'s WindowState<ALIGNED>>,
        now: Timestamp,
    ) -> Option<&'s WindowState<ALIGNED>> {
        let windows = self.window.windows;
        let is_gone = |start: Timestamp| {
            if ALIGNED {
                windows.have_paid_all(start, now)
            } else {
                now.as_us() >= start.as_us() + self.window_us()
            }
        };
        state.filter(|state| now.as_us() < state.ends_us && !is_gone(state.start))
    }

    /// The window of a request at `now`, with its count. A request before its start, because the
    /// clock went back, counts in it too. If the window is over, the current one begins with what
    /// is owed.
    ///
    /// Another limit may have written the state, and count more in it. This limit then counts up to
    /// its own number, and until the earlier of both ends.
    fn window(&self, state: Option<&WindowState<ALIGNED>>, now: Timestamp) -> WindowState<ALIGNED> {
        let begun = || self.window.begin(self.begin(now));
        let Some(state) = self.live(state, now) else { return begun() };
        let count = state.count.min(self.window.most);
        let own = match self.window.windows.over(state.start, now) {
            None => self.window.counting(state, now, count),
            Some(over) => {
                let owed = count.saturating_sub(over.saturating_mul(self.window.limit));
                if owed == 0 {
                    return begun();
                }
                self.window.counting(&begun(), now, owed)
            }
        };
        WindowState { ends_us: own.ends_us.min(state.ends_us), ..own }
    }

    /// The write of a state with this count, or of the current window if this limit could not read
    /// that count.
    fn changed_in(
        &self,
        state: &WindowState<ALIGNED>,
        (now, count): (Timestamp, u64),
        current: WindowState<ALIGNED>,
    ) -> Write<WindowState<ALIGNED>> {
        if !ALIGNED {
            return self.window.put(WindowState { count, ..self.window.begin(state.start) });
        }
        let most = self.window.most;
        let own = |count: u64| self.window.counting(state, now, count.min(most));
        if *state == own(state.count) {
            return self.window.put(if count > most { current } else { own(count) });
        }
        // Another limit wrote it, and may be owed more than this one counts, or less.
        let owed_us = if count.min(most) > self.window.limit { own(count).ends_us } else { 0 };
        let ends_us = state.ends_us.max(owed_us);
        // A charge of a later window of this limit counts there, and for the other limit still in
        // its own.
        let start = if count > state.count { state.start.max(current.start) } else { state.start };
        Write::until(WindowState { start, count: count.min(MAX_INTEGER), ends_us }, ends_us)
    }

    /// A refund or a forced charge, which counts in the window as it was written.
    fn change(
        &self,
        state: Option<&WindowState<ALIGNED>>,
        (now, cost): (Timestamp, u64),
        change: impl Fn(u64) -> u64,
    ) -> Step<WindowState<ALIGNED>> {
        let window = self.window(state, now);
        let count = change(window.count);
        let current = self.window.counting(&window, now, count);
        let write = match self.live(state, now) {
            _ if count == window.count => Write::Keep,
            None => self.window.put(current),
            Some(state) => self.changed_in(state, (now, change(state.count)), current),
        };
        let write = match write {
            Write::Put { state, .. } if state.count == 0 || state.ends_us <= now.as_us() => {
                Write::Remove
            }
            write => write,
        };
        let after = self.window(write.after(state), now);
        Step { decision: self.window.decision((now, cost), after, true), write }
    }
}

impl<const ALIGNED: bool> CountedWindow<ALIGNED> {
    /// What `cost` of what a reservation charged still counts: all of it in the state of its
    /// window; in a later one less what each window since may have paid, under either limit, and
    /// what passes the most that this one counts.
    fn left_of(
        &self,
        state: Option<&WindowState<ALIGNED>>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> u64 {
        let cost = cost.min(reservation.counts);
        let made = reservation.timestamp;
        let start = self.window(state, now).start;
        let windows = match state {
            Some(state) if self.window.contains(state, now, made) => return cost,
            _ => self.window.windows.between(made, start, now),
        };
        windows.map_or(0, |windows| {
            let [level, limit, _] = reservation.terms;
            let paid = windows.saturating_mul(limit.max(self.window.limit));
            let lost = level.saturating_sub(self.window.most);
            cost.saturating_sub(paid).saturating_sub(lost)
        })
    }
}

impl FixedWindow {
    /// The calendar whose windows it has; `None` if they are of one length.
    #[must_use]
    pub const fn calendar(&self) -> Option<&'static Calendar> {
        match self.window.windows {
            Windows::Length(_) => None,
            Windows::Calendar(calendar) => Some(calendar),
        }
    }

    /// As [`new`](Self::new), and up to `debt` may be owed: see [`Algorithm::debt`].
    ///
    /// # Errors
    /// Limit and debt together above 2^52, or a time to pay the debt back that is; a debt at a rate
    /// of 0.
    pub fn with_debt(rate: Rate, debt: u64) -> Result<Self, ConfigError> {
        let Self { window } = Self::new(rate)?;
        match (window.limit, debt) {
            (0, 0) => return Ok(Self { window }),
            (0, _) => return Err(beside_nothing("debt")),
            _ => {}
        }
        let most = window.limit.saturating_add(debt);
        let recovery_us = most.div_ceil(window.limit).saturating_mul(rate.period_us());
        if most > MAX_INTEGER || recovery_us > MAX_INTEGER {
            return Err(ConfigError::new(format!(
                "{rate} with a debt of {debt} needs integers above 2^52; choose a smaller debt"
            )));
        }
        Ok(Self { window: WindowLimit { most, ..window } })
    }
}

impl<const ALIGNED: bool> Algorithm for CountedWindow<ALIGNED> {
    type State = WindowState<ALIGNED>;

    fn capacity(&self) -> u64 {
        self.window.limit
    }

    fn is_within(&self, max: &Self) -> bool {
        self.window_us() == max.window_us()
            && self.window.limit <= max.window.limit
            && self.debt() <= max.debt()
    }

    fn state_kind(&self) -> Cow<'static, str> {
        let name = if ALIGNED { "fixed-window" } else { "first-request-window" };
        match self.window.windows {
            Windows::Length(us) => kind_of_window(name, us),
            Windows::Calendar(calendar) => calendar.kind(name).into(),
        }
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        self.window.step(self.window(state, now), now, cost)
    }

    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        Some(self.change(state, (now, cost), |count| count.saturating_sub(cost)))
    }

    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let charge = cost.min(self.window.most - self.window(state, now).count);
        Some(self.change(state, (now, cost), |count| count.saturating_add(charge)))
    }

    /// As a forced charge.
    fn fill(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        self.force(state, now, cost)
    }

    fn debt(&self) -> u64 {
        self.window.most - self.window.limit
    }

    fn owed(&self, state: Option<&Self::State>, now: Timestamp) -> u64 {
        self.window(state, now).count.saturating_sub(self.window.limit)
    }

    fn recovery(&self) -> Option<Recovery> {
        ALIGNED.then_some(Recovery::AtReset)
    }

    /// One hour.
    fn reservation_us(&self) -> Option<u64> {
        ALIGNED.then_some(Reservation::LIFE_US)
    }

    /// In the window that the charge counts in, if the clock is behind it.
    fn charged_at(&self, state: Option<&Self::State>, now: Timestamp) -> Timestamp {
        if ALIGNED { self.window(state, now).start.max(now) } else { now }
    }

    /// The count that the charge leaves, and what a window pays: an extension in a later window
    /// counts there.
    fn record(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        cost: u64,
        before: Option<&Reservation>,
    ) -> Reservation {
        let count = self.window(state, now).count;
        let left = before.map_or(0, |before| self.left_of(state, now, before, before.counts));
        let (counts, level) = (left.min(count) + cost, count.saturating_add(cost));
        let terms = [level, self.window.limit, 0];
        Reservation { counts, terms, ..Reservation::new(self.charged_at(state, now), cost) }
    }

    /// Charges what a higher cost adds. Returns what a lower cost leaves if the state is still that
    /// of the charge's window; otherwise less what each window since may have paid of it.
    fn settle(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> MaybeStep<Self> {
        match cost.checked_sub(reservation.cost) {
            _ if !ALIGNED => None,
            Some(missing) => self.force(state, now, missing),
            None => {
                let excess = reservation.cost - cost;
                self.refund(state, now, self.left_of(state, now, reservation, excess))
            }
        }
        .map(|step| step.costing(cost))
    }

    /// Takes the charge off its window, if that is still the current one.
    fn undo(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &Self::State,
    ) -> MaybeStep<Self> {
        match state {
            _ if ALIGNED => self.settle(state, now, reservation, 0),
            Some(same) if same.start == charged.start => self.refund(state, now, reservation.cost),
            _ => None,
        }
    }
}

impl<const ALIGNED: bool> InMemory for CountedWindow<ALIGNED> {}

per!(FixedWindow);
owing!(FixedWindow);

per!(FirstRequestWindow);
without_burst!(FirstRequestWindow = "first-request-window" by window_us);
