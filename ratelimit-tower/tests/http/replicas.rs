//! Two replicas of a limited service on one Redis, over real sockets and under load, while Redis is
//! there, hangs, and is stopped and restarted.

use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::routing::get;
use http::{HeaderName, Request};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1::handshake;
use hyper_util::rt::TokioIo;
use ratelimit_core::{AnyAlgorithm, Limits, OnOutage, RateLimiter};
use ratelimit_layers::{BreakerState, Fallback, OutageCount};
use ratelimit_redis::RedisStore;
use ratelimit_servers::RedisServer;
use ratelimit_tower::{RateLimitLayer, header};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::sleep;

const LIMIT: u64 = 600;
const REPLICAS: u64 = 2;
const SHARE: u64 = 300;
/// How many clients each replica has.
const CLIENTS: usize = 4;
/// How long a state may take to be reached. Only a test that fails waits for it.
const PATIENCE: Duration = Duration::from_secs(300);
/// Short, so that an outage is soon noticed.
const BRIEF: Duration = Duration::from_millis(200);
const USER: HeaderName = HeaderName::from_static("x-user");

/// Nothing flows back within a test.
fn daily() -> Limits<AnyAlgorithm> {
    let limit = Limits::builder().limit("daily", "first-request-window 600/d").by(["user"]);
    limit.on_outage(OnOutage::Local).build().expect("limits")
}

/// A service of its own, with its own connection to Redis.
struct Replica {
    store: Arc<Fallback<RedisStore>>,
    address: SocketAddr,
}

impl Replica {
    async fn start(url: &str) -> Self {
        let redis = RedisStore::builder().deadline(BRIEF).connect_lazy(url);
        let settings =
            Fallback::builder().deadline(BRIEF * 2).nodes(NonZeroU64::new(REPLICAS).expect("some"));
        let settings = settings.failures(3).probe_after(Duration::from_millis(50));
        let store = Arc::new(settings.build(redis.expect("a URL"), &daily()).expect("choices"));
        let limiter = RateLimiter::new(daily(), Arc::clone(&store));
        let layer = RateLimitLayer::new(limiter).by("user", header(USER)).checked();
        let router = Router::new().route("/", get(|| async { "hello\n" }));
        let router = router.layer(layer.expect("every identifier has a source"));
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let address = listener.local_addr().expect("an address");
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { store, address }
    }

    /// What the fallback counted.
    fn sum_of(&self, of: fn(&OutageCount) -> u64) -> u64 {
        self.store.outage_counts().iter().map(of).sum()
    }
}

/// Asks by one connection until it is over, and counts the answers of 200, and of 429.
async fn ask(replica: SocketAddr, over: Arc<AtomicBool>, answers: Arc<[AtomicU64; 2]>) {
    let stream = TcpStream::connect(replica).await.expect("it listens");
    let (mut client, connection) = handshake(TokioIo::new(stream)).await.expect("it speaks HTTP");
    tokio::spawn(connection);
    while !over.load(Ordering::Relaxed) {
        let request = Request::get("/").header("host", "test").header(USER, "alice");
        let request = request.body(Empty::<Bytes>::new()).expect("a request");
        let response = client.send_request(request).await.expect("an answer");
        let count = match response.status().as_u16() {
            200 => &answers[0],
            429 => &answers[1],
            other => panic!("a request ended with {other}"),
        };
        let _body = response.into_body().collect().await.expect("a body");
        count.fetch_add(1, Ordering::SeqCst);
        sleep(Duration::from_millis(1)).await;
    }
}

/// Replicas, and clients of each.
struct Load {
    replicas: Vec<Replica>,
    over: Arc<AtomicBool>,
    answers: Arc<[AtomicU64; 2]>,
    clients: JoinSet<()>,
}

impl Load {
    async fn start(server: &RedisServer) -> Self {
        let (over, answers) = (Arc::<AtomicBool>::default(), Arc::<[AtomicU64; 2]>::default());
        let (mut replicas, mut clients) = (Vec::new(), JoinSet::new());
        for _ in 0..REPLICAS {
            let replica = Replica::start(&server.url()).await;
            for _ in 0..CLIENTS {
                clients.spawn(ask(replica.address, Arc::clone(&over), Arc::clone(&answers)));
            }
            replicas.push(replica);
        }
        Self { replicas, over, answers, clients }
    }

