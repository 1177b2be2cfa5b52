//! [`Capacity`]: how many keys, reservations and entries a store has, and may have;
//! [`ReservedRoom`]: room that is counted before it is used.

use ratelimit_core::Timestamp;

use crate::shard::Shard;
use crate::sync::{AtomicUsize, Ordering};

/// One in this many of all entries is kept for the shared states.
const SHARED_PART: usize = 16;

/// A counter of what is in use and what is reserved for use, which never exceeds `most`.
#[derive(Debug)]
pub(crate) struct Room {
    used: AtomicUsize,
    pub(crate) most: usize,
}

impl Room {
    fn new(most: usize) -> Self {
        Self { used: AtomicUsize::new(0), most }
    }

    pub(crate) fn used(&self) -> usize {
        self.used.load(Ordering::Relaxed)
    }

    /// Whether there is room for so many more.
    pub(crate) fn has(&self, more: usize) -> bool {
        self.used().saturating_add(more) <= self.most
    }

    /// Counts so many more, whether there is room for them or not.
    pub(crate) fn count(&self, more: usize) {
        self.used.fetch_add(more, Ordering::Relaxed);
    }

    pub(crate) fn release(&self, count: usize) {
        if count > 0 {
            self.used.fetch_sub(count, Ordering::Relaxed);
        }
    }

    /// An empty [`ReservedRoom`], to which room is then added.
    pub(crate) const fn reserve(&self) -> ReservedRoom<'_> {
        ReservedRoom { of: self, spare: 0 }
    }
}

/// The counters of a store.
#[derive(Debug)]
pub(crate) struct Capacity {
    pub(crate) keys: Room,
    /// The keys that have states in shards, without a cap of their own.
    pub(crate) in_shards: Room,
    pub(crate) reservations: Room,
    /// The entries of the states in shards, without those of shared states.
    pub(crate) entries: Room,
    /// The entries that only shared states may use.
    pub(crate) most_shared_entries: usize,
    /// The entries that a key may always have, however many others have: its part of all.
    pub(crate) entries_of_a_key: usize,
}

impl Capacity {
    pub(crate) fn new(most_keys: usize, most_reservations: usize, most_entries: usize) -> Self {
        let most_shared_entries = most_entries.div_ceil(SHARED_PART);
        Self {
            keys: Room::new(most_keys),
            in_shards: Room::new(usize::MAX),
            reservations: Room::new(most_reservations),
            entries: Room::new(most_entries - most_shared_entries),
            most_shared_entries,
            entries_of_a_key: most_entries / most_keys,
        }
    }

    pub(crate) const fn most_entries(&self) -> usize {
        self.entries.most + self.most_shared_entries
    }

    /// Gives back the place of a key whose state lay in a shard.
    pub(crate) fn release_from_shard(&self) {
        self.in_shards.release(1);
        self.keys.release(1);
    }

    /// Sweeps the next slots of a shard of states. The room of each is given back before its state
    /// is dropped, which may panic.
    #[inline]
    pub(crate) fn sweep<S>(&self, shard: &mut Shard<S>, now: Timestamp, slots: usize) {
        shard.sweep(now, slots, |entries| {
            self.release_from_shard();
            self.entries.release(entries as usize);
        });
    }

    /// Sweeps the next slots of a shard of reservations.
    pub(crate) fn sweep_reservations<S>(&self, shard: &mut Shard<S>, now: Timestamp, slots: usize) {
        shard.sweep(now, slots, |_| self.reservations.release(1));
    }
}

/// Room that is counted and not used yet. The room that is left is given back on drop: whether it
/// was not needed, the call ends in an error, or foreign code panics.
#[derive(Debug)]
pub(crate) struct ReservedRoom<'c> {
    of: &'c Room,
    spare: usize,
}

impl ReservedRoom<'_> {
    /// Reserves room for so many more. Returns `false`, and reserves none, if there is not as much.
    #[inline]
    pub(crate) fn add(&mut self, more: usize) -> bool {
        if more == 0 {
            return true;
        }
        let with_more = |used: usize| used.checked_add(more).filter(|sum| *sum <= self.of.most);
        let used = &self.of.used;
        let added = used.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with_more).is_ok();
        self.spare += if added { more } else { 0 };
        added
    }

    /// Uses room for one, which stays counted. Returns `false` if none is reserved.
    pub(crate) const fn take(&mut self) -> bool {
        let is_left = self.spare > 0;
        self.spare -= is_left as usize;
        is_left
    }

    /// Uses room for what took room for `before` and takes room for `now`. What was not reserved is
    /// counted all the same: an algorithm may write more entries than it announced.
    #[inline]
    pub(crate) fn keep(&mut self, before: u32, now: u32) {
        let (spare, now) = (self.spare + before as usize, now as usize);
        if let Some(more @ 1..) = now.checked_sub(spare) {
            self.of.count(more);
        }
        self.spare = spare.saturating_sub(now);
    }
}

impl Drop for ReservedRoom<'_> {
    #[inline]
    fn drop(&mut self) {
        self.of.release(self.spare);
    }
}
