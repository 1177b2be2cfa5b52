//! What a store reports about its servers, and that each mode needs exactly the permissions that it
//! names.

use std::time::{Duration, Instant};

use crate::common::{aside, query, url, with_client};
use ratelimit_core::{
    Attempts, Batch, Check, ErrorKind, FixedWindow, Gcra, Limit, Op, Policy, PolicyState,
    ReservationId, SlidingLog, Store, StoreError,
};
use ratelimit_redis::{
    Cas, Client, Health, Lua, Mode, Multi, RedisError, RedisStore, Severity, Tag,
};
use ratelimit_testkit::{
    Capability, Harness, Property, RedisCluster, RedisSentinels, RedisServer, Scope, try_same,
};
use tokio::runtime::Runtime;

/// A server with a user who has these permissions, and that user's URL.
fn server_for(rights: &str, client: Client) -> (RedisServer, String) {
    let server = RedisServer::start().expect("redis-server");
    let mut words = vec!["ACL", "SETUSER", "limiter", "on", ">secret", "~rl:*", "-@all"];
    words.extend(rights.split_whitespace());
    query::<()>(&mut aside(&server), &words);
    let url = format!("redis://limiter:secret@127.0.0.1:{}", server.port());
    (server, with_client(&url, client))
}

/// The findings of each mode with these permissions.
async fn found(rights: &str, client: Client) -> [Health; 3] {
    let (_server, url) = server_for(rights, client);
    let store = RedisStore::connect(&url).await.expect("the user may come in");
    [
        tokio::spawn({
            let store = store.clone();
            async move { store.health().await }
        })
        .await
        .expect("no panic"),
        store.in_mode::<Cas>().health().await,
        store.in_mode::<Multi>().health().await,
    ]
}

fn says(health: &Health) -> String {
    let findings: Vec<_> = health.findings().iter().map(ToString::to_string).collect();
    findings.join("\n")
}

async fn a_fresh_server_is_ready_for_every_mode_and_reports_its_version(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&url(&server, client)).await.expect("it is up");
    for health in [
        store.health().await,
        store.in_mode::<Cas>().health().await,
        store.in_mode::<Multi>().health().await,
    ] {
        assert!(health.is_ready() && health.findings().is_empty(), "{}", says(&health));
        let [server] = health.servers() else { panic!("one server") };
        let version = server.version.as_deref().expect("it tells");
        assert!(version.starts_with("redis ") || version.starts_with("valkey "), "{version}");
    }
    let keys: Vec<String> = query(&mut aside(&server), &["KEYS", "*"]);
    let lasting = keys.iter().filter(|key| query::<i64>(&mut aside(&server), &["PTTL", key]) == -1);
    assert_eq!(lasting.count(), 0, "{keys:?}");
}

async fn each_mode_is_ready_with_the_permissions_that_it_names(client: Client) {
    for (mode, rights) in [Lua::COMMANDS, Cas::COMMANDS, Multi::COMMANDS].into_iter().enumerate() {
        let health = &found(&format!("{rights} +info +scan +hgetall"), client).await[mode];
        assert!(health.findings().is_empty(), "{}", says(health));
        let health = &found(rights, client).await[mode];
        assert!(health.is_ready() && says(health).contains("+info"), "{}", says(health));
        assert!(says(health).contains("+scan"), "{}", says(health));
        assert_eq!(health.findings()[0].severity, Severity::Warning);
    }
}

/// The client fred asks more when it connects.
async fn the_named_permissions_leave_no_refusal_in_the_servers_log(client: Client) {
    let rights = format!("{} +client|id +info +scan +hgetall", Lua::COMMANDS);
    for protocol in ["resp2", "resp3"] {
        let (server, url) = server_for(&rights, client);
        let store = RedisStore::connect(&format!("{url}&protocol={protocol}")).await;
        let health = store.expect("the user may come in").health().await;
        assert!(health.findings().is_empty(), "{}", says(&health));
        let log = server.command(&["ACL", "LOG"]).expect("it is up");
        assert_eq!(log, ratelimit_testkit::RespValue::Array(Vec::new()), "{protocol}");
    }
}

