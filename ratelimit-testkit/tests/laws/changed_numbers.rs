//! Reservations that outlive the numbers of their limit, or the window of their first charge.

use ratelimit_core::store::Op;
use ratelimit_testkit::PureStore;

use crate::{ask, limit};

const SECOND_US: u64 = 1_000_000;
const DAY_US: u64 = 86_400 * SECOND_US;

/// Requests one after the other: the limit by its place, the operation, the id, the cost, the time,
/// and what remains afterwards; `None` if it is denied.
type Story<'s> = &'s [(usize, Op, Option<u128>, u64, u64, Option<u64>)];

fn check_story(limits: &[&str], requests: Story<'_>) {
    let limits: Vec<_> = limits.iter().map(|words| limit("l", words)).collect();
    let store = PureStore::new();
    for asked @ (place, op, id, cost, at_us, due) in requests {
        let got = ask(&store, &[&limits[*place]], (*op, *id, *cost), *at_us).expect("decides");
        let left = got.allowed().then(|| got.remaining());
        assert_eq!(left, *due, "{asked:?} of {limits:?}: {got:?}");
    }
}

/// A unit of 100 ms is not given back as an hour.
#[test]
fn a_settlement_after_a_change_gives_back_what_was_charged_and_no_more() {
    use Op::{Acquire, Settle};
    check_story(
        &["gcra 10/s burst 40", "gcra 1/h burst 40"],
        &[
            (0, Acquire, Some(1), 30, 0, Some(10)),
            (1, Acquire, None, 39, 1_000, Some(0)),
            (1, Settle, Some(1), 0, 2_000, Some(1)),
            (1, Acquire, None, 1, 7_000, Some(0)),
            (1, Acquire, None, 1, 7_000, None),
        ],
    );
    // The other way round: an hour was charged, and 100 ms are what the limit counts.
    check_story(
        &["gcra 1/h burst 40", "gcra 10/s burst 40"],
        &[
            (0, Acquire, Some(1), 30, 0, Some(10)),
            (1, Acquire, None, 40, 4 * SECOND_US, Some(0)),
            (0, Settle, Some(1), 0, 4 * SECOND_US, Some(39)),
            (1, Acquire, None, 1, 4 * SECOND_US, None),
        ],
    );
    // The burst is halved: what lay beyond it is lost, and is not given back from what others are
    // charged.
    check_story(
        &["gcra 10/s burst 80", "gcra 10/s burst 40"],
        &[
            (0, Acquire, Some(1), 50, 0, Some(30)),
            (0, Acquire, Some(2), 30, 0, Some(0)),
            (1, Acquire, None, 10, SECOND_US, Some(0)),
            (1, Settle, Some(1), 0, SECOND_US, Some(20)),
            (1, Settle, Some(2), 0, SECOND_US, Some(20)),
        ],
    );
    // The same numbers give back all of it.
    check_story(
        &["gcra 3/s burst 10", "gcra 3/s burst 20"],
        &[(0, Acquire, Some(1), 7, 0, Some(3)), (1, Settle, Some(1), 2, 1, Some(18))],
    );
}

/// A larger window has paid what a smaller one would still count.
#[test]
fn a_window_that_is_paid_is_not_given_back_once_more_under_a_smaller_limit() {
    use Op::{Acquire, Settle};
    check_story(
        &["fixed-window 100/m", "fixed-window 10/m"],
        &[
            (0, Acquire, Some(1), 60, 0, Some(40)),
            (1, Acquire, None, 10, 60 * SECOND_US, Some(0)),
            (1, Settle, Some(1), 0, 60 * SECOND_US, Some(0)),
        ],
    );
}

/// Of a stream over midnight, what was charged after midnight is given back.
#[test]
fn an_extension_in_a_new_window_is_given_back_there() {
    use Op::{Acquire, Extend, Settle};
    let (evening, midnight) = (DAY_US - SECOND_US, DAY_US);
    check_story(
        &["fixed-window 20000/d"],
        &[
            (0, Acquire, Some(1), 64, evening, Some(19_936)),
            (0, Extend, Some(1), 10_064, midnight, Some(10_000)),
            (0, Settle, Some(1), 65, midnight + 1, Some(19_999)),
        ],
    );
    // Of a bucket, less what has refilled since the extension, not since the beginning.
    check_story(
        &["gcra 1/s burst 100"],
        &[
            (0, Acquire, Some(1), 10, 0, Some(90)),
            (0, Extend, Some(1), 60, 30 * SECOND_US, Some(50)),
            (0, Acquire, None, 1, 31 * SECOND_US, Some(50)),
            (0, Settle, Some(1), 10, 32 * SECOND_US, Some(99)),
        ],
    );
}
