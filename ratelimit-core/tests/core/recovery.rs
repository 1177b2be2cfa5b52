//! When a limit says that it recovers, and when it does.

use ratelimit_core::algorithm::Recovery;
use ratelimit_core::{Algorithm, AnyAlgorithm, Timestamp};

#[test]
fn a_fixed_window_recovers_at_its_reset_and_a_bucket_before() {
    for (words, recovery) in [
        ("gcra 10/s burst 20", Some(Recovery::Gradual)),
        ("token-bucket 10/s burst 20", Some(Recovery::Gradual)),
        ("fixed-window 20/s", Some(Recovery::AtReset)),
        ("concurrency 20/s", None),
        ("sliding-counter 20/s", None),
        ("lockout 20/s block 1s", None),
    ] {
        let limit: AnyAlgorithm = words.parse().expect(words);
        assert_eq!(limit.recovery(), recovery, "{words}");
        let Some(recovery) = recovery else { continue };
        let now = Timestamp::saturating_from_us(1_795_218_392_123_456);
        let charged = limit.step(None, now, 20);
        let state = charged.write.after(None);
        let reset = now.saturating_add_us(charged.decision.reset_after_us);
        let just_before = Timestamp::saturating_from_us(reset.as_us() - 1);
        let left = |at| limit.step(state, at, 0).decision.remaining;
        assert_eq!(left(reset), 20, "{words}");
        assert_eq!(left(just_before) > 0, recovery == Recovery::Gradual, "{words}");
    }
}

/// The newest charge takes its time with it, so that at an earlier one, what was charged before
/// counts as if the newest had never been. Once the clock is where it was, all of it is back.
#[test]
fn a_refund_while_the_clock_is_behind_leaves_what_was_there_before_the_newest_charge() {
    let limit: AnyAlgorithm = "bucketed-window bucket 1s rates 10/5s, 100/15s".parse().expect("it");
    let at = |second: u64| Timestamp::saturating_from_us(second * 1_000_000);
    let first = limit.step(None, at(10), 10).write;
    let newest = limit.step(first.after(None), at(15), 1).write;
    let left = |state, second| limit.step(state, at(second), 0).decision.remaining;
    assert_eq!([10, 15].map(|second| left(newest.after(None), second)), [9, 9]);
    let refunded = limit.refund(newest.after(None), at(10), 1).expect("it can").write;
    assert_eq!([10, 15].map(|second| left(refunded.after(None), second)), [0, 10]);
    assert_eq!([10, 15].map(|second| left(first.after(None), second)), [0, 10]);
}
