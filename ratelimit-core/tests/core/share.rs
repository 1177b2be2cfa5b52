//! Shares of a limit: several nodes together admit at most what the limit admits.

use std::num::NonZeroU64;

use proptest::prelude::*;
use ratelimit_core::algorithm::Share;
use ratelimit_core::{Algorithm, AnyAlgorithm, Limit, Stack, Timestamp};

const BEGIN_US: u64 = 1_795_218_392_000_000;

fn algorithm(words: &str) -> AnyAlgorithm {
    words.parse().expect(words)
}

fn share_of(words: &str, nodes: u64) -> Result<AnyAlgorithm, ratelimit_core::ConfigError> {
    algorithm(words).share(NonZeroU64::new(nodes).expect("not 0"))
}

#[test]
fn a_share_divides_bursts_counts_and_debts_rounded_down_and_rates_exactly() {
    for (limit, nodes, share) in [
        ("gcra 10/s burst 20", 4, "gcra 5/2s burst 5"),
        ("gcra 10/s burst 20", 5, "gcra 2/s burst 4"),
        ("token-bucket 100/m burst 7", 2, "token-bucket 50/m burst 3"),
        ("fixed-window 10/s", 3, "fixed-window 3/s"),
        ("sliding-counter 10/m", 4, "sliding-counter 2/m"),
        ("sliding-log 5/s", 1, "sliding-log 5/s"),
        ("window-log 9/s", 9, "window-log 1/s"),
        ("first-request-window 9/s", 2, "first-request-window 4/s"),
        (
            "bucketed-window bucket 1s rates 10/1s, 55/10s",
            10,
            "bucketed-window bucket 1s rates 1/1s, 5/10s",
        ),
        ("concurrency 20/30s", 3, "concurrency 6/30s"),
        ("lockout 5/15m block 15m", 2, "lockout 2/15m block 15m"),
        ("gcra 10/s burst 20 debt 31", 4, "gcra 5/2s burst 5 debt 7"),
        ("token-bucket 10/s burst 20 debt 4", 2, "token-bucket 5/s burst 10 debt 2"),
        ("fixed-window 10/s debt 7", 3, "fixed-window 3/s debt 2"),
        (
            "fixed-window 10/month zone Europe/Berlin anchor 15 debt 7",
            3,
            "fixed-window 3/month zone Europe/Berlin anchor 15 debt 2",
        ),
    ] {
        assert_eq!(share_of(limit, nodes), Ok(algorithm(share)), "{limit} among {nodes}");
    }
}

#[test]
fn a_limit_too_small_for_its_nodes_is_refused_by_name() {
    let limit = Limit::new("login", algorithm("fixed-window 3/m")).expect("a name");
    let error = limit.share(NonZeroU64::new(4).expect("not 0")).expect_err("too small");
    assert_eq!(error.limit(), Some("login"));
    assert!(error.to_string().contains("fewer nodes"), "{error}");
}

#[test]
fn a_share_keeps_everything_else_of_a_limit() {
    let limit = Limit::new("api", algorithm("gcra 10/s burst 20")).expect("a name");
    let limit = limit.by(["ip"]).expect("an identifier").required().shadow();
    let limit = limit.count_attempts().expect("a bucket can");
    let share = limit.share(NonZeroU64::MIN).expect("one node");
    assert_eq!(share, limit);
}

#[test]
fn a_share_of_a_stack_divides_each_of_its_limits() {
    let stack =
        |words: &[&str]| Stack::new(words.iter().map(|one| algorithm(one))).expect("a stack");
    let whole = stack(&["gcra 10/s burst 20", "fixed-window 120/m", "sliding-log 1001/h"]);
    let share = whole.share(NonZeroU64::new(4).expect("not 0")).expect("a share");
    assert_eq!(share, stack(&["gcra 5/2s burst 5", "fixed-window 30/m", "sliding-log 250/h"]));
    let small = stack(&["gcra 10/s burst 20", "fixed-window 3/m"]);
    let error = small.share(NonZeroU64::new(4).expect("not 0")).expect_err("too small");
    assert!(error.to_string().contains("a limit of 3"), "{error}");
}

/// A request of a node at a cost, and how long after the one before.
type Request = (u64, usize, u64);

/// What so many nodes admit by these shares, each at its time.
fn admit_by_shares<A: Algorithm>(
    share: &A,
    nodes: usize,
    requests: &[Request],
) -> Vec<(Timestamp, u64)> {
    let (mut states, mut now_us) = (vec![None; nodes], BEGIN_US);
    let admitted = requests.iter().filter_map(|(gap_us, node, cost)| {
        now_us += gap_us;
        let now = Timestamp::from_us(now_us).expect("a time");
        let state = &mut states[node % nodes];
        let step = share.step(state.as_ref(), now, *cost);
        *state = step.write.after(state.as_ref()).cloned();
        step.decision.allowed.then_some((now, *cost))
    });
    admitted.collect()
}

