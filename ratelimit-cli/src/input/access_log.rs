//! Access logs in the Common and the Combined format.
//!
//! ```text
//! 192.0.2.7 - bob [17/May/2015:10:05:03 +0000] "GET /a?b HTTP/1.1" 200 203 "referrer" "user agent"
//! ```
//!
//! Lines in real logs may be truncated: everything after the status is optional. A number at the end tells how long the
//! request took: `%D` or `%T` of Apache, `$request_time` of nginx.

use std::borrow::Cow;

use jiff::fmt::strtime;
use ratelimit_core::{Op, Timestamp};
use regex::bytes::Regex;

use super::{BadLine, Entry};
use crate::args::UnitArg;
use crate::caller::Caller;
use crate::text::quoted;

/// The expression is never ambiguous about a byte, so it can be matched in one pass.
const LINE: &str = r#"(?x-u)
    ^(\S+)\x20          # 1: the client's address
    \S+\x20             #    its identity after RFC 1413
    (\S+)\x20           # 2: the authenticated user
    \[([^\]]*)\]\x20    # 3: when
    "((?:[^"\\]|\\.)*)" # 4: the request line, with quotes escaped
    \x20(?:\d{3}|-)     #    the status
    (?:\x20|$)"#;

/// What may follow the status: the size, then at least one more field, of which the last is a number.
const DURATION: &str = r#"(?x-u)
    ^\S+(?:\x20(?:"(?:[^"\\]|\\.)*"|[^"\x20]+))*?
    \x20(\d+)(?:\.(\d+))?\s*$"#;

const EXPECTED: &str = "expected `ADDRESS - USER [TIME] \"REQUEST\" STATUS …`";

/// Reads an access log.
#[derive(Debug)]
pub(crate) struct AccessLog {
    line: Regex,
    /// The same expression for user names that contain blanks.
    spaced: Regex,
    duration: Regex,
    /// The unit of a duration, unless it has decimals and is in seconds.
    unit: Option<UnitArg>,
    /// Whether a line ended with a number that has no unit.
    pub(super) lacks_unit: bool,
    /// The last timestamp, as written and as parsed: most lines repeat it.
    last: (Vec<u8>, Timestamp),
}

impl AccessLog {
    pub(crate) fn new(unit: Option<UnitArg>) -> Result<Self, BadLine> {
        let regex = |text: &str| Regex::new(text).map_err(|e| BadLine::new(e.to_string()));
        let spaced = LINE.replacen(r"(\S+)\x20           # 2", r"(.+?)\x20           # 2", 1);
        let (line, spaced, duration) = (regex(LINE)?, regex(&spaced)?, regex(DURATION)?);
        let last = (Vec::new(), Timestamp::ZERO);
        Ok(Self { line, spaced, duration, unit, lacks_unit: false, last })
    }

    pub(crate) fn parse<'l>(&mut self, line: &'l [u8]) -> Result<Entry<'l>, BadLine> {
        let captures = self.line.captures(line).or_else(|| self.spaced.captures(line));
        let captures = captures.ok_or_else(|| reason(line))?;
        let (whole, [ip, user, time, request]) = captures.extract();
        if user.starts_with(b"- ") {
            // Accepted literally, this would attribute all requests of a site to one caller.
            return Err(BadLine::new(format!(
                "has a field too many before its [TIME], such as a virtual host; {EXPECTED}"
            )));
        }
        if time != self.last.0 {
            self.last = (time.to_vec(), parse_time(time)?);
        }
        let ip = String::from_utf8_lossy(ip);
        let mut named = Vec::with_capacity(3);
        named.push((Cow::Borrowed("ip"), ip.clone()));
        if user != b"-" && user != b"\"\"" {
            named.push((Cow::Borrowed("user"), String::from_utf8_lossy(user)));
        }
        if let Some(path) = path(request) {
            named.push((Cow::Borrowed("path"), String::from_utf8_lossy(path)));
        }
        let caller = Caller { bare: Some(ip), named, bare_only: true };
        let duration_us = self.duration_us(line.get(whole.len()..).unwrap_or_default());
        Ok(Entry { at: self.last.1, caller, cost: 1, op: Op::Acquire, duration_us })
    }

    /// How long the request took, from what follows the status.
    fn duration_us(&mut self, rest: &[u8]) -> Option<u64> {
        if !rest.trim_ascii_end().last()?.is_ascii_digit() {
            return None;
        }
        let captures = self.duration.captures(rest)?;
        let number = |digits: &[u8]| str::from_utf8(digits).ok()?.parse::<u64>().ok();
        let whole = number(&captures[1])?;
        let decimals = captures.get(2).map(|decimals| decimals.as_bytes());
        let unit_us = match (self.unit, decimals) {
            (Some(unit), _) => unit.us(),
            (None, Some(_)) => UnitArg::S.us(),
            (None, None) => {
                self.lacks_unit = true;
                return None;
            }
        };
        let mut millionths = [b'0'; 6];
        for (digit, given) in millionths.iter_mut().zip(decimals.unwrap_or_default()) {
            *digit = *given;
        }
        let part_us = number(&millionths)? * unit_us / 1_000_000;
        Some(whole.saturating_mul(unit_us).saturating_add(part_us))
    }
}

