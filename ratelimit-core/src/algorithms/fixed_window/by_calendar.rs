//! A [`FixedWindow`] in words, such as `1000/month zone Europe/Berlin anchor 15 debt 100`, and the
//! builder of one whose windows are those of a calendar.

use alloc::format;
use core::fmt;
use core::str::FromStr;

use crate::algorithms::{Algorithm, FixedWindow};
use crate::builder::{FromRate, knows_words, no_burst, split_number};
use crate::calendar::{Calendar, Unit};
use crate::error::ConfigError;
use crate::rate::{Rate, whole_number};
use crate::window::{WindowLimit, Windows};

impl FixedWindow {
    /// A count per window of this calendar, of which up to `debt` more may be owed.
    fn of_calendar(
        count: u64,
        calendar: &'static Calendar,
        debt: Option<u64>,
    ) -> Result<Self, ConfigError> {
        // The count is in the same range as that of any other rate.
        let limit = Rate::per_us(count, calendar.mean_us())?.count();
        let debt = debt.unwrap_or(0);
        if debt > limit {
            return Err(ConfigError::new(format!(
                "a debt of {debt} is above the {limit} of a window of the calendar, and the next window has to pay all \
                 of it; choose a debt of at most {limit}"
            )));
        }
        let windows = Windows::Calendar(calendar);
        Ok(Self { window: WindowLimit { limit, most: limit + debt, windows } })
    }

    /// The limit in the words of a document: its rate, and the zone and the anchor of a calendar.
    pub(crate) fn of_words(
        rate: &str,
        zone: Option<&str>,
        anchor: Option<&str>,
        debt: Option<u64>,
    ) -> Result<Self, ConfigError> {
        let Some((count, unit)) = Unit::of_rate(rate) else {
            let rate: Rate = rate.parse()?;
            let of_calendar = zone.map(|_| "zone").or_else(|| anchor.map(|_| "anchor"));
            return match (of_calendar, debt) {
                (Some(word), _) => Err(no_calendar(word, rate)),
                (None, Some(debt)) => Self::with_debt(rate, debt),
                (None, None) => Self::new(rate),
            };
        };
        let count = whole_number(count).ok_or_else(|| {
            ConfigError::new(format!(
                "{rate:?} is not a rate; write a whole number per window of a calendar, such as \"1000/{}\"",
                unit.name()
            ))
        })?;
        Self::of_calendar(count, Calendar::of(unit, zone, anchor)?, debt)
    }
}

/// The error for a zone or an anchor of windows that are a length.
fn no_calendar(word: &str, rate: Rate) -> ConfigError {
    ConfigError::new(format!(
        "{word} has no meaning for a rate of {rate}, whose windows have one length; leave it out, or write a rate per \
         day, week, month or year, such as \"1000/month\""
    ))
}

/// The text before a word, and what stands after it.
fn split_word<'t>(text: &'t str, word: &str) -> (&'t str, Option<&'t str>) {
    let found = text
        .match_indices(word)
        .find(|(at, _)| text[..*at].ends_with(' ') && text[at + word.len()..].starts_with(' '));
    match found {
        Some((at, _)) => (&text[..at], Some(text[at + word.len()..].trim())),
        None => (text, None),
    }
}

impl FromStr for FixedWindow {
    type Err = ConfigError;

    /// Reads a rate such as `10/s` or `1000/month`, followed by ` zone Europe/Berlin` and ` anchor
    /// 15` if it is one of a calendar, and by ` debt 5`.
    fn from_str(text: &str) -> Result<Self, ConfigError> {
        let (text, debt) = split_number(text, "debt", 0)?;
        let (text, burst) = split_number(text, "burst", 1)?;
        if burst.is_some() {
            return Err(no_burst("fixed-window"));
        }
        let (text, anchor) = split_word(text, "anchor");
        let (rate, zone) = split_word(text, "zone");
        knows_words(rate)?;
        Self::of_words(rate, zone, anchor, debt)
    }
}

impl FromRate for FixedWindow {
    fn from_rate(rate: Rate, burst: Option<u64>, debt: Option<u64>) -> Result<Self, ConfigError> {
        match (burst, debt) {
            (None, None) => Self::new(rate),
            (None, Some(debt)) => Self::with_debt(rate, debt),
            (Some(_), _) => Err(no_burst("fixed-window")),
        }
    }

    /// Of a calendar that of the mean window.
    fn to_rate(&self) -> Rate {
        Rate::of_built(self.capacity(), self.span_us())
    }

    /// Of a calendar the mean window: a decision does not tell which one it was made in.
    fn span_us(&self) -> u64 {
        self.calendar().map_or(self.window_us(), Calendar::mean_us)
    }

    fn with_count(&self, count: u64, debt: Option<u64>) -> Result<Self, ConfigError> {
        match self.calendar() {
            Some(calendar) => Self::of_calendar(count, calendar, debt),
            None => Self::from_rate(Rate::per_us(count, self.window_us())?, None, debt),
        }
    }

