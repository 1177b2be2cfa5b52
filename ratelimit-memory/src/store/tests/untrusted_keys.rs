//! Untrusted keys, which a client chooses to make the store slow or large, cost what any others do.
//!
//! Clients do not know a store's seed. Without it they can choose keys that collide under functions
//! without a seed, keys that collide under this very function with another seed, and keys that are
//! nearly the same, in case the function mixes badly. These tests count the cost: how many segments
//! the table needs, how many keys find no place in their buckets, how full the fullest shard is,
//! and how many hashes are nearly the same. What a store holds in bytes follows from the first
//! three.

use std::collections::HashMap;
use std::hash::{DefaultHasher, Hasher};

use super::*;

/// The hash of a key under the limit of these tests.
fn hash_by(hasher: &KeyHasher, key: &str) -> u64 {
    hasher.hash(key).under(limit(1).fingerprint())
}

/// The number of keys per set.
const KEYS: usize = 2_048;
/// The number of stores, each with a seed of its own, that a set is tried on.
const SEEDS: usize = 8;

/// The standard library's hash, without its random seed.
fn sip(text: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    hasher.write(text.as_bytes());
    hasher.finish()
}

/// Keys whose hashes agree in the bits of the mask.
fn colliding(hash: impl Fn(&str) -> u64, mask: u64) -> Vec<String> {
    let mut all = (0_u64..1 << 24).map(|n| format!("{n:06x}")).peekable();
    let target = all.peek().map(|first| hash(first) & mask);
    all.filter(|text| Some(hash(text) & mask) == target).take(KEYS).collect()
}

/// Named sets of distinct keys, all of the same size.
fn sets() -> Vec<(&'static str, Vec<String>)> {
    let each = |text: fn(usize) -> String| (0..KEYS).map(text).collect::<Vec<_>>();
    let (low, high) = (0xff, 0xff << 56);
    let other = KeyHasher::random();
    let own = |text: &str| hash_by(&other, text);
    vec![
        ("SipHash without a seed, low bits", colliding(sip, low)),
        ("SipHash without a seed, high bits", colliding(sip, high)),
        // The bits of the bucket, of the distance to the alternate, and of the segment.
        ("the store's own with another seed, where the line is chosen", colliding(own, 0x3f)),
        ("the store's own with another seed, bits in the midst", colliding(own, 0xff << 38)),
        ("the store's own with another seed, where the segment is", colliding(own, high)),
        ("counted", each(|n| format!("user-{n:08}"))),
        ("addresses", each(|n| format!("10.0.{}.{}", n / 256, n % 256))),
        ("one character, again and again", each(|n| "a".repeat(n))),
        ("nothing but NUL", each(|n| "\0".repeat(n))),
        ("as long in the lowest byte", each(|n| format!("{n:x}{}", "-".repeat(256 * (n % 4))))),
        ("the same end", each(|n| format!("{n:x}{}", "suffix".repeat(50)))),
        ("the same beginning", each(|n| format!("{}{n:x}", "prefix".repeat(50)))),
        ("the same ends", each(|n| format!("{0}{n:08x}{0}", "long".repeat(100)))),
        ("one bit", each(|n| format!("{}`{}", "a".repeat(n), "a".repeat(KEYS - 1 - n)))),
    ]
}

fn random() -> Vec<String> {
    let mut random = fastrand::Rng::with_seed(7);
    (0..KEYS).map(|_| format!("{:016x}", random.u64(..))).collect()
}

/// The cost of a set of keys, summed over stores of different seeds.
#[derive(Debug, Default)]
struct KeySetCost {
    segments: usize,
    /// Keys that found no place in their buckets.
    crowded: usize,
    /// The number of keys in the fullest shard, for limits whose states lie in shards.
    fullest: usize,
    /// Pairs of hashes that are the same in their upper half.
    close: usize,
}

fn cost(keys: &[String]) -> KeySetCost {
    let mut cost = KeySetCost::default();
    for _ in 0..SEEDS {
        let table = store_with_charges("gcra 1/h", keys);
        cost.segments += table.table.as_ref().map_or(0, CuckooTable::segments);
        cost.crowded += table.capacity.in_shards.used();
        let shards = store_with_charges("sliding-log 1/h", keys);
        cost.fullest +=
            shards.shards.iter().map(|shard| lock(shard).states().count()).max().unwrap_or(0);
        let mut halves: HashMap<u64, usize> = HashMap::new();
        for key in keys {
            let same = halves.entry(hash_by(&table.hasher, key) >> 32).or_default();
            cost.close += *same;
            *same += 1;
        }
    }
    cost
}

/// Creates a store in which all these keys have been charged.
fn store_with_charges(words: &str, keys: &[String]) -> Memory<AnyAlgorithm> {
    let (store, _): (Memory<AnyAlgorithm>, _) =
        build_store(|builder| builder.capacity(4 * KEYS).shards(64));
    let limit = limit_in_words("l", words);
    assert!(keys.iter().all(|key| store.acquire_now(&limit, key, 1).expect("decides").allowed()));
    assert_eq!((store.len(), store.overflowed()), (keys.len(), 0));
    store
}

#[test]
fn chosen_keys_cost_no_more_than_random_ones() {
    let usual = cost(&random());
    // The tolerance is more than six times the deviation by chance.
    let near = |count: usize, usual: usize| count.abs_diff(usual) * 10 <= usual;
    for (name, keys) in sets() {
        assert_eq!(keys.len(), KEYS, "{name}");
        let cost = cost(&keys);
        assert!(near(cost.segments, usual.segments), "{name}: {cost:?}, not {usual:?}");
        assert!(cost.crowded <= usual.crowded + SEEDS, "{name}: {cost:?}, not {usual:?}");
        assert!(cost.fullest * 4 <= usual.fullest * 5, "{name}: {cost:?}, not {usual:?}");
        // By chance, one set in two hundred has a pair.
        assert!(cost.close <= 2, "{name}: {cost:?}");
    }
}
