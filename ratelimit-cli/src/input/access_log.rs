//! Access logs in the Common and the Combined format.
//!
//! ```text
//! 192.0.2.7 - bob [17/May/2015:10:05:03 +0000] "GET /a?b HTTP/1.1" 200 203 "referrer" "user agent"
//! ```
//!
//! Lines in real logs may be truncated: everything after the status is optional. A number at the
//! end tells how long the request took: `%D` or `%T` of Apache, `$request_time` of nginx.

use chrono::DateTime;
use clap::ValueEnum;
use ratelimit_core::Timestamp;
use ratelimit_core::store::Op;

use super::entry::{BadLine, InputEntry};
use crate::caller::{Caller, Named};
use crate::text::{decimal, quote};

const EXPECTED: &str = "expected `ADDRESS - USER [TIME] \"REQUEST\" STATUS …`";

/// A unit of time, in microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum UnitArg {
    /// Microseconds, as `%D` of Apache.
    Us = 1,
    /// Milliseconds.
    Ms = 1_000,
    /// Seconds, as `%T` of Apache.
    S = 1_000_000,
}

/// Reads an access log.
pub(crate) struct AccessLog {
    /// The unit of a duration, unless it has decimals and is in seconds.
    unit: Option<UnitArg>,
    /// Whether a line ended with a number that has no unit.
    pub(crate) lacks_unit: bool,
    /// The last timestamp, as written and as parsed: most lines repeat it.
    last: (Vec<u8>, Timestamp),
}

impl AccessLog {
    pub(crate) const fn new(unit: Option<UnitArg>) -> Self {
        Self { unit, lacks_unit: false, last: (Vec::new(), Timestamp::ZERO) }
    }

    pub(crate) fn parse(&mut self, line: &[u8]) -> Result<InputEntry, BadLine> {
        let [ip, user, time, request, rest] = fields(line).map_err(|what| {
            let line = quote(&String::from_utf8_lossy(line), 60);
            format!("{what}; {EXPECTED}, got {line}")
        })?;
        if user.starts_with(b"- ") {
            // Accepted literally, this would attribute all requests of a site to one caller.
            let what = "has a field too many before its [TIME], such as a virtual host";
            return Err(format!("{what}; {EXPECTED}"));
        }
        if time != self.last.0 {
            let text = String::from_utf8_lossy(time);
            let at = moment(&text).ok_or_else(|| {
                format!(
                    "the time is {}, expected one such as 17/May/2015:10:05:03 +0000 between the years 1970 and 2112",
                    quote(&text, 40)
                )
            })?;
            self.last = (time.to_vec(), at);
        }
        let user = Some(user).filter(|user| user != b"-" && user != b"\"\"");
        let text = |bytes| String::from_utf8_lossy(bytes).into_owned();
        let named = [
            ("ip", Some(ip)),
            ("user", user),
            ("path", path(request)),
            ("method", method(request)),
        ];
        let named = named.into_iter().filter_map(|(name, value)| Some((name.into(), text(value?))));
        let named = Named { list: named.collect(), bare_only: true };
        let caller = Caller { bare: Some(text(ip)), named };
        let duration_us = self.duration_us(rest);
        let (at, costs, op) = (self.last.1, 1.into(), Op::Acquire);
        Ok(InputEntry { at, caller, costs, op, duration_us, ..InputEntry::default() })
    }

    /// How long the request took, from what follows the status.
    fn duration_us(&mut self, rest: &[u8]) -> Option<u64> {
        let (whole, millionths) = decimal(str::from_utf8(last_field(rest)?).ok()?)?;
        let unit = self.unit.or(millionths.map(|_| UnitArg::S));
        self.lacks_unit |= unit.is_none();
        let unit_us = unit? as u64;
        let part_us = millionths.unwrap_or(0) * unit_us / 1_000_000;
        Some(whole.saturating_mul(unit_us).saturating_add(part_us))
    }
}

