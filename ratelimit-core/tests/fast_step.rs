//! A fast step, where a limit has one, decides and writes as the step does.

#![allow(clippy::expect_used, reason = "tests")]

use proptest::prelude::*;
use ratelimit_core::{
    Algorithm, Compact, Gcra, InMemory, Policy, Rate, Step, Timestamp, Write, step_compact,
};

/// Numbers of every magnitude.
fn up_to_bits(bits: u32) -> impl Strategy<Value = u64> {
    (0..=bits, any::<u64>()).prop_map(|(bits, n)| n & ((1 << bits) - 1))
}

/// Limits whose tokens take whole microseconds, fractions of one, or ticks longer than one.
fn limits() -> impl Strategy<Value = Gcra> {
    let rate = prop_oneof![
        2 => (Just(1), up_to_bits(40)),
        1 => (up_to_bits(24), up_to_bits(40)),
        1 => (up_to_bits(6), up_to_bits(6)),
    ];
    let limit =
        |((count, period_us), burst)| Gcra::new(Rate::per_us(count, period_us).ok()?, burst).ok();
    (rate, up_to_bits(24)).prop_filter_map("a limit", limit)
}

/// A state, and a time near one of the moments at which its decisions change.
fn states() -> impl Strategy<Value = (Compact, Timestamp)> {
    let state = (up_to_bits(51), up_to_bits(45), prop_oneof![3 => Just(0), 1 => up_to_bits(26)]);
    (state, any::<bool>(), up_to_bits(45), any::<bool>()).prop_map(
        |((at_us, span_us, extra), at_the_end, away_us, before)| {
            let near_us = at_us + if at_the_end { span_us } else { 0 };
            let now_us = if before { near_us.saturating_sub(away_us) } else { near_us + away_us };
            let at = Timestamp::saturating_from_us(at_us);
            (Compact { at, span_us, extra }, Timestamp::saturating_from_us(now_us))
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4_000, ..ProptestConfig::default() })]
    #[test]
    fn a_fast_step_decides_as_the_step(
        limit in limits(),
        (state, now) in states(),
        cost in prop_oneof![Just(1), Just(0), up_to_bits(25)],
    ) {
        agrees(limit, state, now, cost)?;
    }

    /// On states that the limit itself wrote, at the remaining cost and 1 less or more.
    #[test]
    fn a_fast_step_decides_as_the_step_where_the_cost_just_fits(
        limit in limits(),
        steps in prop::collection::vec((up_to_bits(44), 0..4_u64, prop::bool::weighted(0.1)), 1..20),
    ) {
        let mut now_us = 1 << 50;
        let mut state: Option<Compact> = None;
        for (away_us, beside, back) in steps {
            now_us = if back { now_us - (away_us >> 20) } else { now_us + away_us };
            let now = Timestamp::saturating_from_us(now_us);
            let left = step_compact(&limit, state, now, 0).expect("a compact state").decision.remaining;
            // The remaining cost, 1 less, 1 more, or a cost of 1.
            let cost = [left, left.saturating_sub(1), left + 1, 1][usize::try_from(beside).expect("few")];
            if let Some(state) = state {
                agrees(limit, state, now, cost)?;
            }
            let step = step_compact(&limit, state, now, cost).expect("a compact state");
            state = step.write.after(state.as_ref()).copied();
        }
    }
}

/// The delay after which the same request is repeated.
const LATER_US: u64 = 1_000_000;

/// The step of the decoded state, encoded.
fn stepped(limit: Gcra, state: Compact, now: Timestamp, cost: u64) -> Option<Step<Compact>> {
    let step = limit.step(Gcra::from_compact(state).as_ref(), now, cost);
    let write = match step.write {
        Write::Put { state, expires } => Write::Put { state: Gcra::to_compact(&state)?, expires },
        Write::Keep => Write::Keep,
        Write::Remove => Write::Remove,
    };
    Some(Step { decision: step.decision, write })
}

/// The fast steps of the limit, of its policy and of its attempts are the steps of each, and exist for nearly all
/// requests.
fn agrees(limit: Gcra, state: Compact, now: Timestamp, cost: u64) -> Result<(), TestCaseError> {
    let refill = limit.refill();
    let is_whole = refill.tick_us == 1 && refill.tick_units == 1;
    let is_usual = is_whole && (1..=refill.burst).contains(&cost) && now >= state.at;
    let policy = Policy::from(limit);
    let attempts = policy.by_attempts().expect("gcra counts attempts");
    prop_assert_eq!(limit.has_fast_step(), is_whole);
    prop_assert_eq!(policy.has_fast_step(), is_whole);
    prop_assert_eq!(attempts.has_fast_step(), is_whole);
    let step = step_compact(&limit, Some(state), now, cost);
    prop_assert_eq!(&step, &stepped(limit, state, now, cost));
    let step = step.filter(|_| is_usual);
    prop_assert_eq!(limit.step_fast(state, now, cost), step.clone());
    prop_assert_eq!(policy.step_fast(state, now, cost), step.clone());
    let admitted = step.filter(|step| step.decision.allowed);
    prop_assert_eq!(attempts.step_fast(state, now, cost), admitted.clone());
    if admitted.is_some() {
        prop_assert_eq!(step_compact(&attempts, Some(state), now, cost), admitted);
    }
    // Times may count from any epoch.
    let later = |timestamp: Timestamp| Timestamp::from_us(timestamp.as_us() + LATER_US);
    let later_by = |step: Option<Step<Compact>>, later_us: u64| {
        step.map(|step| {
            let written = step
                .write
                .after(None)
                .map(|state| (state.at.as_us() - later_us, state.span_us, state.extra));
            (step.decision, written)
        })
    };
    if let (Some(at), Some(now_later)) = (later(state.at), later(now)) {
        let later = limit.step_fast(Compact { at, ..state }, now_later, cost);
        prop_assert_eq!(later_by(later, LATER_US), later_by(limit.step_fast(state, now, cost), 0));
    }
    Ok(())
}
