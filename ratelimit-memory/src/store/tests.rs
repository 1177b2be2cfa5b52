//! What only the store itself can see: places, sweeping, and the behaviour at capacity.

mod entries;

use super::builder::ClockSource;
use super::*;
use ratelimit_core::{FixedWindow, Gcra, Limits, ManualClock, RateLimiter, ReservationId};
use std::time::Duration;

mod growth;
mod hashing;
mod meeting;
mod untrusted_keys;

fn limiter(capacity: usize) -> (RateLimiter<MemoryStore<Gcra, ManualClock>, Gcra>, ManualClock) {
    let clock = ManualClock::new(Timestamp::from_us(1_000_000).expect("a time"));
    let gcra = Gcra::new("1/s".parse().expect("a rate"), 3).expect("a limit");
    let limits = Limits::new([Limit::new("l", gcra).expect("a name")]).expect("limits");
    let store = MemoryStore::builder().capacity(capacity).shards(4).clock(clock.clone());
    (RateLimiter::new(limits, store.build()), clock)
}

/// The number of states in buckets and shards.
fn counted<A: InMemory, C: Clock>(store: &MemoryStore<A, C>) -> usize {
    let in_shards = store.shards.iter().map(|shard| lock(shard).len()).sum::<usize>();
    in_shards + store.table.as_ref().map_or(0, CuckooTable::len)
}

#[test]
fn at_capacity_new_keys_share_a_state() {
    let (limiter, _clock) = limiter(10);
    for n in 0..10 {
        assert!(limiter.check_now(&n.to_string()).expect("decides").allowed());
    }
    let shared: Vec<_> =
        (10..15).map(|n| limiter.check_now(&n.to_string()).expect("decides").allowed()).collect();
    assert_eq!(shared, [true, true, true, false, false]);
    assert_eq!((limiter.store().len(), limiter.store().overflowed()), (10, 5));
    // Keys with states of their own are unaffected.
    assert_eq!(limiter.peek_now("3", 0).expect("decides").remaining(), 2);
    // A reset by one key that uses the shared state does not free all others.
    let _ = limiter.reset_now("11").expect("decides");
    assert!(!limiter.check_now("12").expect("decides").allowed());
}

#[test]
fn expired_keys_make_room_without_a_sweeper() {
    let (limiter, clock) = limiter(10);
    for n in 0..10 {
        let _ = limiter.check_now(&n.to_string()).expect("decides");
    }
    clock.advance(Duration::from_secs(1));
    for n in 10..1000 {
        assert!(limiter.check_now(&n.to_string()).expect("decides").allowed());
        clock.advance(Duration::from_secs(1));
    }
    assert!(limiter.store().len() <= 10);
    assert_eq!(limiter.store().overflowed(), 0);
}

#[test]
fn a_full_store_without_idle_states_sweeps_little_until_some_are_idle() {
    let (limiter, clock) = limiter(5_000);
    let ask = |n: u32, cost: u64| {
        let _ = limiter.check_n_now(&n.to_string(), cost).expect("decides");
        limiter.store().state("l", &n.to_string()).is_some()
    };
    let looked_at = || limiter.store().buckets_when_full.load(Ordering::Relaxed);
    assert!((0..5_000).all(|n| ask(n, if n % 50 == 7 { 1 } else { 3 })));
    assert_eq!(looked_at(), 256);
    assert!(!(5_000..5_010).any(|n| ask(n, 1)));
    assert_eq!(looked_at(), 8);
    // One state in fifty is idle now.
    clock.advance(Duration::from_secs(1));
    let (mut held, mut most) = (0, 0);
    for n in 5_010..7_010 {
        held += usize::from(ask(n, 1));
        most = most.max(looked_at());
    }
    assert_eq!((held, looked_at()), (100, 8));
    assert!(most > 8, "{most}");
}

#[test]
fn a_small_full_store_is_searched_whole_for_idle_states() {
    let (limiter, clock) = limiter(10);
    for n in 0..10 {
        let _ = limiter.check_n_now(&n.to_string(), if n == 7 { 1 } else { 3 }).expect("decides");
    }
    for n in 10..100 {
        let _ = limiter.check_now(&n.to_string()).expect("decides");
    }
    clock.advance(Duration::from_secs(1));
    let _ = limiter.check_now("one place is free").expect("decides");
    assert!(limiter.store().state("l", "one place is free").is_some());
    assert!(limiter.store().state("l", "7").is_none());
}

