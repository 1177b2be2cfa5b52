//! The table of compact states: a *partial-key cuckoo table* (four slots per bucket, two candidate
//! buckets per key, the alternate by XOR; Fan et al., "Cuckoo Filter", 2014) under an
//! *extendible-hashing directory* (Fagin et al., 1979). A slot is sixteen bytes, a bucket one cache
//! line. Readers are *optimistic*, as a seqlock's are: they read, decide and validate. Writers take
//! a lock bit per slot.
//!
//! A state that fits ([`Packed`]) lies in one of its key's two buckets. A state that does not fit,
//! or must outlive the store's own clock, lies in a shard, and the key's first bucket is marked as
//! spilled. A key never has both. A decision that writes nothing takes no lock; one that writes
//! takes its slot's: see `bucket.rs`. When both buckets of a key are full, one of their entries is
//! relocated to its alternate bucket, where an entry may be relocated first, or the segment splits:
//! see `directory.rs`.
//!
//! An entry that has expired by the store's own clock counts as free. A call that needs its slot
//! takes it, and a call that inserts a key sweeps a few buckets.
//!
//! With many keys, cache misses dominate; both candidate buckets are prefetched together. A
//! processor looks some three hundred instructions ahead, so a decision that fits overlaps its two
//! misses. Instructions therefore count: no branch depends on the slot, and rare cases are compiled
//! out of line.

#![allow(
    clippy::inline_always,
    reason = "all of it is a part of one decision of some forty nanoseconds: measured, calls took a quarter of it"
)]

mod address;
mod bucket;
mod directory;
mod entry;

#[cfg(all(test, loom))]
mod loom_cuckoo;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;

use std::borrow::BorrowMut;

use ratelimit_core::Timestamp;
use ratelimit_core::for_memory::Compact;
use smallvec::SmallVec;

pub(crate) use address::Address;
use bucket::BucketGuard;
pub(crate) use bucket::{OptimisticRead, SlotGuard};
pub(crate) use directory::KeyRoute;
use directory::{BucketIndex, Directory};
pub(crate) use entry::{Packed, SlotEntry};

use crate::sync::{AtomicUsize, Ordering};

/// Buckets in a segment, a power of two: 32 KiB.
const MOST_BUCKETS: usize = 512;
/// Buckets in a segment; tests have smaller segments, so that these split.
const BUCKETS: usize = if cfg!(test) { 4 } else { MOST_BUCKETS };
/// About how many entries a segment has when it splits. The directory's size follows from it.
const FULL_SLOTS: usize = BUCKETS * bucket::SLOTS * 3 / 4;
/// How long before the store's creation its epoch lies: the clock may go back by as much.
const BEFORE_US: u64 = 3_600_000_000;

/// The table.
#[derive(Debug)]
pub(crate) struct CuckooTable {
    directory: Directory,
    /// The time that entries count from.
    epoch: Timestamp,
    /// The next bucket to sweep.
    cursor: AtomicUsize,
}

/// A slot of a key's buckets: the first bucket's or its alternate's, and its number there.
pub(crate) type SlotIndex = (usize, usize);

/// The outcome of an insertion into a key's buckets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Insertion {
    /// The entry was inserted.
    Done,
    /// There is a free slot, but no room for one more entry.
    Refused,
    /// Both buckets are full.
    Crowded,
}

/// The two buckets of a key, locked: by guards of its own, or by those of a batch.
#[derive(Debug)]
pub(crate) struct LockedPair<'t, B = BucketGuard<'t>> {
    route: KeyRoute<'t>,
    buckets: [B; 2],
}

