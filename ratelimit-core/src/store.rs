//! The [`Store`] traits: where states are kept, and where batches are decided.

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::future::Future;

use crate::algorithm::{Algorithm, KeepsEntries, WindowEntry};
use crate::batch::{Batch, Check};
use crate::decision::Verdict;
use crate::error::ErrorKind;
use crate::limit::Limit;
use crate::op::Now;
use crate::refusal::Refusal;

#[cfg(feature = "dyn")]
pub(crate) mod erased;

/// A place that keeps states and decides batches, atomically.
///
/// # Contract
///
/// For implementers; `ratelimit-testkit` tests all of it:
///
/// - A batch is decided as [`decide`](crate::decide) does, with nothing of any other batch that
///   shares a key in between.
/// - [`Now::Store`](crate::Now::Store) is read from the store's own clock, as late as can be.
/// - Every state that is written is gone by itself soon after it has expired.
/// - A key is the pair of the limit's name and the check's key, whatever bytes these are.
/// - An error means that the batch was not charged, unless its kind is
///   [`Indeterminate`](ErrorKind::Indeterminate). A denial is no error.
pub trait Store<A: Algorithm>: Send + Sync {
    /// What can go wrong. A [`Refusal`] of the request is one of it.
    type Error: StoreError + From<Refusal>;

    /// Does to the checks of a batch, all or none, what its operation says.
    fn apply(
        &self,
        batch: &Batch<'_, A>,
    ) -> impl Future<Output = Result<Verdict, Self::Error>> + Send;
}

/// A store that needs not wait: it can be asked without a runtime.
pub trait SyncStore<A: Algorithm>: Store<A> {
    /// As [`Store::apply`], at once.
    ///
    /// # Errors
    /// What the store's error type tells.
    fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, Self::Error>;

    /// [`apply_now`](Self::apply_now) to one check, charged at the store's own time: what nearly all requests
    /// are. A store can so decide it without looking whether there is more to it.
    ///
    /// # Errors
    /// What the store's error type tells.
    #[inline]
    fn acquire_now(&self, limit: &Limit<A>, key: &str, cost: u64) -> Result<Verdict, Self::Error> {
        self.apply_now(&Batch::one(&Check { limit, key, cost }))
    }

    /// [`acquire_now`](Self::acquire_now) to each of several keys, one after the other and each for itself,
    /// handing over its place and what is said of it. A store can so do for all of them what takes time,
    /// such as waiting for memory and reading the clock, at once: `told` should be quick, as those who come
    /// after may be decided at a time that was read before it was called. An error of one key, what the
    /// store's error type tells, ends none of the others.
    #[inline]
    fn acquire_each_now(
        &self,
        limit: &Limit<A>,
        keys: &[&str],
        cost: u64,
        mut told: impl FnMut(usize, Result<Verdict, Self::Error>),
    ) {
        for (place, key) in keys.iter().enumerate() {
            told(place, self.acquire_now(limit, key, cost));
        }
    }
}

/// A store that tells who used a window up.
pub trait EntryStore<A: KeepsEntries>: Store<A> {
    /// The requests of this key that a limit has admitted and that still count, oldest first.
    fn entries(
        &self,
        limit: &Limit<A>,
        key: &str,
        now: Now,
    ) -> impl Future<Output = Result<Vec<WindowEntry>, Self::Error>> + Send;
}

/// What every store's error can tell.
pub trait StoreError: core::error::Error + Send + Sync + 'static {
    /// What kind of trouble it is.
    fn kind(&self) -> ErrorKind;
}

impl StoreError for Refusal {
    fn kind(&self) -> ErrorKind {
        self.kind()
    }
}

/// A store behind a pointer is a store.
macro_rules! stores_behind {
    ($($pointer:ty),+) => { $(
        impl<A: Algorithm, S: Store<A> + ?Sized> Store<A> for $pointer {
            type Error = S::Error;

            fn apply(
                &self,
                batch: &Batch<'_, A>,
            ) -> impl Future<Output = Result<Verdict, Self::Error>> + Send {
                (**self).apply(batch)
            }
        }

        impl<A: KeepsEntries, S: EntryStore<A> + ?Sized> EntryStore<A> for $pointer {
            fn entries(
                &self,
                limit: &Limit<A>,
                key: &str,
                now: Now,
            ) -> impl Future<Output = Result<Vec<WindowEntry>, Self::Error>> + Send {
                (**self).entries(limit, key, now)
            }
        }

        #[deny(clippy::missing_trait_methods)]
        impl<A: Algorithm, S: SyncStore<A> + ?Sized> SyncStore<A> for $pointer {
            fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, Self::Error> {
                (**self).apply_now(batch)
            }

            #[inline]
            fn acquire_now(
                &self,
                limit: &Limit<A>,
                key: &str,
                cost: u64,
            ) -> Result<Verdict, Self::Error> {
                (**self).acquire_now(limit, key, cost)
            }

            fn acquire_each_now(
                &self,
                limit: &Limit<A>,
                keys: &[&str],
                cost: u64,
                told: impl FnMut(usize, Result<Verdict, Self::Error>),
            ) {
                (**self).acquire_each_now(limit, keys, cost, told);
            }
        }
    )+ };
}

stores_behind!(&S, Arc<S>);
