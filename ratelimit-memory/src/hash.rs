//! [`KeyHasher`]: keyed hashing of callers' keys by [PolymurHash](https://github.com/orlp/polymur-hash), an
//! almost universal polynomial hash.

use std::fmt;

use polymur_hash::PolymurHash;

/// The number of uppermost bits of a hash that do not depend on the limit: all states of a caller lie near each
/// other.
pub(crate) const CALLER_BITS: u32 = 14;

/// Hashes keys by `PolymurHash` under a random secret, so that clients cannot craft colliding keys without
/// observing hashes.
///
/// `PolymurHash` is proved to be almost universal: if a client chooses two keys of at most `n` bytes without
/// seeing hashes, all 64 bits of theirs agree with a probability of at most `n` · 2^-60.2. It is not a
/// pseudo-random function: a client that sees hashes could compute the secret. The crate's documentation tells
/// what can be seen of them.
#[derive(Clone)]
pub(crate) struct KeyHasher(PolymurHash);

impl KeyHasher {
    /// Creates a hasher with a random secret.
    #[cfg(not(all(test, loom)))]
    pub(crate) fn random() -> Self {
        use std::hash::BuildHasher;
        let random = std::hash::RandomState::new();
        Self(PolymurHash::from_u64x2_seed(random.hash_one(0), random.hash_one(1)))
    }

    /// Creates a hasher with a fixed secret: loom repeats executions, and needs them to be the same.
    #[cfg(all(test, loom))]
    pub(crate) fn random() -> Self {
        Self(PolymurHash::from_u64x2_seed(0, 0))
    }

    /// Hashes a caller's key.
    #[inline]
    pub(crate) fn hash(&self, caller: &str) -> CallerHash {
        #[cfg(all(test, not(loom)))]
        HASHED.set(HASHED.get() + 1);
        CallerHash(self.0.hash(caller.as_bytes()))
    }
}

#[cfg(all(test, not(loom)))]
thread_local! {
    /// How many keys this thread has hashed.
    pub(crate) static HASHED: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Omits the secret.
impl fmt::Debug for KeyHasher {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyHasher").finish_non_exhaustive()
    }
}

/// The hash of a caller's key, for all limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallerHash(u64);

impl CallerHash {
    /// The hash, used as a secret.
    pub(crate) const fn secret(self) -> u64 {
        self.0
    }

    /// The hash of the caller's key under the limit whose name has this
    /// [fingerprint](ratelimit_core::fingerprint).
    ///
    /// The hashes of two limits differ by the difference of their fingerprints, for every caller alike. So two
    /// names never meet, unless their fingerprints agree in all bits that a bucket stores of them: 24 bits in a
    /// small table.
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
    fn limit_and_key_and_the_boundary_between_them_change_the_hash() {
        let hasher = KeyHasher::random();
        let all =
            [("a", "bc"), ("ab", "c"), ("", "abc"), ("abc", ""), ("abcdefg7", "x"), ("b", "bc")];
        let mut distinct: HashSet<_> =
            all.iter().map(|(limit, key)| of(&hasher, limit, key)).collect();
        distinct.insert(of(&KeyHasher::random(), "a", "bc"));
        assert_eq!(distinct.len(), all.len() + 1);
    }

    #[test]
    fn hashes_of_a_callers_limits_begin_alike_and_have_distinct_tags() {
        let hasher = KeyHasher::random();
        let names: Vec<String> = (0..64).map(|n| format!("limit-{n}")).collect();
        let begin = |hash: u64| hash >> (64 - CALLER_BITS);
        for caller in 0..1_000 {
            let caller = caller.to_string();
            let all: Vec<u64> = names.iter().map(|name| of(&hasher, name, &caller)).collect();
            assert!(all.iter().all(|hash| begin(*hash) == begin(all[0])));
            // In the smallest table outside of tests.
            let tags: HashSet<_> = all.iter().map(|hash| Address::new(*hash).tag(0)).collect();
            assert_eq!(tags.len(), names.len());
        }
    }
}
