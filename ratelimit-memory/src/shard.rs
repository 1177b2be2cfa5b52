//! [`Shard`]: states in a slab, found by hash, swept a few slots at a time.
//!
//! A shard grows without a pause. Its slots lie in blocks that never move, and its index consists
//! of many small hash tables that grow by *linear hashing* (Litwin, "Linear Hashing", 1980): every
//! few slots one more table is added, and takes its keys from the next table in turn. A single
//! table would double, and rehash all keys within one call: a hundred thousand keys take longer
//! than the millisecond that a call may take.
//!
//! A key is stored as its hash alone, under a secret key. That any two of ten million keys share a
//! hash, and so their limit, has a chance of 2 in a hundred thousand; `hash.rs` has the figures for
//! untrusted keys. This saves an allocation per key, and a cache miss per request.

use hashbrown::HashTable;
use ratelimit_core::Timestamp;
use ratelimit_core::algorithm::InMemory;
use smallvec::SmallVec;

use crate::blocks::Blocks;
use crate::hash::CALLER_BITS;
use crate::sync::{Mutex, MutexGuard, lock};

/// The end of the list of free slots.
const NOWHERE: u32 = u32::MAX;
/// The most slots of a shard.
pub(crate) const MOST_SLOTS: usize = NOWHERE as usize;
/// Slots per block. A block takes some kilobytes, so that allocating one does not delay a call.
const SLOTS_A_BLOCK: usize = 256;
/// Slots per table. The tables that are next to be split have up to twice as many, and some more by
/// chance: 180 keeps these below 448, the most for a table of 512 places.
const SLOTS_A_TABLE: usize = 180;
/// The multiplier of Fibonacci hashing: 2^64 divided by the golden ratio, which is odd.
const MIX: u64 = 0x9e37_79b9_7f4a_7c15;

enum ShardSlot<S> {
    Used {
        hash: u64,
        sweep_at: Timestamp,
        /// How many entries the state was counted with. It is stored, so that freeing the state
        /// subtracts exactly what was added, whatever the state reports by then.
        entries: u32,
        state: S,
    },
    Free {
        /// The next free slot.
        next: u32,
    },
}

/// A slot, as the index refers to it.
#[derive(Clone, Copy)]
struct Pointer {
    /// The lower half of the hash: growing tables reads no slot, and a lookup reads few slots of
    /// other keys.
    tag: u32,
    slot: u32,
}

impl Pointer {
    /// A hash for the place in the table. It depends on the lower bits as well, by which the table
    /// was chosen.
    #[inline]
    fn mixed(tag: u32) -> u64 {
        u64::from(tag).wrapping_mul(MIX).rotate_left(32)
    }
}

#[inline]
#[allow(clippy::cast_possible_truncation, reason = "the lower half is what is wanted")]
const fn tag_of(hash: u64) -> u32 {
    hash as u32
}

/// The shard of a hash, among `shards` shards, a power of two.
#[inline]
pub(crate) fn shard_of(hash: u64, shards: usize) -> usize {
    // These bits are the same for all limits of a caller; the tables inside a shard use the low
    // bits and the top seven.
    usize::try_from(hash >> (64 - CALLER_BITS)).unwrap_or_default() & (shards - 1)
}

/// Several shards, locked in ascending order by all threads, so that they cannot deadlock.
pub(crate) struct ShardGuards<'s, S> {
    /// The number of all shards.
    all: usize,
    /// The index of each locked one among them, ascending.
    indices: SmallVec<[usize; 4]>,
    pub(crate) shards: SmallVec<[MutexGuard<'s, Shard<S>>; 4]>,
}

impl<'s, S> ShardGuards<'s, S> {
    /// Locks the shards of these hashes.
    pub(crate) fn lock(all: &'s [Mutex<Shard<S>>], hashes: impl Iterator<Item = u64>) -> Self {
        let mut indices: SmallVec<[usize; 4]> =
            hashes.map(|hash| shard_of(hash, all.len())).collect();
        indices.sort_unstable();
        indices.dedup();
        let shards = indices.iter().map(|&index| lock(&all[index])).collect();
        Self { all: all.len(), indices, shards }
    }

