//! Calls reclaim expired states, without a thread: a few at every call, and all of them after
//! enough calls.

use std::time::Duration;

use ratelimit_core::store::Op;

use crate::common::{Memory, ask, ask_all, limit, store};

/// The most slots that a call for so many keys may free: those of each key's two buckets of four
/// and two in its shard, and in passing three further buckets and two slots of another shard.
const fn most_freed(keys: usize) -> usize {
    keys * (2 * 4 + 2) + 3 * 4 + 2
}

/// The number of keys that do not expire.
const LIVE: usize = 100;

/// Fills a store with keys that expire after a second and some that do not, and checks that calls
/// free the former. Each call peeks at `width` new keys; `calls` are made per expired key.
fn check_reclaim(algorithm: &str, options: &str, expired: usize, (calls, width): (usize, usize)) {
    let (store, clock): (Memory, _) = store(|builder| builder.shards(16));
    let [short, long] =
        ["s", "d"].map(|per| limit(per, format!("{algorithm} 1/{per} {options}").trim()));
    let acquire = |limit, n: usize| ask(&store, (limit, &n.to_string()), Op::Acquire, 1).allowed();
    assert!((0..LIVE).all(|n| acquire(&long, n)) && (0..expired).all(|n| acquire(&short, n)));
    assert_eq!((store.len(), store.overflowed()), (LIVE + expired, 0));
    clock.advance(Duration::from_secs(1));
    let mut most = 0;
    for n in 0..calls * expired {
        let before = store.len();
        let keys: Vec<_> = (0..width).map(|other| format!("unknown {n} {other}")).collect();
        let _ = ask_all(&store, &long, &keys, Op::Peek);
        most = most.max(before.saturating_sub(store.len()));
    }
    assert!((1..=most_freed(width)).contains(&most), "{algorithm}: {most} at one call");
    assert_eq!(store.len(), LIVE, "{algorithm}");
    assert!((0..LIVE).all(|n| store.state(&long, &n.to_string()).is_some()));
}

#[test]
fn new_keys_reclaim_expired_states() {
    check_reclaim("gcra", "burst 1", 1_000, (1, 1));
    check_reclaim("gcra", "burst 1", 30_000, (1, 1));
    check_reclaim("gcra", "burst 1", 10_000, (4, 3));
    // The window of `BEGIN` ends within a second, and the day's does not.
    check_reclaim("fixed-window", "count attempts", 10_000, (1, 1));
    check_reclaim("first-request-window", "", 20_000, (1, 1));
    check_reclaim("sliding-log", "", 10_000, (1, 1));
    check_reclaim("sliding-log", "", 10_000, (1, 3));
}
