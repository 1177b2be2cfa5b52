//! What a store finds out about its servers, and the rights that each mode needs: no more and no less.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

#[macro_use]
mod common;

use std::time::Duration;

use common::{aside, query, url, with_client};
use ratelimit_core::{
    Batch, Check, ErrorKind, Gcra, Limit, Policy, PolicyState, SlidingLog, Store, StoreError,
};
use ratelimit_redis::{Cas, Client, Health, Lua, Mode, Multi, RedisStore, Severity};
use ratelimit_testkit::{Harness, Property, RedisCluster, RedisServer, Scope, try_same};
use tokio::runtime::Runtime;

/// A server with a user who has these rights, and that user's URL.
fn server_for(rights: &str, client: Client) -> (RedisServer, String) {
    let server = RedisServer::start().expect("redis-server");
    let mut words = vec!["ACL", "SETUSER", "limiter", "on", ">secret", "~rl:*", "-@all"];
    words.extend(rights.split_whitespace());
    query::<()>(&mut aside(&server), &words);
    let url = format!("redis://limiter:secret@127.0.0.1:{}", server.port());
    (server, with_client(&url, client))
}

/// What is found in each mode, with these rights.
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

async fn a_fresh_server_is_ready_for_every_mode_and_tells_what_it_is(client: Client) {
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

async fn each_mode_is_ready_with_the_rights_that_it_names(client: Client) {
    for (mode, rights) in [Lua::COMMANDS, Cas::COMMANDS, Multi::COMMANDS].into_iter().enumerate() {
        let health = &found(&format!("{rights} +info"), client).await[mode];
        assert!(health.findings().is_empty(), "{}", says(health));
        let health = &found(rights, client).await[mode];
        assert!(health.is_ready() && says(health).contains("+info"), "{}", says(health));
        assert_eq!(health.findings()[0].severity, Severity::Warning);
    }
}

async fn a_right_that_is_missing_is_named_with_the_remedy(client: Client) {
    for (mode, rights, missing) in [
        (0, Lua::COMMANDS, ["evalsha", "hset", "zadd", "rpush", "time", "pexpire"]),
        (1, Cas::COMMANDS, ["get", "set", "time", "evalsha", "eval", "del"]),
        (2, Multi::COMMANDS, ["multi", "hincrby", "zadd", "rpush", "pexpire", "lrange"]),
    ] {
        for command in missing {
            // Cas sets a single key without a script where it can.
            if mode == 1 && matches!(command, "eval" | "evalsha" | "del") {
                continue;
            }
            let health = &found(&format!("{rights} +info -{command}"), client).await[mode];
            let told = says(health);
            assert!(!health.is_ready(), "{command}");
            assert!(told.contains(command) && told.contains("ACL SETUSER"), "{command}: {told}");
            assert!(told.contains("~rl:*") && !told.contains("secret"), "{told}");
        }
    }
}

async fn keys_that_are_not_allowed_are_told(client: Client) {
    let (server, url) = server_for(&format!("{} +info", Lua::COMMANDS), client);
    let builder = RedisStore::builder().prefix("other");
    let health = builder.connect(&url).await.expect("the user may come in").health().await;
    assert!(!health.is_ready() && says(&health).contains("~other:*"), "{}", says(&health));
    drop(server);
}

async fn a_server_that_forgets_under_pressure_is_warned_of(client: Client) {
    let binary = &RedisServer::binaries()[0];
    let args = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let server = RedisServer::start_with(binary, &args).expect("redis-server");
    let store = RedisStore::connect(&url(&server, client)).await.expect("it is up");
    let health = store.health().await;
    assert!(health.is_ready() && says(&health).contains("noeviction"), "{}", says(&health));
}

async fn a_full_server_is_told(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&url(&server, client)).await.expect("it is up");
    query::<()>(&mut aside(&server), &["CONFIG", "SET", "maxmemory", "1"]);
    let health = store.health().await;
    assert!(!health.is_ready() && says(&health).contains("memory is full"), "{}", says(&health));
}

