//! A cluster whose nodes die, hang, return and lose replies.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use ratelimit_core::{ErrorKind, StoreError, Verdict};
use ratelimit_redis::{
    Argument, Client, Connection, Deadline, RedisConnection, RedisError, RedisStore, Reply,
};
use ratelimit_testkit::{FaultProxy, RedisCluster, RedisServer};
use tokio::sync::{Mutex, MutexGuard};
use tokio::task::JoinSet;

use super::{
    PATIENCE, acquire, aside, left, logged, replicated, seldom, store, store_within,
    three_and_no_more, until, with_client,
};

/// How long a call may take while servers are down.
const DEADLINE: Duration = Duration::from_millis(500);

/// Three masters and their replicas, for one test at a time. Each test finds them healthy and leaves
/// them healthy.
async fn cluster() -> Exclusive {
    static CLUSTER: OnceLock<RedisCluster> = OnceLock::new();
    static ALONE: Mutex<()> = Mutex::const_new(());
    let alone = ALONE.lock().await;
    let cluster = CLUSTER.get_or_init(|| RedisCluster::start_with_replicas().expect("a cluster"));
    // A failed test has not tidied up.
    for (number, node) in cluster.nodes().iter().enumerate() {
        match node.pid() {
            Some(_) => node.resume().expect("it runs"),
            None => cluster.restart(number).expect("again"),
        }
    }
    cluster.wait_until_healthy(PATIENCE).expect("well");
    Exclusive { cluster, _alone: alone }
}

struct Exclusive {
    cluster: &'static RedisCluster,
    _alone: MutexGuard<'static, ()>,
}

/// Two identifiers on different nodes, with their nodes.
fn two(cluster: &RedisCluster, name: &str) -> [(String, usize); 2] {
    let placed = |n: u32| {
        let key = format!("{name}-{n}");
        let owner = cluster.master_of(cluster.slot_of(&format!("{{{key}}}"))).expect("an owner");
        (key, owner)
    };
    let first = placed(0);
    let second = (1..100).map(placed).find(|(_, owner)| *owner != first.1).expect("another");
    [first, second]
}

/// A node's replica.
fn replica_of(cluster: &RedisCluster, master: usize) -> usize {
    let is_its = |node: &usize| cluster.master_of_replica(*node) == Ok(Some(master));
    (0..cluster.nodes().len()).find(is_its).expect("a replica")
}

/// How often the nodes were asked for the slot table.
fn looks(cluster: &RedisCluster) -> u64 {
    let of = |node: &RedisServer| node.calls("cluster|slots").expect("it is up");
    cluster.nodes().iter().map(of).sum()
}

/// Repeats a request until it is decided. The first failure may be indeterminate, later ones only
/// unavailable, and all come in time.
async fn comes_back(store: &RedisStore, key: &str) -> u64 {
    let mut first = true;
    until(|| {
        let begin = Instant::now();
        let may_be_lost = std::mem::take(&mut first);
        async move {
            let verdict = acquire(store, &seldom(), key).await;
            assert!(begin.elapsed() < DEADLINE * 2, "{:?}", begin.elapsed());
            if let Err(error) = &verdict {
                let kind = error.kind();
                let indeterminate = kind == ErrorKind::Indeterminate && may_be_lost;
                assert!(kind == ErrorKind::Unavailable || indeterminate, "{error}");
            }
            verdict
        }
    })
    .await
    .remaining()
}

async fn a_learnt_owner_is_not_looked_up_again(client: Client) {
    let Exclusive { cluster, _alone } = cluster().await;
    let store = store(&cluster.url(), client).await;
    let name = format!("learnt-{client}");
    let [(key, owner), (_, other)] = two(cluster, &name);
    let slot = cluster.slot_of(&format!("{{{key}}}"));
    assert_eq!(left(&store, &seldom(), &key).await, 2);
    aside(move || cluster.migrate(slot, other)).await.expect("moved");
    let refused = || {
        let stats = cluster.nodes()[owner].command(&["INFO", "errorstats"]).expect("it is up");
        let stats = stats.to_string();
        let moved = stats.split_once("errorstat_MOVED:count=").map(|(_, rest)| rest.to_owned());
        moved.map_or(0, |rest| rest.lines().next().unwrap().trim().parse::<u64>().unwrap())
    };
    let before = refused();
    for _ in 0..5 {
        let _ = acquire(&store, &seldom(), &key).await.expect("decided");
    }
    assert_eq!(refused(), before + 1);
    aside(move || cluster.migrate(slot, owner)).await.expect("back");
}

