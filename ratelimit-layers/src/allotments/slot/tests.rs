//! The sizes of draws, and the end of an allotment. The simulation tries the rest.

use std::ops::ControlFlow;

use ratelimit_core::algorithm::Recovery;
use ratelimit_core::{Decision, ReservationId, Timestamp};

use super::{AllotmentSlot, Draw, EarlyEnd, MOST, Terms};

const TERMS: Terms = Terms { lifetime_us: 100_000, divisor: 4 };

fn at(us: u64) -> Timestamp {
    Timestamp::saturating_from_us(us)
}

fn admitting(remaining: u64, reset_after_us: u64) -> Decision {
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
struct CountingIds {
    slot: AllotmentSlot,
    ids: u128,
}

impl CountingIds {
    /// Asks for one request of cost 1, of which the store says that so many remain.
    fn asks(&mut self, now: u64, remaining: u64) -> u64 {
        self.ids += 1;
        let id = ReservationId::new(self.ids);
        let asked = self.slot.request(&TERMS, at(now), &[1], || id);
        let ControlFlow::Continue((_, draw)) = asked else { return 0 };
        let said = admitting(remaining, 10_000);
        match draw {
            None => self.slot.tell([&said].into_iter()),
            Some(draw) => {
                let told = [(said, Recovery::Gradual)];
                self.slot.apply_draw(&TERMS, (draw, at(now)), &[1], &told);
            }
        }
        draw.map_or(1, |draw| draw.times)
    }
}

#[test]
fn a_draw_doubles_while_requests_ask_again_and_stays_within_its_bounds() {
    let sizes = |remaining| -> Vec<u64> {
        let mut counted = CountingIds::default();
        // 0: served from the allotment.
        (0..32_768).map(|n| counted.asks(n, remaining)).filter(|size| *size > 0).collect()
    };
    assert_eq!(sizes(400_000)[..7], [1, 2, 4, 8, 16, 32, 64]);
    assert_eq!(sizes(400_000)[13..15], [8_192, MOST]);
    // A quarter of what remains.
    assert_eq!(sizes(21)[..6], [1, 2, 4, 5, 5, 5]);
    assert_eq!(sizes(7), vec![1; 32_768]);
}

#[test]
fn an_allotment_that_lapses_sets_the_next_to_what_was_used_and_a_pause_ends_it() {
    for (pause, size) in [(1, 3), (99_999, 3), (100_100, 1)] {
        let mut counted = CountingIds::default();
        // Two plain ones, then 2, 4, 8: of these, three requests use their part.
        let sizes: Vec<u64> = (0..10).map(|n| counted.asks(n, 400)).collect();
        assert_eq!(sizes, [1, 2, 0, 4, 0, 0, 0, 8, 0, 0]);
        let (_, until) = counted.slot.ends().expect("an allotment");
        // One per thousand less, for the drift of the clock.
        assert_eq!(until, at(7 + 99_900));
        assert_eq!(counted.asks(until.as_us() + pause, 400), size);
    }
}

#[test]
fn an_allotment_is_not_spent_before_the_time_at_which_it_was_drawn() {
    let mut counted = CountingIds::default();
    assert_eq!([1, 2].map(|now| counted.asks(now, 400)), [1, 2]);
    // The clock has gone back, so the allotment has no age.
    assert_eq!(counted.slot.clone().spend(at(1), &[1]), None);
    assert!(counted.slot.spend(at(2), &[1]).is_some());
}

/// A caller may keep the future of a draw, and poll it when its slot is gone or awaits another
/// draw.
#[test]
fn what_comes_for_a_draw_that_is_not_awaited_stays_charged_and_ends_no_other() {
    let mut counted = CountingIds::default();
    assert_eq!(counted.asks(1, 400), 1);
    let asked = counted.slot.request(&TERMS, at(2), &[1], || ReservationId::new(8));
    let ControlFlow::Continue((_, Some(awaited))) = asked else { panic!("{asked:?}") };
    let draw = Draw { id: ReservationId::new(7), times: 3 };
    let told = [(admitting(97, 10_000), Recovery::Gradual)];
    for mut slot in [AllotmentSlot::default(), counted.slot] {
        let is_gone = slot.is_empty();
        let (_, ended) = slot.apply_draw(&TERMS, (draw, at(3)), &[1], &told);
        let ended = ended.expect("it is spent no more");
        // A reset may have come meanwhile: to give it back would create capacity.
        assert_eq!((ended.ending, ended.unused), (EarlyEnd::Forfeited, 2));
        slot.not_drawn(&TERMS, draw.id, None);
        assert_eq!(slot.is_empty(), is_gone);
        let (_, ended) = slot.apply_draw(&TERMS, (awaited, at(2)), &[1], &told);
        assert_eq!(ended.is_some(), is_gone);
    }
}
