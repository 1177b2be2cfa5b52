//! Any batch, decided with all that it touches locked: its buckets, its shards, the overflow states, what is
//! held under its id. Everybody locks these in this order, and buckets and shards among themselves in one.

use ratelimit_core::{
    Batch, Clock, InMemory, Now, Op, Reservation, States, Timestamp, Verdict, Write, fingerprint,
};
use smallvec::SmallVec;

use super::sweep::{SWEEP_BUCKETS, SWEEP_SLOTS, SWEEP_SLOTS_WHEN_FULL};
use super::{Key, MemoryError, MemoryStore};
use crate::capacity::Reserved;
use crate::cuckoo::{self, Address, CuckooTable, Packed};
use crate::reservations::{ReservationGuards, sweep_at};
use crate::shard::{Freed, Locked, Shard, counted_entries, shard_of};
use crate::sync::{MutexGuard, Ordering, lock};

mod capacity;
mod commit;
mod shared;

/// The key of a limit's shared state.
const SHARED: &str = "";

/// Where the state of a check lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In this bucket of those that are held, in this slot.
    Bucket(usize, usize),
    /// In its shard, in this slot.
    Shard(usize),
    /// Nowhere yet.
    New,
    /// Nowhere yet, and a place is reserved.
    Reserved,
    /// Nowhere, and there is no room: the limit's shared state.
    Overflow,
}

/// What a check has been given to be decided on.
struct Placed<'k, S> {
    /// The key of the shared state, if that is its place.
    key: Key<'k>,
    place: Place,
    /// The state, if it lies in a bucket.
    state: Option<S>,
    /// What becomes of it: written once no foreign code is left to run. From then on what was there before: to
    /// drop that is foreign code, too.
    next: Next<S>,
}

/// What becomes of a state, with all that the algorithm has to say of it.
enum Next<S> {
    Same,
    Put(S, Pending),
    Removed,
    /// What was there before, or what a bucket keeps in its own form.
    Replaced(S),
}

/// What is noted beside the state that is to be written.
#[derive(Clone, Copy)]
struct Pending {
    /// The state as a bucket keeps it, if it may lie there.
    packed: Option<Packed>,
    entries: usize,
    sweep_at: Timestamp,
}

/// The states of a batch, held still.
struct LockedBatch<'s, 'k, A: InMemory, C> {
    store: &'s MemoryStore<A, C>,
    table: Option<(&'s CuckooTable, cuckoo::LockedBuckets<'s>)>,
    /// The shards of all its keys, once they are needed.
    shards: Option<Locked<'s, A::State>>,
    overflow: Option<MutexGuard<'s, Shard<A::State>>>,
    reservations: Option<ReservationGuards<'s>>,
    placed: SmallVec<[Placed<'k, A::State>; 2]>,
    /// What becomes of the holds, by the checks' positions.
    next_reservations: SmallVec<[(usize, Reservation, Timestamp); 2]>,
    own: Timestamp,
    time: Now,
    op: Op,
    reserved: Reserved<'s>,
    /// Whether what is needed of entries is still to be found out.
    is_tight: bool,
    /// Whether its shards were locked to write to them, and not swept before.
    is_swept_at_the_end: bool,
    /// Keys whose buckets had no place for them.
    crowded: SmallVec<[Address; 1]>,
    /// The states of keys that went from their shards to buckets: kept to be dropped last.
    moved: Vec<A::State>,
}

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Decides any batch.
    #[cold]
    #[inline(never)]
    pub(super) fn decide_locked(&self, batch: &Batch<'_, A>) -> Result<Verdict, MemoryError> {
        let keys = batch.checks().iter().map(|check| self.key_of(check));
        let new = |key| Placed { key, place: Place::New, state: None, next: Next::Same };
        let placed: SmallVec<[_; 2]> = keys.map(new).collect();
        let addresses = placed.iter().map(|placed| Address::new(placed.key.hash));
        let table = self.table.as_ref().map(|table| (table, table.lock_all(&addresses)));
        let mut held = LockedBatch {
            store: self,
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
            is_tight: false,
            is_swept_at_the_end: false,
            crowded: SmallVec::new(),
            moved: Vec::new(),
        };
        let decided = held.decide(batch);
        if held.overflow.is_some() {
            let shared = held.placed.iter().filter(|placed| placed.place == Place::Overflow);
            self.overflowed.fetch_add(shared.count() as u64, Ordering::Relaxed);
        }
        if decided.is_ok() {
            held.commit();
        }
        held.end();
        decided
    }
}

