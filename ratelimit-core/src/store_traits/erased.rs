//! Stores chosen at run time: [`DynStore`], [`DynSnapshotStore`], [`DynRecordStore`] and
//! [`DynError`].
//!
//! `Arc<dyn DynStore<AnyAlgorithm>>` is a [`Store`] again, at the price of one boxed future per
//! call, `Arc<dyn DynSnapshotStore<AnyAlgorithm>>` a [`SnapshotStore`], and `Arc<dyn
//! DynRecordStore<AnyAlgorithm>>` a [`RecordStore`].

use alloc::boxed::Box;
use core::error::Error;
use core::fmt;

use async_trait::async_trait;

use crate::algorithms::Algorithm;
use crate::batch::Batch;
use crate::decision::Verdict;
use crate::error::ErrorKind;
use crate::limit::Limit;
use crate::record::Record;
use crate::refusal::Refusal;
use crate::store_traits::{RecordStore, SnapshotStore, Store, StoreError, WithSnapshot};

/// [`Store`] with its future and its error boxed. Every store is one.
#[async_trait]
pub trait DynStore<A: Algorithm>: Send + Sync {
    /// As [`Store::apply`].
    async fn apply_boxed(&self, batch: &Batch<'_, A>) -> Result<Verdict, DynError>;

    /// As [`Store::report_counts`].
    fn report_counts_dyn(&self, report: &mut dyn FnMut(&'static str, u64));

    /// As [`Store::server_of`].
    fn server_of_dyn(&self, batch: &Batch<'_, A>) -> Option<u64>;
}

#[async_trait]
impl<A: Algorithm, S: Store<A>> DynStore<A> for S {
    async fn apply_boxed(&self, batch: &Batch<'_, A>) -> Result<Verdict, DynError> {
        self.apply(batch).await.map_err(DynError::new)
    }

    fn report_counts_dyn(&self, report: &mut dyn FnMut(&'static str, u64)) {
        self.report_counts(report);
    }

    fn server_of_dyn(&self, batch: &Batch<'_, A>) -> Option<u64> {
        self.server_of(batch)
    }
}

/// [`SnapshotStore`] with its future and its error boxed. Every such store is one. A layer that
/// wraps a store chosen at run time, such as a cache of denials, takes `Arc<dyn
/// DynSnapshotStore<AnyAlgorithm>>`.
#[async_trait]
pub trait DynSnapshotStore<A: Algorithm>: DynStore<A> {
    /// As [`SnapshotStore::apply_with_snapshot`].
    async fn apply_with_snapshot_boxed(
        &self,
        batch: &Batch<'_, A>,
    ) -> Result<WithSnapshot<A::State>, DynError>;
}

#[async_trait]
impl<A: Algorithm, S: SnapshotStore<A>> DynSnapshotStore<A> for S {
    async fn apply_with_snapshot_boxed(
        &self,
        batch: &Batch<'_, A>,
    ) -> Result<WithSnapshot<A::State>, DynError> {
        self.apply_with_snapshot(batch).await.map_err(DynError::new)
    }
}

/// [`RecordStore`] with its futures and its error boxed. Every such store is one.
///
/// ```
/// use std::sync::Arc;
/// use ratelimit_core::store::DynRecordStore;
/// use ratelimit_core::{AnyAlgorithm, Gcra, Limits, RateLimiter, Record};
/// use ratelimit_memory::MemoryStore;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let store: Arc<dyn DynRecordStore<AnyAlgorithm>> = Arc::new(MemoryStore::new());
/// let limits = Limits::builder().limit("api", Gcra::per_second(10)).overridable().build()?;
/// let limiter = RateLimiter::new(limits, store);
///
/// limiter.set_record("alice", "api", Record::blocked().forever()).await?;
/// assert!(!limiter.check("alice").await?.allowed());
/// assert!(limiter.clear_record("alice", "api").await?.is_some_and(|record| record.is_blocked()));
/// assert!(limiter.check("alice").await?.allowed());
/// # Ok(())
/// # }
/// ```
#[async_trait]
pub trait DynRecordStore<A: Algorithm>: DynStore<A> {
    /// As [`RecordStore::record`].
    async fn record_boxed(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> Result<Option<Record<A>>, DynError>;

    /// As [`RecordStore::exchange_record`].
    async fn exchange_record_boxed(
        &self,
        limit: &Limit<A>,
        key: &str,
        standing: Option<&Record<A>>,
        next: Option<&Record<A>>,
    ) -> Result<bool, DynError>;
}

#[async_trait]
impl<A: Algorithm, S: RecordStore<A>> DynRecordStore<A> for S {
    async fn record_boxed(
        &self,
        limit: &Limit<A>,
        key: &str,
    ) -> Result<Option<Record<A>>, DynError> {
        self.record(limit, key).await.map_err(DynError::new)
    }

    async fn exchange_record_boxed(
        &self,
        limit: &Limit<A>,
        key: &str,
        standing: Option<&Record<A>>,
        next: Option<&Record<A>>,
    ) -> Result<bool, DynError> {
        self.exchange_record(limit, key, standing, next).await.map_err(DynError::new)
    }
}

macro_rules! boxed_stores {
    ($($store:ident),+) => { $(
        #[deny(clippy::missing_trait_methods)]
        impl<A: Algorithm> Store<A> for dyn $store<A> + '_ {
            type Error = DynError;

            async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, DynError> {
                self.apply_boxed(batch).await
            }

            fn report_counts(&self, report: &mut dyn FnMut(&'static str, u64)) {
                self.report_counts_dyn(report);
            }

            fn server_of(&self, batch: &Batch<'_, A>) -> Option<u64> {
                self.server_of_dyn(batch)
            }
        }
    )+ };
}

boxed_stores!(DynStore, DynSnapshotStore, DynRecordStore);

impl<A: Algorithm> SnapshotStore<A> for dyn DynSnapshotStore<A> + '_ {
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, A>,
    ) -> Result<WithSnapshot<A::State>, DynError> {
        self.apply_with_snapshot_boxed(batch).await
    }
}

impl<A: Algorithm> RecordStore<A> for dyn DynRecordStore<A> + '_ {
    async fn record(&self, limit: &Limit<A>, key: &str) -> Result<Option<Record<A>>, DynError> {
        self.record_boxed(limit, key).await
    }

    async fn exchange_record(
        &self,
        limit: &Limit<A>,
        key: &str,
        standing: Option<&Record<A>>,
        next: Option<&Record<A>>,
    ) -> Result<bool, DynError> {
        self.exchange_record_boxed(limit, key, standing, next).await
    }
}

/// Any store's error.
///
/// It displays as the store's own error does, with the same [kind](StoreError::kind) and
/// [source](core::error::Error::source). [`downcast`](Self::downcast) returns the store's own
/// error:
///
/// ```
/// use ratelimit_core::{DynError, Refusal, StoreError};
/// use ratelimit_core::store::Op;
///
/// let error = DynError::from(Refusal::NoId { op: Op::Settle });
/// assert_eq!(error.kind(), Refusal::NoId { op: Op::Settle }.kind());
/// assert!(matches!(error.downcast_ref(), Some(Refusal::NoId { .. })));
/// let refusal: Refusal = error.downcast()?;
/// # Ok::<(), DynError>(())
/// ```
pub struct DynError {
    error: Box<dyn Error + Send + Sync>,
    kind: ErrorKind,
}

impl DynError {
    /// Wraps a store's error. A `DynError` is not wrapped again.
    #[must_use]
    pub fn new<E: StoreError>(error: E) -> Self {
        let kind = error.kind();
        let error: Box<dyn Error + Send + Sync> = Box::new(error);
        match error.downcast::<Self>() {
            Ok(same) => *same,
            Err(error) => Self { error, kind },
        }
    }

    /// The store's own error, if it is of this type.
    #[must_use]
    pub fn downcast_ref<E: Error + 'static>(&self) -> Option<&E> {
        self.error.downcast_ref()
    }

    /// The store's own error, if it is of this type.
    ///
    /// # Errors
    /// The same `DynError`, if the store's own error is of another type.
    pub fn downcast<E: Error + 'static>(self) -> Result<E, Self> {
        let Self { error, kind } = self;
        error.downcast().map(|error| *error).map_err(|error| Self { error, kind })
    }
}

impl From<Refusal> for DynError {
    fn from(refusal: Refusal) -> Self {
        Self::new(refusal)
    }
}

impl fmt::Debug for DynError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl fmt::Display for DynError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.error, f)
    }
}

