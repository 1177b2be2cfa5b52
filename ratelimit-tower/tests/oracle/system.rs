//! The layer under test, over a store that notes what it is asked.

use std::net::SocketAddr;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::{Body, Bytes};
use futures_util::FutureExt as _;
use http::header::{HeaderName, HeaderValue};
use http::{Request, Response, StatusCode};
use http_body::Frame;
use http_body_util::BodyExt as _;
use ratelimit_core::store::{Batch, Check, Op};
use ratelimit_core::{
    AnyAlgorithm, Clock, ErrorKind, LimitCosts, Limits, RateLimiter, Refusal, Store, StoreError,
    SyncStore, Timestamp, Verdict,
};
use ratelimit_layers::{Fallback, OnRecovery};
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{
    Answer, BusyWait, Charge, Choice, ClientAddress, Decisions, Fields, Grpc, Hold, Identify,
    IdentifyError, Meter, ModelFields, OnStoreError, PeerAddress, ProblemJson, ProxyHeader,
    RateLimitLayer, Rejection, Unit, XRateLimit, from_fn, header, optional, unauthorized,
};
use tokio::sync::Notify;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};
use tower::util::BoxCloneSyncService;
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::setup::{
    Ask, Busy, Charged, Frames, Handler, Header, LimitSpec, Mode, Outages, Outcome, Plan, Presence,
    Setup, Shown,
};

/// The time of a store, which passes with that of the runtime.
#[derive(Clone, Copy)]
pub(crate) struct Passing(Instant);

impl Passing {
    pub(crate) fn new() -> Self {
        Self(Instant::now())
    }
}

impl Clock for Passing {
    fn now(&self) -> Timestamp {
        Timestamp::ZERO + self.0.elapsed()
    }
}

/// A charge that the store is asked for: limit, key, cost.
type Noted = (String, String, u64);

/// A store in memory that notes each charge that it is asked for and each settlement that it makes,
/// and can be away.
struct Noting {
    store: MemoryStore<AnyAlgorithm, Passing>,
    away: AtomicBool,
    asked: Mutex<Vec<Noted>>,
    /// What it is charged by force.
    forced: Mutex<Vec<Noted>>,
    /// And how much of each is forgiven.
    settled: Mutex<Vec<(Noted, u64)>>,
}

#[derive(Debug, thiserror::Error)]
#[error("{0:?}")]
struct Failed(ErrorKind);

impl From<Refusal> for Failed {
    fn from(refusal: Refusal) -> Self {
        Self(refusal.kind())
    }
}

impl StoreError for Failed {
    fn kind(&self) -> ErrorKind {
        self.0
    }
}

impl Store<AnyAlgorithm> for Noting {
    type Error = Failed;

