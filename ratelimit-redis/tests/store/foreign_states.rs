//! States that no limit wrote, where flat scripts read them: they are reported and removed, or decided
//! as the pure step decides them, and never charged in part.

use std::cell::RefCell;
use std::fmt::Write as _;
use std::time::Duration;

use crate::common::{aside, query, url};
use proptest::prelude::*;
use proptest::sample::select;
use ratelimit_core::{
    Algorithm, Attempts, Batch, Check, ErrorKind, FirstRequestWindow, FixedWindow, Gcra, Limit,
    Now, Policy, Rate, SlidingCounter, SlidingLog, Store, StoreError, Timestamp, TokenBucket,
    Write,
};
use ratelimit_redis::{Client, RedisConnection, RedisStore};
use ratelimit_testkit::RedisServer;
use tokio::runtime::Runtime;

fn rate(text: &str) -> Rate {
    text.parse().expect("a rate")
}

fn limit(name: &str, policy: impl Into<Policy>) -> Limit<Policy> {
    Limit::new(name, policy.into()).expect("a name")
}

fn seldom() -> Gcra {
    Gcra::new(rate("3/3650d"), 3).expect("a limit")
}

/// A check that costs nothing finds it, in a batch with one that is charged.
async fn a_corrupt_state_beside_a_charge_charges_nothing_and_is_removed(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&url(&server, client)).await.expect("the server is up");
    let mut aside = aside(&server);
    let looked = limit("looked", seldom());
    for charged in [limit("plain", seldom()), limit("attempts", Attempts::new(seldom()))] {
        for (n, garbage) in
            ["nonsense", "gcra", "gcra 1 2 99999999999999999999", "gcra 1 0 1\n", "\n\n", "a\nb"]
                .into_iter()
                .enumerate()
        {
            let key = format!("{}{n}", charged.name());
            let checks = [
                Check { limit: &charged, key: &key, cost: 1 },
                Check { limit: &looked, key: &key, cost: 0 },
            ];
            let batch = Batch::new(&checks).expect("distinct");
            query::<()>(&mut aside, &["HSET", &store.key(&looked, &key), "looked", garbage]);
            let error = store.apply(&batch).await.expect_err(garbage);
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{garbage:?}: {error}");
            assert!(error.to_string().contains("looked"), "{error}");
            let verdict = store.apply(&batch).await.expect("healed");
            assert_eq!(verdict.decisions()[0].remaining, 2, "{garbage:?} of {charged:?}");
        }
    }
}

with_each_client! {
    a_corrupt_state_beside_a_charge_charges_nothing_and_is_removed,
    a_foreign_log_entry_is_reported,
}

/// The oldest entry that counts, and one in the middle, with a total or a time that no limit writes.
async fn a_foreign_log_entry_is_reported(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&url(&server, client)).await.expect("the server is up");
    let mut aside = aside(&server);
    let limit = limit("log", SlidingLog::new(rate("3/h")).expect("a limit"));
    let now: Vec<u64> = query(&mut aside, &["TIME"]);
    let ago = |seconds: u64| format!("{}", (now[0] - seconds) * 1_000_000);
    for (name, score, member) in [
        ("total", ago(60), "1 9007199254740992"),
        ("total-of-many-digits", ago(60), "1 99999999999999999999999999"),
        ("cost", ago(60), "9007199254740992 1"),
        ("fraction", ago(60) + ".5", "1 1"),
    ] {
        for full in [false, true] {
            let caller = format!("{name} {full}");
            let key = store.key(&limit, &caller);
            if full {
                query::<()>(&mut aside, &["ZADD", &key, &ago(90), "1 1", &ago(30), "1 3"]);
            } else {
                query::<()>(&mut aside, &["ZADD", &key, &ago(30), "1 2"]);
            }
            query::<()>(&mut aside, &["ZADD", &key, &score, member]);
            // Only a denial reads the one in the middle, in search of the entry that makes room.
            let check = Check { limit: &limit, key: &caller, cost: if full { 2 } else { 1 } };
            let error = store.apply(&Batch::one(&check)).await.expect_err(&caller);
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{caller}: {error}");
            let verdict = store.apply(&Batch::one(&check)).await.expect("healed");
            assert_eq!(verdict.remaining(), 3 - check.cost, "{caller}");
        }
    }
}

