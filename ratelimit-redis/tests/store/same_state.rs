//! Stored states are identical byte by byte on every server, with either client, on one server and on a
//! cluster, so a fleet can change any of these without losing its limits.

#![cfg(all(feature = "redis", feature = "fred"))]

use std::collections::BTreeMap;
use std::time::Duration;

use ratelimit_core::{
    Algorithm, Attempts, Batch, Check, FixedWindow, Limit, Now, Op, Policy, ReservationId,
    SlidingLog, Store, Timestamp, WindowLog,
};
use ratelimit_redis::{
    Argument, Cas, Connection, Deadline, Multi, RedisConnection, RedisError, RedisStore, Reply,
};
use ratelimit_testkit::{AlgorithmKind, RedisCluster, RedisServer};

const DEADLINE: Duration = Duration::from_secs(20);

fn patient() -> Deadline {
    Deadline::within(DEADLINE)
}

/// Each key and its content.
type Contents = BTreeMap<String, Reply>;

/// A limit of 7 in ten seconds per algorithm, and those that a transaction can decide.
fn limits() -> (Vec<Limit<Policy>>, Vec<Limit<Policy>>) {
    let rate = "7/10s".parse().expect("a rate");
    let admissions = AlgorithmKind::ALL.map(|kind| (format!("{kind:?}"), kind.policy(rate, 7)));
    let attempts: [(&str, Policy); 3] = [
        ("fixed", Attempts::new(FixedWindow::new(rate).expect("a limit")).into()),
        ("log", Attempts::new(SlidingLog::new(rate).expect("a limit")).into()),
        ("list", Attempts::new(WindowLog::new(rate).expect("a limit")).into()),
    ];
    let limit = |name: &str, policy| Limit::new(name, policy).expect("a name");
    let admissions = admissions.into_iter().map(|(name, policy)| limit(&name, policy));
    (admissions.collect(), attempts.into_iter().map(|(name, policy)| limit(name, policy)).collect())
}

/// Sends requests of every kind, at given times.
async fn fill<S: Store<Policy, Error = RedisError>>(
    store: &S,
    limits: &[Limit<Policy>],
    blind: bool,
) {
    for n in 0..40_u64 {
        let at = Timestamp::from_us(1_795_218_392_123_456 + n * 777_777 - n % 3 * 400_000)
            .expect("a time");
        for limit in limits {
            let key = format!("k{}", n % 3);
            let check = Check { limit, key: &key, cost: n % 4 };
            let batch = Batch::one(&check).now(Now::At(at)).metadata(b"");
            let batch = match n % 7 {
                3 if !blind => batch.op(Op::Refund),
                5 if !blind => batch.op(Op::Force),
                6 if !blind && limit.algorithm().reservation_us().is_some() && check.cost > 0 => {
                    batch.id(ReservationId::new(u128::from(n)))
                }
                _ => batch,
            };
            let _ = store.apply(&batch).await.expect("decides");
        }
    }
}

/// The stored contents afterwards in every mode, at this URL.
async fn stored(url: &str) -> Contents {
    let connection = RedisConnection::open(url, DEADLINE).await.expect("it is up");
    let store = RedisStore::builder().over(std::sync::Arc::new(connection)).expect("a prefix");
    let (admissions, attempts) = limits();
    fill(&store, &admissions, false).await;
    fill(&store.in_mode::<Cas>(), &admissions, false).await;
    fill(&store.in_mode::<Multi>(), &attempts, true).await;
    let connection = RedisConnection::open(url, DEADLINE).await.expect("it is up");
    let mut contents = Contents::new();
    for (_, keys) in connection.send_to_each(&["KEYS", "*"].map(Argument::Text), patient()).await {
        let Reply::Array(keys) = keys.expect("the server answers") else { panic!("keys") };
        for key in keys {
            let Reply::Text(key) = key else { panic!("a key") };
            let key = String::from_utf8(key).expect("text");
            let kind = connection.send(&key, &["TYPE", &key].map(Argument::Text), patient()).await;
            let kind = kind.expect("a kind");
            let words: &[&str] = match &kind {
                Reply::Text(kind) if kind == b"hash" => &["HGETALL", &key],
                Reply::Text(kind) if kind == b"zset" => &["ZRANGE", &key, "0", "-1", "WITHSCORES"],
                Reply::Text(kind) if kind == b"list" => &["LRANGE", &key, "0", "-1"],
                _ => &["GET", &key],
            };
            let words: Vec<_> = words.iter().copied().map(Argument::Text).collect();
            let content = connection.send(&key, &words, patient()).await;
            let content = content.expect("the server answers");
            contents.insert(key, sorted(content, &kind));
        }
    }
    contents
}

/// Sorts a hash's fields, and removes random parts from entries.
fn sorted(content: Reply, kind: &Reply) -> Reply {
    let Reply::Array(items) = content else { return content };
    if *kind == Reply::Text(b"hash".to_vec()) {
        let mut pairs: Vec<_> = items.chunks(2).map(<[Reply]>::to_vec).collect();
        pairs.sort_by_key(|pair| format!("{pair:?}"));
        return Reply::Array(pairs.concat());
    }
    let drawn = |item: Reply| match item {
        Reply::Text(text) => {
            let text = String::from_utf8_lossy(&text).into_owned();
            let words: Vec<_> = text.split(' ').filter(|word| word.len() != 32).collect();
            Reply::Text(words.join(" ").into_bytes())
        }
        item => item,
    };
    let mut items: Vec<_> = items.into_iter().map(drawn).collect();
    if *kind != Reply::Text(b"list".to_vec()) {
        items.sort_by_key(|item| format!("{item:?}"));
    }
    Reply::Array(items)
}

#[tokio::test]
async fn stored_states_are_identical_everywhere() {
    let mut due: Option<Contents> = None;
    for binary in RedisServer::binaries() {
        let server = RedisServer::start_with(&binary, &[]).expect("a server");
        let cluster = RedisCluster::start_with(&binary, 0, &[]).expect("a cluster");
        for (url, client) in [
            (server.url(), "redis"),
            (server.url(), "fred"),
            (cluster.url(), "redis"),
            (cluster.url(), "fred"),
        ] {
            let found = stored(&format!("{url}?client={client}")).await;
            let due = due.get_or_insert_with(|| found.clone());
            assert!(due.len() > 30, "{}", due.len());
            assert_eq!(&found, due, "{binary} {url} {client}");
            for node in cluster.nodes().iter().chain([&server]) {
                node.command(&["FLUSHALL"]).expect("it answers").ok().expect("done");
            }
        }
    }
}
