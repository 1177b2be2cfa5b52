//! A step in place and a decision alone decide what a step does, and leave the state that it writes.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::{
    BucketedWindow, Concurrency, FirstRequestWindow, FixedWindow, Gcra, InMemory, Policy, Rate,
    SlidingCounter, SlidingLog, Stack, Step, Timestamp, TokenBucket, WindowLog, Write,
};

/// Every algorithm, and each that can count attempts so as well.
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

/// Takes the steps, each of the limit that it names, by copies and in place.
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
    // The time goes on as a rule, and back at times.
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
    fn of_every_algorithm(policy in select(policies()), steps in steps()) {
        agree(&[policy], &steps);
    }

    /// With more limits than a stack steps fast, and a stack that another one replaces.
    #[test]
    fn of_stacks_of_limits_with_fast_steps(
        stacks in prop::collection::vec(
            prop::collection::vec((1..7_u64, 1..6_u64), 1..6),
            1..3,
        ),
        steps in steps(),
    ) {
        let limit = |(period_us, burst)| {
            Gcra::new(Rate::per_us(1, period_us).expect("a rate"), burst).expect("a limit")
        };
        let stack = |limits: Vec<_>| Stack::new(limits.into_iter().map(limit)).expect("a stack");
        agree(&stacks.into_iter().map(stack).collect::<Vec<_>>(), &steps);
    }

    #[test]
    fn of_a_limit_whose_algorithm_changes(
        policies in prop::collection::vec(select(policies()), 2..4),
        steps in steps(),
    ) {
        agree(&policies, &steps);
    }

    #[test]
    fn of_stacks(
        // More of them than are stepped once only.
        policies in prop::collection::vec(select(policies()), 1..7),
        steps in steps(),
    ) {
        let admitting = policies.iter().map(|policy| policy.by_admissions());
        agree(&[Stack::new(admitting).expect("a stack")], &steps);
    }
}
