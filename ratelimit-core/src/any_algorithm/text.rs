//! An algorithm and its parameters as text, as in a policy document: `gcra 10/s burst 20`.

use alloc::format;
use alloc::string::{String, ToString};
use core::fmt;
use core::str::FromStr;

use super::{AnyAlgorithm, TOKEN_BUCKET};
use crate::builder::WriteNumbers;
use crate::error::{ConfigError, did_you_mean};

/// The name of the algorithm and its numbers.
///
/// The text decides as what the algorithm was read from does, and may differ from it: a bucket
/// keeps its rate in lowest terms, so `120/m` displays as `2/s`.
///
/// ```
/// use ratelimit_core::{Gcra, AnyAlgorithm};
/// let burst = AnyAlgorithm::from(Gcra::new("10/s".parse()?, 20)?);
/// assert_eq!(burst.to_string(), "gcra 10/s burst 20");
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
impl fmt::Display for AnyAlgorithm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        dispatched!(self, |algorithm| algorithm.write_numbers(f))
    }
}

impl AnyAlgorithm {
    /// The same algorithm at these numbers, with or without its name; of a calendar in the same
    /// zone and from the same anchor on, if the text names none.
    ///
    /// ```
    /// use ratelimit_core::AnyAlgorithm;
    /// let policy: AnyAlgorithm = "gcra 10/s burst 20".parse()?;
    /// assert_eq!(policy.at_numbers("100/s burst 200")?, "gcra 100/s burst 200".parse()?);
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// Numbers that are none of the algorithm, or those of another one.
    pub fn at_numbers(&self, numbers: &str) -> Result<Self, ConfigError> {
        let numbers = self.without_its_name(numbers)?;
        let calendar = match self {
            Self::FixedWindow(window) => window.calendar().map(ToString::to_string),
            _ => None,
        };
        if let Some(calendar) = calendar
            && let unit = calendar.split(' ').next().unwrap_or_default()
            && let Some((count, rest)) = numbers.split_once(unit)
            && !["zone", "anchor"].iter().any(|word| rest.contains(word))
        {
            return Self::of_numbers(self.name(), &format!("{count}{calendar}{rest}"));
        }
        Self::of_numbers(self.name(), numbers)
    }

    /// The numbers behind the name of the algorithm, if it stands before them.
    fn without_its_name<'n>(&self, numbers: &'n str) -> Result<&'n str, ConfigError> {
        let named = numbers.trim_start().split_once(' ');
        let Some((name, rest)) = named.filter(|(name, _)| Self::NAMES.contains(name)) else {
            return Ok(numbers);
        };
        // A bucket has two names.
        let is_bucket = |name: &str| matches!(name, "gcra" | TOKEN_BUCKET);
        let own = self.name();
        if name == own || (is_bucket(name) && is_bucket(own)) {
            return Ok(rest);
        }
        Err(ConfigError::new(format!(
            "the numbers are of {name}, and the limit's algorithm is {own}; write numbers of {own}, without a name"
        )))
    }
}

/// The error for an algorithm of an unknown name.
pub(crate) fn unknown(name: &str) -> ConfigError {
    let meant = did_you_mean(name, AnyAlgorithm::NAMES.iter().copied());
    ConfigError::new(format!(
        "unknown algorithm {name:?}; accepted are {}{meant}",
        algorithm_names()
    ))
}

/// The names of all algorithms.
pub(crate) fn algorithm_names() -> String {
    AnyAlgorithm::NAMES.join(", ")
}

/// Parses the text that [`Display`](fmt::Display) writes.
///
/// ```
/// use ratelimit_core::{Gcra, AnyAlgorithm};
///
/// let burst: AnyAlgorithm = "gcra 10/s burst 20".parse()?;
/// assert_eq!(burst, Gcra::per_second(10).burst(20).build()?.into());
///
/// for words in [
///     "token-bucket 7/5m",
///     "fixed-window 2/m",
///     "bucketed-window bucket 1s rates 1000/1s, 5000/10s",
///     "concurrency 20/30s",
/// ] {
///     let algorithm: AnyAlgorithm = words.parse()?;
///     assert_eq!(algorithm, algorithm.to_string().parse()?);
/// }
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
impl FromStr for AnyAlgorithm {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let text = text.trim();
        if text.contains(" count ") {
            return Err(ConfigError::new(
                "what counts is said of a limit, not of its algorithm; call count_attempts(), or write \
                 count = \"attempts\" in a document",
            ));
        }
        let (name, numbers) = text.split_once(' ').unwrap_or((text, ""));
        Self::of_numbers(name, numbers)
    }
}

