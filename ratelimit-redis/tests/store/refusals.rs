//! A server's refusals: the kind of error, and a message that an operator can act on. The same with each
//! client, and nothing is charged.

#![cfg(unix)]

use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::common::{Meddled, url, with_client};
use ratelimit_core::{Batch, Check, ErrorKind, Gcra, Limit, Policy, Store, StoreError, Verdict};
use ratelimit_redis::{Client, RedisConnection, RedisError, RedisStore};
use ratelimit_testkit::RedisServer;

const PATIENCE: Duration = Duration::from_secs(20);

fn seldom() -> Limit<Policy> {
    Limit::new("seldom", Gcra::new("3/3650d".parse().unwrap(), 3).unwrap().into()).unwrap()
}

async fn store(url: &str) -> RedisStore {
    let builder = RedisStore::builder().deadline(PATIENCE);
    builder.connect(url).await.expect("the server is up")
}

async fn acquire(store: &RedisStore) -> Result<Verdict, RedisError> {
    store.apply(&Batch::one(&Check { limit: &seldom(), key: "a", cost: 1 })).await
}

/// The kind of an expected error, which must contain the code and the words.
async fn refused(store: &RedisStore, code: &str, words: &str) -> ErrorKind {
    let error = acquire(store).await.expect_err(code);
    says(&error, code, words)
}

fn says(error: &RedisError, code: &str, words: &str) -> ErrorKind {
    assert!(matches!(error, RedisError::Server { code: c, .. } if c == code), "{code}: {error}");
    assert!(error.to_string().contains(words), "{error}");
    error.kind()
}

fn tell(server: &RedisServer, words: &[&str]) {
    let answer = server.command(words).expect("it is up");
    answer.ok().unwrap_or_else(|error| panic!("{words:?}: {error}"));
}

/// Repeats a request until the server is in the state that the code stands for.
async fn until_refused(store: &RedisStore, code: &str, words: &str) -> ErrorKind {
    let begin = Instant::now();
    loop {
        match acquire(store).await {
            Err(error @ RedisError::Server { .. }) => return says(&error, code, words),
            other => assert!(begin.elapsed() < PATIENCE, "{code}: still {other:?}"),
        }
    }
}

async fn until_decided(store: &RedisStore) -> u64 {
    let begin = Instant::now();
    loop {
        match acquire(store).await {
            Ok(verdict) => return verdict.remaining(),
            Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
        }
    }
}

async fn a_server_that_cannot_write_is_unavailable(client: Client) {
    let args = ["--enable-protected-configs", "yes"];
    let server = RedisServer::start_with(&RedisServer::binaries()[0], &args).expect("redis-server");
    let store = store(&url(&server, client)).await;
    assert_eq!(until_decided(&store).await, 2);

    tell(&server, &["CONFIG", "SET", "min-replicas-to-write", "1"]);
    let kind = refused(&store, "NOREPLICAS", "min-replicas-to-write asks for").await;
    assert_eq!(kind, ErrorKind::Unavailable);
    tell(&server, &["CONFIG", "SET", "min-replicas-to-write", "0"]);

    tell(&server, &["CONFIG", "SET", "maxmemory", "1"]);
    let kind = refused(&store, "OOM", "raise maxmemory").await;
    assert_eq!(kind, ErrorKind::Unavailable);
    tell(&server, &["CONFIG", "SET", "maxmemory", "0"]);

    // The folder no longer exists, so the server cannot save.
    let folder = std::env::temp_dir().join(format!("{client}-{}", server.port()));
    std::fs::create_dir(&folder).expect("a folder");
    tell(&server, &["CONFIG", "SET", "dir", folder.to_str().unwrap()]);
    std::fs::remove_dir(&folder).expect("it was empty");
    tell(&server, &["CONFIG", "SET", "save", "3600 1000000"]);
    tell(&server, &["BGSAVE"]);
    let misconf = tokio::time::timeout(PATIENCE, async {
        loop {
            let info = server.command(&["INFO", "persistence"]).expect("it is up").to_string();
            if info.contains("rdb_last_bgsave_status:err") {
                break refused(&store, "MISCONF", "see to its disk").await;
            }
        }
    });
    assert_eq!(misconf.await.expect("soon"), ErrorKind::Unavailable);
    tell(&server, &["CONFIG", "SET", "save", ""]);
    assert_eq!(until_decided(&store).await, 1, "nothing was charged meanwhile");
}

async fn a_replica_refuses_with_or_without_its_master(client: Client) {
    let mut master = RedisServer::start().expect("redis-server");
    let replica = RedisServer::replica_of(&master).expect("a replica");
    let store = store(&url(&replica, client)).await;
    let kind = refused(&store, "READONLY", "the server is a replica").await;
    assert_eq!(kind, ErrorKind::Unavailable);
    tell(&replica, &["CONFIG", "SET", "replica-serve-stale-data", "no"]);
    master.stop();
    let begin = Instant::now();
    let kind = loop {
        let error = acquire(&store).await.expect_err("no master");
        if matches!(&error, RedisError::Server { code, .. } if code == "MASTERDOWN") {
            break says(&error, "MASTERDOWN", "has lost its master");
        }
        assert!(begin.elapsed() < PATIENCE, "{error}");
    };
    assert_eq!(kind, ErrorKind::Unavailable);
    tell(&replica, &["REPLICAOF", "NO", "ONE"]);
    assert_eq!(until_decided(&store).await, 2, "it is a master now");
}

