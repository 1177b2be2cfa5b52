//! A quick step, where there is one, says and writes what a step does.

#![allow(clippy::expect_used, reason = "tests")]

use proptest::prelude::*;
use ratelimit_core::{Algorithm, Gcra, Policy, Rate, Small, Tick};

/// Numbers of every magnitude.
fn up_to_bits(bits: u32) -> impl Strategy<Value = u64> {
    (0..=bits, any::<u64>()).prop_map(|(bits, n)| n & ((1 << bits) - 1))
}

/// Of rates of whole microseconds a token, of others, and of those too fine for microseconds.
fn limits() -> impl Strategy<Value = Gcra> {
    let rate = prop_oneof![
        (Just(1), up_to_bits(40)),
        (up_to_bits(24), up_to_bits(40)),
        (up_to_bits(6), up_to_bits(6)),
    ];
    let limit =
        |((count, period_us), burst)| Gcra::new(Rate::new(count, period_us).ok()?, burst).ok();
    (rate, up_to_bits(24)).prop_filter_map("a limit", limit)
}

/// A state, and a time near one of the moments at which something changes for it.
fn states() -> impl Strategy<Value = (Small, Tick)> {
    let state = (up_to_bits(51), up_to_bits(45), prop_oneof![3 => Just(0), 1 => up_to_bits(26)]);
    (state, any::<bool>(), up_to_bits(45), any::<bool>()).prop_map(
        |((at_us, span_us, extra), at_the_end, away_us, before)| {
            let near_us = at_us + if at_the_end { span_us } else { 0 };
            let now_us = if before { near_us.saturating_sub(away_us) } else { near_us + away_us };
            let at = Tick::saturating_from_us(at_us);
            (Small { at, span_us, extra }, Tick::saturating_from_us(now_us))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]
    #[test]
    fn a_quick_step_is_the_step(
        limit in limits(),
        (state, now) in states(),
        cost in prop_oneof![Just(1), Just(0), up_to_bits(25)],
    ) {
        agrees(limit, state, now, cost)?;
    }

    /// From states that the limit itself has left, at what is left and 1 less or more.
    #[test]
    fn a_quick_step_is_the_step_where_it_just_fits(
        limit in limits(),
        steps in prop::collection::vec((up_to_bits(44), 0..4_u64, prop::bool::weighted(0.1)), 1..20),
    ) {
        let mut now_us = 1 << 50;
        let mut state: Option<Small> = None;
        for (away_us, beside, back) in steps {
            now_us = if back { now_us - (away_us >> 20) } else { now_us + away_us };
            let now = Tick::saturating_from_us(now_us);
            let left = limit.step_small(state, now, 0).expect("small").decision.remaining;
            // What is left, 1 less, 1 more, or one unit of cost.
            let cost = [left, left.saturating_sub(1), left + 1, 1][usize::try_from(beside).expect("few")];
            if let Some(state) = state {
                agrees(limit, state, now, cost)?;
            }
            let step = limit.step_small(state, now, cost).expect("small");
            state = step.write.after(state.as_ref()).copied();
        }
    }
}

/// A quick step of the limit, by itself, as a policy, and counting attempts, is the step of each.
fn agrees(limit: Gcra, state: Small, now: Tick, cost: u64) -> Result<(), TestCaseError> {
    let is_quick = limit.refill().tick_us == 1;
    let step = limit.step_small(Some(state), now, cost);
    prop_assert_eq!(limit.step_quick(state, now, cost), step.clone().filter(|_| is_quick));
    let policy = Policy::from(limit);
    prop_assert_eq!(policy.step_quick(state, now, cost), step.filter(|_| is_quick));
    let attempts = policy.by_attempts().expect("gcra counts attempts");
    let tried = attempts.step_small(Some(state), now, cost);
    prop_assert_eq!(attempts.step_quick(state, now, cost), tried.filter(|_| is_quick));
    Ok(())
}
