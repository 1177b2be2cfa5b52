//! The cap on the entries of logs: the count is exact, the cap is never exceeded, and no key's limit is reset
//! for it.

use std::time::Duration;

use ratelimit_core::{
    Attempts, Concurrency, ErrorKind, FixedWindow, Gcra, ManualClock, Op, Policy, Rate,
    RateLimiter, ReservationId, SlidingLog, Stack, StoreError, WindowLog,
};

use super::*;

/// The cap of most of these tests. Two of the entries are for shared states.
const MOST: usize = 32;
const OWN: usize = 30;

fn rate(count: u64) -> Rate {
    Rate::per_us(count, 3_600_000_000).expect("a rate")
}

fn store<A: InMemory>(most: usize) -> (MemoryStore<A, ManualClock>, ManualClock) {
    let clock = ManualClock::new(Timestamp::from_us(1_000_000).expect("a time"));
    let builder = MemoryStore::builder().entries(most).shards(4).clock(clock.clone());
    (builder.build(), clock)
}

fn limiter<A: InMemory>(
    algorithm: A,
) -> (RateLimiter<MemoryStore<A, ManualClock>, A>, ManualClock) {
    let (store, clock) = store(MOST);
    let limits = Limits::new([Limit::new("l", algorithm).expect("a name")]).expect("limits");
    (RateLimiter::new(limits, store), clock)
}

/// The number of entries in shards, without those of shared states.
fn kept<A: InMemory, C: Clock>(store: &MemoryStore<A, C>) -> usize {
    let in_shard =
        |shard: &Mutex<Shard<A::State>>| lock(shard).states().map(A::entries_in).sum::<usize>();
    store.shards.iter().map(in_shard).sum()
}

fn is_exact<A: InMemory, C: Clock>(store: &MemoryStore<A, C>) {
    assert_eq!(store.capacity.entries(), kept(store));
    assert!(store.entry_count() <= store.capacity.most_entries());
}

#[test]
fn a_key_that_finds_no_room_for_an_entry_gets_an_error_and_is_charged_nothing() {
    let (limiter, clock) = limiter(SlidingLog::new(rate(100)).expect("a limit"));
    for _ in 0..OWN {
        assert!(limiter.check_now("a").expect("room").allowed());
        clock.advance(Duration::from_micros(1));
    }
    let before = limiter.peek_now("a", 1).expect("decides");
    let full = limiter.check_now("a").expect_err("no room");
    assert_eq!(full, MemoryError::Entries { most: MOST });
    assert_eq!(full.kind(), ErrorKind::Unavailable);
    assert_eq!(
        full.to_string(),
        "the logs of the store are full with 32 entries; give the store more entries, or use limits \
         that keep none, such as gcra or sliding-counter"
    );
    assert_eq!(limiter.peek_now("a", 1).expect("decides"), before);
    // Denials and refunds need no room.
    assert!(!limiter.check_n_now("a", 71).expect("decides").allowed());
    assert_eq!(limiter.refund_now("a", 1).expect("decides").remaining(), 71);
    is_exact(limiter.store());
    // One more entry, and then another charge of the same moment.
    assert_eq!(limiter.check_now("a").expect("room").remaining(), 70);
    assert_eq!(limiter.check_now("a").expect("the same entry").remaining(), 69);
    assert_eq!(limiter.store().entry_count(), OWN);
    let _ = limiter.reset_now("a").expect("decides");
    assert_eq!(limiter.store().entry_count(), 0);
}

#[test]
fn new_keys_share_a_bounded_state_and_other_keys_keep_their_limits() {
    let (limiter, clock) = limiter(WindowLog::new(rate(5)).expect("a limit"));
    for n in 0..OWN {
        assert!(limiter.check_now(&(n % 6).to_string()).expect("room").allowed());
    }
    for n in 0..2 {
        assert!(limiter.check_now(&format!("new {n}")).expect("shared room").allowed());
    }
    let full = limiter.check_now("new 2").expect_err("no room");
    assert_eq!(full, MemoryError::Entries { most: MOST });
    assert_eq!((limiter.store().entry_count(), limiter.store().overflowed()), (MOST, 3));
    assert_eq!(limiter.store().len(), 6);
    for n in 0..6 {
        assert!(!limiter.check_now(&n.to_string()).expect("decides").allowed());
    }
    is_exact(limiter.store());
    // Expired states make room, even shared ones.
    clock.advance(Duration::from_hours(1));
    for n in 0..1_000 {
        assert!(limiter.check_now(&format!("later {n}")).expect("room").allowed());
        clock.advance(Duration::from_mins(10));
    }
    assert_eq!(limiter.store().overflowed(), 3);
    is_exact(limiter.store());
}

