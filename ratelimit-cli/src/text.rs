//! Numbers, times and names for people. All arithmetic uses integers, so no share suffers from float rounding.

use ratelimit_core::Timestamp;

/// `1234567` → `1,234,567`.
pub(crate) fn count(n: u64) -> String {
    let digits = n.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

/// A share in tenths of a percent, rounded; never 0 for a part that exists, and never all for a part that is
/// not the whole.
pub(crate) fn share(part: u64, whole: u64) -> String {
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
pub(crate) fn time(timestamp: Timestamp) -> String {
    let us = i64::try_from(timestamp.as_us()).unwrap_or(i64::MAX);
    jiff::Timestamp::from_microsecond(us)
        .map_or_else(|_| timestamp.to_string(), |time| time.to_string())
}

/// A duration in its two largest units: `2 min 5 s`, `1.250 s`, `40 µs`.
pub(crate) fn duration(us: u64) -> String {
    const S: u64 = 1_000_000;
    let pair = |large: u64, large_name: &str, compact: u64, small_name: &str| {
        let rest = us % large / compact;
        match rest {
            0 => format!("{} {large_name}", us / large),
            _ => format!("{} {large_name} {rest} {small_name}", us / large),
        }
    };
    match us {
        0..1_000 => format!("{us} µs"),
        1_000..S => format!("{} ms", decimals(us, 1_000)),
        S..60_000_000 => format!("{} s", decimals(us, S)),
        60_000_000..3_600_000_000 => pair(60 * S, "min", S, "s"),
        3_600_000_000..86_400_000_000 => pair(3_600 * S, "h", 60 * S, "min"),
        _ => pair(86_400 * S, "d", 3_600 * S, "h"),
    }
}

/// `us / unit` with up to three decimals.
fn decimals(us: u64, unit: u64) -> String {
    let thousandths = us % unit * 1_000 / unit;
    let text = format!("{}.{thousandths:03}", us / unit);
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

/// Untrusted text, made safe for a terminal: control characters are escaped, and the result has at most `max`
/// characters.
pub(crate) fn printable(text: &str, max: usize) -> String {
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
pub(crate) fn quoted(text: &str, max: usize) -> String {
    format!("\"{}\"", printable(text, max))
}

/// `1 line`, `2 lines`.
pub(crate) fn plural(n: u64, one: &str, many: &str) -> String {
    format!("{} {}", count(n), if n == 1 { one } else { many })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        for (n, text) in [(0, "0"), (999, "999"), (1_000, "1,000"), (1_234_567, "1,234,567")] {
            assert_eq!(count(n), text);
        }
    }

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
            (1_500, "1.5 ms"),
            (3_000_000, "3 s"),
            (333_334, "333.334 ms"),
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
        assert_eq!(quoted("a\x1b\\x", 20), "\"a\\u{1b}\\x\"");
    }

    #[test]
    fn times_are_utc() {
        let timestamp = Timestamp::from_us(1_431_857_103_000_000).expect("a time");
        assert_eq!(time(timestamp), "2015-05-17T10:05:03Z");
        assert_eq!(time(Timestamp::ZERO), "1970-01-01T00:00:00Z");
    }
}
