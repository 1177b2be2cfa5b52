//! Loom models of the store's locks and counters: every interleaving of a few threads.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p ratelimit-memory --lib --release loom_`
//!
//! Models named `loom_catches_…` contain a fault that loom must find. Loom does not explore the creation of a segment,
//! eight keys acquired together, and the clocks; threads and the linearizability checker test these.

#![allow(unused_must_use, reason = "a model looks at what is left, not at each verdict")]

use loom::sync::Arc;
use loom::thread::{JoinHandle, spawn};
use ratelimit_core::algorithm::InMemory;
use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{
    FixedWindow, Gcra, Limit, ManualClock, Policy, ReservationId, SlidingLog, SyncStore, Timestamp,
    Verdict,
};

use crate::{MemoryError, MemoryStore};

type LoomStore<A> = MemoryStore<A, ManualClock>;
type Windows = LoomStore<FixedWindow>;
pub(crate) type CompactStore = LoomStore<Gcra>;

const SECOND: Timestamp = Timestamp::saturating_from_us(1_000_000);

/// Explores every interleaving, without a bound. A model with only one interleaving tests nothing, and fails.
pub(crate) fn model(test: impl Fn() + Send + Sync + 'static) {
    use std::sync::atomic::{AtomicUsize, Ordering};
    let tried = std::sync::Arc::new(AtomicUsize::new(0));
    let counted = std::sync::Arc::clone(&tried);
    let mut builder = loom::model::Builder::new();
    builder.log = std::env::var_os("LOOM_LOG").is_some();
    builder.check(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        test();
    });
    assert!(tried.load(Ordering::Relaxed) > 1, "nothing to try");
}

/// Another thread that does this to the same.
pub(crate) fn beside<S: Send + Sync + 'static, T: 'static>(
    same: &Arc<S>,
    what: impl FnOnce(&S) -> T + 'static,
) -> JoinHandle<T> {
    let same = Arc::clone(same);
    spawn(move || what(&same))
}

/// A store on a clock at one second.
fn store<A: InMemory>(
    capacity: usize,
    shards: usize,
    entries: usize,
) -> (Arc<LoomStore<A>>, ManualClock) {
    let clock = ManualClock::new(SECOND);
    let builder = MemoryStore::builder().capacity(capacity).shards(shards).entries(entries);
    (Arc::new(builder.clock(clock.clone()).build()), clock)
}

fn windows(capacity: usize) -> (Arc<Windows>, ManualClock) {
    store(capacity, 4, 100)
}

/// Creates a store of compact states, which lie in buckets.
pub(crate) fn small_store(capacity: usize) -> (Arc<CompactStore>, ManualClock) {
    store(capacity, 1, 100)
}

fn window(count: u64) -> Limit<FixedWindow> {
    let rate = format!("{count}/s").parse().expect("a rate");
    Limit::new("l", FixedWindow::new(rate).expect("a limit")).expect("a name")
}

pub(crate) fn small_limit(count: u64) -> Limit<Gcra> {
    Limit::new("l", Gcra::new("1/s".parse().expect("a rate"), count).expect("a limit"))
        .expect("a name")
}

fn apply(store: &Windows, count: u64, keys: &[&str], op: Op) -> Verdict {
    let limit = &window(count);
    let checks: Vec<_> = keys.iter().map(|key| Check { limit, key, cost: 1 }).collect();
    store.apply_now(&Batch::new(&checks).expect("distinct").op(op)).expect("decides")
}

fn acquires(store: &Windows, count: u64, keys: &[&str]) -> bool {
    apply(store, count, keys, Op::Acquire).allowed()
}

#[test]
fn loom_two_threads_on_one_key_are_admitted_exactly_the_limit() {
    model(|| {
        let (store, _clock) = windows(8);
        let ask = |store: &Windows| (0..2).filter(|_| acquires(store, 3, &["a"])).count();
        let thread = beside(&store, ask);
        assert_eq!(ask(&store) + thread.join().expect("no panic"), 3);
    });
}

