//! [`MemoryStore`]: a cuckoo table for compact states, shards for all others.

#![allow(clippy::inline_always, reason = "see the same in `fast_path.rs`")]

use std::fmt;
use std::future::{Future, ready};

use ratelimit_core::{
    Batch, Check, Clock, Compact, EntryStore, ErrorKind, InMemory, KeepsEntries, Limit, Now, Op,
    Policy, Refusal, Store, StoreError, SyncStore, Timestamp, Verdict, WindowEntry, fingerprint,
};

use crate::capacity::Capacity;
use crate::clock::PreciseClock;
use crate::cuckoo::{Address, CuckooTable};
use crate::hash::{CALLER_BITS, KeyHasher};
use crate::reservations::{IdHasher, Named};
use crate::shard::{MOST_SLOTS, Shard, shard_of};
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, lock};

mod fast_path;
mod locked_batch;
mod optimistic_batch;
mod reservation_path;
mod shard_path;
mod sweep;

use fast_path::{Probe, is_plain};

/// The default capacity, in keys.
const DEFAULT_CAPACITY: usize = 1 << 20;
/// Log entries per key of the capacity, by default.
const ENTRIES_A_KEY: usize = 16;
/// The fewest log entries of a store, by default.
const LEAST_ENTRIES: usize = 1 << 16;

/// An in-process [`Store`]. See the [crate's documentation](crate) for its behaviour.
pub struct MemoryStore<A: InMemory = Policy, C = PreciseClock> {
    /// The compact states, if the algorithm has any.
    table: Option<CuckooTable>,
    /// All other states, by a hash of the key. Locked after any bucket.
    shards: Box<[Mutex<Shard<A::State>>]>,
    /// The states that new keys share when the store is full, one per limit. Locked after any shard.
    overflow: Mutex<Shard<A::State>>,
    /// The reservations, by the ids of batches. Locked after all others.
    reservations: Box<[Mutex<Shard<Named>>]>,
    hasher: KeyHasher,
    id_hasher: IdHasher,
    clock: C,
    capacity: Capacity,
    overflowed: AtomicU64,
    /// The shard that the next sweep looks into.
    next_to_sweep: AtomicUsize,
    /// How many buckets the next sweep of a full store looks into.
    buckets_when_full: AtomicUsize,
}

/// The key of a state: the hash of the limit's name and the caller's key.
#[derive(Clone, Copy)]
struct Key<'a> {
    hash: u64,
    limit: &'a str,
}

/// The settings of a [`MemoryStore`] that is to be built.
#[derive(Clone, Debug)]
pub struct Builder<C = PreciseClock> {
    capacity: usize,
    entries: Option<usize>,
    shards: usize,
    clock: ClockSource<C>,
}

/// Where a store's clock comes from. A default clock is made only if the store uses it: making one panics where
/// the system has no time (`wasm32-unknown-unknown`).
#[derive(Clone, Debug)]
enum ClockSource<C> {
    Given(C),
    Made(fn() -> C),
}

impl<C> ClockSource<C> {
    fn into_clock(self) -> C {
        match self {
            Self::Given(clock) => clock,
            Self::Made(make) => make(),
        }
    }
}

impl Builder<PreciseClock> {
    fn new() -> Self {
        let threads = std::thread::available_parallelism().map_or(4, std::num::NonZero::get);
        let clock = ClockSource::Made(PreciseClock::new);
        Self { capacity: DEFAULT_CAPACITY, entries: None, shards: threads * 16, clock }
    }
}

impl<C: Clock> Builder<C> {
    /// The most keys that the store may have: at least 1, at most 4,294,967,295, and 1,048,576 by default.
    /// Memory grows with the keys; only 16 bytes per thousand keys of the capacity are allocated up front.
    ///
    /// # At capacity
    /// A new key that finds no place shares one state per limit with all other such keys: together they are
    /// admitted what the limit admits one key. A batch that names several of them is charged the sum of their
    /// costs, or nothing. A key gets a state of its own, at full capacity, as soon as there is a place for it.
    /// A key is therefore admitted at most twice its limit within any time: once by the shared state, and once
    /// by its own.
    #[must_use]
    pub fn capacity(mut self, keys: usize) -> Self {
        self.capacity = keys.clamp(1, MOST_SLOTS);
        self
    }

