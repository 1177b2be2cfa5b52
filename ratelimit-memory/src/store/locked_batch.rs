//! The locked batch: any batch, decided with its buckets, its shards, the overflow states and its
//! reservations locked. All threads lock them in this order, buckets by their index and shards by
//! theirs, so that batches cannot deadlock.
//!
//! # When foreign code panics
//!
//! An algorithm and a clock run while the store holds locks. If one of them panics, the call
//! charges nothing and loses no room, every other key stays as it was, and the next call works: all
//! foreign code of a call runs before its first write, and reserved room is given back.
//! `tests/store/panics.rs` makes every call panic. There are three exceptions:
//!
//! - The store drops an old state after it has charged the call. If that panics, the charge stands.
//! - An algorithm that overwrites a state itself
//!   ([`step_in_place`](ratelimit_core::algorithm::InMemory::step_in_place)) decides before it
//!   writes. A panic after that, or in
//!   [`entries_in`](ratelimit_core::algorithm::InMemory::entries_in) of the new state, leaves this
//!   one key with what the algorithm has written. It affects no other key and no count.
//! - The closure of a call for several keys ([`MemoryStore::check_each_now`]) runs after each key
//!   is decided. If it panics, the keys that it was called for stay decided, and all others are as
//!   they were.

use ratelimit_core::algorithm::{InMemory, Write};
use ratelimit_core::store::{Batch, Now, Op, Reservation, Snapshot, States};
use ratelimit_core::{Clock, Timestamp, Verdict};
use smallvec::SmallVec;

use super::sweep::{SWEEP_SLOTS, SWEEP_SLOTS_WHEN_FULL};
use super::{MemoryError, MemoryStore, time_of};
use crate::capacity::ReservedRoom;
use crate::cuckoo::{self, Address, CuckooTable, LockedBuckets, Packed};
use crate::reservations::{ReservationGuards, sweep_at};
use crate::shard::{Shard, ShardGuards, counted_entries};
use crate::sync::{MutexGuard, Ordering, lock};

mod commit;
mod entries;
mod shared;

/// Where the state of a check lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Location {
    /// In this slot of the locked buckets.
    Bucket(cuckoo::SlotIndex),
    /// In this slot of its shard.
    Shard(usize),
    /// There is none yet. [`reserve_places`](LockedBatch::reserve_places) reserves a place for it.
    New,
    /// There is none and no room for one: the check uses the limit's shared state.
    Overflow,
}

/// A check's key and state, and what is written in its place.
struct Located<S> {
    /// The hash of the check's key, or of the shared state if that is its place.
    hash: u64,
    location: Location,
    /// The state, if it lies in a bucket.
    state: Option<S>,
    /// The write that is to follow, once no foreign code is left to run.
    next: NextWrite<S>,
}

impl<S> Located<S> {
    const fn at(hash: u64, location: Location) -> Self {
        Self { hash, location, state: None, next: NextWrite::Same }
    }
}

/// A write that is to follow.
enum NextWrite<S> {
    Same,
    Put {
        state: S,
        /// The packed state, if it may lie in a bucket.
        packed: Option<Packed>,
        entries: u32,
        sweep_at: Timestamp,
    },
    Removed,
}

/// The states of a batch, locked.
struct LockedBatch<'s, 'b, A: InMemory, C> {
    store: &'s MemoryStore<A, C>,
    batch: &'b Batch<'b, A>,
    /// The hashes of the checks' own keys.
    hashes: &'b [u64],
    table: Option<(&'s CuckooTable, LockedBuckets<'s>)>,
    /// The shards of all its keys.
    shards: ShardGuards<'s, A::State>,
    overflow: Option<MutexGuard<'s, Shard<A::State>>>,
    reservations: Option<ReservationGuards<'s>>,
    located: SmallVec<[Located<A::State>; 2]>,
    /// The next reservations, by the checks' positions.
    next_reservations: SmallVec<[(usize, Reservation, Timestamp); 2]>,
    own: Timestamp,
    spare_keys: ReservedRoom<'s>,
    spare_reservations: ReservedRoom<'s>,
    spare_entries: ReservedRoom<'s>,
    /// Whether there is no room for its reservations, and it is charged without them.
    is_unrecorded: bool,
    /// Whether the exact number of entries is still to be found and reserved.
    is_tight: bool,
    /// Keys whose buckets were full.
    crowded: SmallVec<[Address; 1]>,
    /// States that were replaced, removed or moved to a bucket. They are dropped last, because that
    /// is foreign code.
    replaced: SmallVec<[A::State; 2]>,
}

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Decides any batch, given the hashes of its keys, and notes the states that it leaves where
    /// that is asked for.
    #[cold]
    #[inline(never)]
    pub(super) fn decide_locked(
        &self,
        batch: &Batch<'_, A>,
        hashes: &[u64],
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Verdict, MemoryError> {
        let located = hashes.iter().map(|hash| Located::at(*hash, Location::New)).collect();
        let addresses = hashes.iter().copied().map(Address::new);
        let table = self.table.as_ref().map(|table| (table, table.lock_all(&addresses)));
        let shards = ShardGuards::lock(&self.shards, hashes.iter().copied());
        let mut locked = LockedBatch {
            store: self,
            batch,
            hashes,
            table,
            shards,
            overflow: None,
            reservations: None,
            located,
            next_reservations: SmallVec::new(),
            own: self.clock.now(),
            spare_keys: self.capacity.keys.reserve(),
            spare_reservations: self.capacity.reservations.reserve(),
            spare_entries: self.capacity.entries.reserve(),
            is_unrecorded: false,
            is_tight: false,
            crowded: SmallVec::new(),
            replaced: SmallVec::with_capacity(hashes.len()),
        };
        let mut decided = locked.decide();
        if locked.is_unrecorded && decided.as_ref().is_ok_and(Verdict::allowed) {
            self.unrecorded.fetch_add(1, Ordering::Relaxed);
            decided = decided.map(Verdict::unrecorded);
        }
        if locked.overflow.is_some() {
            let shared = locked.count(Location::Overflow);
            self.overflowed.fetch_add(shared as u64, Ordering::Relaxed);
        }
        if decided.is_ok() {
            if let Some(left) = left {
                *left = locked.snapshot();
            }
            locked.commit();
        }
        locked.end();
        decided
    }
}

