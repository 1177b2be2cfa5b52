//! Loom models of the store's locks and counters: every interleaving of a few threads.
//!
//! `RUSTFLAGS="--cfg loom" cargo test -p ratelimit-memory --lib --release loom_`
//!
//! Models named `loom_catches_…` contain a fault that loom must find. Loom does not explore the
//! creation of a segment, eight keys acquired together, and the clocks; threads and the
//! linearizability checker test these.

#![allow(unused_must_use, reason = "a model looks at what is left, not at each verdict")]

use loom::sync::Arc;
use loom::thread::spawn;
use ratelimit_core::algorithm::InMemory;
use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{
    AnyAlgorithm, FixedWindow, Gcra, Limit, ManualClock, ReservationId, SlidingLog, SyncStore,
    Timestamp, Verdict,
};

use super::{MemoryError, MemoryStore};

pub(crate) type LoomStore<A = Gcra> = MemoryStore<A, ManualClock>;
type Windows = LoomStore<FixedWindow>;

const SECOND: Timestamp = Timestamp::saturating_from_us(1_000_000);

/// Explores every interleaving of each case, without a bound. A model with only one interleaving
/// tests nothing, and fails.
pub(crate) fn models<T: Clone + Send + Sync + 'static>(
    cases: impl IntoIterator<Item = T>,
    test: impl Fn(T) + Copy + Send + Sync + 'static,
) {
    cases.into_iter().for_each(|case| model(move || test(case.clone())));
}

/// Explores every interleaving of one case.
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

/// What two threads return that do this to the same at once.
pub(crate) fn race<S: Send + Sync + 'static, H, T: 'static>(
    same: &Arc<S>,
    here: impl FnOnce(&S) -> H,
    there: impl FnOnce(&S) -> T + 'static,
) -> (H, T) {
    let other = Arc::clone(same);
    let thread = spawn(move || there(&other));
    (here(same), thread.join().expect("no panic"))
}

/// Creates a store on a clock at one second.
fn store<A: InMemory>(capacity: usize, shards: usize, entries: usize) -> Arc<LoomStore<A>> {
    let builder = MemoryStore::builder().capacity(capacity).shards(shards).entries(entries);
    Arc::new(builder.clock(ManualClock::new(SECOND)).build())
}

fn windows(capacity: usize) -> Arc<Windows> {
    store(capacity, 4, 100)
}

/// Creates a store of compact states, which lie in buckets.
pub(crate) fn small_store(capacity: usize) -> Arc<LoomStore> {
    store(capacity, 1, 100)
}

fn limit<A: InMemory>(algorithm: A) -> Limit<A> {
    Limit::new("l", algorithm).expect("a name")
}

fn window(count: u64) -> Limit<FixedWindow> {
    let rate = format!("{count}/s").parse().expect("a rate");
    limit(FixedWindow::new(rate).expect("a limit"))
}

pub(crate) fn small_limit(count: u64) -> Limit<Gcra> {
    limit(Gcra::new("1/s".parse().expect("a rate"), count).expect("a limit"))
}

/// Decides a batch of one check of cost 1 per key.
fn apply<A: InMemory>(
    store: &LoomStore<A>,
    limit: &Limit<A>,
    keys: &[&str],
    with: impl Fn(Batch<'_, A>) -> Batch<'_, A>,
) -> Verdict {
    let checks: Vec<_> = keys.iter().map(|key| Check { limit, key, cost: 1 }).collect();
    store.apply_now(&with(Batch::new(&checks).expect("distinct"))).expect("decides")
}

fn acquires(store: &Windows, count: u64, keys: &[&str]) -> bool {
    apply(store, &window(count), keys, |batch| batch).allowed()
}

/// Two threads on one key, of which `begun` were admitted before, `then_us` ago: the limit admits
/// one more.
fn one_is_admitted<A: InMemory + Clone + Send + 'static>(
    store: &Arc<LoomStore<A>>,
    limit: Limit<A>,
    begun: u64,
    then_us: u64,
) {
    let ask = move |store: &LoomStore<A>| apply(store, &limit, &["a"], |batch| batch).allowed();
    assert!((0..begun).all(|_| ask(store)));
    store.clock.set(SECOND.saturating_add_us(then_us));
    let (here, there) = race(store, ask.clone(), ask);
    assert!(here ^ there);
    assert_eq!(store.len(), 1);
}

/// For new keys, and for keys that have states.
const BEGUN: [u64; 2] = [0, 1];

#[test]
fn loom_two_threads_on_one_key_are_admitted_exactly_the_limit() {
    models(BEGUN, |begun| one_is_admitted(&windows(8), window(begun + 1), begun, 0));
    models(BEGUN, |begun| one_is_admitted(&small_store(8), small_limit(begun + 1), begun, 0));
}

#[test]
fn loom_a_sweep_beside_a_request_loses_neither_place_nor_charge() {
    model(|| one_is_admitted(&windows(2), window(1), 1, 1_000_000));
}