    /// The most entries that all logs together may keep, at least 2. Entries are what sliding and window logs
    /// have admitted, leases, and the buckets of bucketed windows. The default is sixteen per key of the
    /// [capacity](Self::capacity), but no fewer than 65,536. An entry takes 16 bytes; in a window log it takes
    /// 32 bytes and its metadata.
    #[must_use]
    pub const fn entries(mut self, entries: usize) -> Self {
        self.entries = Some(if entries < 2 { 2 } else { entries });
        self
    }

    /// The number of locks that the keys are spread over, rounded up to a power of two, at most 16,384. The
    /// default is sixteen per processor.
    #[must_use]
    pub fn shards(mut self, shards: usize) -> Self {
        self.shards = shards;
        self
    }

    /// Sets the clock, such as a [`ManualClock`](ratelimit_core::ManualClock) in a test. The store then reads
    /// no system clock. `wasm32-unknown-unknown` has none, so a store there needs this setting.
    #[must_use]
    pub fn clock<D: Clock>(self, clock: D) -> Builder<D> {
        let clock = ClockSource::Given(clock);
        Builder { capacity: self.capacity, entries: self.entries, shards: self.shards, clock }
    }

    /// Builds the store.
    #[must_use]
    pub fn build<A: InMemory>(self) -> MemoryStore<A, C> {
        let shards = self.shards.clamp(1, 1 << CALLER_BITS).next_power_of_two();
        let hasher = KeyHasher::random();
        let in_proportion = self.capacity.saturating_mul(ENTRIES_A_KEY).max(LEAST_ENTRIES);
        let most_entries = self.entries.unwrap_or(in_proportion);
        let nothing = Compact { at: Timestamp::ZERO, span_us: 0, extra: 0 };
        let has_compact_states = A::from_compact(nothing).is_some();
        let clock = self.clock.into_clock();
        MemoryStore {
            table: has_compact_states.then(|| CuckooTable::new(self.capacity, clock.now())),
            shards: (0..shards).map(|_| Mutex::new(Shard::new())).collect(),
            overflow: Mutex::new(Shard::new()),
            reservations: (0..shards).map(|_| Mutex::new(Shard::new())).collect(),
            id_hasher: IdHasher::new(&hasher),
            hasher,
            clock,
            capacity: Capacity::new(self.capacity, most_entries),
            overflowed: AtomicU64::new(0),
            next_to_sweep: AtomicUsize::new(0),
            buckets_when_full: AtomicUsize::new(sweep::MOST_BUCKETS_WHEN_FULL),
        }
    }
}

impl<A: InMemory> MemoryStore<A> {
    /// Creates a store with a [`PreciseClock`] and a capacity of 1,048,576 keys.
    #[must_use]
    pub fn new() -> Self {
        Builder::new().build()
    }
}

impl<A: InMemory> Default for MemoryStore<A> {
    fn default() -> Self {
        Self::new()
    }
}

