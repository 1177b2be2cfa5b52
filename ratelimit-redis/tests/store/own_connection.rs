//! Stores over external clients: in every mode, on one server and on a cluster, and what happens to a
//! request whose reply is lost.

#![cfg(all(feature = "cluster-async", feature = "connection-manager", feature = "fred"))]

use std::time::{Duration, Instant};

use fred::clients::{Client, Pool};
use fred::interfaces::ClientLike;
use fred::types::Builder;
use fred::types::config::{ClusterDiscoveryPolicy, Config, ReconnectPolicy, Server, ServerConfig};
use ratelimit_core::{
    Attempts, Batch, Check, ErrorKind, Gcra, Limit, Op, Policy, SlidingLog, Store, StoreError,
};
use ratelimit_redis::{
    Argument, Connection, Deadline, IntoConnection, Mode, RedisError, RedisStore, Reply,
    WithoutRetries,
};
use ratelimit_testkit::{FaultProxy, RedisCluster, RedisSentinels, RedisServer};
use redis::aio::{ConnectionManager, MultiplexedConnection};
use redis::cluster::ClusterClientBuilder;
use redis::cluster_async::ClusterConnection;

/// Longer than any step here takes, unless it hangs.
const DEADLINE: Duration = Duration::from_secs(20);

async fn multiplexed(port: u16) -> MultiplexedConnection {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
    let config = redis::AsyncConnectionConfig::new().set_response_timeout(None);
    let connected = client.get_multiplexed_async_connection_with_config(&config).await;
    connected.expect("the server is up")
}

