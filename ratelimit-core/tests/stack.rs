//! A stack of limits decides as the summary of a batch of them.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::{
    Algorithm, Attempts, BucketedWindow, Decision, FixedWindow, Gcra, InMemory, Policy,
    SlidingCounter, SlidingLog, SlidingLogState, Stack, StackState, Step, Timestamp, TokenBucket,
    Verdict, Write,
};

fn limits() -> Vec<Policy> {
    let rate = |text: &str| text.parse().expect("a rate");
    vec![
        Gcra::new(rate("3/10us"), 2).expect("a limit").into(),
        Gcra::new(rate("1/4us"), 3).expect("a limit").into(),
        TokenBucket::new(rate("1/4us"), 3).expect("a limit").into(),
        FixedWindow::new(rate("4/9us")).expect("a limit").into(),
        SlidingLog::new(rate("3/8us")).expect("a limit").into(),
        SlidingCounter::new(rate("5/7us")).expect("a limit").into(),
        BucketedWindow::new(2, &[rate("3/4us"), rate("5/12us")]).expect("a limit").into(),
    ]
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Acquire,
    Refund,
    Force,
}

fn stepped<A: Algorithm>(
    limit: &A,
    state: Option<&A::State>,
    now: Timestamp,
    op: Op,
    cost: u64,
) -> Step<A::State> {
    match op {
        Op::Acquire => limit.step(state, now, cost),
        Op::Refund => limit.refund(state, now, cost).expect("has refunds"),
        Op::Force => limit.force(state, now, cost).expect("can be forced"),
    }
}

/// The same limits side by side, all or nothing.
fn side_by_side(
    limits: &[Policy],
    states: &mut [Option<<Policy as Algorithm>::State>],
    now: Timestamp,
    op: Op,
    cost: u64,
) -> Decision {
    let steps: Vec<_> = limits
        .iter()
        .zip(&*states)
        .map(|(limit, state)| stepped(limit, state.as_ref(), now, op, cost))
        .collect();
    let all = steps.iter().all(|step| step.decision.allowed);
    let mut decisions = Vec::new();
    for ((limit, state), step) in limits.iter().zip(states).zip(steps) {
        let uncharged = limit.step(state.as_ref(), now, 0).decision;
        decisions.push(if step.decision.allowed && !all {
            Decision { cost, ..uncharged }
        } else {
            step.decision
        });
        if all {
            *state = step.write.after(state.as_ref()).cloned();
        }
    }
    *Verdict::several(decisions).summary()
}

proptest! {
    #[test]
    fn a_stack_decides_as_its_limits_side_by_side(
        limits in prop::collection::vec(select(limits()), 1..4),
        trace in prop::collection::vec(
            (0_u64..6, prop_oneof![4 => Just(Op::Acquire), 1 => Just(Op::Refund), 1 => Just(Op::Force)], 0_u64..5),
            1..24,
        ),
    ) {
        let stack = Stack::new(limits.clone()).expect("counts what is admitted");
        let mut states = vec![None; limits.len()];
        let mut stacked: Option<StackState<_>> = None;
        let mut now_us = 100;
        for (later_us, op, cost) in trace {
            now_us += later_us;
            let now = Timestamp::from_us(now_us).expect("a time");
            let due = side_by_side(&limits, &mut states, now, op, cost);
            let step = stepped(&stack, stacked.as_ref(), now, op, cost);
            prop_assert_eq!(step.decision, due);
            if let Write::Put { state, expires } = &step.write {
                let latest = state.states.iter().flatten().map(|one| one.expires).max();
                prop_assert_eq!(latest, Some(*expires));
            }
            stacked = step.write.after(stacked.as_ref()).cloned();
            // An expired stack decides as a new key.
            let recovered = now.saturating_add_us(step.decision.reset_after_us);
            let fresh = stack.step(None, recovered, 1).decision;
            prop_assert_eq!(stack.step(stacked.as_ref(), recovered, 1).decision, fresh);
        }
    }
}

#[test]
fn a_stack_is_charged_at_the_latest_time_of_its_limits() {
    let gcra = |rate: &str| Gcra::new(rate.parse().expect("a rate"), 4).expect("a limit");
    let stack = Stack::new([gcra("3/s"), gcra("9/s")]).expect("a stack");
    let at = |us| Timestamp::from_us(us).expect("a test's time");
    assert_eq!(stack.charged_at(None, at(3)), at(3));
    let charged = stack.step(None, at(5), 1).write;
    for now in [3, 5, 9] {
        assert_eq!(stack.charged_at(charged.after(None), at(now)), at(now.max(5)));
    }
}

#[test]
fn a_stack_has_at_least_one_limit_and_none_that_counts_attempts() {
    assert!(Stack::<Policy>::new([]).is_err());
    let fixed = FixedWindow::new("4/s".parse().expect("a rate")).expect("a limit");
    let refused = Stack::new([fixed.into(), Policy::from(Attempts::new(fixed))]);
    assert!(refused.expect_err("it would charge alone").to_string().contains("attempts"));
    let stack = Stack::new([fixed, FixedWindow::new("2/s".parse().expect("a rate")).expect("one")]);
    assert_eq!(stack.expect("a stack").capacity(), 2);
}

/// A log that panics before it writes, as the contract of `InMemory` asks.
#[derive(Clone, Debug)]
struct Panics(SlidingLog, bool);

impl Algorithm for Panics {
    type State = SlidingLogState;

    fn capacity(&self) -> u64 {
        self.0.capacity()
    }

    fn step(
        &self,
        state: Option<&SlidingLogState>,
        now: Timestamp,
        cost: u64,
    ) -> Step<SlidingLogState> {
        self.0.step(state, now, cost)
    }
}

impl InMemory for Panics {
    fn step_in_place(&self, state: &mut SlidingLogState, now: Timestamp, cost: u64) -> Step<()> {
        if self.1 {
            std::panic::resume_unwind(Box::new(()));
        }
        self.0.step_in_place(state, now, cost)
    }

    fn entries_per_step(&self) -> usize {
        1
    }
}

#[test]
fn a_panic_of_a_stacked_limit_leaves_the_stack_as_it_was() {
    let log = SlidingLog::new("5/h".parse().expect("a rate")).expect("a limit");
    for panics in [[false, true], [true, false], [true, true]] {
        let calm = Stack::new(panics.map(|_| Panics(log, false))).expect("a stack");
        let Write::Put { mut state, .. } = calm.step(None, Timestamp::ZERO, 1).write else {
            panic!("it is charged");
        };
        let before = state.clone();
        let stack = Stack::new(panics.map(|panics| Panics(log, panics))).expect("a stack");
        let step = || stack.step_in_place(&mut state, Timestamp::saturating_from_us(1), 1);
        let stepped = std::panic::catch_unwind(std::panic::AssertUnwindSafe(step));
        assert_eq!(stepped.is_err(), panics[1], "only the last steps in place");
        assert_eq!(state == before, panics[1]);
    }
}
