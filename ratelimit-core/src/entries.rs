//! Entries that count until they are one window old: the common part of the sliding log and the concurrency limit.
//!
//! An entry made at `t` counts until just before `t + window`, and no longer at `t + window`.

use alloc::vec::Vec;

use crate::algorithms::{Step, Write};
use crate::decision::Decision;
use crate::timestamp::Timestamp;

/// The cost admitted at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// The moment.
    pub timestamp: Timestamp,
    /// The sum of the costs.
    pub cost: u64,
}

/// Entries, oldest first, one per moment, none of cost 0.
pub(crate) type Log = Vec<LogEntry>;

/// A limit on the sum of entries, each of which counts for one window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entries {
    pub(crate) limit: u64,
    pub(crate) window_us: u64,
}

/// The entries that still count.
#[derive(Clone, Copy)]
struct LiveEntries<'a> {
    /// The moment: `now`, or the time of the last entry if that is later.
    at: Timestamp,
    entries: &'a [LogEntry],
    /// The sum of their costs.
    used: u64,
}

/// The sum of these costs, at most `u64::MAX`.
pub(crate) fn sum(costs: impl Iterator<Item = u64>) -> u64 {
    // Takes half the time of saturating at each addition.
    let sum: u128 = costs.map(u128::from).sum();
    u64::try_from(sum).unwrap_or(u64::MAX)
}

/// The entries after a refund, which takes so much off the newest ones and drops those of which nothing is left: a refund undoes
/// the latest charges. `None` if nothing changes.
pub(crate) fn refunded<E: Clone>(
    entries: &[E],
    mut owed: u64,
    cost: impl Fn(&mut E) -> &mut u64,
) -> Option<Vec<E>> {
    if owed == 0 || entries.is_empty() {
        return None;
    }
    let mut entries = entries.to_vec();
    while let Some(newest) = entries.last_mut() {
        let cost = cost(newest);
        let back = owed.min(*cost);
        *cost -= back;
        owed -= back;
        if *cost > 0 {
            break;
        }
        entries.pop();
    }
    Some(entries)
}

impl Entries {
    /// When an entry stops counting.
    fn end_us(&self, entry: LogEntry) -> u64 {
        entry.timestamp.as_us() + self.window_us
    }

