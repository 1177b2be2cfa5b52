//! A healthy cluster whose slots move.

use ratelimit_core::{Batch, Check, ErrorKind, Store, StoreError};
use ratelimit_redis::{
    Argument, Cas, Client, Connection, Deadline, Multi, RedisConnection, RedisStore, Reply, Tag,
};
use ratelimit_testkit::{FaultProxy, RedisCluster, RedisServer, RespValue};
use std::time::{Duration, Instant};
use tokio::task::JoinSet;

use super::{
    PATIENCE, acquire, aside, attempts, left, logged, seldom, store, store_within,
    three_and_no_more, with_client,
};

fn cluster() -> &'static RedisCluster {
    RedisCluster::shared().expect("a cluster")
}

/// An identifier's slot, the node that owns it, and another node.
fn places(identifier: &str) -> (u16, usize, usize) {
    let slot = cluster().slot_of(&format!("{{{identifier}}}"));
    let owner = cluster().master_of(slot).expect("an owner");
    (slot, owner, (owner + 1) % 3)
}

async fn each_key_is_decided_on_its_owner_in_every_mode(client: Client) {
    let lua = store(&cluster().url(), client).await;
    let (cas, multi) = (lua.in_mode::<Cas>(), lua.in_mode::<Multi>());
    let (mut owners, limit) = ([0; 3], seldom());
    for n in 0..24 {
        let key = format!("each-{n}");
        three_and_no_more(&lua, &limit, &key).await;
        three_and_no_more(&cas, &limit, &key).await;
        three_and_no_more(&multi, &attempts(), &key).await;
        let state_key = lua.key(&limit, &key);
        let owner = cluster().master_of(cluster().slot_of(&state_key)).expect("an owner");
        let exists = cluster().nodes()[owner].command(&["EXISTS", &state_key]);
        assert_eq!(exists, Ok(RespValue::Integer(1)), "{state_key} on node {owner}");
        owners[owner] += 1;
    }
    assert!(owners.iter().all(|keys| *keys > 0), "{owners:?}");
}

async fn one_live_seed_is_enough_to_find_the_cluster(client: Client) {
    let [first, ..] = cluster().client_ports()[..] else { panic!("nodes") };
    let away = FaultProxy::start(first).expect("a proxy");
    away.refuse(true);
    let hangs = FaultProxy::start(first).expect("a proxy");
    hangs.hang(true);
    for (n, seeds) in [
        format!("127.0.0.1:{first}"),
        format!("127.0.0.1:{},127.0.0.1:{first}", away.port()),
        format!("127.0.0.1:{},127.0.0.1:{first}", hangs.port()),
        format!("localhost:{first}"),
    ]
    .into_iter()
    .enumerate()
    {
        let begin = Instant::now();
        let store = store(&format!("redis-cluster://{seeds}"), client).await;
        for key in ["x", "y", "z", "v", "w"] {
            assert_eq!(left(&store, &seldom(), &format!("seeds-{n}-{key}")).await, 2);
        }
        assert!(begin.elapsed() < PATIENCE / 2, "{seeds}: {:?}", begin.elapsed());
    }
    let silent = format!("redis-cluster://127.0.0.1:{},127.0.0.1:{}", away.port(), hangs.port());
    let begin = Instant::now();
    let error = store_within(Duration::from_millis(300), &silent, client)
        .await
        .expect_err("no server answers");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(begin.elapsed() < PATIENCE / 2, "{:?}", begin.elapsed());
}

async fn a_slot_that_has_moved_is_followed(client: Client) {
    let store = store(&cluster().url(), client).await;
    let key = format!("moves-for-{client}");
    let (slot, owner, other) = places(&key);
    assert_eq!(left(&store, &seldom(), &key).await, 2);
    aside(move || cluster().migrate(slot, other)).await.expect("moved");
    assert_eq!(left(&store, &seldom(), &key).await, 1);
    assert_eq!(left(&store, &seldom(), &key).await, 0);
    aside(move || cluster().migrate(slot, owner)).await.expect("moved");
    assert!(!acquire(&store, &seldom(), &key).await.expect("decided").allowed());
}

async fn during_a_migration_each_key_is_decided_where_it_lies(client: Client) {
    let store = store(&cluster().url(), client).await;
    let stays = format!("half-way-for-{client}");
    let (slot, owner, other) = places(&stays);
    // Another limit's key in the same slot, so one key is there and the other is not.
    assert_eq!(left(&store, &seldom(), &stays).await, 2);
    aside(move || cluster().begin_migration(slot, other)).await.expect("begun");
    // The server that gets the request does not know the script.
    cluster().flush_scripts().expect("flushed");
    assert_eq!(left(&store, &seldom(), &stays).await, 1);
    let new = store.key(&logged(), &stays);
    for due in [2, 1] {
        assert_eq!(left(&store, &logged(), &stays).await, due, "by ASK");
    }
    let mut there = cluster().nodes()[other].client().expect("it is up");
    there.command(&["ASKING"]).expect("asking").ok().expect("asking");
    assert_eq!(there.command(&["EXISTS", &new]), Ok(RespValue::Integer(1)));
    // Each step of a transaction goes through ASK too.
    three_and_no_more(&store.in_mode::<Multi>(), &attempts(), &stays).await;
    aside(move || cluster().finish_migration(slot, other)).await.expect("moved");
    assert_eq!(left(&store, &seldom(), &stays).await, 0);
    assert_eq!(left(&store, &logged(), &stays).await, 0);
    aside(move || cluster().migrate(slot, owner)).await.expect("back");
    assert!(!acquire(&store, &logged(), &stays).await.expect("decided").allowed());
}

