//! The window log: a window that begins with the first request, with an entry per admitted request.
//!
//! Source: the Redis pattern of a list per caller that expires with its window (`RPUSH`, `RPUSHX`,
//! `LLEN`; "Pattern: Rate limiter 2" of the `INCR` documentation). It decides as
//! [`FirstRequestWindow`](crate::FirstRequestWindow) does, by `window.rs`. Each entry keeps the
//! caller's metadata: up to 256 bytes of any meaning.
//!
//! `window_log.lua` in `ratelimit-redis` is the same algorithm in Lua, on a list.

use alloc::borrow::Cow;
use alloc::format;
use alloc::sync::Arc;
use alloc::vec::Vec;

use crate::algorithms::{Algorithm, MaybeStep, Step, Write, undone_by_refund};
use crate::builder::{per, without_burst};
use crate::decision::Decision;
use crate::entries::{after_refund, sum};
use crate::error::ConfigError;
use crate::in_memory::{InMemory, counts_entries};
use crate::rate::{Rate, kind_of_window};
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;
use crate::window::{WindowLimit, WindowState, Windows};

/// The largest limit: the state keeps each admitted request.
const MAX_LIMIT: u64 = 10_000;

/// A count per window, which begins with the first request that it admits, and an entry per
/// request.
///
/// A step takes time and memory in proportion to the requests that the window has admitted, at most
/// `limit`.
///
/// ```
/// use ratelimit_core::{Algorithm, Timestamp, WindowLog};
/// use ratelimit_core::algorithm::Write;
///
/// let log = WindowLog::new("100/m".parse()?)?;
/// let Write::Put { mut state, .. } = log.step(None, Timestamp::ZERO, 1).write else { unreachable!() };
/// log.annotate(&mut state, b"GET /login");
/// assert_eq!(&*log.logged(&state, Timestamp::ZERO)[0].metadata, b"GET /login");
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WindowLog {
    window: WindowLimit,
}

/// What [`WindowLog`] keeps for a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WindowLogState {
    /// When the first request of the window came.
    pub start: Timestamp,
    /// The admitted requests, oldest first, none of cost 0.
    pub entries: Vec<LoggedRequest>,
}

/// One request that a [`WindowLog`] admitted.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LoggedRequest {
    /// When it was admitted.
    pub timestamp: Timestamp,
    /// Its cost.
    pub cost: u64,
    /// The caller's metadata.
    pub metadata: Arc<[u8]>,
}

/// The window of a request.
#[derive(Clone, Copy)]
struct Window<'a> {
    start: Timestamp,
    entries: &'a [LoggedRequest],
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
        Ok(Self {
            window: WindowLimit { limit, most: limit, windows: Windows::Length(rate.period_us()) },
        })
    }

    /// The length of a window in microseconds.
    #[must_use]
    pub const fn window_us(&self) -> u64 {
        self.window.windows.longest_us()
    }

    fn window<'s>(&self, state: Option<&'s WindowLogState>, now: Timestamp) -> Window<'s> {
        match state {
            // A request before the start, because the clock went back, counts in it too.
            Some(state) if now.as_us() < state.start.as_us() + self.window_us() => {
                Window { start: state.start, entries: &state.entries }
            }
            _ => Window { start: now, entries: &[] },
        }
    }

    /// The window as a count. A state written under a larger limit uses at most this limit: its
    /// first requests used it up.
    fn as_count(&self, window: Window<'_>) -> WindowState<false> {
        let used = sum(window.entries.iter().map(|entry| entry.cost));
        WindowState { count: used.min(self.window.limit), ..self.window.begin(window.start) }
    }

    /// The decision on a request, and the charge.
    fn decide(&self, now: Timestamp, cost: u64, window: Window<'_>) -> (Decision, u64) {
        let Step { decision, write } = self.window.step(self.as_count(window), now, cost);
        (decision, if matches!(write, Write::Put { .. }) { cost } else { 0 })
    }

    /// The step of a refund or a forced charge that leaves these entries; `None` changes nothing.
    fn change(
        &self,
        now: Timestamp,
        cost: u64,
        window: Window<'_>,
        entries: Option<Vec<LoggedRequest>>,
    ) -> Step<WindowLogState> {
        let after = Window { entries: entries.as_deref().unwrap_or(window.entries), ..window };
        let decision = self.window.decision((now, cost), self.as_count(after), true);
        let write = match entries {
            None => Write::Keep,
            Some(entries) if entries.is_empty() => Write::Remove,
            Some(entries) => self.write(window.start, entries),
        };
        Step { decision, write }
    }

    fn write(&self, start: Timestamp, entries: Vec<LoggedRequest>) -> Write<WindowLogState> {
        Write::until(WindowLogState { start, entries }, start.as_us() + self.window_us())
    }
}

/// The window's entries and a new one of this cost.
fn with_entry(window: Window<'_>, now: Timestamp, cost: u64) -> Vec<LoggedRequest> {
    let mut entries = Vec::with_capacity(window.entries.len() + 1);
    entries.extend_from_slice(window.entries);
    add(&mut entries, now, cost);
    entries
}

/// Adds an entry of this cost at the end.
fn add(entries: &mut Vec<LoggedRequest>, now: Timestamp, cost: u64) {
    let timestamp = entries.last().map_or(now, |last| now.max(last.timestamp));
    entries.push(LoggedRequest { timestamp, cost, metadata: Arc::default() });
}

impl Algorithm for WindowLog {
    type State = WindowLogState;

    fn capacity(&self) -> u64 {
        self.window.limit
    }

    fn is_within(&self, max: &Self) -> bool {
        self.window_us() == max.window_us() && self.window.limit <= max.window.limit
    }

    fn state_kind(&self) -> Cow<'static, str> {
        kind_of_window("window-log", self.window_us())
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        let window = self.window(state, now);
        let (decision, charge) = self.decide(now, cost, window);
        let write = match charge {
            0 => Write::Keep,
            _ => self.write(window.start, with_entry(window, now, charge)),
        };
        Step { decision, write }
    }

    /// Takes the cost off the newest entries.
    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let window = self.window(state, now);
        let entries = after_refund(window.entries, cost, |entry| &mut entry.cost);
        Some(self.change(now, cost, window, entries))
    }

    undone_by_refund!(|state| state.start);

    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let window = self.window(state, now);
        let charge = cost.min(self.window.limit - self.as_count(window).count);
        let entries = (charge > 0).then(|| with_entry(window, now, charge));
        Some(self.change(now, cost, window, entries))
    }

    /// As a forced charge.
    fn fill(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        self.force(state, now, cost)
    }

    fn metadata_bytes(&self) -> Option<usize> {
        Some(Self::MAX_METADATA_BYTES)
    }

    fn annotate(&self, state: &mut WindowLogState, metadata: &[u8]) {
        if let Some(newest) = state.entries.last_mut() {
            newest.metadata = metadata.into();
        }
    }

    fn logged<'s>(&self, state: &'s WindowLogState, now: Timestamp) -> &'s [LoggedRequest] {
        self.window(Some(state), now).entries
    }
}

impl InMemory for WindowLog {
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
        Step { decision, write: Write::until((), start.as_us() + self.window_us()) }
    }

    counts_entries!(entries);
}

per!(WindowLog);
without_burst!(WindowLog = "window-log" by window_us);
