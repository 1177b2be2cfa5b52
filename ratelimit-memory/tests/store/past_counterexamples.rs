//! Requests by which a store or an algorithm once broke a law, found by the conformance suite.

use std::collections::HashMap;

use ratelimit_core::{
    Algorithm, Batch, Check, Decision, Limit, ManualClock, Now, Op, Policy, PolicyState, SyncStore,
    Timestamp, Write,
};
use ratelimit_memory::MemoryStore;

/// When, what, at which cost, and of which key.
type Request = (u64, Op, u64, &'static str);

/// A refill in whole ticks of a second.
const COARSE_GCRA: &str = "gcra 1000000007/30d burst 1000000007";
const COARSE_BUCKET: &str = "token-bucket 1000000007/30d burst 1000000007";

const COUNTEREXAMPLES: [(&str, &[Request]); 12] = {
    use Op::{Acquire, Force, Peek, Refund};
    [
        (
            "sliding-counter 1/1s",
            &[
                (0, Acquire, 1, "a"),
                (0, Acquire, 1, "b"),
                (1_002_000, Force, 1, "b"),
                (2_000, Acquire, 1, "b"),
            ],
        ),
        (
            "sliding-counter 3/1s",
            &[(2, Acquire, 1, "a"), (2, Acquire, 3, "a"), (1_000_001, Acquire, 1, "a")],
        ),
        (
            "sliding-counter 7/5m",
            &[
                (300_000_000, Acquire, 7, "a"),
                (300_000_000, Acquire, 1, "a"),
                (199_800_000, Acquire, 1, "a"),
                (799_800_000, Acquire, 1, "a"),
                (799_800_000, Acquire, 1, "a"),
                (799_800_000, Acquire, 1, "a"),
                (199_800_000, Acquire, 1, "a"),
                (199_800_000, Acquire, 1, "a"),
            ],
        ),
        (
            "bucketed-window bucket 200ms rates 1/1s, 2/3s",
            &[(0, Acquire, 1, "a"), (1_002_000, Acquire, 1, "a"), (0, Refund, 1, "a")],
        ),
        (
            "bucketed-window bucket 200ms rates 1/1s, 2/3s count attempts",
            &[(0, Acquire, 1, "a"), (1_002_000, Acquire, 1, "a"), (0, Acquire, 1, "a")],
        ),
        (
            "bucketed-window bucket 200ms rates 1/1s, 2/3s count attempts",
            &[(0, Acquire, 1, "a"), (1_000_000, Acquire, 1, "a"), (999_999, Acquire, 1, "a")],
        ),
        (
            COARSE_BUCKET,
            &[
                (0, Acquire, 1, "a"),
                (3, Acquire, 1_000_000_007, "a"),
                (3_000_003, Acquire, 1_000_000_007, "c"),
                (3, Acquire, 1, "b"),
                (3, Acquire, 0, "a"),
            ],
        ),
        (COARSE_BUCKET, &[(0, Acquire, 1, "b"), (1, Acquire, 1, "a"), (1, Acquire, 0, "b")]),
        (
            COARSE_GCRA,
            &[(0, Acquire, 1, "a"), (1_000_000, Acquire, 1, "b"), (999_999, Acquire, 0, "a")],
        ),
        (COARSE_GCRA, &[(0, Acquire, 1, "a"), (1, Acquire, 1, "a"), (1, Peek, 1, "a")]),
        (
            "gcra 1000003/30d burst 1000003",
            &[(0, Force, 1, "a"), (2_591_999, Peek, 1, "a"), (2_591_999, Acquire, 1, "a")],
        ),
        (
            "gcra 1000003/30d burst 3 count attempts",
            &[(0, Acquire, 1, "a"), (1, Acquire, 3, "a"), (0, Acquire, 1, "a")],
        ),
    ]
};

/// Decides as the algorithm alone does, on states in a map.
fn by_the_algorithm(
    policy: &Policy,
    states: &mut HashMap<&'static str, PolicyState>,
    (at_us, op, cost, key): Request,
) -> Decision {
    let (state, now) = (states.get(key), Timestamp::saturating_from_us(at_us));
    let step = match op {
        Op::Force => policy.force(state, now, cost).expect("is supported"),
        Op::Refund => policy.refund(state, now, cost).expect("is supported"),
        _ => policy.step(state, now, cost),
    };
    match step.write {
        Write::Put { state, .. } if op != Op::Peek => _ = states.insert(key, state),
        Write::Remove if op != Op::Peek => _ = states.remove(key),
        _ => {}
    }
    step.decision
}

#[test]
fn a_store_decides_as_the_algorithm_on_past_counterexamples() {
    for (text, requests) in COUNTEREXAMPLES {
        let policy: Policy = text.parse().expect(text);
        let limit = Limit::new("l", policy).expect("a name");
        // By given times and by the store's own clock, so that compact states lie in buckets. A clock that goes
        // back finds expired states freed, which the algorithm alone does not know.
        let goes_back = !requests.is_sorted_by_key(|request| request.0);
        for is_given in [true, false].into_iter().filter(|is_given| *is_given || !goes_back) {
            let clock = ManualClock::new(Timestamp::ZERO);
            let store: MemoryStore<Policy, _> = MemoryStore::builder().clock(clock.clone()).build();
            let mut states = HashMap::new();
            for (place, request) in requests.iter().enumerate() {
                let (at_us, op, cost, key) = *request;
                let now = Timestamp::saturating_from_us(at_us);
                clock.set(now);
                let check = Check { limit: &limit, key, cost };
                let batch = Batch::one(&check).op(op);
                let batch = if is_given { batch.now(Now::At(now)) } else { batch };
                let verdict = store.apply_now(&batch).expect("decides");
                let expected = by_the_algorithm(&policy, &mut states, *request);
                assert_eq!(verdict.decisions(), [expected], "{text}, request {place}, {is_given}");
            }
        }
    }
}
