//! How a [`Lockout`] is built, read and written.

use alloc::format;
use core::fmt;
use core::str::FromStr;
use core::time::Duration;

use super::Lockout;
use crate::builder::WriteNumbers;
use crate::error::ConfigError;
use crate::rate::{Period, Rate, period_us, whole_number};
use crate::timestamp::MAX_INTEGER;

const DAY: Duration = Duration::from_secs(86_400);

/// A [`Lockout`] that is still to be built.
///
/// Numbers are checked by [`build`](Self::build), not before.
/// [`Limits::builder`](crate::Limits::builder) takes the builder as it is and builds it.
///
/// ```
/// use core::time::Duration;
/// use ratelimit_core::Lockout;
///
/// let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
/// let equal = Lockout::new("5/15m".parse()?, minutes(15)).build()?;
/// assert_eq!(equal, "5/15m block 15m".parse()?);
///
/// let growing = Lockout::new("5/15m".parse()?, minutes(15)).factor(2).build()?;
/// assert_eq!(growing, "5/15m block 15m factor 2 longest 1d forget 7d".parse()?);
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder limits nothing: finish with `build()`, or give it to `Limits::builder()`"]
pub struct LockoutBuilder {
    rate: Rate,
    block: Duration,
    factor: Option<u64>,
    longest: Option<Duration>,
    forget: Option<Duration>,
}

impl Lockout {
    /// The count of the rate per window of the rate's period blocks a key for this long; to be
    /// finished with [`build`](LockoutBuilder::build).
    #[allow(clippy::new_ret_no_self, reason = "as `per` of the other algorithms, to be built")]
    pub const fn new(rate: Rate, block: Duration) -> LockoutBuilder {
        LockoutBuilder { rate, block, factor: None, longest: None, forget: None }
    }
}

impl LockoutBuilder {
    /// Each further block is so many times as long as the one before. 1 by default: all are equal.
    pub const fn factor(mut self, factor: u64) -> Self {
        self.factor = Some(factor);
        self
    }

    /// The longest block, for a factor above 1. A day by default, or the first block if that is
    /// longer.
    pub const fn longest(mut self, longest: Duration) -> Self {
        self.longest = Some(longest);
        self
    }

    /// How long without a charge blocks are remembered, for a factor above 1. Seven days by
    /// default.
    pub const fn forget(mut self, forget: Duration) -> Self {
        self.forget = Some(forget);
        self
    }

    /// The algorithm.
    ///
    /// # Errors
    /// A length of 0, or with a fraction of a microsecond; a factor of 0; a longest block that is
    /// shorter than the first; a longest block and a time to forget it that together are 2^52
    /// microseconds or more; either of them with a factor of 1.
    pub fn build(self) -> Result<Lockout, ConfigError> {
        let Self { rate, block, factor, longest, forget } = self;
        let (block_us, factor) = (length_us("block", block)?, factor.unwrap_or(1));
        let (limit, window_us) = (rate.count(), rate.period_us());
        if factor == 0 {
            return Err(ConfigError::new(
                "a factor of 0 blocks once and never again; write at least 1, which makes all blocks \
                 equal",
            ));
        }
        if factor == 1 {
            let without = [("longest", longest), ("forget", forget)];
            if let Some((name, _)) = without.into_iter().find(|(_, given)| given.is_some()) {
                return Err(ConfigError::new(format!(
                    "{name} has no meaning if all blocks are equal; leave it out, or write a factor \
                     of at least 2"
                )));
            }
            let (longest_us, forget_us) = (block_us, 0);
            return Ok(Lockout { limit, window_us, block_us, factor, longest_us, forget_us });
        }
        let longest_us = length_us("longest", longest.unwrap_or(DAY.max(block)))?;
        let forget_us = length_us("forget", forget.unwrap_or(DAY * 7))?;
        let [first, most] = [block_us, longest_us].map(|us| Period { us, times_one: true });
        if longest_us < block_us {
            return Err(ConfigError::new(format!(
                "the longest block, {most}, is shorter than the first, {first}; write at least {first}"
            )));
        }
        if factor > MAX_INTEGER || longest_us + forget_us > MAX_INTEGER {
            return Err(ConfigError::new(format!(
                "a factor of {factor}, and a block of {most} that is remembered, need integers above \
                 2^52; choose smaller ones"
            )));
        }
        Ok(Lockout { limit, window_us, block_us, factor, longest_us, forget_us })
    }
}

/// A length in whole microseconds.
fn length_us(name: &str, length: Duration) -> Result<u64, ConfigError> {
    let us = u64::try_from(length.as_micros()).unwrap_or(u64::MAX);
    let is_whole = length.subsec_nanos().is_multiple_of(1_000);
    Some(us).filter(|us| is_whole && (1..=MAX_INTEGER).contains(us)).ok_or_else(|| {
        ConfigError::new(format!(
            "{name} is {length:?}; choose a whole number of microseconds, at least 1 and below 2^52"
        ))
    })
}

impl TryFrom<LockoutBuilder> for Lockout {
    type Error = ConfigError;

    fn try_from(builder: LockoutBuilder) -> Result<Self, ConfigError> {
        builder.build()
    }
}

impl FromStr for Lockout {
    type Err = ConfigError;

    /// Reads `5/15m block 15m`, and behind it any of `factor 2`, `longest 1d` and `forget 7d`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let refuse = || {
            ConfigError::new(format!(
                "{text:?} is not a lockout; write \"5/15m block 15m\", or \"5/15m block 15m factor 2 \
                 longest 1d forget 7d\""
            ))
        };
        let (rate, lengths) = text.split_once(" block ").ok_or_else(refuse)?;
        let mut words = lengths.split_ascii_whitespace();
        let length = |text: &str| period_us(text).map(Duration::from_micros);
        let mut builder = Self::new(rate.parse()?, length(words.next().ok_or_else(refuse)?)?);
        while let Some(name) = words.next() {
            let value = words.next().ok_or_else(refuse)?;
            let LockoutBuilder { factor, longest, forget, .. } = &builder;
            builder = match name {
                "factor" if factor.is_none() => {
                    builder.factor(whole_number(value).ok_or_else(refuse)?)
                }
                "longest" if longest.is_none() => builder.longest(length(value)?),
                "forget" if forget.is_none() => builder.forget(length(value)?),
                _ => return Err(refuse()),
            };
        }
        builder.build()
    }
}

impl WriteNumbers for Lockout {
    fn write_numbers(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let length = |us| Period { us, times_one: true };
        let rate = Rate::of_built(self.limit, self.window_us);
        write!(f, " {rate} block {}", length(self.block_us))?;
        if self.factor == 1 {
            return Ok(());
        }
        let [longest, forget] = [self.longest_us, self.forget_us].map(length);
        write!(f, " factor {} longest {longest} forget {forget}", self.factor)
    }
}
