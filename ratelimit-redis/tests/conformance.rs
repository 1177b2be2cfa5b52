//! Runs the laws on a real Redis: with either client, on one server and on a cluster of three masters,
//! in every mode. Each client speaks RESP2 in one of the places and RESP3 in the other.

#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

use std::marker::PhantomData;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use ratelimit_core::algorithm::PolicyState;
use ratelimit_core::{Limit, Policy};
use ratelimit_redis::{
    Argument, Builder, Cas, Connection, Deadline, Lua, Mode, Multi, RedisConnection, RedisStore,
    Reply,
};
use ratelimit_servers::{RedisCluster, RedisServer};
use ratelimit_testkit::{Capability, Harness, Property, conformance, regression};
use tokio::runtime::Runtime;

#[path = "common/mod.rs"]
#[macro_use]
mod common;

use common::{OUTLIVING, PATIENCE, prefix};

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
const MANY: u32 = 48;
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
                self.0.leaks(store.prefix(), within).await
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

/// The smallest cases on which a law has failed once, each under the rule that was broken. Where it was on several limits, each of
/// them stands in place of `BEFORE`, and what it was changed to in place of `AFTER`.
#[cfg(feature = "redis")]
mod cases_that_failed_once {
    use ratelimit_testkit::Property::{Agrees, AgreesAfterAChange, KeepsWhatMatters};

    use super::by_redis::{ClusterCas, ClusterLua, StandaloneCas, StandaloneLua, StandaloneMulti};
    use super::*;

    const OF_ATTEMPTS: &str = r#"
        # an attempt that fits is charged beside one that is denied
        on fixed-window 1/s count attempts
        on first-request-window 1/s count attempts
        on window-log 1/s count attempts
        on bucketed-window bucket 200ms rates 1/1s, 2/3s count attempts
        on sliding-log 1/s count attempts
        limit l0: BEFORE
        at 0 acquire 2 of "b", 1 of "a"
        at 0 acquire 1 of "a", 1 of "c"

        # an attempt above its limit fills it and denies the other limit
        limit l0: fixed-window 1/s count attempts
        limit l1: fixed-window 1000003/30d count attempts
        at 0 acquire 220000 of "a" in l1
        at 0 acquire 2 of "a" in l0, 790000 of "a" in l1
        at 0 acquire 1 of "a" in l1, 2 of "b" in l0

        # an attempt displaces earlier ones from full buckets
        limit l0: bucketed-window bucket 50ms rates 1000/250ms, 2000/750ms count attempts
        at 0 acquire 630 of "a"
        at 0 acquire 370 of "a"
        at 50250 acquire 1 of "a"

        # an attempt displaces earlier ones from a full log
        limit l0: sliding-log 3/s count attempts
        at 0 acquire 4 of "b"
        at 1 acquire 1 of "a"
        at 1 acquire 1 of "b"

        # attempts of a full limit count when its algorithm or size changes
        on fixed-window 1/s count attempts => fixed-window 7/5m count attempts
        on window-log 7/5m count attempts => window-log 1000/250ms count attempts
        on sliding-log 2/3us count attempts => fixed-window 1/s count attempts
        on sliding-log 1/s count attempts => sliding-log 7/5m count attempts
        on bucketed-window bucket 50ms rates 4/250ms, 8/750ms count attempts => bucketed-window bucket 200ms rates 1/1s, 2/3s count attempts
        limit l0: BEFORE
        at 1795218390749999 acquire 4 of "c"
        at 1795218390750000 acquire 1 of "c"
        limit l0: AFTER
        at 1795218390750000 acquire 1 of "c"
        at 1795218390750000 acquire 1 of "b", 2 of "c"

        # the wait in a denied batch includes the attempt's own charge
        on window-log 2/3us count attempts
        on first-request-window 1/s count attempts
        on sliding-log 3/s count attempts
        limit l0: BEFORE
        at 0 acquire 4 of "a"
        at 1 acquire 1 of "a"
        at 1 acquire 3 of "b", 1 of "a"

        # a wait across several buckets is long enough
        limit l0: bucketed-window bucket 1m rates 7/5m, 14/15m count attempts
        at 1 acquire 1 of "a"
        at 1 acquire 1 of "b"
        at 1 acquire 2 of "a"
        at 1 acquire 3 of "a"
        at 128571429 acquire 3 of "a"
        at 128571429 acquire 3 of "a"
    "#;

