//! [`JsonLog`]: a log with a JSON object per line, of which paths name the fields.

use std::borrow::Cow;

use ratelimit_core::for_cli::did_you_mean;
use serde_json::Value;

use super::entry::BadLine;
use super::found::{Found, LineTimeArg, LogOptions, Role, Source, UnitArg, is_nothing};
use crate::named::Named as _;
use crate::text::{printable, quote};

/// A line has one of each: its time, and who sent the request.
const NEEDED: [&[Role]; 2] = [&[Role::Time], &[Role::Client, Role::Forwarded, Role::User]];

/// Where the fields of a log's objects are.
#[derive(Clone, Debug)]
pub struct JsonFields {
    fields: Vec<(Role, Paths)>,
    is_unit_told: bool,
    line_time: LineTimeArg,
    /// A field, and with what it begins in the lines that are requests, if it is there.
    only: Option<(Paths, &'static str)>,
}

/// Paths, of which the first that is there tells: `request.client_ip|request.remote_ip`.
#[derive(Clone, Debug)]
struct Paths(Vec<Vec<String>>);

impl Paths {
    fn parse(text: &str) -> Self {
        let path = |path: &str| path.split('.').map(str::to_owned).collect();
        Self(text.split('|').map(path).collect())
    }

    /// What stands there.
    fn values<'v>(&self, object: &'v Value) -> impl Iterator<Item = &'v Value> {
        let step = |value: &'v Value, name: &String| match value {
            Value::Array(items) => items.get(name.parse::<usize>().ok()?),
            Value::Object(fields) => fields.get(name),
            _ => None,
        };
        self.0.iter().filter_map(move |path| path.iter().try_fold(object, step))
    }

    fn is_there(&self, object: &Value) -> bool {
        self.values(object).next().is_some()
    }

    /// The error of an object that has none of them, with the paths that it has.
    fn lack(&self, object: &Value) -> BadLine {
        let mut there = Vec::new();
        paths_of(object, String::new(), &mut there);
        let known = there.iter().map(String::as_str);
        let sought = self.0.iter().map(|path| path.join("."));
        let sought: Vec<_> = sought.collect();
        let meant = sought.iter().map(|path| did_you_mean(path, known.clone()));
        let meant = meant.max_by_key(String::len).unwrap_or_default();
        let (sought, there) = (sought.join("|"), there.join(", "));
        format!("has no field {}; it has {}{meant}", quote(&sought, 80), printable(&there, 200))
    }

    fn find<'v>(&self, object: &'v Value) -> Option<Cow<'v, str>> {
        let mut found = self.values(object);
        found.find_map(|value| match value {
            Value::String(text) if !is_nothing(text) => Some(Cow::Borrowed(&**text)),
            // Never as 1.2e-5.
            Value::Number(number) if number.is_f64() => {
                Some(Cow::Owned(number.as_f64()?.to_string()))
            }
            Value::Number(number) => Some(Cow::Owned(number.to_string())),
            Value::Bool(is_true) => Some(Cow::Owned(is_true.to_string())),
            Value::Array(items) => items.first()?.as_str().map(Cow::Borrowed),
            _ => None,
        })
    }
}

/// The paths of an object's values.
fn paths_of(value: &Value, path: String, all: &mut Vec<String>) {
    let Value::Object(fields) = value else { return all.push(path) };
    for (name, value) in fields {
        let dot = if path.is_empty() { "" } else { "." };
        paths_of(value, format!("{path}{dot}{name}"), all);
    }
}

