//! [`RateLimiter`]: limits and a store, by caller.
//!
//! Shadow limits are decided after the enforced limits have admitted the request, in a batch each.
//! In one batch they would deny the enforced limits, or need an exception in every script. The
//! price is one store call per shadow limit, until one of a request's calls finds the store
//! unreachable: a `Fallback` then decides the rest without asking it again.

#![allow(
    clippy::inline_always,
    reason = "an answer that is not returned from function to function is not copied from each to the next: \
              measured, some nanoseconds a call"
)]

use alloc::boxed::Box;
use alloc::format;
use alloc::vec::Vec;
use core::future::{Future, poll_fn};
use core::pin::Pin;
use core::task::Poll;

use crate::algorithms::{Algorithm, KeepsEntries, WindowEntry};
use crate::any_algorithm::AnyAlgorithm;
use crate::decision::Verdict;
use crate::identifiers::{Identifiers, describe_identifiers};
use crate::limit::{Limit, Limits};
use crate::op::{Now, Op};
use crate::refusal::Refusal;
use crate::reservation::ReservationId;
use crate::store_traits::{EntryStore, Store, SyncStore};

#[cfg(feature = "std")]
mod lease;
mod named;
#[cfg(feature = "tokio")]
mod owned;
mod request;

#[cfg(feature = "std")]
pub use lease::{Lease, Leased};
pub use named::{NamedDecision, NamedDecisions};
#[cfg(feature = "tokio")]
pub use owned::{OwnedReservation, ReserveError, Reserved, repeat_settlement};
pub use request::{LimitCosts, Request};

/// The limits of a policy, kept in a store: *may this caller do this now, at this cost?*
///
/// A caller is a bare key, or identifiers by name. A limit applies to callers that have all of its
/// identifiers; the limits that apply are all charged, or none is. A request to which no limit
/// applies is an error, unless the limiter [allows it](Self::allow_unlimited).
///
/// Only the store differs between a unit test and production; see `ratelimit-memory` and
/// `ratelimit-redis`. Every method has an async form and, for stores that decide without waiting, a
/// form whose name ends in `_now`.
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
        let lacks = |limit: &&Limit<A>| {
            limit.is_required() && !limit.is_shadow() && limit.key_for(caller).is_none()
        };
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

    /// A request of this caller, of cost 1 and at the store's time: the full form of all methods
    /// below.
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
            now: Now::Store,
            id: None,
            settled_once: false,
            metadata: &[],
        }
    }
}

impl<S: Store<A>, A: Algorithm> RateLimiter<S, A> {
    /// Charges the caller 1 if it fits.
    ///
    /// # Errors
    /// The store's error. A denial is not an error.
    pub async fn check<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).acquire().await
    }

    /// Charges the caller `cost` if it fits.
    ///
    /// # Errors
    /// The store's error. A denial is not an error.
    pub async fn check_n<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        cost: u64,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).cost(cost).acquire().await
    }
}

