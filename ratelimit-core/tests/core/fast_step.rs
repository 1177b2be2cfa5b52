//! A fast step, where a limit has one, decides and writes as the step does: for numbers of every
//! magnitude, which the limits of the conformance suite do not have.

use proptest::prelude::*;
use ratelimit_core::algorithm::InMemory;
use ratelimit_core::for_memory::Compact;
use ratelimit_core::{AnyAlgorithm, Gcra, Limit, Rate, Timestamp};

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
        // Also at the cost that just fits, and at one more.
        let limit = Limit::new("l", limit).expect("a name");
        let left = limit.step_compact(Some(state), now, 0).expect("it fits").decision.remaining;
        for cost in [cost, left, left + 1] {
            agrees(&limit, state, now, cost)?;
        }
    }
}

/// The fast step of the limit and of any algorithm is the step of each, and exists for nearly all
/// requests; where it admits, a limit that counts attempts steps alike.
fn agrees(
    limit: &Limit<Gcra>,
    state: Compact,
    now: Timestamp,
    cost: u64,
) -> Result<(), TestCaseError> {
    let gcra = *limit.algorithm();
    let refill = gcra.refill();
    // At a rate of 0 there is no token.
    let is_whole = refill.tick_us == 1 && refill.tick_units == 1 && refill.burst > 0;
    let is_usual = is_whole && (1..=refill.burst).contains(&cost) && now >= state.at;
    let any = Limit::new("l", AnyAlgorithm::from(gcra)).expect("a name");
    let attempts = any.clone().count_attempts().expect("gcra counts attempts");
    prop_assert_eq!(gcra.has_fast_step(), is_whole);
    prop_assert_eq!(any.algorithm().has_fast_step(), is_whole);
    let step = limit.step_compact(Some(state), now, cost).filter(|_| is_usual);
    prop_assert_eq!(gcra.step_fast(state, now, cost), step.clone());
    prop_assert_eq!(any.algorithm().step_fast(state, now, cost), step.clone());
    let admitted = step.filter(|step| step.decision.allowed);
    if admitted.is_some() {
        prop_assert_eq!(attempts.step_compact(Some(state), now, cost), admitted);
    }
    Ok(())
}
