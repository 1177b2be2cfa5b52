//! The answers of a cache are those of the store at that time, field by field; and those of wrong caches are not.

use std::time::Duration;

use ratelimit_core::{
    Batch, Check, Limit, ManualClock, Op, Policy, ReservationId, Source, Store, SyncStore, Verdict,
};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_testkit::block_on;

use crate::noted::{BEGIN, Noted};
use crate::{lasting, limit};

/// How many answers of the cache are compared per algorithm.
const DENIALS: u64 = if cfg!(debug_assertions) { 4_000 } else { 500_000 };
/// No trace needs more requests than this for one answer of the cache.
const REQUESTS_PER_DENIAL: u64 = 200;

/// How far the clock moves at most between two requests.
const MOST_US: u64 = 60_000;

/// Makes requests at random times, of random costs and operations, of a store and of its twin without a cache. Returns how
/// many the cache answered, or where the two differ.
pub(crate) fn compare(
    store: &impl Store<Policy, Error = MemoryError>,
    clock: &ManualClock,
    words: &str,
    seed: u64,
    denials: u64,
) -> Result<u64, String> {
    const KEYS: [&str; 3] = ["alice", "bob", "carol"];
    let mut random = fastrand::Rng::with_seed(seed);
    let twin: MemoryStore<Policy, _> = MemoryStore::builder().clock(clock.clone()).build();
    let first = limit("first", words);
    let second = limit("second", "fixed-window 9/s");
    let (mut answered, mut requests, mut ids) = (0, 0, 0);
    while answered < denials {
        requests += 1;
        if requests > denials * REQUESTS_PER_DENIAL {
            return Err(format!("{answered} answers in {requests} requests"));
        }
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
        let batch = Batch::new(&checks).expect("distinct");
        let mut apply = |batch: &Batch<'_, Policy>| {
            let (got, due) = (block_on(store.apply(batch)), twin.apply_now(batch));
            let is_cached = |verdict: &Verdict| verdict.source() == Source::Cache;
            answered += u64::from(got.as_ref().is_ok_and(is_cached));
            let got = got.map(|verdict| verdict.decisions().to_vec());
            let due = due.map(|verdict| verdict.decisions().to_vec());
            match (got, due) {
                (Ok(got), Ok(due)) if got == due => Ok(()),
                (Err(_), Err(_)) => Ok(()),
                (got, due) => Err(format!("request {requests}, {batch:?}: {got:?} for {due:?}")),
            }
        };
        match random.u8(..) {
            0..2 => apply(&batch.op(Op::Reset))?,
            2..6 => apply(&batch.op(Op::Refund))?,
            6..9 => apply(&batch.op(Op::Force))?,
            9..15 => apply(&batch.op(Op::Peek))?,
            15..20 => {
                ids += 1;
                let batch = batch.id(ReservationId::new(ids));
                apply(&batch)?;
                let less = checks.iter().map(|check| Check { cost: check.cost / 2, ..*check });
                let less: Vec<_> = less.collect();
                let less = Batch::new(&less).expect("distinct").id(ReservationId::new(ids));
                apply(&less.op(Op::Settle))?;
            }
            _ => apply(&batch)?,
        }
    }
    Ok(answered)
}

fn is_exact(words: &str) {
    let clock = ManualClock::new(BEGIN);
    let cache = lasting(&clock).build(Noted::new(&clock));
    let answered = compare(&cache, &clock, words, 1, DENIALS).expect("the same decisions");
    assert_eq!((answered, cache.counts().answered), (DENIALS, DENIALS));
    assert_eq!(cache.counts().asked, cache.store().calls());
}

macro_rules! exact {
    ($($name:ident, $words:literal;)+) => { $(
        #[test]
        fn $name() {
            is_exact($words);
        }
    )+ };
}

exact! {
    answers_of_gcra_are_those_of_the_store, "gcra 10/s burst 7";
    answers_of_a_token_bucket_are_those_of_the_store, "token-bucket 10/s burst 7";
    answers_of_a_fixed_window_are_those_of_the_store, "fixed-window 7/s";
    answers_of_a_first_request_window_are_those_of_the_store, "first-request-window 7/s";
    answers_of_a_sliding_counter_are_those_of_the_store, "sliding-counter 7/s";
    answers_of_a_sliding_log_are_those_of_the_store, "sliding-log 7/s";
    answers_of_a_window_log_are_those_of_the_store, "window-log 7/s";
    answers_of_a_bucketed_window_are_those_of_the_store,
        "bucketed-window bucket 100ms rates 7/s, 20/4s";
}

/// Requests of a store that is a trip away. No answer of the cache denies what the store would admit, and none waits longer
/// than the store says, or shorter by more than the way of the request that was denied. Returns how many it answered.
pub(crate) fn never_late(
    store: &impl Store<Policy, Error = MemoryError>,
    noted: &Noted,
    clock: &ManualClock,
    words: &str,
    denials: u64,
) -> Result<u64, String> {
    const MOST_TRIP_US: u64 = 20_000;
    let mut random = fastrand::Rng::with_seed(2);
    let limit: Limit<Policy> = limit("first", words);
    let (mut answered, mut requests) = (0, 0);
    while answered < denials {
        requests += 1;
        if requests > denials * REQUESTS_PER_DENIAL {
            return Err(format!("{answered} answers in {requests} requests"));
        }
        clock.advance(Duration::from_micros(random.u64(..30_000)));
        noted.takes(random.u64(..MOST_TRIP_US), random.u64(..MOST_TRIP_US));
        let cost = random.u64(1..5);
        let due = noted.would(&limit, "alice", cost);
        let check = Check { limit: &limit, key: "alice", cost };
        let verdict = block_on(store.apply(&Batch::one(&check))).expect("decides");
        if verdict.source() != Source::Cache {
            continue;
        }
        answered += 1;
        let [got_us, due_us] = [verdict.summary(), &due].map(|decision| decision.retry_after_us);
        let (got_us, due_us) = (got_us.unwrap_or_default(), due_us.unwrap_or_default());
        if due.allowed || got_us > due_us || got_us + MOST_TRIP_US < due_us {
            return Err(format!("request {requests}: {:?} for {due:?}", verdict.summary()));
        }
    }
    Ok(answered)
}

#[test]
fn a_denial_ends_no_later_than_in_the_store() {
    for words in ["gcra 10/s burst 4", "sliding-counter 5/s", "sliding-log 5/s"] {
        let clock = ManualClock::new(BEGIN);
        let cache = lasting(&clock).build(Noted::new(&clock));
        let answered = never_late(&cache, cache.store(), &clock, words, 2_000);
        assert_eq!(answered, Ok(2_000), "{words}");
    }
}