impl<A: InMemory, C: Clock> LockedBatch<'_, '_, A, C> {
    /// The time of the decision, and the states that it leaves. `None` if a check uses a shared
    /// state: what other keys charge and give back there says nothing about this one.
    fn snapshot(&self) -> Option<Snapshot<A::State>> {
        if self.count(Location::Overflow) > 0 {
            return None;
        }
        let now = time_of(self.batch.time(), self.own);
        let states = (0..self.located.len()).map(|position| self.get(position).cloned()).collect();
        Some(Snapshot { now, states })
    }

    /// The state of a check before the decision.
    fn state_before(&self, position: usize) -> Option<&A::State> {
        let located = &self.located[position];
        match located.location {
            Location::Bucket(..) => located.state.as_ref(),
            Location::Shard(slot) => self.shards.get(located.hash).state(slot),
            Location::New => None,
            Location::Overflow => {
                let overflow = self.overflow.as_ref()?;
                overflow.state(overflow.find(located.hash)?)
            }
        }
    }

    /// Finds or reserves a place for every check, and notes the writes that are to follow. All
    /// foreign code runs in here, and nothing is written, except that expired entries are freed.
    fn decide(&mut self) -> Result<Verdict, MemoryError> {
        self.find_in_table();
        self.find_in_shards();
        if self.count(Location::New) > 0 {
            self.sweep(SWEEP_SLOTS);
            self.store.sweep_in_passing(self.own);
        }
        self.reserve_places();
        self.share_overflow();
        self.reserve_most_entries();
        self.lock_reservations()?;
        // Read again with all locks held: another thread, at a later time, may have freed a state
        // while this one waited.
        self.own = self.store.clock.now();
        let now = time_of(self.batch.time(), self.own);
        loop {
            let verdict = self.decide_parts(now)?;
            if self.reserve_exact_entries()? {
                return Ok(verdict);
            }
        }
    }

    /// Frees expired entries in the buckets, and notes the batch's own that are left.
    fn find_in_table(&mut self) {
        let Some((table, buckets)) = &mut self.table else { return };
        let freed = buckets.clear_expired(table.since_epoch_us(self.own));
        self.store.capacity.keys.release(freed);
        for (key, located) in self.located.iter_mut().enumerate() {
            if let Some(mut pair) = buckets.pair(key)
                && let Some(slot_index) = pair.find()
            {
                located.location = Location::Bucket(slot_index);
                located.state = A::from_compact(table.unpack(pair.get(slot_index)));
            }
        }
    }

    /// Notes the slots of the keys that have states in shards.
    fn find_in_shards(&mut self) {
        let elsewhere = |located: &&mut Located<A::State>| {
            matches!(located.location, Location::New | Location::Shard(_))
        };
        for located in self.located.iter_mut().filter(elsewhere) {
            let found = self.shards.get(located.hash).find(located.hash);
            located.location = found.map_or(Location::New, Location::Shard);
        }
    }

    /// Sweeps so many slots of each of the batch's shards, and searches them again: a noted slot
    /// must stay its key's own.
    fn sweep(&mut self, slots: usize) {
        for shard in &mut self.shards.shards {
            self.store.capacity.sweep(shard, self.own, slots);
        }
        self.find_in_shards();
    }

