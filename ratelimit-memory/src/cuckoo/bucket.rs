//! [`Bucket`]: four entries in one cache line, each under a lock of one bit, and read without it.
//!
//! The lock is in the entry's word. That of the bucket's first entry has another bit, which says that states of keys
//! whose first bucket this is may lie elsewhere: see `spill`. Whoever charges a key that is there locks its entry
//! alone; whoever puts keys in, moves or removes them locks all four, in their order.
//!
//! # What a reader without the lock sees
//!
//! [`Bucket::look`] reads an entry's word, then the rest of it; [`Snapshot::is_still`] reads all of it again, the
//! word first. A writer takes the lock, then a release fence, then writes the rest, then the word by a release
//! store, which lets go. Whoever has read something of a writer's therefore sees the lock, or the word that
//! belongs to it and all that was written with it, when reading again. So what is found twice the same, with
//! the lock free, was there at one moment. (The word alone does not tell: it has the time of the last charge,
//! and stays what it is if there are several before the clock moves. What was changed and became the same again
//! in between cannot be told: then it was there before, and is there now. That needs several writes before the
//! clock moves, as the word has the time; only where these also go to and fro over a span of 71 minutes could
//! two of them be taken for one.)
//!
//! Whoever charges takes the lock from the very word that was seen, and compares the rest then.
//!
//! A look finds only entries that know all of their tag. One that has moved to a deeper segment knows less, and
//! is found by whoever holds the lock, who writes it anew ([`Locked::find`]). So a reader needs not ask whether its
//! segment has split since it was told of it: an entry of a segment that splits has another tag, and what is
//! still the same is where it was. (That what was written since by another key, one level deeper, is the very same 38
//! bits has a chance of 2^-38: as two keys meet. An entry that goes to its alternate bucket stays what it is, and is
//! cleared under the locks of the bucket that it leaves.)

use std::hint::select_unpredictable;

use ratelimit_core::Compact;

use super::address::Tag;
use super::entry::{Entry, LOCKED, Packed, SPILLED};
use crate::sync::{AtomicU32, AtomicU64, Ordering, fence, wait};

/// Entries in a bucket. Models of interleavings have fewer: each is a lock more to take in any order.
pub(super) const SLOTS: usize = if cfg!(all(test, loom)) { 2 } else { 4 };

/// Four entries.
#[derive(Debug)]
#[repr(C, align(64))]
pub(crate) struct Bucket {
    tags: [AtomicU32; SLOTS],
    lows: [AtomicU32; SLOTS],
    words: [AtomicU64; SLOTS],
}

/// An entry that a reader saw.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Snapshot<'l> {
    bucket: &'l Bucket,
    slot: usize,
    /// As it lies there, nobody having been writing.
    entry: Entry,
}

impl Bucket {
    pub(super) fn new() -> Self {
        Self {
            tags: std::array::from_fn(|_| AtomicU32::new(0)),
            lows: std::array::from_fn(|_| AtomicU32::new(0)),
            words: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// An entry as it lies there.
    #[inline(always)]
    fn entry(&self, slot: usize) -> Entry {
        // Before the others: whoever sees what came of a lock also sees what was written under it.
        let word = self.words[slot].load(Ordering::Acquire);
        let low = self.lows[slot].load(Ordering::Relaxed);
        Entry { word, low, tag: self.tags[slot].load(Ordering::Relaxed) }
    }

    /// Looks in two buckets, without a lock, for a key's entry that knows all of its tag, and in whose word none
    /// of these bits are set.
    ///
    /// A third of all keys lie in their second bucket. Which one it is, and which of four entries, nobody can
    /// foresee: so no branch depends on it. A wrong guess would be found out only when the buckets have come from
    /// memory, and all that has been begun meanwhile would be done again.
    #[inline(always)]
    pub(super) fn look<const UNFIT: u64>(
        [one, other]: [&Self; 2],
        tag: Tag,
    ) -> Option<Snapshot<'_>> {
        // If it is none of them, the last one is looked at.
        let mut place = 2 * SLOTS - 1;
        for before in (0..2 * SLOTS - 1).rev() {
            let bucket = if before < SLOTS { one } else { other };
            let is = bucket.tags[before % SLOTS].load(Ordering::Relaxed) == Entry::low_of(tag);
            place = select_unpredictable(is, before, place);
        }
        let bucket = select_unpredictable(place < SLOTS, one, other);
        let slot = place % SLOTS;
        let entry = bucket.entry(slot);
        entry.is_all_of::<UNFIT>(tag).then_some(Snapshot { bucket, slot, entry })
    }

    /// Whether something here has expired, as far as one can see without the lock.
    pub(super) fn may_have_expired(&self, now_us: u64) -> bool {
        let has_expired = |entry: Entry| !entry.is_free() && entry.has_expired(now_us);
        (0..SLOTS).any(|slot| has_expired(self.entry(slot)))
    }

    /// Waits for the locks of all entries, one after the other. Whoever charges entries holds them
    /// for some instructions, and waits for none meanwhile.
    pub(crate) fn lock(&self) -> Locked<'_> {
        let words = std::array::from_fn(|slot| {
            let mut waited = 0;
            loop {
                if let Some(word) = self.try_lock_entry(slot) {
                    return word;
                }
                wait(&mut waited);
            }
        });
        Locked::new(self, words)
    }

