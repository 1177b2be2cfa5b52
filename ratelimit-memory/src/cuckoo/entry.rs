//! [`SlotEntry`]: a slot's content, a key's tag and state in sixteen bytes.
//!
//! | | bits | what |
//! |---|---|---|
//! | word | 46 | when the state was written, in µs since the store's epoch: at most 2.2 years |
//! | | 2 | the slot's lock bit, and a flag of the bucket: see `bucket.rs` |
//! | | 7 | the tag's upper part |
//! | | 9 | the span's upper part: how long the state matters, and the state's extra bits |
//! | low | 32 | the span's lower part |
//! | tag | 32 | the tag's lower part, including its end mark |

use ratelimit_core::Timestamp;
use ratelimit_core::for_memory::Compact;

use super::address::{KeyTag, TAG_BITS};

const AT_BITS: u32 = 46;
const SPAN_BITS: u32 = 41;
const LOW_BITS: u32 = 32;
const SPAN_HIGH_BITS: u32 = SPAN_BITS - LOW_BITS;
const SPAN_HIGH: u64 = (1 << SPAN_HIGH_BITS) - 1;
const TAG_HIGH: u64 = ((1 << (TAG_BITS - LOW_BITS)) - 1) << SPAN_HIGH_BITS;
const LOCK_BIT: u32 = TAG_BITS - LOW_BITS + SPAN_HIGH_BITS;
/// The lock bit of an entry, set in its word while a thread writes it.
pub(super) const LOCKED: u64 = 1 << LOCK_BIT;
/// Set in a word if the state has more than a time and a span.
pub(super) const EXTRA: u64 = 1 << (SPAN_ONLY - LOW_BITS);
/// Set in a bucket's first word if keys whose first bucket this is may have states in shards.
pub(super) const SPILLED: u64 = 1 << (LOCK_BIT + 1);
const AT_SHIFT: u32 = LOCK_BIT + 2;

/// The encodings of a span and an extra number in 41 bits: their prefixes, and the bits of the
/// extra number in the rest. Spans reach twelve days without an extra, ten hours with an extra up
/// to 15, and a minute with one up to 8,191.
const SPAN_ONLY: u32 = 40;
const SPAN_AND_4: u32 = 39;
const EXTRA_SHORT_BITS: u32 = 4;
const EXTRA_LONG_BITS: u32 = 13;

/// A state as an entry stores it, relative to the store's epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    at_us: u64,
    span: u64,
}

impl Packed {
    /// Packs a state. Returns `None` if it does not fit: such a state lies in a shard.
    #[inline(always)]
    pub(crate) fn new(compact: Compact, epoch: Timestamp) -> Option<Self> {
        let at_us = compact.at.as_us().checked_sub(epoch.as_us())?;
        let fits = |n: u64, bits: u32| n >> bits == 0;
        let (span_us, extra) = (compact.span_us, compact.extra);
        let span = if extra == 0 && fits(span_us, SPAN_ONLY) {
            span_us
        } else if fits(extra, EXTRA_SHORT_BITS) && fits(span_us, SPAN_AND_4 - EXTRA_SHORT_BITS) {
            (0b10 << SPAN_AND_4) | (span_us << EXTRA_SHORT_BITS) | extra
        } else if fits(extra, EXTRA_LONG_BITS) && fits(span_us, SPAN_AND_4 - EXTRA_LONG_BITS) {
            (0b11 << SPAN_AND_4) | (span_us << EXTRA_LONG_BITS) | extra
        } else {
            return None;
        };
        fits(at_us, AT_BITS).then_some(Self { at_us, span })
    }

    /// Packs a state that has only a time since the epoch and a span.
    #[inline(always)]
    pub(crate) const fn of_span(at_us: u64, span_us: u64) -> Option<Self> {
        if (at_us >> AT_BITS) | (span_us >> SPAN_ONLY) == 0 {
            Some(Self { at_us, span: span_us })
        } else {
            None
        }
    }

    /// Unpacks a state that has no [`EXTRA`]; its time counts from the epoch.
    #[inline(always)]
    pub(super) const fn span_since_epoch(self) -> Compact {
        Compact { at: Timestamp::saturating_from_us(self.at_us), span_us: self.span, extra: 0 }
    }

    #[inline(always)]
    const fn span_and_extra(self) -> (u64, u64) {
        if self.span >> SPAN_ONLY == 0 {
            return (self.span, 0);
        }
        let extra_bits = match self.span >> SPAN_AND_4 {
            0b10 => EXTRA_SHORT_BITS,
            _ => EXTRA_LONG_BITS,
        };
        let rest = self.span & ((1 << SPAN_AND_4) - 1);
        (rest >> extra_bits, rest & ((1 << extra_bits) - 1))
    }

