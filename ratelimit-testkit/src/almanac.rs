//! The windows of calendars as the oracle knows them: it looks at every date until the end of time,
//! and asks whether a window begins on it.

use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use jiff::civil::{Date, Weekday, date};
use jiff::tz::TimeZoneDatabase;
use ratelimit_core::{AnyAlgorithm, FixedWindow};

/// When windows begin, in microseconds.
type Begins = Arc<[u64]>;

static KNOWN: LazyLock<Mutex<HashMap<String, Begins>>> = LazyLock::new(Mutex::default);

/// How many windows of this limit have begun until this time: the number of its window.
pub(crate) fn number(window: &FixedWindow, at_us: u64) -> u64 {
    if window.calendar().is_none() {
        return at_us / window.window_us();
    }
    let text = AnyAlgorithm::from(*window).to_string();
    let (_, words) = text.split_once('/').expect("a rate");
    let words = words.split_once(" debt ").map_or(words, |(words, _)| words);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    let begins = match known.get(words) {
        Some(begins) => Arc::clone(begins),
        None => Arc::clone(known.entry(words.to_owned()).or_insert_with(|| begins(words))),
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

fn weekday(name: &str) -> Weekday {
    let days = Weekday::Monday.cycle_forward().take(7);
    let mut named = days.filter(|day| format!("{day:?}").to_lowercase() == name);
    named.next().expect("a day of the week")
}
