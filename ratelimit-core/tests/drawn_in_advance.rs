//! Budget that is drawn in advance: a charge of several requests at once, settled later at what was
//! used of it. The parts that were used, at the times of their charges, are a history that the
//! algorithm itself admits. A layer relies on this when it spends a charge by itself.

#![allow(clippy::expect_used, missing_docs, reason = "tests")]

use proptest::prelude::*;
use ratelimit_core::algorithm::{AnyState, Recovery, Step};
use ratelimit_core::store::Reservation;
use ratelimit_core::{Algorithm, AnyAlgorithm, Timestamp};

/// What happens after a time.
#[derive(Clone, Debug)]
enum Event {
    /// Draws `cost`, of which a part is used.
    Draw { cost: u64, used: u64 },
    /// Settles one of the draws, perhaps not for the first time.
    Settle { which: prop::sample::Index, again: bool },
}

fn events() -> impl Strategy<Value = Vec<(u64, Event)>> {
    let draw = (1..12_u64)
        .prop_flat_map(|cost| (0..=cost).prop_map(move |used| Event::Draw { cost, used }));
    let settle = (any::<prop::sample::Index>(), prop::bool::weighted(0.1))
        .prop_map(|(which, again)| Event::Settle { which, again });
    let after_us = prop_oneof![Just(0), 0..10_u64, 0..400_000_u64, 0..3_000_000_u64];
    prop::collection::vec((after_us, prop_oneof![draw, settle]), 1..60)
}

struct Run {
    limit: AnyAlgorithm,
    /// What a store keeps.
    state: Option<AnyState>,
    /// What it would keep if every draw had been charged what was used of it.
    of_used: Option<AnyState>,
}

impl Run {
    fn apply_write(&mut self, step: &Step<AnyState>) {
        self.state = step.write.after(self.state.as_ref()).cloned();
    }

    /// Draws, and returns the reservation if there was room.
    fn draw(&mut self, now: Timestamp, cost: u64, used: u64) -> Option<Reservation> {
        let charged_at = self.limit.charged_at(self.state.as_ref(), now);
        let step = self.limit.step(self.state.as_ref(), now, cost);
        self.apply_write(&step);
        step.decision.allowed.then(|| {
            let of_used = self.limit.step(self.of_used.as_ref(), now, used);
            assert!(of_used.decision.allowed, "{used} of {cost} at {now}: {:?}", self.of_used);
            self.of_used = of_used.write.after(self.of_used.as_ref()).cloned();
            Reservation::new(charged_at, cost)
        })
    }

    fn settle(&mut self, now: Timestamp, reservation: &Reservation, used: u64) {
        let step = self.limit.settle(self.state.as_ref(), now, reservation, used);
        self.apply_write(&step.expect("it takes reservations"));
    }

    fn remaining(&self, state: Option<&AnyState>, now: Timestamp) -> u64 {
        self.limit.step(state, now, 0).decision.remaining
    }
}

fn limits() -> impl Strategy<Value = AnyAlgorithm> {
    let words = [
        "gcra 10/s burst 20",
        "gcra 7/3s burst 5",
        "gcra 3/s burst 30",
        "token-bucket 10/s burst 20",
        "token-bucket 7/3s burst 5",
        "fixed-window 10/s",
        "fixed-window 30/2s",
    ];
    prop::sample::select(words.map(|words| words.parse().expect(words)).to_vec())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn what_was_used_of_draws_is_admitted_by_the_algorithm_at_the_times_of_their_charges(
        limit in limits(),
        events in events(),
    ) {
        let mut run = Run { limit, state: None, of_used: None };
        let mut now = Timestamp::saturating_from_us(1_795_218_392_123_456);
        let mut draws: Vec<(Reservation, u64)> = Vec::new();
        for (after_us, event) in events {
            now = now.saturating_add_us(after_us);
            match event {
                Event::Draw { cost, used } => {
                    draws.extend(run.draw(now, cost, used).map(|reservation| (reservation, used)));
                }
                Event::Settle { which, again } => {
                    if draws.is_empty() {
                        continue;
                    }
                    let position = which.index(draws.len());
                    let (reservation, used) = draws.swap_remove(position);
                    run.settle(now, &reservation, used);
                    // A store settles an id once. At the cost that was used, once more changes
                    // nothing.
                    if again {
                        let settled = Reservation { cost: used, ..reservation };
                        run.settle(now, &settled, used);
                    }
                }
            }
            let (left, at_most) = (run.remaining(run.state.as_ref(), now), run.remaining(run.of_used.as_ref(), now));
            prop_assert!(left <= at_most, "{left} left, above {at_most}");
        }
    }
}

#[test]
fn a_fixed_window_recovers_at_its_reset_and_a_bucket_before() {
    for (words, recovery) in [
        ("gcra 10/s burst 20", Some(Recovery::Gradual)),
        ("token-bucket 10/s burst 20", Some(Recovery::Gradual)),
        ("fixed-window 20/s", Some(Recovery::AtReset)),
        ("concurrency 20/s", None),
        ("sliding-counter 20/s", None),
    ] {
        let limit: AnyAlgorithm = words.parse().expect(words);
        assert_eq!(limit.recovery(), recovery, "{words}");
        let Some(recovery) = recovery else { continue };
        let now = Timestamp::saturating_from_us(1_795_218_392_123_456);
        let charged = limit.step(None, now, 20);
        let state = charged.write.after(None);
        let reset = now.saturating_add_us(charged.decision.reset_after_us);
        let just_before = Timestamp::saturating_from_us(reset.as_us() - 1);
        let left = |at| limit.step(state, at, 0).decision.remaining;
        assert_eq!(left(reset), 20, "{words}");
        assert_eq!(left(just_before) > 0, recovery == Recovery::Gradual, "{words}");
    }
}
