//! When states end: by the limit that wrote them, however a store sweeps; and not at all at the end of time.

use proptest::prelude::*;
use ratelimit_core::{
    Batch, Check, Limit, ManualClock, Now, Op, Policy, Refusal, SyncStore, Timestamp,
};
use ratelimit_memory::{MemoryError, MemoryStore};

const BEGIN_US: u64 = 1_795_218_392_123_456;

fn limit(words: &str) -> Limit<Policy> {
    Limit::new("l", words.parse::<Policy>().expect(words)).expect("a name")
}

/// Limits that may follow each other, of the algorithms whose states say when they end.
const LIMITS: [[&str; 3]; 5] = [
    ["gcra 20/s burst 40", "gcra 2/m burst 3", "gcra 3/7us burst 2"],
    ["token-bucket 20/s burst 40", "token-bucket 2/m burst 3", "token-bucket 1/s burst 100"],
    ["fixed-window 3/s", "fixed-window 5/m", "fixed-window 2/7s"],
    ["first-request-window 3/s", "first-request-window 5/m", "first-request-window 2/7s"],
    ["sliding-counter 3/s", "sliding-counter 5/m", "sliding-counter 2/7s count attempts"],
];

proptest! {
    #[test]
    fn a_state_ends_by_the_limit_that_wrote_it_whether_it_was_swept_or_not(
        kind in 0..LIMITS.len(),
        requests in prop::collection::vec(
            (prop::sample::select(vec![0_u64, 1, 999_999, 1_000_000, 7_000_000, 61_000_000]), 0..3_usize, 0..4_u8, 1..5_u64),
            1..40,
        ),
    ) {
        let clock = ManualClock::new(Timestamp::saturating_from_us(BEGIN_US));
        // Written at its own time, states are swept as soon as they end; written at given times, an hour later.
        let swept = MemoryStore::builder().shards(1).clock(clock.clone()).build::<Policy>();
        let kept = MemoryStore::builder().shards(1).clock(ManualClock::default()).build::<Policy>();
        let limits = LIMITS[kind].map(limit);
        let mut now_us = BEGIN_US;
        for (n, (gap_us, which, op, cost)) in requests.into_iter().enumerate() {
            now_us += gap_us;
            let now = Timestamp::from_us(now_us).expect("a time");
            clock.set(now);
            let op = [Op::Acquire, Op::Acquire, Op::Refund, Op::Force][usize::from(op)];
            let check = Check { limit: &limits[which], key: "k", cost };
            let batch = Batch::one(&check).op(op);
            let [one, other] = [swept.apply_now(&batch), kept.apply_now(&batch.now(Now::At(now)))];
            prop_assert_eq!(one.expect("decides"), other.expect("decides"));
            for unknown in 0..3 {
                let other = limit("fixed-window 1/s");
                let check = Check { limit: &other, key: &format!("{n} {unknown}"), cost: 1 };
                let _ = swept.apply_now(&Batch::one(&check).op(Op::Peek)).expect("sweeps");
            }
        }
    }
}

#[test]
fn a_clock_at_the_end_of_time_is_refused_by_name() {
    for words in
        LIMITS.concat().into_iter().chain(["sliding-log 3/s", "concurrency 3/s", "window-log 3/s"])
    {
        let clock = ManualClock::new(Timestamp::MAX);
        let store = MemoryStore::builder().clock(clock.clone()).build::<Policy>();
        let limit = limit(words);
        let decide = |op, now| {
            let check = Check { limit: &limit, key: "k", cost: 1 };
            store.apply_now(&Batch::one(&check).op(op).now(now))
        };
        for op in [Op::Acquire, Op::Peek, Op::Force, Op::Refund] {
            let refusal = Refusal::EndOfTime { now_us: Timestamp::MAX.as_us() };
            assert_eq!(decide(op, Now::Store), Err(MemoryError::Refused(refusal)), "{words}");
        }
        // A given time says nothing about the clock; and before the end every limit counts.
        assert!(decide(Op::Acquire, Now::At(Timestamp::MAX)).is_ok());
        clock.set(Timestamp::saturating_from_us(Timestamp::MAX.as_us() - 1));
        let denied = (0..200).any(|_| !decide(Op::Acquire, Now::Store).expect("decides").allowed());
        assert!(denied, "{words}");
    }
}
