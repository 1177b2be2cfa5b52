//! Leases and reservations over the memory store, through the facade.

use std::time::Duration;

use ratelimit_core::{
    Attempts, Concurrency, ErrorKind, FixedWindow, Gcra, Leased, Limit, Limits, ManualClock, Op,
    Policy, RateLimiter, Reservation, ReservationId, SlidingLog, StoreError, Timestamp,
};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_testkit::block_on;

type Limiter = RateLimiter<MemoryStore<Policy, ManualClock>>;

const ID: ReservationId = ReservationId::new(0x2a);

fn limiter<const N: usize>(limits: [(&str, Policy); N]) -> (Limiter, ManualClock) {
    let clock = ManualClock::new(Timestamp::ZERO);
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let limits = limits.map(|(name, policy)| Limit::new(name, policy).expect("a name"));
    (RateLimiter::new(Limits::new(limits).expect("limits"), store), clock)
}

fn tokens() -> (&'static str, Policy) {
    ("tokens", Gcra::new("1/s".parse().expect("a rate"), 100).expect("a limit").into())
}

fn daily() -> (&'static str, Policy) {
    ("daily", FixedWindow::new("100/d".parse().expect("a rate")).expect("a limit").into())
}

fn slots() -> (&'static str, Policy) {
    ("slots", Concurrency::new("2/30s".parse().expect("a rate")).expect("a limit").into())
}

fn described(refused: &MemoryError) -> (ErrorKind, String) {
    (refused.kind(), refused.to_string())
}

#[test]
fn a_lease_is_released_when_it_is_dropped() {
    let (limiter, _clock) = limiter([slots()]);
    let Leased::Granted(first) = limiter.lease_now("a").expect("decides") else {
        panic!("two are free")
    };
    let Leased::Granted(second) = limiter.lease_now("a").expect("decides") else {
        panic!("one is free")
    };
    assert_ne!(first.id(), second.id());
    assert_eq!(second.verdict().remaining(), 0);
    let Leased::Denied(busy) = limiter.lease_now("a").expect("decides") else {
        panic!("none is free")
    };
    assert_eq!(busy.retry_after(), Some(Duration::from_secs(30)));
    drop(first);
    assert_eq!(limiter.peek_now("a", 0).expect("decides").remaining(), 1);
    let Leased::Granted(_third) = limiter.lease_now("a").expect("decides") else {
        panic!("one is free again")
    };
    drop(second);
    assert_eq!(limiter.peek_now("a", 0).expect("decides").remaining(), 1);
}

#[test]
fn a_lease_lives_as_long_as_it_is_renewed() {
    let (limiter, clock) = limiter([slots()]);
    let Leased::Granted(lease) = limiter.request("a").cost(2).lease_now().expect("decides") else {
        panic!("two are free")
    };
    for _ in 0..3 {
        clock.advance(Duration::from_secs(29));
        let _ = lease.renew_now().expect("in time");
        assert!(!limiter.check_now("a").expect("decides").allowed());
    }
    clock.advance(Duration::from_secs(30));
    let (kind, text) = described(&lease.renew_now().expect_err("it is over"));
    let id = lease.id().expect("a lease has one");
    assert_eq!(kind, ErrorKind::Invalid);
    assert_eq!(
        text,
        format!(
            "{id} has no reservation for these identifiers: it never had one, it has expired, or it is for others"
        )
    );
    // Another lease has its place, and keeps it.
    assert!(limiter.check_n_now("a", 2).expect("decides").allowed());
    drop(lease);
    assert_eq!(limiter.peek_now("a", 0).expect("decides").remaining(), 0);
}

#[test]
fn a_reservation_is_committed_at_its_actual_cost() {
    let (limiter, _clock) = limiter([tokens(), daily()]);
    let reserved = limiter.reserve_now("a", ID, 40).expect("decides");
    assert_eq!((reserved.allowed(), reserved.remaining()), (true, 60));
    let committed = limiter.commit_now("a", ID, 12).expect("held");
    assert_eq!((committed.allowed(), committed.remaining()), (true, 88));
    assert_eq!(limiter.commit_now("a", ID, 12).expect("the same once more"), committed);
    let (kind, text) = described(&limiter.commit_now("a", ID, 13).expect_err("another cost"));
    assert_eq!(kind, ErrorKind::Invalid);
    assert_eq!(
        text,
        format!("limit \"tokens\": the reservation {ID} was settled at 12, and no longer changes")
    );
    assert_eq!(limiter.peek_now("a", 0).expect("decides").remaining(), 88);

    let story = async {
        let other = ReservationId::new(1);
        let _ = limiter.reserve("a", other, 10).await?;
        let _ = limiter.renew("a", other).await?;
        let _ = limiter.cancel("a", other).await?;
        limiter.release("a", other).await
    };
    assert_eq!(block_on(story).expect("held").remaining(), 88);
}