impl TryFrom<&str> for AnyAlgorithm {
    type Error = ConfigError;

    fn try_from(text: &str) -> Result<Self, ConfigError> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Gcra, Rate};
    use alloc::string::ToString;

    #[test]
    fn the_text_of_an_algorithm_reads_back_as_the_same() {
        for words in [
            "gcra 10/s burst 20",
            "gcra 1000003/30d burst 1000",
            "token-bucket 7/5m burst 7",
            "fixed-window 2/m",
            "fixed-window 2/m debt 9",
            "gcra 10/s burst 20 debt 5",
            "first-request-window 60/h",
            "window-log 3/1500ms",
            "sliding-counter 9/2us",
            "sliding-log 5/30d",
            "bucketed-window bucket 1s rates 1000/1s, 5000/10s",
            "concurrency 20/30s",
            "lockout 5/15m block 15m",
            "lockout 3/5m block 1m factor 3 longest 1h forget 36h",
        ] {
            let algorithm: AnyAlgorithm = words.parse().expect(words);
            assert_eq!(algorithm.to_string(), words);
        }
        assert_eq!("gcra 10/s".parse(), "gcra 10/s burst 10".parse::<AnyAlgorithm>());
    }

    #[test]
    fn text_that_is_no_algorithm_is_refused_with_what_is_accepted() {
        for (words, says) in [
            ("", "accepted are gcra, token-bucket"),
            ("10/s burst 20", "accepted are gcra, token-bucket"),
            ("gcra", "\"10/s\""),
            ("gcra 10/s burst twenty", "burst is \"twenty\""),
            ("gcra 10/s bursts 3", "did you mean \"burst\"?"),
            ("concurrency 3", "write \"3/30s\""),
            ("fixed-window 10/s burst 20", "no meaning for fixed-window"),
            ("sliding-log 10/s debt 5", "debt has no meaning for sliding-log"),
            ("gcra 10/s debt much", "debt is \"much\""),
            (
                "gcra 10/s debt 4503599627370496",
                "debt of 4503599627370496 needs integers above 2^52",
            ),
            ("fixed-window 1/d debt 100000", "a smaller debt"),
            ("fixed-window 2/m count attempts", "call count_attempts()"),
            ("bucketed-window 1/s", "bucket 1s rates"),
            ("lockout 5/15m", "\"5/15m block 15m\""),
            ("lockout 5/15m block 15m factor", "factor 2 longest 1d forget 7d"),
            ("lockout 5/15m block 15m factor 2 factor 3", "is not a lockout"),
            ("lockout 5/15m block 0m", "is not a length of time"),
            ("lockout 5/15m block 15m factor 0", "a factor of 0"),
            ("lockout 5/15m block 15m forget 7d", "forget has no meaning if all blocks are equal"),
            ("lockout 5/15m block 15m factor 2 longest 5m", "write at least 15m"),
            ("lockout 5/15m block 15m factor 2 forget 52124d", "2^52"),
        ] {
            let message = words.parse::<AnyAlgorithm>().expect_err(words).to_string();
            assert!(message.contains(says), "{words}: {message:?} lacks {says:?}");
        }
    }

    #[test]
    fn a_rate_displays_in_its_shortest_form() {
        for (given, shown) in [
            ("10/s", "10/s"),
            ("120/m", "2/s"),
            ("240/h", "4/m"),
            ("5000/d", "5000/d"),
            ("1000/250ms", "4000/s"),
            ("600/s", "600/s"),
            ("2/3us", "2/3us"),
            ("1/d", "1/d"),
            ("1000003/30d", "1000003/30d"),
            ("10000000/s", "10/us"),
        ] {
            let rate = |text: &str| text.parse::<Rate>().expect(text);
            let algorithm = AnyAlgorithm::from(Gcra::new(rate(given), 1).expect("a limit"));
            assert_eq!(algorithm.to_string(), ["gcra ", shown, " burst 1"].concat(), "{given}");
            assert_eq!(Gcra::new(rate(shown), 1).map(AnyAlgorithm::from), Ok(algorithm), "{given}");
        }
    }
}
