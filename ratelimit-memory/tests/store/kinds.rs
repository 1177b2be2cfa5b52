//! Window logs, and parts of batches, over the memory store.

use std::time::Duration;

use ratelimit_core::algorithm::LoggedRequest;
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{SyncStore, Timestamp};
use ratelimit_testkit::block_on;

use crate::common::{BEGIN, Memory, ask, limit, limiter, store};

#[test]
fn a_window_log_returns_its_charges_and_their_metadata_oldest_first_until_its_window_ends() {
    let limits = [limit("log", "window-log 3/m"), limit("fixed", "fixed-window 9/m")];
    let (limiter, clock) = limiter(limits, |builder| builder);
    clock.set(Timestamp::ZERO);
    let who = |at: &[u8]| limiter.request("a").metadata(at).check_now();
    // The clock goes back before the last one, which counts as made with the newest.
    for (at_us, path) in [(0, &b"GET /login"[..]), (2_000_000, b""), (1_000_000, b"\0\xff")] {
        clock.set(Timestamp::saturating_from_us(at_us));
        assert!(who(path).expect("decides").allowed());
    }
    assert!(!who(b"one too many").expect("decides").allowed());
    let entry = |us, metadata: &[u8]| {
        let timestamp = Timestamp::saturating_from_us(us);
        LoggedRequest { timestamp, cost: 1, metadata: metadata.into() }
    };
    let log = vec![entry(0, b"GET /login"), entry(2_000_000, b""), entry(2_000_000, b"\0\xff")];
    let entries = || block_on(limiter.logged("a")).expect("decides");
    clock.advance(Duration::from_micros(58_999_999));
    assert_eq!(entries(), [("log", log), ("fixed", vec![])]);
    clock.advance(Duration::from_micros(1));
    assert_eq!(entries(), [("log", vec![]), ("fixed", vec![])]);
}

#[test]
fn a_part_of_a_batch_that_is_denied_elsewhere_charges_attempts_only() {
    // What is left afterwards, and the wait that the part reports.
    for (words, left, wait_us) in [
        ("fixed-window 1/h", 1, Some(0)),
        ("sliding-log 5/h", 5, Some(0)),
        ("fixed-window 1/h count attempts", 0, Some(3_600_000_000 - BEGIN.as_us() % 3_600_000_000)),
    ] {
        let (store, _clock): (Memory, _) = store(|builder| builder);
        let limit = limit("l", words);
        let check = Check { limit: &limit, key: "k", cost: 1 };
        let verdict = store.apply_now(&Batch::one(&check).denied_elsewhere()).expect("decides");
        let after = ask(&store, (&limit, "k"), Op::Peek, 0).remaining();
        assert_eq!((after, verdict.summary().retry_after_us), (left, wait_us), "{words}");
    }
}
