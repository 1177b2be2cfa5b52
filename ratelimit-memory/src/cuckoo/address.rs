//! [`Address`]: where a key may lie in the table; [`KeyTag`]: the part of it that a slot stores
//! (the partial key, or fingerprint, of Fan et al., "Cuckoo Filter", 2014).

use super::{BUCKETS, MOST_BUCKETS};

/// The bits of a tag, including the end mark.
pub(super) const TAG_BITS: u32 = 39;
/// The greatest depth of a segment. Up to it, a tag keeps the bits that tell the alternate bucket.
pub(super) const MAX_DEPTH: u32 = 17;
/// The lowest of the address bits that tell how far a key's two buckets are apart.
const APART_BIT: u32 = 38;
const _: () = assert!(
    MAX_DEPTH + MOST_BUCKETS.trailing_zeros() + APART_BIT <= u64::BITS,
    "a tag tells at every depth where the other line is"
);

/// The slope of addresses over hashes at the end where keys are dense, in units of 2^-64, and its
/// increase per 2^5 of the hash: see [`Address::new`].
const SLOPE_FIRST: u64 = 21 << 59;
const SLOPE_MORE: u64 = 11;

/// The bits of a key's hash, in the order in which the table uses them: the top bits choose the
/// segment, those in the middle the distance to the alternate bucket, and the lowest the first
/// bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Address(u64);

/// The part of a key that a slot stores, in a segment of some depth: the address bits that the
/// segment does not imply, and a 1 that marks their end. When the segment splits it implies one
/// more bit, and the tag shifts up by one. An entry that a split has moved therefore stores fewer
/// bits until a writer rewrites it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct KeyTag(pub(super) u64);

impl Address {
    /// Spreads keys unevenly over the segments, twice as densely at one end as at the other.
    /// Segments then do not all fill up and split at the same time, and the table's memory grows in
    /// step with its keys.
    #[inline(always)]
    pub(crate) const fn new(hash: u64) -> Self {
        // Maps a fraction x to (21 x + 11 x²) / 32.
        let slope = SLOPE_FIRST + (hash >> 5) * SLOPE_MORE;
        Self(((hash as u128 * slope as u128) >> 64) as u64)
    }

    /// Creates an address of these bits.
    #[cfg(test)]
    pub(crate) const fn of_bits(bits: u64) -> Self {
        Self(bits)
    }

    /// The index in a directory that ignores the lowest `shift` bits.
    #[allow(clippy::cast_possible_truncation, reason = "of seventeen bits at the most")]
    #[inline(always)]
    pub(crate) const fn directory_index(self, shift: u32) -> usize {
        (self.0 >> shift) as usize
    }

    /// The bucket that is tried first.
    #[allow(clippy::cast_possible_truncation, reason = "the lowest bits are asked for")]
    #[inline(always)]
    pub(crate) const fn first(self) -> usize {
        self.0 as usize & (BUCKETS - 1)
    }

    /// The alternate bucket.
    #[inline(always)]
    pub(crate) const fn second(self) -> usize {
        self.first() ^ apart(self.0, BUCKETS)
    }

    #[inline(always)]
    pub(crate) const fn tag(self, depth: u32) -> KeyTag {
        KeyTag((((self.0 << depth) >> (64 - (TAG_BITS - 1))) << 1) | 1)
    }
}

impl KeyTag {
    /// The alternate bucket of an entry that lies in `bucket` of a segment of this depth.
    pub(super) const fn alternate_bucket(self, bucket: usize, depth: u32) -> usize {
        bucket ^ apart(self.upper_bits(depth), BUCKETS)
    }

    /// The address bits that the tag stores, at their places in the address.
    const fn upper_bits(self, depth: u32) -> u64 {
        ((self.0 >> 1) << (64 - (TAG_BITS - 1))) >> depth
    }
}

/// The XOR distance of the two buckets. It is odd, so that they differ, and comes from bits that
/// every tag stores at every depth.
#[allow(clippy::cast_possible_truncation, reason = "the lowest bits are asked for")]
const fn apart(address: u64, buckets: usize) -> usize {
    ((address >> APART_BIT) as usize & (buckets - 1)) | 1
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::super::tests::hash;
    use super::*;

    #[test]
    fn a_tag_gives_the_alternate_bucket_at_every_depth() {
        for hash in (0..1_000).map(hash).chain([0, u64::MAX]) {
            let address = Address::new(hash);
            assert_ne!(address.first(), address.second());
            for depth in 0..=MAX_DEPTH {
                let tag = address.tag(depth);
                assert_eq!(tag.alternate_bucket(address.first(), depth), address.second());
                assert_eq!(tag.alternate_bucket(address.second(), depth), address.first());
                // Also for segments of full size, which tests do not have.
                let distance = |address| apart(address, MOST_BUCKETS);
                assert_eq!(distance(tag.upper_bits(depth)), distance(address.0));
                // Also for a tag that splits have shifted up since it was written.
                let moved = KeyTag((address.tag(0).0 << depth) & ((1 << TAG_BITS) - 1));
                assert_eq!(moved.alternate_bucket(address.first(), depth), address.second());
            }
        }
    }

    #[test]
    fn addresses_are_twice_as_dense_at_one_end() {
        let mut counts = [0; 16];
        for hash in (0..160_000).map(hash) {
            counts[Address::new(hash).directory_index(60)] += 1;
        }
        assert!(counts.windows(2).all(|pair| pair[0] > pair[1]), "{counts:?}");
        let ratio = f64::from(counts[0]) / f64::from(counts[15]);
        assert!((1.8..2.2).contains(&ratio), "{counts:?}");
    }
}
