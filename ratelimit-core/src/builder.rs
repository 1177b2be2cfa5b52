//! [`AlgorithmBuilder`]: an algorithm from a rate in one expression, and from text.

use alloc::format;
use core::convert::Infallible;
use core::fmt;
use core::marker::PhantomData;

use crate::algorithms::Algorithm;
use crate::error::{ConfigError, did_you_mean};
use crate::rate::{Rate, whole_number};

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
/// assert!(Gcra::per_second(10).burst(0).build().is_err());
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Debug)]
#[must_use = "a builder limits nothing: finish with `build()`, or give it to `Limits::builder()`"]
pub struct AlgorithmBuilder<A> {
    rate: Result<Rate, ConfigError>,
    pub(crate) burst: Option<u64>,
    pub(crate) debt: Option<u64>,
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
    /// A period or burst of 0, or a number that the algorithm does not accept: see its `new`.
    pub fn build(self) -> Result<A, ConfigError> {
        A::from_rate(self.rate?, self.burst, self.debt)
    }
}

/// Writes `debt` of the builder of an algorithm that has one.
macro_rules! owing {
    ($algorithm:ident) => {
        impl $crate::builder::AlgorithmBuilder<$algorithm> {
            /// The most that may be owed beyond the burst or the limit; nothing by default. See
            /// [`Algorithm::debt`](crate::Algorithm::debt).
            pub const fn debt(mut self, debt: u64) -> Self {
                self.debt = Some(debt);
                self
            }
        }
    };
}
pub(crate) use owing;

/// A built-in algorithm that one rate describes, with a burst and a debt where it has them.
pub trait FromRate: Algorithm + Sized {
    /// The algorithm.
    ///
    /// # Errors
    /// A number that the algorithm does not accept, or a burst or a debt where it has none.
    fn from_rate(rate: Rate, burst: Option<u64>, debt: Option<u64>) -> Result<Self, ConfigError>;

    /// The rate in this text, such as `10/s`.
    ///
    /// # Errors
    /// A text that is no rate. The message says what this algorithm needs.
    fn read_rate(text: &str) -> Result<Rate, ConfigError> {
        text.parse()
    }

    /// The rate; of a bucket in its shortest form.
    fn to_rate(&self) -> Rate {
        Rate::of_built(self.capacity(), self.span_us())
    }

    /// The burst, where it has one; none at a rate of 0.
    fn to_burst(&self) -> Option<u64> {
        None
    }

    /// The window or the lease, or the time of a bucket from empty to full, in microseconds.
    fn span_us(&self) -> u64;

    /// The same without a burst, with another count per window and another debt.
    ///
    /// # Errors
    /// A count or a debt that the algorithm does not accept.
    #[doc(hidden)]
    fn with_count(&self, count: u64, debt: Option<u64>) -> Result<Self, ConfigError> {
        Self::from_rate(Rate::per_us(count, self.to_rate().period_us())?, None, debt)
    }

    /// Writes the rate as the algorithm's `FromStr` reads it.
    #[doc(hidden)]
    fn write_rate(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.to_rate())
    }
}

/// The error for a burst of an algorithm that has none.
pub(crate) fn no_burst(algorithm: &str) -> ConfigError {
    ConfigError::new(format!(
        "burst has no meaning for {algorithm}; leave it out, or use gcra or token-bucket"
    ))
}

/// Writes the `FromStr` of an algorithm that is [`FromRate`].
macro_rules! from_text {
    ($algorithm:ident) => {
        impl core::str::FromStr for $algorithm {
            type Err = ConfigError;

            /// Reads a rate such as `10/s`, followed by ` burst 20` and ` debt 5` where the
            /// algorithm has them.
            fn from_str(text: &str) -> Result<Self, ConfigError> {
                let (text, debt) = $crate::builder::split_number(text, "debt", 0)?;
                let (rate, burst) = $crate::builder::split_number(text, "burst", 1)?;
                $crate::builder::knows_words(rate)?;
                let rate = <Self as $crate::builder::FromRate>::read_rate(rate)?;
                $crate::builder::FromRate::from_rate(rate, burst, debt)
            }
        }
    };
}
pub(crate) use from_text;

