//! Loom models of the table: buckets that are read without their lock, taken over and relocated,
//! and segments that split. That a reader sees no mixture of two states, and two entries as they
//! were at one moment, the models of the store's own paths show (`loom_paths.rs`).
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p ratelimit-memory --lib --release loom_`

use loom::sync::Arc;
use ratelimit_core::Timestamp;

use super::bucket::SLOTS;
use super::*;
use crate::store::loom_store::{model, models, race};

/// How many keys with the same two buckets fill these.
const FULL: u64 = 2 * SLOTS as u64;

/// Addresses by the bits that matter to a table of one segment of four buckets, which can split
/// once: the half and the bucket.
fn address(upper: u64, bucket: u64, key: u64) -> Address {
    Address::of_bits((upper << 63) | (key << 27) | bucket)
}

fn pack(buckets: &CuckooTable, at_us: u64, span_us: u64) -> Packed {
    let at = Timestamp::saturating_from_us(at_us);
    buckets.pack(Compact { at, span_us, extra: 0 }).expect("fits")
}

fn buckets() -> Arc<CuckooTable> {
    Arc::new(CuckooTable::new(8, Timestamp::ZERO))
}

/// Inserts a state of a new key, as a store does.
fn insert(buckets: &CuckooTable, address: Address, state: Packed, now_us: u64) -> bool {
    let mut pair = buckets.lock(address);
    pair.insert(state, Some(now_us), || true) == Insertion::Done
}

fn fill(buckets: &CuckooTable, upper: u64, keys: std::ops::Range<u64>) {
    for key in keys {
        assert!(insert(buckets, address(upper, 0, key), pack(buckets, 1, 1_000), 0));
    }
}

fn get(buckets: &CuckooTable, address: Address) -> Option<Packed> {
    buckets.lock(address).state()
}

/// The state that a reader without a lock finds and validates.
fn read_optimistically(buckets: &CuckooTable, address: Address) -> Option<Packed> {
    let seen = buckets.route(address).find()?;
    let state = seen.state()?;
    seen.is_still().then_some(state)
}

/// Two states that differ in all their words.
fn old_and_new(buckets: &CuckooTable) -> [Packed; 2] {
    [pack(buckets, 1, 100), pack(buckets, 2, 200)]
}

/// A slot becomes another key's, charged in the same microsecond: the word stays the same.
#[test]
fn loom_a_reader_does_not_take_another_keys_state_for_its_own() {
    model(|| {
        let buckets = buckets();
        let keys = [1, 2].map(|key| address(0, 0, key));
        let [old, other] = [100, 200].map(|span_us| pack(&buckets, 1, span_us));
        assert!(insert(&buckets, keys[0], old, 0));
        let read = move |buckets: &CuckooTable| keys.map(|key| read_optimistically(buckets, key));
        let takes = move |buckets: &CuckooTable| buckets.lock(keys[1]).set((0, 0), other);
        let (was, ()) = race(&buckets, read, takes);
        let is = |read: Option<Packed>, state| read.is_none_or(|read| read == state);
        assert!(is(was[0], old) && is(was[1], other), "{was:?}");
        assert_eq!(read(&buckets), [None, Some(other)]);
    });
}

/// A sweep of a bucket whose second slot is locked unlocks the first one again, and waits for no
/// other thread.
#[test]
fn loom_a_sweep_that_finds_the_second_slot_locked_unlocks_the_first() {
    model(|| {
        let buckets = buckets();
        let keys = [address(0, 0, 1), address(0, 0, 2)];
        let [old, new] = old_and_new(&buckets);
        assert!(keys.iter().all(|key| insert(&buckets, *key, old, 0)));
        let sweep = |buckets: &CuckooTable| drop(buckets.route(keys[0]).buckets()[0].try_lock());
        let ((), charged) = race(&buckets, sweep, move |buckets| charge(buckets, keys[1], new));
        assert!(charge(&buckets, keys[0], new), "the first is free again");
        assert_eq!(get(&buckets, keys[1]), Some(if charged { new } else { old }));
    });
}

/// An expired state is charged again while another thread sweeps.
#[test]
fn loom_an_expired_entry_is_freed_or_charged_and_never_both() {
    model(|| {
        let buckets = buckets();
        let (expired, live) = (address(0, 0, 1), address(0, 0, 2));
        let [old, new] = [1, 1_000].map(|at_us| pack(&buckets, at_us, 100));
        assert!(insert(&buckets, expired, old, 0) && insert(&buckets, live, new, 0));
        let charge = |buckets: &CuckooTable| charge(buckets, expired, new);
        let (charged, freed) = race(&buckets, charge, sweeps(1_000));
        assert_eq!(freed + usize::from(charged), 1);
        assert_eq!(get(&buckets, expired), charged.then_some(new));
        assert_eq!(get(&buckets, live), Some(new));
    });
}

#[test]
fn loom_a_sweep_beside_a_split_frees_an_expired_entry_once() {
    models([0, 1], |upper| {
        let buckets = buckets();
        let (expired, live) = (address(upper, 0, 1), address(upper, 0, 2));
        assert!(insert(&buckets, expired, pack(&buckets, 1, 2), 0));
        assert!(insert(&buckets, live, pack(&buckets, 1, 100), 0));
        let (freed, split) = race(&buckets, sweeps(50), splits(live));
        assert!(split);
        assert_eq!(buckets.len(), 2 - freed);
        assert_eq!(get(&buckets, expired).is_some(), freed == 0);
        assert!(get(&buckets, live).is_some());
    });
}

#[test]
fn loom_an_expired_slot_is_taken_over_by_one_key() {
    model(|| {
        let buckets = buckets();
        // All slots of these keys are taken, and one has expired.
        fill(&buckets, 0, 10..10 + FULL - 1);
        assert!(insert(&buckets, address(0, 0, 1), pack(&buckets, 1, 2), 0));
        let new = pack(&buckets, 9, 9);
        let take = |key| {
            let key = address(0, 0, key);
            move |buckets: &CuckooTable| insert(buckets, key, new, 9).then_some(key)
        };
        let (here, there) = race(&buckets, take(2), take(3));
        assert!(here.is_some() ^ there.is_some());
        assert_eq!(buckets.len(), 2 * SLOTS);
        assert_eq!(get(&buckets, here.or(there).expect("one of them")), Some(new));
    });
}

/// Frees what has expired in the first bucket.
fn sweeps(now_us: u64) -> impl Fn(&CuckooTable) -> usize {
    move |buckets| buckets.sweep(1, Timestamp::saturating_from_us(now_us))
}

/// Splits a key's segment.
fn splits(key: Address) -> impl Fn(&CuckooTable) -> bool {
    move |buckets| buckets.directory.split(buckets.route(key))
}

/// Charges a key as a store does, on a snapshot that was taken without the lock. Returns whether it
/// did.
fn charge(buckets: &CuckooTable, key: Address, state: Packed) -> bool {
    let Some(seen) = buckets.route(key).find() else { return false };
    let Some(mut entry) = seen.try_lock() else { return false };
    entry.set(state);
    true
}

#[test]
fn loom_a_charge_is_not_lost_while_its_segment_splits() {
    models([0, 1], |upper| {
        let buckets = buckets();
        let [old, new] = old_and_new(&buckets);
        let key = address(upper, 0, 1);
        assert!(insert(&buckets, key, old, 0));
        let (charged, split) = race(&buckets, |it| charge(it, key, new), splits(key));
        assert!(split);
        assert_eq!(get(&buckets, key), Some(if charged { new } else { old }));
    });
}

/// Two threads add to a key's span within one microsecond, so that the entry's word does not
/// change, and lock the slot by `locked`.
fn charge_within_a_microsecond(
    locked: impl for<'s, 'l> Fn(&'s OptimisticRead<'l>) -> Option<SlotGuard<'s, 'l>>
    + Copy
    + Send
    + 'static,
) {
    let buckets = buckets();
    let key = address(0, 0, 1);
    assert!(insert(&buckets, key, pack(&buckets, 1, 100), 0));
    let add_one = move |buckets: &CuckooTable| {
        let Some(seen) = buckets.route(key).find() else { return 0 };
        let Some(state) = seen.state() else { return 0 };
        let span_us = buckets.unpack(state).span_us + 1;
        let Some(mut entry) = locked(&seen) else { return 0 };
        entry.set(pack(buckets, 1, span_us));
        1
    };
    let (here, there) = race(&buckets, add_one, add_one);
    let state = get(&buckets, key).expect("there");
    assert_eq!(buckets.unpack(state).span_us, 100 + here + there, "an update is lost");
}

#[test]
fn loom_two_charges_within_a_microsecond_both_count() {
    model(|| charge_within_a_microsecond(|seen| seen.try_lock()));
}

/// A charge that takes an unchanged word for an unchanged entry loses an update.
#[test]
#[should_panic(expected = "an update is lost")]
fn loom_catches_a_charge_that_compares_nothing_but_the_word() {
    model(|| charge_within_a_microsecond(|seen| seen.try_lock_word()));
}

/// The only segment splits, or one of two. Without the lock, a reader finds the key or rejects what
/// it read; with the lock, it finds the key.
#[test]
fn loom_a_key_is_found_while_its_segment_splits() {
    models([(0, 1), (1, 1), (1, 2)], |(upper, segments)| {
        let buckets = Arc::new(CuckooTable::new(16 * segments, Timestamp::ZERO));
        let (key, state) = (address(upper, 0, 1), pack(&buckets, 1, 100));
        assert!((1..segments).all(|_| splits(key)(&buckets)));
        assert!(insert(&buckets, key, state, 0));
        let looks = |buckets: &CuckooTable| {
            assert!(read_optimistically(buckets, key).is_none_or(|read| read == state));
            assert_eq!(get(buckets, key), Some(state));
        };
        let ((), split) = race(&buckets, looks, splits(key));
        assert!(split);
        looks(&buckets);
        assert_eq!((buckets.len(), buckets.segments()), (1, segments + 1));
    });
}

/// A key is inserted while its segment splits, and then looked for.
fn is_inserted_beside_a_split(inserts: impl Fn(&CuckooTable, Address, Packed)) {
    let (buckets, key) = (buckets(), address(0, 0, 1));
    let state = pack(&buckets, 1, 100);
    let ((), split) = race(&buckets, |buckets| inserts(buckets, key, state), splits(key));
    assert!(split && buckets.segments() == 2);
    assert!(get(&buckets, key).is_some(), "lost in a split");
}

#[test]
fn loom_a_key_inserted_beside_a_split_is_found() {
    model(|| {
        is_inserted_beside_a_split(|buckets, key, state| assert!(insert(buckets, key, state, 0)));
    });
}

/// An insert that does not check, under the bucket's lock, whether the bucket is still its key's.
#[test]
#[should_panic(expected = "lost in a split")]
fn loom_catches_an_insert_that_does_not_check_its_bucket_under_the_lock() {
    model(|| {
        is_inserted_beside_a_split(|buckets, key, state| {
            let route = buckets.route(key);
            route.buckets()[0].lock().set(0, SlotEntry::new(route.tag(), state));
        });
    });
}

#[test]
fn loom_two_threads_that_find_a_segment_full_split_it_once() {
    model(|| {
        let buckets = buckets();
        fill(&buckets, 0, 10..10 + FULL);
        let key = address(0, 0, 1);
        let route = buckets.route(key);
        // The second thread finds the split done, or finds that no other is possible.
        let (split, _) = race(&buckets, |buckets| buckets.directory.split(route), splits(key));
        assert!(split);
        assert_eq!(buckets.segments(), 2);
        assert!((10..10 + FULL).all(|n| get(&buckets, address(0, 0, n)).is_some()));
    });
}
