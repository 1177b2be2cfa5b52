//! Entries that count until they are one window old: the common part of the sliding log and the
//! concurrency limit.
//!
//! An entry made at `t` counts until just before `t + window`, and no longer at `t + window`.

use alloc::borrow::Cow;
use alloc::vec::Vec;

use crate::algorithms::{Algorithm, MaybeStep, Step, Write};
use crate::decision::Decision;
use crate::in_memory::{InMemory, counts_entries};
use crate::rate::kind_of_window;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// The cost admitted at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedCost {
    /// The moment.
    pub timestamp: Timestamp,
    /// The sum of the costs.
    pub cost: u64,
}

/// What [`SlidingLog`](crate::SlidingLog) and [`Concurrency`](crate::Concurrency) (`LEASES`) keep
/// for a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogState<const LEASES: bool> {
    /// What was admitted, or the leases: oldest first, their times strictly ascending, none of cost
    /// 0. Leases of the same moment share one entry; their [`Reservation`]s tell them apart.
    pub entries: Vec<LoggedCost>,
}

/// [`SlidingLog`](crate::SlidingLog), or [`Concurrency`](crate::Concurrency) if `LEASES`: a limit
/// on the sum of entries, each of which counts for one window. They differ in that a lease is known
/// by its time: it can be released and renewed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoggedWindow<const LEASES: bool> {
    pub(crate) limit: u64,
    pub(crate) window_us: u64,
}

/// The entries that still count.
#[derive(Clone, Copy)]
struct LiveEntries<'a> {
    /// The moment: `now`, or the time of the last entry if that is later.
    at: Timestamp,
    entries: &'a [LoggedCost],
    /// The sum of their costs.
    used: u64,
}

/// The sum of these costs, at most `u64::MAX`.
pub(crate) fn sum(costs: impl Iterator<Item = u64>) -> u64 {
    // Takes half the time of saturating at each addition.
    let sum: u128 = costs.map(u128::from).sum();
    u64::try_from(sum).unwrap_or(u64::MAX)
}

