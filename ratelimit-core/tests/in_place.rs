//! `step_in_place` decides as `step` does, and leaves the state that `step` writes.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::{InMemory, Policy, Stack, Step, Timestamp, Write};

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
fn agree<A: InMemory>(limits: &[A], steps: &[(usize, u64, u64)])
where
    A::State: PartialEq + std::fmt::Debug,
{
    let mut state: Option<A::State> = None;
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
        let entries = |state: Option<&A::State>| state.map_or(0, A::entries_in);
        let before = entries(state.as_ref());
        assert!(entries(write.after(state.as_ref())) <= before + limit.entries_per_step());
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

    /// Some stacks have more limits than are stepped without an allocation, and one stack replaces another.
    #[test]
    fn stacks_of_every_algorithm_agree(
        stacks in prop::collection::vec(prop::collection::vec(select(policies()), 1..10), 1..3),
        steps in steps(),
    ) {
        let stack = |limits: Vec<Policy>| {
            Stack::new(limits.into_iter().map(Policy::by_admissions)).expect("a stack")
        };
        agree(&stacks.into_iter().map(stack).collect::<Vec<_>>(), &steps);
    }
}
