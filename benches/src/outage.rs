//! Requests over real sockets to a service behind `RateLimitLayer` and [`Fallback`], whose Redis is
//! suspended (SIGSTOP). What is measured, for each choice of `on_outage`:
//!
//! - `late`: how late the service answers while Redis hangs again and again. Each client sends in
//!   turns to the limited service and to the same service without a limiter, in one run: two busy
//!   processors are late on their own, and the second column says by how much. A request is late
//!   if its answer comes more than the tolerance after the time that the service may take: the
//!   deadline of the fallback, or none without a limiter.
//! - `timeline`: the answers of each tenth of a second around one outage, and the circuit breaker.

mod timeline;

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Bytes;
use axum::routing::get;
use clap::ValueEnum;
use hdrhistogram::Histogram;
use http::{HeaderName, Request, StatusCode};
use http_body_util::{BodyExt as _, Empty};
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use ratelimit_core::{AnyAlgorithm, Gcra, Limit, Limits, OnOutage, RateLimiter};
use ratelimit_layers::{BreakerState, Fallback};
use ratelimit_redis::RedisStore;
use ratelimit_servers::RedisServer;
use ratelimit_tower::{RateLimitLayer, header};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, sleep};

use crate::measure::Fallible;
use crate::report::{BenchReport, Cell, Options, digits};

/// The deadline of the fallback: its default.
pub(crate) const DEADLINE: Duration = Duration::from_millis(100);
/// How much later than the time that it may take an answer may be.
const TOLERANCE: Duration = Duration::from_millis(5);
/// How long a state of the breaker may take to be reached.
const PATIENCE: Duration = Duration::from_secs(60);
pub(crate) const USER: HeaderName = HeaderName::from_static("x-user");

/// Every choice.
const CHOICES: [OnOutage; 3] = [OnOutage::Open, OnOutage::Closed, OnOutage::Local];

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OutagePart {
    Late,
    Timeline,
}

/// Outages under load.
#[derive(Clone, Copy)]
struct OutagePlan {
    clients: usize,
    /// How often each client sends to both services.
    every: Duration,
    outages: u32,
    up: Duration,
    hung: Duration,
}

/// What came of a choice: how long answers took with the limiter and without, and of the former
/// those that the fallback decided, and those of them that waited for the deadline.
struct OutageResult {
    limited: Times,
    bare: Times,
    without_store: u64,
    undetermined: u64,
}

/// How long answers took, in microseconds.
struct Times(Histogram<u64>);

impl Times {
    fn new() -> Fallible<Self> {
        Ok(Self(Histogram::new(3)?))
    }

    fn late(&self, may_take: Duration) -> u64 {
        self.0.count_between(micros(may_take + TOLERANCE) + 1, u64::MAX)
    }

    fn late_per_10_000(&self, may_take: Duration) -> Cell {
        let float = |count: u64| f64::from(u32::try_from(count).unwrap_or(u32::MAX));
        digits(2, float(self.late(may_take)) * 1e4 / float(self.0.len().max(1)))
    }

    fn longest_ms(&self) -> Cell {
        digits(1, Duration::from_micros(self.0.max()).as_secs_f64() * 1e3)
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// Serves this router on a free port, until the runtime ends.
pub(crate) async fn serve(router: Router) -> Fallible<SocketAddr> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move { axum::serve(listener, router).await });
    Ok(address)
}

/// A connection to a service.
pub(crate) struct HttpConnection(SendRequest<Empty<Bytes>>);

impl HttpConnection {
    pub(crate) async fn open(server: SocketAddr) -> Fallible<Self> {
        let stream = TcpStream::connect(server).await?;
        stream.set_nodelay(true)?;
        let (sender, connection) = handshake(TokioIo::new(stream)).await?;
        tokio::spawn(connection);
        Ok(Self(sender))
    }

    /// Sends a request of this user, and says how it was answered and how long that took.
    pub(crate) async fn ask(&mut self, user: &str) -> Fallible<(StatusCode, Duration)> {
        let request = Request::get("/").header("host", "localhost").header(USER, user);
        let begin = Instant::now();
        let response = self.0.send_request(request.body(Empty::new())?).await?;
        let (status, body) = (response.status(), response.into_body().collect().await?);
        let taken = begin.elapsed();
        match status {
            StatusCode::OK | StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE => {
                Ok((status, taken))
            }
            other => Err(format!("a request ended with {other}: {:?}", body.to_bytes()).into()),
        }
    }
}

/// A client that sends to both services in turns until the run is over.
async fn client(
    user: String,
    [limited, bare]: [SocketAddr; 2],
    every: Duration,
    over: Arc<AtomicBool>,
) -> Fallible<[Times; 2]> {
    let mut limited = (HttpConnection::open(limited).await?, Times::new()?);
    let mut bare = (HttpConnection::open(bare).await?, Times::new()?);
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while !over.load(Ordering::Relaxed) {
        ticks.tick().await;
        for (connection, times) in [&mut limited, &mut bare] {
            let (_, taken) = connection.ask(&user).await?;
            times.0.record(micros(taken))?;
        }
    }
    Ok([limited.1, bare.1])
}

