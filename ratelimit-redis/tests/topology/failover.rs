//! Masters that die, hang, are demoted and lose replies: of a cluster, or named by Sentinels.

use std::sync::OnceLock;
use std::time::{Duration, Instant};

use ratelimit_core::{ErrorKind, StoreError};
use ratelimit_redis::{Argument, Client, Connection, Deadline, RedisConnection, RedisStore, Reply};
use ratelimit_servers::{FaultProxy, RedisCluster, RedisSentinels, RedisServer, RespValue};
use tokio::sync::{Mutex, MutexGuard};

use crate::common::{
    PATIENCE, acquire, aside, fails, left, limit, logged, seldom, server, store, store_within,
    tell, until, with_client,
};

/// How long a call may take while servers are down.
const DEADLINE: Duration = Duration::from_millis(500);

/// Masters with replicas, for one test at a time. Each finds them healthy and leaves them healthy.
#[derive(Clone, Copy)]
enum Servers {
    Cluster(&'static RedisCluster),
    Sentinels(&'static RedisSentinels),
}

impl Servers {
    async fn alone(is_cluster: bool) -> (Self, MutexGuard<'static, ()>) {
        static CLUSTER: OnceLock<RedisCluster> = OnceLock::new();
        static SENTINELS: OnceLock<RedisSentinels> = OnceLock::new();
        static ALONE: [Mutex<()>; 2] = [const { Mutex::const_new(()) }; 2];
        let alone = ALONE[usize::from(is_cluster)].lock().await;
        let servers = if is_cluster {
            let start = || RedisCluster::start_with_replicas().expect("a cluster");
            Self::Cluster(CLUSTER.get_or_init(start))
        } else {
            Self::Sentinels(SENTINELS.get_or_init(|| RedisSentinels::start().expect("sentinels")))
        };
        servers.become_well();
        (servers, alone)
    }

    /// What a failed test has left behind does not last.
    fn become_well(self) {
        match self {
            Self::Cluster(cluster) => {
                for (number, node) in cluster.nodes().iter().enumerate() {
                    match node.pid() {
                        Some(_) => node.resume().expect("it runs"),
                        None => cluster.restart(number).expect("again"),
                    }
                }
                cluster.wait_until_healthy(PATIENCE).expect("well");
            }
            Self::Sentinels(sentinels) => {
                for server in sentinels.servers().iter().chain(sentinels.sentinels()) {
                    if server.pid().is_some() {
                        server.resume().expect("it runs");
                    }
                }
                sentinels.restart_dead().expect("well");
                sentinels.wait_until_healthy(PATIENCE).expect("well");
            }
        }
    }

    fn url(self) -> String {
        match self {
            Self::Cluster(cluster) => cluster.url(),
            Self::Sentinels(sentinels) => sentinels.url(),
        }
    }

    /// The master of an identifier.
    fn master(self, identifier: &str) -> (usize, &'static RedisServer) {
        match self {
            Self::Cluster(cluster) => {
                let slot = cluster.slot_of(&format!("{{{identifier}}}"));
                let owner = cluster.master_of(slot).expect("an owner");
                (owner, &cluster.nodes()[owner])
            }
            Self::Sentinels(sentinels) => {
                let master = sentinels.master().expect("a master");
                (master, &sentinels.servers()[master])
            }
        }
    }

    /// Waits until the replica of an identifier's master has caught up.
    fn replicate(self, identifier: &str) {
        let mut client = self.master(identifier).1.client().expect("it is up");
        // WAIT covers what was written on the same connection, and everything before it.
        let key = format!("sync:{{{identifier}}}");
        client.command(&["SET", &key, "1", "PX", "60000"]).expect("it is up").ok().expect("OK");
        let waited = client.command(&["WAIT", "1", "9000"]).expect("it is up");
        assert_eq!(waited, RespValue::Integer(1), "in touch");
    }

    fn kill_master(self, identifier: &str) {
        match self {
            Self::Cluster(cluster) => cluster.kill(self.master(identifier).0),
            Self::Sentinels(sentinels) => {
                sentinels.kill_master().expect("another master");
            }
        }
    }

    fn demote_master(self, identifier: &str) {
        match self {
            Self::Cluster(cluster) => {
                let master = self.master(identifier).0;
                let is_its = |node: &usize| cluster.master_of_replica(*node) == Ok(Some(master));
                let replica = (0..cluster.nodes().len()).find(is_its).expect("a replica");
                cluster.promote(replica).expect("promoted");
            }
            Self::Sentinels(sentinels) => {
                sentinels.fail_over().expect("another master");
            }
        }
    }
}

/// A store on servers that no other test uses meanwhile, and an identifier whose first charge the replica knows.
async fn begun(
    is_cluster: bool,
    deadline: Duration,
    client: Client,
    what: &str,
) -> (Servers, MutexGuard<'static, ()>, RedisStore, String) {
    let (servers, alone) = Servers::alone(is_cluster).await;
    let store = store_within(deadline, &servers.url(), client).await.expect("it is up");
    let key = format!("{what}-{client}");
    assert_eq!(left(&store, &seldom(), &key).await, 2);
    servers.replicate(&key);
    (servers, alone, store, key)
}

/// Repeats a request until it is decided by another master than the first. One failure may be indeterminate, the
/// others only unavailable, and all come in time.
async fn comes_back(store: &RedisStore, key: &str, is_over: impl Fn() -> bool) {
    let lost = std::cell::Cell::new(0);
    until(async || {
        let (begin, was_over) = (Instant::now(), is_over());
        let answer = acquire(store, &logged(), key).await;
        assert!(begin.elapsed() < DEADLINE * 2, "{:?}", begin.elapsed());
        match answer {
            Ok(_) if was_over => Ok(()),
            Ok(_) => Err("the old one serves still".to_owned()),
            Err(error) => {
                lost.set(lost.get() + usize::from(error.kind() == ErrorKind::Indeterminate));
                let kinds = [ErrorKind::Unavailable, ErrorKind::Indeterminate];
                assert!(kinds.contains(&error.kind()) && lost.get() <= 1, "{error}");
                Err(error.to_string())
            }
        }
    })
    .await;
}

async fn a_killed_master_is_followed_to_the_new_one(client: Client) {
    for is_cluster in [true, false] {
        let (servers, _alone, store, key) = begun(is_cluster, DEADLINE, client, "killed").await;
        let old = servers.master(&key).0;
        let (killed, of) = (key.clone(), servers);
        let killing = tokio::task::spawn_blocking(move || of.kill_master(&killed));
        comes_back(&store, &key, || killing.is_finished()).await;
        killing.await.expect("no panic");
        assert_eq!(left(&store, &seldom(), &key).await, 1, "the new one knows what was charged");
        assert_ne!(servers.master(&key).0, old);
        aside(move || servers.become_well()).await;
        assert_eq!(left(&store, &seldom(), &key).await, 0);
    }
}

async fn a_master_that_hangs_costs_the_deadline_until_it_is_replaced(client: Client) {
    for is_cluster in [true, false] {
        let (servers, _alone, store, key) = begun(is_cluster, DEADLINE, client, "hangs").await;
        let (old, master) = servers.master(&key);
        let is_elsewhere = |key: &String| servers.master(key).0 != old;
        let other = (0..100).map(|n| format!("{key}-{n}")).find(is_elsewhere);
        master.pause().expect("it runs");
        let begin = Instant::now();
        fails(acquire(&store, &seldom(), &key).await, ErrorKind::Indeterminate, "");
        assert!(begin.elapsed() < DEADLINE * 2, "{:?}", begin.elapsed());
        if let Some(other) = other {
            assert_eq!(left(&store, &seldom(), &other).await, 2, "the others serve");
        }
        comes_back(&store, &key, || true).await;
        assert_eq!(left(&store, &seldom(), &key).await, 1);
        // It refuses the requests that it received while it hung: it is a replica now.
        aside(move || servers.become_well()).await;
        assert_eq!(left(&store, &seldom(), &key).await, 0);
    }
}

async fn a_demoted_master_redirects_to_the_new_one(client: Client) {
    for is_cluster in [true, false] {
        let (servers, _alone, store, key) = begun(is_cluster, PATIENCE, client, "demoted").await;
        let of = key.clone();
        aside(move || servers.demote_master(&of)).await;
        match acquire(&store, &seldom(), &key).await {
            Ok(verdict) => assert_eq!(verdict.remaining(), 1),
            // The Sentinels close the connections of a master that they demote.
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
                assert!(left(&store, &seldom(), &key).await <= 1);
            }
        }
    }
}

/// On one server, on a cluster, and on a master that Sentinels name.
async fn a_request_with_a_lost_reply_was_executed_once(client: Client) {
    let server = server();
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    executed_once(&proxy.url(), client, "a", &proxy).await;
    let url = with_client(&proxy.url(), client);
    let connection = RedisConnection::open(&url, PATIENCE).await.expect("the server is up");
    let count = async || {
        let count = [["INCR", "n"].map(Argument::Text).to_vec()];
        connection.transaction("n", &count, Deadline::within(PATIENCE)).await
    };
    proxy.swallow_matching("EXEC", 1);
    fails(count().await, ErrorKind::Indeterminate, "");
    assert_eq!(count().await.expect("counted"), [Reply::Integer(2)]);

    let cluster = aside(RedisCluster::start_behind_proxies).await.expect("a cluster");
    for key in ["a", "b"] {
        let owner = cluster.master_of(cluster.slot_of(&format!("{{{key}}}"))).expect("an owner");
        executed_once(&cluster.url(), client, key, &cluster.proxies()[owner]).await;
    }

    let (servers, _alone) = Servers::alone(false).await;
    let Servers::Sentinels(sentinels) = servers else { unreachable!("they are") };
    let proxy = FaultProxy::start(servers.master("a").1.port()).expect("a proxy");
    let (service, port) = (format!("proxied-{client}"), proxy.port().to_string());
    for sentinel in sentinels.sentinels() {
        tell(sentinel, &["SENTINEL", "MONITOR", &service, "127.0.0.1", &port, "2"]);
    }
    let url = servers.url().replace("mymaster", &service);
    executed_once(&url, client, &service, &proxy).await;
    for sentinel in sentinels.sentinels() {
        tell(sentinel, &["SENTINEL", "REMOVE", &service]);
    }
}

async fn executed_once(url: &str, client: Client, key: &str, proxy: &FaultProxy) {
    let store = store(url, client).await;
    let limit = limit("four", "gcra 4/3650d");
    let refused = async || fails(acquire(&store, &limit, key).await, ErrorKind::Indeterminate, "");
    assert_eq!(left(&store, &limit, key).await, 3);
    proxy.swallow_matching("EVALSHA", 1);
    let _ = refused().await;
    assert_eq!(left(&store, &limit, key).await, 1, "charged, and once");
    // A request that never arrived is not sent again either: the client cannot know that.
    proxy.cut_matching("EVALSHA", 1);
    let _ = refused().await;
    assert_eq!((proxy.swallowed(), proxy.requests_cut()), (1, 1));
    assert_eq!(left(&store, &limit, key).await, 0);
}

with_each_client! {
    a_killed_master_is_followed_to_the_new_one,
    a_master_that_hangs_costs_the_deadline_until_it_is_replaced,
    a_demoted_master_redirects_to_the_new_one,
    a_request_with_a_lost_reply_was_executed_once,
}
