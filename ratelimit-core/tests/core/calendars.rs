//! Limits by the windows of a calendar: their decisions, their states, and their text.

use ratelimit_core::algorithm::Write;
use ratelimit_core::{Algorithm as _, AnyAlgorithm, FixedWindow, Limit, Timestamp};

const SECOND_US: u64 = 1_000_000;
const DAY_US: u64 = 86_400 * SECOND_US;

fn at_s(seconds: u64) -> Timestamp {
    Timestamp::saturating_from_us(seconds * SECOND_US)
}

/// An hour of a day since 1970 in UTC, counted by years and months.
fn utc([year, month, day, hour]: [u64; 4]) -> u64 {
    let is_leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let lengths = [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let years: u64 = (1970..year).map(|year| 365 + u64::from(is_leap(year))).sum();
    let months: u64 = lengths.iter().zip(1..month).map(|(length, _)| length).sum();
    (years + months + day - 1) * 86_400 + hour * 3_600
}

/// The table of gubernator's `interval_test.go` (its `GregorianExpiration`, of which each row is
/// the last millisecond of a window). Its minutes and hours are windows of a length here.
#[test]
fn windows_end_when_those_of_gubernator_do() {
    let november = utc([2019, 11, 11, 0]);
    for (words, at, last_ms) in [
        ("1/m", november, 1_573_430_459_999),
        ("1/m", november + 30, 1_573_430_459_999),
        ("1/h", november, 1_573_433_999_999),
        ("1/h", november + 20 * 60 + 1, 1_573_433_999_999),
        ("1/day", november, 1_573_516_799_999),
        ("1/day", utc([2019, 11, 11, 12]) + 10 * 60 + 9, 1_573_516_799_999),
        ("1/month", utc([2019, 11, 1, 0]), 1_575_158_399_999),
        ("1/month", utc([2019, 11, 11, 22]) + 2 * 60 + 23, 1_575_158_399_999),
        ("1/month", utc([2019, 1, 1, 0]), 1_548_979_199_999),
        ("1/year", utc([2019, 1, 1, 0]), 1_577_836_799_999),
        ("1/year", utc([2019, 3, 1, 20]) + 30 * 60 + 1_231, 1_577_836_799_999),
    ] {
        let window: FixedWindow = words.parse().expect(words);
        let decision = window.step(None, at_s(at), 1).decision;
        let end_us = at_s(at).as_us() + decision.reset_after_us;
        assert_eq!(end_us, (last_ms + 1) * 1_000, "{words} at {at}");
    }
}

/// What `IntervallyAlignedRefillSpecification` of bucket4j says of a bucket whose capacity is its
/// refill: nothing comes back before the boundary, all at it, and a caller that was away for long
/// finds the boundaries where they were.
#[test]
fn windows_are_refilled_at_boundaries_as_those_of_bucket4j_are() {
    for (words, first_us, length_us) in [
        ("400/100ms", 100_000, 100_000),
        ("400/m", 60_000_000, 60_000_000),
        ("400/day", DAY_US, DAY_US),
        ("400/day anchor 7", DAY_US + 7 * 3_600_000_000, DAY_US),
        ("400/week", 4 * DAY_US, 7 * DAY_US),
    ] {
        let window: FixedWindow = words.parse().expect(words);
        let at = |us: u64| Timestamp::saturating_from_us(us);
        let full = window.step(None, at(first_us), 400);
        let Write::Put { state, .. } = full.write else { panic!("{words}") };
        let peek = |us: u64| window.step(Some(&state), at(us), 0).decision.remaining;
        assert_eq!(peek(first_us), 0, "{words}");
        // A sixth of the interval later there is nothing, and the wait is the rest.
        let sixth = first_us + length_us / 6;
        let denied = window.step(Some(&state), at(sixth), 1).decision;
        assert_eq!(denied.retry_after_us, Some(length_us - length_us / 6), "{words}");
        assert_eq!(
            (peek(first_us + length_us - 1), peek(first_us + length_us)),
            (0, 400),
            "{words}"
        );
        // In the middle of an interval long after.
        let late = first_us + 326 * length_us + length_us / 2;
        let again = window.step(Some(&state), at(late), 400);
        assert!(again.decision.allowed, "{words}");
        assert_eq!(again.decision.reset_after_us, length_us - length_us / 2, "{words}");
    }
}

#[test]
fn a_clock_that_goes_back_over_the_end_of_a_window_creates_no_capacity() {
    let window: FixedWindow = "10/month zone Europe/Berlin".parse().expect("a limit");
    let begin = utc([2026, 3, 31, 22]);
    let Write::Put { state, .. } = window.step(None, at_s(begin), 10).write else { panic!() };
    for back in [1, 86_400, 90 * 86_400] {
        let denied = window.step(Some(&state), at_s(begin - back), 1).decision;
        assert!(!denied.allowed);
        let wait_s = utc([2026, 4, 30, 22]) - begin + back;
        assert_eq!(denied.retry_after_us, Some(wait_s * SECOND_US));
    }
}

#[test]
fn the_next_window_pays_what_is_owed() {
    let window: FixedWindow = "10/month debt 10".parse().expect("a limit");
    let [january, february, march] = [1, 2, 3].map(|month| utc([2026, month, 10, 0]));
    let forced = window.force(None, at_s(january), 17).expect("it is supported");
    let Write::Put { state, .. } = forced.write else { panic!() };
    assert_eq!(window.owed(Some(&state), at_s(january)), 7);
    let later = |at| window.step(Some(&state), at_s(at), 0).decision;
    assert_eq!((later(february).remaining, later(march).remaining), (3, 10));
    let wait_us = forced.decision.reset_after_us;
    assert_eq!(at_s(january).as_us() + wait_us, at_s(utc([2026, 3, 1, 0])).as_us());
}

/// The state counts with the longest windows, and so seems to be owed for longer.
#[test]
fn a_forced_charge_counts_on_the_day_on_which_all_is_paid() {
    let window: FixedWindow = "10/month debt 10".parse().expect("a limit");
    let [february, april] = [2, 4].map(|month| at_s(utc([2026, month, 1, 0])));
    let owing = window.force(None, february, 17).expect("it is supported").write;
    let forced = window.force(owing.after(None), april, 1).expect("it is supported");
    assert_eq!(forced.decision.remaining, 9);
    let left = window.step(forced.write.after(None), april, 0).decision;
    assert_eq!(left.remaining, 9);
}

#[test]
fn a_state_is_named_by_unit_zone_and_anchor() {
    for (words, kind) in [
        ("1/month zone Europe/Berlin anchor 15", "month(Europe.Berlin.15)"),
        ("1/month", "month(UTC.1)"),
        ("1/week zone America/Port-au-Prince", "week(America.Port-au-Prince.monday)"),
        ("1/day zone Etc/GMT+5 anchor 7", "day(Etc.GMT..5.7)"),
        ("1/day zone Etc/GMT-5 anchor 7", "day(Etc.GMT-5.7)"),
        ("1/year zone utc", "year(UTC)"),
    ] {
        let window: FixedWindow = words.parse().expect(words);
        assert_eq!(window.state_kind(), ["fixed-window/", kind].concat());
        assert!(Limit::new("a", window).is_ok(), "{words}");
    }
}

#[test]
fn the_text_of_a_limit_by_a_calendar_reads_back_as_the_same() {
    for words in [
        "fixed-window 1000/month",
        "fixed-window 1000/month zone Europe/Berlin anchor 15 debt 100",
        "fixed-window 5/week anchor sunday",
        "fixed-window 5/day zone Asia/Kolkata anchor 6",
        "fixed-window 5/year zone America/Argentina/Buenos_Aires",
    ] {
        let algorithm: AnyAlgorithm = words.parse().expect(words);
        assert_eq!(algorithm.to_string(), words);
    }
    // What is said by default is left out, and a zone has the letters of the database.
    let spaced: AnyAlgorithm = "fixed-window 5 / month zone utc anchor 1".parse().expect("a limit");
    assert_eq!(spaced.to_string(), "fixed-window 5/month");
}

#[test]
fn text_that_is_no_calendar_is_refused_with_what_is_accepted() {
    for (words, says) in [
        ("fixed-window 5/month zone Berlin", "\"Berlin\" is not a time zone"),
        ("fixed-window 5/month anchor 32", "a day of the month from 1 to 31"),
        ("fixed-window 5/month anchor 0", "a day of the month from 1 to 31"),
        ("fixed-window 5/month anchor monday", "a day of the month from 1 to 31"),
        ("fixed-window 5/day anchor 24", "an hour from 0 to 23"),
        ("fixed-window 5/week anchor 1", "such as \"monday\""),
        ("fixed-window 5/week anchor mondy", "did you mean \"monday\"?"),
        ("fixed-window 5/year anchor 4", "a year begins on January 1"),
        ("fixed-window 5/d zone Europe/Berlin", "zone has no meaning for a rate of 5/d"),
        ("fixed-window 5/d anchor 4", "anchor has no meaning for a rate of 5/d"),
        ("fixed-window x/month", "\"1000/month\""),
        ("fixed-window 5/month debt 6", "a debt of at most 5"),
        ("fixed-window 5/month burst 6", "no meaning for fixed-window"),
        ("fixed-window 4503599627370496/month", "below 2^52"),
        ("gcra 5/month", "only fixed-window does"),
        ("sliding-log 5/day", "\"5000/d\""),
    ] {
        let message = words.parse::<AnyAlgorithm>().expect_err(words).to_string();
        assert!(message.contains(says), "{words}: {message:?} lacks {says:?}");
    }
}

#[test]
fn the_last_windows_end_after_the_end_of_time() {
    let window: FixedWindow = "3/year zone America/New_York debt 3".parse().expect("a limit");
    let step = window.step(None, Timestamp::MAX, 3);
    assert!(step.decision.allowed && step.decision.reset_after_us > 0);
    let owing = window.force(None, Timestamp::MAX, 6).expect("it is supported");
    assert!(owing.decision.allowed);
}
