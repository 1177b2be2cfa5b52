//! The shard path: one check of a limit whose states lie in shards. It locks the key's shard and steps the
//! state in place.
//!
//! A key's state lies in a bucket or in its shard, never in both. A state that is found in its shard therefore
//! lies in no bucket, and stays while the shard is locked: a thread that moves it locks both. Only a key that
//! is not found needs its buckets as well, locked before the shard.

use ratelimit_core::{Batch, Check, Clock, Decision, InMemory, Now, Op, Step, Timestamp, Write};

use super::sweep::{SWEEP_BUCKETS, SWEEP_SLOTS};
use super::{Key, MemoryStore};
use crate::capacity::Reserved;
use crate::cuckoo::Address;
use crate::reservations::sweep_at;
use crate::shard::{Shard, counted_entries, shard_of};
use crate::sync::lock;

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Decides one check without an id, if its state lies in a shard. If only the state is missing, returns its
    /// key as the error.
    ///
    /// The caller, not this function, then calls `decide_missing`: both results would have to lie in one place
    /// in memory and be copied from there (measured: a twentieth of a decision).
    #[inline]
    pub(super) fn decide_in_shard<'k>(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'k, A>,
    ) -> Result<Decision, Option<Key<'k>>> {
        let is_simple = matches!(batch.operation(), Op::Acquire | Op::Peek)
            && batch.reservation_id().is_none()
            && !batch.is_part();
        if !is_simple || batch.validate().is_err() {
            return Err(None);
        }
        let key = self.key_of(check);
        let mut shard = lock(&self.shards[shard_of(key.hash, self.shards.len())]);
        let slot = shard.find(key.hash).ok_or(Some(key))?;
        if self.belongs_in_the_table(batch, check, shard.state(slot)) {
            return Err(None);
        }
        self.found(batch, check, &mut shard, slot).ok_or(None)
    }

    /// Whether the state is compact and fits into a bucket again: then it is to be moved there.
    fn belongs_in_the_table(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
        state: Option<&A::State>,
    ) -> bool {
        let (Some(table), true) = (&self.table, check.limit.algorithm().is_compact()) else {
            return false;
        };
        let fits =
            |state| A::to_compact(state).is_some_and(|compact| table.pack(compact).is_some());
        batch.time() == Now::Store && state.is_some_and(fits)
    }

    /// The time of a batch: the one that it gives, or `own`, the store's.
    pub(super) fn time_of(batch: &Batch<'_, A>, own: Timestamp) -> Timestamp {
        match batch.time() {
            Now::Store => own,
            Now::At(now) => now,
        }
    }

    /// Decides on the state in a slot, and writes it in place. Returns `None` if there may be no room for the
    /// entries that it would have to keep.
    #[inline]
    fn found(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
        shard: &mut Shard<A::State>,
        slot: usize,
    ) -> Option<Decision> {
        let algorithm = check.limit.algorithm();
        let (state, mut beside) = shard.state_mut(slot)?;
        // Reading the time waits for all earlier reads.
        let own = self.clock.now();
        let now = Self::time_of(batch, own);
        if batch.operation() == Op::Peek {
            return Some(algorithm.decision(Some(state), now, check.cost));
        }
        let mut reserved = self.capacity.reserve();
        if !reserved.add_entries(algorithm.entries_per_step()) {
            return None;
        }
        if !batch.metadata_given().is_empty() {
            return Some(self.annotated(batch, check, shard, slot, (own, now), reserved));
        }
        // Also called before the step, so that a panic in it comes before anything is written.
        let _ = A::entries_in(state);
        let before = beside.entries();
        let Step { decision, write } = algorithm.step_in_place(state, now, check.cost);
        let after = counted_entries::<A>(state);
        reserved.keep_entries(before, after);
        beside.set_entries(after);
        match write {
            Write::Keep => {}
            Write::Put { expires, .. } => {
                beside.set_sweep_at(sweep_at(batch.time(), own, expires));
            }
            Write::Remove => self.remove(shard, slot, &mut reserved),
        }
        if decision.allowed {
            self.capacity.sweep(shard, own, 1);
        }
        Some(decision)
    }

    /// Frees a slot, and the room of its state.
    fn remove(&self, shard: &mut Shard<A::State>, slot: usize, reserved: &mut Reserved<'_>) {
        if let Some((state, entries)) = shard.clear(slot) {
            reserved.keep_entries(entries, 0);
            self.capacity.release_from_shard(1);
            drop(state);
        }
    }

    /// Decides on the state in a slot, and adds the caller's metadata to the charge. It writes a new state,
    /// because a state that was changed in place could not be restored after a panic.
    #[inline(never)]
    fn annotated(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
        shard: &mut Shard<A::State>,
        slot: usize,
        (own, now): (Timestamp, Timestamp),
        mut reserved: Reserved<'_>,
    ) -> Decision {
        let algorithm = check.limit.algorithm();
        let Step { decision, write } = algorithm.step(shard.state(slot), now, check.cost);
        match write {
            Write::Keep => {}
            Write::Put { mut state, expires } => {
                algorithm.annotate(&mut state, batch.metadata_given());
                let entries = counted_entries::<A>(&state);
                let sweep_at = sweep_at(batch.time(), own, expires);
                let replaced = shard.replace(slot, state, entries, sweep_at);
                let before = replaced.as_ref().map_or(0, |replaced| replaced.1);
                reserved.keep_entries(before, entries);
                drop(replaced);
            }
            Write::Remove => self.remove(shard, slot, &mut reserved),
        }
        if decision.allowed {
            self.capacity.sweep(shard, own, 1);
        }
        decision
    }

    /// Decides on a key that has no state in its shard, with its buckets locked as well, if the store has a
    /// table. Returns `None` if there is a state after all, or no place for one.
    #[inline(never)]
    pub(super) fn decide_missing(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
        key: Key<'_>,
    ) -> Option<Decision> {
        let algorithm = check.limit.algorithm();
        let mut pair = self.table.as_ref().map(|table| table.lock(Address::new(key.hash)));
        if pair.as_mut().is_some_and(|pair| pair.state().is_some()) {
            return None;
        }
        let mut shard = lock(&self.shards[shard_of(key.hash, self.shards.len())]);
        if shard.find(key.hash).is_some() {
            return None;
        }
        let own = self.clock.now();
        self.capacity.sweep(&mut shard, own, SWEEP_SLOTS);
        let Step { decision, write } = algorithm.step(None, Self::time_of(batch, own), check.cost);
        if let (Op::Acquire, Write::Put { mut state, expires }) = (batch.operation(), write) {
            if !batch.metadata_given().is_empty() {
                algorithm.annotate(&mut state, batch.metadata_given());
            }
            let entries = counted_entries::<A>(&state);
            let mut reserved = self.capacity.reserve();
            if !reserved.add_entries(entries) || !reserved.add_key() {
                return None;
            }
            if let Some(pair) = &mut pair {
                pair.buckets[0].spill();
            }
            self.capacity.enter_shard();
            shard.insert(key.hash, state, entries, sweep_at(batch.time(), own, expires));
            reserved.keep_entries(0, entries);
            reserved.take_key();
        } else if self.capacity.is_full(1) {
            // In a full store, a new key is decided on the shared state.
            return None;
        }
        drop((shard, pair));
        self.sweep_reservations_in_passing(own);
        if let Some(table) = &self.table {
            self.capacity.release(table.sweep(SWEEP_BUCKETS, own));
        }
        Some(decision)
    }
}