impl JsonFields {
    /// The fields that a list names: `ip=request.client_ip,time=ts,duration=took:ms`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (mut fields, mut names, mut is_unit_told) = (Vec::new(), Vec::new(), false);
        for one in text.split(',') {
            let (name, path) = one
                .split_once('=')
                .filter(|(_, path)| !path.is_empty())
                .ok_or(format!("{one:?} is no field such as ip=request.client_ip"))?;
            let (path, unit) = match path.rsplit_once(':') {
                Some((path, unit)) if name == "duration" => (path, Some(unit)),
                _ => (path, None),
            };
            let role = match name {
                "ip" => Role::Client,
                "forwarded" => Role::Forwarded,
                "user" => Role::User,
                "time" => Role::Time,
                "request" => Role::Request,
                "method" => Role::Method,
                "path" => Role::Target,
                "host" => Role::Host,
                "agent" => Role::Agent,
                "duration" => {
                    is_unit_told = unit.is_some();
                    let unit = unit.unwrap_or("s");
                    let known = UnitArg::ALL.iter().find(|known| known.name() == unit);
                    Role::Duration(
                        *known.ok_or(format!("{unit:?} is no unit; write s, ms, us or ns"))?,
                    )
                }
                _ => {
                    return Err(format!(
                        "{name:?} is no field of a request; these are: ip, forwarded, user, time, request, \
                         method, path, host, agent, duration. For another identifier, add --identifier \
                         {name}={path}"
                    ));
                }
            };
            if names.contains(&name) {
                return Err(format!(
                    "it names {name} twice; write {name}=a|b for the first of two that is there"
                ));
            }
            names.push(name);
            fields.push((role, Paths::parse(path)));
        }
        let has = |roles: &[Role]| fields.iter().any(|(known, _)| roles.contains(known));
        let [time, clients] = NEEDED;
        if !has(time) {
            return Err("it names no time, such as time=ts".to_owned());
        }
        if !has(clients) {
            return Err("it names no client, such as ip=request.client_ip".to_owned());
        }
        Ok(Self { fields, is_unit_told, line_time: LineTimeArg::Arrival, only: None })
    }

    /// The same, with another time of a line.
    pub(super) fn at(self, line_time: LineTimeArg) -> Self {
        Self { line_time, ..self }
    }

    /// The same, of lines only in which this field, if it is there, begins so.
    pub(super) fn only(self, path: &str, start: &'static str) -> Self {
        Self { only: Some((Paths::parse(path), start)), ..self }
    }

    pub(super) fn reader(&self, options: &LogOptions) -> JsonLog {
        let wanted = options.identifiers.iter().enumerate();
        let wanted = wanted.filter_map(|(place, (_, source))| match source {
            Source::Field(path) => Some((place, Paths::parse(path))),
            Source::InPath(_) => None,
        });
        let mut fields = self.clone();
        if let Some(unit) = options.unit.filter(|_| !self.is_unit_told) {
            let mut roles = fields.fields.iter_mut().map(|(role, _)| role);
            if let Some(role) = roles.find(|role| matches!(role, Role::Duration(_))) {
                *role = Role::Duration(unit);
            }
        }
        JsonLog { wanted: wanted.collect(), fields }
    }
}

/// Reads the objects of a log.
pub(crate) struct JsonLog {
    fields: JsonFields,
    /// Identifiers that the user asks for.
    wanted: Vec<(usize, Paths)>,
}

impl JsonLog {
    pub(super) const fn line_time(&self) -> LineTimeArg {
        self.fields.line_time
    }

    /// What a line says of its request. `None` if it is one of another kind.
    pub(super) fn find(&self, line: &[u8]) -> Result<Option<Found<'static>>, BadLine> {
        let object: Value = serde_json::from_slice(line).map_err(|_| {
            format!("is no JSON object: {}", quote(&String::from_utf8_lossy(line), 60))
        })?;
        let is_other = |(field, start): &(Paths, &str)| {
            field.find(&object).is_some_and(|text| !text.starts_with(start))
        };
        if self.fields.only.as_ref().is_some_and(is_other) {
            return Ok(None);
        }
        let mut found = Found::default();
        let mut is_met = [false; NEEDED.len()];
        for (role, paths) in &self.fields.fields {
            if let Some(text) = paths.find(&object) {
                for (is_met, roles) in is_met.iter_mut().zip(NEEDED) {
                    *is_met |= roles.contains(role);
                }
                found.set(*role, Cow::Owned(text.into_owned()));
            }
        }
        for (needed, _) in NEEDED.iter().zip(is_met).filter(|(_, is_met)| !is_met) {
            let mut paths = self.fields.fields.iter().filter(|(role, _)| needed.contains(role));
            if !paths.clone().any(|(_, paths)| paths.is_there(&object))
                && let Some((_, paths)) = paths.next()
            {
                return Err(paths.lack(&object));
            }
        }
        let wanted = self.wanted.iter();
        let wanted = wanted.filter_map(|(place, paths)| {
            Some((*place, Cow::Owned(paths.find(&object)?.into_owned())))
        });
        found.identifiers = wanted.collect();
        Ok(Some(found))
    }
}
