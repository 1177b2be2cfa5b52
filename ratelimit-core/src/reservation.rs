//! [`Reservation`]: a charge under an id, which is made once and can be settled later.
//!
//! A request with a [`ReservationId`] leaves a reservation beside the state that it charges. Under
//! a [`Concurrency`](crate::Concurrency) limit the reservation is a lease. It distinguishes a first
//! call from a repeated one, so a client can safely repeat every operation that carries an id (an
//! idempotency key).
//!
//! An id that a layer drew is settled once. Its record is forgotten ten seconds after the
//! settlement, and a full store in memory charges without a record: refusing would let the
//! reservations of one caller refuse all others.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;

use crate::timestamp::Timestamp;

#[cfg(feature = "std")]
mod random;

/// The id of a reservation, chosen by the caller: unique per key while the reservation lives.
///
/// ```
/// use ratelimit_core::ReservationId;
/// let id = ReservationId::new(0x2a);
/// assert_eq!(id.to_string(), "0000000000000000000000000000002a");
/// assert_eq!("0000000000000000000000000000002a".parse(), Ok(id));
/// # #[cfg(feature = "std")]
/// assert_ne!(ReservationId::random(), ReservationId::random());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ReservationId(u128);

impl ReservationId {
    /// The id of these 128 bits, such as those of a UUID.
    #[must_use]
    pub const fn new(id: u128) -> Self {
        Self(id)
    }

    /// The id as a number.
    #[must_use]
    pub const fn as_u128(self) -> u128 {
        self.0
    }
}

impl fmt::Display for ReservationId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl core::str::FromStr for ReservationId {
    type Err = core::num::ParseIntError;

    /// Reads up to 32 hexadecimal digits.
    fn from_str(digits: &str) -> Result<Self, Self::Err> {
        u128::from_str_radix(digits, 16).map(Self)
    }
}

/// The batch of a reservation, if it has several checks: they are settled together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservationGroup {
    /// The names of the batch's limits, separated by commas, in the order of the batch.
    pub limits: Box<str>,
    /// The store's hash of the limits and keys of the batch.
    pub fingerprint: u64,
}

/// What a store keeps of a reservation or a lease.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// When its newest charge counts as made. Renewing a lease moves this time; renewing any other
    /// reservation does not. In a settled reservation that is forgotten [early](Self::settled_at),
    /// when it is forgotten: later than `since`.
    pub timestamp: Timestamp,
    /// The charge: of an extended reservation the sum of its charges.
    pub cost: u64,
    /// The part of the cost that counted at `timestamp`: what a settlement can give back. All of
    /// it, until an extension finds that some of what was charged before has been paid back. 0 once
    /// it is settled.
    pub counts: u64,
    /// What that part is in the terms of the state, so that it is not worth more once the limit's
    /// numbers have changed. The algorithm [records](crate::Algorithm::record) them, each below
    /// 2^53; all 0 if it needs none, or if the charge was made under the numbers of the limit that
    /// settles it.
    pub terms: [u64; 3],
    /// The cost at which it was settled, if it was. A settled reservation does not change.
    pub settled: Option<u64>,
    /// When it was charged, extended or renewed last, or settled to be forgotten early: it lives
    /// from then.
    pub since: Timestamp,
    /// The batch that it was charged in; `None` for a single check.
    pub group: Option<Arc<ReservationGroup>>,
}

impl Reservation {
    /// An unsettled reservation of a single check: `cost`, charged at `timestamp`.
    #[must_use]
    pub const fn new(timestamp: Timestamp, cost: u64) -> Self {
        let (counts, terms) = (cost, [0; 3]);
        Self { timestamp, cost, counts, terms, settled: None, since: timestamp, group: None }
    }

    /// How long a reservation can be settled, and how long a store remembers an operation with an
    /// id: one hour, in microseconds.
    pub const LIFE_US: u64 = 3_600_000_000;

    /// How long a store remembers a settlement under an id that is [settled
    /// once](crate::store::Batch::settled_once): ten seconds, in microseconds. A settlement that is
    /// sent twice has come twice by then.
    pub const REPEAT_US: u64 = 10_000_000;

    /// This reservation, which lives for `life_us` microseconds, settled at `cost`. One that is
    /// settled `once` is forgotten after [`REPEAT_US`](Self::REPEAT_US), if it does not end
    /// earlier.
    #[must_use]
    pub fn settled_at(mut self, cost: u64, now: Timestamp, life_us: u64, once: bool) -> Self {
        if once {
            self.timestamp = self.ends(life_us).min(now.saturating_add_us(Self::REPEAT_US));
            self.since = now;
        }
        (self.settled, self.counts, self.terms) = (Some(cost), 0, [0; 3]);
        self
    }

    const fn ends_us(&self, life_us: u64) -> u64 {
        let (at_us, since_us) = (self.timestamp.as_us(), self.since.as_us());
        let is_forgotten_early = self.settled.is_some() && at_us > since_us;
        if is_forgotten_early { at_us } else { since_us.saturating_add(life_us) }
    }

    /// When a store forgets it, if it lives for `life_us` microseconds.
    #[must_use]
    pub const fn ends(&self, life_us: u64) -> Timestamp {
        Timestamp::saturating_from_us(self.ends_us(life_us))
    }

    /// Whether a store still knows it at `now`, if it lives for `life_us` microseconds.
    #[must_use]
    pub const fn is_live(&self, now: Timestamp, life_us: u64) -> bool {
        now.as_us() < self.ends_us(life_us)
    }
}
