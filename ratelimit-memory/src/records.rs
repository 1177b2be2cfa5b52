//! [`Records`]: what operators have decided for single callers, apart from all states.
//!
//! A decision looks for a record while it holds the locks of its states, or has validated them: so
//! it and the changes of records are linearizable, without a lock of the state in a change. Nearly
//! all callers have no record, which a counting filter tells by one load (a *counting Bloom filter*
//! of one hash; Fan et al., "Summary Cache", 2000). Several checks are decided by all of their
//! records at one moment, so they also ask whether one was added meanwhile.

use std::sync::PoisonError;

use hashbrown::HashTable;
use once_cell::race::OnceBox;
use ratelimit_core::algorithm::InMemory;
use ratelimit_core::store::{Batch, Check, Standing};
use ratelimit_core::{Limit, Record, Timestamp};

use crate::sync::{AtomicU32, AtomicUsize, Ordering, RwLock, RwLockReadGuard, fence, read};

/// How many counters the filter has; in models few, because loom tracks each.
const COUNTERS: usize = if cfg!(all(test, loom)) { 2 } else { 1 << 14 };

/// The records of a store.
pub(crate) struct Records<A> {
    /// How many records lie at each place; made with the first record.
    filter: OnceBox<Box<[AtomicU32]>>,
    /// How many there are.
    count: AtomicUsize,
    /// How many were ever added.
    added: AtomicUsize,
    /// By the hash of the limit and the key. Locked after all else.
    kept: RwLock<HashTable<Kept<A>>>,
    pub(crate) most: usize,
}

/// A record, with the key that tells it from others of the same hash.
struct Kept<A> {
    hash: u64,
    key: Box<str>,
    record: Record<A>,
    /// Whether it has no numbers, or these have the limit's states. It is so for every limit that
    /// finds it: the hash is of the name and the kind of the states.
    has_states: bool,
}

impl<A> Kept<A> {
    fn is_of(&self, hash: u64, key: &str) -> bool {
        self.hash == hash && *self.key == *key
    }
}

/// There is no room for another record.
pub(crate) struct Full;

/// The records, locked for reading.
pub(crate) struct ReadRecords<'r, A>(RwLockReadGuard<'r, HashTable<Kept<A>>>);

impl<A: InMemory> ReadRecords<'_, A> {
    /// The record by which the caller of a check stands at `now`. Its state is locked.
    pub(crate) fn standing(
        &self,
        check: &Check<'_, A>,
        hash: u64,
        now: Timestamp,
    ) -> Option<&Record<A>> {
        let found = self.0.find(hash, |kept| kept.is_of(hash, check.key))?;
        let record = Some(&found.record).filter(|_| found.has_states);
        record.filter(|record| check.limit.stands_by(record, now))
    }

    /// How the checks of a batch stand at `now`, all at one moment.
    pub(crate) fn standings(
        &self,
        batch: &Batch<'_, A>,
        hashes: &[u64],
        now: Timestamp,
    ) -> Vec<Standing<A>> {
        let checks = batch.checks().iter().zip(hashes);
        checks.map(|(check, hash)| standing_by(&self.0, check, *hash, now)).collect()
    }
}

/// How a check stands by these records.
fn standing_by<A: InMemory>(
    kept: &HashTable<Kept<A>>,
    check: &Check<'_, A>,
    hash: u64,
    now: Timestamp,
) -> Standing<A> {
    let limit = check.limit;
    let record = || kept.find(hash, |kept| kept.is_of(hash, check.key));
    let record = if limit.is_overridable() { record() } else { None };
    limit.standing(record.map(|kept| &kept.record), now)
}

fn place(hash: u64) -> usize {
    // Below the bits that are the same for all limits of a caller.
    usize::try_from(hash % COUNTERS as u64).unwrap_or_default()
}

impl<A: InMemory> Records<A> {
    pub(crate) fn new(most: usize) -> Self {
        Self {
            filter: OnceBox::new(),
            count: AtomicUsize::new(0),
            added: AtomicUsize::new(0),
            kept: RwLock::new(HashTable::new()),
            most,
        }
    }

    pub(crate) fn count(&self) -> usize {
        self.count.load(Ordering::Relaxed)
    }

    /// Whether a key may have a record under a limit.
    #[inline]
    pub(crate) fn may_have(&self, limit: &Limit<A>, hash: u64) -> bool {
        limit.is_overridable() && self.has_at(hash)
    }

