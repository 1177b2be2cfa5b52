//! Rates whose integers are exact only with ticks of a second: the two buckets agree, also after refunds and when the
//! clock goes back.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use ratelimit_core::{Algorithm, Decision, Gcra, Rate, Step, Timestamp, TokenBucket, Write};

const BURST: u64 = 1_000_000_007;

fn rate() -> Rate {
    "1000000007/30d".parse().expect("a rate")
}

enum Op {
    Acquire,
    Refund,
}

/// Runs a trace of times, operations and costs.
fn run<A: Algorithm>(algorithm: &A, trace: &[(u64, Op, u64)]) -> Vec<Decision> {
    let mut state = None;
    let decide = |(at_us, op, cost): &(u64, Op, u64)| {
        let now = Timestamp::from_us(*at_us).expect("a time");
        let Step { decision, write } = match op {
            Op::Acquire => algorithm.step(state.as_ref(), now, *cost),
            Op::Refund => algorithm.refund(state.as_ref(), now, *cost).expect("has refunds"),
        };
        match write {
            Write::Keep => {}
            Write::Put { state: next, .. } => state = Some(next),
            Write::Remove => state = None,
        }
        decision
    };
    trace.iter().map(decide).collect()
}

#[test]
fn a_refund_and_a_clock_that_goes_back_mint_nothing_in_a_coarse_tick() {
    let trace = [
        (10_000_000, Op::Acquire, 1_000),
        (10_900_000, Op::Acquire, 1),
        (10_900_000, Op::Refund, 1_000),
        (9_000_000, Op::Acquire, 384),
        (11_000_000, Op::Acquire, BURST),
        (11_900_000, Op::Acquire, BURST),
    ];
    let gcra = run(&Gcra::new(rate(), BURST).expect("exact in seconds"), &trace);
    let bucket = run(&TokenBucket::new(rate(), BURST).expect("exact in seconds"), &trace);
    assert_eq!(gcra, bucket);
    // A tenth of a second after the charge, next to nothing of the 385 has refilled.
    let [.., back, soon, later] = &gcra[..] else { panic!("six decisions") };
    assert_eq!((back.allowed, back.remaining, back.reset_after_us), (true, 999_999_622, 2_900_000));
    assert_eq!((soon.allowed, soon.retry_after_us), (false, Some(900_000)));
    assert!(later.allowed);
}
