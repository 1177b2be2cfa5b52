//! GCRA: examples with numbers, and the fast path against the textbook.

use super::*;
use crate::algorithm::Write;
use crate::in_memory::{Compact, InMemory};

fn gcra(rate: &str, burst: u64) -> Gcra {
    Gcra::new(rate.parse().expect(rate), burst).expect(rate)
}

fn timestamp(us: u64) -> Timestamp {
    Timestamp::from_us(us).expect("a test's time")
}

/// Acquires one after the other and returns (allowed, remaining, retry, reset) of each.
fn run(gcra: &Gcra, requests: &[(u64, u64)]) -> alloc::vec::Vec<(bool, u64, Option<u64>, u64)> {
    let mut state = None;
    requests
        .iter()
        .map(|&(at_us, cost)| {
            let step = gcra.step(state.as_ref(), timestamp(at_us), cost);
            match step.write {
                Write::Keep => {}
                Write::Put { state: next, .. } => state = Some(next),
                Write::Remove => state = None,
            }
            let d = step.decision;
            (d.allowed, d.remaining, d.retry_after_us, d.reset_after_us)
        })
        .collect()
}

#[test]
fn a_burst_passes_and_then_the_rate_does() {
    assert_eq!(
        run(&gcra("1/s", 2), &[(0, 1), (0, 1), (0, 1), (999_999, 1), (1_000_000, 1)]),
        [
            (true, 1, Some(0), 1_000_000),
            (true, 0, Some(0), 2_000_000),
            (false, 0, Some(1_000_000), 2_000_000),
            (false, 0, Some(1), 1_000_001),
            (true, 0, Some(0), 2_000_000),
        ]
    );
}

#[test]
fn intervals_of_a_third_of_a_second_do_not_drift() {
    let gcra = gcra("3/s", 1);
    let mut state = None;
    let mut at_us = 1_795_218_392_123_456;
    let begin_us = at_us;
    for _ in 0..3_000 {
        let step = gcra.step(state.as_ref(), timestamp(at_us), 1);
        assert!(step.decision.allowed);
        let Write::Put { state: next, .. } = step.write else { panic!("charged") };
        at_us += gcra.step(Some(&next), timestamp(at_us), 1).decision.retry_after_us.expect("fits");
        state = Some(next);
    }
    assert_eq!(at_us - begin_us, 3_000 * 333_334); // Each wait is rounded up by itself …
    let mut admitted = 0;
    let mut state = None;
    for us in (begin_us..begin_us + 1_000_000_000).step_by(1_000) {
        let step = gcra.step(state.as_ref(), timestamp(us), 1);
        if let Write::Put { state: next, .. } = step.write {
            state = Some(next);
            admitted += 1;
        }
    }
    assert_eq!(admitted, 2_995); // … and a request each millisecond: one admitted per 334 ms.
}

#[test]
fn ten_million_per_second_are_ten_per_microsecond() {
    let fast = gcra("10000000/s", 10);
    let got = run(&fast, &[(0, 10), (0, 1), (1, 10), (1, 1)]);
    assert_eq!(got[0], (true, 0, Some(0), 1));
    assert_eq!(got[1], (false, 0, Some(1), 1));
    assert_eq!(got[2], (true, 0, Some(0), 1));
    assert_eq!(got[3], (false, 0, Some(1), 1));
}

#[test]
fn a_clock_that_goes_back_decides_at_the_time_of_the_state() {
    let got = run(&gcra("1/s", 5), &[(10_000_000, 1), (9_000_000, 1), (9_000_000, 4)]);
    assert_eq!(got[1], (true, 3, Some(0), 3_000_000));
    // Of four, one is missing a second after the state's time, which is two seconds from now.
    assert_eq!(got[2], (false, 3, Some(2_000_000), 3_000_000));
}

#[test]
fn a_cost_above_the_burst_never_fits_and_charges_nothing() {
    let got = run(&gcra("1/s", 5), &[(0, 6), (0, u64::MAX), (0, 5)]);
    assert_eq!(got[0], (false, 5, None, 0));
    assert_eq!(got[1], (false, 5, None, 0));
    assert_eq!(got[2], (true, 0, Some(0), 5_000_000));
}