    /// Reserves a place for every new key, or notes that there is none.
    fn reserve_places(&mut self) {
        if self.lacks_places() || self.lacks_entries() {
            self.sweep(SWEEP_SLOTS_WHEN_FULL);
            if self.lacks_places() || self.lacks_entries() {
                self.store.sweep_elsewhere(self.own);
            }
        }
        for located in self.located.iter_mut().filter(|located| located.location == Location::New) {
            if !self.spare_keys.add(1) {
                located.location = Location::Overflow;
            }
        }
    }

    /// How many checks have their states there.
    fn count(&self, location: Location) -> usize {
        self.located.iter().filter(|located| located.location == location).count()
    }

    fn lacks_places(&self) -> bool {
        let new_keys = self.count(Location::New);
        new_keys > 0 && !self.store.capacity.keys.has(new_keys)
    }

    /// Gives the checks that have no place their limits' shared states, and locks these.
    fn share_overflow(&mut self) {
        if self.count(Location::Overflow) == 0 {
            return;
        }
        let mut overflow = lock(&self.store.overflow);
        overflow.sweep(self.own, SWEEP_SLOTS, |_| {});
        self.overflow = Some(overflow);
        for position in 0..self.located.len() {
            if self.located[position].location == Location::Overflow {
                self.share(position);
            }
        }
    }

    /// Gives a check that has no state its limit's shared one. The overflow states must be locked.
    fn share(&mut self, position: usize) {
        let limit = self.batch.checks()[position].limit;
        let hash = self.store.shared_hash.under(limit.fingerprint());
        self.located[position] = Located::at(hash, Location::Overflow);
    }

    /// Locks the reservations under the batch's id, and reserves places for new ones.
    fn lock_reservations(&mut self) -> Result<(), MemoryError> {
        let (store, batch) = (self.store, self.batch);
        let Some(id) = batch.reservation_id() else { return Ok(()) };
        // By the checks' own keys, even for checks that use a shared state.
        let hash_of_id = store.hasher.hash_id(id);
        let mut reservations =
            ReservationGuards::lock(&store.reservations, id, hash_of_id, self.hashes);
        reservations.sweep(&store.capacity, self.own);
        if batch.operation() != Op::Peek && !batch.operation().needs_id() {
            let new_keys = reservations.new_keys();
            if !store.capacity.reservations.has(new_keys) {
                store.sweep_elsewhere(self.own);
            }
            // All of its reservations or none, because they are settled together.
            if !self.spare_reservations.add(new_keys) {
                if !batch.is_settled_once() || batch.operation() != Op::Acquire {
                    return Err(MemoryError::Full { capacity: store.capacity.reservations.most });
                }
                self.is_unrecorded = true;
            }
        }
        self.reservations = Some(reservations);
        Ok(())
    }
}

impl<A: InMemory, C: Clock> States<A::State> for LockedBatch<'_, '_, A, C> {
    fn get(&self, position: usize) -> Option<&A::State> {
        match &self.located[position].next {
            NextWrite::Put { state, .. } => Some(state),
            NextWrite::Removed => None,
            NextWrite::Same => self.state_before(position),
        }
    }

    fn put(&mut self, position: usize, write: Write<A::State>) {
        let next = match write {
            Write::Keep => return,
            // One caller's reset or refund must not free all callers that share a state. A settled
            // charge was the caller's own.
            Write::Remove
                if self.located[position].location == Location::Overflow
                    && self.batch.operation() != Op::Settle =>
            {
                return;
            }
            Write::Remove => NextWrite::Removed,
            Write::Put { state, expires } => {
                // A state that is written at a given time has to outlive the store's own clock, by
                // which entries of buckets expire.
                let is_for_table = self.batch.time() == Now::Store
                    && self.located[position].location != Location::Overflow;
                let compact = if is_for_table { A::to_compact(&state) } else { None };
                let packed = compact.and_then(|compact| self.store.table.as_ref()?.pack(compact));
                let entries = counted_entries::<A>(&state);
                let sweep_at = sweep_at(self.batch.time(), self.own, expires);
                NextWrite::Put { state, packed, entries, sweep_at }
            }
        };
        self.located[position].next = next;
    }

    fn reservation(&self, position: usize) -> Option<Reservation> {
        let next = self.next_reservations.iter().rev().find(|next| next.0 == position);
        next.map(|next| next.1.clone()).or_else(|| self.reservations.as_ref()?.get(position))
    }

    fn fingerprint(&self) -> u64 {
        self.reservations.as_ref().map_or(0, ReservationGuards::fingerprint)
    }

    fn put_reservation(&mut self, position: usize, reservation: Reservation, expires: Timestamp) {
        let sweep_at = sweep_at(self.batch.time(), self.own, expires);
        self.next_reservations.push((position, reservation, sweep_at));
    }
}
