//! The table of small states: sixteen bytes a key, four keys a cache line.
//!
//! A state that fits ([`Packed`]) lies in one of the two lines of its key; whatever does not fit, or must
//! outlive the store's own clock, lies in the shards, and the key's first line says that some do. A key never
//! has both. A decision that writes nothing takes no lock, and one that writes its entry's: see `line.rs`. When
//! both lines of a key are full, an entry of theirs moves to its other line, which may have another one moved
//! first, or the segment splits: see `directory.rs`.
//!
//! An entry whose state has stopped to matter by the store's own clock is as good as free. Whoever needs the
//! place takes it, and whoever puts in a new key sweeps a few lines.

#![allow(
    clippy::inline_always,
    reason = "all of it is a part of one decision of some forty nanoseconds: measured, calls took a quarter of it"
)]

mod address;
mod directory;
mod entry;
mod line;

#[cfg(all(test, loom))]
mod loom_lines;
#[cfg(all(test, not(loom)))]
mod tests;

use ratelimit_core::{Compact, Timestamp};
use smallvec::SmallVec;

pub(crate) use address::Address;
pub(crate) use directory::Route;
use directory::{Directory, LineId};
pub(crate) use entry::{Entry, Packed};
pub(crate) use line::{Locked, LockedEntry, Seen};

use crate::sync::{AtomicUsize, Ordering};

/// Lines in a segment, a power of two: 32 KiB.
const MOST_LINES: usize = 512;
/// Tests have smaller ones, so that they split.
const LINES: usize = if cfg!(any(test, loom)) { 4 } else { MOST_LINES };
/// Entries of a segment that has to be split, about: what the directory's size is reckoned by.
const FULL_SLOTS: usize = LINES * line::SLOTS * 3 / 4;
/// How long before a store is built its epoch lies: a clock may go back by as much.
const BEFORE_US: u64 = 3_600_000_000;

/// The table.
#[derive(Debug)]
pub(crate) struct Lines {
    directory: Directory,
    /// What times are counted from.
    epoch: Timestamp,
    /// The line that is swept next.
    cursor: AtomicUsize,
}

/// The two lines of a key, locked.
#[derive(Debug)]
pub(crate) struct Pair<'t> {
    pub(crate) route: Route<'t>,
    pub(crate) lines: [Locked<'t>; 2],
}

impl Pair<'_> {
    /// The line and the slot that the key lies in.
    pub(crate) fn find(&mut self) -> Option<(usize, usize)> {
        let tag = self.route.tag();
        self.lines.iter_mut().enumerate().find_map(|(at, line)| Some((at, line.find(tag)?)))
    }

    /// The key's state, if it lies here.
    pub(crate) fn state(&mut self) -> Option<Packed> {
        self.find().map(|(line, slot)| self.lines[line].get(slot).state())
    }

    /// A place whose state has stopped to matter.
    pub(crate) fn expired_place(&self, now_us: u64) -> Option<(usize, usize)> {
        self.place(|line| line.expired_slot(now_us))
    }

    /// A place that is free.
    #[expect(
        clippy::redundant_closure_for_method_calls,
        reason = "the method by itself is one of a single lifetime, and does not compile here"
    )]
    pub(crate) fn free_place(&self) -> Option<(usize, usize)> {
        self.place(|line| line.free_slot())
    }

    fn place(&self, slot: impl Fn(&Locked<'_>) -> Option<usize>) -> Option<(usize, usize)> {
        self.lines.iter().enumerate().find_map(|(at, line)| Some((at, slot(line)?)))
    }
}

/// All the lines of a batch, locked.
#[derive(Debug)]
pub(crate) struct Held<'t> {
    pub(crate) lines: SmallVec<[Locked<'t>; 4]>,
    /// For each key where it lies.
    pub(crate) routes: SmallVec<[Route<'t>; 2]>,
    /// And the positions of its two lines among those that are held.
    positions: SmallVec<[[usize; 2]; 2]>,
}

impl Held<'_> {
    /// The line and the slot that a key lies in.
    pub(crate) fn find(&mut self, key: usize) -> Option<(usize, usize)> {
        let (tag, positions) = (self.routes[key].tag(), self.positions[key]);
        positions.into_iter().find_map(|line| Some((line, self.lines[line].find(tag)?)))
    }

    /// A free place for a key.
    pub(crate) fn free_place(&self, key: usize) -> Option<(usize, usize)> {
        let slot = |line: usize| Some((line, self.lines[line].free_slot()?));
        self.positions[key].into_iter().find_map(slot)
    }

    /// Whether states of keys that begin where this one does may lie elsewhere.
    pub(crate) fn has_spilled(&self, key: usize) -> bool {
        self.lines[self.positions[key][0]].has_spilled()
    }

    /// Notes that this key's state lies elsewhere.
    pub(crate) fn spill(&mut self, key: usize) {
        let [first, _] = self.positions[key];
        self.lines[first].spill();
    }
}