fn parse_time(text: &[u8]) -> Result<Timestamp, BadLine> {
    let text = String::from_utf8_lossy(text);
    let time = strtime::parse("%d/%b/%Y:%H:%M:%S %z", &*text)
        .and_then(|parsed| parsed.to_timestamp())
        .map_err(|_| {
            BadLine::new(format!(
                "the time is {}, expected one such as 17/May/2015:10:05:03 +0000",
                quoted(&text, 40)
            ))
        })?;
    let timestamp =
        |time: jiff::Timestamp| Timestamp::from_us(u64::try_from(time.as_microsecond()).ok()?);
    timestamp(time).ok_or_else(|| {
        let text = quoted(&text, 40);
        BadLine::new(format!("the time {text} is not between the years 1970 and 2112"))
    })
}

/// The path of a request line, without query and fragment; for an absolute URI, its path. `None` if the request
/// has no path.
fn path(request: &[u8]) -> Option<&[u8]> {
    let (method, rest) = request.split_at(request.iter().position(|&b| b == b' ')?);
    if method.is_empty() || !method.iter().all(|b| b.is_ascii_alphabetic() || *b == b'-') {
        return None;
    }
    let rest = rest.trim_ascii();
    // A target that contains spaces, against the standard, extends to the protocol.
    let target = match rest.iter().rposition(|&b| b == b' ') {
        Some(at) if rest[at + 1..].starts_with(b"HTTP/") => rest[..at].trim_ascii_end(),
        _ if rest.starts_with(b"HTTP/") => return None,
        _ => rest,
    };
    let end = target.iter().position(|b| matches!(b, b'?' | b'#')).unwrap_or(target.len());
    let target = &target[..end];
    if target.starts_with(b"/") || target == b"*" {
        return Some(target);
    }
    let scheme_end = target.windows(3).position(|three| three == b"://")?;
    let authority = &target[scheme_end + 3..];
    Some(authority.iter().position(|&b| b == b'/').map_or(b"/", |slash| &authority[slash..]))
}