impl<'t, B: BorrowMut<BucketGuard<'t>>> LockedPair<'t, B> {
    /// The first such slot of both buckets.
    fn place(&mut self, slot: impl Fn(&mut BucketGuard<'t>) -> Option<usize>) -> Option<SlotIndex> {
        let mut buckets = self.buckets.iter_mut().enumerate();
        buckets.find_map(|(at, bucket)| Some((at, slot(bucket.borrow_mut())?)))
    }

    /// Finds the key's entry.
    pub(crate) fn find(&mut self) -> Option<SlotIndex> {
        let tag = self.route.tag();
        self.place(|bucket| bucket.find(tag))
    }

    /// Returns the key's state, if the table has it.
    pub(crate) fn state(&mut self) -> Option<Packed> {
        self.find().map(|index| self.get(index))
    }

    /// The state in a slot.
    pub(crate) fn get(&self, (bucket, slot): SlotIndex) -> Packed {
        self.buckets[bucket].borrow().get(slot).state()
    }

    /// Writes a state over the key's entry.
    pub(crate) fn set(&mut self, (bucket, slot): SlotIndex, state: Packed) {
        let entry = SlotEntry::new(self.route.tag(), state);
        self.buckets[bucket].borrow_mut().set(slot, entry);
    }

    /// Frees a slot. Returns `false` if it is free.
    pub(crate) fn clear(&mut self, (bucket, slot): SlotIndex) -> bool {
        let bucket = self.buckets[bucket].borrow_mut();
        let is_used = !bucket.get(slot).is_free();
        bucket.clear(slot);
        is_used
    }

    /// Inserts a state of the key, which has none: over an entry that has expired by `now_us`, or
    /// into a free slot if `may_add` reserves room for one more entry.
    pub(crate) fn insert(
        &mut self,
        state: Packed,
        now_us: Option<u64>,
        may_add: impl FnOnce() -> bool,
    ) -> Insertion {
        let index = if let Some(expired) = self.place(|bucket| bucket.expired_slot(now_us?)) {
            expired
        } else {
            let free = self.place(|bucket| bucket.free_slot());
            let Some(free) = free else { return Insertion::Crowded };
            if !may_add() {
                return Insertion::Refused;
            }
            free
        };
        self.set(index, state);
        Insertion::Done
    }

    /// Whether keys with the same first bucket may have states in shards.
    pub(crate) fn has_spilled(&self) -> bool {
        self.buckets[0].borrow().has_spilled()
    }

    /// Marks the first bucket: the key's state lies in a shard.
    pub(crate) fn spill(&mut self) {
        self.buckets[0].borrow_mut().spill();
    }
}

