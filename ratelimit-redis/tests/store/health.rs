//! What a store reports about its servers, and that each mode needs exactly the permissions that it
//! names.

use ratelimit_redis::{Health, Severity, Tag};

use crate::common::prelude::*;

const MODES: [&str; 3] = [Lua::COMMANDS, Cas::COMMANDS, Multi::COMMANDS];
/// The permissions in the documentation of `Mode::COMMANDS`.
const ON_A_CLUSTER: &str = "+cluster|slots +asking";

/// The URL by which a user with these permissions on the keys of a store comes in.
fn allowed(servers: &[RedisServer], url: &str, rights: &str, client: Client) -> String {
    with_client(&login(servers, url, &format!("~rl:* -@all {rights}")), client)
}

async fn connect(url: &str) -> RedisStore {
    RedisStore::connect(url).await.expect("the user may come in")
}

/// A user's store on a server of its own.
async fn store_of(rights: &str, client: Client) -> (RedisServer, RedisStore) {
    let server = server();
    let url = allowed(std::slice::from_ref(&server), &server.url(), rights, client);
    let store = connect(&url).await;
    (server, store)
}

/// The findings in each mode.
async fn found(store: &RedisStore) -> [Health; 3] {
    let (cas, multi) = (store.in_mode::<Cas>(), store.in_mode::<Multi>());
    let lua = store.clone();
    // Its future can be sent.
    let lua = tokio::spawn(async move { lua.health().await }).await.expect("no panic");
    [lua, cas.health().await, multi.health().await]
}

#[track_caller]
fn is_well(health: &Health, servers: usize) {
    assert!(health.is_ready() && health.findings().is_empty(), "{}", findings_in_words(health));
    assert_eq!(health.servers().len(), servers);
}

#[track_caller]
fn says(health: &Health, is_ready: bool, words: &str) {
    let told = findings_in_words(health);
    assert!(health.is_ready() == is_ready && told.contains(words), "{words}: {told}");
}

async fn a_fresh_server_is_ready_for_every_mode_and_left_as_it_was(client: Client) {
    let server = server();
    for health in found(&store(&server.url(), client).await).await {
        is_well(&health, 1);
        let version = health.servers()[0].version.as_deref().expect("it tells");
        assert!(version.starts_with("redis ") || version.starts_with("valkey "), "{version}");
    }
    // A compare-and-set removal leaves an empty value for a millisecond.
    until(async || keys(&server).is_empty().then_some(()).ok_or("something is left")).await;
}

async fn each_mode_is_ready_with_the_permissions_that_it_names(client: Client) {
    for (mode, rights) in MODES.into_iter().enumerate() {
        let (_server, store) = store_of(&format!("{rights} +info +scan +hgetall"), client).await;
        is_well(&found(&store).await[mode], 1);
        let (_server, store) = store_of(rights, client).await;
        let health = &found(&store).await[mode];
        says(health, true, "+info");
        says(health, true, "+scan");
        assert_eq!(health.findings()[0].severity, Severity::Warning);
    }
}

/// The client fred asks more when it connects.
async fn the_named_permissions_leave_no_refusal_in_the_servers_log(client: Client) {
    let rights = format!("{} +client|id +info +scan +hgetall", Lua::COMMANDS);
    let server = server();
    let url = allowed(std::slice::from_ref(&server), &server.url(), &rights, client);
    for protocol in ["resp2", "resp3"] {
        is_well(&connect(&format!("{url}&protocol={protocol}")).await.health().await, 1);
        assert_eq!(tell(&server, &["ACL", "LOG"]), RespValue::Array(Vec::new()), "{protocol}");
    }
}

async fn what_is_wrong_is_named_with_the_remedy(client: Client) {
    let only_rl = server();
    let rights = format!("{} +info", Lua::COMMANDS);
    let url = allowed(std::slice::from_ref(&only_rl), &only_rl.url(), &rights, client);
    let other = RedisStore::builder().prefix("other").connect(&url).await;
    says(&other.expect("the user may come in").health().await, false, "~other:*");

    let evicts = server_with(&["--maxmemory", "100mb", "--maxmemory-policy", "allkeys-lru"]);
    says(&store(&evicts.url(), client).await.health().await, true, "noeviction");
    let full = server();
    let store_of_full = store(&full.url(), client).await;
    tell(&full, &["CONFIG", "SET", "maxmemory", "1"]);
    says(&store_of_full.health().await, false, "raise maxmemory");

    let master = server();
    let replica = RedisServer::replica_of(&master).expect("a replica");
    says(&store(&replica.url(), client).await.health().await, false, "it is a replica");
    let store = store(&master.url(), client).await;
    master.stop();
    says(&store.health().await, false, "127.0.0.1");
}

