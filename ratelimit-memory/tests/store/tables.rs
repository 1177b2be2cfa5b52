//! What other limiters say of single callers, transcribed from their tests: the overrides of
//! boulder, and the blocked and listed keys of rate-limiter-flexible. Each row is a fact of theirs.
//! Rows without a counterpart are left out: an override that is disabled and kept, a list of keys
//! that is no store's, and a charge to a key that is blocked.

use std::time::Duration;

use ratelimit_core::store::Op;
use ratelimit_core::{AnyAlgorithm, LimitCosts, Record};
use ratelimit_testkit::block_on;

use crate::common::{Limiter, algorithm, limit, limiter};

const MS: Duration = Duration::from_millis(1);

fn numbers(words: &str) -> Record<AnyAlgorithm> {
    Record::numbers(algorithm(words)).forever()
}

/// The answer to a request: allowed, remaining, and its waits in milliseconds.
type Answer = (bool, u64, Option<u64>, u64);

fn ask(limiter: &Limiter, caller: &str, op: Op, cost: u64) -> Answer {
    let verdict = limiter.request(caller).cost(cost).apply_now(op).expect("decides");
    let told = verdict.summary();
    let in_ms = |us: u64| us.div_ceil(1_000);
    let retry_ms = told.retry_after_us.map(in_ms);
    (told.allowed, told.remaining, retry_ms, in_ms(told.reset_after_us))
}

/// `TestLimiter_CheckWithLimitOverrides`: 20 per second for all, and 40 for one address.
#[test]
fn an_override_of_boulder_decides_for_its_caller_alone() {
    use Op::{Acquire, Peek, Refund, Reset};
    let limits = [limit("ip", "gcra 20/s burst 20").overridable()];
    let (limiter, clock) = limiter(limits, |builder| builder);
    let double = numbers("gcra 40/s burst 40");
    assert_eq!(block_on(limiter.set_record("64.112.117.1", "ip", double)), Ok(None));
    let (over, other) = ("64.112.117.1", "10.0.0.1");
    // How long to wait before, who asks, the operation, the cost, and the answer.
    let rows = [
        (0, over, Acquire, 40, (true, 0, Some(0), 1_000)),
        (0, over, Acquire, 1, (false, 0, Some(25), 1_000)),
        (25, over, Acquire, 1, (true, 0, Some(0), 1_000)),
        (1_000, over, Acquire, 39, (true, 1, Some(0), 975)),
        (0, over, Acquire, 1, (true, 0, Some(0), 1_000)),
        (0, over, Acquire, 1, (false, 0, Some(25), 1_000)),
        (1_000, over, Acquire, 1, (true, 39, Some(0), 25)),
        (0, other, Acquire, 1, (true, 19, Some(0), 50)),
        (0, over, Refund, 1, (true, 40, Some(0), 0)),
        (0, other, Refund, 1, (true, 20, Some(0), 0)),
        (0, over, Acquire, 1, (true, 39, Some(0), 25)),
        (0, other, Acquire, 1, (true, 19, Some(0), 50)),
        (0, over, Reset, 0, (true, 40, Some(0), 0)),
        (0, other, Reset, 0, (true, 20, Some(0), 0)),
        // A check spends nothing.
        (0, over, Acquire, 1, (true, 39, Some(0), 25)),
        (0, other, Peek, 1, (true, 19, Some(0), 50)),
        (0, over, Peek, 0, (true, 39, Some(0), 25)),
        (0, other, Peek, 0, (true, 20, Some(0), 0)),
        (0, over, Acquire, 1, (true, 38, Some(0), 50)),
        (0, other, Acquire, 1, (true, 19, Some(0), 50)),
        // 20 do not fit, and nothing of them is spent.
        (0, over, Acquire, 1, (true, 37, Some(0), 75)),
        (0, other, Acquire, 20, (false, 19, Some(50), 50)),
        (0, over, Peek, 0, (true, 37, Some(0), 75)),
        (0, other, Peek, 0, (true, 19, Some(0), 50)),
    ];
    for (nth, (wait_ms, caller, op, cost, due)) in rows.into_iter().enumerate() {
        clock.advance(wait_ms * MS);
        assert_eq!(ask(&limiter, caller, op, cost), due, "row {nth}");
    }
}

