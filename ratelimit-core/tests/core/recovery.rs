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
