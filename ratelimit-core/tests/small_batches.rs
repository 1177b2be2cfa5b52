//! A batch that is decided on small states is decided as on the states themselves.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use ratelimit_core::{
    Algorithm, Batch, Check, FixedWindow, Gcra, Hold, Limit, Op, Policy, PolicyState, Rate, Small,
    SmallStates, States, Tick, Write, decide, decide_small,
};

const BEGIN: Tick = Tick::saturating_from_us(1_795_218_392_123_456);

/// What a store keeps, and what was done to it.
struct Kept {
    states: Vec<Option<PolicyState>>,
    writes: Vec<Option<Write<PolicyState>>>,
}

impl States<PolicyState> for Kept {
    fn get(&self, position: usize) -> Option<&PolicyState> {
        self.states[position].as_ref()
    }

    fn put(&mut self, position: usize, write: Write<PolicyState>) {
        self.writes[position] = Some(write);
    }

    fn hold(&self, _: usize) -> Option<Hold> {
        None
    }

    fn put_hold(&mut self, _: usize, _: Hold, _: Tick) {}
}

/// The same in numbers.
struct Told {
    states: Vec<Option<Small>>,
    writes: Vec<Option<Write<Small>>>,
}

impl SmallStates for Told {
    fn get(&mut self, position: usize) -> Option<Small> {
        self.states[position]
    }

    fn note(&mut self, position: usize, write: Write<Small>) -> Option<()> {
        self.writes[position] = Some(write);
        Some(())
    }
}

/// Limits that are quick, and that are not; that charge denials; whose states are not small.
fn policies() -> impl Strategy<Value = Policy> {
    let rates = (1..40_u64, prop_oneof![Just(1_000_000_u64), Just(7_001), Just(60_000_000)]);
    (rates, 1..30_u64, 0..32_u8).prop_map(|((count, period_us), burst, kind)| {
        let rate = Rate::new(count, period_us).expect("a rate");
        let gcra = |rate| Policy::from(Gcra::new(rate, burst).expect("a limit"));
        match kind {
            0 => FixedWindow::new(rate).expect("a limit").into(),
            1 | 2 => gcra(rate).by_attempts().expect("counts"),
            3..16 => gcra(Rate::new(1, period_us).expect("a rate")),
            _ => gcra(rate),
        }
    })
}

/// A limit, what was charged to it before and how long ago, and what it is asked for.
type Asked = (Policy, Vec<(u64, u64)>, u64);

fn asked() -> impl Strategy<Value = Asked> {
    let ago_us = prop_oneof![0..40_u64, 0..20_000_u64, 0..2_000_000_u64];
    let before = prop::collection::vec((ago_us, 1..6_u64), 1..5);
    (policies(), before, prop_oneof![4 => Just(1_u64), 1 => 0..32_u64])
}

/// What the charges have left.
fn charged(policy: &Policy, charges: &[(u64, u64)]) -> Option<PolicyState> {
    let mut charges = charges.to_vec();
    charges.sort_unstable_by_key(|(ago_us, _)| std::cmp::Reverse(*ago_us));
    charges.iter().fold(None, |state, (ago_us, cost)| {
        let at = Tick::saturating_from_us(BEGIN.as_us() - ago_us);
        let step = policy.step(state.as_ref(), at, *cost);
        step.write.after(state.as_ref()).cloned()
    })
}

/// How often what was seen.
#[derive(Debug, Default)]
struct Seen {
    charged: u32,
    denied: u32,
    left_to_others: u32,
}

fn agrees(
    asked: &[Asked],
    op: Op,
    back_us: u64,
    seen: &RefCell<Seen>,
) -> Result<(), TestCaseError> {
    let named = asked.iter().enumerate();
    let named = named.map(|(n, (policy, ..))| Limit::new(&n.to_string(), *policy));
    let limits: Vec<_> = named.collect::<Result<_, _>>().expect("names");
    let costs = limits.iter().zip(asked).map(|(limit, (.., cost))| (limit, *cost));
    let checks: Vec<_> = costs.map(|(limit, cost)| Check { limit, key: "k", cost }).collect();
    let batch = Batch::new(&checks).expect("distinct").op(op);
    let now = Tick::saturating_from_us(BEGIN.as_us() - back_us);

    let states = asked.iter().map(|(policy, charges, _)| charged(policy, charges));
    let mut kept = Kept { states: states.collect(), writes: vec![None; checks.len()] };
    let small = |state: &Option<PolicyState>| state.as_ref().and_then(Policy::to_small);
    let states: Vec<_> = kept.states.iter().map(small).collect();
    let are_small = states.iter().all(Option::is_some);
    let mut told = Told { states, writes: vec![None; checks.len()] };
    let verdict = decide(&batch, now, &mut kept).expect("no refusal");

    let mut seen = seen.borrow_mut();
    let Some(told_verdict) = decide_small(&batch, now, &mut told) else {
        seen.left_to_others += 1;
        let charges = limits.iter().any(|limit| limit.algorithm().charges_denials());
        prop_assert!(!are_small || (charges && !verdict.allowed()));
        return Ok(());
    };
    prop_assert_eq!(&told_verdict, &verdict);
    if !verdict.allowed() || op == Op::Peek {
        seen.denied += 1;
        prop_assert!(kept.writes.iter().all(Option::is_none));
        return Ok(());
    }
    seen.charged += 1;
    let written = kept.writes.into_iter().flatten();
    let written = written.map(|write| write.map(|state| Policy::to_small(&state).expect("small")));
    prop_assert_eq!(
        told.writes.into_iter().flatten().collect::<Vec<_>>(),
        written.collect::<Vec<_>>()
    );
    Ok(())
}

#[test]
fn a_batch_on_small_states_is_decided_as_on_the_states_themselves() {
    let ops = prop_oneof![4 => Just(Op::Acquire), 1 => Just(Op::Peek)];
    let back_us = prop_oneof![4 => Just(0_u64), 1 => 0..3_000_000_u64];
    let cases = (prop::collection::vec(asked(), 2..5), ops, back_us);
    let seen = RefCell::default();
    let config = ProptestConfig { cases: 8_000, ..ProptestConfig::with_source_file(file!()) };
    TestRunner::new(config)
        .run(&cases, |(asked, op, back_us)| agrees(&asked, op, back_us, &seen))
        .unwrap_or_else(|failure| panic!("{failure}"));
    let Seen { charged, denied, left_to_others } = seen.into_inner();
    assert!(charged.min(denied).min(left_to_others) > 500, "{charged} {denied} {left_to_others}");
}
