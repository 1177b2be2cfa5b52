//! The windows of calendars as the oracle knows them: it looks at every date until the end of time,
//! and asks whether a window begins on it.

use std::sync::{Arc, Mutex, PoisonError};

use jiff::civil::{Date, Weekday, date};
use jiff::tz::TimeZoneDatabase;
use ratelimit_core::algorithm::Calendar;
use ratelimit_core::{Algorithm, AnyAlgorithm, FixedWindow, Timestamp};

use crate::algorithm::AlgorithmHarness;
use crate::seeds::{CALENDARS, full_us};
use crate::trace::made::Instance;

/// When windows begin, in microseconds.
type Begins = Arc<[u64]>;

/// Of the calendars that were asked for: a few, each one static.
static KNOWN: Mutex<Vec<(&Calendar, Begins)>> = Mutex::new(Vec::new());

/// How many windows of this limit have begun until this time: the number of its window.
pub(crate) fn number(window: &FixedWindow, at_us: u64) -> u64 {
    let Some(calendar) = window.calendar() else { return at_us / window.window_us() };
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let found = known.iter().find(|(of, _)| std::ptr::eq(*of, calendar));
    let begins = if let Some((_, begins)) = found {
        Arc::clone(begins)
    } else {
        let text = AnyAlgorithm::from(*window).to_string();
        let (_, words) = text.split_once('/').expect("a rate");
        let begins = begins(words.split_once(" debt ").map_or(words, |(words, _)| words));
        known.push((calendar, Arc::clone(&begins)));
        begins
    };
    drop(known);
    begins.partition_point(|begin| *begin <= at_us) as u64
}

/// The begins of a calendar such as `month zone Europe/Berlin anchor 15`.
fn begins(words: &str) -> Begins {
    let mut words = words.split(' ');
    let unit = words.next().unwrap_or_default();
    let (mut zone, mut anchor) = ("UTC", None);
    while let Some(word) = words.next() {
        match word {
            "zone" => zone = words.next().expect("a zone"),
            _ => anchor = words.next(),
        }
    }
    let zone = TimeZoneDatabase::bundled().get(zone).expect("a zone");
    let day = |otherwise: i8| anchor.map_or(otherwise, |day| day.parse().expect("a number"));
    let is_begin = |at: Date| match unit {
        "day" => true,
        "week" => at.weekday() == weekday(anchor.unwrap_or("monday")),
        "month" => at.day() == day(1).min(at.days_in_month()),
        _ => at.day_of_year() == 1,
    };
    let hour = if unit == "day" { day(0) } else { 0 };
    let dates = std::iter::successors(Some(date(1969, 12, 31)), |at| at.tomorrow().ok());
    let dates = dates.take_while(|at| at.year() < 2115).filter(|at| is_begin(*at));
    let begin = |at: Date| {
        let begin = zone.to_timestamp(at.at(hour, 0, 0, 0)).expect("a time");
        u64::try_from(begin.as_microsecond()).ok()
    };
    dates.filter_map(begin).collect()
}

/// The laws of limits by a calendar, at the times at which calendars go wrong: clocks that change,
/// the ends of months, leap years and the century that is none.
///
/// ```
/// use ratelimit_testkit::{Calendars, algorithm_conformance};
///
/// algorithm_conformance!(calendars, Calendars);
/// # fn main() {}
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Calendars;

impl AlgorithmHarness for Calendars {
    type Algorithm = AnyAlgorithm;

    const CASES: u32 = 128;

    fn limits() -> Vec<Instance<AnyAlgorithm>> {
        CALENDARS.iter().map(|words| words.parse().expect("a limit")).collect()
    }

    /// No window admits more than the limit, however the oracle counts windows.
    fn excess(
        limit: &AnyAlgorithm,
        admitted: &[(Timestamp, u64)],
        at: Timestamp,
        cost: u64,
    ) -> Option<String> {
        let AnyAlgorithm::FixedWindow(window) = limit else { return None };
        let of = |at: Timestamp| number(window, at.as_us());
        let same = admitted.iter().filter(|(earlier, _)| of(*earlier) == of(at));
        let total = same.map(|(_, cost)| cost).sum::<u64>() + cost;
        (total > limit.capacity()).then(|| format!("{total} in one window"))
    }

    fn recovers_within_us(limit: &AnyAlgorithm) -> Option<u64> {
        Some(full_us(limit))
    }

    fn unkind_times() -> Vec<Timestamp> {
        let days = [
            // Clocks change in Havana, in Berlin and on Lord Howe Island, forwards and back.
            [2027, 3, 14],
            [2027, 3, 28],
            [2027, 4, 3],
            [2027, 10, 2],
            [2027, 10, 31],
            [2027, 11, 7],
            // The last days of months, and a year.
            [2027, 1, 30],
            [2027, 2, 27],
            [2027, 12, 31],
            [2028, 2, 28],
            [2028, 2, 29],
            [2100, 2, 28],
            [2100, 3, 1],
        ];
        let hours = |day: [i16; 3]| {
            let [month, of_month] = [day[1], day[2]].map(|part| i8::try_from(part).expect("small"));
            // When days begin in these zones, and when their clocks change.
            [1, 5, 13, 15, 22, 23].map(move |hour| date(day[0], month, of_month).at(hour, 0, 0, 0))
        };
        let at = days.into_iter().flat_map(hours).map(|at| {
            let zoned = at.to_zoned(jiff::tz::TimeZone::UTC).expect("a time");
            u64::try_from(zoned.timestamp().as_microsecond()).expect("since 1970")
        });
        at.map(Timestamp::saturating_from_us).collect()
    }
}

fn weekday(name: &str) -> Weekday {
    let days = Weekday::Monday.cycle_forward().take(7);
    let mut named = days.filter(|day| format!("{day:?}").to_lowercase() == name);
    named.next().expect("a day of the week")
}