#[test]
fn a_denial_a_peek_a_reset_and_a_refund_take_no_place() {
    let (limiter, _clock) = limiter(10);
    assert!(!limiter.check_n_now("a", 4).expect("decides").allowed());
    let _ = limiter.peek_now("b", 1).expect("decides");
    let _ = limiter.reset_now("c").expect("decides");
    let _ = limiter.refund_now("d", 1).expect("decides");
    assert!(limiter.store().is_empty());
    let _ = limiter.check_now("a").expect("decides");
    assert_eq!(limiter.store().len(), 1);
    let _ = limiter.reset_now("a").expect("decides");
    assert!(limiter.store().is_empty());
}

/// Makes and settles a reservation per id, so that only the reservation is left.
fn reserve_and_settle(
    limiter: &RateLimiter<MemoryStore<Gcra, ManualClock>, Gcra>,
    ids: std::ops::Range<u128>,
) {
    for id in ids.map(ratelimit_core::ReservationId::new) {
        let key = id.to_string();
        assert!(limiter.reserve_now(&key, id, 1).expect("a place").allowed());
        let _ = limiter.commit_now(&key, id, 0).expect("held");
    }
}

#[test]
fn reservations_are_counted_and_swept() {
    let (limiter, clock) = limiter(100);
    reserve_and_settle(&limiter, 0..20);
    assert_eq!((limiter.store().len(), limiter.store().reservations()), (0, 20));
    clock.advance(Duration::from_secs(3_600));
    for n in 0..100 {
        let _ = limiter.peek_now(&n.to_string(), 1).expect("decides");
    }
    assert_eq!((limiter.store().len(), limiter.store().reservations()), (0, 0));
}

#[test]
fn expired_reservations_make_room_for_others() {
    let (limiter, clock) = limiter(12);
    reserve_and_settle(&limiter, 0..12);
    clock.advance(Duration::from_secs(3_600));
    for n in 0..12 {
        let id = ratelimit_core::ReservationId::new(1_000 + n as u128);
        let request = limiter.request(["a", "b", "c", "d"][n % 4]).id(id);
        let _ = request.apply_now(ratelimit_core::Op::Acquire).expect("a place");
        clock.advance(Duration::from_secs(1_800));
    }
}

#[test]
fn a_reservation_without_a_place_is_an_error_and_charges_nothing() {
    use ratelimit_core::{ErrorKind, ReservationId, StoreError};
    let (limiter, clock) = limiter(1);
    assert!(limiter.reserve_now("a", ReservationId::new(1), 1).expect("a place").allowed());
    let before = limiter.peek_now("a", 0).expect("decides");
    let full = limiter.reserve_now("a", ReservationId::new(2), 1).expect_err("no place");
    assert_eq!(full, MemoryError::Full { capacity: 1 });
    assert_eq!(full.kind(), ErrorKind::Unavailable);
    assert_eq!(
        full.to_string(),
        "the store has no place for another reservation: it is full with 1; give it room for more \
         (Builder::reservations)"
    );
    assert_eq!(limiter.peek_now("a", 0).expect("decides"), before);
    assert_eq!((limiter.store().len(), limiter.store().reservations()), (1, 1));
    // It can be settled, and counts until the hour is over.
    let _ = limiter.commit_now("a", ReservationId::new(1), 0).expect("held");
    assert!(limiter.reserve_now("a", ReservationId::new(2), 1).is_err());
    clock.advance(Duration::from_secs(3_600));
    assert!(limiter.reserve_now("a", ReservationId::new(2), 1).expect("a place").allowed());
}

#[test]
fn states_written_at_a_given_time_expire_by_the_stores_clock() {
    let (limiter, clock) = limiter(10);
    let at = |us| Timestamp::from_us(us).expect("a time");
    let _ =
        limiter.request("a").at(at(5_000_000)).apply_now(ratelimit_core::Op::Acquire).expect("ok");
    for _ in 0..100 {
        let _ = limiter
            .request("b")
            .at(at(9_000_000_000))
            .apply_now(ratelimit_core::Op::Peek)
            .expect("ok");
    }
    assert_eq!(limiter.store().len(), 1);
    clock.advance(Duration::from_secs(3_602));
    for n in 0..100 {
        let _ = limiter.peek_now(&n.to_string(), 1).expect("decides");
    }
    assert!(limiter.store().is_empty());
}

