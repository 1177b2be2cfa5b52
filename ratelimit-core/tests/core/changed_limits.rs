//! States of buckets that an earlier limit of the same name has written.

use ratelimit_core::algorithm::GcraState;
use ratelimit_core::{Algorithm, Gcra, Rate, Timestamp};

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