/// The entries after a refund, which takes so much off the newest ones and drops those of which
/// nothing is left: a refund undoes the latest charges. `None` if nothing changes.
pub(crate) fn after_refund<E: Clone>(
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

impl<const LEASES: bool> LoggedWindow<LEASES> {
    /// When an entry stops counting.
    fn end_us(&self, entry: LoggedCost) -> u64 {
        entry.timestamp.as_us() + self.window_us
    }

    fn live<'a>(&self, state: Option<&'a LogState<LEASES>>, now: Timestamp) -> LiveEntries<'a> {
        let entries = state.map_or(&[][..], |state| &state.entries);
        let at = entries.last().map_or(now, |last| now.max(last.timestamp));
        let expired = entries.partition_point(|entry| self.end_us(*entry) <= at.as_us());
        let entries = &entries[expired..];
        LiveEntries { at, entries, used: used(entries) }
    }

    fn remaining(&self, live: LiveEntries<'_>) -> u64 {
        self.limit.saturating_sub(live.used)
    }

    /// When the oldest entries, of at least `excess` together, will have stopped counting.
    fn freed_us<'e>(
        &self,
        mut entries: impl Iterator<Item = &'e LoggedCost>,
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
    fn decision<'e>(
        &self,
        (now, cost): (Timestamp, u64),
        used: u64,
        entries: impl DoubleEndedIterator<Item = &'e LoggedCost> + Clone,
        retry_after_us: Option<u64>,
    ) -> Decision {
        // What can admit nothing has nothing to recover.
        let last = entries.clone().next_back().filter(|_| self.limit > 0);
        // More of a cost may count than a limit that was lowered has room for.
        let excess = used.saturating_sub(self.limit).saturating_add(1);
        let grown_us = self.freed_us(entries, excess);
        Decision {
            allowed: retry_after_us == Some(0),
            cost,
            limit: self.limit,
            remaining: self.limit.saturating_sub(used),
            retry_after_us,
            replenish_after_us: grown_us.map_or(0, |us| us.saturating_sub(now.as_us())),
            reset_after_us: last.map_or(0, |last| self.end_us(*last).saturating_sub(now.as_us())),
        }
    }

    /// The decision on a request, and the charge.
    fn decide(&self, now: Timestamp, cost: u64, live: LiveEntries<'_>) -> (Decision, u64) {
        if cost > self.remaining(live) {
            return (self.denial(now, cost, live), 0);
        }
        let new = LoggedCost { timestamp: live.at, cost };
        let entries = live.entries.iter().chain((cost > 0).then_some(&new));
        (self.decision((now, cost), live.used.saturating_add(cost), entries, Some(0)), cost)
    }

    fn denial(&self, now: Timestamp, cost: u64, live: LiveEntries<'_>) -> Decision {
        let room = self.limit.checked_sub(cost);
        let retry_us = room.and_then(|room| self.freed_us(live.entries.iter(), live.used - room));
        // A store may have kept entries in no order, of which some have ended already.
        let retry_after_us = retry_us.map(|us| us.saturating_sub(now.as_us()).max(1));
        self.decision((now, cost), live.used, live.entries.iter(), retry_after_us)
    }

    /// The step that is always allowed and leaves these entries; `None` changes nothing.
    fn change(
        &self,
        now: Timestamp,
        cost: u64,
        live: LiveEntries<'_>,
        entries: Option<Vec<LoggedCost>>,
    ) -> Step<LogState<LEASES>> {
        let after = entries.as_deref().unwrap_or(live.entries);
        let decision = self.decision((now, cost), used(after), after.iter(), Some(0));
        let write = entries.map_or(Write::Keep, |entries| self.write(entries));
        Step { decision, write }
    }

    fn write(&self, entries: Vec<LoggedCost>) -> Write<LogState<LEASES>> {
        match entries.last() {
            None => Write::Remove,
            Some(last) => {
                let end_us = self.end_us(*last);
                Write::until(LogState { entries }, end_us)
            }
        }
    }

    /// Takes `charged` off the entry made at `timestamp`, if it is still there. If `renewed`, adds
    /// what it took at `now`.
    fn take(
        &self,
        state: Option<&LogState<LEASES>>,
        (now, timestamp): (Timestamp, Timestamp),
        charged: u64,
        renewed: bool,
    ) -> Step<LogState<LEASES>> {
        let live = self.live(state, now);
        let made = live.entries.binary_search_by_key(&timestamp, |entry| entry.timestamp);
        let (Ok(position), 1..) = (made, charged) else { return self.change(now, 0, live, None) };
        let entry = live.entries[position];
        let taken = charged.min(entry.cost);
        let rest = LoggedCost { cost: entry.cost - taken, ..entry };
        let rest = Some(rest).filter(|rest| rest.cost > 0);
        // Removing the last lease allocates nothing.
        let (older, newer) = (&live.entries[..position], &live.entries[position + 1..]);
        let mut entries =
            Vec::with_capacity(older.len() + newer.len() + usize::from(rest.is_some()));
        entries.extend(older.iter().copied().chain(rest).chain(newer.iter().copied()));
        if renewed {
            entries = with_entry(LiveEntries { entries: &entries, ..live }, taken);
        }
        self.change(now, 0, live, Some(entries))
    }
}

impl<const LEASES: bool> Algorithm for LoggedWindow<LEASES> {
    type State = LogState<LEASES>;

    fn capacity(&self) -> u64 {
        self.limit
    }

    fn is_within(&self, max: &Self) -> bool {
        self.window_us == max.window_us && self.limit <= max.limit
    }