#[test]
fn a_charge_within_a_coarse_tick_begins_a_new_tick() {
    let rate = Rate::per_us(1_000_000_007, 30 * 86_400_000_000).expect("a rate");
    let coarse = Gcra::new(rate, 1_000_000_007).expect("exact in seconds");
    let got = run(
        &coarse,
        &[(0, 1), (999_999, 1), (1_000_000, 1_000_000_007), (1_999_999, 1_000_000_007)],
    );
    // A microsecond after the second token was charged, next to nothing of it has refilled.
    assert_eq!((got[2].0, got[2].1, got[2].2), (false, 1_000_000_005, Some(999_999)));
    assert!(got[3].0);
}

#[test]
fn a_compact_state_decodes_to_the_same_state() {
    let state = GcraState { tat_us: 1_333_334, surplus: 2, timestamp: timestamp(1_000_000) };
    let compact = Gcra::to_compact(&state).expect("a span");
    assert_eq!(compact, Compact { at: timestamp(1_000_000), span_us: 333_334, extra: 2 });
    assert_eq!(Gcra::from_compact(compact), Some(state));
    // No limit writes such a state, but a store may be given one.
    let backwards = GcraState { tat_us: 1, surplus: 0, timestamp: timestamp(2) };
    assert_eq!(Gcra::to_compact(&backwards), None);
}

#[test]
fn a_fast_step_is_the_textbook_step() {
    let mut tried = [0, 0];
    for (rate, burst) in [("1/s", 2), ("4/s", 60), ("1/us", 2), ("1/30d", 1)] {
        let (limit, begin_us) = (gcra(rate, burst), 1 << 50);
        assert!(limit.has_fast_step());
        let full_us = limit.refill.full_us();
        let spans = [0, 1, full_us / 3, full_us - 1, full_us, full_us + 1, 2 * full_us];
        for (span_us, away_us) in spans.into_iter().flat_map(|s| spans.map(|away| (s, away))) {
            for (extra, cost) in [(0, 1), (1, 1), (0, 2), (1, 60)] {
                let compact = Compact { at: timestamp(begin_us), span_us, extra };
                let now = timestamp(begin_us + away_us);
                let Some(fast) = limit.step_fast(compact, now, cost) else {
                    assert!(cost > burst);
                    continue;
                };
                let step = limit.step(Gcra::from_compact(compact).as_ref(), now, cost);
                let allowed = step.decision.allowed;
                let compact = |state| Gcra::to_compact(&state).expect("a span");
                assert_eq!(fast, Step { decision: step.decision, write: step.write.map(compact) });
                tried[usize::from(allowed)] += 1;
            }
        }
    }
    assert!(tried.iter().all(|tried| *tried > 50), "{tried:?}");
}

#[test]
fn limits_of_fractional_tokens_have_no_fast_step() {
    let compact = Compact { at: timestamp(0), span_us: 0, extra: 0 };
    for limit in [gcra("3/s", 1), gcra("10000000/s", 5)] {
        assert!(!limit.has_fast_step());
        assert_eq!(limit.step_fast(compact, timestamp(1), 1), None);
    }
}

#[test]
fn a_coarse_tick_refills_late_but_never_early() {
    // A billion and seven per month: a refill tick is a second and refills some 386 tokens.
    let coarse =
        Gcra::new(Rate::per_us(1_000_000_007, 30 * 86_400_000_000).expect("a rate"), 1_000_000_007)
            .expect("exact in seconds");
    let half = 500_000;
    let got = run(
        &coarse,
        &[(half, 1_000_000_007), (1_000_000, 1), (half + 999_999, 1), (half + 1_000_000, 1)],
    );
    assert!(got[0].0);
    assert_eq!((got[1].0, got[1].2), (false, Some(half)));
    assert_eq!((got[2].0, got[2].2), (false, Some(1)));
    assert!(got[3].0);
    assert_eq!(got[3].1, 384);
}