/// Why a line is not one of an access log: the first missing part.
fn reason(line: &[u8]) -> BadLine {
    let text = String::from_utf8_lossy(line);
    let what = match text.split_once(" [").map(|(_, time)| time.split_once("] \"")) {
        None => "has no [TIME]",
        Some(None) => "has no \"REQUEST\" after its [TIME]",
        Some(Some((_, request))) if !request.contains('"') => "ends within its request",
        Some(Some(_)) => "has a broken part before its end",
    };
    BadLine::new(format!("{what}; {EXPECTED}, got {}", quoted(&text, 60)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratelimit_core::Identifiers;

    const START: &str = "192.0.2.7 - - [17/May/2015:10:05:03 +0000] ";

    fn parse(line: &str) -> Result<Entry<'_>, BadLine> {
        AccessLog::new(None).expect("a regex").parse(line.as_bytes())
    }

    #[test]
    fn a_line_may_be_cut_short_after_its_status() {
        for end in [
            "\"GET /a HTTP/1.1\" 200 5 \"-\" \"Mozilla/5.0 (X11)\"",
            "\"GET /a HTTP/1.1\" 200 5 \"-\" \"Mozilla/5.0 (comp",
            "\"GET /a HTTP/1.1\" 200 5 \"http://exam",
            "\"GET /a HTTP/1.1\" 200 5",
            "\"GET /a HTTP/1.1\" 200",
            "\"GET /a HTTP/1.1\" - -",
        ] {
            let line = format!("{START}{end}");
            let entry = parse(&line).expect(&line);
            assert_eq!(entry.at.as_us(), 1_431_857_103_000_000);
            assert_eq!(entry.caller.identifier("ip"), Some("192.0.2.7"));
            assert_eq!(entry.caller.identifier("path"), Some("/a"));
            assert_eq!(entry.caller.identifier("user"), None);
            assert_eq!(entry.caller.bare(), Some("192.0.2.7"));
        }
    }

    #[test]
    fn a_number_behind_the_size_is_how_long_the_request_took() {
        let (with, ua) = (|unit| AccessLog::new(unit).expect("a regex"), "\"-\" \"X (1) \\\" 2\"");
        for (unit, end, us) in [
            (None, "5", None),
            (None, "5 0.25", Some(250_000)),
            (None, &format!("5 {ua} 12.0345678"), Some(12_034_567)),
            (None, &format!("5 {ua} \"-\" 0.000"), Some(0)),
            (None, &format!("5 {ua} 7"), None),
            (None, &format!("5 {ua} -"), None),
            (None, "5 \"-\" \"X 0.5", None),
            (None, "5 \"-\" \"X 0.5\"", None),
            (Some(UnitArg::Us), &format!("5 {ua} 7"), Some(7)),
            (Some(UnitArg::Ms), &format!("5 {ua} 7.25"), Some(7_250)),
            (Some(UnitArg::S), "- 7", Some(7_000_000)),
        ] {
            let mut log = with(unit);
            let line = format!("{START}\"GET / HTTP/1.1\" 200 {end}");
            assert_eq!(log.parse(line.as_bytes()).expect(&line).duration_us, us, "{line}");
            assert_eq!(log.lacks_unit, end.ends_with(" 7") && unit.is_none(), "{line}");
        }
    }

    #[test]
    fn a_path_excludes_query_and_fragment() {
        for (request, expected) in [
            ("GET / HTTP/1.1", Some("/")),
            ("GET /a/b?x=1#y HTTP/1.1", Some("/a/b")),
            ("GET /a#y?x HTTP/1.0", Some("/a")),
            ("GET /a", Some("/a")),
            ("GET /a b HTTP/1.1", Some("/a b")),
            ("GET http://example.com/a?x HTTP/1.1", Some("/a")),
            ("GET http://example.com HTTP/1.1", Some("/")),
            ("M-SEARCH * HTTP/1.1", Some("*")),
            (r#"GET /\"quoted\" HTTP/1.1"#, Some(r#"/\"quoted\""#)),
            ("CONNECT example.com:443 HTTP/1.1", None),
            ("-", None),
            ("GET", None),
            ("GET HTTP/1.1", None),
            (r"\x16\x03\x01", None),
            (r"\x16 /a", None),
            ("", None),
        ] {
            let line = format!("{START}\"{request}\" 200 5");
            assert_eq!(parse(&line).expect(&line).caller.identifier("path"), expected, "{request}");
        }
    }

    #[test]
    fn users_and_addresses_are_kept_as_written() {
        let line = "2001:db8::1 - Bob Smith [17/May/2015:12:05:03 +0200] \"GET / HTTP/1.1\" 200 5";
        let entry = parse(line).expect("a line");
        assert_eq!(entry.caller.identifier("ip"), Some("2001:db8::1"));
        assert_eq!(entry.caller.identifier("user"), Some("Bob Smith"));
        assert_eq!(entry.at.as_us(), 1_431_857_103_000_000);
    }

    #[test]
    fn an_empty_or_dash_user_is_absent() {
        for user in ["-", "\"\""] {
            let line =
                format!("192.0.2.7 - {user} [17/May/2015:12:05:03 +0200] \"GET / HTTP/1.1\" 401 5");
            assert_eq!(parse(&line).expect("a line").caller.identifier("user"), None, "{user}");
        }
    }

    #[test]
    fn bad_lines_say_what_is_missing() {
        let with_time = |time| format!("192.0.2.7 - - [{time}] \"GET / HTTP/1.1\" 200 5");
        for (line, says) in [
            ("hello".to_owned(), "no [TIME]"),
            (format!("{START}200"), "no \"REQUEST\""),
            (format!("{START}\"GET /a"), "ends within its request"),
            (format!("{START}\"GET /a HTTP/1.1\""), "broken part"),
            (with_time("17/Mai/2015:10:05:03 +0000"), "the time is"),
            (with_time("17/May/2015:10:05:03"), "the time is"),
            (with_time("31/Feb/2015:10:05:03 +0000"), "the time is"),
            (with_time("31/Dec/1969:23:59:59 +0000"), "1970"),
            (with_time("01/Jan/2200:00:00:00 +0000"), "2112"),
            (format!("shop.example:443 {START}\"GET / HTTP/1.1\" 200 5"), "a field too many"),
            ("\u{1b}[2J".to_owned(), "got \"\\u{1b}[2J\""),
            (with_time("\u{1b}"), "the time is \"\\u{1b}\","),
        ] {
            let reason = parse(&line).expect_err(&line).to_string();
            assert!(reason.contains(says), "{line}\n→ {reason}\nlacks {says}");
        }
    }

    #[test]
    fn an_invalid_time_is_not_cached() {
        let mut parser = AccessLog::new(None).expect("a regex");
        let bad = b"192.0.2.7 - - [x] \"GET / HTTP/1.1\" 200 5";
        assert!(parser.parse(bad).is_err());
        assert!(parser.parse(bad).is_err());
    }

    #[test]
    fn invalid_utf8_is_replaced_not_refused() {
        let mut parser = AccessLog::new(None).expect("a regex");
        let line = b"192.0.2.7 - - [17/May/2015:10:05:03 +0000] \"GET /\xff HTTP/1.1\" 200 5";
        let entry = parser.parse(line).expect("a line");
        assert_eq!(entry.caller.identifier("path"), Some("/\u{fffd}"));
    }
}