#[test]
fn loom_batches_that_name_their_keys_in_opposite_orders_do_not_deadlock() {
    model(|| {
        let (store, _clock) = windows(8);
        let thread = beside(&store, |store| acquires(store, 1, &["a", "b", "c"]));
        let here = acquires(&store, 1, &["c", "b", "a"]);
        let there = thread.join().expect("no panic");
        assert!(here ^ there, "all or nothing: one of the two has all three keys");
        assert_eq!(store.len(), 3);
    });
}

#[test]
fn loom_the_cap_holds_while_keys_come_and_go() {
    model(|| {
        let (store, _clock) = windows(1);
        let thread = beside(&store, |store| {
            [Op::Acquire, Op::Reset].map(|op| apply(store, 1, &["a"], op));
        });
        apply(&store, 1, &["b"], Op::Acquire);
        assert!(store.len() <= 1);
        thread.join().expect("no panic");
        apply(&store, 1, &["b"], Op::Reset);
        assert_eq!(store.len(), 0, "every place was given back");
    });
}

#[test]
fn loom_a_sweep_beside_a_request_loses_neither_place_nor_charge() {
    model(|| {
        let (store, clock) = windows(2);
        assert!(acquires(&store, 1, &["a"]));
        clock.set(Timestamp::saturating_from_us(2_000_000));
        let thread = beside(&store, |store| acquires(store, 1, &["a"]));
        assert!(acquires(&store, 1, &["a"]) ^ thread.join().expect("no panic"));
        assert_eq!(store.len(), 1);
    });
}

fn reserved(store: &Windows, op: Op, id: u128, cost: u64) -> Result<Verdict, MemoryError> {
    let check = Check { limit: &window(3), key: "a", cost };
    store.apply_now(&Batch::one(&check).op(op).id(ReservationId::new(id)))
}

#[test]
fn loom_one_id_sent_by_two_threads_is_charged_once() {
    model(|| {
        let (store, _clock) = windows(8);
        let thread = beside(&store, |store| reserved(store, Op::Acquire, 7, 2));
        let here = reserved(&store, Op::Acquire, 7, 2).expect("a place");
        assert_eq!((here.allowed(), here.remaining()), (true, 1));
        assert_eq!(thread.join().expect("no panic"), Ok(here));
        assert_eq!((store.len(), store.reservations()), (1, 1));
    });
}

#[test]
fn loom_a_reservation_that_two_threads_settle_is_settled_once() {
    model(|| {
        let (store, _clock) = windows(8);
        reserved(&store, Op::Acquire, 7, 3).expect("a place");
        let thread = beside(&store, |store| reserved(store, Op::Settle, 7, 1));
        let here = reserved(&store, Op::Settle, 7, 2);
        let there = thread.join().expect("no panic");
        // The second one gets the cost of the first as an error.
        assert!(here.is_ok() ^ there.is_ok());
        let left = here.or(there).expect("one of them").remaining();
        assert_eq!(apply(&store, 3, &["a"], Op::Peek).remaining(), left - 1, "after one more");
    });
}

#[test]
fn loom_the_last_place_for_a_reservation_is_given_once_and_given_back() {
    model(|| {
        let (store, clock) = windows(2);
        assert!(acquires(&store, 3, &["a"]));
        let thread = beside(&store, |store| {
            reserved(store, Op::Acquire, 7, 1).and(reserved(store, Op::Settle, 7, 0)).is_ok()
        });
        let here = reserved(&store, Op::Acquire, 8, 1).is_ok();
        assert!(here && thread.join().expect("no panic"));
        assert!(reserved(&store, Op::Acquire, 9, 1).is_err(), "full");
        assert_eq!(store.reservations(), 2);
        clock.set(Timestamp::saturating_from_us(7_200_000_000));
        assert!(reserved(&store, Op::Acquire, 9, 1).is_ok(), "expired reservations make room");
    });
}

fn ask(store: &CompactStore, key: &str, count: u64) -> bool {
    store.acquire_now(&small_limit(count), key, 1).expect("decides").allowed()
}

#[test]
fn loom_two_threads_on_one_key_in_a_bucket_are_admitted_exactly_the_limit() {
    for begun in [0, 1] {
        model(move || {
            let (store, _clock) = small_store(8);
            assert!((0..begun).all(|_| ask(&store, "a", begun + 1)));
            let thread = beside(&store, move |store| ask(store, "a", begun + 1));
            assert!(ask(&store, "a", begun + 1) ^ thread.join().expect("no panic"));
            assert_eq!(store.len(), 1);
        });
    }
}