    async fn apply(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, Failed> {
        self.apply_now(batch)
    }
}

impl SyncStore<AnyAlgorithm> for Noting {
    fn apply_now(&self, batch: &Batch<'_, AnyAlgorithm>) -> Result<Verdict, Failed> {
        if self.away.load(Ordering::Relaxed) {
            return Err(Failed(ErrorKind::Unavailable));
        }
        let verdict = self.store.apply_now(batch).map_err(|error| Failed(error.kind()))?;
        let checks = batch.checks().iter();
        let noted = checks.map(|one| (one.limit.name().to_owned(), one.key.to_owned(), one.cost));
        match batch.operation() {
            Op::Acquire => self.asked.lock().unwrap().extend(noted),
            Op::Force => self.forced.lock().unwrap().extend(noted),
            Op::Settle => {
                let forgiven = (0..).map(|nth| verdict.account(nth).forgiven);
                self.settled.lock().unwrap().extend(noted.zip(forgiven));
            }
            _ => {}
        }
        Ok(verdict)
    }
}

/// What the handler has seen of the decisions.
type HandlerView = Arc<Mutex<Vec<(String, u64)>>>;

/// Where the handler waits, and what it keeps.
#[derive(Clone, Default)]
struct Held(Arc<(Notify, Mutex<Option<ratelimit_tower::Held>>)>);

/// The service fails.
#[derive(Debug, thiserror::Error)]
#[error("as it was told")]
pub(crate) struct Broken;

pub(crate) type Head = Response<()>;

type Boxed = BoxCloneSyncService<Request<Body>, Response<Body>, Broken>;

type Answering = Pin<Box<dyn Future<Output = Result<Response<Body>, Broken>>>>;

/// A request that is underway.
pub(crate) struct Underway {
    held: Held,
    call: Option<Answering>,
    body: Option<Body>,
}

pub(crate) struct System {
    store: Arc<Noting>,
    /// What [`Fallback`] knows, if there is one.
    fallback: Option<Fallback<Arc<Noting>, AnyAlgorithm, Passing>>,
    service: Boxed,
    header: Option<Header>,
    handler_view: HandlerView,
}

/// The answers of the two formats.
#[derive(Clone)]
struct InFormat {
    grpc: bool,
}

impl Answer<Body> for InFormat {
    fn answer(&self, rejection: &Rejection) -> Response<Body> {
        if self.grpc { Grpc.answer(rejection) } else { ProblemJson.answer(rejection) }
    }
}

const USER: HeaderName = HeaderName::from_static("x-user");

pub(crate) fn limits<'a>(specs: impl Iterator<Item = &'a LimitSpec>) -> Limits<AnyAlgorithm> {
    let mut limits = Limits::builder();
    for spec in specs {
        limits =
            limits.limit(spec.name, spec.kind.algorithm()).by(spec.by).on_outage(spec.on_outage);
        if spec.kind.attempts {
            limits = limits.count_attempts();
        }
        limits = match spec.when_user {
            Some((user, false)) => limits.when("user", user),
            Some((user, true)) => limits.when_not("user", user),
            None => limits,
        };
        if spec.required {
            limits = limits.required();
        }
        if spec.shadow {
            limits = limits.shadow();
        }
    }
    limits.build().unwrap()
}

fn fields(setup: &Setup) -> Fields {
    let mut fields = Fields::new();
    if !setup.fields.draft {
        fields = fields.without_draft();
    }
    if setup.fields.older {
        fields = fields.x_ratelimit(XRateLimit::Seconds);
    }
    if setup.fields.models {
        fields = fields.model_fields(ModelFields::Anthropic);
    }
    if setup.fields.only_denials {
        fields = fields.only_on_denials();
    }
    fields = fields.busy_wait(match setup.fields.busy {
        Busy::Untold => BusyWait::Untold,
        Busy::Hint { ms } => BusyWait::Hint(Duration::from_millis(ms)),
        Busy::Estimated => BusyWait::Estimated,
    });
    for limit in &setup.limits {
        fields = match limit.shown {
            Shown::Own => fields,
            Shown::Hidden => fields.hide(limit.name),
            Shown::As(name) => fields.rename(limit.name, name).unwrap(),
        };
        fields = match limit.unit {
            None => fields,
            Some("content-bytes") => fields.unit(limit.name, Unit::ContentBytes),
            Some(unit) => fields.unit(limit.name, Unit::Other(unit.into())),
        };
        if limit.abnormal {
            fields = fields.abnormal_usage(limit.name);
        }
    }
    fields
}

/// The body of a response.
struct SentBody {
    frames: Frames,
    meter: Option<Meter>,
}

impl http_body::Body for SentBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let Some(bytes) = self.frames.bytes.pop_front() else {
            let broken = self.frames.breaks.then(|| Err(axum::Error::new(Broken)));
            return Poll::Ready(broken);
        };
        if let (true, Some(meter)) = (self.frames.meters, &self.meter) {
            meter.add(1);
        }
        Poll::Ready(Some(Ok(Frame::data(vec![b'x'; bytes.try_into().unwrap()].into()))))
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_over()
    }
}

