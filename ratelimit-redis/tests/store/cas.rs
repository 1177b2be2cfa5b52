//! A user's own algorithm, that of the example, in memory and on Redis, and the behaviour of the
//! compare-and-set mode on a real server.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::common::{Meddled, Meddling, aside, query, url};
use crate::weekend_budget::WeekendBudget;
use ratelimit_core::{
    Batch, Check, ErrorKind, Gcra, Limit, ManualClock, Now, Op, Policy, ReservationId, Store,
    StoreError, SyncStore, Timestamp,
};
use ratelimit_memory::MemoryStore;
use ratelimit_redis::{
    Argument, Cas, Client, Connection, Deadline, RedisConnection, RedisError, RedisStore, Reply,
};
use ratelimit_testkit::{RedisServer, RespClient, RespValue};
use tokio::sync::Barrier;

const DAY_US: u64 = 86_400_000_000;
/// A Friday, 20 March 2026, at midnight.
const FRIDAY_US: u64 = 1_773_964_800_000_000;

async fn store(server: &RedisServer, client: Client) -> RedisStore<Cas> {
    RedisStore::builder().cas().connect(&url(server, client)).await.expect("the server is up")
}

fn hourly() -> Limit<Policy> {
    let gcra = Gcra::new("3/h".parse().expect("a rate"), 3).expect("a limit");
    Limit::new("hourly", gcra.into()).expect("a name")
}

async fn a_users_algorithm_decides_alike_in_memory_and_on_redis(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let redis = store(&server, client).await;
    let memory = MemoryStore::builder().clock(ManualClock::default()).build();
    let limit = Limit::new("budget", WeekendBudget(100)).expect("a name");
    let mut seen = Vec::new();
    for (day, cost) in
        [(0, 60), (0, 60), (0, 0), (1, 60), (1, 50), (1, 1), (0, 1), (3, 100), (3, 101)]
    {
        let at = Timestamp::from_us(FRIDAY_US + day * DAY_US + 1).expect("a time");
        let check = Check { limit: &limit, key: "alice", cost };
        let batch = Batch::one(&check).now(Now::At(at));
        let there = redis.apply(&batch).await.expect("decides");
        assert_eq!(memory.apply_now(&batch).expect("decides"), there, "{cost} on day {day}");
        assert_eq!(
            memory.state("budget", "alice"),
            redis.state(&limit, "alice").await.expect("reads"),
        );
        seen.push((there.allowed(), there.limit(), there.remaining()));
    }
    assert_eq!(
        seen,
        [
            (true, 100, 40),
            (false, 100, 40),
            (true, 100, 40),
            (false, 50, 50), // Saturday
            (true, 50, 0),
            (false, 50, 0),
            (false, 50, 0), // the clock went back
            (true, 100, 0),
            (false, 100, 0),
        ]
    );
}

async fn an_operation_that_an_algorithm_lacks_is_unsupported_and_charges_nothing(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = store(&server, client).await;
    let limit = Limit::new("budget", WeekendBudget(100)).expect("a name");
    let check = Check { limit: &limit, key: "alice", cost: 1 };
    for op in [Op::Refund, Op::Force] {
        let error = store.apply(&Batch::one(&check).op(op)).await.expect_err("has none");
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.to_string().contains("budget"), "{error}");
    }
    assert_eq!(query::<u64>(&mut aside(&server), &["DBSIZE"]), 0);
}

async fn a_corrupt_value_is_reported_once_and_the_limit_starts_fresh(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let (store, mut aside) = (store(&server, client).await, aside(&server));
    let limit = hourly();
    let check = Check { limit: &limit, key: "a", cost: 1 };
    for garbage in ["nonsense", "gcra 1 2", "gcra 1 2 99999999999999999999"] {
        query::<()>(&mut aside, &["SET", &store.key(&limit, "a"), garbage]);
        let error = store.apply(&Batch::one(&check)).await.expect_err(garbage);
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
        assert_eq!(store.apply(&Batch::one(&check)).await.expect("healed").remaining(), 2);
    }
    query::<()>(&mut aside, &["DEL", &store.key(&limit, "a")]);
    query::<()>(&mut aside, &["RPUSH", &store.key(&limit, "a"), "another program's"]);
    let error = store.apply(&Batch::one(&check)).await.expect_err("a list");
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
}

