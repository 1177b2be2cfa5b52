//! Entries that count until they are a window old: what the sliding log and the concurrency limit
//! have in common.
//!
//! An entry made at `t` counts until just before `t + window`, and no longer at `t + window`.

use alloc::vec::Vec;

use crate::algorithm::{Step, Write};
use crate::decision::Decision;
use crate::tick::{MAX_INTEGER, Tick};

/// What was admitted at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogEntry {
    /// When.
    pub tick: Tick,
    /// How much, together.
    pub cost: u64,
}

/// So much at a time, each entry for so long. Entries stand oldest first, one a moment, none of cost 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entries {
    pub(super) limit: u64,
    pub(super) window_us: u64,
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

fn sum(entries: &[LogEntry]) -> u64 {
    entries.iter().map(|entry| entry.cost).fold(0, u64::saturating_add)
}

impl Entries {
    /// When an entry stops to count.
    fn end_us(&self, entry: LogEntry) -> u64 {
        entry.tick.as_us() + self.window_us
    }

    fn live<'a>(&self, entries: &'a [LogEntry], now: Tick) -> Live<'a> {
        let at = entries.last().map_or(now, |last| now.max(last.tick));
        let expired = entries.partition_point(|entry| self.end_us(*entry) <= at.as_us());
        let entries = &entries[expired..];
        Live { at, entries, used: sum(entries) }
    }

    fn left(&self, live: Live<'_>) -> u64 {
        self.limit.saturating_sub(live.used)
    }

    /// When the oldest entries that cost at least `excess` together will have gone.
    fn freed_us(&self, live: Live<'_>, excess: u64) -> Option<u64> {
        let mut freed: u64 = 0;
        let last_to_go = live.entries.iter().find(|entry| {
            freed = freed.saturating_add(entry.cost);
            freed >= excess
        })?;
        Some(self.end_us(*last_to_go))
    }

    fn decision(
        &self,
        now: Tick,
        cost: u64,
        entries: &[LogEntry],
        retry_after_us: Option<u64>,
    ) -> Decision {
        Decision {
            allowed: retry_after_us == Some(0),
            cost,
            limit: self.limit,
            remaining: self.limit.saturating_sub(sum(entries)),
            retry_after_us,
            reset_after_us: entries.last().map_or(0, |last| self.end_us(*last) - now.as_us()),
        }
    }

    fn unchanged(&self, now: Tick, cost: u64, live: Live<'_>) -> Step<Vec<LogEntry>> {
        let decision = self.decision(now, cost, live.entries, Some(0));
        Step { decision, write: Write::Keep }
    }

    fn changed(&self, now: Tick, cost: u64, entries: Vec<LogEntry>) -> Step<Vec<LogEntry>> {
        let decision = self.decision(now, cost, &entries, Some(0));
        Step { decision, write: self.written(entries) }
    }

    fn written(&self, entries: Vec<LogEntry>) -> Write<Vec<LogEntry>> {
        match entries.last() {
            None => Write::Remove,
            Some(last) => {
                let expires = Tick::saturating_from_us(self.end_us(*last));
                Write::Put { state: entries, expires }
            }
        }
    }

    pub(super) fn step(&self, entries: &[LogEntry], now: Tick, cost: u64) -> Step<Vec<LogEntry>> {
        let live = self.live(entries, now);
        if cost > self.left(live) {
            let retry_us = if cost > self.limit {
                None
            } else {
                self.freed_us(live, live.used + cost - self.limit)
            };
            let retry_after_us = retry_us.map(|us| us - now.as_us());
            let decision = self.decision(now, cost, live.entries, retry_after_us);
            return Step { decision, write: Write::Keep };
        }
        self.charged(now, cost, live, cost)
    }

    pub(super) fn force(&self, entries: &[LogEntry], now: Tick, cost: u64) -> Step<Vec<LogEntry>> {
        let live = self.live(entries, now);
        self.charged(now, cost, live, cost.min(self.left(live)))
    }

    fn charged(&self, now: Tick, cost: u64, live: Live<'_>, charge: u64) -> Step<Vec<LogEntry>> {
        if charge == 0 {
            return self.unchanged(now, cost, live);
        }
        self.changed(now, cost, with_entry(live, charge))
    }

    /// Takes the cost off the newest entries: a refund undoes what was charged last.
    pub(super) fn refund(&self, entries: &[LogEntry], now: Tick, cost: u64) -> Step<Vec<LogEntry>> {
        let live = self.live(entries, now);
        if cost == 0 || live.entries.is_empty() {
            return self.unchanged(now, cost, live);
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
        self.changed(now, cost, entries)
    }

    /// Takes `charged` off the entry that was made at `tick`, if it is still there; and adds what was taken
    /// anew at `now` if it is `renewed`.
    pub(super) fn take(
        &self,
        entries: &[LogEntry],
        (now, tick): (Tick, Tick),
        charged: u64,
        renewed: bool,
    ) -> Step<Vec<LogEntry>> {
        let live = self.live(entries, now);
        let made = live.entries.binary_search_by_key(&tick, |entry| entry.tick);
        let (Ok(place), 1..) = (made, charged) else { return self.unchanged(now, 0, live) };
        let mut entries = live.entries.to_vec();
        let taken = charged.min(entries[place].cost);
        entries[place].cost -= taken;
        if entries[place].cost == 0 {
            entries.remove(place);
        }
        if renewed {
            entries = with_entry(Live { entries: &entries, ..live }, taken);
        }
        self.changed(now, 0, entries)
    }

    /// The entries with `cost` more of them than fit, up to the largest number that is exact on every
    /// backend; without the oldest that make no difference to any decision, so that somebody who keeps
    /// trying makes no state grow.
    pub(super) fn overcharge(
        &self,
        entries: &[LogEntry],
        now: Tick,
        cost: u64,
    ) -> Write<Vec<LogEntry>> {
        let live = self.live(entries, now);
        let charge = cost.min(MAX_INTEGER.saturating_sub(live.used));
        if charge == 0 {
            return Write::Keep;
        }
        let mut entries = with_entry(live, charge);
        let mut newer = 0_u64;
        let needed = entries.iter().rposition(|entry| {
            newer = newer.saturating_add(entry.cost);
            newer >= self.limit
        });
        entries.drain(..needed.unwrap_or_default());
        self.written(entries)
    }
}

/// The live entries with one of this cost added at the end.
fn with_entry(live: Live<'_>, cost: u64) -> Vec<LogEntry> {
    let mut entries = Vec::with_capacity(live.entries.len() + 1);
    entries.extend_from_slice(live.entries);
    match entries.last_mut() {
        Some(last) if last.tick == live.at => last.cost = last.cost.saturating_add(cost),
        _ => entries.push(LogEntry { tick: live.at, cost }),
    }
    entries
}
