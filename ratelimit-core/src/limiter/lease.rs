//! [`Lease`]: a lease that lives as long as a value.

use crate::algorithms::Algorithm;
use crate::decision::Verdict;
use crate::identifiers::Identifiers;
use crate::limit::Limit;
use crate::limiter::Request;
use crate::refusal::Refusal;
use crate::reservation::ReservationId;
use crate::store_traits::SyncStore;

impl<'a, S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> Request<'a, S, A, C> {
    /// Acquires the cost for as long as the [`Lease`] lives, under a new id if the request has
    /// none.
    ///
    /// This is for [`Concurrency`](crate::Concurrency) limits. Under a limit of a rate, dropping
    /// the value would settle the charge at 0, and nothing would be limited. So a request to which
    /// such a limit applies is [refused](Refusal::GrantsNoLease), unless that is in shadow mode:
    /// use [`check_now`](Self::check_now) there.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # fn example<S: SyncStore<AnyAlgorithm>>(limiter: RateLimiter<S>) -> Result<(), S::Error> {
    /// match limiter.request("alice").cost(2).lease_now()? {
    ///     Leased::Granted(_lease) => { /* at work; the lease ends with this block */ }
    ///     Leased::Denied(verdict) => println!("busy, for {:?} at most", verdict.retry_after()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The store's error; a limit without leases. A denial is not an error.
    pub fn lease_now(self) -> Result<Leased<'a, S, A, C>, S::Error> {
        self.grants_leases()?;
        let request = match self.id {
            Some(_) => self,
            None => self.with_drawn_id(ReservationId::random()),
        };
        let verdict = request.check_now()?;
        Ok(if verdict.allowed() {
            Leased::Granted(Lease { request, verdict })
        } else {
            Leased::Denied(verdict)
        })
    }

    /// Refuses a limit that applies and grants no leases.
    fn grants_leases(&self) -> Result<(), Refusal> {
        let mut limits = self.limiter.limits().iter();
        let lacks = |limit: &&Limit<A>| {
            let grants = limit.algorithm().has_leases();
            !grants && !limit.is_shadow() && limit.key_for(self.caller).is_some()
        };
        limits
            .find(lacks)
            .map_or(Ok(()), |limit| Err(Refusal::GrantsNoLease { limit: limit.name().into() }))
    }
}

/// The answer of [`Request::lease_now`].
#[must_use = "a lease that is dropped is released, and a denial limits nothing by itself"]
#[derive(Debug)]
pub enum Leased<'a, S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> {
    /// The lease, which is released when it is dropped.
    Granted(Lease<'a, S, A, C>),
    /// The denial.
    Denied(Verdict),
}

/// A lease that is released when it is dropped.
///
/// Without a renewal it also ends by itself after the length of a lease. A failed release is not
/// reported: the lease then ends by itself. So does one that the store granted [without a
/// record](Verdict::is_unrecorded), which can be neither renewed nor released.
#[must_use = "a lease that is dropped is released"]
#[derive(Debug)]
pub struct Lease<'a, S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> {
    request: Request<'a, S, A, C>,
    verdict: Verdict,
}

impl<S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> Lease<'_, S, A, C> {
    /// The verdict that granted it.
    pub const fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// Its id.
    #[must_use]
    pub const fn id(&self) -> Option<ReservationId> {
        self.request.id
    }

    /// Starts it again, for the length of a lease.
    ///
    /// # Errors
    /// The store's error. [`Ended`](crate::ErrorKind::Ended) if the lease has: another caller may
    /// have its place.
    pub fn renew_now(&self) -> Result<Verdict, S::Error> {
        self.request.renew_now()
    }
}

impl<S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> Drop for Lease<'_, S, A, C> {
    fn drop(&mut self) {
        if !self.verdict.is_unrecorded() {
            drop(self.request.cost(0).settle_now());
        }
    }
}