/// A connection on which another client is always faster: the key changes before every write.
struct Overtaken {
    connection: RedisConnection,
    changes: AtomicU64,
}

impl Connection for Overtaken {
    async fn send(
        &self,
        to: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        let key = match words {
            [Argument::Text("EVAL" | "EVALSHA"), _, _, key, ..]
            | [Argument::Text("SET"), key, ..] => Some(*key),
            _ => None,
        };
        if let Some(key) = key {
            let now_us = self.changes.fetch_add(1, Ordering::Relaxed);
            let state = format!("gcra {now_us} 0 0");
            let change = [Argument::Text("SET"), key, Argument::Text(&state), Argument::Text("PX")];
            let ttl = [Argument::Number(60_000)];
            self.connection.send(to, &[&change[..], &ttl[..]].concat(), deadline).await?;
        }
        self.connection.send(to, words, deadline).await
    }

    async fn transaction(
        &self,
        to: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        self.connection.transaction(to, commands, deadline).await
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        self.connection.send_to_each(words, deadline).await
    }

    fn is_cluster(&self) -> bool {
        self.connection.is_cluster()
    }

    fn address(&self) -> &Arc<str> {
        self.connection.address()
    }
}

async fn a_key_that_others_always_change_first_is_contended_and_uncharged(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let opened = RedisConnection::open(&url(&server, client), Duration::from_secs(5)).await;
    let connection = opened.expect("the server is up");
    let overtaken = Overtaken { connection, changes: AtomicU64::new(1) };
    let store = RedisStore::builder().cas().over(Arc::new(overtaken)).expect("a prefix");
    let limit = hourly();
    let checks = ["a", "b"].map(|key| Check { limit: &limit, key, cost: 1 });
    for batch in [Batch::one(&checks[0]), Batch::new(&checks).expect("distinct")] {
        let error = store.apply(&batch).await.expect_err("never first");
        assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
    }
    assert_eq!(store.state(&limit, "b").await.expect("reads"), None);
    // A peek writes nothing and disturbs no other caller.
    let _ = store.apply(&Batch::one(&checks[0]).op(Op::Peek)).await.expect("decides");
}

/// A connection on which a read waits until this many have been sent.
struct AllAtOnce {
    connection: RedisConnection,
    readings: Barrier,
}

