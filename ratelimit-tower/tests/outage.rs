//! Two replicas of a limited service on one Redis, over real sockets and under load, while Redis is there, hangs, and is
//! stopped and restarted.
#![cfg(all(unix, feature = "axum", feature = "tokio"))]
#![allow(missing_docs, clippy::expect_used, clippy::panic, reason = "tests")]

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::routing::get;
use http::{HeaderName, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use ratelimit_core::{
    Batch, Check, Limit, Limits, OnOutage, Policy, RateLimiter, Source, Store, Verdict,
};
use ratelimit_layers::{BreakerState, Fallback};
use ratelimit_redis::RedisStore;
use ratelimit_testkit::RedisServer;
use ratelimit_tower::{RateLimitLayer, header};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

const LIMIT: u64 = 600;
const REPLICAS: usize = 2;
const SHARE: u64 = 300;
/// How many clients each replica has.
const CLIENTS: usize = 4;
/// How long a state may take to be reached. Only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(300);
const USER: HeaderName = HeaderName::from_static("x-user");

/// Nothing flows back within a test.
fn daily() -> Limit<Policy> {
    let policy = "first-request-window 600/d".parse().expect("a policy");
    let limit = Limit::new("daily", policy).and_then(|limit| limit.by(["user"]));
    limit.expect("a limit").on_outage(OnOutage::Local)
}

/// A store that counts the verdicts of each source.
struct Sources {
    store: Fallback<RedisStore>,
    by_store: AtomicU64,
    by_fallback: AtomicU64,
}

impl Store<Policy> for Sources {
    type Error = <Fallback<RedisStore> as Store<Policy>>::Error;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Self::Error> {
        let verdict = self.store.apply(batch).await?;
        let count = match verdict.source() {
            Source::Store | Source::Cache | Source::Allotment => &self.by_store,
            Source::Fallback => &self.by_fallback,
        };
        count.fetch_add(1, Ordering::SeqCst);
        Ok(verdict)
    }
}

/// A service of its own, with its own connection to Redis.
#[derive(Clone)]
struct Replica {
    store: Arc<Sources>,
    address: SocketAddr,
}

impl Replica {
    async fn start(url: &str, deadline: Duration) -> Self {
        let limits = Limits::new([daily()]).expect("limits");
        let redis = RedisStore::builder().deadline(deadline).connect_lazy(url);
        let nodes = NonZeroU64::new(REPLICAS as u64).expect("some");
        let settings = Fallback::builder().deadline(deadline * 2).nodes(nodes);
        let settings = settings.failures(3).probe_after(Duration::from_millis(50));
        let store = settings.build(redis.expect("a URL"), &limits).expect("choices");
        let (by_store, by_fallback) = (AtomicU64::new(0), AtomicU64::new(0));
        let store = Arc::new(Sources { store, by_store, by_fallback });
        let limiter = RateLimiter::new(limits, Arc::clone(&store));
        let layer = RateLimitLayer::new(limiter).by("user", header(USER)).checked();
        let layer = layer.expect("every identifier has a source");
        let router = Router::new().route("/", get(|| async { "hello\n" })).layer(layer);
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { store, address }
    }

    fn breaker(&self) -> BreakerState {
        self.store.store.breaker()
    }

    fn by_store(&self) -> u64 {
        self.store.by_store.load(Ordering::SeqCst)
    }

    fn by_fallback(&self) -> u64 {
        self.store.by_fallback.load(Ordering::SeqCst)
    }

    /// What the fallback counted: allowed, denied, and of both those that Redis may have charged.
    fn without_store(&self) -> (u64, u64, u64) {
        let counts = self.store.store.outage_counts();
        let sum = |of: fn(&ratelimit_layers::OutageCount) -> u64| counts.iter().map(of).sum();
        (sum(|count| count.allowed), sum(|count| count.denied), sum(|count| count.undetermined))
    }
}

async fn replicas(server: &RedisServer, deadline: Duration) -> Vec<Replica> {
    let mut replicas = Vec::new();
    for _ in 0..REPLICAS {
        replicas.push(Replica::start(&server.url(), deadline).await);
    }
    replicas
}

/// Answers by status. Every request is answered with one of the two.
#[derive(Debug, Default)]
struct Answers {
    admitted: AtomicU64,
    denied: AtomicU64,
}

impl Answers {
    fn all(&self) -> u64 {
        self.admitted.load(Ordering::SeqCst) + self.denied.load(Ordering::SeqCst)
    }
}

/// Clients of all replicas, each on a connection of its own, which ask one after the other.
struct Load {
    over: Arc<AtomicBool>,
    answers: Arc<Answers>,
    clients: JoinSet<()>,
}

impl Load {
    fn start(replicas: &[Replica]) -> Self {
        let (over, answers) = (Arc::<AtomicBool>::default(), Arc::<Answers>::default());
        let mut clients = JoinSet::new();
        for replica in replicas.iter().flat_map(|replica| [replica.address; CLIENTS]) {
            let (over, answers) = (Arc::clone(&over), Arc::clone(&answers));
            clients.spawn(async move {
                let stream = TcpStream::connect(replica).await.expect("it listens");
                let (mut client, connection) =
                    handshake(TokioIo::new(stream)).await.expect("it speaks HTTP");
                tokio::spawn(connection);
                while !over.load(Ordering::Relaxed) {
                    let request = Request::get("/").header("host", "test").header(USER, "alice");
                    let request = request.body(Empty::<Bytes>::new()).expect("a request");
                    let response = client.send_request(request).await.expect("an answer");
                    let count = match response.status() {
                        StatusCode::OK => &answers.admitted,
                        StatusCode::TOO_MANY_REQUESTS => &answers.denied,
                        other => panic!("a request ended with {other}"),
                    };
                    let _body = response.into_body().collect().await.expect("a body");
                    count.fetch_add(1, Ordering::SeqCst);
                    sleep(Duration::from_millis(1)).await;
                }
            });
        }
        Self { over, answers, clients }
    }

    /// Waits for this many more answers.
    async fn more(&mut self, count: u64) {
        let due = self.answers.all() + count;
        let answers = Arc::clone(&self.answers);
        self.until("there are more answers", || answers.all() >= due).await;
    }

    async fn until(&mut self, what: &str, mut reached: impl FnMut() -> bool) {
        let begin = Instant::now();
        while !reached() {
            assert!(begin.elapsed() < PATIENCE, "not reached: {what}");
            if let Some(ended) = self.clients.try_join_next() {
                ended.expect("every request is decided");
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Ends it. Returns how many requests were admitted, and denied.
    async fn end(mut self) -> (u64, u64) {
        self.over.store(true, Ordering::Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended.expect("every request is decided");
        }
        let Answers { admitted, denied } = &*self.answers;
        (admitted.load(Ordering::SeqCst), denied.load(Ordering::SeqCst))
    }
}

/// What Redis says that the caller was charged.
async fn charged(replica: &Replica) -> u64 {
    let limit = daily();
    let check = Check { limit: &limit, key: "alice", cost: 0 };
    let begin = Instant::now();
    loop {
        match replica.store.store.store().apply(&Batch::one(&check)).await {
            Ok(verdict) => return LIMIT - verdict.remaining(),
            // On a busy machine any deadline can pass.
            Err(error) => assert!(begin.elapsed() < PATIENCE, "Redis does not answer: {error}"),
        }
    }
}

/// Waits until every replica has decided without Redis, has used up its share, and denies.
async fn out_of_share(load: &mut Load, replicas: &[Replica]) {
    for replica in replicas {
        let denied = replica.without_store().1;
        load.until("the share is used up", || replica.without_store().1 > denied + 20).await;
    }
}

/// Waits until every replica asks Redis again, and Redis decides.
async fn back(load: &mut Load, replicas: &[Replica]) {
    for replica in replicas {
        load.until("the breaker closes", || replica.breaker() == BreakerState::Closed).await;
        let before = replica.by_store();
        load.until("Redis decides", || replica.by_store() > before + 20).await;
    }
}

/// Every answer was decided by Redis or the fallback, each decision of the fallback is counted, and no replica admitted
/// more than its share without Redis. Returns how many requests the replicas admitted without Redis, and how many Redis
/// may have charged beside these.
fn accounted(replicas: &[Replica], answers: u64) -> (u64, u64) {
    let decided: u64 =
        replicas.iter().map(|replica| replica.by_store() + replica.by_fallback()).sum();
    assert_eq!(decided, answers);
    let (mut locally, mut unknown) = (0, 0);
    for replica in replicas {
        let (allowed, denied, undetermined) = replica.without_store();
        assert_eq!(allowed + denied, replica.by_fallback());
        assert!(allowed <= SHARE, "{allowed}");
        locally += allowed;
        unknown += undetermined;
    }
    (locally, unknown)
}

/// Short, so that an outage is soon noticed.
const BRIEF: Duration = Duration::from_millis(200);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_under_load_admit_exactly_the_limit_together() {
    let server = RedisServer::start().expect("a server");
    // No deadline passes, however busy the machine is.
    let replicas = replicas(&server, PATIENCE).await;
    let mut load = Load::start(&replicas);
    load.more(2 * LIMIT).await;
    let (admitted, denied) = load.end().await;
    assert_eq!(admitted, LIMIT);
    assert!(denied >= LIMIT, "{denied}");
    assert_eq!(accounted(&replicas, admitted + denied), (0, 0));
    for replica in &replicas {
        assert_eq!(replica.by_fallback(), 0);
        assert!(replica.by_store() > 0, "a replica was not asked");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_admit_their_shares_while_redis_hangs_and_the_rest_of_the_limit_afterwards() {
    let server = RedisServer::start().expect("a server");
    let replicas = replicas(&server, BRIEF).await;
    let mut load = Load::start(&replicas);
    load.more(100).await;
    for _ in 0..2 {
        server.pause().expect("it is suspended");
        out_of_share(&mut load, &replicas).await;
        server.resume().expect("it is resumed");
        back(&mut load, &replicas).await;
    }
    // More than it can admit, so that Redis denies, too.
    let by_redis = || replicas.iter().map(Replica::by_store).sum::<u64>();
    load.until("Redis denies", || by_redis() > 2 * LIMIT).await;
    let (admitted, denied) = load.end().await;
    let (locally, unknown) = accounted(&replicas, admitted + denied);
    assert_eq!(locally, REPLICAS as u64 * SHARE);
    // Redis charged what it admitted and what it never answered, and no more.
    let (by_redis, charged) = (admitted - locally, charged(&replicas[0]).await);
    assert_eq!(charged, LIMIT);
    assert!((by_redis..=by_redis + unknown).contains(&charged), "{by_redis} {charged} {unknown}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_admit_their_shares_while_redis_is_stopped_and_redis_decides_when_it_is_back() {
    let mut server = RedisServer::start().expect("a server");
    let replicas = replicas(&server, BRIEF).await;
    let mut load = Load::start(&replicas);
    load.more(100).await;
    for _ in 0..2 {
        server.stop();
        out_of_share(&mut load, &replicas).await;
        server.restart().expect("it starts again");
        back(&mut load, &replicas).await;
    }
    let (admitted, denied) = load.end().await;
    let (locally, _) = accounted(&replicas, admitted + denied);
    assert_eq!(locally, REPLICAS as u64 * SHARE);
    // Each start begins with an empty server.
    assert!(admitted - locally <= 3 * LIMIT, "{admitted} {locally}");
    assert!(charged(&replicas[0]).await > 0);
}