async fn a_missing_permission_is_named_with_the_remedy(client: Client) {
    for (mode, rights) in [Lua::COMMANDS, Cas::COMMANDS, Multi::COMMANDS].into_iter().enumerate() {
        for command in rights.split_whitespace().map(|right| &right[1..]) {
            // These are for connecting.
            if matches!(command, "ping" | "hello" | "select") {
                continue;
            }
            let health = &found(&format!("{rights} +info -{command}"), client).await[mode];
            let message = says(health);
            assert!(!health.is_ready(), "{command}");
            assert!(
                message.contains(command) && message.contains("ACL SETUSER"),
                "{command}: {message}"
            );
            assert!(message.contains("~rl:*") && !message.contains("secret"), "{message}");
        }
    }
}

async fn forbidden_keys_are_reported(client: Client) {
    let (server, url) = server_for(&format!("{} +info", Lua::COMMANDS), client);
    let builder = RedisStore::builder().prefix("other");
    let health = builder.connect(&url).await.expect("the user may come in").health().await;
    assert!(!health.is_ready() && says(&health).contains("~other:*"), "{}", says(&health));
    drop(server);
}

async fn an_evicting_server_gets_a_warning(client: Client) {
    let binary = &RedisServer::binaries()[0];
    let args = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let server = RedisServer::start_with(binary, &args).expect("redis-server");
    let store = RedisStore::connect(&url(&server, client)).await.expect("it is up");
    let health = store.health().await;
    assert!(health.is_ready() && says(&health).contains("noeviction"), "{}", says(&health));
}

async fn a_full_server_is_reported(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&url(&server, client)).await.expect("it is up");
    query::<()>(&mut aside(&server), &["CONFIG", "SET", "maxmemory", "1"]);
    let health = store.health().await;
    assert!(!health.is_ready() && says(&health).contains("memory is full"), "{}", says(&health));
}

async fn a_replica_and_a_server_that_is_down_are_reported(client: Client) {
    let mut master = RedisServer::start().expect("redis-server");
    let port = master.port().to_string();
    let binary = &RedisServer::binaries()[0];
    let replica = RedisServer::start_with(binary, &["--replicaof", "127.0.0.1", &port]);
    let replica = replica.expect("a replica");
    let store = RedisStore::connect(&url(&replica, client)).await.expect("it is up");
    let health = store.health().await;
    assert!(!health.is_ready() && says(&health).contains("it is a replica"), "{}", says(&health));
    let store = RedisStore::connect(&url(&master, client)).await.expect("it is up");
    master.stop();
    let health = store.health().await;
    assert!(!health.is_ready() && says(&health).contains("127.0.0.1"), "{}", says(&health));
}

