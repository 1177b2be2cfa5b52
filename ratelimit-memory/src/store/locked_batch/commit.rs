//! Writes what was decided. No foreign code runs here: no step, no question to an algorithm, no
//! clock, and no state is dropped.

use ratelimit_core::algorithm::InMemory;
use ratelimit_core::{Clock, Timestamp};

use super::{Location, LockedBatch, NextWrite};
use crate::cuckoo::{Address, Insertion, Packed};
use crate::shard::Shard;

impl<A: InMemory, C: Clock> LockedBatch<'_, '_, A, C> {
    /// Writes all that the decision noted.
    pub(super) fn commit(&mut self) {
        for position in 0..self.located.len() {
            match std::mem::replace(&mut self.located[position].next, NextWrite::Same) {
                NextWrite::Same => {}
                NextWrite::Removed => self.remove(position),
                NextWrite::Put { state, packed, entries, sweep_at } => {
                    if packed.is_some_and(|packed| self.put_in_table(position, packed)) {
                        self.replaced.push(state);
                    } else {
                        self.put_in_shard(position, state, entries, sweep_at);
                    }
                }
            }
        }
        if let Some(reservations) = &mut self.reservations {
            for (position, reservation, sweep_at) in self.next_reservations.drain(..) {
                reservations.put(position, reservation, sweep_at, &mut self.spare_reservations);
            }
        }
    }

    /// Unlocks everything, and then makes room for the keys whose buckets were full, so that their
    /// next write finds a slot there. Reserved room that is left is given back.
    pub(super) fn end(self) {
        let Self { store, located, replaced, crowded, .. } = self;
        drop((self.reservations, self.overflow, self.shards, self.table));
        drop((self.spare_keys, self.spare_reservations, self.spare_entries));
        if let Some(table) = &store.table {
            for address in crowded {
                table.make_room(address);
            }
        }
        drop((located, replaced));
    }

    /// The shard that a key's state lies in, or that has the state it shares.
    fn shard(&mut self, key: usize) -> Option<&mut Shard<A::State>> {
        match self.located[key].location {
            Location::Overflow => self.overflow.as_deref_mut(),
            _ => Some(self.shards.get_mut(self.located[key].hash)),
        }
    }

    /// Frees the slot of a key's state in its shard. Returns `false` if another check has freed it.
    fn clear_in_shard(&mut self, key: usize) -> bool {
        let hash = self.located[key].hash;
        let Some(shard) = self.shard(key) else { return false };
        let cleared = shard.find(hash).and_then(|slot| shard.clear(slot));
        let Some((state, entries)) = cleared else { return false };
        self.replaced.push(state);
        if self.located[key].location != Location::Overflow {
            self.spare_entries.keep(entries, 0);
        }
        true
    }

    /// Writes a state to a bucket, if the key has a slot there or finds one.
    fn put_in_table(&mut self, key: usize, packed: Packed) -> bool {
        let pair = self.table.as_mut().and_then(|(_, buckets)| buckets.pair(key));
        let Some(mut pair) = pair else { return false };
        let location = self.located[key].location;
        if let Location::Bucket(slot_index) = location {
            pair.set(slot_index, packed);
            return true;
        }
        // Expired entries stay: they may be other keys' of the same batch.
        if pair.insert(packed, None, || true) != Insertion::Done {
            self.crowded.push(Address::new(self.located[key].hash));
            return false;
        }
        if location == Location::New {
            self.spare_keys.take();
        } else if self.clear_in_shard(key) {
            self.store.capacity.in_shards.release(1);
        }
        true
    }

    /// Writes a state to the key's shard, and removes it from its bucket; or to the state that the
    /// key shares.
    fn put_in_shard(&mut self, key: usize, state: A::State, entries: u32, sweep_at: Timestamp) {
        let (hash, location) = (self.located[key].hash, self.located[key].location);
        let Some(shard) = self.shard(key) else { return };
        let replaced = if let Some(slot) = shard.find(hash) {
            shard.replace(slot, state, entries, sweep_at)
        } else {
            shard.insert(hash, state, entries, sweep_at);
            None
        };
        if location != Location::Overflow {
            self.spare_entries.keep(replaced.as_ref().map_or(0, |replaced| replaced.1), entries);
            if replaced.is_none() {
                self.store.capacity.in_shards.count(1);
            }
            if location == Location::New && replaced.is_none() {
                self.spare_keys.take();
            }
            // The bucket of a key that was found in its shard is marked already.
            if !matches!(location, Location::Shard(_))
                && let Some((_, buckets)) = &mut self.table
                && let Some(mut pair) = buckets.pair(key)
            {
                pair.spill();
                if let Location::Bucket(slot_index) = location {
                    pair.clear(slot_index);
                }
            }
        }
        if let Some((before, _)) = replaced {
            self.replaced.push(before);
        }
    }

    fn remove(&mut self, key: usize) {
        match self.located[key].location {
            // If two keys of the batch meet, the other check may have freed this slot: then nothing
            // is freed again.
            Location::Bucket(slot_index) => {
                if let Some((_, buckets)) = &mut self.table
                    && buckets.pair(key).is_some_and(|mut pair| pair.clear(slot_index))
                {
                    self.store.capacity.keys.release(1);
                }
            }
            Location::Shard(_) => {
                if self.clear_in_shard(key) {
                    self.store.capacity.release_from_shard();
                }
            }
            Location::Overflow => _ = self.clear_in_shard(key),
            Location::New => {}
        }
    }
}
