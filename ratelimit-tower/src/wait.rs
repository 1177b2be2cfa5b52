//! [`Waiter`]: waits until a request is admitted.

use std::sync::Arc;
use std::time::Duration;

use derive_where::derive_where;
use ratelimit_core::{
    Algorithm, Decision, Identifiers, LimitCosts, Policy, RateLimiter, Store, Verdict,
};
use tokio::time::{Instant, sleep_until};

mod layer;
mod queue;

pub use layer::{WaitLayer, WaitService, WaitServiceError};

use queue::{QueueKey, WaitQueues};

use crate::fields::advice::Advice;

/// Waits until a request is admitted, instead of refusing it.
///
/// Callers with the same identifiers are served in the order in which they came, in this process: the first of them asks the store
/// and sleeps for the wait that it returns, and the others wait behind it. Callers with other identifiers do not wait for them.
///
/// A wait that is dropped has charged nothing, unless the store was deciding at that moment.
///
/// The limiter knows the client's own limit. What another service says remains goes to [`adopt`](Self::adopt), and what it asks for to
/// [`hold_back`](Self::hold_back).
///
/// ```
/// # use std::time::Duration;
/// # use ratelimit_core::*;
/// use ratelimit_tower::Waiter;
///
/// # async fn example<S: Store<Policy>>(limiter: RateLimiter<S>) -> Result<(), ratelimit_tower::WaitError<S::Error>> {
/// let waiter = Waiter::new(limiter).jitter(Duration::from_millis(50));
/// waiter.until_allowed("api.example.com", Duration::from_secs(30)).await?;
/// // send the request
/// # Ok(())
/// # }
/// ```
#[derive_where(Clone, Debug)]
pub struct Waiter<S, A = Policy> {
    #[derive_where(skip(Debug))]
    limiter: Arc<RateLimiter<S, A>>,
    #[derive_where(skip(Debug))]
    queues: Arc<WaitQueues>,
    jitter: Duration,
}

/// Why a wait ended without an admission. Nothing was charged, unless the store's error is `Indeterminate`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WaitError<E> {
    /// The wait would be longer than the caller allows. With a verdict, its `retry_after` is the wait; without one, other callers
    /// were still waiting ahead.
    #[error("the wait would be longer than the {max_wait:?} that the caller allows")]
    TooLong {
        /// What the caller allows.
        max_wait: Duration,
        /// The denial, if the store was asked.
        verdict: Option<Verdict>,
    },
    /// The callers are [held back](Waiter::hold_back) for longer than this caller allows.
    #[error(
        "the requests are held back for another {wait:?}, longer than the {max_wait:?} that the caller allows"
    )]
    HeldBack {
        /// What the caller allows.
        max_wait: Duration,
        /// How long the requests are still held back.
        wait: Duration,
    },
    /// The cost is above the capacity of a limit: no wait is long enough.
    #[error("the cost is above the capacity of a limit; lower it, or split the request")]
    Never {
        /// The denial.
        verdict: Verdict,
    },
    /// The store cannot decide.
    #[error(transparent)]
    Store(#[from] E),
}

impl<S: Store<A>, A: Algorithm> Waiter<S, A> {
    /// A waiter for admissions of this limiter. Its clones have one queue.
    #[must_use]
    pub fn new(limiter: impl Into<Arc<RateLimiter<S, A>>>) -> Self {
        Self { limiter: limiter.into(), queues: Arc::default(), jitter: Duration::ZERO }
    }

    /// The same waiter, whose waits are longer by a random time of up to this, so that processes that share a limit do not all ask at
    /// the same moment. No wait exceeds the caller's maximum; the store's calls come on top, one or, for a caller that queued, two.
    #[must_use]
    pub const fn jitter(mut self, jitter: Duration) -> Self {
        self.jitter = jitter;
        self
    }

