//! [`MemoryStore`]: a cuckoo table for compact states, shards for all others.
//!
//! A state of a few numbers goes to the table, unless it takes more than twelve days to recover or
//! is written more than 2.2 years after the store was made. All other states go to shards: windows,
//! logs, leases, stacks, and states that were charged at an explicit time.
//!
//! The locked batch can decide everything. Each other path is only faster, and stays while it saves
//! a tenth of the instructions of the requests that it serves.

#![allow(clippy::inline_always, reason = "see the same in `fast_path.rs`")]

use std::borrow::Cow;
use std::fmt;
use std::future::{Future, ready};

use ratelimit_core::algorithm::{InMemory, LoggedRequest};
use ratelimit_core::store::{
    Batch, Check, LogStore, Now, Op, RecordStore, SnapshotStore, WithSnapshot,
};
use ratelimit_core::{
    AnyAlgorithm, Clock, Identifiers, Limit, Limits, RateLimiter, Record, Store, SyncStore,
    Timestamp, Verdict,
};

use crate::capacity::Capacity;
use crate::clock::PreciseClock;
use crate::cuckoo::{Address, CuckooTable};
use crate::hash::{CallerHash, KeyHasher};
use crate::records::{Full, Records};
use crate::reservations::KeyedReservation;
use crate::shard::{Shard, shard_of};
use crate::sync::{AtomicU64, AtomicUsize, Mutex, Ordering, lock};

mod bucket_path;
mod builder;
mod error;
mod fast_path;
mod known_batch;
mod locked_batch;
mod optimistic_batch;
mod shard_path;
mod sweep;

pub use builder::Builder;
pub use error::MemoryError;
use fast_path::{Probe, is_plain};
use optimistic_batch::FEW;

/// An in-process [`Store`]. See the [crate's documentation](crate) for its behaviour.
pub struct MemoryStore<A: InMemory = AnyAlgorithm, C = PreciseClock> {
    /// The compact states, if the algorithm has any.
    table: Option<CuckooTable>,
    /// All other states, by a hash of the key. Locked after any bucket.
    shards: Box<[Mutex<Shard<A::State>>]>,
    /// The states that new keys share when the store is full, one per limit. Locked after any
    /// shard.
    overflow: Mutex<Shard<A::State>>,
    /// The reservations, by the ids of batches. Locked after all others.
    reservations: Box<[Mutex<Shard<KeyedReservation>>]>,
    /// What operators have decided for single callers. Locked last.
    records: Records<A>,
    hasher: KeyHasher,
    /// The hash of the shared states' key.
    shared_hash: CallerHash,
    clock: C,
    capacity: Capacity,
    overflowed: AtomicU64,
    unrecorded: AtomicU64,
    /// The shard that the next sweep looks into.
    next_to_sweep: AtomicUsize,
    /// How many buckets the next sweep of a full store looks into.
    buckets_when_full: AtomicUsize,
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
    /// Returns the number of keys in the store, including expired keys that no call has swept yet,
    /// without [reservations](Self::reservations).
    #[must_use]
    pub fn len(&self) -> usize {
        self.capacity.keys.used()
    }

    /// Returns whether the store contains no key.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns how many checks were decided on a shared state because the store was full. If it is
    /// more than 0, the store needs a larger [capacity](Builder::capacity).
    #[must_use]
    pub fn overflowed(&self) -> u64 {
        self.overflowed.load(Ordering::Relaxed)
    }

    /// Returns the number of reservations and leases in the store: those that wait for their
    /// settlement, those that are settled and not yet forgotten, and expired ones that no call has
    /// swept yet. It never exceeds [the cap](Builder::reservations).
    #[must_use]
    pub fn reservations(&self) -> usize {
        self.capacity.reservations.used()
    }

    /// Returns how many requests were charged [without a record](Verdict::is_unrecorded) of their
    /// reservation, because the store had no room for it. If it is more than 0, the store needs
    /// room for more [reservations](Builder::reservations).
    #[must_use]
    pub fn unrecorded(&self) -> u64 {
        self.unrecorded.load(Ordering::Relaxed)
    }

    /// Returns the number of [records](Record) in the store, including ended ones that no record
    /// has replaced yet. It never exceeds [the cap](Builder::records).
    #[must_use]
    pub fn record_count(&self) -> usize {
        self.records.count()
    }

