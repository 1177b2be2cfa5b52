//! The optimistic batch: a few checks at the store's own time, whose states all lie in buckets. It
//! reads and decides without locks, then validates, or locks the slots for the moment of the write.

use ratelimit_core::algorithm::{InMemory, Write};
use ratelimit_core::for_memory::Compact;
use ratelimit_core::for_memory::{CompactStates, decide_compact};
use ratelimit_core::store::Batch;
use ratelimit_core::{Clock, Verdict};

use super::MemoryStore;
use super::fast_path::{FastPathMiss, is_plain};
use crate::cuckoo::{Address, CuckooTable, KeyRoute, OptimisticRead, Packed, SlotGuard};
use crate::sync::wait;

/// The most checks of such a batch: few requests have more.
pub(super) const FEW: usize = 4;
/// How often to try again, with a longer wait each time.
const TRIES: u32 = if cfg!(all(test, loom)) { 1 } else { 4 };

/// The states of a few checks and the writes that are to follow.
struct PendingWrites<'l> {
    table: &'l CuckooTable,
    routes: [KeyRoute<'l>; FEW],
    /// The entries as they were read, and the states that are to replace them, if these differ.
    seen: [Option<OptimisticRead<'l>>; FEW],
    next: [Option<Packed>; FEW],
    /// The reason for a fallback.
    fallback: FastPathMiss,
}

impl CompactStates for PendingWrites<'_> {
    #[inline(always)]
    fn get(&mut self, position: usize) -> Option<Compact> {
        if self.seen[position].is_none() {
            self.seen[position] = self.routes[position].find();
        }
        let state = self.seen[position]?.state();
        if state.is_none() {
            self.fallback = FastPathMiss::Busy;
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
    /// Locks all slots if their entries are unchanged, and writes the new states. It waits for no
    /// lock, so the order does not matter.
    fn write(&self, is_ruled: impl FnOnce() -> bool) -> Result<(), FastPathMiss> {
        let mut guards: [Option<SlotGuard<'_, '_>>; FEW] = std::array::from_fn(|_| None);
        for (guard, seen) in guards.iter_mut().zip(&self.seen) {
            if let Some(seen) = seen {
                *guard = Some(seen.try_lock().ok_or(FastPathMiss::Busy)?);
            }
        }
        // With all slots locked: what sees a record later sees these charges.
        if is_ruled() {
            return Err(FastPathMiss::More);
        }
        for (guard, next) in guards.iter_mut().zip(&self.next) {
            if let (Some(guard), Some(state)) = (guard, next) {
                guard.set(*state);
            }
        }
        Ok(())
    }
}

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Decides several plain checks whose states all lie in buckets.
    pub(super) fn decide_optimistically(
        &self,
        batch: &Batch<'_, A>,
        hashes: &[u64],
    ) -> Option<Verdict> {
        let table = self.table.as_ref()?;
        let is_simple = is_plain(batch)
            && (2..=FEW).contains(&batch.checks().len())
            && batch.checks().iter().all(|check| check.limit.algorithm().is_compact());
        if !is_simple {
            return None;
        }
        let mut waited = 0;
        loop {
            match self.try_optimistically(table, batch, hashes) {
                Ok(verdict) => return Some(verdict),
                Err(FastPathMiss::Busy) if waited < TRIES => wait(&mut waited),
                Err(FastPathMiss::Busy | FastPathMiss::More) => return None,
            }
        }
    }

    fn try_optimistically(
        &self,
        table: &CuckooTable,
        batch: &Batch<'_, A>,
        hashes: &[u64],
    ) -> Result<Verdict, FastPathMiss> {
        let (first, others) = hashes.split_first().ok_or(FastPathMiss::More)?;
        let route = |hash: &u64| table.route(Address::new(*hash));
        // Filled in place, because returning it would copy it. Unused elements repeat the first
        // route.
        let mut pending = PendingWrites {
            table,
            routes: [route(first); FEW],
            seen: std::array::from_fn(|_| None),
            next: std::array::from_fn(|_| None),
            fallback: FastPathMiss::More,
        };
        for (pending_route, hash) in pending.routes[1..].iter_mut().zip(others) {
            *pending_route = route(hash);
        }
        pending.routes[..batch.checks().len()].iter().for_each(|route| route.prefetch());
        let now = self.clock.now();
        let verdict = decide_compact(batch, now, &mut pending).ok_or(pending.fallback)?;
        if pending.next.iter().any(Option::is_some) {
            pending.write(|| self.records.may_rule(batch, hashes))?;
        } else if self.records.may_rule(batch, hashes) {
            return Err(FastPathMiss::More);
        } else if !pending.seen.iter().flatten().all(OptimisticRead::is_still) {
            // If all are unchanged, all were there at one moment.
            return Err(FastPathMiss::Busy);
        }
        Ok(verdict)
    }
}
