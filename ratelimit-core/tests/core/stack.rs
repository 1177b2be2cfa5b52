//! A stack of limits decides as the summary of a batch of them.

use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::algorithm::{StackState, Write};
use ratelimit_core::store::{Batch, Check, Op, Snapshot, decide};
use ratelimit_core::{Algorithm, AnyAlgorithm, Gcra, Limit, Stack, Timestamp};

fn limits() -> Vec<AnyAlgorithm> {
    let limits = [
        "gcra 3/10us burst 2",
        "gcra 1/4us burst 3",
        "fixed-window 4/9us",
        "sliding-log 3/8us",
        "sliding-counter 5/7us",
        "bucketed-window bucket 2us rates 3/4us, 5/12us",
        "gcra 0/us",
    ];
    limits.map(|words| words.parse().expect(words)).into()
}

/// The limits of a batch, by their places.
fn named_limits(limits: &[AnyAlgorithm]) -> Vec<Limit<AnyAlgorithm>> {
    let named = limits.iter().enumerate().map(|(n, limit)| Limit::new(&n.to_string(), *limit));
    named.collect::<Result<_, _>>().expect("names")
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
        let limits = named_limits(&limits);
        let mut side_by_side = Snapshot { now: Timestamp::ZERO, states: vec![None; limits.len()] };
        let mut stacked: Option<StackState<_>> = None;
        let mut now_us = 100;
        for (later_us, op, cost) in trace {
            now_us += later_us;
            let now = Timestamp::from_us(now_us).expect("a time");
            let checks: Vec<_> = limits.iter().map(|limit| Check { limit, key: "k", cost }).collect();
            let batch = Batch::new(&checks).expect("distinct").op(op);
            let due = decide(&batch, now, &mut side_by_side).expect("no refusal");
            let step = match op {
                Op::Refund => stack.refund(stacked.as_ref(), now, cost).expect("has refunds"),
                Op::Force => stack.force(stacked.as_ref(), now, cost).expect("can be forced"),
                _ => stack.step(stacked.as_ref(), now, cost),
            };
            prop_assert_eq!(&step.decision, due.summary());
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
fn a_stack_has_at_least_one_limit_and_counts_no_attempts() {
    assert!(Stack::<AnyAlgorithm>::new([]).is_err());
    let algorithm = |words: &str| words.parse::<AnyAlgorithm>().expect(words);
    let stack = Stack::new(["fixed-window 4/s", "fixed-window 2/s"].map(algorithm));
    let stack = stack.expect("a stack");
    assert_eq!(stack.capacity(), 2);
    let refused = Limit::new("l", stack).and_then(Limit::count_attempts);
    let message = refused.expect_err("it is charged as a whole").to_string();
    assert!(message.contains("no meaning for stack"), "{message}");
}