/// What the generated request asks of the handler.
async fn handle(request: Request<Body>) -> Result<Response<Body>, Broken> {
    let handler: &Handler = request.extensions().get().unwrap();
    let meter: Option<&Meter> = request.extensions().get();
    if let Some(meter) = meter {
        if let Some(cost) = handler.metered {
            meter.set(cost);
        }
        if let Some((limit, cost)) = handler.metered_of {
            meter.add_of(limit, cost);
        }
    }
    let decisions: &Decisions = request.extensions().get().unwrap();
    let seen = decisions.iter().map(|(name, one)| (name.to_owned(), one.remaining)).collect();
    *request.extensions().get::<HandlerView>().unwrap().lock().unwrap() = seen;
    let Held(held) = request.extensions().get().unwrap();
    if let (true, Some(hold)) = (handler.keeps, request.extensions().get::<Hold>()) {
        *held.1.lock().unwrap() = Some(hold.keep());
    }
    if handler.waits {
        held.0.notified().await;
    }
    let body = SentBody { frames: handler.body.clone(), meter: meter.cloned() };
    match handler.outcome {
        Outcome::Answers { status } => {
            Ok(Response::builder().status(status).body(Body::new(body)).unwrap())
        }
        Outcome::Fails => Err(Broken),
        // Without the message of a panic.
        Outcome::Panics => resume_unwind(Box::new(())),
    }
}

fn box_service<B, S>(service: S) -> Boxed
where
    B: http_body::Body<Data = axum::body::Bytes, Error = axum::Error> + Send + 'static,
    S: Service<Request<Body>, Response = Response<B>, Error = Broken, Future: Send>,
    S: Clone + Send + Sync + 'static,
{
    BoxCloneSyncService::new(service.map_response(|response: Response<B>| response.map(Body::new)))
}

/// The layer with all that the setup says.
fn configure<S: Store<AnyAlgorithm>>(
    setup: &Setup,
    layer: RateLimitLayer<S>,
) -> RateLimitLayer<S, AnyAlgorithm, InFormat> {
    let address = match setup.header {
        None => ClientAddress::peer(),
        Some(header) => {
            let header = match header {
                Header::Forwarded => ProxyHeader::Forwarded,
                Header::XForwardedFor => ProxyHeader::XForwardedFor,
                Header::RealIp => ProxyHeader::Single(HeaderName::from_static("x-real-ip")),
            };
            ClientAddress::behind(["10.0.0.0/8", "2001:db8:ff::/48"], header).unwrap()
        }
    };
    let layer = match setup.user {
        Presence::Mandatory => layer.by("user", header(USER)),
        Presence::Optional => layer.by("user", optional(header(USER))),
        Presence::Unauthorized => layer.by("user", by_bearer()),
    };
    let layer = layer
        .by("ip", address)
        .key(from_fn(|_| Ok(Some("all".into()))))
        .cost_of(|request| request.extensions.get::<LimitCosts>().unwrap().clone())
        .fields(fields(setup))
        .tell_handlers()
        .answer(InFormat { grpc: setup.grpc });
    let admits = [OnStoreError::Refuse, OnStoreError::Admit][usize::from(setup.admits_outage)];
    layer.on_store_error(admits)
}

/// A layer over this store, around the handler.
fn build_layer<S: Store<AnyAlgorithm> + 'static>(
    setup: &Setup,
    store: &Arc<S>,
) -> RateLimitLayer<Arc<S>, AnyAlgorithm, InFormat> {
    let limiter = |limits| Arc::new(RateLimiter::new(limits, store.clone()));
    let all = limiter(limits(setup.limits.iter()));
    let layer = if setup.mode == Mode::Choosing {
        let backwards = limiter(limits(setup.limits.iter().rev()));
        let first = limiter(limits(setup.limits.iter().take(1)));
        RateLimitLayer::choosing(move |request| match request.extensions.get().unwrap() {
            Plan::All => Choice::Limited(all.clone()),
            Plan::Backwards => Choice::Limited(backwards.clone()),
            Plan::First => Choice::Limited(first.clone()),
            Plan::Exempt => Choice::Exempt,
            Plan::Refused => Choice::Refused(unpaid()),
        })
    } else {
        RateLimitLayer::new(all)
    };
    configure(setup, layer)
}

