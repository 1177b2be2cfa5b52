//! A limit warns in the decision that crosses its threshold, in that one alone, and in no other.

use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;
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

/// A request of one key, and whether it warns.
fn ask(
    store: &PureStore,
    limit: &Limit<AnyAlgorithm>,
    (op, id, cost): (Op, Option<u128>, u64),
    at_us: u64,
) -> Result<(Verdict, bool), Refusal> {
    let check = Check { limit, key: "a", cost };
    let batch = Batch::one(&check).op(op).now(Now::At(Timestamp::saturating_from_us(at_us)));
    let batch = id.map_or(batch, |id| batch.id(ReservationId::new(id)));
    let verdict = store.decide(&batch)?;
    let warns = batch.warned(&verdict).next().is_some();
    Ok((verdict, warns))
}

/// What is used, in whole units, and owed.
fn used(store: &PureStore, limit: &Limit<AnyAlgorithm>, at_us: u64) -> u64 {
    let (shown, warns) = ask(store, limit, (Op::Peek, None, 0), at_us).expect("decides");
    assert!(!warns, "a peek charges nothing");
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

fn requests() -> impl Strategy<Value = Vec<(u64, Op, Option<u128>, u64)>> {
    let later = select(vec![0, 0, 1, 400_000, 2_500_000, 7_000_000, 60_000_000]);
    vec((later, select(&OPS[..]), prop::option::of(0..4_u128), 0..14_u64), 1..40)
}

proptest! {
    #[test]
    fn each_operation_warns_if_it_crosses_the_threshold_and_only_then(
        words in select(&ALGORITHMS[..]),
        percent in 1..=100_u8,
        requests in requests(),
    ) {
        let limit = limit("l", words).warn_at_percent(percent).expect("a percentage");
        let (store, mut at_us) = (PureStore::new(), 1_795_218_390_000_000);
        for (later_us, op, id, cost) in requests {
            at_us += later_us;
            let before = used(&store, &limit, at_us);
            let Ok((verdict, warns)) = ask(&store, &limit, (op, id, cost), at_us) else { continue };
            let after = used(&store, &limit, at_us);
            let reached = |used: u64| used * 100 >= u64::from(percent) * verdict.limit();
            let due = verdict.allowed() && !reached(before) && reached(after);
            prop_assert_eq!(warns, due, "{} {:?} {} of {}: {} to {}", op, id, cost, words, before, after);
        }
    }

    #[test]
    fn a_window_warns_once_if_it_is_used_so_far_and_otherwise_never(
        percent in 1..=100_u8,
        attempts in any::<bool>(),
        requests in vec((0..900_000_u64, 1..9_u64), 1..60),
    ) {
        let words = if attempts { "fixed-window 20/3s count attempts" } else { "fixed-window 20/3s" };
        let limit = limit("l", words).warn_at_percent(percent).expect("a percentage");
        let (store, mut at_us) = (PureStore::new(), 0);
        // What was admitted, what was refused, and the warnings, by the window.
        let mut windows: BTreeMap<u64, (u64, u64, u64)> = BTreeMap::new();
        for (later_us, cost) in requests {
            at_us += later_us;
            let (verdict, warns) = ask(&store, &limit, (Op::Acquire, None, cost), at_us).expect("decides");
            let (admitted, denied, warned) = windows.entry(at_us / 3_000_000).or_default();
            *(if verdict.allowed() { admitted } else { denied }) += cost;
            *warned += u64::from(warns);
        }
        for (admitted, denied, warned) in windows.into_values() {
            let reached = admitted * 100 >= u64::from(percent) * 20;
            prop_assert_eq!(warned, u64::from(reached), "{} and {} of 20", admitted, denied);
        }
    }
}

#[test]
fn a_denial_a_repetition_and_what_another_limit_denies_warn_of_nothing() {
    let warns = |name, words| limit(name, words).warn_at_percent(50).expect("a percentage");
    let (wide, narrow) = (warns("wide", "gcra 1/d burst 10"), limit("narrow", "gcra 1/d burst 3"));
    let attempts = warns("attempts", "fixed-window 8/d count attempts");
    let store = PureStore::new();
    let told = |op, id, cost| ask(&store, &wide, (op, id, cost), 0).map(|(_, warns)| warns);
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
