//! [`Line`]: four entries in one cache line, under a lock of one bit, and read without it.
//!
//! The first word of the first entry has two bits of the line's. One is its lock. The other says that
//! states of keys whose first line this is may lie elsewhere: see `spill`.
//!
//! # What a reader without the lock sees
//!
//! [`Line::look`] reads the first word, then the entries; [`Line::is_still`] reads the first word and the
//! entry again. A writer takes the lock, then a release fence, then writes, then lets go by a release
//! store. Whoever has read a word of a writer's therefore sees the lock, or all that the writer wrote,
//! when reading again: what is found twice the same, with the lock free both times, was there at one
//! moment. (The words of a key can only become what they were by being removed and written again within
//! one microsecond; a reader that is caught twice in between could see halves of both. It would decide on
//! a state that the key has had in that microsecond, one field off.)
//!
//! It finds only entries that know all of their tag. One that has moved to a deeper segment knows less, and
//! is found by whoever holds the lock, who writes it anew ([`Locked::find`]). So a reader needs not ask whether its
//! segment has split since it was told of it: an entry of a segment that splits becomes another word, and what is
//! still the same is where it was. (That what was written since by another key, one level deeper, is the very same 38
//! bits has a chance of 2^-38: as two keys meet. An entry that goes to its other line keeps its words, and is
//! cleared under the lock of the line that it leaves.)

use super::address::Tag;
use super::entry::Entry;
use crate::sync::{AtomicU64, Ordering, fence, wait};

/// Entries in a line.
pub(super) const SLOTS: usize = 4;

const LOCKED: u64 = 1 << 63;
const SPILLED: u64 = 1 << 62;
const FLAGS: u64 = LOCKED | SPILLED;

/// Four entries.
#[derive(Debug)]
#[repr(align(64))]
pub(crate) struct Line([AtomicU64; 2 * SLOTS]);

/// The first word of a line, with which a look at it begins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Begun(u64);

/// What a reader saw.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    /// The line's first word.
    word: u64,
    /// Where the entry lies that was looked for.
    pub(crate) slot: usize,
    pub(crate) entry: Entry,
}

impl Line {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }

    /// Reads what a look begins with: from here on the line is on its way.
    #[inline(always)]
    pub(super) fn begun(&self) -> Begun {
        Begun(self.0[0].load(Ordering::Acquire))
    }

    #[inline(always)]
    fn entry(&self, slot: usize) -> Entry {
        Entry {
            // Before the second: a writer stores both behind the lock that the first look has seen.
            first: self.0[2 * slot].load(Ordering::Acquire) & !FLAGS,
            second: self.0[2 * slot + 1].load(Ordering::Relaxed),
        }
    }

    /// Looks, without the lock, for a key's entry that knows all of its tag.
    #[inline(always)]
    pub(super) fn look(&self, Begun(word): Begun, tag: Tag) -> Option<Seen> {
        // Which of four it is nobody can foresee: so no branch depends on it.
        let mut found = SLOTS;
        for slot in (0..SLOTS).rev() {
            if Entry::is_low_of(self.0[2 * slot + 1].load(Ordering::Acquire), tag) {
                found = slot;
            }
        }
        if found == SLOTS {
            return None;
        }
        let slot = found % SLOTS;
        let entry = self.entry(slot);
        entry.is_all_of(tag).then_some(Seen { word, slot, entry })
    }

    /// Whether what was seen is there still, and nobody was writing.
    #[inline(always)]
    pub(crate) fn is_still(&self, seen: &Seen) -> bool {
        fence(Ordering::Acquire);
        let word = self.0[0].load(Ordering::Acquire);
        seen.word & LOCKED == 0 && word == seen.word && self.entry(seen.slot) == seen.entry
    }

    /// Whether something here has expired, as far as one can see without the lock.
    pub(super) fn may_have_expired(&self, now_us: u64) -> bool {
        let has_expired = |entry: Entry| !entry.is_free() && entry.has_expired(now_us);
        (0..SLOTS).any(|slot| has_expired(self.entry(slot)))
    }

    /// Waits for the lock.
    pub(crate) fn lock(&self) -> Locked<'_> {
        let mut waited = 0;
        loop {
            if let Some(locked) = self.try_lock() {
                return locked;
            }
            wait(&mut waited);
        }
    }

    /// Takes the lock if it is free.
    #[inline(always)]
    pub(crate) fn try_lock(&self) -> Option<Locked<'_>> {
        let word = self.0[0].load(Ordering::Relaxed);
        if word & LOCKED != 0 {
            return None;
        }
        self.try_lock_from(word)
    }

    /// Takes the lock if the first word is still this one.
    #[inline(always)]
    fn try_lock_from(&self, word: u64) -> Option<Locked<'_>> {
        let taken = word | LOCKED;
        self.0[0].compare_exchange(word, taken, Ordering::Acquire, Ordering::Relaxed).ok()?;
        // Whoever reads what is written from here on also sees the lock, or what came of it.
        fence(Ordering::Release);
        Some(Locked { line: self, word })
    }

    /// Takes the lock if the first word is still what was seen, and was not locked then.
    #[inline(always)]
    pub(crate) fn try_lock_seen(&self, seen: &Seen) -> Option<Locked<'_>> {
        if seen.word & LOCKED != 0 {
            return None;
        }
        self.try_lock_from(seen.word)
    }
}

/// A line that nobody else writes to, until this is dropped.
#[derive(Debug)]
pub(crate) struct Locked<'l> {
    line: &'l Line,
    /// What its first word becomes when the lock is let go.
    word: u64,
}

impl Locked<'_> {
    /// Whether what was seen is there still, of a line that nothing has been written to.
    #[inline(always)]
    pub(crate) fn is_still(&self, seen: &Seen) -> bool {
        self.line.entry(seen.slot) == seen.entry
    }

    #[inline(always)]
    pub(crate) fn get(&self, slot: usize) -> Entry {
        let entry = self.line.entry(slot);
        if slot == 0 { Entry { first: self.word & !FLAGS, ..entry } } else { entry }
    }

    #[inline(always)]
    pub(crate) fn set(&mut self, slot: usize, entry: Entry) {
        if slot == 0 {
            self.word = (self.word & FLAGS) | entry.first;
        } else {
            self.line.0[2 * slot].store(entry.first, Ordering::Relaxed);
        }
        self.line.0[2 * slot + 1].store(entry.second, Ordering::Relaxed);
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
        if !entry.is_all_of(tag) {
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

    /// Whether states of keys whose first line this is may lie elsewhere.
    pub(crate) const fn has_spilled(&self) -> bool {
        self.word & SPILLED != 0
    }

    /// Notes that such a state lies elsewhere. It is never taken back: nobody knows how many there are.
    pub(crate) const fn spill(&mut self) {
        self.word |= SPILLED;
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.line.0[0].store(self.word, Ordering::Release);
    }
}
