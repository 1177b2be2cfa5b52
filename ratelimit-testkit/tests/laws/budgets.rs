//! Budgets whose costs are known late: what limits with a debt bound, and what extensions and
//! adopting must not create.

use proptest::prelude::*;
use ratelimit_core::store::Op;
use ratelimit_core::{Algorithm, AnyAlgorithm};
use ratelimit_testkit::PureStore;

use crate::{ask, limit};

/// What may owe, with the units that come back per microsecond as a fraction: `units / us`.
const OWING: [(&str, u64, u64); 5] = [
    ("gcra 10/s burst 20 debt 30", 10, 1_000_000),
    ("gcra 7/5m burst 7 debt 3", 7, 300_000_000),
    ("token-bucket 3/2us burst 2 debt 1", 3, 2),
    ("fixed-window 10/s debt 25", 10, 1_000_000),
    ("fixed-window 3/7us debt 1", 3, 7),
];

/// What a request used and no limit charged, also of a limit without a debt. A lease ends at any
/// cost.
#[test]
fn what_is_used_beyond_a_limit_is_told() {
    for words in [
        "gcra 10/d burst 20",
        "token-bucket 10/d burst 20",
        "fixed-window 20/d",
        "first-request-window 20/d",
        "window-log 20/d",
        "bucketed-window bucket 1h rates 20/1d",
        "sliding-counter 20/d",
        "sliding-log 20/d",
        "concurrency 20/1h",
        "fixed-window 20/d count attempts",
        "gcra 10/d burst 20 debt 5",
    ] {
        let (limit, store) = (limit("l", words), PureStore::new());
        let debt = limit.algorithm().debt();
        let told = |op, cost| {
            let verdict = ask(&store, &[&limit], (op, None, cost), 0).expect("decides");
            (verdict.forgiven(), verdict.owed())
        };
        assert_eq!(told(Op::Force, 15), (0, 0), "{words}");
        assert_eq!(told(Op::Force, 12), (7 - debt, debt), "{words}");
        assert_eq!(told(Op::Acquire, 3), (0, debt), "{words}");
    }
    for (words, forgiven) in [("gcra 10/d burst 20", 5), ("concurrency 20/1h", 0)] {
        let (limit, store) = (limit("l", words), PureStore::new());
        let _ = ask(&store, &[&limit], (Op::Acquire, Some(1), 10), 0).expect("fits");
        let settled = ask(&store, &[&limit], (Op::Settle, Some(1), 25), 0).expect("is known");
        assert_eq!(settled.forgiven(), forgiven, "{words}");
    }
}

/// Parts of a recovery that pass, operations with the number of an id, and costs in parts of the
/// capacity.
type Story = Vec<(u64, Op, u128, u64)>;

