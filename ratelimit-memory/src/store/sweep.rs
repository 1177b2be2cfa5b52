//! Sweeping: each call frees a few expired slots in passing, and more when the store is full.
//!
//! There is no sweeper thread and no pause. A check of a state in a bucket frees nothing. A new key
//! takes the slot of an expired one if it can, and frees expired states in the next three buckets
//! and in two slots of a shard. In a batch whose states are all in buckets, it frees those in its
//! own buckets. An admission by a state in a shard looks at one slot there.
//!
//! # A full store
//!
//! The store never resets a live key to make room. At the cap, a call that needs a slot looks for
//! an expired state in its own buckets and shard, then in the next 8 to 256 buckets, and in 64
//! slots of each of four other shards. The number of buckets doubles after a call that found an
//! expired state, and halves after one that did not. If none is found, the new key shares one state
//! per limit with all others like it, even if there are idle states elsewhere. With one idle state
//! in two hundred, 256 buckets hold about three, and the next call looks at the next buckets.

use ratelimit_core::algorithm::InMemory;
use ratelimit_core::{Clock, Timestamp};

use super::MemoryStore;
use crate::sync::{Ordering, try_lock};

/// How many slots of a shard a call sweeps in passing: more than the one that it can add.
pub(super) const SWEEP_SLOTS: usize = 2;
/// How many buckets a call sweeps in passing: 171 calls sweep the smallest table. Models of whole
/// stores sweep none, which takes them seconds instead of minutes; `loom_cuckoo.rs` sweeps beside a
/// charge.
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
    /// Sweeps the next buckets, and a few slots of the next shard of states and of reservations.
    pub(super) fn sweep_in_passing(&self, now: Timestamp) {
        if let Some(table) = &self.table {
            self.capacity.keys.release(table.sweep(SWEEP_BUCKETS, now));
        }
        self.sweep_next_shard(now, SWEEP_SLOTS);
    }

    /// Sweeps a few other shards of states and of reservations, and some buckets.
    pub(super) fn sweep_elsewhere(&self, now: Timestamp) {
        for _ in 0..SWEEP_SHARDS_WHEN_FULL {
            self.sweep_next_shard(now, SWEEP_SLOTS_WHEN_FULL);
        }
        let Some(table) = &self.table else { return };
        // Twice as many buckets as the last time if that freed an entry, half as many if it did
        // not. A flood of untrusted keys at a full store without idle states therefore soon gets
        // short sweeps.
        let count = self.buckets_when_full.load(Ordering::Relaxed);
        let freed = table.sweep(count, now);
        self.capacity.keys.release(freed);
        let next = if freed > 0 { count * 2 } else { count / 2 };
        let next = next.clamp(FEWEST_BUCKETS_WHEN_FULL, MOST_BUCKETS_WHEN_FULL);
        if next != count {
            self.buckets_when_full.store(next, Ordering::Relaxed);
        }
    }

    /// Sweeps slots of the next shard of states and of the next shard of reservations, if they are
    /// in use. Never waits, and skips a shard that another thread, or this very one, has locked.
    fn sweep_next_shard(&self, now: Timestamp, slots: usize) {
        let (in_shards, reserved) =
            (self.capacity.in_shards.used(), self.capacity.reservations.used());
        if in_shards + reserved == 0 {
            return;
        }
        let next = self.next_to_sweep.fetch_add(1, Ordering::Relaxed) % self.shards.len();
        if in_shards > 0
            && let Some(mut shard) = try_lock(&self.shards[next])
        {
            self.capacity.sweep(&mut shard, now, slots);
        }
        if reserved > 0
            && let Some(mut reservations) = try_lock(&self.reservations[next])
        {
            self.capacity.sweep_reservations(&mut reservations, now, slots);
        }
    }
}