    /// Returns how many entries all logs together keep, including expired entries that no call has
    /// swept yet. Of all, those beyond the part of their key never exceed [the
    /// cap](Builder::entries).
    #[must_use]
    pub fn entry_count(&self) -> usize {
        lock(&self.overflow).entries() + self.capacity.entries.used()
    }

    /// Returns the state of a key under a limit, if the key has one of its own.
    #[must_use]
    pub fn state(&self, limit: &Limit<A>, key: &str) -> Option<A::State> {
        let hash = self.hash(limit, key);
        // Locked until the shard has been searched: a key may move from one to the other.
        let mut pair = self.table.as_ref().map(|table| (table, table.lock(Address::new(hash))));
        if let Some((table, pair)) = &mut pair
            && let Some(state) = pair.state()
        {
            return A::from_compact(table.unpack(state));
        }
        let shard = lock(&self.shards[shard_of(hash, self.shards.len())]);
        shard.state(shard.find(hash)?).cloned()
    }

    /// The hash of a key under a limit.
    #[inline(always)]
    fn hash(&self, limit: &Limit<A>, key: &str) -> u64 {
        self.hasher.hash(key).under(limit.fingerprint())
    }

    /// Hashes the keys of a batch, each once for consecutive limits.
    #[inline(always)]
    fn hash_all(&self, batch: &Batch<'_, A>, hashes: &mut [u64]) {
        let mut last: Option<(&str, CallerHash)> = None;
        for (hash, check) in hashes.iter_mut().zip(batch.checks()) {
            let caller = match last {
                Some((key, caller)) if std::ptr::eq(key, check.key) => caller,
                _ => self.hasher.hash(check.key),
            };
            last = Some((check.key, caller));
            *hash = caller.under(check.limit.fingerprint());
        }
    }

    /// Charges a key that the fast step did not charge.
    #[inline(never)]
    fn acquire(
        &self,
        limit: &Limit<A>,
        key: &str,
        hash: u64,
        cost: u64,
    ) -> Result<Verdict, MemoryError> {
        let check = Check { limit, key, cost };
        if limit.counts_attempts() {
            return self.acquire_attempt(&check, hash);
        }
        let by_record = self.records.may_have(limit, hash);
        match if by_record {
            self.charge_by_record(&check, hash)
        } else {
            self.decide_unlocked::<false>(&check, hash, true)
        } {
            Some(decision) => Ok(Verdict::one(decision)),
            None => self.decide_one(&Batch::one(&check), &check, hash),
        }
    }

    /// Apart, so that the decisions of all other limits stay in registers.
    #[inline(never)]
    fn acquire_attempt(&self, check: &Check<'_, A>, hash: u64) -> Result<Verdict, MemoryError> {
        match self.decide_unlocked::<true>(check, hash, true) {
            Some(decision) => Ok(Verdict::one(decision)),
            None => self.decide_one(&Batch::one(check), check, hash),
        }
    }

    /// Decides one check that the fast path did not decide.
    #[inline(never)]
    fn decide_one(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
        hash: u64,
    ) -> Result<Verdict, MemoryError> {
        let in_buckets = self.decide_in_buckets(batch, check, hash);
        match in_buckets.or_else(|| self.decide_in_shard(batch, check, hash)) {
            Some(decision) => Ok(Verdict::one(decision)),
            None => self.decide_locked(batch, &[hash], None),
        }
    }

    /// Decides several checks, all of them or none.
    #[inline(never)]
    fn decide_several(&self, batch: &Batch<'_, A>) -> Result<Verdict, MemoryError> {
        let (mut few, mut many) = ([0; FEW], Vec::new());
        let hashes = if let Some(few) = few.get_mut(..batch.checks().len()) {
            few
        } else {
            many.resize(batch.checks().len(), 0);
            &mut many[..]
        };
        self.hash_all(batch, hashes);
        // A batch by records needs more.
        let is_ruled = self.records.may_rule(batch, hashes);
        let optimistic = if is_ruled { None } else { self.decide_optimistically(batch, hashes) };
        match optimistic.or_else(|| self.decide_known(batch, hashes)) {
            Some(verdict) => Ok(verdict),
            None => self.decide_locked(batch, hashes, None),
        }
    }

