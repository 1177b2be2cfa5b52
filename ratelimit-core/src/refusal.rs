//! [`Refusal`]: a request that no state could satisfy.

use alloc::format;
use alloc::string::String;

use crate::error::ErrorKind;
use crate::op::Op;
use crate::reservation::ReservationId;

/// Why a request was not decided. Nothing was charged.
///
/// The message names the limit and the remedy, and is the same on every backend.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// No limit applies to the request: it lacks the identifiers of every limit, or does not meet
    /// its [conditions](crate::Limit::when). A limiter that
    /// [allows unlimited requests](crate::RateLimiter::allow_unlimited) admits it.
    #[error(
        "no limit applies to the request, which has {had}: {wanted}; name the identifiers as the limits \
         do, or build the limiter with allow_unlimited() to admit such requests"
    )]
    NoLimitApplies {
        /// The identifiers of the request, such as `identifier "IP"`.
        had: String,
        /// The identifiers and conditions of the limits, such as `limit "burst" wants "ip" when
        /// method = "POST"`.
        wanted: String,
    },
    /// The request lacks an identifier of a [required](crate::Limit::required) limit, or of the
    /// limit of its record.
    #[error("limit {limit:?} wants {wanted}; the request has {had}; add the missing identifier")]
    MissingIdentifier {
        /// The limit's name.
        limit: String,
        /// The identifiers of the request, such as `identifier "user"`.
        had: String,
        /// The identifiers of the limit, such as `"ip"`, and its conditions.
        wanted: String,
    },
    /// The request gives the [cost](crate::Request::costs) of a limit that the policy lacks, or a
    /// [record](crate::Record) is of one.
    #[error("no limit is named {name:?}; the limits are {limits}")]
    UnknownLimit {
        /// The name.
        name: String,
        /// The names of the limits.
        limits: String,
    },
    /// The request has [numbers](crate::Request::numbers) that a limit does not accept.
    #[error("limit {limit:?} does not accept the numbers of the request: {why}")]
    Numbers {
        /// The limit's name.
        limit: String,
        /// Why, and the remedy.
        why: &'static str,
    },
    /// A record of a caller that the limit does not take.
    #[error("limit {limit:?} does not take the record: {why}")]
    Record {
        /// The limit's name.
        limit: String,
        /// Why, and the remedy.
        why: &'static str,
    },
    /// A limit looks for records of its callers, and the store keeps none.
    #[error(
        "limit {limit:?} is overridable, and this store keeps no records; leave overridable out, or \
         take a store that does: in memory, or on Redis in the modes lua and cas"
    )]
    NoRecords {
        /// The limit's name.
        limit: String,
    },
    /// The algorithm of a limit has no such operation.
    #[error("limit {limit:?}: its algorithm has no {op}")]
    Unsupported {
        /// The limit's name.
        limit: String,
        /// The operation.
        op: Op,
    },
    /// The algorithm of a limit has no reservations.
    #[error(
        "limit {limit:?}: its algorithm has no reservations; use gcra, token-bucket, fixed-window or \
         concurrency, and count admitted requests"
    )]
    CannotReserve {
        /// The limit's name.
        limit: String,
    },
    /// A [lease](crate::Request::lease_now) under a limit that grants none: dropping it would give
    /// the charge back, and nothing would be limited.
    #[error(
        "limit {limit:?}: its algorithm grants no leases, and a charge that ends with a value limits nothing; \
         use check, reserve and settle, or the algorithm concurrency"
    )]
    GrantsNoLease {
        /// The limit's name.
        limit: String,
    },
    /// A reservation of cost 0.
    #[error("limit {limit:?}: a cost of 0 reserves nothing; reserve at least 1")]
    ReservesNothing {
        /// The limit's name.
        limit: String,
    },
    /// A request to settle, to renew or to reserve up to a cost has no id.
    #[error("{op} needs the id of the reservation; give the request one with id(…)")]
    NoId {
        /// The operation.
        op: Op,
    },
    /// The store's own clock is at the end of time, or past it: states written now would never
    /// count.
    #[error(
        "the store's clock says {now_us} µs since the Unix epoch, which is the year 2112 or later; set the \
         clock, which may count in another unit than microseconds"
    )]
    EndOfTime {
        /// The time of the clock, in microseconds since the Unix epoch; at most
        /// [`MAX_INTEGER`](crate::algorithm::MAX_INTEGER) where the clock is cut there.
        now_us: u64,
    },
    /// The metadata is longer than a limit keeps.
    #[error(
        "limit {limit:?}: {bytes} bytes of metadata are more than the {most} that it keeps of a request; \
         shorten them"
    )]
    Metadata {
        /// The limit's name.
        limit: String,
        /// The bytes of the metadata.
        bytes: usize,
        /// The most bytes that the limit keeps.
        most: usize,
    },
    /// The id has no reservation for these identifiers: it never had one, it has expired, or it is
    /// for others.
    #[error(
        "{}{id} has no reservation for these identifiers: it never had one, it has ended, or it is for \
         others; renew the next one before it ends (a lease within its length, any other within an hour)",
        limit.as_ref().map_or_else(String::new, |limit| format!("limit {limit:?}: "))
    )]
    UnknownReservation {
        /// The limit of the batch that has none: the first, or the first whose lease has ended.
        /// `None` of a batch without limits.
        limit: Option<String>,
        /// The id.
        id: ReservationId,
    },
    /// The reservation was settled at another cost.
    #[error("limit {limit:?}: the reservation {id} was settled at {at}, and no longer changes")]
    Settled {
        /// The limit's name.
        limit: String,
        /// The id.
        id: ReservationId,
        /// The cost at which it was settled.
        at: u64,
    },
    /// The id has a reservation of another cost.
    #[error(
        "limit {limit:?}: {id} already reserves a cost of {at}; to charge another cost, take another id"
    )]
    Reserved {
        /// The limit's name.
        limit: String,
        /// The id.
        id: ReservationId,
        /// The cost of the reservation.
        at: u64,
    },
    /// The reservation was made in a batch of other limits or keys.
    #[error(
        "limit {limit:?}: {id} was reserved in one batch of the limits {reserved}; name the same limits \
         and identifiers"
    )]
    OtherChecks {
        /// The limit's name.
        limit: String,
        /// The id.
        id: ReservationId,
        /// The names of the limits of that batch, separated by commas.
        reserved: String,
    },
    /// The id belongs to a reservation that is not settled.
    #[error(
        "limit {limit:?}: {id} is the id of a reservation that is not settled; take another id"
    )]
    Pending {
        /// The limit's name.
        limit: String,
        /// The id.
        id: ReservationId,
    },
}

