//! [`Hold`]: a charge with a name, so that it can be settled later, and done only once.
//!
//! A request that carries a [`HoldId`] leaves a hold beside the state it charged: a lease of a
//! [`Concurrency`](crate::Concurrency) limit, or a reservation of any other that can be settled. The
//! hold tells a first call from a repeated one, and so makes every operation that carries an id one
//! that can be sent again.

use core::fmt;

use crate::tick::Tick;

/// The name of a hold, chosen by whoever asks for it: unique for the key while the hold lives.
///
/// ```
/// use ratelimit_core::HoldId;
/// let id = HoldId::new(0x2a);
/// assert_eq!(id.to_string(), "0000000000000000000000000000002a");
/// assert_eq!("0000000000000000000000000000002a".parse(), Ok(id));
/// # #[cfg(feature = "std")]
/// assert_ne!(HoldId::random(), HoldId::random());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HoldId(u128);

impl HoldId {
    /// This id, such as the 128 bits of a UUID.
    #[must_use]
    pub const fn new(id: u128) -> Self {
        Self(id)
    }

    /// A new id, from the standard library's randomly seeded hasher: no two are alike, but
    /// somebody who has seen many may guess others.
    #[cfg(feature = "std")]
    #[must_use]
    pub fn random() -> Self {
        use core::hash::BuildHasher;
        use core::sync::atomic::{AtomicU64, Ordering};
        use std::collections::hash_map::RandomState;
        use std::sync::OnceLock;

        static SEED: OnceLock<RandomState> = OnceLock::new();
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let seed = SEED.get_or_init(RandomState::new);
        let next = NEXT.fetch_add(1, Ordering::Relaxed);
        let half = |which: u8| u128::from(seed.hash_one((next, which)));
        Self(half(0) << 64 | half(1))
    }

    /// The id as a number.
    #[must_use]
    pub const fn as_u128(self) -> u128 {
        self.0
    }
}

impl fmt::Display for HoldId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl core::str::FromStr for HoldId {
    type Err = core::num::ParseIntError;

    /// Reads up to 32 hexadecimal digits.
    fn from_str(digits: &str) -> Result<Self, Self::Err> {
        u128::from_str_radix(digits, 16).map(Self)
    }
}

/// What is kept of a hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hold {
    /// When what was charged counts as made: of a lease that was renewed, when it was so last. A reservation
    /// that is renewed lives longer, but its charge stays where it is in time.
    pub tick: Tick,
    /// What was charged.
    pub cost: u64,
    /// What it was settled at, once it has been. Then nothing of it changes any more.
    pub settled: Option<u64>,
    /// Since when it lives: when it was charged or renewed last.
    pub since: Tick,
}

impl Hold {
    /// How long a reservation can be settled, and how long an operation with an id is known to have
    /// been done: an hour.
    pub const LIFE_US: u64 = 3_600_000_000;

    /// Whether it can still be settled, or told to have been, at `now`.
    #[must_use]
    pub const fn is_live(&self, now: Tick, life_us: u64) -> bool {
        now.saturating_us_since(self.since) < life_us
    }
}
