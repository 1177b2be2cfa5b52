//! Customers with numbers of their own: what is reserved, settled and held by them.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::store::Reservation as Record;
use ratelimit_core::{
    Algorithm as _, ErrorKind, Leased, LimitCosts, Limits, Numbers, RateLimiter, Reserved,
    StoreError as _,
};

use crate::common::{Memory, store};

/// A budget and places, each for a small customer; and the numbers of a large one.
fn limiter() -> (Arc<RateLimiter<Memory>>, ratelimit_core::ManualClock, Arc<Numbers>) {
    let limits = Limits::builder()
        .limit("tokens", "fixed-window 100/360d")
        .accepts_up_to("fixed-window 100000/360d debt 100000")
        .limit("jobs", "concurrency 1/1h")
        .accepts_up_to("concurrency 50/1h")
        .build()
        .expect("limits");
    let (store, clock) = store(|builder| builder);
    let limiter = RateLimiter::new(limits, store);
    let large = [("tokens", "1000/360d debt 50"), ("jobs", "3/1h")];
    let large = limiter.limits().parse_numbers(large).expect("numbers");
    (Arc::new(limiter), clock, Arc::new(large))
}

/// What a customer has left of both.
fn left(limiter: &RateLimiter<Memory>, numbers: &Numbers, caller: &str) -> [u64; 2] {
    let peek = limiter.request(caller).numbers(numbers).cost(0).peek_now().expect("decides");
    let named = limiter.named(&peek).numbers(numbers);
    ["tokens", "jobs"].map(|name| named.by_name(name).expect("it applies").remaining)
}

#[tokio::test]
async fn a_reservation_is_extended_and_settled_by_the_numbers_that_it_was_made_with() {
    let (limiter, _clock, large) = limiter();
    let costs = |tokens| LimitCosts::from(1).with("tokens", tokens);
    let by = Some(Arc::clone(&large));
    let Ok(Reserved::Granted(mut reservation)) = limiter.reserve_by(by, "a", costs(400)).await
    else {
        panic!("400 of 1,000 fit");
    };
    assert_eq!(left(&limiter, &large, "a"), [600, 2]);
    assert!(reservation.extend(costs(900)).await.expect("decides").allowed());
    assert!(!reservation.extend(costs(1_001)).await.expect("decides").allowed());
    assert_eq!(left(&limiter, &large, "a"), [100, 2]);
    // Beyond the capacity of the large customer, and within its debt.
    let settled = reservation.settle(costs(1_020)).await.expect("settles");
    assert_eq!((settled.owed(), settled.forgiven()), (20, 0));
    assert_eq!(left(&limiter, &large, "a"), [0, 3]);
    // Dropped, it is settled at the estimate.
    let by = Some(Arc::clone(&large));
    let reserved = limiter.reserve_by(by, "b", costs(700)).await;
    assert!(matches!(&reserved, Ok(Reserved::Granted(_))));
    drop(reserved);
    assert_eq!(left(&limiter, &large, "b"), [300, 3]);
    assert!(matches!(limiter.reserve("c", costs(400)).await, Ok(Reserved::Denied(_))));
}

#[tokio::test]
async fn a_late_settlement_charges_the_rest_by_the_numbers_of_the_customer() {
    let (limiter, clock, large) = limiter();
    let only = |tokens| LimitCosts::from(1).with("tokens", tokens);
    let by = Some(Arc::clone(&large));
    let Ok(Reserved::Granted(reservation)) = limiter.reserve_by(by, "a", only(400)).await else {
        panic!("400 of 1,000 fit");
    };
    clock.advance(Duration::from_micros(Record::LIFE_US + 1));
    let late = reservation.settle(only(900)).await.expect_err("it has ended");
    assert_eq!(late.kind(), ErrorKind::Ended);
    assert_eq!(left(&limiter, &large, "a"), [100, 3]);
}

#[test]
fn places_are_held_by_the_numbers_of_the_customer() {
    let jobs =
        Limits::builder().limit("jobs", "concurrency 1/1h").accepts_up_to("concurrency 9/1h");
    let limiter = RateLimiter::new(jobs.build().expect("limits"), store(|builder| builder).0);
    let large = limiter.limits().parse_numbers([("jobs", "3/1h")]).expect("numbers");
    let lease = |caller| limiter.request(caller).numbers(&large).lease_now().expect("decides");
    let leases = [lease("a"), lease("a"), lease("a")];
    assert!(leases.iter().all(|lease| matches!(lease, Leased::Granted(_))));
    assert!(matches!(lease("a"), Leased::Denied(_)));
    // A customer without numbers of its own has one place.
    let small = || limiter.request("b").lease_now().expect("decides");
    let held = small();
    assert!(matches!((&held, small()), (Leased::Granted(_), Leased::Denied(_))));
    drop(leases);
    let peek = limiter.request("a").numbers(&large).cost(0).peek_now().expect("decides");
    assert_eq!(peek.remaining(), 3);
}

#[test]
fn numbers_belong_to_the_limits_that_they_were_built_from() {
    let (limiter, _clock, large) = limiter();
    let replaced = Limits::builder().limit("tokens", "fixed-window 100/30d");
    let replaced = replaced.accepts_up_to("fixed-window 100000/30d").build().expect("limits");
    let replaced = RateLimiter::new(replaced, store(|builder| builder).0);
    let error = replaced.request("a").numbers(&large).check_now().expect_err("another window");
    assert_eq!(error.kind(), ErrorKind::Invalid);
    let said = error.to_string();
    assert!(said.contains("limit \"tokens\"") && said.contains("another algorithm or window"));
    assert!(replaced.request("a").numbers(&large).validate().is_err());
    // Nothing was charged, and the limits that they belong to decide by them.
    assert_eq!(replaced.request("a").cost(0).peek_now().expect("decides").remaining(), 100);
    assert!(limiter.request("a").numbers(&large).cost(1).check_now().expect("decides").allowed());
    assert_eq!(large.iter().map(|own| own.algorithm().capacity()).sum::<u64>(), 1_003);
}