impl<'s, A: InMemory, C: Clock> LockedBatch<'s, '_, A, C> {
    /// Finds or reserves a place for every check, and notes what becomes of it. All foreign code runs in here, and
    /// nothing is written but what has expired.
    fn decide(&mut self, batch: &Batch<'_, A>) -> Result<Verdict, MemoryError> {
        self.find_in_table();
        if !self.table_suffices(batch) {
            self.lock_shards();
        }
        self.reserve_places(batch);
        self.share_overflow();
        self.reserve_most_entries(batch);
        self.lock_holds(batch)?;
        // Read with all locks held: somebody whose time is later may have freed what was waited for.
        self.own = self.store.clock.now();
        let now = MemoryStore::<A, C>::time_of(batch, self.own);
        self.reserve_exact_entries(batch, now)?;
        let shared = self.shared(batch, now);
        Ok(shared::decide(shared, batch, now, self)?)
    }

    /// Frees what has expired in the buckets, and notes what is left of the batch's own.
    fn find_in_table(&mut self) {
        let Some((table, held)) = &mut self.table else { return };
        let now_us = table.since_epoch_us(self.own);
        let freed = held.buckets.iter_mut().map(|bucket| bucket.clear_expired(now_us)).sum();
        self.store.capacity.release(freed);
        for (key, placed) in self.placed.iter_mut().enumerate() {
            if let Some((bucket, slot)) = held.find(key) {
                let compact = table.unpack(held.buckets[bucket].get(slot).state());
                (placed.place, placed.state) =
                    (Place::Bucket(bucket, slot), A::from_compact(compact));
            }
        }
    }

    /// Whether the shards need not be looked at, as far as can be known before the decision.
    fn table_suffices(&self, batch: &Batch<'_, A>) -> bool {
        let Some((_, held)) = &self.table else { return false };
        let is_known = |key: usize| {
            self.placed[key].place != Place::New
                || (!held.has_spilled(key) && batch.checks()[key].limit.algorithm().is_compact())
        };
        batch.time() == Now::Store
            && batch.reservation_id().is_none()
            && (0..self.placed.len()).all(is_known)
    }

    /// Locks the batch's shards, sweeps a little, and notes what is found. Sweeping comes before slots are
    /// noted: a noted slot must stay its key's own.
    fn lock_shards(&mut self) {
        self.shards = Some(self.locked_shards());
        self.sweep_shards();
        self.find_in_shards();
    }

    fn locked_shards(&self) -> Locked<'s, A::State> {
        let all = &self.store.shards;
        let places = self.placed.iter().map(|placed| shard_of(placed.key.hash, all.len()));
        Locked::lock(all, places)
    }

    /// Sweeps a little of the batch's shards, and of all else.
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

    /// Notes the slots of the keys that the shards hold.
    fn find_in_shards(&mut self) {
        let Some(locked) = &self.shards else { return };
        let count = self.store.shards.len();
        let elsewhere = |placed: &&mut Placed<'_, A::State>| {
            matches!(placed.place, Place::New | Place::Shard(_))
        };
        for placed in self.placed.iter_mut().filter(elsewhere) {
            let shard = locked.position(shard_of(placed.key.hash, count));
            let found = locked.shards[shard].find(placed.key.hash);
            placed.place = found.map_or(Place::New, Place::Shard);
        }
    }

    /// Reserves a place for every new key, or notes that there is none.
    fn reserve_places(&mut self, batch: &Batch<'_, A>) {
        if self.lacks_places() || self.lacks_entries(batch) {
            self.make_room(batch);
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

    /// Sweeps more.
    fn make_room(&mut self, batch: &Batch<'_, A>) {
        let own = self.own;
        if let Some(locked) = &mut self.shards {
            for shard in &mut locked.shards {
                self.store.capacity.sweep(shard, own, SWEEP_SLOTS_WHEN_FULL);
            }
            // Slots that were noted may be among them.
            self.find_in_shards();
        }
        if self.lacks_places() || self.lacks_entries(batch) {
            self.store.sweep_elsewhere(own);
        }
    }

    /// Gives shared states to the checks that have no place, and locks these.
    fn share_overflow(&mut self) {
        if self.placed.iter().all(|placed| placed.place != Place::Overflow) {
            return;
        }
        if self.shards.is_none() {
            // Another check's state may have to go there, and then it would be too late.
            self.lock_shards();
        }
        let mut overflow = lock(&self.store.overflow);
        overflow.sweep(self.own, SWEEP_SLOTS, &mut Freed::default());
        self.overflow = Some(overflow);
        for position in 0..self.placed.len() {
            if self.placed[position].place == Place::Overflow {
                self.share(position);
            }
        }
    }

    /// Gives a check that has no state its limit's shared one. The shared states are locked.
    fn share(&mut self, position: usize) {
        let limit = self.placed[position].key.limit;
        let key = self.store.key(limit, fingerprint(limit), SHARED);
        if self.placed[position].place == Place::Reserved {
            self.reserved.release_key();
        }
        self.placed[position] =
            Placed { key, place: Place::Overflow, state: None, next: Next::Same };
    }

    /// Locks what is held under the batch's id, with places for what may be new.
    fn lock_holds(&mut self, batch: &Batch<'_, A>) -> Result<(), MemoryError> {
        let store = self.store;
        let Some(id) = batch.reservation_id() else { return Ok(()) };
        // By the checks' own keys, also of those that share an overflow state.
        let keys = batch.checks().iter().map(|check| store.key_of(check).hash);
        let mut reservations =
            ReservationGuards::lock(&store.reservations, store.id_hasher, id, keys);
        reservations.sweep(&store.capacity, self.own);
        if !matches!(batch.operation(), Op::Settle | Op::Renew | Op::Peek) {
            let new_keys = reservations.new_keys();
            if store.capacity.is_full(new_keys) {
                store.sweep_elsewhere(self.own);
            }
            if !(0..new_keys).all(|_| self.reserved.add_reservation()) {
                return Err(MemoryError::Full { capacity: store.capacity.most_keys() });
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
                let shard = locked.position(shard_of(placed.key.hash, self.store.shards.len()));
                locked.shards[shard].state(slot)
            }
            Place::New | Place::Reserved => None,
            Place::Overflow => {
                let overflow = self.overflow.as_ref()?;
                overflow.state(overflow.find(placed.key.hash)?)
            }
        }
    }

    fn put(&mut self, position: usize, write: Write<A::State>) {
        let next = match write {
            Write::Keep => return,
            // One caller's reset or refund must not free all who share a state. What is settled was its own.
            Write::Remove
                if self.placed[position].place == Place::Overflow && self.op != Op::Settle =>
            {
                return;
            }
            Write::Remove => Next::Removed,
            Write::Put { state, expires } => {
                // What is written at a given time has to outlive the store's own clock, by which buckets forget.
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
