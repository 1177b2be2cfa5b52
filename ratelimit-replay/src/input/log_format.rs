//! [`LogFormat`]: a log in the format of a string, as the configuration of its server has it.
//!
//! Three notations are known: nginx (`$remote_addr`), Apache (`%h`), and goaccess (`%h`, with `%^`
//! for what is left out). Each field ends where the text behind it begins. A line may end early
//! once it has told its client, its time and its request.

use std::borrow::Cow;
use std::fmt::Write as _;

use chrono::{DateTime, NaiveDateTime};
use regex::bytes::{CaptureLocations, Regex, RegexBuilder};

use super::entry::BadLine;
use super::found::{Found, LineTimeArg, LogOptions, Role, Source, UnitArg};
use crate::text::quote;

/// A part of a format.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Field { name: String, role: Role },
}

/// A format as a string.
#[derive(Clone, Debug)]
pub struct LogFormat {
    parts: Vec<Part>,
    line_time: LineTimeArg,
    /// Whether a quote within quotes stands as it is.
    has_bare_quotes: bool,
    /// Whether a field takes only what its server writes there.
    has_shapes: bool,
    /// The form of the time, if the format has one of its own.
    time_form: Option<String>,
}

impl LogFormat {
    /// The format that a string of nginx, Apache or goaccess describes.
    pub fn parse(text: &str) -> Result<Self, String> {
        let text = with_combined(&in_quotes(text));
        // The form of a time is no part of the format itself.
        let mut outer = text.split("%{");
        let first = outer.next().unwrap_or_default().to_owned();
        let outer =
            first + &outer.filter_map(|part| Some(part.split_once('}')?.1)).collect::<String>();
        let is_goaccess = ["%^", "%d", "%x", "%~"].iter().any(|sign| outer.contains(sign));
        let mut time_form = None;
        let (parts, line_time) = if text.contains('$') {
            (nginx(&text)?, LineTimeArg::End)
        } else if is_goaccess {
            (goaccess(&text)?, LineTimeArg::Arrival)
        } else {
            let ends = text.contains("%{end:");
            let line_time = if ends { LineTimeArg::End } else { LineTimeArg::Arrival };
            (with_one_time(apache(&text)?, &mut time_form), line_time)
        };
        let parts = joined(parts);
        let format =
            Self { parts, line_time, has_bare_quotes: false, has_shapes: false, time_form };
        format.check()?;
        Ok(format)
    }

    /// The same as the format of a server that is known, whose fields have [`shape`]s.
    pub(super) fn of_server(self, line_time: LineTimeArg) -> Self {
        Self { line_time, has_shapes: true, ..self }
    }

    /// The same of lines in which a quote within quotes may stand as it is, as Envoy writes it.
    pub(super) fn with_bare_quotes(self, has_bare_quotes: bool) -> Self {
        Self { has_bare_quotes, ..self }
    }

    fn check(&self) -> Result<(), String> {
        let has = |roles: &[Role]| {
            let mut fields = self.fields();
            fields.any(|(_, role)| roles.contains(&role))
        };
        let lacks = if !has(&[Role::Client, Role::Forwarded, Role::User]) {
            "the client: $remote_addr of nginx, %h of Apache and goaccess"
        } else if !(has(&[Role::Time]) || has(&[Role::Date]) && has(&[Role::Clock])) {
            "the time: $time_local of nginx, %t of Apache, %d:%t of goaccess"
        } else {
            let is_field = |part: &Part| matches!(part, Part::Field { .. });
            let pairs = self.parts.windows(2);
            let mut pairs = pairs.filter(|pair| pair.iter().all(is_field));
            let Some([Part::Field { name, .. }, Part::Field { name: next, .. }]) = pairs.next()
            else {
                return Ok(());
            };
            return Err(format!(
                "nothing stands between {name} and {next}, so nobody knows where one ends; put a text between them"
            ));
        };
        Err(format!("it does not name {lacks}"))
    }