async fn until(mut reached: impl FnMut() -> bool, what: &str) -> Fallible {
    let begin = Instant::now();
    while !reached() {
        if begin.elapsed() > PATIENCE {
            return Err(format!("after {PATIENCE:?} {what}").into());
        }
        sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// The service, without a limiter.
pub(crate) fn service() -> Router {
    Router::new().route("/", get(|| async { "hello\n" }))
}

/// The service behind a limit for each user, and the Redis that keeps it.
struct LimitedService {
    redis: RedisServer,
    fallback: Fallback<RedisStore>,
    address: SocketAddr,
}

impl LimitedService {
    async fn start(choice: OnOutage, algorithm: Gcra) -> Fallible<Self> {
        let redis = RedisServer::start()?;
        let limit = Limit::<AnyAlgorithm>::new("burst", algorithm.into())?;
        let limits = Limits::new([limit.by(["user"])?.on_outage(choice)])?;
        let store = RedisStore::builder().deadline(DEADLINE * 4 / 5).connect(&redis.url()).await?;
        let settings = Fallback::builder().deadline(DEADLINE).nodes(2.try_into()?);
        let fallback = settings.build(store, &limits)?;
        let layer = RateLimitLayer::new(RateLimiter::new(limits, fallback.clone()));
        let address = serve(service().layer(layer.by("user", header(USER)).checked()?)).await?;
        Ok(Self { redis, fallback, address })
    }
}

/// Hangs Redis again and again, and says how long each request took.
async fn measure(choice: OnOutage, plan: OutagePlan) -> Fallible<OutageResult> {
    // A limit that no client reaches, so that every decision takes the same path.
    let limit = Gcra::per_second(1_000_000).build()?;
    let LimitedService { redis, fallback, address } = LimitedService::start(choice, limit).await?;
    let services = [address, serve(service()).await?];

    let over = Arc::new(AtomicBool::new(false));
    let mut clients = JoinSet::new();
    for nth in 0..plan.clients {
        clients.spawn(client(format!("user {nth}"), services, plan.every, Arc::clone(&over)));
    }
    for _ in 0..plan.outages {
        sleep(plan.up).await;
        tokio::task::block_in_place(|| redis.pause())?;
        sleep(plan.hung).await;
        until(|| fallback.breaker() != BreakerState::Closed, "the breaker has not opened").await?;
        tokio::task::block_in_place(|| redis.resume())?;
        until(|| fallback.breaker() == BreakerState::Closed, "Redis does not decide").await?;
    }
    over.store(true, Ordering::Relaxed);

    let [mut limited, mut bare] = [Times::new()?, Times::new()?];
    while let Some(ended) = clients.join_next().await {
        let [of_limited, of_bare] = ended??;
        limited.0.add(of_limited.0)?;
        bare.0.add(of_bare.0)?;
    }
    let counts = fallback.outage_counts();
    Ok(OutageResult {
        limited,
        bare,
        without_store: counts.iter().map(|count| count.allowed + count.denied).sum(),
        undetermined: counts.iter().map(|count| count.undetermined).sum(),
    })
}

pub(crate) fn runtime() -> std::io::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()
}

/// Measures each choice.
pub(crate) fn run(options: &Options<OutagePart>) -> Fallible {
    let mut report = BenchReport::new(&options.effort)?;
    if options.has(&OutagePart::Late) {
        late(options.effort.quick, &mut report)?;
    }
    if options.has(&OutagePart::Timeline) {
        timeline::run(&mut report)?;
    }
    Ok(())
}

fn late(quick: bool, report: &mut BenchReport) -> Fallible {
    let plan = OutagePlan {
        clients: 16,
        every: Duration::from_millis(4),
        outages: if quick { 3 } else { 15 },
        up: Duration::from_millis(500),
        hung: Duration::from_millis(1_500),
    };
    println!(
        "Requests while Redis hangs {} times per choice. Late is an answer more than {TOLERANCE:?} after the\n\
         deadline of {DEADLINE:?}; of the same service without a limiter, one more than {TOLERANCE:?} after its request.",
        plan.outages
    );
    for choice in CHOICES {
        let outcome = runtime()?.block_on(measure(choice, plan))?;
        let OutageResult { limited, bare, without_store, undetermined } = outcome;
        report.row(&[
            ("choice", choice.name().into()),
            ("requests", limited.0.len().into()),
            ("without_store", without_store.into()),
            ("undetermined", undetermined.into()),
            ("late", limited.late(DEADLINE).into()),
            ("late_per_10_000", limited.late_per_10_000(DEADLINE)),
            ("longest_ms", limited.longest_ms()),
            ("bare_late", bare.late(Duration::ZERO).into()),
            ("bare_late_per_10_000", bare.late_per_10_000(Duration::ZERO)),
            ("bare_longest_ms", bare.longest_ms()),
        ])?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_choice_decides_while_redis_hangs() -> Fallible {
        let brief = Duration::from_millis(20);
        let every = Duration::from_millis(2);
        let plan = OutagePlan { clients: 8, every, outages: 2, up: brief, hung: brief };
        for choice in [OnOutage::Open, OnOutage::Closed, OnOutage::Local] {
            let outcome = runtime()?.block_on(measure(choice, plan))?;
            let requests = 1..=outcome.limited.0.len();
            assert!(requests.contains(&outcome.without_store), "{}", outcome.without_store);
            assert!(!outcome.bare.0.is_empty());
        }
        Ok(())
    }
}
