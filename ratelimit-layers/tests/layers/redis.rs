//! The layers around Redis. Its outages are tried behind HTTP, in the tests of `ratelimit-tower`.

mod faults;

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Op, Snapshot, SnapshotStore};
use ratelimit_core::{Algorithm as _, Limit, ManualClock, OnOutage, Policy, Source};
use ratelimit_layers::{Allotments, DenialCache, Fallback};
use ratelimit_redis::RedisStore;
use ratelimit_servers::{RedisCluster, RedisServer};
use tokio::task::JoinSet;

use crate::common::{BEGIN, ask, limit, limits, operate};

/// How long a state may take to be reached. Only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

async fn redis(url: &str) -> RedisStore {
    RedisStore::builder().deadline(PATIENCE).connect(url).await.expect("a store")
}

type Cached = Arc<DenialCache<RedisStore, Policy, ManualClock>>;

async fn denied(store: &Cached, limit: &Limit<Policy>) -> Source {
    let verdict = ask(&**store, limit, "mallory", 1).await;
    assert!(!verdict.allowed());
    verdict.source()
}

/// Denies many requests at once. Returns how many the store denied.
async fn burst(store: &Cached, limit: &Limit<Policy>) -> u64 {
    let mut tasks = JoinSet::new();
    for _ in 0..500 {
        let (store, limit) = (store.clone(), limit.clone());
        tasks.spawn(async move { u64::from(denied(&store, &limit).await == Source::Store) });
    }
    tasks.join_all().await.into_iter().sum()
}

/// The cache's clock stands, and moves to the end of the wait when the test says so; the server's runs on.
async fn attacked(url: &str, servers: &[RedisServer]) {
    let scripts = || -> u64 {
        let calls = |server: &RedisServer| {
            ["evalsha", "eval"].map(|command| server.calls(command).expect("it is up"))
        };
        servers.iter().flat_map(calls).sum()
    };
    let clock = ManualClock::new(BEGIN);
    let cache = DenialCache::builder().clock(clock.clone()).max_age(Duration::MAX);
    let store: Cached = cache.max_wait(PATIENCE).build(redis(url).await).into();
    let limit = limit("login", "gcra 3/d burst 3");
    for _ in 0..3 {
        assert!(ask(&*store, &limit, "mallory", 1).await.allowed());
    }
    assert_eq!(denied(&store, &limit).await, Source::Store);
    // From here on the server knows the scripts, and no call is repeated by its text.
    store.forget();
    assert_eq!(burst(&store, &limit).await, 4);

    // During the wait, no call reaches the server.
    let before = scripts();
    assert_eq!((burst(&store, &limit).await, scripts()), (0, before));

    // When it ends, one of those that come at once makes a call, and its answer is that of all others.
    for _ in 0..3 {
        let before = scripts();
        let verdict = ask(&*store, &limit, "mallory", 1).await;
        clock.advance(verdict.retry_after().expect("a wait"));
        assert_eq!((burst(&store, &limit).await, scripts() - before), (1, 1));
        assert_eq!((burst(&store, &limit).await, scripts() - before), (0, 1));
    }

    // What the server forgets by a reset here is asked again.
    assert!(operate(&*store, Op::Reset, &limit, "mallory", 1).await.allowed());
    assert!(ask(&*store, &limit, "mallory", 1).await.allowed());
}

#[tokio::test]
async fn during_an_attack_no_call_reaches_the_servers_and_at_its_end_one_does() {
    let server = RedisServer::start().expect("redis-server");
    attacked(&server.url(), std::slice::from_ref(&server)).await;
    let cluster = RedisCluster::start().expect("a cluster");
    attacked(&cluster.url(), cluster.nodes()).await;
}

