//! A few checks at the store's own time, whose states are all found in buckets: nothing is locked before all
//! is decided, and then for a moment.

use ratelimit_core::{
    Algorithm, Batch, Check, Clock, Compact, CompactStates, Verdict, Write, decide_compact,
};

#[cfg(all(test, loom))]
mod loom_optimistic_batch;

use super::MemoryStore;
use super::fast_path::{Fallback, is_plain};
use crate::cuckoo::{Address, CuckooTable, LockedEntry, Packed, Route, Snapshot};
use crate::hash::CallerHash;
use crate::sync::wait;

/// As many as a request comes with, as a rule.
const FEW: usize = 4;
/// How often to try again, waiting longer each time.
const TRIES: u32 = if cfg!(all(test, loom)) { 1 } else { 4 };

/// The states of a few checks, as they are found one after the other.
struct PendingWrites<'l> {
    table: &'l CuckooTable,
    routes: [Route<'l>; FEW],
    /// What was seen there, and what it becomes, unless that is the same.
    seen: [Option<Snapshot<'l>>; FEW],
    next: [Option<Packed>; FEW],
    /// Why there is no more.
    fallback: Fallback,
}

impl CompactStates for PendingWrites<'_> {
    #[inline(always)]
    fn get(&mut self, position: usize) -> Option<Compact> {
        if self.seen[position].is_none() {
            self.seen[position] = self.routes[position].find();
        }
        let state = self.seen[position]?.state();
        if state.is_none() {
            self.fallback = Fallback::Busy;
        }
        Some(self.table.unpack(state?))
    }

    #[inline(always)]
    fn note(&mut self, position: usize, write: Write<Compact>) -> Option<()> {
        self.next[position] = match write {
            Write::Keep => None,
            Write::Put { state, .. } => Some(self.table.pack(state)?),
            Write::Remove => return None,
        };
        Some(())
    }
}

impl PendingWrites<'_> {
    /// Whether what was seen is there still: then it was all there at one moment.
    fn is_still(&self) -> bool {
        self.seen.iter().flatten().all(Snapshot::is_still)
    }

    /// Locks all that was seen, if it is there still, and writes what it becomes. Waits for none of them, so that
    /// the order does not matter.
    fn write(&self) -> Option<()> {
        let mut locked: [Option<LockedEntry<'_, '_>>; FEW] = std::array::from_fn(|_| None);
        for (locked, seen) in locked.iter_mut().zip(&self.seen) {
            if let Some(seen) = seen {
                *locked = Some(seen.try_lock()?);
            }
        }
        for (locked, next) in locked.iter_mut().zip(&self.next) {
            if let (Some(entry), Some(state)) = (locked, next) {
                entry.set(*state);
            }
        }
        Some(())
    }
}

impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// Decides several checks, if all of them have states in buckets and there is no more to it.
    pub(super) fn decide_few(&self, batch: &Batch<'_, A>) -> Option<Verdict> {
        let table = self.table.as_ref()?;
        let is_simple = is_plain(batch)
            && (2..=FEW).contains(&batch.checks().len())
            && batch.checks().iter().all(|check| check.limit.algorithm().is_compact());
        if !is_simple {
            return None;
        }
        let mut waited = 0;
        loop {
            match self.try_few(table, batch) {
                Ok(verdict) => return Some(verdict),
                Err(Fallback::Busy) if waited < TRIES => wait(&mut waited),
                Err(Fallback::Busy | Fallback::More) => return None,
            }
        }
    }

    fn try_few(&self, table: &CuckooTable, batch: &Batch<'_, A>) -> Result<Verdict, Fallback> {
        let (first, others) = batch.checks().split_first().ok_or(Fallback::More)?;
        let (mut key, mut hash) = (first.key, self.hasher.hash(first.key));
        let route = |hash: CallerHash, check: &Check<'_, A>| {
            table.route(Address::new(hash.under(check.limit.fingerprint())))
        };
        // Filled where it lies: to hand it over would be to copy it. What is left over is the first one again.
        let mut noted = PendingWrites {
            table,
            routes: [route(hash, first); FEW],
            seen: std::array::from_fn(|_| None),
            next: std::array::from_fn(|_| None),
            fallback: Fallback::More,
        };
        for (place, check) in noted.routes[1..].iter_mut().zip(others) {
            // A key is hashed once for all limits that follow each other.
            if !std::ptr::eq(key, check.key) {
                (key, hash) = (check.key, self.hasher.hash(check.key));
            }
            *place = route(hash, check);
        }
        noted.routes[..batch.checks().len()].iter().for_each(|route| route.prefetch());
        let now = self.clock.now();
        let verdict = decide_compact(batch, now, &mut noted).ok_or(noted.fallback)?;
        if noted.next.iter().any(Option::is_some) {
            noted.write().ok_or(Fallback::Busy)?;
        } else if !noted.is_still() {
            return Err(Fallback::Busy);
        }
        Ok(verdict)
    }
}
