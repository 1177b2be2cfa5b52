//! Every kind of connection decides in every mode, executes a request once, and reports a lost
//! reply, a deadline and a server's error: those of the store's own, and clients that a program has
//! already.

#![cfg(all(feature = "connection-manager", feature = "fred"))]

use fred::clients::{Client, Pool};
use fred::interfaces::ClientLike;
use fred::types::Builder;
use fred::types::config::{ClusterDiscoveryPolicy, Config, ReconnectPolicy, Server, ServerConfig};
use ratelimit_redis::IntoConnection;
use redis::aio::{ConnectionManager, MultiplexedConnection};

use crate::common::prelude::*;

async fn multiplexed(port: u16) -> MultiplexedConnection {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    let connected = client.get_multiplexed_async_connection_with_config(&config).await;
    connected.expect("the server is up")
}

async fn manager(port: u16) -> ConnectionManager {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
    // It reports that no server listened once it has given up connecting: with no retries, at once.
    let config = redis::aio::ConnectionManagerConfig::new();
    let config = config.set_response_timeout(None).set_number_of_retries(0);
    client.get_connection_manager_with_config(config).await.expect("the server is up")
}

/// With the default retries and a reconnect policy.
fn fred(server: ServerConfig) -> Builder {
    let mut builder = Builder::from_config(Config { server, ..Config::default() });
    builder.set_policy(ReconnectPolicy::new_constant(0, 10));
    builder
}

fn one(port: u16) -> ServerConfig {
    ServerConfig::Centralized { server: Server::new("127.0.0.1", port) }
}

async fn client(server: ServerConfig) -> Client {
    let client = fred(server).build().expect("a client");
    client.init().await.expect("the server is up");
    client
}

async fn pool(server: ServerConfig) -> Pool {
    let pool = fred(server).build_pool(2).expect("a pool");
    pool.init().await.expect("the server is up");
    pool
}

async fn the_stores_own_connection_serves(client: ratelimit_redis::Client) {
    one_server(async |port| {
        let url = with_client(&format!("redis://127.0.0.1:{port}"), client);
        RedisConnection::open(&url, PATIENCE).await.expect("the server is up")
    })
    .await;
}

with_each_client!(the_stores_own_connection_serves);

#[tokio::test]
async fn a_multiplexed_connection_serves() {
    one_server(multiplexed).await;
}

#[tokio::test]
async fn a_connection_manager_serves() {
    one_server(manager).await;
}

#[tokio::test]
async fn a_fred_client_serves() {
    one_server(async |port| client(one(port)).await).await;
}

#[tokio::test]
async fn a_fred_pool_serves() {
    one_server(async |port| pool(one(port)).await).await;
}

/// What a proxy does to so many requests of a kind.
type Loses = fn(&FaultProxy, &str, usize);

async fn one_server<I: IntoConnection>(connect: impl AsyncFn(u16) -> I) {
    let (server, proxy) = server_behind_proxy();
    decides(connect(server.port()).await).await;
    let client = connect(proxy.port()).await.into_connection().expect("one server");
    assert!(!client.is_cluster());
    errors(&client).await;
    drop(client);
    let counts = connect(proxy.port()).await.into_connection().expect("one server");
    proxy.swallow_matching("EXEC", 1);
    let counted = counts.transaction("n", &[words(["INCR", "n"])], patient()).await;
    fails(counted, ErrorKind::Indeterminate, "");
    assert_eq!(server.calls("incr").expect("it is up"), 1, "executed, and once");
    // A request that never arrived is not sent again either: the client cannot know that.
    let faults: [(Loses, _, _); 2] =
        [(FaultProxy::swallow_matching, "lost", 1), (FaultProxy::cut_matching, "cut", 2)];
    for (loses, key, due) in faults {
        // A client of its own, since the proxy cuts the connection, and another one looks.
        let store = RedisStore::builder().deadline(PATIENCE).over(connect(proxy.port()).await);
        let store = store.expect("a prefix");
        assert_eq!(remaining_after_acquire(&store, &seldom(), key).await, 2);
        loses(&proxy, "EVALSHA", 1);
        fails(acquire(&store, &seldom(), key).await, ErrorKind::Indeterminate, "");
        assert_eq!(peek(&plain(&server).await, &seldom(), key).await, due, "{key}: once, or never");
    }
    assert_eq!((proxy.swallowed(), proxy.requests_cut()), (2, 1));
    hangs(connect(proxy.port()).await, &proxy).await;

    let builder = RedisStore::builder().deadline(Duration::from_secs(1));
    let store = builder.over(connect(server.port()).await).expect("a prefix");
    let _ = remaining_after_acquire(&store, &seldom(), "gone").await;
    server.stop();
    for _ in 0..3 {
        let begun = Instant::now();
        let error = acquire(&store, &seldom(), "gone").await.expect_err("it is gone");
        // The client does not say whether it had sent the request when the connection ended.
        assert!(is_gone(&error) && begun.elapsed() < PATIENCE, "{error:?}");
    }
    server.restart().expect("redis-server");
}

fn is_gone(error: &RedisError) -> bool {
    matches!(error.kind(), ErrorKind::Indeterminate | ErrorKind::Unavailable)
}

