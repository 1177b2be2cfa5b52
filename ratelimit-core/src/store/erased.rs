//! Stores chosen at run time: [`DynStore`] and [`DynError`].
//!
//! `Arc<dyn DynStore<Policy>>` is a [`Store`] again, for the price of a boxed future a call.

use alloc::boxed::Box;
use core::fmt;

use async_trait::async_trait;

use crate::algorithm::Algorithm;
use crate::batch::Batch;
use crate::decision::Verdict;
use crate::error::ErrorKind;
use crate::refusal::Refusal;
use crate::store::{Store, StoreError};

/// [`Store`] with its future and its error boxed. Every store is one.
#[async_trait]
pub trait DynStore<A: Algorithm>: Send + Sync {
    /// As [`Store::apply`].
    async fn apply_boxed(&self, batch: &Batch<'_, A>) -> Result<Verdict, DynError>;
}

#[async_trait]
impl<A: Algorithm, S: Store<A>> DynStore<A> for S {
    async fn apply_boxed(&self, batch: &Batch<'_, A>) -> Result<Verdict, DynError> {
        self.apply(batch).await.map_err(|error| DynError(Box::new(error)))
    }
}

impl<A: Algorithm> Store<A> for dyn DynStore<A> + '_ {
    type Error = DynError;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, DynError> {
        self.apply_boxed(batch).await
    }
}

/// Any store's error.
pub struct DynError(Box<dyn StoreError>);

impl From<Refusal> for DynError {
    fn from(refusal: Refusal) -> Self {
        Self(Box::new(refusal))
    }
}

impl fmt::Debug for DynError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for DynError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl core::error::Error for DynError {
    fn source(&self) -> Option<&(dyn core::error::Error + 'static)> {
        self.0.source()
    }
}

impl StoreError for DynError {
    fn kind(&self) -> ErrorKind {
        self.0.kind()
    }
}
