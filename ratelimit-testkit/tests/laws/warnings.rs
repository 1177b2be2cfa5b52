//! A limit warns in the decision that crosses its threshold, in that one alone, and in no other.
//! Other rules of when to warn are caught.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
use proptest::test_runner::{RngAlgorithm, TestError, TestRng, TestRunner};
use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{AnyAlgorithm, Limit, Refusal, ReservationId, Timestamp, Verdict};
use ratelimit_testkit::PureStore;

use crate::limit;

const ALGORITHMS: [&str; 13] = [
    "gcra 10/s burst 20",
    "gcra 7/5m burst 9",
    "token-bucket 3/2us burst 11 debt 6",
    "gcra 10/s burst 20 debt 30",
    "fixed-window 20/7s",
    "fixed-window 20/7s debt 25",
    "first-request-window 20/7s",
    "window-log 20/7s",
    "bucketed-window bucket 1s rates 20/7s",
    "sliding-counter 20/7s",
    "sliding-log 20/7s",
    "concurrency 20/7s",
    "fixed-window 20/7s count attempts",
];

/// A rule of when a verdict on a batch of one check warns.
type Warns = fn(&Batch<'_, AnyAlgorithm>, &Verdict) -> bool;

fn warns(batch: &Batch<'_, AnyAlgorithm>, verdict: &Verdict) -> bool {
    batch.warned(verdict).next().is_some()
}

/// A request of one key, and whether it warns by the rule.
fn ask(
    warns: Warns,
    store: &PureStore,
    limit: &Limit<AnyAlgorithm>,
    (op, id, cost): (Op, Option<u128>, u64),
    at_us: u64,
) -> Result<(Verdict, bool), Refusal> {
    let check = Check { limit, key: "a", cost };
    let batch = Batch::one(&check).op(op).now(Now::At(Timestamp::saturating_from_us(at_us)));
    let batch = id.map_or(batch, |id| batch.id(ReservationId::new(id)));
    let verdict = store.decide(&batch)?;
    let warns = warns(&batch, &verdict);
    Ok((verdict, warns))
}

/// What is used, in whole units, and owed.
fn used(store: &PureStore, limit: &Limit<AnyAlgorithm>, at_us: u64) -> u64 {
    let (shown, _) = ask(warns, store, limit, (Op::Peek, None, 0), at_us).expect("decides");
    shown.limit() - shown.remaining() + shown.owed()
}

const OPS: [Op; 9] = [
    Op::Acquire,
    Op::Acquire,
    Op::Force,
    Op::Refund,
    Op::Settle,
    Op::Extend,
    Op::Renew,
    Op::Adopt,
    Op::Reset,
];

/// How much later a request is made, its operation, its id, and its cost.
type Asked = (u64, Op, Option<u128>, u64);

fn requests() -> impl Strategy<Value = Vec<Asked>> {
    let later = select(vec![0, 0, 1, 400_000, 2_500_000, 7_000_000, 60_000_000]);
    vec((later, select(&OPS[..]), prop::option::of(0..4_u128), 0..14_u64), 1..40)
}

/// Each operation warns if it crosses the threshold, and only then; a peek charges nothing.
fn each_operation_warns_if_it_crosses_the_threshold(
    by: Warns,
    (words, percent, requests): (&str, u8, Vec<Asked>),
) -> Result<(), TestCaseError> {
    let limit = limit("l", words).warn_at_percent(percent).expect("a percentage");
    let (store, mut at_us) = (PureStore::new(), 1_795_218_390_000_000);
    for (later_us, op, id, cost) in requests {
        at_us += later_us;
        let before = used(&store, &limit, at_us);
        let peek = ask(by, &store, &limit, (Op::Peek, None, cost), at_us).expect("decides");
        prop_assert!(!peek.1, "a peek of {}", words);
        let Ok((verdict, warns)) = ask(by, &store, &limit, (op, id, cost), at_us) else { continue };
        let after = used(&store, &limit, at_us);
        let reached = |used: u64| used * 100 >= u64::from(percent) * verdict.limit();
        let due = verdict.allowed() && !reached(before) && reached(after);
        let told = format!("{op} {id:?} {cost} of {words} at {percent} %: {before} to {after}");
        prop_assert_eq!(warns, due, "{}", told);
    }
    Ok(())
}

/// A window warns once if it is used so far, and otherwise never.
fn a_window_warns_once(
    by: Warns,
    (percent, attempts, requests): (u8, bool, Vec<(u64, u64)>),
) -> Result<(), TestCaseError> {
    let words = if attempts { "fixed-window 20/3s count attempts" } else { "fixed-window 20/3s" };
    let limit = limit("l", words).warn_at_percent(percent).expect("a percentage");
    let (store, mut at_us) = (PureStore::new(), 0);
    // What was admitted, what was refused, and the warnings, by the window.
    let mut windows: BTreeMap<u64, (u64, u64, u64)> = BTreeMap::new();
    for (later_us, cost) in requests {
        at_us += later_us;
        let (verdict, warns) =
            ask(by, &store, &limit, (Op::Acquire, None, cost), at_us).expect("decides");
        let (admitted, denied, warned) = windows.entry(at_us / 3_000_000).or_default();
        *(if verdict.allowed() { admitted } else { denied }) += cost;
        *warned += u64::from(warns);
    }
    for (admitted, denied, warned) in windows.into_values() {
        let reached = admitted * 100 >= u64::from(percent) * 20;
        prop_assert_eq!(warned, u64::from(reached), "{} and {} of 20", admitted, denied);
    }
    Ok(())
}

/// What the laws of warnings say of a rule: of each operation, and of windows.
fn tried(by: Warns) -> [Result<(), String>; 2] {
    let runner = || {
        let config = ProptestConfig { failure_persistence: None, ..ProptestConfig::default() };
        TestRunner::new_with_rng(config, TestRng::deterministic_rng(RngAlgorithm::ChaCha))
    };
    let of_each = (select(&ALGORITHMS[..]), 1..=100_u8, requests());
    let of_windows = (1..=100_u8, any::<bool>(), vec((0..900_000_u64, 1..9_u64), 1..60));
    let each = |case| each_operation_warns_if_it_crosses_the_threshold(by, case);
    [
        runner().run(&of_each, each).map_err(|error| said(&error)),
        runner()
            .run(&of_windows, |case| a_window_warns_once(by, case))
            .map_err(|error| said(&error)),
    ]
}

fn said<T>(error: &TestError<T>) -> String {
    match error {
        TestError::Abort(reason) | TestError::Fail(reason, _) => reason.to_string(),
    }
}

#[test]
fn a_limit_warns_when_its_threshold_is_crossed_and_only_then() {
    assert_eq!(tried(warns), [Ok(()), Ok(())]);
}

/// How much is used after a decision, and whether that is beyond the threshold.
fn beyond(batch: &Batch<'_, AnyAlgorithm>, verdict: &Verdict) -> (u64, bool) {
    let percent = batch.checks()[0].limit.warns_at_percent().expect("it warns").get();
    let used = verdict.limit() - verdict.remaining() + verdict.owed();
    (used, used * 100 >= u64::from(percent) * verdict.limit())
}

#[test]
fn other_rules_of_when_to_warn_are_caught() {
    let rules: [(&str, Warns, [bool; 2]); 5] = [
        (
            "each decision beyond the threshold",
            |batch, verdict| beyond(batch, verdict).1,
            [true; 2],
        ),
        (
            "each charge beyond it",
            |batch, verdict| {
                verdict.allowed() && verdict.summary().cost > 0 && beyond(batch, verdict).1
            },
            [true; 2],
        ),
        (
            "by the cost, whatever the operation charges",
            |batch, verdict| {
                let accounts = verdict.accounts().map(|(position, account)| {
                    (position, ratelimit_core::Account { charged: None, ..account })
                });
                let alike = Verdict::several(verdict.decisions().to_vec());
                warns(batch, &alike.with_accounts(accounts))
            },
            // A window is only charged by requests here.
            [true, false],
        ),
        (
            "a denial too",
            |batch, verdict| {
                warns(batch, verdict) || !verdict.allowed() && beyond(batch, verdict).1
            },
            [true; 2],
        ),
        ("never", |_, _| false, [true; 2]),
    ];
    for (what, rule, due) in rules {
        assert_eq!(tried(rule).map(|held| held.is_err()), due, "{what}");
    }
}

#[test]
fn a_denial_a_repetition_and_what_another_limit_denies_warn_of_nothing() {
    let at_half = |name, words| limit(name, words).warn_at_percent(50).expect("a percentage");
    let (wide, narrow) =
        (at_half("wide", "gcra 1/d burst 10"), limit("narrow", "gcra 1/d burst 3"));
    let attempts = at_half("attempts", "fixed-window 8/d count attempts");
    let store = PureStore::new();
    let told = |op, id, cost| ask(warns, &store, &wide, (op, id, cost), 0).map(|(_, warns)| warns);
    assert_eq!(told(Op::Acquire, None, 11), Ok(false));
    assert_eq!(told(Op::Acquire, Some(1), 5), Ok(true));
    assert_eq!(told(Op::Acquire, Some(1), 5), Ok(false), "the first has said so");
    assert_eq!(told(Op::Settle, Some(1), 4), Ok(false));
    assert_eq!(told(Op::Acquire, None, 1), Ok(true), "again, after something came back");
    // All are denied, and attempts are charged.
    let checks = [(&wide, "b"), (&narrow, "b"), (&attempts, "b")];
    let checks = checks.map(|(limit, key)| Check { limit, key, cost: 5 });
    let batch = Batch::new(&checks).expect("distinct");
    let verdict = store.decide(&batch).expect("decides");
    let warned: Vec<_> = batch.warned(&verdict).map(|(check, _)| check.limit.name()).collect();
    assert_eq!((verdict.allowed(), warned), (false, vec!["attempts"]));
}
