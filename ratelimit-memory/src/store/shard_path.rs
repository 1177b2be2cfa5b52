//! One check of a limit whose states lie in shards: its shard is locked, and its state is stepped in place.
//!
//! A key's state lies in a bucket or in its shard, never in both. One that is found in its shard is so known
//! to lie in no bucket, and stays there while the shard is locked: whoever moves it locks both. Only one
//! that is not found needs the buckets as well, locked before the shard.

use ratelimit_core::{Batch, Check, Clock, Decision, InMemory, Now, Op, Step, Timestamp, Write};

use super::sweep::{SWEEP_BUCKETS, SWEEP_SLOTS};
use super::{Key, MemoryStore};
use crate::capacity::Reserved;
use crate::cuckoo::Address;
use crate::reservations::sweep_at;
use crate::shard::{Shard, counted_entries, shard_of};
use crate::sync::lock;

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Decides one check without an id, if its state lies in a shard, and says under which key it would, if
    /// only that is missing.
    ///
    /// What comes then is not called here: the answers of both would have to lie in one place in memory, and
    /// be copied from there (measured: a twentieth of a decision).
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

    /// Whether a small state lies here that a bucket can hold again: then it is to be moved there.
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

    /// The time of a batch, by the store's clock at this time.
    pub(super) fn time_of(batch: &Batch<'_, A>, own: Timestamp) -> Timestamp {
        match batch.time() {
            Now::Store => own,
            Now::At(now) => now,
        }
    }

    /// The decision on a state that was found, written over it. `None` if there may be no room for what it
    /// would have to keep.
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
        // What reads the time waits until what was read before it has come.
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
        // Asked of the state that is there as well: what panics here panics before anything is written.
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

    /// Frees a slot, and all the room that its state had.
    fn remove(&self, shard: &mut Shard<A::State>, slot: usize, reserved: &mut Reserved<'_>) {
        if let Some((state, entries)) = shard.clear(slot) {
            reserved.keep_entries(entries, 0);
            self.capacity.release_from_shard(1);
            drop(state);
        }
    }

    /// The decision on a state that was found, with the caller's metadata put to what is charged. That is done to a
    /// new state before it is written: in place there would be no way back from a panic.
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

    /// The decision on a key that has no state in its shard, with its buckets held as well, if there are
    /// any. `None` if there is a state there, or no place for one.
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
            // What a full store says of a new key is what the shared state says.
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
