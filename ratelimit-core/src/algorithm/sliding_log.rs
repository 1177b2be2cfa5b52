//! The sliding log: every admitted request is remembered until it is a window old.
//!
//! Source: the sorted set of timestamps that the Redis tutorials call "rolling rate limiter". It is the exact
//! one: in no stretch of one window's length is more admitted than the limit. The price is its
//! memory, one entry per moment at which something was admitted.
//!
//! An entry made at `t` counts until just before `t + window`, and no longer at `t + window`.
//!
//! The Lua twin of this file is `sliding_log.lua` in `ratelimit-redis`, on a sorted set.

use alloc::vec::Vec;

use crate::algorithm::{Algorithm, ChargesAttempts, Step, Write};
use crate::decision::Decision;
use crate::entries::{Entries, LogEntry};
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// So many in any stretch of one window's length.
///
/// A step takes time and memory in proportion to the entries that are alive, at most `limit` of
/// them.
///
/// ```
/// use ratelimit_core::{Algorithm, SlidingLog, Timestamp, Write};
///
/// let log = SlidingLog::new("1/s".parse()?)?;
/// let Write::Put { state, .. } = log.step(None, Timestamp::ZERO, 1).write else { unreachable!() };
/// let at = |us| Timestamp::from_us(us).expect("a time");
/// assert!(!log.step(Some(&state), at(999_999), 1).decision.allowed);
/// assert!(log.step(Some(&state), at(1_000_000), 1).decision.allowed);
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingLog {
    log: Entries,
}

/// What [`SlidingLog`] keeps for a key: what was admitted, oldest first, one entry a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingLogState {
    /// The entries, their ticks strictly ascending, no cost 0.
    pub entries: Vec<LogEntry>,
}

impl SlidingLog {
    /// The rate's number in any stretch of the rate's period.
    ///
    /// # Errors
    /// None for any [`Rate`] today; a `Result` so that all algorithms are built alike.
    pub fn new(rate: Rate) -> Result<Self, ConfigError> {
        Ok(Self { log: Entries { limit: rate.count(), window_us: rate.period_us() } })
    }

    /// The length of the window in microseconds.
    #[must_use]
    pub const fn window_us(&self) -> u64 {
        self.log.window_us
    }
}

fn entries(state: Option<&SlidingLogState>) -> &[LogEntry] {
    state.map_or(&[], |state| &state.entries)
}

fn kept(entries: Vec<LogEntry>) -> SlidingLogState {
    SlidingLogState { entries }
}

impl Algorithm for SlidingLog {
    type State = SlidingLogState;

    fn capacity(&self) -> u64 {
        self.log.limit
    }

    fn step(
        &self,
        state: Option<&SlidingLogState>,
        now: Timestamp,
        cost: u64,
    ) -> Step<SlidingLogState> {
        self.log.step(entries(state), now, cost).map(kept)
    }

    /// Takes the cost off the newest entries: a refund undoes what was charged last.
    fn refund(
        &self,
        state: Option<&SlidingLogState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<SlidingLogState>> {
        Some(self.log.refund(entries(state), now, cost).map(kept))
    }

    /// Takes it off the entry that it was charged in, if that is still there.
    fn undo(
        &self,
        state: Option<&SlidingLogState>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &SlidingLogState,
    ) -> Option<Step<SlidingLogState>> {
        let timestamp = charged.entries.last()?.timestamp;
        let of_it =
            |entry: &LogEntry| entry.timestamp == timestamp && entry.cost >= reservation.cost;
        let there = entries(state).iter().any(of_it);
        there.then(|| {
            self.log.take(entries(state), (now, timestamp), reservation.cost, false).map(kept)
        })
    }

    fn force(
        &self,
        state: Option<&SlidingLogState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<SlidingLogState>> {
        Some(self.log.force(entries(state), now, cost).map(kept))
    }
}

impl InMemory for SlidingLog {
    fn decision(&self, state: Option<&SlidingLogState>, now: Timestamp, cost: u64) -> Decision {
        self.log.decision(entries(state), now, cost)
    }

    fn step_in_place(&self, state: &mut SlidingLogState, now: Timestamp, cost: u64) -> Step<()> {
        self.log.step_in_place(&mut state.entries, now, cost)
    }

    fn entries_in(state: &SlidingLogState) -> usize {
        state.entries.len()
    }

    fn entries_per_step(&self) -> usize {
        1
    }
}

impl ChargesAttempts for SlidingLog {
    /// Records the cost and drops the oldest, partly if need be, down to exactly full.
    fn fill(
        &self,
        state: Option<&SlidingLogState>,
        now: Timestamp,
        cost: u64,
    ) -> Write<SlidingLogState> {
        self.log.fill(entries(state), now, cost).map(kept)
    }
}
