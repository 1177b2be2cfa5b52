//! [`Refusal`]: a request that cannot be, whatever is stored.

use alloc::string::String;
use core::fmt;

use crate::error::ErrorKind;
use crate::op::Op;
use crate::reservation::ReservationId;

/// Why a request was not decided at all. Nothing was charged.
///
/// The message names the limit and the remedy, and is the same on every backend.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// No limit applies to the request: it has other identifiers than the limits are kept for. A limiter that
    /// [allows it](crate::RateLimiter::allow_unlimited) admits such a request.
    NoLimitApplies {
        /// What the request has, such as `identifier "IP"`.
        had: String,
        /// What the limits are kept for, such as `limit "burst" wants "ip"`.
        wanted: String,
    },
    /// The request lacks an identifier of a [required](crate::Limit::required) limit.
    MissingIdentifier {
        /// The limit's name.
        limit: String,
        /// What the request has, such as `identifier "user"`.
        had: String,
        /// What the limit is kept for, such as `"ip"`.
        wanted: String,
    },
    /// The algorithm of a limit has no such operation.
    Unsupported {
        /// The limit's name.
        limit: String,
        /// What was to be done.
        op: Op,
    },
    /// What is charged by the algorithm of a limit cannot be held to be settled later.
    CannotReserve {
        /// The limit's name.
        limit: String,
    },
    /// A hold of nothing.
    HoldsNothing {
        /// The limit's name.
        limit: String,
    },
    /// What is to be settled or renewed has no id.
    NoId {
        /// What was to be done.
        op: Op,
    },
    /// More bytes about the caller than a limit keeps.
    Metadata {
        /// The limit's name.
        limit: String,
        /// How many were given.
        bytes: usize,
        /// How many are kept at most.
        most: usize,
    },
    /// Nothing is held under the id for these identifiers: it never was, its time is over, or others were reserved.
    UnknownReservation {
        /// The id.
        id: ReservationId,
    },
    /// What was held under the id has been settled, and at another cost.
    Settled {
        /// The limit's name.
        limit: String,
        /// The id.
        id: ReservationId,
        /// The cost at which it was settled.
        at: u64,
    },
    /// Something is held under the id, and at another cost.
    Held {
        /// The limit's name.
        limit: String,
        /// The id.
        id: ReservationId,
        /// The cost that is held.
        at: u64,
    },
    /// The charge under the id was made together with others: the request names other limits or keys.
    OtherChecks {
        /// The limit's name.
        limit: String,
        /// The id.
        id: ReservationId,
        /// The names of the limits that were charged under the id, with commas in between.
        reserved: String,
    },
    /// The id is that of a charge which waits to be settled.
    Pending {
        /// The limit's name.
        limit: String,
        /// The id.
        id: ReservationId,
    },
}

impl Refusal {
    /// What kind of trouble it is, for a store's error to tell.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Unsupported { .. } | Self::CannotReserve { .. } => ErrorKind::Unsupported,
            _ => ErrorKind::Invalid,
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLimitApplies { had, wanted } => write!(
                f,
                "no limit applies to the request, which has {had}: {wanted}; name the identifiers as the limits \
                 do, or build the limiter with allow_unlimited() to admit such requests"
            ),
            Self::MissingIdentifier { limit, had, wanted } => write!(
                f,
                "limit {limit:?} is required and wants {wanted}; the request has {had}; add what is missing"
            ),
            Self::Unsupported { limit, op } => {
                write!(f, "limit {limit:?}: its algorithm has no {op}")
            }
            Self::CannotReserve { limit } => write!(
                f,
                "limit {limit:?}: what its algorithm charges cannot be held; use gcra, token-bucket, \
                 fixed-window or concurrency, and count what is admitted"
            ),
            Self::HoldsNothing { limit } => {
                write!(f, "limit {limit:?}: a cost of 0 holds nothing; hold at least 1")
            }
            Self::NoId { op } => write!(f, "a {op} needs the id that the charge is held under"),
            Self::Metadata { limit, bytes, most } => write!(
                f,
                "limit {limit:?}: {bytes} bytes of metadata are more than the {most} that it keeps of \
                 a request; shorten them"
            ),
            Self::UnknownReservation { id } => write!(
                f,
                "nothing is held under {id} for these identifiers: it never was, its time is over, or others \
                 were reserved"
            ),
            Self::Settled { limit, id, at } => write!(
                f,
                "limit {limit:?}: what was held under {id} has been settled at {at}, and stays so"
            ),
            Self::Held { limit, id, at } => write!(
                f,
                "limit {limit:?}: a cost of {at} is held under {id} already; to charge another, take \
                 another id"
            ),
            Self::OtherChecks { limit, id, reserved } => write!(
                f,
                "limit {limit:?}: its charge under {id} was made in one batch of the limits {reserved}; name the \
                 same limits and identifiers as then"
            ),
            Self::Pending { limit, id } => write!(
                f,
                "limit {limit:?}: {id} is the id of a charge that waits to be settled; take another"
            ),
        }
    }
}

impl core::error::Error for Refusal {}
