//! The reservations of a batch with an id: stored beside the states, and locked after them.

use ratelimit_core::store::{Now, Reservation};
use ratelimit_core::{ReservationId, Timestamp};
use smallvec::SmallVec;

use crate::capacity::{Capacity, ReservedRoom};
use crate::shard::{Shard, ShardGuards};
use crate::sync::Mutex;

/// How many slots a call sweeps in a shard of reservations that it uses.
const SWEEP_SLOTS: usize = 2;

/// A reservation, with the id and the key that tell it from others of the same hash.
#[derive(Clone, Debug)]
pub(crate) struct KeyedReservation {
    id: ReservationId,
    /// The hash of the limit's state name and the caller's key.
    key: u64,
    reservation: Reservation,
}

/// The reservations of one batch, locked.
pub(crate) struct ReservationGuards<'s> {
    locked: ShardGuards<'s, KeyedReservation>,
    id: ReservationId,
    hash_of_id: u64,
    /// The hashes of the checks' limits and keys.
    keys: SmallVec<[u64; 2]>,
}

impl<'s> ReservationGuards<'s> {
    /// Locks the reservations under an id for the keys of these distinct hashes.
    pub(crate) fn lock(
        all: &'s [Mutex<Shard<KeyedReservation>>],
        id: ReservationId,
        hash_of_id: u64,
        keys: &[u64],
    ) -> Self {
        let hashes = keys.iter().map(|key| key.wrapping_add(hash_of_id));
        Self { locked: ShardGuards::lock(all, hashes), id, hash_of_id, keys: keys.into() }
    }

    /// Sweeps a few slots in passing.
    pub(crate) fn sweep(&mut self, capacity: &Capacity, now: Timestamp) {
        for shard in &mut self.locked.shards {
            capacity.sweep_reservations(shard, now, SWEEP_SLOTS);
        }
    }

    /// The hash of a check's reservation. Both terms are secret and evenly spread, so their sum is,
    /// and clients cannot choose it.
    const fn hash(&self, key: u64) -> u64 {
        key.wrapping_add(self.hash_of_id)
    }

    fn find(&self, key: u64) -> Option<usize> {
        let is_it = |named: &KeyedReservation| (named.id, named.key) == (self.id, key);
        self.locked.get(self.hash(key)).find_if(self.hash(key), is_it)
    }

    /// How many checks of the batch have no reservation yet.
    pub(crate) fn new_keys(&self) -> usize {
        self.keys.iter().filter(|key| self.find(**key).is_none()).count()
    }

    pub(crate) fn get(&self, position: usize) -> Option<Reservation> {
        let key = self.keys[position];
        let slot = self.find(key)?;
        Some(self.locked.get(self.hash(key)).state(slot)?.reservation.clone())
    }

    /// A number that identifies the limits and keys, in any order: distinct are secret, and so is
    /// their sum.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.keys.iter().copied().fold(0, u64::wrapping_add)
    }

    /// Replaces a check's reservation, or inserts it if room is reserved for it.
    pub(crate) fn put(
        &mut self,
        position: usize,
        reservation: Reservation,
        sweep_at: Timestamp,
        spare: &mut ReservedRoom<'_>,
    ) {
        let key = self.keys[position];
        let (found, hash) = (self.find(key), self.hash(key));
        let shard = self.locked.get_mut(hash);
        let named = KeyedReservation { id: self.id, key, reservation };
        if let Some(slot) = found {
            shard.replace(slot, named, 0, sweep_at);
        } else if spare.take() {
            shard.insert(hash, named, 0, sweep_at);
        }
    }
}

/// When a state or reservation may be swept, by the store's own clock, as with a time to live in
/// Redis. The time that a request gives says nothing about when the next request comes.
pub(crate) fn sweep_at(time: Now, own: Timestamp, expires: Timestamp) -> Timestamp {
    match time {
        Now::Store => expires,
        Now::At(now) => own
            .saturating_add_us(expires.saturating_us_since(now))
            .saturating_add_us(Now::PADDING_US),
    }
}
