//! The fast path: one check at the store's own time, decided on its buckets alone. It allocates nothing, and a
//! decision that writes nothing takes no lock, unless another thread is writing there.

#![allow(
    clippy::inline_always,
    reason = "whatever is not inlined here copies the answer once more: measured, each some nanoseconds"
)]

use ratelimit_core::{
    Batch, Check, Clock, Decision, InMemory, Limit, Now, Op, Step, Timestamp, Write, step_compact,
};

use super::MemoryStore;
use crate::cuckoo::{Address, CuckooTable, Entry, Packed, Route};
use crate::sync::wait;

/// Why the fast path did not decide a check. It has changed nothing.
#[derive(Clone, Copy)]
pub(super) enum Fallback {
    /// Another thread was writing.
    Busy,
    /// The check needs another path.
    More,
}

/// How often to try again, with a longer wait each time.
const TRIES: u32 = if cfg!(all(test, loom)) { 1 } else { 8 };

/// The outcome of an attempt with the key's buckets locked.
enum Attempt {
    Decided(Decision),
    /// Decided at this time, for a key that had no state.
    New(Decision, Timestamp),
    /// The check needs more than the buckets.
    Elsewhere,
    /// The key's buckets are full.
    Crowded,
}

/// Whether a batch only charges or peeks, at the store's own time.
#[inline(always)]
pub(super) fn is_plain<A: InMemory>(batch: &Batch<'_, A>) -> bool {
    batch.is_plain() && batch.time() == Now::Store
}

/// A key's two candidate buckets.
#[derive(Clone, Copy)]
pub(super) struct Probe<'l> {
    table: &'l CuckooTable,
    route: Route<'l>,
}

impl<'l> Probe<'l> {
    #[inline(always)]
    pub(super) fn new(table: &'l CuckooTable, address: Address) -> Self {
        Self { table, route: table.route(address) }
    }

    /// Prefetches both buckets.
    #[inline(always)]
    pub(super) fn prefetch(&self) {
        self.route.prefetch();
    }

    /// Charges the key's state by the algorithm's fast step. Returns `None` if there is no such state or step,
    /// or another thread is writing the state.
    #[inline(always)]
    pub(super) fn charge<A: InMemory>(
        self,
        algorithm: &A,
        now: Timestamp,
        cost: u64,
    ) -> Option<Decision> {
        let Self { table, route } = self;
        let (seen, state) = route.find_span()?;
        let now = table.now_since_epoch(now)?;
        let Step { decision, write } = algorithm.step_fast(state, now, cost)?;
        match write {
            Write::Put { state, .. } if state.extra == 0 => {
                let packed = Packed::of_span(state.at.as_us(), state.span_us)?;
                seen.try_lock()?.set(packed);
            }
            Write::Keep if seen.is_still() => {}
            _ => return None,
        }
        Some(decision)
    }

