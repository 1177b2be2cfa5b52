//! [`Calendar`]: windows that begin with the days, weeks, months or years of a time zone.
//!
//! The windows of a calendar have numbers. The date of a moment tells the number of its window, and
//! a number the date on which that window begins (`days_from_civil` and its inverse, Howard
//! Hinnant, "chrono-Compatible Low-Level Date Algorithms"). Only the step between a date and a
//! moment needs the rules of the zone, for which `zone.rs` asks the crate `jiff`.

use alloc::format;
use alloc::string::{String, ToString};
use core::fmt;
use core::sync::atomic::{AtomicU64, Ordering};

use crate::error::{ConfigError, did_you_mean};
use crate::rate::{CALENDAR_UNITS, whole_number};
use crate::timestamp::Timestamp;

mod zone;

use zone::Zone;

const DAY_S: i64 = 86_400;
const SECOND_US: u64 = 1_000_000;
const MINUTE_US: u64 = 60 * SECOND_US;

/// The days of the week from the first of 1970, which was a Thursday.
const WEEKDAYS: [&str; 7] =
    ["thursday", "friday", "saturday", "sunday", "monday", "tuesday", "wednesday"];

/// How long the windows of a calendar are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Unit {
    Day,
    Week,
    Month,
    Year,
}

impl Unit {
    pub(crate) const ALL: [Self; 4] = [Self::Day, Self::Week, Self::Month, Self::Year];

    /// The name after the slash of a rate.
    pub(crate) const fn name(self) -> &'static str {
        CALENDAR_UNITS[self as usize]
    }

    /// The count and the unit of a rate such as `1000/month`; `None` for a rate per length, and for
    /// any other text.
    pub(crate) fn of_rate(text: &str) -> Option<(&str, Self)> {
        let (count, name) = text.split_once('/')?;
        let unit = Self::ALL.into_iter().find(|unit| unit.name() == name.trim())?;
        Some((count.trim(), unit))
    }

    /// The days of the longest window, and one for clocks that go back.
    const fn longest_days(self) -> u64 {
        match self {
            Self::Day => 2,
            Self::Week => 8,
            Self::Month => 32,
            Self::Year => 367,
        }
    }

    /// The mean of 400 years, after which the dates of the Gregorian calendar repeat.
    const fn mean_us(self) -> u64 {
        const YEARS_400_US: u64 = 146_097 * 86_400 * SECOND_US;
        match self {
            Self::Day => 86_400 * SECOND_US,
            Self::Week => 7 * 86_400 * SECOND_US,
            Self::Month => YEARS_400_US / 4_800,
            Self::Year => YEARS_400_US / 400,
        }
    }

    /// Where windows begin without an anchor: at midnight, on Monday, on the first.
    const fn own_anchor(self) -> u8 {
        match self {
            Self::Day | Self::Year => 0,
            Self::Week => 4,
            Self::Month => 1,
        }
    }

    /// What an anchor of this unit may be.
    const fn anchors(self) -> &'static str {
        match self {
            Self::Day => "an hour from 0 to 23",
            Self::Week => "a day of the week, such as \"monday\"",
            Self::Month => "a day of the month from 1 to 31",
            Self::Year => "none: a year begins on January 1",
        }
    }

    /// The anchor in these words.
    fn anchor(self, words: &str) -> Result<u8, ConfigError> {
        let number = |least: u8, most: u8| {
            let number = whole_number(words).and_then(|number| u8::try_from(number).ok());
            number.filter(|number| (least..=most).contains(number))
        };
        let anchor = match self {
            Self::Day => number(0, 23),
            Self::Week => (0..).zip(WEEKDAYS).find(|(_, day)| *day == words).map(|(day, _)| day),
            Self::Month => number(1, 31),
            Self::Year => None,
        };
        anchor.ok_or_else(|| {
            let meant = did_you_mean(words, WEEKDAYS);
            let meant = if self == Self::Week { &*meant } else { "" };
            let (name, anchors) = (self.name(), self.anchors());
            ConfigError::new(format!("anchor is {words:?}; that of a {name} is {anchors}{meant}"))
        })
    }
}

/// Refuses an anchor that no unit has: nothing that follows in a document makes it right.
#[cfg(feature = "serde")]
pub(crate) fn check_anchor(words: &str) -> Result<(), ConfigError> {
    if Unit::ALL.into_iter().any(|unit| unit.anchor(words).is_ok()) {
        return Ok(());
    }
    let [day, week, month] = [Unit::Day, Unit::Week, Unit::Month].map(Unit::anchors);
    let meant = did_you_mean(words, WEEKDAYS);
    Err(ConfigError::new(format!("anchor is {words:?}; write {month}, {week}, or {day}{meant}")))
}

/// Refuses a zone that is not known.
#[cfg(feature = "serde")]
pub(crate) fn check_zone(name: &str) -> Result<(), ConfigError> {
    Zone::named(name).map(drop)
}

