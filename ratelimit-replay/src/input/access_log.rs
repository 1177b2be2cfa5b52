//! Access logs in the Common and the Combined format, with what servers put before their address.
//!
//! ```text
//! 192.0.2.7 - bob [17/May/2015:10:05:03 +0000] "GET /a?b HTTP/1.1" 200 203 "referrer" "user agent"
//! ```
//!
//! Lines in real logs may be truncated: everything after the status is optional. A number at the
//! end tells how long the request took: `%D` or `%T` of Apache, `$request_time` of nginx.
//!
//! Before the address may stand a virtual host (`other_vhosts_access.log` of Debian), and in its
//! place a list of the client and its proxies. A name is a client only before `- USER [TIME]`, in a
//! line that has no address elsewhere.

use std::borrow::Cow;

use compact_str::CompactString;

use super::entry::BadLine;
use super::found::{Found, LogOptions, Role, Source, UnitArg, check_user};
use super::request::{host_name, is_host};
use crate::address::{address, client as client_of};
use crate::text::{decimal, quote};

const EXPECTED: &str = "expected `ADDRESS - USER [TIME] \"REQUEST\" STATUS …`";

/// The fields of a line, by the names under which an identifier may ask for one.
const NAMES: [&str; 10] =
    ["ip", "user", "time", "request", "status", "size", "referrer", "agent", "host", "forwarded"];

/// Reads an access log.
#[allow(clippy::struct_excessive_bools, reason = "each is seen by itself")]
pub(crate) struct AccessLog {
    /// Identifiers that the user asks for, with the places of their names.
    wanted: Vec<(usize, usize)>,
    /// Whether a line ended with a number that has no unit.
    pub(crate) lacks_unit: bool,
    /// Whether a line began with a virtual host, or with a list of addresses.
    pub(crate) has_hosts: bool,
    pub(crate) has_lists: bool,
    /// Whether a line had the addresses that proxies forward, behind the agent.
    pub(crate) has_forwarded: bool,
    /// How many lines have no such address, though the user asks for it.
    pub(crate) unforwarded: u64,
    /// Whether a line ended with two numbers that may be durations.
    pub(crate) has_two_durations: bool,
}

impl AccessLog {
    pub(crate) fn new(options: &LogOptions) -> Result<Self, String> {
        let mut wanted = Vec::new();
        for (place, (_, source)) in options.identifiers.iter().enumerate() {
            let Source::Field(name) = source else { continue };
            let found = NAMES.iter().position(|known| known == name).ok_or_else(|| {
                format!(
                    "an access log has no field {}; it has {}",
                    quote(name, 40),
                    NAMES.join(", ")
                )
            })?;
            wanted.push((place, found));
        }
        let (has_hosts, has_lists, has_forwarded) = (false, false, false);
        let (lacks_unit, has_two_durations) = (false, false);
        Ok(Self {
            wanted,
            lacks_unit,
            has_hosts,
            has_lists,
            has_forwarded,
            unforwarded: 0,
            has_two_durations,
        })
    }