    /// [`RateLimiter::check_now`] of several callers, in order and each by itself; `report` gets
    /// the position and the result of each. With a single limit, the clock is read and memory
    /// fetched for eight callers together, which is faster than one call each; so `report` should
    /// be quick.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limits, RateLimiter};
    /// use ratelimit_memory::MemoryStore;
    ///
    /// let limits = Limits::builder().limit("burst", Gcra::per_second(10)).build()?;
    /// let limiter = RateLimiter::new(limits, MemoryStore::new());
    /// let mut denied = Vec::new();
    /// MemoryStore::check_each_now(&limiter, &["alice", "bob", "carol"], |position, said| match said {
    ///     Ok(verdict) if verdict.allowed() => {}
    ///     _ => denied.push(position),
    /// });
    /// assert!(denied.is_empty());
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    pub fn check_each_now<I: Identifiers + ?Sized>(
        limiter: &RateLimiter<Self, A>,
        callers: &[&I],
        mut report: impl FnMut(usize, Result<Verdict, MemoryError>),
    ) {
        for (nth, callers) in callers.chunks(AT_ONCE).enumerate() {
            let mut report = |position, decided| report(nth * AT_ONCE + position, decided);
            let mut keys = [""; AT_ONCE];
            if let Some(limit) = one_key_each(limiter.limits(), callers, &mut keys) {
                limiter.store().acquire_each_now(limit, &keys[..callers.len()], 1, report);
            } else {
                for (position, caller) in callers.iter().enumerate() {
                    report(position, limiter.check_now(*caller));
                }
            }
        }
    }

    /// Acquires each of several keys, in order, and passes the position and the result of each to
    /// `report`. An error of one key does not end the others. The time is read once per eight keys,
    /// or once per four of those that are left. If `report` panics, the key that it was called for
    /// and all keys before it have been decided, and no other key has.
    pub(crate) fn acquire_each_now(
        &self,
        limit: &Limit<A>,
        keys: &[&str],
        cost: u64,
        mut report: impl FnMut(usize, Result<Verdict, MemoryError>),
    ) {
        let mut position = 0;
        let mut report = |decided| {
            report(position, decided);
            position += 1;
        };
        let (eights, keys) = keys.as_chunks::<8>();
        let (fours, keys) = keys.as_chunks::<4>();
        for keys in eights {
            self.acquire_together(limit, keys, cost, &mut report);
        }
        for keys in fours {
            self.acquire_together(limit, keys, cost, &mut report);
        }
        for key in keys {
            report(self.acquire_now(limit, key, cost));
        }
    }

    /// Charges several keys, each for itself, so that their cache misses overlap.
    #[inline]
    fn acquire_together<const N: usize>(
        &self,
        limit: &Limit<A>,
        keys: &[&str; N],
        cost: u64,
        report: &mut impl FnMut(Result<Verdict, MemoryError>),
    ) {
        let Some(table) = self.table_for(limit) else {
            for key in keys {
                report(self.acquire_now(limit, key, cost));
            }
            return;
        };
        let hashes = keys.map(|key| self.hash(limit, key));
        // All buckets are prefetched before the first is read, so that the cache misses overlap.
        let probes = hashes.map(|hash| Probe::new(table, hash));
        let now = self.clock.now();
        let has_fast_step = limit.algorithm().has_fast_step();
        for ((key, hash), probe) in keys.iter().zip(hashes).zip(probes) {
            let charged =
                if has_fast_step { probe.charge(&self.records, limit, now, cost) } else { None };
            report(match charged {
                Some(decision) => Ok(Verdict::one(decision)),
                None => self.acquire(limit, key, hash, cost),
            });
        }
    }
}

/// How many callers are decided together: enough to fetch the memory of all of them in the time of
/// one.
const AT_ONCE: usize = 8;

/// Finds the keys of these callers, if there is one limit and each key is one identifier that its
/// caller keeps as text.
#[inline]
fn one_key_each<'a, A: InMemory, I: Identifiers + ?Sized>(
    limits: &'a Limits<A>,
    callers: &[&'a I],
    keys: &mut [&'a str; AT_ONCE],
) -> Option<&'a Limit<A>> {
    let [limit] = limits.as_slice() else { return None };
    if limit.is_shadow() {
        return None;
    }
    for (key, caller) in keys.iter_mut().zip(callers) {
        let Some(Cow::Borrowed(own)) = limit.key_for(*caller) else { return None };
        *key = own;
    }
    Some(limit)
}

