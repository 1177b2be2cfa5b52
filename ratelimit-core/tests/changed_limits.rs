//! States that an earlier limit of the same name has written.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use ratelimit_core::{
    Algorithm, Attempts, ChargesAttempts, FirstRequestWindow, FixedWindow, Gcra, GcraState, Rate,
    Reservation, SlidingCounter, SlidingLog, Timestamp, WindowLog,
};

fn rate(text: &str) -> Rate {
    text.parse().expect("a rate")
}

fn timestamp(us: u64) -> Timestamp {
    Timestamp::from_us(us).expect("a test's time")
}

#[test]
fn retry_after_is_exact_after_a_limit_was_made_smaller() {
    let gcra = Gcra::new(Rate::per_us(7, 12).expect("a rate"), 9).expect("a limit");
    let state = GcraState { tat_us: 1_036, surplus: 0, timestamp: timestamp(1_000) }; // of a larger limit
    let wait_us = gcra.step(Some(&state), timestamp(1_000), 1).decision.retry_after_us;
    let wait_us = wait_us.expect("fits");
    assert!(!gcra.step(Some(&state), timestamp(1_000 + wait_us - 1), 1).decision.allowed);
    assert!(gcra.step(Some(&state), timestamp(1_000 + wait_us), 1).decision.allowed);
}

#[test]
fn a_state_of_a_finer_limit_is_read_by_one_of_coarser_ticks() {
    // The last tick before the arrival time lies before the epoch.
    let month = 30 * 86_400_000_000;
    let coarse = Rate::per_us(1_000_000_007, month).and_then(|r| Gcra::new(r, 1_000_000_007));
    let coarse = coarse.expect("exact in seconds");
    let state = GcraState { tat_us: 1_500_000, surplus: 0, timestamp: Timestamp::ZERO };
    let decision = coarse.step(Some(&state), timestamp(300_000), 1_000_000_007).decision;
    assert_eq!(decision.retry_after_us, Some(1_200_000));
}

#[test]
fn an_attempt_leaves_a_limit_that_was_made_smaller_as_full_as_it_was() {
    fn left<A: ChargesAttempts>(large: A, compact: A) -> u64 {
        let filled = Attempts::new(large).step(None, Timestamp::ZERO, u64::MAX).write;
        let compact = Attempts::new(compact);
        let tried = compact.step(filled.after(None), Timestamp::ZERO, 1).write;
        let state = tried.after(filled.after(None));
        let refund = |cost| compact.refund(state, Timestamp::ZERO, cost).expect("has refunds");
        assert_eq!(refund(6).decision.remaining, 0);
        refund(7).decision.remaining
    }
    macro_rules! of {
        ($algorithm:ident) => {
            left(
                $algorithm::new(rate("9/m")).expect("a limit"),
                $algorithm::new(rate("3/m")).expect("a limit"),
            )
        };
    }
    let windows = [
        of!(SlidingLog),
        of!(SlidingCounter),
        of!(FixedWindow),
        of!(FirstRequestWindow),
        of!(WindowLog),
    ];
    assert_eq!(windows, [1; 5]);
}

/// How many requests `new` admits within 3 s when it takes a key over from `old`, which does `old_does` to thirty
/// charges of its own meanwhile, one per 100 ms.
fn admitted_beside<A: Algorithm>(
    old: &A,
    new: &A,
    old_does: impl Fn(&A, Option<&A::State>, Timestamp) -> ratelimit_core::Step<A::State>,
) -> u64 {
    let (mut state, mut admitted) = (None, 0);
    for round in 0..=30 {
        let now = timestamp(60_000_000 + round * 100_000);
        for _ in 0..40 {
            let step = new.step(state.as_ref(), now, 1);
            admitted += u64::from(step.decision.allowed);
            state = step.write.after(state.as_ref()).cloned();
        }
        state = old_does(old, state.as_ref(), now).write.after(state.as_ref()).cloned();
    }
    admitted
}

#[test]
fn settlements_and_refunds_of_the_limit_before_forgive_nothing_of_a_tighter_one() {
    fn of<A: Algorithm>(old: &A, new: &A) {
        let settled = admitted_beside(old, new, |old, state, now| {
            let reservation = Reservation::new(timestamp(59_999_999), 1);
            old.settle(state, now, &reservation, 2).expect("settles")
        });
        let refunded = admitted_beside(old, new, |old, state, now| {
            old.refund(state, now, 1).expect("refunds")
        });
        // 2/m with a burst of 3 refills nothing in 3 s, and 30 old tokens are 1.5 s of it.
        assert_eq!((settled, refunded), (3, 3));
    }
    of(
        &Gcra::new(rate("20/s"), 40).expect("a limit"),
        &Gcra::new(rate("2/m"), 3).expect("a limit"),
    );
    let window = |text| FixedWindow::new(rate(text)).expect("a limit");
    let settled = admitted_beside(&window("20/s"), &window("3/m"), |old, state, now| {
        let reservation = Reservation::new(timestamp(59_999_999), 1);
        old.settle(state, now, &reservation, 2).expect("settles")
    });
    assert_eq!(settled, 3);
}

#[test]
fn a_sliding_counter_refuses_windows_that_it_cannot_add_up() {
    let accepted = SlidingCounter::new(rate("3/2251799813685247us")).expect("the longest");
    assert_eq!(accepted.window_us(), (1 << 51) - 1);
    let error = SlidingCounter::new(rate("3/2251799813685248us")).expect_err("too long");
    assert!(error.to_string().contains("sliding-log"), "{error}");
}