    #[inline(always)]
    pub(crate) fn compact(self, epoch: Timestamp) -> Compact {
        let (span_us, extra) = self.span_and_extra();
        Compact { at: Timestamp::saturating_from_us(epoch.as_us() + self.at_us), span_us, extra }
    }
}

/// The content of a slot: free, or a key's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotEntry {
    /// Usually without the lock bit and the bucket's flag.
    pub(super) word: u64,
    pub(super) low: u32,
    /// Never 0 in an entry that is not free: a tag has its end mark.
    pub(super) tag: u32,
}

impl SlotEntry {
    pub(super) const FREE: Self = Self { word: 0, low: 0, tag: 0 };

    #[inline(always)]
    pub(crate) const fn new(tag: KeyTag, state: Packed) -> Self {
        Self { word: Self::high_of(tag), low: 0, tag: Self::low_of(tag) }.with(state)
    }

    /// The upper part of a tag, at its place in the word.
    #[inline(always)]
    const fn high_of(tag: KeyTag) -> u64 {
        (tag.0 >> (LOW_BITS - SPAN_HIGH_BITS)) & TAG_HIGH
    }

    /// The lower part of a tag.
    #[allow(clippy::cast_possible_truncation, reason = "the lower part is asked for")]
    #[inline(always)]
    pub(super) const fn low_of(tag: KeyTag) -> u32 {
        tag.0 as u32
    }

    /// The entry without its lock bit and the bucket's flag.
    #[inline(always)]
    pub(super) const fn without_flags(self) -> Self {
        Self { word: self.word & !(LOCKED | SPILLED), ..self }
    }

    /// The entry with another state of the same key. The lock bit and the bucket's flag stay.
    #[allow(clippy::cast_possible_truncation, reason = "the lower part is asked for")]
    #[inline(always)]
    pub(super) const fn with(self, state: Packed) -> Self {
        let word = self.word & (SPILLED | LOCKED | TAG_HIGH);
        let word = word | (state.at_us << AT_SHIFT) | (state.span >> LOW_BITS);
        Self { word, low: state.span as u32, ..self }
    }

    #[inline(always)]
    pub(crate) const fn is_free(self) -> bool {
        self.tag == 0
    }

    /// Whether the entry is this key's, by the bits that it stores.
    #[inline(always)]
    pub(crate) const fn is(self, tag: KeyTag) -> bool {
        // Only the bits above the end mark count.
        let known = !(self.tag ^ self.tag.wrapping_sub(1));
        let differs = (self.tag ^ Self::low_of(tag)) & known;
        differs == 0 && self.word & TAG_HIGH == Self::high_of(tag) && !self.is_free()
    }

    /// Whether the entry stores all of this key's tag (no split has moved it since it was written),
    /// and its word has none of the `UNFIT` bits.
    #[inline(always)]
    pub(super) const fn is_all_of<const UNFIT: u64>(self, tag: KeyTag) -> bool {
        let differs = (self.word ^ Self::high_of(tag)) & (TAG_HIGH | UNFIT);
        self.tag == Self::low_of(tag) && differs == 0
    }

    /// Whether both entries have the same word.
    #[cfg(all(test, loom))]
    pub(crate) const fn has_word_of(self, other: Self) -> bool {
        self.word == other.word
    }

    const fn tag(self) -> KeyTag {
        KeyTag(((self.word & TAG_HIGH) << (LOW_BITS - SPAN_HIGH_BITS)) | self.tag as u64)
    }

    pub(super) const fn alternate_bucket(self, bucket: usize, depth: u32) -> usize {
        self.tag().alternate_bucket(bucket, depth)
    }

    #[inline(always)]
    pub(crate) const fn state(self) -> Packed {
        let span = ((self.word & SPAN_HIGH) << LOW_BITS) | self.low as u64;
        Packed { at_us: self.word >> AT_SHIFT, span }
    }

    /// Whether it has a state, which has expired.
    pub(super) const fn has_expired(self, now_us: u64) -> bool {
        let state = self.state();
        !self.is_free() && state.at_us + state.span_and_extra().0 <= now_us
    }

