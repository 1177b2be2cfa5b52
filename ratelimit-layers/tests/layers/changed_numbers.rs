//! Allotments that outlive the numbers of their limit: what is given back of them is worth no more
//! than what was charged.

use std::sync::Arc;
use std::time::Duration;

use proptest::prelude::*;
use ratelimit_core::{Algorithm, AnyAlgorithm, Clock, ManualClock};
use ratelimit_layers::Allotments;

use crate::common::{BEGIN, Memory, ask, limit, memory, paused_runtime, run_until_idle};

type Node = Allotments<Arc<Memory>, AnyAlgorithm, ManualClock>;

const LIFETIME: Duration = Duration::from_millis(500);

/// Limits before and after a change, and what the second gives back: so many units in so many
/// microseconds, at once for a window.
const CHANGES: [(&str, &str, u64, u64); 6] = [
    ("gcra 1000/s", "gcra 2/m burst 3", 2, 60_000_000),
    ("token-bucket 10/s burst 40", "token-bucket 1/h burst 40", 1, 3_600_000_000),
    ("gcra 1/h burst 40", "gcra 10/s burst 40", 10, 1_000_000),
    ("gcra 10/s burst 80", "gcra 10/s burst 40", 10, 1_000_000),
    ("fixed-window 100/m", "fixed-window 10/m", 10, 60_000_000),
    ("fixed-window 10/s", "fixed-window 100/s", 100, 1_000_000),
];

/// Requests: which of five nodes asks, after how many microseconds, at what cost.
type Requests = Vec<(usize, u64, u64)>;

fn requests() -> impl Strategy<Value = Requests> {
    let after_us = prop_oneof![6 => Just(0), 3 => 0..5_000_u64, 1 => 0..2_000_000_u64];
    prop::collection::vec((0..5_usize, after_us, 1..4_u64), 1..60)
}

/// What is admitted under the second limit, and when, once these requests have been asked under the
/// first.
fn admitted_after(change: [&str; 2], before: &Requests, after: &Requests) -> Vec<(u64, u64)> {
    paused_runtime().block_on(async {
        let clock = ManualClock::new(BEGIN);
        let store = Arc::new(memory(&clock));
        let nodes: Vec<Node> = (0..5)
            .map(|_| {
                let builder = Allotments::builder().clock(clock.clone());
                builder.divisor(1).lifetime(LIFETIME).build(store.clone())
            })
            .collect();
        let limits = change.map(|words| limit("changed", words));
        let mut admitted = Vec::new();
        for (limit, requests) in limits.iter().zip([before, after]) {
            admitted.clear();
            for (node, after_us, cost) in requests {
                clock.advance(Duration::from_micros(*after_us));
                if ask(&nodes[*node], limit, "alice", *cost).await.allowed() {
                    admitted.push((clock.now().as_us(), *cost));
                }
                // What was settled in a task.
                run_until_idle().await;
            }
        }
        admitted
    })
}

/// The most that is admitted at one moment.
fn at_once(admitted: &[(u64, u64)]) -> u64 {
    admitted.iter().map(|(_, cost)| cost).sum()
}

/// Five processes have drawn from a thousand a second when the limit becomes two a minute: 7 and 14
/// were admitted of 3.
#[test]
fn of_a_limit_that_is_lowered_no_more_is_admitted_once_allotments_go_back() {
    let before: Requests = (0..60).map(|n| (n % 5, 0, 1)).collect();
    let after: Requests = (0..40).map(|n| (n % 5, 0, 1)).collect();
    for (old, new, ..) in CHANGES {
        let most = limit("changed", new).algorithm().capacity();
        let admitted = at_once(&admitted_after([old, new], &before, &after));
        assert!(admitted <= most, "{old} became {new}: {admitted} of {most}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn after_a_change_a_fleet_admits_what_the_new_limit_admits(
        (old, new, units, us) in prop::sample::select(&CHANGES[..]),
        before in requests(),
        after in requests(),
    ) {
        let admitted = admitted_after([old, new], &before, &after);
        let capacity = limit("changed", new).algorithm().capacity();
        let lifetime_us = u64::try_from(LIFETIME.as_micros()).expect("short");
        for (first, (begin_us, _)) in admitted.iter().enumerate() {
            let mut sum = 0;
            for (end_us, cost) in &admitted[first..] {
                sum += cost;
                let back = if new.starts_with("fixed-window") {
                    (end_us / us - begin_us / us) * units
                } else {
                    ((end_us - begin_us + lifetime_us) * units).div_ceil(us)
                };
                prop_assert!(sum <= capacity + back, "{old} became {new}: {sum} in {begin_us}..={end_us}");
            }
        }
    }
}
