//! `check` and its forms: the calls of nearly all programs.

#![allow(
    clippy::inline_always,
    reason = "an answer that is not returned from function to function is not copied from each to the next: \
              measured, some nanoseconds a call"
)]

use super::RateLimiter;
use crate::algorithms::Algorithm;
use crate::decision::Verdict;
use crate::identifiers::Identifiers;
use crate::store_traits::{Store, SyncStore};

// Documentation shows the methods of this module before those of the others.
impl<S: Store<A>, A: Algorithm> RateLimiter<S, A> {
    /// Charges the caller 1 if it fits.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # async fn example<S: Store<AnyAlgorithm>>(limiter: RateLimiter<S>) -> Result<(), S::Error> {
    /// let verdict = limiter.check(&[("ip", "192.0.2.7"), ("user", "alice")]).await?;
    /// if !verdict.allowed() {
    ///     println!("come back in {:?}", verdict.retry_after());
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The store's error. A denial is not an error.
    pub async fn check<C: Identifiers + Sync + ?Sized>(
        &self,
        caller: &C,
    ) -> Result<Verdict, S::Error> {
        self.request(caller).check().await
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
        self.request(caller).cost(cost).check().await
    }
}

impl<S: SyncStore<A>, A: Algorithm> RateLimiter<S, A> {
    /// [`check`](Self::check) without waiting.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limits, RateLimiter};
    /// use ratelimit_memory::MemoryStore;
    ///
    /// let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
    /// let limiter = RateLimiter::new(limits, MemoryStore::new());
    /// let verdict = limiter.check_now("alice")?;
    /// assert!(verdict.allowed());
    /// assert_eq!(verdict.remaining(), 4);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
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
        self.request(caller).cost(cost).check_now()
    }
}