#[tokio::test]
async fn a_store_says_what_it_saw_merged_or_not() {
    let server = RedisServer::start().expect("redis-server");
    for merge in ["on", "off"] {
        let store = redis(&format!("{}?merge={merge}", server.url())).await;
        for words in [
            "gcra 3/h burst 3",
            "token-bucket 3/h burst 3",
            "fixed-window 3/30d",
            "first-request-window 3/h",
            "sliding-counter 3/30d",
        ] {
            let (limit, key) = (limit("l", words), format!("{merge} {words}"));
            let ask = || {
                let (store, limit, key) = (store.clone(), limit.clone(), key.clone());
                async move {
                    let one = Check { limit: &limit, key: &key, cost: 1 };
                    let (verdict, left) =
                        store.apply_with_snapshot(&Batch::one(&one)).await.expect("decides");
                    (verdict, left.expect("the state is a few numbers"))
                }
            };
            let all = (0..20).map(|_| ask()).collect::<JoinSet<_>>().join_all().await;
            assert_eq!(all.iter().filter(|(verdict, _)| verdict.allowed()).count(), 3, "{key}");
            let (verdict, Snapshot { now, states }) = ask().await;
            let step = limit.algorithm().step(states[0].as_ref(), now, 1);
            assert_eq!(&step.decision, verdict.summary(), "{key}");
            // After all of them the state is full, whichever call they went in.
            let last = all.iter().map(|(_, left)| left).max_by_key(|left| left.now);
            assert_eq!(last.expect("some").states, states, "{key}");
        }
        for words in ["sliding-log 3/h", "window-log 3/h", "concurrency 3/h"] {
            let limit = limit("l", words);
            let one = Check { limit: &limit, key: merge, cost: 1 };
            let (_, left) = store.apply_with_snapshot(&Batch::one(&one)).await.expect("decides");
            assert_eq!(left, None, "{words}");
        }
    }
}

/// Nodes with all layers, in the order that the guide shows, to which tasks send requests of random costs.
async fn nodes_admit_exactly_the_limit(url: &str) {
    const LIMIT: u64 = 2_000;
    // A window that does not end while a test runs, on most days.
    let limit = limit("monthly", "fixed-window 2000/30d").on_outage(OnOutage::Open);
    let mut all = Vec::new();
    for _ in 0..3 {
        let settings = Allotments::builder().divisor(4).lifetime(Duration::from_secs(5));
        let store = settings.build(DenialCache::<_, Policy>::new(redis(url).await));
        let settings = Fallback::builder().deadline(PATIENCE);
        all.push(settings.build(store, &limits(std::slice::from_ref(&limit))).expect("choices"));
    }
    let mut tasks = JoinSet::new();
    for (seed, node) in (0..8).flat_map(|_| &all).enumerate() {
        let (node, limit) = (node.clone(), limit.clone());
        let mut random = fastrand::Rng::with_seed(seed as u64);
        tasks.spawn(async move {
            let mut admitted = 0;
            for _ in 0..200 {
                let cost = random.u64(1..3);
                admitted +=
                    if ask(&node, &limit, "alice", cost).await.allowed() { cost } else { 0 };
            }
            admitted
        });
    }
    let mut admitted: u64 = tasks.join_all().await.into_iter().sum();
    assert!(admitted <= LIMIT, "{admitted}");
    let mut served = 0;
    for node in &all {
        assert_eq!(node.store().give_back().await, 0);
        let counts = node.store().counts();
        served += counts.served;
        assert_eq!(counts.forfeited, 0);
    }
    let left = operate(&redis(url).await, Op::Peek, &limit, "alice", 0).await.remaining();
    assert_eq!(left, LIMIT - admitted);
    // Nothing lies idle: what other nodes gave back goes to the one that asks.
    while ask(&all[0], &limit, "alice", 1).await.allowed() {
        admitted += 1;
    }
    assert_eq!(admitted, LIMIT);
    assert!(
        served > LIMIT / 8 && all.iter().all(|node| node.outage_counts().is_empty()),
        "{served}"
    );
}

#[tokio::test]
async fn nodes_with_allotments_admit_exactly_the_limit() {
    nodes_admit_exactly_the_limit(&RedisServer::start().expect("redis-server").url()).await;
    nodes_admit_exactly_the_limit(&RedisCluster::start().expect("a cluster").url()).await;
}