    fn position(&self, hash: u64) -> usize {
        self.indices.partition_point(|&index| index < shard_of(hash, self.all))
    }

    /// The shard of a hash, which is locked.
    pub(crate) fn get(&self, hash: u64) -> &Shard<S> {
        &self.shards[self.position(hash)]
    }

    pub(crate) fn get_mut(&mut self, hash: u64) -> &mut Shard<S> {
        let position = self.position(hash);
        &mut self.shards[position]
    }
}

/// The states of some keys, chosen by hash.
pub(crate) struct Shard<S> {
    slots: Blocks<ShardSlot<S>, SLOTS_A_BLOCK>,
    /// The index, by hash. A single table is stored inline, which saves a cache miss.
    tables: SmallVec<[HashTable<Pointer>; 1]>,
    /// The mask of the tag bits that choose a table.
    mask: u32,
    /// The first free slot.
    free: u32,
    /// The next slot to sweep.
    cursor: usize,
    /// No state may be swept before this time: until then a sweep reads no slot.
    earliest: Timestamp,
    /// The earliest sweep time of the states that the sweep has passed in this round, or that were
    /// written since.
    passed: Timestamp,
}

/// How many entries a state is counted with: as many as it reports, up to `u32::MAX`.
#[inline]
pub(crate) fn counted_entries<A: InMemory>(state: &A::State) -> u32 {
    u32::try_from(A::entries_in(state)).unwrap_or(u32::MAX)
}

impl<S> Shard<S> {
    pub(crate) fn new() -> Self {
        Self {
            slots: Blocks::new(),
            tables: SmallVec::new(),
            mask: 0,
            free: NOWHERE,
            cursor: 0,
            earliest: Timestamp::MAX,
            passed: Timestamp::MAX,
        }
    }

    /// The table of a tag. When a table is added, only the keys of one other table move.
    #[inline]
    fn table_of(&self, tag: u32) -> usize {
        let table = (tag & self.mask) as usize;
        if table < self.tables.len() { table } else { (tag & (self.mask >> 1)) as usize }
    }

    /// Finds the slot of a hash. The slot stays its key's until it is [cleared](Self::clear).
    #[inline]
    pub(crate) fn find(&self, hash: u64) -> Option<usize> {
        self.find_if(hash, |_| true)
    }

    /// Finds the slot of a hash whose state satisfies `is_it`: several states can have one hash if
    /// their content tells them apart.
    #[inline]
    pub(crate) fn find_if(&self, hash: u64, is_it: impl Fn(&S) -> bool) -> Option<usize> {
        let tag = tag_of(hash);
        let table = self.tables.get(self.table_of(tag))?;
        let is_wanted = |pointer: &Pointer| {
            let wanted = |slot: &ShardSlot<S>| match slot {
                ShardSlot::Used { hash: its, state, .. } => *its == hash && is_it(state),
                ShardSlot::Free { .. } => false,
            };
            pointer.tag == tag && wanted(self.slots.get(pointer.slot as usize))
        };
        table.find(Pointer::mixed(tag), is_wanted).map(|pointer| pointer.slot as usize)
    }

    /// The state in a slot, the number of entries that it is counted with, and when it may be
    /// swept, to be changed in place. A caller that changes that time calls
    /// [`expect_at`](Self::expect_at).
    #[inline]
    pub(crate) fn state_mut(&mut self, slot: usize) -> Option<(&mut S, &mut u32, &mut Timestamp)> {
        match self.slots.get_mut(slot) {
            ShardSlot::Used { state, entries, sweep_at, .. } => Some((state, entries, sweep_at)),
            ShardSlot::Free { .. } => None,
        }
    }

    /// Notes that a state may be swept at this time.
    #[inline]
    pub(crate) fn expect_at(&mut self, sweep_at: Timestamp) {
        self.earliest = sweep_at.min(self.earliest);
        self.passed = sweep_at.min(self.passed);
    }

    #[inline]
    pub(crate) fn state(&self, slot: usize) -> Option<&S> {
        match self.slots.get(slot) {
            ShardSlot::Used { state, .. } => Some(state),
            ShardSlot::Free { .. } => None,
        }
    }