    /// A lease of another length is another state: a shorter one would forget those of the longer
    /// one.
    fn state_kind(&self) -> Cow<'static, str> {
        kind_of_window(if LEASES { "concurrency" } else { "sliding-log" }, self.window_us)
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        let live = self.live(state, now);
        let (decision, charge) = self.decide(now, cost, live);
        let write = match charge {
            0 => Write::Keep,
            _ => self.write(with_entry(live, charge)),
        };
        Step { decision, write }
    }

    /// Takes the cost off the newest entries: a refund undoes the latest charges, or ends the
    /// newest leases.
    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let live = self.live(state, now);
        let entries = after_refund(live.entries, cost, |entry| &mut entry.cost);
        Some(self.change(now, cost, live, entries))
    }

    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let live = self.live(state, now);
        let charge = cost.min(self.remaining(live));
        let entries = (charge > 0).then(|| with_entry(live, charge));
        Some(self.change(now, cost, live, entries))
    }

    /// Adds the cost and drops the oldest entries, the last one in part, until the log is exactly
    /// full; or as full as it was, if a larger limit wrote it. A denied attempt takes no lease.
    fn fill(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        if LEASES {
            return None;
        }
        let live = self.live(state, now);
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
        Some(self.change(now, cost, live, Some(entries).filter(|_| cost > 0)))
    }

    fn has_leases(&self) -> bool {
        LEASES
    }

    /// The length of a lease.
    fn reservation_us(&self) -> Option<u64> {
        LEASES.then_some(self.window_us)
    }

    /// At the time of the newest lease, if that is later.
    fn charged_at(&self, state: Option<&Self::State>, now: Timestamp) -> Timestamp {
        let newest = state.filter(|_| LEASES).and_then(|state| state.entries.last());
        newest.map_or(now, |newest| now.max(newest.timestamp))
    }

    /// Releases the lease, whatever the cost.
    fn settle(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> MaybeStep<Self> {
        let lease = (now, reservation.timestamp);
        LEASES.then(|| self.take(state, lease, reservation.cost, false).costing(cost))
    }

    /// Starts the lease again at `now`, if it is still there.
    fn renew(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
    ) -> Step<Self::State> {
        let charged = if LEASES { reservation.cost } else { 0 };
        self.take(state, (now, reservation.timestamp), charged, true)
    }

    /// Releases the lease, or takes the charge off its entry, if that is still there.
    fn undo(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &Self::State,
    ) -> MaybeStep<Self> {
        if LEASES {
            return self.settle(state, now, reservation, 0);
        }
        let timestamp = charged.entries.last()?.timestamp;
        let of_it =
            |entry: &LoggedCost| entry.timestamp == timestamp && entry.cost >= reservation.cost;
        let there = state?.entries.iter().any(of_it);
        there.then(|| self.take(state, (now, timestamp), reservation.cost, false))
    }
}

impl<const LEASES: bool> InMemory for LoggedWindow<LEASES> {
    fn step_in_place(&self, state: &mut Self::State, now: Timestamp, cost: u64) -> Step<()> {
        let live = self.live(Some(state), now);
        let (decision, charge) = self.decide(now, cost, live);
        if charge == 0 {
            return Step { decision, write: Write::Keep };
        }
        let new = LoggedCost { timestamp: live.at, cost: charge };
        let past = state.entries.len() - live.entries.len();
        if past > 0 {
            state.entries.drain(..past);
        }
        add(&mut state.entries, new);
        Step { decision, write: Write::until((), self.end_us(new)) }
    }

    counts_entries!(entries);
}

fn used(entries: &[LoggedCost]) -> u64 {
    sum(entries.iter().map(|entry| entry.cost))
}

/// The live entries and a new one of this cost.
fn with_entry(live: LiveEntries<'_>, cost: u64) -> Vec<LoggedCost> {
    let mut entries = Vec::with_capacity(live.entries.len() + 1);
    entries.extend_from_slice(live.entries);
    add(&mut entries, LoggedCost { timestamp: live.at, cost });
    entries
}

/// Adds an entry, to the last one if both are of the same moment.
fn add(entries: &mut Vec<LoggedCost>, new: LoggedCost) {
    match entries.last_mut() {
        Some(last) if last.timestamp == new.timestamp => {
            last.cost = last.cost.saturating_add(new.cost);
        }
        _ => entries.push(new),
    }
}
