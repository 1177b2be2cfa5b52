//! Room for the entries of logs. Most calls reserve the most that they can need, and give the rest
//! back. Where there is not as much, a call decides first, and then reserves what it is to write.

use ratelimit_core::Clock;
use ratelimit_core::algorithm::InMemory;
use ratelimit_core::store::Op;
use smallvec::SmallVec;

use super::{Location, LockedBatch, NextWrite};
use crate::shard::counted_entries;
use crate::store::MemoryError;
use crate::sync::lock;

impl<A: InMemory, C: Clock> LockedBatch<'_, '_, A, C> {
    /// The most entries that the batch can add.
    fn most_added(&self) -> usize {
        if !matches!(self.batch.operation(), Op::Acquire | Op::Force | Op::Renew | Op::Adopt) {
            return 0;
        }
        self.batch.checks().iter().map(|check| check.limit.algorithm().entries_per_step()).sum()
    }

    /// Reserves the most entries that the batch can add. If there is not as much room, or the batch
    /// uses shared states, it is to reserve exactly what it writes instead, with the overflow
    /// states locked.
    pub(super) fn reserve_most_entries(&mut self) {
        let most = self.most_added();
        if most > 0 && (self.overflow.is_some() || !self.spare_entries.add(most)) {
            // A new key may have to use a shared state, and reservations are locked after these.
            self.overflow.get_or_insert_with(|| lock(&self.store.overflow));
            self.is_tight = true;
        }
    }

    /// Whether the batch may need more entries than there is room for.
    pub(super) fn lacks_entries(&self) -> bool {
        let most = self.most_added();
        most > 0 && !self.store.capacity.entries.has(most)
    }

    /// Reserves exactly the entries that the decision writes, if they were not reserved before. A
    /// key that has no more than its part of them needs no room: otherwise, one caller's log could
    /// turn all others away. Returns `false` where there is no room for those of new keys: these
    /// use the shared states now, which have entries of their own, and the batch has to be decided
    /// anew.
    pub(super) fn reserve_exact_entries(&mut self) -> Result<bool, MemoryError> {
        if !self.is_tight {
            return Ok(true);
        }
        let is_shared = |position: &usize| self.located[*position].location == Location::Overflow;
        let (shared, mut own): (SmallVec<[usize; 2]>, SmallVec<[usize; 2]>) =
            (0..self.located.len()).filter(|at| self.growth(*at) > 0).partition(is_shared);
        own.retain(|at| self.entries_after(*at) > self.store.capacity.entries_of_a_key);
        let sum = |positions: &[usize]| positions.iter().map(|at| self.growth(*at)).sum::<usize>();
        let capacity = &self.store.capacity;
        let kept = self.overflow.as_ref().map_or(0, |overflow| overflow.entries());
        let fits = kept.saturating_add(sum(&shared)) <= capacity.most_shared_entries;
        let own_entries = sum(&own);
        if (shared.is_empty() || fits) && self.spare_entries.add(own_entries) {
            return Ok(true);
        }
        let is_new = |at: &usize| self.located[*at].location == Location::New;
        let new_keys: SmallVec<[usize; 2]> = own.into_iter().filter(is_new).collect();
        if new_keys.is_empty() || !(shared.is_empty() || fits) {
            return Err(MemoryError::Entries { most: capacity.most_entries() });
        }
        for position in new_keys {
            self.share(position);
        }
        self.located.iter_mut().for_each(|located| located.next = NextWrite::Same);
        self.next_reservations.clear();
        Ok(false)
    }

    /// By how many entries a check's state grows.
    fn growth(&self, position: usize) -> usize {
        let before = self.state_before(position).map_or(0, counted_entries::<A>) as usize;
        self.entries_after(position).saturating_sub(before)
    }

    /// How many entries a check's state has, if it is written.
    fn entries_after(&self, position: usize) -> usize {
        let NextWrite::Put { entries, .. } = self.located[position].next else { return 0 };
        entries as usize
    }
}
