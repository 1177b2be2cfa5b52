//! One shard: states in a slab, found by hash, swept a few slots at a time.
//!
//! A key is known by its hash alone: 64 bits of `SipHash` under a secret key. That two of ten million share
//! theirs, and so their limit, has a chance of 3 in a million, and nobody can bring it about. What is
//! saved is an allocation a key, and a look into other memory a request.

use hashbrown::HashTable;
use ratelimit_core::Tick;
use smallvec::SmallVec;

use crate::sync::{Mutex, MutexGuard, lock};

struct Entry<S> {
    hash: u64,
    state: S,
    sweep_at: Tick,
}

/// What a sweep has freed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Freed {
    pub(crate) slots: usize,
    /// The entries of the states in them.
    pub(crate) entries: usize,
}

impl std::ops::AddAssign for Freed {
    fn add_assign(&mut self, more: Self) {
        self.slots += more.slots;
        self.entries += more.entries;
    }
}

impl std::iter::Sum for Freed {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        let mut sum = Self::default();
        all.for_each(|freed| sum += freed);
        sum
    }
}

/// Where the keys of this hash lie among so many shards, a power of two.
#[inline]
pub(crate) fn shard_of(hash: u64, shards: usize) -> usize {
    // The table inside a shard uses the low bits and the top seven.
    usize::try_from(hash >> 32).unwrap_or_default() & (shards - 1)
}

/// Several shards, locked in one order for everybody: nobody waits in a circle.
pub(crate) struct Locked<'s, S> {
    /// Where each of them lies among all, ascending.
    places: SmallVec<[usize; 4]>,
    pub(crate) shards: SmallVec<[MutexGuard<'s, Shard<S>>; 4]>,
}

impl<'s, S> Locked<'s, S> {
    pub(crate) fn lock(all: &'s [Mutex<Shard<S>>], places: impl Iterator<Item = usize>) -> Self {
        let mut places: SmallVec<[usize; 4]> = places.collect();
        places.sort_unstable();
        places.dedup();
        let shards = places.iter().map(|&place| lock(&all[place])).collect();
        Self { places, shards }
    }

    /// The position among the locked ones of the shard that lies there among all.
    pub(crate) fn position(&self, place: usize) -> usize {
        self.places.partition_point(|&other| other < place)
    }
}

/// The states of the keys whose hashes lead here.
pub(crate) struct Shard<S> {
    /// Positions in `slots`, by hash.
    table: HashTable<usize>,
    slots: Vec<Option<Entry<S>>>,
    free: Vec<usize>,
    /// The slot that the sweep looks at next.
    cursor: usize,
}

impl<S> Shard<S> {
    pub(crate) const fn new() -> Self {
        Self { table: HashTable::new(), slots: Vec::new(), free: Vec::new(), cursor: 0 }
    }

    /// How many states there are.
    #[cfg(all(test, not(loom)))]
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// The slot of a hash, which stays its own until it is [cleared](Self::clear).
    #[inline]
    pub(crate) fn find(&self, hash: u64) -> Option<usize> {
        self.find_if(hash, |_| true)
    }

    /// The slot of a hash whose state is like this: several can be kept under one hash if each is looked
    /// for by what tells it from the others.
    #[inline]
    pub(crate) fn find_if(&self, hash: u64, is_it: impl Fn(&S) -> bool) -> Option<usize> {
        let is_entry = |entry: &Entry<S>| entry.hash == hash && is_it(&entry.state);
        let same = |&slot: &usize| self.slots[slot].as_ref().is_some_and(is_entry);
        self.table.find(hash, same).copied()
    }

    /// The state in a slot, and when it may be swept, to be changed in place.
    #[inline]
    pub(crate) fn state_mut(&mut self, slot: usize) -> Option<(&mut S, &mut Tick)> {
        self.slots[slot].as_mut().map(|entry| (&mut entry.state, &mut entry.sweep_at))
    }

