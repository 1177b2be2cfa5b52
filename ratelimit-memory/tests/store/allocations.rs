//! One check of one limit by a borrowed key that the store knows allocates nothing, whatever the
//! operation and the answer. A log grows as a vector does, and so allocates seldom.
//!
//! The crate `allocation-counter` puts a counting allocator under this whole program.

use std::hint::black_box;
use std::time::Duration;

use allocation_counter::measure;
use futures_util::FutureExt;
use ratelimit_core::algorithm::InMemory;
use ratelimit_core::store::Op;
use ratelimit_core::{Gcra, Limit, Limits, RateLimiter, Stack};
use ratelimit_memory::MemoryStore;

use crate::common::{algorithm, limit, limiter, store};

const KNOWN_KEY: &str = "203.0.113.77";

/// A limit of three, of which one is charged, is used up, and some of it returned.
const EVERY_OPERATION: [(Op, bool); 9] = [
    (Op::Peek, true),
    (Op::Acquire, true),
    (Op::Acquire, true),
    (Op::Peek, false),
    (Op::Acquire, false),
    (Op::Refund, true),
    // What a forced charge leaves out, its verdict keeps elsewhere.
    (Op::Force, true),
    (Op::Refund, true),
    (Op::Acquire, true),
];

fn gcra() -> Gcra {
    Gcra::new("1/h".parse().expect("a rate"), 3).expect("a limit")
}

/// Fails if the call allocates another number of times, or if its answer is another.
#[track_caller]
fn allocates(what: &str, times: u64, allowed: bool, call: impl FnOnce() -> bool) {
    let mut said = None;
    let counted = measure(|| said = Some(call()));
    assert_eq!((said, counted.count_total), (Some(allowed), times), "{what}");
}

fn allocates_nothing<A: InMemory>(
    name: &str,
    algorithm: A,
    (charged, operations): (usize, &[(Op, bool)]),
) {
    let (store, clock) = store(|builder| builder);
    let limit = Limit::new("l", algorithm).expect("a name");
    let limiter = RateLimiter::new(Limits::new([limit]).expect("limits"), store);
    let call = |op: Op| {
        // Each an entry of its own.
        clock.advance(Duration::from_micros(1));
        let verdict = limiter.request(black_box(KNOWN_KEY)).apply_now(op).expect("decides");
        black_box(verdict).allowed()
    };
    assert!((0..charged).all(|_| call(Op::Acquire)), "{name}");
    for (op, allowed) in operations {
        allocates(&format!("{name}: {op:?}"), 0, *allowed, || call(*op));
    }
}

#[test]
fn no_operation_on_a_known_key_allocates_admitted_or_denied() {
    let all = (1, &EVERY_OPERATION[..]);
    allocates_nothing("gcra by its type", gcra(), all);
    for words in [
        "gcra 1/h burst 3",
        "token-bucket 1/h burst 3",
        "fixed-window 3/h",
        "first-request-window 3/h",
        "sliding-counter 3/h",
    ] {
        allocates_nothing(words, algorithm(words), all);
    }
    // With the first two charges a log grows; a peek may copy it, as it may copy a stack.
    let checks = (2, &[(Op::Acquire, true), (Op::Acquire, false)][..]);
    let others = [
        "sliding-log 3/h",
        "window-log 3/h",
        "concurrency 3/h",
        "bucketed-window bucket 1s rates 3/m",
        // A refund gives a blocked key nothing back.
        "lockout 3/h block 1h",
    ];
    for words in others {
        allocates_nothing(words, algorithm(words), checks);
    }
    let mixed = [
        "gcra 1/h burst 3",
        "fixed-window 3/h",
        "fixed-window 3/h",
        "gcra 1/h burst 3",
        "gcra 1/h burst 3",
    ];
    allocates_nothing("stack", stack([gcra(); 3]), checks);
    allocates_nothing("stack of five limits", stack(mixed.map(algorithm)), checks);
}

fn stack<A: InMemory + Clone, const N: usize>(limits: [A; N]) -> Stack<A> {
    Stack::new(limits).expect("a stack")
}

#[test]
fn no_way_to_ask_allocates_more_than_the_answer() {
    assert_eq!(measure(|| drop(black_box(Box::new(1)))).count_total, 1, "the counter counts");
    let three = |name| limit(name, "gcra 1/h burst 3");
    let (by_identifier, _) =
        limiter([three("l").by(["ip"]).expect("an identifier")], |builder| builder);
    let (single, _) = limiter([three("l")], |builder| builder);
    let (several, _) = limiter(["a", "b", "c"].map(three), |builder| builder);
    let callers: Vec<String> = (0..20).map(|n| format!("caller {n}")).collect();
    let callers: Vec<&str> = callers.iter().map(String::as_str).collect();
    let large = || "gcra 2/h burst 9".parse().expect("numbers");
    let open = three("l").accepts_up_to(large()).expect("a max");
    let (own, _) = limiter([open], |builder| builder);
    let numbers = own.limits().parse_numbers([("l", "1/h burst 3")]).expect("numbers");
    let ways: [(_, _, &dyn Fn() -> bool); 5] = [
        ("by own numbers", 0, &|| {
            let request = own.request(black_box(KNOWN_KEY)).numbers(black_box(&numbers));
            black_box(request.check_now()).expect("decides").allowed()
        }),
        ("by identifier", 0, &|| {
            by_identifier.check_now(&[("ip", KNOWN_KEY)]).expect("decides").allowed()
        }),
        ("awaited", 0, &|| {
            let said = single.check(black_box(KNOWN_KEY)).now_or_never();
            said.expect("never waits").expect("decides").allowed()
        }),
        ("several limits", 1, &|| {
            black_box(several.check_now(black_box(KNOWN_KEY))).expect("decides").allowed()
        }),
        ("several callers at once", 0, &|| {
            let mut allowed = true;
            MemoryStore::check_each_now(&single, &callers, |_, said| {
                allowed &= said.expect("decides").allowed();
            });
            allowed
        }),
    ];
    for (name, times, call) in ways {
        assert!(call());
        for allowed in [true, true, false, false] {
            allocates(name, times, allowed, call);
        }
    }
    // A new key that is denied at once takes no place in the store.
    let call = |key: &str| single.check_n_now(key, 4).expect("decides").allowed();
    assert!(!call("a caller"));
    allocates("denied at once", 0, false, || call("another caller"));
}
