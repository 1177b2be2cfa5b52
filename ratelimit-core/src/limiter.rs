//! [`RateLimiter`]: limits and a store, asked by caller.

use alloc::borrow::Cow;
use alloc::vec::Vec;

use crate::algorithm::Algorithm;
use crate::batch::{Batch, Check, Now, Op};
use crate::decision::Verdict;
use crate::limit::{Identifiers, Limits};
use crate::policy::Policy;
use crate::store::{Store, SyncStore};
use crate::tick::Tick;

/// The limits of a policy, kept in a store: *may this caller do this now, at this cost?*
///
/// A caller is a bare key, or identifiers by kind; each limit that names its identifiers applies,
/// and all of them are charged or none.
///
/// The store is the only thing that changes between a unit test and production; see
/// `ratelimit-memory` and `ratelimit-redis`. Every method exists for stores that are awaited and, with
/// `_now` at the end of its name, for those that need not be.
#[derive(Clone, Debug)]
pub struct RateLimiter<S, A = Policy> {
    limits: Limits<A>,
    store: S,
}

impl<S, A: Algorithm> RateLimiter<S, A> {
    /// A limiter with these limits in this store.
    #[must_use]
    pub const fn new(limits: Limits<A>, store: S) -> Self {
        Self { limits, store }
    }

    /// The limits, in the order in which a [`Verdict`] tells of them.
    #[must_use]
    pub const fn limits(&self) -> &Limits<A> {
        &self.limits
    }

    /// The store.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// A request of this caller, cost 1, to be acquired at the store's time: the full form of all
    /// the methods below.
    ///
    /// `limiter.request(&[("ip", ip), ("user", user)]).cost(5).at(tick).peek().await?`
    pub const fn request<'a, C: Identifiers + ?Sized>(
        &'a self,
        caller: &'a C,
    ) -> Request<'a, S, A, C> {
        Request { limiter: self, caller, cost: 1, now: Now::Store }
    }
}

impl<S: Store<A>, A: Algorithm> RateLimiter<S, A> {
    /// Charges the caller 1, if that fits.
    ///
    /// # Errors
    /// What the store could not do. A denial is no error.
    pub async fn check<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).acquire().await
    }

    /// Charges the caller `cost`, if that fits.
    ///
    /// # Errors
    /// What the store could not do. A denial is no error.
    pub async fn check_n<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        cost: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).cost(cost).acquire().await
    }

    /// Says what [`check_n`](Self::check_n) would say, and charges nothing.
    ///
    /// # Errors
    /// What the store could not do.
    pub async fn peek<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        cost: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).cost(cost).peek().await
    }

    /// Charges the caller `cost` whether it fits or not, down to nothing left.
    ///
    /// # Errors
    /// What the store could not do.
    pub async fn force<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        cost: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).cost(cost).force().await
    }

    /// Gives the caller `cost` back, never above the capacity.
    ///
    /// # Errors
    /// What the store could not do.
    pub async fn refund<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        cost: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).cost(cost).refund().await
    }

    /// Forgets the caller: full capacity in every limit that applies.
    ///
    /// # Errors
    /// What the store could not do.
    pub async fn reset<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).reset().await
    }
}

impl<S: SyncStore<A>, A: Algorithm> RateLimiter<S, A> {
    /// [`check`](Self::check) without waiting.
    ///
    /// # Errors
    /// What the store could not do. A denial is no error.
    pub fn check_now<C: Identifiers + ?Sized>(&self, caller: &C) -> Result<Verdict, S::Error> {
        self.request(caller).apply_now(Op::Acquire)
    }

    /// [`check_n`](Self::check_n) without waiting.
    ///
    /// # Errors
    /// What the store could not do. A denial is no error.
    pub fn check_n_now<C: Identifiers + ?Sized>(
        &self,
        caller: &C,
        cost: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).cost(cost).apply_now(Op::Acquire)
    }

    /// [`peek`](Self::peek) without waiting.
    ///
    /// # Errors
    /// What the store could not do.
    pub fn peek_now<C: Identifiers + ?Sized>(
        &self,
        caller: &C,
        cost: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).cost(cost).apply_now(Op::Peek)
    }

    /// [`force`](Self::force) without waiting.
    ///
    /// # Errors
    /// What the store could not do.
    pub fn force_now<C: Identifiers + ?Sized>(
        &self,
        caller: &C,
        cost: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).cost(cost).apply_now(Op::Force)
    }

    /// [`refund`](Self::refund) without waiting.
    ///
    /// # Errors
    /// What the store could not do.
    pub fn refund_now<C: Identifiers + ?Sized>(
        &self,
        caller: &C,
        cost: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).cost(cost).apply_now(Op::Refund)
    }

    /// [`reset`](Self::reset) without waiting.
    ///
    /// # Errors
    /// What the store could not do.
    pub fn reset_now<C: Identifiers + ?Sized>(&self, caller: &C) -> Result<Verdict, S::Error> {
        self.request(caller).apply_now(Op::Reset)
    }
}

