//! The locked batch: any batch, decided with its buckets, its shards, the overflow states and its reservations
//! locked. All threads lock them in this order, buckets by their index and shards by theirs, so that batches
//! cannot deadlock.

use ratelimit_core::{
    Batch, Clock, InMemory, Now, Op, Reservation, Snapshot, States, Timestamp, Verdict, Write,
};
use smallvec::SmallVec;

use super::sweep::{SWEEP_BUCKETS, SWEEP_SLOTS, SWEEP_SLOTS_WHEN_FULL};
use super::{MemoryError, MemoryStore, adds_reservations};
use crate::capacity::Reserved;
use crate::cuckoo::{self, Address, CuckooTable, LockedBuckets, Packed};
use crate::reservations::{ReservationGuards, sweep_at};
use crate::shard::{Freed, Shard, ShardGuards, counted_entries, shard_of};
use crate::sync::{MutexGuard, Ordering, lock};

mod commit;
mod entries;
mod shared;

/// Where the state of a check lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In this slot of the locked buckets.
    Bucket(cuckoo::Place),
    /// In this slot of its shard.
    Shard(usize),
    /// There is none yet.
    New,
    /// There is none yet, and a place is reserved.
    Reserved,
    /// There is none and no room for one: the check uses the limit's shared state.
    Overflow,
}

/// A check's key and state, and what becomes of that.
struct Placed<S> {
    /// The hash of the check's key, or of the shared state if that is its place.
    hash: u64,
    place: Place,
    /// The state, if it lies in a bucket.
    state: Option<S>,
    /// The write that is to follow, once no foreign code is left to run. After it, the state that was replaced:
    /// dropping that is foreign code, too.
    next: Next<S>,
}

/// A write that is to follow, or the state that it has replaced.
enum Next<S> {
    Same,
    Put(S, Pending),
    Removed,
    /// The replaced state, or the general form of a state that a bucket stores packed.
    Replaced(S),
}

/// What is written along with a state.
#[derive(Clone, Copy)]
struct Pending {
    /// The packed state, if it may lie in a bucket.
    packed: Option<Packed>,
    entries: usize,
    sweep_at: Timestamp,
}