#[test]
fn loom_batches_that_name_their_keys_in_opposite_orders_do_not_deadlock() {
    model(|| {
        let store = windows(8);
        let ask = |keys: [&'static str; 3]| move |store: &Windows| acquires(store, 1, &keys);
        let (here, there) = race(&store, ask(["c", "b", "a"]), ask(["a", "b", "c"]));
        assert!(here ^ there, "all or nothing: one of the two has all three keys");
        assert_eq!(store.len(), 3);
    });
}

#[test]
fn loom_the_cap_holds_while_keys_come_and_go() {
    model(|| {
        let store = windows(1);
        let on = |store: &Windows, key, op| apply(store, &window(1), &[key], |it| it.op(op));
        let here = |store: &Windows| {
            on(store, "b", Op::Acquire);
            assert!(store.len() <= 1);
        };
        let there = move |store: &Windows| {
            [Op::Acquire, Op::Reset].map(|op| on(store, "a", op));
        };
        race(&store, here, there);
        on(&store, "b", Op::Reset);
        assert_eq!(store.len(), 0, "every place was given back");
    });
}

fn apply_with_id(store: &Windows, op: Op, id: u128, cost: u64) -> Result<Verdict, MemoryError> {
    let check = Check { limit: &window(3), key: "a", cost };
    store.apply_now(&Batch::one(&check).op(op).id(ReservationId::new(id)))
}

#[test]
fn loom_one_id_sent_by_two_threads_is_charged_once() {
    model(|| {
        let store = windows(8);
        let reserve = |store: &Windows| apply_with_id(store, Op::Acquire, 7, 2).expect("a place");
        let (here, there) = race(&store, reserve, reserve);
        assert_eq!((here.allowed(), here.remaining()), (true, 1));
        assert_eq!(there, here);
        assert_eq!((store.len(), store.reservations()), (1, 1));
    });
}

#[test]
fn loom_a_reservation_that_two_threads_settle_is_settled_once() {
    model(|| {
        let store = windows(8);
        apply_with_id(&store, Op::Acquire, 7, 3).expect("a place");
        let settle = |cost| move |store: &Windows| apply_with_id(store, Op::Settle, 7, cost);
        let (here, there) = race(&store, settle(2), settle(1));
        // The second one gets the cost of the first as an error.
        assert!(here.is_ok() ^ there.is_ok());
        let left = here.or(there).expect("one of them").remaining();
        let after = apply(&store, &window(3), &["a"], |batch| batch.op(Op::Peek)).remaining();
        assert_eq!(after, left - 1, "after one more");
    });
}

#[test]
fn loom_the_last_place_for_a_reservation_is_given_once_and_given_back() {
    model(|| {
        let store = windows(2);
        assert!(acquires(&store, 3, &["a"]));
        let reserve = |store: &Windows, id| apply_with_id(store, Op::Acquire, id, 1);
        let (here, there) = race(
            &store,
            |store| reserve(store, 8),
            move |store| reserve(store, 7).and(apply_with_id(store, Op::Settle, 7, 0)),
        );
        assert!(here.and(there).is_ok());
        assert!(reserve(&store, 9).is_err(), "full");
        assert_eq!(store.reservations(), 2);
        store.clock.set(Timestamp::saturating_from_us(7_200_000_000));
        assert!(reserve(&store, 9).is_ok(), "expired reservations make room");
    });
}

fn ask(store: &LoomStore, key: &str, count: u64) -> bool {
    store.acquire_now(&small_limit(count), key, 1).expect("decides").allowed()
}

#[test]
fn loom_a_key_that_moves_to_a_shard_is_charged_there_and_nowhere_else() {
    models(BEGUN, |begun| {
        let store = small_store(8);
        let ask = |store: &LoomStore| ask(store, "a", 3);
        assert!((0..begun).all(|_| ask(&store)));
        // A state that is written at a given time lies in a shard.
        let (here, there) = race(&store, ask, |store| {
            apply(store, &small_limit(3), &["a"], |batch| batch.now(Now::At(SECOND))).allowed()
        });
        assert!(here && there);
        let more = (0..3).filter(|_| ask(&store)).count() as u64;
        assert_eq!((more, store.len()), (1 - begun, 1));
    });
}

/// Two new keys where there is room for one: the other one uses the shared state, which serves as
/// well while only one key uses it.
fn one_shares<A: InMemory + Clone + Send + 'static>(
    store: &Arc<LoomStore<A>>,
    limit: &Limit<A>,
    entries: usize,
) {
    let ask = |key: &'static str| {
        let limit = limit.clone();
        move |store: &LoomStore<A>| apply(store, &limit, &[key], |batch| batch).allowed()
    };
    let (here, there) = race(store, ask("b"), ask("a"));
    assert!(here && there);
    assert_eq!((store.len(), store.overflowed(), store.entry_count()), (1, 1, entries));
}

