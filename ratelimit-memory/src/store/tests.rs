//! What only the store itself can see: places, sweeping, and the behaviour at capacity.

use super::*;
use ratelimit_core::{Gcra, ManualClock, ReservationId};
use ratelimit_testkit::limit_in_words;
use std::time::Duration;

mod entries;
mod growth;
mod hashing;
mod meeting;
mod untrusted_keys;

const NOW: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);
const HOUR: Duration = Duration::from_secs(3_600);

type Memory<A = Gcra> = MemoryStore<A, ManualClock>;

/// A limit that recovers one an hour.
fn limit(burst: u64) -> Limit<Gcra> {
    Limit::new("l", Gcra::new("1/h".parse().expect("a rate"), burst).expect("a limit"))
        .expect("a name")
}

/// A store on a clock that stands at [`NOW`].
fn build_store<A: InMemory>(
    build: impl FnOnce(Builder<ManualClock>) -> Builder<ManualClock>,
) -> (Memory<A>, ManualClock) {
    let clock = ManualClock::new(NOW);
    (build(MemoryStore::builder().shards(4).clock(clock.clone())).build(), clock)
}

fn store(capacity: usize) -> (Memory, ManualClock) {
    build_store(|builder| builder.capacity(capacity))
}

fn try_ask(
    store: &Memory,
    key: &str,
    op: Op,
    cost: u64,
    with: impl for<'b> Fn(Batch<'b, Gcra>) -> Batch<'b, Gcra>,
) -> Result<Verdict, MemoryError> {
    store.apply_now(&with(Batch::one(&Check { limit: &limit(3), key, cost }).op(op)))
}

fn ask(store: &Memory, key: &str, op: Op, cost: u64) -> (bool, u64) {
    let verdict = try_ask(store, key, op, cost, |batch| batch).expect("decides");
    (verdict.allowed(), verdict.remaining())
}

/// The number of states in buckets and shards.
fn count_states<A: InMemory, C: Clock>(store: &MemoryStore<A, C>) -> usize {
    let in_shards = store.shards.iter().map(|shard| lock(shard).states().count()).sum::<usize>();
    in_shards + store.table.as_ref().map_or(0, CuckooTable::len)
}

#[test]
fn a_full_store_sweeps_little_until_some_states_are_idle() {
    let (store, clock) = store(5_000);
    let gets_a_place = |n: u32, cost: u64| {
        let key = n.to_string();
        let _ = ask(&store, &key, Op::Acquire, cost);
        store.state(&limit(3), &key).is_some()
    };
    let looked_at = || store.buckets_when_full.load(Ordering::Relaxed);
    assert!((0..5_000).all(|n| gets_a_place(n, if n % 50 == 7 { 1 } else { 3 })));
    assert_eq!(looked_at(), 256);
    assert!(!(5_000..5_010).any(|n| gets_a_place(n, 1)));
    assert_eq!(looked_at(), 8);
    // One state in fifty is idle now.
    clock.advance(HOUR);
    let (mut held, mut most) = (0, 0);
    for n in 5_010..7_010 {
        held += usize::from(gets_a_place(n, 3));
        most = most.max(looked_at());
    }
    assert_eq!((held, looked_at()), (100, 8));
    assert!(most > 8, "{most}");
}

#[test]
fn batches_make_room_in_full_buckets() {
    let ((store, _), limit) = (store(100_000), limit(3));
    for n in 0..1_000 {
        let keys = [n.to_string(), format!("beside {n}")];
        let checks = keys.each_ref().map(|key| Check { limit: &limit, key, cost: 1 });
        let verdict = store.apply_now(&Batch::new(&checks).expect("distinct"));
        assert!(verdict.expect("decides").allowed());
    }
    let in_shards = store.capacity.in_shards.used();
    assert!(in_shards < 1_000, "{in_shards}");
}

#[test]
fn settled_reservations_crowd_out_no_keys_are_bounded_and_are_swept() {
    let (store, clock) = store(20);
    let reserve = |id: u128, op: Op, cost: u64| {
        try_ask(&store, &id.to_string(), op, cost, |batch| batch.id(ReservationId::new(id)))
    };
    let counts = || (store.len(), store.reservations());
    for id in 0..20 {
        assert!(reserve(id, Op::Acquire, 1).expect("a place").allowed());
        let _ = reserve(id, Op::Settle, 0).expect("held");
    }
    assert_eq!(counts(), (0, 20));
    let full = reserve(20, Op::Acquire, 1).expect_err("no place");
    assert_eq!(full, MemoryError::Full { capacity: 20 });
    assert_eq!(
        full.to_string(),
        "the store has no room for another reservation: it is full with 20; give it room for more \
         (Builder::reservations)"
    );
    assert_eq!(counts(), (0, 20), "an error charges nothing");
    assert!((0..20).all(|n| ask(&store, &format!("new {n}"), Op::Acquire, 1) == (true, 2)));
    assert_eq!((counts(), store.overflowed()), ((20, 20), 0));
    // Expired ones make room for others, and calls of any kind sweep them.
    clock.advance(HOUR);
    assert!((100..120).all(|id| reserve(id, Op::Acquire, 1).expect("a place").allowed()));
    clock.advance(HOUR);
    (0..100).for_each(|n| _ = ask(&store, &n.to_string(), Op::Peek, 1));
    assert_eq!(counts(), (0, 0));
}

/// Making a system clock panics where the system has no time.
#[test]
fn a_default_clock_is_made_when_a_store_is_built_that_uses_it() {
    thread_local!(static MADE: std::cell::Cell<usize> = const { std::cell::Cell::new(0) });
    fn manual_clock() -> ManualClock {
        MADE.set(MADE.get() + 1);
        ManualClock::default()
    }
    let given = MemoryStore::builder().clock(ManualClock::default());
    let builder = Builder { clock: Err(manual_clock), ..given };
    let given = builder.clone().capacity(10).clock(ManualClock::new(NOW)).build::<Gcra>();
    assert_eq!((given.clock.now(), MADE.get()), (NOW, 0));
    drop(builder.build::<Gcra>());
    assert_eq!(MADE.get(), 1);
}
