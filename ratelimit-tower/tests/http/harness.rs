//! Limits, requests, and what came back.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::get;
use http::header::HeaderName;
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Collected};
use ratelimit_core::store::{Batch, Op};
use ratelimit_core::{
    AnyAlgorithm, ErrorKind, Limits, LimitsBuilder, ManualClock, RateLimiter, Refusal, Store,
    StoreError, Verdict,
};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{ClientAddress, PeerAddress, RateLimitLayer};
use tower::{Service, ServiceExt};

pub(crate) type Manual = MemoryStore<AnyAlgorithm, ManualClock>;

pub(crate) fn store(clock: &ManualClock) -> Manual {
    MemoryStore::builder().clock(clock.clone()).build()
}

/// A store in memory that takes its time, and fails where it is to.
pub(crate) struct Faulty {
    store: Manual,
    takes: Duration,
    calls: AtomicU64,
    fails: Box<dyn Fn(u64, Op) -> Option<ErrorKind> + Send + Sync>,
}

impl Faulty {
    /// A store that fails where this function of the number of the call and the operation says so.
    pub(crate) fn new(
        clock: &ManualClock,
        fails: impl Fn(u64, Op) -> Option<ErrorKind> + Send + Sync + 'static,
    ) -> Self {
        let (takes, calls) = (Duration::ZERO, AtomicU64::new(0));
        Self { store: store(clock), takes, calls, fails: Box::new(fails) }
    }

    /// A store that decides a second later.
    pub(crate) fn slow() -> Self {
        Self { takes: Duration::from_secs(1), ..Self::new(&ManualClock::default(), |_, _| None) }
    }
}

/// The failure of a call. Each reads differently.
#[derive(Debug, thiserror::Error)]
#[error("call {0} failed: {1:?}")]
pub(crate) struct Failed(u64, ErrorKind);

impl From<Refusal> for Failed {
    fn from(refusal: Refusal) -> Self {
        Self(0, refusal.kind())
    }
}

impl StoreError for Failed {
    fn kind(&self) -> ErrorKind {
        self.1
    }
}

impl Store<AnyAlgorithm> for Faulty {
    type Error = Failed;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, Failed> {
        tokio::time::sleep(self.takes).await;
        let nth = self.calls.fetch_add(1, Ordering::Relaxed);
        match (self.fails)(nth, batch.operation()) {
            Some(kind) => Err(Failed(nth, kind)),
            None => self.store.apply(batch).await.map_err(|error| Failed(nth, error.kind())),
        }
    }
}

/// Each limit's name, its policy in words, and the identifier that it counts by.
pub(crate) type Rows<'a> = &'a [(&'a str, &'a str, &'a str)];

/// Two requests per address, one more every ten seconds.
pub(crate) const BURST: Rows = &[("burst", "gcra 6/m burst 2", "ip")];

pub(crate) fn limits(rows: Rows) -> Limits<AnyAlgorithm> {
    let add =
        |limits: LimitsBuilder, row: &(&str, &str, &str)| limits.limit(row.0, row.1).by([row.2]);
    rows.iter().fold(Limits::builder(), add).build().unwrap()
}

/// The clock stands still.
pub(crate) fn limiter(rows: Rows) -> RateLimiter<Manual> {
    RateLimiter::new(limits(rows), store(&ManualClock::default()))
}

/// A layer of these limits, which count by the address of the peer.
pub(crate) fn by_ip<S: Store<AnyAlgorithm>>(
    limiter: impl Into<Arc<RateLimiter<S>>>,
) -> RateLimitLayer<S> {
    RateLimitLayer::new(limiter).by("ip", ClientAddress::peer())
}

pub(crate) fn layer(rows: Rows) -> RateLimitLayer<Manual> {
    by_ip(limiter(rows))
}

pub(crate) fn hello() -> Router {
    Router::new().route("/", get(|| async { "hello" }))
}

pub(crate) const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

pub(crate) fn request(path: &str) -> Request<Body> {
    let mut request = Request::get(path).body(Body::empty()).unwrap();
    let peer: SocketAddr = "192.0.2.7:4711".parse().unwrap();
    request.extensions_mut().insert(PeerAddress(peer));
    request
}

pub(crate) fn with_key(key: &str) -> Request<Body> {
    let mut request = request("/");
    request.headers_mut().insert(API_KEY, key.parse().unwrap());
    request
}

/// What came back.
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

impl Answer {
    /// The lines of this field; empty if there are none.
    pub(crate) fn field(&self, name: &str) -> String {
        let lines = self.headers.get_all(name).iter().map(|line| line.to_str().unwrap());
        lines.collect::<Vec<_>>().join(", ")
    }

    pub(crate) fn problem(&self) -> serde_json::Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub(crate) fn violated_limits(&self) -> Vec<String> {
        serde_json::from_value(self.problem()["violated-policies"].clone()).unwrap()
    }
}

/// A service of this body, which does not fail.
pub(crate) trait App<B>:
    Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone
{
}

impl<S, B> App<B> for S where
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible> + Clone
{
}

/// Sends a request, and reads the answer to its end.
pub(crate) async fn send<B: http_body::Body>(app: &impl App<B>, request: Request<Body>) -> Answer {
    let (parts, body) = app.clone().oneshot(request).await.unwrap().into_parts();
    let body = body.collect().await.map_or(Bytes::new(), Collected::to_bytes);
    Answer { status: parts.status.as_u16(), headers: parts.headers, body }
}

/// Sends these requests, one after the other.
pub(crate) async fn statuses<B: http_body::Body, const N: usize>(
    app: &impl App<B>,
    requests: [Request<Body>; N],
) -> [u16; N] {
    let mut statuses = [0; N];
    for (status, request) in statuses.iter_mut().zip(requests) {
        *status = send(app, request).await.status;
    }
    statuses
}
