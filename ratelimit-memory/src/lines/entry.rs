//! [`Entry`]: a key's tag and state in two words.
//!
//! | word | bits | what |
//! |---|---|---|
//! | first | 2 | of the line, not of the entry: see `line.rs` |
//! | | 46 | when the state was written, in µs since the store's epoch: 2.2 years |
//! | | 16 | the tag's upper part |
//! | second | 41 | how long it matters, and what else there is to it |
//! | | 23 | the tag's lower part, its end mark included |

use ratelimit_core::{Small, Tick};

use super::address::{TAG_BITS, Tag};

const AT_BITS: u32 = 46;
const TAG_LOW_BITS: u32 = 23;
const TAG_HIGH_BITS: u32 = TAG_BITS - TAG_LOW_BITS;
const TAG_LOW: u64 = (1 << TAG_LOW_BITS) - 1;
const TAG_HIGH: u64 = (1 << TAG_HIGH_BITS) - 1;

/// The ways of telling a span and something extra in 41 bits: what they begin with, and the bits that
/// the extra has of the rest. From a span of twelve days, by ten hours and 15, to a minute and 8,191.
const SPAN_ONLY: u32 = 40;
const SPAN_AND_4: u32 = 39;
const EXTRA_SHORT_BITS: u32 = 4;
const EXTRA_LONG_BITS: u32 = 13;

/// A state as it lies in an entry, by the store's epoch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Packed {
    at_us: u64,
    span: u64,
}

impl Packed {
    /// `None` if it does not fit: such a state lives elsewhere.
    #[inline(always)]
    pub(crate) fn new(small: Small, epoch: Tick) -> Option<Self> {
        let at_us = small.at.as_us().checked_sub(epoch.as_us())?;
        let fits = |n: u64, bits: u32| n >> bits == 0;
        let (span_us, extra) = (small.span_us, small.extra);
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
    pub(crate) fn small(self, epoch: Tick) -> Small {
        let (span_us, extra) = self.span_and_extra();
        Small { at: Tick::saturating_from_us(epoch.as_us() + self.at_us), span_us, extra }
    }
}

/// A place in a line: free, or a key's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The first word without the line's bits.
    pub(super) first: u64,
    /// The second word; never 0 in an entry that is not free, since a tag has its mark.
    pub(super) second: u64,
}

impl Entry {
    pub(super) const FREE: Self = Self { first: 0, second: 0 };

    #[inline(always)]
    pub(crate) const fn new(tag: Tag, state: Packed) -> Self {
        Self {
            first: (state.at_us << TAG_HIGH_BITS) | (tag.0 >> TAG_LOW_BITS),
            second: (state.span << TAG_LOW_BITS) | (tag.0 & TAG_LOW),
        }
    }

    #[inline(always)]
    pub(crate) const fn is_free(self) -> bool {
        self.second == 0
    }

    /// Whether it is of this key, as far as it knows.
    #[inline(always)]
    pub(crate) const fn is(self, tag: Tag) -> bool {
        // From the end mark down there is nothing to compare.
        let known = !(self.second ^ self.second.wrapping_sub(1)) & TAG_LOW;
        let differs =
            ((self.first ^ (tag.0 >> TAG_LOW_BITS)) & TAG_HIGH) | ((self.second ^ tag.0) & known);
        differs == 0 && !self.is_free()
    }

    /// Whether an entry with this second word is of this key, and has been written where it lies, as far as the
    /// lower part of the tag tells.
    #[inline(always)]
    pub(super) const fn is_low_of(second: u64, tag: Tag) -> bool {
        (second ^ tag.0) & TAG_LOW == 0
    }

    /// Whether it is of this key, and has been written where it lies: then it knows all of the tag.
    #[inline(always)]
    pub(super) const fn is_all_of(self, tag: Tag) -> bool {
        ((self.second ^ tag.0) & TAG_LOW) | ((self.first ^ (tag.0 >> TAG_LOW_BITS)) & TAG_HIGH) == 0
    }

    const fn tag(self) -> Tag {
        Tag(((self.first & TAG_HIGH) << TAG_LOW_BITS) | (self.second & TAG_LOW))
    }

    pub(super) const fn other_line(self, line: usize, depth: u32) -> usize {
        self.tag().other_line(line, depth)
    }

    #[inline(always)]
    pub(crate) const fn state(self) -> Packed {
        Packed { at_us: self.first >> TAG_HIGH_BITS, span: self.second >> TAG_LOW_BITS }
    }

    /// Whether its state has stopped to matter.
    pub(super) const fn has_expired(self, now_us: u64) -> bool {
        let state = self.state();
        state.at_us + state.span_and_extra().0 <= now_us
    }

    /// The same entry one level deeper, and whether it belongs to the upper half there.
    pub(super) const fn deeper(self) -> (Self, bool) {
        let tag = self.tag().0;
        let moved = Tag((tag << 1) & ((1 << TAG_BITS) - 1));
        (Self::new(moved, self.state()), tag >> (TAG_BITS - 1) == 1)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::super::address::{Address, MAX_DEPTH};
    use super::*;
    use proptest::prelude::*;

    const EPOCH: Tick = Tick::saturating_from_us(1_795_218_392_123_456);

    fn small(after_us: u64, span_us: u64, extra: u64) -> Small {
        Small { at: EPOCH.saturating_add_us(after_us), span_us, extra }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
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
            let packed = Packed::new(small(after_us, span_us, extra), EPOCH);
            assert_eq!(packed.is_some(), fits, "{after_us} {span_us} {extra}");
        }
        let before = Small { at: Tick::ZERO, span_us: 1, extra: 0 };
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
            let small = small(below(after_bits), below(span_bits), below(extra_bits));
            let Some(packed) = Packed::new(small, EPOCH) else { return Ok(()) };
            let (address, other) = (Address::new(hash), Address::new(other));
            let entry = Entry::new(address.tag(depth), packed);
            prop_assert_eq!(entry.state().small(EPOCH), small);
            prop_assert!(!entry.is_free() && entry.is(address.tag(depth)));
            prop_assert_eq!(entry.is(other.tag(depth)), address.tag(depth) == other.tag(depth));
            let ends_us = below(after_bits) + small.span_us;
            prop_assert!(entry.has_expired(ends_us));
            prop_assert!(ends_us == 0 || !entry.has_expired(ends_us - 1));
        }

        #[test]
        fn an_entry_that_moves_keeps_its_key_and_its_state(hash: u64, other: u64, span_us in 0..1_u64 << 40) {
            let (address, other) = (Address::new(hash), Address::new(other));
            let packed = Packed::new(small(7, span_us, 0), EPOCH).expect("fits");
            let mut entry = Entry::new(address.tag(0), packed);
            for depth in 1..=MAX_DEPTH {
                let (deeper, upper) = entry.deeper();
                prop_assert_eq!(upper, address.place(depth) % 2 == 1);
                prop_assert!(deeper.is(address.tag(depth)) && !deeper.is_free());
                prop_assert!(!deeper.is(other.tag(depth)));
                prop_assert_eq!(deeper.state(), packed);
                entry = deeper;
            }
        }
    }

    #[test]
    fn a_free_place_is_nobodys() {
        for hash in [0, 1, u64::MAX] {
            assert!(!Entry::FREE.is(Address::new(hash).tag(0)));
        }
    }
}
