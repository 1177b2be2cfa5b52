//! [`RateLimitLayer`]: limits in front of a service.

use std::sync::Arc;

use derive_where::derive_where;
use http::request::Parts;
use ratelimit_core::algorithm::Quota;
use ratelimit_core::{
    AnyAlgorithm, ConfigError, LimitCosts, Limits, Numbers, RateLimiter, Store, SyncStore,
};
use tower_layer::Layer;

use crate::checked::Checked;
use crate::config::{Choice, Config, Cost, Limiters, OnStoreError};
use crate::fields::Fields;
use crate::gate::Gate;
use crate::identify::Identify;
use crate::mode::{Awaited, Immediate};
use crate::rejection::ProblemJson;
use crate::service::{RateLimitService, Shared};

/// Limits requests before they reach a service.
///
/// The layer charges each request when it arrives. A request that fits goes on, and its response
/// gets the fields that describe the limits; any other is answered by the layer. The body's type is
/// that of the inner service.
///
/// ```
/// use ratelimit_core::{Gcra, Limits, RateLimiter};
/// use ratelimit_memory::MemoryStore;
/// use ratelimit_tower::{ClientAddress, RateLimitLayer};
///
/// let limits = Limits::builder().limit("burst", Gcra::per_second(10).burst(20)).by(["ip"]).build()?;
/// let limiter = RateLimiter::new(limits, MemoryStore::new());
/// let layer = RateLimitLayer::new(limiter).by("ip", ClientAddress::peer());
/// # let _layer: RateLimitLayer<_, _> = layer;
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
///
/// # Never unlimited
///
/// A request without an identifier is refused: with 500 and a line in the log if the service is at
/// fault, with 400 or 401 if the client did not send it. So is a request to which no limit applies,
/// and one that the store cannot decide, unless [`on_store_error`](Self::on_store_error) admits it.
/// A limit whose identifier no source provides is an error of every request, which
/// [`checked`](Self::checked) finds when the service starts.
///
/// # Sharing
///
/// Clones of the layer and of its services share the limiter. Two layers that are built from
/// limiters with the same store and the same limits share states as well.
#[derive_where(Clone; R, M)]
#[derive_where(Debug; M)]
pub struct RateLimitLayer<S, A = AnyAlgorithm, R = ProblemJson, M = Awaited> {
    #[derive_where(skip(Debug))]
    pub(crate) config: Config<S, A>,
    #[derive_where(skip(Debug))]
    answer: R,
    pub(crate) mode: M,
}

impl<S: Store<A>, A: Quota + 'static> RateLimitLayer<S, A> {
    /// A layer with these limits, which all requests are held to.
    #[must_use]
    pub fn new(limiter: impl Into<Arc<RateLimiter<S, A>>>) -> Self {
        Self::with(Limiters::One(limiter.into()))
    }

    /// A layer that chooses the limits of each request, such as by its route, its method, or the
    /// plan of a customer that an earlier layer left in the extensions.
    ///
    /// ```
    /// use std::sync::Arc;
    /// # use ratelimit_core::*;
    /// use ratelimit_tower::{Choice, IdentifyError, RateLimitLayer, extension};
    ///
    /// #[derive(Clone)]
    /// struct Customer { name: String, pays: bool }
    ///
    /// # fn example<S: Store<AnyAlgorithm> + 'static>(free: RateLimiter<S>, paid: RateLimiter<S>) {
    /// let (free, paid) = (Arc::new(free), Arc::new(paid));
    /// let layer = RateLimitLayer::choosing(move |request| match request.extensions.get::<Customer>() {
    ///     _ if request.uri.path() == "/health" => Choice::Exempt,
    ///     Some(customer) if customer.pays => Choice::Limited(paid.clone()),
    ///     Some(_) => Choice::Limited(free.clone()),
    ///     None => Choice::Refused(IdentifyError::not_wired("authentication does not run before the limits")),
    /// })
    /// .by("customer", extension(|customer: &Customer| Some(customer.name.as_str().into())));
    /// # }
    /// ```
    #[must_use]
    pub fn choosing<F>(choose: F) -> Self
    where
        F: Fn(&Parts) -> Choice<S, A> + Send + Sync + 'static,
    {
        Self::with(Limiters::Chosen(Arc::new(choose)))
    }

    fn with(limiters: Limiters<S, A>) -> Self {
        Self { config: Config::new(limiters), answer: ProblemJson, mode: Awaited }
    }
}