async fn keys_split_by_a_migration_are_waited_for_and_charged_once(client: Client) {
    let store = store(&cluster().url(), client).await;
    let key = format!("torn-apart-for-{client}");
    let (slot, owner, other) = places(&key);
    let (seldom, logged) = (seldom(), logged());
    let checks = [
        Check { limit: &seldom, key: &key, cost: 1 },
        Check { limit: &logged, key: &key, cost: 1 },
    ];
    let batch = Batch::new(&checks).expect("two limits");
    assert_eq!(store.apply(&batch).await.expect("decided").remaining(), 2);
    let moved = store.key(&logged, &key);
    aside(move || cluster().begin_migration(slot, other)).await.expect("begun");
    assert!(aside(move || cluster().move_key(&moved)).await.expect("moved"));

    let brief = Duration::from_millis(60);
    let begin = Instant::now();
    loop {
        // On a busy machine the time may be too short to connect.
        let brief = store_within(brief, &cluster().url(), client).await;
        let error = match brief {
            Ok(brief) => brief.apply(&batch).await.expect_err("torn apart"),
            Err(error) => error,
        };
        if error.to_string().contains("TRYAGAIN") {
            break assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
        }
        assert!(begin.elapsed() < PATIENCE, "{error}");
    }

    let (verdict, finished) = tokio::join!(
        store.apply(&batch),
        aside(move || {
            std::thread::sleep(Duration::from_millis(30));
            cluster().finish_migration(slot, other)
        }),
    );
    finished.expect("moved");
    assert_eq!(verdict.expect("decided").remaining(), 1);
    assert_eq!(store.apply(&batch).await.expect("decided").remaining(), 0);
    assert!(!store.apply(&batch).await.expect("decided").allowed());
    aside(move || cluster().migrate(slot, owner)).await.expect("back");
}

/// Requests that share calls while their slot is on its way, some of their keys on either server and some on none.
/// They are decided while it is half way, because no call waits for another's keys, and while the rest moves.
async fn gathered_requests_of_a_slot_on_its_way_are_each_decided_once(client: Client) {
    let builder = RedisStore::builder().prefix(client.name()).deadline(PATIENCE);
    let url = with_client(&cluster().url(), client);
    let store = builder.tag(Tag::UpTo('/')).connect(&url).await.expect("the cluster is up");
    let tenant = format!("gathered-for-{client}");
    let (slot, owner, other) = places(&tenant);
    let key = |n: usize| format!("{tenant}/{n}");
    for n in 0..16 {
        assert_eq!(left(&store, &seldom(), &key(n)).await, 2);
    }
    aside(move || cluster().begin_migration(slot, other)).await.expect("begun");
    for n in 0..8 {
        let moved = store.key(&seldom(), &key(n));
        assert!(aside(move || cluster().move_key(&moved)).await.expect("moved"));
    }
    // Eight keys there, eight here, and eight that do not exist.
    let half_way = concurrently(&store, (0..24).map(key).collect()).await;
    for (n, left) in half_way.into_iter().enumerate() {
        let due = [1, 0, 2, 1, 0];
        assert_eq!(left, if n < 16 { &due[..2] } else { &due[2..] }, "{n}");
    }
    let finished = aside(move || cluster().finish_migration(slot, other));
    let meanwhile = async {
        let mut all = Vec::new();
        for round in 0..20 {
            let keys = (0..8).map(|n| key(100 + 8 * round + n)).collect();
            all.extend(concurrently(&store, keys).await);
        }
        all
    };
    let (finished, meanwhile) = tokio::join!(finished, meanwhile);
    finished.expect("moved");
    assert!(meanwhile.iter().all(|left| left == &[2, 1, 0]), "{meanwhile:?}");
    aside(move || cluster().migrate(slot, owner)).await.expect("back");
    let none = concurrently(&store, (0..24).map(key).collect()).await;
    assert!(none.iter().all(Vec::is_empty), "{none:?}");
}

