//! Loom models of the store's locks and counters: every interleaving of a few threads.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p ratelimit-memory --lib --release loom_`

#![allow(unused_must_use, reason = "a model looks at what is left, not at each verdict")]

use loom::sync::Arc;
use ratelimit_core::{
    Batch, Check, FixedWindow, Gcra, Limit, ManualClock, Now, Op, Policy, Rate, ReservationId,
    SlidingLog, SyncStore, Timestamp, TokenBucket, Verdict,
};

use crate::MemoryStore;

type Store = MemoryStore<FixedWindow, ManualClock>;

/// Explores every interleaving, without a bound.
pub(crate) fn model(test: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.log = std::env::var_os("LOOM_LOG").is_some();
    builder.check(test);
}

fn limit(name: &str, count: u64) -> Limit<FixedWindow> {
    let rate = Rate::per_second(count).expect("a rate");
    Limit::new(name, FixedWindow::new(rate).expect("a limit")).expect("a name")
}

fn store(capacity: usize) -> (Arc<Store>, ManualClock) {
    let clock = ManualClock::new(Timestamp::ZERO);
    let store = MemoryStore::builder().capacity(capacity).shards(4).clock(clock.clone());
    (Arc::new(store.build()), clock)
}

fn apply(store: &Store, limit: &Limit<FixedWindow>, keys: &[&str], op: Op) -> Verdict {
    let checks: Vec<_> = keys.iter().map(|key| Check { limit, key, cost: 1 }).collect();
    store.apply_now(&Batch::new(&checks).expect("distinct").op(op)).expect("decides")
}

#[test]
fn loom_two_threads_on_one_key_are_admitted_exactly_the_limit() {
    model(|| {
        let (store, _clock) = store(8);
        let other = Arc::clone(&store);
        let ask = |store: &Store| {
            let limit = limit("l", 3);
            (0..2).filter(|_| apply(store, &limit, &["a"], Op::Acquire).allowed()).count()
        };
        let thread = loom::thread::spawn(move || ask(&other));
        let here = ask(&store);
        assert_eq!(here + thread.join().expect("no panic"), 3);
    });
}

#[test]
fn loom_batches_that_name_their_keys_in_opposite_orders_do_not_deadlock() {
    model(|| {
        let (store, _clock) = store(8);
        let other = Arc::clone(&store);
        let thread = loom::thread::spawn(move || {
            apply(&other, &limit("l", 1), &["a", "b", "c"], Op::Acquire).allowed()
        });
        let here = apply(&store, &limit("l", 1), &["c", "b", "a"], Op::Acquire).allowed();
        let there = thread.join().expect("no panic");
        assert!(here ^ there, "all or nothing: one of the two has all three keys");
        assert_eq!(store.len(), 3);
    });
}

#[test]
fn loom_the_cap_holds_while_keys_come_and_go() {
    model(|| {
        let (store, _clock) = store(1);
        let other = Arc::clone(&store);
        let thread = loom::thread::spawn(move || {
            let limit = limit("l", 1);
            apply(&other, &limit, &["a"], Op::Acquire);
            apply(&other, &limit, &["a"], Op::Reset);
        });
        let limit = limit("l", 1);
        apply(&store, &limit, &["b"], Op::Acquire);
        assert!(store.len() <= 1);
        apply(&store, &limit, &["b"], Op::Reset);
        thread.join().expect("no panic");
        assert_eq!(store.len(), 0, "every place was given back");
    });
}

#[test]
fn loom_a_sweep_beside_a_request_loses_neither_place_nor_charge() {
    model(|| {
        let (store, clock) = store(2);
        apply(&store, &limit("l", 1), &["a"], Op::Acquire);
        clock.set(Timestamp::saturating_from_us(1_000_000));
        let other = Arc::clone(&store);
        let thread = loom::thread::spawn(move || {
            apply(&other, &limit("l", 1), &["a"], Op::Acquire).allowed()
        });
        let here = apply(&store, &limit("l", 1), &["a"], Op::Acquire).allowed();
        assert!(here ^ thread.join().expect("no panic"));
        assert_eq!(store.len(), 1);
    });
}

fn reserved(store: &Store, op: Op, id: u128, cost: u64) -> Result<Verdict, crate::MemoryError> {
    let limit = limit("l", 3);
    let check = Check { limit: &limit, key: "a", cost };
    store.apply_now(&Batch::one(&check).op(op).id(ReservationId::new(id)))
}

#[test]
fn loom_one_id_sent_by_two_threads_is_charged_once() {
    model(|| {
        let (store, _clock) = store(8);
        let other = Arc::clone(&store);
        let thread = loom::thread::spawn(move || reserved(&other, Op::Acquire, 7, 2));
        let here = reserved(&store, Op::Acquire, 7, 2).expect("a place");
        let there = thread.join().expect("no panic").expect("a place");
        assert_eq!((here.allowed(), here.remaining()), (true, 1));
        assert_eq!(here, there);
        assert_eq!((store.len(), store.reservations()), (1, 1));
    });
}