async fn a_hundred_redirected_callers_share_one_look_up(client: Client) {
    let Exclusive { cluster, _alone } = cluster().await;
    let store = store(&cluster.url(), client).await;
    let [(key, owner), (_, other)] = two(cluster, &format!("hundred-{client}"));
    let slot = cluster.slot_of(&format!("{{{key}}}"));
    assert_eq!(left(&store, &seldom(), &key).await, 2);
    aside(move || cluster.migrate(slot, other)).await.expect("moved");
    let before = looks(cluster);
    let begin = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..100 {
        let (store, key) = (store.clone(), key.clone());
        tasks.spawn(async move { acquire(&store, &seldom(), &key).await.expect("decided") });
    }
    let admitted = tasks.join_all().await.into_iter().filter(Verdict::allowed).count();
    assert_eq!(admitted, 2);
    let looks_since = looks(cluster) - before;
    // The next look-up comes after 50 ms at the earliest, and a busy machine may take longer for all of
    // this.
    let most = 1 + begin.elapsed().as_millis() / 50;
    assert!(u128::from(looks_since) <= most, "{looks_since} looks, and at most {most} are due");
    let begin = Instant::now();
    while looks(cluster) == before {
        left(&store, &seldom(), &key).await;
        assert!(begin.elapsed() < PATIENCE, "no look-up begins");
    }
    for _ in 0..100 {
        left(&store, &seldom(), &key).await;
    }
    assert_eq!(looks(cluster) - before, 1);
    aside(move || cluster.migrate(slot, owner)).await.expect("back");
}

async fn a_killed_master_is_replaced_by_its_replica(client: Client) {
    let Exclusive { cluster, _alone } = cluster().await;
    let store = store_within(DEADLINE, &cluster.url(), client).await.expect("the cluster is up");
    let [(key, owner), (other, _)] = two(cluster, &format!("killed-{client}"));
    assert_eq!(left(&store, &seldom(), &key).await, 2);
    let replica = replica_of(cluster, owner);
    replicated(&cluster.nodes()[owner], &key);
    aside(move || cluster.kill(owner)).await;
    assert_eq!(left(&store, &seldom(), &other).await, 2, "the others serve");
    assert_eq!(comes_back(&store, &key).await, 1, "the replica knows what was charged");
    assert_eq!(cluster.master_of(cluster.slot_of(&format!("{{{key}}}"))), Ok(replica));
    aside(move || cluster.restart(owner)).await.expect("again");
    aside(move || cluster.wait_until_healthy(PATIENCE)).await.expect("well");
    assert_eq!(left(&store, &seldom(), &key).await, 0);
}

async fn a_demoted_master_redirects_to_the_new_one(client: Client) {
    let Exclusive { cluster, _alone } = cluster().await;
    let store = store(&cluster.url(), client).await;
    let [(key, owner), _] = two(cluster, &format!("demoted-{client}"));
    assert_eq!(left(&store, &seldom(), &key).await, 2);
    let replica = replica_of(cluster, owner);
    replicated(&cluster.nodes()[owner], &key);
    aside(move || cluster.promote(replica)).await.expect("promoted");
    assert_eq!(left(&store, &seldom(), &key).await, 1);
}

async fn a_master_that_hangs_costs_the_deadline_until_it_is_replaced(client: Client) {
    let Exclusive { cluster, _alone } = cluster().await;
    let store = store_within(DEADLINE, &cluster.url(), client).await.expect("the cluster is up");
    let [(key, owner), (other, _)] = two(cluster, &format!("hangs-{client}"));
    assert_eq!(left(&store, &seldom(), &key).await, 2);
    replicated(&cluster.nodes()[owner], &key);
    cluster.nodes()[owner].pause().expect("it runs");
    let begin = Instant::now();
    let error = acquire(&store, &seldom(), &key).await.expect_err("it hangs");
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
    assert!(begin.elapsed() < DEADLINE * 2, "{:?}", begin.elapsed());
    assert_eq!(left(&store, &seldom(), &other).await, 2, "the others serve");
    assert_eq!(comes_back(&store, &key).await, 1);
    cluster.nodes()[owner].resume().expect("it runs");
    aside(move || cluster.wait_until_healthy(PATIENCE)).await.expect("well");
    // It refuses the requests that it received while it hung: it is a replica now.
    assert_eq!(left(&store, &seldom(), &key).await, 0);
}

