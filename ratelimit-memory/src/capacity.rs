//! [`Capacity`]: how many keys, reservations and entries a store has, and may have; [`Reserved`]: room that is
//! counted before it is used.

use ratelimit_core::Timestamp;

use crate::shard::{Freed, Shard};
use crate::sync::{AtomicUsize, Ordering};

/// One in this many of all entries is kept for the shared states.
const SHARED_PART: usize = 16;

/// The counters of a store.
#[derive(Debug)]
pub(crate) struct Capacity {
    /// Keys in the store, and places reserved for new ones. Never above `most_keys`.
    keys: AtomicUsize,
    /// How many of the keys have states in shards.
    in_shards: AtomicUsize,
    /// Reservations in the store, and places reserved for new ones. Never above `most_reservations`.
    reservations: AtomicUsize,
    /// Entries of the states in shards, and room reserved for new ones. With the entries of shared states,
    /// never above `most_entries`.
    entries: AtomicUsize,
    most_keys: usize,
    most_reservations: usize,
    most_entries: usize,
}

impl Capacity {
    pub(crate) fn new(most_keys: usize, most_reservations: usize, most_entries: usize) -> Self {
        let [keys, in_shards, reservations, entries] = std::array::from_fn(|_| AtomicUsize::new(0));
        Self { keys, in_shards, reservations, entries, most_keys, most_reservations, most_entries }
    }

    pub(crate) fn keys(&self) -> usize {
        self.keys.load(Ordering::Relaxed)
    }

    pub(crate) fn in_shards(&self) -> usize {
        self.in_shards.load(Ordering::Relaxed)
    }

    pub(crate) fn reservations(&self) -> usize {
        self.reservations.load(Ordering::Relaxed)
    }

    /// Without the entries of shared states.
    pub(crate) fn entries(&self) -> usize {
        self.entries.load(Ordering::Relaxed)
    }

    pub(crate) const fn most_keys(&self) -> usize {
        self.most_keys
    }

    pub(crate) const fn most_reservations(&self) -> usize {
        self.most_reservations
    }

    pub(crate) const fn most_entries(&self) -> usize {
        self.most_entries
    }

    /// The entries that only shared states may use.
    pub(crate) const fn most_shared_entries(&self) -> usize {
        self.most_entries.div_ceil(SHARED_PART)
    }

    const fn most_own_entries(&self) -> usize {
        self.most_entries - self.most_shared_entries()
    }

    /// Whether there is no room for `new_keys` more keys.
    pub(crate) fn is_full(&self, new_keys: usize) -> bool {
        self.keys().saturating_add(new_keys) > self.most_keys
    }

    /// Whether there is no room for `more` reservations.
    pub(crate) fn is_full_of_reservations(&self, more: usize) -> bool {
        self.reservations().saturating_add(more) > self.most_reservations
    }

    pub(crate) fn has_room_for(&self, entries: usize) -> bool {
        self.entries().saturating_add(entries) <= self.most_own_entries()
    }

    /// An empty [`Reserved`], to which room is then added.
    pub(crate) const fn reserve(&self) -> Reserved<'_> {
        Reserved { of: self, keys: 0, reservations: 0, entries: 0 }
    }

    /// Gives back the places of so many keys.
    pub(crate) fn release(&self, keys: usize) {
        if keys > 0 {
            self.keys.fetch_sub(keys, Ordering::Relaxed);
        }
    }

    fn release_reservations(&self, reservations: usize) {
        if reservations > 0 {
            self.reservations.fetch_sub(reservations, Ordering::Relaxed);
        }
    }

    fn release_entries(&self, entries: usize) {
        if entries > 0 {
            self.entries.fetch_sub(entries, Ordering::Relaxed);
        }
    }

    /// Counts a state that has moved from its shard to a bucket.
    pub(crate) fn leave_shard(&self) {
        self.in_shards.fetch_sub(1, Ordering::Relaxed);
    }

    /// Counts a state that is written to a shard.
    pub(crate) fn enter_shard(&self) {
        self.in_shards.fetch_add(1, Ordering::Relaxed);
    }

    /// Gives back the places of so many keys whose states lay in shards.
    pub(crate) fn release_from_shard(&self, keys: usize) {
        if keys > 0 {
            self.in_shards.fetch_sub(keys, Ordering::Relaxed);
            self.release(keys);
        }
    }

    /// Sweeps the next slots of a shard of states.
    #[inline]
    pub(crate) fn sweep<S>(&self, shard: &mut Shard<S>, now: Timestamp, slots: usize) {
        shard.sweep(
            now,
            slots,
            &mut Swept { of: self, reservations: false, freed: Freed::default() }.freed,
        );
    }

    /// Sweeps the next slots of a shard of reservations.
    pub(crate) fn sweep_reservations<S>(&self, shard: &mut Shard<S>, now: Timestamp, slots: usize) {
        shard.sweep(
            now,
            slots,
            &mut Swept { of: self, reservations: true, freed: Freed::default() }.freed,
        );
    }
}