    /// Takes the locks of all entries if they are free.
    pub(crate) fn try_lock(&self) -> Option<Locked<'_>> {
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
        Some(Locked::new(self, words))
    }

    /// Takes the lock of an entry if it is free, and says what its word was.
    fn try_lock_entry(&self, slot: usize) -> Option<u64> {
        let word = self.words[slot].load(Ordering::Relaxed);
        (word & LOCKED == 0 && self.try_lock_from(slot, word)).then_some(word)
    }

    /// Takes the lock of an entry if its word is still this one, which is not locked.
    #[inline(always)]
    fn try_lock_from(&self, slot: usize, word: u64) -> bool {
        let locked = word | LOCKED;
        let was =
            self.words[slot].compare_exchange(word, locked, Ordering::Acquire, Ordering::Relaxed);
        was.is_ok()
    }
}

/// For models in which a thread has seen something before it begins.
#[cfg(all(test, loom))]
impl Bucket {
    pub(crate) fn seen(&self, (slot, entry): (usize, Entry)) -> Snapshot<'_> {
        Snapshot { bucket: self, slot, entry }
    }
}

#[cfg(all(test, loom))]
impl Snapshot<'_> {
    pub(crate) fn parts(&self) -> (usize, Entry) {
        (self.slot, self.entry)
    }
}

impl<'l> Snapshot<'l> {
    /// What was found to be but a time and a span, the time counted from the epoch on.
    #[inline(always)]
    pub(super) const fn span_since_epoch(&self) -> Compact {
        self.entry.state().span_since_epoch()
    }

    /// The state, unless somebody was writing.
    #[inline(always)]
    pub(crate) fn state(&self) -> Option<Packed> {
        self.is_unlocked().then(|| self.entry.state())
    }

    #[inline(always)]
    const fn is_unlocked(&self) -> bool {
        self.entry.word & LOCKED == 0
    }

    /// Whether what was seen is there still, and nobody was writing.
    #[inline(always)]
    pub(crate) fn is_still(&self) -> bool {
        fence(Ordering::Acquire);
        self.is_unlocked() && self.bucket.entry(self.slot) == self.entry
    }

    /// Takes the entry's lock if it is still what was seen, and was not locked then.
    #[inline(always)]
    pub(crate) fn try_lock(&self) -> Option<LockedEntry<'_, 'l>> {
        let locked = self.try_lock_word()?;
        let Self { bucket, slot, entry } = *self;
        let is_rest_still = bucket.lows[slot].load(Ordering::Relaxed) == entry.low
            && bucket.tags[slot].load(Ordering::Relaxed) == entry.tag;
        is_rest_still.then_some(locked)
    }

    /// Takes the entry's lock if its word is still what was seen, and was not locked then.
    #[inline(always)]
    pub(super) fn try_lock_word(&self) -> Option<LockedEntry<'_, 'l>> {
        let word = self.entry.word;
        if !self.is_unlocked() || !self.bucket.try_lock_from(self.slot, word) {
            return None;
        }
        // Whoever reads what is written from here on also sees the lock, or what came of it.
        fence(Ordering::Release);
        Some(LockedEntry { seen: self, word })
    }
}