/// Writes each operation in its async form and, for stores that decide without waiting, in the form
/// whose name ends in `_now`.
macro_rules! operations {
    ($(
        $(#[$doc:meta])+
        $name:ident, $now:ident($($given:ident: $type:ty),*) => |$request:ident| $asked:expr, $op:ident;
    )+) => {
        impl<S: Store<A>, A: Algorithm> RateLimiter<S, A> { $(
            $(#[$doc])+
            pub async fn $name<C: Identifiers + Sync + ?Sized>(
                &self,
                caller: &C,
                $($given: $type),*
            ) -> Result<Verdict, S::Error> {
                let $request = self.request(caller);
                $asked.apply(Op::$op).await
            }
        )+ }

        impl<S: SyncStore<A>, A: Algorithm> RateLimiter<S, A> { $(
            #[doc = concat!("[`", stringify!($name), "`](Self::", stringify!($name), ") without waiting.")]
            ///
            /// # Errors
            #[doc = concat!("As [`", stringify!($name), "`](Self::", stringify!($name), ").")]
            pub fn $now<C: Identifiers + ?Sized>(
                &self,
                caller: &C,
                $($given: $type),*
            ) -> Result<Verdict, S::Error> {
                let $request = self.request(caller);
                $asked.apply_now(Op::$op)
            }
        )+ }
    };
}

operations! {
    /// Decides as [`check_n`](Self::check_n) does, and charges nothing.
    /// [`remaining`](Verdict::remaining) is what such a request would leave; of a peek at cost 0,
    /// it is what is there.
    ///
    /// ```
    /// use ratelimit_core::{FixedWindow, Limits, RateLimiter};
    /// use ratelimit_memory::MemoryStore;
    ///
    /// let daily = Limits::builder().limit("daily", FixedWindow::per_day(10)).build()?;
    /// let limiter = RateLimiter::new(daily, MemoryStore::new());
    /// assert_eq!(limiter.peek_now("alice", 1)?.remaining(), 9);
    /// assert_eq!(limiter.peek_now("alice", 0)?.remaining(), 10);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// The store's error.
    peek, peek_now(cost: u64) => |request| request.cost(cost), Peek;

    /// Charges the caller `cost` even if it does not fit, down to nothing left.
    ///
    /// # Errors
    /// The store's error.
    force, force_now(cost: u64) => |request| request.cost(cost), Force;

    /// Gives the caller `cost` back, up to the capacity.
    ///
    /// # Errors
    /// The store's error.
    refund, refund_now(cost: u64) => |request| request.cost(cost), Refund;

    /// Forgets the caller: full capacity in every limit that applies.
    ///
    /// # Errors
    /// The store's error.
    reset, reset_now() => |request| request, Reset;

    /// Charges the caller an estimate under this id, to [commit](Self::commit) within an hour of
    /// this call, or of the last that renews or extends it. Under a
    /// [`Concurrency`](crate::Concurrency) limit it grants a lease, to [renew](Self::renew), and to
    /// release by committing 0. A reservation that is never settled stays charged; a lease ends by
    /// itself.
    ///
    /// ```
    /// # use std::future::{Future, ready};
    /// # use ratelimit_core::*;
    /// # async fn example<S: Store<AnyAlgorithm>>(limiter: RateLimiter<S>) -> Result<(), S::Error> {
    /// let id = ReservationId::random();
    /// if limiter.reserve("alice", id, 4_000).await?.allowed() {
    ///     let tokens_used = 1_234; // the true cost, known after the call
    ///     let _ = limiter.commit("alice", id, tokens_used).await?;
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The store's error; a limit without reservations. A denial is not an error.
    reserve, reserve_now(id: ReservationId, estimate: u64) => |request| request.id(id).cost(estimate), Acquire;

    /// Settles the reservation at its final cost: returns the difference to the estimate, or
    /// charges it, down to nothing left. A cost of 0 gives all of it back; a lease ends at any
    /// cost. Repeating the call changes nothing.
    ///
    /// # Errors
    /// The store's error; an id without a reservation, or one that was settled at another cost.
    commit, commit_now(id: ReservationId, cost: u64) => |request| request.id(id).cost(cost), Settle;

    /// Starts the lease again, or keeps the reservation for another hour.
    ///
    /// # Errors
    /// The store's error; an id without a reservation: it has expired, and another caller may have
    /// its place.
    renew, renew_now(id: ReservationId) => |request| request.id(id), Renew;
}

impl<S: EntryStore<A>, A: KeepsEntries> RateLimiter<S, A> {
    /// The entries of each limit that applies to the caller, by the limit's name: the admitted
    /// requests that count, oldest first. Only a [`WindowLog`](crate::WindowLog) keeps entries.
    ///
    /// # Errors
    /// The store's error.
    pub async fn entries<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
    ) -> Result<Vec<(&str, Vec<WindowEntry>)>, S::Error> {
        self.has_required(caller)?;
        let keys = self.limits.iter().filter_map(|limit| Some((limit, limit.key_for(caller)?)));
        // All at once: one after the other, each could take as long as its store may.
        let asked = keys.map(|(limit, key)| async move {
            let entries = self.store.entries(limit, &key, Now::Store).await?;
            Ok::<_, S::Error>((limit.name(), entries))
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

impl<S: SyncStore<A>, A: Algorithm> RateLimiter<S, A> {
    /// [`check`](Self::check) without waiting.
    ///
    /// # Errors
    /// The store's error. A denial is not an error.
    #[inline(always)]
    pub fn check_now<C: Identifiers + ?Sized>(&self, caller: &C) -> Result<Verdict, S::Error> {
        self.check_n_now(caller, 1)
    }

    /// [`check_n`](Self::check_n) without waiting.
    ///
    /// # Errors
    /// The store's error. A denial is not an error.
    #[inline(always)]
    pub fn check_n_now<C: Identifiers + ?Sized>(
        &self,
        caller: &C,
        cost: u64,
    ) -> Result<Verdict, S::Error> {
        // The path of nearly all requests, which a store can have inlined here.
        if let [limit] = self.limits.as_slice()
            && !limit.is_shadow()
            && let Some(key) = limit.key_for(caller)
        {
            return self.store.acquire_now(limit, &key, cost);
        }
        self.request(caller).cost(cost).apply_any_now(Op::Acquire).0
    }

    /// Grants the caller a lease of 1 for as long as the returned value lives. See
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
