//! The window log: a window that begins with the first request, with an entry per admitted request.
//!
//! Source: the Redis pattern of a list per caller that expires with its window (`RPUSH`, `RPUSHX`, `LLEN`; "Pattern:
//! Rate limiter 2" of the `INCR` documentation). It decides as [`FirstRequestWindow`](crate::FirstRequestWindow) does.
//! Each entry keeps the caller's metadata: up to 256 bytes of any meaning.
//!
//! `window_log.lua` in `ratelimit-redis` is the same algorithm in Lua, on a list.

use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::algorithm::{Algorithm, ChargesAttempts, Step, Write};
use crate::decision::Decision;
use crate::entries::sum;
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// The largest limit: the state keeps each admitted request.
const MAX_LIMIT: u64 = 10_000;

/// A count per window, which begins with the first request that it admits, and an entry per request.
///
/// A step takes time and memory in proportion to the requests that the window has admitted, at most `limit`.
///
/// ```
/// use ratelimit_core::{Algorithm, Timestamp, WindowLog, Write};
///
/// let log = WindowLog::new("100/m".parse()?)?;
/// let Write::Put { mut state, .. } = log.step(None, Timestamp::ZERO, 1).write else { unreachable!() };
/// log.annotate(&mut state, b"GET /login");
/// assert_eq!(&*log.entries(&state, Timestamp::ZERO)[0].metadata, b"GET /login");
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowLog {
    limit: u64,
    window_us: u64,
}

/// What [`WindowLog`] keeps for a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowLogState {
    /// When the first request of the window came.
    pub start: Timestamp,
    /// The admitted requests, oldest first, none of cost 0.
    pub entries: Vec<WindowEntry>,
}

/// One request that a [`WindowLog`] admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowEntry {
    /// When it was admitted.
    pub timestamp: Timestamp,
    /// Its cost.
    pub cost: u64,
    /// The caller's metadata.
    pub metadata: Arc<[u8]>,
}

/// An algorithm that keeps an entry per admitted request.
pub trait KeepsEntries: Algorithm {
    /// The entries that count at `now`, oldest first.
    fn entries_of<'s>(&self, state: &'s Self::State, now: Timestamp) -> &'s [WindowEntry];
}

impl KeepsEntries for WindowLog {
    fn entries_of<'s>(&self, state: &'s WindowLogState, now: Timestamp) -> &'s [WindowEntry] {
        self.entries(state, now)
    }
}

/// The window of a request.
#[derive(Clone, Copy)]
struct Window<'a> {
    start: Timestamp,
    entries: &'a [WindowEntry],
}

impl WindowLog {
    /// The most bytes of metadata per request: 256.
    pub const MAX_METADATA_BYTES: usize = 256;

    /// The count of the rate per window of the rate's period.
    ///
    /// # Errors
    /// A count above 10,000, which bounds the state of a key.
    pub fn new(rate: Rate) -> Result<Self, ConfigError> {
        let limit = rate.count();
        if limit > MAX_LIMIT {
            return Err(ConfigError::new(format!(
                "a window of {limit} is too large for a log that keeps every request; write at most \
                 {MAX_LIMIT}, or use first-request-window, which keeps a count only"
            )));
        }
        Ok(Self { limit, window_us: rate.period_us() })
    }

    /// The length of a window in microseconds.
    #[must_use]
    pub const fn window_us(&self) -> u64 {
        self.window_us
    }

