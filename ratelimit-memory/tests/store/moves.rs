//! States that move between buckets and shards.

use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{ReservationId, SyncStore};

use crate::common::{Memory, ask, limit, limiter, store};

#[test]
fn a_state_too_large_for_a_bucket_moves_to_a_shard_and_back() {
    // A burst of a month, at a day per token: after twelve days' worth of charges the span is too long for a
    // bucket.
    let (limiter, clock) = limiter([limit("l", "gcra 1/d burst 30")], |builder| builder);
    for n in 1..=30 {
        let verdict = limiter.check_now("a").expect("decides");
        assert!(verdict.allowed());
        assert_eq!((verdict.remaining(), limiter.store().len()), (30 - n, 1));
    }
    assert!(!limiter.check_now("a").expect("decides").allowed());
    for n in 0..25 {
        clock.advance(Duration::from_secs(86_400));
        assert_eq!(limiter.peek_now("a", 1).expect("decides").remaining(), n);
    }
    assert!(limiter.check_now("a").expect("decides").allowed());
    assert_eq!(limiter.peek_now("a", 1).expect("decides").remaining(), 23);
    assert_eq!(limiter.store().len(), 1);
}

/// Two limits of one name: the states of one lie in buckets, those of the other in shards. Each ignores what the other
/// wrote, and the key has one state, whichever it was charged or reserved by first.
#[test]
fn changing_the_algorithm_of_a_limit_resets_it_and_leaves_one_state() {
    let [in_table, in_shard] = [limit("l", "gcra 2/d burst 2"), limit("l", "fixed-window 2/d")];
    for reserved_first in [false, true] {
        for key in (0..100).map(|n| n.to_string()) {
            let (store, clock): (Memory, _) = store(|builder| builder);
            let mut reservations = 0;
            for turn in 0..8 {
                let turns_to_shard = (turn % 2 == 1) != reserved_first;
                let limit = if turns_to_shard { &in_shard } else { &in_table };
                let check = Check { limit, key: &key, cost: 2 };
                let mut batch = Batch::one(&check);
                if turns_to_shard {
                    reservations += 1;
                    batch = batch.id(ReservationId::new(turn));
                }
                assert!(store.apply_now(&batch).expect("decides").allowed(), "turn {turn}");
                assert!(!ask(&store, (limit, &key), Op::Acquire, 2).allowed());
                assert_eq!((store.len(), store.reservations()), (1, reservations));
                clock.advance(Duration::from_secs(1));
            }
        }
    }
}