/// The moment `17/May/2015:10:05:03 +0000`, if it is one in the range of the algorithms.
fn moment(text: &str) -> Option<Timestamp> {
    let time = DateTime::parse_from_str(text, "%d/%b/%Y:%H:%M:%S %z").ok()?;
    Timestamp::from_us(time.timestamp_micros().try_into().ok()?)
}

/// The method of a request line. `None` if what stands there is none, as of a request in TLS.
fn method(request: &[u8]) -> Option<&[u8]> {
    let (method, _) = until(request, b' ')?;
    let is_method = |b: &u8| b.is_ascii_alphabetic() || *b == b'-';
    Some(method).filter(|method| !method.is_empty() && method.iter().all(is_method))
}

/// The path of a request line, without query and fragment; for an absolute URI, its path. `None` if
/// the request has no path.
fn path(request: &[u8]) -> Option<&[u8]> {
    let rest = request[method(request)?.len()..].trim_ascii();
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

/// The fields of a line that a request is made of: its address, user, time and request, and what
/// follows its status. Or what keeps it from being one. Each byte is looked at a bounded number of
/// times, whatever a client sent.
fn fields(line: &[u8]) -> Result<[&[u8]; 5], &'static str> {
    const NO_TIME: &str = "has no [TIME]";
    let (ip, line) = word(line).ok_or(NO_TIME)?;
    let (_identity, line) = word(line).ok_or(NO_TIME)?;
    let mut what = NO_TIME;
    let mut begin = 1;
    // A user's name may contain blanks and brackets: it ends before the first [TIME] that a request
    // follows.
    for end in (0..line.len()).filter(|&at| line[at] == b']') {
        let time =
            line.get(begin..end).and_then(|text| text.windows(2).rposition(|two| two == b" ["));
        if let Some(at) = time.map(|at| begin + at) {
            what = match after_time(&line[end + 1..]) {
                Ok((request, rest)) => {
                    return Ok([ip, &line[..at], &line[at + 2..end], request, rest]);
                }
                Err(what) => what,
            };
        }
        begin = end + 1;
    }
    Err(what)
}

/// The request, and what follows the status.
fn after_time(text: &[u8]) -> Result<(&[u8], &[u8]), &'static str> {
    let request = text.strip_prefix(b" \"").ok_or("has no \"REQUEST\" after its [TIME]")?;
    let (request, text) = until_quote(request).ok_or("ends within its request")?;
    let broken = "has a broken part before its end";
    let text = text.strip_prefix(b" ").ok_or(broken)?;
    let (status, rest) = until(text, b' ').unwrap_or((text, b""));
    let is_status = status == b"-" || status.len() == 3 && status.iter().all(u8::is_ascii_digit);
    if is_status { Ok((request, rest)) } else { Err(broken) }
}

/// The user agent of a line in the Combined format: the second quoted field after the size.
pub(crate) fn agent(line: &str) -> Option<&str> {
    let [.., rest] = fields(line.as_bytes()).ok()?;
    let (_size, rest) = until(rest, b' ')?;
    let (_referrer, rest) = until_quote(rest.strip_prefix(b"\"")?)?;
    let (agent, _) = until_quote(rest.strip_prefix(b" \"")?)?;
    str::from_utf8(agent).ok().filter(|agent| !["", "-"].contains(agent))
}

/// The last of the fields after the size, unless it stands in quotes.
fn last_field(rest: &[u8]) -> Option<&[u8]> {
    let (_size, mut rest) = until(rest.trim_ascii_end(), b' ')?;
    loop {
        rest = match (rest.strip_prefix(b"\""), until(rest, b' ')) {
            (Some(quoted), _) => until_quote(quoted)?.1.strip_prefix(b" ")?,
            (None, Some((field, rest))) if !field.contains(&b'"') => rest,
            (None, Some(_)) => return None,
            (None, None) => return Some(rest),
        };
    }
}

/// The first word, and what follows the blank behind it.
fn word(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let is_word = |word: &[u8]| !word.is_empty() && !word.iter().any(u8::is_ascii_whitespace);
    until(text, b' ').filter(|(word, _)| is_word(word))
}