async fn a_restarted_node_is_used_again(client: Client) {
    let Exclusive { cluster, _alone } = cluster().await;
    let store = store_within(DEADLINE, &cluster.url(), client).await.expect("the cluster is up");
    let [(key, owner), _] = two(cluster, &format!("restarted-{client}"));
    assert_eq!(left(&store, &seldom(), &key).await, 2);
    aside(move || cluster.kill(owner)).await;
    aside(move || cluster.restart(owner)).await.expect("again");
    let left = comes_back(&store, &key).await;
    assert!(left == 2 || left == 1, "it may have lost what it knew, but no more: {left}");
    aside(move || cluster.wait_until_healthy(PATIENCE)).await.expect("well");
}

async fn an_ask_redirection_reaches_a_master_without_slots(client: Client) {
    let mut cluster = aside(RedisCluster::start).await.expect("a cluster");
    let (cluster, fourth) = aside(move || {
        let fourth = cluster.add_empty_master().expect("a fourth");
        (Arc::new(cluster), fourth)
    })
    .await;
    let store = store(&cluster.url(), client).await;
    let slot = cluster.slot_of("{a}");
    cluster.begin_migration(slot, fourth).expect("begun");
    assert_eq!(left(&store, &seldom(), "a").await, 2);
    assert_eq!(left(&store, &logged(), "a").await, 2);
    let moving = Arc::clone(&cluster);
    aside(move || moving.finish_migration(slot, fourth)).await.expect("moved");
    assert_eq!(left(&store, &seldom(), "a").await, 1);
    for key in ["b", "c", "d", "e"] {
        three_and_no_more(&store, &seldom(), key).await;
    }
}

async fn a_request_with_a_lost_reply_was_executed_once(client: Client) {
    let cluster = aside(RedisCluster::start_behind_proxies).await.expect("a cluster");
    let store = store(&cluster.url(), client).await;
    for key in ["a", "b"] {
        assert_eq!(left(&store, &seldom(), key).await, 2);
        let owner = cluster.master_of(cluster.slot_of(&format!("{{{key}}}"))).expect("an owner");
        let proxy = &cluster.proxies()[owner];
        proxy.swallow_matching("EVALSHA", 1);
        let error = acquire(&store, &seldom(), key).await.expect_err("no answer");
        assert_eq!((error.kind(), proxy.swallowed()), (ErrorKind::Indeterminate, 1), "{error}");
        assert_eq!(left(&store, &seldom(), key).await, 0, "charged, and once");
    }
    // A request that never arrived is not sent again either: the client cannot know that.
    let proxy = &cluster.proxies()[cluster.master_of(cluster.slot_of("{c}")).expect("an owner")];
    proxy.cut_matching("EVALSHA", 1);
    let error = acquire(&store, &seldom(), "c").await.expect_err("no answer");
    assert_eq!((error.kind(), proxy.requests_cut()), (ErrorKind::Indeterminate, 1), "{error}");
    assert_eq!(left(&store, &seldom(), "c").await, 2);
}

async fn on_a_single_server_a_request_with_a_lost_reply_was_executed_once(client: Client) {
    let server = RedisServer::start().expect("redis-server");
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    let store = store(&proxy.url(), client).await;
    assert_eq!(left(&store, &seldom(), "a").await, 2);
    proxy.swallow_matching("EVALSHA", 1);
    let error = acquire(&store, &seldom(), "a").await.expect_err("no answer");
    assert_eq!(error.kind(), ErrorKind::Indeterminate, "{error}");
    assert_eq!(left(&store, &seldom(), "a").await, 0, "charged, and once");

    let url = with_client(&proxy.url(), client);
    let connection = RedisConnection::open(&url, PATIENCE).await.expect("the server is up");
    proxy.swallow_matching("EXEC", 1);
    let count = [["INCR", "n"].map(Argument::Text).to_vec()];
    let error = connection.transaction("n", &count, Deadline::within(PATIENCE)).await;
    let error = error.expect_err("no answer");
    assert_eq!((error.kind(), proxy.swallowed()), (ErrorKind::Indeterminate, 2), "{error}");
    let counted = connection.transaction("n", &count, Deadline::within(PATIENCE)).await;
    assert_eq!(counted.expect("counted"), [Reply::Integer(2)]);
}

