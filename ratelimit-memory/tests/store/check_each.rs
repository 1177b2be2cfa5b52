//! Several callers in one call are decided as if one after the other, also through a pointer to a store.

use std::sync::Arc;

use ratelimit_core::{
    FixedWindow, Gcra, Identifiers, InMemory, Limit, Limits, ManualClock, Policy, RateLimiter,
    SlidingLog, SyncStore, Timestamp,
};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::Doors;

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

fn gcra(rate: &str, burst: u64) -> Policy {
    Gcra::new(rate.parse().expect("a rate"), burst).expect("a limit").into()
}

fn window(rate: &str) -> Policy {
    FixedWindow::new(rate.parse().expect("a rate")).expect("a limit").into()
}

fn log(rate: &str) -> Policy {
    SlidingLog::new(rate.parse().expect("a rate")).expect("a limit").into()
}

fn limits(all: &[(&str, Policy, &[&str])]) -> Limits<Policy> {
    let limit = |(name, policy, identifier_names): &(&str, Policy, &[&str])| {
        let limit = Limit::new(name, *policy).expect("a name");
        if identifier_names.is_empty() {
            limit
        } else {
            limit.by(*identifier_names).expect("kinds")
        }
    };
    Limits::new(all.iter().map(limit).collect::<Vec<_>>()).expect("limits")
}

fn store() -> MemoryStore<Policy, ManualClock> {
    MemoryStore::builder().clock(ManualClock::new(BEGIN)).build()
}

/// Asks one limiter about all callers at once, and another of the same limits about one after the other: places
/// come in order, each once, and the answers are the same, also when asked again.
fn agrees<C: Identifiers + ?Sized>(limits: &Limits<Policy>, callers: &[&C]) {
    let at_once = RateLimiter::new(limits.clone(), store());
    let alone = RateLimiter::new(limits.clone(), store());
    for turn in 0..3 {
        let mut reported = Vec::new();
        at_once.check_each_now(callers, |place, decided| reported.push((place, decided)));
        let expected: Vec<_> = callers.iter().map(|caller| alone.check_now(*caller)).collect();
        let places: Vec<_> = reported.iter().map(|(place, _)| *place).collect();
        assert_eq!(places, (0..callers.len()).collect::<Vec<_>>(), "turn {turn}");
        for ((place, decided), expected) in reported.iter().zip(&expected) {
            assert_eq!(decided, expected, "turn {turn}, caller {place} of {}", callers.len());
        }
        assert_eq!(at_once.store().len(), alone.store().len(), "turn {turn}");
    }
}

fn names(count: usize) -> Vec<String> {
    (0..count).map(|n| format!("caller {n}")).collect()
}

#[test]
fn any_number_of_callers_is_decided_as_one_by_one_by_every_kind_of_limit() {
    for policy in [gcra("2/h", 2), window("2/h"), log("2/h")] {
        let limits = limits(&[("one", policy, &[])]);
        for count in [0, 1, 7, 8, 9, 16, 17] {
            let names = names(count);
            agrees::<str>(&limits, &names.iter().map(String::as_str).collect::<Vec<_>>());
        }
    }
}

#[test]
fn a_caller_named_several_times_is_charged_each_time() {
    for policy in [gcra("5/h", 5), window("5/h"), log("5/h")] {
        let limits = limits(&[("one", policy, &[])]);
        agrees::<str>(&limits, &["a"; 17]);
        agrees::<str>(&limits, &["a", "b", "a", "a", "c", "b", "a", "a", "a", "a", "b"]);
    }
}

#[test]
fn several_limits_are_charged_all_or_none() {
    let limits = limits(&[("few", gcra("2/h", 2), &[]), ("more", window("5/h"), &[])]);
    for count in [0, 1, 7, 8, 9, 17] {
        let names = names(count);
        agrees::<str>(&limits, &names.iter().map(String::as_str).collect::<Vec<_>>());
    }
    agrees::<str>(&limits, &["a"; 9]);
}

#[test]
fn callers_without_an_identifier_are_decided_as_one_by_one() {
    let both: &[(&str, &str)] = &[("ip", "1.2.3.4"), ("user", "u")];
    let user: &[(&str, &str)] = &[("user", "u")];
    let neither: &[(&str, &str)] = &[];
    let by_ip = limits(&[("ip", gcra("3/h", 3), &["ip"])]);
    let by_both = limits(&[("pair", gcra("3/h", 3), &["ip", "user"])]);
    let one_each = limits(&[("ip", gcra("3/h", 3), &["ip"]), ("user", window("9/h"), &["user"])]);
    for limits in [by_ip, by_both, one_each] {
        agrees(&limits, &[both]);
        agrees(&limits, &[neither]);
        agrees(&limits, &[both, user, neither, both, both, both, user, both, both, user, both]);
        // The caller without the identifier is the last of eight, the first of the next, and the last of all.
        agrees(&limits, &[both, both, both, both, both, both, both, user, user, both, neither]);
    }
}

#[test]
fn the_closure_may_call_the_limiter_again() {
    let limiter = RateLimiter::new(limits(&[("one", gcra("4/h", 4), &[])]), store());
    let mut left = Vec::new();
    limiter.check_each_now::<str>(&["a", "b", "a"], |_, decided| {
        let again = limiter.check_now("a").expect("decides");
        left.push((decided.expect("decides").remaining(), again.remaining()));
    });
    // `a` is charged by the call and by the closure, in turn.
    assert_eq!(left, [(3, 2), (3, 1), (0, 0)]);
}

/// Which of ten callers a limiter allows.
fn allowed<S: SyncStore<Policy>>(limiter: &RateLimiter<S>) -> [bool; 10] {
    let callers = ["a", "b", "c", "a", "d", "e", "f", "a", "g", "b"];
    let mut allowed = [false; 10];
    limiter.check_each_now::<str>(&callers, |place, decided| {
        allowed[place] = decided.expect("decides").allowed();
    });
    allowed
}

#[test]
fn several_callers_are_decided_alike_through_pointers() {
    let limits = limits(&[("one", gcra("1/h", 1), &[])]);
    let expected = [true, true, true, false, true, true, true, false, true, false];
    assert_eq!(allowed(&RateLimiter::new(limits.clone(), Arc::new(store()))), expected);
    assert_eq!(allowed(&RateLimiter::new(limits, &store())), expected);
}

/// Asks about nine callers in one call, and about two more one by one.
fn reach<S: SyncStore<A>, A: InMemory>(limits: Limits<A>, store: S) {
    let limiter = RateLimiter::new(limits, store);
    let names = names(9);
    let callers: Vec<&str> = names.iter().map(String::as_str).collect();
    let mut count = 0;
    limiter.check_each_now::<str>(&callers, |_, decided| count += usize::from(decided.is_ok()));
    assert_eq!(count, 9);
    assert!(limiter.check_now("ten").is_ok() && limiter.check_n_now("eleven", 1).is_ok());
}

#[test]
fn a_pointer_to_a_store_forwards_several_keys_in_one_call() {
    let limits = limits(&[("one", gcra("1/h", 1), &[])]);
    let doors = Arc::new(Doors::new(store()));
    reach(limits.clone(), Arc::clone(&doors));
    assert_eq!((doors.several(), doors.single()), (9, 2));
    reach(limits, &*doors);
    assert_eq!((doors.several(), doors.single()), (9, 2));
}