#[test]
fn a_commit_above_the_estimate_charges_at_most_all_that_is_left() {
    let (limiter, _clock) = limiter([daily()]);
    let _ = limiter.reserve_now("a", ID, 90).expect("decides");
    assert_eq!(limiter.commit_now("a", ID, 1_000).expect("held").remaining(), 0);
}

#[test]
fn a_refund_never_exceeds_the_capacity_and_counts_once_per_id() {
    let (limiter, _clock) = limiter([tokens(), daily()]);
    let _ = limiter.check_n_now("a", 5).expect("decides");
    let back = limiter.refund_now("a", 1_000).expect("has refunds");
    assert_eq!(back.decisions().iter().map(|d| d.remaining).collect::<Vec<_>>(), [100, 100]);
    // A repeated refund under one id is made once.
    let _ = limiter.check_n_now("a", 5).expect("decides");
    for _ in 0..2 {
        let refund = limiter.request("a").id(ID).cost(2).apply_now(Op::Refund);
        assert_eq!(refund.expect("has refunds").remaining(), 97);
    }
}

#[test]
fn an_error_says_what_is_wrong_and_charges_nothing() {
    let log = SlidingLog::new("5/s".parse().expect("a rate")).expect("a limit");
    let tries = FixedWindow::new("5/m".parse().expect("a rate")).expect("a limit");
    let (limiter, _clock) = limiter([daily(), slots()]);
    let (logged, _clock) = self::limiter([daily(), ("log", log.into())]);
    let (counted, _clock) = self::limiter([daily(), ("tries", Attempts::new(tries).into())]);
    let cannot_reserve = |name: &str| {
        format!(
            "limit {name:?}: its algorithm has no reservations; use gcra, token-bucket, fixed-window or \
                 concurrency, and count admitted requests"
        )
    };
    for (limiter, (op, id, cost), kind, text) in [
        (
            &limiter,
            (Op::Settle, Some(ID), 1),
            ErrorKind::Invalid,
            format!(
                "{ID} has no reservation for these identifiers: it never had one, it has expired, or it is for others"
            ),
        ),
        (
            &limiter,
            (Op::Acquire, Some(ID), 0),
            ErrorKind::Invalid,
            "limit \"daily\": a cost of 0 reserves nothing; reserve at least 1".to_owned(),
        ),
        (
            &limiter,
            (Op::Settle, None, 1),
            ErrorKind::Invalid,
            "a settle needs the id of the reservation".to_owned(),
        ),
        (
            &limiter,
            (Op::Renew, None, 1),
            ErrorKind::Invalid,
            "a renew needs the id of the reservation".to_owned(),
        ),
        (&logged, (Op::Acquire, Some(ID), 1), ErrorKind::Unsupported, cannot_reserve("log")),
        (&counted, (Op::Acquire, Some(ID), 1), ErrorKind::Unsupported, cannot_reserve("tries")),
    ] {
        let request = limiter.request("a").cost(cost);
        let request = id.map_or(request, |id| request.id(id));
        let refused = request.apply_now(op).expect_err("cannot be");
        assert_eq!(described(&refused), (kind, text));
        assert!(limiter.store().is_empty());
    }
    let _ = limiter.reserve_now("a", ID, 1).expect("decides");
    let pending = limiter.request("a").id(ID).apply_now(Op::Refund).expect_err("it waits");
    assert_eq!(
        described(&pending),
        (
            ErrorKind::Invalid,
            format!(
                "limit \"daily\": {ID} is the id of a reservation that is not settled; take another id"
            )
        )
    );
}

