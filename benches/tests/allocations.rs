//! One check of one limit by a borrowed key that the store knows allocates nothing, whatever the operation and
//! the answer. A log grows as a vector does, and so allocates seldom.
//!
//! The crate `allocation-counter` puts a counting allocator under this whole test.

#![allow(clippy::expect_used, clippy::panic)]

use std::future::Future;
use std::hint::black_box;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use allocation_counter::measure;
use ratelimit_core::{
    BucketedWindow, Concurrency, FirstRequestWindow, FixedWindow, Gcra, InMemory, Limit, Limits,
    ManualClock, Op, Policy, Rate, RateLimiter, SlidingCounter, SlidingLog, Stack, Timestamp,
    TokenBucket, WindowLog,
};
use ratelimit_memory::MemoryStore;

const KNOWN_KEY: &str = "203.0.113.77";

fn gcra() -> Gcra {
    Gcra::new("1/h".parse().expect("a rate"), 3).expect("a limit")
}

fn limiter<A: InMemory>(algorithm: A) -> RateLimiter<MemoryStore<A>, A> {
    let limits = Limits::new([Limit::new("l", algorithm).expect("a name")]).expect("limits");
    RateLimiter::new(limits, MemoryStore::new())
}

/// Fails if the call allocates, or if its answer is not `allowed`.
#[track_caller]
fn allocates_nothing(what: &str, allowed: bool, call: impl FnOnce() -> bool) {
    let mut said = None;
    let counted = measure(|| said = Some(call()));
    assert_eq!((said, counted.count_total, counted.bytes_total), (Some(allowed), 0, 0), "{what}");
}

/// Uses up a limit of three by one key, returns some of it, and counts the allocations of every call.
fn every_operation_allocates_nothing<A: InMemory>(name: &str, algorithm: A) {
    let limiter = limiter(algorithm);
    let call = |op: Op| {
        let verdict = limiter.request(black_box(KNOWN_KEY)).apply_now(op).expect("decides");
        black_box(verdict).allowed()
    };
    assert!(call(Op::Acquire));
    let script = [
        (Op::Peek, true),
        (Op::Acquire, true),
        (Op::Acquire, true),
        (Op::Peek, false),
        (Op::Acquire, false),
        (Op::Acquire, false),
        (Op::Force, true),
        (Op::Refund, true),
        (Op::Acquire, true),
    ];
    for (op, allowed) in script {
        allocates_nothing(&format!("{name}: {op:?}"), allowed, || call(op));
    }
}

#[test]
fn the_counter_counts() {
    assert_eq!(measure(|| drop(black_box(Box::new(1)))).count_total, 1);
}

#[test]
fn no_operation_on_a_known_key_allocates_admitted_or_denied() {
    let rate: Rate = "3/h".parse().expect("a rate");
    every_operation_allocates_nothing("gcra", gcra());
    let bucket = TokenBucket::new("1/h".parse().expect("a rate"), 3);
    every_operation_allocates_nothing("token-bucket", bucket.expect("a limit"));
    every_operation_allocates_nothing("fixed-window", FixedWindow::new(rate).expect("a limit"));
    let first = FirstRequestWindow::new(rate);
    every_operation_allocates_nothing("first-request-window", first.expect("a limit"));
    let counter = SlidingCounter::new(rate);
    every_operation_allocates_nothing("sliding-counter", counter.expect("a limit"));
}

/// Uses up a limit of three by checks, and counts the allocations of all but those with which a log grows.
fn a_check_allocates_nothing<A: InMemory>(name: &str, algorithm: A) {
    let clock = ManualClock::new(Timestamp::saturating_from_us(1_000_000));
    let store = MemoryStore::builder().clock(clock.clone()).build();
    let limits = Limits::new([Limit::new("l", algorithm).expect("a name")]).expect("limits");
    let limiter = RateLimiter::new(limits, store);
    let call = |op: Op| {
        // Each an entry of its own.
        clock.advance(Duration::from_micros(1));
        let verdict = limiter.request(black_box(KNOWN_KEY)).apply_now(op).expect("decides");
        black_box(verdict).allowed()
    };
    assert!(call(Op::Acquire) && call(Op::Acquire));
    for (op, allowed) in
        [(Op::Peek, true), (Op::Acquire, true), (Op::Peek, false), (Op::Acquire, false)]
    {
        allocates_nothing(&format!("{name}: {op:?}"), allowed, || call(op));
    }
}