/// The windows of a [`FixedWindow`](crate::FixedWindow) that begin with the days, weeks, months or
/// years of a time zone, as its clocks show them. Needs the feature `calendar`.
///
/// A window begins at midnight, or at the hour that is the anchor of a day. Where the clocks skip
/// that hour, it begins with the first hour after it; where they show it twice, with the first. A
/// month whose anchor it does not have begins on its last day: after the 28th of February comes the
/// 31st of March.
///
/// The rules of the zones are those of the crate `jiff` that the program is built with, so they do
/// not depend on the machine. Two programs that know different rules of a zone agree again from the
/// next window on that has the same begin by both.
///
/// A program keeps one calendar for each unit, zone and anchor that it has read, until it ends: a
/// limit only points to it. So read zones from what you control, not from requests. (All zones with
/// all anchors are some 40,000 calendars of 200 bytes.)
///
/// ```
/// # #[cfg(feature = "calendar")] {
/// use ratelimit_core::{FixedWindow, Timestamp};
///
/// let window = FixedWindow::per_month(1_000).zone("Europe/Berlin").anchor(15).build()?;
/// let calendar = window.calendar().expect("its windows are months");
/// let at = Timestamp::from_us(1_795_975_200_000_000).expect("2026-11-29, 19:00 in Berlin");
/// let month = calendar.window(at);
/// assert_eq!(month.start.as_us(), 1_794_697_200_000_000); // 2026-11-15, 0:00
/// assert_eq!(month.end_us, 1_797_289_200_000_000); // 2026-12-15, 0:00
/// # }
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Debug)]
pub struct Calendar {
    rule: Rule,
    /// The window that was last asked for. Nearly all requests ask for the present one, and the
    /// rules of a zone take longer than the step.
    recent: Recent,
}

/// One calendar for each rule.
impl PartialEq for Calendar {
    fn eq(&self, other: &Self) -> bool {
        self.rule == other.rule
    }
}

impl Eq for Calendar {}

/// Where the windows of a calendar begin.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rule {
    unit: Unit,
    /// The hour, the day of the week since Thursday, or the day of the month.
    anchor: u8,
    zone: Zone,
}

/// A window in one word, so that threads share it: in minutes its begin (27 bits) and its length
/// (20 bits), and its number since 1969 (16 bits). 0 is none.
#[derive(Debug, Default)]
struct Recent(AtomicU64);

impl Recent {
    fn get(&self) -> Option<CalendarWindow> {
        let word = self.0.load(Ordering::Relaxed);
        let start_us = (word >> 36) * MINUTE_US;
        let end_us = start_us + (word >> 16 & 0xf_ffff) * MINUTE_US;
        let number = i64::try_from(word & 0xffff).unwrap_or_default();
        let start = Timestamp::from_us(start_us)?;
        (word != 0).then_some(CalendarWindow { number, start, end_us })
    }

    /// Keeps a window, if it fits.
    fn set(&self, window: CalendarWindow) {
        let CalendarWindow { number, start, end_us } = window;
        let length_us = end_us - start.as_us();
        let [start_min, length_min] = [start.as_us(), length_us].map(|us| us / MINUTE_US);
        let is_whole = start.as_us().is_multiple_of(MINUTE_US) && end_us.is_multiple_of(MINUTE_US);
        let Ok(number) = u16::try_from(number) else { return };
        if is_whole && start_min < 1 << 27 && length_min < 1 << 20 {
            let word = start_min << 36 | length_min << 16 | u64::from(number);
            self.0.store(word, Ordering::Relaxed);
        }
    }
}

/// A window of a [`Calendar`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CalendarWindow {
    /// Its number: one more than that of the window before. A day that a zone left out has a window
    /// without length.
    pub number: i64,
    /// When it begins; the Unix epoch, if that is later.
    pub start: Timestamp,
    /// When it ends and the next one begins, in microseconds since the Unix epoch. It may lie past
    /// [`Timestamp::MAX`], by a year at most.
    pub end_us: u64,
}

