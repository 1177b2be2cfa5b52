//! The sliding window log: an entry per admitted request, which counts until it is one window old.
//!
//! Source: the "rolling rate limiter" of Redis tutorials, a sorted set of timestamps. It is exact: no span of one
//! window's length admits more than the limit. In return a state takes memory for every moment at which it admitted a
//! request.
//!
//! An entry made at `t` counts until just before `t + window`, and no longer at `t + window`.
//!
//! `sliding_log.lua` in `ratelimit-redis` is the same algorithm in Lua, on a sorted set.

use alloc::vec::Vec;

use crate::algorithms::{Algorithm, ChargesAttempts, MaybeStep, Step, Write};
use crate::entries::{Entries, Log, LogEntry};
use crate::error::ConfigError;
use crate::in_memory::{InMemory, counts_entries};
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// A count in any span of one window's length.
///
/// A step takes time and memory in proportion to the live entries, at most `limit`.
///
/// ```
/// use ratelimit_core::{Algorithm, SlidingLog, Timestamp};
/// use ratelimit_core::algorithm::Write;
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

/// What [`SlidingLog`] keeps for a key: what it has admitted, oldest first, one entry per moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingLogState {
    /// The entries, their times strictly ascending, none of cost 0.
    pub entries: Vec<LogEntry>,
}

impl SlidingLog {
    /// The count of the rate in any span of the rate's period.
    ///
    /// # Errors
    /// None today; a `Result` so that all algorithms are built alike.
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

fn kept(entries: Log) -> SlidingLogState {
    SlidingLogState { entries }
}

impl Algorithm for SlidingLog {
    type State = SlidingLogState;

    fn capacity(&self) -> u64 {
        self.log.limit
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        self.log.step(entries(state), now, cost).map(kept)
    }

    /// Takes the cost off the newest entries: a refund undoes the latest charges.
    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        Some(self.log.refund(entries(state), now, cost).map(kept))
    }

    /// Takes the charge off its entry, if that is still there.
    fn undo(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &Self::State,
    ) -> MaybeStep<Self> {
        let timestamp = charged.entries.last()?.timestamp;
        let of_it =
            |entry: &LogEntry| entry.timestamp == timestamp && entry.cost >= reservation.cost;
        let there = entries(state).iter().any(of_it);
        there.then(|| {
            self.log.take(entries(state), (now, timestamp), reservation.cost, false).map(kept)
        })
    }

    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        Some(self.log.force(entries(state), now, cost).map(kept))
    }
}

impl InMemory for SlidingLog {
    fn step_in_place(&self, state: &mut SlidingLogState, now: Timestamp, cost: u64) -> Step<()> {
        self.log.step_in_place(&mut state.entries, now, cost)
    }

    counts_entries!(entries);
}

impl ChargesAttempts for SlidingLog {
    /// Adds the cost and drops the oldest entries, the last one in part, until the log is exactly full.
    fn fill(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Write<Self::State> {
        self.log.fill(entries(state), now, cost).map(kept)
    }
}
