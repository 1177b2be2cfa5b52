//! The answers of a cache are those of the store at that time, field by field.

use std::time::Duration;

use ratelimit_core::{
    Batch, Check, ManualClock, Op, Policy, ReservationId, Source, Store, Verdict,
};
use ratelimit_testkit::block_on;

use crate::cache::lasting;
use crate::common::{BEGIN, Fake, ask, limit, memory, operate};

/// How many answers of the cache are compared per algorithm.
const DENIALS: u64 = if cfg!(debug_assertions) { 4_000 } else { 500_000 };
/// No trace needs more requests than this for one answer of the cache.
const REQUESTS_PER_DENIAL: u64 = 200;
/// How far the clock moves at most between two requests.
const MOST_US: u64 = 60_000;

/// Makes requests at random times, of random costs and operations, of a cache and of a twin without one.
#[test]
fn answers_are_those_of_the_store() {
    const KEYS: [&str; 3] = ["alice", "bob", "carol"];
    for words in [
        "gcra 10/s burst 7",
        "token-bucket 10/s burst 7",
        "fixed-window 7/s",
        "first-request-window 7/s",
        "sliding-counter 7/s",
        "sliding-log 7/s",
        "window-log 7/s",
        "bucketed-window bucket 100ms rates 7/s, 20/4s",
        "gcra 10/s burst 7 count attempts",
    ] {
        let clock = ManualClock::new(BEGIN);
        let (store, twin) = (lasting(&clock).build(Fake::new(&clock)), memory(&clock));
        let (first, second) = (limit("first", words), limit("second", "fixed-window 9/s"));
        let mut random = fastrand::Rng::with_seed(1);
        let denials = if words.ends_with("attempts") { DENIALS / 20 } else { DENIALS };
        let mut requests = 0;
        while store.counts().answered < denials {
            requests += 1;
            assert!(requests < denials * REQUESTS_PER_DENIAL, "{words}: {:?}", store.counts());
            if random.u8(..) < 160 {
                clock.advance(Duration::from_micros(random.u64(..MOST_US)));
            }
            let key = KEYS[random.usize(..KEYS.len())];
            let cost = if random.bool() { 1 } else { random.u64(1..12) };
            let mut checks = vec![Check { limit: &first, key, cost }];
            if random.u8(..) < 60 {
                let check = Check { limit: &second, key, cost: random.u64(..4) };
                checks.insert(random.usize(..2), check);
            }
            // Of attempts none is answered but those of the second limit alone.
            if words.ends_with("attempts") && random.bool() {
                checks = vec![Check { limit: &second, key, cost }];
            }
            let apply = |batch: &Batch<'_, Policy>| {
                let decided = |verdict: Verdict| verdict.decisions().to_vec();
                let got = block_on(store.apply(batch)).map(decided);
                let due = block_on(twin.apply(batch)).map(decided);
                assert_eq!(got.ok(), due.ok(), "{words}, request {requests}: {batch:?}");
            };
            let batch = Batch::new(&checks).expect("distinct");
            match random.u8(..) {
                0..2 => apply(&batch.op(Op::Reset)),
                2..6 => apply(&batch.op(Op::Refund)),
                6..9 => apply(&batch.op(Op::Force)),
                9..15 => apply(&batch.op(Op::Peek)),
                15..20 => {
                    let id = ReservationId::new(requests.into());
                    apply(&batch.id(id));
                    let less = checks.iter().map(|check| Check { cost: check.cost / 2, ..*check });
                    let less: Vec<_> = less.collect();
                    apply(&Batch::new(&less).expect("distinct").id(id).op(Op::Settle));
                }
                _ => apply(&batch),
            }
        }
        assert_eq!(store.counts().asked, store.store().calls());
    }
}

/// Where the store is a trip away, no answer denies what the store would admit, and none waits longer than the store says, or
/// shorter by more than the way of the request that was denied.
#[test]
fn a_denial_ends_no_later_than_in_the_store() {
    const MOST_TRIP_US: u64 = 20_000;
    for words in ["gcra 10/s burst 4", "sliding-counter 5/s", "sliding-log 5/s"] {
        let clock = ManualClock::new(BEGIN);
        let store = lasting(&clock).build(Fake::new(&clock));
        let limit = limit("first", words);
        let mut random = fastrand::Rng::with_seed(2);
        let mut requests = 0;
        while store.counts().answered < 2_000 {
            requests += 1;
            assert!(requests < 2_000 * REQUESTS_PER_DENIAL, "{words}: {:?}", store.counts());
            clock.advance(Duration::from_micros(random.u64(..30_000)));
            let trip = [(); 2].map(|()| Duration::from_micros(random.u64(..MOST_TRIP_US)));
            store.store().takes(trip);
            let cost = random.u64(1..5);
            let memory = &store.store().memory;
            let due = block_on(operate(memory, Op::Peek, &limit, "alice", cost));
            let verdict = block_on(ask(&store, &limit, "alice", cost));
            if verdict.source() == Source::Cache {
                let [got_us, due_us] =
                    [&verdict, &due].map(|verdict| verdict.summary().retry_after_us.unwrap_or(0));
                let is_late = due.allowed() || got_us > due_us || got_us + MOST_TRIP_US < due_us;
                assert!(!is_late, "{words}, request {requests}: {verdict:?} for {due:?}");
            }
        }
    }
}
