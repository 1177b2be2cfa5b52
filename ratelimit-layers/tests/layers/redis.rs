//! The layers around Redis. Its outages are tried behind HTTP, in the tests of `ratelimit-tower`.

mod faults;

use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Op, Snapshot, SnapshotStore};
use ratelimit_core::{Algorithm as _, AnyAlgorithm, OnOutage, ReservationId};
use ratelimit_layers::{Allotments, DenialCache, Fallback};
use ratelimit_redis::RedisStore;
use ratelimit_servers::{RedisCluster, RedisServer};
use tokio::task::JoinSet;

use crate::common::{ask, limit, limits, operate};

/// How long a state may take to be reached. Only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

async fn redis(url: &str) -> RedisStore {
    RedisStore::builder().deadline(PATIENCE).connect(url).await.expect("a store")
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
            "lockout 3/h block 1h factor 2",
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
            // A reservation tells as much, and a denied one leaves nothing.
            let one = Check { limit: &limit, key: &key, cost: 1 };
            let reserve = Batch::one(&one).id(ReservationId::random()).settled_once();
            if limit.algorithm().reservation_us().is_some() {
                let (denied, left) = store.apply_with_snapshot(&reserve).await.expect("decides");
                assert!(!denied.allowed() && left.is_some_and(|left| left.states == states));
            }
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

/// Nodes with all layers, in the order that the guide shows, to which tasks send requests of random
/// costs.
async fn nodes_admit_exactly_the_limit(url: &str) {
    const LIMIT: u64 = 2_000;
    // A window that does not end while a test runs, on most days.
    let limit = limit("monthly", "fixed-window 2000/30d").on_outage(OnOutage::Open);
    let mut all = Vec::new();
    for _ in 0..3 {
        let settings = Allotments::builder().divisor(4).lifetime(Duration::from_secs(5));
        let store = settings.build(DenialCache::<_, AnyAlgorithm>::new(redis(url).await));
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