const NOW_US: u64 = 1_795_218_392_123_456;

/// Algorithms whose state is a few numbers, and how many.
fn of_numbers() -> Vec<(Policy, usize)> {
    let mut all = Vec::new();
    for text in ["3/s", "7/5m", "1000000000/s", "1/3650d", "4503599627/d"] {
        let rate = || rate(text);
        for burst in [1, 1_000, 1 << 40] {
            all.extend(Gcra::new(rate(), burst).map(|limit| (limit.into(), 3)));
            all.extend(Gcra::new(rate(), burst).map(|limit| (Attempts::new(limit).into(), 3)));
            all.extend(TokenBucket::new(rate(), burst).map(|limit| (limit.into(), 4)));
        }
        all.extend(FixedWindow::new(rate()).map(|limit| (limit.into(), 2)));
        all.extend(FirstRequestWindow::new(rate()).map(|limit| (limit.into(), 2)));
        all.extend(FirstRequestWindow::new(rate()).map(|limit| (Attempts::new(limit).into(), 2)));
        all.extend(SlidingCounter::new(rate()).map(|limit| (limit.into(), 3)));
    }
    all
}

/// Small numbers, those around times, and those around the limits of a double.
fn numbers() -> impl Strategy<Value = u64> {
    let near = |centre: u64| (0..=4_u64).prop_map(move |n| (centre + n).saturating_sub(2));
    prop_oneof![
        0..5_u64,
        any::<u64>(),
        (0..64_u32).prop_map(|bits| 1 << bits).prop_flat_map(near),
        near(NOW_US),
        (NOW_US - 10_000_000)..(NOW_US + 10_000_000),
    ]
}

#[test]
fn script_and_step_agree_on_any_stored_numbers() {
    let server = RedisServer::start().expect("redis-server");
    let runtime = Runtime::new().expect("a runtime");
    let store = runtime.block_on(async {
        let connection = RedisConnection::open(&server.url(), Duration::from_secs(20)).await?;
        RedisStore::builder().deadline(Duration::from_secs(20)).over(connection)
    });
    let (store, aside) = (store.expect("the server is up"), RefCell::new(aside(&server)));
    let costs = prop_oneof![1..5_u64, numbers()];
    let stored = proptest::collection::vec(numbers(), 4);
    let config =
        ProptestConfig { cases: 4_000, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |((policy, count) in select(of_numbers()), stored in stored, cost in costs)| {
        let limit = limit("l", policy);
        let key = store.key(&limit, "a\r\nb");
        let mut text = limit.algorithm().name().to_owned();
        for number in &stored[..count] {
            write!(text, " {number}").expect("a text takes all");
        }
        for words in [&["DEL", &*key][..], &["HSET", &key, "l", &text]] {
            query::<()>(&mut aside.borrow_mut(), words);
        }
        let now = Timestamp::from_us(NOW_US).expect("a time");
        let check = Check { limit: &limit, key: "a\r\nb", cost };
        let batch = Batch::one(&check).now(Now::At(now));
        runtime.block_on(async {
            let state = store.state(&limit, "a\r\nb").await;
            match store.apply(&batch).await {
                Ok(verdict) => {
                    let state = state.expect("it was decided by it");
                    let step = limit.algorithm().step(state.as_ref(), now, cost);
                    assert_eq!(*verdict.summary(), step.decision, "{text} of {limit:?}");
                    if let Write::Put { state: due, .. } = step.write {
                        let left = store.state(&limit, "a\r\nb").await.expect("reads");
                        assert_eq!(left, Some(due), "after {text} of {limit:?}");
                    }
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::Corrupt, "{text}: {error}"),
            }
        });
    });
}
