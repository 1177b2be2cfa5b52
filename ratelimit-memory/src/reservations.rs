//! The reservations of a batch with an id: stored beside the states, and locked after them.

use ratelimit_core::{Now, Reservation, ReservationId, Timestamp};
use smallvec::SmallVec;

use crate::capacity::{Capacity, Reserved};
use crate::hash::KeyHasher;
use crate::shard::{Shard, ShardGuards, shard_of};
use crate::sync::{Mutex, MutexGuard, lock};

/// How many slots a call sweeps in a shard of reservations that it uses.
const SWEEP_SLOTS: usize = 2;

/// A reservation, with the id and the key that tell it from others of the same hash.
#[derive(Clone, Debug)]
pub(crate) struct Named {
    id: ReservationId,
    /// The hash of the limit's name and the caller's key.
    key: u64,
    reservation: Reservation,
}

/// The place of a check's reservation.
#[derive(Clone, Copy)]
struct Place {
    hash: u64,
    key: u64,
    /// The position of its shard among the locked ones.
    shard: usize,
}

/// The reservations of one batch, locked.
pub(crate) struct ReservationGuards<'s> {
    locked: ShardGuards<'s, Named>,
    id: ReservationId,
    places: SmallVec<[Place; 2]>,
}

impl<'s> ReservationGuards<'s> {
    /// Locks the reservations under an id for the keys of these distinct.
    pub(crate) fn lock(
        all: &'s [Mutex<Shard<Named>>],
        hasher: IdHasher,
        id: ReservationId,
        keys: impl Iterator<Item = u64>,
    ) -> Self {
        let of_id = hasher.hash(id);
        // Both terms are secret and evenly spread, so their sum is, and clients cannot choose it.
        let place = |key: u64| Place { hash: key.wrapping_add(of_id), key, shard: 0 };
        let mut places: SmallVec<[Place; 2]> = keys.map(place).collect();
        let locked =
            ShardGuards::lock(all, places.iter().map(|place| shard_of(place.hash, all.len())));
        for place in &mut places {
            place.shard = locked.position(shard_of(place.hash, all.len()));
        }
        Self { locked, id, places }
    }

    /// Sweeps a few slots in passing.
    pub(crate) fn sweep(&mut self, capacity: &Capacity, now: Timestamp) {
        for shard in &mut self.locked.shards {
            capacity.sweep_reservations(shard, now, SWEEP_SLOTS);
        }
    }

    fn find(&self, place: &Place) -> Option<usize> {
        let is_it = |named: &Named| (named.id, named.key) == (self.id, place.key);
        self.locked.shards[place.shard].find_if(place.hash, is_it)
    }

    /// How many checks of the batch have no reservation yet.
    pub(crate) fn new_keys(&self) -> usize {
        self.places.iter().filter(|place| self.find(place).is_none()).count()
    }

    pub(crate) fn get(&self, position: usize) -> Option<Reservation> {
        let place = &self.places[position];
        let slot = self.find(place)?;
        Some(self.locked.shards[place.shard].state(slot)?.reservation.clone())
    }

    /// A number that identifies the limits and keys, in any order: distinct are secret, and so is their sum.
    pub(crate) fn fingerprint(&self) -> u64 {
        self.places.iter().map(|place| place.key).fold(0, u64::wrapping_add)
    }

    /// Replaces a check's reservation, or inserts it if a place is reserved for it.
    pub(crate) fn put(
        &mut self,
        position: usize,
        reservation: Reservation,
        sweep_at: Timestamp,
        reserved: &mut Reserved<'_>,
    ) {
        let place = self.places[position];
        let found = self.find(&place);
        let shard = &mut self.locked.shards[place.shard];
        let named = Named { id: self.id, key: place.key, reservation };
        if let Some(slot) = found {
            shard.replace(slot, named, 0, sweep_at);
        } else if reserved.take_reservation() {
            shard.insert(place.hash, named, 0, sweep_at);
        }
    }
}

/// The reservation of one check, locked.
pub(crate) struct ReservationGuard<'s> {
    shard: MutexGuard<'s, Shard<Named>>,
    slot: Option<usize>,
    hash: u64,
    id: ReservationId,
    key: u64,
}

impl<'s> ReservationGuard<'s> {
    /// Locks the reservation under an id for the key of this hash.
    pub(crate) fn lock(
        all: &'s [Mutex<Shard<Named>>],
        hasher: IdHasher,
        id: ReservationId,
        key: u64,
    ) -> Self {
        let hash = key.wrapping_add(hasher.hash(id));
        let shard = lock(&all[shard_of(hash, all.len())]);
        let slot = shard.find_if(hash, |named| (named.id, named.key) == (id, key));
        Self { shard, slot, hash, id, key }
    }

    /// Whether there is no reservation yet.
    pub(crate) const fn is_new(&self) -> bool {
        self.slot.is_none()
    }

    pub(crate) fn get(&self) -> Option<Reservation> {
        Some(self.shard.state(self.slot?)?.reservation.clone())
    }

    /// Replaces the reservation, or inserts it if a place is reserved for it.
    pub(crate) fn put(
        &mut self,
        reservation: Reservation,
        sweep_at: Timestamp,
        reserved: &mut Reserved<'_>,
    ) {
        let named = Named { id: self.id, key: self.key, reservation };
        if let Some(slot) = self.slot {
            self.shard.replace(slot, named, 0, sweep_at);
        } else if reserved.take_reservation() {
            self.slot = Some(self.shard.insert(self.hash, named, 0, sweep_at));
        }
    }

    /// Sweeps a few slots in passing.
    pub(crate) fn sweep(&mut self, capacity: &Capacity, now: Timestamp) {
        capacity.sweep_reservations(&mut self.shard, now, SWEEP_SLOTS);
    }
}

/// Hashes ids, so that a client that chooses ids cannot foresee which of them meet. The hash only chooses the
/// place: a reservation is recognized by the id itself.
#[derive(Clone, Copy)]
pub(crate) struct IdHasher([u64; 2]);

impl IdHasher {
    pub(crate) fn new(hasher: &KeyHasher) -> Self {
        Self(["low", "high"].map(|half| hasher.hash(half).secret()))
    }

    /// Each half is combined by XOR with a secret; the halves are multiplied, and the product is folded.
    fn hash(self, id: ReservationId) -> u64 {
        let [low_secret, high_secret] = self.0;
        let (low, high) = halves(id.as_u128());
        let (low, high) = halves(u128::from(low ^ low_secret) * u128::from(high ^ high_secret));
        low ^ high
    }
}

#[allow(clippy::cast_possible_truncation, reason = "the halves are what is wanted")]
const fn halves(number: u128) -> (u64, u64) {
    (number as u64, (number >> 64) as u64)
}

/// When a state or reservation may be swept, by the store's own clock, as with a time to live in Redis. The
/// time that a request gives says nothing about when the next request comes.
pub(crate) fn sweep_at(time: Now, own: Timestamp, expires: Timestamp) -> Timestamp {
    match time {
        Now::Store => expires,
        Now::At(now) => own
            .saturating_add_us(expires.saturating_us_since(now))
            .saturating_add_us(Now::PADDING_US),
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn every_bit_of_an_id_counts() {
        let hasher = IdHasher::new(&KeyHasher::random());
        let ids = (0..128).map(|bit| ReservationId::new(1 << bit)).chain([ReservationId::new(0)]);
        let mut distinct: Vec<_> = ids.map(|id| hasher.hash(id)).collect();
        distinct.sort_unstable();
        distinct.dedup();
        assert_eq!(distinct.len(), 129);
    }
}
