//! [`Address`]: where a key may lie in the table, and what is kept of it there.

use super::{BUCKETS, MOST_BUCKETS};

/// How many bits of a key are kept with its state, the mark at their end included.
pub(super) const TAG_BITS: u32 = 39;
/// The deepest a segment can lie: so that what says where a key's alternate bucket is stays in the tag.
pub(super) const MAX_DEPTH: u32 = 17;
/// The bit of an address from which on is told how far a key's two buckets are apart.
const APART_BIT: u32 = 38;
const _: () = assert!(
    MAX_DEPTH + MOST_BUCKETS.trailing_zeros() + APART_BIT <= u64::BITS,
    "a tag tells at every depth where the other line is"
);

/// How steeply addresses rise with hashes at the end where keys are dense, in parts of which 2 to the power of
/// 64 are one, and by how much more they do for each 2^5 that a hash is larger: see [`Address::new`].
const SLOPE_FIRST: u64 = 21 << 59;
const SLOPE_MORE: u64 = 11;

/// The bits of a key's hash, in the order in which the table uses them: from the top those that choose
/// the segment; in the midst those that choose between the two buckets; at the bottom those that choose
/// the first of the two.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address(u64);

/// What is kept of a key, in a segment at some depth: the bits of its address that the segment does not
/// tell, and a 1 for their end. Wherever the segment splits, one more bit is told, and the tag moves up
/// by it: entries that have moved know fewer bits, until they are written anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Tag(pub(super) u64);

impl Address {
    /// Keys are not spread evenly over the segments, but twice as densely at one end as at the other: then
    /// the segments are not all full, and split, at the same time, and the table's memory grows in step
    /// with its keys.
    #[inline(always)]
    pub(crate) const fn new(hash: u64) -> Self {
        // Of a fraction x: (21 x + 11 x²) / 32.
        let slope = SLOPE_FIRST + (hash >> 5) * SLOPE_MORE;
        Self(((hash as u128 * slope as u128) >> 64) as u64)
    }

    /// With these very bits.
    #[cfg(test)]
    pub(crate) const fn of_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The place in a directory, which so many bits do not choose.
    #[allow(clippy::cast_possible_truncation, reason = "of seventeen bits at the most")]
    #[inline(always)]
    pub(crate) const fn place(self, shift: u32) -> usize {
        (self.0 >> shift) as usize
    }

    /// The bucket that the key lies in unless that is full.
    #[allow(clippy::cast_possible_truncation, reason = "the lowest bits are asked for")]
    #[inline(always)]
    pub(crate) const fn first(self) -> usize {
        self.0 as usize & (BUCKETS - 1)
    }

    /// The bucket that it lies in otherwise.
    #[inline(always)]
    pub(crate) const fn second(self) -> usize {
        self.first() ^ apart(self.0, BUCKETS)
    }

    #[inline(always)]
    pub(crate) const fn tag(self, depth: u32) -> Tag {
        Tag((((self.0 << depth) >> (64 - (TAG_BITS - 1))) << 1) | 1)
    }
}

impl Tag {
    /// The other one of the two buckets of an entry that lies in `bucket` of a segment at this depth.
    pub(super) const fn alternate_bucket(self, bucket: usize, depth: u32) -> usize {
        bucket ^ apart(self.upper_bits(depth), BUCKETS)
    }

    /// The bits of the address that it knows, where they lie there.
    const fn upper_bits(self, depth: u32) -> u64 {
        ((self.0 >> 1) << (64 - (TAG_BITS - 1))) >> depth
    }
}

/// How far apart the two buckets are: an odd number, so that they are never the same. Of bits that are in
/// every tag at every depth.
#[allow(clippy::cast_possible_truncation, reason = "the lowest bits are asked for")]
const fn apart(address: u64, buckets: usize) -> usize {
    ((address >> APART_BIT) as usize & (buckets - 1)) | 1
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// As good as chance, and the same every time.
    fn hashes(count: u64) -> impl Iterator<Item = u64> {
        (1..=count).map(|n| {
            let mixed = (n ^ (n << 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (mixed >> 32)
        })
    }

    #[test]
    fn a_tag_tells_the_other_bucket_at_every_depth() {
        for hash in hashes(1_000).chain([0, u64::MAX]) {
            let address = Address::new(hash);
            assert_ne!(address.first(), address.second());
            for depth in 0..=MAX_DEPTH {
                let tag = address.tag(depth);
                assert_eq!(tag.alternate_bucket(address.first(), depth), address.second());
                assert_eq!(tag.alternate_bucket(address.second(), depth), address.first());
                // Tests have fewer buckets than there are.
                let told = |address| apart(address, MOST_BUCKETS);
                assert_eq!(told(tag.upper_bits(depth)), told(address.0));
                // Also once the tag has moved up from where it was written.
                let moved = Tag((address.tag(0).0 << depth) & ((1 << TAG_BITS) - 1));
                assert_eq!(moved.alternate_bucket(address.first(), depth), address.second());
            }
        }
    }

    #[test]
    fn keys_are_about_twice_as_dense_at_one_end() {
        let mut counts = [0; 16];
        for hash in hashes(160_000) {
            counts[Address::new(hash).place(60)] += 1;
        }
        assert!(counts.windows(2).all(|pair| pair[0] > pair[1]), "{counts:?}");
        let ratio = f64::from(counts[0]) / f64::from(counts[15]);
        assert!((1.8..2.2).contains(&ratio), "{counts:?}");
    }
}
