//! Requests by which a store or an algorithm once broke a law, found by the conformance suite.

use std::collections::HashMap;

use ratelimit_core::SyncStore;
use ratelimit_core::{
    Algorithm, Batch, Check, Decision, Now, Op, Policy, PolicyState, Timestamp, Write,
};

use crate::common::{Memory, limit, store};

/// Limits and requests: when, what, at which cost, and of which key.
const COUNTEREXAMPLES: [(&str, &str); 12] = [
    ("sliding-counter 1/1s", "0 acquire 1 a, 0 acquire 1 b, 1002000 force 1 b, 2000 acquire 1 b"),
    ("sliding-counter 3/1s", "2 acquire 1 a, 2 acquire 3 a, 1000001 acquire 1 a"),
    (
        "sliding-counter 7/5m",
        "300000000 acquire 7 a, 300000000 acquire 1 a, 199800000 acquire 1 a, 799800000 acquire 1 a, \
         799800000 acquire 1 a, 799800000 acquire 1 a, 199800000 acquire 1 a, 199800000 acquire 1 a",
    ),
    (
        "bucketed-window bucket 200ms rates 1/1s, 2/3s",
        "0 acquire 1 a, 1002000 acquire 1 a, 0 refund 1 a",
    ),
    (
        "bucketed-window bucket 200ms rates 1/1s, 2/3s count attempts",
        "0 acquire 1 a, 1002000 acquire 1 a, 0 acquire 1 a",
    ),
    (
        "bucketed-window bucket 200ms rates 1/1s, 2/3s count attempts",
        "0 acquire 1 a, 1000000 acquire 1 a, 999999 acquire 1 a",
    ),
    // A refill in whole ticks of a second.
    (
        "token-bucket 1000000007/30d burst 1000000007",
        "0 acquire 1 a, 3 acquire 1000000007 a, 3000003 acquire 1000000007 c, 3 acquire 1 b, 3 acquire 0 a",
    ),
    ("token-bucket 1000000007/30d burst 1000000007", "0 acquire 1 b, 1 acquire 1 a, 1 acquire 0 b"),
    (
        "gcra 1000000007/30d burst 1000000007",
        "0 acquire 1 a, 1000000 acquire 1 b, 999999 acquire 0 a",
    ),
    ("gcra 1000000007/30d burst 1000000007", "0 acquire 1 a, 1 acquire 1 a, 1 peek 1 a"),
    ("gcra 1000003/30d burst 1000003", "0 force 1 a, 2591999 peek 1 a, 2591999 acquire 1 a"),
    ("gcra 1000003/30d burst 3 count attempts", "0 acquire 1 a, 1 acquire 3 a, 0 acquire 1 a"),
];

fn parsed(request: &str) -> (Timestamp, Op, u64, &str) {
    let words: Vec<_> = request.split(' ').collect();
    let number = |word: &str| word.parse().expect("a number");
    let ops = [Op::Acquire, Op::Peek, Op::Force, Op::Refund];
    let op = ops.into_iter().find(|op| op.to_string() == words[1]).expect("an operation");
    (Timestamp::saturating_from_us(number(words[0])), op, number(words[2]), words[3])
}

/// Decides as the algorithm alone does, on a state in a map.
fn by_the_algorithm(
    policy: &Policy,
    state: &mut Option<PolicyState>,
    (now, op, cost): (Timestamp, Op, u64),
) -> Decision {
    let step = match op {
        Op::Force => policy.force(state.as_ref(), now, cost).expect("is supported"),
        Op::Refund => policy.refund(state.as_ref(), now, cost).expect("is supported"),
        _ => policy.step(state.as_ref(), now, cost),
    };
    match step.write {
        Write::Put { state: next, .. } if op != Op::Peek => *state = Some(next),
        Write::Remove if op != Op::Peek => *state = None,
        _ => {}
    }
    step.decision
}

#[test]
fn a_store_decides_as_the_algorithm_on_past_counterexamples() {
    for (words, requests) in COUNTEREXAMPLES {
        let limit = limit("l", words);
        let requests: Vec<_> = requests.split(", ").map(parsed).collect();
        // By given times and by the store's own clock, so that compact states lie in buckets. A clock that goes
        // back finds expired states freed, which the algorithm alone does not know.
        let goes_back = !requests.is_sorted_by_key(|request| request.0);
        for is_given in [true, false].into_iter().filter(|is_given| *is_given || !goes_back) {
            let (store, clock): (Memory, _) = store(|builder| builder);
            let mut states: HashMap<&str, Option<PolicyState>> = HashMap::new();
            for (now, op, cost, key) in &requests {
                clock.set(*now);
                let check = Check { limit: &limit, key, cost: *cost };
                let batch = Batch::one(&check).op(*op);
                let batch = if is_given { batch.now(Now::At(*now)) } else { batch };
                let verdict = store.apply_now(&batch).expect("decides");
                let state = states.entry(key).or_default();
                let expected = by_the_algorithm(limit.algorithm(), state, (*now, *op, *cost));
                assert_eq!(verdict.decisions(), [expected], "{words}: {op} {key} at {now}");
            }
        }
    }
}