    /// The entry one level deeper, and whether it belongs to the upper half there.
    pub(super) const fn deeper(self) -> (Self, bool) {
        let tag = self.tag().0;
        let moved = KeyTag((tag << 1) & ((1 << TAG_BITS) - 1));
        (Self::new(moved, self.state()), tag >> (TAG_BITS - 1) == 1)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::super::address::{Address, MAX_DEPTH};
    use super::*;
    use proptest::prelude::*;

    const EPOCH: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

    fn compact(after_us: u64, span_us: u64, extra: u64) -> Compact {
        Compact { at: EPOCH.saturating_add_us(after_us), span_us, extra }
    }

    #[test]
    fn a_state_that_needs_too_many_bits_is_not_packed() {
        for (after_us, span_us, extra, fits) in [
            (0, 0, 0, true),
            ((1 << 46) - 1, (1 << 40) - 1, 0, true),
            (1 << 46, 1, 0, false),
            (0, 1 << 40, 0, false),
            (0, (1 << 35) - 1, 15, true),
            (0, 1 << 35, 1, false),
            (0, (1 << 26) - 1, 8_191, true),
            (0, 1 << 26, 16, false),
            (0, 1, 8_192, false),
        ] {
            let packed = Packed::new(compact(after_us, span_us, extra), EPOCH);
            assert_eq!(packed.is_some(), fits, "{after_us} {span_us} {extra}");
        }
        let before = Compact { at: Timestamp::ZERO, span_us: 1, extra: 0 };
        assert_eq!(Packed::new(before, EPOCH), None);
    }

    proptest! {
        #[test]
        fn a_state_and_its_key_are_read_as_they_were_written(
            hash: u64,
            other: u64,
            depth in 0..=MAX_DEPTH,
            after_bits in 0..48_u32,
            span_bits in 0..44_u32,
            extra_bits in 0..16_u32,
            chance: u64,
        ) {
            let below = |bits: u32| chance & ((1 << bits) - 1);
            let compact = compact(below(after_bits), below(span_bits), below(extra_bits));
            let Some(packed) = Packed::new(compact, EPOCH) else { return Ok(()) };
            let (address, other) = (Address::new(hash), Address::new(other));
            let entry = SlotEntry::new(address.tag(depth), packed);
            prop_assert_eq!(entry.state().compact(EPOCH), compact);
            prop_assert!(!entry.is_free() && entry.is(address.tag(depth)));
            prop_assert!(SlotEntry::FREE.is_free() && !SlotEntry::FREE.is(address.tag(depth)));
            let is_span = compact.extra == 0;
            prop_assert_eq!(entry.word & EXTRA == 0, is_span);
            for (flags, is_unlocked) in [(0, true), (SPILLED, true), (LOCKED, false)] {
                let entry = SlotEntry { word: entry.word | flags, ..entry };
                for tag in [address, other].map(|address| address.tag(depth)) {
                    let is = tag == address.tag(depth);
                    prop_assert_eq!(entry.is_all_of::<0>(tag), is);
                    prop_assert_eq!(entry.is_all_of::<LOCKED>(tag), is && is_unlocked);
                    prop_assert_eq!(entry.is_all_of::<EXTRA>(tag), is && is_span);
                }
                prop_assert_eq!(entry.with(packed), entry);
                prop_assert_eq!(entry.state(), packed);
            }
            let of_span = Packed::of_span(below(after_bits), compact.span_us);
            prop_assert_eq!(of_span.filter(|_| is_span), Some(packed).filter(|_| is_span));
            prop_assert_eq!(Packed::of_span(1 << AT_BITS, 1 << SPAN_ONLY), None);
            if is_span {
                let Compact { at, span_us, extra } = packed.span_since_epoch();
                prop_assert_eq!((at.as_us(), span_us, extra), (below(after_bits), compact.span_us, 0));
            }
            prop_assert_eq!(entry.is(other.tag(depth)), address.tag(depth) == other.tag(depth));
            let ends_us = below(after_bits) + compact.span_us;
            prop_assert!(entry.has_expired(ends_us));
            prop_assert!(ends_us == 0 || !entry.has_expired(ends_us - 1));
        }

        #[test]
        fn an_entry_that_a_split_moves_keeps_its_key_and_its_state(hash: u64, other: u64, span_us in 0..1_u64 << 40) {
            let (address, other) = (Address::new(hash), Address::new(other));
            let packed = Packed::new(compact(7, span_us, 0), EPOCH).expect("fits");
            let mut entry = SlotEntry::new(address.tag(0), packed);
            for depth in 1..=MAX_DEPTH {
                let (deeper, upper) = entry.deeper();
                prop_assert_eq!(upper, address.directory_index(u64::BITS - depth) % 2 == 1);
                prop_assert!(deeper.is(address.tag(depth)) && !deeper.is_free());
                prop_assert!(!deeper.is(other.tag(depth)));
                prop_assert_eq!(deeper.state(), packed);
                entry = deeper;
            }
        }
    }
}