/// An entry that nobody else writes to, until this is dropped.
#[derive(Debug)]
pub(crate) struct LockedEntry<'s, 'l> {
    seen: &'s Snapshot<'l>,
    /// What its word becomes when its lock is let go.
    word: u64,
}

impl LockedEntry<'_, '_> {
    /// Writes another state of the same key.
    #[inline(always)]
    pub(crate) fn set(&mut self, state: Packed) {
        let Snapshot { bucket, slot, entry } = self.seen;
        let Entry { word, low, .. } = entry.with(state);
        self.word = word;
        bucket.lows[*slot].store(low, Ordering::Relaxed);
    }
}

impl Drop for LockedEntry<'_, '_> {
    #[inline(always)]
    fn drop(&mut self) {
        self.seen.bucket.words[self.seen.slot].store(self.word, Ordering::Release);
    }
}

/// A bucket that nobody else writes to, until this is dropped.
#[derive(Debug)]
pub(crate) struct Locked<'l> {
    bucket: &'l Bucket,
    /// What the words of its entries become when their locks are let go.
    words: [u64; SLOTS],
}

impl<'l> Locked<'l> {
    fn new(bucket: &'l Bucket, words: [u64; SLOTS]) -> Self {
        // Whoever reads what is written from here on also sees the locks, or what came of them.
        fence(Ordering::Release);
        Self { bucket, words }
    }

    #[inline(always)]
    pub(crate) fn get(&self, slot: usize) -> Entry {
        let low = self.bucket.lows[slot].load(Ordering::Relaxed);
        let tag = self.bucket.tags[slot].load(Ordering::Relaxed);
        Entry { word: self.words[slot], low, tag }.without_flags()
    }

    #[inline(always)]
    pub(crate) fn set(&mut self, slot: usize, entry: Entry) {
        self.words[slot] = (self.words[slot] & SPILLED) | entry.word;
        self.bucket.lows[slot].store(entry.low, Ordering::Relaxed);
        self.bucket.tags[slot].store(entry.tag, Ordering::Relaxed);
    }

    pub(crate) fn clear(&mut self, slot: usize) {
        self.set(slot, Entry::FREE);
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (usize, Entry)> {
        (0..SLOTS).map(|slot| (slot, self.get(slot)))
    }

    /// The slot of a key. If its entry has moved since it was written, it knows all of the tag again from here
    /// on: those who look without the lock find no other.
    pub(crate) fn find(&mut self, tag: Tag) -> Option<usize> {
        let (slot, entry) = self.entries().find(|(_, entry)| entry.is(tag))?;
        if !entry.is_all_of::<0>(tag) {
            self.set(slot, Entry::new(tag, entry.state()));
        }
        Some(slot)
    }

    pub(crate) fn free_slot(&self) -> Option<usize> {
        self.entries().find(|(_, entry)| entry.is_free()).map(|(slot, _)| slot)
    }

    /// A slot whose state has stopped to matter.
    pub(crate) fn expired_slot(&self, now_us: u64) -> Option<usize> {
        let expired = |(_, entry): &(usize, Entry)| !entry.is_free() && entry.has_expired(now_us);
        self.entries().find(expired).map(|(slot, _)| slot)
    }

    /// Frees what has expired, and says how much.
    pub(crate) fn clear_expired(&mut self, now_us: u64) -> usize {
        let mut freed = 0;
        while let Some(slot) = self.expired_slot(now_us) {
            self.clear(slot);
            freed += 1;
        }
        freed
    }

    /// Whether states of keys whose first bucket this is may lie elsewhere.
    pub(crate) const fn has_spilled(&self) -> bool {
        self.words[0] & SPILLED != 0
    }

    /// Notes that such a state lies elsewhere. It is never taken back: nobody knows how many there are.
    pub(crate) const fn spill(&mut self) {
        self.words[0] |= SPILLED;
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        for (slot, word) in self.words.into_iter().enumerate() {
            self.bucket.words[slot].store(word, Ordering::Release);
        }
    }
}
