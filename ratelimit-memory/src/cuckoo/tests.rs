//! The table against a map: an inserted entry is there, once, until it is removed or expires.

use std::collections::{HashMap, HashSet};

use proptest::prelude::*;

use super::*;

/// Pseudo-random hashes, the same in every run.
pub(super) fn hash(n: u64) -> u64 {
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
fn until(table: &CuckooTable, us: u64) -> Packed {
    table.pack(Compact { at: at(0), span_us: us, extra: 0 }).expect("fits")
}

/// Inserts a state as the store does. Returns `false` if there is no place for it.
fn put(table: &CuckooTable, address: Address, state: Packed, now: Timestamp) -> bool {
    loop {
        let mut pair = table.lock(address);
        if let Some(slot_index) = pair.find() {
            pair.set(slot_index, state);
            return true;
        }
        if pair.insert(state, Some(table.since_epoch_us(now)), || true) == Insertion::Done {
            return true;
        }
        drop(pair);
        if !table.make_room(address) {
            return false;
        }
    }
}

fn get(table: &CuckooTable, address: Address) -> Option<Packed> {
    table.lock(address).state()
}

/// The state that a lookup without the lock finds: an entry that was written or looked up since a
/// split moved it.
fn read_optimistically(table: &CuckooTable, address: Address) -> Option<Packed> {
    let seen = table.route(address).find()?;
    assert!(seen.is_still());
    seen.state()
}

/// How many entries a key has.
fn count(table: &CuckooTable, address: Address) -> usize {
    let pair = table.lock(address);
    let is = |bucket: &BucketGuard<'_>, slot| bucket.get(slot).is(pair.route.tag());
    let of = |bucket| (0..bucket::SLOTS).filter(move |slot| is(bucket, *slot)).count();
    pair.buckets.iter().map(of).sum()
}

#[test]
fn a_growing_table_is_two_thirds_full_and_any_capacity_works() {
    let table = CuckooTable::new(20_000, Timestamp::ZERO);
    assert!((0..10_000).all(|n| put(&table, address(n), until(&table, n + 1), Timestamp::ZERO)));
    assert_eq!(table.len(), 10_000);
    // The small segments of tests are three quarters as full as those of full size.
    let slots = table.segments() * BUCKETS * bucket::SLOTS;
    assert!(slots * 2 < 10_000 * 3, "{slots} slots");
    let found = (0..10_000).filter(|n| read_optimistically(&table, address(*n)).is_some()).count();
    assert!((1..9_000).contains(&found), "{found}");
    for n in 0..10_000 {
        assert_eq!(get(&table, address(n)), Some(until(&table, n + 1)), "{n}");
        assert_eq!(read_optimistically(&table, address(n)), Some(until(&table, n + 1)), "{n}");
    }
    for capacity in [1, 2, 1 << 40, usize::MAX] {
        let table = CuckooTable::new(capacity, Timestamp::ZERO);
        assert!(put(&table, address(7), until(&table, 9), Timestamp::ZERO), "{capacity}");
        assert_eq!(get(&table, address(7)), Some(until(&table, 9)), "{capacity}");
    }
}

#[test]
fn keys_that_no_split_separates_fill_two_buckets_at_most() {
    let table = CuckooTable::new(64, Timestamp::ZERO);
    // The addresses have the same upper half: the same segment at every depth, and the same
    // alternate bucket.
    let same = |n: u64| Address::of_bits((0xdead_beef << 32) | (n << 27));
    let fits = |n: &u64| put(&table, same(*n), until(&table, 9), Timestamp::ZERO);
    assert_eq!((0..31).take_while(fits).count(), 2 * bucket::SLOTS);
    assert!((0..8).all(|n| get(&table, same(n)).is_some()));
    // Expired entries make room.
    assert!(put(&table, same(31), until(&table, 99), at(9)));
}

/// What is done to which keys; states matter for so many microseconds.
#[derive(Clone, Debug)]
enum Act {
    Put(u64, u64),
    /// Inserts those of the keys that have no entry, in one batch.
    PutSeveral(HashSet<u64>, u64),
    Clear(u64),
    Spill(u64),
    /// So many microseconds pass.
    Later(u64),
    /// Sweeps so many buckets.
    Sweep(usize),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let (key, span_us) = (|| 0..120_u64, || 1..400_u64);
    let keys = prop::collection::hash_set(key(), 2..5);
    let act = prop_oneof![
        6 => (key(), span_us()).prop_map(|(key, span_us)| Act::Put(key, span_us)),
        2 => (keys, span_us()).prop_map(|(keys, span_us)| Act::PutSeveral(keys, span_us)),
        1 => key().prop_map(Act::Clear),
        1 => key().prop_map(Act::Spill),
        1 => (0..40_u64).prop_map(Act::Later),
        1 => (1..9_usize).prop_map(Act::Sweep),
    ];
    prop::collection::vec(act, 1..600)
}

proptest! {
    #[test]
    fn the_table_agrees_with_a_map(acts in acts(), salt: u64) {
        let table = CuckooTable::new(500, Timestamp::ZERO);
        let address = |key: u64| address(key ^ salt);
        let mut map: HashMap<u64, (Packed, u64)> = HashMap::new();
        let (mut spilled, mut now_us) = (HashSet::new(), 0);
        for act in acts {
            let state = |span_us| {
                table.pack(Compact { at: at(now_us), span_us, extra: 0 }).expect("fits")
            };
            match act {
                Act::Put(key, span_us) => {
                    // A table for five hundred keys always has a place for a hundred and twenty.
                    prop_assert!(put(&table, address(key), state(span_us), at(now_us)));
                    map.insert(key, (state(span_us), now_us + span_us));
                }
                Act::PutSeveral(keys, span_us) => {
                    let keys: Vec<_> = keys.into_iter().collect();
                    let mut locked = table.lock_all(&keys.iter().map(|key| address(*key)));
                    locked.clear_expired(now_us);
                    for (position, key) in keys.into_iter().enumerate() {
                        let mut pair = locked.pair(position).expect("two buckets");
                        let found = pair.state();
                        let live = map.get(&key).filter(|(_, expires_us)| *expires_us > now_us);
                        prop_assert_eq!(found, live.map(|live| live.0));
                        if found.is_none() && pair.insert(state(span_us), None, || true) == Insertion::Done {
                            map.insert(key, (state(span_us), now_us + span_us));
                        }
                    }
                }
                Act::Clear(key) => {
                    let mut pair = table.lock(address(key));
                    prop_assert!(pair.find().is_none_or(|slot_index| pair.clear(slot_index)));
                    map.remove(&key);
                }
                Act::Spill(key) => {
                    table.lock(address(key)).spill();
                    spilled.insert(key);
                }
                Act::Later(us) => now_us += us,
                Act::Sweep(buckets) => drop(table.sweep(buckets, at(now_us))),
            }
            for key in 0..120 {
                let (found, due) = (get(&table, address(key)), map.get(&key));
                match due {
                    Some((state, expires_us)) if *expires_us > now_us => {
                        prop_assert_eq!(found, Some(*state));
                    }
                    // An expired entry may still be there, unchanged.
                    due => prop_assert!(found.is_none() || found == due.map(|due| due.0)),
                }
                prop_assert!(count(&table, address(key)) <= 1 && read_optimistically(&table, address(key)) == found);
            }
        }
        // The mark outlives splits. A sweep of a bucket that is locked waits for nothing, and one
        // of all leaves the live.
        prop_assert!(spilled.iter().all(|key| table.lock(address(*key)).has_spilled()));
        let locked = table.lock(address(0));
        let (before, freed) = (table.segments() * BUCKETS, table.sweep(1 << 20, at(now_us)));
        drop(locked);
        let freed = freed + table.sweep(before, at(now_us));
        let live = map.values().filter(|(_, expires_us)| *expires_us > now_us).count();
        prop_assert!(freed <= 120 && table.len() == live);
    }
}
