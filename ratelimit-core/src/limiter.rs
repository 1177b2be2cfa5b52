//! [`RateLimiter`]: limits and a store, asked by caller.

use alloc::borrow::Cow;
use alloc::vec::Vec;

use crate::algorithm::{Algorithm, KeepsEntries, WindowEntry};
use crate::batch::{Batch, Check};
use crate::decision::Verdict;
use crate::hold::HoldId;
use crate::limit::{Identifiers, Limits};
use crate::op::{Now, Op};
use crate::policy::Policy;
use crate::store::{EntryStore, Store, SyncStore};
use crate::tick::Tick;

/// How many callers are asked about at once: enough to wait for the memory of all of them in the time of one.
const AT_ONCE: usize = 8;

#[cfg(feature = "std")]
mod lease;

#[cfg(feature = "std")]
pub use lease::{Lease, Leased};

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
    #[inline]
    pub const fn request<'a, C: Identifiers + ?Sized>(
        &'a self,
        caller: &'a C,
    ) -> Request<'a, S, A, C> {
        Request { limiter: self, caller, cost: 1, now: Now::Store, id: None, metadata: &[] }
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

    /// Charges the caller an estimate now, to be [committed](Self::commit) or
    /// [cancelled](Self::cancel) under this id within an hour; or, of a
    /// [`Concurrency`](crate::Concurrency) limit, grants a lease, to be [renewed](Self::renew) and
    /// [released](Self::release) under it. What is never settled stands as charged, and a lease ends by
    /// itself.
    ///
    /// ```
    /// # use std::future::{Future, ready};
    /// # use ratelimit_core::*;
    /// # async fn example<S: Store<Policy>>(limiter: RateLimiter<S>) -> Result<(), S::Error> {
    /// let id = HoldId::random();
    /// if limiter.reserve("alice", id, 4_000).await?.allowed() {
    ///     let tokens_used = 1_234; // what the call turned out to cost
    ///     limiter.commit("alice", id, tokens_used).await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// What the store could not do; a limit whose charges cannot be held. A denial is no error.
    pub async fn reserve<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        id: HoldId,
        estimate: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).id(id).cost(estimate).acquire().await
    }

    /// Settles what was reserved under the id at what it did cost: gives back what was too much, or
    /// charges what was missing, down to nothing left. The same once more changes nothing.
    ///
    /// # Errors
    /// What the store could not do; nothing held under the id, or settled at another cost.
    pub async fn commit<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        id: HoldId,
        cost: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).id(id).cost(cost).settle().await
    }

    /// Gives back all that was reserved under the id. The same once more changes nothing.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub async fn cancel<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        id: HoldId,
    ) -> Result<Verdict, S::Error> {
        self.commit(caller, id, 0).await
    }

    /// Ends the lease that was granted under the id. The same once more changes nothing.
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub async fn release<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        id: HoldId,
    ) -> Result<Verdict, S::Error> {
        self.commit(caller, id, 0).await
    }

    /// Makes the lease that was granted under the id begin anew, and a reservation wait for another
    /// hour.
    ///
    /// # Errors
    /// What the store could not do; nothing held under the id: its time is over, and somebody else may
    /// hold its place.
    pub async fn renew<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        id: HoldId,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).id(id).renew().await
    }
}

impl<S: EntryStore<A>, A: KeepsEntries> RateLimiter<S, A> {
    /// Who used up the caller's windows: of each limit that applies, by its name, the requests that it
    /// has admitted and that still count, oldest first. None are kept by other limits than a
    /// [`WindowLog`](crate::WindowLog).
    ///
    /// # Errors
    /// What the store could not do.
    pub async fn entries<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
    ) -> Result<Vec<(&str, Vec<WindowEntry>)>, S::Error> {
        let mut told = Vec::new();
        for limit in &self.limits {
            if let Some(key) = limit.key_for(caller) {
                told.push((limit.name(), self.store.entries(limit, &key, Now::Store).await?));
            }
        }
        Ok(told)
    }
}