#[test]
fn a_denied_reservation_names_the_limit_and_reserves_nothing() {
    let (limiter, _clock) = limiter([tokens(), slots(), daily()]);
    let denied = limiter.reserve_now("a", ID, 3).expect("decides");
    assert_eq!(denied.denied_by().collect::<Vec<_>>(), [1]);
    assert!(limiter.store().is_empty());
    assert!(limiter.commit_now("a", ID, 0).is_err());
    assert!(limiter.reserve_now("a", ID, 2).expect("decides").allowed());
    assert_eq!((limiter.store().len(), limiter.store().reservations()), (3, 3));
}

fn logins() -> (&'static str, Policy) {
    ("logins", Gcra::new("5/m".parse().expect("a rate"), 5).expect("a limit").into())
}

fn limiter_of(capacity: usize, (name, policy): (&str, Policy)) -> (Limiter, ManualClock) {
    let clock = ManualClock::new(Timestamp::ZERO);
    let store = MemoryStore::builder().capacity(capacity).clock(clock.clone()).build();
    let limits = Limits::new([Limit::new(name, policy).expect("a name")]).expect("limits");
    (RateLimiter::new(limits, store), clock)
}

#[test]
fn settled_reservations_crowd_out_no_keys() {
    let (limiter, _clock) = limiter_of(1_000, logins());
    for id in (0..999).map(ReservationId::new) {
        assert!(limiter.reserve_now("busy", id, 1).expect("room").allowed());
        let _ = limiter.commit_now("busy", id, 0).expect("reserved");
    }
    assert_eq!((limiter.store().len(), limiter.store().reservations()), (0, 999));
    for n in 0..100 {
        let verdict = limiter.check_now(&format!("user {n}")).expect("decides");
        assert_eq!((verdict.allowed(), verdict.remaining()), (true, 4));
    }
    assert_eq!(limiter.store().overflowed(), 0);
}

#[test]
fn what_the_limiter_reserved_under_an_id_of_its_own_is_forgotten_soon_after_its_settlement() {
    let (limiter, clock) = limiter_of(1_000, slots());
    let grant = |caller: &str| match limiter.lease_now(caller).expect("decides") {
        Leased::Granted(lease) => lease.id().expect("a lease has one"),
        Leased::Denied(verdict) => panic!("denied: {verdict:?}"),
    };
    let ids: Vec<_> = (0..100).map(|_| grant("a")).collect();
    // Each has been released, and can be released again for a while.
    assert_eq!(limiter.store().reservations(), 100);
    clock.advance(Duration::from_micros(Reservation::REPEAT_US - 1));
    let _ = limiter.commit_now("a", ids[0], 0).expect("released again");
    clock.advance(Duration::from_micros(1));
    assert_eq!(
        limiter.commit_now("a", ids[0], 0).expect_err("forgotten").kind(),
        ErrorKind::Invalid
    );
    for n in 0..1_000 {
        let _ = grant(&n.to_string());
    }
    assert!(limiter.store().reservations() < 1_100);
    clock.advance(Duration::from_micros(Reservation::REPEAT_US));
    for n in 0..2_000 {
        let _ = limiter.check_now(&n.to_string()).expect("decides");
    }
    assert_eq!(limiter.store().reservations(), 0);
}

#[test]
fn without_room_for_a_reservation_a_lease_of_the_limiter_is_granted_and_ends_by_itself() {
    let (limiter, clock) = limiter_of(1, slots());
    let Leased::Granted(first) = limiter.lease_now("a").expect("decides") else {
        panic!("two are free")
    };
    assert!(!first.verdict().is_unrecorded());
    let Leased::Granted(second) = limiter.lease_now("a").expect("decides") else {
        panic!("one is free")
    };
    assert!(second.verdict().is_unrecorded());
    assert_eq!(limiter.store().unrecorded(), 1);
    assert!(matches!(limiter.reserve_now("b", ID, 1), Err(MemoryError::Full { capacity: 1 })));
    assert_eq!(second.renew_now().expect_err("there is no record").kind(), ErrorKind::Invalid);
    // A denial is the limit's, and needs no record.
    assert!(matches!(limiter.lease_now("a").expect("decides"), Leased::Denied(_)));
    drop(second);
    assert_eq!(limiter.peek_now("a", 0).expect("decides").remaining(), 0);
    drop(first);
    assert_eq!(limiter.peek_now("a", 0).expect("decides").remaining(), 1);
    clock.advance(Duration::from_secs(30));
    assert_eq!(limiter.peek_now("a", 0).expect("decides").remaining(), 2);
    assert_eq!(limiter.store().unrecorded(), 1);
}