    fn live<'a>(&self, entries: &'a [LogEntry], now: Timestamp) -> LiveEntries<'a> {
        let at = entries.last().map_or(now, |last| now.max(last.timestamp));
        let expired = entries.partition_point(|entry| self.end_us(*entry) <= at.as_us());
        let entries = &entries[expired..];
        LiveEntries { at, entries, used: used(entries) }
    }

    fn left(&self, live: LiveEntries<'_>) -> u64 {
        self.limit.saturating_sub(live.used)
    }

    /// When the oldest entries, of at least `excess` together, will have stopped counting.
    fn freed_us<'e>(
        &self,
        mut entries: impl Iterator<Item = &'e LogEntry>,
        excess: u64,
    ) -> Option<u64> {
        let mut freed: u64 = 0;
        let last_to_go = entries.find(|entry| {
            freed = freed.saturating_add(entry.cost);
            freed >= excess
        })?;
        Some(self.end_us(*last_to_go))
    }

    /// The decision that leaves these entries, of `used` together.
    fn decided<'e>(
        &self,
        (now, cost): (Timestamp, u64),
        used: u64,
        entries: impl DoubleEndedIterator<Item = &'e LogEntry> + Clone,
        retry_after_us: Option<u64>,
    ) -> Decision {
        let last = entries.clone().next_back();
        // More of a cost may count than a limit that was lowered has room for.
        let excess = used.saturating_sub(self.limit).saturating_add(1);
        let grown_us = self.freed_us(entries, excess);
        Decision {
            allowed: retry_after_us == Some(0),
            cost,
            limit: self.limit,
            remaining: self.limit.saturating_sub(used),
            retry_after_us,
            replenish_after_us: grown_us.map_or(0, |us| us - now.as_us()),
            reset_after_us: last.map_or(0, |last| self.end_us(*last) - now.as_us()),
        }
    }

    /// The decision to admit a cost and to charge `charge` for it.
    fn admitted(&self, now: Timestamp, cost: u64, live: LiveEntries<'_>, charge: u64) -> Decision {
        let new = LogEntry { timestamp: live.at, cost: charge };
        let entries = live.entries.iter().chain((charge > 0).then_some(&new));
        self.decided((now, cost), live.used.saturating_add(charge), entries, Some(0))
    }

    fn denied(&self, now: Timestamp, cost: u64, live: LiveEntries<'_>) -> Decision {
        let room = self.limit.checked_sub(cost);
        let retry_us = room.and_then(|room| self.freed_us(live.entries.iter(), live.used - room));
        let retry_after_us = retry_us.map(|us| us - now.as_us());
        self.decided((now, cost), live.used, live.entries.iter(), retry_after_us)
    }

    /// The decision on a request, and the charge.
    fn decide(&self, now: Timestamp, cost: u64, live: LiveEntries<'_>) -> (Decision, u64) {
        if cost > self.left(live) {
            (self.denied(now, cost, live), 0)
        } else {
            (self.admitted(now, cost, live, cost), cost)
        }
    }

    fn unchanged(&self, now: Timestamp, cost: u64, live: LiveEntries<'_>) -> Step<Log> {
        Step { decision: self.admitted(now, cost, live, 0), write: Write::Keep }
    }

    fn changed(&self, now: Timestamp, cost: u64, entries: Log) -> Step<Log> {
        let decision = self.decided((now, cost), used(&entries), entries.iter(), Some(0));
        Step { decision, write: self.written(entries) }
    }

    fn written(&self, entries: Log) -> Write<Log> {
        match entries.last() {
            None => Write::Remove,
            Some(last) => {
                let end_us = self.end_us(*last);
                Write::until(entries, end_us)
            }
        }
    }

    pub(crate) fn step(&self, entries: &[LogEntry], now: Timestamp, cost: u64) -> Step<Log> {
        let live = self.live(entries, now);
        let (decision, charge) = self.decide(now, cost, live);
        self.charged(decision, live, charge)
    }

    /// [`step`](Self::step) in place.
    pub(crate) fn step_in_place(&self, entries: &mut Log, now: Timestamp, cost: u64) -> Step<()> {
        let live = self.live(entries, now);
        let (decision, charge) = self.decide(now, cost, live);
        if charge == 0 {
            return Step { decision, write: Write::Keep };
        }
        let new = LogEntry { timestamp: live.at, cost: charge };
        let past = entries.len() - live.entries.len();
        if past > 0 {
            entries.drain(..past);
        }
        add(entries, new);
        Step { decision, write: Write::until((), self.end_us(new)) }
    }

    pub(crate) fn force(&self, entries: &[LogEntry], now: Timestamp, cost: u64) -> Step<Log> {
        let live = self.live(entries, now);
        let charge = cost.min(self.left(live));
        self.charged(self.admitted(now, cost, live, charge), live, charge)
    }

    fn charged(&self, decision: Decision, live: LiveEntries<'_>, charge: u64) -> Step<Log> {
        let write = match charge {
            0 => Write::Keep,
            _ => self.written(with_entry(live, charge)),
        };
        Step { decision, write }
    }

    pub(crate) fn refund(&self, entries: &[LogEntry], now: Timestamp, cost: u64) -> Step<Log> {
        let live = self.live(entries, now);
        match refunded(live.entries, cost, |entry| &mut entry.cost) {
            None => self.unchanged(now, cost, live),
            Some(entries) => self.changed(now, cost, entries),
        }
    }

    /// Takes `charged` off the entry made at `timestamp`, if it is still there. If `renewed`, adds what it took at
    /// `now`.
    pub(crate) fn take(
        &self,
        entries: &[LogEntry],
        (now, timestamp): (Timestamp, Timestamp),
        charged: u64,
        renewed: bool,
    ) -> Step<Log> {
        let live = self.live(entries, now);
        let made = live.entries.binary_search_by_key(&timestamp, |entry| entry.timestamp);
        let (Ok(position), 1..) = (made, charged) else { return self.unchanged(now, 0, live) };
        let entry = live.entries[position];
        let taken = charged.min(entry.cost);
        let rest = LogEntry { cost: entry.cost - taken, ..entry };
        let rest = Some(rest).filter(|rest| rest.cost > 0);
        // Removing the last lease allocates nothing.
        let (older, newer) = (&live.entries[..position], &live.entries[position + 1..]);
        let mut entries =
            Vec::with_capacity(older.len() + newer.len() + usize::from(rest.is_some()));
        entries.extend(older.iter().copied().chain(rest).chain(newer.iter().copied()));
        if renewed {
            entries = with_entry(LiveEntries { entries: &entries, ..live }, taken);
        }
        self.changed(now, 0, entries)
    }

    /// Adds `cost` and drops the oldest entries, the last one in part, until the entries are exactly full; or as full as
    /// they were, if a larger limit wrote them.
    pub(crate) fn fill(&self, entries: &[LogEntry], now: Timestamp, cost: u64) -> Write<Log> {
        if cost == 0 {
            return Write::Keep;
        }
        let live = self.live(entries, now);
        let full = self.limit.max(live.used);
        let mut entries = with_entry(live, cost.min(self.limit));
        let mut excess = used(&entries).saturating_sub(full);
        let first_kept = entries.iter_mut().position(|entry| {
            let dropped = excess.min(entry.cost);
            entry.cost -= dropped;
            excess -= dropped;
            entry.cost > 0
        });
        entries.drain(..first_kept.unwrap_or_default());
        self.written(entries)
    }
}

fn used(entries: &[LogEntry]) -> u64 {
    sum(entries.iter().map(|entry| entry.cost))
}

/// The live entries and a new one of this cost.
fn with_entry(live: LiveEntries<'_>, cost: u64) -> Log {
    let mut entries = Vec::with_capacity(live.entries.len() + 1);
    entries.extend_from_slice(live.entries);
    add(&mut entries, LogEntry { timestamp: live.at, cost });
    entries
}

/// Adds an entry, to the last one if both are of the same moment.
fn add(entries: &mut Log, new: LogEntry) {
    match entries.last_mut() {
        Some(last) if last.timestamp == new.timestamp => {
            last.cost = last.cost.saturating_add(new.cost);
        }
        _ => entries.push(new),
    }
}
