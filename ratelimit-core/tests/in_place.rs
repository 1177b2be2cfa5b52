//! `step_in_place` and `decision` decide as `step` does, and `step_in_place` leaves the state that `step` writes.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::{
    BucketedWindow, Concurrency, FirstRequestWindow, FixedWindow, Gcra, InMemory, Policy, Rate,
    SlidingCounter, SlidingLog, Stack, Step, Timestamp, TokenBucket, WindowLog, Write,
};

/// Every algorithm, and once more, counting attempts, each that can.
fn policies() -> Vec<Policy> {
    let rate = |text: &str| text.parse().expect("a rate");
    let admitting: Vec<Policy> = vec![
        Gcra::new(rate("3/10us"), 2).expect("a limit").into(),
        Gcra::new(rate("1/4us"), 3).expect("a limit").into(),
        TokenBucket::new(rate("1/4us"), 3).expect("a limit").into(),
        FixedWindow::new(rate("4/9us")).expect("a limit").into(),
        FirstRequestWindow::new(rate("4/9us")).expect("a limit").into(),
        WindowLog::new(rate("3/8us")).expect("a limit").into(),
        SlidingLog::new(rate("4/8us")).expect("a limit").into(),
        SlidingCounter::new(rate("5/7us")).expect("a limit").into(),
        BucketedWindow::new(2, &[rate("3/4us"), rate("5/12us")]).expect("a limit").into(),
        Concurrency::new(rate("3/6us")).expect("a limit").into(),
    ];
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
        assert_eq!(limit.decision(state.as_ref(), now, cost), decision);
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

fn stack_of(limits: impl IntoIterator<Item = (u64, u64)>) -> Stack<Gcra> {
    let limit = |(period_us, burst)| {
        Gcra::new(Rate::per_us(1, period_us).expect("a rate"), burst).expect("a limit")
    };
    Stack::new(limits.into_iter().map(limit)).expect("a stack")
}

#[test]
fn a_peek_by_a_shorter_stack_agrees_on_the_state_of_a_longer_one() {
    let stacks = [stack_of([(1, 1)]), stack_of([(1, 1), (1, 1)])];
    agree(&stacks, &[(1, 100, 1), (0, 100, 0)]);
}

proptest! {
    #[test]
    fn every_algorithm_agrees(policy in select(policies()), steps in steps()) {
        agree(&[policy], &steps);
    }

    /// Some stacks have more limits than a fast step serves, and one stack replaces another.
    #[test]
    fn stacks_of_limits_with_fast_steps_agree(
        stacks in prop::collection::vec(
            prop::collection::vec((1..7_u64, 1..6_u64), 1..6),
            1..3,
        ),
        steps in steps(),
    ) {
        agree(&stacks.into_iter().map(stack_of).collect::<Vec<_>>(), &steps);
    }

    #[test]
    fn a_limit_whose_algorithm_changes_agrees(
        policies in prop::collection::vec(select(policies()), 2..4),
        steps in steps(),
    ) {
        agree(&policies, &steps);
    }

    #[test]
    fn stacks_of_every_algorithm_agree(
        // More limits than one step serves.
        policies in prop::collection::vec(select(policies()), 1..7),
        steps in steps(),
    ) {
        let admitting = policies.iter().map(|policy| policy.by_admissions());
        agree(&[Stack::new(admitting).expect("a stack")], &steps);
    }
}
