//! Runs the laws on a real Redis: with either client, on one server and on a cluster of three masters,
//! in every mode. Each client speaks RESP2 in one of the places and RESP3 in the other.

#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ratelimit_core::algorithm::PolicyState;
use ratelimit_core::{Limit, Limits, Policy};
use ratelimit_redis::{
    Argument, Builder, Cas, Connection, Deadline, Lua, Mode, Multi, RedisConnection, RedisStore,
    Reply,
};
use ratelimit_servers::{RedisCluster, RedisServer};
use ratelimit_testkit::{Capability, Harness, conformance, regression};
use tokio::runtime::Runtime;

#[path = "common/mod.rs"]
#[macro_use]
mod common;
#[path = "../../ratelimit-testkit/tests/laws/failed_once.rs"]
mod failed_once;

use common::{OUTLIVING, PATIENCE, kept_longer, prefix};

/// How much longer than its state matters a key may live. The time between the decision and the look at
/// the key does not count: it only shortens what remains.
const SLACK: Duration = Duration::from_secs(2);

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

impl<S: Servers> OnServers<S> {
    fn new(client: &str, shared: &'static OnceLock<(Runtime, Arc<RedisConnection>)>) -> Self {
        let shared = shared.get_or_init(|| {
            let runtime = tokio::runtime::Builder::new_multi_thread()
                .worker_threads(1)
                .enable_all()
                .build()
                .expect("a runtime");
            let connection = runtime.block_on(RedisConnection::open(&S::url(client), PATIENCE));
            (runtime, Arc::new(connection.expect("the servers are up")))
        });
        Self { shared, servers: PhantomData }
    }

    fn store<M: Mode>(&self, builder: Builder<M>) -> RedisStore<M, Arc<RedisConnection>> {
        let builder = builder.prefix(&prefix()).deadline(PATIENCE);
        builder.over(Arc::clone(&self.shared.1)).expect("a plain prefix")
    }

    /// The keys that live for too long, on each server.
    async fn leaks(&self, prefix: &str, within: Duration) -> Vec<String> {
        let within_ms = (within + SLACK).as_millis().to_string();
        let words = ["EVAL", OUTLIVING, "0", prefix, &within_ms].map(Argument::Text);
        let answers = self.shared.1.send_to_each(&words, Deadline::within(PATIENCE)).await;
        let kept = |answer| match answer {
            Ok(Reply::Array(kept)) => kept,
            other => panic!("{other:?}"),
        };
        answers
            .into_iter()
            .flat_map(|(_, answer)| kept(answer))
            .map(|key| format!("{key:?}"))
            .collect()
    }
}

/// How many cases are tried: many in one place per mode. Elsewhere the same scripts and steps decide, and only how commands get
/// there differs: batches over all algorithms try that.
const MANY: u32 = 16;
const FEW: u32 = 6;

/// Writes the harness of a mode with one client on these servers, and its tests.
macro_rules! conformance_on {
    ($name:ident, $harness:ident, $client:literal, $servers:ty, $cases:expr, $mode:ty, $builder:expr,
     $lacks:expr $(, $only:ident)?) => {
        pub(super) struct $harness(OnServers<$servers>);

        impl Harness for $harness {
            type Store = RedisStore<$mode, Arc<RedisConnection>>;
            const CASES: u32 = $cases;
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
                self.0.leaks(store.prefix(), within + kept_longer::<$mode>()).await
            }
        }

        conformance!($name, $harness $(, $only)?);
    };
}

#[cfg(feature = "redis")]
#[rustfmt::skip]
mod by_redis {
    use super::*;

    conformance_on!(redis_standalone_lua, StandaloneLua, "redis", Standalone, MANY, Lua, RedisStore::builder(), &[]);
    conformance_on!(redis_standalone_cas, StandaloneCas, "redis", Standalone, MANY, Cas, RedisStore::builder().cas(), &[]);
    conformance_on!(redis_standalone_multi, StandaloneMulti, "redis", Standalone, MANY, Multi, RedisStore::builder().multi(), Capability::INCREMENT_FIRST);
    conformance_on!(redis_cluster_lua, ClusterLua, "redis", Cluster, FEW, Lua, RedisStore::builder(), &[], batches);
    conformance_on!(redis_cluster_cas, ClusterCas, "redis", Cluster, FEW, Cas, RedisStore::builder().cas(), &[], batches);
    conformance_on!(redis_cluster_multi, ClusterMulti, "redis", Cluster, FEW, Multi, RedisStore::builder().multi(), Capability::INCREMENT_FIRST, batches);
}

#[cfg(feature = "fred")]
#[rustfmt::skip]
mod by_fred {
    use super::*;

    conformance_on!(fred_standalone_lua, StandaloneLua, "fred", Standalone, FEW, Lua, RedisStore::builder(), &[], batches);
    conformance_on!(fred_standalone_cas, StandaloneCas, "fred", Standalone, FEW, Cas, RedisStore::builder().cas(), &[], batches);
    conformance_on!(fred_standalone_multi, StandaloneMulti, "fred", Standalone, FEW, Multi, RedisStore::builder().multi(), Capability::INCREMENT_FIRST, batches);
    conformance_on!(fred_cluster_lua, ClusterLua, "fred", Cluster, FEW, Lua, RedisStore::builder(), &[], batches);
    conformance_on!(fred_cluster_cas, ClusterCas, "fred", Cluster, FEW, Cas, RedisStore::builder().cas(), &[], batches);
    conformance_on!(fred_cluster_multi, ClusterMulti, "fred", Cluster, FEW, Multi, RedisStore::builder().multi(), Capability::INCREMENT_FIRST, batches);
}

#[cfg(feature = "redis")]
fn is_decided_by_multi(policy: &str) -> bool {
    let limit = Limit::new("l", policy.parse::<Policy>().expect(policy)).expect("a name");
    RedisStore::<Multi>::supports(&Limits::new([limit]).expect("one")).is_ok()
}

#[cfg(feature = "redis")]
#[test]
fn cases_that_failed_once() {
    use by_redis::{ClusterCas, ClusterLua, StandaloneCas, StandaloneLua, StandaloneMulti};

    for (property, case) in failed_once::cases() {
        regression::<StandaloneLua>(property, &case);
        regression::<StandaloneCas>(property, &case);
        // What lies in several slots takes another way.
        regression::<ClusterLua>(property, &case);
        regression::<ClusterCas>(property, &case);
        let mut policies = case.lines().filter_map(|line| Some(line.split_once(": ")?.1));
        if policies.all(is_decided_by_multi) {
            regression::<StandaloneMulti>(property, &case);
        }
    }
}
