//! Runs the laws on a real Redis: with either client, on one server and on a cluster of three
//! masters, in every mode. Each client speaks RESP2 in one of the places and RESP3 in the other.

#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

use std::sync::OnceLock;

use ratelimit_core::algorithm::AnyState;
use ratelimit_testkit::{
    Capability, Harness, conformance, failed_once, limit_in_words, record_conformance, regression,
};

#[path = "common/mod.rs"]
#[macro_use]
mod common;

use common::prelude::*;

/// How much longer than its state matters a key may live. The time between the decision and the
/// look at the key does not count: it only shortens what remains.
const SLACK: Duration = Duration::from_secs(2);

/// One server that all tests share, or three masters: their URL, and each of them.
fn place(is_cluster: bool) -> (String, &'static [RedisServer]) {
    if is_cluster {
        let cluster = RedisCluster::shared().expect("a cluster to test on");
        (cluster.url(), cluster.nodes())
    } else {
        let server = RedisServer::shared().expect("a server to test on");
        (server.url(), std::slice::from_ref(server))
    }
}

type Shared = (Runtime, RedisConnection);

/// A runtime and a connection that all tests of one place share. Each store has its own prefix.
struct OnServers(&'static Shared);

impl OnServers {
    fn new(client: &str, is_cluster: bool, shared: &'static OnceLock<Shared>) -> Self {
        Self(shared.get_or_init(|| {
            let is_resp3 = (client == "fred") != is_cluster;
            let protocol = if is_resp3 { "resp3" } else { "resp2" };
            let url = format!("{}?client={client}&protocol={protocol}", place(is_cluster).0);
            let runtime = driven_runtime();
            let connection = runtime.block_on(RedisConnection::open(&url, PATIENCE));
            (runtime, connection.expect("the servers are up"))
        }))
    }

    fn store<M: Mode>(&self, builder: Builder<M>) -> RedisStore<M> {
        let builder = builder.prefix(&prefix()).deadline(PATIENCE);
        builder.over(self.0.1.clone()).expect("a plain prefix")
    }
}

/// How many cases are tried: many in one place per mode. Elsewhere the same scripts and steps
/// decide, and only how commands get there differs: batches over all algorithms try that.
const MANY: u32 = 16;
const FEW: u32 = 6;

/// Writes the harness of a mode with one client on these servers, and its tests.
macro_rules! conformance_on {
    ($name:ident, $harness:ident, $client:literal, $is_cluster:literal, $cases:expr, $mode:ty, $builder:expr,
     $lacks:expr $(, $only:ident)?) => {
        pub(super) struct $harness(OnServers);

        impl Harness for $harness {
            type Store = RedisStore<$mode>;
            const CASES: u32 = $cases;
            const SMALL_TRACE_REQUESTS: u32 = 2;
            const LACKS: &'static [Capability] = $lacks;

            fn new() -> Self {
                static SHARED: OnceLock<Shared> = OnceLock::new();
                Self(OnServers::new($client, $is_cluster, &SHARED))
            }

            fn store(&self) -> Self::Store {
                self.0.store($builder)
            }

            fn block_on<F: Future>(&self, future: F) -> F::Output {
                self.0.0.0.block_on(future)
            }

            async fn state(
                &self,
                store: &Self::Store,
                limit: &Limit<AnyAlgorithm>,
                key: &str,
            ) -> Option<AnyState> {
                store.state(limit, key).await.expect("a state, or none")
            }

            async fn leaks(&self, store: &Self::Store, within: Duration) -> Vec<String> {
                let within_ms = (within + SLACK + kept_longer::<$mode>()).as_millis();
                let on = |server| outliving(server, store.prefix(), within_ms);
                place($is_cluster).1.iter().flat_map(on).collect()
            }
        }

        conformance!($name, $harness $(, $only)?);
    };
}

#[cfg(feature = "redis")]
#[rustfmt::skip]
mod by_redis {
    use super::*;

    conformance_on!(redis_standalone_lua, StandaloneLua, "redis", false, MANY, Lua, RedisStore::builder(), &[]);
    conformance_on!(redis_standalone_cas, StandaloneCas, "redis", false, MANY, Cas, RedisStore::builder().cas(), &[]);
    conformance_on!(redis_standalone_multi, StandaloneMulti, "redis", false, MANY, Multi, RedisStore::builder().multi(), Capability::INCREMENT_FIRST);
    conformance_on!(redis_cluster_lua, ClusterLua, "redis", true, FEW, Lua, RedisStore::builder(), &[], batches);
    conformance_on!(redis_cluster_cas, ClusterCas, "redis", true, FEW, Cas, RedisStore::builder().cas(), &[], batches);
    record_conformance!(redis_standalone_records, StandaloneLua);
    record_conformance!(redis_cluster_records, ClusterLua);
    record_conformance!(redis_standalone_records_cas, StandaloneCas);
    record_conformance!(redis_cluster_records_cas, ClusterCas);
    conformance_on!(redis_cluster_multi, ClusterMulti, "redis", true, FEW, Multi, RedisStore::builder().multi(), Capability::INCREMENT_FIRST, batches);
}

#[cfg(feature = "fred")]
#[rustfmt::skip]
mod by_fred {
    use super::*;

    conformance_on!(fred_standalone_lua, StandaloneLua, "fred", false, FEW, Lua, RedisStore::builder(), &[], batches);
    conformance_on!(fred_standalone_cas, StandaloneCas, "fred", false, FEW, Cas, RedisStore::builder().cas(), &[], batches);
    conformance_on!(fred_standalone_multi, StandaloneMulti, "fred", false, FEW, Multi, RedisStore::builder().multi(), Capability::INCREMENT_FIRST, batches);
    conformance_on!(fred_cluster_lua, ClusterLua, "fred", true, FEW, Lua, RedisStore::builder(), &[], batches);
    conformance_on!(fred_cluster_cas, ClusterCas, "fred", true, FEW, Cas, RedisStore::builder().cas(), &[], batches);
    record_conformance!(fred_cluster_records, ClusterLua);
    record_conformance!(fred_standalone_records_cas, StandaloneCas);
    record_conformance!(fred_cluster_records_cas, ClusterCas);
    conformance_on!(fred_cluster_multi, ClusterMulti, "fred", true, FEW, Multi, RedisStore::builder().multi(), Capability::INCREMENT_FIRST, batches);
}

#[cfg(feature = "redis")]
fn is_decided_by_multi(algorithm: &str) -> bool {
    RedisStore::<Multi>::supports(&Limits::new([limit_in_words("l", algorithm)]).expect("one"))
        .is_ok()
}

#[cfg(feature = "redis")]
#[test]
fn cases_that_failed_once() {
    use by_redis::{ClusterCas, ClusterLua, StandaloneCas, StandaloneLua, StandaloneMulti};

    for (property, case) in failed_once() {
        regression::<StandaloneLua>(property, &case);
        regression::<StandaloneCas>(property, &case);
        // What lies in several slots takes another way.
        regression::<ClusterLua>(property, &case);
        regression::<ClusterCas>(property, &case);
        let mut algorithms = case.lines().filter_map(|line| Some(line.split_once(": ")?.1));
        if algorithms.all(is_decided_by_multi) {
            regression::<StandaloneMulti>(property, &case);
        }
    }
}
