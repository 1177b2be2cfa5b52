//! Stores over clients that a program has already, on one server and on a cluster: they decide in every mode, report
//! a lost reply, a deadline and a server's error as connections of the store's own do, and follow slots that move.

#![cfg(all(feature = "cluster-async", feature = "connection-manager", feature = "fred"))]

use std::time::{Duration, Instant};

use fred::clients::{Client, Pool};
use fred::interfaces::ClientLike;
use fred::types::Builder;
use fred::types::config::{ClusterDiscoveryPolicy, Config, ReconnectPolicy, Server, ServerConfig};
use ratelimit_core::{ErrorKind, Op, Policy, Store, StoreError};
use ratelimit_redis::{
    Argument, Cas, Connection, Deadline, IntoConnection, Multi, RedisError, RedisStore, Reply,
    WithoutRetries,
};
use ratelimit_servers::{FaultProxy, RedisCluster, RedisSentinels, RedisServer};
use redis::aio::{ConnectionManager, MultiplexedConnection};
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;

use crate::common::{
    PATIENCE, acquire, apply, attempts, fails, left, number, peek, plain, prefix, seldom, server,
    three_and_no_more, until,
};

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

fn all(ports: &[u16]) -> ServerConfig {
    let hosts = ports.iter().map(|port| Server::new("127.0.0.1", *port)).collect();
    ServerConfig::Clustered { hosts, policy: ClusterDiscoveryPolicy::default() }
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

async fn cluster(ports: &[u16], retries: Option<u32>) -> ClusterConnection {
    let urls = ports.iter().map(|port| format!("redis://127.0.0.1:{port}"));
    let mut builder = ClusterClientBuilder::new(urls).response_timeout(PATIENCE);
    if let Some(retries) = retries {
        builder = builder.retries(retries);
    }
    let client = builder.build().expect("a client");
    client.get_async_connection().await.expect("the cluster is up")
}

macro_rules! serves {
    ($contract:ident: $($name:ident by $connect:expr),+ $(,)?) => {
        mod $contract {
            use super::*;
            $(
                #[tokio::test]
                async fn $name() {
                    super::$contract($connect).await;
                }
            )+
        }
    };
}

serves! {
    one_server:
    multiplexed_connection by multiplexed,
    connection_manager by manager,
    fred_client by async |port| client(one(port)).await,
    fred_pool by async |port| pool(one(port)).await,
}

serves! {
    a_cluster:
    // This client repeats requests: a store over it has to guard against that.
    cluster_connection by async |ports: &[u16]| cluster(ports, None).await,
    cluster_connection_without_retries by async |ports: &[u16]| {
        WithoutRetries(cluster(ports, Some(0)).await)
    },
    fred_client by async |ports: &[u16]| client(all(ports)).await,
    fred_pool by async |ports: &[u16]| pool(all(ports)).await,
}

async fn one_server<I: IntoConnection>(connect: impl AsyncFn(u16) -> I) {
    let mut server = server();
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    decides(connect(server.port()).await, &["alice"]).await;
    let client = connect(proxy.port()).await.into_connection(PATIENCE);
    assert!(!client.is_cluster() && !client.may_repeat());
    errors(&client, 1).await;
    drop(client);
    for pattern in ["INCR", "EXEC"] {
        // A client of its own, since the proxy cuts the connection.
        let client = connect(proxy.port()).await;
        assert_eq!(executed_when_lost(client, pattern, &proxy, &server).await, 1);
    }
    // One more, which may have ended with its connection: another one looks.
    let store = RedisStore::builder().deadline(PATIENCE).over(connect(proxy.port()).await);
    let store = store.expect("a prefix");
    assert_eq!(left(&store, &seldom(), "lost").await, 2);
    proxy.swallow_matching("EVALSHA", 1);
    fails(acquire(&store, &seldom(), "lost").await, ErrorKind::Indeterminate, "");
    assert_eq!(peek(&plain(&server).await, &seldom(), "lost").await, 1, "charged, and once");
    hangs(connect(proxy.port()).await, &[&proxy]).await;

    let builder = RedisStore::builder().deadline(Duration::from_secs(1));
    let store = builder.over(connect(server.port()).await).expect("a prefix");
    let _ = left(&store, &seldom(), "gone").await;
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

async fn a_cluster<I: IntoConnection>(connect: impl AsyncFn(&[u16]) -> I) {
    let cluster = RedisCluster::start_behind_proxies().expect("a cluster");
    let connect = async || connect(&cluster.client_ports()).await;
    let behind = |key: &str| {
        let owner = cluster.master_of(cluster.slot_of(key)).expect("an owner");
        (&cluster.proxies()[owner], &cluster.nodes()[owner])
    };
    // Some keys of each of the three masters.
    decides(connect().await, &["a", "b", "c", "d", "e", "f", "g"]).await;
    let client = connect().await.into_connection(PATIENCE);
    let times = if client.may_repeat() { 2 } else { 1 };
    assert!(client.is_cluster());
    errors(&client, 3).await;
    drop(client);
    for pattern in ["INCR", "EXEC"] {
        let (proxy, node) = behind("n");
        assert_eq!(executed_when_lost(connect().await, pattern, proxy, node).await, times);
    }
    let store = RedisStore::builder().deadline(PATIENCE).over(connect().await).expect("a prefix");
    charged_once_when_lost(&store, behind("{alice}").0, "EVALSHA").await;
    let sets = times == 1 && RedisServer::binaries()[0].contains("valkey");
    let pattern = if sets { "IFEQ" } else { "EVALSHA" };
    charged_once_when_lost(&store.in_mode::<Cas>(), behind("{alice}").0, pattern).await;
    follows(&connect().await.into_connection(PATIENCE), &cluster).await;
    hangs(connect().await, &cluster.proxies().iter().collect::<Vec<_>>()).await;
}

#[tokio::test]
async fn a_refused_connection_is_unavailable_if_the_client_reports_it() {
    let mut server = server();
    let store = RedisStore::builder().deadline(PATIENCE).over(manager(server.port()).await);
    let (store, limit) = (store.expect("a prefix"), seldom());
    assert_eq!(left(&store, &limit, "a").await, 2);
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
    Box::pin(decides(given.clone(), &["alice"])).await;
    let store = RedisStore::builder().over(given).expect("a prefix");
    sentinels.kill_master().expect("another one");
    let _ = until(async || acquire(&store, &seldom(), "bob").await).await;
}

/// Decides in every mode, for each of these keys.
async fn decides<I: IntoConnection>(client: I, keys: &[&str]) {
    let builder = RedisStore::builder().prefix(&prefix()).deadline(PATIENCE);
    let connection = std::sync::Arc::new(client.into_connection(PATIENCE));
    let lua = builder.over(std::sync::Arc::clone(&connection)).expect("a prefix");
    for key in keys {
        three_and_no_more(&lua, &seldom(), key).await;
        three_and_no_more(&lua, &attempts(), key).await;
        three_and_no_more(&lua.in_mode::<Cas>(), &seldom(), key).await;
        let multi = lua.in_mode::<Multi>();
        if connection.may_repeat() {
            let error = acquire(&multi, &attempts(), key).await.expect_err("no guard there");
            assert!(matches!(error, RedisError::MayRepeat), "{error:?}");
        } else {
            three_and_no_more(&multi, &attempts(), key).await;
        }
    }
}

fn patient() -> Deadline {
    Deadline::within(PATIENCE)
}

fn words<const N: usize>(words: [&'static str; N]) -> Vec<Argument<'static>> {
    words.map(Argument::Text).into()
}

async fn incr<C: Connection>(
    client: &C,
    key: &'static str,
    deadline: Deadline,
) -> Result<Reply, RedisError> {
    client.send(key, &words(["INCR", key]), deadline).await
}

/// How often a command, or a transaction of one, is executed when its reply is lost once.
async fn executed_when_lost<I: IntoConnection>(
    client: I,
    pattern: &'static str,
    proxy: &FaultProxy,
    node: &RedisServer,
) -> u64 {
    let client = client.into_connection(PATIENCE);
    let before = node.calls("incr").expect("it is up");
    let lost = proxy.swallowed();
    proxy.swallow_matching(pattern, 1);
    let answer = match pattern {
        "EXEC" => client.transaction("n", &[words(["INCR", "n"])], patient()).await.map(drop),
        _ => incr(&client, "n", patient()).await.map(drop),
    };
    if client.may_repeat() {
        answer.expect("the client has sent it again");
    } else {
        fails(answer, ErrorKind::Indeterminate, "");
    }
    assert_eq!(proxy.swallowed(), lost + 1);
    assert!(number(node, &["EXISTS", "n"]) == 1);
    node.calls("incr").expect("it is up") - before
}

/// A charge whose reply is lost is made once, whatever the client does about it.
async fn charged_once_when_lost<S: Store<Policy, Error = RedisError>>(
    store: &S,
    proxy: &FaultProxy,
    pattern: &str,
) {
    let limit = seldom();
    // The store first learns which commands the server lacks, and the server learns the script.
    assert_eq!(left(store, &limit, "alice").await, 2);
    let refund = apply(store, &[(&limit, "alice", 1)], Op::Refund, None).await;
    assert_eq!(refund.expect("gives back").remaining(), 3);
    assert_eq!(left(store, &limit, "alice").await, 2);
    let lost = proxy.swallowed();
    proxy.swallow_matching(pattern, 1);
    match acquire(store, &limit, "alice").await {
        Ok(answer) => assert_eq!(answer.remaining(), 1, "the answer that was given first"),
        error => drop(fails(error, ErrorKind::Indeterminate, "")),
    }
    assert_eq!(proxy.swallowed(), lost + 1);
    assert_eq!(peek(store, &limit, "alice").await, 1);
}

/// No reply arrives, and a request ends at the store's deadline.
async fn hangs<I: IntoConnection>(client: I, proxies: &[&FaultProxy]) {
    let deadline = Duration::from_millis(300);
    let client = client.into_connection(deadline);
    incr(&client, "n", patient()).await.expect("executed");
    for proxy in proxies {
        proxy.hang(true);
    }
    let begun = Instant::now();
    let error = incr(&client, "n", Deadline::within(deadline)).await.expect_err("it hangs");
    assert!((deadline / 2..PATIENCE).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    assert!(matches!(error, RedisError::TimedOut { .. }), "{error:?}");
    let increment = [words(["INCR", "n"])];
    let error = client.transaction("n", &increment, Deadline::within(deadline)).await;
    let error = error.expect_err("it hangs");
    assert!(is_gone(&error) && begun.elapsed() < PATIENCE, "{error:?}");
}

/// A server's error keeps its code, and each of so many masters answers for itself.
async fn errors<C: Connection>(client: &C, masters: usize) {
    const KEY: &str = "{e}text";
    let code = |error: RedisError| match error {
        RedisError::Server { code, .. } => code,
        other => panic!("not a server's error: {other:?}"),
    };
    client.send(KEY, &words(["SET", KEY, "x"]), patient()).await.expect("written");
    let unknown = words(["EVALSHA", "0123456789012345678901234567890123456789", "0"]);
    for (command, due) in [(words(["LPUSH", KEY, "y"]), "WRONGTYPE"), (unknown, "NOSCRIPT")] {
        let error = client.send(KEY, &command, patient()).await.expect_err(due);
        assert_eq!(code(error), due);
    }
    for (commands, due) in [
        ([words(["SET", KEY, "y"]), words(["NONSENSE"])], "ERR"),
        ([words(["LPUSH", KEY, "y"]), words(["SET", KEY, "z"])], "WRONGTYPE"),
    ] {
        let error = client.transaction(KEY, &commands, patient()).await.expect_err(due);
        assert_eq!(code(error), due);
    }
    let read = client.transaction(KEY, &[words(["GET", KEY])], patient()).await;
    assert_eq!(read.expect("read"), [Reply::Text(b"z".to_vec())]);
    let mut each = client.send_to_each(&[Argument::Text("DBSIZE")], patient()).await;
    assert!(each.iter().all(|(_, answer)| answer.is_ok()), "{each:?}");
    each.sort_by(|(one, _), (other, _)| one.cmp(other));
    each.dedup_by(|(one, _), (other, _)| one == other);
    assert_eq!(each.len(), masters, "{each:?}");
}

/// Requests are executed once each while their slot moves.
async fn follows<C: Connection>(client: &C, cluster: &RedisCluster) {
    let slot = cluster.slot_of("{s}");
    let both = |number| async move {
        let answer = incr(client, "{s}a", patient()).await;
        assert_eq!(answer.expect("executed"), Reply::Integer(number));
        let answer = client.transaction("{s}b", &[words(["INCR", "{s}b"])], patient()).await;
        assert_eq!(answer.expect("executed"), [Reply::Integer(number)]);
    };
    both(1).await;
    let to = (cluster.master_of(slot).expect("an owner") + 1) % 3;
    cluster.begin_migration(slot, to).expect("begun");
    // Still on the old server.
    both(2).await;
    for key in ["{s}a", "{s}b"] {
        cluster.move_key(key).expect("moved");
    }
    // ASK.
    both(3).await;
    both(4).await;
    cluster.finish_migration(slot, to).expect("finished");
    // MOVED.
    both(5).await;
    cluster.migrate(slot, (to + 1) % 3).expect("moved");
    both(6).await;
}
