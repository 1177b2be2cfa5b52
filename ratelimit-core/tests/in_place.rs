//! `step_in_place` decides as `step` does, and leaves the state that `step` writes, also of a state that another algorithm wrote.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::algorithm::{InMemory, PolicyState, Step, Write};
use ratelimit_core::{Algorithm, Policy, Timestamp};

/// Every algorithm, and once more, counting attempts, each that can.
fn policies() -> Vec<Policy> {
    let admitting = [
        "gcra 3/10us burst 2",
        "gcra 1/4us burst 3",
        "fixed-window 4/9us",
        "first-request-window 4/9us",
        "window-log 3/8us",
        "sliding-log 4/8us",
        "sliding-counter 5/7us",
        "bucketed-window bucket 2us rates 3/4us, 5/12us",
        "concurrency 3/6us",
    ];
    let admitting: Vec<Policy> = admitting.map(|words| words.parse().expect(words)).into();
    let trying: Vec<_> = admitting.iter().filter_map(|policy| policy.by_attempts()).collect();
    admitting.into_iter().chain(trying).collect()
}

/// Takes the steps, each by the limit that it names, both by copies and in place.
fn agree(limits: &[Policy], steps: &[(usize, u64, u64)]) {
    let mut state: Option<PolicyState> = None;
    for &(which, us, cost) in steps {
        let limit = &limits[which % limits.len()];
        let now = Timestamp::from_us(us).expect("a time");
        let Step { decision, write } = limit.step(state.as_ref(), now, cost);
        if let Some(before) = &state {
            let mut own = before.clone();
            let placed = limit.step_in_place(&mut own, now, cost);
            assert_eq!(placed.decision, decision);
            assert_eq!(placed.write, write.clone().map(drop));
            if write != Write::Remove {
                assert_eq!(Some(&own), write.after(Some(before)));
            }
        }
        state = write.after(state.as_ref()).cloned();
    }
}

fn steps() -> impl Strategy<Value = Vec<(usize, u64, u64)>> {
    // Time mostly goes forward, and sometimes back.
    let step = (any::<usize>(), 0..6_u64, 0..5_u64, prop::bool::weighted(0.1));
    prop::collection::vec(step, 1..40).prop_map(|steps| {
        let mut us = 100;
        let timed = steps.into_iter().map(|(which, more, cost, back)| {
            us += more;
            (which, if back { us - 20 } else { us }, cost)
        });
        timed.collect()
    })
}

proptest! {
    #[test]
    fn a_limit_whose_algorithm_changes_agrees(
        policies in prop::collection::vec(select(policies()), 1..4),
        steps in steps(),
    ) {
        agree(&policies, &steps);
    }
}
