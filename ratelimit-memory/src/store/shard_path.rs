//! The shard path: one plain check of a key whose state lies in its shard, stepped in its place
//! under the shard's lock alone.
//!
//! A key's state lies in a bucket or in its shard, never in both. A state that is found in its
//! shard therefore lies in no bucket, and stays while the shard is locked: a thread that moves it
//! locks both.

use ratelimit_core::algorithm::{InMemory, Step, Write};
use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{Clock, Decision, Timestamp};

use super::{MemoryStore, time_of};
use crate::reservations::sweep_at;
use crate::shard::{counted_entries, shard_of};
use crate::sync::lock;

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Decides a request without an id and metadata on the state in its shard. Returns `None` if
    /// there is none, if it belongs in a bucket, if its key may owe, if there may be no room for
    /// the entries that the step adds, or at the end of time.
    pub(super) fn decide_in_shard(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
        hash: u64,
    ) -> Option<Decision> {
        if !batch.is_plain() {
            return None;
        }
        let algorithm = check.limit.algorithm();
        if algorithm.debt() > 0 {
            return None;
        }
        let mut shard = lock(&self.shards[shard_of(hash, self.shards.len())]);
        let slot = shard.find(hash)?;
        let state = shard.state(slot)?;
        if algorithm.is_compact() && self.belongs_in_the_table(batch, state) {
            return None;
        }
        // Read with the lock held: a thread that locks it later must not decide by an earlier time.
        let own = self.clock.now();
        if own == Timestamp::MAX || self.records.may_have(check.limit, hash) {
            return None;
        }
        let now = time_of(batch.time(), own);
        if batch.operation() == Op::Peek {
            return Some(check.limit.step(Some(state), now, check.cost).decision);
        }
        let mut spare = self.capacity.entries.reserve();
        if !spare.add(algorithm.entries_per_step()) {
            return None;
        }
        // Also asked before the step, so that a panic in it comes before anything is written.
        let _ = A::entries_in(state);
        let (state, entries, due) = shard.state_mut(slot)?;
        let Step { decision, write } = check.limit.step_in_place(state, now, check.cost);
        let before = std::mem::replace(entries, counted_entries::<A>(state));
        spare.keep(before, *entries);
        match write {
            Write::Keep => {}
            Write::Put { expires, .. } => {
                let expires = sweep_at(batch.time(), own, expires);
                *due = expires;
                shard.expect_at(expires);
            }
            Write::Remove => {
                if let Some((state, entries)) = shard.clear(slot) {
                    spare.keep(entries, 0);
                    self.capacity.release_from_shard();
                    drop(state);
                }
            }
        }
        if decision.allowed {
            self.capacity.sweep(&mut shard, own, 1);
        }
        Some(decision)
    }

    /// Whether a state of a compact limit fits into a bucket again: then it is to be moved there.
    fn belongs_in_the_table(&self, batch: &Batch<'_, A>, state: &A::State) -> bool {
        let Some(table) = &self.table else { return false };
        batch.time() == Now::Store
            && A::to_compact(state).is_some_and(|compact| table.pack(compact).is_some())
    }
}