    /// Decides on the key's state, unless another thread is writing it or the check needs another path.
    #[inline(always)]
    pub(super) fn decide<A: InMemory>(
        self,
        algorithm: &A,
        now: Timestamp,
        cost: u64,
        charges: bool,
    ) -> Result<Decision, Fallback> {
        let Self { table, route } = self;
        let seen = route.find().ok_or(Fallback::More)?;
        let state = table.unpack(seen.state().ok_or(Fallback::Busy)?);
        let step = step_compact(algorithm, Some(state), now, cost);
        let Step { decision, write } = step.ok_or(Fallback::More)?;
        match write {
            Write::Put { state, .. } if charges => {
                let packed = table.pack(state).ok_or(Fallback::More)?;
                seen.try_lock().ok_or(Fallback::Busy)?.set(packed);
            }
            Write::Remove if charges => return Err(Fallback::More),
            _ if seen.is_still() => {}
            _ => return Err(Fallback::Busy),
        }
        Ok(decision)
    }
}

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Charges one key whose state lies in a bucket, by the algorithm's fast step.
    ///
    /// Nearly all decisions run only this, inlined into one piece without a call: the step's result goes
    /// straight into the verdict, and is not copied from function to function through memory.
    #[inline(always)]
    pub(super) fn charge_at_once(
        &self,
        limit: &Limit<A>,
        key: &str,
        cost: u64,
    ) -> Option<Decision> {
        if !limit.algorithm().has_fast_step() {
            return None;
        }
        let table = self.table.as_ref()?;
        let sought = Probe::new(table, self.address_of(limit, key));
        sought.prefetch();
        let now = self.clock.now();
        sought.charge(limit.algorithm(), now, cost)
    }

    /// Decides one check on a state that lies in a bucket, without a lock until it writes. It tries a few times
    /// if another thread is writing there.
    #[inline(always)]
    pub(super) fn decide_unlocked(&self, check: Check<'_, A>, charges: bool) -> Option<Decision> {
        let table = self.table_for(check.limit)?;
        let address = self.address_of(check.limit, check.key);
        let mut waited = 0;
        loop {
            let sought = Probe::new(table, address);
            sought.prefetch();
            let now = self.clock.now();
            match sought.decide(check.limit.algorithm(), now, check.cost, charges) {
                Ok(decision) => return Some(decision),
                Err(Fallback::Busy) if waited < TRIES => wait(&mut waited),
                Err(_) => return None,
            }
        }
    }

    /// The table, if states of this limit usually lie there.
    #[inline(always)]
    pub(super) fn table_for(&self, limit: &Limit<A>) -> Option<&CuckooTable> {
        self.table.as_ref().filter(|_| limit.algorithm().is_compact())
    }

    #[inline(always)]
    pub(super) fn address_of(&self, limit: &Limit<A>, key: &str) -> Address {
        Address::new(self.key(limit.name(), limit.fingerprint(), key).hash)
    }

    /// Decides one check with the key's buckets locked, if the buckets suffice.
    pub(super) fn decide_in_table(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
    ) -> Option<Decision> {
        let table = self.table_for(check.limit).filter(|_| is_plain(batch))?;
        let address = self.address_of(check.limit, check.key);
        let charges = batch.operation() == Op::Acquire;
        loop {
            match self.attempt(table, address, check, charges) {
                Attempt::Decided(decision) => return Some(decision),
                Attempt::New(decision, now) => {
                    self.sweep_in_passing(table, now);
                    return Some(decision);
                }
                Attempt::Elsewhere => return None,
                Attempt::Crowded => {
                    let way = table.make_way(address, self.clock.now());
                    self.capacity.release(way.freed);
                    if !way.made {
                        return None;
                    }
                }
            }
        }
    }

    /// Makes one attempt; it writes only if the check charges.
    fn attempt(
        &self,
        table: &CuckooTable,
        address: Address,
        check: &Check<'_, A>,
        charges: bool,
    ) -> Attempt {
        let mut pair = table.lock(address);
        // Only now: a thread that locks the bucket later must not decide by an earlier time.
        let now = self.clock.now();
        let place = pair.find();
        if place.is_none() && pair.buckets[0].has_spilled() && self.capacity.in_shards() > 0 {
            return Attempt::Elsewhere;
        }
        let state =
            place.map(|(bucket, slot)| table.unpack(pair.buckets[bucket].get(slot).state()));
        let step = step_compact(check.limit.algorithm(), state, now, check.cost);
        let Some(Step { decision, write }) = step else { return Attempt::Elsewhere };
        let entry = match write {
            Write::Put { state, .. } if charges => match table.pack(state) {
                Some(state) => Entry::new(pair.route.tag(), state),
                None => return Attempt::Elsewhere,
            },
            Write::Remove if charges => {
                if let Some((bucket, slot)) = place {
                    pair.buckets[bucket].clear(slot);
                    self.capacity.release(1);
                }
                return Attempt::Decided(decision);
            }
            _ if place.is_some() => return Attempt::Decided(decision),
            // In a full store, a new key is decided on the shared state.
            _ if self.capacity.is_full(1) => return Attempt::Elsewhere,
            _ => return Attempt::New(decision, now),
        };
        let now_us = table.since_epoch_us(now);
        if let Some((bucket, slot)) = place.or_else(|| pair.expired_place(now_us)) {
            pair.buckets[bucket].set(slot, entry);
        } else if let Some((bucket, slot)) = pair.free_place() {
            let mut reserved = self.capacity.reserve();
            if !reserved.add_key() {
                return Attempt::Elsewhere;
            }
            pair.buckets[bucket].set(slot, entry);
            reserved.take_key();
        } else {
            return Attempt::Crowded;
        }
        if place.is_some() { Attempt::Decided(decision) } else { Attempt::New(decision, now) }
    }
}