/// What remained after each admitted one of five concurrent requests per key, in descending order.
async fn concurrently(store: &RedisStore, keys: Vec<String>) -> Vec<Vec<u64>> {
    let mut tasks = JoinSet::new();
    for n in 0..keys.len() * 5 {
        let (store, place) = (store.clone(), n % keys.len());
        let key = keys[place].clone();
        tasks.spawn(async move {
            (place, acquire(&store, &seldom(), &key).await.expect("decided, not waited for"))
        });
    }
    let mut left = vec![Vec::new(); keys.len()];
    for (place, verdict) in tasks.join_all().await {
        if verdict.allowed() {
            left[place].push(verdict.remaining());
        }
    }
    for left in &mut left {
        left.sort_unstable_by(|one, other| other.cmp(one));
    }
    left
}

async fn scripts_flushed_on_every_node_are_loaded_again(client: Client) {
    let store = store(&cluster().url(), client).await;
    for due in [2, 1, 0] {
        cluster().flush_scripts().expect("flushed");
        for key in ["a", "b", "c", "d"] {
            assert_eq!(left(&store, &seldom(), &format!("flushed-{key}")).await, due);
        }
    }
}

async fn a_broadcast_reaches_every_master(client: Client) {
    let url = with_client(&cluster().url(), client);
    let connection = RedisConnection::open(&url, PATIENCE).await.expect("the cluster is up");
    assert!(connection.is_cluster());
    let answers = connection
        .send_to_each(&["CLUSTER", "MYID"].map(Argument::Text), Deadline::within(PATIENCE))
        .await;
    let mut ids: Vec<_> = answers
        .into_iter()
        .map(|(_, answer)| match answer.expect("it is up") {
            Reply::Text(id) => String::from_utf8(id).expect("hexadecimal"),
            other => panic!("{other:?}"),
        })
        .collect();
    let mut due: Vec<_> = (0..3).map(|node| cluster().id(node).to_owned()).collect();
    ids.sort();
    due.sort();
    assert_eq!(ids, due);
}

async fn keys_of_different_slots_are_refused(client: Client) {
    let url = with_client(&cluster().url(), client);
    let connection = RedisConnection::open(&url, PATIENCE).await.expect("the cluster is up");
    let words = ["MGET", "a", "b"].map(Argument::Text);
    let error = connection.send("a", &words, Deadline::within(PATIENCE)).await;
    assert_eq!(error.expect_err("two slots").kind(), ErrorKind::CrossSlot);
}

async fn a_url_of_the_wrong_topology_is_refused_with_the_remedy(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let alone = format!("redis-cluster://127.0.0.1:{}", server.port());
    let error = store_within(PATIENCE, &alone, client).await.expect_err("no cluster");
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("use redis://127.0.0.1"), "{error}");

    let [first, ..] = cluster().client_ports()[..] else { panic!("nodes") };
    let one = store(&format!("redis://127.0.0.1:{first}"), client).await;
    let elsewhere = (0..100).map(|n| format!("one-{n}")).find(|key| places(key).1 != 0);
    let error = acquire(&one, &seldom(), &elsewhere.expect("one")).await.expect_err("moved");
    assert_eq!(error.kind(), ErrorKind::Config);
    assert!(error.to_string().contains("redis-cluster://"), "{error}");
}

async fn a_cluster_accepts_a_named_user_and_both_protocols(client: Client) {
    let user = format!("limiter-{client}");
    for node in cluster().nodes() {
        let rules = [
            "ACL",
            "SETUSER",
            &user,
            "on",
            ">s3cret@",
            "~*",
            "-@all",
            "+evalsha",
            "+eval",
            "+time",
            "+asking",
            "+cluster|slots",
            "+hget",
            "+hset",
            "+pttl",
            "+pexpire",
            "+unlink",
        ];
        node.command(&rules).expect("it is up").ok().expect("a user");
    }
    let url = cluster().url().replace("//", &format!("//{user}:s3cret%40@"));
    for (n, protocol) in ["resp2", "resp3"].into_iter().enumerate() {
        let store = store(&format!("{url}?protocol={protocol}"), client).await;
        for key in ["a", "b", "c", "d"] {
            three_and_no_more(&store, &seldom(), &format!("user-{n}-{key}")).await;
        }
    }
    let wrong = url.replace("s3cret", "wrong");
    let error = store_within(PATIENCE, &wrong, client).await.expect_err("a wrong password");
    assert_eq!(error.kind(), ErrorKind::Config, "{error}");
    assert!(!error.to_string().contains("wrong%") && !error.to_string().contains("wrong@"));
}

with_each_client! {
    each_key_is_decided_on_its_owner_in_every_mode,
    one_live_seed_is_enough_to_find_the_cluster,
    a_slot_that_has_moved_is_followed,
    during_a_migration_each_key_is_decided_where_it_lies,
    keys_split_by_a_migration_are_waited_for_and_charged_once,
    gathered_requests_of_a_slot_on_its_way_are_each_decided_once,
    scripts_flushed_on_every_node_are_loaded_again,
    a_broadcast_reaches_every_master,
    keys_of_different_slots_are_refused,
    a_url_of_the_wrong_topology_is_refused_with_the_remedy,
    a_cluster_accepts_a_named_user_and_both_protocols,
}
