//! Room for the entries of logs. Most calls reserve the most that they can need, and give the rest back. Where
//! there is not as much, a trial decision counts what the batch would write.

use ratelimit_core::{Batch, Clock, InMemory, Reservation, States, Timestamp, Write};
use smallvec::SmallVec;

use super::{LockedBatch, Place, shared};
use crate::shard::counted_entries;
use crate::store::{MemoryError, adds_entries};
use crate::sync::lock;

/// A trial decision of a batch, which writes nothing.
struct Trial<'t, 's, 'h, A: InMemory, C> {
    batch: &'t LockedBatch<'s, 'h, A, C>,
    /// By how many entries each state would grow.
    growth: SmallVec<[usize; 2]>,
}

impl<A: InMemory, C: Clock> States<A::State> for Trial<'_, '_, '_, A, C> {
    fn get(&self, position: usize) -> Option<&A::State> {
        self.batch.get(position)
    }

    fn put(&mut self, position: usize, write: Write<A::State>) {
        let placed = &self.batch.placed;
        if placed[position].place == Place::Overflow {
            // Of the checks that share a state, only the last one's write stays.
            let hash = placed[position].hash;
            let has_it = |other: &usize| {
                placed[*other].place == Place::Overflow && placed[*other].hash == hash
            };
            (0..position).filter(has_it).for_each(|other| self.growth[other] = 0);
        }
        let before = self.batch.get(position);
        let entries = |state: Option<&A::State>| state.map_or(0, counted_entries::<A>);
        self.growth[position] = entries(write.after(before)).saturating_sub(entries(before));
    }

    fn reservation(&self, position: usize) -> Option<Reservation> {
        self.batch.reservation(position)
    }

    fn fingerprint(&self) -> u64 {
        self.batch.fingerprint()
    }

    fn put_reservation(&mut self, _: usize, _: Reservation, _: Timestamp) {}
}

/// The most entries that a batch can add.
fn most_added<A: InMemory>(batch: &Batch<'_, A>) -> usize {
    if !adds_entries(batch.operation()) {
        return 0;
    }
    batch.checks().iter().map(|check| check.limit.algorithm().entries_per_step()).sum()
}

impl<A: InMemory, C: Clock> LockedBatch<'_, '_, A, C> {
    /// Reserves the most entries that the batch can add. If there is not as much room, or the batch uses shared
    /// states, it marks the batch for a trial decision instead, with the overflow states locked.
    pub(super) fn reserve_most_entries(&mut self, batch: &Batch<'_, A>) {
        let (store, most) = (self.store, most_added(batch));
        if most == 0 {
            return;
        }
        if self.overflow.is_none() {
            if self.reserved.add_entries(most) {
                return;
            }
            // Shards are locked before the overflow states, and another check's state may have to go to one.
            if self.shards.is_none() {
                self.lock_shards();
            }
            // A new key may have to use a shared state, and reservations are locked after these.
            self.overflow = Some(lock(&store.overflow));
        }
        self.is_tight = true;
    }

    /// Whether the batch may need more entries than there is room for.
    pub(super) fn lacks_entries(&self, batch: &Batch<'_, A>) -> bool {
        let most = most_added(batch);
        most > 0 && !self.store.capacity.has_room_for(most)
    }

    /// Reserves exactly the entries that the batch will add, if they were not reserved before. Where there is
    /// no room, new keys get the shared states, which have entries of their own.
    pub(super) fn reserve_exact_entries(
        &mut self,
        batch: &Batch<'_, A>,
        now: Timestamp,
    ) -> Result<(), MemoryError> {
        if !self.is_tight {
            return Ok(());
        }
        loop {
            let growth = SmallVec::from_elem(0, self.placed.len());
            let parts = self.shared(batch, now);
            let mut trial = Trial { batch: self, growth };
            let _ = shared::decide(parts, batch, now, &mut trial)?;
            let growth = trial.growth;
            let is_shared = |position: &usize| self.placed[*position].place == Place::Overflow;
            let (shared, own): (SmallVec<[usize; 2]>, SmallVec<[usize; 2]>) =
                (0..growth.len()).filter(|position| growth[*position] > 0).partition(is_shared);
            let sum = |positions: &[usize]| positions.iter().map(|at| growth[*at]).sum::<usize>();
            if !self.has_shared_room(sum(&shared)) {
                return Err(self.no_room());
            }
            if self.reserved.add_entries(sum(&own)) {
                return Ok(());
            }
            let is_new =
                |at: &usize| matches!(self.placed[*at].place, Place::New | Place::Reserved);
            let new_keys: SmallVec<[usize; 2]> = own.into_iter().filter(is_new).collect();
            if new_keys.is_empty() {
                return Err(self.no_room());
            }
            for position in new_keys {
                self.share(batch, position);
            }
        }
    }

    fn has_shared_room(&self, more: usize) -> bool {
        let Some(overflow) = &self.overflow else { return more == 0 };
        more == 0
            || overflow.entries().saturating_add(more) <= self.store.capacity.most_shared_entries()
    }

    const fn no_room(&self) -> MemoryError {
        MemoryError::Entries { most: self.store.capacity.most_entries() }
    }
}
