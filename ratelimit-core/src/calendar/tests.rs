//! Unit tests of calendars: their windows, as other libraries and the clocks of the zones have
//! them.

use super::*;
use alloc::vec::Vec;

fn calendar(unit: Unit, zone: &str, anchor: Option<&str>) -> &'static Calendar {
    Calendar::of(unit, Some(zone), anchor).expect("a calendar")
}

fn at_s(seconds: i64) -> Timestamp {
    Timestamp::saturating_from_us(u64::try_from(seconds).expect("since 1970") * SECOND_US)
}

/// A date of the Gregorian calendar, and an hour of it, in UTC.
fn utc([year, month, day, hour]: [i64; 4]) -> i64 {
    days_from_civil(year, month, day) * DAY_S + hour * 3_600
}

/// The begin and the end of the window that contains a second.
fn bounds(calendar: &Calendar, at: i64) -> [i64; 2] {
    let window = calendar.window(at_s(at));
    let seconds = |us: u64| i64::try_from(us / SECOND_US).expect("below 2^53");
    [seconds(window.start.as_us()), seconds(window.end_us)]
}

#[test]
fn dates_and_days_convert_into_each_other() {
    for (days, date) in [
        (0, (1970, 1, 1)),
        (59, (1970, 3, 1)),
        (11_016, (2000, 2, 29)),
        (-1, (1969, 12, 31)),
        (47_541, (2100, 3, 1)),
        (52_129, (2112, 9, 22)),
    ] {
        assert_eq!(civil_from_days(days), date);
    }
    for days in -800..53_000 {
        let (year, month, day) = civil_from_days(days);
        assert_eq!(days_from_civil(year, month, day), days);
    }
}

#[test]
fn windows_are_those_that_another_library_computes() {
    let mut rows = 0;
    for line in include_str!("windows.txt").lines().filter(|line| !line.starts_with('#')) {
        let [zone, unit, anchor, at, start, end] = line.split(' ').collect::<Vec<_>>()[..] else {
            panic!("{line}")
        };
        let unit = Unit::ALL.into_iter().find(|known| known.name() == unit).expect(line);
        let calendar = calendar(unit, zone, (anchor != "-").then_some(anchor));
        let [at, start, end] = [at, start, end].map(|number| number.parse().expect(line));
        assert_eq!(bounds(calendar, at), [start, end], "{line}");
        rows += 1;
    }
    assert!(rows > 400);
}

#[test]
fn a_day_on_which_the_clocks_change_has_23_or_25_hours() {
    let berlin = calendar(Unit::Day, "Europe/Berlin", None);
    let hours = |at| {
        let [start, end] = bounds(berlin, at);
        (end - start) / 3_600
    };
    assert_eq!(hours(utc([2026, 3, 29, 12])), 23);
    assert_eq!(hours(utc([2026, 10, 25, 12])), 25);
    assert_eq!(hours(utc([2026, 10, 26, 12])), 24);
    // By half an hour.
    let howe = calendar(Unit::Day, "Australia/Lord_Howe", None);
    let [start, end] = bounds(howe, utc([2026, 4, 4, 14]));
    assert_eq!(end - start, 24 * 3_600 + 1_800);
}

#[test]
fn an_hour_that_a_day_does_not_have_or_has_twice_still_begins_a_window() {
    let berlin = calendar(Unit::Day, "Europe/Berlin", Some("2"));
    // 2:00 is skipped, so the window begins at 3:00, which is 1:00 in UTC.
    assert_eq!(
        bounds(berlin, utc([2026, 3, 29, 1])),
        [utc([2026, 3, 29, 1]), utc([2026, 3, 30, 0])]
    );
    assert_eq!(bounds(berlin, utc([2026, 3, 29, 1]) - 1)[1], utc([2026, 3, 29, 1]));
    // 2:00 comes twice, and the first time begins it.
    let [start, end] = bounds(berlin, utc([2026, 10, 25, 1]));
    assert_eq!([start, end], [utc([2026, 10, 25, 0]), utc([2026, 10, 26, 1])]);
    // Midnight is skipped, in Beirut in March.
    let beirut = calendar(Unit::Day, "Asia/Beirut", None);
    let [start, end] = bounds(beirut, utc([2024, 3, 31, 12]));
    assert_eq!([start, end], [utc([2024, 3, 30, 22]), utc([2024, 3, 31, 21])]);
}