/// Awaits the store, and reserves if the setup says so.
fn await_store<S: Store<AnyAlgorithm> + 'static>(
    setup: &Setup,
    layer: RateLimitLayer<S, AnyAlgorithm, InFormat>,
) -> Boxed {
    let Mode::Reserving(charged) = setup.mode else {
        return box_service(layer.layer(service_fn(handle)));
    };
    let charge = match charged {
        Charged::Estimate => Charge::estimate(),
        Charged::Bytes => Charge::body_bytes(),
        Charged::Status => Charge::by_status(|status| u64::from(status.as_u16() / 100)),
    };
    let frees_500 = setup.frees_500;
    let charge = charge.free(move |status| status == 304 || (status == 500 && frees_500));
    box_service(layer.reserve(charge).layer(service_fn(handle)))
}

impl System {
    pub(crate) fn new(setup: &Setup) -> Self {
        let clock = Passing::new();
        let store = Arc::new(Noting {
            store: MemoryStore::builder().clock(clock).build(),
            away: AtomicBool::new(false),
            asked: Mutex::default(),
            forced: Mutex::default(),
            settled: Mutex::default(),
        });
        let fallback = setup.fallback.map(|Outages { failures, nodes, charges }| {
            let recovers = if charges { OnRecovery::Charge } else { OnRecovery::Forget };
            let settings = Fallback::builder().failures(failures).on_recovery(recovers);
            let settings = settings.nodes(nodes.try_into().unwrap()).at_least_one().clock(clock);
            settings.build(store.clone(), &limits(setup.limits.iter())).unwrap()
        });
        let service = match &fallback {
            Some(fallback) => await_store(setup, build_layer(setup, &Arc::new(fallback.clone()))),
            None if setup.mode == Mode::Immediate => {
                box_service(build_layer(setup, &store).immediate().layer(service_fn(handle)))
            }
            None => await_store(setup, build_layer(setup, &store)),
        };
        Self {
            store,
            fallback,
            service,
            header: setup.header,
            handler_view: HandlerView::default(),
        }
    }

    /// The time until the next request passes.
    pub(crate) async fn passes(&self, ms: u64) {
        // Tasks that renew and charge run in between.
        for _ in 0..4 {
            yield_now().await;
        }
        if ms > 0 {
            sleep(Duration::from_millis(ms)).await;
        }
    }

    /// Makes the store unreachable, or reachable again.
    pub(crate) fn away(&self, away: bool) {
        self.store.away.store(away, Ordering::Relaxed);
    }

    /// Sends a request, which waits for nothing but its handler.
    pub(crate) fn ask(&self, ask: &Ask) -> (Underway, Option<Head>) {
        let to_keep = Held::default();
        let mut request = self.request(ask);
        request.extensions_mut().insert(to_keep.clone());
        let answer = Box::pin(self.service.clone().oneshot(request));
        let mut underway = Underway { held: to_keep, call: Some(answer), body: None };
        let head = underway.call();
        (underway, head)
    }

    pub(crate) fn request(&self, ask: &Ask) -> Request<Body> {
        let mut request = Request::new(Body::empty());
        let peer = SocketAddr::new(ask.peer.text().parse().unwrap(), 4711);
        let costs = ask.costs.iter();
        let costs =
            costs.fold(LimitCosts::from(ask.cost), |all, (name, cost)| all.with(name, *cost));
        let extensions = request.extensions_mut();
        extensions.insert(PeerAddress(peer));
        extensions.insert(costs);
        extensions.insert(self.handler_view.clone());
        extensions.insert(ask.plan);
        extensions.insert(ask.handler.clone());
        if let Some(user) = ask.user {
            request.headers_mut().insert(USER, HeaderValue::from_static(user));
        }
        for line in &ask.lines {
            let line: Vec<_> = line.iter().map(|hop| &*hop.text).collect();
            let name = self.header.unwrap_or(Header::XForwardedFor).name();
            request.headers_mut().append(name, line.join(",").trim().parse().unwrap());
        }
        request
    }