impl MemoryStore {
    /// Returns a builder, which sets the store's size and clock.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::new()
    }
}

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Returns the number of keys in the store, including expired keys that no call has swept yet. Reservations
    /// count as keys.
    #[must_use]
    pub fn len(&self) -> usize {
        self.capacity.keys()
    }

    /// Returns whether the store contains no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns how many checks were decided on a shared state because the store was full. If it is more than 0,
    /// the store needs a larger [capacity](Builder::capacity).
    #[must_use]
    pub fn overflowed(&self) -> u64 {
        self.overflowed.load(Ordering::Relaxed)
    }

    /// Returns how many entries all logs together keep, including expired entries that no call has swept yet.
    /// It never exceeds [the cap](Builder::entries).
    #[must_use]
    pub fn entry_count(&self) -> usize {
        lock(&self.overflow).entries() + self.capacity.entries()
    }

    /// Returns the state of a key under the limit of this name, if the key has one of its own.
    #[must_use]
    pub fn state(&self, limit: &str, key: &str) -> Option<A::State> {
        let key = self.key(limit, fingerprint(limit), key);
        // Locked until the shard has been searched: a key may move from one to the other.
        let mut held = self.table.as_ref().map(|table| (table, table.lock(Address::new(key.hash))));
        if let Some((table, held)) = &mut held
            && let Some(state) = held.state()
        {
            return A::from_compact(table.unpack(state));
        }
        let shard = lock(&self.shards[shard_of(key.hash, self.shards.len())]);
        shard.state(shard.find(key.hash)?).cloned()
    }

    /// Decides a batch that the fast path did not decide.
    #[inline(never)]
    fn decide(&self, batch: &Batch<'_, A>) -> Result<Verdict, MemoryError> {
        if let [check] = batch.checks() {
            let is_compact = check.limit.algorithm().is_compact();
            if is_compact && let Some(decision) = self.decide_in_table(batch, check) {
                return Ok(Verdict::one(decision));
            }
            match self.decide_in_shard(batch, check) {
                Ok(decision) => return Ok(Verdict::one(decision)),
                Err(Some(key)) if !is_compact => {
                    if let Some(decision) = self.decide_missing(batch, check, key) {
                        return Ok(Verdict::one(decision));
                    }
                }
                Err(_) => {}
            }
            if let Some(decided) = self.decide_held(batch, check) {
                return decided;
            }
        }
        if let Some(verdict) = self.decide_few(batch) {
            return Ok(verdict);
        }
        self.decide_locked(batch)
    }

    /// Charges a key that the fast path did not charge.
    #[inline(never)]
    fn acquire(&self, limit: &Limit<A>, key: &str, cost: u64) -> Result<Verdict, MemoryError> {
        let check = Check { limit, key, cost };
        match self.decide_unlocked(check, true) {
            Some(decision) => Ok(Verdict::one(decision)),
            None => self.decide(&Batch::one(&check)),
        }
    }

    /// Charges several keys, each for itself, so that their cache misses overlap.
    #[inline]
    fn acquire_together<const N: usize>(
        &self,
        limit: &Limit<A>,
        keys: &[&str; N],
        cost: u64,
        told: &mut impl FnMut(Result<Verdict, MemoryError>),
    ) {
        let Some(table) = self.table_for(limit) else {
            for key in keys {
                told(self.acquire_now(limit, key, cost));
            }
            return;
        };
        // All buckets are prefetched before the first is read, so that the cache misses overlap.
        let sought: [_; N] = std::array::from_fn(|place| {
            let sought = Probe::new(table, self.address_of(limit, keys[place]));
            sought.prefetch();
            sought
        });
        let now = self.clock.now();
        if !limit.algorithm().has_fast_step() {
            return self.acquire_sought(limit, keys, cost, &sought, now, told);
        }
        for (sought, key) in sought.iter().zip(keys) {
            told(match sought.charge(limit.algorithm(), now, cost) {
                Some(decision) => Ok(Verdict::one(decision)),
                None => self.acquire(limit, key, cost),
            });
        }
    }

    /// [`acquire_together`](Self::acquire_together) by the algorithm's general step. It is a function of its
    /// own so that the fast one stays short.
    #[inline(never)]
    fn acquire_sought(
        &self,
        limit: &Limit<A>,
        keys: &[&str],
        cost: u64,
        sought: &[Probe<'_>],
        now: Timestamp,
        told: &mut impl FnMut(Result<Verdict, MemoryError>),
    ) {
        for (sought, key) in sought.iter().zip(keys) {
            told(match sought.decide(limit.algorithm(), now, cost, true) {
                Ok(decision) => Ok(Verdict::one(decision)),
                Err(_) => self.acquire(limit, key, cost),
            });
        }
    }

    #[inline]
    fn key<'a>(&self, limit: &'a str, fingerprint: u64, caller: &str) -> Key<'a> {
        Key { hash: self.hasher.hash(caller).under(fingerprint), limit }
    }

    #[inline]
    fn key_of<'a>(&self, check: &Check<'a, A>) -> Key<'a> {
        self.key(check.limit.name(), check.limit.fingerprint(), check.key)
    }
}

