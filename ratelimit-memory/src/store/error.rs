//! [`MemoryError`]: why a store in memory does not decide.

use ratelimit_core::{ErrorKind, Refusal, StoreError};

/// The errors of a [`MemoryStore`](crate::MemoryStore). A call that returns one has charged
/// nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MemoryError {
    /// The request is invalid.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The store has no room for another reservation.
    #[error(
        "the store has no room for another reservation: it is full with {capacity}; give it room for more \
         (Builder::reservations)"
    )]
    Full {
        /// The most reservations that the store may have.
        capacity: usize,
    },
    /// The logs have no room for the entries that the request needs.
    #[error(
        "the logs of the store are full with {most} entries; give the store more entries, or use limits \
         that keep none, such as gcra or sliding-counter"
    )]
    Entries {
        /// The most entries that all logs together may keep.
        most: usize,
    },
    /// The store has no room for another record of a caller.
    #[error(
        "the store has no room for another record: it is full with {most} that have not ended; clear some, or \
         give it room for more (Builder::records)"
    )]
    Records {
        /// The most records that the store may have.
        most: usize,
    },
}

impl StoreError for MemoryError {
    fn kind(&self) -> ErrorKind {
        match self {
            Self::Refused(refusal) => refusal.kind(),
            Self::Full { .. } | Self::Entries { .. } | Self::Records { .. } => {
                ErrorKind::Unavailable
            }
        }
    }
}
