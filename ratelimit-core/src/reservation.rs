//! [`Reservation`]: a charge with a name, so that it can be settled later, and done only once.
//!
//! A request that carries a [`ReservationId`] leaves a hold beside the state it charged: a lease of a
//! [`Concurrency`](crate::Concurrency) limit, or a reservation of any other that can be settled. The
//! hold tells a first call from a repeated one, and so makes every operation that carries an id one
//! that can be sent again.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::fmt;

use crate::timestamp::Timestamp;

#[cfg(feature = "std")]
mod random;

/// The name of a hold, chosen by whoever asks for it: unique for the key while the hold lives.
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
    /// This id, such as the 128 bits of a UUID.
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

/// The batch that a hold belongs to, if that has several checks: they are settled together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ReservationGroup {
    /// The names of the batch's limits, with commas in between, in the order of the batch.
    pub limits: Box<str>,
    /// A number of the store's that stands for the limits and keys of the batch.
    pub fingerprint: u64,
}

/// What is kept of a hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reservation {
    /// When what was charged counts as made: of a lease that was renewed, when it was so last. A reservation
    /// that is renewed lives longer, but its charge stays where it is in time.
    pub timestamp: Timestamp,
    /// What was charged.
    pub cost: u64,
    /// What it was settled at, once it has been. Then nothing of it changes any more.
    pub settled: Option<u64>,
    /// Since when it lives: when it was charged or renewed last.
    pub since: Timestamp,
    /// The batch that it was charged in; `None` if that is one check.
    pub group: Option<Arc<ReservationGroup>>,
}

impl Reservation {
    /// A charge of `cost` that counts as made at `timestamp`, by itself and not settled yet.
    #[must_use]
    pub const fn new(timestamp: Timestamp, cost: u64) -> Self {
        Self { timestamp, cost, settled: None, since: timestamp, group: None }
    }

    /// How long a reservation can be settled, and how long an operation with an id is known to have
    /// been done: an hour.
    pub const LIFE_US: u64 = 3_600_000_000;

    /// Whether it can still be settled, or told to have been, at `now`.
    #[must_use]
    pub const fn is_live(&self, now: Timestamp, life_us: u64) -> bool {
        now.saturating_us_since(self.since) < life_us
    }
}
