//! Topologies of several servers: clusters whose slots move and whose masters die, masters that
//! Sentinels name, and encrypted connections. Each with every client.

#![cfg(unix)]
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic, missing_docs, reason = "tests")]

#[path = "../common/mod.rs"]
#[macro_use]
mod common;

mod cluster;
mod disruption;
mod sentinel;
#[cfg(feature = "tls")]
mod tls;

use std::future::Future;
use std::time::{Duration, Instant};

use common::with_client;
use ratelimit_core::{
    Attempts, Batch, Check, FixedWindow, Gcra, Limit, Policy, SlidingLog, Store, Verdict,
};
use ratelimit_redis::{Client, RedisError, RedisStore};
use ratelimit_testkit::{RedisServer, RespValue};

/// For every call that has to succeed: the machine may be busy.
const PATIENCE: Duration = Duration::from_secs(20);
/// No window ends and nothing refills while a test runs.
const SELDOM: &str = "3/3650d";

fn seldom() -> Limit<Policy> {
    Limit::new("seldom", Gcra::new(SELDOM.parse().unwrap(), 3).unwrap().into()).unwrap()
}

/// A limit whose state has its own key.
fn logged() -> Limit<Policy> {
    Limit::new("logged", SlidingLog::new(SELDOM.parse().unwrap()).unwrap().into()).unwrap()
}

/// A limit that a transaction can decide.
fn attempts() -> Limit<Policy> {
    let window = FixedWindow::new(SELDOM.parse().unwrap()).unwrap();
    Limit::new("attempts", Attempts::new(window).into()).unwrap()
}

/// A store whose keys differ from the other client's, with a deadline for calls that have to succeed.
async fn store(url: &str, client: Client) -> RedisStore {
    store_within(PATIENCE, url, client).await.expect("the servers are up")
}

async fn store_within(
    deadline: Duration,
    url: &str,
    client: Client,
) -> Result<RedisStore, RedisError> {
    let builder = RedisStore::builder().prefix(client.name()).deadline(deadline);
    builder.connect(&with_client(url, client)).await
}

async fn acquire<S: Store<Policy, Error = RedisError>>(
    store: &S,
    limit: &Limit<Policy>,
    key: &str,
) -> Result<Verdict, RedisError> {
    store.apply(&Batch::one(&Check { limit, key, cost: 1 })).await
}

/// The remaining cost after a request that has to be decided.
async fn left<S: Store<Policy, Error = RedisError>>(
    store: &S,
    limit: &Limit<Policy>,
    key: &str,
) -> u64 {
    acquire(store, limit, key).await.expect("decided").remaining()
}

/// Three requests are admitted and a fourth is denied.
async fn three_and_no_more<S: Store<Policy, Error = RedisError>>(
    store: &S,
    limit: &Limit<Policy>,
    key: &str,
) {
    for due in [2, 1, 0] {
        assert_eq!(left(store, limit, key).await, due, "{key}");
    }
    assert!(!acquire(store, limit, key).await.expect("decided").allowed(), "{key}");
}

/// Waits until the replica has caught up with its master. The key lies in the same slot, if there are
/// slots.
fn replicated(master: &RedisServer, key: &str) {
    let mut client = master.client().expect("it is up");
    // WAIT covers what was written on the same connection, and everything before it.
    let written = client.command(&["SET", &format!("sync:{{{key}}}"), "1", "PX", "60000"]);
    written.expect("it is up").ok().expect("a master");
    let waited = client.command(&["WAIT", "1", "9000"]).expect("it is up");
    assert_eq!(waited, RespValue::Integer(1), "in touch");
}

/// Repeats the attempt until it succeeds.
async fn until<T, E: std::fmt::Display, F: Future<Output = Result<T, E>>>(
    mut attempt: impl FnMut() -> F,
) -> T {
    let begin = Instant::now();
    loop {
        match attempt().await {
            Ok(done) => return done,
            Err(error) => assert!(begin.elapsed() < PATIENCE, "still: {error}"),
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

/// Runs work that blocks on servers without blocking the connections.
async fn aside<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    tokio::task::spawn_blocking(work).await.expect("no panic")
}
