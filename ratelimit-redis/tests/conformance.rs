//! Runs the laws on a real Redis: with either client, on one server and on a cluster of three masters,
//! in every mode. Each client speaks RESP2 in one of the places and RESP3 in the other.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ratelimit_core::{Limit, Policy, PolicyState};
use ratelimit_redis::{
    Argument, Builder, Cas, Connection, Deadline, Lua, Mode, Multi, RedisConnection, RedisStore,
    Reply,
};
use ratelimit_testkit::{Capability, Harness, RedisCluster, RedisServer, conformance};
use tokio::runtime::Runtime;

/// How long a call may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(20);

fn patient() -> Deadline {
    Deadline::within(DEADLINE)
}
/// How much longer than its state matters a key may live. The time between the decision and the look at
/// the key does not count: it only shortens what remains.
const SLACK: Duration = Duration::from_secs(2);

/// What a transaction cannot do.
const NOTHING_BACK: &[Capability] =
    &[Capability::Refund, Capability::Force, Capability::Reservations];

/// Where the keys lie.
trait Servers: Sync {
    /// A URL for a client, with the protocol that it speaks there.
    fn url(client: &str) -> String;
}

fn speaking(url: &str, client: &str, resp3: bool) -> String {
    format!("{url}?client={client}&protocol={}", if resp3 { "resp3" } else { "resp2" })
}

/// On one server that all tests share.
struct Standalone;

impl Servers for Standalone {
    fn url(client: &str) -> String {
        let server = RedisServer::shared().expect("a server to test on");
        speaking(&server.url(), client, client == "fred")
    }
}

/// On three masters that all tests share.
struct Cluster;

impl Servers for Cluster {
    fn url(client: &str) -> String {
        let cluster = RedisCluster::shared().expect("a cluster to test on");
        speaking(&cluster.url(), client, client == "redis")
    }
}

/// A runtime and a connection that all tests of one place share. Each store has its own prefix.
struct OnServers<S> {
    shared: &'static (Runtime, Arc<RedisConnection>),
    servers: PhantomData<S>,
}

/// No two stores of this process share a prefix, and no other process uses the servers.
static NEXT_PREFIX: AtomicU64 = AtomicU64::new(0);

impl<S: Servers> OnServers<S> {
    fn new(client: &str, shared: &'static OnceLock<(Runtime, Arc<RedisConnection>)>) -> Self {
        let shared = shared.get_or_init(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .expect("a runtime");
            let connection = runtime.block_on(RedisConnection::open(&S::url(client), DEADLINE));
            (runtime, Arc::new(connection.expect("the servers are up")))
        });
        Self { shared, servers: PhantomData }
    }

    fn store<M: Mode>(&self, builder: Builder<M>) -> RedisStore<M, Arc<RedisConnection>> {
        let prefix = format!("law{}", NEXT_PREFIX.fetch_add(1, Ordering::Relaxed));
        builder.prefix(&prefix).over(Arc::clone(&self.shared.1)).expect("a plain prefix")
    }

    async fn leaks(&self, prefix: &str, within: Duration) -> Vec<String> {
        let mut leaks = Vec::new();
        for key in self.keys(prefix).await {
            let ttl = self
                .shared
                .1
                .send(&key, &[Argument::Text("PTTL"), Argument::Text(&key)], patient())
                .await;
            let Reply::Integer(ttl_ms) = ttl.expect("the server answers") else {
                panic!("a time to live is a number");
            };
            match u64::try_from(ttl_ms).map(Duration::from_millis) {
                Ok(ttl) if ttl <= within + SLACK => {}
                Ok(ttl) => {
                    leaks.push(format!("{key} lives for {ttl:?}, and matters for {within:?}"));
                }
                Err(_) if ttl_ms == -2 => {} // expired since the look
                Err(_) => leaks.push(format!("{key} lives for ever")),
            }
        }
        leaks
    }

    /// All keys of a prefix.
    async fn keys(&self, prefix: &str) -> Vec<String> {
        let pattern = format!("{prefix}:*");
        let answers =
            self.shared.1.send_to_each(&["KEYS", &pattern].map(Argument::Text), patient()).await;
        let mut keys = Vec::new();
        for (_, answer) in answers {
            let Reply::Array(found) = answer.expect("the server answers") else { panic!("keys") };
            for key in found {
                let Reply::Text(key) = key else { panic!("a key") };
                keys.push(String::from_utf8(key).expect("keys are text"));
            }
        }
        keys
    }
}