async fn manager(port: u16) -> ConnectionManager {
    let client = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
    let config = redis::aio::ConnectionManagerConfig::new().set_response_timeout(None);
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

async fn client_of_one(port: u16) -> Client {
    client(one(port)).await
}

async fn pool_of_one(port: u16) -> Pool {
    pool(one(port)).await
}

async fn client_of_all(ports: &[u16]) -> Client {
    client(all(ports)).await
}

async fn pool_of_all(ports: &[u16]) -> Pool {
    pool(all(ports)).await
}

async fn cluster(ports: &[u16], retries: Option<u32>) -> ClusterConnection {
    let urls = ports.iter().map(|port| format!("redis://127.0.0.1:{port}"));
    let builder = ClusterClientBuilder::new(urls).response_timeout(DEADLINE);
    let builder = match retries {
        Some(retries) => builder.retries(retries),
        None => builder,
    };
    let client = builder.build().expect("a client");
    client.get_async_connection().await.expect("the cluster is up")
}

async fn with_retries(ports: &[u16]) -> ClusterConnection {
    cluster(ports, None).await
}

async fn without_retries(ports: &[u16]) -> WithoutRetries<ClusterConnection> {
    WithoutRetries(cluster(ports, Some(0)).await)
}

/// Writes a module of cases for each of these clients to one server.
macro_rules! on_one_server {
    ($($name:ident: $connect:expr),* $(,)?) => {
        mod on_one_server {
            $(mod $name {
                use super::super::*;

                #[tokio::test]
                async fn it_decides_in_every_mode() {
                    let server = RedisServer::start().expect("redis-server");
                    decides($connect(server.port()).await, &["alice"], false).await;
                }

                #[tokio::test]
                async fn a_request_with_a_lost_reply_is_executed_once() {
                    for what in [What::Command, What::Transaction] {
                        let server = RedisServer::start().expect("redis-server");
                        let proxy = FaultProxy::start(server.port()).expect("a proxy");
                        let client = $connect(proxy.port()).await;
                        let executed =
                            executed_when_lost(client, what, &proxy, server.port()).await;
                        assert_eq!(executed, 1);
                    }
                }

                #[tokio::test]
                async fn a_decision_with_a_lost_reply_is_charged_once_and_reported_as_indeterminate() {
                    let server = RedisServer::start().expect("redis-server");
                    let proxy = FaultProxy::start(server.port()).expect("a proxy");
                    let builder = RedisStore::builder().deadline(DEADLINE);
                    let store = builder.over($connect(proxy.port()).await).expect("a prefix");
                    assert_eq!(acquire(&store, &hourly(), "a").await.expect("decides"), Some(2));
                    proxy.swallow_matching("EVALSHA", 1);
                    let error = acquire(&store, &hourly(), "a").await.expect_err("no answer");
                    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
                    let aside = RedisStore::connect(&server.url()).await.expect("it is up");
                    assert_eq!(acquire(&aside, &hourly(), "a").await.expect("decides"), Some(0));
                }

                #[tokio::test]
                async fn the_deadline_of_the_store_holds() {
                    let server = RedisServer::start().expect("redis-server");
                    let proxy = FaultProxy::start(server.port()).expect("a proxy");
                    let client = $connect(proxy.port()).await;
                    hangs(client, &[&proxy]).await;
                }

                #[tokio::test]
                async fn an_error_of_the_server_keeps_its_code() {
                    let server = RedisServer::start().expect("redis-server");
                    let client = $connect(server.port()).await.into_connection(DEADLINE);
                    errors(&client).await;
                    let each = client.send_to_each(&[Argument::Text("PING")], patient()).await;
                    assert_eq!(each.len(), 1);
                    assert_eq!(each[0].1.as_ref().ok(), Some(&Reply::Text(b"PONG".to_vec())));
                    assert!(!client.is_cluster() && !client.may_repeat());
                }

                #[tokio::test]
                async fn a_server_that_has_gone_is_an_error_soon() {
                    let mut server = RedisServer::start().expect("redis-server");
                    let deadline = Duration::from_secs(1);
                    let client = $connect(server.port()).await.into_connection(deadline);
                    incr(&client, "n").await.expect("executed");
                    server.stop();
                    let begun = Instant::now();
                    for _ in 0..3 {
                        let error = incr_within(deadline, &client, "n").await;
                        let error = error.expect_err("it is gone");
                        let kind = error.kind();
                        assert!(
                            matches!(kind, ErrorKind::Indeterminate | ErrorKind::Unavailable),
                            "{error:?}"
                        );
                    }
                    assert!(begun.elapsed() < DEADLINE);
                }
            })*
        }
    };
}

on_one_server! {
    multiplexed_connection: multiplexed,
    connection_manager: manager,
    fred_client: client_of_one,
    fred_pool: pool_of_one,
}

/// Writes a module of cases for each of these clients to a cluster, with the number of times that the
/// client executes a request whose reply is lost.
macro_rules! on_a_cluster {
    ($($name:ident: $connect:expr, $executed:literal),* $(,)?) => {
        mod on_a_cluster {
            $(mod $name {
                use super::super::*;

                #[tokio::test]
                async fn it_decides_in_every_mode() {
                    let cluster = RedisCluster::shared().expect("a cluster");
                    let client = $connect(&cluster.client_ports()).await;
                    // Some keys of each of the three masters.
                    decides(client, &["a", "b", "c", "d", "e", "f", "g"], true).await;
                }

                #[tokio::test]
                async fn a_request_with_a_lost_reply_is_executed_as_often_as_documented() {
                    for what in [What::Command, What::Transaction] {
                        let cluster = RedisCluster::start_behind_proxies().expect("a cluster");
                        let client = $connect(&cluster.client_ports()).await;
                        let owner = cluster.master_of(cluster.slot_of("n")).expect("an owner");
                        let proxy = &cluster.proxies()[owner];
                        let port = cluster.nodes()[owner].port();
                        let executed = executed_when_lost(client, what, proxy, port).await;
                        assert_eq!(executed, $executed);
                    }
                }

                #[tokio::test]
                async fn a_charge_with_a_lost_reply_is_made_once() {
                    let cluster = RedisCluster::start_behind_proxies().expect("a cluster");
                    let client = $connect(&cluster.client_ports()).await;
                    let store = RedisStore::builder().over(client).expect("a prefix");
                    let owner = cluster.master_of(cluster.slot_of("{alice}")).expect("an owner");
                    let proxy = &cluster.proxies()[owner];
                    charged_once_when_lost(&store, proxy, "EVALSHA").await;
                    let cas = store.in_mode::<ratelimit_redis::Cas>();
                    let sets = $executed == 1 && RedisServer::binaries()[0].contains("valkey");
                    let pattern = if sets { "IFEQ" } else { "EVALSHA" };
                    charged_once_when_lost(&cas, proxy, pattern).await;
                }

                #[tokio::test]
                async fn migrating_slots_are_followed() {
                    let cluster = RedisCluster::start().expect("a cluster");
                    let client = $connect(&cluster.client_ports()).await.into_connection(DEADLINE);
                    follows(&client, &cluster).await;
                }

                #[tokio::test]
                async fn the_deadline_of_the_store_holds() {
                    let cluster = RedisCluster::start_behind_proxies().expect("a cluster");
                    let client = $connect(&cluster.client_ports()).await;
                    hangs(client, &cluster.proxies().iter().collect::<Vec<_>>()).await;
                }

                #[tokio::test]
                async fn an_error_of_a_server_keeps_its_code() {
                    let cluster = RedisCluster::shared().expect("a cluster");
                    let client = $connect(&cluster.client_ports()).await.into_connection(DEADLINE);
                    errors(&client).await;
                    let mut each = client.send_to_each(&[Argument::Text("DBSIZE")], patient()).await;
                    assert!(each.iter().all(|(_, answer)| answer.is_ok()), "{each:?}");
                    each.sort_by(|(a, _), (b, _)| a.cmp(b));
                    each.dedup_by(|(a, _), (b, _)| a == b);
                    assert_eq!(each.len(), 3, "{each:?}");
                    assert!(client.is_cluster());
                    assert_eq!(client.may_repeat(), $executed > 1);
                }
            })*
        }
    };
}

on_a_cluster! {
    // This client repeats requests: a store over it has to guard against that.
    cluster_connection: with_retries, 2,
    cluster_connection_without_retries: without_retries, 1,
    fred_client: client_of_all, 1,
    fred_pool: pool_of_all, 1,
}

/// The manager reports that no server listened once it has given up connecting: with no retries, at
/// once.
#[tokio::test]
async fn a_refused_connection_is_unavailable_if_the_client_reports_it() {
    let mut server = RedisServer::start().expect("redis-server");
    let client = redis::Client::open(server.url()).expect("a URL");
    let config = redis::aio::ConnectionManagerConfig::new().set_number_of_retries(0);
    let manager = client.get_connection_manager_with_config(config).await.expect("it is up");
    let store = RedisStore::builder().deadline(DEADLINE).over(manager).expect("a prefix");
    assert_eq!(acquire(&store, &hourly(), "a").await.expect("decides"), Some(2));
    server.stop();
    let error = acquire(&store, &hourly(), "a").await.expect_err("it is gone");
    // The client does not say whether it had sent the request when the connection ended.
    assert!(matches!(error.kind(), ErrorKind::Indeterminate | ErrorKind::Unavailable), "{error}");
    for _ in 0..3 {
        let error = acquire(&store, &hourly(), "a").await.expect_err("no server listens");
        assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    }
    server.restart().expect("redis-server");
    let again = async { while acquire(&store, &hourly(), "a").await.is_err() {} };
    tokio::time::timeout(DEADLINE, again).await.expect("it is back");
}

#[tokio::test]
async fn a_fred_client_by_sentinels_decides_in_every_mode_and_follows_the_master() {
    let sentinels = RedisSentinels::start().expect("sentinels");
    let hosts = sentinels.ports().iter().map(|port| Server::new("127.0.0.1", *port)).collect();
    let url = sentinels.url();
    let name = url.rsplit('/').next().expect("a name").to_owned();
    let given = client(ServerConfig::Sentinel { hosts, service_name: name }).await;
    Box::pin(decides(given.clone(), &["alice"], false)).await;
    let store = RedisStore::builder().over(given).expect("a prefix");
    sentinels.kill_master().expect("another one");
    let again = async {
        while acquire(&store, &hourly(), "bob").await.is_err() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(DEADLINE, again).await.expect("it finds the new master");
}

fn hourly() -> Limit<Policy> {
    let gcra = Gcra::new("3/h".parse().expect("a rate"), 3).expect("a limit");
    Limit::new("hourly", gcra.into()).expect("a name")
}

/// A limit that every mode can decide.
fn attempts() -> Limit<Policy> {
    let log = SlidingLog::new("3/h".parse().expect("a rate")).expect("a limit");
    Limit::new("log", Attempts::new(log).into()).expect("a name")
}

/// The remaining cost, if the request was admitted.
async fn acquire<S: Store<Policy>>(
    store: &S,
    limit: &Limit<Policy>,
    key: &str,
) -> Result<Option<u64>, S::Error> {
    let verdict = store.apply(&Batch::one(&Check { limit, key, cost: 1 })).await?;
    Ok(verdict.allowed().then(|| verdict.remaining()))
}

/// Decides in every mode, for each of these keys.
async fn decides<I: IntoConnection>(client: I, keys: &[&str], is_cluster: bool) {
    let connection = std::sync::Arc::new(client.into_connection(DEADLINE));
    assert_eq!(connection.is_cluster(), is_cluster);
    let may_repeat = connection.may_repeat();
    // Another prefix per client, on servers that they share.
    let prefix = format!("{}-{}", std::any::type_name::<I>().replace(['{', '}'], ""), is_cluster);
    let builder = RedisStore::builder().prefix(&prefix);
    let lua = builder.over(connection).expect("a prefix");
    for key in keys {
        admits_three(&lua, &hourly(), key).await;
        admits_three(&lua, &attempts(), key).await;
        admits_three(&lua.in_mode::<ratelimit_redis::Cas>(), &hourly(), key).await;
        let multi = lua.in_mode::<ratelimit_redis::Multi>();
        if may_repeat {
            let error = acquire(&multi, &attempts(), key).await.expect_err("no guard there");
            assert!(matches!(error, RedisError::MayRepeat), "{error:?}");
        } else {
            admits_three(&multi, &attempts(), key).await;
        }
    }
}

async fn admits_three<M: Mode, C: Connection>(
    store: &RedisStore<M, C>,
    limit: &Limit<Policy>,
    key: &str,
) where
    RedisStore<M, C>: Store<Policy, Error = RedisError>,
{
    for left in [Some(2), Some(1), Some(0), None] {
        assert_eq!(acquire(store, limit, key).await.expect(M::NAME), left, "{} {key}", M::NAME);
    }
}

async fn incr<C: Connection>(client: &C, key: &str) -> Result<Reply, RedisError> {
    incr_within(DEADLINE, client, key).await
}

async fn incr_within<C: Connection>(
    deadline: Duration,
    client: &C,
    key: &str,
) -> Result<Reply, RedisError> {
    let words = [Argument::Text("INCR"), Argument::Text(key)];
    client.send(key, &words, Deadline::within(deadline)).await
}

fn patient() -> Deadline {
    Deadline::within(DEADLINE)
}

/// How often a command, or a transaction of one, is executed when its reply is lost once.
async fn executed_when_lost<I: IntoConnection>(
    client: I,
    what: What,
    proxy: &FaultProxy,
    port: u16,
) -> u64 {
    let client = client.into_connection(DEADLINE);
    let (key, pattern) = ("n", if what == What::Command { "INCR" } else { "EXEC" });
    proxy.swallow_matching(pattern, 1);
    let answer = match what {
        What::Command => incr(&client, key).await.map(drop),
        What::Transaction => {
            let increment = [vec![Argument::Text("INCR"), Argument::Text(key)]];
            client.transaction(key, &increment, patient()).await.map(drop)
        }
    };
    if client.may_repeat() {
        answer.expect("the client has sent it again");
    } else {
        let error = answer.expect_err("the answer is lost");
        assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
    }
    assert_eq!(proxy.swallowed(), 1);
    let aside = redis::Client::open(format!("redis://127.0.0.1:{port}")).expect("a URL");
    let mut aside = aside.get_connection().expect("the server is up");
    redis::cmd("GET").arg(key).query(&mut aside).expect("a number")
}

/// A charge whose reply is lost is made once, whatever the client does about it; so is a refund.
async fn charged_once_when_lost<S: Store<Policy, Error = RedisError>>(
    store: &S,
    proxy: &FaultProxy,
    pattern: &str,
) {
    let limit = hourly();
    let check = Check { limit: &limit, key: "alice", cost: 1 };
    let refund = Batch::one(&check).op(Op::Refund);
    // The store first learns which commands the server lacks, and the server learns the script.
    assert_eq!(acquire(store, &limit, "alice").await.expect("decides"), Some(2));
    assert_eq!(store.apply(&refund).await.expect("gives back").remaining(), 3);
    assert_eq!(acquire(store, &limit, "alice").await.expect("decides"), Some(2));
    let lost = proxy.swallowed();
    proxy.swallow_matching(pattern, 1);
    match acquire(store, &limit, "alice").await {
        Ok(answer) => assert_eq!(answer, Some(1), "the answer that was given first"),
        Err(error) => assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}"),
    }
    assert_eq!(proxy.swallowed(), lost + 1);
    let peek = async || {
        let batch = Batch::one(&check).op(Op::Peek);
        store.apply(&batch).await.expect("decides").remaining()
    };
    assert_eq!(peek().await, 0, "what is left of three after the two, if this were one more");
    proxy.swallow_matching(pattern, 1);
    let refunded = store.apply(&Batch::one(&check).op(Op::Refund)).await;
    assert!(
        refunded.is_ok() || refunded.is_err_and(|error| error.kind() == ErrorKind::Indeterminate)
    );
    assert_eq!(peek().await, 1, "one of the two has been given back, once");
}

/// The kind of request.
#[derive(Clone, Copy, PartialEq)]
enum What {
    Command,
    Transaction,
}

/// No reply arrives, and a request ends at the store's deadline.
async fn hangs<I: IntoConnection>(client: I, proxies: &[&FaultProxy]) {
    let deadline = Duration::from_millis(300);
    let client = client.into_connection(deadline);
    incr(&client, "n").await.expect("executed");
    for proxy in proxies {
        proxy.hang(true);
    }
    let begun = Instant::now();
    let error = incr_within(deadline, &client, "n").await.expect_err("it hangs");
    assert!((deadline / 2..DEADLINE).contains(&begun.elapsed()), "{:?}", begun.elapsed());
    assert!(matches!(error, RedisError::TimedOut { .. }), "{error:?}");
    let increment = [vec![Argument::Text("INCR"), Argument::Text("n")]];
    let error = client.transaction("n", &increment, Deadline::within(deadline)).await;
    let error = error.expect_err("it hangs");
    assert!(begun.elapsed() < DEADLINE);
    assert!(matches!(error.kind(), ErrorKind::Indeterminate | ErrorKind::Unavailable), "{error:?}");
}

async fn errors<C: Connection>(client: &C) {
    let words =
        |words: &[&'static str]| words.iter().copied().map(Argument::Text).collect::<Vec<_>>();
    let code = |error: RedisError| match error {
        RedisError::Server { code, .. } => code,
        other => panic!("not a server's error: {other:?}"),
    };
    let written = client.send("{e}text", &words(&["SET", "{e}text", "x"]), patient()).await;
    written.expect("written");
    let error = client.send("{e}text", &words(&["LPUSH", "{e}text", "y"]), patient()).await;
    assert_eq!(code(error.expect_err("no list")), "WRONGTYPE");
    let unknown = words(&["EVALSHA", "0123456789012345678901234567890123456789", "0"]);
    let error = client.send("{e}text", &unknown, patient()).await;
    assert_eq!(code(error.expect_err("no such script")), "NOSCRIPT");
    let refused = [words(&["SET", "{e}text", "y"]), words(&["NONSENSE"])];
    let error = client.transaction("{e}text", &refused, patient()).await;
    assert_eq!(code(error.expect_err("no such command")), "ERR");
    let failed = [words(&["LPUSH", "{e}text", "y"]), words(&["SET", "{e}text", "z"])];
    let error = client.transaction("{e}text", &failed, patient()).await;
    assert_eq!(code(error.expect_err("no list")), "WRONGTYPE");
    let get = [words(&["GET", "{e}text"])];
    let read = client.transaction("{e}text", &get, patient()).await;
    assert_eq!(read.expect("read"), [Reply::Text(b"z".to_vec())]);
}

/// Requests are executed once each while their slot moves.
async fn follows<C: Connection>(client: &C, cluster: &RedisCluster) {
    let slot = cluster.slot_of("{s}");
    let both = |number| {
        let increment = vec![Argument::Text("INCR"), Argument::Text("{s}b")];
        async move {
            assert_eq!(incr(client, "{s}a").await.expect("executed"), Reply::Integer(number));
            let answer = client.transaction("{s}b", &[increment], patient()).await;
            assert_eq!(answer.expect("executed"), [Reply::Integer(number)]);
        }
    };
    both(1).await;
    let from = cluster.master_of(slot).expect("an owner");
    let to = (from + 1) % 3;
    cluster.begin_migration(slot, to).expect("begun");
    // Still on the old server.
    both(2).await;
    cluster.move_key("{s}a").expect("moved");
    cluster.move_key("{s}b").expect("moved");
    // ASK.
    both(3).await;
    both(4).await;
    cluster.finish_migration(slot, to).expect("finished");
    // MOVED.
    both(5).await;
    cluster.migrate(slot, (to + 1) % 3).expect("moved");
    both(6).await;
}