impl<A: InMemory, C: Clock> SyncStore<A> for MemoryStore<A, C> {
    #[inline]
    fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, MemoryError> {
        if let [check] = batch.checks()
            && is_plain(batch)
        {
            if batch.operation() == Op::Acquire {
                return self.acquire_now(check.limit, check.key, check.cost);
            }
            if let Some(decision) = self.decide_unlocked(*check, false) {
                return Ok(Verdict::one(decision));
            }
        }
        self.decide(batch)
    }

    #[inline(always)]
    fn acquire_now(&self, limit: &Limit<A>, key: &str, cost: u64) -> Result<Verdict, MemoryError> {
        match self.charge_at_once(limit, key, cost) {
            Some(decision) => Ok(Verdict::one(decision)),
            None => self.acquire(limit, key, cost),
        }
    }

    /// Reads the time once per eight keys, or once per four of those that are left. If `told` panics, the key
    /// that it was told of and all keys before it have been decided, and no other key has.
    fn acquire_each_now(
        &self,
        limit: &Limit<A>,
        keys: &[&str],
        cost: u64,
        mut told: impl FnMut(usize, Result<Verdict, MemoryError>),
    ) {
        let mut place = 0;
        let mut told = |said| {
            told(place, said);
            place += 1;
        };
        let (eights, keys) = keys.as_chunks::<8>();
        let (fours, keys) = keys.as_chunks::<4>();
        for keys in eights {
            self.acquire_together(limit, keys, cost, &mut told);
        }
        for keys in fours {
            self.acquire_together(limit, keys, cost, &mut told);
        }
        for key in keys {
            told(self.acquire_now(limit, key, cost));
        }
    }
}

impl<A: InMemory, C: Clock> Store<A> for MemoryStore<A, C> {
    type Error = MemoryError;

    fn apply(
        &self,
        batch: &Batch<'_, A>,
    ) -> impl Future<Output = Result<Verdict, MemoryError>> + Send {
        ready(self.apply_now(batch))
    }
}

impl<A: KeepsEntries + InMemory, C: Clock> EntryStore<A> for MemoryStore<A, C> {
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

/// The errors of a [`MemoryStore`]. A call that returns one has charged nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The request is invalid.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The store has no place for another reservation.
    #[error(
        "the store is full with {capacity} keys and holds, and nothing more can be held under an id; \
         give it a larger capacity"
    )]
    Full {
        /// The most keys and reservations that the store may have.
        capacity: usize,
    },
    /// The logs have no room for the entries that the request needs.
    #[error(
        "the logs of the store keep all of the {most} entries that they may, and none more can be kept; \
         give it more entries, or limits that keep none, such as gcra or sliding-counter"
    )]
    Entries {
        /// The most entries that all logs together may keep.
        most: usize,
    },
}

impl StoreError for MemoryError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Refused(refusal) => refusal.kind(),
            Self::Full { .. } | Self::Entries { .. } => ErrorKind::Unavailable,
        }
    }
}

impl<A: InMemory, C> fmt::Debug for MemoryStore<A, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("held", &self.capacity.keys())
            .field("capacity", &self.capacity.most_keys())
            .field("overflowed", &self.overflowed.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, loom))]
mod loom_paths;
#[cfg(all(test, not(loom)))]
mod tests;