/// What was done for a key whose lines were full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Way {
    /// Whether it has a place now, unless others were quicker.
    pub(crate) made: bool,
    /// Entries that had expired and are gone.
    pub(crate) freed: usize,
}

impl Lines {
    /// For so many keys at the most, in a store that is built at `now`.
    pub(crate) fn new(capacity: usize, now: Timestamp) -> Self {
        let epoch = Timestamp::saturating_from_us(now.as_us().saturating_sub(BEFORE_US));
        Self { directory: Directory::new(capacity), epoch, cursor: AtomicUsize::new(0) }
    }

    /// The time as entries count it.
    #[inline(always)]
    pub(crate) fn since_epoch_us(&self, now: Timestamp) -> u64 {
        self.now_since_epoch(now).map_or(0, Timestamp::as_us)
    }

    /// The time from the epoch on, unless it lies before that.
    #[inline(always)]
    pub(crate) fn now_since_epoch(&self, now: Timestamp) -> Option<Timestamp> {
        now.checked_since(self.epoch)
    }

    #[inline(always)]
    pub(crate) fn pack(&self, compact: Compact) -> Option<Packed> {
        Packed::new(compact, self.epoch)
    }

    #[inline(always)]
    pub(crate) fn unpack(&self, state: Packed) -> Compact {
        state.compact(self.epoch)
    }

    #[inline(always)]
    pub(crate) fn route(&self, address: Address) -> Route<'_> {
        self.directory.route(address)
    }

    /// Locks both lines of a key.
    pub(crate) fn lock(&self, address: Address) -> Pair<'_> {
        loop {
            let route = self.route(address);
            let ([first, second], [first_id, second_id]) = (route.lines(), route.ids());
            let lines = if first_id < second_id {
                [first.lock(), second.lock()]
            } else {
                let second = second.lock();
                [first.lock(), second]
            };
            if route.is_still() {
                return Pair { route, lines };
            }
        }
    }

    /// Locks the lines of several keys, all in one order, so that nobody waits in a circle.
    pub(crate) fn lock_all(&self, addresses: &(impl Iterator<Item = Address> + Clone)) -> Held<'_> {
        loop {
            let routes: SmallVec<[Route<'_>; 2]> =
                addresses.clone().map(|address| self.route(address)).collect();
            let mut ids: SmallVec<[LineId; 4]> =
                routes.iter().flat_map(|route| route.ids()).collect();
            ids.sort_unstable();
            ids.dedup();
            let lines = ids.iter().map(|id| self.directory.line(*id).lock()).collect();
            if routes.iter().all(|route| route.is_still()) {
                let position = |id: LineId| ids.partition_point(|other| *other < id);
                let positions = routes.iter().map(|route| route.ids().map(position)).collect();
                return Held { lines, routes, positions };
            }
        }
    }

    /// Makes way for a key whose lines are full. No line may be held.
    pub(crate) fn make_way(&self, address: Address, now: Timestamp) -> Way {
        let now_us = self.since_epoch_us(now);
        let Pair { route, mut lines } = self.lock(address);
        let freed = lines.iter_mut().map(|line| line.clear_expired(now_us)).sum();
        let has_place = lines.iter().any(|line| line.free_slot().is_some());
        if has_place || self.directory.relocate(route, &mut lines) {
            return Way { made: true, freed };
        }
        drop(lines);
        Way { made: self.directory.split(route), freed }
    }

    /// How many lines there are.
    pub(crate) fn count(&self) -> usize {
        self.directory.segments() * LINES
    }

    /// Frees what has expired in the next so many lines, those that nobody is using just now, and says
    /// how much that was.
    pub(crate) fn sweep(&self, count: usize, now: Timestamp) -> usize {
        let now_us = self.since_epoch_us(now);
        let lines = self.count();
        let begin = self.cursor.fetch_add(count, Ordering::Relaxed);
        let next = (begin..).take(count.min(lines)).map(|place| place % lines);
        let swept = next.map(|place| {
            let line = self.directory.line((place / LINES, place % LINES));
            if !line.may_have_expired(now_us) {
                return 0;
            }
            // Never waits, and passes over those that this very thread holds.
            line.try_lock().map_or(0, |mut line| line.clear_expired(now_us))
        });
        swept.sum()
    }

    /// How many entries there are, those that have expired included.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        let ids =
            (0..self.segments()).flat_map(|segment| (0..LINES).map(move |line| (segment, line)));
        let used = |line: Locked<'_>| line.entries().filter(|(_, entry)| !entry.is_free()).count();
        ids.map(|id| used(self.directory.line(id).lock())).sum()
    }

    /// Splits the segment of a key.
    #[cfg(all(test, loom))]
    pub(crate) fn split(&self, address: Address) -> bool {
        self.directory.split(self.route(address))
    }

    /// How many segments there are.
    #[cfg(test)]
    pub(crate) fn segments(&self) -> usize {
        self.directory.segments()
    }
}
