//! A batch on compact states decides as on full states.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::cell::RefCell;

use proptest::prelude::*;
use proptest::test_runner::TestRunner;
use ratelimit_core::algorithm::{Compact, InMemory, PolicyState, Write};
use ratelimit_core::store::{Batch, Check, CompactStates, Op, Snapshot, decide, decide_compact};
use ratelimit_core::{Algorithm, FixedWindow, Gcra, Limit, Policy, Rate, Timestamp};

const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

/// Compact states, and the writes to them.
struct CompactOnly {
    states: Vec<Option<Compact>>,
    writes: Vec<Write<Compact>>,
}

impl CompactStates for CompactOnly {
    fn get(&mut self, position: usize) -> Option<Compact> {
        self.states[position]
    }

    fn note(&mut self, position: usize, write: Write<Compact>) -> Option<()> {
        self.writes[position] = write;
        Some(())
    }
}

/// Limits with and without a fast step, limits that charge denials, and limits without compact states.
fn policies() -> impl Strategy<Value = Policy> {
    let rates = (1..40_u64, prop_oneof![Just(1_000_000_u64), Just(7_001), Just(60_000_000)]);
    (rates, 1..30_u64, 0..32_u8).prop_map(|((count, period_us), burst, kind)| {
        let rate = Rate::per_us(count, period_us).expect("a rate");
        let gcra = |rate| Policy::from(Gcra::new(rate, burst).expect("a limit"));
        match kind {
            // Ticks of a second.
            31 => gcra(Rate::per_us(1_000_000_007, 30 * 86_400_000_000).expect("a rate")),
            0 => FixedWindow::new(rate).expect("a limit").into(),
            1 | 2 => gcra(rate).by_attempts().expect("counts"),
            3..16 => gcra(Rate::per_us(1, period_us).expect("a rate")),
            _ => gcra(rate),
        }
    })
}

/// The state of a key before the batch.
#[derive(Clone, Debug)]
enum Before {
    /// The state after charges by the limit: their age, and their number.
    Charges(Vec<(u64, u64)>),
    /// Numbers of another limit of that name, or that no limit writes, and their age.
    Numbers { ago_us: u64, span_us: u64, extra: u64 },
}

/// A limit, the state before, and the cost.
type Asked = (Policy, Before, u64);

fn asked() -> impl Strategy<Value = Asked> {
    let ago_us = || prop_oneof![0..40_u64, 0..20_000_u64, 0..2_000_000_u64];
    let charges = prop::collection::vec((ago_us(), 1..6_u64), 1..5).prop_map(Before::Charges);
    let numbers = (ago_us(), 0..40_000_000_u64, prop_oneof![Just(0_u64), 0..40_u64])
        .prop_map(|(ago_us, span_us, extra)| Before::Numbers { ago_us, span_us, extra });
    let before = prop_oneof![3 => charges, 1 => numbers];
    (policies(), before, prop_oneof![4 => Just(1_u64), 1 => 0..32_u64])
}

/// The state of a key.
fn state(policy: &Policy, before: &Before) -> Option<PolicyState> {
    let ago = |us: u64| Timestamp::saturating_from_us(BEGIN.as_us() - us);
    match before {
        Before::Charges(charges) => {
            let mut charges = charges.clone();
            charges.sort_unstable_by_key(|(ago_us, _)| std::cmp::Reverse(*ago_us));
            charges.iter().fold(None, |state, (ago_us, cost)| {
                let step = policy.step(state.as_ref(), ago(*ago_us), *cost);
                step.write.after(state.as_ref()).cloned()
            })
        }
        Before::Numbers { ago_us, span_us, extra } => {
            // Only for limits with such states.
            let at = ago(*ago_us);
            Policy::from_compact(Compact { at, span_us: *span_us, extra: *extra })
                .filter(|_| policy.is_compact())
        }
    }
}

/// The number of batches of each outcome.
#[derive(Debug, Default)]
struct Seen {
    allowed: u32,
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
    let now = Timestamp::saturating_from_us(BEGIN.as_us() - back_us);

    let states = asked.iter().map(|(policy, before, _)| state(policy, before));
    let mut kept = Snapshot { now, states: states.collect() };
    let compact = |state: &Option<PolicyState>| state.as_ref().and_then(Policy::to_compact);
    let states: Vec<_> = kept.states.iter().map(compact).collect();
    let are_compact = states.iter().all(Option::is_some);
    let mut compact = CompactOnly { states, writes: vec![Write::Keep; checks.len()] };
    let verdict = decide(&batch, now, &mut kept).expect("no refusal");
    prop_assert_eq!(decide_compact(&batch, Timestamp::MAX, &mut compact), None);

    let mut seen = seen.borrow_mut();
    let Some(compact_verdict) = decide_compact(&batch, now, &mut compact) else {
        seen.left_to_others += 1;
        prop_assert!(!are_compact);
        return Ok(());
    };
    prop_assert_eq!(&compact_verdict, &verdict);
    let count = if verdict.allowed() { &mut seen.allowed } else { &mut seen.denied };
    *count += 1;
    // A state without a write stays as it is.
    let written = compact.states.iter().zip(&compact.writes);
    let written = written.map(|(state, write)| write.after(state.as_ref()).copied());
    let kept = kept.states.iter().map(|state| state.as_ref().and_then(Policy::to_compact));
    prop_assert_eq!(written.collect::<Vec<_>>(), kept.collect::<Vec<_>>());
    Ok(())
}

#[test]
fn a_batch_on_compact_states_decides_as_on_full_states() {
    let ops = prop_oneof![4 => Just(Op::Acquire), 1 => Just(Op::Peek)];
    let back_us = prop_oneof![4 => Just(0_u64), 1 => 0..3_000_000_u64];
    let cases = (prop::collection::vec(asked(), 2..5), ops, back_us);
    let seen = RefCell::default();
    let config = ProptestConfig { cases: 8_000, ..ProptestConfig::with_source_file(file!()) };
    TestRunner::new(config)
        .run(&cases, |(asked, op, back_us)| agrees(&asked, op, back_us, &seen))
        .unwrap_or_else(|failure| panic!("{failure}"));
    let Seen { allowed, denied, left_to_others } = seen.into_inner();
    assert!(allowed.min(denied).min(left_to_others) > 500, "{allowed} {denied} {left_to_others}");
}