    const OF_ALL: &str = r#"
        # an ended lease is not renewed by another reservation of its batch
        limit l0: concurrency 2/30s
        limit l1: gcra 100/d burst 100
        at 0 acquire 1 of "a" in l0, 1 of "b" in l1 under 1
        at 30000000 renew 0 of "a" in l0, 0 of "b" in l1 under 1

        # a settled id refuses other keys
        limit l0: fixed-window 1/s
        at 0 acquire 1 of "b" under 1
        at 0 acquire 1 of "a" under 1
        at 0 settle 0 of "b" under 1
        at 0 settle 1 of "a", 2 of "b" under 1
        at 0 acquire 1 of "a" under 1

        # a bucket with refill ticks of a second admits no token early
        on token-bucket 1000000007/30d burst 1000000007
        on gcra 1000000007/30d burst 1000000007
        limit l0: BEFORE
        at 1795218392123456 acquire 2 of "a"
        at 1795218392123457 refund 1 of "a"
        at 1795218392123456 acquire 1 of "a"
        at 1795218392123456 acquire 1 of "a"
        at 1795218392123457 acquire 0 of "a"
        at 1795218392123457 acquire 1 of "a"

        # with refill ticks of a second the wait is exact after time went back
        on token-bucket 1000000007/30d burst 1000000007
        on gcra 1000000007/30d burst 1000000007
        limit l0: BEFORE
        at 0 force 1 of "b"
        at 2592000000001 acquire 1 of "a"
        at 1 acquire 0 of "b"

        # a key with refill ticks of a millisecond expires in time
        limit l0: gcra 1000003/30d burst 1000003
        at 0 acquire 540000 of "a"
        at 5184000000 acquire 1 of "a"
        at 5184000000 acquire 10000 of "a"

        # a log that became shorter counts its last window
        limit l0: sliding-log 7/5m
        at 0 acquire 1 of "a"
        at 42857142 acquire 1 of "a"
        limit l0: sliding-log 3/s
        at 42857142 acquire 3 of "a"

        # a refund gives nothing back of a window that is past for the limit that counted in it
        limit l0: sliding-counter 2/3us
        at 0 acquire 2 of "a"
        limit l0: sliding-counter 1/s
        at 4 acquire 1 of "a"
        at 4 refund 1 of "a"

        # a check that costs nothing in one slot leaves the others' charge
        limit l0: gcra 3/s burst 4
        at 0 acquire 1 of "a"
        at 0 acquire 1 of "a"
        at 0 acquire 0 of "a", 1 of "b"
        at 0 acquire 4 of "a"

        # an attempt is charged beside a check that costs nothing in another slot
        limit l0: gcra 1/s burst 1
        limit l1: token-bucket 2/3us burst 3 count attempts
        at 0 acquire 1 of "a" in l0
        at 0 acquire 1 of "b" in l0, 0 of "a" in l0
        at 0 acquire 1 of "b" in l0, 0 of "a" in l1
    "#;

    /// Tries each case, on each of its limits, by the property that speaks of it.
    fn tried(cases: &str, on: impl Fn(Property, &str)) {
        for case in cases.split("\n\n") {
            let property = match case.matches("limit l0:").count() {
                _ if case.contains("expires in time") => KeepsWhatMatters,
                1 => Agrees,
                _ => AgreesAfterAChange,
            };
            let (limits, rest): (Vec<_>, Vec<_>) =
                case.lines().map(str::trim).partition(|line| line.starts_with("on "));
            let rest = rest.join("\n");
            for limits in if limits.is_empty() { vec!["on BEFORE"] } else { limits } {
                let (before, after) = limits[3..].split_once(" => ").unwrap_or((&limits[3..], ""));
                on(property, &rest.replace("BEFORE", before).replace("AFTER", after));
            }
        }
    }

    #[test]
    fn of_limits_that_count_attempts() {
        tried(OF_ATTEMPTS, |property, case| {
            regression::<StandaloneMulti>(property, case);
            regression::<StandaloneLua>(property, case);
            regression::<StandaloneCas>(property, case);
        });
    }

    #[test]
    fn of_all_limits() {
        tried(OF_ALL, |property, case| {
            regression::<StandaloneLua>(property, case);
            regression::<StandaloneCas>(property, case);
            // What lies in several slots takes another way.
            regression::<ClusterLua>(property, case);
            regression::<ClusterCas>(property, case);
        });
    }
}
