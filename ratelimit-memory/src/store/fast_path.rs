//! The fast path: one check at the store's own time, decided on its buckets alone. It allocates
//! nothing, and a decision that writes nothing takes no lock, unless another thread is writing
//! there.

#![allow(
    clippy::inline_always,
    reason = "whatever is not inlined here copies the answer once more: measured, each some nanoseconds"
)]

use ratelimit_core::algorithm::{InMemory, Step, Write};
use ratelimit_core::for_memory::{Compact, step_compact};
use ratelimit_core::store::{Batch, Check, Now};
use ratelimit_core::{Clock, Decision, Limit, Timestamp};

use super::MemoryStore;
use crate::cuckoo::{Address, CuckooTable, KeyRoute, Packed};
use crate::records::Records;
use crate::sync::wait;

/// Why the fast path did not decide a check. It has changed nothing.
#[derive(Clone, Copy)]
pub(super) enum FastPathMiss {
    /// Another thread was writing.
    Busy,
    /// The check needs another path.
    More,
}

/// How often to try again, with a longer wait each time.
const TRIES: u32 = if cfg!(all(test, loom)) { 1 } else { 8 };

/// Whether a batch only charges or peeks, at the store's own time.
#[inline(always)]
pub(super) fn is_plain<A: InMemory>(batch: &Batch<'_, A>) -> bool {
    batch.is_plain() && batch.time() == Now::Store
}

/// Whether a key may owe, which the general step tells.
#[inline]
pub(super) fn may_owe<A: InMemory>(algorithm: &A, decision: &Decision) -> bool {
    decision.remaining == 0 && algorithm.debt() > 0
}

/// A key's two candidate buckets, prefetched.
#[derive(Clone, Copy)]
pub(super) struct Probe<'l> {
    table: &'l CuckooTable,
    route: KeyRoute<'l>,
    hash: u64,
}

impl<'l> Probe<'l> {
    #[inline(always)]
    pub(super) fn new(table: &'l CuckooTable, hash: u64) -> Self {
        let route = table.route(Address::new(hash));
        route.prefetch();
        Self { table, route, hash }
    }

    /// Charges the key's state by the algorithm's fast step. Returns `None` if there is no such
    /// state or step, another thread is writing the state, or the key may have a record.
    #[inline(always)]
    pub(super) fn charge<A: InMemory>(
        self,
        records: &Records<A>,
        limit: &Limit<A>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Decision> {
        let Self { table, route, hash } = self;
        let (seen, state) = route.find_span()?;
        let now = table.now_since_epoch(now)?;
        let (decision, next) = step_span(limit, limit.algorithm(), state, now, cost)?;
        if let Some(state) = next {
            let mut slot = seen.try_lock()?;
            // With the slot locked: what sees a record later sees this charge.
            if records.may_have(limit, hash) {
                return None;
            }
            slot.set(state);
        } else if records.may_have(limit, hash) || !seen.is_still() {
            return None;
        }
        Some(decision)
    }

    /// Decides on the key's state, unless another thread is writing it or the check needs another
    /// path. `ATTEMPTS`: the limit counts attempts.
    #[inline(always)]
    pub(super) fn decide<A: InMemory, const ATTEMPTS: bool>(
        self,
        records: &Records<A>,
        limit: &Limit<A>,
        now: Timestamp,
        cost: u64,
        charges: bool,
    ) -> Result<Decision, FastPathMiss> {
        let Self { table, route, hash } = self;
        let seen = route.find().ok_or(FastPathMiss::More)?;
        let state = table.unpack(seen.state().ok_or(FastPathMiss::Busy)?);
        let step = if ATTEMPTS {
            limit.step_compact(Some(state), now, cost)
        } else {
            step_compact(limit.algorithm(), Some(state), now, cost)
        };
        let Step { decision, write } = step.ok_or(FastPathMiss::More)?;
        if may_owe(limit.algorithm(), &decision) {
            return Err(FastPathMiss::More);
        }
        match write {
            Write::Put { state, .. } if charges => {
                let packed = table.pack(state).ok_or(FastPathMiss::More)?;
                let mut slot = seen.try_lock().ok_or(FastPathMiss::Busy)?;
                if records.may_have(limit, hash) {
                    return Err(FastPathMiss::More);
                }
                slot.set(packed);
            }
            _ if records.may_have(limit, hash) => return Err(FastPathMiss::More),
            Write::Remove if charges => return Err(FastPathMiss::More),
            _ if seen.is_still() => {}
            _ => return Err(FastPathMiss::Busy),
        }
        Ok(decision)
    }
}

/// The fast step of a state by these numbers, and the state that is to replace it.
#[inline(always)]
fn step_span<A: InMemory>(
    limit: &Limit<A>,
    numbers: &A,
    state: Compact,
    now: Timestamp,
    cost: u64,
) -> Option<(Decision, Option<Packed>)> {
    let Step { decision, write } = numbers.step_fast(state, now, cost)?;
    match write {
        Write::Put { state, .. } if state.extra == 0 => {
            Some((decision, Some(Packed::of_span(state.at.as_us(), state.span_us)?)))
        }
        // A denied attempt is charged, by another path.
        Write::Keep if !limit.counts_attempts() => Some((decision, None)),
        _ => None,
    }
}

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Charges one key whose state lies in a bucket, by the algorithm's fast step.
    ///
    /// Nearly all decisions run only this, inlined into one piece without a call: the step's result
    /// goes straight into the verdict, and is not copied from function to function through memory.
    #[inline(always)]
    pub(super) fn charge_fast(&self, limit: &Limit<A>, hash: u64, cost: u64) -> Option<Decision> {
        // One that may have a record is charged by `charge_by_record`.
        if !limit.algorithm().has_fast_step() || self.records.may_have(limit, hash) {
            return None;
        }
        let table = self.table.as_ref()?;
        let probe = Probe::new(table, hash);
        let now = self.clock.now();
        probe.charge(&self.records, limit, now, cost)
    }

