//! [`AlgorithmBuilder`]: an algorithm from a rate in one expression, and from text.

use alloc::format;
use alloc::vec::Vec;
use core::convert::Infallible;
use core::marker::PhantomData;
use core::str::FromStr;
use core::time::Duration;

use crate::algorithms::{
    Algorithm, BucketedWindow, Concurrency, FirstRequestWindow, FixedWindow, Gcra, SlidingCounter,
    SlidingLog, WindowLog,
};
use crate::error::ConfigError;
use crate::rate::{Rate, period_us, whole_number};

/// A built-in algorithm that is still to be built: `Gcra::per_second(10).burst(20)`.
///
/// Numbers are checked by [`build`](Self::build), not before: no step of the chain panics, and only
/// the last one returns a `Result`. [`Limits::builder`](crate::Limits::builder) takes the builder
/// as it is and builds it.
///
/// ```
/// use ratelimit_core::{FixedWindow, Gcra, TokenBucket};
///
/// let gcra = Gcra::per_second(10).burst(20).build()?;
/// assert_eq!(gcra, "10/s burst 20".parse()?);
///
/// // Without a burst, a bucket holds the number of its rate.
/// assert_eq!(TokenBucket::per_minute(5).build()?, "5/m burst 5".parse()?);
///
/// assert_eq!(FixedWindow::per_day(5_000).build()?, "5000/d".parse()?);
///
/// // A number that no limit can have is an error.
/// assert!(Gcra::per_second(0).build().is_err());
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder limits nothing: finish with `build()`, or give it to `Limits::builder()`"]
pub struct AlgorithmBuilder<A> {
    rate: Result<Rate, ConfigError>,
    burst: Option<u64>,
    debt: Option<u64>,
    algorithm: PhantomData<A>,
}

impl<A> AlgorithmBuilder<A> {
    pub(crate) const fn new(rate: Result<Rate, ConfigError>) -> Self {
        Self { rate, burst: None, debt: None, algorithm: PhantomData }
    }
}

impl<A: FromRate> AlgorithmBuilder<A> {
    /// The algorithm.
    ///
    /// # Errors
    /// A count, period or burst of 0, or one that the algorithm does not accept: see its `new`.
    pub fn build(self) -> Result<A, ConfigError> {
        A::from_rate(self.rate?, self.burst, self.debt)
    }
}

impl AlgorithmBuilder<Gcra> {
    /// The most that is admitted at one moment, at least 1; the number of the rate by default.
    pub const fn burst(mut self, burst: u64) -> Self {
        self.burst = Some(burst);
        self
    }
}

impl<A: Owing> AlgorithmBuilder<A> {
    /// The most that may be owed beyond the burst or the limit; nothing by default. See
    /// [`Algorithm::debt`](crate::Algorithm::debt).
    pub const fn debt(mut self, debt: u64) -> Self {
        self.debt = Some(debt);
        self
    }
}

/// An algorithm with which a [debt](AlgorithmBuilder::debt) has a meaning.
pub trait Owing {}
impl Owing for Gcra {}
impl Owing for FixedWindow {}

/// A built-in algorithm that one rate describes, with a burst and a debt where it has them.
pub trait FromRate: Algorithm + Sized {
    /// The algorithm.
    ///
    /// # Errors
    /// A number that the algorithm does not accept, or a burst or a debt where it has none.
    fn from_rate(rate: Rate, burst: Option<u64>, debt: Option<u64>) -> Result<Self, ConfigError>;

    /// The rate; of a bucket in its shortest form.
    fn to_rate(&self) -> Rate {
        Rate::of_built(self.capacity(), self.span_us())
    }

    /// The burst, where it has one.
    fn to_burst(&self) -> Option<u64> {
        None
    }

    /// The window or the lease, or the time of a bucket from empty to full, in microseconds.
    fn span_us(&self) -> u64;
}

impl FromRate for Gcra {
    fn from_rate(rate: Rate, burst: Option<u64>, debt: Option<u64>) -> Result<Self, ConfigError> {
        Self::with_debt(rate, burst.unwrap_or(rate.count()), debt.unwrap_or_default())
    }

