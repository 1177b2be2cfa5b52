//! [`Bucket`]: four slots in one cache line, each with a lock bit of its own and readable without
//! it. Reads are *optimistic*, as a seqlock's are: read, decide, validate.
//!
//! The lock bit is in the entry's word. The first entry's word has one more flag: keys whose first
//! bucket this is may have states in shards (see `spill`). A charge of a key that is there locks
//! its slot alone. A writer that inserts, moves or removes keys locks all four slots, in their
//! order.
//!
//! # What a reader without the lock sees
//!
//! [`Bucket::look`] reads an entry's word, then the rest of it; [`OptimisticRead::is_still`] reads
//! all of it again, the word first. A writer takes the lock, executes a release fence, writes the
//! rest, and then stores the word with release ordering, which unlocks. A reader that has read any
//! part of a write therefore sees, when it reads again, the lock bit, or the word that belongs to
//! that write and all that was written with it. So an entry that is read twice the same, unlocked,
//! was there at one moment.
//!
//! The word alone is not enough: it has the time of the last charge, and several charges within one
//! microsecond can leave it unchanged. An entry that changes and changes back in between goes
//! unnoticed, which is harmless: it was there before, and is there now. A mixture of two writes
//! could pass only if several writes within one microsecond move the span across a multiple of 2^32
//! µs (71 minutes) and back.
//!
//! A charge takes the lock by a compare-exchange from the word that it saw, and then compares the
//! rest.
//!
//! A look finds only entries that store their whole tag. An entry that a split has moved to a
//! deeper segment stores fewer bits; only the holder of its lock finds it, and rewrites it
//! ([`BucketGuard::find`]). A reader therefore need not check whether its segment has split since
//! it read the directory: a split changes the tag of each entry, so an entry that is unchanged is
//! where it was. (Another key, written since and one level deeper, has the very same 38 bits with a
//! chance of 2^-38, the chance that two keys meet. A relocated entry keeps its tag, and is cleared
//! under the locks of the bucket that it leaves.)

use std::hint::select_unpredictable;

use ratelimit_core::for_memory::Compact;

use super::address::KeyTag;
use super::entry::{LOCKED, Packed, SPILLED, SlotEntry};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence, wait};

/// Slots in a bucket. Loom models have fewer: each is one more lock to interleave.
pub(super) const SLOTS: usize = if cfg!(all(test, loom)) { 2 } else { 4 };

/// Four slots.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Bucket {
    tags: [AtomicU32; SLOTS],
    lows: [AtomicU32; SLOTS],
    words: [AtomicU64; SLOTS],
}

/// An entry that a reader saw, to be validated later.
#[derive(Clone, Copy, Debug)]
pub(crate) struct OptimisticRead<'l> {
    bucket: &'l Bucket,
    slot: usize,
    /// The entry as the reader saw it, which may be locked.
    entry: SlotEntry,
}

impl Bucket {
    pub(super) fn new() -> Self {
        Self {
            tags: std::array::from_fn(|_| AtomicU32::new(0)),
            lows: std::array::from_fn(|_| AtomicU32::new(0)),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Reads an entry.
    #[inline(always)]
    fn entry(&self, slot: usize) -> SlotEntry {
        // The word comes first: a reader that sees the word of an unlock also sees all that was
        // written under that lock.
        let word = self.words[slot].load(Ordering::Acquire);
        let low = self.lows[slot].load(Ordering::Relaxed);
        SlotEntry { word, low, tag: self.tags[slot].load(Ordering::Relaxed) }
    }

    /// Looks in two buckets, without a lock, for a key's entry that stores its whole tag and has
    /// none of the `UNFIT` bits in its word.
    ///
    /// A third of all keys lie in their alternate bucket. A processor cannot predict the bucket or
    /// the slot, so no branch depends on them. It would notice a misprediction only when the
    /// buckets have come from memory, and would then repeat all that it has begun meanwhile.
    #[inline(always)]
    pub(super) fn look<const UNFIT: u64>(
        [one, other]: [&Self; 2],
        tag: KeyTag,
    ) -> Option<OptimisticRead<'_>> {
        // If no tag matches, the last slot is checked, and rejected.
        let mut position = 2 * SLOTS - 1;
        for before in (0..2 * SLOTS - 1).rev() {
            let bucket = if before < SLOTS { one } else { other };
            let is = bucket.tags[before % SLOTS].load(Ordering::Relaxed) == SlotEntry::low_of(tag);
            position = select_unpredictable(is, before, position);
        }
        let bucket = select_unpredictable(position < SLOTS, one, other);
        let slot = position % SLOTS;
        let entry = bucket.entry(slot);
        entry.is_all_of::<UNFIT>(tag).then_some(OptimisticRead { bucket, slot, entry })
    }

    /// Whether an entry seems to have expired, read without the lock.
    pub(super) fn may_have_expired(&self, now_us: u64) -> bool {
        (0..SLOTS).any(|slot| self.entry(slot).has_expired(now_us))
    }

    /// Locks all slots, one after the other. A charge holds one for a few instructions, and waits
    /// for no other meanwhile.
    pub(crate) fn lock(&self) -> BucketGuard<'_> {
        let words = std::array::from_fn(|slot| {
            let mut waited = 0;
            loop {
                if let Some(word) = self.try_lock_entry(slot) {
                    return word;
                }
                wait(&mut waited);
            }
        });
        BucketGuard::new(self, words)
    }

