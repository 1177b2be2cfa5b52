//! The checker of intervals accepts what each algorithm admits, at whatever speed, and catches a
//! racy store of each.

use proptest::prelude::*;
use ratelimit_core::{Algorithm, AnyAlgorithm, Timestamp};
use ratelimit_testkit::Admissions;

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

const ALGORITHMS: [&str; 10] = [
    "gcra 7/s burst 3",
    "token-bucket 3/s burst 9",
    "fixed-window 5/s",
    "first-request-window 5/s",
    "window-log 4/s",
    "sliding-log 5/s",
    "sliding-counter 6/s",
    "bucketed-window bucket 100ms rates 3/300ms, 5/s",
    "lockout 5/s block 1s",
    "lockout 4/s block 300ms factor 2 longest 900ms forget 5s",
];

/// What a store admits of requests, each so much later than the one before and at a cost. Its clock
/// and its answers take up to `slow_us`. A racy store reads the state from before the last `stale`
/// requests.
fn admit_over(
    algorithm: AnyAlgorithm,
    asks: &[(u64, u64)],
    slow_us: u64,
    stale: usize,
) -> Admissions {
    let mut admissions = Admissions::new(algorithm);
    let (mut states, mut now) = (vec![None], BEGIN);
    for (later_us, cost) in asks {
        now = now.saturating_add_us(*later_us);
        let seen = states[states.len().saturating_sub(1 + stale)].clone();
        let step = algorithm.step(seen.as_ref(), now, *cost);
        if step.decision.allowed {
            let begin = Timestamp::saturating_from_us(now.as_us() - slow_us);
            admissions.add([begin, now.saturating_add_us(slow_us)], *cost);
        }
        states.push(step.write.after(seen.as_ref()).cloned());
    }
    admissions
}

proptest! {
    #[test]
    fn what_each_algorithm_admits_is_within_its_bound(
        asks in prop::collection::vec(
            (prop_oneof![Just(0), 1..5_000_u64, 90_000..110_000_u64, 300_000..2_000_000_u64], 1..4_u64),
            1..120,
        ),
        slow_us in prop_oneof![Just(0), 1..500_000_u64],
    ) {
        for text in ALGORITHMS {
            admit_over(text.parse().expect(text), &asks, slow_us, 0).check().expect("sound");
        }
    }
}

#[test]
fn a_racy_store_is_caught_with_each_algorithm() {
    // As fast as is asked for, for six seconds.
    let asks = [(20_000, 1); 300];
    for text in ALGORITHMS {
        let algorithm: AnyAlgorithm = text.parse().expect(text);
        for slow_us in [0, 10_000] {
            admit_over(algorithm, &asks, slow_us, 0).check().expect("sound");
            let stale = usize::try_from(algorithm.capacity()).expect("few");
            let caught = admit_over(algorithm, &asks, slow_us, stale).check().expect_err(text);
            assert!(caught.to_string().contains(&algorithm.to_string()), "{caught}");
        }
    }
}

#[test]
fn an_event_allows_more_in_the_intervals_that_it_may_lie_in() {
    let at = |ms: u64| BEGIN.saturating_add_us(ms * 1_000);
    let mut admissions = Admissions::new("sliding-log 5/s".parse().expect("a limit"));
    admissions.add([at(0), at(10)], 5);
    admissions.add([at(500), at(510)], 5);
    admissions.allow([at(511), at(600)], 5);
    let excess = admissions.check().expect_err("before the reset");
    assert_eq!((excess.admitted, excess.bound), (10, 5));
    admissions.allow([at(490), at(501)], 5);
    admissions.check().expect("it was reset in between");
}