#[tokio::test]
async fn a_refused_connection_is_unavailable_if_the_client_reports_it() {
    let server = server();
    let store = RedisStore::builder().deadline(PATIENCE).over(manager(server.port()).await);
    let (store, limit) = (store.expect("a prefix"), seldom());
    assert_eq!(remaining_after_acquire(&store, &limit, "a").await, 2);
    server.stop();
    let error = acquire(&store, &limit, "a").await.expect_err("it is gone");
    assert!(is_gone(&error), "{error}");
    for _ in 0..3 {
        fails(acquire(&store, &limit, "a").await, ErrorKind::Unavailable, "");
    }
    server.restart().expect("redis-server");
    let _ = until(async || acquire(&store, &limit, "a").await).await;
}

#[tokio::test]
async fn a_fred_client_by_sentinels_decides_in_every_mode_and_follows_the_master() {
    let sentinels = RedisSentinels::start().expect("sentinels");
    let hosts = sentinels.ports().iter().map(|port| Server::new("127.0.0.1", *port)).collect();
    let service_name = sentinels.service().to_owned();
    let given = client(ServerConfig::Sentinel { hosts, service_name }).await;
    Box::pin(decides(given.clone())).await;
    let store = RedisStore::builder().over(given).expect("a prefix");
    sentinels.kill_master().expect("another one");
    let _ = until(async || acquire(&store, &seldom(), "bob").await).await;
}

#[tokio::test]
async fn a_fred_client_of_a_cluster_is_refused_with_what_to_give() {
    let (hosts, policy) = (vec![Server::new("127.0.0.1", 1)], ClusterDiscoveryPolicy::default());
    let given = fred(ServerConfig::Clustered { hosts, policy });
    let client = RedisStore::builder().over(given.build().expect("a client"));
    fails(client, ErrorKind::Config, "redis-cluster://");
    let pool = RedisStore::builder().over(given.build_pool(2).expect("a pool"));
    fails(pool, ErrorKind::Config, "redis-cluster://");
}

/// Decides in every mode.
async fn decides<I: IntoConnection>(client: I) {
    let builder = RedisStore::builder().prefix(&prefix()).deadline(PATIENCE);
    let lua = builder.over(client).expect("a prefix");
    three_and_no_more(&lua, &seldom(), "alice").await;
    three_and_no_more(&lua, &attempts(), "alice").await;
    three_and_no_more(&lua.in_mode::<Cas>(), &seldom(), "alice").await;
    three_and_no_more(&lua.in_mode::<Multi>(), &attempts(), "alice").await;
}

fn patient() -> Deadline {
    Deadline::within(PATIENCE)
}

fn words<const N: usize>(words: [&'static str; N]) -> Vec<Argument<'static>> {
    words.map(Argument::Text).into()
}

/// No reply arrives, and a request ends at the store's deadline.
async fn hangs<I: IntoConnection>(client: I, proxy: &FaultProxy) {
    let deadline = Duration::from_millis(300);
    let client = client.into_connection().expect("one server");
    let increment = [words(["INCR", "n"])];
    client.send("n", &increment[0], patient()).await.expect("executed");
    proxy.hang(true);
    let begun = Instant::now();
    let error = client.send("n", &increment[0], Deadline::within(deadline)).await;
    let error = error.expect_err("it hangs");
    assert!((deadline / 2..PATIENCE).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    assert!(matches!(error, RedisError::TimedOut { .. }), "{error:?}");
    let error = client.transaction("n", &increment, Deadline::within(deadline)).await;
    let error = error.expect_err("it hangs");
    assert!(is_gone(&error) && begun.elapsed() < PATIENCE, "{error:?}");
}

/// A server's error keeps its code.
async fn errors<C: Connection>(client: &C) {
    const KEY: &str = "text";
    fn code(error: RedisError) -> String {
        match error {
            RedisError::Server { code, .. } => code,
            RedisError::InPart(error) => format!("in part: {}", code(*error)),
            other => panic!("not a server's error: {other:?}"),
        }
    }
    client.send(KEY, &words(["SET", KEY, "x"]), patient()).await.expect("written");
    let unknown = words(["EVALSHA", "0123456789012345678901234567890123456789", "0"]);
    for (command, due) in [(words(["LPUSH", KEY, "y"]), "WRONGTYPE"), (unknown, "NOSCRIPT")] {
        let error = client.send(KEY, &command, patient()).await.expect_err(due);
        assert_eq!(code(error), due);
    }
    for (commands, due) in [
        ([words(["SET", KEY, "y"]), words(["NONSENSE"])], "ERR"),
        ([words(["LPUSH", KEY, "y"]), words(["SET", KEY, "z"])], "in part: WRONGTYPE"),
    ] {
        let error = client.transaction(KEY, &commands, patient()).await.expect_err(due);
        assert_eq!(code(error), due);
    }
    let read = client.transaction(KEY, &[words(["GET", KEY])], patient()).await;
    assert_eq!(read.expect("read"), [Reply::Text(b"z".to_vec())]);
    let each = client.send_to_each(&[Argument::Text("DBSIZE")], patient()).await;
    assert!(matches!(&each[..], [(_, Ok(_))]), "{each:?}");
}