/// Writes [`FromRate`] and `FromStr` of an algorithm whose number is a rate, without a burst.
macro_rules! without_burst {
    ($window:ident = $name:literal by $span_us:ident $(reading $read_rate:ident)?) => {
        $crate::builder::from_text!($window);

        impl $crate::builder::FromRate for $window {
            fn from_rate(
                rate: Rate,
                burst: Option<u64>,
                debt: Option<u64>,
            ) -> Result<Self, ConfigError> {
                match (burst, debt) {
                    (None, None) => Self::new(rate),
                    (None, Some(_)) => Err(ConfigError::new(concat!(
                        "debt has no meaning for ",
                        $name,
                        "; leave it out, or use gcra, token-bucket or fixed-window"
                    ))),
                    (Some(_), _) => Err($crate::builder::no_burst($name)),
                }
            }

            $(
                fn read_rate(text: &str) -> Result<Rate, ConfigError> {
                    $read_rate(text)
                }
            )?

            fn span_us(&self) -> u64 {
                self.$span_us()
            }
        }
    };
}
pub(crate) use without_burst;

/// `per_second` and its like, for algorithms whose number is a rate.
macro_rules! per {
    ($algorithm:ident) => {
        impl $algorithm {
            $crate::builder::per! { @
                /// `count` per second, to be finished with
                /// [`build`](crate::algorithm::AlgorithmBuilder::build).
                per_second 1
                /// `count` per minute, to be finished with
                /// [`build`](crate::algorithm::AlgorithmBuilder::build).
                per_minute 60
                /// `count` per hour, to be finished with
                /// [`build`](crate::algorithm::AlgorithmBuilder::build).
                per_hour 3_600
                /// `count` per day of 24 hours, to be finished with
                /// [`build`](crate::algorithm::AlgorithmBuilder::build).
                per_day 86_400
            }

            /// `count` per `period`, a whole number of microseconds, to be finished with
            /// [`build`](crate::algorithm::AlgorithmBuilder::build).
            pub fn per(
                count: u64,
                period: core::time::Duration,
            ) -> $crate::builder::AlgorithmBuilder<Self> {
                $crate::builder::AlgorithmBuilder::new(Rate::new(count, period))
            }
        }
    };
    (@ $( $(#[$doc:meta])+ $per:ident $seconds:literal )+) => { $(
        $(#[$doc])+
        pub fn $per(count: u64) -> $crate::builder::AlgorithmBuilder<Self> {
            Self::per(count, core::time::Duration::from_secs($seconds))
        }
    )+ };
}
pub(crate) use per;

/// The numbers of an algorithm, as its `FromStr` reads them, after a space.
pub(crate) trait WriteNumbers {
    fn write_numbers(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result;
}

impl<A: FromRate> WriteNumbers for A {
    fn write_numbers(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(" ")?;
        self.write_rate(f)?;
        self.to_burst().map_or(Ok(()), |burst| write!(f, " burst {burst}"))?;
        match self.debt() {
            0 => Ok(()),
            debt => write!(f, " debt {debt}"),
        }
    }
}

/// The text before a number under this name, and the number if it is there: ` burst 20` of `10/s
/// burst 20`.
pub(crate) fn split_number<'t>(
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

/// The numbers that may follow a rate.
const NUMBERS: [&str; 2] = ["burst", "debt"];

/// Refuses a word behind a rate, which [`split_number`] has left there.
pub(crate) fn knows_words(text: &str) -> Result<(), ConfigError> {
    let mut ends = text.rmatch_indices(' ').map(|(end, _)| text.split_at(end));
    let Some((rate, rest)) = ends.find(|(rate, _)| rate.parse::<Rate>().is_ok()) else {
        return Ok(());
    };
    let Some(word) = rest.split_whitespace().next() else { return Ok(()) };
    let rate = rate.trim();
    Err(ConfigError::new(if let Some(name) = NUMBERS.into_iter().find(|name| *name == word) {
        format!("{name} has no number; write one, such as \"{rate} {name} 20\"")
    } else {
        let meant = did_you_mean(word, NUMBERS);
        format!(
            "{word:?} behind the rate {rate} has no meaning; only a burst and a debt follow it, such as \
             \"{rate} burst 20\"{meant}"
        )
    }))
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
    use crate::share::Share as _;
    use crate::timestamp::Timestamp;
    use crate::{
        AnyAlgorithm, BucketedWindow, Concurrency, FixedWindow, Gcra, SlidingCounter, TokenBucket,
        WindowLog,
    };
    use alloc::string::ToString;
    use core::num::NonZeroU64;
    use core::time::Duration;

    #[test]
    fn zero_and_out_of_range_numbers_are_errors_that_say_what_to_write() {
        let message = |error: ConfigError| error.to_string();
        let refused = [
            (Gcra::per_second(0).burst(1).build().map(drop), "a burst beside it has no meaning"),
            (Gcra::per_second(0).debt(1).build().map(drop), "a debt beside it has no meaning"),
            (FixedWindow::per_second(0).debt(1).build().map(drop), "a debt beside it"),
            ("0/s burst 0".parse::<Gcra>().map(drop), "a burst beside it"),
            (Gcra::per_second(1).burst(0).build().map(drop), "burst of 0"),
            (Gcra::per_day(u64::MAX).build().map(drop), "2^52"),
            (TokenBucket::per(1, Duration::ZERO).build().map(drop), "per 0 time"),
            (FixedWindow::per(1, Duration::from_secs(u64::MAX)).build().map(drop), "2^52"),
            (FixedWindow::per(1, Duration::from_nanos(1)).build().map(drop), "whole microseconds"),
            (WindowLog::per_hour(10_001).build().map(drop), "10000"),
            (
                "10/s burst".parse::<Gcra>().map(drop),
                "burst has no number; write one, such as \"10/s burst 20\"",
            ),
            ("10/s burst 0".parse::<Gcra>().map(drop), "burst of 0"),
            ("10/s burst +2".parse::<Gcra>().map(drop), "\"10/s burst 20\""),
            ("10/s burst 2 3".parse::<Gcra>().map(drop), "\"10/s burst 20\""),
            (
                "10/s bursts 2".parse::<Gcra>().map(drop),
                "\"bursts\" behind the rate 10/s has no meaning",
            ),
            ("10/s bursts 2".parse::<Gcra>().map(drop), "did you mean \"burst\"?"),
            ("7 / m  brust 2 debt 3".parse::<Gcra>().map(drop), "\"brust\" behind the rate 7 / m"),
            ("10/s 5".parse::<FixedWindow>().map(drop), "\"5\" behind the rate 10/s"),
            ("10 s".parse::<Gcra>().map(drop), "\"10 s\" is not a rate"),
            (
                "3".parse::<Concurrency>().map(drop),
                "a count needs the length of a lease; write \"3/30s\"",
            ),
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

    #[test]
    fn a_rate_of_0_is_a_limit_that_denies_everything_and_shows_it() {
        let second = Duration::from_secs(1);
        let built: [AnyAlgorithm; 4] = [
            Gcra::per_second(0).build().expect("a limit").into(),
            FixedWindow::per_day(0).build().expect("a limit").into(),
            WindowLog::per_hour(0).build().expect("a limit").into(),
            Concurrency::at_once(0, second).build().expect("a limit").into(),
        ];
        let read = [
            "token-bucket 0/30d",
            "first-request-window 0/s",
            "sliding-log 0/250ms",
            "sliding-counter 0/m",
            "bucketed-window bucket 1s rates 0/1s, 5/10s",
        ];
        let read = read.map(|words| words.parse::<AnyAlgorithm>().expect(words));
        for algorithm in built.into_iter().chain(read) {
            let words = algorithm.to_string();
            assert_eq!(words.parse(), Ok(algorithm), "{words}");
            let share = algorithm.share(NonZeroU64::new(3).expect("not 0"));
            assert_eq!(share.map(|share| share.capacity()), Ok(0), "{words}");
            for at in [0, 1_795_218_392_123_456].map(Timestamp::saturating_from_us) {
                let [peek, one] = [0, 1].map(|cost| algorithm.step(None, at, cost).decision);
                let seen = (peek.allowed, peek.limit, peek.remaining, peek.reset_after_us);
                assert_eq!(seen, (true, 0, 0, 0), "{words}");
                assert_eq!((one.allowed, one.retry_after_us), (false, None), "{words}");
                assert_eq!((one.replenish_after_us, one.reset_after_us), (0, 0), "{words}");
            }
        }
    }
}