#[test]
fn no_check_of_a_log_or_a_stack_allocates_admitted_or_denied() {
    let rate: Rate = "3/h".parse().expect("a rate");
    let log = SlidingLog::new(rate).expect("a limit");
    a_check_allocates_nothing("sliding-log", log);
    a_check_allocates_nothing("window-log", WindowLog::new(rate).expect("a limit"));
    a_check_allocates_nothing("concurrency", Concurrency::new(rate).expect("a limit"));
    let buckets = BucketedWindow::new(1_000_000, &["3/m".parse().expect("a rate")]);
    a_check_allocates_nothing("bucketed-window", buckets.expect("a limit"));
    a_check_allocates_nothing("policy", Policy::from(log));
    a_check_allocates_nothing("stack", Stack::new([gcra(); 3]).expect("a stack"));
    let fixed = FixedWindow::new(rate).expect("a limit");
    let mixed = [Policy::from(gcra()), log.into(), fixed.into(), gcra().into(), gcra().into()];
    a_check_allocates_nothing("stack of five limits", Stack::new(mixed).expect("a stack"));
}

#[test]
fn a_policy_of_one_limit_allocates_nothing() {
    every_operation_allocates_nothing("policy", Policy::from(gcra()));
    let limit = Limit::new("l", Policy::from(gcra())).expect("a name");
    let limits = Limits::new([limit.by(["ip"]).expect("an identifier")]).expect("limits");
    let limiter = RateLimiter::new(limits, MemoryStore::<Policy>::new());
    let check = || limiter.check_now(&[("ip", KNOWN_KEY)]).expect("decides").allowed();
    assert!(check());
    for allowed in [true, true, false, false] {
        allocates_nothing("by identifier", allowed, check);
    }
}

#[test]
fn awaiting_a_check_allocates_nothing() {
    let limiter = limiter(gcra());
    let check = || {
        let mut context = Context::from_waker(Waker::noop());
        match pin!(limiter.check(black_box(KNOWN_KEY))).poll(&mut context) {
            Poll::Ready(verdict) => verdict.expect("decides").allowed(),
            Poll::Pending => panic!("a store in memory never waits"),
        }
    };
    assert!(check());
    for allowed in [true, true, false, false] {
        allocates_nothing("awaited", allowed, check);
    }
}

#[test]
fn a_new_key_is_denied_without_an_allocation() {
    // A new key that is denied at once takes no place in the store.
    let limiter = limiter(gcra());
    let call = |key: &str| limiter.check_n_now(key, 4).expect("decides").allowed();
    assert!(!call("a caller"));
    allocates_nothing("denied at once", false, || call("another caller"));
}

#[test]
fn several_limits_of_a_caller_allocate_only_the_answer() {
    let limits = ["a", "b", "c"].map(|name| Limit::new(name, gcra()).expect("a name"));
    let limits = Limits::new(limits).expect("limits");
    let limiter = RateLimiter::new(limits, MemoryStore::<Gcra>::new());
    let check = || black_box(limiter.check_now(black_box(KNOWN_KEY))).expect("decides").allowed();
    assert!(check());
    for allowed in [true, true, false, false] {
        let mut said = None;
        let counted = measure(|| said = Some(check()));
        assert_eq!((said, counted.count_total), (Some(allowed), 1));
    }
}

#[test]
fn several_callers_at_once_allocate_nothing() {
    let limiter = limiter(gcra());
    let callers: Vec<String> = (0..20).map(|n| format!("caller {n}")).collect();
    let callers: Vec<&str> = callers.iter().map(String::as_str).collect();
    let check_all = || {
        let mut allowed = 0;
        limiter.check_each_now(&callers, |_, said| {
            allowed += usize::from(said.expect("decides").allowed());
        });
        allowed
    };
    assert_eq!(check_all(), 20);
    for allowed in [20, 20, 0, 0] {
        allocates_nothing("each", true, || check_all() == allowed);
    }
}