/// One request of a [`RateLimiter`]: who, at what cost, at what time.
#[must_use = "a request does nothing until it is applied"]
#[derive(Debug)]
pub struct Request<'a, S, A, C: ?Sized> {
    limiter: &'a RateLimiter<S, A>,
    caller: &'a C,
    cost: u64,
    now: Now,
}

impl<'a, S, A: Algorithm, C: Identifiers + ?Sized> Request<'a, S, A, C> {
    /// The same request at this cost.
    pub const fn cost(mut self, cost: u64) -> Self {
        self.cost = cost;
        self
    }

    /// The same request at this time, for tests and replay.
    pub const fn at(mut self, now: Tick) -> Self {
        self.now = Now::At(now);
        self
    }

    /// The limits that apply to the caller, by their position in the policy: those whose
    /// identifiers it has. [`Verdict::decisions`] answers in the same order.
    pub fn applicable(&self) -> impl Iterator<Item = usize> + use<'a, '_, S, A, C> {
        let limits = self.limiter.limits.iter().enumerate();
        limits.filter(|(_, limit)| limit.key_for(self.caller).is_some()).map(|(place, _)| place)
    }

    fn keys(&self) -> Vec<(usize, Cow<'a, str>)> {
        let limits = self.limiter.limits.iter().enumerate();
        limits.filter_map(|(place, limit)| Some((place, limit.key_for(self.caller)?))).collect()
    }

    fn checks<'k>(&self, keys: &'k [(usize, Cow<'a, str>)]) -> Vec<Check<'k, A>>
    where
        'a: 'k,
    {
        let limits = self.limiter.limits.as_slice();
        keys.iter()
            .map(|(place, key)| Check { limit: &limits[*place], key, cost: self.cost })
            .collect()
    }
}

/// Runs `$apply` on the batch of a request: of one check on the stack, where the policy has one
/// limit, and of several in a vector. Both times it is the caller that awaits, or does not.
macro_rules! with_batch {
    ($request:expr, $op:expr, |$batch:ident| $apply:expr) => {{
        let request = &$request;
        if let [limit] = request.limiter.limits.as_slice() {
            let Some(key) = limit.key_for(request.caller) else {
                return Ok(Verdict::several(Vec::new()));
            };
            let check = Check { limit, key: &key, cost: request.cost };
            let $batch = Batch::one(&check).op($op).now(request.now);
            return $apply;
        }
        let keys = request.keys();
        let checks = request.checks(&keys);
        if checks.is_empty() {
            return Ok(Verdict::several(Vec::new()));
        }
        let $batch = Batch::distinct(&checks).op($op).now(request.now);
        $apply
    }};
}

impl<S: Store<A>, A: Algorithm, C: Identifiers + Sync + ?Sized> Request<'_, S, A, C> {
    /// Charges the cost, if it fits.
    ///
    /// # Errors
    /// What the store could not do. A denial is no error.
    pub async fn acquire(self) -> Result<Verdict, S::Error> {
        self.apply(Op::Acquire).await
    }

    /// Says what [`acquire`](Self::acquire) would say, and charges nothing.
    ///
    /// # Errors
    /// What the store could not do.
    pub async fn peek(self) -> Result<Verdict, S::Error> {
        self.apply(Op::Peek).await
    }

    /// Charges the cost whether it fits or not, down to nothing left.
    ///
    /// # Errors
    /// What the store could not do.
    pub async fn force(self) -> Result<Verdict, S::Error> {
        self.apply(Op::Force).await
    }

    /// Gives the cost back, never above the capacity.
    ///
    /// # Errors
    /// What the store could not do.
    pub async fn refund(self) -> Result<Verdict, S::Error> {
        self.apply(Op::Refund).await
    }

    /// Forgets the caller: full capacity in every limit that applies.
    ///
    /// # Errors
    /// What the store could not do.
    pub async fn reset(self) -> Result<Verdict, S::Error> {
        self.apply(Op::Reset).await
    }

    /// Does what `op` says.
    ///
    /// # Errors
    /// What the store could not do. A denial is no error.
    pub async fn apply(self, op: Op) -> Result<Verdict, S::Error> {
        with_batch!(self, op, |batch| self.limiter.store.apply(&batch).await)
    }
}

impl<S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> Request<'_, S, A, C> {
    /// Does what `op` says, without waiting.
    ///
    /// # Errors
    /// What the store could not do. A denial is no error.
    pub fn apply_now(self, op: Op) -> Result<Verdict, S::Error> {
        with_batch!(self, op, |batch| self.limiter.store.apply_now(&batch))
    }
}
