//! [`Request`]: one request of a limiter in full.

#![allow(clippy::inline_always, reason = "see the same in `check.rs`")]

use alloc::borrow::Cow;
use alloc::boxed::Box;
use alloc::collections::BTreeMap;
use alloc::vec::Vec;

use derive_where::derive_where;

use super::RateLimiter;
use crate::algorithms::Algorithm;
use crate::batch::{Batch, Check};
use crate::decision::{Source, Verdict};
use crate::error::did_you_mean;
use crate::identifiers::Identifiers;
use crate::limit::Limit;
use crate::numbers::Numbers;
use crate::op::{Now, Op};
use crate::refusal::Refusal;
use crate::reservation::ReservationId;
use crate::store_traits::{Store, StoreError as _, SyncStore};
use crate::timestamp::Timestamp;

/// The checks that are gathered without an allocation: as many as most policies have.
const FEW: usize = 8;

/// One request of a [`RateLimiter`]: who, at what cost, at what time.
#[must_use = "a request does nothing until it is applied"]
#[derive(Debug)]
#[derive_where(Clone, Copy)]
pub struct Request<'a, S, A, C: ?Sized> {
    pub(super) limiter: &'a RateLimiter<S, A>,
    pub(super) caller: &'a C,
    pub(super) cost: u64,
    /// The costs under each limit, in place of `cost`.
    pub(super) costs: Option<&'a LimitCosts>,
    /// The numbers under some limits, in place of their own.
    pub(super) numbers: Option<&'a Numbers<A>>,
    pub(super) now: Now,
    pub(super) id: Option<ReservationId>,
    /// Whether the limiter drew the id for this charge.
    pub(super) settled_once: bool,
    pub(super) metadata: &'a [u8],
}

/// What a request costs under each limit: one cost under all of them, or [of its
/// own](Request::costs) under some. A number is the cost under all.
///
/// A cost under a limit that does not apply to the caller, because it lacks the limit's
/// identifiers, is not charged. A name that no limit of the policy has is an error of the request:
/// a misspelt name must not go unnoticed. A settlement alone leaves such a name out, so that the
/// rest is settled.
///
/// ```
/// use ratelimit_core::LimitCosts;
///
/// let estimate = LimitCosts::from(1).with("input", 812).with("output", 4_000); // and 1 under `requests`
/// # assert_eq!(estimate.clone().with("input", 9), LimitCosts::from(1).with("output", 4_000).with("input", 9));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitCosts {
    others: u64,
    of: BTreeMap<Box<str>, u64>,
}

impl LimitCosts {
    /// The same at another cost under the limit of this name.
    #[must_use]
    pub fn with(mut self, limit: &str, cost: u64) -> Self {
        self.set(limit, cost);
        self
    }

    /// The same at another cost under all limits whose costs are not told.
    #[must_use]
    pub const fn with_others(mut self, cost: u64) -> Self {
        self.others = cost;
        self
    }

    /// The cost under the limit of this name.
    #[must_use]
    pub fn get(&self, limit: &str) -> u64 {
        self.of.get(limit).copied().unwrap_or(self.others)
    }

    /// The same, without the costs under limits of other names than these.
    #[must_use]
    pub fn only(mut self, is_known: impl Fn(&str) -> bool) -> Self {
        self.of.retain(|name, _| is_known(name));
        self
    }

    /// The larger cost of both under each limit.
    #[must_use]
    pub fn max(mut self, other: &Self) -> Self {
        // Then both tell of the same names.
        for name in other.of.keys() {
            self.set(name, self.get(name));
        }
        for (name, cost) in &mut self.of {
            *cost = other.get(name).max(*cost);
        }
        self.others = self.others.max(other.others);
        self
    }

    /// The costs under some limits, by their names, and the cost under all others.
    pub fn parts(&self) -> (impl Iterator<Item = (&str, u64)>, u64) {
        (self.of.iter().map(|(name, cost)| (&**name, *cost)), self.others)
    }

    /// The cost under all limits, if it is the same.
    #[must_use]
    pub fn uniform(&self) -> Option<u64> {
        self.of.is_empty().then_some(self.others)
    }

    /// Sets the cost under the limit of this name.
    pub fn set(&mut self, limit: &str, cost: u64) {
        self.of.insert(limit.into(), cost);
    }
}

impl From<u64> for LimitCosts {
    fn from(cost: u64) -> Self {
        Self { others: cost, of: BTreeMap::new() }
    }
}

