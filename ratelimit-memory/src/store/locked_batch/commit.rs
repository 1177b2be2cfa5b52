//! Writes what was decided. No foreign code runs here: no step, no question to an algorithm, no clock, and no
//! state is dropped.

use ratelimit_core::{Clock, InMemory};

use super::{LockedBatch, Next, Pending, Place};
use crate::cuckoo::{Address, Insertion, Packed};
use crate::shard::{Shard, shard_of};

impl<A: InMemory, C: Clock> LockedBatch<'_, '_, A, C> {
    /// Writes all that the decision noted.
    pub(super) fn commit(&mut self) {
        for position in 0..self.placed.len() {
            let placed = &mut self.placed[position];
            match std::mem::replace(&mut placed.next, Next::Same) {
                Next::Same | Next::Replaced(_) => {}
                Next::Removed => self.remove(position),
                Next::Put(state, pending) if placed.place == Place::Overflow => {
                    self.put_in_overflow(position, state, pending);
                }
                Next::Put(state, pending) => {
                    let is_in_table =
                        pending.packed.is_some_and(|packed| self.put_in_table(position, packed));
                    if is_in_table {
                        self.placed[position].next = Next::Replaced(state);
                    } else {
                        self.put_in_shard(position, state, pending);
                    }
                }
            }
        }
        if let Some(reservations) = &mut self.reservations {
            for (position, reservation, sweep_at) in self.next_reservations.drain(..) {
                reservations.put(position, reservation, sweep_at, &mut self.reserved);
            }
        }
    }

    /// Unlocks everything, and then makes room for the keys whose buckets were full, so that their next write
    /// finds a slot there. Reserved room that is left is given back.
    pub(super) fn end(mut self) {
        if self.is_swept_at_the_end {
            self.sweep_shards();
        }
        let Self { store, placed, reservations, overflow, shards, table, reserved, .. } = self;
        drop((reservations, overflow, shards, table, reserved));
        if let Some(table) = &store.table {
            for address in self.crowded {
                store.capacity.release(table.make_room(address, self.own).freed);
            }
        }
        drop((placed, self.moved));
    }

    /// The shard of a key. It locks the batch's shards if no lock that comes after them is held. They are swept
    /// at the end then, because a sweep drops states.
    fn shard(&mut self, key: usize) -> Option<&mut Shard<A::State>> {
        if self.shards.is_none() && self.overflow.is_none() && self.reservations.is_none() {
            self.shards = Some(self.locked_shards());
            self.is_swept_at_the_end = true;
        }
        let place = shard_of(self.placed[key].hash, self.store.shards.len());
        let locked = self.shards.as_mut()?;
        let position = locked.position(place);
        locked.shards.get_mut(position).map(|shard| &mut **shard)
    }

    /// Writes a state to a bucket, if the key has a slot there or finds one.
    fn put_in_table(&mut self, key: usize, packed: Packed) -> bool {
        let Some((_, buckets)) = &mut self.table else { return false };
        let place = self.placed[key].place;
        if let Place::Bucket(place) = place {
            buckets.set(key, place, packed);
            return true;
        }
        if buckets.insert(key, packed) != Insertion::Done {
            self.crowded.push(Address::new(self.placed[key].hash));
            return false;
        }
        match place {
            Place::Reserved => _ = self.reserved.take_key(),
            Place::Shard(slot) => {
                if let Some((state, entries)) = self.shard(key).and_then(|shard| shard.clear(slot))
                {
                    self.reserved.keep_entries(entries, 0);
                    self.moved.push(state);
                    self.store.capacity.leave_shard();
                }
            }
            _ => {}
        }
        true
    }

    /// Writes a state to the key's shard, and removes it from its bucket.
    fn put_in_shard(&mut self, key: usize, state: A::State, pending: Pending) {
        let hash = self.placed[key].hash;
        let Pending { entries, sweep_at, .. } = pending;
        let Some(shard) = self.shard(key) else { return };
        let (slot, replaced) = if let Some(slot) = shard.find(hash) {
            (slot, shard.replace(slot, state, entries, sweep_at))
        } else {
            let slot = shard.insert(hash, state, entries, sweep_at);
            self.store.capacity.enter_shard();
            if self.placed[key].place == Place::Reserved {
                self.reserved.take_key();
            }
            (slot, None)
        };
        self.reserved.keep_entries(replaced.as_ref().map_or(0, |replaced| replaced.1), entries);
        // The bucket of a key that was found in its shard is marked already.
        if let (Some((_, buckets)), place @ (Place::Bucket(_) | Place::Reserved | Place::New)) =
            (&mut self.table, self.placed[key].place)
        {
            buckets.spill(key);
            if let Place::Bucket(place) = place {
                buckets.clear(place);
            }
        }
        self.placed[key].place = Place::Shard(slot);
        if let Some((before, _)) = replaced {
            self.placed[key].next = Next::Replaced(before);
        }
    }

    fn put_in_overflow(&mut self, key: usize, state: A::State, pending: Pending) {
        let hash = self.placed[key].hash;
        let Pending { entries, sweep_at, .. } = pending;
        let Some(overflow) = &mut self.overflow else { return };
        let Some(slot) = overflow.find(hash) else {
            overflow.insert(hash, state, entries, sweep_at);
            return;
        };
        if let Some((before, _)) = overflow.replace(slot, state, entries, sweep_at) {
            self.placed[key].next = Next::Replaced(before);
        }
    }

    fn remove(&mut self, key: usize) {
        match self.placed[key].place {
            // If two keys of the batch meet, the other check may have freed this slot: then nothing is freed
            // again.
            Place::Bucket(place) => {
                if let Some((_, buckets)) = &mut self.table
                    && buckets.get(place).is_some()
                {
                    buckets.clear(place);
                    self.store.capacity.release(1);
                }
            }
            Place::Shard(slot) => {
                if let Some((state, entries)) = self.shard(key).and_then(|shard| shard.clear(slot))
                {
                    self.reserved.keep_entries(entries, 0);
                    self.placed[key].next = Next::Replaced(state);
                    self.store.capacity.release_from_shard(1);
                }
            }
            Place::Overflow => {
                let Some(overflow) = &mut self.overflow else { return };
                let slot = overflow.find(self.placed[key].hash);
                if let Some((state, _)) = slot.and_then(|slot| overflow.clear(slot)) {
                    self.placed[key].next = Next::Replaced(state);
                }
                return;
            }
            Place::New | Place::Reserved => return,
        }
        self.placed[key].place = Place::New;
    }
}