/// The states of a batch, locked.
struct LockedBatch<'s, 'h, A: InMemory, C> {
    store: &'s MemoryStore<A, C>,
    /// The hashes of the checks' own keys.
    hashes: &'h [u64],
    table: Option<(&'s CuckooTable, LockedBuckets<'s>)>,
    /// The shards of all its keys, once they are needed.
    shards: Option<ShardGuards<'s, A::State>>,
    overflow: Option<MutexGuard<'s, Shard<A::State>>>,
    reservations: Option<ReservationGuards<'s>>,
    placed: SmallVec<[Placed<A::State>; 2]>,
    /// The next reservations, by the checks' positions.
    next_reservations: SmallVec<[(usize, Reservation, Timestamp); 2]>,
    own: Timestamp,
    time: Now,
    op: Op,
    reserved: Reserved<'s>,
    /// Whether there is no room for its reservations, and it is charged without them.
    is_unrecorded: bool,
    /// Whether the exact number of entries is still to be found and reserved.
    is_tight: bool,
    /// Whether the shards were locked only to write to them, so that they are to be swept afterwards.
    is_swept_at_the_end: bool,
    /// Keys whose buckets were full.
    crowded: SmallVec<[Address; 1]>,
    /// States that moved from shards to buckets. They are dropped last.
    moved: Vec<A::State>,
}

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Decides any batch, given the hashes of its keys, and notes the states that it leaves where that is asked for.
    #[cold]
    #[inline(never)]
    pub(super) fn decide_locked(
        &self,
        batch: &Batch<'_, A>,
        hashes: &[u64],
        left: Option<&mut Option<Snapshot<A::State>>>,
    ) -> Result<Verdict, MemoryError> {
        let new = |hash| Placed { hash, place: Place::New, state: None, next: Next::Same };
        let placed = hashes.iter().copied().map(new).collect();
        let addresses = hashes.iter().copied().map(Address::new);
        let table = self.table.as_ref().map(|table| (table, table.lock_all(&addresses)));
        let mut locked = LockedBatch {
            store: self,
            hashes,
            table,
            shards: None,
            overflow: None,
            reservations: None,
            placed,
            next_reservations: SmallVec::new(),
            own: self.clock.now(),
            time: batch.time(),
            op: batch.operation(),
            reserved: self.capacity.reserve(),
            is_unrecorded: false,
            is_tight: false,
            is_swept_at_the_end: false,
            crowded: SmallVec::new(),
            moved: Vec::new(),
        };
        let mut decided = locked.decide(batch);
        if locked.is_unrecorded {
            decided = decided.map(|verdict| self.without_record(verdict));
        }
        if locked.overflow.is_some() {
            let shared = locked.placed.iter().filter(|placed| placed.place == Place::Overflow);
            self.overflowed.fetch_add(shared.count() as u64, Ordering::Relaxed);
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

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// The verdict of a request for whose reservations there is no room.
    fn without_record(&self, verdict: Verdict) -> Verdict {
        if !verdict.allowed() {
            return verdict;
        }
        self.unrecorded.fetch_add(1, Ordering::Relaxed);
        verdict.unrecorded()
    }
}

impl<'s, A: InMemory, C: Clock> LockedBatch<'s, '_, A, C> {
    /// The time of the decision, and the states that it leaves. `None` if a check uses a shared state: what other keys
    /// charge and give back there says nothing about this one.
    fn snapshot(&self) -> Option<Snapshot<A::State>> {
        if self.placed.iter().any(|placed| placed.place == Place::Overflow) {
            return None;
        }
        let now = match self.time {
            Now::Store => self.own,
            Now::At(now) => now,
        };
        let states = (0..self.placed.len()).map(|position| self.get(position).cloned()).collect();
        Some(Snapshot { now, states })
    }

    /// Finds or reserves a place for every check, and notes the writes that are to follow. All foreign code
    /// runs in here, and nothing is written, except that expired entries are freed.
    fn decide(&mut self, batch: &Batch<'_, A>) -> Result<Verdict, MemoryError> {
        self.find_in_table();
        if !self.table_suffices(batch) {
            self.lock_shards();
        }
        self.reserve_places(batch);
        self.share_overflow(batch);
        self.reserve_most_entries(batch);
        self.lock_reservations(batch)?;
        // Read again with all locks held: another thread, at a later time, may have freed a state while this
        // one waited.
        self.own = self.store.clock.now();
        let now = MemoryStore::<A, C>::time_of(batch, self.own);
        self.reserve_exact_entries(batch, now)?;
        let shared = self.shared(batch, now);
        Ok(shared::decide(shared, batch, now, self)?)
    }

    /// Frees expired entries in the buckets, and notes the batch's own that are left.
    fn find_in_table(&mut self) {
        let Some((table, buckets)) = &mut self.table else { return };
        let freed = buckets.clear_expired(table.since_epoch_us(self.own));
        self.store.capacity.release(freed);
        for (key, placed) in self.placed.iter_mut().enumerate() {
            if let Some(place) = buckets.find(key)
                && let Some(packed) = buckets.get(place)
            {
                placed.place = Place::Bucket(place);
                placed.state = A::from_compact(table.unpack(packed));
            }
        }
    }

    /// Whether the shards need not be searched, as far as can be known before the decision.
    fn table_suffices(&self, batch: &Batch<'_, A>) -> bool {
        let Some((_, buckets)) = &self.table else { return false };
        let is_known = |key: usize| {
            self.placed[key].place != Place::New
                || (!buckets.has_spilled(key) && batch.checks()[key].limit.algorithm().is_compact())
        };
        batch.time() == Now::Store
            && batch.reservation_id().is_none()
            && (0..self.placed.len()).all(is_known)
    }

    /// Locks and sweeps the batch's shards, then notes what it finds there. The sweep comes first because a
    /// noted slot must stay its key's own.
    fn lock_shards(&mut self) {
        self.shards = Some(self.locked_shards());
        self.sweep_shards();
        self.find_in_shards();
    }

    fn locked_shards(&self) -> ShardGuards<'s, A::State> {
        let all = &self.store.shards;
        let places = self.placed.iter().map(|placed| shard_of(placed.hash, all.len()));
        ShardGuards::lock(all, places)
    }

    /// Sweeps a few slots of the batch's shards, a few buckets, and a few reservations.
    fn sweep_shards(&mut self) {
        let own = self.own;
        for shard in self.shards.iter_mut().flat_map(|locked| &mut locked.shards) {
            self.store.capacity.sweep(shard, own, SWEEP_SLOTS);
        }
        if let Some(table) = &self.store.table {
            self.store.capacity.release(table.sweep(SWEEP_BUCKETS, own));
        }
        self.store.sweep_reservations_in_passing(own);
    }

    /// Notes the slots of the keys that have states in shards.
    fn find_in_shards(&mut self) {
        let Some(locked) = &self.shards else { return };
        let count = self.store.shards.len();
        let elsewhere =
            |placed: &&mut Placed<A::State>| matches!(placed.place, Place::New | Place::Shard(_));
        for placed in self.placed.iter_mut().filter(elsewhere) {
            let shard = locked.position(shard_of(placed.hash, count));
            let found = locked.shards[shard].find(placed.hash);
            placed.place = found.map_or(Place::New, Place::Shard);
        }
    }

    /// Reserves a place for every new key, or notes that there is none.
    fn reserve_places(&mut self, batch: &Batch<'_, A>) {
        if self.lacks_places() || self.lacks_entries(batch) {
            self.sweep_when_full(batch);
        }
        for placed in self.placed.iter_mut().filter(|placed| placed.place == Place::New) {
            let reserved = self.reserved.add_key();
            placed.place = if reserved { Place::Reserved } else { Place::Overflow };
        }
    }

    fn lacks_places(&self) -> bool {
        let new_keys = self.placed.iter().filter(|placed| placed.place == Place::New).count();
        new_keys > 0 && self.store.capacity.is_full(new_keys)
    }

    /// Sweeps more than in passing.
    fn sweep_when_full(&mut self, batch: &Batch<'_, A>) {
        let own = self.own;
        if let Some(locked) = &mut self.shards {
            for shard in &mut locked.shards {
                self.store.capacity.sweep(shard, own, SWEEP_SLOTS_WHEN_FULL);
            }
            // The sweep may have freed slots that were noted.
            self.find_in_shards();
        }
        if self.lacks_places() || self.lacks_entries(batch) {
            self.store.sweep_elsewhere(own);
        }
    }

    /// Gives the checks that have no place their limits' shared states, and locks these.
    fn share_overflow(&mut self, batch: &Batch<'_, A>) {
        if self.placed.iter().all(|placed| placed.place != Place::Overflow) {
            return;
        }
        if self.shards.is_none() {
            // Another check's state may have to go to a shard, and shards are locked before the overflow
            // states.
            self.lock_shards();
        }
        let mut overflow = lock(&self.store.overflow);
        overflow.sweep(self.own, SWEEP_SLOTS, &mut Freed::default());
        self.overflow = Some(overflow);
        for position in 0..self.placed.len() {
            if self.placed[position].place == Place::Overflow {
                self.share(batch, position);
            }
        }
    }

    /// Gives a check that has no state its limit's shared one. The overflow states must be locked.
    fn share(&mut self, batch: &Batch<'_, A>, position: usize) {
        let hash = self.store.shared_hash.under(batch.checks()[position].limit.fingerprint());
        if self.placed[position].place == Place::Reserved {
            self.reserved.release_key();
        }
        self.placed[position] =
            Placed { hash, place: Place::Overflow, state: None, next: Next::Same };
    }

    /// Locks the reservations under the batch's id, and reserves places for new ones.
    fn lock_reservations(&mut self, batch: &Batch<'_, A>) -> Result<(), MemoryError> {
        let store = self.store;
        let Some(id) = batch.reservation_id() else { return Ok(()) };
        // By the checks' own keys, even for checks that use a shared state.
        let keys = self.hashes.iter().copied();
        let mut reservations =
            ReservationGuards::lock(&store.reservations, store.id_hasher, id, keys);
        reservations.sweep(&store.capacity, self.own);
        if adds_reservations(batch.operation()) {
            let new_keys = reservations.new_keys();
            if store.capacity.is_full_of_reservations(new_keys) {
                store.sweep_elsewhere(self.own);
            }
            if !(0..new_keys).all(|_| self.reserved.add_reservation()) {
                if !batch.is_settled_once() || batch.operation() != Op::Acquire {
                    let capacity = store.capacity.most_reservations();
                    return Err(MemoryError::Full { capacity });
                }
                // All of its reservations or none, because they are settled together.
                self.reserved.release_reservations();
                self.is_unrecorded = true;
            }
        }
        self.reservations = Some(reservations);
        Ok(())
    }
}