    #[inline]
    fn has_at(&self, hash: u64) -> bool {
        // Not before the state was read.
        fence(Ordering::Acquire);
        self.filter.get().is_some_and(|filter| filter[place(hash)].load(Ordering::SeqCst) > 0)
    }

    /// Whether a check of a batch may have a record. If not, none had one at the same moment: no
    /// record was added while the filter was read.
    #[inline]
    pub(crate) fn may_rule(&self, batch: &Batch<'_, A>, hashes: &[u64]) -> bool {
        fence(Ordering::Acquire);
        if self.filter.get().is_none() || !batch.is_overridable() {
            return false;
        }
        let added = self.added.load(Ordering::SeqCst);
        let mut checks = batch.checks().iter().zip(hashes);
        checks.any(|(check, hash)| self.may_have(check.limit, *hash))
            || self.added.load(Ordering::SeqCst) != added
    }

    /// The records, if a check of a batch may have one; if not, the policy decides all.
    #[inline]
    pub(crate) fn read_several(
        &self,
        batch: &Batch<'_, A>,
        hashes: &[u64],
    ) -> Option<ReadRecords<'_, A>> {
        self.may_rule(batch, hashes).then(|| ReadRecords(read(&self.kept)))
    }

    /// The records, if this key may have one under the limit.
    #[inline]
    pub(crate) fn read(&self, limit: &Limit<A>, hash: u64) -> Option<ReadRecords<'_, A>> {
        self.may_have(limit, hash).then(|| ReadRecords(read(&self.kept)))
    }

    /// The record of a key that stands at `now`.
    pub(crate) fn get(&self, hash: u64, key: &str, now: Timestamp) -> Option<Record<A>> {
        let kept = read(&self.kept);
        let found = kept.find(hash, |kept| kept.is_of(hash, key))?;
        Some(found.record.clone()).filter(|record| record.stands_at(now))
    }

    /// Puts `next` in the place of `standing`, if that is what stands at `now`: returns whether it
    /// is.
    pub(crate) fn exchange(
        &self,
        limit: &Limit<A>,
        (hash, key): (u64, &str),
        now: Timestamp,
        standing: Option<&Record<A>>,
        next: Option<&Record<A>>,
    ) -> Result<bool, Full>
    where
        A: PartialEq,
    {
        // Foreign code, before anything is written.
        let next = next.cloned().map(|record| {
            let kind = limit.algorithm().state_kind();
            let has_states = record.algorithm().is_none_or(|numbers| numbers.state_kind() == kind);
            Kept { hash, key: key.into(), record, has_states }
        });
        let mut all = self.kept.write().unwrap_or_else(PoisonError::into_inner);
        let before = all.find_entry(hash, |kept| kept.is_of(hash, key)).ok();
        let stands = before.as_ref().map(|before| &before.get().record);
        if stands.filter(|record| record.stands_at(now)) != standing {
            return Ok(false);
        }
        let replaced = match (before, next) {
            (Some(mut before), Some(next)) => Some(std::mem::replace(before.get_mut(), next)),
            (Some(before), None) => {
                self.uncount(hash);
                Some(before.remove().0)
            }
            (None, Some(next)) => {
                if self.count() >= self.most {
                    self.forget_ended(&mut all, now);
                }
                if self.count() >= self.most {
                    return Err(Full);
                }
                all.insert_unique(hash, next, |kept| kept.hash);
                let filter = self
                    .filter
                    .get_or_init(|| Box::new((0..COUNTERS).map(|_| AtomicU32::new(0)).collect()));
                filter[place(hash)].fetch_add(1, Ordering::SeqCst);
                self.added.fetch_add(1, Ordering::SeqCst);
                self.count.fetch_add(1, Ordering::Relaxed);
                None
            }
            (None, None) => None,
        };
        drop(all);
        // Foreign code, after all is written.
        drop(replaced);
        Ok(true)
    }

    /// Counts one record less. What is still counted lets a decision look for none; the lock of the
    /// records is held.
    fn uncount(&self, hash: u64) {
        if let Some(filter) = self.filter.get() {
            filter[place(hash)].fetch_sub(1, Ordering::SeqCst);
        }
        self.count.fetch_sub(1, Ordering::Relaxed);
    }

    /// Removes the records that have ended.
    fn forget_ended(&self, all: &mut HashTable<Kept<A>>, now: Timestamp) {
        all.retain(|kept| {
            let stands = kept.record.stands_at(now);
            if !stands {
                self.uncount(kept.hash);
            }
            stands
        });
    }
}
