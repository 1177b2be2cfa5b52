//! [`Reserving`]: a layer reserves a cost when a request arrives, and settles it with the response.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use derive_where::derive_where;
use http::StatusCode;
use http::request::Parts;
use ratelimit_core::algorithm::Quota;
use ratelimit_core::{LimitCosts, Store};
use tokio_util::task::TaskTracker;

use crate::layer::RateLimitLayer;

mod body;
mod estimate;
mod grpc_status;
mod hold;
mod mode;
mod open;

pub use body::SettledBody;
pub use estimate::CostEstimates;
pub use hold::{Held, Hold};

/// The mode of a layer that reserves the cost of a request when it arrives, and settles it at the
/// real cost of the response.
///
/// [`RateLimitLayer::reserve`] makes such a layer of one whose cost is the estimate. A request is
/// admitted if its estimate fits. The difference is given back, or charged down to nothing left,
/// when the body of the response ends or is dropped, or when the client disconnects:
///
/// | the request ends | it costs |
/// |---|---|
/// | its body was sent, or the client left while it was | the cost by [`Charge`] |
/// | the client left before there was a response | the estimate, or the cost in the [`Meter`] |
/// | the handler panicked | as above |
/// | the inner service failed | nothing, if a 500 is free |
///
/// A limit of [`Concurrency`](ratelimit_core::Concurrency) holds as many places as the request
/// costs, for that time: beside a budget, give it the cost 1, as by
/// `LimitCosts::from(1).with("tokens", estimate)`. A [`Hold`] keeps it for longer, while an
/// upgraded connection lives, such as a WebSocket's. Without one, the response 101 gives the place
/// back.
///
/// # Renewal
///
/// What is reserved lives for an hour, and a place for its lease. The layer renews both at half of
/// that time, for as long as the request is underway. A renewal that fails is an error of the
/// store, as a failed settlement is, and is repeated three times before the end of the life. What
/// has expired all the same is a warning in the log.
///
/// A store that decides without waiting settles before the end of the body is reported, so that the
/// next request finds the capacity. Any other settles after it: see
/// [`settlements`](RateLimitLayer::settlements).
///
/// The limits must be of algorithms that reserve: [`Gcra`](ratelimit_core::Gcra),
/// [`FixedWindow`](ratelimit_core::FixedWindow), [`Concurrency`](ratelimit_core::Concurrency).
/// Others are answered with 500. The service needs a tokio runtime, on which settlements run.
///
/// ```
/// # use ratelimit_core::*;
/// use ratelimit_tower::{Charge, ClientAddress, Fields, RateLimitLayer, Unit};
///
/// # fn example<S: Store<AnyAlgorithm> + 'static>(limiter: RateLimiter<S>) {
/// // 64 KiB are reserved, and the bytes of the body charged. Errors and unchanged pages cost nothing.
/// let layer = RateLimitLayer::new(limiter)
///     .by("ip", ClientAddress::peer())
///     .fields(Fields::new().unit("bandwidth", Unit::ContentBytes))
///     .cost(64 * 1024)
///     .reserve(Charge::body_bytes().free(|status| status == 304 || status.is_server_error()));
/// # let _ = layer;
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct Reserving {
    charge: Charge,
    settlements: Settlements,
    /// Whether the log says that a connection was upgraded without a [`Hold`].
    said_unheld: Arc<AtomicBool>,
}

impl<S: Store<A>, A: Quota + 'static, R, M> RateLimitLayer<S, A, R, M> {
    /// A layer that reserves this layer's cost when a request arrives, and settles it by the
    /// response. See [`Reserving`].
    #[must_use]
    pub fn reserve(self, charge: Charge) -> RateLimitLayer<S, A, R, Reserving> {
        let settlements = Settlements(TaskTracker::new());
        // A closed tracker still counts; an open one would make waiting endless.
        settlements.0.close();
        self.with_mode(Reserving { charge, settlements, said_unheld: Arc::default() }, true)
    }
}

impl<S, A, R> RateLimitLayer<S, A, R, Reserving> {
    /// The same layer, which admits a request also where less is left than its cost, down to what
    /// this function returns: it reserves what is left, as
    /// [`reserve_up_to`](ratelimit_core::Request::reserve_up_to) does. A denial is that of the
    /// minimum.
    ///
    /// With [`tell_handlers`](Self::tell_handlers) the service sees what it may use: the cost of
    /// each decision.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// use axum::Extension;
    /// use ratelimit_tower::{Charge, Decisions, RateLimitLayer, header};
    ///
    /// # fn example<S: Store<AnyAlgorithm> + 'static>(limiter: RateLimiter<S>) {
    /// let layer = RateLimitLayer::new(limiter)
    ///     .by("customer", header(http::header::AUTHORIZATION))
    ///     .cost_of(|_| LimitCosts::from(1).with("tokens", 4_000))
    ///     .tell_handlers()
    ///     .reserve(Charge::estimate())
    ///     .down_to(|_| LimitCosts::from(1).with("tokens", 500));
    /// # drop(layer);
    /// # }
    ///
    /// async fn complete(Extension(decisions): Extension<Decisions>) -> String {
    ///     let most_tokens = decisions.by_name("tokens").map_or(4_000, |tokens| tokens.cost);
    ///     format!("an answer of at most {most_tokens} tokens")
    /// }
    /// ```
    #[must_use]
    pub fn down_to<K: Into<LimitCosts>>(
        mut self,
        least: impl Fn(&Parts) -> K + Send + Sync + 'static,
    ) -> Self {
        self.config.least = Some(Arc::new(move |request| least(request).into()));
        self
    }