    /// What the handler has seen since the last call.
    pub(crate) fn take_handler_view(&self) -> Vec<(String, u64)> {
        std::mem::take(&mut self.handler_view.lock().unwrap())
    }

    /// What the store was asked to charge since the last call.
    pub(crate) fn take_asked(&self) -> Vec<Noted> {
        std::mem::take(&mut self.store.asked.lock().unwrap())
    }

    /// What the store was charged by force since the last call.
    pub(crate) fn take_forced(&self) -> Vec<Noted> {
        std::mem::take(&mut self.store.forced.lock().unwrap())
    }

    /// What the store has settled since the last call, and how much of that is forgiven.
    pub(crate) fn take_settled(&self) -> Vec<(Noted, u64)> {
        std::mem::take(&mut self.store.settled.lock().unwrap())
    }

    /// How many requests each limit has allowed, denied and spared by its choice, without the
    /// store.
    pub(crate) fn without_store(&self) -> Vec<(String, u8, [u64; 3])> {
        let counts = self.fallback.iter().flat_map(Fallback::outage_counts);
        let counts = counts.map(|count| {
            let outcomes = [count.allowed, count.denied, count.spared];
            (count.limit.into(), count.choice as u8, outcomes)
        });
        counts.collect()
    }

    /// What is left of a limit in the store, and owed.
    pub(crate) fn remaining_and_owed(&self, limit: &LimitSpec, key: &str) -> (u64, u64) {
        let limits = limits(std::iter::once(limit));
        let check = Check { limit: limits.iter().next().unwrap(), key, cost: 0 };
        let verdict = self.store.store.apply_now(&Batch::one(&check).op(Op::Peek)).unwrap();
        (verdict.remaining(), verdict.owed())
    }
}

impl Underway {
    /// The service goes on, if it was called. Returns the head of its response.
    fn call(&mut self) -> Option<Head> {
        let call = self.call.as_mut()?;
        let polled = catch_unwind(AssertUnwindSafe(|| call.as_mut().now_or_never()));
        let answered = match polled {
            Ok(None) => return None,
            Ok(Some(answered)) => answered.ok(),
            Err(_) => None,
        };
        self.call = None;
        let (parts, body) = answered?.into_parts();
        self.body = Some(body);
        Some(Response::from_parts(parts, ()))
    }

    /// The next step: the response, whose head is returned, or a frame.
    pub(crate) fn goes_on(&mut self) -> Option<Head> {
        self.held.0.0.notify_one();
        if self.call.is_some() {
            return self.call();
        }
        let frame = self
            .body
            .as_mut()
            .and_then(|body| body.frame().now_or_never().expect("it waits for nothing"));
        if frame.is_none_or(|frame| frame.is_err()) {
            self.body = None;
        }
        None
    }

    /// The rest of the body.
    pub(crate) fn collect_body(&mut self) -> Bytes {
        let body = self.body.take().unwrap();
        body.collect().now_or_never().expect("it waits for nothing").unwrap().to_bytes()
    }

    /// Whether the response is over.
    pub(crate) fn is_over(&self) -> bool {
        self.call.is_none() && self.body.is_none()
    }

    /// The client leaves.
    pub(crate) fn leaves(&mut self) {
        (self.call, self.body) = (None, None);
    }
}

fn unpaid() -> IdentifyError {
    IdentifyError::refused(StatusCode::PAYMENT_REQUIRED, "the subscription has ended")
}

fn by_bearer() -> impl Identify {
    unauthorized(header(USER), HeaderValue::from_static("Bearer"))
}