    fn to_rate(&self) -> Rate {
        self.refill().rate()
    }

    fn to_burst(&self) -> Option<u64> {
        Some(self.refill().burst)
    }

    fn span_us(&self) -> u64 {
        self.refill().full_us()
    }
}

macro_rules! from_text {
    ($($algorithm:ident),+) => { $(
        impl FromStr for $algorithm {
            type Err = ConfigError;

            /// Reads a rate such as `10/s`, followed by ` burst 20` and ` debt 5` where the
            /// algorithm has them.
            fn from_str(text: &str) -> Result<Self, ConfigError> {
                let (text, debt) = split_number(text, "debt", 0)?;
                let (rate, burst) = split_number(text, "burst", 1)?;
                Self::from_rate(rate.parse()?, burst, debt)
            }
        }

    )+ };
}

from_text!(Gcra);

macro_rules! windows {
    ($($window:ident = $name:literal by $span_us:ident $(owing $with_debt:ident)?),+ $(,)?) => {
        from_text!($($window),+);
        $(
        impl FromRate for $window {
            fn from_rate(
                rate: Rate,
                burst: Option<u64>,
                debt: Option<u64>,
            ) -> Result<Self, ConfigError> {
                match (burst, debt) {
                    (None, None) => Self::new(rate),
                    $( (None, Some(debt)) => Self::$with_debt(rate, debt), )?
                    #[allow(unreachable_patterns, reason = "reached by windows without a debt")]
                    (None, Some(_)) => Err(ConfigError::new(concat!(
                        "debt has no meaning for ", $name, "; leave it out, or use gcra, token-bucket or fixed-window"
                    ))),
                    (Some(_), _) => Err(ConfigError::new(concat!(
                        "burst has no meaning for ", $name, "; leave it out, or use gcra or token-bucket"
                    ))),
                }
            }

            fn span_us(&self) -> u64 {
                self.$span_us()
            }
        }
        )+
    };
}

windows! {
    FixedWindow = "fixed-window" by window_us owing with_debt,
    FirstRequestWindow = "first-request-window" by window_us,
    WindowLog = "window-log" by window_us,
    SlidingCounter = "sliding-counter" by window_us,
    SlidingLog = "sliding-log" by window_us,
    Concurrency = "concurrency" by lease_us,
}