impl Connection for AllAtOnce {
    async fn send(
        &self,
        to: &str,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Result<Reply, RedisError> {
        if matches!(words, [Argument::Text("GET" | "TIME"), ..]) {
            let all = tokio::time::timeout_at(deadline.at(), self.readings.wait());
            all.await.expect("all readings are sent at once");
        }
        self.connection.send(to, words, deadline).await
    }

    async fn transaction(
        &self,
        to: &str,
        commands: &[Vec<Argument<'_>>],
        deadline: Deadline,
    ) -> Result<Vec<Reply>, RedisError> {
        self.connection.transaction(to, commands, deadline).await
    }

    async fn send_to_each(
        &self,
        words: &[Argument<'_>],
        deadline: Deadline,
    ) -> Vec<(Arc<str>, Result<Reply, RedisError>)> {
        self.connection.send_to_each(words, deadline).await
    }

    fn is_cluster(&self) -> bool {
        self.connection.is_cluster()
    }

    fn address(&self) -> &Arc<str> {
        self.connection.address()
    }
}

async fn a_batch_reads_everything_in_one_round_trip(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let limit = hourly();
    let checks = ["a", "b"].map(|key| Check { limit: &limit, key, cost: 1 });
    // The states, the reservations under the id, and the time.
    for (batch, readings) in [
        (Batch::one(&checks[0]), 2),
        (Batch::new(&checks).expect("distinct"), 3),
        (Batch::new(&checks).expect("distinct").id(ReservationId::new(7)), 5),
    ] {
        let deadline = Duration::from_secs(10);
        let opened = RedisConnection::open(&url(&server, client), deadline).await;
        let connection = opened.expect("the server is up");
        let all_at_once = AllAtOnce { connection, readings: Barrier::new(readings) };
        let builder = RedisStore::builder().cas().deadline(deadline);
        let store = builder.over(Arc::new(all_at_once)).expect("a prefix");
        assert!(store.apply(&batch).await.expect("decides").allowed(), "{readings}");
    }
}

/// Callers of one process take turns, and processes back off from each other.
async fn many_callers_of_one_key_are_rarely_contended(client: Client) {
    const TIMES: usize = 10;
    let limit: Limit<Policy> = Limit::new(
        "many",
        Gcra::new("1/h".parse().expect("a rate"), 1_000).expect("a limit").into(),
    )
    .expect("a name");
    for (stores, tasks) in [(1, 64), (4, 16)] {
        let server = RedisServer::start().expect("redis-server");
        let (mut asking, mut contended) = (tokio::task::JoinSet::new(), 0);
        for _ in 0..stores {
            let builder = RedisStore::builder().cas().deadline(Duration::from_secs(20));
            let store = builder.connect(&url(&server, client)).await.expect("the server is up");
            for _ in 0..tasks {
                let (store, limit) = (store.clone(), limit.clone());
                asking.spawn(async move {
                    let mut contended = 0;
                    for _ in 0..TIMES {
                        let check = Check { limit: &limit, key: "one", cost: 1 };
                        match store.apply(&Batch::one(&check)).await {
                            Ok(verdict) => assert!(verdict.allowed()),
                            Err(error) => {
                                assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
                                contended += 1;
                            }
                        }
                    }
                    contended
                });
            }
        }
        while let Some(of_task) = asking.join_next().await {
            contended += of_task.expect("no panic");
        }
        let requests = stores * tasks * TIMES;
        assert!(contended * 100 < requests, "{contended} of {requests} with {stores} stores");
        let store = store(&server, client).await;
        let check = Check { limit: &limit, key: "one", cost: 0 };
        let left = store.apply(&Batch::one(&check)).await.expect("decides").remaining();
        assert_eq!(left, 1_000 - (requests - contended) as u64, "each was charged once");
    }
}

/// A store on whose connection `before` runs before every write. Its deadline never forces another
/// attempt.
async fn meddled(
    server: &RedisServer,
    client: Client,
    clustered: bool,
    before_writes: impl Fn(&mut RespClient) + Send + Sync + 'static,
) -> RedisStore<Cas, Arc<Meddled>> {
    let opened = RedisConnection::open(&url(server, client), Duration::from_secs(20)).await;
    let port = server.port();
    let connection = Meddled::new(opened.expect("the server is up")).before(move |words| {
        if matches!(words, [Argument::Text("EVAL" | "EVALSHA" | "SET"), ..]) {
            before_writes(&mut RespClient::connect(port).expect("it is up"));
        }
        Meddling::None
    });
    let connection = if clustered { connection.clustered() } else { connection };
    let builder = RedisStore::builder().cas().deadline(Duration::from_millis(1));
    builder.over(Arc::new(connection)).expect("a prefix")
}

fn tell(client: &mut RespClient, words: &[&str]) -> RespValue {
    client.command(words).expect("it answers").ok().expect("done")
}

/// Makes keys expire, and returns when they have.
fn expire(client: &mut RespClient, keys: &[String]) {
    for key in keys {
        tell(client, &["PEXPIRE", key, "1"]);
        while tell(client, &["EXISTS", key]) == RespValue::Integer(1) {}
    }
}

/// No other client is there, so it is no contention, however long it takes and in however many slots.
async fn a_state_that_expires_between_read_and_write_is_read_again(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let limit = hourly();
    let keys = ["a", "b"].map(|key| format!("rl:1:hourly!:{{{key}}}"));
    let checks = ["a", "b"].map(|key| Check { limit: &limit, key, cost: 1 });
    let (one, both) = (Batch::one(&checks[0]), Batch::new(&checks).expect("distinct"));
    for (batch, clustered) in [(one, false), (both, false), (both, true)] {
        let to_expire = keys.clone();
        let store = meddled(&server, client, clustered, move |aside| expire(aside, &to_expire));
        let store = store.await;
        for _ in 0..3 {
            for key in &keys {
                let mut aside = RespClient::connect(server.port()).expect("it is up");
                tell(&mut aside, &["SET", key, "gcra 1 0 0", "PX", "60000"]);
            }
            let verdict = store.apply(&batch).await.expect("no other caller is there");
            assert_eq!(verdict.remaining(), 2);
        }
    }
}

/// Each of many states expires at a different time, and each time all of them are read again.
async fn states_that_expire_in_turn_are_no_contention(client: Client) {
    const MANY: usize = 50;
    let server = RedisServer::start().expect("redis-server");
    let limit = hourly();
    let names: Vec<_> = (0..MANY).map(|n| n.to_string()).collect();
    let keys: Vec<_> = names.iter().map(|name| format!("rl:1:hourly!:{{{name}}}")).collect();
    let mut aside = RespClient::connect(server.port()).expect("it is up");
    for key in &keys {
        tell(&mut aside, &["SET", key, "gcra 1 0 0", "PX", "60000"]);
    }
    let store = meddled(&server, client, false, move |aside| {
        let there = |key: &&String| tell(aside, &["EXISTS", key]) == RespValue::Integer(1);
        if let Some(first) = keys.iter().find(there).cloned() {
            expire(aside, &[first]);
        }
    });
    let store = store.await;
    let checks: Vec<_> =
        names.iter().map(|name| Check { limit: &limit, key: name, cost: 1 }).collect();
    let verdict = store.apply(&Batch::new(&checks).expect("distinct")).await;
    assert_eq!(verdict.expect("no other caller is there").remaining(), 2);
}

/// A removal by another client looks like an expiry. Together with its writes it is contention.
async fn a_key_that_others_write_and_remove_in_turn_is_contended(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let limit = hourly();
    let check = Check { limit: &limit, key: "a", cost: 1 };
    let written = AtomicU64::new(0);
    let store = meddled(&server, client, false, move |aside| {
        let key = "rl:1:hourly!:{a}";
        if tell(aside, &["DEL", key]) == RespValue::Integer(0) {
            let state = format!("gcra {} 0 0", written.fetch_add(1, Ordering::Relaxed));
            tell(aside, &["SET", key, &state, "PX", "60000"]);
        }
    });
    let error = store.await.apply(&Batch::one(&check)).await.expect_err("never first");
    assert_eq!(error.kind(), ErrorKind::Contended, "{error}");
}

/// On every configured server. Those without `SET … IFEQ` need the script, and support it.
async fn a_single_check_needs_no_scripting_if_the_server_has_ifeq(client: Client) {
    for binary in RedisServer::binaries() {
        let server = RedisServer::start_with(&binary, &[]).expect("a server");
        let (store, mut aside) = (store(&server, client).await, aside(&server));
        query::<()>(&mut aside, &["SET", "probe", "old"]);
        let mut ifeq = redis::cmd("SET");
        let known = ifeq.arg(&["probe", "new", "IFEQ", "old"]).query::<()>(&mut aside).is_ok();
        let limit = hourly();
        let check = Check { limit: &limit, key: "a", cost: 1 };
        for remaining in [2, 1, 0] {
            let verdict = store.apply(&Batch::one(&check)).await.expect("decides");
            assert_eq!((verdict.allowed(), verdict.remaining()), (true, remaining), "{binary}");
        }
        assert!(!store.apply(&Batch::one(&check)).await.expect("decides").allowed());
        let refund = Check { cost: 3, ..check };
        let verdict = store.apply(&Batch::one(&refund).op(Op::Refund)).await.expect("decides");
        assert_eq!(verdict.remaining(), 3);
        assert_eq!(store.state(&limit, "a").await.expect("reads"), None);
        assert_eq!(store.apply(&Batch::one(&check)).await.expect("decides").remaining(), 2);
        let calls = |command| server.calls(command).expect("it is up");
        let scripted = calls("evalsha") + calls("eval") > 0;
        assert_eq!(scripted, !known, "{binary}: IFEQ is known: {known}");
    }
}

with_each_client! {
    a_users_algorithm_decides_alike_in_memory_and_on_redis,
    an_operation_that_an_algorithm_lacks_is_unsupported_and_charges_nothing,
    a_corrupt_value_is_reported_once_and_the_limit_starts_fresh,
    a_key_that_others_always_change_first_is_contended_and_uncharged,
    a_batch_reads_everything_in_one_round_trip,
    many_callers_of_one_key_are_rarely_contended,
    a_state_that_expires_between_read_and_write_is_read_again,
    states_that_expire_in_turn_are_no_contention,
    a_key_that_others_write_and_remove_in_turn_is_contended,
    a_single_check_needs_no_scripting_if_the_server_has_ifeq,
}