fn stories() -> impl Strategy<Value = ((&'static str, u64, u64), Story)> {
    let op = prop::sample::select(vec![Op::Acquire, Op::Extend, Op::Settle, Op::Force]);
    let step = (prop_oneof![Just(0), 0..40_u64], op, 0..4_u128, 0..24_u64);
    (prop::sample::select(&OWING[..]), prop::collection::vec(step, 1..24))
}

proptest! {
    /// What was used, less what was forgiven, in any interval of length `x` is at most burst + rate
    /// · x + debt. A window is aligned, so an interval touches one more.
    #[test]
    fn what_is_used_and_not_forgiven_is_bounded((limit_of, story) in stories()) {
        let (words, units, us) = limit_of;
        let (limit, store) = (limit("l", words), PureStore::new());
        let (capacity, debt) = (limit.algorithm().capacity(), limit.algorithm().debt());
        let aligned = matches!(limit.algorithm(), AnyAlgorithm::FixedWindow(_));
        let (mut at_us, mut used) = (5 * us, Vec::<(u64, Option<u128>, u64)>::new());
        let mut reserved = [None::<u64>; 4];
        for (passes, op, id, parts) in story {
            at_us += passes * us.div_ceil(units) / 3;
            let cost = parts * capacity / 8;
            let named = (op != Op::Force).then_some(id);
            let Ok(verdict) = ask(&store, &[&limit], (op, named, cost), at_us) else { continue };
            let known = &mut reserved[usize::try_from(id).expect("a few")];
            let charged = match op {
                // The same again is answered, and charges nothing.
                Op::Acquire if !verdict.allowed() || known.is_some() => 0,
                Op::Acquire => {
                    *known = Some(cost);
                    cost
                }
                Op::Extend if !verdict.allowed() => 0,
                Op::Extend | Op::Settle => {
                    let before = known.unwrap_or_default();
                    // What a settlement gives back was not used.
                    let mut unused = if op == Op::Settle { before.saturating_sub(cost) } else { 0 };
                    for (_, _, charged) in used.iter_mut().rev().filter(|(_, by, _)| *by == named) {
                        let taken = unused.min(*charged);
                        (*charged, unused) = (*charged - taken, unused - taken);
                    }
                    *known = Some(if op == Op::Extend { before.max(cost) } else { cost });
                    cost.saturating_sub(before)
                }
                _ => cost,
            };
            used.push((at_us, named, charged - verdict.forgiven()));
        }
        for (first, (begin_us, ..)) in used.iter().enumerate() {
            let mut sum = 0;
            for (end_us, _, charged) in &used[first..] {
                sum += charged;
                let back = if aligned {
                    (end_us / us - begin_us / us) * units
                } else {
                    ((end_us - begin_us) * units).div_ceil(us)
                };
                prop_assert!(sum <= capacity + back + debt, "{words}: {sum} in {begin_us}..={end_us}");
            }
        }
    }

    /// An extension leaves as much as one request of the total would have, changes nothing when it
    /// is repeated or denied, and is settled as such a request is.
    #[test]
    fn an_extension_is_what_a_larger_reservation_would_have_been(
        words in prop::sample::select(&["gcra 10/s burst 20", "fixed-window 20/s", "gcra 10/s burst 20 debt 5"][..]),
        (first, total, settled) in (1..20_u64, 1..30_u64, 0..30_u64),
    ) {
        let (limit, grown, whole) = (limit("l", words), PureStore::new(), PureStore::new());
        let reserved = ask(&grown, &[&limit], (Op::Acquire, Some(1), first), 0).expect("fits");
        let extended = ask(&grown, &[&limit], (Op::Extend, Some(1), total), 0).expect("is known");
        let again = ask(&grown, &[&limit], (Op::Extend, Some(1), total), 0).expect("is known");
        prop_assert_eq!(extended.allowed(), total <= 20);
        prop_assert_eq!(again.summary().remaining, extended.summary().remaining);
        let cost = if extended.allowed() { first.max(total) } else { first };
        let due = ask(&whole, &[&limit], (Op::Acquire, Some(1), cost), 0).expect("fits");
        prop_assert_eq!(extended.remaining(), due.remaining(), "after {}", reserved.remaining());
        let settle = (Op::Settle, Some(1), settled);
        prop_assert_eq!(
            ask(&grown, &[&limit], settle, 0).map(|verdict| (verdict.remaining(), verdict.owed())),
            ask(&whole, &[&limit], settle, 0).map(|verdict| (verdict.remaining(), verdict.owed()))
        );
    }

    /// A charge counts under a limit that has been changed, even if another limit wrote the state.
    #[test]
    fn a_forced_charge_counts_under_a_changed_limit(
        (before, after) in prop::sample::select(&[
            ("fixed-window 60/h", "fixed-window 10/m"), ("fixed-window 60/h debt 5", "fixed-window 10/m debt 5"),
            ("fixed-window 5/3s", "fixed-window 10/s"), ("first-request-window 60/h", "first-request-window 10/m"),
            ("gcra 60/h", "gcra 10/m"), ("sliding-counter 60/h", "sliding-counter 10/m"), ("sliding-log 60/h", "sliding-log 10/m"),
        ][..]),
        (used, passes_us, charged) in (1..5_u64, 0..7_000_000_000_u64, 1..12_u64),
    ) {
        let (before, after, store) = (limit("l", before), limit("l", after), PureStore::new());
        let (at_us, then_us) = (1_795_218_392_123_456, 1_795_218_392_123_456 + passes_us);
        let _ = ask(&store, &[&before], (Op::Acquire, None, used), at_us).expect("fits");
        let left = ask(&store, &[&after], (Op::Peek, None, 0), then_us).expect("decides").remaining();
        let _ = ask(&store, &[&after], (Op::Force, None, charged), then_us).expect("it can be forced");
        let peek = ask(&store, &[&after], (Op::Peek, None, 0), then_us).expect("decides");
        prop_assert!(peek.remaining() <= left.saturating_sub(charged), "{} of {left}", peek.remaining());
    }

    /// Afterwards no more remains than was adopted, and never more than before.
    #[test]
    fn adopting_admits_no_more_than_either_count(
        words in prop::sample::select(&[
            "gcra 10/s burst 20 debt 5", "fixed-window 20/s", "sliding-counter 20/s", "sliding-log 20/s", "window-log 20/s",
            "bucketed-window bucket 100ms rates 20/1s", "token-bucket 20/s",
        ][..]),
        (used, told, at_us) in (0..25_u64, 0..30_u64, 0..1_500_000_u64),
    ) {
        let (limit, store) = (limit("l", words), PureStore::new());
        let _ = ask(&store, &[&limit], (Op::Force, None, used), 0).expect("it can be forced");
        let before = ask(&store, &[&limit], (Op::Peek, None, 0), at_us).expect("decides").remaining();
        let adopted = ask(&store, &[&limit], (Op::Adopt, None, told), at_us).expect("it can be forced");
        prop_assert_eq!(adopted.remaining(), before.min(told));
        let next = ask(&store, &[&limit], (Op::Acquire, None, before.min(told) + 1), at_us);
        prop_assert!(!next.expect("decides").allowed());
    }
}
