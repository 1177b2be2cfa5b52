//! [`MemoryStore`]: shards, and the one way of deciding a batch over them.

use std::fmt;
use std::future::{Future, ready};
use std::hash::BuildHasher;

use ratelimit_core::{
    Algorithm, Batch, Check, Clock, EntryStore, ErrorKind, Hold, KeepsEntries, Limit, Now, Op,
    Policy, Refusal, States, Store, StoreError, SyncStore, SystemClock, Tick, Verdict, WindowEntry,
    Write, decide,
};

use crate::holds::{HeldHolds, sweep_at};
use crate::shard::{Key, Locked, Shard, shard_of};
use crate::sync::{AtomicU64, AtomicUsize, KeyHasher, Mutex, MutexGuard, Ordering, lock};

/// How many slots a call sweeps in passing: more than the one that it can add.
const SWEEP_SLOTS: usize = 2;
/// How many slots of a shard a call sweeps when it needs a place and the store is full.
const SWEEP_SLOTS_WHEN_FULL: usize = 64;
/// How many other shards a call looks into when it needs a place and the store is full.
const SWEEP_SHARDS_WHEN_FULL: usize = 4;
/// How many keys a store holds unless told otherwise.
const DEFAULT_CAPACITY: usize = 1 << 20;

/// An in-process [`Store`]. See the [crate's documentation](crate) for its behaviour.
pub struct MemoryStore<A: Algorithm = Policy, C = SystemClock> {
    shards: Box<[Mutex<Shard<A::State>>]>,
    /// The states of new keys when the store is full: one a limit. Locked after any shard.
    overflow: Mutex<Shard<A::State>>,
    /// What is held under the ids of batches. Locked after all others.
    holds: Box<[Mutex<Shard<Hold>>]>,
    hasher: KeyHasher,
    clock: C,
    /// Keys held, and places reserved for keys about to be; holds count as keys. Never above
    /// `capacity`.
    held: AtomicUsize,
    /// How many of them are holds.
    holding: AtomicUsize,
    capacity: usize,
    overflowed: AtomicU64,
    /// The shard that the next call looks into when the store is full.
    next_to_sweep: AtomicUsize,
}

/// How a [`MemoryStore`] is to be built.
#[derive(Clone, Debug)]
pub struct Builder<C = SystemClock> {
    capacity: usize,
    shards: usize,
    clock: C,
}

impl Builder<SystemClock> {
    fn new() -> Self {
        let threads = std::thread::available_parallelism().map_or(4, std::num::NonZero::get);
        Self { capacity: DEFAULT_CAPACITY, shards: threads * 16, clock: SystemClock::new() }
    }
}

impl<C: Clock> Builder<C> {
    /// The most keys that the store may hold, at least 1; 1,048,576 unless told otherwise.
    #[must_use]
    pub fn capacity(mut self, keys: usize) -> Self {
        self.capacity = keys.max(1);
        self
    }

    /// How many locks the keys are spread over: rounded up to a power of two, at most 65,536.
    /// Sixteen a processor unless told otherwise.
    #[must_use]
    pub fn shards(mut self, shards: usize) -> Self {
        self.shards = shards;
        self
    }

    /// Another clock, such as [`ManualClock`](ratelimit_core::ManualClock) in a test.
    #[must_use]
    pub fn clock<D: Clock>(self, clock: D) -> Builder<D> {
        Builder { capacity: self.capacity, shards: self.shards, clock }
    }

    /// The store.
    #[must_use]
    pub fn build<A: Algorithm>(self) -> MemoryStore<A, C> {
        let shards = self.shards.clamp(1, 1 << 16).next_power_of_two();
        MemoryStore {
            shards: (0..shards).map(|_| Mutex::new(Shard::new())).collect(),
            overflow: Mutex::new(Shard::new()),
            holds: (0..shards).map(|_| Mutex::new(Shard::new())).collect(),
            hasher: KeyHasher::default(),
            clock: self.clock,
            held: AtomicUsize::new(0),
            holding: AtomicUsize::new(0),
            capacity: self.capacity,
            overflowed: AtomicU64::new(0),
            next_to_sweep: AtomicUsize::new(0),
        }
    }
}

impl<A: Algorithm> MemoryStore<A> {
    /// A store with the system's clock and room for 1,048,576 keys.
    #[must_use]
    pub fn new() -> Self {
        Builder::new().build()
    }
}

impl<A: Algorithm> Default for MemoryStore<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// Where to say how large the store is, and by which clock it lives.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::new()
    }
}

