//! [`Rate`], a count per period, and [`Refill`], the same rate in integers that stay exact.

use alloc::borrow::Cow;
use alloc::format;
use alloc::string::{String, ToString};
use core::fmt;
use core::num::NonZeroU64;
use core::str::FromStr;
use core::time::Duration;

use crate::error::ConfigError;
use crate::timestamp::MAX_INTEGER;

/// A count per period: `10/s`, `7/5m`, `1000/250ms`. A limit at a rate of 0 denies everything.
///
/// ```
/// use ratelimit_core::Rate;
/// let rate: Rate = "7/5m".parse()?;
/// assert_eq!((rate.count(), rate.period_us()), (7, 300_000_000));
/// assert_eq!(rate.to_string(), "7/5m");
/// assert!("10/0s".parse::<Rate>().is_err());
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rate {
    count: u64,
    period_us: NonZeroU64,
}

/// The units a period may have, longest first, and their length in microseconds.
const UNITS: [(&str, u64); 6] = [
    ("d", 86_400_000_000),
    ("h", 3_600_000_000),
    ("m", 60_000_000),
    ("s", 1_000_000),
    ("ms", 1_000),
    ("us", 1),
];

/// The units of a calendar, which have no one length: see `calendar.rs`.
pub(crate) const CALENDAR_UNITS: [&str; 4] = ["day", "week", "month", "year"];

const ACCEPTED: &str =
    "write a whole number per period, such as \"10/s\", \"7/5m\", \"1000/250ms\" or \"5000/d\"";

impl Rate {
    /// `count` per `period`, which is a whole number of microseconds.
    ///
    /// ```
    /// use core::time::Duration;
    /// use ratelimit_core::Rate;
    ///
    /// assert_eq!(Rate::new(1_000, Duration::from_millis(250))?, "1000/250ms".parse()?);
    /// assert!(Rate::new(10, Duration::ZERO).is_err());
    /// assert!(Rate::new(10, Duration::from_nanos(1_500)).is_err());
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// A period of 0, a count or period in microseconds above [`MAX_INTEGER`], or a period with a
    /// fraction of a microsecond, which would not be exact.
    pub fn new(count: u64, period: Duration) -> Result<Self, ConfigError> {
        if !period.subsec_nanos().is_multiple_of(1_000) {
            return Err(ConfigError::new(format!(
                "a rate per {period:?} is not exact; choose a period of whole microseconds"
            )));
        }
        // What passes 64 bits is above the largest accepted period, too.
        Self::per_us(count, u64::try_from(period.as_micros()).unwrap_or(u64::MAX))
    }

    /// `count` per `period_us` microseconds.
    ///
    /// # Errors
    /// A period of 0, or a count or period above [`MAX_INTEGER`].
    pub fn per_us(count: u64, period_us: u64) -> Result<Self, ConfigError> {
        match NonZeroU64::new(period_us) {
            None => Err(ConfigError::new(format!("a rate per 0 time has no meaning; {ACCEPTED}"))),
            Some(period_us) if count.max(period_us.get()) <= MAX_INTEGER => {
                Ok(Self { count, period_us })
            }
            Some(_) => Err(ConfigError::new(format!(
                "the rate's numbers must be below 2^52 ({MAX_INTEGER}), its period in microseconds"
            ))),
        }
    }

    /// The rate of numbers that an algorithm was built with, which are in range.
    pub(crate) fn of_built(count: u64, period_us: u64) -> Self {
        Self { count, period_us: NonZeroU64::new(period_us).unwrap_or(NonZeroU64::MIN) }
    }

    /// The count per period.
    #[must_use]
    pub const fn count(self) -> u64 {
        self.count
    }

    /// The period in microseconds.
    #[must_use]
    pub const fn period_us(self) -> u64 {
        self.period_us.get()
    }
}

