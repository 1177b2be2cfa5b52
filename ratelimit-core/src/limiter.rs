//! [`RateLimiter`]: limits and a store, by caller.
//!
//! Shadow limits are decided after the enforced limits have admitted the request, in a batch each.
//! In one batch they would deny the enforced limits, or need an exception in every script. The
//! price is one store call per shadow limit, until one of a request's calls finds the store
//! unreachable: a `Fallback` then decides the rest without asking it again.

use alloc::boxed::Box;
use alloc::format;
use alloc::vec::Vec;
use core::future::{Future, poll_fn};
use core::pin::Pin;
use core::task::Poll;

use crate::algorithms::{Algorithm, LoggedRequest};
use crate::any_algorithm::AnyAlgorithm;
use crate::decision::Verdict;
use crate::identifiers::{Identifiers, describe_identifiers};
use crate::limit::{Limit, Limits};
use crate::op::Now;
use crate::refusal::Refusal;
use crate::store_traits::{LogStore, Store};

mod check;
#[cfg(feature = "std")]
mod lease;
mod named;
#[cfg(feature = "tokio")]
mod owned;
mod records;
mod request;
mod up_to;

#[cfg(feature = "std")]
pub use lease::{Lease, Leased};
pub use named::{NamedDecision, NamedDecisions};
#[cfg(feature = "tokio")]
pub use owned::{OwnedReservation, ReserveError, Reserved, repeat_settlement};
pub use request::{LimitCosts, Request};

/// The limits of a policy, kept in a store: *may this caller do this now, at this cost?*
///
/// A caller is a bare key, or identifiers by name. A limit applies to callers that have all of its
/// identifiers and meet its [conditions](Limit::when); the limits that apply are all charged, or
/// none is. A request to which no limit applies is an error, unless the limiter [allows
/// it](Self::allow_unlimited).
///
/// [`check`](Self::check) and its forms are what most programs call. [`request`](Self::request)
/// does everything else: another operation, a cost per limit, a reservation, a given time. A store
/// in memory also has the forms that do not wait, whose names end in `_now`.
///
/// Only the store differs between a unit test and production; see `ratelimit-memory` and
/// `ratelimit-redis`.
///
/// ```
/// use ratelimit_core::{Gcra, Limits, RateLimiter};
/// use ratelimit_memory::MemoryStore;
///
/// let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
/// let limiter = RateLimiter::new(limits, MemoryStore::new());
///
/// assert!(limiter.check_now("alice")?.allowed());
/// assert_eq!(limiter.request("alice").cost(0).peek_now()?.remaining(), 4);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct RateLimiter<S, A = AnyAlgorithm> {
    limits: Limits<A>,
    store: S,
    allows_unlimited: bool,
}

impl<S, A: Algorithm> RateLimiter<S, A> {
    /// A limiter with these limits in this store.
    ///
    /// The limits determine the type of the store: `MemoryStore::builder().build()` needs no type
    /// here.
    #[must_use]
    pub const fn new(limits: Limits<A>, store: S) -> Self
    where
        S: Store<A>,
    {
        Self { limits, store, allows_unlimited: false }
    }

    /// The same limiter, which admits a request to which no limit applies.
    ///
    /// By default such a request is an error,
    /// [`Refusal::NoLimitApplies`](crate::Refusal::NoLimitApplies): a misspelt or missing
    /// identifier must not be unlimited. A request that lacks the identifiers of a
    /// [required](Limit::required) limit stays an error. Settling and renewing under identifiers to
    /// which no limit applies then succeed too, as for a reservation that was unlimited: check
    /// their spelling in both calls.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # fn example<S: SyncStore<AnyAlgorithm>>(store: S) -> Result<(), Box<dyn std::error::Error>> {
    /// let limits = Limits::builder().limit("user", Gcra::per_second(10).burst(20)).by(["user"]).build()?;
    /// let limiter = RateLimiter::new(limits, store).allow_unlimited();
    /// assert!(limiter.check_now(&[("ip", "192.0.2.7")])?.is_unlimited());
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn allow_unlimited(mut self) -> Self {
        self.allows_unlimited = true;
        self
    }