    fn fields(&self) -> impl Iterator<Item = (&str, Role)> {
        self.parts.iter().filter_map(|part| match part {
            Part::Field { name, role } => Some((&**name, *role)),
            Part::Text(_) => None,
        })
    }

    /// The expression of a line that is in the format to its end.
    pub(super) fn whole_line(&self) -> Option<Regex> {
        Regex::new(&self.expression(true)).ok()
    }

    /// The expression of its lines. Behind the last field that a request needs, all may be absent,
    /// unless the line has to be whole.
    fn expression(&self, is_whole: bool) -> String {
        let is_needed = |part: &Part| {
            let needed = [Role::Client, Role::Time, Role::Clock, Role::Request, Role::Target];
            matches!(part, Part::Field { role, .. } if needed.contains(role))
        };
        let needed = self.parts.iter().rposition(is_needed).map_or(0, |last| last + 1);
        let (mut expression, mut open) = ("(?s-u)^\\s*".to_owned(), 0);
        for (place, part) in self.parts.iter().enumerate() {
            match part {
                Part::Text(text) => {
                    // A line may end behind what closes a field.
                    let may_end = place > needed && !is_whole;
                    let close = usize::from(may_end && text.starts_with(['"', ']', ')', '}']));
                    let (close, text) = text.split_at(close);
                    for begin in [close, ""].iter().filter(|_| may_end) {
                        let _ = write!(expression, "(?:{}", regex::escape(begin));
                        open += 1;
                    }
                    // Servers pad some fields.
                    for word in text.split_inclusive(' ') {
                        let bare = word.trim_end_matches(' ');
                        expression.push_str(&regex::escape(bare));
                        expression.push_str(if bare.len() < word.len() { " +" } else { "" });
                    }
                }
                Part::Field { name, role } => {
                    let before = place.checked_sub(1).map(|before| &self.parts[before]);
                    let text = |part: Option<&Part>| match part {
                        Some(Part::Text(text)) => text.clone(),
                        _ => String::new(),
                    };
                    let (before, after) = (text(before), text(self.parts.get(place + 1)));
                    let is_quoted = before.ends_with('"') && after.starts_with('"');
                    let has_shape = self.has_shapes && !is_quoted && !before.ends_with('[');
                    let shape = has_shape.then(|| shape(name, &after)).flatten();
                    let shape = if let Some(shape) = shape {
                        shape
                    } else if is_quoted && self.has_bare_quotes && *role == Role::Request {
                        // Its protocol ends it.
                        r#"\S+ .*? HTTP/[\d.]+|[^"]*"#
                    } else if is_quoted && self.has_bare_quotes {
                        ".*?"
                    } else if is_quoted {
                        r#"(?:[^"\\]|\\.)*"#
                    } else if before.ends_with('[') && after.starts_with(']') {
                        r"[^\]]*"
                    } else if *role == Role::Time {
                        // A day and a time of day may have a blank between them.
                        r"\d{4}[-/]\d\d[-/]\d\d[ T]\d\d:\d\d:\d\d\S*?|.*?"
                    } else if *role == Role::Client && after.starts_with(':') {
                        // The port stands behind the last colon.
                        r"\S+"
                    } else if *role == Role::Client {
                        r"\S+?"
                    } else if *role == Role::Target {
                        r#"[^"]*?"#
                    } else if matches!(role, Role::Method | Role::Duration(_)) {
                        r#"[^\s"]*?"#
                    } else if place > needed
                        && *role == Role::Other
                        && !["$_", "%^"].contains(&&**name)
                    {
                        // Not the rest of a line with more fields. nginx writes lists with blanks.
                        r#"(?:[^\s"]|, | : )*?"#
                    } else if after.is_empty() {
                        ".*"
                    } else {
                        ".*?"
                    };
                    let _ = write!(expression, "({shape})");
                }
            }
        }
        for _ in 0..open {
            expression.push_str(")?");
        }
        expression + r"\s*$"
    }

