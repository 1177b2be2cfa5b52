//! [`W3c`]: logs whose first lines name their fields: `#Fields: date time c-ip cs-method …`, as of
//! IIS and `CloudFront` (W3C, *Extended Log File Format*, 1996).

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
    /// The day of the last `#Date:`, which lines without a date are of.
    day: Option<String>,
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
        let mut reader = Self { names, roles, wanted, asked: asked.collect(), day: None };
        reader.directive(line)?;
        Ok(Some(reader))
    }

    /// Heeds a directive: a server writes the fields anew with every start.
    pub(super) fn directive(&mut self, line: &[u8]) -> Result<(), BadLine> {
        if let Some(date) = line.strip_prefix(DATE) {
            let date = String::from_utf8_lossy(date);
            self.day = date.split_ascii_whitespace().next().map(str::to_owned);
        }
        let Some(fields) = line.strip_prefix(FIELDS) else { return Ok(()) };
        let fields = String::from_utf8_lossy(fields);
        self.names = fields.split_ascii_whitespace().map(str::to_owned).collect();
        self.roles = self.names.iter().map(|name| role(name)).collect();
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

    pub(super) fn find<'l>(&self, line: &'l [u8]) -> Result<Found<'l>, BadLine> {
        // A blank within a field is written as `+`, or the fields are separated by tabs.
        let is_tabbed = line.contains(&b'\t');
        let is_end = |b: &u8| *b == b'\t' || !is_tabbed && *b == b' ';
        let cells: Vec<_> = line.split(is_end).collect();
        let (found, expected) = (cells.len(), self.names.len());
        if found < expected {
            return Err(format!("has {found} fields, and the header names {expected}"));
        }
        let text = |cell: &'l [u8]| String::from_utf8_lossy(cell);
        let mut request = Found::default();
        for (role, cell) in self.roles.iter().zip(&cells) {
            request.set(*role, text(cell));
        }
        if let Some(day) = self.day.as_ref().filter(|_| !self.roles.contains(&Role::Date)) {
            request.set(Role::Date, day.clone().into());
        }
        let wanted = self.wanted.iter();
        request.identifiers =
            wanted.filter_map(|(of, at)| Some((*of, text(cells.get(*at)?)))).collect();
        Ok(request)
    }
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