async fn health_checks_every_master_of_a_cluster_whatever_the_tag(client: Client) {
    let cluster = RedisCluster::start().expect("a cluster");
    let url = with_client(&cluster.url(), client);
    is_well(&connect(&url).await.health().await, 3);
    // One of three masters allows less than the others.
    let deny = |node: usize| tell(&cluster.nodes()[node], &["ACL", "SETUSER", "default", "-hset"]);
    deny(1);
    let health = connect(&url).await.health().await;
    assert_eq!(health.findings().len(), 1, "{}", findings_in_words(&health));
    says(&health, false, &cluster.nodes()[1].port().to_string());
    // A cluster's node that is used without a cluster URL.
    let alone = with_client(&cluster.nodes()[0].url(), client);
    says(&connect(&alone).await.health().await, false, "redis-cluster://");
    deny(0);
    deny(2);
    // However keys are built, the check covers every master that stores any, and quickly.
    for (tag, is_secret, masters) in [
        (Tag::Identifier, false, 3),
        (Tag::Identifier, true, 3),
        (Tag::UpTo('-'), false, 3),
        (Tag::UpTo('/'), true, 3),
        (Tag::Fixed("acme".into()), false, 1),
    ] {
        let builder = RedisStore::builder().tag(tag.clone());
        let builder = if is_secret { builder.hide_identifiers("a secret") } else { builder };
        let store = builder.connect(&url).await.expect("it is up");
        let begin = Instant::now();
        let health = store.health().await;
        assert!(begin.elapsed() < Duration::from_millis(500), "{tag:?}: {:?}", begin.elapsed());
        assert_eq!(health.findings().len(), masters, "{tag:?}: {}", findings_in_words(&health));
    }
    // fred cannot connect to any node of a cluster that is down, which is reported as well.
    for node in cluster.nodes() {
        tell(node, &["CLUSTER", "DELSLOTS", "0"]);
    }
    let store = connect(&url).await;
    let health = until(async || {
        let (health, says) = (store.health().await, ["16383 of 16384", "CLUSTERDOWN"]);
        let told = findings_in_words(&health);
        if says.iter().any(|says| told.contains(says)) { Ok(health) } else { Err(told) }
    });
    assert!(!health.await.is_ready());
}

async fn health_checks_a_sentinel_service(client: Client) {
    let sentinels = RedisSentinels::start().expect("sentinels");
    for health in found(&store(&sentinels.url(), client).await).await {
        is_well(&health, 1);
    }
}

/// In every mode: the store is ready, and it decides across slots even while a slot migrates.
async fn the_permissions_for_a_cluster_suffice_and_a_missing_one_is_named(client: Client) {
    let cluster = RedisCluster::start().expect("a cluster");
    for (mode, commands) in MODES.into_iter().enumerate() {
        let rights = format!("{commands} {ON_A_CLUSTER}");
        let store = connect(&allowed(cluster.nodes(), &cluster.url(), &rights, client)).await;
        let told = findings_in_words(&found(&store).await[mode]);
        // The three things that it may not read, on each of three masters.
        assert!(told.lines().count() == 9 && !told.contains("error"), "{mode}: {told}");
        assert!(told.contains("+info") && told.contains("+cluster|info"), "{told}");
        assert!(!told.contains("s3cret"), "{told}");
        let limit = if mode == 2 { attempts() } else { seldom() };
        let both = [(&limit, "alice", 1), (&limit, "bob", 1)];
        let (name, store) = in_every_mode(&store)[mode].clone();
        let decides = async |id| {
            for op in [Op::Acquire, Op::Reset] {
                let answer = apply(&store, &both, op, if op == Op::Reset { None } else { id });
                let _ = answer.await.unwrap_or_else(|error| panic!("{name} {op}: {error}"));
            }
        };
        decides((mode < 2).then_some(1)).await;
        let slot = cluster.slot_of("{alice}");
        let to = (cluster.master_of(slot).expect("an owner") + 1) % 3;
        cluster.begin_migration(slot, to).expect("begun");
        decides(None).await;
        cluster.finish_migration(slot, to).expect("moved");
        decides(None).await;
    }
    for missing in ["cluster|slots", "cluster|info"] {
        let rights = format!("{} {ON_A_CLUSTER} +info +cluster|info -{missing}", Lua::COMMANDS);
        let url = allowed(cluster.nodes(), &cluster.url(), &rights, client);
        let told = match RedisStore::connect(&url).await {
            Ok(store) => findings_in_words(&store.health().await),
            Err(error) => error.to_string(),
        };
        assert!(told.contains(missing) && told.contains("ACL SETUSER"), "{missing}: {told}");
    }
}

with_each_client! {
    a_fresh_server_is_ready_for_every_mode_and_left_as_it_was,
    each_mode_is_ready_with_the_permissions_that_it_names,
    the_named_permissions_leave_no_refusal_in_the_servers_log,
    what_is_wrong_is_named_with_the_remedy,
    health_checks_every_master_of_a_cluster_whatever_the_tag,
    health_checks_a_sentinel_service,
    the_permissions_for_a_cluster_suffice_and_a_missing_one_is_named,
}

/// The commands of each mode that every request needs, or every request of some limits.
const TRIED: [&str; 3] = [
    "eval evalsha time get set del unlink hget hset hdel pttl pexpire zadd zrange rpush lindex",
    "evalsha time get set del",
    "multi exec time del pexpire hincrby hgetall zadd zremrangebyrank zrange rpush lrange",
];

#[tokio::test]
async fn a_missing_permission_is_named_in_every_mode() {
    let server = server();
    for (mode, (rights, tried)) in MODES.into_iter().zip(TRIED).enumerate() {
        for command in tried.split(' ') {
            let rights = format!("{rights} +info -{command}");
            let servers = std::slice::from_ref(&server);
            let url = allowed(servers, &server.url(), &rights, Client::default());
            let health = &found(&connect(&url).await).await[mode];
            for words in [command, "ACL SETUSER", "~rl:*"] {
                says(health, false, words);
            }
            assert!(!findings_in_words(health).contains("s3cret"), "{}", findings_in_words(health));
        }
    }
}