impl Calendar {
    /// The calendar of this unit, by the zone and the anchor in these words.
    pub(crate) fn of(
        unit: Unit,
        zone: Option<&str>,
        anchor: Option<&str>,
    ) -> Result<&'static Self, ConfigError> {
        let zone = Zone::named(zone.unwrap_or(zone::UTC))?;
        let anchor = anchor.map_or(Ok(unit.own_anchor()), |words| unit.anchor(words))?;
        Ok(Rule { unit, anchor, zone }.interned())
    }

    /// The window that contains this moment.
    #[must_use]
    pub fn window(&self, at: Timestamp) -> CalendarWindow {
        let contains = |window: &CalendarWindow| window.start <= at && at.as_us() < window.end_us;
        self.recent.get().filter(contains).unwrap_or_else(|| {
            let window = self.window_by_rule(at);
            self.recent.set(window);
            window
        })
    }

    /// The same for a moment that is not the present, which the calendar does not keep.
    pub(crate) fn window_by_rule(&self, at: Timestamp) -> CalendarWindow {
        let at_s = at.as_us() / SECOND_US;
        let at_s = i64::try_from(at_s).unwrap_or(i64::MAX);
        let mut number = self.rule.number_on(self.rule.zone.local_s(at_s));
        // Clocks that go back show the date before for a second time, and clocks that skip the
        // begin of a window show its date before that. Both go over one begin at most.
        if at_s < self.rule.start_s(number) {
            number -= 1;
        } else if self.rule.start_s(number + 1) <= at_s {
            number += 1;
        }
        let start = Timestamp::saturating_from_us(self.start_us(number));
        CalendarWindow { number, start, end_us: self.start_us(number + 1) }
    }

    /// When the window of this number begins, in microseconds since the Unix epoch, or 0 if that is
    /// later.
    #[must_use]
    pub fn start_us(&self, number: i64) -> u64 {
        u64::try_from(self.rule.start_s(number)).unwrap_or(0) * SECOND_US
    }

    /// A time that no window is longer than, in microseconds.
    #[must_use]
    pub const fn longest_us(&self) -> u64 {
        self.rule.unit.longest_days() * 86_400 * SECOND_US
    }

    /// The mean length of a window, in microseconds: that of a month is 30.44 days.
    #[must_use]
    pub const fn mean_us(&self) -> u64 {
        self.rule.unit.mean_us()
    }

    /// The [kind](crate::Algorithm::state_kind) of the states of these windows, such as
    /// `fixed-window/month(Europe.Berlin.15)`.
    pub(crate) fn kind(&self, algorithm: &str) -> String {
        let Rule { unit, zone, .. } = &self.rule;
        // No name of a zone contains a full stop.
        let zone = zone.name().replace('/', ".").replace('+', "..");
        let name = unit.name();
        match unit {
            Unit::Year => format!("{algorithm}/{name}({zone})"),
            _ => format!("{algorithm}/{name}({zone}.{})", self.rule.anchor_words()),
        }
    }
}

impl Rule {
    fn start_s(&self, number: i64) -> i64 {
        let anchor = i64::from(self.anchor);
        self.zone.moment_s(match self.unit {
            Unit::Day => number * DAY_S + anchor * 3_600,
            Unit::Week => (7 * number + anchor) * DAY_S,
            Unit::Month => {
                let (year, month) = (1969 + number.div_euclid(12), number.rem_euclid(12) + 1);
                days_from_civil(year, month, self.day_in(year, month)) * DAY_S
            }
            Unit::Year => days_from_civil(1969 + number, 1, 1) * DAY_S,
        })
    }

    /// The number of the window to which the date and time belong that the clocks show.
    fn number_on(&self, local_s: i64) -> i64 {
        let (anchor, day) = (i64::from(self.anchor), local_s.div_euclid(DAY_S));
        match self.unit {
            Unit::Day => (local_s - anchor * 3_600).div_euclid(DAY_S),
            Unit::Week => (day - anchor).div_euclid(7),
            Unit::Month => {
                let (year, month, date) = civil_from_days(day);
                12 * (year - 1969) + month - 1 - i64::from(date < self.day_in(year, month))
            }
            Unit::Year => civil_from_days(day).0 - 1969,
        }
    }

    /// The day on which the window of a month begins: its last one, if it has no such day.
    fn day_in(&self, year: i64, month: i64) -> i64 {
        let (next_year, next) = if month == 12 { (year + 1, 1) } else { (year, month + 1) };
        let length = days_from_civil(next_year, next, 1) - days_from_civil(year, month, 1);
        length.min(self.anchor.into())
    }

    fn anchor_words(&self) -> String {
        match self.unit {
            Unit::Week => WEEKDAYS[usize::from(self.anchor % 7)].to_string(),
            _ => self.anchor.to_string(),
        }
    }
}

/// What stands after the count of a rate: `/month zone Europe/Berlin anchor 15`.
impl fmt::Display for Calendar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Rule { unit, anchor, zone } = &self.rule;
        write!(f, "/{}", unit.name())?;
        match zone.name() {
            zone::UTC => {}
            zone => write!(f, " zone {zone}")?,
        }
        if *anchor == unit.own_anchor() {
            return Ok(());
        }
        write!(f, " anchor {}", self.rule.anchor_words())
    }
}

/// The days from the Unix epoch to a date of the Gregorian calendar.
const fn days_from_civil(year: i64, month: i64, day: i64) -> i64 {
    let year = if month <= 2 { year - 1 } else { year };
    let era = year.div_euclid(400);
    let year_of_era = year.rem_euclid(400);
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let day_of_era = 365 * year_of_era + year_of_era / 4 - year_of_era / 100 + day_of_year;
    era * 146_097 + day_of_era - 719_468
}

/// The year, the month and the day that are so many days after the Unix epoch.
const fn civil_from_days(days: i64) -> (i64, i64, i64) {
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era =
        (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day_of_year + 2) / 153;
    let (day, month) = (day_of_year - (153 * from_march + 2) / 5 + 1, (from_march + 2) % 12 + 1);
    let year = year_of_era + era * 400;
    (if month <= 2 { year + 1 } else { year }, month, day)
}

#[cfg(all(test, feature = "calendar"))]
mod tests;