    /// Waits until a request of cost 1 is admitted, and returns the [summary](Verdict::summary) of the verdict.
    ///
    /// # Errors
    /// The wait would be longer than `max_wait`; the store's error.
    pub async fn until_allowed<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        max_wait: Duration,
    ) -> Result<Decision, WaitError<S::Error>> {
        self.until_n_allowed(caller, 1, max_wait).await
    }

    /// Waits until a request of this cost is admitted.
    ///
    /// # Errors
    /// The wait would be longer than `max_wait`; a cost above the capacity, at once; the store's error.
    pub async fn until_n_allowed<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        cost: u64,
        max_wait: Duration,
    ) -> Result<Decision, WaitError<S::Error>> {
        let limiter = &*self.limiter;
        // A maximum beyond what the clock can tell is none.
        let deadline = Instant::now().checked_add(max_wait);
        let too_long = |verdict| WaitError::TooLong { max_wait, verdict };
        let held_back = |wait| WaitError::HeldBack { max_wait, wait };
        let mut position = self.queues.enter(self.queue_of(caller));
        // Those who would wait for too long need not queue up for it.
        position.held_until(deadline).map_err(held_back)?;
        let (limits, request) = (limiter.limits().as_slice(), limiter.request(caller));
        if request.applicable().any(|position| limits[position].algorithm().capacity() < cost) {
            // No wait is long enough. Only the store can say so in a verdict. During an outage it may admit the request in its turn.
            let verdict = limiter.request(caller).cost(cost).peek().await?;
            if !verdict.allowed() && verdict.retry_after().is_none() {
                return Err(WaitError::Never { verdict });
            }
        }
        let _turn = position.take_turn(deadline).await.ok_or_else(|| too_long(None))?;
        loop {
            let held = position.held_until(deadline).map_err(held_back)?;
            let at = if let Some(at) = held {
                at
            } else {
                position.goes_on_by(Instant::now());
                let verdict = limiter.request(caller).cost(cost).acquire().await?;
                if verdict.allowed() {
                    return Ok(*verdict.summary());
                }
                let Some(wait) = verdict.retry_after() else {
                    return Err(WaitError::Never { verdict });
                };
                let is_in_time = |at: &Instant| deadline.is_none_or(|deadline| *at <= deadline);
                let Some(at) = Instant::now().checked_add(wait).filter(is_in_time) else {
                    return Err(too_long(Some(verdict)));
                };
                at
            };
            // It sleeps until then, longer by the jitter, and no longer than the deadline.
            position.goes_on_by(at.checked_add(self.jitter).unwrap_or(at));
            let most_us = u64::try_from(self.jitter.as_micros()).unwrap_or(u64::MAX);
            let jitter = Duration::from_micros(fastrand::u64(..=most_us));
            let jittered = at.checked_add(jitter).unwrap_or(at);
            sleep_until(deadline.map_or(jittered, |deadline| jittered.min(deadline))).await;
        }
    }

    /// Holds back the requests of callers with these identifiers for this long, because the service that they go to asks for it:
    /// nothing that begins to wait from now on, or waits already, is admitted before. The longest time that was asked for counts, and
    /// at most a day, so that a service's mistake does not stop a client for good.
    ///
    /// A request whose maximum wait is shorter is refused at once, and charges nothing. Requests that were admitted before are not called
    /// back. When the time is over, requests go in the order in which they came, as fast as the limiter allows.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # use http::HeaderMap;
    /// use ratelimit_tower::{Advice, Waiter};
    ///
    /// # fn example<S: Store<Policy>>(waiter: Waiter<S>, headers: &HeaderMap) {
    /// if let Some(wait) = Advice::from_headers(headers).wait() {
    ///     waiter.hold_back("api.example.com", wait);
    /// }
    /// # }
    /// ```
    pub fn hold_back<C: Identifiers + ?Sized>(&self, caller: &C, wait: Duration) {
        self.queues.hold_back(self.queue_of(caller), wait);
    }

    /// Adopts what the service that the requests go to says remains: each limit of the limiter that the answer names has no more
    /// left afterwards, and never more than before. All processes that share the limiter's store share what it says, so they do not
    /// all run into its limit. Returns the verdict, or `None` if the answer names no limit of the limiter.
    ///
    /// The service had not seen the requests that were in flight. An answer that comes late may hold back more than needed.
    ///
    /// # Errors
    /// The store's error: a store by MULTI cannot adopt.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # use http::HeaderMap;
    /// use ratelimit_tower::{Advice, Waiter};
    ///
    /// # async fn example<S: Store<Policy>>(waiter: Waiter<S>, headers: &HeaderMap) -> Result<(), S::Error> {
    /// waiter.adopt("api.example.com", &Advice::from_headers(headers)).await?;
    /// # Ok(())
    /// # }
    /// ```
    pub async fn adopt<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
        advice: &Advice,
    ) -> Result<Option<Verdict>, S::Error> {
        let (mut remaining, mut is_told) = (LimitCosts::from(0), false);
        for limit in self.limiter.limits() {
            let told = advice.limits.iter().filter(|told| told.name == limit.name());
            let told = told.map(|told| told.remaining).min();
            is_told |= told.is_some();
            let capacity = limit.algorithm().capacity();
            remaining.set(limit.name(), told.map_or(capacity, |told| told.min(capacity)));
        }
        if !is_told {
            return Ok(None);
        }
        self.limiter.request(caller).costs(&remaining).adopt().await.map(Some)
    }

    /// The queue of a caller: the keys that its limits are kept by.
    fn queue_of<C: Identifiers + ?Sized>(&self, caller: &C) -> QueueKey {
        let limits = self.limiter.limits().iter();
        limits.map(|limit| Some(limit.key_for(caller)?.into_owned())).collect()
    }
}

#[cfg(test)]
mod tests;