async fn a_replica_and_a_server_that_is_away_are_told(client: Client) {
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

/// One limit of two needs what the user may not: what the other was charged by then stays charged, and
/// the error does not say otherwise.
async fn what_was_charged_before_a_right_was_missing_is_not_denied(client: Client) {
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
    // Where nothing was written before, it is a matter of configuration.
    let (_server, url) = server_for(&format!("{} -hset", Lua::COMMANDS), client);
    let store = RedisStore::connect(&url).await.expect("the user may come in");
    let error = store.apply(&Batch::one(&check(0))).await.expect_err("denied");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
}

async fn a_cluster_is_looked_at_master_by_master(client: Client) {
    let cluster = RedisCluster::start().expect("a cluster");
    let store = RedisStore::connect(&with_client(&cluster.url(), client)).await.expect("it is up");
    let health = store.health().await;
    assert!(health.findings().is_empty() && health.servers().len() == 3, "{}", says(&health));
    // One of three may do less than the others.
    let denied = ["ACL", "SETUSER", "default", "-hset"];
    cluster.nodes()[1].command(&denied).expect("it answers").ok().expect("done");
    let health = store.health().await;
    let told = says(&health);
    assert_eq!(health.findings().len(), 1, "{told}");
    assert!(told.contains(&cluster.nodes()[1].port().to_string()), "{told}");
    // Not as a cluster it is a part of one.
    let alone = with_client(&cluster.nodes()[0].url(), client);
    let alone = RedisStore::connect(&alone).await.expect("it is up").health().await;
    assert!(!alone.is_ready() && says(&alone).contains("redis-cluster://"), "{}", says(&alone));
}

#[cfg(feature = "fred")]
#[tokio::test]
async fn a_cluster_is_looked_at_before_anything_else_over_a_given_client() {
    use fred::prelude::*;
    let cluster = RedisCluster::start().expect("a cluster");
    let one = format!("redis-cluster://127.0.0.1:{}", cluster.client_ports()[0]);
    let config = Config::from_url(&one).expect("a URL");
    let client = fred::types::Builder::from_config(config).build().expect("a client");
    let store = RedisStore::builder().over(client).expect("a prefix");
    let health = store.health().await;
    assert!(health.is_ready() && health.servers().len() == 3, "{}", says(&health));
}

with_each_client!(
    what_was_charged_before_a_right_was_missing_is_not_denied,
    a_fresh_server_is_ready_for_every_mode_and_tells_what_it_is,
    each_mode_is_ready_with_the_rights_that_it_names,
    a_right_that_is_missing_is_named_with_the_remedy,
    keys_that_are_not_allowed_are_told,
    a_server_that_forgets_under_pressure_is_warned_of,
    a_full_server_is_told,
    a_replica_and_a_server_that_is_away_are_told,
    a_cluster_is_looked_at_master_by_master,
);

/// A user with the rights that a mode names, and no others, on a server of its own.
struct Restricted<M> {
    runtime: Runtime,
    server: RedisServer,
    store: RedisStore<M>,
}

macro_rules! harness {
    ($mode:ty, $gives_back:literal) => {
        impl Harness for Restricted<$mode> {
            type Store = RedisStore<$mode>;
            const GIVES_BACK: bool = $gives_back;

            fn new() -> Self {
                // To tell what is stored, a test reads more than the store does.
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

harness!(Lua, true);
harness!(Cas, true);
harness!(Multi, false);

fn anything<H: Harness>(scope: Scope) {
    let harness = H::new();
    for property in [Property::OneAnswerEverywhere, Property::HoldsAgree] {
        if property.applies(scope)
            && let Err(failure) = try_same(&harness, property, scope, 64)
        {
            panic!("{failure}");
        }
    }
}

#[test]
fn the_rights_of_the_lua_mode_are_enough_for_everything() {
    anything::<Restricted<Lua>>(Scope::Mixed);
}

#[test]
fn the_rights_of_the_cas_mode_are_enough_for_everything() {
    anything::<Restricted<Cas>>(Scope::Mixed);
}

#[test]
fn the_rights_of_the_multi_mode_are_enough_for_everything() {
    anything::<Restricted<Multi>>(Scope::MixedAttempts);
}