/// The user lacks a permission that only one of two limits needs. The other limit's charge stays, and
/// the error says so.
async fn a_charge_before_a_permission_error_is_reported_as_possible(client: Client) {
    let (server, url) = server_for(&format!("{} -zadd", Lua::COMMANDS), client);
    let store = RedisStore::connect(&url).await.expect("the user may come in");
    let rate = "5/h".parse().expect("a rate");
    let gcra = Gcra::new(rate, 5).expect("a limit").into();
    let log = SlidingLog::new(rate).expect("a limit").into();
    let limits = [("gcra", gcra), ("log", log)];
    let limits = limits.map(|(name, policy)| Limit::<Policy>::new(name, policy).expect("a name"));
    let check = |n: usize| Check { limit: &limits[n], key: "a", cost: 1 };
    let both = [check(0), check(1)];
    let error = store.apply(&Batch::new(&both).expect("distinct")).await.expect_err("denied");
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
    assert!(error.to_string().contains("ACL SETUSER"), "{error}");
    assert_eq!(query::<u64>(&mut aside(&server), &["HLEN", "rl:1::{a}"]), 1);
    // If nothing was written before, it is a configuration error.
    let (_server, url) = server_for(&format!("{} -hset", Lua::COMMANDS), client);
    let store = RedisStore::connect(&url).await.expect("the user may come in");
    let error = store.apply(&Batch::one(&check(0))).await.expect_err("denied");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

async fn health_checks_every_master_of_a_cluster(client: Client) {
    let cluster = RedisCluster::start().expect("a cluster");
    let store = RedisStore::connect(&with_client(&cluster.url(), client)).await.expect("it is up");
    let health = store.health().await;
    assert!(health.findings().is_empty() && health.servers().len() == 3, "{}", says(&health));
    // One of three masters allows less than the others.
    let denied = ["ACL", "SETUSER", "default", "-hset"];
    cluster.nodes()[1].command(&denied).expect("it answers").ok().expect("done");
    let health = store.health().await;
    let message = says(&health);
    assert_eq!(health.findings().len(), 1, "{message}");
    assert!(message.contains(&cluster.nodes()[1].port().to_string()), "{message}");
    // A cluster's node that is used without a cluster URL.
    let alone = with_client(&cluster.nodes()[0].url(), client);
    let alone = RedisStore::connect(&alone).await.expect("it is up").health().await;
    assert!(!alone.is_ready() && says(&alone).contains("redis-cluster://"), "{}", says(&alone));
}

#[cfg(feature = "fred")]
#[tokio::test]
async fn health_works_as_the_first_request_of_an_external_client() {
    use fred::prelude::*;
    let cluster = RedisCluster::start().expect("a cluster");
    let one = format!("redis-cluster://127.0.0.1:{}", cluster.client_ports()[0]);
    let config = Config::from_url(&one).expect("a URL");
    let client = fred::types::Builder::from_config(config).build().expect("a client");
    let store = RedisStore::builder().over(client).expect("a prefix");
    let health = store.health().await;
    assert!(health.is_ready() && health.servers().len() == 3, "{}", says(&health));
}

/// A cluster with a user who has these permissions, and that user's URL.
fn cluster_for(rights: &str, client: Client) -> (RedisCluster, String) {
    let cluster = RedisCluster::start().expect("a cluster");
    let mut words = vec!["ACL", "SETUSER", "limiter", "on", ">secret", "~rl:*", "-@all"];
    words.extend(rights.split_whitespace());
    for node in cluster.nodes() {
        node.command(&words).expect("it answers").ok().expect("done");
    }
    let url = cluster.url().replace("://", "://limiter:secret@");
    (cluster, with_client(&url, client))
}

/// In every mode: the store is ready, and it decides across slots even while a slot migrates.
async fn the_permissions_for_a_cluster_suffice(client: Client) {
    async fn decides<S: Store<Policy, Error = RedisError>>(
        store: &S,
        limit: &Limit<Policy>,
        keys: [&str; 2],
        id: Option<ReservationId>,
        mode: &str,
    ) {
        let checks = keys.map(|key| Check { limit, key, cost: 1 });
        let batch = Batch::new(&checks).expect("distinct");
        let batch = id.map_or(batch, |id| batch.id(id));
        let _ = store.apply(&batch).await.unwrap_or_else(|error| panic!("{mode}: {error}"));
        let reset = Batch::new(&checks).expect("distinct").op(Op::Reset);
        let _ = store.apply(&reset).await.unwrap_or_else(|error| panic!("{mode}: {error}"));
    }

    async fn tried<M>(client: Client, limit: Limit<Policy>, id: Option<ReservationId>)
    where
        RedisStore<M>: Store<Policy, Error = RedisError>,
        M: Healthy,
    {
        let rights = format!("{} {}", M::COMMANDS, ON_A_CLUSTER);
        let (cluster, url) = cluster_for(&rights, client);
        let store = RedisStore::connect(&url).await.expect("the user may come in").in_mode::<M>();
        let message = says(&M::health(&store).await);
        // The three things that it may not read, on each of three masters.
        assert!(
            message.lines().count() == 9 && !message.contains("error"),
            "{}: {message}",
            M::NAME
        );
        assert!(message.contains("+info") && message.contains("+cluster|info"), "{message}");
        assert!(!message.contains("secret"), "{message}");
        decides(&store, &limit, ["alice", "bob"], id, M::NAME).await;
        let slot = cluster.slot_of("{alice}");
        let owner = cluster.master_of(slot).expect("an owner");
        cluster.begin_migration(slot, (owner + 1) % 3).expect("begun");
        decides(&store, &limit, ["alice", "bob"], None, M::NAME).await;
        cluster.finish_migration(slot, (owner + 1) % 3).expect("moved");
        decides(&store, &limit, ["alice", "bob"], None, M::NAME).await;
    }

    let rate = "1000/h".parse().expect("a rate");
    let gcra = || Limit::new("l", Gcra::new(rate, 9).expect("a limit").into()).expect("a name");
    let window = FixedWindow::new(rate).expect("a limit");
    tried::<Lua>(client, gcra(), Some(ReservationId::new(1))).await;
    tried::<Cas>(client, gcra(), Some(ReservationId::new(1))).await;
    let attempts = Limit::new("l", Attempts::new(window).into()).expect("a name");
    tried::<Multi>(client, attempts, None).await;
}

/// The health of a store in each mode.
trait Healthy: Mode {
    fn health(store: &RedisStore<Self>) -> impl Future<Output = Health>
    where
        Self: Sized;
}

macro_rules! healthy {
    ($($mode:ty),*) => {
        $(
            impl Healthy for $mode {
                async fn health(store: &RedisStore<Self>) -> Health {
                    store.health().await
                }
            }
        )*
    };
}

healthy!(Lua, Cas, Multi);

/// A permission that only a cluster needs.
async fn a_missing_permission_on_a_cluster_is_named(client: Client) {
    for missing in ["cluster|slots", "cluster|info"] {
        let rights = format!("{} {ON_A_CLUSTER} +info +cluster|info -{missing}", Lua::COMMANDS);
        let (_cluster, url) = cluster_for(&rights, client);
        match RedisStore::connect(&url).await {
            Ok(store) => {
                let message = says(&store.health().await);
                assert!(
                    message.contains(missing) && message.contains("ACL SETUSER"),
                    "{missing}: {message}"
                );
            }
            Err(error) => assert!(error.to_string().contains(missing), "{missing}: {error}"),
        }
    }
}

/// The permissions in the documentation of `Mode::COMMANDS`.
const ON_A_CLUSTER: &str = "+cluster|slots +asking";

async fn a_cluster_that_is_down_is_reported(client: Client) {
    let cluster = RedisCluster::start().expect("a cluster");
    let store = RedisStore::connect(&with_client(&cluster.url(), client)).await.expect("it is up");
    for node in cluster.nodes() {
        node.command(&["CLUSTER", "DELSLOTS", "0"]).expect("it answers").ok().expect("done");
    }
    let begin = Instant::now();
    loop {
        let health = store.health().await;
        // fred cannot connect to any node of such a cluster, which is reported as well.
        let message = says(&health);
        if message.contains("16383 of 16384") || message.contains("CLUSTERDOWN") {
            assert!(!health.is_ready());
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(20), "{}", says(&health));
    }
}

async fn a_health_check_leaves_nothing_behind(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&url(&server, client)).await.expect("it is up");
    store.health().await;
    store.in_mode::<Cas>().health().await;
    store.in_mode::<Multi>().health().await;
    // A compare-and-set removal leaves an empty value for a millisecond.
    let begin = Instant::now();
    loop {
        let keys: Vec<String> = query(&mut aside(&server), &["KEYS", "*"]);
        if keys.is_empty() {
            break;
        }
        assert!(begin.elapsed() < Duration::from_secs(1), "{keys:?}");
    }
}