#[test]
fn loom_the_caps_hold_while_keys_come() {
    model(|| one_shares(&small_store(1), &small_limit(1), 0));
    // One entry for keys of their own, and one for shared states.
    let log = limit(SlidingLog::new("1/s".parse().expect("a rate")).expect("a limit"));
    model(move || one_shares(&store(100, 1, 2), &log, 2));
}

#[test]
fn loom_a_batch_and_a_check_of_one_of_its_keys_are_serialized() {
    models(BEGUN, |begun| {
        let (store, ask) = (small_store(8), move |store: &_, key| ask(store, key, begun + 1));
        assert!((0..begun).all(|_| ask(&store, "a") && ask(&store, "b")));
        let (here, there) = race(
            &store,
            |store| ask(store, "b"),
            move |store| apply(store, &small_limit(begun + 1), &["a", "b"], |it| it).allowed(),
        );
        assert!(here ^ there);
        assert_eq!(ask(&store, "a"), here, "charged only if both were");
    });
}

/// The state of one algorithm lies in a bucket, that of the other in a shard.
#[test]
fn loom_a_key_charged_by_two_algorithms_has_a_state_of_each() {
    let cases = [("sliding-log 2/s", true, None), ("fixed-window 2/s", false, Some(7))];
    models(cases, |(words, begun, id)| {
        let ask = |words: &'static str, id: Option<u128>| {
            move |store: &LoomStore<AnyAlgorithm>| {
                let limit = limit(words.parse().expect("a policy"));
                let decided = apply(store, &limit, &["a"], |batch| match id {
                    Some(id) => batch.id(ReservationId::new(id)),
                    None => batch,
                });
                decided.allowed()
            }
        };
        let store = store(8, 1, 100);
        assert!(!begun || ask(words, id)(&store));
        let (here, there) = race(&store, ask("gcra 2/s", None), ask(words, id));
        assert!(here && there);
        assert_eq!((store.len(), store.reservations()), (2, usize::from(id.is_some())));
    });
}

/// One limit's states lie in buckets, the other's in shards. Both keys have states, and room for
/// one more charge.
#[test]
fn loom_a_batch_of_known_keys_and_a_check_of_one_of_them_are_serialized() {
    const BOTH: [(&str, &str); 2] = [("few", "gcra 1/s burst 2"), ("all", "fixed-window 2/s")];
    models([&BOTH[..1], &BOTH[1..], &BOTH], |others| {
        let ask = |limits: &'static [(&str, &str)], op| {
            move |store: &LoomStore<AnyAlgorithm>| {
                let limits: Vec<_> = limits
                    .iter()
                    .map(|(name, words)| Limit::new(name, words.parse().expect("a policy")))
                    .collect::<Result<_, _>>()
                    .expect("names");
                let checks: Vec<Check<'_, AnyAlgorithm>> =
                    limits.iter().map(|limit| Check { limit, key: "a", cost: 1 }).collect();
                let batch = Batch::new(&checks).expect("distinct").op(op);
                store.apply_now(&batch).expect("decides")
            }
        };
        let store = store(8, 1, 100);
        assert!(ask(&BOTH, Op::Acquire)(&store).allowed());
        let (here, there) = race(&store, ask(&BOTH, Op::Acquire), ask(others, Op::Acquire));
        assert!(here.allowed() ^ there.allowed());
        let left = ask(&BOTH, Op::Peek)(&store);
        let free = |name: &str| here.allowed() || others.iter().any(|other| other.0 == name);
        let due = BOTH.map(|(name, _)| u64::from(!free(name)));
        assert_eq!([0, 1].map(|nth: usize| u64::from(left.decisions()[nth].allowed)), due);
    });
}

/// A limit of one is used up under an id. What ends the charge comes before the other request, or
/// after it.
#[test]
fn loom_what_ends_a_charge_beside_a_request_comes_before_or_after_it() {
    models([(Op::Settle, true), (Op::Refund, false), (Op::Reset, false)], |(op, by_id)| {
        let store = windows(8);
        assert!(apply_with_id(&store, Op::Acquire, 7, 3).expect("a place").allowed());
        let end = move |store: &Windows| {
            let check = Check { limit: &window(3), key: "a", cost: if by_id { 0 } else { 3 } };
            let batch = Batch::one(&check).op(op);
            let batch = if by_id { batch.id(ReservationId::new(7)) } else { batch };
            store.apply_now(&batch).expect("ends it")
        };
        let ask = |store: &Windows| apply(store, &window(3), &["a"], |batch| batch).allowed();
        let (there, ended) = race(&store, ask, end);
        let left = apply(&store, &window(3), &["a"], |batch| batch.op(Op::Peek)).remaining();
        // The peek shows what a cost of 1 would leave.
        assert_eq!((left, ended.remaining()), (if there { 1 } else { 2 }, 3));
    });
}
