//! On Redis: the calls that reach the server during an attack.

use std::time::Duration;

use ratelimit_core::{
    Batch, Check, Limit, ManualClock, Policy, Snapshot, SnapshotStore, Source, Store,
};
use ratelimit_layers::DenialCache;
use ratelimit_redis::RedisStore;
use ratelimit_testkit::{RedisCluster, RedisServer};
use tokio::task::JoinSet;

use crate::noted::BEGIN;
use crate::{lasting, limit};

type Cached = std::sync::Arc<DenialCache<RedisStore, Policy, ManualClock>>;

const AT_ONCE: u64 = 500;
const PATIENCE: Duration = Duration::from_secs(60);

/// How many scripts the server has executed.
fn scripts(server: &RedisServer) -> u64 {
    ["evalsha", "eval"].map(|command| server.calls(command).expect("it is up")).iter().sum()
}

async fn check(store: &Cached, limit: &Limit<Policy>) -> Source {
    let check = Check { limit, key: "mallory", cost: 1 };
    let verdict = store.apply(&Batch::one(&check)).await.expect("decides");
    assert!(!verdict.allowed());
    verdict.source()
}

/// Denies as many requests at once. Returns how many the store denied.
async fn burst(store: &Cached, limit: &Limit<Policy>) -> u64 {
    let mut tasks = JoinSet::new();
    for _ in 0..AT_ONCE {
        let (store, limit) = (store.clone(), limit.clone());
        tasks.spawn(async move { u64::from(check(&store, &limit).await == Source::Store) });
    }
    tasks.join_all().await.into_iter().sum()
}

/// The cache's clock stands, and moves to the end of the wait when the test says so; the server's runs on.
async fn attacked(url: &str, servers: &[RedisServer]) {
    let scripts = || servers.iter().map(scripts).sum::<u64>();
    let redis = RedisStore::builder().deadline(PATIENCE);
    let redis: RedisStore = redis.connect(url).await.expect("a store");
    let clock = ManualClock::new(BEGIN);
    let store: Cached = lasting(&clock).max_wait(PATIENCE).build(redis).into();
    let limit = limit("login", "gcra 3/d burst 3");
    let one = Check { limit: &limit, key: "mallory", cost: 1 };
    for _ in 0..3 {
        assert!(store.apply(&Batch::one(&one)).await.expect("decides").allowed());
    }
    assert_eq!(check(&store, &limit).await, Source::Store);
    // From here on the server knows the scripts, and no call is repeated by its text.
    store.forget();
    assert_eq!(burst(&store, &limit).await, 4);

    // During the wait, no call reaches the server.
    let before = scripts();
    for _ in 0..2_000 {
        assert_eq!(check(&store, &limit).await, Source::Cache);
    }
    assert_eq!((burst(&store, &limit).await, scripts()), (0, before));

    // When it ends, one of those that come at once makes a call, and its answer is that of all others.
    for _ in 0..3 {
        let before = scripts();
        let verdict = store.apply(&Batch::one(&one)).await.expect("decides");
        clock.advance(verdict.retry_after().expect("a wait"));
        assert_eq!((burst(&store, &limit).await, scripts() - before), (1, 1));
        assert_eq!((burst(&store, &limit).await, scripts() - before), (0, 1));
    }

    // What the server forgets by a reset here is asked again.
    let reset = Batch::one(&one).op(ratelimit_core::Op::Reset);
    assert!(store.apply(&reset).await.expect("resets").allowed());
    assert!(store.apply(&Batch::one(&one)).await.expect("decides").allowed());
}

#[tokio::test]
async fn during_an_attack_no_call_reaches_the_server_and_at_its_end_one_does() {
    let server = RedisServer::start().expect("redis-server");
    let url = server.url();
    attacked(&url, std::slice::from_ref(&server)).await;
}

#[tokio::test]
async fn during_an_attack_no_call_reaches_a_cluster_and_at_its_end_one_does() {
    let cluster = RedisCluster::start().expect("a cluster");
    attacked(&cluster.url(), cluster.nodes()).await;
}

/// What a store saw, merged or not, decides a request at its time as the store did.
async fn says_what_it_saw(store: RedisStore) {
    for words in [
        "gcra 3/h burst 3",
        "token-bucket 3/h burst 3",
        "fixed-window 3/30d",
        "first-request-window 3/h",
        "sliding-counter 3/30d",
    ] {
        let limit = limit("l", words);
        let ask = || {
            let (store, limit) = (store.clone(), limit.clone());
            async move {
                let one = Check { limit: &limit, key: words, cost: 1 };
                let (verdict, left) =
                    store.apply_with_snapshot(&Batch::one(&one)).await.expect("decides");
                (verdict, left.expect("the state is a few numbers"))
            }
        };
        let mut tasks = JoinSet::new();
        for _ in 0..20 {
            tasks.spawn(ask());
        }
        let all = tasks.join_all().await;
        assert_eq!(all.iter().filter(|(verdict, _)| verdict.allowed()).count(), 3, "{words}");
        let (verdict, Snapshot { now, states }) = ask().await;
        let step = ratelimit_core::Algorithm::step(limit.algorithm(), states[0].as_ref(), now, 1);
        assert_eq!(&step.decision, verdict.summary(), "{words}");
        // After all of them the state is full, whichever call they went in.
        let last = all.iter().map(|(_, left)| left).max_by_key(|left| left.now);
        assert_eq!(last.expect("some").states, states, "{words}");
    }
    for words in ["sliding-log 3/h", "window-log 3/h", "concurrency 3/h"] {
        let limit = limit("l", words);
        let one = Check { limit: &limit, key: words, cost: 1 };
        let (_, left) = store.apply_with_snapshot(&Batch::one(&one)).await.expect("decides");
        assert_eq!(left, None, "{words}");
    }
}

#[tokio::test]
async fn a_merging_store_says_what_it_saw() {
    let server = RedisServer::start().expect("redis-server");
    says_what_it_saw(RedisStore::connect(&server.url()).await.expect("a store")).await;
}

#[tokio::test]
async fn a_store_that_does_not_merge_says_what_it_saw() {
    let server = RedisServer::start().expect("redis-server");
    let url = format!("{}?merge=off", server.url());
    says_what_it_saw(RedisStore::connect(&url).await.expect("a store")).await;
}