impl<S: SyncStore<A>, A: Algorithm> RateLimiter<S, A> {
    /// [`check`](Self::check) without waiting.
    ///
    /// # Errors
    /// What the store could not do. A denial is no error.
    #[inline(always)]
    pub fn check_now<C: Identifiers + ?Sized>(&self, caller: &C) -> Result<Verdict, S::Error> {
        self.request(caller).apply_now(Op::Acquire)
    }

    /// [`check`](Self::check) of several callers without waiting, each for itself, in this order: hands over
    /// a caller's place and what is said of it. Faster than one after the other where the store can do for
    /// several at once what takes time.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # fn example<S: SyncStore<Policy>>(limiter: RateLimiter<S>) {
    /// let mut denied = Vec::new();
    /// limiter.check_each_now(&["alice", "bob", "carol"], |place, said| match said {
    ///     Ok(verdict) if verdict.allowed() => {}
    ///     _ => denied.push(place),
    /// });
    /// # }
    /// ```
    pub fn check_each_now<C: Identifiers + ?Sized>(
        &self,
        callers: &[&C],
        mut told: impl FnMut(usize, Result<Verdict, S::Error>),
    ) {
        for (nth, callers) in callers.chunks(AT_ONCE).enumerate() {
            let mut told = |place, said| told(nth * AT_ONCE + place, said);
            if let Some(checks) = self.checks_of(callers) {
                let batches = checks.each_ref().map(Batch::one);
                self.store.apply_each_now(&batches[..callers.len()], told);
            } else {
                for (place, caller) in callers.iter().enumerate() {
                    told(place, self.check_now(*caller));
                }
            }
        }
    }

    /// A check of each of these callers, the last one's again and again to the end, if there is but one
    /// limit and it is kept for one identifier.
    #[inline]
    fn checks_of<'a, C: Identifiers + ?Sized>(
        &'a self,
        callers: &[&'a C],
    ) -> Option<[Check<'a, A>; AT_ONCE]> {
        let ([limit], Some(last)) = (self.limits.as_slice(), callers.last()) else { return None };
        let caller = |place: usize| callers.get(place).unwrap_or(last);
        let key = limit.plain_key_for(*caller(0))?;
        let mut checks = [Check { limit, key, cost: 1 }; AT_ONCE];
        for (place, check) in checks.iter_mut().enumerate().skip(1) {
            check.key = limit.plain_key_for(*caller(place))?;
        }
        Some(checks)
    }

    /// [`check_n`](Self::check_n) without waiting.
    ///
    /// # Errors
    /// What the store could not do. A denial is no error.
    #[inline]
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

    /// [`reserve`](Self::reserve) without waiting.
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub fn reserve_now<C: Identifiers + ?Sized>(
        &self,
        caller: &C,
        id: HoldId,
        estimate: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).id(id).cost(estimate).apply_now(Op::Acquire)
    }

    /// [`commit`](Self::commit) without waiting; at 0, [`cancel`](Self::cancel) and
    /// [`release`](Self::release).
    ///
    /// # Errors
    /// As [`commit`](Self::commit).
    pub fn commit_now<C: Identifiers + ?Sized>(
        &self,
        caller: &C,
        id: HoldId,
        cost: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).id(id).cost(cost).apply_now(Op::Settle)
    }

    /// [`renew`](Self::renew) without waiting.
    ///
    /// # Errors
    /// As [`renew`](Self::renew).
    pub fn renew_now<C: Identifiers + ?Sized>(
        &self,
        caller: &C,
        id: HoldId,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).id(id).apply_now(Op::Renew)
    }

    /// Holds 1 of the caller's for as long as the answer lives, or until the lease is over. See
    /// [`Request::lease_now`].
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    #[cfg(feature = "std")]
    pub fn lease_now<'a, C: Identifiers + ?Sized>(
        &'a self,
        caller: &'a C,
    ) -> Result<Leased<'a, S, A, C>, S::Error> {
        self.request(caller).lease_now()
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
    id: Option<HoldId>,
    metadata: &'a [u8],
}

