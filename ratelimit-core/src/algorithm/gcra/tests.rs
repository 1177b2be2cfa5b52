//! GCRA: examples with numbers.

use super::*;
use crate::algorithm::Algorithm;
use crate::in_memory::InMemory;

fn gcra(rate: &str, burst: u64) -> Gcra {
    Gcra::new(rate.parse().expect(rate), burst).expect(rate)
}

fn timestamp(us: u64) -> Timestamp {
    Timestamp::from_us(us).expect("a test's time")
}

/// A billion and seven per month: a refill tick is a second and refills some 386 tokens.
fn coarse() -> Gcra {
    gcra("1000000007/30d", 1_000_000_007)
}

#[test]
fn requests_are_decided_as_worked_out_by_hand() {
    const BURST: u64 = 1_000_000_007;
    // The time, the cost, whether it fits, what remains, and the wait.
    let fits = |at_us, cost, remaining| (at_us, cost, true, remaining, Some(0));
    let waits = |at_us, cost, remaining, wait_us| (at_us, cost, false, remaining, Some(wait_us));
    let never = |at_us, cost, remaining| (at_us, cost, false, remaining, None);
    for (limit, table) in [
        // A burst passes, and then the rate does.
        (
            gcra("1/s", 2),
            &[
                fits(0, 1, 1),
                fits(0, 1, 0),
                waits(0, 1, 0, 1_000_000),
                waits(999_999, 1, 0, 1),
                fits(1_000_000, 1, 0),
            ][..],
        ),
        // Ten million per second are ten per microsecond.
        (
            gcra("10000000/s", 10),
            &[fits(0, 10, 0), waits(0, 1, 0, 1), fits(1, 10, 0), waits(1, 1, 0, 1)],
        ),
        // A clock that goes back decides at the time of the state: of four, one is missing a second after that.
        (
            gcra("1/s", 5),
            &[fits(10_000_000, 1, 4), fits(9_000_000, 1, 3), waits(9_000_000, 4, 3, 2_000_000)],
        ),
        // A cost above the burst never fits and charges nothing.
        (gcra("1/s", 5), &[never(0, 6, 5), never(0, u64::MAX, 5), fits(0, 5, 0)]),
        // A charge within a coarse tick begins a new tick: a microsecond later, next to nothing has refilled.
        (
            coarse(),
            &[
                fits(0, 1, BURST - 1),
                fits(999_999, 1, BURST - 2),
                waits(1_000_000, BURST, BURST - 2, 999_999),
                fits(1_999_999, BURST, 0),
            ],
        ),
        // A coarse tick refills late, but never early.
        (
            coarse(),
            &[
                fits(500_000, BURST, 0),
                waits(1_000_000, 1, 0, 500_000),
                waits(1_499_999, 1, 0, 1),
                fits(1_500_000, 1, 384),
            ],
        ),
    ] {
        let mut state = None;
        for &(at_us, cost, allowed, remaining, wait_us) in table {
            let step = limit.step(state.as_ref(), timestamp(at_us), cost);
            let got = step.decision;
            let got = (got.allowed, got.remaining, got.retry_after_us);
            assert_eq!(got, (allowed, remaining, wait_us), "{limit:?} at {at_us}");
            state = step.write.after(state.as_ref()).copied();
        }
    }
}

/// No limit writes such a state, but a store may be given one.
#[test]
fn a_state_that_ends_before_it_was_written_has_no_compact_form() {
    let backwards = GcraState { tat_us: 1, surplus: 0, timestamp: timestamp(2) };
    assert_eq!(Gcra::to_compact(&backwards), None);
}