    /// A limiter with these limits and otherwise the same, in the same store.
    #[must_use]
    pub fn with_limits(&self, limits: Limits<A>) -> Self
    where
        S: Clone,
    {
        Self { limits, store: self.store.clone(), ..*self }
    }

    /// The verdict of a request to which no limit applies, or the refusal.
    #[cold]
    fn unlimited<C: Identifiers + ?Sized>(&self, caller: &C) -> Result<Verdict, Refusal> {
        self.has_required(caller)?;
        if self.allows_unlimited || self.limits.iter().all(Limit::is_shadow) {
            return Ok(Verdict::several(Vec::new()));
        }
        let wants = |limit: &Limit<A>| {
            format!("limit {:?} wants {}", limit.name(), limit.describe_identifiers())
        };
        let enforced = self.limits.iter().filter(|limit| !limit.is_shadow());
        let wanted: Vec<_> = enforced.map(wants).collect();
        Err(Refusal::NoLimitApplies {
            had: describe_identifiers(caller),
            wanted: wanted.join(", "),
        })
    }

    /// Refuses a caller that lacks the identifiers of a required limit.
    fn has_required<C: Identifiers + ?Sized>(&self, caller: &C) -> Result<(), Refusal> {
        let lacks = |limit: &&Limit<A>| !limit.is_shadow() && limit.misses(caller);
        self.limits.iter().find(lacks).map_or(Ok(()), |limit| {
            let (limit, wanted) = (limit.name().into(), limit.describe_identifiers());
            Err(Refusal::MissingIdentifier { limit, had: describe_identifiers(caller), wanted })
        })
    }

    /// The limits, in the order of the decisions of a [`Verdict`].
    #[must_use]
    pub const fn limits(&self) -> &Limits<A> {
        &self.limits
    }

    /// The store.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// A request of this caller, of cost 1 and at the store's time, for every operation.
    ///
    /// `limiter.request(&[("ip", ip), ("user", user)]).cost(5).at(timestamp).peek().await?`
    #[inline]
    pub const fn request<'a, C: Identifiers + ?Sized>(
        &'a self,
        caller: &'a C,
    ) -> Request<'a, S, A, C> {
        Request {
            limiter: self,
            caller,
            cost: 1,
            costs: None,
            numbers: None,
            now: Now::Store,
            id: None,
            settled_once: false,
            metadata: &[],
        }
    }
}

impl<S: LogStore<A>, A: Algorithm> RateLimiter<S, A> {
    /// The admitted requests that count, oldest first, of each limit that applies to the caller, by
    /// the limit's name. Only a [`WindowLog`](crate::WindowLog) keeps them.
    ///
    /// # Errors
    /// The store's error.
    pub async fn logged<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
    ) -> Result<Vec<(&str, Vec<LoggedRequest>)>, S::Error> {
        self.has_required(caller)?;
        let keys = self.limits.iter().filter_map(|limit| Some((limit, limit.key_for(caller)?)));
        // All at once: one after the other, each could take as long as its store may.
        let asked = keys.map(|(limit, key)| async move {
            let logged = self.store.logged(limit, &key, Now::Store).await?;
            Ok::<_, S::Error>((limit.name(), logged))
        });
        let found = all_or_error(asked.map(Box::pin).collect()).await?;
        if found.is_empty() {
            let _unlimited = self.unlimited(caller)?;
        }
        Ok(found)
    }
}

/// What these futures come to, in their order, or the first error.
async fn all_or_error<T, E>(
    mut all: Vec<Pin<Box<impl Future<Output = Result<T, E>>>>>,
) -> Result<Vec<T>, E> {
    let mut found: Vec<Option<T>> = all.iter().map(|_| None).collect();
    poll_fn(|cx| {
        for (future, found) in all.iter_mut().zip(&mut found).filter(|(_, found)| found.is_none()) {
            if let Poll::Ready(said) = future.as_mut().poll(cx)? {
                *found = Some(said);
            }
        }
        if found.iter().any(Option::is_none) { Poll::Pending } else { Poll::Ready(Ok(())) }
    })
    .await?;
    Ok(found.into_iter().flatten().collect())
}
