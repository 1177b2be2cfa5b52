//! [`Lease`]: what is held for as long as a value lives.

use crate::algorithm::Algorithm;
use crate::decision::Verdict;
use crate::identifiers::Identifiers;
use crate::limiter::Request;
use crate::op::Op;
use crate::reservation::ReservationId;
use crate::store::SyncStore;

impl<'a, S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> Request<'a, S, A, C> {
    /// Holds the cost for as long as the [`Lease`] lives, under a new id if the request has none.
    ///
    /// This is for [`Concurrency`](crate::Concurrency) limits. A reservation of a rate that is settled at
    /// nothing when a value is dropped limits no rate: that is what [`Op::Acquire`] is for.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # fn example<S: SyncStore<Policy>>(limiter: RateLimiter<S>) -> Result<(), S::Error> {
    /// match limiter.request("alice").cost(2).lease_now()? {
    ///     Leased::Granted(_lease) => { /* at work; the lease ends with this block */ }
    ///     Leased::Denied(verdict) => println!("busy, for {:?} at most", verdict.retry_after()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// What the store could not do; a limit whose charges cannot be held. A denial is no error.
    pub fn lease_now(self) -> Result<Leased<'a, S, A, C>, S::Error> {
        let request = self.id(self.id.unwrap_or_else(ReservationId::random));
        let verdict = request.apply_now(Op::Acquire)?;
        Ok(if verdict.allowed() {
            Leased::Granted(Lease { request, verdict })
        } else {
            Leased::Denied(verdict)
        })
    }
}

/// What [`Request::lease_now`] answers.
#[must_use = "a lease that is dropped is released, and a denial limits nothing by itself"]
#[derive(Debug)]
pub enum Leased<'a, S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> {
    /// The cost is held until the lease is dropped.
    Granted(Lease<'a, S, A, C>),
    /// It is not.
    Denied(Verdict),
}

/// A lease that is released when it is dropped.
///
/// It ends by itself as well, a lease's time after it was granted or renewed last. An error in
/// releasing it has nobody to be told to: the lease then ends by itself.
#[must_use = "a lease that is dropped is released"]
#[derive(Debug)]
pub struct Lease<'a, S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> {
    request: Request<'a, S, A, C>,
    verdict: Verdict,
}

impl<S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> Lease<'_, S, A, C> {
    /// What was said when it was granted.
    pub const fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// The id that it is held under.
    #[must_use]
    pub const fn id(&self) -> Option<ReservationId> {
        self.request.id
    }

    /// Makes it begin anew.
    ///
    /// # Errors
    /// What the store could not do. [`Invalid`](crate::ErrorKind::Invalid) if its time was over: then
    /// somebody else may hold its place.
    pub fn renew_now(&self) -> Result<Verdict, S::Error> {
        self.request.apply_now(Op::Renew)
    }
}

impl<S: SyncStore<A>, A: Algorithm, C: Identifiers + ?Sized> Drop for Lease<'_, S, A, C> {
    fn drop(&mut self) {
        drop(self.request.cost(0).apply_now(Op::Settle));
    }
}