#[test]
fn loom_a_reservation_that_two_threads_settle_is_settled_once() {
    model(|| {
        let (store, _clock) = store(8);
        reserved(&store, Op::Acquire, 7, 3).expect("a place");
        let other = Arc::clone(&store);
        let thread = loom::thread::spawn(move || reserved(&other, Op::Settle, 7, 1));
        let here = reserved(&store, Op::Settle, 7, 2);
        let there = thread.join().expect("no panic");
        // The second one gets the cost of the first as an error.
        assert!(here.is_ok() ^ there.is_ok());
        let left = here.or(there).expect("one of them").remaining();
        let after_one_more = apply(&store, &limit("l", 3), &["a"], Op::Peek).remaining();
        assert_eq!(after_one_more, left - 1);
    });
}

#[test]
fn loom_the_last_place_for_a_reservation_is_given_once_and_given_back() {
    model(|| {
        let (store, clock) = store(2);
        apply(&store, &limit("l", 3), &["a"], Op::Acquire);
        let other = Arc::clone(&store);
        let thread = loom::thread::spawn(move || {
            reserved(&other, Op::Acquire, 7, 1).is_ok()
                && reserved(&other, Op::Settle, 7, 0).is_ok()
        });
        let here = reserved(&store, Op::Acquire, 8, 1).is_ok();
        assert!(here && thread.join().expect("no panic"));
        assert!(reserved(&store, Op::Acquire, 9, 1).is_err(), "full");
        assert_eq!(store.reservations(), 2);
        clock.set(Timestamp::saturating_from_us(7_200_000_000));
        assert!(reserved(&store, Op::Acquire, 9, 1).is_ok(), "expired reservations make room");
    });
}

pub(crate) type Compact = MemoryStore<Gcra, ManualClock>;

pub(crate) fn small_limit(count: u64) -> Limit<Gcra> {
    let gcra = Gcra::new(Rate::per_second(1).expect("a rate"), count).expect("a limit");
    Limit::new("l", gcra).expect("a name")
}

/// Creates a store of compact states, which lie in buckets, and its clock, at one second.
pub(crate) fn small_store(capacity: usize) -> (Arc<Compact>, ManualClock) {
    let clock = ManualClock::new(Timestamp::saturating_from_us(1_000_000));
    let store = MemoryStore::builder().capacity(capacity).shards(1).clock(clock.clone());
    (Arc::new(store.build()), clock)
}

fn ask(store: &Compact, key: &str, count: u64, now: Now) -> bool {
    let limit = small_limit(count);
    let check = Check { limit: &limit, key, cost: 1 };
    let verdict = match now {
        Now::Store => store.acquire_now(&limit, key, 1),
        Now::At(_) => store.apply_now(&Batch::one(&check).now(now)),
    };
    verdict.expect("decides").allowed()
}

#[test]
fn loom_two_threads_on_one_key_in_a_bucket_are_admitted_exactly_the_limit() {
    for begun in [false, true] {
        model(move || {
            let (store, _clock) = small_store(8);
            let count = 1 + u64::from(begun);
            if begun {
                assert!(ask(&store, "a", count, Now::Store));
            }
            let other = Arc::clone(&store);
            let thread = loom::thread::spawn(move || ask(&other, "a", count, Now::Store));
            let here = ask(&store, "a", count, Now::Store);
            assert!(here ^ thread.join().expect("no panic"));
            assert_eq!(store.len(), 1);
        });
    }
}

#[test]
fn loom_a_key_that_moves_to_a_shard_is_charged_there_and_nowhere_else() {
    for begun in [false, true] {
        model(move || {
            let (store, _clock) = small_store(8);
            if begun {
                assert!(ask(&store, "a", 3, Now::Store));
            }
            let other = Arc::clone(&store);
            // A state that is written at a given time lies in a shard.
            let at = Now::At(Timestamp::saturating_from_us(1_000_000));
            let thread = loom::thread::spawn(move || ask(&other, "a", 3, at));
            assert!(ask(&store, "a", 3, Now::Store));
            assert!(thread.join().expect("no panic"));
            let left = usize::from(!begun);
            let more = (0..3).filter(|_| ask(&store, "a", 3, Now::Store)).count();
            assert_eq!((more, store.len()), (left, 1));
        });
    }
}

#[test]
fn loom_the_cap_holds_while_keys_come_into_buckets() {
    model(|| {
        let (store, _clock) = small_store(1);
        let other = Arc::clone(&store);
        let thread = loom::thread::spawn(move || ask(&other, "a", 1, Now::Store));
        // The other one uses the shared state, which serves as well while only one key uses it.
        assert!(ask(&store, "b", 1, Now::Store) && thread.join().expect("no panic"));
        assert_eq!((store.len(), store.overflowed()), (1, 1));
    });
}