impl FromStr for Rate {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let refuse = || ConfigError::new(format!("{text:?} is not a rate; {ACCEPTED}"));
        let (count, period) = text.trim().split_once('/').ok_or_else(refuse)?;
        if CALENDAR_UNITS.contains(&period.trim()) {
            return Err(ConfigError::new(format!(
                "{text:?} counts by the calendar, as only fixed-window does; use that, or write a length such as \
                 \"5000/d\" or \"1000/30d\""
            )));
        }
        let count = whole_number(count.trim()).ok_or_else(refuse)?;
        Self::per_us(count, parsed_period_us(period).ok_or_else(refuse)?)
    }
}

/// A length of time in text form, such as `1s`, `250ms` or `m`, in microseconds.
pub(crate) fn period_us(text: &str) -> Result<u64, ConfigError> {
    parsed_period_us(text).filter(|us| (1..=MAX_INTEGER).contains(us)).ok_or_else(|| {
        ConfigError::new(format!(
            "{text:?} is not a length of time; write one such as \"1s\", \"250ms\" or \"5m\""
        ))
    })
}

fn parsed_period_us(text: &str) -> Option<u64> {
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (times, unit) = text.split_at(digits);
    let (_, unit_us) = UNITS.iter().find(|(name, _)| *name == unit.trim())?;
    let times = if times.is_empty() { 1 } else { whole_number(times)? };
    Some(times.saturating_mul(*unit_us))
}

/// Digits only: `u64::from_str` would take a leading plus sign.
pub(crate) fn whole_number(digits: &str) -> Option<u64> {
    digits.bytes().all(|b| b.is_ascii_digit()).then(|| digits.parse().ok()).flatten()
}

impl fmt::Display for Rate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.count, Period { us: self.period_us(), times_one: false })
    }
}

impl Rate {
    /// The same rate in its shortest form: `1/100ms` as `10/s`. One of 0 keeps its period.
    fn shortest(self) -> Self {
        if self.count == 0 {
            return self;
        }
        let (mut shortest, mut letters) = (self, self.to_string().len());
        for (per, us) in UNITS.into_iter().rev().filter(|(_, us)| *us >= 1_000_000) {
            let whole = us.is_multiple_of(self.period_us());
            let count = self.count().checked_mul(us / self.period_us()).filter(|_| whole);
            let Some(same) = count.and_then(|count| Self::per_us(count, us).ok()) else { continue };
            let length = same.to_string().len();
            // On a tie the second is the most familiar.
            if length < letters || (length == letters && per == "s") {
                (shortest, letters) = (same, length);
            }
        }
        shortest
    }
}

/// A length of time in the largest unit of which it is a whole number.
pub(crate) struct Period {
    pub(crate) us: u64,
    /// Whether one unit is written `1s`, and not `s`.
    pub(crate) times_one: bool,
}

impl fmt::Display for Period {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let whole = |(_, unit_us): &&(&str, u64)| self.us.is_multiple_of(*unit_us);
        // Every period is a multiple of one microsecond, the last unit.
        let (name, unit_us) = UNITS.iter().find(whole).unwrap_or(&("us", 1));
        match self.us / unit_us {
            1 if !self.times_one => f.write_str(name),
            times => write!(f, "{times}{name}"),
        }
    }
}

/// The [kind](crate::Algorithm::state_kind) of an algorithm's states for windows of this length,
/// such as `fixed-window/1d`.
pub(crate) fn kind_of_window(algorithm: &str, us: u64) -> Cow<'static, str> {
    format!("{algorithm}/{}", Period { us, times_one: true }).into()
}

