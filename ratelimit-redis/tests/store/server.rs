//! What only a real server can show: flushed scripts, servers that are down, foreign values, and keys
//! that must expire.

use std::time::{Duration, Instant};

use crate::common::{aside, query, url, with_client};
use ratelimit_core::{
    Batch, BucketedWindow, Check, Concurrency, ErrorKind, FirstRequestWindow, FixedWindow, Gcra,
    Limit, Limits, Now, Op, Policy, Rate, RateLimiter, ReservationId, SlidingCounter, SlidingLog,
    Store, StoreError, Timestamp, TokenBucket, Verdict, WindowLog,
};
use ratelimit_redis::{Cas, Client, Multi, RedisError, RedisStore};
use ratelimit_testkit::RedisServer;

fn limit(name: &str, policy: impl Into<Policy>) -> Limit<Policy> {
    Limit::new(name, policy.into()).expect("a name")
}

fn rate(text: &str) -> Rate {
    text.parse().expect("a rate")
}

const DAY_US: u64 = 86_400_000_000;

/// One limit per algorithm, 3 in ten years, so no test reaches the end of a window.
fn every_algorithm() -> Vec<Limit<Policy>> {
    let seldom = rate("3/3650d");
    vec![
        limit("gcra", Gcra::new(seldom, 3).unwrap()),
        limit("token-bucket", TokenBucket::new(seldom, 3).unwrap()),
        limit("fixed-window", FixedWindow::new(seldom).unwrap()),
        limit("first-request-window", FirstRequestWindow::new(seldom).unwrap()),
        limit(
            "bucketed-window",
            BucketedWindow::new(DAY_US * 10, &[seldom, rate("9/7300d")]).unwrap(),
        ),
        limit("sliding-counter", SlidingCounter::new(seldom).unwrap()),
        limit("sliding-log", SlidingLog::new(seldom).unwrap()),
        limit("window-log", WindowLog::new(seldom).unwrap()),
        limit("concurrency", Concurrency::new(seldom).unwrap()),
    ]
}

async fn store(server: &RedisServer, client: Client) -> RedisStore {
    RedisStore::connect(&url(server, client)).await.expect("the server is up")
}

async fn acquire(
    store: &RedisStore,
    limit: &Limit<Policy>,
    key: &str,
) -> Result<Verdict, RedisError> {
    store.apply(&Batch::one(&Check { limit, key, cost: 1 })).await
}

/// Stops or continues the server's process.
fn signal(server: &RedisServer, signal: &str) {
    let pid = server.pid().expect("it runs").to_string();
    let sent = std::process::Command::new("kill").args([signal, &pid]).status();
    assert!(sent.expect("kill").success());
}

async fn texts_that_only_lua_reads_as_numbers_are_corrupt_and_removed(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (store, mut aside) = (store(&server, client).await, aside(&server));
    let log = limit("log", SlidingLog::new(rate("3/h")).unwrap());
    let steps = limit("steps", BucketedWindow::new(60_000_000, &[rate("3/h")]).unwrap());
    let zeros = "0".repeat(16);
    for (limit, command) in [
        (&log, &["ZADD", "", "inf", "1 1"][..]),
        (&log, &["ZADD", "", "1e300", "1 1"]),
        (&log, &["ZADD", "", "1.5", "1 1"]),
        (
            &steps,
            &["HSET", "", "steps", &format!("bucketed-window {zeros} {zeros}              nan")],
        ),
        (
            &steps,
            &["HSET", "", "steps", &format!("bucketed-window {zeros} 0000000000000x10 {zeros}")],
        ),
    ] {
        let key = store.key(limit, "a");
        let command: Vec<&str> =
            command.iter().map(|word| if word.is_empty() { &*key } else { *word }).collect();
        let _: redis::Value = query(&mut aside, &command);
        let error = acquire(&store, limit, "a").await.expect_err("no state");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{command:?}: {error}");
        for left in [2, 1, 0] {
            let verdict = acquire(&store, limit, "a").await.expect("heals");
            assert_eq!(verdict.remaining(), left, "{command:?}");
        }
        assert!(!acquire(&store, limit, "a").await.expect("decides").allowed());
        let _: redis::Value = query(&mut aside, &["DEL", &key]);
    }
}