    /// A reader of lines in this format.
    pub(super) fn reader(&self, options: &LogOptions) -> Result<FormattedLog, String> {
        let fields: Vec<_> = self.fields().collect();
        let mut wanted = Vec::new();
        for (place, (_, source)) in options.identifiers.iter().enumerate() {
            let Source::Field(name) = source else { continue };
            let found = fields.iter().position(|(known, _)| known == name).ok_or_else(|| {
                let names =
                    fields.iter().map(|(name, _)| *name).filter(|name| !name.starts_with("$_"));
                let names = names.collect::<Vec<_>>().join(", ");
                format!("the format has no field {}; it has {names}", quote(name, 40))
            })?;
            wanted.push((place, found));
        }
        let roles = fields.into_iter().map(|(_, role)| role).collect();
        // A line takes time in proportion to its length, whatever a client sent.
        let expression = RegexBuilder::new(&self.expression(false)).size_limit(1 << 24).build();
        let expression = expression.map_err(|error| format!("it is too long: {error}"))?;
        let groups = expression.capture_locations();
        let (line_time, time_form) = (self.line_time, self.time_form.clone());
        Ok(FormattedLog { expression, groups, roles, wanted, line_time, time_form })
    }
}

/// What a server that is known writes in a field: its other formats have other fields there. `None`
/// of a field that may be anything.
fn shape(name: &str, after: &str) -> Option<&'static str> {
    let is_bounded = after.starts_with(" [") || after.starts_with([')', '}']);
    Some(match name {
        "$status" | "$_status" => r"\d{3}|0|-1?",
        "$_bytes" => r"\+?\d+|-",
        "$_number" | "$duration_ms" | "$duration_us" | "$request_time" => r"[+-]?\d+(?:\.\d+)?|-",
        "$msec" => r"\d+\.\d{3}",
        "$time_iso8601" => r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S*",
        "$remote_port" => r"\d+",
        "$request_method" => "[A-Z][A-Z_-]*",
        "$result" => "[A-Z_]+",
        "$hierarchy" => r"[A-Z_]+/\S+",
        "$operation" => r"[A-Z\d]+\.[A-Z\d._]+",
        "$response_flags" => r"[A-Z\d,]+|-",
        "$termination_state" => "[A-Za-z-]{4}",
        "$type" => "https?|h2|grpcs|wss?",
        "$_" | "$upstream_addr" => return None,
        _ if name == "$remote_addr" || is_bounded || after.is_empty() => return None,
        _ => r"\S+",
    })
}

/// Reads lines of a format.
pub(crate) struct FormattedLog {
    expression: Regex,
    groups: CaptureLocations,
    /// The roles of the groups.
    roles: Vec<Role>,
    /// Identifiers that the user asks for, with their groups.
    wanted: Vec<(usize, usize)>,
    pub(super) line_time: LineTimeArg,
    time_form: Option<String>,
}

impl FormattedLog {
    pub(super) fn find<'l>(&mut self, line: &'l [u8]) -> Result<Found<'l>, BadLine> {
        if self.expression.captures_read(&mut self.groups, line).is_none() {
            let line = quote(&String::from_utf8_lossy(line), 60);
            return Err(format!("is not in the format: {line}"));
        }
        let group = |place: usize| {
            let (start, end) = self.groups.get(place + 1)?;
            Some(String::from_utf8_lossy(&line[start..end]))
        };
        let mut found = Found::default();
        for (place, role) in self.roles.iter().enumerate() {
            if *role != Role::Other
                && let Some(text) = group(place)
            {
                let form = self.time_form.as_ref().filter(|_| *role == Role::Time);
                let text = match form {
                    Some(form) => Cow::Owned(in_form(&text, form)?),
                    None => text,
                };
                found.set(*role, text);
            }
        }
        let wanted = self.wanted.iter().filter_map(|(of, place)| Some((*of, group(*place)?)));
        found.identifiers = wanted.collect();
        Ok(found)
    }
}