    /// Iterates over all states.
    #[cfg(test)]
    pub(crate) fn states(&self) -> impl Iterator<Item = &S> {
        (0..self.slots.len).filter_map(|slot| self.state(slot))
    }

    /// The number of entries that all states were counted with.
    pub(crate) fn entries(&self) -> usize {
        let entries = |slot| match self.slots.get(slot) {
            ShardSlot::Used { entries, .. } => *entries as usize,
            ShardSlot::Free { .. } => 0,
        };
        (0..self.slots.len).map(entries).sum()
    }

    /// Replaces the state of a slot that is in use. Returns the old state and its entries.
    pub(crate) fn replace(
        &mut self,
        slot: usize,
        state: S,
        entries: u32,
        sweep_at: Timestamp,
    ) -> Option<(S, u32)> {
        let (its, counted, due) = self.state_mut(slot)?;
        let before = (std::mem::replace(its, state), std::mem::replace(counted, entries));
        *due = sweep_at;
        self.expect_at(sweep_at);
        Some(before)
    }

    /// Inserts a state, and returns its slot.
    pub(crate) fn insert(
        &mut self,
        hash: u64,
        state: S,
        entries: u32,
        sweep_at: Timestamp,
    ) -> usize {
        self.expect_at(sweep_at);
        let used = ShardSlot::Used { hash, sweep_at, entries, state };
        let slot = if self.free == NOWHERE { self.add(used) } else { self.reuse(used) };
        self.point(Pointer { tag: tag_of(hash), slot });
        slot as usize
    }

    /// Uses the first free slot.
    fn reuse(&mut self, used: ShardSlot<S>) -> u32 {
        let slot = self.free;
        if let ShardSlot::Free { next } = std::mem::replace(self.slots.get_mut(slot as usize), used)
        {
            self.free = next;
        }
        slot
    }

    /// Adds a slot and, every [`SLOTS_A_TABLE`] slots, a table.
    #[allow(clippy::cast_possible_truncation, reason = "no store has more than `MOST_SLOTS`")]
    fn add(&mut self, slot: ShardSlot<S>) -> u32 {
        let added = self.slots.len;
        self.slots.push(slot);
        if added.is_multiple_of(SLOTS_A_TABLE) {
            self.add_table();
        }
        added as u32
    }

    /// Adds a table, and splits the table that has its keys.
    fn add_table(&mut self) {
        let Some(highest_bit) = self.tables.len().checked_ilog2() else {
            self.tables.push(HashTable::new());
            return;
        };
        let table = self.tables.len() - (1 << highest_bit);
        self.tables.push(HashTable::with_capacity(SLOTS_A_TABLE));
        self.mask = u32::MAX >> (31 - highest_bit);
        let split =
            std::mem::replace(&mut self.tables[table], HashTable::with_capacity(SLOTS_A_TABLE));
        split.into_iter().for_each(|pointer| self.point(pointer));
    }

    fn point(&mut self, pointer: Pointer) {
        let table = self.table_of(pointer.tag);
        let hash = |pointer: &Pointer| Pointer::mixed(pointer.tag);
        self.tables[table].insert_unique(hash(&pointer), pointer, hash);
    }

    /// Frees a slot. Returns its state, and the entries that this was counted with.
    #[allow(clippy::cast_possible_truncation, reason = "it was made of such a number")]
    pub(crate) fn clear(&mut self, slot: usize) -> Option<(S, u32)> {
        let ShardSlot::Used { hash, .. } = *self.slots.get(slot) else { return None };
        let (tag, number) = (tag_of(hash), slot as u32);
        let table = self.table_of(tag);
        let is_it = |pointer: &Pointer| pointer.slot == number;
        if let Ok(found) = self.tables[table].find_entry(Pointer::mixed(tag), is_it) {
            found.remove();
        }
        let free = ShardSlot::Free { next: std::mem::replace(&mut self.free, number) };
        match std::mem::replace(self.slots.get_mut(slot), free) {
            ShardSlot::Used { state, entries, .. } => Some((state, entries)),
            ShardSlot::Free { .. } => None,
        }
    }

