//! Window logs, and parts of batches, over the memory store.

use std::time::Duration;

use ratelimit_core::{Batch, Check, Op, SyncStore};
use ratelimit_testkit::block_on;

use crate::common::{BEGIN, Memory, ask, limit, limiter, store};

#[test]
fn a_window_log_returns_the_metadata_of_its_charges() {
    let limits = [limit("log", "window-log 3/m"), limit("fixed", "fixed-window 9/m")];
    let (limiter, clock) = limiter(limits, |builder| builder);
    clock.set(ratelimit_core::Timestamp::ZERO);
    let who = |at: &[u8]| limiter.request("a").metadata(at).apply_now(Op::Acquire);
    for path in [&b"GET /login"[..], b"", b"\0\xff"] {
        assert!(who(path).expect("decides").allowed());
        clock.advance(Duration::from_secs(1));
    }
    assert!(!who(b"one too many").expect("decides").allowed());
    let entries = || {
        let all = block_on(limiter.entries("a")).expect("decides").into_iter();
        let of = |entries: Vec<ratelimit_core::WindowEntry>| entries.into_iter();
        all.map(|(name, entries)| {
            let short = of(entries).map(|e| (e.timestamp.as_us(), e.cost, e.metadata.to_vec()));
            (name.to_owned(), short.collect::<Vec<_>>())
        })
        .collect::<Vec<_>>()
    };
    let log = vec![
        (0, 1, b"GET /login".to_vec()),
        (1_000_000, 1, vec![]),
        (2_000_000, 1, b"\0\xff".to_vec()),
    ];
    assert_eq!(entries(), [("log".into(), log), ("fixed".into(), vec![])]);
    clock.advance(Duration::from_secs(57));
    assert_eq!(entries(), [("log".into(), vec![]), ("fixed".into(), vec![])]);
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
