//! One check of one limit by a borrowed key that is already held allocates nothing.
//!
//! The crate `allocation-counter` puts a counting allocator under this whole test.

#![allow(clippy::expect_used)]

use std::hint::black_box;

use allocation_counter::{AllocationInfo, measure};
use ratelimit_core::{Gcra, Limit, Limits, Policy, RateLimiter};
use ratelimit_memory::MemoryStore;

const HELD_KEY: &str = "203.0.113.77";

fn gcra() -> Gcra {
    Gcra::new("1/h".parse().expect("a rate"), 3).expect("a limit")
}

fn of_one_check(check: impl Fn(&str) -> bool, allowed: bool) -> AllocationInfo {
    measure(|| assert_eq!(check(black_box(HELD_KEY)), allowed))
}

#[test]
fn the_counter_counts() {
    assert_eq!(measure(|| drop(black_box(Box::new(1)))).count_total, 1);
}

#[test]
fn a_check_of_a_held_key_allocates_nothing_admitted_or_denied() {
    let limits = Limits::new([Limit::new("l", gcra()).expect("a name")]).expect("limits");
    let limiter = RateLimiter::new(limits, MemoryStore::new());
    let check = |key: &str| limiter.check_now(key).expect("decides").allowed();
    assert!(check(HELD_KEY));
    for allowed in [true, true, false, false] {
        let counted = of_one_check(check, allowed);
        assert_eq!((counted.count_total, counted.bytes_total), (0, 0), "allowed: {allowed}");
    }
}

#[test]
fn a_policy_of_one_limit_allocates_nothing_either() {
    let limit = Limit::new("l", Policy::from(gcra())).expect("a name");
    let limits = Limits::new([limit.by(["ip"]).expect("a kind")]).expect("limits");
    let limiter = RateLimiter::new(limits, MemoryStore::<Policy>::new());
    let check = |key: &str| limiter.check_now(&[("ip", key)]).expect("decides").allowed();
    assert!(check(HELD_KEY));
    for allowed in [true, true, false, false] {
        assert_eq!(of_one_check(check, allowed).count_total, 0, "allowed: {allowed}");
    }
}
