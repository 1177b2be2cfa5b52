//! The layer under test, over a store that notes what it is asked.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::num::NonZeroU64;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use http::header::{HeaderName, HeaderValue};
use http::{Request, Response, StatusCode};
use ratelimit_core::store::{Batch, Op};
use ratelimit_core::{
    ErrorKind, LimitCosts, Limits, ManualClock, Policy, RateLimiter, Refusal, Store, StoreError,
    SyncStore, Verdict,
};
use ratelimit_layers::Fallback;
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{
    Answer, Charge, Choice, ClientAddress, Decisions, Fields, Grpc, Identify, IdentifyError, Meter,
    ModelFields, OnStoreError, PeerAddress, ProblemJson, ProxyHeader, RateLimitLayer, Rejection,
    Unit, XRateLimit, from_fn, header, optional, unauthorized,
};
use tower::util::BoxCloneSyncService;
use tower::{Layer, Service, ServiceExt, service_fn};

use crate::setup::{
    Ask, Charged, Handler, Header, Kind, LimitSpec, Mode, Plan, Presence, Setup, Shown,
};

/// A store in memory that notes each charge that it is asked for, and can be away.
struct Noting {
    store: MemoryStore<Policy, ManualClock>,
    away: AtomicBool,
    asked: Mutex<Vec<(String, String, u64)>>,
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

impl Store<Policy> for Noting {
    type Error = Failed;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Failed> {
        self.apply_now(batch)
    }
}

impl SyncStore<Policy> for Noting {
    fn apply_now(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Failed> {
        if self.away.load(Ordering::Relaxed) {
            return Err(Failed(ErrorKind::Unavailable));
        }
        if batch.operation() == Op::Acquire {
            let asked = batch.checks().iter();
            let asked =
                asked.map(|one| (one.limit.name().to_owned(), one.key.to_owned(), one.cost));
            self.asked.lock().unwrap().extend(asked);
        }
        self.store.apply_now(batch).map_err(|error| Failed(error.kind()))
    }
}

/// What the handler has seen of the decisions.
type Seen = Arc<Mutex<Vec<(String, u64)>>>;

type Boxed = BoxCloneSyncService<Request<Body>, Response<Body>, Infallible>;

pub(crate) struct System {
    clock: ManualClock,
    store: Arc<Noting>,
    pub(crate) service: Boxed,
    header: Option<Header>,
    seen: Seen,
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

pub(crate) fn limits<'a>(specs: impl Iterator<Item = &'a LimitSpec>) -> Limits<Policy> {
    let mut limits = Limits::builder();
    for spec in specs {
        let words = match spec.kind {
            Kind::Bucket { every_us, burst } => {
                format!("gcra 1/{}ms burst {burst}", every_us / 1_000)
            }
            Kind::Window { limit, length_us } => {
                format!("fixed-window {limit}/{}ms", length_us / 1_000)
            }
        };
        limits = limits.limit(spec.name, &*words).by(spec.by).on_outage(spec.on_outage);
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

/// What the generated request asks of the handler.
async fn handle(request: Request<Body>) -> Result<Response<Body>, Infallible> {
    let handler: &Handler = request.extensions().get().unwrap();
    if let Some(meter) = request.extensions().get::<Meter>() {
        if let Some(cost) = handler.metered {
            meter.set(cost);
        }
        if let Some((limit, cost)) = handler.metered_of {
            meter.add_of(limit, cost);
        }
    }
    let decisions: &Decisions = request.extensions().get().unwrap();
    let seen = decisions.iter().map(|(name, one)| (name.to_owned(), one.remaining)).collect();
    *request.extensions().get::<Seen>().unwrap().lock().unwrap() = seen;
    let body = "x".repeat(usize::try_from(handler.bytes).unwrap());
    Ok(Response::builder().status(handler.status).body(Body::from(body)).unwrap())
}

fn boxed<B, S>(service: S) -> Boxed
where
    B: http_body::Body<Data = axum::body::Bytes, Error = axum::Error> + Send + 'static,
    S: Service<Request<Body>, Response = Response<B>, Error = Infallible, Future: Send>,
    S: Clone + Send + Sync + 'static,
{
    BoxCloneSyncService::new(service.map_response(|response: Response<B>| response.map(Body::new)))
}

/// The layer with all that the setup says.
fn configured<S: Store<Policy>>(
    setup: &Setup,
    layer: RateLimitLayer<S>,
) -> RateLimitLayer<S, Policy, InFormat> {
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

impl System {
    pub(crate) fn new(setup: &Setup) -> Self {
        let clock = ManualClock::default();
        let store = MemoryStore::builder().clock(clock.clone()).build();
        let store =
            Arc::new(Noting { store, away: AtomicBool::new(false), asked: Mutex::default() });
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
        let layer = configured(setup, layer);
        let service = match setup.mode {
            Mode::Immediate => boxed(layer.immediate().layer(service_fn(handle))),
            Mode::Awaited | Mode::Choosing => boxed(layer.layer(service_fn(handle))),
            Mode::Reserving(charged) => {
                let charge = match charged {
                    Charged::Estimate => Charge::estimate(),
                    Charged::Bytes => Charge::body_bytes(),
                    Charged::Status => Charge::by_status(|status| u64::from(status.as_u16() / 100)),
                };
                let layer = layer.reserve(charge.free(|status| status == 304));
                boxed(layer.layer(service_fn(handle)))
            }
        };
        Self { clock, store, service, header: setup.header, seen: Seen::default() }
    }

    /// The same layer over a fallback around the store.
    pub(crate) fn with_fallback(&self, setup: &Setup) -> Boxed {
        let limits = limits(setup.limits.iter());
        let settings = Fallback::builder().nodes(NonZeroU64::MIN).clock(self.clock.clone());
        let store = settings.build(self.store.clone(), &limits).unwrap();
        let layer = RateLimitLayer::new(RateLimiter::new(limits, store));
        boxed(configured(setup, layer).layer(service_fn(handle)))
    }

    /// The time until the request passes, and the store is away or comes back.
    pub(crate) fn pass(&self, ask: &Ask) {
        self.clock.advance(Duration::from_millis(ask.after_ms));
        self.store.away.store(ask.away, Ordering::Relaxed);
    }

    pub(crate) fn request(&self, ask: &Ask) -> Request<Body> {
        let mut request = Request::new(Body::empty());
        let peer = SocketAddr::new(ask.peer.text().parse().unwrap(), 4711);
        let costs = ask.costs.iter();
        let costs = costs.fold(LimitCosts::from(ask.cost), |all, (name, cost)| all.of(name, *cost));
        let extensions = request.extensions_mut();
        extensions.insert(PeerAddress(peer));
        extensions.insert(costs);
        extensions.insert(self.seen.clone());
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
    pub(crate) fn take_seen(&self) -> Vec<(String, u64)> {
        std::mem::take(&mut self.seen.lock().unwrap())
    }

    /// What the store was asked to charge since the last call: limit, key, cost.
    pub(crate) fn take_asked(&self) -> Vec<(String, String, u64)> {
        std::mem::take(&mut self.store.asked.lock().unwrap())
    }
}

fn unpaid() -> IdentifyError {
    IdentifyError::refused(StatusCode::PAYMENT_REQUIRED, "the subscription has ended")
}

fn by_bearer() -> impl Identify {
    unauthorized(header(USER), HeaderValue::from_static("Bearer"))
}
