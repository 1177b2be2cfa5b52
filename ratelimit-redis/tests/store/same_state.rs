//! Stored states are identical byte by byte on every server, with either client and protocol, on one server and on a
//! cluster, so a fleet can change any of these without losing its limits.

#![cfg(all(feature = "redis", feature = "fred"))]

use std::collections::BTreeMap;

use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{Algorithm, Limit, Policy, ReservationId, Store, Timestamp};
use ratelimit_redis::{Argument, Connection, Deadline, RedisConnection, RedisStore, Reply};
use ratelimit_servers::{RedisCluster, RedisServer};

use crate::common::{PATIENCE, in_every_mode, limit, tell};

/// Each key and its content.
type Contents = BTreeMap<String, Reply>;

/// Limits of 7 in ten seconds: of every algorithm, and those that a transaction can decide.
fn limits() -> [Vec<Limit<Policy>>; 2] {
    let text = |name: &str| match name {
        "bucketed-window" => format!("{name} bucket 2s rates 7/10s, 14/30s"),
        _ => format!("{name} 7/10s"),
    };
    let admissions = Policy::NAMES.iter().map(|name| limit(name, &text(name)));
    let attempts = crate::common::NATIVE.map(|name| {
        let policy = format!("{} count attempts", text(name));
        limit(&format!("{name}-attempts"), &policy)
    });
    [admissions.collect(), attempts.into()]
}

/// Sends requests of every kind, at given times.
async fn fill<S: Store<Policy>>(store: &S, limits: &[Limit<Policy>], only_acquires: bool) {
    for n in 0..40_u64 {
        let at_us = 1_795_218_392_123_456 + n * 777_777 - n % 3 * 400_000;
        for limit in limits {
            let key = format!("k{}", n % 3);
            let check = Check { limit, key: &key, cost: n % 4 };
            let now = Now::At(Timestamp::from_us(at_us).expect("a time"));
            let batch = Batch::one(&check).now(now).metadata(b"");
            let reserves = limit.algorithm().reservation_us().is_some() && check.cost > 0;
            let batch = match n % 7 {
                3 if !only_acquires => batch.op(Op::Refund),
                5 if !only_acquires => batch.op(Op::Force),
                6 if !only_acquires && reserves => batch.id(ReservationId::new(u128::from(n))),
                _ => batch,
            };
            let _ = store.apply(&batch).await.expect("decides");
        }
    }
}

/// The stored contents after requests in every mode, by a client with these options.
async fn stored(url: &str, options: &str) -> Contents {
    let asking = format!("{url}?{options}");
    let connection = RedisConnection::open(&asking, PATIENCE).await.expect("it is up");
    let store = RedisStore::builder().over(std::sync::Arc::new(connection)).expect("a prefix");
    let [admissions, attempts] = limits();
    for (mode, store) in in_every_mode(&store) {
        match mode {
            "multi" => fill(&store, &attempts, true).await,
            _ => fill(&store, &admissions, false).await,
        }
    }
    // All contents are read by one protocol.
    let connection = RedisConnection::open(url, PATIENCE).await.expect("it is up");
    let patient = || Deadline::within(PATIENCE);
    let mut contents = Contents::new();
    for (_, keys) in connection.send_to_each(&["KEYS", "*"].map(Argument::Text), patient()).await {
        let Reply::Array(keys) = keys.expect("the server answers") else { panic!("keys") };
        for key in keys {
            let Reply::Text(key) = key else { panic!("a key") };
            let key = String::from_utf8(key).expect("text");
            let ask = async |words: &[&str]| {
                let words: Vec<_> = words.iter().map(|word| Argument::Text(word)).collect();
                connection.send(&key, &words, patient()).await.expect("the server answers")
            };
            let Reply::Text(kind) = ask(&["TYPE", &key]).await else { panic!("a kind") };
            let content = match &*kind {
                b"hash" => sorted(ask(&["HGETALL", &key]).await, 2),
                b"zset" => sorted(ask(&["ZRANGE", &key, "0", "-1", "WITHSCORES"]).await, 1),
                b"list" => sorted(ask(&["LRANGE", &key, "0", "-1"]).await, usize::MAX),
                _ => ask(&["GET", &key]).await,
            };
            contents.insert(key, content);
        }
    }
    contents
}

/// Sorts parts of so many items, without the random words of entries.
fn sorted(content: Reply, size: usize) -> Reply {
    let Reply::Array(items) = content else { return content };
    let plain = |item: &Reply| match item {
        Reply::Text(text) => {
            let text = String::from_utf8_lossy(text).into_owned();
            let words: Vec<_> = text.split(' ').filter(|word| word.len() != 32).collect();
            Reply::Text(words.join(" ").into_bytes())
        }
        item => item.clone(),
    };
    let mut parts: Vec<Vec<_>> =
        items.chunks(size).map(|part| part.iter().map(plain).collect()).collect();
    parts.sort_by_key(|part| format!("{part:?}"));
    Reply::Array(parts.concat())
}

#[tokio::test]
async fn stored_states_are_identical_everywhere() {
    let mut due: Option<Contents> = None;
    for binary in RedisServer::binaries() {
        let server = RedisServer::start_with(&binary, &[]).expect("a server");
        let cluster = RedisCluster::start_with(&binary, 0, &[]).expect("a cluster");
        for (url, options) in [
            (server.url(), "client=redis"),
            (server.url(), "client=redis&protocol=resp3"),
            (server.url(), "client=fred"),
            (cluster.url(), "client=redis"),
            (cluster.url(), "client=fred&protocol=resp3"),
        ] {
            let found = stored(&url, options).await;
            let due = due.get_or_insert_with(|| found.clone());
            assert!(due.len() > 30, "{}", due.len());
            assert_eq!(&found, due, "{binary} {url} {options}");
            for node in cluster.nodes().iter().chain([&server]) {
                tell(node, &["FLUSHALL"]);
            }
        }
    }
}