/// A rate and a burst in whole units: what [`Gcra`](crate::Gcra) computes with.
///
/// A rate of `n` tokens per `p` refill ticks is reduced to lowest terms. Then one token is `p`
/// units, and every refill tick adds `n` units: thirds and sevenths are exact. A refill tick is one
/// microsecond. Where the capacity in units would pass 2^52, it is a millisecond or a second. A
/// coarser tick adds the same units later, never earlier: if it would add more than a nearly full
/// bucket had room for meanwhile, the tick starts again with the charge.
///
/// ```
/// use ratelimit_core::algorithm::Refill;
///
/// let refill = Refill::new("7/5m".parse()?, 7)?; // seven units per tick; a token is 300,000,000 units
/// assert_eq!((refill.token_units, refill.tick_units, refill.tick_us), (300_000_000, 7, 1));
/// assert_eq!(refill.full_us(), 300_000_000); // from empty to full
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Refill {
    /// The capacity in tokens.
    pub burst: u64,
    /// The most that can be used at one moment, in tokens: the burst and what may be owed.
    pub most: u64,
    /// Units in one token: `p`.
    pub token_units: u64,
    /// Units that each refill tick adds: `n`.
    pub tick_units: u64,
    /// The length of a refill tick: 1, 1,000 or 1,000,000 µs.
    pub tick_us: u64,
}

impl Refill {
    /// The exact integers for this rate and burst.
    ///
    /// # Errors
    /// A burst of 0 at a rate above 0, a burst above 0 at a rate of 0, or numbers too large to stay
    /// exact even with refill ticks of a second.
    pub fn new(rate: Rate, burst: u64) -> Result<Self, ConfigError> {
        Self::with_debt(rate, burst, 0)
    }

    /// The exact integers for this rate and burst, if so many tokens may be owed.
    ///
    /// # Errors
    /// As [`new`](Self::new): burst and debt together must stay exact.
    pub fn with_debt(rate: Rate, burst: u64, debt: u64) -> Result<Self, ConfigError> {
        match (rate.count(), burst) {
            (0, 0) if debt == 0 => {}
            (0, 0) => return Err(beside_nothing("debt")),
            (0, _) => return Err(beside_nothing("burst")),
            (_, 0) => {
                return Err(ConfigError::new(
                    "a burst of 0 admits nothing; write at least 1, or leave it out for the rate's number; a \
                     rate of 0 denies everything",
                ));
            }
            _ => {}
        }
        // A bucket without room gains nothing. Its refill stands for the period alone.
        let count = rate.count().max(1);
        [1, 1_000, 1_000_000]
            .into_iter()
            .filter(|tick_us| rate.period_us().is_multiple_of(*tick_us))
            .map(|tick_us| {
                let ticks = rate.period_us() / tick_us;
                let divisor = gcd(count, ticks);
                let (token_units, tick_units) = (ticks / divisor, count / divisor);
                let most = burst.saturating_add(debt);
                Self { burst, most, token_units, tick_units, tick_us }
            })
            .find(Self::is_exact)
            .ok_or_else(|| {
                let (owing, smaller) = match debt {
                    0 => (String::new(), "burst"),
                    _ => (format!(" and a debt of {debt}"), "burst or debt"),
                };
                ConfigError::new(format!(
                    "a rate of {rate} with a burst of {burst}{owing} needs integers above 2^52; choose a smaller \
                     {smaller}, or a count and period with a common divisor"
                ))
            })
    }

    /// Whether every intermediate of a decision stays exact in a double.
    fn is_exact(&self) -> bool {
        let fits = |n: Option<u64>| n.is_some_and(|n| n <= MAX_INTEGER);
        let most = self.most.checked_mul(self.token_units);
        fits(most.and_then(|units| units.checked_add(self.tick_units)))
            && fits(most.and_then(|units| self.ticks_for(units).checked_mul(self.tick_us)))
    }

    /// The rate in its shortest form: `120/m` becomes `2/s`.
    #[must_use]
    pub fn rate(&self) -> Rate {
        let period_us = self.token_units.saturating_mul(self.tick_us);
        let count = if self.most == 0 { 0 } else { self.tick_units };
        Rate::of_built(count, period_us).shortest()
    }

