//! Leases and reservations over the memory store, through the facade.

use std::time::Duration;

use ratelimit_core::store::Reservation;
use ratelimit_core::{AnyAlgorithm, ErrorKind, Lease, Leased, ReservationId, StoreError};
use ratelimit_memory::{MemoryError, MemoryStore};

use crate::common::{Limiter, limit, limiter};

const ID: ReservationId = ReservationId::new(0x2a);
const SLOTS: &str = "concurrency 2/30s";

type Held<'l> =
    Lease<'l, MemoryStore<AnyAlgorithm, ratelimit_core::ManualClock>, AnyAlgorithm, str>;

fn reserve_one<'l>(limiter: &'l Limiter, caller: &'l str) -> Held<'l> {
    match limiter.request(caller).lease_now().expect("decides") {
        Leased::Granted(lease) => lease,
        Leased::Denied(verdict) => panic!("denied: {verdict:?}"),
    }
}

fn remaining(limiter: &Limiter) -> u64 {
    limiter.request("a").cost(0).peek_now().expect("decides").remaining()
}

#[test]
fn a_lease_is_released_when_it_is_dropped_and_lives_as_long_as_it_is_renewed() {
    let (limiter, clock) = limiter([limit("slots", SLOTS)], |builder| builder);
    let (first, second) = (reserve_one(&limiter, "a"), reserve_one(&limiter, "a"));
    assert_ne!(first.id(), second.id());
    assert_eq!(second.verdict().remaining(), 0);
    let Leased::Denied(busy) = limiter.request("a").lease_now().expect("decides") else {
        panic!("none is free")
    };
    assert_eq!(busy.retry_after(), Some(Duration::from_secs(30)));
    drop(first);
    assert_eq!(remaining(&limiter), 1);
    for _ in 0..3 {
        clock.advance(Duration::from_secs(29));
        let _ = second.renew_now().expect("in time");
        assert_eq!(remaining(&limiter), 1);
    }
    clock.advance(Duration::from_secs(30));
    let late = second.renew_now().expect_err("it is over");
    let id = second.id().expect("a lease has one");
    assert_eq!(late.kind(), ErrorKind::Ended);
    let said = late.to_string();
    assert!(said.starts_with(&format!("limit \"slots\": {id} has no reservation")), "{said}");
    assert!(said.contains("renew the next one before it ends"), "{said}");
    // Another lease has its place, and keeps it.
    assert!(limiter.check_n_now("a", 2).expect("decides").allowed());
    drop(second);
    assert_eq!(remaining(&limiter), 0);
}

/// Another caller may have its place, whatever lives longer.
#[test]
fn a_renewal_is_refused_once_any_of_several_leases_has_ended_wherever_it_stands() {
    let all = ["concurrency 9/30s", "concurrency 9/60s", "fixed-window 9/d"];
    for order in [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]] {
        let limits = order.map(|place: usize| limit(&format!("l{place}"), all[place]));
        let (limiter, clock) = limiter(limits, |builder| builder);
        assert!(limiter.request("a").id(ID).check_now().expect("decides").allowed());
        clock.advance(Duration::from_secs(29));
        assert!(limiter.request("a").id(ID).renew_now().expect("all live").allowed());
        clock.advance(Duration::from_secs(30));
        let late = limiter.request("a").id(ID).renew_now().expect_err("one has ended");
        assert_eq!(late.kind(), ErrorKind::Ended, "{order:?}");
        assert!(late.to_string().starts_with("limit \"l0\": "), "{order:?}: {late}");
        // What lives on is settled.
        assert!(limiter.request("a").id(ID).cost(0).settle_now().expect("two live").allowed());
        assert_eq!(remaining(&limiter), 9, "{order:?}");
    }
}

#[test]
fn a_lease_is_refused_where_a_limit_that_applies_grants_none_and_charges_nothing() {
    let rate = || limit("rate", "gcra 5/s");
    let by_user = rate().by(["user"]).expect("a name");
    for (limits, refused) in [
        ([rate(), limit("slots", SLOTS)], true),
        ([limit("slots", SLOTS), rate()], true),
        ([limit("slots", SLOTS), rate().shadow()], false),
        ([limit("slots", SLOTS), by_user], false),
    ] {
        let (limiter, _) = limiter(limits, |builder| builder);
        let before = remaining(&limiter);
        match limiter.request("a").lease_now() {
            Err(error) => {
                assert!(refused && error.kind() == ErrorKind::Unsupported, "{error}");
                assert!(error.to_string().starts_with("limit \"rate\": "), "{error}");
                assert_eq!(remaining(&limiter), before);
            }
            Ok(leased) => assert!(!refused && matches!(leased, Leased::Granted(_))),
        }
    }
}

#[test]
fn what_the_limiter_reserved_under_an_id_of_its_own_is_forgotten_soon_after_its_settlement() {
    let (limiter, clock) = limiter([limit("slots", SLOTS)], |builder| builder.capacity(1_000));
    let grant = |caller: &str| drop(reserve_one(&limiter, caller));
    (0..100).for_each(|_| grant("a"));
    // Each has been released, and can be released again for a while.
    assert_eq!(limiter.store().reservations(), 100);
    clock.advance(Duration::from_micros(Reservation::REPEAT_US));
    (0..1_000).for_each(|n| grant(&n.to_string()));
    assert!(limiter.store().reservations() < 1_100);
    clock.advance(Duration::from_micros(Reservation::REPEAT_US));
    (0..2_000).for_each(|n| _ = limiter.check_now(&n.to_string()).expect("decides"));
    assert_eq!(limiter.store().reservations(), 0);
}

#[test]
fn without_room_for_a_reservation_a_lease_of_the_limiter_is_granted_and_ends_by_itself() {
    let (limiter, clock) = limiter([limit("slots", SLOTS)], |builder| builder.capacity(1));
    let (first, second) = (reserve_one(&limiter, "a"), reserve_one(&limiter, "a"));
    assert!(!first.verdict().is_unrecorded() && second.verdict().is_unrecorded());
    assert_eq!(limiter.store().unrecorded(), 1);
    assert!(matches!(
        limiter.request("b").id(ID).check_now(),
        Err(MemoryError::Full { capacity: 1 })
    ));
    assert_eq!(second.renew_now().expect_err("there is no record").kind(), ErrorKind::Ended);
    // A denial is the limit's, and needs no record.
    assert!(matches!(limiter.request("a").lease_now().expect("decides"), Leased::Denied(_)));
    drop(second);
    assert_eq!(remaining(&limiter), 0);
    drop(first);
    assert_eq!(remaining(&limiter), 1);
    clock.advance(Duration::from_secs(30));
    assert_eq!((remaining(&limiter), limiter.store().unrecorded()), (2, 1));
}