#[test]
fn loom_a_key_that_moves_to_a_shard_is_charged_there_and_nowhere_else() {
    for begun in [0, 1] {
        model(move || {
            let (store, _clock) = small_store(8);
            assert!((0..begun).all(|_| ask(&store, "a", 3)));
            // A state that is written at a given time lies in a shard.
            let thread = beside(&store, |store| {
                let check = Check { limit: &small_limit(3), key: "a", cost: 1 };
                store
                    .apply_now(&Batch::one(&check).now(Now::At(SECOND)))
                    .expect("decides")
                    .allowed()
            });
            assert!(ask(&store, "a", 3) && thread.join().expect("no panic"));
            let more = (0..3).filter(|_| ask(&store, "a", 3)).count();
            assert_eq!((more, store.len()), (1 - begun, 1));
        });
    }
}

#[test]
fn loom_the_cap_holds_while_keys_come_into_buckets() {
    model(|| {
        let (store, _clock) = small_store(1);
        let thread = beside(&store, |store| ask(store, "a", 1));
        // The other one uses the shared state, which serves as well while only one key uses it.
        assert!(ask(&store, "b", 1) && thread.join().expect("no panic"));
        assert_eq!((store.len(), store.overflowed()), (1, 1));
    });
}

#[test]
fn loom_a_batch_and_a_check_of_one_of_its_keys_are_serialized() {
    // For new keys, and for keys that have states.
    for begun in [0, 1] {
        model(move || {
            let (store, _clock) = small_store(8);
            for key in ["a", "b"] {
                (0..begun).for_each(|_| assert!(ask(&store, key, begun + 1)));
            }
            let thread = beside(&store, move |store| {
                let limit = small_limit(begun + 1);
                let checks = ["a", "b"].map(|key| Check { limit: &limit, key, cost: 1 });
                let batch = Batch::new(&checks).expect("distinct");
                store.apply_now(&batch).expect("decides").allowed()
            });
            let here = ask(&store, "b", begun + 1);
            assert!(here ^ thread.join().expect("no panic"));
            assert_eq!(ask(&store, "a", begun + 1), here, "charged only if both were");
        });
    }
}

/// Charges a key by a limit of the one name.
fn ask_kind(store: &LoomStore<Policy>, words: &str, id: Option<u128>) -> bool {
    let limit: Limit<Policy> = Limit::new("l", words.parse().expect("a policy")).expect("a name");
    let check = Check { limit: &limit, key: "a", cost: 1 };
    let batch = Batch::one(&check);
    let batch = id.map_or(batch, |id| batch.id(ReservationId::new(id)));
    store.apply_now(&batch).expect("a place").allowed()
}

/// The states of one limit lie in buckets, those of the other in shards, and each ignores the other's.
#[test]
fn loom_a_key_charged_by_two_algorithms_has_one_state() {
    for (words, begun, id) in
        [("sliding-log 2/s", true, None), ("fixed-window 2/s", false, Some(7))]
    {
        model(move || {
            let (store, _clock) = store(8, 1, 100);
            assert!(!begun || ask_kind(&store, words, id));
            let thread = beside(&store, move |store| ask_kind(store, words, id));
            assert!(ask_kind(&store, "gcra 2/s", None) && thread.join().expect("no panic"));
            assert_eq!((store.len(), store.reservations()), (1, usize::from(id.is_some())));
        });
    }
}

#[test]
fn loom_the_cap_on_entries_holds_while_keys_come() {
    model(|| {
        // One entry for keys of their own, and one for shared states.
        let (store, _clock) = store::<SlidingLog>(100, 1, 2);
        let ask = |store: &LoomStore<SlidingLog>, key| {
            let log = SlidingLog::new("1/s".parse().expect("a rate")).expect("a limit");
            let limit = Limit::new("l", log).expect("a name");
            store.acquire_now(&limit, key, 1).is_ok_and(|verdict| verdict.allowed())
        };
        let thread = beside(&store, move |store| ask(store, "a"));
        assert!(ask(&store, "b") && thread.join().expect("no panic"));
        assert_eq!((store.entry_count(), store.overflowed()), (2, 1));
    });
}