/// The same test's batches: the answer to both at once is that of the one with less.
#[test]
fn an_override_beside_the_default_of_boulder_shows_the_default() {
    let limits = [("ip", "gcra 20/s burst 20"), ("account", "gcra 20/s burst 20")];
    let limits = limits.map(|(name, words)| limit(name, words).overridable().by([name]));
    let (limiter, _) = limiter(limits.map(|limit| limit.expect("a name")), |builder| builder);
    let caller = [("ip", "64.112.117.1"), ("account", "7")];
    let double = numbers("gcra 40/s burst 40");
    assert_eq!(block_on(limiter.set_record(&caller, "ip", double)), Ok(None));
    for (op, due) in [
        (Op::Acquire, (19, 50)),
        (Op::Refund, (20, 0)),
        (Op::Acquire, (19, 50)),
        (Op::Reset, (20, 0)),
    ] {
        let verdict = limiter.request(&caller).apply_now(op).expect("decides");
        let told = verdict.summary();
        assert_eq!((told.remaining, told.reset_after_us / 1_000), due, "{op}");
        assert_eq!((told.allowed, told.retry_after_us), (true, Some(0)), "{op}");
    }
}

/// `TestOverrideLowerThanExisting`, and what `TestAddRateLimitOverrideInsertThenUpdate` makes of
/// it: one that is lower is not taken, unless it is forced.
#[test]
fn an_override_of_boulder_that_is_lower_is_taken_only_by_force() {
    for (existing, new, is_lower) in [
        // Their names: lower, higher, equal rate in another period, lower rate in another period.
        ("100/168h burst 100", "50/168h burst 50", true),
        ("100/168h burst 100", "200/168h burst 200", false),
        ("100/168h burst 100", "50/84h burst 100", false),
        ("100/84h burst 100", "50/168h burst 100", true),
        // Insert, update with the same, raise in another period, lower.
        ("100/1h burst 100", "100/1h burst 100", false),
        ("100/1h burst 100", "200/1h burst 200", false),
        ("200/2h burst 200", "100/2h burst 100", true),
    ] {
        let limits = [limit("orders", "gcra 1/168h burst 1").overridable()];
        let (limiter, _) = limiter(limits, |builder| builder);
        let [existing, new] = [existing, new].map(|words| numbers(&format!("gcra {words}")));
        assert_eq!(block_on(limiter.set_record("7", "orders", existing.clone())), Ok(None));
        let set = block_on(limiter.set_record("7", "orders", new.clone()));
        assert_eq!(set.is_err(), is_lower, "{existing:?} and {new:?}: {set:?}");
        let stands = if is_lower { &existing } else { &new };
        assert_eq!(block_on(limiter.records("7")), Ok(vec![("orders", stands.clone())]));
        // By force.
        let before = block_on(limiter.replace_record("7", "orders", new.clone()));
        assert_eq!(before, Ok(Some(stands.clone())));
        assert_eq!(block_on(limiter.records("7")), Ok(vec![("orders", new)]));
    }
}

/// `TestDisableEnableRateLimitOverride` and `TestGetEnabledRateLimitOverrides`: what is disabled is
/// not listed and decides nothing. Here it is cleared, which returns it.
#[test]
fn an_override_of_boulder_that_is_disabled_decides_nothing() {
    let limits = ["on", "off"].map(|name| limit(name, "gcra 20/s burst 20").overridable());
    let (limiter, _) = limiter(limits, |builder| builder);
    let double = numbers("gcra 40/s burst 40");
    for name in ["on", "off"] {
        assert_eq!(block_on(limiter.set_record("7", name, double.clone())), Ok(None));
    }
    let disabled = block_on(limiter.clear_record("7", "off")).expect("cleared");
    assert_eq!(block_on(limiter.records("7")), Ok(vec![("on", double.clone())]));
    let limits_of = || {
        let verdict = limiter.request("7").cost(0).peek_now().expect("decides");
        limiter.named(&verdict).map(|one| one.limit).collect::<Vec<_>>()
    };
    assert_eq!(limits_of(), [40, 20]);
    let enabled = disabled.expect("it was there");
    assert_eq!(block_on(limiter.set_record("7", "off", enabled)), Ok(None));
    assert_eq!(limits_of(), [40, 40]);
}

/// `TestValidateLimit`: neither a burst, a count nor a period of 0. A count of 0 alone denies.
#[test]
fn numbers_of_an_override_that_boulder_refuses_are_refused() {
    for (words, is_valid) in [
        ("gcra 1/s burst 1", true),
        ("gcra 1/s burst 0", false),
        ("gcra 0/s burst 1", false),
        ("gcra 1/0s burst 1", false),
    ] {
        assert_eq!(words.parse::<AnyAlgorithm>().is_ok(), is_valid, "{words}");
    }
}