/// Whether all that so many nodes admit by these shares, the limit by itself admits too, `times`
/// times at once.
fn admits_what_nodes_admit<A: Algorithm>(
    limit: &A,
    share: &A,
    (nodes, times): (usize, u64),
    requests: &[Request],
) -> bool {
    let mut whole = None;
    admit_by_shares(share, nodes, requests).into_iter().all(|(now, cost)| {
        let step = limit.step(whole.as_ref(), now, cost * times);
        whole = step.write.after(whole.as_ref()).cloned();
        step.decision.allowed
    })
}

#[test]
fn a_stack_of_which_a_limit_is_not_shared_is_caught() {
    let whole = Stack::new([algorithm("gcra 10/s burst 10"), algorithm("fixed-window 12/h")]);
    let wrong = Stack::new([algorithm("gcra 5/s burst 5"), algorithm("fixed-window 12/h")]);
    let (whole, wrong) = (whole.expect("a stack"), wrong.expect("a stack"));
    let requests: Vec<Request> = (0..40).map(|nth| (500_000, nth, 1)).collect();
    let right = whole.share(NonZeroU64::new(2).expect("not 0")).expect("a share");
    for nodes in [(2, 1), (1, 2)] {
        assert!(!admits_what_nodes_admit(&whole, &wrong, nodes, &requests));
        assert!(admits_what_nodes_admit(&whole, &right, nodes, &requests));
    }
}

/// A limit in the words of a policy: of an algorithm whose traces add up, or of any.
fn words(kinds: std::ops::Range<usize>) -> impl Strategy<Value = String> {
    (kinds, 1..40_u64, 1..50_000_u64, 1..40_u64).prop_map(|(kind, count, period_us, burst)| {
        match kind {
            0 => format!("gcra {count}/{period_us}us burst {burst}"),
            1 => format!("token-bucket {count}/{period_us}us burst {burst}"),
            2 => format!("fixed-window {count}/{period_us}us"),
            3 => format!("sliding-log {count}/{period_us}us"),
            4 => format!("first-request-window {count}/{period_us}us"),
            5 => format!("window-log {count}/{period_us}us"),
            6 => {
                let (rate, block_us) = (format!("{count}/{period_us}us"), period_us * burst);
                format!("lockout {rate} block {block_us}us factor 2 longest 1h forget 1s")
            }
            _ => format!("bucketed-window bucket 100us rates {count}/{}us", 100 * burst),
        }
    })
}

fn stacks(kinds: std::ops::Range<usize>) -> impl Strategy<Value = Stack<AnyAlgorithm>> {
    let limits = proptest::collection::vec(words(kinds), 1..4);
    limits.prop_map(|limits| {
        Stack::new(limits.iter().map(|limit| algorithm(limit))).expect("a stack")
    })
}

fn requests() -> impl Strategy<Value = Vec<Request>> {
    proptest::collection::vec((0..9_000_u64, 0..6_usize, 1..5_u64), 1..80)
}

/// Whether the requests at so many nodes keep the contract, if the stack can be shared.
fn keeps_the_contract(
    stack: &Stack<AnyAlgorithm>,
    nodes: u64,
    (states, times): (usize, u64),
    requests: &[Request],
) -> bool {
    match stack.share(NonZeroU64::new(nodes).expect("not 0")) {
        Ok(share) => admits_what_nodes_admit(stack, &share, (states, times), requests),
        Err(_) => stack.capacity() < nodes,
    }
}

proptest! {
    #[test]
    fn shares_of_a_stack_admit_together_at_most_what_the_stack_admits(
        stack in stacks(0..4),
        nodes in 1..6_usize,
        requests in requests(),
    ) {
        prop_assert!(keeps_the_contract(&stack, nodes as u64, (nodes, 1), &requests), "{stack:?}");
    }

    /// What the nodes admit in a span is then no more than what the limit may admit in one.
    #[test]
    fn what_a_share_of_a_stack_admits_the_stack_admits_of_all_nodes_at_once(
        stack in stacks(0..8),
        nodes in 1..6_u64,
        requests in requests(),
    ) {
        prop_assert!(keeps_the_contract(&stack, nodes, (1, nodes), &requests), "{stack:?}");
    }

    #[test]
    fn nodes_exceed_a_sliding_counter_by_less_than_one_each(
        nodes in 1_usize..6,
        requests in prop::collection::vec((0_u64..700_000, 0_usize..6, 1_u64..4), 1..60),
    ) {
        let share = share_of("sliding-counter 12/s", nodes as u64).expect("a share");
        let admitted = admit_by_shares(&share, nodes, &requests);
        for (position, (now, _)) in admitted.iter().enumerate() {
            let sum = |window: u64| -> u64 {
                let until_now = admitted[..=position].iter();
                let of = until_now.filter(|(at, _)| at.as_us() / 1_000_000 == window);
                of.map(|(_, cost)| cost).sum()
            };
            let (window, overlap_us) = (now.as_us() / 1_000_000, 1_000_000 - now.as_us() % 1_000_000);
            let used = sum(window) + sum(window - 1) * overlap_us / 1_000_000;
            prop_assert!(used < 12 + nodes as u64, "{} used among {}", used, nodes);
        }
    }
}
