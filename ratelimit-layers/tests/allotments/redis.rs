//! On Redis: several nodes on one server or on a cluster, with tasks that drop futures and a network that swallows replies.

use std::sync::Arc;
use std::time::Duration;

use fastrand::Rng;
use ratelimit_core::{Batch, Check, Limit, Limits, OnOutage, Policy, RateLimiter, Store, Verdict};
use ratelimit_layers::{Allotments, DenialCache, Fallback};
use ratelimit_redis::RedisStore;
use ratelimit_testkit::{FaultProxy, RedisCluster, RedisServer};
use tokio::task::{JoinSet, yield_now};

use crate::{ask, left, limit};

type Node = Arc<Allotments<DenialCache<RedisStore>>>;

const LIMIT: u64 = 2_000;
const NODES: usize = 3;
const TASKS: usize = 8;
const REQUESTS: usize = 200;

/// A window that does not end while a test runs, on most days.
fn monthly() -> Limit<Policy> {
    limit("monthly", "fixed-window 2000/30d")
}

async fn redis(url: &str) -> RedisStore {
    let redis = RedisStore::builder().deadline(Duration::from_secs(60));
    redis.connect(url).await.expect("a store")
}

async fn nodes(url: &str) -> Vec<Node> {
    let mut nodes = Vec::new();
    for _ in 0..NODES {
        let store = Allotments::builder().divisor(4).lifetime(Duration::from_secs(5));
        nodes.push(Arc::new(store.build(DenialCache::new(redis(url).await))));
    }
    nodes
}

/// Turns of the runtime, after which a future is dropped.
async fn turns(count: usize) {
    for _ in 0..count {
        yield_now().await;
    }
}

/// Sends requests of random costs from all nodes, of which some are dropped. Returns what was admitted.
async fn load(nodes: &[Node], dropped: bool, seed: u64) -> u64 {
    let mut tasks = JoinSet::new();
    for (place, node) in (0..TASKS).flat_map(|_| nodes).enumerate() {
        let (node, limit) = (node.clone(), monthly());
        let mut random = Rng::with_seed(seed ^ place as u64);
        tasks.spawn(async move {
            let mut admitted = 0;
            for _ in 0..REQUESTS {
                let cost = random.u64(1..3);
                let patience =
                    if dropped && random.u8(..3) == 0 { random.usize(..200) } else { usize::MAX };
                let check = Check { limit: &limit, key: "alice", cost };
                let batch = Batch::one(&check);
                let said = tokio::select! {
                    biased;
                    said = node.apply(&batch) => said.ok(),
                    () = turns(patience) => None,
                };
                admitted += said.filter(Verdict::allowed).map_or(0, |_| cost);
            }
            admitted
        });
    }
    tasks.join_all().await.into_iter().sum()
}

/// What all nodes have saved.
fn served(nodes: &[Node]) -> u64 {
    nodes.iter().map(|node| node.counts().served).sum()
}

async fn admits_exactly_the_limit(url: &str) {
    let nodes = nodes(url).await;
    let mut admitted = load(&nodes, false, 1).await;
    assert!(admitted <= LIMIT, "{admitted}");
    for node in &nodes {
        node.give_back().await;
        assert_eq!(node.counts().forfeited, 0);
    }
    let limit = monthly();
    assert_eq!(left(&redis(url).await, &limit, "alice").await, LIMIT - admitted);
    // Nothing lies idle: what other nodes gave back goes to the one that asks.
    while ask(&*nodes[0], &limit, "alice", 1).await.allowed() {
        admitted += 1;
    }
    assert_eq!(admitted, LIMIT);
    assert!(served(&nodes) > LIMIT / 8, "{}", served(&nodes));
}

#[tokio::test]
async fn nodes_on_one_server_admit_exactly_the_limit() {
    let server = RedisServer::start().expect("redis-server");
    admits_exactly_the_limit(&server.url()).await;
}

#[tokio::test]
async fn nodes_on_a_cluster_admit_exactly_the_limit() {
    let cluster = RedisCluster::start().expect("a cluster");
    admits_exactly_the_limit(&cluster.url()).await;
}

#[tokio::test]
async fn futures_that_are_dropped_admit_nothing_more_and_leave_no_slot_behind() {
    let server = RedisServer::start().expect("redis-server");
    let nodes = nodes(&server.url()).await;
    let admitted = load(&nodes, true, 2).await;
    assert!(admitted <= LIMIT, "{admitted}");
    let limit = monthly();
    let mut more = 0;
    for node in &nodes {
        node.give_back().await;
        while ask(&**node, &limit, "alice", 1).await.allowed() {
            more += 1;
        }
    }
    assert!(admitted + more <= LIMIT, "{admitted} and {more}");
    assert_eq!(left(&redis(&server.url()).await, &limit, "alice").await, 0);
}

#[tokio::test]
async fn lost_replies_admit_nothing_more() {
    let server = RedisServer::start().expect("redis-server");
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    let limit = monthly();
    let builder = RedisStore::builder().deadline(Duration::from_secs(60));
    let store: RedisStore = builder.connect(&proxy.url()).await.expect("a store");
    let node = Allotments::builder().divisor(4).lifetime(Duration::from_secs(5)).build(store);
    let (mut admitted, mut lost) = (0, 0);
    for n in 0..3_000 {
        if n % 40 == 20 {
            proxy.swallow_matching("EVALSHA", 1);
        }
        let check = Check { limit: &limit, key: "alice", cost: 1 };
        match node.apply(&Batch::one(&check)).await {
            Ok(verdict) => admitted += u64::from(verdict.allowed()),
            Err(_) => lost += 1,
        }
    }
    assert!(admitted <= LIMIT && lost > 0, "{admitted} admitted, {lost} lost");
    assert!(node.counts().served > LIMIT / 8, "{:?}", node.counts());
    // What was served was charged.
    node.give_back().await;
    let left = left(&redis(&server.url()).await, &limit, "alice").await;
    assert!(admitted + left <= LIMIT, "{admitted} and {left}");
}

/// The order that the guide shows: a fallback around allotments around a cache around Redis.
#[tokio::test]
async fn a_limiter_with_all_layers_serves_most_requests_of_a_busy_key_without_a_call() {
    let server = RedisServer::start().expect("redis-server");
    let limits = Limits::new([
        limit("burst", "gcra 1000000/s burst 100000").on_outage(OnOutage::Open),
        limit("monthly", "fixed-window 100000/30d").on_outage(OnOutage::Open),
    ]);
    let limits = limits.expect("limits");
    let store = Allotments::new(DenialCache::new(redis(&server.url()).await));
    let fallback = Fallback::builder().deadline(Duration::from_secs(60));
    let limiter =
        RateLimiter::new(limits.clone(), fallback.build(store, &limits).expect("choices"));
    for _ in 0..2_000 {
        assert!(limiter.check("alice").await.expect("decides").allowed());
    }
    let counts = limiter.store().store().counts();
    assert!(counts.served > 1_000, "{counts:?}");
    limiter.store().store().give_back().await;
    let monthly = limit("monthly", "fixed-window 100000/30d");
    assert_eq!(left(&redis(&server.url()).await, &monthly, "alice").await, 98_000);
}