    /// Whether it refills no faster than another. Below 2^53 each, the products are exact. What
    /// admits nothing is no faster than anything, whatever its time.
    pub(crate) fn is_at_most(&self, other: &Self) -> bool {
        if self.most == 0 {
            return true;
        }
        let token_us = |of: &Self| u128::from(of.token_units) * u128::from(of.tick_us);
        let work = |of: &Self, other: &Self| u128::from(of.tick_units) * token_us(other);
        work(self, other) <= work(other, self)
    }

    /// The capacity in units.
    #[must_use]
    pub const fn capacity_units(&self) -> u64 {
        self.burst * self.token_units
    }

    /// The most that can be used at one moment, in units.
    #[must_use]
    pub const fn most_units(&self) -> u64 {
        self.most * self.token_units
    }

    /// Microseconds from the deepest debt to full.
    #[must_use]
    pub const fn recovery_us(&self) -> u64 {
        self.ticks_for(self.most_units()) * self.tick_us
    }

    /// Microseconds from empty to full.
    #[must_use]
    pub const fn full_us(&self) -> u64 {
        self.ticks_for(self.capacity_units()) * self.tick_us
    }

    /// The number of refill ticks in which this many units refill.
    #[must_use]
    pub const fn ticks_for(&self, units: u64) -> u64 {
        // Most rates divide a second: then this is the most frequent division of all, by 1.
        if self.tick_units == 1 { units } else { units.div_ceil(self.tick_units) }
    }

    /// Whole refill ticks in so many microseconds, and whether there is a part of one more.
    pub(crate) const fn ticks_in(&self, us: u64) -> (u64, bool) {
        if self.tick_us == 1 {
            (us, false)
        } else {
            (us / self.tick_us, !us.is_multiple_of(self.tick_us))
        }
    }
}

/// The error of a burst or a debt at a rate of 0.
pub(crate) fn beside_nothing(field: &str) -> ConfigError {
    ConfigError::new(format!(
        "a rate of 0 denies everything, so a {field} beside it has no meaning; leave it out, or write a rate \
         of at least 1"
    ))
}

/// Euclid's greatest common divisor.
pub(crate) const fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read_as_they_are_written() {
        for (text, count, period_us) in [
            ("10/s", 10, 1_000_000),
            ("10/1s", 10, 1_000_000),
            ("1000/250ms", 1000, 250_000),
            ("7 / 5m", 7, 300_000_000),
            ("5000/d", 5000, 86_400_000_000),
            ("1/10us", 1, 10),
            ("0/s", 0, 1_000_000),
            ("0/7d", 0, 604_800_000_000),
        ] {
            let rate: Rate = text.parse().expect(text);
            assert_eq!((rate.count(), rate.period_us()), (count, period_us), "{text}");
            assert_eq!(rate.to_string().parse(), Ok(rate), "{text}");
        }
    }

    #[test]
    fn text_that_is_no_rate_is_refused_with_an_example() {
        let texts = " 10 10/ /s 0/0s 10/0s -1/s +1/s 1.5/s 10/y 9999999999999999999999/s";
        for text in texts.split(' ') {
            let error = text.parse::<Rate>().expect_err(text).to_string();
            assert!(error.contains("\"10/s\""), "{text}: {error}");
        }
        assert!("1/99999999999d".parse::<Rate>().is_err());
    }

    #[test]
    fn a_rate_too_fine_for_microseconds_refills_in_coarser_ticks() {
        let refill = |count, burst| Refill::new(Rate::per_us(count, 30 * 86_400_000_000)?, burst);
        assert_eq!(refill(1_000_003, 1_000).map(|r| r.tick_us), Ok(1));
        assert_eq!(refill(1_000_003, 1_000_003).map(|r| r.tick_us), Ok(1_000));
        assert_eq!(refill(1_000_000_007, 1_000_000_007).map(|r| r.tick_us), Ok(1_000_000));
        assert!(refill(1_000_000_007, MAX_INTEGER).is_err());
    }
}