/// The string between the quotes of a configuration's line: `log_format main '…' '…';` of nginx,
/// `LogFormat "…" combined` of Apache; any other as it is. An escaped quote is a quote.
fn in_quotes(text: &str) -> Cow<'_, str> {
    let text = text.trim();
    let unescaped = |text: &str| text.replace("\\\"", "\"");
    let pieces = |quote: char, text: &str| text.split(quote).skip(1).step_by(2).collect::<String>();
    let lower = text.to_ascii_lowercase();
    if lower.starts_with("log_format") {
        return Cow::Owned(pieces('\'', text));
    }
    if lower.starts_with("logformat") || lower.starts_with("customlog") {
        let inner = text.split_once('"').map_or(text, |(_, inner)| inner);
        return Cow::Owned(unescaped(inner.rsplit_once('"').map_or(inner, |(inner, _)| inner)));
    }
    if text.contains("\\\"") { Cow::Owned(unescaped(text)) } else { Cow::Borrowed(text) }
}

/// The string with the format of the name `combined` in the place of it, at its beginning, as nginx
/// and Apache have it.
fn with_combined(text: &str) -> String {
    const NGINX: &str = "$remote_addr - $remote_user [$time_local] \"$request\" $status $body_bytes_sent \
                         \"$http_referer\" \"$http_user_agent\"";
    const APACHE: &str = "%h %l %u %t \"%r\" %>s %b \"%{Referer}i\" \"%{User-Agent}i\"";
    let rest =
        text.strip_prefix("combined").filter(|rest| rest.is_empty() || rest.starts_with(' '));
    match rest {
        Some(rest) if rest.contains('%') => format!("{APACHE}{rest}"),
        Some(rest) => format!("{NGINX}{rest}"),
        None => text.to_owned(),
    }
}

/// Texts that follow each other as one.
fn joined(parts: Vec<Part>) -> Vec<Part> {
    let mut all: Vec<Part> = Vec::new();
    for part in parts {
        match (all.last_mut(), part) {
            (_, Part::Text(more)) if more.is_empty() => {}
            (Some(Part::Text(text)), Part::Text(more)) => text.push_str(&more),
            (_, part) => all.push(part),
        }
    }
    all
}

fn field(name: impl Into<String>, role: Role) -> Part {
    Part::Field { name: name.into(), role }
}

/// `$name` and `${name}`.
fn nginx(text: &str) -> Result<Vec<Part>, String> {
    let (mut parts, mut rest) = (Vec::new(), text);
    while let Some((before, after)) = rest.split_once('$') {
        parts.push(Part::Text(before.to_owned()));
        let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
        let (name, behind) = match after.strip_prefix('{').and_then(|in_| in_.split_once('}')) {
            Some((name, behind)) => (name, behind),
            None => after.split_at(after.find(|c| !is_name(c)).unwrap_or(after.len())),
        };
        if name.is_empty() || !name.chars().all(is_name) {
            return Err(format!("no name follows the $ before {}", quote(after, 20)));
        }
        let role = variable(name);
        parts.push(field(format!("${name}"), role));
        rest = behind;
        if role == Role::Target {
            // A query belongs to it.
            for more in
                ["$is_args", "${is_args}", "$args", "${args}", "$query_string", "${query_string}"]
            {
                rest = rest.strip_prefix(more).unwrap_or(rest);
            }
        }
    }
    parts.push(Part::Text(rest.to_owned()));
    Ok(parts)
}

/// What a variable of nginx says.
fn variable(name: &str) -> Role {
    match name {
        "remote_addr" => Role::Client,
        "http_x_forwarded_for" | "proxy_add_x_forwarded_for" | "http_x_real_ip" => Role::Forwarded,
        "remote_user" => Role::User,
        "time_local" | "time_iso8601" | "msec" => Role::Time,
        "request" => Role::Request,
        "request_method" => Role::Method,
        "request_uri" | "uri" => Role::Target,
        "host" | "http_host" | "server_name" => Role::Host,
        "http_user_agent" => Role::Agent,
        "request_time" => Role::Duration(UnitArg::S),
        "duration_ms" => Role::Duration(UnitArg::Ms),
        "duration_us" => Role::Duration(UnitArg::Us),
        _ => Role::Other,
    }
}

