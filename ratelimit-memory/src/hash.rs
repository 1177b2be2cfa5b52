//! [`KeyHasher`]: keyed hashing of callers' keys by [PolymurHash](https://github.com/orlp/polymur-hash), an
//! almost universal polynomial hash.

use std::fmt;

use polymur_hash::PolymurHash;
use ratelimit_core::ReservationId;

/// The number of uppermost bits of a hash that do not depend on the limit: all states of a caller lie near each
/// other.
pub(crate) const CALLER_BITS: u32 = 14;

/// Tells hashes of ids from those of keys.
const ID_TWEAK: u64 = 1;

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
    /// Creates a hasher with a random secret; in models with a fixed one, because loom repeats executions and needs them to be
    /// the same.
    pub(crate) fn random() -> Self {
        use std::hash::BuildHasher;
        let random = std::hash::RandomState::new();
        let seed = |half: u8| if cfg!(all(test, loom)) { 0 } else { random.hash_one(half) };
        Self(PolymurHash::from_u64x2_seed(seed(0), seed(1)))
    }

    /// Hashes a caller's key.
    #[inline]
    pub(crate) fn hash(&self, caller: &str) -> CallerHash {
        #[cfg(test)]
        #[cfg(not(loom))]
        HASHED.set(HASHED.get() + 1);
        CallerHash(self.0.hash(caller.as_bytes()))
    }

    /// Hashes the id of a batch, so that a client that chooses ids cannot foresee which of them meet. The hash only
    /// chooses the place: a reservation is recognized by the id itself.
    pub(crate) fn hash_id(&self, id: ReservationId) -> u64 {
        self.0.hash_with_tweak(id.as_u128().to_le_bytes(), ID_TWEAK)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
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

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::cuckoo::Address;
    use ratelimit_core::fingerprint;
    use std::collections::HashSet;

    #[test]
    fn hashes_of_a_callers_limits_begin_alike_and_have_distinct_tags() {
        let hasher = KeyHasher::random();
        let names: Vec<String> = (0..64).map(|n| format!("limit-{n}")).collect();
        for caller in (0..1_000).map(|caller| hasher.hash(&caller.to_string())) {
            let all = names.iter().map(|name| caller.under(fingerprint(name)));
            assert!(all.clone().all(|hash| (hash ^ caller.0) >> (64 - CALLER_BITS) == 0));
            // In the smallest table outside of tests.
            let tags: HashSet<_> = all.map(|hash| Address::new(hash).tag(0)).collect();
            assert_eq!(tags.len(), names.len());
        }
    }
}