/// The room that a sweep frees. It is given back when the sweep ends, even by a panic of a state that is
/// dropped.
struct Swept<'c> {
    of: &'c Capacity,
    reservations: bool,
    freed: Freed,
}

impl Drop for Swept<'_> {
    #[inline]
    fn drop(&mut self) {
        let Freed { slots, entries } = self.freed;
        if slots == 0 {
            return;
        }
        if self.reservations {
            self.of.release_reservations(slots);
        } else {
            self.of.release_from_shard(slots);
            self.of.release_entries(entries);
        }
    }
}

/// Room that is counted and not used yet. The room that is left is given back on drop: whether it was not
/// needed, the call ends in an error, or foreign code panics.
#[derive(Debug)]
pub(crate) struct Reserved<'c> {
    of: &'c Capacity,
    keys: usize,
    reservations: usize,
    entries: usize,
}

impl Reserved<'_> {
    /// Reserves a place for one more key. Returns `false` if there is none.
    pub(crate) fn add_key(&mut self) -> bool {
        let added = one_more(&self.of.keys, self.of.most_keys);
        self.keys += usize::from(added);
        added
    }

    /// Reserves a place for one more reservation. Returns `false` if there is none.
    pub(crate) fn add_reservation(&mut self) -> bool {
        let added = one_more(&self.of.reservations, self.of.most_reservations);
        self.reservations += usize::from(added);
        added
    }

    /// Gives back the places for reservations.
    pub(crate) fn release_reservations(&mut self) {
        self.of.release_reservations(std::mem::take(&mut self.reservations));
    }

    /// Reserves room for so many more entries. Returns `false` if there is not as much.
    #[inline]
    pub(crate) fn add_entries(&mut self, more: usize) -> bool {
        if more == 0 {
            return true;
        }
        let most = self.of.most_own_entries();
        let with_more = |kept: usize| kept.checked_add(more).filter(|sum| *sum <= most);
        let added =
            self.of.entries.fetch_update(Ordering::Relaxed, Ordering::Relaxed, with_more).is_ok();
        self.entries += if added { more } else { 0 };
        added
    }

    /// Gives back a place for a key that is not needed.
    pub(crate) fn release_key(&mut self) {
        if self.take_key() {
            self.of.release(1);
        }
    }

    /// Uses a place for a key, which stays counted. Returns `false` if none is reserved.
    pub(crate) const fn take_key(&mut self) -> bool {
        let is_left = self.keys > 0;
        self.keys -= is_left as usize;
        is_left
    }

    /// Uses a place for a reservation, which stays counted. Returns `false` if none is reserved.
    pub(crate) const fn take_reservation(&mut self) -> bool {
        let is_left = self.reservations > 0;
        self.reservations -= is_left as usize;
        is_left
    }

    /// Uses room for a state that had `before` entries and has `now`.
    #[inline]
    pub(crate) fn keep_entries(&mut self, before: usize, now: usize) {
        let spare = self.entries + before;
        // Entries beyond the number that the algorithm announced are counted all the same.
        if let Some(more @ 1..) = now.checked_sub(spare) {
            self.of.entries.fetch_add(more, Ordering::Relaxed);
        }
        self.entries = spare.saturating_sub(now);
    }
}

/// Counts one more. Returns `false` if there are `most` already.
fn one_more(counter: &AtomicUsize, most: usize) -> bool {
    let add = |count| (count < most).then_some(count + 1);
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).is_ok()
}

impl Drop for Reserved<'_> {
    #[inline]
    fn drop(&mut self) {
        self.of.release(self.keys);
        self.of.release_reservations(self.reservations);
        self.of.release_entries(self.entries);
    }
}