/// A change of a caller's record.
#[derive(Clone, Copy, Debug)]
enum Change {
    /// Blocked for so many seconds, 0 for ever.
    Block(u64),
    Exempt,
    Clear,
}

/// Steps of one case: how many milliseconds later, who, a change, and then an operation with its
/// cost and the answer: allowed, remaining, and the wait.
type Steps<'s> =
    &'s [(u64, &'s str, Option<Change>, Option<(Op, u64, (bool, u64, Option<u64>))>)];

fn check_steps(case: &str, policy: &str, steps: Steps<'_>) {
    let limits = [limit("keys", policy).overridable()];
    let (limiter, clock) = limiter(limits, |builder| builder.records(1_000));
    for (nth, (wait_ms, caller, change, asked)) in steps.iter().enumerate() {
        clock.advance(Duration::from_millis(*wait_ms));
        let until =
            |seconds: u64| ratelimit_core::Clock::now(&clock) + Duration::from_secs(seconds);
        let record = match change {
            Some(Change::Block(0)) => Some(Record::blocked().forever()),
            Some(Change::Block(seconds)) => Some(Record::blocked().until(until(*seconds))),
            Some(Change::Exempt) => Some(Record::exempt().forever()),
            Some(Change::Clear) | None => None,
        };
        match (change, record) {
            (Some(_), Some(record)) => {
                block_on(limiter.set_record(*caller, "keys", record)).map(drop).expect("set");
            }
            (Some(_), None) => {
                block_on(limiter.clear_record(*caller, "keys")).map(drop).expect("cleared");
            }
            (None, _) => {}
        }
        if let Some((op, cost, due)) = asked {
            let (allowed, remaining, retry_ms, _) = ask(&limiter, caller, *op, *cost);
            assert_eq!((allowed, remaining, retry_ms), *due, "{case}, step {nth}");
        }
    }
}