#[cfg(feature = "reload")]
impl<S, A> RateLimitLayer<Arc<S>, A>
where
    S: Store<A> + 'static,
    A: Quota + Clone + PartialEq + 'static,
{
    /// A layer whose limits are replaced while it is in use: those of a
    /// [`Reload`](ratelimit_layers::Reload), or a [part](ratelimit_layers::Reload::part) of them.
    ///
    /// From the time when the layer is [checked](Self::checked) or put before a service, a policy
    /// that `checked` would refuse is refused, and the one in force stays.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # use ratelimit_layers::Reload;
    /// use ratelimit_tower::{ClientAddress, RateLimitLayer};
    ///
    /// # fn example<S: Store<AnyAlgorithm> + 'static>(limits: Limits<AnyAlgorithm>, store: S) -> Result<(), ConfigError> {
    /// let reload = Reload::new(limits, store);
    /// let layer = RateLimitLayer::reloading(&reload).by("ip", ClientAddress::peer()).checked()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn reloading(part: impl Into<ratelimit_layers::Part<S, A>>) -> Self {
        let part = part.into();
        let requires = part.clone();
        let mut layer = Self::choosing(move |_| Choice::Limited(part.limiter()));
        layer.config.require =
            Some(Arc::new(move |sources, reserves| requires.require(&sources.names(), reserves)));
        layer
    }
}