    pub(super) fn find<'l>(
        &mut self,
        line: &'l [u8],
        options: &LogOptions,
    ) -> Result<Found<'l>, BadLine> {
        let fields = fields(line).map_err(|what| {
            let line = quote(&String::from_utf8_lossy(line), 60);
            format!("{what}; {EXPECTED}, got {line}")
        })?;
        self.has_hosts |= fields.host.is_some();
        self.has_lists |= fields.client.contains(&b',');
        self.has_forwarded = self.has_forwarded || forwarded(fields.rest).is_some();
        let mut found = Found::default();
        let mut set = |role, bytes| found.set(role, text(bytes));
        set(Role::Client, fields.client);
        set(Role::User, fields.user);
        set(Role::Time, fields.time);
        set(Role::Request, fields.request);
        set(Role::Host, fields.host.unwrap_or_default());
        if options.keeps_lines {
            set(Role::Agent, quoted(fields.rest, 2).unwrap_or_default());
        }
        if let Some(number) = last_field(fields.rest).and_then(|last| str::from_utf8(last).ok()) {
            let is_number = number.bytes().all(|b| b.is_ascii_digit());
            match options.unit {
                // A number with decimals is in seconds, unless the user tells another unit.
                Some(unit) => found.set(Role::Duration(unit), number.into()),
                None if is_number => self.lacks_unit = true,
                None => found.set(Role::Duration(UnitArg::S), number.into()),
            }
            if options.unit.is_none() && found.too_long.take().is_some() {
                // It is another number, such as a time.
                (found.duration_us, found.has_decimals) = (None, false);
            }
            self.has_two_durations |= found.duration_us.is_some()
                && [Some(number), before_last(fields.rest)].into_iter().all(is_decimal);
        }
        for (place, name) in &self.wanted {
            let size = || fields.rest.split(|&b| b == b' ').next();
            let value = match NAMES[*name] {
                "ip" => Some(fields.client),
                "user" => Some(fields.user),
                "time" => Some(fields.time),
                "request" => Some(fields.request),
                "status" => Some(fields.status),
                "size" => size(),
                "referrer" => quoted(fields.rest, 1),
                "agent" => quoted(fields.rest, 2),
                "forwarded" => {
                    let list = forwarded(fields.rest);
                    let is_client =
                        options.identifiers.get(*place).is_some_and(|(name, _)| name == "ip");
                    self.unforwarded += u64::from(list.is_none() && is_client);
                    list
                }
                _ => fields.host,
            };
            let value = value.map(text);
            found.identifiers.extend(value.map(|value| (*place, value)));
        }
        Ok(found)
    }
}

/// The text of a field. Most are UTF-8, which is checked faster than it is mended.
fn text(bytes: &[u8]) -> Cow<'_, str> {
    str::from_utf8(bytes).map_or_else(|_| String::from_utf8_lossy(bytes), Cow::Borrowed)
}

/// The fields of a line that a request is made of.
struct Fields<'l> {
    host: Option<&'l [u8]>,
    /// The address, or a list that begins with it.
    client: &'l [u8],
    user: &'l [u8],
    time: &'l [u8],
    request: &'l [u8],
    status: &'l [u8],
    /// What follows the status.
    rest: &'l [u8],
}

/// The fields of a line, or what keeps it from being a request. Each byte is looked at a bounded
/// number of times, whatever a client sent.
fn fields(line: &[u8]) -> Result<Fields<'_>, String> {
    let mut what = "has no [TIME]";
    let mut begin = 0;
    // A user's name may contain blanks and brackets: it ends before the first [TIME] that a request
    // follows.
    for end in (0..line.len()).filter(|&at| line[at] == b']') {
        let time =
            line.get(begin..end).and_then(|text| text.windows(2).rposition(|two| two == b" ["));
        if let Some(at) = time.map(|at| begin + at) {
            what = match after_time(&line[end + 1..]) {
                Ok([request, status, rest]) => {
                    let Who { host, client, user, is_name } = before_time(&line[..at])?;
                    if is_name && let Some(later) = address_in(rest) {
                        return Err(no_client(client, later));
                    }
                    let time = &line[at + 2..end];
                    return Ok(Fields { host, client, user, time, request, status, rest });
                }
                Err(what) => what,
            };
        }
        begin = end + 1;
    }
    Err(what.to_owned())
}

/// What stands before the time.
struct Who<'l> {
    host: Option<&'l [u8]>,
    client: &'l [u8],
    user: &'l [u8],
    /// Whether the client is the name of a host.
    is_name: bool,
}

