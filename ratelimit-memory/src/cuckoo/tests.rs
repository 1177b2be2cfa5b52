//! The table against a map: an inserted entry is there, once, until it is removed or expires.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;

/// Pseudo-random hashes, the same in every run.
fn hash(n: u64) -> u64 {
    let mixed = (n ^ (n << 31) ^ 7).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9) ^ (mixed >> 32)
}

fn address(n: u64) -> Address {
    Address::new(hash(n))
}

fn at(us: u64) -> Timestamp {
    Timestamp::saturating_from_us(us)
}

/// A state that was written at 0 and expires at `us`.
fn until(buckets: &CuckooTable, us: u64) -> Packed {
    buckets.pack(Compact { at: at(0), span_us: us, extra: 0 }).expect("fits")
}

/// Inserts a state as the store does. Returns `false` if there is no place for it.
fn put(buckets: &CuckooTable, address: Address, state: Packed, now: Timestamp) -> bool {
    loop {
        let mut pair = buckets.lock(address);
        if let Some(place) = pair.find() {
            pair.set(place, state);
            return true;
        }
        if pair.insert(state, buckets.since_epoch_us(now), || true) == Insertion::Done {
            return true;
        }
        drop(pair);
        if !buckets.make_room(address, now).made_room {
            return false;
        }
    }
}

fn get(buckets: &CuckooTable, address: Address) -> Option<Packed> {
    buckets.lock(address).state()
}

/// How many entries a key has.
fn count(buckets: &CuckooTable, address: Address) -> usize {
    let pair = buckets.lock(address);
    let is = |entry: Entry| entry.is(pair.route.tag());
    pair.buckets.iter().flat_map(BucketGuard::entries).filter(|(_, entry)| is(*entry)).count()
}

fn seen(buckets: &CuckooTable, address: Address) -> Option<Packed> {
    let seen = buckets.route(address).find()?;
    assert!(seen.is_still());
    seen.state()
}

#[test]
fn a_growing_table_loses_no_entry() {
    let buckets = CuckooTable::new(20_000, Timestamp::ZERO);
    let first = buckets.segments();
    for n in 0..10_000 {
        assert!(put(&buckets, address(n), until(&buckets, n + 1), Timestamp::ZERO), "{n}");
    }
    assert_eq!(buckets.len(), 10_000);
    let segments = buckets.segments();
    assert!(segments > 100 * first);
    // The small segments of tests are three quarters as full as those of full size.
    let full =
        10_000.0 / f64::from(u32::try_from(segments * BUCKETS * bucket::SLOTS).expect("few"));
    assert!(full > 0.45, "{full}");
    // A lookup without the lock finds only entries that were written or looked up under it since a split moved
    // them.
    let found = (0..10_000).filter(|n| seen(&buckets, address(*n)).is_some()).count();
    assert!((1..9_000).contains(&found), "{found}");
    for n in 0..10_000 {
        assert_eq!(get(&buckets, address(n)), Some(until(&buckets, n + 1)), "{n}");
        assert_eq!(seen(&buckets, address(n)), Some(until(&buckets, n + 1)), "{n}");
        assert_eq!(count(&buckets, address(n)), 1, "{n}");
    }
    assert!((10_000..20_000).all(|n| get(&buckets, address(n)).is_none()));
}

#[test]
fn any_capacity_from_one_key_to_the_largest_works() {
    for capacity in [1, 2, 1 << 40, usize::MAX] {
        let buckets = CuckooTable::new(capacity, Timestamp::ZERO);
        assert!(put(&buckets, address(7), until(&buckets, 9), Timestamp::ZERO), "{capacity}");
        assert_eq!(get(&buckets, address(7)), Some(until(&buckets, 9)), "{capacity}");
    }
}

#[test]
fn expired_entries_are_replaced_before_a_segment_splits() {
    let buckets = CuckooTable::new(20_000, Timestamp::ZERO);
    for n in 0..1_000_u64 {
        assert!(put(&buckets, address(n), until(&buckets, n + 100), at(n)));
    }
    // A hundred are live at a time: the table has grown for these, and for a few that no call has come across.
    assert!(buckets.segments() <= 24, "{}", buckets.segments());
    assert!((900..1_000).all(|n| get(&buckets, address(n)).is_some()));
}

#[test]
fn a_sweep_frees_expired_entries_and_no_others() {
    let buckets = CuckooTable::new(20_000, Timestamp::ZERO);
    for n in 0..500_u64 {
        put(&buckets, address(n), until(&buckets, n + 1), Timestamp::ZERO);
    }
    let all = buckets.segments() * BUCKETS;
    let pair = buckets.lock(address(7));
    let freed = (0..all).map(|_| buckets.sweep(1, at(250))).sum::<usize>();
    drop(pair);
    let freed = freed + buckets.sweep(all, at(250));
    assert_eq!((freed, buckets.len()), (250, 250));
    assert!((250..500).all(|n| get(&buckets, address(n)).is_some()));
}

