//! The batch of known keys: plain checks at the store's own time, whose states all are there, in
//! buckets and in shards. It locks the shards, reads the buckets without locks, and locks their
//! slots for the moment of the write.
//!
//! A state that is found in its shard stays there while the shard is locked: see `shard_path.rs`.
//! So no bucket is locked for it, which takes the locked batch half of its time.
//!
//! Where a caller may have a record, the records stay locked for reading until the write.

use ratelimit_core::algorithm::{InMemory, Write};
use ratelimit_core::store::{Batch, Now, Reservation, States, decide};
use ratelimit_core::{Clock, Timestamp, Verdict};
use smallvec::SmallVec;

use super::MemoryStore;
use super::fast_path::{FastPathMiss, is_plain};
use crate::cuckoo::{Address, CuckooTable, OptimisticRead, Packed, SlotGuard};
use crate::reservations::sweep_at;
use crate::shard::{ShardGuards, counted_entries};
use crate::sync::wait;

/// How often to try again, with a longer wait each time.
const TRIES: u32 = if cfg!(all(test, loom)) { 1 } else { 4 };

/// Where the state of a check lies, and the state that is to replace it, if it changes.
enum Known<'t, S> {
    Bucket { seen: OptimisticRead<'t>, state: S, next: Option<Packed> },
    Shard { hash: u64, slot: usize, next: Option<(S, u32, Timestamp)> },
}

/// The states of a batch, found.
struct KnownBatch<'s, A: InMemory> {
    table: Option<&'s CuckooTable>,
    shards: ShardGuards<'s, A::State>,
    known: SmallVec<[Known<'s, A::State>; 4]>,
    own: Timestamp,
    /// Whether a write needs more than a new state in the place of the old one.
    needs_more: bool,
}

impl<A: InMemory> States<A::State> for KnownBatch<'_, A> {
    fn get(&self, position: usize) -> Option<&A::State> {
        match &self.known[position] {
            Known::Bucket { state, .. } => Some(state),
            Known::Shard { hash, slot, .. } => self.shards.get(*hash).state(*slot),
        }
    }

    fn put(&mut self, position: usize, write: Write<A::State>) {
        let (state, expires) = match write {
            Write::Keep => return,
            Write::Put { state, expires } => (state, expires),
            Write::Remove => {
                self.needs_more = true;
                return;
            }
        };
        match &mut self.known[position] {
            Known::Bucket { next, .. } => {
                let packed = A::to_compact(&state).and_then(|state| self.table?.pack(state));
                self.needs_more |= packed.is_none();
                *next = packed;
            }
            Known::Shard { next, .. } => {
                let entries = counted_entries::<A>(&state);
                *next = Some((state, entries, sweep_at(Now::Store, self.own, expires)));
            }
        }
    }

    fn reservation(&self, _: usize) -> Option<Reservation> {
        None
    }

    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_reservation(&mut self, _: usize, _: Reservation, _: Timestamp) {
        self.needs_more = true;
    }
}

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Decides several plain checks of keys that all have states. Returns `None`, and has changed
    /// nothing, if they need the locked batch.
    pub(super) fn decide_known(&self, batch: &Batch<'_, A>, hashes: &[u64]) -> Option<Verdict> {
        if !is_plain(batch) {
            return None;
        }
        let mut waited = 0;
        loop {
            match self.try_known(batch, hashes) {
                Ok(verdict) => return Some(verdict),
                Err(FastPathMiss::Busy) if waited < TRIES => wait(&mut waited),
                Err(FastPathMiss::Busy | FastPathMiss::More) => return None,
            }
        }
    }

    fn try_known(&self, batch: &Batch<'_, A>, hashes: &[u64]) -> Result<Verdict, FastPathMiss> {
        let limits = || batch.checks().iter().map(|check| check.limit);
        let in_buckets: SmallVec<[_; 4]> = limits().map(|limit| self.table_for(limit)).collect();
        let in_shards = hashes.iter().zip(&in_buckets).filter(|(_, table)| table.is_none());
        let shards = ShardGuards::lock(&self.shards, in_shards.map(|(hash, _)| *hash));
        // No record changes from here to the writes.
        let records = self.records.read_several(batch, hashes);
        // Read with the locks held: a thread that locks a shard later must not decide by an earlier
        // time.
        let own = self.clock.now();
        let mut known = SmallVec::with_capacity(hashes.len());
        for (hash, table) in hashes.iter().copied().zip(in_buckets) {
            known.push(if let Some(table) = table {
                let seen = table.route(Address::new(hash)).find().ok_or(FastPathMiss::More)?;
                let state = table.unpack(seen.state().ok_or(FastPathMiss::Busy)?);
                let state = A::from_compact(state).ok_or(FastPathMiss::More)?;
                Known::Bucket { seen, state, next: None }
            } else {
                let slot = shards.get(hash).find(hash).ok_or(FastPathMiss::More)?;
                Known::Shard { hash, slot, next: None }
            });
        }
        let mut spare_entries = self.capacity.entries.reserve();
        if !spare_entries.add(limits().map(|limit| limit.algorithm().entries_per_step()).sum()) {
            return Err(FastPathMiss::More);
        }
        let table = self.table.as_ref();
        let mut states = KnownBatch::<A> { table, shards, known, own, needs_more: false };
        let standings = records.as_ref().map(|records| records.standings(batch, hashes, own));
        let verdict = if let Some(standings) = &standings {
            let checks = batch.checks_by(standings);
            decide(&batch.with_checks(&checks).standing_so(standings), own, &mut states)
        } else {
            decide(batch, own, &mut states)
        };
        let verdict = verdict.map_err(|_| FastPathMiss::More)?;
        if states.needs_more {
            return Err(FastPathMiss::More);
        }
        let KnownBatch { mut known, mut shards, .. } = states;
        // No foreign code from here on: states that are replaced are dropped last.
        write_buckets(&known, || records.is_none() && self.records.may_rule(batch, hashes))?;
        for known in &mut known {
            if let Known::Shard { hash, slot, next } = known
                && let Some((state, entries, sweep_at)) = next.take()
            {
                let replaced = shards.get_mut(*hash).replace(*slot, state, entries, sweep_at);
                if let Some((state, before)) = replaced {
                    spare_entries.keep(before, entries);
                    *next = Some((state, before, sweep_at));
                }
            }
        }
        drop(shards);
        drop(records);
        Ok(verdict)
    }
}

/// Writes the new states of buckets, if all entries are as they were read. It waits for no lock, so
/// the order does not matter.
fn write_buckets<S>(
    known: &[Known<'_, S>],
    is_ruled: impl Fn() -> bool,
) -> Result<(), FastPathMiss> {
    let of_bucket = |known: &Known<'_, S>| matches!(known, Known::Bucket { next: Some(_), .. });
    let writes = known.iter().any(of_bucket);
    let mut guards: SmallVec<[(SlotGuard<'_, '_>, Option<Packed>); 4]> = SmallVec::new();
    for known in known {
        let Known::Bucket { seen, next, .. } = known else { continue };
        if !writes && is_ruled() {
            return Err(FastPathMiss::More);
        }
        if writes {
            guards.push((seen.try_lock().ok_or(FastPathMiss::Busy)?, *next));
        } else if !seen.is_still() {
            return Err(FastPathMiss::Busy);
        }
    }
    // With all slots and shards locked: what sees a record later sees these charges.
    if is_ruled() {
        return Err(FastPathMiss::More);
    }
    for (mut guard, next) in guards {
        if let Some(state) = next {
            guard.set(state);
        }
    }
    Ok(())
}