// By hand, because neither store nor caller needs to be cloned.
impl<S, A, C: ?Sized> Clone for Request<'_, S, A, C> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<S, A, C: ?Sized> Copy for Request<'_, S, A, C> {}

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

    /// The same request under an id: it is done once, however often it is sent, and what it acquires can
    /// be [settled](Op::Settle) and [renewed](Op::Renew) under the same id.
    pub const fn id(mut self, id: HoldId) -> Self {
        self.id = Some(id);
        self
    }

    /// The same request with what a [`WindowLog`](crate::WindowLog) is to keep of the caller.
    pub const fn metadata(mut self, metadata: &'a [u8]) -> Self {
        self.metadata = metadata;
        self
    }

    /// The limits that apply to the caller, by their position in the policy: those whose
    /// identifiers it has. [`Verdict::decisions`] answers in the same order.
    pub fn applicable(&self) -> impl Iterator<Item = usize> + use<'a, '_, S, A, C> {
        let limits = self.limiter.limits.iter().enumerate();
        limits.filter(|(_, limit)| limit.key_for(self.caller).is_some()).map(|(place, _)| place)
    }

    /// The batch of these checks as this request wants it.
    #[inline]
    const fn shaped<'k>(&self, batch: Batch<'k, A>, op: Op) -> Batch<'k, A>
    where
        'a: 'k,
    {
        let batch = batch.op(op).now(self.now).metadata(self.metadata);
        match self.id {
            Some(id) => batch.id(id),
            None => batch,
        }
    }

    /// The checks of a few limits, each kept for one identifier, and how many of them apply; the rest are
    /// repetitions. `None` if there is more to it, or nothing.
    fn plain_checks(&self) -> Option<([Check<'a, A>; AT_ONCE], usize)> {
        let mut checks: Option<[Check<'a, A>; AT_ONCE]> = None;
        let mut count = 0;
        for limit in &self.limiter.limits {
            if limit.kinds().len() > 1 || count == AT_ONCE {
                return None;
            }
            let Some(key) = limit.plain_key_for(self.caller) else { continue };
            let check = Check { limit, key, cost: self.cost };
            checks.get_or_insert([check; AT_ONCE])[count] = check;
            count += 1;
        }
        Some((checks?, count))
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
            let $batch = request.shaped(Batch::one(&check), $op);
            return $apply;
        }
        let keys = request.keys();
        let checks = request.checks(&keys);
        if checks.is_empty() {
            return Ok(Verdict::several(Vec::new()));
        }
        let $batch = request.shaped(Batch::distinct(&checks), $op);
        $apply
    }};
}

/// What is handed over in a place of its own. The optimiser would otherwise have the answer of the frequent way
/// lie where that of the rare one does, in memory, and be copied from there: measured, an eighth of a
/// decision.
struct Apart<T>(T);

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

    /// Settles at the cost what is held under the [`id`](Self::id).
    ///
    /// # Errors
    /// What the store could not do; nothing held under the id, or settled at another cost.
    pub async fn settle(self) -> Result<Verdict, S::Error> {
        self.apply(Op::Settle).await
    }

    /// Makes what is held under the [`id`](Self::id) count as acquired now.
    ///
    /// # Errors
    /// What the store could not do; nothing held under the id, or settled already.
    pub async fn renew(self) -> Result<Verdict, S::Error> {
        self.apply(Op::Renew).await
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
    #[inline(always)]
    pub fn apply_now(self, op: Op) -> Result<Verdict, S::Error> {
        // What nearly all requests are, in little code: it goes wherever this is called.
        if let [limit] = self.limiter.limits.as_slice()
            && let Some(key) = limit.plain_key_for(self.caller)
        {
            let check = Check { limit, key, cost: self.cost };
            return self.limiter.store.apply_now(&self.shaped(Batch::one(&check), op));
        }
        self.apply_any_now(op).0
    }

    #[inline(never)]
    fn apply_any_now(self, op: Op) -> Apart<Result<Verdict, S::Error>> {
        if let Some((checks, count)) = self.plain_checks() {
            let batch = Batch::distinct(&checks[..count]);
            return Apart(self.limiter.store.apply_now(&self.shaped(batch, op)));
        }
        let apply = || with_batch!(self, op, |batch| self.limiter.store.apply_now(&batch));
        Apart(apply())
    }
}
