//! The mode of native commands on a real server: without scripting, under contention, and its refusals.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{aside, url, with_client};
use proptest::prelude::*;
use ratelimit_core::{
    Algorithm, Attempts, Batch, BucketedWindow, Check, EntryStore, ErrorKind, FirstRequestWindow,
    FixedWindow, Gcra, Limit, Limits, Now, Op, Policy, PolicyState, Rate, RateLimiter, SlidingLog,
    Store, StoreError, Timestamp, WindowLog,
};
use ratelimit_redis::{
    Argument, Client, Connection, Deadline, Multi, RedisConnection, RedisError, RedisStore,
};
use ratelimit_testkit::{PureStore, RedisServer};

const DEADLINE: Duration = Duration::from_secs(20);

/// Sends a command and returns the raw reply.
fn query(server: &RedisServer, words: &[&str]) -> redis::Value {
    crate::common::query(&mut aside(server), words)
}

async fn store(server: &RedisServer, client: Client) -> RedisStore<Multi> {
    let builder = RedisStore::builder().multi().deadline(DEADLINE);
    builder.connect(&url(server, client)).await.expect("the server is up")
}

/// All limits that a transaction can decide, with this many per window.
fn all(count: u64, window: &str) -> Vec<Policy> {
    let rate = || -> Rate { format!("{count}/{window}").parse().expect("a rate") };
    let bucket_us = rate().period_us() / 5;
    let bucketed = BucketedWindow::new(bucket_us, &[rate()]).expect("whole buckets");
    vec![
        Attempts::new(FixedWindow::new(rate()).expect("a limit")).into(),
        Attempts::new(FirstRequestWindow::new(rate()).expect("a limit")).into(),
        Attempts::new(WindowLog::new(rate()).expect("a limit")).into(),
        Attempts::new(bucketed).into(),
        Attempts::new(SlidingLog::new(rate()).expect("a limit")).into(),
    ]
}

fn named(policies: Vec<Policy>) -> Vec<Limit<Policy>> {
    let limit = |(n, policy): (usize, Policy)| Limit::new(&format!("l{n}"), policy);
    policies.into_iter().enumerate().map(limit).map(|limit| limit.expect("a name")).collect()
}

async fn a_user_without_scripting_permission_can_use_the_mode(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    query(&server, &["ACL", "SETUSER", "plain", "on", ">secret", "~rl:*", "+@all", "-@scripting"]);
    let url = with_client(&server.url().replace("redis://", "redis://plain:secret@"), client);
    let connection = RedisConnection::open(&url, DEADLINE).await.expect("logs in");
    let script = connection
        .send("", &["EVAL", "return 1", "0"].map(Argument::Text), Deadline::within(DEADLINE))
        .await;
    assert!(
        matches!(&script, Err(RedisError::Server { code, .. }) if code == "NOPERM"),
        "{script:?}"
    );

    let limits = Limits::new(named(all(3, "h"))).expect("limits");
    let store = RedisStore::builder().multi().over(connection).expect("a prefix");
    let limiter = RateLimiter::new(limits, store);
    let mut allowed = Vec::new();
    for _ in 0..5 {
        let verdict = limiter.request("alice").metadata(b"it was me").acquire().await;
        allowed.push(verdict.expect("decides").allowed());
    }
    assert_eq!(allowed, [true, true, true, false, false]);
    let listed = limiter.entries("alice").await.expect("tells");
    let (name, entries) = &listed[2];
    assert_eq!((*name, entries.len()), ("l2", 3)); // and no excess entry
    assert!(entries.iter().all(|entry| *entry.metadata == *b"it was me"));
    let _ = limiter.reset("alice").await.expect("forgets");
    assert!(limiter.check("alice").await.expect("decides").allowed());
}

async fn a_forbidden_command_is_an_error_and_charges_nothing(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    query(&server, &["ACL", "SETUSER", "half", "on", ">secret", "~rl:*", "+@all", "-pexpire"]);
    let url = with_client(&server.url().replace("redis://", "redis://half:secret@"), client);
    let store = RedisStore::builder().multi().connect(&url).await.expect("logs in");
    for limit in named(all(3, "h")) {
        let check = Check { limit: &limit, key: "a", cost: 1 };
        let error = store.apply(&Batch::one(&check)).await.expect_err("no PEXPIRE");
        assert_eq!(error.kind(), ErrorKind::Config, "{error}");
        assert!(error.to_string().contains("pexpire"), "{error}");
    }
    assert_eq!(query(&server, &["DBSIZE"]), redis::Value::Int(0));
}

