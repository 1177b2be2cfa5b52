//! What a call frees of what has expired: a little in passing, and more where the store is full.

use ratelimit_core::{Algorithm, Clock, Timestamp};

use super::MemoryStore;
use crate::cuckoo::CuckooTable;
use crate::sync::{Ordering, try_lock};

/// How many slots a call sweeps in passing: more than the one that it can add.
pub(super) const SWEEP_SLOTS: usize = 2;
/// How many buckets a call sweeps in passing: all of the smallest table in 171 calls. Models of whole stores
/// sweep none: it is the difference between seconds and minutes, and `loom_cuckoo.rs` sweeps beside a charge.
pub(super) const SWEEP_BUCKETS: usize = if cfg!(all(test, loom)) { 0 } else { 3 };
/// How many slots of a shard a call sweeps when it needs a place and the store is full.
pub(super) const SWEEP_SLOTS_WHEN_FULL: usize = 64;
/// How many buckets at the most: some microseconds.
pub(super) const MOST_BUCKETS_WHEN_FULL: usize = if cfg!(all(test, loom)) { 1 } else { 256 };
/// And at the least. In models it is one of four.
const FEWEST_BUCKETS_WHEN_FULL: usize = if cfg!(all(test, loom)) { 1 } else { 8 };
/// How many other shards a call looks into when it needs a place and the store is full.
const SWEEP_SHARDS_WHEN_FULL: usize = 4;

impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// Sweeps the next buckets, and a little of what no bucket holds, if there is any: the next shard, and the next
    /// of holds, unless another thread is using them just now.
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

    /// Sweeps a little of what is held under ids, unless another thread is using it just now.
    pub(super) fn sweep_reservations_in_passing(&self, now: Timestamp) {
        if self.capacity.reservations() > 0 {
            self.sweep_reservations_of(self.next_shard_to_sweep(), now, SWEEP_SLOTS);
        }
    }

    /// Sweeps a few other shards, a few of holds, and some buckets: those that no thread is using just now.
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

    /// Never waits, and passes over a shard that this very thread holds.
    fn sweep_shard(&self, place: usize, now: Timestamp, slots: usize) {
        if let Some(mut shard) = try_lock(&self.shards[place]) {
            self.capacity.sweep(&mut shard, now, slots);
        }
    }

    /// Never waits, and passes over a shard that this very thread holds.
    fn sweep_reservations_of(&self, place: usize, now: Timestamp, slots: usize) {
        if let Some(mut reservations) = try_lock(&self.reservations[place]) {
            self.capacity.sweep_reservations(&mut reservations, now, slots);
        }
    }

    /// Sweeps the next buckets: twice as many as the last time if that freed something, half as many if it did not. So
    /// strangers who come to a full store where nothing is idle are soon told so. All of them, if they are few.
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