#[test]
fn a_month_without_the_anchor_begins_on_its_last_day_and_the_next_on_the_anchor() {
    let billed = calendar(Unit::Month, "UTC", Some("31"));
    let begins = [[1, 31], [2, 28], [3, 31], [4, 30], [5, 31]];
    let begins = begins.map(|[month, day]| utc([2026, month, day, 0]));
    for pair in begins.windows(2) {
        assert_eq!(bounds(billed, pair[0]), [pair[0], pair[1]]);
        assert_eq!(bounds(billed, pair[1] - 1), [pair[0], pair[1]]);
    }
    let leap = [utc([2028, 2, 29, 0]), utc([2028, 3, 31, 0])];
    assert_eq!(bounds(billed, utc([2028, 3, 5, 0])), leap);
    // 2100 is no leap year.
    let century = [utc([2100, 2, 28, 0]), utc([2100, 3, 31, 0])];
    assert_eq!(bounds(billed, utc([2100, 2, 28, 5])), century);
}

#[test]
fn zones_that_change_their_rules_have_no_gap_and_no_overlap() {
    // Samoa had no 30th of December 2011: its window has no length.
    let apia = calendar(Unit::Day, "Pacific/Apia", None);
    let skipped = utc([2011, 12, 30, 10]);
    let [before, after] = [apia.window(at_s(skipped - 1)), apia.window(at_s(skipped))];
    assert_eq!(before.end_us, after.start.as_us());
    assert_eq!(after.number, before.number + 2);
    assert_eq!(apia.start_us(before.number + 1), after.start.as_us());
    for (zone, anchor) in [
        ("Asia/Kathmandu", "5"),
        ("Asia/Pyongyang", "0"),
        ("America/Caracas", "3"),
        ("America/St_Johns", "0"),
        ("Antarctica/Troll", "1"),
        ("Africa/Casablanca", "3"),
        ("Pacific/Apia", "5"),
        ("America/Havana", "0"),
    ] {
        let calendar = calendar(Unit::Day, zone, Some(anchor));
        let mut window = calendar.window(at_s(utc([1984, 12, 30, 0])));
        while window.end_us < at_s(utc([2020, 1, 1, 0])).as_us() {
            let end = Timestamp::saturating_from_us(window.end_us);
            let last = Timestamp::saturating_from_us(window.end_us - 1);
            assert_eq!(calendar.window(last), window, "{zone}");
            assert!(window.end_us - window.start.as_us() <= calendar.longest_us(), "{zone}");
            let next = calendar.window(end);
            assert_eq!(next.start, end, "{zone}");
            window = next;
        }
    }
}

#[test]
fn windows_reach_from_the_epoch_to_the_end_of_time() {
    for unit in Unit::ALL {
        for zone in ["UTC", "America/New_York", "Pacific/Kiritimati"] {
            let calendar = calendar(unit, zone, None);
            let first = calendar.window(Timestamp::ZERO);
            assert_eq!(first.start, Timestamp::ZERO, "{zone}");
            let last = calendar.window(Timestamp::MAX);
            assert!(last.start <= Timestamp::MAX && last.end_us > Timestamp::MAX.as_us());
            assert!(last.end_us < 1 << 53);
        }
    }
}

#[test]
fn equal_calendars_are_one() {
    let one = calendar(Unit::Month, "Europe/Berlin", Some("15"));
    assert!(core::ptr::eq(one, calendar(Unit::Month, "europe/berlin", Some("15"))));
    for (unit, zone, anchor) in [
        (Unit::Month, "Europe/Berlin", Some("14")),
        (Unit::Month, "Europe/Vienna", Some("15")),
        (Unit::Day, "Europe/Berlin", Some("15")),
    ] {
        assert_ne!(one, calendar(unit, zone, anchor));
    }
}
