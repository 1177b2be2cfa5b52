//! A slot by itself, with random requests, answers and times.

use proptest::prelude::*;
use ratelimit_core::{Decision, Recovery, ReservationId, Timestamp};

use super::{Answer, Draw, Ending, Slot, Terms};

const TERMS: Terms = Terms { lifetime_us: 1_000, drift_ppm: 10_000, divisor: 4, most: 50 };

fn at(us: u64) -> Timestamp {
    Timestamp::saturating_from_us(us)
}

fn told(remaining: u64, reset_after_us: u64) -> Decision {
    Decision {
        allowed: true,
        cost: 0,
        limit: 1_000,
        remaining,
        retry_after_us: Some(0),
        replenish_after_us: reset_after_us,
        reset_after_us,
    }
}

/// A slot that makes ids by counting.
#[derive(Default)]
struct Counted {
    slot: Slot,
    ids: u128,
}

impl Counted {
    fn request(&mut self, now: u64, costs: &[u64]) -> Answer {
        self.ids += 1;
        let id = ReservationId::new(self.ids);
        self.slot.request(&TERMS, at(now), costs, || id)
    }

    /// Asks for one request of cost 1, of which the store says that so many remain.
    fn asks(&mut self, now: u64, remaining: u64) -> u64 {
        let Answer::Ask { draw, .. } = self.request(now, &[1]) else { return 0 };
        let said = told(remaining, 10_000);
        match draw {
            None => self.slot.tell([&said].into_iter()),
            Some(draw) => {
                let told = [(said, Recovery::Gradual)];
                self.slot.drawn(&TERMS, (draw, at(now)), &[1], &told);
            }
        }
        draw.map_or(1, |draw| draw.times)
    }
}

#[test]
fn a_draw_doubles_while_requests_ask_again_and_stays_within_its_bounds() {
    let mut counted = Counted::default();
    // 0: served from the allotment.
    let sizes: Vec<u64> = (0..128).map(|n| counted.asks(n, 400)).filter(|size| *size > 0).collect();
    assert_eq!(sizes[..6], [1, 2, 4, 8, 16, 32]);
    assert_eq!(sizes[6], TERMS.most);
    // A quarter of what remains.
    let mut counted = Counted::default();
    let sizes: Vec<u64> = (0..64).map(|n| counted.asks(n, 21)).filter(|size| *size > 0).collect();
    assert_eq!(sizes[..4], [1, 2, 4, 5]);
    assert_eq!(sizes[5], 5);
    let mut counted = Counted::default();
    assert!((0..64).all(|n| counted.asks(n, 7) == 1));
}

#[test]
fn an_allotment_that_lapses_sets_the_next_to_what_was_used_and_a_pause_ends_it() {
    for (pause, size) in [(1, 3), (999, 3), (1_100, 1)] {
        let mut counted = Counted::default();
        // Two plain ones, then 2, 4, 8: of these, three requests use their part.
        let sizes: Vec<u64> = (0..10).map(|n| counted.asks(n, 400)).collect();
        assert_eq!(sizes, [1, 2, 0, 4, 0, 0, 0, 8, 0, 0]);
        let (_, until) = counted.slot.ends().expect("an allotment");
        // One per hundred less, for the drift of the clock.
        assert_eq!(until, at(7 + 990));
        assert_eq!(counted.asks(until.as_us() + pause, 400), size);
    }
}

/// A draw that the store has charged: what was charged by check, when, and what was spent of it.
struct Drawn {
    draw: Draw,
    /// When its budget resets, if it does at once.
    resets: Option<u64>,
    sent: u64,
    charged: Vec<u64>,
    spent: Vec<u64>,
    is_settled: bool,
}

proptest! {
    /// The lemma of the bound: the store charged, once, in the same window and within the lifetime before, what the slot admits
    /// without a call; and the slot settles what it spent.
    #[test]
    fn what_is_served_was_charged_within_the_lifetime_and_is_settled_at_what_was_spent(
        events in prop::collection::vec(
            (0..700_u64, prop::collection::vec(1..5_u64, 2), 0..400_u64, 1..3_000_u64, 0..10_u8),
            1..80,
        ),
    ) {
        let (mut counted, mut now) = (Counted::default(), 1_000_000);
        let mut charges: Vec<Drawn> = Vec::new();
        let settled = |charges: &mut Vec<Drawn>, ended: super::Ended| {
            let place = charges.iter().position(|charge| charge.draw.id == ended.id);
            let charge = &mut charges[place.expect("it was drawn")];
            prop_assert!(!charge.is_settled);
            prop_assert_eq!(&ended.used, &charge.spent);
            let unused = charge.charged.iter().zip(&charge.spent).map(|(all, spent)| all - spent);
            prop_assert_eq!(ended.unused, unused.sum::<u64>());
            charge.is_settled = true;
            Ok(())
        };
        for (pause, costs, remaining, reset_after_us, outcome) in events {
            now += pause;
            match counted.request(now, &costs) {
                Answer::Serve(decisions) => {
                    prop_assert!(decisions.iter().all(|decision| decision.allowed));
                    let open = charges.iter_mut().filter(|charge| !charge.is_settled);
                    let charge = open.last().expect("what is served was charged");
                    for (spent, cost) in charge.spent.iter_mut().zip(&costs) {
                        *spent += cost;
                    }
                    prop_assert!(charge.spent.iter().zip(&charge.charged).all(|(s, c)| s <= c));
                    // A clock that is slow by the drift is not above the lifetime either.
                    let lasts_us = (now - charge.sent) * 100;
                    prop_assert!(lasts_us < TERMS.lifetime_us * 99);
                    if let Some(reset) = charge.resets {
                        prop_assert!(lasts_us < (reset - charge.sent) * 99);
                    }
                }
                Answer::Ask { ended, draw } => {
                    if let Some(ended) = ended {
                        settled(&mut charges, ended)?;
                    }
                    let said = told(remaining, reset_after_us);
                    let Some(draw) = draw else {
                        counted.slot.tell([&said, &said].into_iter());
                        continue;
                    };
                    prop_assert!(costs.iter().all(|cost| cost * draw.times <= TERMS.most));
                    if outcome == 0 {
                        counted.slot.not_drawn(&TERMS, draw.id, None);
                        continue;
                    }
                    let is_window = outcome % 2 == 0;
                    let recovery = if is_window { Recovery::AtReset } else { Recovery::Gradual };
                    let sent = now;
                    now += u64::from(outcome) * 40;
                    let told = [(said, recovery), (told(remaining, 9_999_999), Recovery::AtReset)];
                    let all = counted.slot.drawn(&TERMS, (draw, at(sent)), &costs, &told);
                    prop_assert_eq!(all.1, None);
                    charges.push(Drawn {
                        draw,
                        resets: is_window.then_some(sent + reset_after_us),
                        sent,
                        charged: costs.iter().map(|cost| cost * draw.times).collect(),
                        spent: costs,
                        is_settled: false,
                    });
                }
            }
        }
        if let Some(ended) = counted.slot.end(Ending::GivenBack) {
            settled(&mut charges, ended)?;
        }
    }
}