#[test]
fn keys_that_no_split_separates_fill_two_buckets_at_most() {
    let buckets = CuckooTable::new(64, Timestamp::ZERO);
    // The addresses have the same upper half: the same segment at every depth, and the same alternate bucket.
    let same = |n: u64| Address::of_bits((0xdead_beef << 32) | (n << 27));
    let most = (0..31)
        .take_while(|n| put(&buckets, same(*n), until(&buckets, 9), Timestamp::ZERO))
        .count();
    assert_eq!(most, 2 * bucket::SLOTS);
    assert!((0..8).all(|n| get(&buckets, same(n)).is_some()));
    // Expired entries make room.
    assert!(put(&buckets, same(31), until(&buckets, 99), at(9)));
}

#[test]
fn both_halves_of_a_split_keep_the_spill_flag() {
    let buckets = CuckooTable::new(20_000, Timestamp::ZERO);
    let spilled: Vec<u64> = (0..50).collect();
    for n in &spilled {
        buckets.lock(address(*n)).spill();
    }
    for n in 1_000..6_000 {
        put(&buckets, address(n), until(&buckets, 9), Timestamp::ZERO);
    }
    assert!(spilled.iter().all(|n| buckets.lock(address(*n)).has_spilled()));
}

#[derive(Clone, Debug)]
enum Act {
    Put { key: u64, span_us: u64 },
    Clear { key: u64 },
    Later { us: u64 },
    Sweep { buckets: usize },
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let key = || 0..120_u64;
    let act = prop_oneof![
        6 => (key(), 1..400_u64).prop_map(|(key, span_us)| Act::Put { key, span_us }),
        1 => key().prop_map(|key| Act::Clear { key }),
        1 => (0..40_u64).prop_map(|us| Act::Later { us }),
        1 => (1..9_usize).prop_map(|buckets| Act::Sweep { buckets }),
    ];
    prop::collection::vec(act, 1..600)
}

proptest! {
    #[test]
    fn the_table_agrees_with_a_map(acts in acts(), salt: u64) {
        let buckets = CuckooTable::new(500, Timestamp::ZERO);
        let address = |key: u64| address(key ^ salt);
        let mut map: HashMap<u64, (Packed, u64)> = HashMap::new();
        let mut now_us = 0;
        for act in acts {
            match act {
                Act::Put { key, span_us } => {
                    let compact = Compact { at: at(now_us), span_us, extra: 0 };
                    let state = buckets.pack(compact).expect("fits");
                    // A table for five hundred keys always has a place for a hundred and twenty.
                    prop_assert!(put(&buckets, address(key), state, at(now_us)));
                    map.insert(key, (state, now_us + span_us));
                }
                Act::Clear { key } => {
                    let mut pair = buckets.lock(address(key));
                    let tag = pair.route.tag();
                    for bucket in &mut pair.buckets {
                        if let Some(slot) = bucket.find(tag) {
                            bucket.clear(slot);
                        }
                    }
                    map.remove(&key);
                }
                Act::Later { us } => now_us += us,
                Act::Sweep { buckets: count } => drop(buckets.sweep(count, at(now_us))),
            }
            for key in 0..120 {
                let (found, due) = (get(&buckets, address(key)), map.get(&key));
                match due {
                    Some((state, expires_us)) if *expires_us > now_us => {
                        prop_assert_eq!(found, Some(*state));
                    }
                    // An expired entry may still be there, unchanged.
                    due => prop_assert!(found.is_none() || found == due.map(|due| due.0)),
                }
                prop_assert!(count(&buckets, address(key)) <= 1);
            }
        }
    }
}

#[test]
fn several_keys_are_locked_together_and_found() {
    let buckets = CuckooTable::new(500, Timestamp::ZERO);
    for n in 0..100 {
        put(&buckets, address(n), until(&buckets, n + 1), Timestamp::ZERO);
    }
    let keys = [3, 99, 200, 41, 7];
    let mut locked = buckets.lock_all(&keys.into_iter().map(address));
    for (key, n) in keys.into_iter().enumerate() {
        let found = locked.find(key).and_then(|place| locked.get(place));
        assert_eq!(found, (n < 100).then(|| until(&buckets, n + 1)));
        assert!(!locked.has_spilled(key));
    }
    locked.spill(2);
    drop(locked);
    assert!(buckets.lock(address(200)).has_spilled());
}
