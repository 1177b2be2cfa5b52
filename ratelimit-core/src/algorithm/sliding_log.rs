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

use crate::algorithm::{Algorithm, Step, Write};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::rate::Rate;
use crate::tick::Tick;

/// So many in any stretch of one window's length.
///
/// A step takes time and memory in proportion to the entries that are alive, at most `limit` of
/// them.
///
/// ```
/// use ratelimit_core::{Algorithm, SlidingLog, Tick, Write};
///
/// let log = SlidingLog::new("1/s".parse()?)?;
/// let Write::Put { state, .. } = log.step(None, Tick::ZERO, 1).write else { unreachable!() };
/// let at = |us| Tick::from_us(us).expect("a time");
/// assert!(!log.step(Some(&state), at(999_999), 1).decision.allowed);
/// assert!(log.step(Some(&state), at(1_000_000), 1).decision.allowed);
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlidingLog {
    limit: u64,
    window_us: u64,
}

/// What [`SlidingLog`] keeps for a key: what was admitted, oldest first, one entry a moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlidingLogState {
    /// The entries, their ticks strictly ascending, no cost 0.
    pub entries: Vec<LogEntry>,
}

/// What was admitted at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// When.
    pub tick: Tick,
    /// How much, together.
    pub cost: u64,
}

/// The entries that still count.
#[derive(Clone, Copy)]
struct Live<'a> {
    /// The moment: `now`, or the last entry's tick if that is later.
    at: Tick,
    entries: &'a [LogEntry],
    /// What they cost together.
    used: u64,
}

impl SlidingLog {
    /// The rate's number in any stretch of the rate's period.
    ///
    /// # Errors
    /// None for any [`Rate`] today; a `Result` so that all algorithms are built alike.
    pub fn new(rate: Rate) -> Result<Self, ConfigError> {
        Ok(Self { limit: rate.count(), window_us: rate.period_us() })
    }

    /// The length of the window in microseconds.
    #[must_use]
    pub const fn window_us(&self) -> u64 {
        self.window_us
    }

    /// When an entry stops to count.
    fn end_us(&self, entry: LogEntry) -> u64 {
        entry.tick.as_us() + self.window_us
    }

    fn live<'a>(&self, state: Option<&'a SlidingLogState>, now: Tick) -> Live<'a> {
        let entries = state.map_or(&[][..], |state| &state.entries);
        let at = entries.last().map_or(now, |last| now.max(last.tick));
        let expired = entries.partition_point(|entry| self.end_us(*entry) <= at.as_us());
        let entries = &entries[expired..];
        Live { at, entries, used: entries.iter().map(|entry| entry.cost).sum() }
    }

    /// When the oldest entries that cost at least `excess` together will have gone.
    fn freed_us(&self, live: Live<'_>, excess: u64) -> Option<u64> {
        let mut freed = 0;
        let last_to_go = live.entries.iter().find(|entry| {
            freed += entry.cost;
            freed >= excess
        })?;
        Some(self.end_us(*last_to_go))
    }

    fn decision(
        &self,
        now: Tick,
        cost: u64,
        (used, last): (u64, Option<&LogEntry>),
        retry_after_us: Option<u64>,
    ) -> Decision {
        Decision {
            allowed: retry_after_us == Some(0),
            cost,
            limit: self.limit,
            remaining: self.limit.saturating_sub(used),
            retry_after_us,
            reset_after_us: last.map_or(0, |last| self.end_us(*last) - now.as_us()),
        }
    }

    fn admitted(
        &self,
        now: Tick,
        cost: u64,
        live: Live<'_>,
        entries: Option<Vec<LogEntry>>,
    ) -> Step<SlidingLogState> {
        let after = entries.as_deref().unwrap_or(live.entries);
        let used = after.iter().map(|entry| entry.cost).sum();
        let decision = self.decision(now, cost, (used, after.last()), Some(0));
        let write = match entries {
            None => Write::Keep,
            Some(entries) => match entries.last() {
                None => Write::Remove,
                Some(last) => {
                    let expires = Tick::saturating_from_us(self.end_us(*last));
                    Write::Put { state: SlidingLogState { entries }, expires }
                }
            },
        };
        Step { decision, write }
    }

    /// The live entries with one of this cost added at the end.
    fn charged(live: Live<'_>, cost: u64) -> Option<Vec<LogEntry>> {
        if cost == 0 {
            return None;
        }
        let mut entries = Vec::with_capacity(live.entries.len() + 1);
        entries.extend_from_slice(live.entries);
        match entries.last_mut() {
            Some(last) if last.tick == live.at => last.cost += cost,
            _ => entries.push(LogEntry { tick: live.at, cost }),
        }
        Some(entries)
    }
}

impl Algorithm for SlidingLog {
    type State = SlidingLogState;

    fn capacity(&self) -> u64 {
        self.limit
    }

    fn step(&self, state: Option<&SlidingLogState>, now: Tick, cost: u64) -> Step<SlidingLogState> {
        let live = self.live(state, now);
        if cost > self.limit.saturating_sub(live.used) {
            let retry_us = if cost > self.limit {
                None
            } else {
                self.freed_us(live, live.used + cost - self.limit)
            };
            let retry_after_us = retry_us.map(|us| us - now.as_us());
            let decision =
                self.decision(now, cost, (live.used, live.entries.last()), retry_after_us);
            return Step { decision, write: Write::Keep };
        }
        self.admitted(now, cost, live, Self::charged(live, cost))
    }

    /// Takes the cost off the newest entries: a refund undoes what was charged last.
    fn refund(
        &self,
        state: Option<&SlidingLogState>,
        now: Tick,
        cost: u64,
    ) -> Option<Step<SlidingLogState>> {
        let live = self.live(state, now);
        if cost == 0 || live.entries.is_empty() {
            return Some(self.admitted(now, cost, live, None));
        }
        let mut entries = live.entries.to_vec();
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
        Some(self.admitted(now, cost, live, Some(entries)))
    }

    fn force(
        &self,
        state: Option<&SlidingLogState>,
        now: Tick,
        cost: u64,
    ) -> Option<Step<SlidingLogState>> {
        let live = self.live(state, now);
        let charge = cost.min(self.limit.saturating_sub(live.used));
        Some(self.admitted(now, cost, live, Self::charged(live, charge)))
    }
}
