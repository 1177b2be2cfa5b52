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
use ratelimit_servers::{RedisCluster, RedisServer};
use ratelimit_testkit::{Capability, Harness, Property, conformance, regression};
use tokio::runtime::Runtime;

/// How long a call may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(20);

fn patient() -> Deadline {
    Deadline::within(DEADLINE)
}

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
        let builder = builder.prefix(&prefix).deadline(DEADLINE);
        builder.over(Arc::clone(&self.shared.1)).expect("a plain prefix")
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

/// The smallest cases on which a law has failed once, each named after the rule that was broken.
#[cfg(feature = "redis")]
mod cases_that_failed_once {
    use ratelimit_testkit::Property::{Agrees, AgreesAfterAChange, KeepsWhatMatters};

    use super::by_redis::{ClusterCas, ClusterLua, StandaloneCas, StandaloneLua, StandaloneMulti};
    use super::*;

    /// A rule, the property that speaks of it, the limits on which it has failed, and the requests after them.
    type Failed<'a> = (&'a str, Property, &'a [&'a str], &'a str);

    fn tried(cases: &[Failed<'_>], on: impl Fn(Property, &str)) {
        for (_rule, property, limits, requests) in cases {
            for limits in *limits {
                on(*property, &format!("limit l0: {limits}\n{requests}"));
            }
        }
    }

    #[test]
    #[allow(clippy::too_many_lines, reason = "a table")]
    fn of_limits_that_count_attempts() {
        tried(
            &[
                (
                    "an attempt that fits is charged beside one that is denied",
                    Agrees,
                    &[
                        "fixed-window 1/s count attempts",
                        "first-request-window 1/s count attempts",
                        "window-log 1/s count attempts",
                        "bucketed-window bucket 200ms rates 1/1s, 2/3s count attempts",
                        "sliding-log 1/s count attempts",
                    ],
                    r#"
                    at 0 acquire 2 of "b", 1 of "a"
                    at 0 acquire 1 of "a", 1 of "c"
                    "#,
                ),
                (
                    "an attempt above its limit fills it and denies the other limit",
                    Agrees,
                    &[
                        "fixed-window 1/s count attempts\nlimit l1: fixed-window 1000003/30d count attempts",
                    ],
                    r#"
                    at 0 acquire 220000 of "a" in l1
                    at 0 acquire 2 of "a" in l0, 790000 of "a" in l1
                    at 0 acquire 1 of "a" in l1, 2 of "b" in l0
                    "#,
                ),
                (
                    "an attempt displaces earlier ones from full buckets",
                    Agrees,
                    &["bucketed-window bucket 50ms rates 1000/250ms, 2000/750ms count attempts"],
                    r#"
                    at 0 acquire 630 of "a"
                    at 0 acquire 370 of "a"
                    at 50250 acquire 1 of "a"
                    "#,
                ),
                (
                    "an attempt displaces earlier ones from a full log",
                    Agrees,
                    &["sliding-log 3/s count attempts"],
                    r#"
                    at 0 acquire 4 of "b"
                    at 1 acquire 1 of "a"
                    at 1 acquire 1 of "b"
                    "#,
                ),
                (
                    "attempts of a full limit count when its algorithm or size changes",
                    AgreesAfterAChange,
                    &[
                        "fixed-window 1/s count attempts\nCHANGED fixed-window 7/5m count attempts",
                        "window-log 7/5m count attempts\nCHANGED window-log 1000/250ms count attempts",
                        "sliding-log 2/3us count attempts\nCHANGED fixed-window 1/s count attempts",
                        "sliding-log 1/s count attempts\nCHANGED sliding-log 7/5m count attempts",
                        "bucketed-window bucket 50ms rates 4/250ms, 8/750ms count attempts\n\
                         CHANGED bucketed-window bucket 200ms rates 1/1s, 2/3s count attempts",
                    ],
                    r#"
                    at 1795218390750000 acquire 1 of "c"
                    at 1795218390750000 acquire 1 of "b", 2 of "c"
                    "#,
                ),
                (
                    "the wait in a denied batch includes the attempt's own charge",
                    Agrees,
                    &[
                        "window-log 2/3us count attempts",
                        "first-request-window 1/s count attempts",
                        "sliding-log 3/s count attempts",
                    ],
                    r#"
                    at 0 acquire 4 of "a"
                    at 1 acquire 1 of "a"
                    at 1 acquire 3 of "b", 1 of "a"
                    "#,
                ),
                (
                    "a wait across several buckets is long enough",
                    Agrees,
                    &["bucketed-window bucket 1m rates 7/5m, 14/15m count attempts"],
                    r#"
                    at 1 acquire 1 of "a"
                    at 1 acquire 1 of "b"
                    at 1 acquire 2 of "a"
                    at 1 acquire 3 of "a"
                    at 128571429 acquire 3 of "a"
                    at 128571429 acquire 3 of "a"
                    "#,
                ),
            ],
            |property, case| {
                let full = "at 1795218390749999 acquire 4 of \"c\"\nat 1795218390750000 acquire 1 of \"c\"";
                let case = case.replace("CHANGED", &format!("{full}\nlimit l0:"));
                regression::<StandaloneMulti>(property, &case);
                regression::<StandaloneLua>(property, &case);
                regression::<StandaloneCas>(property, &case);
            },
        );
    }

    #[test]
    #[allow(clippy::too_many_lines, reason = "a table")]
    fn of_all_limits() {
        tried(
            &[
                (
                    "an ended lease is not renewed by another reservation of its batch",
                    Agrees,
                    &["concurrency 2/30s\nlimit l1: gcra 100/d burst 100"],
                    r#"
                    at 0 acquire 1 of "a" in l0, 1 of "b" in l1 under 00000000000000000000000000000001
                    at 30000000 renew 0 of "a" in l0, 0 of "b" in l1 under 00000000000000000000000000000001
                    "#,
                ),
                (
                    "a settled id refuses other keys",
                    Agrees,
                    &["fixed-window 1/s"],
                    r#"
                    at 0 acquire 1 of "b" under 00000000000000000000000000000001
                    at 0 acquire 1 of "a" under 00000000000000000000000000000001
                    at 0 settle 0 of "b" under 00000000000000000000000000000001
                    at 0 settle 1 of "a", 2 of "b" under 00000000000000000000000000000001
                    at 0 acquire 1 of "a" under 00000000000000000000000000000001
                    "#,
                ),
                (
                    "a bucket with refill ticks of a second admits no token early",
                    Agrees,
                    &[
                        "token-bucket 1000000007/30d burst 1000000007",
                        "gcra 1000000007/30d burst 1000000007",
                    ],
                    r#"
                    at 1795218392123456 acquire 2 of "a"
                    at 1795218392123457 refund 1 of "a"
                    at 1795218392123456 acquire 1 of "a"
                    at 1795218392123456 acquire 1 of "a"
                    at 1795218392123457 acquire 0 of "a"
                    at 1795218392123457 acquire 1 of "a"
                    "#,
                ),
                (
                    "with refill ticks of a second the wait is exact after time went back",
                    Agrees,
                    &[
                        "token-bucket 1000000007/30d burst 1000000007",
                        "gcra 1000000007/30d burst 1000000007",
                    ],
                    r#"
                    at 0 force 1 of "b"
                    at 2592000000001 acquire 1 of "a"
                    at 1 acquire 0 of "b"
                    "#,
                ),
                (
                    "a key with refill ticks of a millisecond expires in time",
                    KeepsWhatMatters,
                    &["gcra 1000003/30d burst 1000003"],
                    r#"
                    at 0 acquire 540000 of "a"
                    at 5184000000 acquire 1 of "a"
                    at 5184000000 acquire 10000 of "a"
                    "#,
                ),
                (
                    "a log that became shorter counts its last window",
                    AgreesAfterAChange,
                    &["sliding-log 7/5m"],
                    r#"
                    at 0 acquire 1 of "a"
                    at 42857142 acquire 1 of "a"
                    limit l0: sliding-log 3/s
                    at 42857142 acquire 3 of "a"
                    "#,
                ),
                (
                    "a refund gives nothing back of a window that is past for the limit that counted in it",
                    AgreesAfterAChange,
                    &["sliding-counter 2/3us"],
                    r#"
                    at 0 acquire 2 of "a"
                    limit l0: sliding-counter 1/s
                    at 4 acquire 1 of "a"
                    at 4 refund 1 of "a"
                    "#,
                ),
                (
                    "a check that costs nothing in one slot leaves the others' charge",
                    Agrees,
                    &["gcra 3/s burst 4"],
                    r#"
                    at 0 acquire 1 of "a"
                    at 0 acquire 1 of "a"
                    at 0 acquire 0 of "a", 1 of "b"
                    at 0 acquire 4 of "a"
                    "#,
                ),
                (
                    "an attempt is charged beside a check that costs nothing in another slot",
                    Agrees,
                    &["gcra 1/s burst 1\nlimit l1: token-bucket 2/3us burst 3 count attempts"],
                    r#"
                    at 0 acquire 1 of "a" in l0
                    at 0 acquire 1 of "b" in l0, 0 of "a" in l0
                    at 0 acquire 1 of "b" in l0, 0 of "a" in l1
                    "#,
                ),
            ],
            |property, case| {
                regression::<StandaloneLua>(property, case);
                regression::<StandaloneCas>(property, case);
                // What lies in several slots takes another way.
                regression::<ClusterLua>(property, case);
                regression::<ClusterCas>(property, case);
            },
        );
    }
}