impl<S: Store<A>, A: Quota + 'static, R, M> RateLimitLayer<S, A, R, M> {
    /// The same layer, which finds the identifier of this name by this source. A limit names the
    /// identifiers that it counts by: `Limit::by(["ip"])`.
    #[must_use]
    pub fn by(mut self, identifier: &str, source: impl Identify) -> Self {
        self.config.sources = self.config.sources.with(Some(identifier), source);
        self
    }

    /// The same layer, which finds the bare key by this source, for limits that name no identifier.
    #[must_use]
    pub fn key(mut self, source: impl Identify) -> Self {
        self.config.sources = self.config.sources.with(None, source);
        self
    }

    /// The same layer, at this cost per request; 1 by default.
    #[must_use]
    pub fn cost(mut self, cost: u64) -> Self {
        self.config.cost = Cost::Fixed(cost);
        self
    }

    /// The same layer, with what this function returns for each request: a cost, or
    /// [costs](LimitCosts) of several limits. A cost of a limit that the layer lacks is an error of
    /// the request, so a layer that [reloads](Self::reloading) names these limits in its part.
    #[must_use]
    pub fn cost_of<K: Into<LimitCosts>>(
        mut self,
        cost: impl Fn(&Parts) -> K + Send + Sync + 'static,
    ) -> Self {
        self.config.cost = Cost::ByRequest(Arc::new(move |request| cost(request).into()));
        self
    }

    /// The same layer, whose limits decide each request by the [numbers](Numbers) that this
    /// function returns, in place of their own: those of its customer. `None` for a request without
    /// any.
    ///
    /// The function is called before the store is asked, so it looks the numbers up and does not
    /// build them. The fields of the answer tell the numbers that decided. Numbers that a limit
    /// does not accept are the service's fault: the answer is 500, and the log says why.
    ///
    /// ```
    /// use std::collections::HashMap;
    /// use std::sync::Arc;
    /// use ratelimit_core::{Gcra, Limits, RateLimiter};
    /// use ratelimit_memory::MemoryStore;
    /// use ratelimit_tower::{RateLimitLayer, extension};
    ///
    /// /// An authenticated customer, which an earlier layer left in the extensions.
    /// #[derive(Clone)]
    /// struct Customer { name: String, plan: String }
    ///
    /// let limits = Limits::builder()
    ///     .limit("api", Gcra::per_second(10).burst(20)).by(["customer"])
    ///     .accepts_up_to(Gcra::per_second(1_000).burst(2_000))
    ///     .build()?;
    /// let gold = limits.parse_numbers([("api", "100/s burst 200")])?;
    /// let plans = HashMap::from([("gold".to_owned(), Arc::new(gold))]); // as your database has them
    /// let layer = RateLimitLayer::new(RateLimiter::new(limits, MemoryStore::new()))
    ///     .by("customer", extension(|customer: &Customer| Some(customer.name.as_str().into())))
    ///     .numbers_of(move |request| plans.get(&request.extensions.get::<Customer>()?.plan).cloned());
    /// # drop(layer);
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    #[must_use]
    pub fn numbers_of(
        mut self,
        numbers: impl Fn(&Parts) -> Option<Arc<Numbers<A>>> + Send + Sync + 'static,
    ) -> Self {
        self.config.numbers = Some(Arc::new(numbers));
        self
    }

    /// The same layer, whose answers have these fields.
    #[must_use]
    pub fn fields(mut self, fields: Fields) -> Self {
        self.config.fields = fields;
        self
    }

    /// The same layer, whose requests have [`Decisions`](crate::Decisions) as an extension: what
    /// each limit decided, for their handlers. It takes an allocation, and is off by default.
    #[must_use]
    pub const fn tell_handlers(mut self) -> Self {
        self.config.tells_handlers = true;
        self
    }

    /// The same layer, with this answer to requests that the store cannot decide. By default they
    /// are refused with 503.
    #[must_use]
    pub const fn on_store_error(mut self, on_store_error: OnStoreError) -> Self {
        self.config.on_store_error = on_store_error;
        self
    }

    /// The same layer, which answers rejected requests so: [`ProblemJson`] by default,
    /// [`Grpc`](crate::Grpc), or a function. See [`Answer`](crate::Answer).
    #[must_use]
    pub fn answer<R2>(self, answer: R2) -> RateLimitLayer<S, A, R2, M> {
        RateLimitLayer { config: self.config, answer, mode: self.mode }
    }

    /// The same layer, which decides without waiting and boxes no future.
    #[must_use]
    pub fn immediate(self) -> RateLimitLayer<S, A, R, Immediate>
    where
        S: SyncStore<A>,
    {
        self.with_mode(Immediate, false)
    }

    pub(crate) fn with_mode<M2>(self, mode: M2, reserves: bool) -> RateLimitLayer<S, A, R, M2> {
        let config = Config { reserves, ..self.config };
        RateLimitLayer { config, answer: self.answer, mode }
    }

    /// Checks that every limit's identifiers have a source, and that its algorithm
    /// [suits](ratelimit_core::Limit::check_reserving) a layer that [reserves](Self::reserve), or
    /// one that does not. A layer without this check refuses all requests to limits that lack a
    /// source or cannot be reserved. Call it last: a [checked](Checked) layer does not change.
    ///
    /// Nothing is known of the limits among which a layer [chooses](Self::choosing):
    /// [`check`](Self::check) each of them.
    ///
    /// # Errors
    /// A limit that counts by an identifier without a source, or whose algorithm does not suit the
    /// layer.
    pub fn checked(self) -> Result<Checked<Self>, ConfigError> {
        if let Limiters::One(limiter) = &self.config.limiters {
            self.check(limiter.limits())?;
        }
        self.config.require()?;
        Ok(Checked::new(self))
    }

    /// The same for each of these limits: limits among which the layer [chooses](Self::choosing),
    /// or a new policy, by `Reload::validate`.
    ///
    /// # Errors
    /// A limit that counts by an identifier without a source, or whose algorithm does not suit the
    /// layer.
    pub fn check(&self, limits: &Limits<A>) -> Result<(), ConfigError> {
        limits.iter().try_for_each(|limit| {
            limit.check_identifiers(&self.config.sources.names())?;
            limit.check_reserving(self.config.reserves)
        })
    }
}

impl<Svc, S, A, R, M> Layer<Svc> for RateLimitLayer<S, A, R, M>
where
    S: Store<A>,
    A: Quota + 'static,
    R: Clone,
    M: Clone,
{
    type Service = RateLimitService<Svc, S, A, R, M>;

    fn layer(&self, inner: Svc) -> Self::Service {
        let Self { config, answer, mode } = self.clone();
        let shared = Shared { gate: Gate::new(config), answer, mode };
        RateLimitService { inner, shared: Arc::new(shared) }
    }
}