/// However keys are built, the check covers every master that stores any, and quickly.
async fn health_checks_every_master_whatever_the_tag(client: Client) {
    let cluster = RedisCluster::start().expect("a cluster");
    let denied = ["ACL", "SETUSER", "default", "-hset"];
    for node in cluster.nodes() {
        node.command(&denied).expect("it answers").ok().expect("done");
    }
    let url = with_client(&cluster.url(), client);
    for (tag, secret, masters) in [
        (Tag::Identifier, false, 3),
        (Tag::Identifier, true, 3),
        (Tag::UpTo('-'), false, 3),
        (Tag::UpTo('/'), true, 3),
        (Tag::Fixed("acme".into()), false, 1),
    ] {
        let builder = RedisStore::builder().tag(tag.clone());
        let builder =
            if secret { builder.hide_identifiers("a secret of the fleet") } else { builder };
        let store = builder.connect(&url).await.expect("it is up");
        let begin = Instant::now();
        let health = store.health().await;
        assert!(begin.elapsed() < Duration::from_millis(500), "{tag:?}: {:?}", begin.elapsed());
        assert_eq!(health.findings().len(), masters, "{tag:?}: {}", says(&health));
    }
}

async fn health_checks_a_sentinel_service(client: Client) {
    let sentinels = RedisSentinels::start().expect("sentinels");
    let store =
        RedisStore::connect(&with_client(&sentinels.url(), client)).await.expect("it is up");
    for health in [
        store.health().await,
        store.in_mode::<Cas>().health().await,
        store.in_mode::<Multi>().health().await,
    ] {
        assert!(health.findings().is_empty() && health.servers().len() == 1, "{}", says(&health));
    }
}