/// `%h`, `%>s`, `%{Referer}i` of Apache.
fn apache(text: &str) -> Result<Vec<Part>, String> {
    let (mut parts, mut rest) = (Vec::new(), text);
    while let Some((before, after)) = rest.split_once('%') {
        parts.push(Part::Text(before.to_owned()));
        if let Some(behind) = after.strip_prefix('%') {
            parts.push(Part::Text("%".to_owned()));
            rest = behind;
            continue;
        }
        let bare = after.trim_start_matches(|c: char| "<>!,".contains(c) || c.is_ascii_digit());
        let (argument, behind) = match bare.strip_prefix('{').and_then(|in_| in_.split_once('}')) {
            Some((argument, behind)) => (argument, behind),
            None => ("", bare),
        };
        let letters = if behind.starts_with('^') { 3 } else { 1 };
        let directive: String = behind.chars().take(letters).collect();
        let Some(behind) = behind.strip_prefix(&*directive).filter(|_| !directive.is_empty())
        else {
            return Err("a % stands at its end, and no directive follows".to_owned());
        };
        rest = behind;
        let name = match argument {
            "" => format!("%{directive}"),
            _ => format!("%{{{argument}}}{directive}"),
        };
        let header = argument.to_ascii_lowercase();
        let role = match (&*directive, &*header) {
            // The peer, which may be a proxy: the client is %a.
            ("h" | "a", "c") => Role::Other,
            ("h" | "a", _) => Role::Client,
            ("i", "x-forwarded-for" | "x-real-ip") => Role::Forwarded,
            ("u", _) => Role::User,
            ("r", _) => Role::Request,
            ("m", _) => Role::Method,
            ("U", _) => Role::Target,
            ("v" | "V", _) | ("i", "host") => Role::Host,
            ("i", "user-agent") => Role::Agent,
            ("D", _) | ("T", "us") => Role::Duration(UnitArg::Us),
            ("T", "ms") => Role::Duration(UnitArg::Ms),
            ("T", _) => Role::Duration(UnitArg::S),
            ("t", _) => Role::Time,
            _ => Role::Other,
        };
        if role == Role::Target {
            // A query belongs to it.
            rest = rest.strip_prefix("%q").unwrap_or(rest);
        }
        let has_brackets = directive == "t" && argument.is_empty();
        let bracket =
            |bracket: &str| Part::Text(if has_brackets { bracket } else { "" }.to_owned());
        parts.extend([bracket("["), field(name, role), bracket("]")]);
    }
    parts.push(Part::Text(rest.to_owned()));
    Ok(parts)
}

/// The parts with all `%{…}t` as one field, from the first to the last of them, and the form that
/// they have together: `%{%d/%b/%Y:%T}t.%{msec_frac}t %{%z}t`. The plain forms of Apache are known.
fn with_one_time(parts: Vec<Part>, form: &mut Option<String>) -> Vec<Part> {
    let argument = |part: &Part| match part {
        Part::Field { name, role: Role::Time } => {
            Some(name.strip_prefix("%{")?.strip_suffix("}t")?.to_owned())
        }
        _ => None,
    };
    let place = |part: Option<usize>| part.unwrap_or(0);
    let first = place(parts.iter().position(|part| argument(part).is_some()));
    let last = place(parts.iter().rposition(|part| argument(part).is_some()));
    let is_time = |part: &Part| argument(part).is_some() || matches!(part, Part::Text(_));
    let times = &parts[first..parts.len().min(last + 1)];
    if times.is_empty() || argument(&times[0]).is_none() || !times.iter().all(is_time) {
        return parts;
    }
    let of_part = |part: &Part| match (argument(part), part) {
        (Some(name), _) => {
            let bare = name.strip_prefix("begin:").or_else(|| name.strip_prefix("end:"));
            match bare.unwrap_or(&name) {
                "sec" => "%s".to_owned(),
                "msec" | "usec" => String::new(),
                "msec_frac" => "%3f".to_owned(),
                "usec_frac" => "%6f".to_owned(),
                form => form.to_owned(),
            }
        }
        (None, Part::Text(text)) => text.replace('%', "%%"),
        (None, Part::Field { .. }) => String::new(),
    };
    let all: String = times.iter().map(of_part).collect();
    // A number since 1970 alone tells its unit by its digits.
    *form = Some(all).filter(|all| !all.is_empty() && all != "%s");
    let name = times.iter().filter_map(argument).map(|name| format!("%{{{name}}}t"));
    let name = name.collect::<String>();
    let (before, after) = (parts[..first].to_vec(), parts[last + 1..].to_vec());
    [before, vec![field(name, Role::Time)], after].concat()
}

