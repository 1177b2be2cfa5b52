//! Read-only requests write nothing, even if they find a value that no limit wrote: a peek, a read of
//! the stored state, and the cross-slot question whether an operation would be refused. A writing
//! request removes the value and reports it.

use std::sync::Arc;
use std::time::Duration;

use crate::common::{Meddled, url};
use ratelimit_core::{
    Attempts, Batch, Check, DynStore, ErrorKind, FixedWindow, Gcra, Limit, Op, Policy,
    ReservationId, SlidingLog, Store, StoreError, WindowLog,
};
use ratelimit_redis::{Client, RedisConnection, RedisStore};
use ratelimit_testkit::{RedisServer, RespValue};

const DEADLINE: Duration = Duration::from_secs(20);
const ID: ReservationId = ReservationId::new(7);

fn limits() -> [Limit<Policy>; 4] {
    let rate = || "3/h".parse().expect("a rate");
    [
        Limit::new("bucket", Gcra::new(rate(), 3).expect("a limit").into()),
        Limit::new("window", Attempts::new(FixedWindow::new(rate()).expect("a limit")).into()),
        Limit::new("list", Attempts::new(WindowLog::new(rate()).expect("a limit")).into()),
        Limit::new("log", Attempts::new(SlidingLog::new(rate()).expect("a limit")).into()),
    ]
    .map(|limit| limit.expect("a name"))
}

fn tell(server: &RedisServer, words: &[&str]) -> RespValue {
    server.command(words).expect("it is up").ok().expect("done")
}

/// Stores a value of this type that no limit writes.
fn spoil(server: &RedisServer, key: &str, storage: &str) {
    match storage {
        "string" => tell(server, &["SET", key, "nonsense"]),
        "list" => tell(server, &["RPUSH", key, "nonsense"]),
        "zset" => tell(server, &["ZADD", key, "1", "nonsense"]),
        field => tell(server, &["HSET", key, field, "nonsense"]),
    };
}

fn dump(server: &RedisServer, key: &str) -> Option<RespValue> {
    Some(tell(server, &["DUMP", key])).filter(|dumped| *dumped != RespValue::Nil)
}

/// The store in each mode that can decide the limit, the key of its state, and the type of its value
/// there.
fn places(
    store: &RedisStore,
    limit: &Limit<Policy>,
) -> Vec<(Box<dyn DynStore<Policy>>, String, &'static str)> {
    let (cas, multi) =
        (store.in_mode::<ratelimit_redis::Cas>(), store.in_mode::<ratelimit_redis::Multi>());
    let in_lua = match limit.name() {
        "list" => "list",
        "log" => "zset",
        "bucket" => "bucket",
        _ => "window",
    };
    let in_multi = match limit.name() {
        "list" => "list",
        "log" => "zset",
        _ => "17",
    };
    let mut places: Vec<(Box<dyn DynStore<Policy>>, _, _)> = vec![
        (Box::new(store.clone()), store.key(limit, "a"), in_lua),
        (Box::new(cas.clone()), cas.key(limit, "a"), "string"),
    ];
    if let Some(key) = multi.key(limit, "a") {
        places.push((Box::new(multi), key, in_multi));
    }
    places
}

fn corrupt(result: Result<impl Sized, impl StoreError>, says: &str) {
    let Err(error) = result else { panic!("it is corrupt") };
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains(says), "{error}");
}

const LEFT: &str = "has not been removed";
const REMOVED: &str = "has been removed";

async fn a_peek_leaves_a_foreign_value_and_a_write_removes_it(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&url(&server, client)).await.expect("it is up");
    for limit in &limits() {
        for (store, key, storage) in places(&store, limit) {
            let check = Check { limit, key: "a", cost: 1 };
            spoil(&server, &key, storage);
            let before = dump(&server, &key).expect("spoilt");
            for _ in 0..2 {
                corrupt(store.apply(&Batch::one(&check).op(Op::Peek)).await, LEFT);
                assert_eq!(dump(&server, &key), Some(before.clone()), "{}: {key}", limit.name());
            }
            corrupt(store.apply(&Batch::one(&check)).await, REMOVED);
            let verdict = store.apply(&Batch::one(&check)).await.expect("healed");
            assert_eq!(verdict.remaining(), 2, "{}: {key}", limit.name());
        }
    }
}

async fn reading_a_stored_state_never_changes_it(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&url(&server, client)).await.expect("it is up");
    let multi = store.in_mode::<ratelimit_redis::Multi>();
    for limit in &limits()[1..] {
        let key = multi.key(limit, "a").expect("native");
        spoil(
            &server,
            &key,
            match limit.name() {
                "list" => "list",
                "log" => "zset",
                _ => "17",
            },
        );
        let before = dump(&server, &key).expect("spoilt");
        corrupt(multi.state(limit, "a").await, LEFT);
        assert_eq!(dump(&server, &key), Some(before), "{key}");
    }
}