    /// Charges one key as [`charge_fast`](Self::charge_fast) does, by the numbers of its record, if
    /// it may have one.
    pub(super) fn charge_by_record(&self, check: &Check<'_, A>, hash: u64) -> Option<Decision> {
        let (table, limit) = (self.table_for(check.limit)?, check.limit);
        let (seen, state) = Probe::new(table, hash).route.find_span()?;
        let mut slot = seen.try_lock()?;
        // With the slot locked: what sees another record later sees this charge.
        let records = self.records.read(limit, hash)?;
        let now = self.clock.now();
        let record = records.standing(check, hash, now);
        let numbers = match record {
            Some(record) => record.algorithm()?,
            None => limit.algorithm(),
        };
        let now = table.now_since_epoch(now)?;
        let (decision, next) = step_span(limit, numbers, state, now, check.cost)?;
        if record.is_some_and(|record| !record.tells_wait(&decision)) {
            return None;
        }
        if let Some(state) = next {
            slot.set(state);
        }
        Some(decision)
    }

    /// Decides one check on a state that lies in a bucket, without a lock until it writes. It tries
    /// a few times if another thread is writing there. `ATTEMPTS`: the limit counts attempts.
    #[inline(always)]
    pub(super) fn decide_unlocked<const ATTEMPTS: bool>(
        &self,
        check: &Check<'_, A>,
        hash: u64,
        charges: bool,
    ) -> Option<Decision> {
        let table = self.table_for(check.limit)?;
        let mut waited = 0;
        loop {
            let probe = Probe::new(table, hash);
            // At the end of time no state counts any more, and the general step refuses.
            let now = self.clock.now();
            let decided =
                probe.decide::<A, ATTEMPTS>(&self.records, check.limit, now, check.cost, charges);
            match decided {
                Ok(decision) => return Some(decision),
                Err(FastPathMiss::Busy) if waited < TRIES => wait(&mut waited),
                Err(_) => return None,
            }
        }
    }

    /// The table, if states of this limit usually lie there.
    #[inline(always)]
    pub(super) fn table_for(&self, limit: &Limit<A>) -> Option<&CuckooTable> {
        self.table.as_ref().filter(|_| limit.algorithm().is_compact())
    }
}
