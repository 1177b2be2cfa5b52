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
use ratelimit_testkit::{
    Capability, Harness, Property, RedisCluster, RedisServer, conformance, regression,
};
use tokio::runtime::Runtime;

/// How long a call may take on a busy machine.
const DEADLINE: Duration = Duration::from_secs(20);

fn patient() -> Deadline {
    Deadline::within(DEADLINE)
}

/// How much longer than its state matters a key may live. The time between the decision and the look at
/// the key does not count: it only shortens what remains.
const SLACK: Duration = Duration::from_secs(2);

/// What a transaction cannot do: it gives nothing back.
const NOTHING_BACK: &[Capability] =
    &[Capability::Refund, Capability::Force, Capability::Reservations, Capability::TimesInOrder];

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

/// How many cases are tried in a place.
struct Effort {
    cases: u32,
    small_trace_requests: u32,
}

/// Where each mode is tried by all laws on each algorithm. Elsewhere the same scripts and steps decide, and only how commands get
/// there differs: batches over all algorithms try that.
const MOST: Effort = Effort { cases: 4, small_trace_requests: 2 };
const FEW: Effort = Effort { cases: 4, small_trace_requests: 1 };

/// Writes the harness of a mode with one client on these servers, and its tests.
macro_rules! conformance_on {
    ($name:ident, $harness:ident, $client:literal, $servers:ty, $effort:ident, $mode:ty, $builder:expr,
     $lacks:expr $(, $only:ident)?) => {
        struct $harness(OnServers<$servers>);

        impl Harness for $harness {
            type Store = RedisStore<$mode, Arc<RedisConnection>>;
            const CASES: u32 = $effort.cases;
            const SMALL_TRACE_REQUESTS: u32 = $effort.small_trace_requests;
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

/// The smallest cases on which a law has failed once, each named after the rule that was broken. They run in every
/// mode that can, on one server and on a cluster.
macro_rules! cases_that_failed_once {
    () => {
        mod cases_that_failed_once {
            use super::*;

            /// Limits that count attempts.
            fn attempts(property: Property, case: &str) {
                regression::<StandaloneMulti>(property, case);
                regression::<ClusterMulti>(property, case);
                regression::<StandaloneLua>(property, case);
                regression::<ClusterCas>(property, case);
            }

            /// Limits and operations of any kind.
            fn any(property: Property, case: &str) {
                regression::<StandaloneLua>(property, case);
                regression::<StandaloneCas>(property, case);
                regression::<ClusterLua>(property, case);
                regression::<ClusterCas>(property, case);
            }

            #[test]
            fn an_ended_lease_is_not_renewed_by_another_reservation_of_its_batch() {
                any(
                    Property::ReservationsAgree,
                    r#"
                    limit l0: concurrency 2/30s
                    limit l1: gcra 100/d burst 100
                    at 0 acquire 1 of "a" in l0, 1 of "b" in l1 under 00000000000000000000000000000001
                    at 30000000 renew 0 of "a" in l0, 0 of "b" in l1 under 00000000000000000000000000000001
                    "#,
                );
            }

            #[test]
            fn an_attempt_that_fits_is_charged_beside_one_that_is_denied() {
                for limit in [
                    "fixed-window 1/s",
                    "first-request-window 1/s",
                    "window-log 1/s",
                    "bucketed-window bucket 200ms rates 1/1s, 2/3s",
                    "sliding-log 1/s",
                ] {
                    attempts(
                        Property::OneAnswerEverywhere,
                        &format!(
                            r#"
                            limit l0: {limit} count attempts
                            at 0 acquire 2 of "b", 1 of "a"
                            at 0 acquire 1 of "a", 1 of "c"
                            "#
                        ),
                    );
                }
            }

            #[test]
            fn an_attempt_above_its_limit_fills_it_and_denies_the_other_limit() {
                attempts(
                    Property::OneAnswerEverywhere,
                    r#"
                    limit l0: fixed-window 1/s count attempts
                    limit l1: fixed-window 1000003/30d count attempts
                    at 0 acquire 220000 of "a" in l1
                    at 0 acquire 2 of "a" in l0, 790000 of "a" in l1
                    at 0 acquire 1 of "a" in l1, 2 of "b" in l0
                    "#,
                );
            }

            #[test]
            fn an_attempt_displaces_earlier_ones_from_full_buckets() {
                attempts(
                    Property::OneAnswerEverywhere,
                    r#"
                    limit l0: bucketed-window bucket 50ms rates 1000/250ms, 2000/750ms count attempts
                    at 0 acquire 630 of "a"
                    at 0 acquire 370 of "a"
                    at 50250 acquire 1 of "a"
                    "#,
                );
            }

            #[test]
            fn an_attempt_displaces_earlier_ones_from_a_full_log() {
                attempts(
                    Property::OneAnswerEverywhere,
                    r#"
                    limit l0: sliding-log 3/s count attempts
                    at 0 acquire 4 of "b"
                    at 1 acquire 1 of "a"
                    at 1 acquire 1 of "b"
                    "#,
                );
            }

            #[test]
            fn attempts_of_a_full_limit_count_when_its_algorithm_or_size_changes() {
                for (before, after) in [
                    ("fixed-window 1/s", "fixed-window 7/5m"),
                    ("window-log 7/5m", "window-log 1000/250ms"),
                    ("sliding-log 2/3us", "fixed-window 1/s"),
                    ("sliding-log 1/s", "sliding-log 7/5m"),
                    (
                        "bucketed-window bucket 50ms rates 4/250ms, 8/750ms",
                        "bucketed-window bucket 200ms rates 1/1s, 2/3s",
                    ),
                ] {
                    attempts(
                        Property::OneAnswerAfterALimitWasChanged,
                        &format!(
                            r#"
                            limit l0: {before} count attempts
                            at 1795218390749999 acquire 4 of "c"
                            at 1795218390750000 acquire 1 of "c"
                            then
                            limit l0: {after} count attempts
                            at 1795218390750000 acquire 1 of "c"
                            at 1795218390750000 acquire 1 of "b", 2 of "c"
                            "#
                        ),
                    );
                }
            }

            #[test]
            fn the_wait_in_a_denied_batch_includes_the_attempts_own_charge() {
                for limit in ["window-log 2/3us", "first-request-window 1/s", "sliding-log 3/s"] {
                    attempts(
                        Property::RetryAfterIsHonest,
                        &format!(
                            r#"
                            limit l0: {limit} count attempts
                            at 0 acquire 4 of "a"
                            at 1 acquire 1 of "a"
                            at 1 acquire 3 of "b", 1 of "a"
                            "#
                        ),
                    );
                }
            }

            #[test]
            fn a_wait_across_several_buckets_is_long_enough() {
                attempts(
                    Property::RetryAfterIsHonest,
                    r#"
                    limit l0: bucketed-window bucket 1m rates 7/5m, 14/15m count attempts
                    at 1 acquire 1 of "a"
                    at 1 acquire 1 of "b"
                    at 1 acquire 2 of "a"
                    at 1 acquire 3 of "a"
                    at 128571429 acquire 3 of "a"
                    at 128571429 acquire 3 of "a"
                    "#,
                );
            }

            #[test]
            fn a_settled_id_refuses_other_keys() {
                any(
                    Property::ReservationsAgree,
                    r#"
                    limit l0: fixed-window 1/s
                    at 0 acquire 1 of "b" under 00000000000000000000000000000001
                    at 0 acquire 1 of "a" under 00000000000000000000000000000001
                    at 0 settle 0 of "b" under 00000000000000000000000000000001
                    at 0 settle 1 of "a", 2 of "b" under 00000000000000000000000000000001
                    at 0 acquire 1 of "a" under 00000000000000000000000000000001
                    "#,
                );
            }

            #[test]
            fn a_bucket_with_refill_ticks_of_a_second_admits_no_token_early() {
                any(
                    Property::TwoNamesOneMachine,
                    r#"
                    limit l0: token-bucket 1000000007/30d burst 1000000007
                    at 1795218392123456 acquire 2 of "a"
                    at 1795218392123457 refund 1 of "a"
                    at 1795218392123456 acquire 1 of "a"
                    at 1795218392123456 acquire 1 of "a"
                    "#,
                );
                for limit in ["token-bucket", "gcra"] {
                    any(
                        Property::CostZeroIsAPeek,
                        &format!(
                            r#"
                            limit l0: {limit} 1000000007/30d burst 1000000007
                            at 0 acquire 1 of "b"
                            at 1 acquire 1 of "b"
                            at 1 acquire 1 of "b"
                            "#
                        ),
                    );
                }
            }

            #[test]
            fn with_refill_ticks_of_a_second_the_wait_is_exact_after_time_went_back() {
                any(
                    Property::RetryAfterIsHonest,
                    r#"
                    limit l0: token-bucket 1000000007/30d burst 1000000007
                    at 0 force 1 of "b"
                    at 1 acquire 0 of "b"
                    "#,
                );
                any(
                    Property::RetryAfterIsHonest,
                    r#"
                    limit l0: gcra 1000000007/30d burst 1000000007
                    at 0 acquire 1 of "b"
                    at 2592000000001 acquire 1 of "a"
                    at 1 acquire 0 of "b"
                    "#,
                );
            }

            #[test]
            fn a_key_with_refill_ticks_of_a_millisecond_expires_in_time() {
                any(
                    Property::NothingLeaks,
                    r#"
                    limit l0: gcra 1000003/30d burst 1000003
                    at 0 acquire 540000 of "a"
                    at 5184000000 acquire 1 of "a"
                    at 5184000000 acquire 10000 of "a"
                    "#,
                );
            }

            #[test]
            fn a_log_that_became_shorter_counts_its_last_window() {
                any(
                    Property::OneAnswerAfterALimitWasChanged,
                    r#"
                    limit l0: sliding-log 7/5m
                    at 0 acquire 1 of "a"
                    at 42857142 acquire 1 of "a"
                    then
                    limit l0: sliding-log 3/s
                    at 42857142 acquire 3 of "a"
                    "#,
                );
            }

            #[test]
            fn a_check_that_costs_nothing_in_one_slot_leaves_the_others_charge() {
                any(
                    Property::NeverAdmitsMoreThanItsBound,
                    r#"
                    limit l0: gcra 3/s burst 4
                    at 0 acquire 1 of "a"
                    at 0 acquire 1 of "a"
                    at 0 acquire 0 of "a", 1 of "b"
                    at 0 acquire 4 of "a"
                    "#,
                );
                any(
                    Property::EveryAttemptIsCharged,
                    r#"
                    limit l0: gcra 1/s burst 1
                    limit l1: token-bucket 2/3us burst 3 count attempts
                    at 0 acquire 1 of "a" in l0
                    at 0 acquire 1 of "b" in l0, 0 of "a" in l0
                    "#,
                );
            }
        }
    };
}

#[rustfmt::skip]
#[cfg(feature = "redis")]
mod by_redis {
    use super::*;

    conformance_on!(redis_standalone_lua, StandaloneLua, "redis", Standalone, MOST, Lua, RedisStore::builder(), &[]);
    conformance_on!(redis_standalone_cas, StandaloneCas, "redis", Standalone, MOST, Cas, RedisStore::builder().cas(), &[]);
    conformance_on!(redis_standalone_multi, StandaloneMulti, "redis", Standalone, MOST, Multi, RedisStore::builder().multi(), NOTHING_BACK, attempts);
    conformance_on!(redis_cluster_lua, ClusterLua, "redis", Cluster, FEW, Lua, RedisStore::builder(), &[], mixed);
    conformance_on!(redis_cluster_cas, ClusterCas, "redis", Cluster, FEW, Cas, RedisStore::builder().cas(), &[], mixed);
    conformance_on!(redis_cluster_multi, ClusterMulti, "redis", Cluster, FEW, Multi, RedisStore::builder().multi(), NOTHING_BACK, mixed_attempts);

    cases_that_failed_once!();
}

#[rustfmt::skip]
#[cfg(feature = "fred")]
mod by_fred {
    use super::*;

    conformance_on!(fred_standalone_lua, StandaloneLua, "fred", Standalone, FEW, Lua, RedisStore::builder(), &[], mixed);
    conformance_on!(fred_standalone_cas, StandaloneCas, "fred", Standalone, FEW, Cas, RedisStore::builder().cas(), &[], mixed);
    conformance_on!(fred_standalone_multi, StandaloneMulti, "fred", Standalone, FEW, Multi, RedisStore::builder().multi(), NOTHING_BACK, mixed_attempts);
    conformance_on!(fred_cluster_lua, ClusterLua, "fred", Cluster, FEW, Lua, RedisStore::builder(), &[], mixed);
    conformance_on!(fred_cluster_cas, ClusterCas, "fred", Cluster, FEW, Cas, RedisStore::builder().cas(), &[], mixed);
    conformance_on!(fred_cluster_multi, ClusterMulti, "fred", Cluster, FEW, Multi, RedisStore::builder().multi(), NOTHING_BACK, mixed_attempts);

    cases_that_failed_once!();
}