async fn a_peek_leaves_a_foreign_reservation(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&url(&server, client)).await.expect("it is up");
    let cas = store.in_mode::<ratelimit_redis::Cas>();
    let limit = &limits()[0];
    let check = Check { limit, key: "a", cost: 1 };
    let peek = Batch::one(&check).op(Op::Peek).id(ID);
    let (reservation, of_cas) =
        (store.reservation_key(limit, "a", ID), cas.reservation_key(limit, "a", ID));
    for key in [&reservation, &of_cas] {
        spoil(&server, key, "string");
    }
    corrupt(store.apply(&peek).await, LEFT);
    corrupt(cas.apply(&peek).await, LEFT);
    for key in [&reservation, &of_cas] {
        assert!(dump(&server, key).is_some(), "{key}");
    }
}

/// A store that takes the server for a cluster, so each key lies in a slot of its own.
async fn split(
    server: &RedisServer,
    client: Client,
) -> RedisStore<ratelimit_redis::Lua, Arc<Meddled>> {
    let connection = RedisConnection::open(&url(server, client), DEADLINE).await.expect("it is up");
    let connection = Arc::new(Meddled::new(connection).clustered());
    RedisStore::builder().over(connection).expect("a prefix")
}

async fn across_slots_a_question_leaves_a_foreign_value_and_the_operation_removes_it(
    client: Client,
) {
    let server = RedisServer::start().expect("redis-server");
    let store = split(&server, client).await;
    let cas = store.in_mode::<ratelimit_redis::Cas>();
    let limit = &limits()[0];
    let checks = ["a", "b"].map(|key| Check { limit, key, cost: 1 });
    let batch = Batch::new(&checks).expect("distinct").id(ID);
    let (settle, peek) = (batch.op(Op::Settle), batch.op(Op::Peek));
    let in_lua = |key| store.reservation_key(limit, key, ID);
    let in_cas = |key| cas.reservation_key(limit, key, ID);

    let _ = store.apply(&batch).await.expect("reservation");
    let reservation = dump(&server, &in_lua("a")).expect("reservation");
    spoil(&server, &in_lua("b"), "string");
    corrupt(store.apply(&peek).await, LEFT);
    assert!(dump(&server, &in_lua("b")).is_some(), "only read");
    // The other slot is not touched.
    corrupt(store.apply(&settle).await, REMOVED);
    assert_eq!(dump(&server, &in_lua("a")), Some(reservation));
    assert_eq!(dump(&server, &in_lua("b")), None);
    let _ = store.apply(&settle).await.expect("healed");

    let _ = cas.apply(&batch).await.expect("reservation");
    let reservation = dump(&server, &in_cas("a")).expect("reservation");
    spoil(&server, &in_cas("b"), "string");
    corrupt(cas.apply(&peek).await, LEFT);
    assert!(dump(&server, &in_cas("b")).is_some(), "only read");
    corrupt(cas.apply(&settle).await, REMOVED);
    assert_eq!(dump(&server, &in_cas("a")), Some(reservation));
    let _ = cas.apply(&settle).await.expect("healed");
}

/// Asking is part of charging: otherwise a corrupt value would deny forever.
async fn across_slots_a_charge_removes_a_foreign_value(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = split(&server, client).await;
    for limit in &limits() {
        let checks = ["a", "b"].map(|key| Check { limit, key, cost: 1 });
        let batch = Batch::new(&checks).expect("distinct");
        let (cas, multi) =
            (store.in_mode::<ratelimit_redis::Cas>(), store.in_mode::<ratelimit_redis::Multi>());
        let in_lua = match limit.name() {
            "list" => "list",
            "log" => "zset",
            name => name,
        };
        spoil(&server, &store.key(limit, "b"), in_lua);
        corrupt(store.apply(&batch.op(Op::Peek)).await, LEFT);
        corrupt(store.apply(&batch).await, REMOVED);
        assert_eq!(store.apply(&batch).await.expect("healed").remaining(), 2);
        spoil(&server, &cas.key(limit, "b"), "string");
        corrupt(cas.apply(&batch.op(Op::Peek)).await, LEFT);
        corrupt(cas.apply(&batch).await, REMOVED);
        assert_eq!(cas.apply(&batch).await.expect("healed").remaining(), 2);
        let Some(key) = multi.key(limit, "b") else { continue };
        spoil(
            &server,
            &key,
            match limit.name() {
                "list" => "list",
                "log" => "zset",
                _ => "17",
            },
        );
        corrupt(multi.apply(&batch.op(Op::Peek)).await, LEFT);
        // Each slot charges an attempt on its own.
        let error = multi.apply(&batch).await.expect_err("spoilt");
        assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
        assert!(error.to_string().contains(REMOVED), "{error}");
        let _ = multi.apply(&batch).await.expect("healed");
    }
}

with_each_client! {
    a_peek_leaves_a_foreign_value_and_a_write_removes_it,
    reading_a_stored_state_never_changes_it,
    a_peek_leaves_a_foreign_reservation,
    across_slots_a_question_leaves_a_foreign_value_and_the_operation_removes_it,
    across_slots_a_charge_removes_a_foreign_value,
}
