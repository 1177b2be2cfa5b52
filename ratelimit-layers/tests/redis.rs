//! A Redis that is stopped, hung and restarted under load: every request is decided, a node admits at most its share without
//! the store, and the store decides again when it is back.

#![cfg(unix)]
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use common::{limit, nodes};
use ratelimit_core::{Batch, Check, Limit, Limits, OnOutage, Policy, Store};
use ratelimit_layers::{BreakerState, Fallback};
use ratelimit_redis::RedisStore;
use ratelimit_testkit::{FaultProxy, RedisServer};

type Layered = Fallback<RedisStore, Policy>;

const LIMIT: u64 = 3_000;
const SHARE: u64 = 1_000;
const TASKS: u64 = 8;
/// How long a state may take to be reached. Only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(60);

fn daily() -> Limit<Policy> {
    limit("daily", "first-request-window 3000/d", OnOutage::Local)
}

fn layered(url: &str) -> Layered {
    let limits = Limits::new([daily()]).expect("limits");
    let redis = RedisStore::builder().deadline(Duration::from_millis(200));
    let redis = redis.connect_lazy(url).expect("a URL");
    let settings = Fallback::builder().deadline(Duration::from_millis(400)).nodes(nodes(3));
    let settings = settings.failures(3).probe_after(Duration::from_millis(50));
    settings.build(redis, &limits).expect("choices")
}

/// Requests from several tasks, until it is ended. Every one of them must be decided.
struct Load {
    over: Arc<AtomicBool>,
    decided: Arc<AtomicU64>,
    admitted: Arc<AtomicU64>,
    tasks: tokio::task::JoinSet<()>,
}

impl Load {
    fn start(store: &Layered, key: &'static str) -> Self {
        let (over, decided, admitted) = (
            Arc::<AtomicBool>::default(),
            Arc::<AtomicU64>::default(),
            Arc::<AtomicU64>::default(),
        );
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..TASKS {
            let (store, over) = (store.clone(), Arc::clone(&over));
            let (decided, admitted) = (Arc::clone(&decided), Arc::clone(&admitted));
            tasks.spawn(async move {
                let limit = daily();
                while !over.load(Ordering::Relaxed) {
                    let check = Check { limit: &limit, key, cost: 1 };
                    let verdict = store.apply(&Batch::one(&check)).await.expect("is decided");
                    admitted.fetch_add(u64::from(verdict.allowed()), Ordering::Relaxed);
                    decided.fetch_add(1, Ordering::Relaxed);
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
            });
        }
        Self { over, decided, admitted, tasks }
    }

    /// Waits for this many more decisions.
    async fn more(&self, count: u64) {
        let due = self.decided.load(Ordering::Relaxed) + count;
        until(|| self.decided.load(Ordering::Relaxed) >= due).await;
    }

    /// Ends it. Returns how many requests were admitted.
    async fn end(mut self) -> u64 {
        self.over.store(true, Ordering::Relaxed);
        while let Some(ended) = self.tasks.join_next().await {
            ended.expect("every request is decided");
        }
        self.admitted.load(Ordering::Relaxed)
    }
}

async fn until(mut reached: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !reached() {
        assert!(begin.elapsed() < PATIENCE, "not reached");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// What was decided without the store: allowed, and denied.
fn without(store: &Layered) -> (u64, u64) {
    let counts = store.outage_counts();
    counts
        .iter()
        .fold((0, 0), |(allowed, denied), count| (allowed + count.allowed, denied + count.denied))
}

/// What the server says that the key was charged.
async fn charged(store: &Layered, key: &str) -> u64 {
    let limit = daily();
    let check = Check { limit: &limit, key, cost: 0 };
    let begin = Instant::now();
    loop {
        match store.store().apply(&Batch::one(&check)).await {
            Ok(verdict) => return LIMIT - verdict.remaining(),
            // On a busy machine any deadline can pass.
            Err(error) => assert!(begin.elapsed() < PATIENCE, "Redis does not answer: {error}"),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_redis_hangs_a_node_admits_its_share_and_no_request_fails() {
    let server = RedisServer::start().expect("a server");
    let proxy = FaultProxy::start(server.port()).expect("a proxy");
    let store = layered(&proxy.url());
    let load = Load::start(&store, "alice");
    load.more(100).await;

    proxy.hang(true);
    until(|| store.breaker() != BreakerState::Closed).await;
    // More than the share, so that the share denies.
    until(|| without(&store).1 > 100).await;
    assert!(without(&store).0 <= SHARE);

    proxy.heal();
    until(|| store.breaker() == BreakerState::Closed).await;
    let before = without(&store);
    load.more(100).await;
    let admitted = load.end().await;
    // What was sent and not answered may be charged without having been admitted by the store, and nothing else.
    let (local, _) = without(&store);
    assert!(local <= SHARE && before.0 <= local, "{local}");
    let undetermined: u64 = store.outage_counts().iter().map(|count| count.undetermined).sum();
    let (by_store, charged) = (admitted - local, charged(&store, "alice").await);
    assert!(
        (by_store..=by_store + undetermined).contains(&charged),
        "{by_store} {charged} {undetermined}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn redis_that_is_stopped_and_restarted_under_load_decides_again() {
    let mut server = RedisServer::start().expect("a server");
    let store = layered(&server.url());
    let load = Load::start(&store, "bob");
    load.more(100).await;
    for _ in 0..2 {
        server.stop();
        until(|| store.breaker() != BreakerState::Closed).await;
        load.more(200).await;
        server.restart().expect("it starts again");
        until(|| store.breaker() == BreakerState::Closed).await;
        load.more(100).await;
    }
    let admitted = load.end().await;
    let (local, _) = without(&store);
    assert!(local <= SHARE, "{local}");
    // Each start begins with an empty server.
    assert!(admitted <= 3 * LIMIT + SHARE, "{admitted}");
    assert!(charged(&store, "bob").await > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_starts_while_redis_is_away() {
    let mut server = RedisServer::start().expect("a server");
    server.stop();
    let store = layered(&server.url());
    let load = Load::start(&store, "carol");
    load.more(50).await;
    assert!(without(&store).0 > 0);
    server.restart().expect("it starts");
    until(|| store.breaker() == BreakerState::Closed).await;
    load.more(50).await;
    let admitted = load.end().await;
    assert!(admitted <= LIMIT + SHARE && charged(&store, "carol").await > 0);
}