#[test]
fn a_batch_that_sweeps_one_of_its_own_keys_still_charges_all() {
    let clock = ManualClock::default();
    let store: MemoryStore<Gcra, _> =
        MemoryStore::builder().shards(1).capacity(8).clock(clock.clone()).build();
    let gcra = Gcra::new("1/s".parse().expect("a rate"), 3).expect("a limit");
    let limit = Limit::new("l", gcra).expect("a name");
    for round in 0..100 {
        // Some of these keys have expired, some are new, and the sweep reaches all of them.
        let keys: Vec<_> = (round..round + 5).map(|n: u32| (n * 7 % 13).to_string()).collect();
        let checks: Vec<_> = keys.iter().map(|key| Check { limit: &limit, key, cost: 1 }).collect();
        let batch = Batch::new(&checks).expect("distinct");
        let free = store.apply_now(&batch.op(ratelimit_core::Op::Peek)).expect("decides");
        let charged = store.apply_now(&batch).expect("decides");
        assert_eq!(free, charged);
        let held = keys.iter().filter(|key| store.state("l", key).is_some()).count();
        let counted = counted(&store);
        assert_eq!(store.len(), counted, "round {round}: {held} of the batch are held");
        assert!(store.len() <= 8);
        clock.advance(Duration::from_millis(u64::from(round % 3) * 700));
    }
}

#[test]
fn many_threads_are_admitted_exactly_the_limit() {
    let (limiter, _clock) = limiter(1000);
    let admitted = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| {
                for n in 0..2_000 {
                    let verdict = limiter.check_now(&(n % 10).to_string()).expect("decides");
                    admitted.fetch_add(usize::from(verdict.allowed()), Ordering::Relaxed);
                }
            });
        }
    });
    assert_eq!(admitted.load(Ordering::Relaxed), 30);
}

/// A shard whose lock a panic has poisoned is swept in passing like any other.
#[test]
fn a_shard_in_which_a_call_panicked_is_swept() {
    let clock = ManualClock::default();
    let store: MemoryStore<FixedWindow, _> =
        MemoryStore::builder().shards(4).clock(clock.clone()).build();
    let window = FixedWindow::new("1/s".parse().expect("a rate")).expect("a limit");
    let limit = Limit::new("l", window).expect("a name");
    for n in 0..100_u128 {
        let (key, id) = (n.to_string(), ReservationId::new(n));
        let check = Check { limit: &limit, key: &key, cost: 1 };
        assert!(store.apply_now(&Batch::one(&check).id(id)).expect("a place").allowed());
    }
    std::thread::scope(|scope| {
        let panicking = |reservation: fn(&MemoryStore<FixedWindow, ManualClock>)| {
            let store = &store;
            let panicked = scope.spawn(move || reservation(store)).join();
            assert!(panicked.is_err());
        };
        panicking(|store| {
            let _held: Vec<_> = store.shards.iter().map(lock).collect();
            std::panic::resume_unwind(Box::new(()));
        });
        panicking(|store| {
            let _held: Vec<_> = store.reservations.iter().map(lock).collect();
            std::panic::resume_unwind(Box::new(()));
        });
    });
    clock.advance(Duration::from_hours(2));
    for _ in 0..4 {
        store.sweep_elsewhere(clock.now());
    }
    assert_eq!((store.len(), store.reservations()), (0, 0));
}

/// Making a system clock panics where the system has no time.
#[test]
fn an_unused_clock_is_not_made() {
    let clock = ClockSource::Made(|| panic!("there is no time here"));
    let builder: Builder = Builder { clock, ..MemoryStore::builder() };
    let builder = builder.capacity(10).entries(10).shards(2).clone();
    let store = builder.clock(ManualClock::new(Timestamp::ZERO)).build::<Gcra>();
    assert_eq!((store.clock.now(), store.len()), (Timestamp::ZERO, 0));
}

#[test]
fn a_clock_is_made_when_the_store_is_built() {
    fn counted() -> ManualClock {
        MADE.with(|made| made.set(made.get() + 1));
        ManualClock::new(Timestamp::ZERO)
    }
    thread_local!(static MADE: std::cell::Cell<usize> = const { std::cell::Cell::new(0) });
    let Builder { capacity, reservations, entries, shards, .. } = MemoryStore::builder();
    let clock = ClockSource::Made(counted);
    let builder = Builder { capacity, reservations, entries, shards, clock };
    assert_eq!(MADE.get(), 0);
    drop(builder.build::<Gcra>());
    assert_eq!(MADE.get(), 1);
}