/// Every operation on a limit, with and without an id, ending with a stored state.
async fn everything<S: Store<Policy>>(store: &S, limit: &Limit<Policy>) {
    let ops = [Op::Acquire, Op::Peek, Op::Renew, Op::Settle, Op::Refund, Op::Force, Op::Reset];
    for id in [None, Some(ReservationId::new(1)), Some(ReservationId::new(2))] {
        for op in ops.into_iter().chain([Op::Acquire, Op::Acquire, Op::Acquire, Op::Acquire]) {
            let check = Check { limit, key: "alice", cost: 1 };
            let batch = Batch::one(&check).op(op).metadata(b"me");
            let batch = id.map_or(batch, |id| batch.id(id));
            match store.apply(&batch).await {
                Ok(_) => {}
                Err(error) => {
                    let kind = error.kind();
                    let refused = matches!(kind, ErrorKind::Invalid | ErrorKind::Unsupported);
                    assert!(refused, "{op} {limit:?}: {error}");
                }
            }
        }
    }
}

async fn no_key_lives_forever_after_any_operation(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (lua, mut aside) = (store(&server, client).await, aside(&server));
    let (cas, multi) = (lua.in_mode::<Cas>(), lua.in_mode::<Multi>());
    for admitted in every_algorithm() {
        let attempts = admitted.algorithm().by_attempts();
        for policy in [Some(*admitted.algorithm()), attempts].into_iter().flatten() {
            let limit = limit(admitted.name(), policy);
            everything(&lua, &limit).await;
            everything(&cas, &limit).await;
            everything(&multi, &limit).await;
        }
    }
    let keys: Vec<String> = query(&mut aside, &["KEYS", "*"]);
    assert!(keys.len() > 30, "{keys:?}");
    for key in keys {
        let ttl_ms: i64 = query(&mut aside, &["PTTL", &key]);
        // -2: the key has expired since.
        assert!(ttl_ms > 0 || ttl_ms == -2, "{key}: {ttl_ms}");
    }
}

async fn both_protocols_return_the_same_states(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let resp2 = store(&server, client).await;
    let resp3 = RedisStore::connect(&format!("{}&protocol=resp3", url(&server, client))).await;
    let resp3 = resp3.expect("the server speaks it");
    for limit in every_algorithm() {
        for store in [&resp2, &resp3] {
            let _ = acquire(store, &limit, "alice").await.expect("decides");
        }
        let found = resp3.state(&limit, "alice").await.expect("a state");
        assert_eq!(found, resp2.state(&limit, "alice").await.expect("a state"));
        assert!(found.is_some(), "{limit:?}");

        let Some(attempts) = limit.algorithm().by_attempts() else { continue };
        let limit = Limit::new(limit.name(), attempts).expect("a name");
        if RedisStore::<Multi>::supports(&Limits::new([limit.clone()]).unwrap()).is_err() {
            continue;
        }
        let (resp2, resp3) = (resp2.in_mode::<Multi>(), resp3.in_mode::<Multi>());
        for store in [&resp2, &resp3] {
            let check = Check { limit: &limit, key: "alice", cost: 1 };
            let _ = store.apply(&Batch::one(&check)).await.expect("decides");
        }
        let found = resp3.state(&limit, "alice").await.expect("a state");
        assert_eq!(found, resp2.state(&limit, "alice").await.expect("a state"));
        assert!(found.is_some(), "{limit:?}");
    }
}

async fn flushed_scripts_are_loaded_again(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (store, mut aside) = (store(&server, client).await, aside(&server));
    for limit in &every_algorithm() {
        for remaining in [2, 1, 0] {
            query::<()>(&mut aside, &["SCRIPT", "FLUSH"]);
            let verdict = acquire(&store, limit, "a").await.expect("EVAL follows EVALSHA");
            assert_eq!((verdict.allowed(), verdict.remaining()), (true, remaining));
        }
        assert!(!acquire(&store, limit, "a").await.expect("decides").allowed());
    }
}

async fn a_batch_is_one_call_of_one_script(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = store(&server, client).await;
    let limits = Limits::new(every_algorithm()).expect("limits");
    let limiter = RateLimiter::new(limits, store);
    let _ = limiter.check("a").await.expect("loads the script");
    let before = server.calls("evalsha").expect("it is up");
    let _ = limiter.check("a").await.expect("decides");
    assert_eq!(server.calls("evalsha").expect("it is up") - before, 1);
}

async fn limits_of_a_few_numbers_share_one_key_per_identifier(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (store, mut aside) = (store(&server, client).await, aside(&server));
    let limiter = RateLimiter::new(Limits::new(every_algorithm()).expect("limits"), store);
    let _ = limiter.check("1.2.3.4").await.expect("decides");
    let mut keys: Vec<String> = query(&mut aside, &["KEYS", "*"]);
    keys.sort();
    assert_eq!(
        keys,
        ["rl:1::{1.2.3.4}", "rl:1:sliding-log:{1.2.3.4}", "rl:1:window-log+:{1.2.3.4}"]
    );
    let _ = limiter.reset("1.2.3.4").await.expect("forgets");
    assert_eq!(query::<u64>(&mut aside, &["DBSIZE"]), 0);
}

