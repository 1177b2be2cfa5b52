//! The bucket path: one check at the store's own time, decided with the key's two buckets locked.
//! It inserts new keys, and serves the fast path when that meets too many writers.

use ratelimit_core::algorithm::{InMemory, Step, Write};
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{Clock, Decision, Record, Timestamp};

use super::MemoryStore;
use super::fast_path::{is_plain, may_owe};
use crate::cuckoo::{Address, Insertion};

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Decides one check with the key's buckets locked, and writes if the check charges. Returns
    /// `None` if it needs more than the buckets.
    pub(super) fn decide_in_buckets(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
        hash: u64,
    ) -> Option<Decision> {
        let table = self.table_for(check.limit).filter(|_| is_plain(batch))?;
        let address = Address::new(hash);
        let charges = batch.operation() == Op::Acquire;
        loop {
            let mut pair = table.lock(address);
            // Only now: a thread that locks the bucket later must not decide by an earlier time.
            let now = self.clock.now();
            if now == Timestamp::MAX {
                return None;
            }
            let records = self.records.read(check.limit, hash);
            let record = records.as_ref().and_then(|records| records.standing(check, hash, now));
            let slot_index = pair.find();
            if slot_index.is_none() && pair.has_spilled() && self.capacity.in_shards.used() > 0 {
                return None;
            }
            let state = slot_index.map(|slot_index| table.unpack(pair.get(slot_index)));
            let step = match record {
                Some(record) => check.limit.step_compact_by(record, state, now, check.cost),
                None => check.limit.step_compact(state, now, check.cost),
            };
            let Step { decision, write } = step?;
            let numbers = record.and_then(Record::algorithm);
            if may_owe(numbers.unwrap_or_else(|| check.limit.algorithm()), &decision) {
                return None;
            }
            drop(records);
            match (write, slot_index) {
                (Write::Put { state, .. }, Some(slot_index)) if charges => {
                    pair.set(slot_index, table.pack(state)?);
                }
                (Write::Put { state, .. }, None) if charges => {
                    let packed = table.pack(state)?;
                    let mut spare = self.capacity.keys.reserve();
                    let now_us = Some(table.since_epoch_us(now));
                    match pair.insert(packed, now_us, || spare.add(1)) {
                        Insertion::Done => _ = spare.take(),
                        Insertion::Refused => return None,
                        Insertion::Crowded => {
                            drop(pair);
                            if table.make_room(address) {
                                continue;
                            }
                            return None;
                        }
                    }
                }
                (Write::Remove, Some(slot_index)) if charges => {
                    pair.clear(slot_index);
                    self.capacity.keys.release(1);
                }
                // In a full store, a new key is decided on the shared state.
                (_, None) if !self.capacity.keys.has(1) => return None,
                _ => {}
            }
            drop(pair);
            if slot_index.is_none() {
                self.sweep_in_passing(now);
            }
            return Some(decision);
        }
    }
}
