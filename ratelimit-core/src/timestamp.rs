//! Time as the algorithms see it: integer microseconds.

use core::fmt;
use core::time::Duration;

/// The largest integer an algorithm works with as a time, a capacity or a span: 2^52 − 1.
///
/// The sum of two such integers stays below 2^53, where a double (the only number type of Lua 5.1)
/// is still exact. So a script on Redis computes exactly what this crate computes.
pub const MAX_INTEGER: u64 = (1 << 52) - 1;

/// A moment: microseconds since the Unix epoch, at most [`Timestamp::MAX`] (the year 2112).
///
/// ```
/// use ratelimit_core::Timestamp;
/// let timestamp = Timestamp::from_us(1_500_000).expect("long before 2112");
/// assert_eq!(timestamp.as_us(), 1_500_000);
/// assert_eq!(Timestamp::from_us(u64::MAX), None);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Timestamp(u64);

impl Timestamp {
    /// The Unix epoch.
    pub const ZERO: Self = Self(0);
    /// The last moment an algorithm can compute with.
    pub const MAX: Self = Self(MAX_INTEGER);

    /// The moment `us` microseconds after the Unix epoch, or `None` past [`Timestamp::MAX`].
    #[must_use]
    pub const fn from_us(us: u64) -> Option<Self> {
        if us <= MAX_INTEGER { Some(Self(us)) } else { None }
    }

    /// The moment `us` microseconds after the Unix epoch, or [`Timestamp::MAX`] if that is earlier.
    ///
    /// For clocks, which must not fail.
    #[must_use]
    pub const fn saturating_from_us(us: u64) -> Self {
        if us <= MAX_INTEGER { Self(us) } else { Self::MAX }
    }

    /// Microseconds since the Unix epoch.
    #[must_use]
    pub const fn as_us(self) -> u64 {
        self.0
    }

    /// `us` microseconds after this moment, [`Timestamp::MAX`] at the latest.
    #[must_use]
    pub const fn saturating_add_us(self, us: u64) -> Self {
        Self::saturating_from_us(self.0.saturating_add(us))
    }

    /// This moment, counted from `earlier` instead of from the Unix epoch; `None` if that is later.
    #[must_use]
    pub const fn checked_since(self, earlier: Self) -> Option<Self> {
        match self.0.checked_sub(earlier.0) {
            Some(us) => Some(Self(us)),
            None => None,
        }
    }

    /// Microseconds from `earlier` to this moment; 0 if `earlier` is later.
    #[must_use]
    pub const fn saturating_us_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }

    /// The latest multiple of `us` microseconds since the Unix epoch that is not after this moment.
    pub(crate) const fn aligned(self, us: u64) -> Self {
        Self(self.0 - self.0 % us)
    }
}

impl core::ops::Add<Duration> for Timestamp {
    type Output = Self;

    /// The whole microseconds of `duration` after this moment, [`Timestamp::MAX`] at the latest.
    fn add(self, duration: Duration) -> Self {
        // `as_micros` would divide 128 bits at each reading of a clock.
        let whole_us = duration.as_secs().saturating_mul(1_000_000);
        self.saturating_add_us(whole_us.saturating_add(duration.subsec_micros().into()))
    }
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} µs", self.0)
    }
}
