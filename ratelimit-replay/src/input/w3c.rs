//! [`W3c`]: logs whose first lines name their fields: `#Fields: date time c-ip cs-method …`, as of
//! IIS and `CloudFront` (W3C, *Extended Log File Format*, 1996).

use chrono::{NaiveDate, NaiveTime};

use super::entry::BadLine;
use super::found::{Found, LogOptions, Role, Source, UnitArg};
use crate::text::quote;

const FIELDS: &[u8] = b"#Fields:";
const DATE: &[u8] = b"#Date:";

/// Reads the lines below a header.
pub(crate) struct W3c {
    names: Vec<String>,
    roles: Vec<Role>,
    /// Identifiers that the user asks for, with their columns.
    wanted: Vec<(usize, usize)>,
    /// The names of those, by their place among all.
    asked: Vec<(usize, String)>,
    /// The day of lines without a date, from the last `#Date:` on, and the time of day of the last.
    day: Option<NaiveDate>,
    last: Option<NaiveTime>,
    /// The unit of durations, if the user tells it.
    unit: Option<UnitArg>,
}

/// Whether a line is a directive, and no request.
pub(super) fn is_directive(line: &[u8]) -> bool {
    const NAMES: [&[u8]; 7] =
        [b"Version:", b"Software:", b"Date:", b"Fields:", b"Remark:", b"Start-Date:", b"End-Date:"];
    line.strip_prefix(b"#").is_some_and(|line| NAMES.iter().any(|name| line.starts_with(name)))
}

impl W3c {
    /// The reader under a line that names the fields; `None` under any other.
    pub(super) fn under(line: &[u8], options: &LogOptions) -> Result<Option<Self>, BadLine> {
        if !line.starts_with(FIELDS) {
            return Ok(None);
        }
        let asked = options.identifiers.iter().enumerate();
        let asked = asked.filter_map(|(place, (_, source))| match source {
            Source::Field(name) => Some((place, name.clone())),
            Source::InPath(_) => None,
        });
        let (names, roles, wanted) = (Vec::new(), Vec::new(), Vec::new());
        let (asked, unit) = (asked.collect(), options.unit);
        let mut reader = Self { names, roles, wanted, asked, day: None, last: None, unit };
        reader.directive(line)?;
        Ok(Some(reader))
    }

    /// Heeds a directive: a server writes the fields anew with every start.
    pub(super) fn directive(&mut self, line: &[u8]) -> Result<(), BadLine> {
        if let Some(date) = line.strip_prefix(DATE) {
            let date = String::from_utf8_lossy(date);
            let mut words = date.split_ascii_whitespace();
            self.day = words.next().and_then(|day| day.parse().ok());
            self.last = words.next().and_then(|time| time.parse().ok());
        }
        let Some(fields) = line.strip_prefix(FIELDS) else { return Ok(()) };
        let fields = String::from_utf8_lossy(fields);
        self.names = fields.split_ascii_whitespace().map(str::to_owned).collect();
        self.roles = self.names.iter().map(|name| role(name)).collect();
        if let Some(unit) = self.unit {
            let is_duration = |role: &&mut Role| matches!(role, Role::DurationOr(_));
            self.roles.iter_mut().filter(is_duration).for_each(|role| *role = Role::Duration(unit));
        }
        // CloudFront's own name is no news beside the one that the client asked for.
        let place = |name: &str| self.names.iter().position(|known| known == name);
        if let (Some(_), Some(own)) = (place("x-host-header"), place("cs(Host)")) {
            self.roles[own] = Role::Other;
        }
        self.wanted.clear();
        for (place, name) in &self.asked {
            let column = self.names.iter().position(|known| known == name).ok_or_else(|| {
                let names = self.names.join(", ");
                format!("the header has no field {}; it has {names}", quote(name, 40))
            })?;
            self.wanted.push((*place, column));
        }
        Ok(())
    }

    pub(super) fn find<'l>(&mut self, line: &'l [u8]) -> Result<Found<'l>, BadLine> {
        // A blank within a field is written as `+`, or the field stands in quotes, or tabs separate
        // the fields.
        let separator = if line.contains(&b'\t') { b'\t' } else { b' ' };
        let cells = cells(line, separator);
        let (found, expected) = (cells.len(), self.names.len());
        if found != expected {
            return Err(format!("has {found} fields, and the header names {expected}"));
        }
        let text = |cell: &'l [u8]| String::from_utf8_lossy(cell);
        let mut request = Found::default();
        let has_date = self.roles.contains(&Role::Date);
        for (role, cell) in self.roles.iter().zip(&cells) {
            request.set(*role, text(cell));
            if *role == Role::Clock
                && !has_date
                && let Some(day) = day(&mut self.day, &mut self.last, &text(cell))
            {
                request.set(Role::Date, day.to_string().into());
            }
        }
        let wanted = self.wanted.iter();
        request.identifiers =
            wanted.filter_map(|(of, at)| Some((*of, text(cells.get(*at)?)))).collect();
        Ok(request)
    }
}

/// The values of a line; one in quotes may contain the separator.
fn cells(line: &[u8], separator: u8) -> Vec<&[u8]> {
    let is_tabbed = separator == b'\t';
    let (mut cells, mut rest) =
        (Vec::new(), Some(if is_tabbed { line } else { line.trim_ascii_end() }));
    while let Some(text) = rest {
        let is_end = |at: usize| text.get(at).is_none_or(|b| *b == separator);
        let quote = |at: &usize| text[*at] == b'"' && is_end(at + 1);
        let close = (1..text.len()).find(quote).filter(|_| text.starts_with(b"\""));
        let end = close.map_or_else(|| (0..text.len()).find(|at| is_end(*at)), |at| Some(at + 1));
        let end = end.unwrap_or(text.len());
        cells.push(close.map_or(&text[..end], |close| &text[1..close]));
        rest = text.get(end + 1..);
    }
    cells
}

/// The day of a line that tells a time of day only: it goes on where that goes back by hours. Lines
/// may be somewhat out of order.
fn day(
    day: &mut Option<NaiveDate>,
    last: &mut Option<NaiveTime>,
    clock: &str,
) -> Option<NaiveDate> {
    const HOUR: i64 = 3_600;
    let time = clock.parse::<NaiveTime>().ok()?;
    let passed = last.map_or(0, |last| (time - last).num_seconds());
    // Of the evening before.
    if passed > 24 * HOUR - HOUR / 12 {
        return day.and_then(|day| day.pred_opt());
    }
    if passed < -HOUR {
        *day = day.and_then(|day| day.succ_opt());
    }
    *last = Some(time);
    *day
}

fn role(name: &str) -> Role {
    match name {
        "c-ip" => Role::Client,
        "x-forwarded-for" | "X-Forwarded-For" | "cs(X-Forwarded-For)" => Role::Forwarded,
        "cs-username" => Role::User,
        "date" => Role::Date,
        "time" => Role::Clock,
        "cs-method" => Role::Method,
        "cs-uri-stem" | "cs-uri" => Role::Target,
        "cs-host" | "cs(Host)" | "x-host-header" => Role::Host,
        "cs(User-Agent)" => Role::Agent,
        // Milliseconds of IIS, seconds with decimals of CloudFront.
        "time-taken" => Role::DurationOr(UnitArg::Ms),
        _ => Role::Other,
    }
}
