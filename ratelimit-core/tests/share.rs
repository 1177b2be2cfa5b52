//! Shares of a limit: several nodes together admit at most what the limit admits.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::num::NonZeroU64;

use proptest::prelude::*;
use ratelimit_core::{Algorithm, Limit, Policy, Share, Timestamp};

const BEGIN_US: u64 = 1_795_218_392_000_000;

fn policy(words: &str) -> Policy {
    words.parse().expect(words)
}

fn shared(words: &str, nodes: u64) -> Result<Policy, ratelimit_core::ConfigError> {
    policy(words).share(NonZeroU64::new(nodes).expect("not 0"))
}

#[test]
fn a_share_divides_bursts_and_counts_rounded_down_and_rates_exactly() {
    for (limit, nodes, share) in [
        ("gcra 10/s burst 20", 4, "gcra 5/2s burst 5"),
        ("gcra 10/s burst 20", 5, "gcra 2/s burst 4"),
        ("token-bucket 100/m burst 7", 2, "token-bucket 50/m burst 3"),
        ("fixed-window 10/s", 3, "fixed-window 3/s"),
        ("sliding-counter 10/m", 4, "sliding-counter 2/m"),
        ("sliding-log 5/s", 1, "sliding-log 5/s"),
        ("window-log 9/s", 9, "window-log 1/s"),
        ("first-request-window 9/s count attempts", 2, "first-request-window 4/s count attempts"),
        (
            "bucketed-window bucket 1s rates 10/1s, 55/10s",
            10,
            "bucketed-window bucket 1s rates 1/1s, 5/10s",
        ),
        ("concurrency 20/30s", 3, "concurrency 6/30s"),
    ] {
        assert_eq!(shared(limit, nodes), Ok(policy(share)), "{limit} among {nodes}");
    }
}

#[test]
fn a_limit_too_small_for_its_nodes_is_refused_by_name() {
    let limit = Limit::new("login", policy("fixed-window 3/m")).expect("a name");
    let error = limit.share(NonZeroU64::new(4).expect("not 0")).expect_err("too small");
    assert_eq!(error.limit(), Some("login"));
    assert!(error.to_string().contains("fewer nodes"), "{error}");
}

#[test]
fn a_share_keeps_everything_else_of_a_limit() {
    let limit = Limit::new("api", policy("gcra 10/s burst 20")).expect("a name");
    let limit = limit.by(["ip"]).expect("an identifier").required().shadow();
    let share = limit.share(NonZeroU64::MIN).expect("one node");
    assert_eq!(share, limit);
}

proptest! {
    /// All that the nodes admit, the limit by itself admits too.
    #[test]
    fn shares_admit_together_at_most_what_the_limit_admits(
        kind in 0..4_usize,
        (count, period_us, burst) in (1..40_u64, 1..50_000_u64, 1..40_u64),
        nodes in 1..6_u64,
        requests in proptest::collection::vec((0..9_000_u64, 0..6_usize, 1..5_u64), 1..80),
    ) {
        let words = match kind {
            0 => format!("gcra {count}/{period_us}us burst {burst}"),
            1 => format!("token-bucket {count}/{period_us}us burst {burst}"),
            2 => format!("fixed-window {count}/{period_us}us"),
            _ => format!("sliding-log {count}/{period_us}us"),
        };
        let limit = policy(&words);
        let Ok(share) = shared(&words, nodes) else {
            prop_assert!(limit.capacity() < nodes);
            return Ok(());
        };
        let mut states = vec![None; 6];
        let (mut whole, mut now_us) = (None, BEGIN_US);
        for (gap_us, node, cost) in requests {
            now_us += gap_us;
            let now = Timestamp::from_us(now_us).expect("a time");
            let state = &mut states[node % usize::try_from(nodes).expect("few")];
            let step = share.step(state.as_ref(), now, cost);
            *state = step.write.after(state.as_ref()).cloned();
            if step.decision.allowed {
                let step = limit.step(whole.as_ref(), now, cost);
                prop_assert!(step.decision.allowed, "{words} among {nodes} at {now}");
                whole = step.write.after(whole.as_ref()).cloned();
            }
        }
    }
}
