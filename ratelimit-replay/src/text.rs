//! Numbers, times and names for people. All arithmetic uses integers, so no share suffers from
//! float rounding.

use std::time::{Duration, UNIX_EPOCH};

use ratelimit_core::{AnyAlgorithm, Limit, Timestamp};

/// `1234567` → `1,234,567`.
pub fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut grouped = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// An algorithm in the words of a document, in the place of that of a limit.
pub fn in_words(algorithm: &AnyAlgorithm, limit: &Limit<AnyAlgorithm>) -> String {
    format!("{algorithm}{}", if limit.counts_attempts() { " count attempts" } else { "" })
}

/// A share in tenths of a percent, rounded; never 0 for a part that exists, and never all for a
/// part that is not the whole.
pub fn share(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "–".to_owned();
    }
    let (part, whole) = (u128::from(part), u128::from(whole));
    let tenths = (part * 2000 + whole) / (whole * 2);
    match tenths {
        0 if part > 0 => "<0.1%".to_owned(),
        1000 if part < whole => ">99.9%".to_owned(),
        _ => format!("{}.{}%", tenths / 10, tenths % 10),
    }
}

/// A moment in UTC, formatted as in RFC 3339.
pub fn time(timestamp: Timestamp) -> String {
    let time = UNIX_EPOCH + Duration::from_micros(timestamp.as_us());
    let text = humantime::format_rfc3339_micros(time).to_string();
    text.replacen(".000000Z", "Z", 1)
}

/// A duration in its two largest units: `2 min 5 s`, `1 s 250 ms`, `40 µs`.
pub fn duration(us: u64) -> String {
    const UNITS: [(u64, &str); 6] = [
        (86_400_000_000, "d"),
        (3_600_000_000, "h"),
        (60_000_000, "min"),
        (1_000_000, "s"),
        (1_000, "ms"),
        (1, "µs"),
    ];
    let mut rest = us;
    let mut parts = Vec::new();
    for (unit, name) in UNITS.into_iter().skip_while(|(unit, _)| us.max(1) < *unit).take(2) {
        if rest >= unit || us == 0 {
            parts.push(format!("{} {name}", rest / unit));
        }
        rest %= unit;
    }
    parts.join(" ")
}

/// The whole part of a number such as `12` or `12.5`, and the millionths behind its point, if it
/// has one. Further decimals are cut.
pub(crate) fn decimal(text: &str) -> Option<(u64, Option<u64>)> {
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    let number = |text: &str| Some(text).filter(|text| digits(text))?.parse().ok();
    let Some((whole, decimals)) = text.split_once('.') else { return Some((number(text)?, None)) };
    let millionths =
        format!("{decimals:0<6}").get(..6).and_then(number).filter(|_| digits(decimals))?;
    Some((number(whole)?, Some(millionths)))
}

/// Untrusted text, made safe for a terminal: control characters are escaped, and the result has at
/// most `max` characters.
pub fn printable(text: &str, max: usize) -> String {
    let mut shown = String::new();
    for (place, c) in text.chars().enumerate() {
        if place == max {
            shown.push('…');
            break;
        }
        // Direction marks would reverse the rest of the line.
        let turns = matches!(c, '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
        if c.is_control() || turns {
            shown.extend(c.escape_unicode());
        } else {
            shown.push(c);
        }
    }
    shown
}

/// As [`printable`], in quotes.
pub fn quote(text: &str, max: usize) -> String {
    format!("\"{}\"", printable(text, max))
}

/// `1 line`, `2 lines`.
pub fn plural(n: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(n), if n == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_rounded_and_never_hide_the_last_one() {
        for (part, whole, text) in [
            (0, 0, "–"),
            (0, 5, "0.0%"),
            (1, 3, "33.3%"),
            (2, 3, "66.7%"),
            (5, 5, "100.0%"),
            (1, 10_000_000, "<0.1%"),
            (9_999_999, 10_000_000, ">99.9%"),
            (u64::MAX, u64::MAX, "100.0%"),
        ] {
            assert_eq!(share(part, whole), text, "{part}/{whole}");
        }
    }

    #[test]
    fn durations_show_their_two_largest_units() {
        for (us, text) in [
            (0, "0 µs"),
            (1_500, "1 ms 500 µs"),
            (3_000_000, "3 s"),
            (333_334, "333 ms 334 µs"),
            (60_000_001, "1 min"),
            (125_000_000, "2 min 5 s"),
            (3_600_000_000, "1 h"),
            (90_061_000_000, "1 d 1 h"),
        ] {
            assert_eq!(duration(us), text);
        }
    }

    #[test]
    fn untrusted_text_cannot_control_the_terminal() {
        assert_eq!(printable("a\x1b[2Jb\n", 20), "a\\u{1b}[2Jb\\u{a}");
        assert_eq!(printable("äöüß", 3), "äöü…");
        assert_eq!(quote("a\x1b\\x", 20), "\"a\\u{1b}\\x\"");
    }

    #[test]
    fn times_are_utc() {
        for (us, text) in [
            (0, "1970-01-01T00:00:00Z"),
            (1_431_857_103_000_000, "2015-05-17T10:05:03Z"),
            (1_431_857_103_250_000, "2015-05-17T10:05:03.250000Z"),
            (Timestamp::MAX.as_us(), "2112-09-17T23:53:47.370495Z"),
        ] {
            assert_eq!(time(Timestamp::saturating_from_us(us)), text);
        }
    }
}
