//! A sliding counter as its publisher describes it, and the waits of batches that count attempts.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use ratelimit_core::{
    Algorithm, Attempts, Batch, Check, Decision, FixedWindow, Gcra, Limit, Op, Policy, Rate,
    SlidingCounter, SlidingCounterState, Snapshot, Timestamp, decide,
};

const SECOND_US: u64 = 1_000_000;

fn rate(text: &str) -> Rate {
    text.parse().expect("a rate")
}

fn at(us: u64) -> Timestamp {
    Timestamp::from_us(us).expect("a test's time")
}

/// One key of one limit.
struct Key<A: Algorithm> {
    algorithm: A,
    state: Option<A::State>,
}

impl<A: Algorithm> Key<A> {
    fn acquire(&mut self, us: u64, cost: u64) -> Decision {
        let step = self.algorithm.step(self.state.as_ref(), at(us), cost);
        self.state = step.write.after(self.state.as_ref()).cloned();
        step.decision
    }

    /// Replays a table of requests: the time in milliseconds, the cost, whether it is admitted, and what remains.
    fn replays(&mut self, table: &[(u64, u64, bool, u64)]) {
        for (row, &(ms, cost, allowed, remaining)) in table.iter().enumerate() {
            let got = self.acquire(ms * 1_000, cost);
            assert_eq!((got.allowed, got.remaining), (allowed, remaining), "row {row}: {got:?}");
        }
    }
}

/// Cloudflare's example of 2017: 50 per minute, 42 in the last minute and 18 in this one, of which 15 seconds have
/// passed: 42 · 0.75 + 18 = 49.5.
#[test]
fn a_sliding_counter_weights_the_previous_window_as_cloudflare_does() {
    let counter = SlidingCounter::new(rate("50/m")).expect("a limit");
    let start = at(60 * SECOND_US);
    let state = SlidingCounterState { start, previous: 42, current: 18, window_us: 60 * SECOND_US };
    let mut key = Key { algorithm: counter, state: Some(state) };
    key.replays(&[(75_000, 0, true, 1), (75_000, 2, false, 1), (75_000, 1, true, 0)]);
    assert!(!key.acquire(75 * SECOND_US, 1).allowed);
    // A counter of attempts fills its window with them, and counts no further.
    let mut key = Key { algorithm: Attempts::new(counter), state: Some(state) };
    key.replays(&[(75_000, 2, false, 0), (75_000, 40, false, 0), (119_999, 1, false, 0)]);
    assert_eq!(
        key.state,
        Some(SlidingCounterState { start, previous: 42, current: 50, window_us: 60 * SECOND_US })
    );
    // In the next window 50 fade, and the attempt itself counts 1: 50 · 58.8/60 is 49, and 48 must be left.
    assert_eq!(key.acquire(120 * SECOND_US, 1).retry_after_us, Some(1_200_001));
}

#[test]
fn the_wait_of_a_denied_batch_counts_what_its_own_attempt_charged() {
    let limit = |name, policy: Policy| Limit::new(name, policy).expect("a name");
    let gcra = |burst| Gcra::new(rate("1/s"), burst).expect("a limit");
    let a = limit("a", gcra(1).into());
    let decide_twice = |b: Policy, cost: u64| {
        let b = limit("b", b);
        let checks = [(&a, 1), (&b, cost)].map(|(limit, cost)| Check { limit, key: "k", cost });
        let batch = Batch::new(&checks).expect("two limits");
        let mut kept = Snapshot { now: Timestamp::ZERO, states: vec![None; 2] };
        assert!(decide(&batch, Timestamp::ZERO, &mut kept).expect("decides").allowed());
        let peeked = decide(&batch.op(Op::Peek), Timestamp::ZERO, &mut kept).expect("decides");
        let denied = decide(&batch, Timestamp::ZERO, &mut kept).expect("decides");
        assert!(!denied.allowed() && denied.decisions()[1].allowed);
        assert_eq!(peeked, denied);
        (denied.decisions()[1].retry_after_us, denied.summary().retry_after_us)
    };
    let two_per_minute = FixedWindow::new(rate("2/m")).expect("a limit");
    let waits = decide_twice(Attempts::new(two_per_minute).into(), 1);
    assert_eq!(waits, (Some(60 * SECOND_US), Some(60 * SECOND_US)));
    // The attempt left one of seven: three fit again after two seconds.
    let waits = decide_twice(Attempts::new(gcra(7)).into(), 3);
    assert_eq!(waits, (Some(2 * SECOND_US), Some(2 * SECOND_US)));
    // Where the same request fits again, the other limit alone makes it wait.
    let waits = decide_twice(Attempts::new(gcra(9)).into(), 3);
    assert_eq!(waits, (Some(0), Some(SECOND_US)));
}