    /// Locks all slots if they are unlocked.
    pub(crate) fn try_lock(&self) -> Option<BucketGuard<'_>> {
        let mut words = [0; SLOTS];
        for slot in 0..SLOTS {
            let Some(word) = self.try_lock_entry(slot) else {
                for (slot, word) in words.into_iter().enumerate().take(slot) {
                    self.words[slot].store(word, Ordering::Release);
                }
                return None;
            };
            words[slot] = word;
        }
        Some(BucketGuard::new(self, words))
    }

    /// Locks a slot if it is unlocked, and returns its word from before.
    fn try_lock_entry(&self, slot: usize) -> Option<u64> {
        let word = self.words[slot].load(Ordering::Relaxed);
        (word & LOCKED == 0 && self.try_lock_from(slot, word)).then_some(word)
    }

    /// Locks a slot if its word is still this one, which is unlocked.
    #[inline(always)]
    fn try_lock_from(&self, slot: usize, word: u64) -> bool {
        let locked = word | LOCKED;
        let was =
            self.words[slot].compare_exchange(word, locked, Ordering::Acquire, Ordering::Relaxed);
        was.is_ok()
    }
}

/// For models in which a thread has a snapshot before it begins.
#[cfg(all(test, loom))]
impl Bucket {
    pub(crate) fn optimistic_read(&self, (slot, entry): (usize, SlotEntry)) -> OptimisticRead<'_> {
        OptimisticRead { bucket: self, slot, entry }
    }
}

#[cfg(all(test, loom))]
impl OptimisticRead<'_> {
    pub(crate) fn parts(&self) -> (usize, SlotEntry) {
        (self.slot, self.entry)
    }
}

impl<'l> OptimisticRead<'l> {
    /// The state, which has only a time and a span; the time counts from the epoch.
    #[inline(always)]
    pub(super) const fn span_since_epoch(&self) -> Compact {
        self.entry.state().span_since_epoch()
    }

    /// The state, unless a writer held the lock.
    #[inline(always)]
    pub(crate) fn state(&self) -> Option<Packed> {
        self.is_unlocked().then(|| self.entry.state())
    }

    #[inline(always)]
    const fn is_unlocked(&self) -> bool {
        self.entry.word & LOCKED == 0
    }

    /// Whether the entry is unchanged and was unlocked.
    #[inline(always)]
    pub(crate) fn is_still(&self) -> bool {
        fence(Ordering::Acquire);
        self.is_unlocked() && self.bucket.entry(self.slot) == self.entry
    }

    /// Locks the slot if the entry is unchanged and was unlocked.
    #[inline(always)]
    pub(crate) fn try_lock(&self) -> Option<SlotGuard<'_, 'l>> {
        let locked = self.try_lock_word()?;
        let Self { bucket, slot, entry } = *self;
        let is_rest_still = bucket.lows[slot].load(Ordering::Relaxed) == entry.low
            && bucket.tags[slot].load(Ordering::Relaxed) == entry.tag;
        is_rest_still.then_some(locked)
    }