fn before_time(head: &[u8]) -> Result<Who<'_>, String> {
    const NO_CLIENT: &str = "has no client before its [TIME]";
    let (first, behind_first) = word(head).ok_or(NO_CLIENT)?;
    let shown = |bytes| quote(&String::from_utf8_lossy(bytes), 40);
    let name = host_name(first);
    let listed = clients(head);
    // A virtual host may be an address, too: then it has a port, and another address follows.
    let may_be_host = listed.is_none_or(|(list, _)| list == first && name.len() < first.len());
    let behind_host = Some(behind_first).filter(|_| may_be_host && is_name(name));
    let (host, (client, rest)) = match (behind_host.and_then(clients), listed) {
        (Some(client), _) => (Some(name), client),
        (None, Some(client)) => (None, client),
        (None, None) => {
            let mut later = behind_first.split(u8::is_ascii_whitespace);
            if let Some(later) = later.find(|word| word.len() > 6 && is_known(word)) {
                return Err(no_client(first, later));
            }
            if !is_name(first) {
                let first = shown(first);
                return Err(format!("begins with {first}, which is no address and no name"));
            }
            let is_classical = word(behind_first).is_some_and(|(identity, _)| identity == b"-");
            if !is_classical {
                let first = shown(first);
                return Err(format!("begins with {first}, which is no address, and no - follows"));
            }
            (None, (first, behind_first))
        }
    };
    let (identity, user) = word(rest).unwrap_or((rest, b""));
    if identity.contains(&b',') || is_known(identity) {
        return Err("has two clients before its [TIME]; name one by --log-format".to_owned());
    }
    let mut user = user.trim_ascii();
    if identity != b"-" && user.contains(&b' ') {
        return Err(
            "has a field too many before its [TIME]; tell the format by --log-format".to_owned()
        );
    }
    // What old ingress controllers write behind the address: `- [ADDRESS] - USER`.
    if user.starts_with(b"[")
        && let Some((list, behind)) = until(&user[1..], b']')
        && let Some(behind) = behind.strip_prefix(b" - ")
        && first_of(list) == first_of(client)
    {
        user = behind;
    }
    check_user(&text(user))?;
    let is_name = listed.is_none() && host.is_none() && client != b"-";
    Ok(Who { host, client, user, is_name })
}

/// The error of a line that has an address behind the client's place, and none in it: a name there
/// would be one client for all.
fn no_client(first: &[u8], later: &[u8]) -> String {
    let [first, later] = [first, later].map(|bytes| quote(&text(bytes), 40));
    format!("begins with {first}, which is no address, and {later} is one")
}

/// The first field behind the status that is an address or has one in a list.
fn address_in(mut rest: &[u8]) -> Option<&[u8]> {
    loop {
        rest = rest.trim_ascii_start();
        let (field, behind) = match rest.strip_prefix(b"\"") {
            Some(quoted) => until_quote(quoted)?,
            None => word(rest)?,
        };
        let mut members = field.split(|&b| b == b',');
        if members.any(|member| member.len() > 6 && is_known(member)) {
            return Some(field);
        }
        rest = behind;
    }
}

/// The client of a list, as it is counted.
fn first_of(list: &[u8]) -> CompactString {
    client_of(&text(list), 128)
}

/// The address of a client, or a list that begins with it, by commas, and what follows.
fn clients(head: &[u8]) -> Option<(&[u8], &[u8])> {
    let is_member = |word: &[u8]| is_known(word) || matches!(word, b"-" | b"unknown");
    let (mut member, mut rest) = word(head)?;
    while let Some(known) = member.strip_suffix(b",") {
        (member, rest) = word(rest).filter(|_| is_member(known))?;
    }
    let list = &head[..head.len() - rest.len()];
    let mut members = member.split(|&b| b == b',');
    members.all(is_known).then(|| (list.trim_ascii_end(), rest))
}

/// Whether a word is an address.
fn is_known(word: &[u8]) -> bool {
    str::from_utf8(word).is_ok_and(|word| address(word).is_some())
}

/// Whether a word may be a host.
fn is_name(word: &[u8]) -> bool {
    is_known(word) || is_host(word)
}