async fn a_short_limit_does_not_shorten_the_life_of_its_neighbour(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (store, mut aside) = (store(&server, client).await, aside(&server));
    let hourly = limit("hourly", FirstRequestWindow::new(rate("3/h")).unwrap());
    let quick = limit("quick", Gcra::new(rate("100/s"), 1).unwrap());
    let _ = acquire(&store, &hourly, "a").await.expect("decides");
    let _ = acquire(&store, &quick, "a").await.expect("decides");
    let ttl_ms: i64 = query(&mut aside, &["PTTL", "rl:1::{a}"]);
    assert!((3_590_000..=3_600_000).contains(&ttl_ms), "{ttl_ms}");
}

async fn a_key_expires_when_its_state_stops_to_matter(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (store, mut aside) = (store(&server, client).await, aside(&server));
    let quick = rate("1/50ms");
    for (limit, key) in [
        (limit("gcra", Gcra::new(quick, 1).unwrap()), "rl:1::{a}"),
        (limit("bucket", TokenBucket::new(quick, 1).unwrap()), "rl:1::{a}"),
        (limit("fixed", FixedWindow::new(quick).unwrap()), "rl:1::{a}"),
        (limit("first", FirstRequestWindow::new(quick).unwrap()), "rl:1::{a}"),
        (limit("log", SlidingLog::new(quick).unwrap()), "rl:1:log:{a}"),
        (limit("list", WindowLog::new(quick).unwrap()), "rl:1:list+:{a}"),
        (limit("leases", Concurrency::new(quick).unwrap()), "rl:1::{a}"),
    ] {
        assert!(acquire(&store, &limit, "a").await.expect("decides").allowed());
        let ttl_ms: i64 = query(&mut aside, &["PTTL", key]);
        assert!((0..=51).contains(&ttl_ms) || ttl_ms == -2, "{key}: {ttl_ms}");
        query::<()>(&mut aside, &["DEL", key]);
    }
}

async fn the_servers_clock_decides(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (store, mut aside) = (store(&server, client).await, aside(&server));
    let hourly = limit("hourly", FirstRequestWindow::new(rate("3/h")).unwrap());
    let server_us = |connection: &mut redis::Connection| {
        let (seconds, us): (u64, u64) = query(connection, &["TIME"]);
        seconds * 1_000_000 + us
    };
    let before = server_us(&mut aside);
    let _ = acquire(&store, &hourly, "a").await.expect("decides");
    let after = server_us(&mut aside);
    let policy_state = store.state(&hourly, "a").await.expect("reads").expect("there");
    let ratelimit_core::PolicyState::FirstRequestWindow(state) = policy_state else {
        panic!("another algorithm's state: {policy_state:?}");
    };
    assert!((before..=after).contains(&state.start.as_us()));
}

async fn a_corrupt_value_is_reported_once_and_the_limit_starts_fresh(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (store, mut aside) = (store(&server, client).await, aside(&server));
    for limit in &every_algorithm() {
        let name = limit.name();
        let key = store.key(limit, "a");
        for garbage in
            ["nonsense", "gcra", "gcra nan inf 0x10", "gcra 1 2 99999999999999999999", "-1 -1"]
        {
            let garbage = garbage.replace("gcra", name);
            match name {
                "sliding-log" => query::<()>(&mut aside, &["ZADD", &key, "1", &garbage]),
                "window-log" => query::<()>(&mut aside, &["RPUSH", &key, &garbage]),
                _ => query::<()>(&mut aside, &["HSET", &key, name, &garbage]),
            }
            let error = acquire(&store, limit, "a").await.expect_err(&garbage);
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{name}: {error}");
            let message = error.to_string();
            assert!(message.contains(name) && message.contains(&key), "{message}");
            for remaining in [2, 1, 0] {
                let verdict = acquire(&store, limit, "a").await.expect("healed");
                assert_eq!((verdict.allowed(), verdict.remaining()), (true, remaining), "{name}");
            }
            assert!(!acquire(&store, limit, "a").await.expect("decides").allowed());
            query::<()>(&mut aside, &["DEL", &key]);
        }
    }
}