    /// The reservations of this layer and its clones that are not settled yet.
    #[must_use]
    pub fn settlements(&self) -> Settlements {
        self.mode.settlements.clone()
    }
}

/// The reservations of a layer and its clones that are not settled yet: requests in flight, and
/// settlements. See [`RateLimitLayer::settlements`].
#[derive(Clone, Debug)]
pub struct Settlements(TaskTracker);

impl Settlements {
    /// How many there are.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Waits until there is none, in a test or at shutdown. It waits for open bodies too, so give
    /// it a time limit.
    pub async fn wait(&self) {
        self.0.wait().await;
    }
}

/// What a response costs.
///
/// The functions of [`free`](Self::free) and [`by_status`](Self::by_status) see the status of HTTP.
/// gRPC answers 200 to everything, so for its responses they see what the `grpc-status` of the
/// header or of the trailers stands for, as `google.rpc.Code` says: 404 for `NOT_FOUND`, 429 for
/// `RESOURCE_EXHAUSTED`, 500 for `INTERNAL`, 503 for `UNAVAILABLE`.
///
/// A handler's word goes before all other rules, except after [`unmetered`](Self::unmetered): see
/// [`Meter`].
#[derive(Clone)]
#[derive_where(Debug)]
pub struct Charge {
    by: ChargedBy,
    #[derive_where(skip)]
    free: Option<Arc<dyn Fn(StatusCode) -> bool + Send + Sync>>,
    unmetered: bool,
}

#[derive(Clone)]
#[derive_where(Debug)]
enum ChargedBy {
    Estimate,
    BodyBytes,
    Status(#[derive_where(skip)] Arc<dyn Fn(StatusCode) -> u64 + Send + Sync>),
}

impl Charge {
    const fn by(by: ChargedBy) -> Self {
        Self { by, free: None, unmetered: false }
    }

    /// The estimate.
    #[must_use]
    pub const fn estimate() -> Self {
        Self::by(ChargedBy::Estimate)
    }

    /// The bytes of the body that were handed to the connection.
    #[must_use]
    pub const fn body_bytes() -> Self {
        Self::by(ChargedBy::BodyBytes)
    }

    /// The result of this function for the status.
    #[must_use]
    pub fn by_status(cost: impl Fn(StatusCode) -> u64 + Send + Sync + 'static) -> Self {
        Self::by(ChargedBy::Status(Arc::new(cost)))
    }

    /// The same, and nothing where this function is true of the status, such as `|s| s == 304 ||
    /// s.is_server_error()`.
    #[must_use]
    pub fn free(mut self, free: impl Fn(StatusCode) -> bool + Send + Sync + 'static) -> Self {
        self.free = Some(Arc::new(free));
        self
    }

    /// The same, whatever the handler's [`Meter`] counts, such as for a layer that counts bytes
    /// around one that counts tokens.
    #[must_use]
    pub const fn unmetered(mut self) -> Self {
        self.unmetered = true;
        self
    }

    /// What a request costs that the service answered with this status, or failed: `None` for the
    /// estimate. And whether the bytes of the body add to that.
    fn cost_for(&self, status: StatusCode, failed: bool) -> (Option<u64>, bool) {
        match &self.by {
            _ if self.free.as_ref().is_some_and(|free| free(status)) => (Some(0), false),
            ChargedBy::BodyBytes if !failed => (Some(0), true),
            ChargedBy::Status(cost) if !failed => (Some(cost(status)), false),
            _ => (None, false),
        }
    }
}

/// The cost of a request as its handler counts it: an extension of each request that a layer that
/// [reserves](Reserving) admits.
///
/// Clones count together, so that a stream can count while it is sent. Once a cost is set, it
/// overrides the [`Charge`] and the status. Layers inside each other share one meter; one that
/// counts something else is [`unmetered`](Charge::unmetered).
///
/// ```
/// use ratelimit_tower::Meter;
///
/// async fn handler(meter: Meter) { // with axum: `Extension(meter): Extension<Meter>`
///     meter.add(17); // tokens that were made
/// }
/// ```
#[derive(Clone, Debug, Default)]
pub struct Meter(Arc<Metered>);

#[derive(Debug, Default)]
struct Metered {
    /// The cost and 1, or 0 if it is not set.
    count: AtomicU64,
    /// Under the limits that it names.
    each: Mutex<LimitCosts>,
}

impl Meter {
    /// Sets the cost.
    pub fn set(&self, cost: u64) {
        self.0.count.store(cost.saturating_add(1), Ordering::Release);
    }

    /// Adds to the cost, which is then set.
    pub fn add(&self, cost: u64) {
        let added = |count: u64| Some(count.max(1).saturating_add(cost));
        // The function always has an answer.
        let _before = self.0.count.fetch_update(Ordering::AcqRel, Ordering::Acquire, added);
    }

    /// Adds to the cost under the limit of this name, which is then set: for limits that count
    /// different things, such as input and output. Another limit costs what [`set`](Self::set) and
    /// [`add`](Self::add) say, or else its estimate. A layer leaves out what is not the name of one
    /// of its limits, because layers inside each other share the meter.
    pub fn add_of(&self, limit: &str, cost: u64) {
        let mut each = self.each();
        let sum = each.get(limit).saturating_add(cost);
        each.set(limit, sum);
    }

    /// The costs under those limits that have one of their own.
    fn each(&self) -> MutexGuard<'_, LimitCosts> {
        self.0.each.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cost, if it is set.
    #[must_use]
    pub fn cost(&self) -> Option<u64> {
        self.0.count.load(Ordering::Acquire).checked_sub(1)
    }
}