    fn answers(&self) -> [u64; 2] {
        self.answers.each_ref().map(|count| count.load(Ordering::SeqCst))
    }

    fn sum_of(&self, of: fn(&OutageCount) -> u64) -> u64 {
        self.replicas.iter().map(|replica| replica.sum_of(of)).sum()
    }

    /// How many answers Redis has decided. One that is in flight may be missing.
    fn by_redis(&self) -> u64 {
        let by_fallback = self.sum_of(|count| count.allowed + count.denied);
        self.answers().iter().sum::<u64>().saturating_sub(by_fallback)
    }

    async fn until(&mut self, what: &str, reached: impl Fn(&Self) -> bool) {
        let begin = Instant::now();
        while !reached(self) {
            assert!(begin.elapsed() < PATIENCE, "not reached: {what}");
            if let Some(ended) = self.clients.try_join_next() {
                ended.expect("every request is decided");
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    async fn until_redis_decides(&mut self, more: u64) {
        let due = self.by_redis() + more;
        self.until("Redis decides", |load| load.by_redis() > due).await;
    }

    /// Waits until every replica has decided without Redis, has used up its share, and denies.
    async fn out_of_share(&mut self) {
        for nth in 0..self.replicas.len() {
            let due = self.replicas[nth].sum_of(|count| count.denied) + 20;
            let denied = |load: &Self| load.replicas[nth].sum_of(|count| count.denied) > due;
            self.until("the share is used up", denied).await;
        }
    }

    /// Waits until every replica asks Redis again, and Redis decides.
    async fn back(&mut self) {
        let is_closed = |replica: &Replica| replica.store.breaker() == BreakerState::Closed;
        self.until("the breakers close", |load| load.replicas.iter().all(is_closed)).await;
        self.until_redis_decides(40).await;
    }

    /// Ends it. No replica admitted more than its share without Redis. Returns how many requests
    /// were admitted, and how many of them without Redis.
    async fn end(&mut self) -> (u64, u64) {
        self.over.store(true, Ordering::Relaxed);
        while let Some(ended) = self.clients.join_next().await {
            ended.expect("every request is decided");
        }
        let locally = |replica: &Replica| replica.sum_of(|count| count.allowed);
        assert!(self.replicas.iter().all(|replica| locally(replica) <= SHARE));
        (self.answers()[0], self.sum_of(|count| count.allowed))
    }

    /// What Redis says that the caller was charged.
    async fn read_charged(&self) -> u64 {
        let redis = RateLimiter::new(daily(), self.replicas[0].store.store());
        let begin = Instant::now();
        loop {
            match redis.request(&[("user", "alice")]).cost(0).peek().await {
                Ok(verdict) => return LIMIT - verdict.remaining(),
                // On a busy machine any deadline can pass.
                Err(error) => assert!(begin.elapsed() < PATIENCE, "no answer: {error}"),
            }
        }
    }
}

type Change = fn(&RedisServer);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_admit_their_shares_while_redis_is_away_and_redis_decides_whenever_it_is_there() {
    let hangs: [Change; 2] = [
        |server| server.pause().expect("it is suspended"),
        |server| server.resume().expect("it is resumed"),
    ];
    let is_stopped: [Change; 2] =
        [RedisServer::stop, |server| server.restart().expect("it starts again")];
    // A server that is started again is empty.
    for ([goes_away, comes_back], most_by_redis) in [(hangs, LIMIT), (is_stopped, 2 * LIMIT)] {
        let server = RedisServer::start().expect("a server");
        // No server runs yet.
        goes_away(&server);
        let mut load = Load::start(&server).await;
        for _ in 0..2 {
            goes_away(&server);
            load.out_of_share().await;
            comes_back(&server);
            load.back().await;
        }
        // More than it can admit, so that Redis denies, too.
        load.until_redis_decides(2 * LIMIT).await;
        let (admitted, locally) = load.end().await;
        assert_eq!(locally, REPLICAS * SHARE);
        // Redis charged what it admitted and what it never answered, and no more.
        let (by_redis, charged) = (admitted - locally, load.read_charged().await);
        let unknown = load.sum_of(|count| count.undetermined);
        assert_eq!(charged, LIMIT);
        assert!(by_redis <= most_by_redis, "{by_redis}");
        assert!(charged <= by_redis + unknown, "{by_redis} {unknown}");
    }
}