async fn a_corrupt_value_deep_in_a_log_is_reported_and_removed(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (store, mut aside) = (store(&server, client).await, aside(&server));
    let log = limit("log", SlidingLog::new(rate("3/h")).unwrap());
    let key = store.key(&log, "a");
    let _ = acquire(&store, &log, "a").await.expect("decides");
    let (seconds, _): (u64, u64) = query(&mut aside, &["TIME"]);
    let earlier = ((seconds - 60) * 1_000_000).to_string();
    query::<()>(&mut aside, &["ZADD", &key, &earlier, "nonsense"]);
    let error = acquire(&store, &log, "a").await.expect_err("nonsense");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(acquire(&store, &log, "a").await.expect("healed").remaining(), 2);
}

async fn a_key_of_another_type_is_reported_and_nothing_is_written(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (store, mut aside) = (store(&server, client).await, aside(&server));
    for limit in &every_algorithm() {
        let key = store.key(limit, "a");
        query::<()>(&mut aside, &["SET", &key, "another program's"]);
        for _ in 0..2 {
            let error = acquire(&store, limit, "a").await.expect_err("a string");
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert!(error.to_string().contains(&key), "{error}");
        }
        let error = store.state(limit, "a").await.expect_err("a string");
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert_eq!(query::<String>(&mut aside, &["GET", &key]), "another program's");
        query::<()>(&mut aside, &["DEL", &key]);
    }
}

async fn a_long_log_is_read_a_few_entries_at_a_time(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (store, mut aside) = (store(&server, client).await, aside(&server));
    let log = limit("log", SlidingLog::new(rate("5000/h")).unwrap());
    let check = Check { limit: &log, key: "a", cost: 1 };
    let at = |us: u64| Batch::one(&check).now(Now::At(Timestamp::from_us(us).expect("a time")));
    for us in 0..5_000 {
        let _ = store.apply(&at(us)).await.expect("decides");
    }
    let before = server.calls("zrange").expect("it is up");
    let denied = store.apply(&at(5_000)).await.expect("decides");
    assert_eq!(denied.summary().retry_after_us, Some(3_600_000_000 - 5_000));
    let reads = server.calls("zrange").expect("it is up") - before;
    assert!(reads <= 16, "{reads} reads of 5,000 entries");
    // An hour later all entries have expired. They are removed, not carried along.
    let later = store.apply(&at(3_600_005_000)).await.expect("decides");
    assert_eq!(later.remaining(), 4_999);
    assert_eq!(query::<u64>(&mut aside, &["ZCARD", "rl:1:log:{a}"]), 1);
}

async fn a_server_that_is_down_is_unavailable_soon(client: Client) {
    let closed = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = closed.local_addr().expect("bound").port();
    drop(closed);
    let begun = Instant::now();
    let error =
        RedisStore::connect(&with_client(&format!("redis://user:secret@127.0.0.1:{port}"), client))
            .await
            .expect_err("no server listens");
    assert!(begun.elapsed() < Duration::from_secs(2));
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    let message = format!("{error} {error:?}");
    assert!(
        message.contains(&format!("127.0.0.1:{port}")) && !message.contains("secret"),
        "{message}"
    );
}

async fn a_server_that_hangs_is_indeterminate_at_the_deadline(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let builder = RedisStore::builder().deadline(Duration::from_millis(200));
    let store = builder.connect(&url(&server, client)).await.expect("the server is up");
    let limit = limit("l", Gcra::new(rate("3/h"), 3).unwrap());
    let _ = acquire(&store, &limit, "a").await.expect("decides");
    signal(&server, "-STOP");
    let error = acquire(&store, &limit, "a").await.expect_err("it hangs");
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
    signal(&server, "-CONT");
    // The earlier request was executed after all: this is the third.
    let verdict = acquire(&store, &limit, "a").await.expect("it is back");
    assert_eq!(verdict.remaining(), 0);
}

async fn the_store_reconnects_to_a_server_that_returns(client: Client) {
    let mut server = RedisServer::start().expect("redis-server");
    let store = store(&server, client).await;
    let limit = limit("l", Gcra::new(rate("3/h"), 3).unwrap());
    let _ = acquire(&store, &limit, "a").await.expect("decides");
    server.stop();
    let error = acquire(&store, &limit, "a").await.expect_err("it is gone");
    assert!(matches!(error.kind(), ErrorKind::Indeterminate | ErrorKind::Unavailable), "{error}");
    let error = acquire(&store, &limit, "a").await.expect_err("it is still gone");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    server.restart().expect("redis-server");
    let _ = acquire(&store, &limit, "a").await.expect("it is back");
}