#[test]
fn loom_a_batch_and_a_check_of_one_of_its_keys_are_serialized() {
    // For new keys, and for keys that have states.
    for begun in [0, 1] {
        model(move || {
            let (store, _clock) = small_store(8);
            let count = begun + 1;
            for key in ["a", "b"] {
                (0..begun).for_each(|_| assert!(ask(&store, key, count, Now::Store)));
            }
            let other = Arc::clone(&store);
            let thread = loom::thread::spawn(move || {
                let limit = small_limit(count);
                let checks = ["a", "b"].map(|key| Check { limit: &limit, key, cost: 1 });
                let batch = Batch::new(&checks).expect("distinct");
                other.apply_now(&batch).expect("decides").allowed()
            });
            let here = ask(&store, "b", count, Now::Store);
            let there = thread.join().expect("no panic");
            assert!(here ^ there);
            assert_eq!(ask(&store, "a", count, Now::Store), here, "charged only if both were");
        });
    }
}

/// Charges a key by one of two limits of one name: GCRA, whose states lie in buckets, or a log, whose states
/// lie in shards.
fn ask_kind(store: &MemoryStore<Policy, ManualClock>, key: &str, log: bool) -> bool {
    let rate = Rate::per_second(2).expect("a rate");
    let policy = if log {
        SlidingLog::new(rate).expect("a limit").into()
    } else {
        Gcra::new(rate, 2).expect("a limit").into()
    };
    let limit: Limit<Policy> = Limit::new("l", policy).expect("a name");
    let check = Check { limit: &limit, key, cost: 1 };
    store.apply_now(&Batch::one(&check)).is_ok_and(|verdict| verdict.allowed())
}

#[test]
fn loom_a_key_charged_by_two_algorithms_has_one_state() {
    model(|| {
        let clock = ManualClock::new(Timestamp::saturating_from_us(1_000_000));
        let store = Arc::new(MemoryStore::builder().capacity(8).shards(1).clock(clock).build());
        assert!(ask_kind(&store, "a", true));
        let other = Arc::clone(&store);
        let thread = loom::thread::spawn(move || ask_kind(&other, "a", true));
        // A state of one algorithm is ignored by the other.
        assert!(ask_kind(&store, "a", false) && thread.join().expect("no panic"));
        assert_eq!(store.len(), 1);
    });
}

/// The same, for a charge with an id by a limit whose states lie in shards.
#[test]
fn loom_a_key_reserved_and_charged_by_two_algorithms_has_one_state() {
    model(|| {
        let clock = ManualClock::new(Timestamp::saturating_from_us(1_000_000));
        let store = Arc::new(MemoryStore::builder().capacity(8).shards(1).clock(clock).build());
        let other: Arc<MemoryStore<Policy, ManualClock>> = Arc::clone(&store);
        let thread = loom::thread::spawn(move || {
            let rate = Rate::per_second(2).expect("a rate");
            let bucket = TokenBucket::new(rate, 2).expect("a limit").into();
            let limit: Limit<Policy> = Limit::new("l", bucket).expect("a name");
            let check = Check { limit: &limit, key: "a", cost: 1 };
            other
                .apply_now(&Batch::one(&check).id(ReservationId::new(7)))
                .expect("a place")
                .allowed()
        });
        assert!(ask_kind(&store, "a", false) && thread.join().expect("no panic"));
        assert_eq!((store.len(), store.reservations()), (1, 1));
    });
}

#[test]
fn loom_the_cap_on_entries_holds_while_keys_come() {
    model(|| {
        let clock = ManualClock::new(Timestamp::saturating_from_us(1_000_000));
        // One entry for keys of their own, and one for shared states.
        let builder = MemoryStore::builder().entries(2).shards(1).clock(clock);
        let store = Arc::new(builder.build::<SlidingLog>());
        let ask = |store: &MemoryStore<SlidingLog, ManualClock>, key| {
            let log = SlidingLog::new(Rate::per_second(1).expect("a rate")).expect("a limit");
            let limit = Limit::new("l", log).expect("a name");
            let check = Check { limit: &limit, key, cost: 1 };
            store.apply_now(&Batch::one(&check)).is_ok_and(|verdict| verdict.allowed())
        };
        let other = Arc::clone(&store);
        let thread = loom::thread::spawn(move || ask(&other, "a"));
        assert!(ask(&store, "b") && thread.join().expect("no panic"));
        assert_eq!((store.entry_count(), store.overflowed()), (2, 1));
    });
}

/// The mutant: a store that reads and writes under two separate locks, as if the real one unlocked in between.
/// Loom must find the lost update.
#[test]
#[should_panic(expected = "admitted more than the limit")]
fn loom_catches_a_store_that_unlocks_between_read_and_write() {
    model(|| {
        let count = Arc::new(crate::sync::Mutex::new(0_u64));
        let acquire = |count: &crate::sync::Mutex<u64>| {
            let seen = *crate::sync::lock(count);
            let fits = seen < 1;
            if fits {
                *crate::sync::lock(count) = seen + 1;
            }
            usize::from(fits)
        };
        let other = Arc::clone(&count);
        let thread = loom::thread::spawn(move || acquire(&other));
        let admitted = acquire(&count) + thread.join().expect("no panic");
        assert!(admitted <= 1, "admitted more than the limit");
    });
}
