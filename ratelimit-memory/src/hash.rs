//! [`KeyHasher`]: keyed hashing of callers' keys by
//! [PolymurHash](https://github.com/orlp/polymur-hash), an almost universal polynomial hash.
//!
//! # Hash collisions
//!
//! The store keeps hashes, not keys. Two keys whose hashes agree share a state. If both arrive
//! while the table grows, one may find the limit of the other, or its own limit started anew.
//!
//! The hash is a polynomial at a secret point. For two keys of at most *n* bytes, chosen without
//! seeing hashes, the probability of a full collision is proved to be at most *n* · 2⁻⁶⁰. For keys
//! that no attacker chose, its 61 bits behave as random, and shards use all of them: any two of ten
//! million keys collide with a probability of 2 in a hundred thousand. (Chosen keys of 20 bytes: at
//! most 8 in ten thousand.) Buckets use 46 bits in a small table, and one more each time the table
//! has doubled, as of the state's last write. It is not proved that a part of the hash behaves as
//! random, but every test agrees. In the worst case, all keys arrive once and never again:
//!
//! | keys in the store | a new key meets any | any two have met | … once all were written anew |
//! |---|---|---|---|
//! | 1,000 | 1.4 · 10⁻¹¹ | 7 · 10⁻⁹ | 7 · 10⁻⁹ |
//! | 1,000,000 | 1.4 · 10⁻¹⁰ | 1.2 · 10⁻⁴ | 8 · 10⁻⁶ |
//! | 10,000,000 | 1.8 · 10⁻¹⁰ | 1.6 · 10⁻³ | 8 · 10⁻⁵ |
//!
//! A stream of a hundred thousand new keys per second therefore causes at most about one such pair
//! per day, of keys that no client can choose.
//!
//! The limits of one caller are near each other, and the fingerprints of their names tell them
//! apart. The fingerprints of two names collide with a probability of 10⁻⁷ in a small table and
//! 10⁻¹⁰ among a million keys; even then, the limits of only one caller in 256 share a state.
//!
//! # What the behaviour reveals
//!
//! The store shows no hash, but its behaviour reveals a little: keys that collide share a limit; in
//! a full store, a new key gets a state of its own if one near it has expired; and near keys are
//! slightly faster. To compute the secret from that takes far more keys, and far more precise
//! timing, than answers over a network give. This is an argument, not a proof.

use polymur_hash::PolymurHash;
use ratelimit_core::ReservationId;

/// The number of uppermost bits of a hash that do not depend on the limit: all states of a caller
/// lie near each other.
pub(crate) const CALLER_BITS: u32 = 14;

/// Tells hashes of ids from those of keys.
const ID_TWEAK: u64 = 1;

/// Hashes keys by `PolymurHash` under a random secret, so that clients cannot craft colliding keys
/// without observing hashes.
///
/// `PolymurHash` is proved to be almost universal: if a client chooses two keys of at most `n`
/// bytes without seeing hashes, all 64 bits of theirs agree with a probability of at most `n` ·
/// 2^-60.2. It is not a pseudo-random function: a client that sees hashes could compute the secret.
/// The module's documentation describes what the store's behaviour reveals of them.
pub(crate) struct KeyHasher(PolymurHash);

impl KeyHasher {
    /// Creates a hasher with a random secret; in models with a fixed one, because loom repeats
    /// executions and needs them to be the same.
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

    /// Hashes the id of a batch, so that a client that chooses ids cannot foresee which of them
    /// meet. The hash only chooses the place: a reservation is recognized by the id itself.
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

/// The hash of a caller's key, for all limits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CallerHash(u64);

impl CallerHash {
    /// The hash of the caller's key under the limit with this
    /// [fingerprint](ratelimit_core::Limit::fingerprint).
    ///
    /// The hashes of two limits differ by the difference of their fingerprints, for every caller
    /// alike. So two state names never meet, unless their fingerprints agree in all bits that a
    /// bucket stores of them: 24 bits in a small table.
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
    use crate::shard::shard_of;
    use ratelimit_core::{Gcra, Limit};
    use std::collections::HashSet;

    #[test]
    fn hashes_of_a_callers_limits_begin_alike_and_have_distinct_tags() {
        let hasher = KeyHasher::random();
        let ids = (0..64).map(|id| hasher.hash_id(ReservationId::new(id)));
        assert_eq!(ids.collect::<HashSet<_>>().len(), 64);
        let callers: Vec<_> = (0..1_000).map(|n| hasher.hash(&n.to_string())).collect();
        let shards: HashSet<_> = callers.iter().map(|caller| shard_of(caller.0, 16)).collect();
        assert_eq!(shards.len(), 16);
        let gcra = Gcra::per_second(1).build().expect("a limit");
        let limits = (0..64).map(|n| Limit::new(&format!("limit-{n}"), gcra).expect("a name"));
        let limits: Vec<_> = limits.collect();
        for caller in callers {
            let all = limits.iter().map(|limit| caller.under(limit.fingerprint()));
            assert!(all.clone().all(|hash| (hash ^ caller.0) >> (64 - CALLER_BITS) == 0));
            // In the smallest table outside of tests.
            let tags: HashSet<_> = all.map(|hash| Address::new(hash).tag(0)).collect();
            assert_eq!(tags.len(), limits.len());
        }
    }
}