impl<'a, S, A: Algorithm, C: Identifiers + ?Sized> Request<'a, S, A, C> {
    /// The same request at this cost under every limit.
    pub const fn cost(mut self, cost: u64) -> Self {
        (self.cost, self.costs) = (cost, None);
        self
    }

    /// The same request at a cost of its own under some limits. All limits are charged, or none, as
    /// ever. A name that no limit has is [refused](Refusal::UnknownLimit).
    ///
    /// ```
    /// use ratelimit_core::{Gcra, LimitCosts, Limits, RateLimiter};
    /// use ratelimit_memory::MemoryStore;
    ///
    /// let limits = Limits::builder()
    ///     .limit("input", Gcra::per_minute(40_000))
    ///     .limit("requests", Gcra::per_minute(50))
    ///     .build()?;
    /// let limiter = RateLimiter::new(limits, MemoryStore::new());
    /// let costs = LimitCosts::from(1).with("input", 812);
    /// let verdict = limiter.request("alice").costs(&costs).check_now()?;
    /// let left: Vec<_> = limiter.named(&verdict).map(|one| one.remaining).collect();
    /// assert_eq!(left, [39_188, 49]); // `requests` costs 1
    /// let misspelt = LimitCosts::from(1).with("inptu", 812);
    /// assert!(limiter.request("alice").costs(&misspelt).check_now().is_err());
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub const fn costs(mut self, costs: &'a LimitCosts) -> Self {
        self.costs = Some(costs);
        self
    }