/// What a check has been given to be decided on.
#[derive(Clone, Copy)]
enum Place {
    /// Its key is held, in the shard at this position of the locked ones, in this slot.
    Held { shard: usize, slot: usize },
    /// Its key is new, and a place is reserved in the shard at this position.
    Reserved(usize),
    /// Its key is new and there is no room: the limit's overflow state.
    Overflow,
}

impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// How many keys are held, those included that have expired and not been swept yet.
    #[must_use]
    pub fn len(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// Whether no key is held.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// How many checks were decided on a shared bucket because the store was full. More than 0
    /// asks for a larger [capacity](Builder::capacity).
    #[must_use]
    pub fn overflowed(&self) -> u64 {
        self.overflowed.load(Ordering::Relaxed)
    }

    /// The state held for a key of the limit of this name.
    #[must_use]
    pub fn state(&self, limit: &str, key: &str) -> Option<A::State> {
        let key = self.key(limit, key);
        let shard = lock(&self.shards[self.shard_of(key)]);
        shard.state(shard.find(key)?).cloned()
    }

    fn key<'a>(&self, limit: &'a str, caller: &'a str) -> Key<'a> {
        Key { hash: self.hasher.hash_one((limit, caller)), limit, caller }
    }

    fn key_of<'a>(&self, check: &Check<'a, A>) -> Key<'a> {
        self.key(check.limit.name(), check.key)
    }

    fn shard_of(&self, key: Key<'_>) -> usize {
        shard_of(key.hash, self.shards.len())
    }

    /// Sweeps a little in the locked shards. Like all sweeping it comes before slots are noted: a noted
    /// slot must stay its key's own.
    fn sweep_in_passing(&self, shards: &mut [MutexGuard<'_, Shard<A::State>>], now: Tick) {
        let freed = shards.iter_mut().map(|shard| shard.sweep(now, SWEEP_SLOTS)).sum();
        self.release(freed);
        if self.holding.load(Ordering::Relaxed) > 0 {
            let next = self.next_to_sweep.fetch_add(1, Ordering::Relaxed) % self.holds.len();
            // Never waits.
            if let Ok(mut holds) = self.holds[next].try_lock() {
                self.release_holds(holds.sweep(now, SWEEP_SLOTS));
            }
        }
    }

    /// Sweeps more if there is no room for so many new keys.
    fn make_room(
        &self,
        shards: &mut [MutexGuard<'_, Shard<A::State>>],
        new_keys: usize,
        now: Tick,
    ) {
        let is_full = || self.len().saturating_add(new_keys) > self.capacity;
        if is_full() {
            let freed =
                shards.iter_mut().map(|shard| shard.sweep(now, SWEEP_SLOTS_WHEN_FULL)).sum();
            self.release(freed);
        }
        if is_full() {
            self.sweep_elsewhere(now);
        }
    }

    /// A place for a new key in the shard at this position of the locked ones.
    fn reserved(&self, position: usize) -> Place {
        if self.reserve() { Place::Reserved(position) } else { Place::Overflow }
    }

    /// Sweeps a few other shards, and a few of holds, those that nobody is using just now.
    fn sweep_elsewhere(&self, now: Tick) {
        let (mut freed, mut freed_holds) = (0, 0);
        for _ in 0..SWEEP_SHARDS_WHEN_FULL {
            let next = self.next_to_sweep.fetch_add(1, Ordering::Relaxed) % self.shards.len();
            // Never waits, and passes over those that this very thread holds.
            if let Ok(mut shard) = self.shards[next].try_lock() {
                freed += shard.sweep(now, SWEEP_SLOTS_WHEN_FULL);
            }
            if self.holding.load(Ordering::Relaxed) > 0
                && let Ok(mut holds) = self.holds[next].try_lock()
            {
                freed_holds += holds.sweep(now, SWEEP_SLOTS_WHEN_FULL);
            }
        }
        self.release(freed);
        self.release_holds(freed_holds);
    }

    fn reserve(&self) -> bool {
        let one_more = |held| (held < self.capacity).then_some(held + 1);
        self.held.fetch_update(Ordering::Relaxed, Ordering::Relaxed, one_more).is_ok()
    }

    fn release(&self, places: usize) {
        if places > 0 {
            self.held.fetch_sub(places, Ordering::Relaxed);
        }
    }

    fn release_holds(&self, places: usize) {
        if places > 0 {
            self.holding.fetch_sub(places, Ordering::Relaxed);
            self.release(places);
        }
    }

    /// Locks what is held under the batch's id, with places for what may be new.
    fn locked_holds(
        &self,
        batch: &Batch<'_, A>,
        own: Tick,
    ) -> Result<Option<HeldHolds<'_>>, MemoryError> {
        let Some(mut holds) = HeldHolds::lock(&self.holds, &self.hasher, batch) else {
            return Ok(None);
        };
        self.release_holds(holds.sweep(own));
        if !matches!(batch.operation(), Op::Settle | Op::Renew | Op::Peek) {
            let new_keys = holds.new_keys();
            if self.len().saturating_add(new_keys) > self.capacity {
                self.sweep_elsewhere(own);
            }
            for _ in 0..new_keys {
                if !self.reserve() {
                    self.release_holds(holds.reserved);
                    return Err(MemoryError::Full { capacity: self.capacity });
                }
                self.holding.fetch_add(1, Ordering::Relaxed);
                holds.reserved += 1;
            }
        }
        Ok(Some(holds))
    }

    fn decide_one(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
    ) -> Result<Verdict, MemoryError> {
        let key = self.key_of(check);
        let mut held = [lock(&self.shards[self.shard_of(key)])];
        let own = self.clock.now();
        self.sweep_in_passing(&mut held, own);
        let place = if let Some(slot) = held[0].find(key) {
            Place::Held { shard: 0, slot }
        } else {
            self.make_room(&mut held, 1, own);
            self.reserved(0)
        };
        self.decide_held(batch, own, &mut held, &mut [(key, place)])
    }

    fn decide_several(&self, batch: &Batch<'_, A>) -> Result<Verdict, MemoryError> {
        let keys: Vec<_> = batch.checks().iter().map(|check| self.key_of(check)).collect();
        let mut locked = Locked::lock(&self.shards, keys.iter().map(|key| self.shard_of(*key)));
        let own = self.clock.now();
        self.sweep_in_passing(&mut locked.shards, own);
        let positions: Vec<_> =
            keys.iter().map(|key| locked.position(self.shard_of(*key))).collect();
        let found = |(key, position): (&Key<'_>, &usize)| locked.shards[*position].find(*key);
        let new_keys = keys.iter().zip(&positions).filter(|at| found(*at).is_none()).count();
        if new_keys > 0 {
            self.make_room(&mut locked.shards, new_keys, own);
        }
        let place = |(key, &shard): (&Key<'_>, &usize)| match locked.shards[shard].find(*key) {
            Some(slot) => Place::Held { shard, slot },
            None => self.reserved(shard),
        };
        let mut places: Vec<_> = keys.iter().zip(&positions).map(|at| (*at.0, place(at))).collect();
        self.decide_held(batch, own, &mut locked.shards, &mut places)
    }

    /// Decides with all shards of the batch locked.
    fn decide_held<'s>(
        &'s self,
        batch: &Batch<'_, A>,
        own: Tick,
        shards: &mut [MutexGuard<'s, Shard<A::State>>],
        places: &mut [(Key<'_>, Place)],
    ) -> Result<Verdict, MemoryError> {
        let overflow = self.divert_overflow(places, own);
        let unused = |(_, place): &&mut (Key<'_>, Place)| matches!(place, Place::Reserved(_));
        let holds = match self.locked_holds(batch, own) {
            Ok(holds) => holds,
            Err(full) => {
                self.release(places.iter_mut().filter(unused).count());
                return Err(full);
            }
        };
        let now = match batch.time() {
            Now::Store => own,
            Now::At(now) => now,
        };
        let mut held = Held { shards, overflow, holds, places, own, time: batch.time(), freed: 0 };
        let verdict = decide(batch, now, &mut held).map_err(MemoryError::Refused);
        self.release_holds(held.holds.as_ref().map_or(0, |holds| holds.reserved));
        let released = held.freed + held.places.iter_mut().filter(unused).count();
        self.release(released);
        verdict
    }

    /// Gives the checks without a place of their own the shared state of their limit.
    fn divert_overflow(
        &self,
        places: &mut [(Key<'_>, Place)],
        own: Tick,
    ) -> Option<MutexGuard<'_, Shard<A::State>>> {
        let diverted = |place: &(Key<'_>, Place)| matches!(place.1, Place::Overflow);
        let count = places.iter().filter(|place| diverted(place)).count();
        if count == 0 {
            return None;
        }
        self.overflowed.fetch_add(count as u64, Ordering::Relaxed);
        for position in 0..places.len() {
            if diverted(&places[position]) {
                // Two keys of one limit in one batch must not be charged to one state unseen.
                let limit = places[position].0.limit;
                let same = |place: &&(Key<'_>, Place)| diverted(place) && place.0.limit == limit;
                let nth = places[..position].iter().filter(same).count();
                places[position].0 = self.key(limit, &NTH_OVERFLOW[..nth.min(NTH_OVERFLOW.len())]);
            }
        }
        let mut overflow = lock(&self.overflow);
        overflow.sweep(own, SWEEP_SLOTS);
        Some(overflow)
    }
}

/// The keys of overflow states: nothing for the first of a limit in a batch, then one dot more for
/// each.
const NTH_OVERFLOW: &str = "................................................................";

/// The states of a batch, held still.
struct Held<'h, 's, 'k, S> {
    shards: &'h mut [MutexGuard<'s, Shard<S>>],
    overflow: Option<MutexGuard<'s, Shard<S>>>,
    holds: Option<HeldHolds<'s>>,
    places: &'h mut [(Key<'k>, Place)],
    own: Tick,
    time: Now,
    /// Places that became free.
    freed: usize,
}

impl<S> States<S> for Held<'_, '_, '_, S> {
    fn get(&self, position: usize) -> Option<&S> {
        match self.places[position] {
            (_, Place::Held { shard, slot }) => self.shards[shard].state(slot),
            (_, Place::Reserved(_)) => None,
            (key, Place::Overflow) => {
                let overflow = self.overflow.as_ref()?;
                overflow.state(overflow.find(key)?)
            }
        }
    }

    fn put(&mut self, position: usize, write: Write<S>) {
        let (key, place) = self.places[position];
        match (write, place) {
            // One caller's reset or refund must not free all who share an overflow state.
            (Write::Keep, _) | (Write::Remove, Place::Reserved(_) | Place::Overflow) => {}
            (Write::Put { state, expires }, place) => {
                let sweep_at = sweep_at(self.time, self.own, expires);
                match (place, &mut self.overflow) {
                    (Place::Held { shard, slot }, _) => {
                        self.shards[shard].replace(slot, state, sweep_at);
                    }
                    (Place::Reserved(shard), _) => {
                        let slot = self.shards[shard].insert(key, state, sweep_at);
                        self.places[position].1 = Place::Held { shard, slot };
                    }
                    (Place::Overflow, Some(overflow)) => match overflow.find(key) {
                        Some(slot) => overflow.replace(slot, state, sweep_at),
                        None => drop(overflow.insert(key, state, sweep_at)),
                    },
                    (Place::Overflow, None) => {}
                }
            }
            (Write::Remove, Place::Held { shard, slot }) => {
                self.freed += usize::from(self.shards[shard].clear(slot));
            }
        }
    }

    fn hold(&self, position: usize) -> Option<Hold> {
        self.holds.as_ref()?.get(position)
    }

    fn put_hold(&mut self, position: usize, hold: Hold, expires: Tick) {
        let sweep_at = sweep_at(self.time, self.own, expires);
        if let Some(holds) = &mut self.holds {
            holds.put(position, hold, sweep_at);
        }
    }
}

impl<A: Algorithm, C: Clock> SyncStore<A> for MemoryStore<A, C> {
    fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, MemoryError> {
        match batch.checks() {
            [check] => self.decide_one(batch, check),
            _ => self.decide_several(batch),
        }
    }
}

impl<A: Algorithm, C: Clock> Store<A> for MemoryStore<A, C> {
    type Error = MemoryError;

    fn apply(
        &self,
        batch: &Batch<'_, A>,
    ) -> impl Future<Output = Result<Verdict, MemoryError>> + Send {
        ready(self.apply_now(batch))
    }
}

impl<A: KeepsEntries, C: Clock> EntryStore<A> for MemoryStore<A, C> {
    fn entries(
        &self,
        limit: &Limit<A>,
        key: &str,
        now: Now,
    ) -> impl Future<Output = Result<Vec<WindowEntry>, MemoryError>> + Send {
        let state = self.state(limit.name(), key);
        let now = match now {
            Now::Store => self.clock.now(),
            Now::At(now) => now,
        };
        let entries = |state: &A::State| limit.algorithm().entries_of(state, now).to_vec();
        ready(Ok(state.as_ref().map(entries).unwrap_or_default()))
    }
}

/// What the store cannot do. Nothing was charged.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// A request that cannot be.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// There is no place for what is to be held under an id.
    #[error(
        "the store is full with {capacity} keys and holds, and nothing more can be held under an id; \
         give it a larger capacity"
    )]
    Full {
        /// How many it may have.
        capacity: usize,
    },
}

impl StoreError for MemoryError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Refused(refusal) => refusal.kind(),
            Self::Full { .. } => ErrorKind::Unavailable,
        }
    }
}

impl<A: Algorithm, C> fmt::Debug for MemoryStore<A, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("held", &self.held.load(Ordering::Relaxed))
            .field("capacity", &self.capacity)
            .field("overflowed", &self.overflowed.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, not(loom)))]
mod tests;