/// Writes the harness of a mode with one client on these servers, and its tests.
macro_rules! reservation {
    ($name:ident, $harness:ident, $client:literal, $servers:ty, $mode:ty, $builder:expr,
     $lacks:expr $(, $only:ident)?) => {
        struct $harness(OnServers<$servers>);

        impl Harness for $harness {
            type Store = RedisStore<$mode, Arc<RedisConnection>>;
            const CASES: u32 = 4;
            const SMALL_TRACE_REQUESTS: u32 = 2;
            const LACKS: &'static [Capability] = $lacks;

            fn new() -> Self {
                static SHARED: OnceLock<(Runtime, Arc<RedisConnection>)> = OnceLock::new();
                Self(OnServers::new($client, &SHARED))
            }

            fn store(&self) -> Self::Store {
                self.0.store($builder)
            }

            fn block_on<F: Future>(&self, future: F) -> F::Output {
                self.0.shared.0.block_on(future)
            }

            async fn state(
                &self,
                store: &Self::Store,
                limit: &Limit<Policy>,
                key: &str,
            ) -> Option<PolicyState> {
                store.state(limit, key).await.expect("a state, or none")
            }

            async fn leaks(&self, store: &Self::Store, within: Duration) -> Vec<String> {
                self.0.leaks(store.prefix(), within).await
            }
        }

        conformance!($name, $harness $(, $only)?);
    };
}

#[rustfmt::skip]
#[cfg(feature = "redis")]
mod by_redis {
    use super::*;

    reservation!(redis_standalone_lua, StandaloneLua, "redis", Standalone, Lua, RedisStore::builder(), &[]);
    reservation!(redis_standalone_cas, StandaloneCas, "redis", Standalone, Cas, RedisStore::builder().cas(), &[]);
    reservation!(redis_standalone_multi, StandaloneMulti, "redis", Standalone, Multi, RedisStore::builder().multi(), NOTHING_BACK, attempts);
    reservation!(redis_cluster_lua, ClusterLua, "redis", Cluster, Lua, RedisStore::builder(), &[]);
    reservation!(redis_cluster_cas, ClusterCas, "redis", Cluster, Cas, RedisStore::builder().cas(), &[]);
    reservation!(redis_cluster_multi, ClusterMulti, "redis", Cluster, Multi, RedisStore::builder().multi(), NOTHING_BACK, attempts);
}

#[rustfmt::skip]
#[cfg(feature = "fred")]
mod by_fred {
    use super::*;

    reservation!(fred_standalone_lua, StandaloneLua, "fred", Standalone, Lua, RedisStore::builder(), &[]);
    reservation!(fred_standalone_cas, StandaloneCas, "fred", Standalone, Cas, RedisStore::builder().cas(), &[]);
    reservation!(fred_standalone_multi, StandaloneMulti, "fred", Standalone, Multi, RedisStore::builder().multi(), NOTHING_BACK, attempts);
    reservation!(fred_cluster_lua, ClusterLua, "fred", Cluster, Lua, RedisStore::builder(), &[]);
    reservation!(fred_cluster_cas, ClusterCas, "fred", Cluster, Cas, RedisStore::builder().cas(), &[]);
    reservation!(fred_cluster_multi, ClusterMulti, "fred", Cluster, Multi, RedisStore::builder().multi(), NOTHING_BACK, attempts);
}