async fn a_loading_server_is_unavailable_until_it_has_loaded(client: Client) {
    let args = ["--enable-debug-command", "yes", "--loading-process-events-interval-bytes", "1024"];
    let server = RedisServer::start_with(&RedisServer::binaries()[0], &args).expect("redis-server");
    let store = store(&url(&server, client)).await;
    assert_eq!(until_decided(&store).await, 2);
    for n in 0..100 {
        tell(&server, &["SET", &format!("other:{n}"), &format!("{n}").repeat(2_000)]);
    }
    tell(&server, &["CONFIG", "SET", "rdbcompression", "no"]);
    tell(&server, &["CONFIG", "SET", "key-load-delay", "2000"]);
    let mut debug = server.client().expect("it is up");
    debug.send(&["DEBUG", "RELOAD"]).expect("sent");
    let kind = until_refused(&store, "LOADING", "it has just started").await;
    assert_eq!(kind, ErrorKind::Unavailable);
    debug.receive().expect("loaded").ok().expect("loaded");
    let left = until_decided(&store).await;
    assert!(left <= 1, "what was admitted before it loaded is charged: {left}");
}

async fn a_server_with_an_endless_script_is_unavailable_until_it_is_killed(client: Client) {
    let args = ["--lua-time-limit", "10"];
    let server = RedisServer::start_with(&RedisServer::binaries()[0], &args).expect("redis-server");
    let store = store(&url(&server, client)).await;
    assert_eq!(until_decided(&store).await, 2);
    let mut busy = server.client().expect("it is up");
    busy.send(&["EVAL", "while true do end", "0"]).expect("sent");
    let is_busy = || server.command(&["PING"]).expect("it is up").as_error().is_some();
    let begin = Instant::now();
    while !is_busy() {
        assert!(begin.elapsed() < PATIENCE, "the script has ended");
    }
    let kind = refused(&store, "BUSY", "SCRIPT KILL").await;
    assert_eq!(kind, ErrorKind::Unavailable);
    tell(&server, &["SCRIPT", "KILL"]);
    assert_eq!(until_decided(&store).await, 1);
}

async fn a_missing_permission_is_a_configuration_error(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    tell(&server, &["ACL", "SETUSER", "guest", "on", ">s3cret", "~*", "+ping"]);
    let login = |password: &str| {
        let login = format!("redis://guest:{password}@");
        with_client(&server.url().replace("redis://", &login), client)
    };
    let guest = store(&login("s3cret")).await;
    let kind = refused(&guest, "NOPERM", "ACL SETUSER").await;
    assert_eq!(kind, ErrorKind::Config);
    // The user may call the script, but not the commands in it.
    tell(&server, &["ACL", "SETUSER", "guest", "+evalsha", "+eval"]);
    let error = acquire(&guest).await.expect_err("half of it");
    assert_eq!(says(&error, "ERR", "ACL SETUSER"), ErrorKind::Config);
    tell(&server, &["ACL", "SETUSER", "guest", "+@all"]);
    assert_eq!(until_decided(&guest).await, 2);

    let builder = RedisStore::builder().deadline(PATIENCE);
    let error = builder.connect(&login("wr0ng")).await.expect_err("a wrong password");
    assert_eq!(says(&error, "WRONGPASS", "log in: give user and password"), ErrorKind::Config);
    assert!(!error.to_string().contains("wr0ng"), "{error}");
    tell(&server, &["CONFIG", "SET", "requirepass", "s3cret"]);
    let builder = RedisStore::builder().deadline(PATIENCE);
    let error = builder.connect(&url(&server, client)).await.expect_err("no password");
    assert_eq!(says(&error, "NOAUTH", "log in: give user and password"), ErrorKind::Config);
}

with_each_client! {
    a_server_that_cannot_write_is_unavailable,
    a_replica_refuses_with_or_without_its_master,
    a_loading_server_is_unavailable_until_it_has_loaded,
    a_server_with_an_endless_script_is_unavailable_until_it_is_killed,
    a_missing_permission_is_a_configuration_error,
}

#[tokio::test]
async fn a_servers_clock_at_the_end_of_time_is_refused_by_name_in_every_mode() {
    /// Past the end by half the time that is left.
    const AHEAD_S: i64 = 3_000_000_000;
    let server = RedisServer::start().expect("redis-server");
    let meddled = async || {
        let connection = RedisConnection::open(&server.url(), Duration::from_secs(20)).await;
        Arc::new(Meddled::new(connection.expect("it is up")).clock_ahead(AHEAD_S))
    };
    let lua = RedisStore::builder().over(meddled().await).expect("a prefix");
    let cas = RedisStore::builder().cas().over(meddled().await).expect("a prefix");
    let multi = RedisStore::builder().multi().over(meddled().await).expect("a prefix");
    for words in
        ["gcra 3/s", "fixed-window 3/s", "sliding-log 3/s", "fixed-window 3/s count attempts"]
    {
        let limit = Limit::new("l", words.parse::<Policy>().expect("a policy")).expect("a name");
        let check = Check { limit: &limit, key: "k", cost: 1 };
        let batch = Batch::one(&check);
        let mut said = vec![lua.apply(&batch).await, cas.apply(&batch).await];
        if words.contains("attempts") {
            said.push(multi.apply(&batch).await);
        }
        for said in said {
            let error = said.expect_err(words);
            assert_eq!(error.kind(), ErrorKind::Config, "{error}");
            assert!(error.to_string().contains("set the clock"), "{error}");
        }
    }
}
