//! Loom models of the table: buckets that are read without their lock, taken over and relocated, and segments
//! that split. That a reader sees no mixture of two states, and two entries as they were at one moment, the models
//! of the store's own paths show (`loom_paths.rs`, `loom_optimistic_batch.rs`).
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p ratelimit-memory --lib --release loom_`

use loom::sync::Arc;
use loom::thread::JoinHandle;
use ratelimit_core::Timestamp;

use super::bucket::{Bucket, SLOTS};
use super::*;
use crate::loom_store::{beside, model};

/// How many keys with the same two buckets fill these.
const FULL: u64 = 2 * SLOTS as u64;

/// Addresses by the bits that matter to a table of one segment of four buckets, which can split once: the half
/// and the bucket.
fn address(upper: u64, bucket: u64, key: u64) -> Address {
    Address::of_bits((upper << 63) | (key << 27) | bucket)
}

fn packed(buckets: &CuckooTable, at_us: u64, span_us: u64) -> Packed {
    let at = Timestamp::saturating_from_us(at_us);
    buckets.pack(Compact { at, span_us, extra: 0 }).expect("fits")
}

fn buckets() -> Arc<CuckooTable> {
    Arc::new(CuckooTable::new(8, Timestamp::ZERO))
}

/// Inserts a state of a new key, as a store does.
fn insert(buckets: &CuckooTable, address: Address, state: Packed, now_us: u64) -> bool {
    let mut pair = buckets.lock(address);
    pair.insert(state, now_us, || true) == Insertion::Done
}

fn fill(buckets: &CuckooTable, upper: u64, keys: std::ops::Range<u64>) {
    for key in keys {
        assert!(insert(buckets, address(upper, 0, key), packed(buckets, 1, 1_000), 0));
    }
}

fn get(buckets: &CuckooTable, address: Address) -> Option<Packed> {
    buckets.lock(address).state()
}

/// The state that a reader without a lock finds and validates.
fn seen(buckets: &CuckooTable, address: Address) -> Option<Packed> {
    let seen = buckets.route(address).find()?;
    let state = seen.state()?;
    seen.is_still().then_some(state)
}

/// Two states that differ in all their words.
fn old_and_new(buckets: &CuckooTable) -> [Packed; 2] {
    [packed(buckets, 1, 100), packed(buckets, 2, 200)]
}

/// A slot becomes another key's, charged in the same microsecond: the word stays the same.
#[test]
fn loom_a_reader_does_not_take_another_keys_state_for_its_own() {
    model(|| {
        let buckets = buckets();
        let (here, there) = (address(0, 0, 1), address(0, 0, 2));
        let [old, other] = [100, 200].map(|span_us| packed(&buckets, 1, span_us));
        assert!(insert(&buckets, here, old, 0));
        let thread = beside(&buckets, move |buckets| buckets.lock(there).set((0, 0), other));
        let read = (seen(&buckets, here), seen(&buckets, there));
        assert!(read.0.is_none_or(|read| read == old), "{read:?}");
        assert!(read.1.is_none_or(|read| read == other), "{read:?}");
        thread.join().expect("no panic");
        assert_eq!((seen(&buckets, here), seen(&buckets, there)), (None, Some(other)));
    });
}

/// A sweep of a bucket whose second slot is locked unlocks the first one again, and waits for no other thread.
#[test]
fn loom_a_sweep_that_finds_the_second_slot_locked_unlocks_the_first() {
    model(|| {
        let buckets = buckets();
        let keys = [address(0, 0, 1), address(0, 0, 2)];
        let [old, new] = old_and_new(&buckets);
        assert!(keys.iter().all(|key| insert(&buckets, *key, old, 0)));
        let thread = beside(&buckets, move |other| charge(other, keys[1], new));
        drop(buckets.route(keys[0]).buckets()[0].try_lock());
        let charged = thread.join().expect("no panic");
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
        let [old, new] = [1, 1_000].map(|at_us| packed(&buckets, at_us, 100));
        assert!(insert(&buckets, expired, old, 0) && insert(&buckets, live, new, 0));
        let sweep = |buckets: &CuckooTable| buckets.sweep(1, Timestamp::saturating_from_us(1_000));
        let thread = beside(&buckets, sweep);
        let charged = charge(&buckets, expired, new);
        let freed = thread.join().expect("no panic");
        assert_eq!(freed + usize::from(charged), 1);
        assert_eq!(get(&buckets, expired), charged.then_some(new));
        assert_eq!(get(&buckets, live), Some(new));
    });
}

#[test]
fn loom_a_sweep_beside_a_split_frees_an_expired_entry_once() {
    for upper in [0, 1] {
        model(move || {
            let buckets = buckets();
            let (expired, live) = (address(upper, 0, 1), address(upper, 0, 2));
            assert!(insert(&buckets, expired, packed(&buckets, 1, 2), 0));
            assert!(insert(&buckets, live, packed(&buckets, 1, 100), 0));
            let thread = splits(&buckets, live);
            let freed = buckets.sweep(1, Timestamp::saturating_from_us(50));
            assert!(thread.join().expect("no panic"));
            assert_eq!(buckets.len(), 2 - freed);
            assert_eq!(get(&buckets, expired).is_some(), freed == 0);
            assert!(get(&buckets, live).is_some());
        });
    }
}

#[test]
fn loom_two_writers_of_one_bucket_lose_nothing() {
    model(|| {
        let buckets = buckets();
        let state = packed(&buckets, 1, 100);
        let (here, there) = (address(0, 0, 1), address(0, 0, 2));
        let thread = beside(&buckets, move |other| insert(other, there, packed(other, 1, 100), 0));
        assert!(insert(&buckets, here, state, 0));
        assert!(thread.join().expect("no panic"));
        assert_eq!((get(&buckets, here), get(&buckets, there)), (Some(state), Some(state)));
        assert_eq!(buckets.len(), 2);
    });
}

#[test]
fn loom_an_expired_slot_is_taken_over_by_one_key() {
    model(|| {
        let buckets = buckets();
        // All slots of these keys are taken, and one has expired.
        fill(&buckets, 0, 10..10 + FULL - 1);
        assert!(insert(&buckets, address(0, 0, 1), packed(&buckets, 1, 2), 0));
        let (here, there) = (address(0, 0, 2), address(0, 0, 3));
        let thread = beside(&buckets, move |other| insert(other, there, packed(other, 9, 9), 9));
        let here = insert(&buckets, here, packed(&buckets, 9, 9), 9).then_some(here);
        let there = thread.join().expect("no panic").then_some(there);
        assert!(here.is_some() ^ there.is_some());
        assert_eq!(buckets.len(), 2 * SLOTS);
        let winner = here.or(there).expect("one of them");
        assert_eq!(get(&buckets, winner), Some(packed(&buckets, 9, 9)));
    });
}

/// Another thread that splits a key's segment.
fn splits(buckets: &Arc<CuckooTable>, key: Address) -> JoinHandle<bool> {
    beside(buckets, move |buckets| buckets.directory.split(buckets.route(key)))
}

/// Looks for a key during a split of its segment, and after it.
fn is_found_beside_a_split(buckets: &Arc<CuckooTable>, key: Address) {
    let state = packed(buckets, 1, 100);
    assert!(insert(buckets, key, state, 0));
    let thread = splits(&buckets, key);
    // Without the lock, a reader finds the key or rejects what it read; with the lock, it finds the key.
    assert!(seen(buckets, key).is_none_or(|read| read == state));
    assert_eq!(get(buckets, key), Some(state));
    assert!(thread.join().expect("no panic"));
    assert_eq!((get(buckets, key), buckets.len()), (Some(state), 1));
}

/// Charges a key as a store does, on a snapshot that was taken without the lock. Returns whether it did.
fn charge(buckets: &CuckooTable, key: Address, state: Packed) -> bool {
    let Some(seen) = buckets.route(key).find() else { return false };
    let Some(mut entry) = seen.try_lock() else { return false };
    entry.set(state);
    true
}

#[test]
fn loom_a_charge_is_not_lost_while_its_segment_splits() {
    for upper in [0, 1] {
        model(move || {
            let buckets = buckets();
            let [old, new] = old_and_new(&buckets);
            let key = address(upper, 0, 1);
            assert!(insert(&buckets, key, old, 0));
            let thread = splits(&buckets, key);
            let charged = charge(&buckets, key, new);
            assert!(thread.join().expect("no panic"));
            assert_eq!(get(&buckets, key), Some(if charged { new } else { old }));
        });
    }
}

/// Two threads add to a key's span within one microsecond, so that the entry's word does not change, and lock
/// the slot by `locked`.
fn charge_within_a_microsecond(
    locked: impl for<'s, 'l> Fn(&'s OptimisticRead<'l>) -> Option<SlotGuard<'s, 'l>>
    + Copy
    + Send
    + 'static,
) {
    let buckets = buckets();
    let key = address(0, 0, 1);
    assert!(insert(&buckets, key, packed(&buckets, 1, 100), 0));
    let add_one = move |buckets: &CuckooTable| {
        let Some(seen) = buckets.route(key).find() else { return 0 };
        let Some(state) = seen.state() else { return 0 };
        let span_us = buckets.unpack(state).span_us + 1;
        let Some(mut entry) = locked(&seen) else { return 0 };
        entry.set(packed(buckets, 1, span_us));
        1
    };
    let thread = beside(&buckets, add_one);
    let added = add_one(&buckets) + thread.join().expect("no panic");
    let state = get(&buckets, key).expect("there");
    assert_eq!(buckets.unpack(state).span_us, 100 + added, "an update is lost");
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

#[test]
fn loom_a_key_is_found_while_its_segment_splits() {
    for upper in [0, 1] {
        model(move || is_found_beside_a_split(&buckets(), address(upper, 0, 1)));
    }
}

#[test]
fn loom_a_key_inserted_beside_a_split_is_found() {
    model(|| {
        let buckets = buckets();
        let (here, there) = (address(0, 0, 1), address(0, 1, 2));
        let thread = splits(&buckets, there);
        assert!(insert(&buckets, here, packed(&buckets, 1, 100), 0));
        assert!(thread.join().expect("no panic"));
        assert!(get(&buckets, here).is_some());
        assert_eq!(buckets.segments(), 2);
    });
}

/// An insert that does not check, under the bucket's lock, whether the bucket is still its key's.
#[test]
#[should_panic(expected = "lost in a split")]
fn loom_catches_an_insert_that_does_not_check_its_bucket_under_the_lock() {
    model(|| {
        let buckets = buckets();
        let key = address(0, 0, 1);
        let thread = splits(&buckets, key);
        let route = buckets.route(key);
        let bucket: &Bucket = route.buckets()[0];
        let mut locked = bucket.lock();
        locked.set(0, SlotEntry::new(route.tag(), packed(&buckets, 1, 100)));
        drop(locked);
        assert!(thread.join().expect("no panic"));
        assert!(get(&buckets, key).is_some(), "lost in a split");
    });
}

#[test]
fn loom_a_key_is_found_while_one_of_several_segments_splits() {
    model(|| {
        let key = address(1, 0, 1);
        let buckets = Arc::new(CuckooTable::new(32, Timestamp::ZERO));
        assert!(buckets.directory.split(buckets.route(key)));
        is_found_beside_a_split(&buckets, key);
        assert_eq!(buckets.segments(), 3);
    });
}

#[test]
fn loom_two_threads_that_find_a_segment_full_split_it_once() {
    model(|| {
        let buckets = buckets();
        fill(&buckets, 0, 10..10 + FULL);
        let key = address(0, 0, 1);
        let route = buckets.route(key);
        let thread = splits(&buckets, key);
        assert!(buckets.directory.split(route));
        // The second thread finds the split done, or finds that no other is possible.
        thread.join().expect("no panic");
        assert_eq!(buckets.segments(), 2);
        assert!((10..10 + FULL).all(|n| get(&buckets, address(0, 0, n)).is_some()));
    });
}