/// The time of a request: the one that it gives, or `own`, the store's.
const fn time_of(time: Now, own: Timestamp) -> Timestamp {
    match time {
        Now::Store => own,
        Now::At(now) => now,
    }
}

impl<A: InMemory, C: Clock> SyncStore<A> for MemoryStore<A, C> {
    #[inline]
    fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, MemoryError> {
        let [check] = batch.checks() else { return self.decide_several(batch) };
        let is_plain = is_plain(batch);
        if is_plain && batch.operation() == Op::Acquire {
            return self.acquire_now(check.limit, check.key, check.cost);
        }
        let hash = self.hash(check.limit, check.key);
        if is_plain
            && !check.limit.counts_attempts()
            && let Some(decision) = self.decide_unlocked::<false>(check, hash, false)
        {
            return Ok(Verdict::one(decision));
        }
        self.decide_one(batch, check, hash)
    }

    #[inline(always)]
    fn acquire_now(&self, limit: &Limit<A>, key: &str, cost: u64) -> Result<Verdict, MemoryError> {
        let hash = self.hash(limit, key);
        match self.charge_fast(limit, hash, cost) {
            Some(decision) => Ok(Verdict::one(decision)),
            None => self.acquire(limit, key, hash, cost),
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

    fn report_counts(&self, report: &mut dyn FnMut(&'static str, u64)) {
        report("ratelimit_reservations", self.reservations() as u64);
        report("ratelimit_reservations_unrecorded_total", self.unrecorded());
        report("ratelimit_records", self.record_count() as u64);
    }
}

/// By the locked batch, which decides and copies the states under one set of locks: slower than
/// [`Store::apply`]. The states are unknown where a check uses a state that new keys share in a
/// full store.
impl<A: InMemory, C: Clock> SnapshotStore<A> for MemoryStore<A, C> {
    fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, A>,
    ) -> impl Future<Output = Result<WithSnapshot<A::State>, MemoryError>> + Send {
        let mut hashes = vec![0; batch.checks().len()];
        self.hash_all(batch, &mut hashes);
        let mut left = None;
        let decided = self.decide_locked(batch, &hashes, Some(&mut left));
        ready(decided.map(|verdict| (verdict, left)))
    }
}

impl<A: InMemory + PartialEq, C: Clock> RecordStore<A> for MemoryStore<A, C> {
    fn record(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> impl Future<Output = Result<Option<Record<A>>, MemoryError>> + Send {
        let now = self.clock.now();
        ready(Ok(self.records.get(self.hash(limit, key), key, now)))
    }

    fn exchange_record(
        &self,
        limit: &Limit<A>,
        key: &str,
        standing: Option<&Record<A>>,
        next: Option<&Record<A>>,
    ) -> impl Future<Output = Result<bool, MemoryError>> + Send {
        let (hash, now) = (self.hash(limit, key), self.clock.now());
        if let Err(refused) = limit.takes_record(next, now) {
            return ready(Err(refused.into()));
        }
        let exchanged = self.records.exchange(limit, (hash, key), now, standing, next);
        ready(exchanged.map_err(|Full| MemoryError::Records { most: self.records.most }))
    }
}

impl<A: InMemory, C: Clock> LogStore<A> for MemoryStore<A, C> {
    fn logged(
        &self,
        limit: &Limit<A>,
        key: &str,
        now: Now,
    ) -> impl Future<Output = Result<Vec<LoggedRequest>, MemoryError>> + Send {
        let state = self.state(limit, key);
        let now = time_of(now, self.clock.now());
        let entries = |state: &A::State| limit.algorithm().logged(state, now).to_vec();
        ready(Ok(state.as_ref().map(entries).unwrap_or_default()))
    }
}

impl<A: InMemory, C> fmt::Debug for MemoryStore<A, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryStore")
            .field("keys", &self.capacity.keys.used())
            .field("capacity", &self.capacity.keys.most)
            .field("reservations", &self.capacity.reservations.used())
            .field("overflowed", &self.overflowed.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

#[cfg(all(test, loom))]
mod loom_paths;
#[cfg(all(test, loom))]
pub(crate) mod loom_store;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