    /// The same request, which limits decide by these numbers in place of their own: those of its
    /// customer. See [`Numbers`].
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # async fn example<S: Store<AnyAlgorithm>>(limiter: RateLimiter<S>) -> Result<(), Box<dyn std::error::Error>>
    /// # where S::Error: Into<Box<dyn std::error::Error>> {
    /// let gold = limiter.limits().parse_numbers([("api", "100/s burst 200")])?;
    /// let verdict = limiter.request("alice").numbers(&gold).cost(5).check().await.map_err(Into::into)?;
    /// for decision in limiter.named(&verdict).numbers(&gold) {
    ///     println!("{}: {} left, {:?}", decision.name(), decision.remaining, decision.rate());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    pub const fn numbers(mut self, numbers: &'a Numbers<A>) -> Self {
        self.numbers = Some(numbers);
        self
    }

    /// The limit that decides in place of one of the policy.
    #[inline]
    fn deciding(&self, limit: &'a Limit<A>) -> &'a Limit<A> {
        self.numbers.map_or(limit, |numbers| numbers.limit_of(limit))
    }

    /// The cost under this limit.
    #[inline]
    pub(super) fn cost_under(&self, limit: &Limit<A>) -> u64 {
        self.costs.map_or(self.cost, |costs| costs.get(limit.name()))
    }

    /// Refuses the cost of a limit that the policy lacks, and numbers that a limit does not accept.
    #[inline]
    fn suits_limits(&self) -> Result<(), Refusal> {
        self.costs.map_or(Ok(()), |costs| self.knows_each(costs))?;
        self.numbers.map_or(Ok(()), |numbers| self.limiter.limits.accept(numbers))
    }

    #[cold]
    fn knows_each(&self, costs: &LimitCosts) -> Result<(), Refusal> {
        let limits = &self.limiter.limits;
        let Some(name) = costs.of.keys().find(|name| !limits.has(name)) else { return Ok(()) };
        let names = limits.iter().map(Limit::name);
        let meant = did_you_mean(name, names.clone());
        let limits = names.collect::<Vec<_>>().join(", ");
        Err(Refusal::UnknownLimit { name: name.clone().into(), limits: limits + &meant })
    }

    /// The same request at this time, for tests and replay.
    pub const fn at(mut self, now: Timestamp) -> Self {
        self.now = Now::At(now);
        self
    }

    /// The same request under an id. The store applies it once, however often it is sent, and the
    /// charge can be [settled](Self::settle) and [renewed](Self::renew) under the id.
    pub const fn id(mut self, id: ReservationId) -> Self {
        self.id = Some(id);
        self.settled_once = false;
        self
    }

    /// The same request under an id that the limiter drew for it.
    #[cfg(feature = "std")]
    pub(super) const fn with_drawn_id(mut self, id: ReservationId) -> Self {
        self.id = Some(id);
        self.settled_once = true;
        self
    }

    /// The same request with metadata of the caller, which a [`WindowLog`](crate::WindowLog) keeps.
    pub const fn metadata(mut self, metadata: &'a [u8]) -> Self {
        self.metadata = metadata;
        self
    }

    /// Checks that the store can decide the request, whatever its states.
    ///
    /// # Errors
    /// [`Refusal::MissingIdentifier`], [`Refusal::NoLimitApplies`], [`Refusal::UnknownLimit`] or
    /// [`Refusal::Numbers`], which every other method returns too.
    pub fn validate(&self) -> Result<(), Refusal> {
        self.suits_limits()?;
        self.limiter.has_required(self.caller)?;
        match self.applicable().next() {
            Some(_) => Ok(()),
            None => self.limiter.unlimited(self.caller).map(drop),
        }
    }

    /// The limits that apply to the caller, by their position in the policy: those whose
    /// identifiers it has and whose conditions it meets, but no shadow limits.
    /// [`Verdict::decisions`] has the same order.
    pub fn applicable(&self) -> impl Iterator<Item = usize> + use<'a, '_, S, A, C> {
        let limits = self.limiter.limits.iter().enumerate();
        let applies = |limit: &Limit<A>| !limit.is_shadow() && limit.key_for(self.caller).is_some();
        limits.filter(move |(_, limit)| applies(limit)).map(|(position, _)| position)
    }

    /// The batch of these checks as this request wants it.
    #[inline]
    const fn shape_batch<'k>(&self, batch: Batch<'k, A>, op: Op) -> Batch<'k, A>
    where
        'a: 'k,
    {
        let batch = batch.op(op).now(self.now).metadata(self.metadata);
        match self.id {
            Some(id) if self.settled_once => batch.id(id).settled_once(),
            Some(id) => batch.id(id),
            None => batch,
        }
    }

    /// Whether it is decided at the store's own time, and carries neither an id nor metadata.
    #[inline]
    const fn is_plain(&self) -> bool {
        matches!(self.now, Now::Store) && self.id.is_none() && self.metadata.is_empty()
    }

    /// The request as a shadow limit has it: its reservations are not those of the enforced limits.
    fn in_shadow(mut self, limit: &Limit<A>) -> Self {
        self.id =
            self.id.map(|id| ReservationId::new(id.as_u128() ^ u128::from(limit.fingerprint())));
        self
    }

    /// The checks of a few limits, each kept for one identifier that the caller keeps as text;
    /// their positions in the policy; and how many apply. The rest are repetitions. `None` if there
    /// is more to it, or nothing.
    fn plain_checks(&self) -> Option<([Check<'a, A>; FEW], [usize; FEW], usize)> {
        let mut checks: Option<[Check<'a, A>; FEW]> = None;
        let mut positions = [0; FEW];
        let mut count = 0;
        for (position, limit) in self.limiter.limits.iter().enumerate() {
            if limit.identifier_names().len() > 1 || count == FEW || limit.is_shadow() {
                return None;
            }
            match limit.key_for(self.caller) {
                Some(Cow::Borrowed(key)) => {
                    let cost = self.cost_under(limit);
                    let check = Check { limit: self.deciding(limit), key, cost };
                    checks.get_or_insert([check; FEW])[count] = check;
                    positions[count] = position;
                    count += 1;
                }
                None if !limit.misses(self.caller) => {}
                _ => return None,
            }
        }
        Some((checks?, positions, count))
    }

    /// The keys of the limits that apply and are in shadow mode, or not, each with its position.
    fn keys(&self, shadow: bool) -> Vec<(usize, Cow<'a, str>)> {
        let limits = self.limiter.limits.iter().enumerate();
        let limits = limits.filter(|(_, limit)| limit.is_shadow() == shadow);
        limits
            .filter_map(|(position, limit)| Some((position, limit.key_for(self.caller)?)))
            .collect()
    }

    fn checks<'k>(&self, keys: &'k [(usize, Cow<'a, str>)]) -> Vec<Check<'k, A>>
    where
        'a: 'k,
    {
        let limits = self.limiter.limits.as_slice();
        keys.iter()
            .map(|(position, key)| {
                let limit = &limits[*position];
                Check { limit: self.deciding(limit), key, cost: self.cost_under(limit) }
            })
            .collect()
    }
}

/// Runs `$apply` on the batch of a request: of one check on the stack, where the policy has one
/// limit, and of several in a vector; then on a batch for each shadow limit. The caller awaits, or
/// does not.
macro_rules! with_batch {
    ($request:expr, $op:expr, |$batch:ident| $apply:expr) => {{
        let request = &$request;
        request.suits_limits()?;
        if let [limit] = request.limiter.limits.as_slice()
            && !limit.is_shadow()
        {
            let Some(key) = limit.key_for(request.caller) else {
                return Ok(request.limiter.unlimited(request.caller)?);
            };
            let (limit, cost) = (request.deciding(limit), request.cost_under(limit));
            let check = Check { limit, key: &key, cost };
            let $batch = request.shape_batch(Batch::one(&check), $op);
            return $apply;
        }
        request.limiter.has_required(request.caller)?;
        let keys = request.keys(false);
        let shadow_keys = request.keys(true);
        let verdict = if !keys.is_empty() {
            let checks = request.checks(&keys);
            let $batch = request.shape_batch(Batch::distinct(&checks), $op);
            let verdict = $apply?;
            verdict.at_positions(keys.iter().map(|(position, _)| *position))
        } else {
            // A shadow limit that applies stands in for none that is enforced.
            request.limiter.unlimited(request.caller)?
        };
        let mut shadow = Vec::new();
        if verdict.allowed() {
            // A store that is away is waited for once per request.
            let mut is_away = verdict.source() == Source::Fallback;
            for (position, key) in shadow_keys {
                let limit = &request.limiter.limits.as_slice()[position];
                let (limit, cost) = (request.deciding(limit), request.cost_under(limit));
                let check = Check { limit, key: &key, cost };
                let batch = request.in_shadow(limit).shape_batch(Batch::one(&check), $op);
                let $batch = if is_away { batch.without_store() } else { batch };
                let decided: Result<Verdict, S::Error> = $apply;
                // Neither a denial nor an error of a shadow limit refuses a request.
                match decided {
                    Ok(verdict) => {
                        is_away |= verdict.source() == Source::Fallback;
                        shadow.push((position, *verdict.summary(), verdict.account(0)));
                    }
                    // What does not ask the store takes no time.
                    Err(error) if error.kind().is_outage() && !is_away => break,
                    Err(_) => {}
                }
            }
        }
        Ok(verdict.with_shadow(shadow))
    }};
}

/// The result of an outlined (rare) path, in a type of its own. If both paths returned the same
/// type, the optimiser would build the common path's result in memory too, and copy it from there
/// (measured: an eighth of a decision).
pub(super) struct Outlined<T>(pub(super) T);

/// Writes each operation in its async form and, for stores that decide without waiting, in the form
/// whose name ends in `_now`.
macro_rules! operations {
    ($( $(#[$doc:meta])+ $name:ident, $now:ident, $op:ident; )+) => {
        impl<S: Store<A>, A: Algorithm, C: Identifiers + Sync + ?Sized> Request<'_, S, A, C> { $(
            $(#[$doc])+
            ///
            /// # Errors
            /// The store's error. A denial is not an error.
            pub fn $name(self) -> impl Future<Output = Result<Verdict, S::Error>> {
                self.apply(Op::$op)
            }
        )+ }

        impl<S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> Request<'_, S, A, C> { $(
            #[doc = concat!("[`", stringify!($name), "`](Self::", stringify!($name), ") without waiting.")]
            ///
            /// # Errors
            /// The store's error. A denial is not an error.
            #[inline(always)]
            pub fn $now(self) -> Result<Verdict, S::Error> {
                self.apply_now(Op::$op)
            }
        )+ }
    };
}

operations! {
    /// Charges the cost if it fits. Under an [`id`](Self::id) it reserves: the cost is an estimate,
    /// to [settle](Self::settle) within an hour of this call, or of the last that renews or extends
    /// it. Under a [`Concurrency`](crate::Concurrency) limit it grants a lease, to
    /// [renew](Self::renew), and to release by settling at any cost. A reservation that is never
    /// settled stays charged; a lease ends by itself.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # async fn example<S: Store<AnyAlgorithm>>(limiter: RateLimiter<S>) -> Result<(), S::Error> {
    /// let id = ReservationId::random();
    /// if limiter.request("alice").id(id).cost(4_000).check().await?.allowed() {
    ///     let tokens_used = 1_234; // the true cost, known after the call
    ///     let _ = limiter.request("alice").id(id).cost(tokens_used).settle().await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    check, check_now, Acquire;
    /// Decides as [`check`](Self::check) does, and charges nothing.
    /// [`remaining`](Verdict::remaining) is what such a request would leave; of a peek at cost 0,
    /// it is what is there.
    ///
    /// ```
    /// use ratelimit_core::{FixedWindow, Limits, RateLimiter};
    /// use ratelimit_memory::MemoryStore;
    ///
    /// let daily = Limits::builder().limit("daily", FixedWindow::per_day(10)).build()?;
    /// let limiter = RateLimiter::new(daily, MemoryStore::new());
    /// assert_eq!(limiter.request("alice").peek_now()?.remaining(), 9);
    /// assert_eq!(limiter.request("alice").cost(0).peek_now()?.remaining(), 10);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    peek, peek_now, Peek;
    /// Charges the cost even if it does not fit, down to nothing left, or into
    /// [debt](Algorithm::debt).
    force, force_now, Force;
    /// Gives the cost back, up to the capacity.
    refund, refund_now, Refund;
    /// Forgets the caller: full capacity in every limit that applies.
    reset, reset_now, Reset;
    /// Settles the reservation under the [`id`](Self::id) at the cost, its final one: returns the
    /// difference to the estimate, or charges it, down to nothing left. A cost of 0 gives all of it
    /// back; a lease ends at any cost. The same call again changes nothing. A reservation that does
    /// not exist, or was settled at another cost, is an error.
    settle, settle_now, Settle;
    /// Starts the lease under the [`id`](Self::id) again, or keeps the reservation for another
    /// hour. One that does not exist, or was settled, is an error: it has expired, and another
    /// caller may have its place.
    renew, renew_now, Renew;
    /// Grows the reservation under the [`id`](Self::id) to the cost, if what is added fits: a
    /// stream that is longer than its estimate asks before it goes on. The same call again changes
    /// nothing. One that does not exist, or was settled, is an error.
    extend, extend_now, Extend;
    /// Adopts what another service says remains of its limit: charges until no more than the cost
    /// remains here. With [`costs`](Request::costs) each limit adopts its own.
    adopt, adopt_now, Adopt;
}

impl<S: Store<A>, A: Algorithm, C: Identifiers + Sync + ?Sized> Request<'_, S, A, C> {
    /// Applies an operation that the program chooses while it runs.
    ///
    /// # Errors
    /// The store's error. A denial is not an error.
    #[allow(clippy::manual_async_fn, reason = "an `async fn` keeps its arguments twice")]
    pub fn apply(self, op: Op) -> impl Future<Output = Result<Verdict, S::Error>> {
        async move { with_batch!(self, op, |batch| self.limiter.store.apply(&batch).await) }
    }
}

impl<S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> Request<'_, S, A, C> {
    /// [`apply`](Self::apply) without waiting.
    ///
    /// # Errors
    /// The store's error. A denial is not an error.
    #[inline(always)]
    pub fn apply_now(self, op: Op) -> Result<Verdict, S::Error> {
        self.suits_limits()?;
        if let [limit] = self.limiter.limits.as_slice()
            && !limit.is_shadow()
            && let Some(key) = limit.key_for(self.caller)
        {
            let (limit, cost) = (self.deciding(limit), self.cost_under(limit));
            // The path of nearly all requests, which a store can have inlined here.
            if op == Op::Acquire && self.is_plain() {
                return self.limiter.store.acquire_now(limit, &key, cost);
            }
            let check = Check { limit, key: &key, cost };
            return self.limiter.store.apply_now(&self.shape_batch(Batch::one(&check), op));
        }
        self.apply_any_now(op).0
    }

    /// [`apply_now`](Self::apply_now) of what may be more than one plain check.
    #[inline(never)]
    pub(super) fn apply_any_now(self, op: Op) -> Outlined<Result<Verdict, S::Error>> {
        if let Some((checks, positions, count)) = self.plain_checks() {
            let batch = Batch::distinct(&checks[..count]);
            let verdict = self.limiter.store.apply_now(&self.shape_batch(batch, op));
            if count == self.limiter.limits.as_slice().len() {
                return Outlined(verdict);
            }
            let positions = positions[..count].iter().copied();
            return Outlined(verdict.map(|verdict| verdict.at_positions(positions)));
        }
        let apply = || with_batch!(self, op, |batch| self.limiter.store.apply_now(&batch));
        Outlined(apply())
    }
}
