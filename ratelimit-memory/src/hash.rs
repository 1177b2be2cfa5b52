//! [`KeyHasher`]: where a key lies, and what it is known by.

use std::fmt;

use polymur_hash::PolymurHash;

/// How many bits of a hash, the uppermost, tell nothing of the limit: all that is kept of a caller lies
/// near each other.
pub(crate) const CALLER_BITS: u32 = 14;

/// Hashes keys by [PolymurHash](https://github.com/orlp/polymur-hash) with a random key of its own, so that nobody
/// can choose some that collide.
///
/// It is proved to be almost universal: whoever chooses two keys of at most `n` bytes, and sees nothing of the
/// hashes, makes all 64 bits of theirs agree with a chance of `n` · 2^-60.2 at the most. It is no secret function:
/// whoever saw hashes could compute its key. See the crate's documentation for what can be seen of them.
#[derive(Clone)]
pub(crate) struct KeyHasher(PolymurHash);

impl KeyHasher {
    /// With a key that nobody else knows.
    #[cfg(not(all(test, loom)))]
    pub(crate) fn random() -> Self {
        use std::hash::BuildHasher;
        let random = std::hash::RandomState::new();
        Self(PolymurHash::from_u64x2_seed(random.hash_one(0), random.hash_one(1)))
    }

    /// Loom runs the same execution again and again, and needs it to be the same: a fixed key.
    #[cfg(all(test, loom))]
    pub(crate) fn random() -> Self {
        Self(PolymurHash::from_u64x2_seed(0, 0))
    }

    /// The hash of a caller's key.
    #[inline]
    pub(crate) fn hash(&self, caller: &str) -> CallerHash {
        CallerHash(self.0.hash(caller.as_bytes()))
    }
}

/// Without what nobody else may know.
impl fmt::Debug for KeyHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyHasher").finish_non_exhaustive()
    }
}

/// The hash of a caller's key, for all limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallerHash(u64);

impl CallerHash {
    /// A number that nobody else can know.
    pub(crate) const fn secret(self) -> u64 {
        self.0
    }

    /// The hash of the caller's key under the limit whose name has this
    /// [fingerprint](ratelimit_core::fingerprint).
    ///
    /// Two limits of one caller differ in what their fingerprints do, for every caller alike. So two names
    /// never meet, unless these agree in all that a bucket keeps of them: 24 bits in a small table.
    #[inline]
    pub(crate) const fn under(self, fingerprint: u64) -> u64 {
        self.0 ^ (fingerprint >> CALLER_BITS)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::cuckoo::Address;
    use ratelimit_core::fingerprint;
    use std::collections::HashSet;

    fn of(hasher: &KeyHasher, limit: &str, caller: &str) -> u64 {
        hasher.hash(caller).under(fingerprint(limit))
    }

    #[test]
    fn limit_and_key_both_count_and_so_does_where_the_one_ends() {
        let hasher = KeyHasher::random();
        let all =
            [("a", "bc"), ("ab", "c"), ("", "abc"), ("abc", ""), ("abcdefg7", "x"), ("b", "bc")];
        let mut told: HashSet<_> = all.iter().map(|(limit, key)| of(&hasher, limit, key)).collect();
        told.insert(of(&KeyHasher::random(), "a", "bc"));
        assert_eq!(told.len(), all.len() + 1);
    }

    #[test]
    fn all_limits_of_a_caller_begin_alike_and_are_told_apart_by_what_a_bucket_keeps() {
        let hasher = KeyHasher::random();
        let names: Vec<String> = (0..64).map(|n| format!("limit-{n}")).collect();
        let begin = |hash: u64| hash >> (64 - CALLER_BITS);
        for caller in 0..1_000 {
            let caller = caller.to_string();
            let told: Vec<u64> = names.iter().map(|name| of(&hasher, name, &caller)).collect();
            assert!(told.iter().all(|hash| begin(*hash) == begin(told[0])));
            // In the smallest table that there is outside of tests.
            let kept: HashSet<_> = told.iter().map(|hash| Address::new(*hash).tag(0)).collect();
            assert_eq!(kept.len(), names.len());
        }
    }
}
