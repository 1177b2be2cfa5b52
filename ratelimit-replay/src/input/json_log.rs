//! [`JsonLog`]: a log with a JSON object per line, of which paths name the fields.

use std::borrow::Cow;

use serde_json::Value;

use super::entry::BadLine;
use super::found::{Found, LineTimeArg, LogOptions, Role, Source, UnitArg};
use crate::text::quote;

/// Where the fields of a log's objects are.
#[derive(Clone, Debug)]
pub struct JsonFields {
    fields: Vec<(Role, Paths)>,
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

    fn find<'v>(&self, object: &'v Value) -> Option<Cow<'v, str>> {
        let step = |value: &'v Value, name: &String| match value {
            Value::Array(items) => items.get(name.parse::<usize>().ok()?),
            Value::Object(fields) => fields.get(name),
            _ => None,
        };
        let mut found = self.0.iter().filter_map(|path| path.iter().try_fold(object, step));
        found.find_map(|value| match value {
            Value::String(text) if !text.is_empty() => Some(Cow::Borrowed(&**text)),
            Value::Number(number) => Some(Cow::Owned(number.to_string())),
            Value::Bool(is_true) => Some(Cow::Owned(is_true.to_string())),
            Value::Array(items) => items.first()?.as_str().map(Cow::Borrowed),
            _ => None,
        })
    }
}

impl JsonFields {
    /// The fields that a list names: `ip=request.client_ip,time=ts,duration=took:ms`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let mut fields = Vec::new();
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
                "duration" => match unit {
                    None | Some("s") => Role::Duration(UnitArg::S),
                    Some("ms") => Role::Duration(UnitArg::Ms),
                    Some("us") => Role::Duration(UnitArg::Us),
                    Some("ns") => Role::Nanoseconds,
                    Some(unit) => {
                        return Err(format!("{unit:?} is no unit; write s, ms, us or ns"));
                    }
                },
                _ => {
                    return Err(format!(
                        "{name:?} is no field of a request; these are: ip, forwarded, user, time, request, \
                         method, path, host, agent, duration. For another identifier, add --identifier \
                         {name}={path}"
                    ));
                }
            };
            fields.push((role, Paths::parse(path)));
        }
        let has = |role: Role| fields.iter().any(|(known, _)| *known == role);
        if !has(Role::Time) {
            return Err("it names no time, such as time=ts".to_owned());
        }
        if ![Role::Client, Role::Forwarded, Role::User].into_iter().any(has) {
            return Err("it names no client, such as ip=request.client_ip".to_owned());
        }
        Ok(Self { fields, line_time: LineTimeArg::Arrival, only: None })
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
        JsonLog { wanted: wanted.collect(), fields: self.clone() }
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
        for (role, paths) in &self.fields.fields {
            if let Some(text) = paths.find(&object) {
                found.set(*role, Cow::Owned(text.into_owned()));
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