async fn a_missing_password_is_a_configuration_error(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    query::<()>(&mut aside(&server), &["CONFIG", "SET", "requirepass", "hidden"]);
    let url = |userinfo: &str| {
        with_client(&format!("redis://{userinfo}127.0.0.1:{}", server.port()), client)
    };
    let store = RedisStore::connect(&url(":hidden@")).await.expect("the right password");
    let limit = limit("l", Gcra::new(rate("3/h"), 3).unwrap());
    let _ = acquire(&store, &limit, "a").await.expect("decides");
    assert!(!format!("{store:?}").contains("hidden"));
    let error = RedisStore::connect(&url(":secret@")).await.expect_err("a wrong password");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    let message = format!("{error} {error:?}");
    assert!(message.contains("password is wrong") && !message.contains("secret"), "{message}");
    // Without a password, the server accepts the connection and refuses the first command.
    let store = RedisStore::connect(&url("")).await;
    let error = match store {
        Ok(store) => acquire(&store, &limit, "a").await.expect_err("no password"),
        Err(error) => error,
    };
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

async fn a_missing_database_is_a_configuration_error(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let error = RedisStore::connect(&with_client(&format!("{}/99", server.url()), client))
        .await
        .expect_err("no 99th");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

async fn a_server_of_another_kind_is_reported_in_one_line(client: Client) {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let url = with_client(&format!("redis://{}", listener.local_addr().expect("bound")), client);
    let other = std::thread::spawn(move || {
        use std::io::Write;
        let (mut stream, _) = listener.accept().expect("a caller");
        stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").expect("written");
    });
    let error = RedisStore::connect(&url).await.expect_err("no Redis").to_string();
    assert!(
        error.contains("does not speak the Redis protocol") && error.lines().count() == 1,
        "{error}"
    );
    other.join().expect("no panic");
}

async fn a_full_server_charges_nothing_and_reports_it(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (store, mut aside) = (store(&server, client).await, aside(&server));
    let limits = every_algorithm();
    let _ = acquire(&store, &limits[0], "a").await.expect("decides");
    query::<()>(&mut aside, &["CONFIG", "SET", "maxmemory", "1"]);
    for limit in &limits {
        let error = acquire(&store, limit, "b").await.expect_err("no memory");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    query::<()>(&mut aside, &["CONFIG", "SET", "maxmemory", "0"]);
    for limit in &limits {
        assert_eq!(acquire(&store, limit, "b").await.expect("decides").remaining(), 2);
    }
}

async fn refunds_and_forced_charges_work_as_in_memory(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = store(&server, client).await;
    for limit in &every_algorithm() {
        let check = Check { limit, key: "a", cost: 2 };
        let remaining = |op: Op| {
            let (store, batch) = (&store, Batch::one(&check).op(op));
            async move { store.apply(&batch).await.expect("decides").remaining() }
        };
        assert_eq!(remaining(Op::Force).await, 1, "{}", limit.name());
        assert_eq!(remaining(Op::Force).await, 0, "{}", limit.name());
        assert_eq!(remaining(Op::Refund).await, 2, "{}", limit.name());
        assert_eq!(remaining(Op::Peek).await, 0, "{}", limit.name());
        assert_eq!(remaining(Op::Refund).await, 3, "{}", limit.name());
        assert_eq!(store.state(limit, "a").await.expect("reads"), None);
    }
}

with_each_client! {
    texts_that_only_lua_reads_as_numbers_are_corrupt_and_removed,
    no_key_lives_forever_after_any_operation,
    both_protocols_return_the_same_states,
    flushed_scripts_are_loaded_again,
    a_batch_is_one_call_of_one_script,
    limits_of_a_few_numbers_share_one_key_per_identifier,
    a_short_limit_does_not_shorten_the_life_of_its_neighbour,
    a_key_expires_when_its_state_stops_to_matter,
    the_servers_clock_decides,
    a_corrupt_value_is_reported_once_and_the_limit_starts_fresh,
    a_corrupt_value_deep_in_a_log_is_reported_and_removed,
    a_key_of_another_type_is_reported_and_nothing_is_written,
    a_long_log_is_read_a_few_entries_at_a_time,
    a_server_that_is_down_is_unavailable_soon,
    a_server_that_hangs_is_indeterminate_at_the_deadline,
    the_store_reconnects_to_a_server_that_returns,
    a_missing_password_is_a_configuration_error,
    a_missing_database_is_a_configuration_error,
    a_server_of_another_kind_is_reported_in_one_line,
    a_full_server_charges_nothing_and_reports_it,
    refunds_and_forced_charges_work_as_in_memory,
}