/// What stands before the first of these bytes, and behind it.
fn until(text: &[u8], end: u8) -> Option<(&[u8], &[u8])> {
    let at = text.iter().position(|&b| b == end)?;
    Some((&text[..at], &text[at + 1..]))
}

/// What stands before the first quote that no backslash escapes, and behind it.
fn until_quote(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let mut is_escaped = false;
    let at = text.iter().position(|&b| {
        let is_end = b == b'"' && !is_escaped;
        is_escaped = b == b'\\' && !is_escaped;
        is_end
    })?;
    Some((&text[..at], &text[at + 1..]))
}

#[cfg(test)]
mod tests {
    use super::*;

    const START: &str = "192.0.2.7 - - [17/May/2015:10:05:03 +0000] ";

    fn parse(line: &str) -> Result<InputEntry, BadLine> {
        AccessLog::new(None).parse(line.as_bytes())
    }

    #[test]
    fn a_line_has_an_address_a_user_a_path_and_a_time_and_may_be_cut_short_after_its_status() {
        let request = "\"GET /a HTTP/1.1\" 200";
        let with = |user: &str, zone: &str| {
            format!("2001:db8::1 - {user} [17/May/2015:{zone}] {request} 5")
        };
        let of = |end: &str| format!("2001:db8::1 - - [17/May/2015:10:05:03 +0000] {end}");
        for (line, user) in [
            (of(&format!("{request} 5 \"-\" \"Mozilla/5.0 (X11)\"")), None),
            (of(&format!("{request} 5 \"-\" \"Mozilla/5.0 (comp")), None),
            (of(&format!("{request} 5 \"http://exam")), None),
            (of(request), None),
            (of("\"GET /a HTTP/1.1\" - -"), None),
            (with("\"\"", "12:05:03 +0200"), None),
            (with("bob", "04:35:03 -0530"), Some("bob")),
            (with("Bob Smith", "10:05:03 +0000"), Some("Bob Smith")),
            (with("Bob] [Smith", "10:05:03 +0000"), Some("Bob] [Smith")),
            (with("Bob [x", "10:05:03 +0000"), Some("Bob [x")),
        ] {
            let entry = parse(&line).expect(&line);
            assert_eq!(entry.at.as_us(), 1_431_857_103_000_000, "{line}");
            let caller = &entry.caller;
            let named = ["ip", "user", "path", "method"].map(|name| caller.identifier(name));
            assert_eq!(named, [Some("2001:db8::1"), user, Some("/a"), Some("GET")], "{line}");
            assert_eq!(caller.bare.as_deref(), Some("2001:db8::1"));
        }
        let entry =
            AccessLog::new(None).parse(b"h - - [17/May/2015:10:05:03 +0000] \"GET /\xff\" 200");
        assert_eq!(entry.expect("a line").caller.identifier("path"), Some("/\u{fffd}"));
    }

    #[test]
    fn a_number_behind_the_size_is_how_long_the_request_took() {
        let ua = "\"-\" \"X (1) \\\" 2\"";
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
            let mut log = AccessLog::new(unit);
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
    fn the_method_is_the_first_word_of_a_request_that_has_one() {
        for (request, expected) in [
            ("POST /login HTTP/1.1", Some("POST")),
            ("get /", Some("get")),
            ("M-SEARCH * HTTP/1.1", Some("M-SEARCH")),
            ("CONNECT example.com:443 HTTP/1.1", Some("CONNECT")),
            (r"\x16 /a", None),
            ("GET", None),
            ("-", None),
            (" /a", None),
        ] {
            let line = format!("{START}\"{request}\" 200 5");
            assert_eq!(
                parse(&line).expect(&line).caller.identifier("method"),
                expected,
                "{request}"
            );
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
            let mut log = AccessLog::new(None);
            let reason = log.parse(line.as_bytes()).expect_err(&line);
            assert!(log.parse(line.as_bytes()).is_err(), "a wrong time is not remembered: {line}");
            assert!(reason.contains(says), "{line}\n→ {reason}\nlacks {says}");
        }
    }
}
