//! The moments that logs write, in whatever form.

use chrono::{DateTime, NaiveDateTime};
use ratelimit_core::Timestamp;

use super::entry::BadLine;
use crate::text::{decimal, quote};

/// Reads moments. Most lines repeat the last one.
#[derive(Default)]
pub(super) struct Moments {
    last: (String, Timestamp),
}

impl Moments {
    pub(super) fn read(&mut self, text: &str) -> Result<Timestamp, BadLine> {
        if text != self.last.0 || text.is_empty() {
            let at = moment(text).ok_or_else(|| {
                format!(
                    "the time is {}, expected one such as 17/May/2015:10:05:03 +0000, 2015-05-17T10:05:03Z or \
                     1431857103.25, between the years 1970 and 2112",
                    quote(text, 40)
                )
            })?;
            self.last = (text.to_owned(), at);
        }
        Ok(self.last.1)
    }
}

/// The forms with a zone, and those without, which are taken as UTC.
const ZONED: [&str; 4] = [
    "%d/%b/%Y:%H:%M:%S%.f %z",
    "%Y-%m-%dT%H:%M:%S%.f%#z",
    "%Y-%m-%d %H:%M:%S%.f%#z",
    "%Y-%m-%d %H:%M:%S%.f %#z",
];
const UTC: [&str; 6] = [
    "%d/%b/%Y:%H:%M:%S%.f",
    "%Y-%m-%dT%H:%M:%S%.f",
    "%Y-%m-%d %H:%M:%S%.f",
    "%Y/%m/%d %H:%M:%S%.f",
    "%a %b %e %H:%M:%S %Y",
    "%Y-%m-%d %H:%M:%S%.f UTC",
];

/// The moment that a text tells, if it is in the range of the algorithms.
pub(super) fn moment(text: &str) -> Option<Timestamp> {
    let text = text.trim();
    let zoned = |form: &&str| DateTime::parse_from_str(text, form).ok();
    let utc = |form: &&str| NaiveDateTime::parse_from_str(text, form).ok();
    let us = if let Some(us) = since_1970(text) {
        us
    } else if let Some(time) = ZONED.iter().find_map(zoned) {
        time.timestamp_micros().try_into().ok()?
    } else {
        UTC.iter().find_map(utc)?.and_utc().timestamp_micros().try_into().ok()?
    };
    Timestamp::from_us(us)
}

/// Microseconds since 1970 of a number of seconds, milliseconds, microseconds or nanoseconds: its
/// digits tell which, between the years 1973 and 2112.
fn since_1970(text: &str) -> Option<u64> {
    let (whole, millionths) = decimal(text)?;
    let digits = text.find('.').unwrap_or(text.len());
    let millionths = millionths.unwrap_or(0);
    match digits {
        ..=8 => None,
        9..=10 => whole.checked_mul(1_000_000)?.checked_add(millionths),
        11..=13 => whole.checked_mul(1_000)?.checked_add(millionths / 1_000),
        14..=16 => Some(whole),
        _ => Some(whole / 1_000),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_moment_is_read_in_the_forms_of_logs() {
        let whole = 1_431_857_103_000_000;
        for (text, us) in [
            ("17/May/2015:10:05:03 +0000", Some(whole)),
            ("17/May/2015:12:05:03 +0200", Some(whole)),
            ("17/May/2015:10:05:03.250", Some(whole + 250_000)),
            ("2015-05-17T10:05:03Z", Some(whole)),
            ("2015-05-17T10:05:03.25Z", Some(whole + 250_000)),
            ("2015-05-17T12:05:03.000001+02:00", Some(whole + 1)),
            ("2015-05-17T12:05:03+0200", Some(whole)),
            ("2015-05-17 10:05:03", Some(whole)),
            ("2015-05-17 10:05:03.250000 UTC", Some(whole + 250_000)),
            ("2015/05/17 10:05:03", Some(whole)),
            ("Sun May 17 10:05:03 2015", Some(whole)),
            ("1431857103", Some(whole)),
            ("1431857103.25", Some(whole + 250_000)),
            ("1431857103250", Some(whole + 250_000)),
            ("1431857103250000", Some(whole + 250_000)),
            ("1431857103250000999", Some(whole + 250_000)),
            ("", None),
            ("5", None),
            ("today", None),
            ("17/May/1969:10:05:03 +0000", None),
            ("17/May/2113:10:05:03 +0000", None),
            ("2015-05-17", None),
        ] {
            assert_eq!(moment(text).map(Timestamp::as_us), us, "{text}");
        }
    }
}
