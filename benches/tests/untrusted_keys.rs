//! Keys that untrusted clients choose take no more heap than random ones. Their other costs are counted in
//! `ratelimit-memory/src/store/tests/untrusted_keys.rs`.
//!
//! The crate `allocation-counter` puts a counting allocator under this whole test.

#![allow(clippy::expect_used)]

use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher};

use allocation_counter::measure;
use ratelimit_core::{Gcra, Limit, Limits, RateLimiter};
use ratelimit_memory::MemoryStore;

/// The store grows by 32 KiB where keys happen to fall together, some 80 times for so many: chance moves the whole
/// by one or two in a hundred.
const KEYS: usize = 100_000;

/// The bytes that a store holds once these keys have been charged.
fn bytes(keys: &[String]) -> u64 {
    let gcra = Gcra::new("1/d".parse().expect("a rate"), 3).expect("a limit");
    let limits = Limits::new([Limit::new("l", gcra).expect("a name")]).expect("limits");
    let mut kept = None;
    let counted = measure(|| {
        let limiter = RateLimiter::new(limits, MemoryStore::new());
        for key in keys {
            assert!(limiter.check_now(key).expect("decides").allowed());
        }
        kept = Some(limiter);
    });
    let store = kept.as_ref().map(RateLimiter::store).expect("is kept");
    assert_eq!((store.len(), store.overflowed()), (KEYS, 0));
    u64::try_from(counted.bytes_current).expect("more was made than dropped")
}

fn sip(text: &str) -> u64 {
    BuildHasherDefault::<DefaultHasher>::new().hash_one(text)
}

fn keys(text: impl Fn(usize) -> String) -> Vec<String> {
    (0..).map(text).take(KEYS).collect()
}

#[test]
fn chosen_keys_take_as_much_heap_as_random_keys() {
    let usual = bytes(&keys(|n| format!("{:016x}", sip(&n.to_string()))));
    let long = "long".repeat(64);
    let colliding = |mask: u64| {
        let all = (0..).map(|n: u64| n.to_string());
        all.filter(|text| sip(text) & mask == 0).take(KEYS).collect::<Vec<_>>()
    };
    let sets = [
        ("counted", keys(|n| format!("user-{n:08}"))),
        ("the same ends", keys(|n| format!("{long}{n:08}{long}"))),
        ("SipHash without a seed, low bits", colliding(0x3f)),
        ("SipHash without a seed, high bits", colliding(0x3f << 58)),
    ];
    for (name, keys) in sets {
        let bytes = bytes(&keys);
        assert!(bytes.abs_diff(usual) * 10 <= usual, "{name}: {bytes}, random {usual}");
    }
}