    fn write_rate(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.calendar() {
            Some(calendar) => write!(f, "{}{calendar}", self.capacity()),
            None => write!(f, "{}", self.to_rate()),
        }
    }
}

#[cfg(feature = "calendar")]
mod builder {
    use alloc::string::{String, ToString};

    use super::FixedWindow;
    use crate::calendar::{Calendar, Unit};
    use crate::error::ConfigError;

    /// Writes the constructors, one for each unit.
    macro_rules! per_unit {
        ($( $(#[$doc:meta])+ $per:ident $unit:ident )+) => { $(
            $(#[$doc])+
            pub const fn $per(count: u64) -> CalendarBuilder {
                let (zone, anchor, debt) = (None, None, None);
                CalendarBuilder { count, unit: Unit::$unit, zone, anchor, debt }
            }
        )+ };
    }

    impl FixedWindow {
        per_unit! {
            /// `count` per day of the calendar, from midnight to midnight. A day on which the
            /// clocks change has 23 or 25 hours; [`per_day`](Self::per_day) counts 24.
            per_calendar_day Day
            /// `count` per week of the calendar, from Monday on.
            per_week Week
            /// `count` per month of the calendar, from the first on.
            per_month Month
            /// `count` per year of the calendar, from January 1 on.
            per_year Year
        }
    }

    /// A [`FixedWindow`] by a calendar that is still to be built: a count per unit, in UTC unless a
    /// [`zone`](Self::zone) follows. Needs the feature `calendar`.
    ///
    /// As with [`AlgorithmBuilder`](crate::algorithm::AlgorithmBuilder), only
    /// [`build`](Self::build) fails, and [`Limits::builder`](crate::Limits::builder) takes the
    /// builder as it is.
    ///
    /// ```
    /// use ratelimit_core::FixedWindow;
    ///
    /// let billed = FixedWindow::per_month(1_000).zone("Europe/Berlin").anchor(15).build()?;
    /// assert_eq!(billed, "1000/month zone Europe/Berlin anchor 15".parse()?);
    ///
    /// let weekly = FixedWindow::per_week(50).anchor("sunday").debt(5).build()?;
    /// assert_eq!(weekly, "50/week anchor sunday debt 5".parse()?);
    ///
    /// assert!(FixedWindow::per_month(1_000).zone("Berlin").build().is_err());
    /// # Ok::<(), ratelimit_core::ConfigError>(())
    /// ```
    #[derive(Clone, Debug)]
    #[must_use = "a builder limits nothing: finish with `build()`, or give it to `Limits::builder()`"]
    pub struct CalendarBuilder {
        count: u64,
        unit: Unit,
        zone: Option<String>,
        anchor: Option<Anchor>,
        debt: Option<u64>,
    }

    /// Where the windows of a calendar begin: see [`CalendarBuilder::anchor`].
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub struct Anchor(String);

    /// An hour, or a day of the month.
    impl From<i32> for Anchor {
        fn from(number: i32) -> Self {
            Self(number.to_string())
        }
    }

    /// A day of the week, such as `monday`, or a number.
    impl From<&str> for Anchor {
        fn from(words: &str) -> Self {
            Self(words.into())
        }
    }

    impl CalendarBuilder {
        /// The time zone whose clocks count, by its name in the IANA database, such as
        /// `Europe/Berlin`. `UTC` by default.
        pub fn zone(mut self, name: &str) -> Self {
            self.zone = Some(name.into());
            self
        }

        /// Where windows begin: an hour of the day (0 to 23, by default 0), a day of the week (by
        /// default `monday`), or a day of the month (1 to 31, by default 1; in a month that does
        /// not have it, the last one).
        pub fn anchor(mut self, anchor: impl Into<Anchor>) -> Self {
            self.anchor = Some(anchor.into());
            self
        }

        /// The most that may be owed beyond the limit, for the next window to pay: at most the
        /// limit, and nothing by default. See [`Algorithm::debt`](crate::Algorithm::debt).
        pub const fn debt(mut self, debt: u64) -> Self {
            self.debt = Some(debt);
            self
        }

        /// The algorithm.
        ///
        /// # Errors
        /// A count above 2^52, a zone that is not known, an anchor that the unit does not
        /// have, or a debt above the count.
        pub fn build(self) -> Result<FixedWindow, ConfigError> {
            let anchor = self.anchor.as_ref().map(|Anchor(words)| &**words);
            let calendar = Calendar::of(self.unit, self.zone.as_deref(), anchor)?;
            FixedWindow::of_calendar(self.count, calendar, self.debt)
        }
    }

    impl TryFrom<CalendarBuilder> for FixedWindow {
        type Error = ConfigError;

        fn try_from(builder: CalendarBuilder) -> Result<Self, ConfigError> {
            builder.build()
        }
    }
}

#[cfg(feature = "calendar")]
pub use builder::{Anchor, CalendarBuilder};