impl Error for DynError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        self.error.source()
    }
}

impl StoreError for DynError {
    fn kind(&self) -> ErrorKind {
        self.kind
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Op;
    use alloc::string::ToString;

    #[derive(Debug, thiserror::Error)]
    #[error("the answer was lost")]
    struct Lost(#[source] fmt::Error);

    impl StoreError for Lost {
        fn kind(&self) -> ErrorKind {
            ErrorKind::Indeterminate
        }
    }

    #[test]
    fn a_boxed_error_displays_and_downcasts_as_the_error_of_its_store() {
        // As of a store behind two pointers, whose error is boxed twice.
        let error = DynError::new(DynError::new(Lost(fmt::Error)));
        assert_eq!(
            (error.to_string().as_str(), error.kind()),
            ("the answer was lost", ErrorKind::Indeterminate)
        );
        assert!(error.source().is_some_and(<dyn Error>::is::<fmt::Error>));
        assert!(error.downcast_ref::<Lost>().is_some());
        assert!(error.downcast_ref::<Refusal>().is_none());

        let same = error.downcast::<Refusal>().expect_err("no refusal");
        assert_eq!(same.kind(), ErrorKind::Indeterminate);
        assert!(same.downcast::<Lost>().is_ok());

        let refusal = DynError::from(Refusal::NoId { op: Op::Settle });
        assert!(matches!(refusal.downcast(), Ok(Refusal::NoId { op: Op::Settle })));
    }
}
