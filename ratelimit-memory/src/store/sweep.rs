//! Sweeping: each call frees a few expired slots in passing, and more when the store is full.

use ratelimit_core::{Clock, InMemory, Timestamp};

use super::MemoryStore;
use crate::cuckoo::CuckooTable;
use crate::sync::{Ordering, try_lock};

/// How many slots of a shard a call sweeps in passing: more than the one that it can add.
pub(super) const SWEEP_SLOTS: usize = 2;
/// How many buckets a call sweeps in passing: 171 calls sweep the smallest table. Models of whole stores sweep
/// none, which takes them seconds instead of minutes; `loom_cuckoo.rs` sweeps beside a charge.
pub(super) const SWEEP_BUCKETS: usize = if cfg!(all(test, loom)) { 0 } else { 3 };
/// How many slots of a shard a call sweeps when it needs a place and the store is full.
pub(super) const SWEEP_SLOTS_WHEN_FULL: usize = 64;
/// The most buckets that such a call sweeps, which takes some microseconds.
pub(super) const MOST_BUCKETS_WHEN_FULL: usize = if cfg!(all(test, loom)) { 1 } else { 256 };
/// The fewest buckets that such a call sweeps. In models it is one of four.
const FEWEST_BUCKETS_WHEN_FULL: usize = if cfg!(all(test, loom)) { 1 } else { 8 };
/// How many other shards such a call sweeps.
const SWEEP_SHARDS_WHEN_FULL: usize = 4;

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Sweeps the next buckets and, if they are in use, a few slots of the next shard of states and of the next
    /// shard of reservations. It skips shards that another thread has locked.
    pub(super) fn sweep_in_passing(&self, table: &CuckooTable, now: Timestamp) {
        self.capacity.release(table.sweep(SWEEP_BUCKETS, now));
        let (in_shards, reservations) = (self.capacity.in_shards(), self.capacity.reservations());
        if in_shards + reservations == 0 {
            return;
        }
        let next = self.next_shard_to_sweep();
        if in_shards > 0 {
            self.sweep_shard(next, now, SWEEP_SLOTS);
        }
        if reservations > 0 {
            self.sweep_reservations_of(next, now, SWEEP_SLOTS);
        }
    }

    /// Sweeps a few slots of the next shard of reservations, unless another thread has locked it.
    pub(super) fn sweep_reservations_in_passing(&self, now: Timestamp) {
        if self.capacity.reservations() > 0 {
            self.sweep_reservations_of(self.next_shard_to_sweep(), now, SWEEP_SLOTS);
        }
    }

    /// Sweeps a few other shards of states and of reservations, and some buckets. It skips those that another
    /// thread has locked.
    pub(super) fn sweep_elsewhere(&self, now: Timestamp) {
        for _ in 0..SWEEP_SHARDS_WHEN_FULL {
            let next = self.next_shard_to_sweep();
            self.sweep_shard(next, now, SWEEP_SLOTS_WHEN_FULL);
            if self.capacity.reservations() > 0 {
                self.sweep_reservations_of(next, now, SWEEP_SLOTS_WHEN_FULL);
            }
        }
        if let Some(table) = &self.table {
            self.sweep_buckets_when_full(table, now);
        }
    }

    fn next_shard_to_sweep(&self) -> usize {
        self.next_to_sweep.fetch_add(1, Ordering::Relaxed) % self.shards.len()
    }

    /// Never waits, and skips a shard that this very thread has locked.
    fn sweep_shard(&self, place: usize, now: Timestamp, slots: usize) {
        if let Some(mut shard) = try_lock(&self.shards[place]) {
            self.capacity.sweep(&mut shard, now, slots);
        }
    }

    /// Never waits, and skips a shard that this very thread has locked.
    fn sweep_reservations_of(&self, place: usize, now: Timestamp, slots: usize) {
        if let Some(mut reservations) = try_lock(&self.reservations[place]) {
            self.capacity.sweep_reservations(&mut reservations, now, slots);
        }
    }

    /// Sweeps the next buckets: twice as many as the last time if that freed an entry, half as many if it did
    /// not. A flood of untrusted keys at a full store without idle states therefore soon gets short sweeps. A
    /// small table is swept whole.
    fn sweep_buckets_when_full(&self, table: &CuckooTable, now: Timestamp) {
        if table.count() <= MOST_BUCKETS_WHEN_FULL {
            self.capacity.release(table.sweep(MOST_BUCKETS_WHEN_FULL, now));
            return;
        }
        let count = self.buckets_when_full.load(Ordering::Relaxed);
        let freed = table.sweep(count, now);
        self.capacity.release(freed);
        let next = if freed > 0 { count * 2 } else { count / 2 };
        let next = next.clamp(FEWEST_BUCKETS_WHEN_FULL, MOST_BUCKETS_WHEN_FULL);
        if next != count {
            self.buckets_when_full.store(next, Ordering::Relaxed);
        }
    }
}