/// All the buckets of a batch, locked.
#[derive(Debug)]
pub(crate) struct LockedBuckets<'t> {
    buckets: SmallVec<[BucketGuard<'t>; 4]>,
    /// The route of each key.
    routes: SmallVec<[KeyRoute<'t>; 2]>,
    /// The positions of each key's two buckets in `buckets`.
    positions: SmallVec<[[usize; 2]; 2]>,
}

impl<'t> LockedBuckets<'t> {
    /// The two buckets of a key. There are two, because they differ.
    pub(crate) fn pair(&mut self, key: usize) -> Option<LockedPair<'t, &mut BucketGuard<'t>>> {
        let buckets = self.buckets.get_disjoint_mut(self.positions[key]).ok()?;
        Some(LockedPair { route: self.routes[key], buckets })
    }

    /// Frees the expired entries of all buckets, and returns how many there were.
    pub(crate) fn clear_expired(&mut self, now_us: u64) -> usize {
        self.buckets.iter_mut().map(|bucket| bucket.clear_expired(now_us)).sum()
    }
}

impl CuckooTable {
    /// Creates a table for at most `capacity` keys, in a store that is built at `now`.
    pub(crate) fn new(capacity: usize, now: Timestamp) -> Self {
        let epoch = Timestamp::saturating_from_us(now.as_us().saturating_sub(BEFORE_US));
        Self { directory: Directory::new(capacity), epoch, cursor: AtomicUsize::new(0) }
    }

    /// The microseconds since the epoch; 0 before it.
    #[inline(always)]
    pub(crate) fn since_epoch_us(&self, now: Timestamp) -> u64 {
        self.now_since_epoch(now).map_or(0, Timestamp::as_us)
    }

    /// The time since the epoch, unless `now` lies before it.
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
    pub(crate) fn route(&self, address: Address) -> KeyRoute<'_> {
        self.directory.route(address)
    }

    /// Locks both buckets of a key.
    pub(crate) fn lock(&self, address: Address) -> LockedPair<'_> {
        loop {
            let route = self.route(address);
            let ([first, second], [first_id, second_id]) = (route.buckets(), route.ids());
            let buckets = if first_id < second_id {
                [first.lock(), second.lock()]
            } else {
                let second = second.lock();
                [first.lock(), second]
            };
            if route.is_still() {
                return LockedPair { route, buckets };
            }
        }
    }

    /// Locks the buckets of several keys, in the global order, so that batches cannot deadlock.
    pub(crate) fn lock_all(
        &self,
        addresses: &(impl Iterator<Item = Address> + Clone),
    ) -> LockedBuckets<'_> {
        loop {
            let routes: SmallVec<[KeyRoute<'_>; 2]> =
                addresses.clone().map(|address| self.route(address)).collect();
            let mut ids: SmallVec<[BucketIndex; 4]> =
                routes.iter().flat_map(|route| route.ids()).collect();
            ids.sort_unstable();
            ids.dedup();
            let buckets = ids.iter().map(|id| self.directory.bucket(*id).lock()).collect();
            if routes.iter().all(|route| route.is_still()) {
                let position = |id: BucketIndex| ids.partition_point(|other| *other < id);
                let positions = routes.iter().map(|route| route.ids().map(position)).collect();
                return LockedBuckets { buckets, routes, positions };
            }
        }
    }

    /// Frees a slot for a key whose buckets are full. Returns whether there is one now; another
    /// thread may take it. The caller must hold no bucket's lock.
    pub(crate) fn make_room(&self, address: Address) -> bool {
        let LockedPair { route, mut buckets } = self.lock(address);
        let has_place = buckets.iter().any(|bucket| bucket.free_slot().is_some());
        if has_place || self.directory.relocate(route, &mut buckets) {
            return true;
        }
        drop(buckets);
        self.directory.split(route)
    }

    /// Frees the expired entries in the next `count` buckets, skipping those that another thread
    /// has locked. Returns how many it freed.
    pub(crate) fn sweep(&self, count: usize, now: Timestamp) -> usize {
        let now_us = self.since_epoch_us(now);
        let buckets = self.directory.segments() * BUCKETS;
        let begin = self.cursor.fetch_add(count, Ordering::Relaxed);
        let next = (begin..).take(count.min(buckets)).map(|index| index % buckets);
        let swept = next.map(|index| {
            let bucket = self.directory.bucket((index / BUCKETS, index % BUCKETS));
            if !bucket.may_have_expired(now_us) {
                return 0;
            }
            // Never waits, and skips buckets that this very thread has locked.
            bucket.try_lock().map_or(0, |mut bucket| bucket.clear_expired(now_us))
        });
        swept.sum()
    }

    /// The number of entries, including expired ones.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        let ids = (0..self.segments())
            .flat_map(|segment| (0..BUCKETS).map(move |bucket| (segment, bucket)));
        let used = |bucket: BucketGuard<'_>| {
            (0..bucket::SLOTS).filter(|slot| !bucket.get(*slot).is_free()).count()
        };
        ids.map(|id| used(self.directory.bucket(id).lock())).sum()
    }

    /// Splits the segment of a key.
    #[cfg(all(test, loom))]
    pub(crate) fn split(&self, address: Address) -> bool {
        self.directory.split(self.route(address))
    }

    /// The number of segments.
    #[cfg(test)]
    pub(crate) fn segments(&self) -> usize {
        self.directory.segments()
    }
}