impl<A: InMemory, C: Clock> States<A::State> for LockedBatch<'_, '_, A, C> {
    fn get(&self, position: usize) -> Option<&A::State> {
        let placed = &self.placed[position];
        match &placed.next {
            Next::Put(state, _) => return Some(state),
            Next::Removed => return None,
            _ => {}
        }
        match placed.place {
            Place::Bucket(..) => placed.state.as_ref(),
            Place::Shard(slot) => {
                let locked = self.shards.as_ref()?;
                let shard = locked.position(shard_of(placed.hash, self.store.shards.len()));
                locked.shards[shard].state(slot)
            }
            Place::New | Place::Reserved => None,
            Place::Overflow => {
                let overflow = self.overflow.as_ref()?;
                overflow.state(overflow.find(placed.hash)?)
            }
        }
    }

    fn put(&mut self, position: usize, write: Write<A::State>) {
        let next = match write {
            Write::Keep => return,
            // One caller's reset or refund must not free all callers that share a state. A settled charge was
            // the caller's own.
            Write::Remove
                if self.placed[position].place == Place::Overflow && self.op != Op::Settle =>
            {
                return;
            }
            Write::Remove => Next::Removed,
            Write::Put { state, expires } => {
                // A state that is written at a given time has to outlive the store's own clock, by which
                // entries of buckets expire.
                let is_for_table =
                    self.time == Now::Store && self.placed[position].place != Place::Overflow;
                let compact = if is_for_table { A::to_compact(&state) } else { None };
                let packed = compact.and_then(|compact| self.store.table.as_ref()?.pack(compact));
                let entries = counted_entries::<A>(&state);
                let sweep_at = sweep_at(self.time, self.own, expires);
                Next::Put(state, Pending { packed, entries, sweep_at })
            }
        };
        self.placed[position].next = next;
    }

    fn reservation(&self, position: usize) -> Option<Reservation> {
        let next = self.next_reservations.iter().rev().find(|next| next.0 == position);
        next.map(|next| next.1.clone()).or_else(|| self.reservations.as_ref()?.get(position))
    }

    fn fingerprint(&self) -> u64 {
        self.reservations.as_ref().map_or(0, ReservationGuards::fingerprint)
    }

    fn put_reservation(&mut self, position: usize, reservation: Reservation, expires: Timestamp) {
        self.next_reservations.push((
            position,
            reservation,
            sweep_at(self.time, self.own, expires),
        ));
    }
}