/// `RateLimiterMemory.test.js` and `BlockedKeys.test.js`: points are units of cost, `consume` an
/// acquire and `get` a peek.
#[test]
fn keys_are_blocked_as_those_of_rate_limiter_flexible_are() {
    use Change::Block;
    use Op::{Acquire, Peek};
    let one = "first-request-window 1/s";
    let cases: [(&str, &str, Steps<'_>); 7] = [
        (
            "block custom key",
            one,
            &[(0, "a", Some(Block(2)), Some((Acquire, 1, (false, 0, Some(2_000)))))],
        ),
        (
            "do not block key second time until block expires",
            one,
            &[
                (0, "a", Some(Block(2)), Some((Acquire, 2, (false, 0, None)))),
                (0, "a", None, Some((Acquire, 1, (false, 0, Some(2_000))))),
                (1_001, "a", None, Some((Acquire, 1, (false, 0, Some(999))))),
            ],
        ),
        (
            "block expires in blockDuration seconds",
            one,
            &[
                (0, "a", Some(Block(2)), Some((Acquire, 1, (false, 0, Some(2_000))))),
                (2_000, "a", None, Some((Acquire, 1, (true, 0, Some(0))))),
            ],
        ),
        (
            "block key forever, if secDuration is 0",
            one,
            &[
                (0, "a", Some(Block(0)), None),
                (1_000, "a", None, Some((Peek, 1, (false, 0, None)))),
            ],
        ),
        (
            "check not blocked key",
            one,
            &[
                (0, "a", Some(Block(1)), None),
                (0, "b", None, Some((Acquire, 1, (true, 0, Some(0))))),
            ],
        ),
        (
            "expire blocked key",
            one,
            &[
                (0, "a", Some(Block(1)), None),
                (1_001, "a", None, Some((Acquire, 1, (true, 0, Some(0))))),
            ],
        ),
        (
            "duplicated keys: the last block counts",
            one,
            &[
                (0, "a", Some(Block(1)), None),
                (0, "a", Some(Block(2)), None),
                (1_001, "a", Some(Block(3)), Some((Acquire, 1, (false, 0, Some(3_000))))),
            ],
        ),
    ];
    for (case, policy, steps) in cases {
        check_steps(case, policy, steps);
    }
}

/// `RLWrapperBlackAndWhite.test.js`: `penalty` is a forced charge, `reward` a refund and `delete` a
/// reset.
#[test]
fn keys_are_listed_as_those_of_rate_limiter_flexible_are() {
    use Change::{Block, Clear, Exempt};
    use Op::{Acquire, Force, Peek, Refund, Reset};
    let one = "first-request-window 1/s";
    let cases: [(&str, &str, Steps<'_>); 6] = [
        (
            "rejected on consume if blacked, and consumes nothing",
            one,
            &[
                (0, "a", Some(Block(0)), Some((Acquire, 1, (false, 0, None)))),
                (0, "a", Some(Clear), Some((Peek, 0, (true, 1, Some(0))))),
            ],
        ),
        (
            "penalty and reward even if blacked when runAction set to true",
            "first-request-window 3/s",
            &[
                (0, "a", Some(Block(0)), Some((Force, 1, (true, 2, Some(0))))),
                (0, "a", None, Some((Force, 1, (true, 1, Some(0))))),
                (0, "a", None, Some((Refund, 1, (true, 2, Some(0))))),
                (0, "a", Some(Clear), Some((Peek, 0, (true, 2, Some(0))))),
            ],
        ),
        (
            "resolve consume if whited, whatever the points, and consume nothing",
            one,
            &[
                (0, "a", Some(Exempt), Some((Acquire, 3, (true, 1, Some(0))))),
                (0, "a", None, Some((Peek, 0, (true, 1, Some(0))))),
            ],
        ),
        (
            "resolve penalty and reward if whited",
            one,
            &[
                (0, "a", Some(Exempt), Some((Force, 3, (true, 1, Some(0))))),
                (0, "a", None, Some((Refund, 3, (true, 1, Some(0))))),
                (0, "a", Some(Clear), Some((Peek, 0, (true, 1, Some(0))))),
            ],
        ),
        (
            "delete data even if key is black or white listed",
            one,
            &[
                (0, "a", None, Some((Acquire, 1, (true, 0, Some(0))))),
                (0, "a", Some(Block(0)), Some((Reset, 0, (true, 1, Some(0))))),
                (0, "a", Some(Clear), Some((Acquire, 1, (true, 0, Some(0))))),
                (0, "a", Some(Exempt), Some((Reset, 0, (true, 1, Some(0))))),
                (0, "a", Some(Clear), Some((Acquire, 1, (true, 0, Some(0))))),
            ],
        ),
        (
            "consume if not blacked",
            one,
            &[
                (0, "blacked", Some(Block(0)), None),
                (0, "test", None, Some((Acquire, 1, (true, 0, Some(0))))),
                (0, "blacked", None, Some((Acquire, 1, (false, 0, None)))),
            ],
        ),
    ];
    for (case, policy, steps) in cases {
        check_steps(case, policy, steps);
    }
}

/// `blockDuration`, of a limit that blocks by itself: after the points, the key is blocked for
/// longer than the window, a denied request begins no other block, and the next one counts from 0.
#[test]
fn a_key_that_has_used_its_points_is_blocked_as_in_rate_limiter_flexible() {
    use Op::Acquire;
    check_steps(
        "blocks key for block duration",
        "lockout 2/s block 2s",
        &[
            (0, "a", None, Some((Acquire, 2, (true, 0, Some(0))))),
            (0, "a", None, Some((Acquire, 1, (false, 0, Some(2_000))))),
            (1_001, "a", None, Some((Acquire, 1, (false, 0, Some(999))))),
            (999, "a", None, Some((Acquire, 1, (true, 1, Some(0))))),
        ],
    );
}

/// "collect expired on add if there more than 999 blocked keys".
#[test]
fn a_full_store_forgets_the_blocks_that_have_ended_as_rate_limiter_flexible_does() {
    let limits = [limit("keys", "first-request-window 1/s").overridable()];
    let (limiter, clock) = limiter(limits, |builder| builder.records(1_000));
    let block = || {
        let until = ratelimit_core::Clock::now(&clock) + Duration::from_secs(1);
        Record::<AnyAlgorithm>::blocked().until(until)
    };
    for nth in 0..1_000 {
        let key = format!("key{nth}");
        assert_eq!(block_on(limiter.set_record(&*key, "keys", block())), Ok(None));
    }
    assert!(block_on(limiter.set_record("more", "keys", block())).is_err(), "none has ended");
    clock.advance(1_001 * MS);
    assert_eq!(block_on(limiter.set_record("more", "keys", block())), Ok(None));
    assert_eq!(limiter.store().record_count(), 1);
    let costs = LimitCosts::from(1);
    assert!(!limiter.request("more").costs(&costs).check_now().expect("decides").allowed());
}