/// A time in a form of its own, as one that logs write.
fn in_form(text: &str, form: &str) -> Result<String, BadLine> {
    let zoned = DateTime::parse_from_str(text, form).map(|time| time.timestamp_micros());
    let in_utc = |form: &str| {
        NaiveDateTime::parse_from_str(text, form).map(|time| time.and_utc().timestamp_micros())
    };
    let named = ["UTC", "GMT"].map(|name| form.replace("%Z", name));
    let utc = named.iter().map(|form| in_utc(form)).find(Result::is_ok);
    if utc.is_none() && form.contains("%Z") && in_utc(form).is_ok() {
        let text = quote(text, 40);
        return Err(format!(
            "the time is {text}, whose zone is not known by its name; write %z in place of %Z in the server's format"
        ));
    }
    let us = zoned.or_else(|error| utc.unwrap_or(Err(error))).map_err(|_| {
        format!("the time is {}, expected one in the form {}", quote(text, 40), quote(form, 60))
    })?;
    Ok(format!("{}.{:06}", us.div_euclid(1_000_000), us.rem_euclid(1_000_000)))
}

/// `%h`, `%d`, `%^` of goaccess.
fn goaccess(text: &str) -> Result<Vec<Part>, String> {
    let (mut parts, mut rest) = (Vec::new(), text);
    while let Some((before, after)) = rest.split_once('%') {
        parts.push(Part::Text(before.to_owned()));
        let mut letters = after.chars();
        let Some(letter) = letters.next() else {
            return Err("a % stands at its end, and no specifier follows".to_owned());
        };
        rest = letters.as_str();
        if letter == '~' {
            // Blanks, or the client in a list: `~h{, "}`.
            if let Some(behind) = rest.strip_prefix("h{").and_then(|list| list.split_once('}')) {
                parts.push(field("%~h", Role::Forwarded));
                rest = behind.1;
            } else {
                parts.push(Part::Text(" ".to_owned()));
            }
            continue;
        }
        let role = match letter {
            'h' => Role::Client,
            'e' => Role::User,
            'x' => Role::Time,
            'd' => Role::Date,
            't' => Role::Clock,
            'r' => Role::Request,
            'm' => Role::Method,
            'U' => Role::Target,
            'v' => Role::Host,
            'u' => Role::Agent,
            'T' => Role::Duration(UnitArg::S),
            'L' => Role::Duration(UnitArg::Ms),
            'D' => Role::Duration(UnitArg::Us),
            'n' => Role::Duration(UnitArg::Ns),
            _ => Role::Other,
        };
        // What is left out behind a time of day may be its zone.
        let is_behind_time =
            matches!(parts[..], [.., Part::Field { role: Role::Date | Role::Clock, .. }, _]);
        let is_zone = letter == '^' && is_behind_time;
        if is_zone && before.ends_with(['+', '-']) {
            return Err(
                "a sign stands before the %^ behind the time, where a zone may stand; leave \
                        the sign to %^"
                    .to_owned(),
            );
        }
        let role = if is_zone { Role::Zone } else { role };
        parts.push(field(format!("%{letter}"), role));
    }
    parts.push(Part::Text(rest.to_owned()));
    Ok(parts)
}
