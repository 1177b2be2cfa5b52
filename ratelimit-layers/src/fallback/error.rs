//! [`FallbackError`]: why a request was neither decided by the store nor without it.

use std::time::Duration;

use ratelimit_core::store::Op;
use ratelimit_core::{ConfigError, ErrorKind, Refusal, StoreError};
use ratelimit_memory::MemoryError;

/// The errors of a [`Fallback`](crate::Fallback) over a store with errors `E`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FallbackError<E> {
    /// The store's own error: one that is no outage, or an outage during an operation that only the
    /// store can do.
    #[error(transparent)]
    Store(E),
    /// The store did not answer in time. It may have done what it was asked.
    #[error(
        "the store did not answer within {deadline:?} and may have done what it was asked; look at the store, or raise \
         the deadline"
    )]
    #[non_exhaustive]
    TimedOut {
        /// The deadline of each call.
        deadline: Duration,
    },
    /// The store is unreachable, and only it can do this. Nothing was sent.
    #[error(
        "the store is unreachable and its circuit breaker open, and only the store can do this {op}; repeat it in \
         {retry_after:?}"
    )]
    #[non_exhaustive]
    BreakerOpen {
        /// The operation.
        op: Op,
        /// How long until the store may be asked again.
        retry_after: Duration,
    },
    /// The store is unreachable, and the limits in memory have no room.
    #[error(
        "the store is unreachable, and the local limits cannot decide: {0}; see FallbackBuilder::capacity"
    )]
    Local(MemoryError),
    /// The store is unreachable, and there is no room for another id.
    #[error(
        "the store is unreachable, and {most} ids are in use without it, which is the most; raise the fallback's \
         capacity"
    )]
    #[non_exhaustive]
    Ids {
        /// The most ids that may be in use.
        most: usize,
    },
    /// The store is unreachable, and a limit declares no outage behaviour.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The request is invalid.
    #[error(transparent)]
    Refused(#[from] Refusal),
}

impl<E: StoreError> StoreError for FallbackError<E> {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Store(error) => error.kind(),
            Self::TimedOut { .. } => ErrorKind::Indeterminate,
            Self::BreakerOpen { .. } | Self::Local(_) | Self::Ids { .. } => ErrorKind::Unavailable,
            Self::Config(_) => ErrorKind::Config,
            Self::Refused(refusal) => refusal.kind(),
        }
    }
}