    pub(crate) fn state(&self, slot: usize) -> Option<&S> {
        self.slots[slot].as_ref().map(|entry| &entry.state)
    }

    /// All the states.
    pub(crate) fn states(&self) -> impl Iterator<Item = &S> {
        self.slots.iter().flatten().map(|entry| &entry.state)
    }

    /// Writes another state to a slot that is in use, and gives back what was there.
    pub(crate) fn replace(&mut self, slot: usize, state: S, sweep_at: Tick) -> Option<S> {
        let entry = self.slots[slot].as_mut()?;
        entry.sweep_at = sweep_at;
        Some(std::mem::replace(&mut entry.state, state))
    }

    /// Writes a state that is not there yet, and says where.
    pub(crate) fn insert(&mut self, hash: u64, state: S, sweep_at: Tick) -> usize {
        let entry = Some(Entry { hash, state, sweep_at });
        let slot = if let Some(slot) = self.free.pop() {
            self.slots[slot] = entry;
            slot
        } else {
            self.slots.push(entry);
            self.slots.len() - 1
        };
        let slots = &self.slots;
        let hash_of = |&slot: &usize| slots[slot].as_ref().map_or(0, |entry| entry.hash);
        self.table.insert_unique(hash, slot, hash_of);
        slot
    }

    /// Frees a slot, and gives back what was there.
    pub(crate) fn clear(&mut self, slot: usize) -> Option<S> {
        let entry = self.slots[slot].take()?;
        if let Ok(found) = self.table.find_entry(entry.hash, |&other| other == slot) {
            found.remove();
        }
        self.free.push(slot);
        Some(entry.state)
    }

    /// Looks at the next `count` slots, frees those that have expired, and says how many, and how many
    /// entries their states had by this count.
    pub(crate) fn sweep(
        &mut self,
        now: Tick,
        count: usize,
        entries_in: impl Fn(&S) -> usize,
    ) -> Freed {
        let mut freed = Freed::default();
        for _ in 0..count.min(self.slots.len()) {
            self.cursor += 1;
            if self.cursor >= self.slots.len() {
                self.cursor = 0;
            }
            let expired = |entry: &Entry<S>| entry.sweep_at <= now;
            if self.slots[self.cursor].as_ref().is_some_and(expired)
                && let Some(state) = self.clear(self.cursor)
            {
                freed += Freed { slots: 1, entries: entries_in(&state) };
            }
        }
        freed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tick(us: u64) -> Tick {
        Tick::from_us(us).expect("a time")
    }

    #[test]
    fn several_under_one_hash_are_told_apart_by_what_they_are() {
        let mut shard = Shard::new();
        let a = shard.insert(7, ("a", 1), Tick::MAX);
        let b = shard.insert(7, ("b", 2), Tick::MAX);
        assert_eq!(shard.replace(a, ("a", 3), Tick::MAX), Some(("a", 1)));
        let find = |name| shard.find_if(7, |state| state.0 == name);
        assert_eq!((find("a"), find("b"), find("c")), (Some(a), Some(b), None));
        assert_eq!((shard.state(a), shard.state(b)), (Some(&("a", 3)), Some(&("b", 2))));
        assert!(shard.find(8).is_none());
    }

    #[test]
    fn slots_are_used_again_and_the_sweep_finds_what_has_expired() {
        let mut shard = Shard::new();
        let slots: Vec<_> = (0..100).map(|n| shard.insert(n, n, tick(n))).collect();
        assert_eq!((shard.clear(slots[0]), shard.clear(slots[0])), (Some(0), None));
        let freed = (0..100).map(|_| shard.sweep(tick(50), 1, |_| 3)).sum::<Freed>();
        assert_eq!(freed, Freed { slots: 50, entries: 150 });
        assert_eq!((shard.find(50), shard.find(51)), (None, Some(slots[51])));
        for n in 1000..1051 {
            shard.insert(n, n, Tick::MAX);
        }
        assert_eq!(shard.slots.len(), 100);
    }
}