/// `per_second` and its like, for algorithms whose number is a rate.
macro_rules! per {
    ($($algorithm:ident),+) => { $(
        impl $algorithm {
            per! { @
                /// `count` per second, to be finished with [`build`](AlgorithmBuilder::build).
                per_second 1
                /// `count` per minute, to be finished with [`build`](AlgorithmBuilder::build).
                per_minute 60
                /// `count` per hour, to be finished with [`build`](AlgorithmBuilder::build).
                per_hour 3_600
                /// `count` per day of 24 hours, to be finished with
                /// [`build`](AlgorithmBuilder::build).
                per_day 86_400
            }

            /// `count` per `period`, a whole number of microseconds, to be finished with
            /// [`build`](AlgorithmBuilder::build).
            pub fn per(count: u64, period: Duration) -> AlgorithmBuilder<Self> {
                AlgorithmBuilder::new(Rate::new(count, period))
            }
        }
    )+ };
    (@ $( $(#[$doc:meta])+ $per:ident $seconds:literal )+) => { $(
        $(#[$doc])+
        pub fn $per(count: u64) -> AlgorithmBuilder<Self> {
            Self::per(count, Duration::from_secs($seconds))
        }
    )+ };
}

per!(Gcra, FixedWindow, FirstRequestWindow, WindowLog, SlidingCounter, SlidingLog);

impl Concurrency {
    /// `count` at the same time, each for at most `lease`, to be finished with
    /// [`build`](AlgorithmBuilder::build).
    ///
    /// ```
    /// use core::time::Duration;
    /// use ratelimit_core::Concurrency;
    ///
    /// let downloads = Concurrency::at_once(20, Duration::from_secs(30)).build()?;
    /// assert_eq!(downloads, "20/30s".parse()?);
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    pub fn at_once(count: u64, lease: Duration) -> AlgorithmBuilder<Self> {
        AlgorithmBuilder::new(Rate::new(count, lease))
    }
}

/// The text before a number under this name, and the number if it is there: ` burst 20` of `10/s
/// burst 20`.
fn split_number<'t>(
    text: &'t str,
    name: &str,
    least: u64,
) -> Result<(&'t str, Option<u64>), ConfigError> {
    let split = text
        .split_once(name)
        .filter(|(before, after)| before.ends_with(' ') && after.starts_with(' '));
    let Some((before, digits)) = split else { return Ok((text, None)) };
    let digits = digits.trim();
    let number = whole_number(digits).ok_or_else(|| {
        ConfigError::new(format!(
            "{name} is {digits:?}; write a whole number of at least {least}, such as \"10/s {name} 20\""
        ))
    })?;
    Ok((before, Some(number)))
}

impl FromStr for BucketedWindow {
    type Err = ConfigError;

    /// Reads `bucket 1s rates 1000/1s, 5000/10s`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let words = text.trim().strip_prefix("bucket ").and_then(|rest| rest.split_once(" rates "));
        let (bucket, rates) = words.ok_or_else(|| {
            ConfigError::new(format!(
                "{text:?} is not a bucketed window; write \"bucket 1s rates 1000/1s, 5000/10s\""
            ))
        })?;
        let rates = rates.split(',').map(str::parse).collect::<Result<Vec<Rate>, _>>()?;
        Self::new(period_us(bucket)?, &rates)
    }
}

/// What needs no building is an algorithm already: see
/// [`LimitsBuilder::limit`](crate::LimitsBuilder::limit).
impl From<Infallible> for ConfigError {
    fn from(never: Infallible) -> Self {
        match never {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenBucket;
    use alloc::string::ToString;

    #[test]
    fn zero_and_out_of_range_numbers_are_errors_that_say_what_to_write() {
        let message = |error: ConfigError| error.to_string();
        let refused = [
            (Gcra::per_second(0).build().map(drop), "a rate of 0"),
            (Gcra::per_second(1).burst(0).build().map(drop), "burst of 0"),
            (Gcra::per_day(u64::MAX).build().map(drop), "2^52"),
            (TokenBucket::per(1, Duration::ZERO).build().map(drop), "per 0 time"),
            (FixedWindow::per(1, Duration::from_secs(u64::MAX)).build().map(drop), "2^52"),
            (FixedWindow::per(1, Duration::from_nanos(1)).build().map(drop), "whole microseconds"),
            (WindowLog::per_hour(10_001).build().map(drop), "10000"),
            (Concurrency::at_once(0, Duration::from_secs(1)).build().map(drop), "a rate of 0"),
            ("10/s burst".parse::<Gcra>().map(drop), "\"10/s\""),
            ("10/s burst 0".parse::<Gcra>().map(drop), "burst of 0"),
            ("10/s burst +2".parse::<Gcra>().map(drop), "\"10/s burst 20\""),
            ("10/s burst 2 3".parse::<Gcra>().map(drop), "\"10/s burst 20\""),
            ("10/s bursts 2".parse::<Gcra>().map(drop), "\"10/s\""),
            ("3/2251799813685248us".parse::<SlidingCounter>().map(drop), "sliding-log"),
            ("10/s burst 20".parse::<FixedWindow>().map(drop), "no meaning for fixed-window"),
            ("1s 5/s".parse::<BucketedWindow>().map(drop), "bucket 1s rates"),
        ];
        for (refused, says) in refused {
            let text = refused.map_err(message).expect_err(says);
            assert!(text.contains(says), "{text:?} lacks {says:?}");
        }
        assert!("3/2251799813685247us".parse::<SlidingCounter>().is_ok(), "the longest window");
    }
}