with_each_client!(
    a_charge_before_a_permission_error_is_reported_as_possible,
    the_permissions_for_a_cluster_suffice,
    a_missing_permission_on_a_cluster_is_named,
    a_cluster_that_is_down_is_reported,
    a_health_check_leaves_nothing_behind,
    health_checks_every_master_whatever_the_tag,
    health_checks_a_sentinel_service,
    a_fresh_server_is_ready_for_every_mode_and_reports_its_version,
    each_mode_is_ready_with_the_permissions_that_it_names,
    the_named_permissions_leave_no_refusal_in_the_servers_log,
    a_missing_permission_is_named_with_the_remedy,
    forbidden_keys_are_reported,
    an_evicting_server_gets_a_warning,
    a_full_server_is_reported,
    a_replica_and_a_server_that_is_down_are_reported,
    health_checks_every_master_of_a_cluster,
);

/// What a transaction cannot do.
const NOTHING_BACK: &[Capability] =
    &[Capability::Refund, Capability::Force, Capability::Reservations, Capability::TimesInOrder];

/// A user with exactly the permissions that a mode names, on a server of its own.
struct Restricted<M> {
    runtime: Runtime,
    server: RedisServer,
    store: RedisStore<M>,
}

macro_rules! harness {
    ($mode:ty, $lacks:expr) => {
        impl Harness for Restricted<$mode> {
            type Store = RedisStore<$mode>;
            const LACKS: &'static [Capability] = $lacks;

            fn new() -> Self {
                // The test reads more than the store does, to see what is stored.
                let rights = format!("{} +hget +zrange +lrange", <$mode>::COMMANDS);
                let (server, url) = server_for(&rights, Client::default());
                let runtime = Runtime::new().expect("a runtime");
                let store =
                    runtime.block_on(RedisStore::connect(&url)).expect("it is up").in_mode();
                Self { runtime, server, store }
            }

            fn store(&self) -> Self::Store {
                query::<()>(&mut aside(&self.server), &["FLUSHALL"]);
                self.store.clone()
            }

            fn block_on<F: Future>(&self, future: F) -> F::Output {
                self.runtime.block_on(future)
            }

            async fn state(
                &self,
                store: &Self::Store,
                limit: &Limit<Policy>,
                key: &str,
            ) -> Option<PolicyState> {
                store.state(limit, key).await.expect("a state, or none")
            }

            async fn leaks(&self, _: &Self::Store, _within: Duration) -> Vec<String> {
                Vec::new()
            }
        }
    };
}

harness!(Lua, &[]);
harness!(Cas, &[]);
harness!(Multi, NOTHING_BACK);

fn anything<H: Harness>(scope: Scope) {
    let harness = H::new();
    for property in [Property::OneAnswerEverywhere, Property::ReservationsAgree] {
        if property.applies(scope)
            && let Err(failure) = try_same(&harness, property, scope, 64)
        {
            panic!("{failure}");
        }
    }
}

#[test]
fn the_permissions_of_the_lua_mode_suffice() {
    anything::<Restricted<Lua>>(Scope::Mixed);
}

#[test]
fn the_permissions_of_the_cas_mode_suffice() {
    anything::<Restricted<Cas>>(Scope::Mixed);
}

#[test]
fn the_permissions_of_the_multi_mode_suffice() {
    anything::<Restricted<Multi>>(Scope::MixedAttempts);
}