    /// Sweeps the next `count` slots: frees those that have expired, and tells of each how many
    /// entries its state had.
    pub(crate) fn sweep(&mut self, now: Timestamp, count: usize, freed: impl Fn(u32)) {
        for _ in 0..count.min(self.slots.len) {
            if now < self.earliest {
                break;
            }
            self.cursor += 1;
            if self.cursor >= self.slots.len {
                self.cursor = 0;
                self.earliest = std::mem::replace(&mut self.passed, Timestamp::MAX);
            }
            let ShardSlot::Used { sweep_at, .. } = *self.slots.get(self.cursor) else { continue };
            if sweep_at > now {
                self.passed = sweep_at.min(self.passed);
            } else if let Some((state, entries)) = self.clear(self.cursor) {
                freed(entries);
                // Last, because dropping a state may panic.
                drop(state);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timestamp(us: u64) -> Timestamp {
        Timestamp::from_us(us).expect("a time")
    }

    #[test]
    fn states_of_one_hash_are_told_apart_by_their_content() {
        let mut shard = Shard::new();
        let a = shard.insert(7, ("a", 1), 5, Timestamp::MAX);
        let b = shard.insert(7, ("b", 2), 6, Timestamp::MAX);
        assert_eq!(shard.replace(a, ("a", 3), 7, Timestamp::MAX), Some((("a", 1), 5)));
        assert_eq!(shard.entries(), 13);
        let find = |name| shard.find_if(7, |state| state.0 == name);
        assert_eq!((find("a"), find("b"), find("c")), (Some(a), Some(b), None));
        assert_eq!((shard.state(a), shard.state(b)), (Some(&("a", 3)), Some(&("b", 2))));
        assert!(shard.find(8).is_none());
    }

    #[test]
    fn states_are_found_after_tables_split_and_slots_are_cleared() {
        let mut shard = Shard::new();
        // Pseudo-random hashes, the same in every run.
        let hash = |n: u64| n.wrapping_mul(MIX) ^ n.wrapping_mul(MIX).rotate_left(29);
        let check = |shard: &Shard<u64>, inserted| {
            for n in 0..inserted {
                let found = shard.find(hash(n)).and_then(|slot| shard.state(slot)).copied();
                assert_eq!(found, (n % 3 != 0).then_some(n));
            }
        };
        for n in 0..30_000 {
            let tables = shard.tables.len();
            let slot = shard.insert(hash(n), n, 2, Timestamp::MAX);
            if n % 3 == 0 {
                assert_eq!((shard.clear(slot), shard.clear(slot)), (Some((n, 2)), None));
            }
            // A key that a split forgets may be found again after the next one.
            if shard.tables.len() > tables {
                check(&shard, n + 1);
            }
        }
        check(&shard, 30_000);
        assert_eq!((shard.slots.len, shard.tables.len()), (20_000, 112));
        assert_eq!(shard.tables.iter().map(HashTable::len).sum::<usize>(), 20_000);
        assert!(shard.tables.iter().all(|table| table.capacity() <= 448), "no pause");
    }

    #[test]
    fn a_sweep_reads_no_slot_until_a_state_can_have_expired() {
        let mut shard = Shard::new();
        let slots: Vec<_> = (0..10).map(|n| shard.insert(n, n, 1, timestamp(100 + n))).collect();
        // The entries that a sweep of all slots frees.
        let sweep = |shard: &mut Shard<u64>, us| {
            let freed = std::cell::Cell::new(0);
            shard.sweep(timestamp(us), 20, |entries| freed.set(freed.get() + entries));
            freed.get()
        };
        assert_eq!((sweep(&mut shard, 99), shard.cursor), (0, 0), "none was looked at");
        assert_eq!((sweep(&mut shard, 104), sweep(&mut shard, 104)), (5, 0));
        assert_eq!(shard.earliest, timestamp(105));
        shard.replace(slots[9], 9, 1, timestamp(50));
        assert_eq!(sweep(&mut shard, 60), 1);
        shard.replace(slots[8], 8, 1, timestamp(70));
        shard.insert(10, 10, 1, timestamp(80));
        assert_eq!((sweep(&mut shard, 80), sweep(&mut shard, 108)), (2, 3));
        assert_eq!(shard.states().count(), 0);
    }
}