/// The request, the status, and what follows it.
fn after_time(text: &[u8]) -> Result<[&[u8]; 3], &'static str> {
    let request = text.strip_prefix(b" \"").ok_or("has no \"REQUEST\" after its [TIME]")?;
    let (request, text) = until_quote(request).ok_or("ends within its request")?;
    if is_known(request) {
        return Err("has an address in the place of its request");
    }
    let broken = "has a broken part before its end";
    let text = text.strip_prefix(b" ").ok_or(broken)?;
    let (status, rest) = until(text, b' ').unwrap_or((text, b""));
    let is_status = status == b"-" || status.len() == 3 && status.iter().all(u8::is_ascii_digit);
    if is_status { Ok([request, status, rest]) } else { Err(broken) }
}

/// The quoted field of this number behind the size: the referrer is the first, the agent the
/// second.
fn quoted(rest: &[u8], number: usize) -> Option<&[u8]> {
    let (_size, mut rest) = until(rest, b' ')?;
    let mut field = &rest[..0];
    for _ in 0..number {
        (field, rest) = until_quote(rest.trim_ascii_start().strip_prefix(b"\"")?)?;
    }
    Some(field)
}

/// The addresses that stand in quotes behind the agent, as of `$http_x_forwarded_for` in the format
/// that nginx is packaged with. Without an address at its end, the list tells no client.
fn forwarded(rest: &[u8]) -> Option<&[u8]> {
    let list = quoted(rest, 3)?;
    let mut from_end = list.rsplit(|&b| b == b',');
    is_known(from_end.next()?.trim_ascii()).then_some(list)
}

/// The field before the last one.
fn before_last(rest: &[u8]) -> Option<&str> {
    let mut fields = rest.trim_ascii_end().rsplit(|&b| b == b' ').skip(1);
    str::from_utf8(fields.next()?).ok()
}

