//! Ids in `decide`: each is charged once and settled once, and frees no other client's charge.

use ratelimit_core::store::{Batch, Check, Op, Reservation};
use ratelimit_core::{AnyAlgorithm, ErrorKind, Limit, Refusal, ReservationId, WindowLog};
use ratelimit_testkit::PureStore;

use crate::{ask, limit};

const ID: u128 = 7;
const SECOND_US: u64 = 1_000_000;

fn fixed() -> Limit<AnyAlgorithm> {
    limit("fixed", "fixed-window 10/m")
}

/// What a refused request runs into.
fn obstacle(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::OtherChecks { reserved, .. } if reserved.as_str() == "gcra,leases" => "others",
        Refusal::UnknownReservation { .. } => "unknown",
        Refusal::Settled { at: 3, .. } => "settled at 3",
        Refusal::Reserved { at: 1, .. } => "reserves 1",
        _ => "something else",
    }
}

/// Requests one after the other: the limits by their first letters, the operation, whether under
/// the id, the cost, the time in seconds, and what remains or why it is refused.
type Story<'s> = &'s [(&'s str, Op, bool, u64, u64, Result<&'s [u64], &'s str>)];

#[test]
fn reservations_are_settled_with_what_they_were_made_with_and_return_what_still_counts() {
    use Op::{Acquire, Peek, Refund, Renew, Reset, Settle};
    let hour = Reservation::LIFE_US / SECOND_US;
    let stories: [Story<'_>; 15] = [
        // Other limits than were reserved settle nothing. The lease has expired first: the same
        // limits settle the rest.
        &[
            ("gl", Acquire, true, 2, 0, Ok(&[8, 1])),
            ("g", Settle, true, 2, 0, Err("others")),
            ("l", Renew, true, 2, 0, Err("others")),
            ("g", Acquire, true, 2, 0, Err("others")),
            ("l", Refund, true, 2, 0, Err("others")),
            ("gf", Settle, true, 0, 0, Err("others")),
            ("f", Settle, true, 0, 0, Err("unknown")),
            ("gl", Peek, false, 0, 0, Ok(&[8, 1])),
            ("gl", Settle, true, 0, 60, Ok(&[10, 3])),
        ],
        // A batch is reserved and settled as a whole, or not at all.
        &[
            ("gfl", Acquire, true, 4, 0, Ok(&[10, 10, 3])),
            ("gfl", Settle, true, 0, 0, Err("unknown")),
            ("gfl", Acquire, true, 3, 0, Ok(&[7, 7, 0])),
            ("gfl", Settle, true, 1, 31, Ok(&[10, 9, 3])),
            ("l", Settle, true, 1, 31, Err("unknown")),
        ],
        // A settlement charges what is missing.
        &[("f", Acquire, true, 4, 0, Ok(&[6])), ("f", Settle, true, 6, 0, Ok(&[4]))],
        // It returns nothing of a window that is past, also if it was renewed meanwhile …
        &[
            ("f", Acquire, true, 10, 0, Ok(&[0])),
            ("f", Renew, true, 0, 60, Ok(&[10])),
            ("f", Acquire, false, 10, 60, Ok(&[0])),
            ("f", Settle, true, 0, 60, Ok(&[0])),
        ],
        // … after which it lives for another hour …
        &[
            ("f", Acquire, true, 10, 0, Ok(&[0])),
            ("f", Renew, true, 0, 60, Ok(&[10])),
            ("f", Settle, true, 0, hour, Ok(&[10])),
        ],
        // … and nothing of what has flowed back into a bucket already.
        &[
            ("g", Acquire, true, 10, 0, Ok(&[0])),
            ("g", Renew, true, 0, 9, Ok(&[9])),
            ("g", Acquire, false, 10, 10, Ok(&[0])),
            ("g", Settle, true, 0, 10, Ok(&[0])),
        ],
        // Releasing a lease after a reset frees no other lease.
        &[
            ("l", Acquire, true, 2, 0, Ok(&[1])),
            ("l", Reset, false, 0, 1, Ok(&[3])),
            ("l", Acquire, false, 3, 2, Ok(&[0])),
            ("l", Renew, true, 0, 3, Ok(&[0])),
            ("l", Settle, true, 0, 4, Ok(&[0])),
        ],
        // A clock that goes back neither loses a lease nor frees another.
        &[
            ("fl", Acquire, false, 1, 70, Ok(&[9, 2])),
            ("fl", Acquire, true, 2, 50, Ok(&[7, 0])),
            ("fl", Settle, true, 0, 50, Ok(&[9, 2])),
        ],
        // An operation with an id is done once.
        &[
            ("f", Acquire, false, 8, 0, Ok(&[2])),
            ("f", Refund, true, 3, 0, Ok(&[5])),
            ("f", Refund, true, 3, 0, Ok(&[5])),
            ("f", Refund, true, 4, 0, Err("settled at 3")),
        ],
        // Repeating it at another cost is refused.
        &[
            ("g", Acquire, true, 1, 0, Ok(&[9])),
            ("g", Acquire, true, 1, 0, Ok(&[9])),
            ("g", Acquire, true, 11, 0, Err("reserves 1")),
            ("g", Peek, true, 11, 0, Err("reserves 1")),
        ],
        // Without other charges, the true cost might have been charged from the beginning.
        &[("m", Acquire, true, 10, 0, Ok(&[0])), ("m", Settle, true, 2, 0, Ok(&[8]))],
        &[("m", Acquire, true, 10, 0, Ok(&[0])), ("m", Settle, true, 2, 60, Ok(&[9]))],
        &[("m", Acquire, true, 10, 0, Ok(&[0])), ("m", Settle, true, 2, 300, Ok(&[10]))],
        // With others in between, 5 of the 8 in excess may have refilled.
        &[
            ("m", Acquire, true, 10, 0, Ok(&[0])),
            ("m", Acquire, false, 4, 240, Ok(&[0])),
            ("m", Settle, true, 2, 300, Ok(&[1 + 3])),
        ],
        // All but the share of the last moment has refilled, and is not returned a second time.
        &[
            ("m", Acquire, true, 10, 0, Ok(&[0])),
            ("m", Acquire, false, 9, 594, Ok(&[0])),
            ("m", Settle, true, 2, 597, Ok(&[0])),
        ],
    ];
    let all = [
        limit("gcra", "gcra 1/s burst 10"),
        limit("minutes", "gcra 1/m burst 10"),
        fixed(),
        limit("leases", "concurrency 3/30s"),
    ];
    for story in stories {
        let store = PureStore::new();
        for request in story {
            let &(limits, op, has_id, cost, at_s, due) = request;
            let limits: Vec<_> = limits
                .chars()
                .flat_map(|c| all.iter().filter(move |l| l.name().starts_with(c)))
                .collect();
            let asked = (op, has_id.then_some(ID), cost);
            let got = ask(&store, &limits, asked, at_s * SECOND_US);
            let left = got.as_ref().map(|verdict| {
                verdict.decisions().iter().map(|one| one.remaining).collect::<Vec<_>>()
            });
            assert_eq!(left.map_err(obstacle), due.map(<[u64]>::to_vec), "{request:?}: {got:?}");
        }
    }
}

#[test]
fn an_impossible_operation_is_refused_and_writes_nothing() {
    let log = limit("log", "sliding-log 3/s");
    let attempts = limit("attempts", "fixed-window 10/m count attempts");
    let fixed = fixed();
    let store = PureStore::new();
    for (limits, asked, kind) in [
        (vec![&fixed], (Op::Settle, None, 1), ErrorKind::Invalid),
        (vec![&fixed], (Op::Renew, None, 1), ErrorKind::Invalid),
        (vec![&fixed], (Op::Acquire, Some(ID), 0), ErrorKind::Invalid),
        (vec![&fixed], (Op::Settle, Some(ID), 1), ErrorKind::Ended),
        (vec![&fixed, &log], (Op::Acquire, Some(ID), 1), ErrorKind::Unsupported),
        (vec![&fixed, &attempts], (Op::Acquire, Some(ID), 1), ErrorKind::Unsupported),
    ] {
        let refusal = ask(&store, &limits, asked, 0).expect_err("cannot be");
        assert_eq!(refusal.kind(), kind, "{asked:?}: {refusal}");
        for limit in limits {
            assert_eq!(store.state(limit, "a"), None);
            assert_eq!(store.reservation(limit, "a", ReservationId::new(ID)), None);
        }
    }
}

#[test]
fn metadata_beyond_the_bound_is_refused_where_any_is_kept() {
    let log = limit("log", "window-log 3/s");
    let fixed = fixed();
    let bytes = [0; WindowLog::MAX_METADATA_BYTES + 1];
    let validated =
        |limit, bytes| Batch::one(&Check { limit, key: "a", cost: 1 }).metadata(bytes).validate();
    assert_eq!(validated(&log, &bytes[1..]), Ok(()));
    assert_eq!(validated(&fixed, &bytes), Ok(()), "it keeps none");
    let refusal = validated(&log, &bytes).expect_err("a byte too many");
    assert_eq!(refusal, Refusal::Metadata { limit: "log".to_owned(), bytes: 257, most: 256 });
    assert_eq!(
        refusal.to_string(),
        "limit \"log\": 257 bytes of metadata are more than the 256 that it keeps of a request; \
         shorten them"
    );
}