async fn a_limit_that_no_transaction_can_decide_is_refused_by_name(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = store(&server, client).await;
    let gcra: Policy = Gcra::new("1/s".parse().expect("a rate"), 1).expect("a limit").into();
    let limits = Limits::new([Limit::new("burst", gcra).expect("a name")]).expect("limits");
    let message = "limit \"burst\": a transaction charges first and looks afterwards, and cannot decide \
                this; use the Lua mode, or count = \"attempts\" with one of fixed-window, \
                first-request-window, window-log, bucketed-window and sliding-log";
    let error = RedisStore::<Multi>::supports(&limits).expect_err("gcra");
    assert_eq!((error.to_string().as_str(), error.kind()), (message, ErrorKind::Unsupported));
    let error = RateLimiter::new(limits, store.clone()).check("a").await.expect_err("gcra");
    assert_eq!(error.to_string(), message);

    let limits = Limits::new(named(all(3, "h"))).expect("limits");
    RedisStore::<Multi>::supports(&limits).expect("all of these");
    let limiter = RateLimiter::new(limits, store);
    let error = limiter.refund("a", 1).await.expect_err("charged is charged");
    assert_eq!(
        error.to_string(),
        "limit \"l0\": there is no refund in the mode of transactions; use the Lua mode"
    );
}

fn traces() -> impl Strategy<Value = Vec<(u64, bool, Op, u64)>> {
    let op = prop_oneof![8 => Just(Op::Acquire), 2 => Just(Op::Peek), 1 => Just(Op::Reset)];
    let cost = prop_oneof![6 => 1_u64..4, 1 => Just(0), 1 => Just(u64::MAX)];
    prop::collection::vec((0_u64..4_000, prop::bool::weighted(0.1), op, cost), 1..40)
}

static NEXT: AtomicU64 = AtomicU64::new(0);

#[test]
fn it_decides_as_the_pure_step_does() {
    let server = RedisServer::start().expect("redis-server");
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");
    let connection = runtime.block_on(RedisConnection::open(&server.url(), DEADLINE));
    let connection = Arc::new(connection.expect("the server is up"));
    proptest!(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) }, |(trace in traces(), pick in 1_usize..32)| {
        let prefix = format!("p{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let store = RedisStore::builder().multi().prefix(&prefix).over(Arc::clone(&connection)).expect("a prefix");
        let limits = named(all(4, "5ms"));
        let chosen: Vec<_> = limits.iter().enumerate().filter(|(n, _)| pick & (1 << n) != 0).map(|(_, limit)| limit).collect();
        let pure = PureStore::new();
        let mut at_us = 1_795_218_392_123_456;
        for (by_us, back, op, cost) in trace {
            at_us = if back { at_us - by_us } else { at_us + by_us };
            let now = Now::At(Timestamp::from_us(at_us).expect("a time"));
            let checks: Vec<_> = chosen.iter().map(|&limit| Check { limit, key: "k", cost }).collect();
            let batch = Batch::new(&checks).expect("distinct").op(op).now(now).metadata(b"m");
            let due = pure.decide(&batch).expect("can be");
            let got = runtime.block_on(store.apply(&batch)).expect("decides");
            prop_assert_eq!(got, due);
            for limit in &chosen {
                let got = runtime.block_on(store.state(limit, "k")).expect("a state");
                prop_assert_eq!(got, pure.state(limit, "k"), "{:?}", limit);
            }
        }
    });
}

async fn concurrent_callers_get_exactly_the_limit_by_the_servers_clock(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = store(&server, client).await;
    let limits = Limits::new(named(all(50, "h"))).expect("limits");
    let limiter = Arc::new(RateLimiter::new(limits, store));
    let task = |n: usize| {
        let limiter = Arc::clone(&limiter);
        tokio::spawn(async move {
            let mut admitted = 0_u64;
            for _ in 0..8 {
                let verdict = limiter.check_n("shared", 1 + n as u64 % 2).await.expect("decides");
                admitted += if verdict.allowed() { 1 + n as u64 % 2 } else { 0 };
            }
            admitted
        })
    };
    let mut admitted = 0;
    for task in (0..20).map(task).collect::<Vec<_>>() {
        admitted += task.await.expect("no panic");
    }
    // A request of cost two that finds one left uses it up without being admitted.
    assert!((49..=50).contains(&admitted), "{admitted}");
}

/// However many concurrent attempts find room that others then use up. A sliding log counts only the
/// newest, as many as there is room for.
async fn concurrent_attempts_fill_and_never_overfill(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = store(&server, client).await;
    for limit in named(all(50, "h")) {
        let limit = Arc::new(limit);
        let task = |n: u64| {
            let (store, limit) = (store.clone(), Arc::clone(&limit));
            tokio::spawn(async move {
                for _ in 0..3 {
                    let check = Check { limit: &limit, key: "shared", cost: 1 + n % 7 };
                    let _ = store.apply(&Batch::one(&check)).await.expect("decides");
                }
            })
        };
        for task in (0..64).map(task).collect::<Vec<_>>() {
            task.await.expect("no panic");
        }
        let state = store.state(&limit, "shared").await.expect("a state").expect("charged");
        let used: u64 = match state {
            PolicyState::FixedWindow(state) => state.count,
            PolicyState::FirstRequestWindow(state) => state.count,
            PolicyState::WindowLog(state) => state.entries.iter().map(|entry| entry.cost).sum(),
            PolicyState::BucketedWindow(state) => state.buckets.iter().map(|b| b.count).sum(),
            _ => 50,
        };
        assert_eq!(used, 50, "{limit:?}");
        let check = Check { limit: &limit, key: "shared", cost: 1 };
        let verdict = store.apply(&Batch::one(&check).op(Op::Peek)).await.expect("decides");
        assert!(!verdict.allowed(), "{verdict:?}");
    }
}

