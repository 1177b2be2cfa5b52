//! What a store finds out about its servers, and the rights that each mode needs: no more and no less.

#![allow(clippy::expect_used, clippy::panic, reason = "tests")]

mod common;

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::{aside, query};
use ratelimit_core::{Limit, Policy, PolicyState};
use ratelimit_redis::{Cas, Health, Lua, Mode, Multi, RedisStore, Severity};
use ratelimit_testkit::{Harness, Property, RedisServer, Scope, try_same};
use tokio::runtime::Runtime;

/// A server with a user who has these rights, and that user's URL.
fn server_for(rights: &str) -> (RedisServer, String) {
    let server = RedisServer::start().expect("redis-server");
    let mut words = vec!["ACL", "SETUSER", "limiter", "on", ">secret", "~rl:*", "-@all"];
    words.extend(rights.split_whitespace());
    query::<()>(&mut aside(&server), &words);
    let url = format!("redis://limiter:secret@127.0.0.1:{}", server.port());
    (server, url)
}

/// What is found in each mode, with these rights.
async fn found(rights: &str) -> [Health; 3] {
    let (_server, url) = server_for(rights);
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

#[tokio::test]
async fn a_fresh_server_is_ready_for_every_mode_and_tells_what_it_is() {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&server.url()).await.expect("it is up");
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

#[tokio::test]
async fn each_mode_is_ready_with_the_rights_that_it_names() {
    for (mode, rights) in [Lua::COMMANDS, Cas::COMMANDS, Multi::COMMANDS].into_iter().enumerate() {
        let health = &found(&format!("{rights} +info")).await[mode];
        assert!(health.findings().is_empty(), "{}", says(health));
        let health = &found(rights).await[mode];
        assert!(health.is_ready() && says(health).contains("+info"), "{}", says(health));
        assert_eq!(health.findings()[0].severity, Severity::Warning);
    }
}

#[tokio::test]
async fn a_right_that_is_missing_is_named_with_the_remedy() {
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
            let health = &found(&format!("{rights} +info -{command}")).await[mode];
            let told = says(health);
            assert!(!health.is_ready(), "{command}");
            assert!(told.contains(command) && told.contains("ACL SETUSER"), "{command}: {told}");
            assert!(told.contains("~rl:*") && !told.contains("secret"), "{told}");
        }
    }
}

#[tokio::test]
async fn keys_that_are_not_allowed_are_told() {
    let (server, url) = server_for(&format!("{} +info", Lua::COMMANDS));
    let builder = RedisStore::builder().prefix("other");
    let health = builder.connect(&url).await.expect("the user may come in").health().await;
    assert!(!health.is_ready() && says(&health).contains("~other:*"), "{}", says(&health));
    drop(server);
}

#[tokio::test]
async fn a_server_that_forgets_under_pressure_is_warned_of() {
    let binary = &RedisServer::binaries()[0];
    let args = ["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"];
    let server = RedisServer::start_with(binary, &args).expect("redis-server");
    let store = RedisStore::connect(&server.url()).await.expect("it is up");
    let health = store.health().await;
    assert!(health.is_ready() && says(&health).contains("noeviction"), "{}", says(&health));
}

#[tokio::test]
async fn a_full_server_is_told() {
    let server = RedisServer::start().expect("redis-server");
    let store = RedisStore::connect(&server.url()).await.expect("it is up");
    query::<()>(&mut aside(&server), &["CONFIG", "SET", "maxmemory", "1"]);
    let health = store.health().await;
    assert!(!health.is_ready() && says(&health).contains("memory is full"), "{}", says(&health));
}

#[tokio::test]
async fn a_replica_and_a_server_that_is_away_are_told() {
    let mut master = RedisServer::start().expect("redis-server");
    let port = master.port().to_string();
    let binary = &RedisServer::binaries()[0];
    let replica = RedisServer::start_with(binary, &["--replicaof", "127.0.0.1", &port]);
    let replica = replica.expect("a replica");
    let store = RedisStore::connect(&replica.url()).await.expect("it is up");
    let health = store.health().await;
    assert!(!health.is_ready() && says(&health).contains("it is a replica"), "{}", says(&health));
    let store = RedisStore::connect(&master.url()).await.expect("it is up");
    master.stop();
    let health = store.health().await;
    assert!(!health.is_ready() && says(&health).contains("127.0.0.1"), "{}", says(&health));
}

/// A user with the rights that a mode names, and no others, on a server of its own.
struct Restricted<M> {
    runtime: Runtime,
    _server: RedisServer,
    store: RedisStore<M>,
}

static NEXT: AtomicU64 = AtomicU64::new(0);

macro_rules! harness {
    ($mode:ty, $gives_back:literal) => {
        impl Harness for Restricted<$mode> {
            type Store = RedisStore<$mode>;
            const GIVES_BACK: bool = $gives_back;

            fn new() -> Self {
                // To tell what is stored, a test reads more than the store does.
                let rights = format!("{} +hget +zrange +lrange", <$mode>::COMMANDS);
                let (server, url) = server_for(&rights);
                let runtime = Runtime::new().expect("a runtime");
                let store =
                    runtime.block_on(RedisStore::connect(&url)).expect("it is up").in_mode();
                Self { runtime, _server: server, store }
            }

            fn store(&self) -> Self::Store {
                let flush = ["FLUSHALL"];
                if NEXT.fetch_add(1, Ordering::Relaxed) > 0 {
                    query::<()>(&mut aside(&self._server), &flush);
                }
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