    /// Locks the slot if the entry's word is unchanged and was unlocked.
    #[inline(always)]
    pub(super) fn try_lock_word(&self) -> Option<SlotGuard<'_, 'l>> {
        let word = self.entry.word;
        if !self.is_unlocked() || !self.bucket.try_lock_from(self.slot, word) {
            return None;
        }
        // A reader that sees a write from here on also sees the lock bit, or the word that replaces
        // it.
        fence(Ordering::Release);
        Some(SlotGuard { seen: self, word })
    }
}

/// The lock guard of one slot.
#[derive(Debug)]
pub(crate) struct SlotGuard<'s, 'l> {
    seen: &'s OptimisticRead<'l>,
    /// The word that unlocking stores.
    word: u64,
}

impl SlotGuard<'_, '_> {
    /// Writes another state of the same key.
    #[inline(always)]
    pub(crate) fn set(&mut self, state: Packed) {
        let OptimisticRead { bucket, slot, entry } = self.seen;
        let SlotEntry { word, low, .. } = entry.with(state);
        self.word = word;
        bucket.lows[*slot].store(low, Ordering::Relaxed);
    }
}

impl Drop for SlotGuard<'_, '_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.seen.bucket.words[self.seen.slot].store(self.word, Ordering::Release);
    }
}

/// The lock guard of all slots of a bucket.
#[derive(Debug)]
pub(crate) struct BucketGuard<'l> {
    bucket: &'l Bucket,
    /// The words that unlocking stores.
    words: [u64; SLOTS],
}

impl<'l> BucketGuard<'l> {
    fn new(bucket: &'l Bucket, words: [u64; SLOTS]) -> Self {
        // A reader that sees a write from here on also sees the lock bits, or the words that
        // replace them.
        fence(Ordering::Release);
        Self { bucket, words }
    }

    #[inline(always)]
    pub(crate) fn get(&self, slot: usize) -> SlotEntry {
        let low = self.bucket.lows[slot].load(Ordering::Relaxed);
        let tag = self.bucket.tags[slot].load(Ordering::Relaxed);
        SlotEntry { word: self.words[slot], low, tag }.without_flags()
    }

    #[inline(always)]
    pub(crate) fn set(&mut self, slot: usize, entry: SlotEntry) {
        self.words[slot] = (self.words[slot] & SPILLED) | entry.word;
        self.bucket.lows[slot].store(entry.low, Ordering::Relaxed);
        self.bucket.tags[slot].store(entry.tag, Ordering::Relaxed);
    }

    pub(crate) fn clear(&mut self, slot: usize) {
        self.set(slot, SlotEntry::FREE);
    }

    /// The first slot whose entry satisfies `is_it`.
    fn slot(&self, is_it: impl Fn(SlotEntry) -> bool) -> Option<usize> {
        (0..SLOTS).find(|slot| is_it(self.get(*slot)))
    }

    /// Finds a key's slot. If a split has moved the entry since it was written, rewrites it with
    /// its whole tag: lookups without the lock find no other.
    pub(crate) fn find(&mut self, tag: KeyTag) -> Option<usize> {
        let slot = self.slot(|entry| entry.is(tag))?;
        let entry = self.get(slot);
        if !entry.is_all_of::<0>(tag) {
            self.set(slot, SlotEntry::new(tag, entry.state()));
        }
        Some(slot)
    }

    pub(crate) fn free_slot(&self) -> Option<usize> {
        self.slot(SlotEntry::is_free)
    }

    /// Finds a slot whose state has expired.
    pub(crate) fn expired_slot(&self, now_us: u64) -> Option<usize> {
        self.slot(|entry| entry.has_expired(now_us))
    }

    /// Frees the expired slots, and returns how many there were.
    pub(crate) fn clear_expired(&mut self, now_us: u64) -> usize {
        let mut freed = 0;
        while let Some(slot) = self.expired_slot(now_us) {
            self.clear(slot);
            freed += 1;
        }
        freed
    }

    /// Whether keys whose first bucket this is may have states in shards.
    pub(crate) const fn has_spilled(&self) -> bool {
        self.words[0] & SPILLED != 0
    }

    /// Notes that such a state lies in a shard. The flag is never cleared: nothing counts these
    /// states.
    pub(crate) const fn spill(&mut self) {
        self.words[0] |= SPILLED;
    }
}

impl Drop for BucketGuard<'_> {
    fn drop(&mut self) {
        for (slot, word) in self.words.into_iter().enumerate() {
            self.bucket.words[slot].store(word, Ordering::Release);
        }
    }
}