/// Whether a field is a number with decimals that may be a duration.
fn is_decimal(field: Option<&str>) -> bool {
    field.and_then(decimal).is_some_and(|(whole, decimals)| whole <= 86_400 && decimals.is_some())
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

/// The first word, and what follows the blanks behind it.
fn word(text: &[u8]) -> Option<(&[u8], &[u8])> {
    let text = text.trim_ascii_start();
    let end = text.iter().position(u8::is_ascii_whitespace).unwrap_or(text.len());
    (end > 0).then(|| (&text[..end], text[end..].trim_ascii_start()))
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
    use super::super::entry::InputEntry;
    use super::super::found::LineTimeArg;
    use super::super::moment::Moments;
    use super::*;

    const START: &str = "192.0.2.7 - - [17/May/2015:10:05:03 +0000] ";

    fn parse_with(log: &mut AccessLog, line: &str) -> Result<InputEntry, BadLine> {
        parse_by(log, line, &LogOptions::default())
    }

    fn parse_by(
        log: &mut AccessLog,
        line: &str,
        options: &LogOptions,
    ) -> Result<InputEntry, BadLine> {
        let mut moments = Moments::default();
        log.find(line.as_bytes(), options)?.entry(&mut moments, options, LineTimeArg::Arrival)
    }

    fn parse(line: &str) -> Result<InputEntry, BadLine> {
        parse_with(&mut AccessLog::new(&LogOptions::default()).expect("no identifier"), line)
    }

    #[test]
    fn a_line_has_an_address_a_user_a_path_and_a_time_and_may_be_cut_short_after_its_status() {
        let request = "\"GET /a HTTP/1.1\" 200";
        let with = |user: &str, zone: &str| {
            format!("198.51.100.1 - {user} [17/May/2015:{zone}] {request} 5")
        };
        let of = |end: &str| format!("198.51.100.1 - - [17/May/2015:10:05:03 +0000] {end}");
        for (line, user) in [
            (of(&format!("{request} 5 \"-\" \"Mozilla/5.0 (X11)\"")), None),
            (of(&format!("{request} 5 \"-\" \"Mozilla/5.0 (comp")), None),
            (of(&format!("{request} 5 \"http://exam")), None),
            (of(request), None),
            (of("\"GET /a HTTP/1.1\" - -"), None),
            (with("\"\"", "12:05:03 +0200"), None),
            (with("\"-\"", "12:05:03 +0200"), None),
            (with(" - ", "12:05:03 +0200"), None),
            (with("bob", "04:35:03 -0530"), Some("bob")),
            (with("Bob Smith", "10:05:03 +0000"), Some("Bob Smith")),
            (with("Bob] [Smith", "10:05:03 +0000"), Some("Bob] [Smith")),
            (with("Bob [x", "10:05:03 +0000"), Some("Bob [x")),
            (with("[198.51.100.1] - -", "10:05:03 +0000"), None),
            (with("[198.51.100.1, 10.0.0.1] - bob", "10:05:03 +0000"), Some("bob")),
            (of(request).replacen("100.1", "100.1, 10.0.0.1, 10.0.0.2", 1), None),
            (of(request).replacen("100.1", "100.1,10.0.0.1", 1), None),
            (format!("-, {}", of(request)), None),
            (format!("unknown, {}", of(request).replacen("100.1", "100.1, 10.0.0.1", 1)), None),
            (of(request).replacen("100.1", "100.1:5678", 1), None),
            (format!("::ffff:{}", of(request)), None),
        ] {
            let entry = parse(&line).expect(&line);
            assert_eq!(entry.at.as_us(), 1_431_857_103_000_000, "{line}");
            let caller = &entry.caller;
            let named = ["ip", "user", "path", "method"].map(|name| caller.identifier(name));
            assert_eq!(named, [Some("198.51.100.1"), user, Some("/a"), Some("GET")], "{line}");
            assert_eq!(caller.bare.as_deref(), Some("198.51.100.1"));
        }
    }

    #[test]
    fn a_virtual_host_may_stand_before_the_address_and_a_name_in_its_place() {
        let line = format!("{START}\"GET / HTTP/1.1\" 200 5");
        for (line, ip, host) in [
            (format!("shop.example:443 {line}"), "192.0.2.7", Some("shop.example")),
            (format!("shop.example {line}"), "192.0.2.7", Some("shop.example")),
            (format!("10.0.0.5:80 {line}"), "192.0.2.7", Some("10.0.0.5")),
            (format!("[2001:db8::9]:80 {line}"), "192.0.2.7", Some("[2001:db8::9]")),
            (
                format!("shop.example {}", line.replacen("2.7", "2.7, 10.0.0.1", 1)),
                "192.0.2.7",
                Some("shop.example"),
            ),
            (line.replacen("192.0.2.7", "client.example", 1), "client.example", None),
            (line.replacen("192.0.2.7", "2001:db8::1", 1), "2001:db8::/64", None),
        ] {
            let entry = parse(&line).expect(&line);
            let named = ["ip", "host"].map(|name| entry.caller.identifier(name));
            assert_eq!(named, [Some(ip), host], "{line}");
        }
        let agent = AccessLog::new(&LogOptions { keeps_lines: true, ..LogOptions::default() });
        let line = format!("{line} \"-\" \"X (1) \\\" 2\" 0.5");
        let options = LogOptions { keeps_lines: true, ..LogOptions::default() };
        let mut log = agent.expect("no identifier");
        let mut found = log.find(line.as_bytes(), &options).expect(&line);
        assert_eq!(found.agent.take().as_deref(), Some("X (1) \\\" 2"));
        let entry = found.entry(&mut Moments::default(), &options, LineTimeArg::End);
        let entry = entry.expect(&line);
        assert_eq!(entry.at.as_us(), 1_431_857_102_500_000, "its end is half a second later");
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
            (None, &format!("5 {ua} 7ms"), Some(7_000)),
            (None, "5 \"-\" \"X 0.5", None),
            (None, "5 \"-\" \"X 0.5\"", None),
            (Some(UnitArg::Us), &format!("5 {ua} 7"), Some(7)),
            (Some(UnitArg::Ms), &format!("5 {ua} 7.25"), Some(7_250)),
            (Some(UnitArg::S), "- 7", Some(7_000_000)),
        ] {
            let options = LogOptions { unit, ..LogOptions::default() };
            let mut log = AccessLog::new(&options).expect("no identifier");
            let line = format!("{START}\"GET / HTTP/1.1\" 200 {end}");
            assert_eq!(parse_by(&mut log, &line, &options).expect(&line).duration_us, us, "{line}");
            assert_eq!(log.lacks_unit, end.ends_with(" 7") && unit.is_none(), "{line}");
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
            let entry = parse(&line).expect(&line);
            assert_eq!(entry.caller.identifier("method"), expected, "{request}");
        }
    }

    #[test]
    fn bad_lines_say_what_is_missing() {
        let with_time = |time| format!("192.0.2.7 - - [{time}] \"GET / HTTP/1.1\" 200 5");
        let line = format!("{START}\"GET / HTTP/1.1\" 200 5");
        for (line, says) in [
            ("hello".to_owned(), "no [TIME]"),
            (format!("{START}200"), "no \"REQUEST\""),
            (format!("{START}\"GET /a"), "ends within its request"),
            (format!("{START}\"GET /a HTTP/1.1\""), "broken part"),
            (with_time("17/Mai/2015:10:05:03 +0000"), "the time is"),
            (with_time("31/Feb/2015:10:05:03 +0000"), "the time is"),
            (with_time("31/Dec/1969:23:59:59 +0000"), "1970"),
            (with_time("01/Jan/2200:00:00:00 +0000"), "2112"),
            (format!("Jul 18 11:07:07 web1 nginx[1]: {line}"), "\"Jul\", which is no address"),
            (format!("a b {line}"), "\"192.0.2.7\" is one"),
            (format!("a b - - {}", &line[14..]), "no - follows"),
            (line.replacen("192.0.2.7", "443", 1), "\"443\", which is no address and no name"),
            (line.replacen("192.0.2.7", "0.005", 1), "no address and no name"),
            (line.replacen("192.0.2.7 - -", "a1b2", 1), "no - follows"),
            (
                line.replacen("192.0.2.7", "a.example", 1) + " \"-\" \"x\" \"10.0.0.1, 192.0.2.7\"",
                "10.0.0.1, 192.0.2.7\" is one",
            ),
            (line.replacen("- -", "- 203.0.113.9 - -", 1), "in the place of the user"),
            (line.replacen("- -", "- 203.0.113.9, 10.0.0.7 - -", 1), "--log-format"),
            (
                line.replacen("- -", "- [203.0.113.9] - bob", 1),
                "\"[203.0.113.9] - bob\" in the place",
            ),
            (line.replacen("- -", "- bob -", 1), "in the place of the user"),
            (line.replacen("- -", "203.0.113.9 -", 1), "two clients"),
            (line.replacen("- -", "a1b2 c3 443", 1), "a field too many"),
            (
                format!("shop.example {}", line.replacen("- -", "- 203.0.113.9 - bob", 1)),
                "in the place",
            ),
            (format!("10.0.0.1 192.0.2.7, {line}"), "two clients"),
            (format!("\0\0{line}"), "no address and no name"),
            (format!("\u{1b}[36mweb-1 | {line}"), "which is no address"),
            (format!("access.log:{line}"), "no address and no name"),
            (format!("INFO: {line}"), "which is no address"),
            ("\u{1b}[2J".to_owned(), "got \"\\u{1b}[2J\""),
            (with_time("\u{1b}"), "the time is \"\\u{1b}\","),
        ] {
            let mut log = AccessLog::new(&LogOptions::default()).expect("no identifier");
            let reason = parse_with(&mut log, &line).expect_err(&line);
            assert!(reason.contains(says), "{line}\n→ {reason}\nlacks {says}");
        }
    }
}