#[test]
fn a_lease_needs_an_entry_until_its_release_and_a_repeated_id_needs_none() {
    let (limiter, clock) = limiter(Concurrency::new(rate(100)).expect("a limit"));
    let lease = |id: usize| limiter.reserve_now("a", ReservationId::new(id as u128), 1);
    for id in 0..OWN {
        assert!(lease(id).expect("room").allowed());
        clock.advance(Duration::from_micros(1));
    }
    assert_eq!(lease(OWN).expect_err("no room"), MemoryError::Entries { most: MOST });
    assert!(lease(7).expect("done already").allowed());
    // A renewed lease becomes the newest: one entry goes, and one comes.
    assert!(limiter.renew_now("a", ReservationId::new(3)).expect("held").allowed());
    clock.advance(Duration::from_micros(1));
    let _ = limiter.commit_now("a", ReservationId::new(5), 0).expect("held");
    assert!(lease(OWN).expect("room").allowed());
    assert_eq!(limiter.store().entry_count(), OWN);
    is_exact(limiter.store());
}

#[test]
fn every_log_of_a_stack_needs_an_entry_or_the_stack_is_not_charged() {
    let log = |count| SlidingLog::new(rate(count)).expect("a limit").into();
    let fixed = FixedWindow::new(rate(1_000)).expect("a limit").into();
    let stack = Stack::<Policy>::new([log(90), fixed, log(100)]).expect("a stack");
    let (limiter, clock) = limiter(stack);
    for _ in 0..OWN / 2 {
        assert!(limiter.check_now("a").expect("room").allowed());
        clock.advance(Duration::from_micros(1));
    }
    assert_eq!(limiter.store().entry_count(), OWN);
    assert!(limiter.check_now("a").is_err());
    assert_eq!(limiter.peek_now("a", 0).expect("decides").remaining(), 75);
    is_exact(limiter.store());
}

#[test]
fn attempts_are_counted_until_the_cap() {
    let attempts = Attempts::new(SlidingLog::new(rate(40)).expect("a limit"));
    let (limiter, clock) = limiter(attempts);
    for n in 0..50 {
        assert_eq!(limiter.check_now("a").is_ok(), n < OWN);
        clock.advance(Duration::from_micros(1));
    }
    is_exact(limiter.store());
}

#[test]
fn many_threads_never_exceed_the_cap_and_are_admitted_no_more_than_the_limit() {
    let (limiter, clock) = limiter(SlidingLog::new(rate(20)).expect("a limit"));
    let admitted: Vec<_> = (0..10).map(|_| AtomicUsize::new(0)).collect();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for n in 0..1_000 {
                    let verdict = limiter.check_now(&(n % 10).to_string());
                    let allowed = verdict.is_ok_and(|verdict| verdict.allowed());
                    admitted[n % 10].fetch_add(usize::from(allowed), Ordering::Relaxed);
                    clock.advance(Duration::from_micros(1));
                    assert!(limiter.store().entry_count() <= MOST);
                }
            });
        }
    });
    is_exact(limiter.store());
    assert!(admitted.iter().all(|admitted| admitted.load(Ordering::Relaxed) <= 40));
}

/// All kinds of limits under the same names, all operations, alone and in batches, with ids and without.
#[test]
fn the_entry_count_is_exact_after_every_operation() {
    let (store, clock) = store::<Policy>(MOST / 2);
    let policies: Vec<Policy> = vec![
        SlidingLog::new(rate(9)).expect("a limit").into(),
        WindowLog::new(rate(9)).expect("a limit").into(),
        Concurrency::new(rate(9)).expect("a limit").into(),
        Gcra::new(rate(9), 9).expect("a limit").into(),
        Attempts::new(SlidingLog::new(rate(3)).expect("a limit")).into(),
        FixedWindow::new(rate(9)).expect("a limit").into(),
    ];
    let ops = [
        Op::Acquire,
        Op::Acquire,
        Op::Acquire,
        Op::Force,
        Op::Refund,
        Op::Reset,
        Op::Peek,
        Op::Settle,
        Op::Renew,
    ];
    let mut random = 88_172_645_463_325_252_u64;
    let mut next = |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        usize::try_from(random >> 33).expect("31 bits") % below
    };
    let mut refused = 0;
    for _ in 0..20_000 {
        let limits: Vec<_> = (0..=next(3))
            .map(|n| Limit::new(["x", "y", "z"][n], policies[next(6)]).expect("a name"))
            .collect();
        let key = next(30).to_string();
        let cost = next(4) as u64;
        let checks: Vec<_> = limits.iter().map(|limit| Check { limit, key: &key, cost }).collect();
        let mut batch = Batch::new(&checks).expect("distinct").op(ops[next(ops.len())]);
        if next(3) == 0 {
            batch = batch.id(ReservationId::new(next(20) as u128));
        }
        if next(8) == 0 {
            batch = batch.now(Now::At(clock.now()));
        }
        let answer = store.apply_now(&batch);
        refused += usize::from(matches!(answer, Err(MemoryError::Entries { .. })));
        is_exact(&store);
        assert_eq!(store.len(), counted(&store));
        clock.advance(Duration::from_secs(next(120) as u64));
    }
    assert!(refused > 100 && store.overflowed() > 10, "{refused}, {}", store.overflowed());
}