    /// The requests that the window of `now` has admitted, oldest first.
    #[must_use]
    pub fn entries<'s>(&self, state: &'s WindowLogState, now: Timestamp) -> &'s [WindowEntry] {
        self.window(Some(state), now).entries
    }

    fn window<'s>(&self, state: Option<&'s WindowLogState>, now: Timestamp) -> Window<'s> {
        match state {
            // A request before the start, because the clock went back, counts in it too.
            Some(state) if now.as_us() < state.start.as_us() + self.window_us => {
                Window { start: state.start, entries: &state.entries }
            }
            _ => Window { start: now, entries: &[] },
        }
    }

    /// The decision that leaves `used` used up.
    fn decided(
        &self,
        now: Timestamp,
        cost: u64,
        window: Window<'_>,
        used: u64,
        fits: bool,
    ) -> Decision {
        let end_us = window.start.as_us() + self.window_us - now.as_us();
        let reset_after_us = if used == 0 { 0 } else { end_us };
        Decision {
            allowed: fits,
            cost,
            limit: self.limit,
            remaining: self.limit - used,
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

    /// What the window has used up. A state written under a larger limit uses at most this limit: its first requests
    /// used it up.
    fn used(&self, window: Window<'_>) -> u64 {
        charged_in(window).min(self.limit)
    }

    /// The decision on a request, and the charge.
    fn decide(&self, now: Timestamp, cost: u64, window: Window<'_>) -> (Decision, u64) {
        let used = self.used(window);
        let fits = cost <= self.limit - used;
        let charge = if fits { cost } else { 0 };
        (self.decided(now, cost, window, used + charge, fits), charge)
    }

    fn unchanged(&self, now: Timestamp, cost: u64, window: Window<'_>) -> Step<WindowLogState> {
        let decision = self.decided(now, cost, window, self.used(window), true);
        Step { decision, write: Write::Keep }
    }

    fn changed(
        &self,
        now: Timestamp,
        cost: u64,
        start: Timestamp,
        entries: Vec<WindowEntry>,
    ) -> Step<WindowLogState> {
        let window = Window { start, entries: &entries };
        let decision = self.decided(now, cost, window, self.used(window), true);
        let write = if entries.is_empty() { Write::Remove } else { self.written(start, entries) };
        Step { decision, write }
    }

    fn written(&self, start: Timestamp, entries: Vec<WindowEntry>) -> Write<WindowLogState> {
        let expires = start.saturating_add_us(self.window_us);
        Write::Put { state: WindowLogState { start, entries }, expires }
    }

    fn charged(
        &self,
        now: Timestamp,
        cost: u64,
        window: Window<'_>,
        charge: u64,
    ) -> Step<WindowLogState> {
        if charge == 0 {
            return self.unchanged(now, cost, window);
        }
        self.changed(now, cost, window.start, with_entry(window, now, charge))
    }
}

fn charged_in(window: Window<'_>) -> u64 {
    sum(window.entries.iter().map(|entry| entry.cost))
}

/// The window's entries and a new one of this cost.
fn with_entry(window: Window<'_>, now: Timestamp, cost: u64) -> Vec<WindowEntry> {
    let mut entries = Vec::with_capacity(window.entries.len() + 1);
    entries.extend_from_slice(window.entries);
    add(&mut entries, now, cost);
    entries
}

/// Adds an entry of this cost at the end.
fn add(entries: &mut Vec<WindowEntry>, now: Timestamp, cost: u64) {
    let timestamp = entries.last().map_or(now, |last| now.max(last.timestamp));
    entries.push(WindowEntry { timestamp, cost, metadata: Arc::default() });
}

impl Algorithm for WindowLog {
    type State = WindowLogState;

    fn capacity(&self) -> u64 {
        self.limit
    }

    fn step(
        &self,
        state: Option<&WindowLogState>,
        now: Timestamp,
        cost: u64,
    ) -> Step<WindowLogState> {
        let window = self.window(state, now);
        let (decision, charge) = self.decide(now, cost, window);
        let write = match charge {
            0 => Write::Keep,
            _ => self.written(window.start, with_entry(window, now, charge)),
        };
        Step { decision, write }
    }

    /// Takes the cost off the newest entries: a refund undoes the latest charges.
    fn refund(
        &self,
        state: Option<&WindowLogState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<WindowLogState>> {
        let window = self.window(state, now);
        if cost == 0 || window.entries.is_empty() {
            return Some(self.unchanged(now, cost, window));
        }
        let mut entries = window.entries.to_vec();
        let mut owed = cost;
        while let Some(last) = entries.last_mut() {
            let back = owed.min(last.cost);
            last.cost -= back;
            owed -= back;
            if last.cost > 0 {
                break;
            }
            entries.pop();
        }
        Some(self.changed(now, cost, window.start, entries))
    }

    /// Takes the charge off its window, if that is still the current one.
    fn undo(
        &self,
        state: Option<&WindowLogState>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &WindowLogState,
    ) -> Option<Step<WindowLogState>> {
        let same = state.is_some_and(|state| state.start == charged.start);
        if same { self.refund(state, now, reservation.cost) } else { None }
    }

    fn force(
        &self,
        state: Option<&WindowLogState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<WindowLogState>> {
        let window = self.window(state, now);
        let left = self.limit - self.used(window);
        Some(self.charged(now, cost, window, cost.min(left)))
    }

    fn metadata_bytes(&self) -> Option<usize> {
        Some(Self::MAX_METADATA_BYTES)
    }

    fn annotate(&self, state: &mut WindowLogState, metadata: &[u8]) {
        if let Some(newest) = state.entries.last_mut() {
            newest.metadata = metadata.into();
        }
    }
}

impl InMemory for WindowLog {
    fn decision(&self, state: Option<&WindowLogState>, now: Timestamp, cost: u64) -> Decision {
        self.decide(now, cost, self.window(state, now)).0
    }

    fn step_in_place(&self, state: &mut WindowLogState, now: Timestamp, cost: u64) -> Step<()> {
        let window = self.window(Some(state), now);
        let (decision, charge) = self.decide(now, cost, window);
        if charge == 0 {
            return Step { decision, write: Write::Keep };
        }
        let Window { start, entries } = window;
        if entries.is_empty() {
            state.entries.clear();
        }
        state.start = start;
        add(&mut state.entries, now, charge);
        let expires = start.saturating_add_us(self.window_us);
        Step { decision, write: Write::Put { state: (), expires } }
    }

    fn entries_in(state: &WindowLogState) -> usize {
        state.entries.len()
    }

    fn entries_per_step(&self) -> usize {
        1
    }
}

impl ChargesAttempts for WindowLog {}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    fn timestamp(us: u64) -> Timestamp {
        Timestamp::from_us(us).expect("a test's time")
    }

    fn log(rate: &str) -> WindowLog {
        WindowLog::new(rate.parse().expect("a rate")).expect("a limit")
    }

    fn left_by(step: Step<WindowLogState>) -> WindowLogState {
        match step.write {
            Write::Put { state, .. } => state,
            other => panic!("nothing was kept: {other:?}"),
        }
    }

    fn entries_of(log: &WindowLog, state: &WindowLogState, now: u64) -> Vec<(u64, u64)> {
        log.entries(state, timestamp(now)).iter().map(|e| (e.timestamp.as_us(), e.cost)).collect()
    }

    #[test]
    fn entries_are_oldest_first_and_end_with_their_window() {
        let log = log("9/10us");
        let mut state = left_by(log.step(None, timestamp(5), 2));
        // An entry at 6 counts as made with the newest, at 7: the clock went back.
        for us in [7, 6, 14] {
            state = left_by(log.step(Some(&state), timestamp(us), 1));
        }
        assert_eq!(entries_of(&log, &state, 14), [(5, 2), (7, 1), (7, 1), (14, 1)]);
        assert_eq!(entries_of(&log, &state, 15), []);
        let next = left_by(log.step(Some(&state), timestamp(15), 1));
        assert_eq!((next.start, next.entries.len()), (timestamp(15), 1));
    }

    #[test]
    fn a_refund_takes_the_newest_entries_and_removes_an_empty_state() {
        let log = log("9/10us");
        let mut state = left_by(log.step(None, timestamp(5), 2));
        state = left_by(log.step(Some(&state), timestamp(6), 3));
        state = left_by(log.refund(Some(&state), timestamp(7), 4).expect("has refunds"));
        assert_eq!(entries_of(&log, &state, 7), [(5, 1)]);
        let last = log.refund(Some(&state), timestamp(7), 4).expect("has refunds");
        assert_eq!((last.decision.remaining, last.write), (9, Write::Remove));
    }

    #[test]
    fn metadata_belongs_to_the_newest_entry() {
        let log = log("9/10us");
        let mut state = left_by(log.step(None, timestamp(5), 1));
        log.annotate(&mut state, b"first");
        state = left_by(log.step(Some(&state), timestamp(6), 1));
        log.annotate(&mut state, b"\0\xff");
        let metadata: Vec<_> = state.entries.iter().map(|entry| &*entry.metadata).collect();
        assert_eq!(metadata, [&b"first"[..], &b"\0\xff"[..]]);
    }

    #[test]
    fn attempts_are_recorded_up_to_the_limit() {
        let log = log("2/10us");
        let mut state = None;
        for us in 0..9 {
            let step = crate::Attempts::new(log).step(state.as_ref(), timestamp(us), 1);
            assert_eq!(step.decision.allowed, us < 2);
            state = step.write.after(state.as_ref()).cloned();
        }
        assert_eq!(entries_of(&log, &state.expect("in its window"), 9), [(0, 1), (1, 1)]);
    }

    #[test]
    fn a_limit_above_the_maximum_is_refused_with_an_alternative() {
        let error = WindowLog::new("10001/s".parse().expect("a rate")).expect_err("too many");
        assert!(error.to_string().contains("first-request-window"), "{error}");
    }
}