async fn a_cluster_without_a_slot_or_a_node_is_unavailable_and_says_so(client: Client) {
    let cluster = aside(|| {
        let args = ["--cluster-require-full-coverage", "no"];
        let binary = &RedisServer::binaries()[0];
        RedisCluster::start_with(binary, 0, &args)
    });
    let cluster = cluster.await.expect("a cluster");
    let store = store_within(DEADLINE, &cluster.url(), client).await.expect("the cluster is up");
    let slot = cluster.slot_of("{a}");
    let owner = cluster.master_of(slot).expect("an owner");
    let failure = async |store: &RedisStore| -> RedisError {
        acquire(store, &seldom(), "a").await.expect_err("no server answers")
    };
    for node in cluster.nodes() {
        node.command(&["CLUSTER", "DELSLOTS", &slot.to_string()])
            .expect("it is up")
            .ok()
            .expect("OK");
    }
    let error = failure(&store).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains("CLUSTERDOWN"), "{error}");
    let fresh = store_within(DEADLINE, &cluster.url(), client).await.expect("the cluster is up");
    let error = failure(&fresh).await;
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    assert!(error.to_string().contains(&format!("no server keeps slot {slot}")), "{error}");
    let give = cluster.nodes()[owner].command(&["CLUSTER", "ADDSLOTS", &slot.to_string()]);
    give.expect("it is up").ok().expect("OK");
    for store in [&store, &fresh] {
        let _ = until(|| async { acquire(store, &seldom(), "a").await }).await;
    }
}

/// How often the nodes have said that no server is in charge.
fn downs(cluster: &RedisCluster) -> u64 {
    let of = |node: &RedisServer| {
        let stats = node.command(&["INFO", "errorstats"]).expect("it is up").to_string();
        let count = stats
            .split_once("errorstat_CLUSTERDOWN:count=")
            .map(|(_, rest)| rest.lines().next().unwrap().trim().parse::<u64>().unwrap());
        count.unwrap_or(0)
    };
    cluster.nodes().iter().map(of).sum()
}

async fn a_slot_that_has_no_owner_for_a_moment_is_waited_for(client: Client) {
    let cluster = aside(|| {
        let args = ["--cluster-require-full-coverage", "no"];
        RedisCluster::start_with(&RedisServer::binaries()[0], 0, &args)
    });
    let cluster = cluster.await.expect("a cluster");
    let slot = cluster.slot_of("{a}");
    let owner = cluster.master_of(slot).expect("an owner");
    let all = |command: &str, nodes: &[RedisServer]| {
        for node in nodes {
            let done = node.command(&["CLUSTER", command, &slot.to_string()]);
            done.expect("it is up").ok().expect("OK");
        }
    };
    let known = store(&cluster.url(), client).await;
    assert_eq!(left(&known, &seldom(), "a").await, 2);
    all("DELSLOTS", cluster.nodes());
    // To one of them the owner is known, to the other it is not.
    let fresh = store(&cluster.url(), client).await;
    for (store, due) in [(known, 1), (fresh, 0)] {
        let (refused, looked) = (downs(&cluster), looks(&cluster));
        let asking = {
            let store = store.clone();
            tokio::spawn(async move { left(&store, &seldom(), "a").await })
        };
        until(|| async {
            let told = downs(&cluster) > refused || looks(&cluster) > looked;
            told.then_some(()).ok_or("no server was asked")
        })
        .await;
        assert!(!asking.is_finished(), "it waits");
        all("ADDSLOTS", &cluster.nodes()[owner..=owner]);
        assert_eq!(asking.await.expect("no panic"), due);
        all("DELSLOTS", &cluster.nodes()[owner..=owner]);
    }
    // Once it has lasted as long as the deadline, a request is refused at once: after one question to each.
    let brief = store_within(DEADLINE, &cluster.url(), client).await.expect("it is up");
    let error = acquire(&brief, &seldom(), "a").await.expect_err("no server is in charge");
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{error}");
    let looked = looks(&cluster);
    for _ in 0..20 {
        acquire(&brief, &seldom(), "a").await.expect_err("no server is in charge");
    }
    let looks = looks(&cluster) - looked;
    assert!(looks <= 30, "a request that waits looks again every 50 ms: {looks}");
}

with_each_client! {
    a_slot_that_has_no_owner_for_a_moment_is_waited_for,
    a_learnt_owner_is_not_looked_up_again,
    a_hundred_redirected_callers_share_one_look_up,
    a_killed_master_is_replaced_by_its_replica,
    a_demoted_master_redirects_to_the_new_one,
    a_master_that_hangs_costs_the_deadline_until_it_is_replaced,
    a_restarted_node_is_used_again,
    an_ask_redirection_reaches_a_master_without_slots,
    a_request_with_a_lost_reply_was_executed_once,
    on_a_single_server_a_request_with_a_lost_reply_was_executed_once,
    a_cluster_without_a_slot_or_a_node_is_unavailable_and_says_so,
}