impl Refusal {
    /// The name of the limit that it is about, if it is about one.
    #[must_use]
    pub fn limit(&self) -> Option<&str> {
        match self {
            Self::MissingIdentifier { limit, .. }
            | Self::Numbers { limit, .. }
            | Self::Record { limit, .. }
            | Self::NoRecords { limit }
            | Self::Unsupported { limit, .. }
            | Self::CannotReserve { limit }
            | Self::GrantsNoLease { limit }
            | Self::ReservesNothing { limit }
            | Self::Metadata { limit, .. }
            | Self::Settled { limit, .. }
            | Self::Reserved { limit, .. }
            | Self::OtherChecks { limit, .. }
            | Self::Pending { limit, .. } => Some(limit),
            Self::UnknownReservation { limit, .. } => limit.as_deref(),
            Self::NoLimitApplies { .. }
            | Self::UnknownLimit { .. }
            | Self::NoId { .. }
            | Self::EndOfTime { .. } => None,
        }
    }

    /// The kind of error, for a store's error type.
    #[must_use]
    pub const fn kind(&self) -> ErrorKind {
        match self {
            Self::Unsupported { .. }
            | Self::CannotReserve { .. }
            | Self::GrantsNoLease { .. }
            | Self::NoRecords { .. } => ErrorKind::Unsupported,
            Self::EndOfTime { .. } => ErrorKind::Config,
            Self::UnknownReservation { .. } => ErrorKind::Ended,
            Self::NoLimitApplies { .. }
            | Self::MissingIdentifier { .. }
            | Self::UnknownLimit { .. }
            | Self::Numbers { .. }
            | Self::Record { .. }
            | Self::ReservesNothing { .. }
            | Self::NoId { .. }
            | Self::Metadata { .. }
            | Self::Settled { .. }
            | Self::Reserved { .. }
            | Self::OtherChecks { .. }
            | Self::Pending { .. } => ErrorKind::Invalid,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A row per variant: the match in [`Refusal::kind`] does not compile without a new one, and
    /// its kind is said here.
    #[test]
    fn each_refusal_has_its_kind_and_names_the_limit_that_it_is_about() {
        let (limit, id) = (|| String::from("l7"), ReservationId::new(9));
        let text = String::from("a, b");
        let refusals = [
            (
                Refusal::NoLimitApplies { had: text.clone(), wanted: text.clone() },
                ErrorKind::Invalid,
                false,
            ),
            (
                Refusal::MissingIdentifier {
                    limit: limit(),
                    had: text.clone(),
                    wanted: text.clone(),
                },
                ErrorKind::Invalid,
                true,
            ),
            (
                Refusal::UnknownLimit { name: text.clone(), limits: text.clone() },
                ErrorKind::Invalid,
                false,
            ),
            (Refusal::Numbers { limit: limit(), why: "they are" }, ErrorKind::Invalid, true),
            (Refusal::Record { limit: limit(), why: "it is" }, ErrorKind::Invalid, true),
            (Refusal::NoRecords { limit: limit() }, ErrorKind::Unsupported, true),
            (Refusal::Unsupported { limit: limit(), op: Op::Force }, ErrorKind::Unsupported, true),
            (Refusal::CannotReserve { limit: limit() }, ErrorKind::Unsupported, true),
            (Refusal::GrantsNoLease { limit: limit() }, ErrorKind::Unsupported, true),
            (Refusal::ReservesNothing { limit: limit() }, ErrorKind::Invalid, true),
            (Refusal::NoId { op: Op::Settle }, ErrorKind::Invalid, false),
            (Refusal::EndOfTime { now_us: 1 }, ErrorKind::Config, false),
            (Refusal::Metadata { limit: limit(), bytes: 2, most: 1 }, ErrorKind::Invalid, true),
            (Refusal::UnknownReservation { limit: None, id }, ErrorKind::Ended, false),
            (Refusal::UnknownReservation { limit: Some(limit()), id }, ErrorKind::Ended, true),
            (Refusal::Settled { limit: limit(), id, at: 1 }, ErrorKind::Invalid, true),
            (Refusal::Reserved { limit: limit(), id, at: 1 }, ErrorKind::Invalid, true),
            (Refusal::OtherChecks { limit: limit(), id, reserved: text }, ErrorKind::Invalid, true),
            (Refusal::Pending { limit: limit(), id }, ErrorKind::Invalid, true),
        ];
        for (refusal, kind, is_about_one) in refusals {
            let said = alloc::string::ToString::to_string(&refusal);
            assert_eq!(refusal.kind(), kind, "{said}");
            assert!(!kind.is_outage(), "no refusal is an outage, and none has charged: {said}");
            assert_eq!(refusal.limit(), is_about_one.then_some("l7"), "{said}");
            assert_eq!(said.contains("limit \"l7\""), is_about_one, "{said}");
        }
    }
}
