//! The table of compact states: a *partial-key cuckoo table* (four slots per bucket, two candidate buckets per
//! key, the alternate by XOR; Fan et al., "Cuckoo Filter", 2014) under an *extendible-hashing directory* (Fagin
//! et al., 1979). A slot is sixteen bytes, a bucket one cache line. Readers are *optimistic*, as a seqlock's
//! are: they read, decide and validate. Writers take a lock bit per slot.
//!
//! A state that fits ([`Packed`]) lies in one of its key's two buckets. A state that does not fit, or must
//! outlive the store's own clock, lies in a shard, and the key's first bucket is marked as spilled. A key never
//! has both. A decision that writes nothing takes no lock; one that writes takes its slot's: see `bucket.rs`.
//! When both buckets of a key are full, one of their entries is relocated to its alternate bucket, where an
//! entry may be relocated first, or the segment splits: see `directory.rs`.
//!
//! An entry that has expired by the store's own clock counts as free. A call that needs its slot takes it, and
//! a call that inserts a key sweeps a few buckets.

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
#[cfg(all(test, not(loom)))]
mod tests;

use ratelimit_core::{Compact, Timestamp};
use smallvec::SmallVec;

pub(crate) use address::Address;
pub(crate) use bucket::{Locked, LockedEntry, Snapshot};
pub(crate) use directory::Route;
use directory::{BucketIndex, Directory};
pub(crate) use entry::{Entry, Packed};

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

/// The two buckets of a key, locked.
#[derive(Debug)]
pub(crate) struct Pair<'t> {
    pub(crate) route: Route<'t>,
    pub(crate) buckets: [Locked<'t>; 2],
}

impl Pair<'_> {
    /// Finds the key's bucket and slot.
    pub(crate) fn find(&mut self) -> Option<(usize, usize)> {
        let tag = self.route.tag();
        self.buckets.iter_mut().enumerate().find_map(|(at, bucket)| Some((at, bucket.find(tag)?)))
    }

    /// Returns the key's state, if the table has it.
    pub(crate) fn state(&mut self) -> Option<Packed> {
        self.find().map(|(bucket, slot)| self.buckets[bucket].get(slot).state())
    }

    /// Finds a slot whose state has expired.
    pub(crate) fn expired_place(&self, now_us: u64) -> Option<(usize, usize)> {
        self.place(|bucket| bucket.expired_slot(now_us))
    }

    /// Finds a free slot.
    #[expect(
        clippy::redundant_closure_for_method_calls,
        reason = "the method by itself is one of a single lifetime, and does not compile here"
    )]
    pub(crate) fn free_place(&self) -> Option<(usize, usize)> {
        self.place(|bucket| bucket.free_slot())
    }

    fn place(&self, slot: impl Fn(&Locked<'_>) -> Option<usize>) -> Option<(usize, usize)> {
        self.buckets.iter().enumerate().find_map(|(at, bucket)| Some((at, slot(bucket)?)))
    }
}

/// All the buckets of a batch, locked.
#[derive(Debug)]
pub(crate) struct LockedBuckets<'t> {
    pub(crate) buckets: SmallVec<[Locked<'t>; 4]>,
    /// The route of each key.
    pub(crate) routes: SmallVec<[Route<'t>; 2]>,
    /// The positions of each key's two buckets in `buckets`.
    positions: SmallVec<[[usize; 2]; 2]>,
}

impl LockedBuckets<'_> {
    /// Finds a key's bucket and slot.
    pub(crate) fn find(&mut self, key: usize) -> Option<(usize, usize)> {
        let (tag, positions) = (self.routes[key].tag(), self.positions[key]);
        positions.into_iter().find_map(|bucket| Some((bucket, self.buckets[bucket].find(tag)?)))
    }

    /// Finds a free slot for a key.
    pub(crate) fn free_place(&self, key: usize) -> Option<(usize, usize)> {
        let slot = |bucket: usize| Some((bucket, self.buckets[bucket].free_slot()?));
        self.positions[key].into_iter().find_map(slot)
    }

    /// Whether keys with the same first bucket may have states in shards.
    pub(crate) fn has_spilled(&self, key: usize) -> bool {
        self.buckets[self.positions[key][0]].has_spilled()
    }

    /// Marks the key's first bucket: the key's state lies in a shard.
    pub(crate) fn spill(&mut self, key: usize) {
        let [first, _] = self.positions[key];
        self.buckets[first].spill();
    }
}

/// The outcome of an attempt to free a slot for a key whose buckets were full.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Relocation {
    /// Whether a slot was free at the end of the attempt; another thread may have taken it since.
    pub(crate) made: bool,
    /// How many expired entries were freed.
    pub(crate) freed: usize,
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
    pub(crate) fn route(&self, address: Address) -> Route<'_> {
        self.directory.route(address)
    }

    /// Locks both buckets of a key.
    pub(crate) fn lock(&self, address: Address) -> Pair<'_> {
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
                return Pair { route, buckets };
            }
        }
    }

    /// Locks the buckets of several keys, in the global order, so that batches cannot deadlock.
    pub(crate) fn lock_all(
        &self,
        addresses: &(impl Iterator<Item = Address> + Clone),
    ) -> LockedBuckets<'_> {
        loop {
            let routes: SmallVec<[Route<'_>; 2]> =
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

    /// Makes room for a key whose buckets are full. The caller must hold no bucket's lock.
    pub(crate) fn make_way(&self, address: Address, now: Timestamp) -> Relocation {
        let now_us = self.since_epoch_us(now);
        let Pair { route, mut buckets } = self.lock(address);
        let freed = buckets.iter_mut().map(|bucket| bucket.clear_expired(now_us)).sum();
        let has_place = buckets.iter().any(|bucket| bucket.free_slot().is_some());
        if has_place || self.directory.relocate(route, &mut buckets) {
            return Relocation { made: true, freed };
        }
        drop(buckets);
        Relocation { made: self.directory.split(route), freed }
    }

    /// The number of buckets.
    pub(crate) fn count(&self) -> usize {
        self.directory.segments() * BUCKETS
    }

    /// Frees the expired entries in the next `count` buckets, skipping those that another thread has locked.
    /// Returns how many it freed.
    pub(crate) fn sweep(&self, count: usize, now: Timestamp) -> usize {
        let now_us = self.since_epoch_us(now);
        let buckets = self.count();
        let begin = self.cursor.fetch_add(count, Ordering::Relaxed);
        let next = (begin..).take(count.min(buckets)).map(|place| place % buckets);
        let swept = next.map(|place| {
            let bucket = self.directory.bucket((place / BUCKETS, place % BUCKETS));
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
        let used =
            |bucket: Locked<'_>| bucket.entries().filter(|(_, entry)| !entry.is_free()).count();
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