async fn every_key_has_a_time_to_live(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let limiter = RateLimiter::new(
        Limits::new(named(all(3, "h"))).expect("limits"),
        store(&server, client).await,
    );
    for n in 0..20 {
        let _ = limiter.check_n(&format!("k{}", n % 3), n % 5).await.expect("decides");
    }
    let keys = query(&server, &["KEYS", "*"]);
    let redis::Value::Array(keys) = keys else { panic!("keys") };
    assert_eq!(keys.len(), 15);
    for key in keys {
        let key: String = redis::from_redis_value(key).expect("text");
        let redis::Value::Int(ttl_ms) = query(&server, &["PTTL", &key]) else { panic!("a time") };
        // A second longer than it matters, for late charges.
        assert!((1..=3_601_000).contains(&ttl_ms), "{key}: {ttl_ms}");
    }
}

async fn a_foreign_value_is_reported_once_and_a_wrong_type_left_alone(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = store(&server, client).await;
    for limit in named(all(3, "h")) {
        let key = store.key(&limit, "a").expect("native");
        let check = Check { limit: &limit, key: "a", cost: 1 };
        query(&server, &["SET", &key, "mine"]);
        let error = store.apply(&Batch::one(&check)).await.expect_err("a string");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert!(error.to_string().contains("a value of another type; remove the key"), "{error}");
        assert_eq!(query(&server, &["PTTL", &key]), redis::Value::Int(-1), "left alone");
        query(&server, &["DEL", &key]);
        match limit.algorithm().name() {
            "window-log" => query(&server, &["RPUSH", &key, "nonsense"]),
            "sliding-log" => query(&server, &["ZADD", &key, "1", "nonsense"]),
            _ => query(&server, &["HSET", &key, "1", "nonsense"]),
        };
        let error = store.apply(&Batch::one(&check)).await.expect_err("nonsense");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        let verdict = store.apply(&Batch::one(&check)).await.expect("heals");
        assert_eq!(verdict.remaining(), limit.algorithm().capacity() - 1);
    }
}

async fn an_impossible_count_is_reported_once_and_leftovers_of_corrections_go(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = store(&server, client).await;
    let at = Now::At(Timestamp::from_us(7_200_000_000).expect("a time"));
    for limit in named(all(3, "h")) {
        let key = store.key(&limit, "a").expect("native");
        let check = Check { limit: &limit, key: "a", cost: 1 };
        let batch = Batch::one(&check).now(at);
        if !matches!(limit.algorithm().name(), "window-log" | "sliding-log") {
            query(&server, &["HSET", &key, "7200000000", "9223372036854775807"]);
            let error = store.apply(&batch).await.expect_err("too many");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            // A counter that a correction emptied long ago, and a correction that is under way.
            query(&server, &["HSET", &key, "1", "0", "7200000000", "-1"]);
            let _ = store.apply(&batch).await.expect("heals");
            assert_eq!(query(&server, &["HEXISTS", &key, "1"]), redis::Value::Int(0));
            assert!(matches!(query(&server, &["PTTL", &key]), redis::Value::Int(1..)));
        }
    }
}

async fn a_window_that_is_over_is_not_read_again(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = store(&server, client).await;
    let limit = &named(all(3, "5ms"))[2];
    let check = Check { limit, key: "a", cost: 1 };
    let at = |us| Now::At(Timestamp::from_us(us).expect("a time"));
    for us in [1, 2, 5_001] {
        let _ = store.apply(&Batch::one(&check).now(at(us)).metadata(b"x")).await.expect("decides");
    }
    let entries = store.entries(limit, "a", at(5_002)).await.expect("tells");
    assert_eq!(entries.iter().map(|e| e.timestamp.as_us()).collect::<Vec<_>>(), [5_001]);
    assert!(store.entries(limit, "a", at(10_001)).await.expect("tells").is_empty());
}

with_each_client! {
    a_user_without_scripting_permission_can_use_the_mode,
    a_forbidden_command_is_an_error_and_charges_nothing,
    a_limit_that_no_transaction_can_decide_is_refused_by_name,
    concurrent_callers_get_exactly_the_limit_by_the_servers_clock,
    concurrent_attempts_fill_and_never_overfill,
    every_key_has_a_time_to_live,
    a_foreign_value_is_reported_once_and_a_wrong_type_left_alone,
    an_impossible_count_is_reported_once_and_leftovers_of_corrections_go,
    a_window_that_is_over_is_not_read_again,
}
