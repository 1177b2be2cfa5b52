//! [`Found`]: what a line of a server's log says of a request, and the request that it makes.

use std::borrow::Cow;
use std::iter;

use compact_str::CompactString;
use ratelimit_core::Timestamp;
use ratelimit_core::store::Op;
use regex::Regex;

use super::entry::{BadLine, InputEntry};
use super::moment::Moments;
use super::request::{is_host, method, path};
use crate::address::{address, client};
use crate::caller::{Caller, Named};
use crate::named::{Named as _, named};
use crate::text::{decimal, quote};

named! {
    /// A unit of time, in nanoseconds.
    pub enum UnitArg {
        /// Nanoseconds, as Caddy may write them.
        "ns" => Ns = 1,
        /// Microseconds, as `%D` of Apache.
        "us" => Us = 1_000,
        /// Milliseconds.
        "ms" => Ms = 1_000_000,
        /// Seconds, as `%T` of Apache.
        "s" => S = 1_000_000_000,
    }
}

named! {
    /// What a line's time is.
    pub enum LineTimeArg {
        /// When the request came, as Apache writes it.
        "arrival" => Arrival,
        /// When the request ended, as nginx writes it: the request came so much earlier as it took.
        "end" => End,
    }
}

/// The longest that a request can take: a number of more is another number, or has another unit.
const DAY_US: u64 = 86_400_000_000;

/// How the lines of logs are read, as the user asks.
#[derive(Clone, Debug)]
pub struct LogOptions {
    /// The unit of durations that tell none.
    pub unit: Option<UnitArg>,
    /// What the time of a line is, if the user tells.
    pub line_time: Option<LineTimeArg>,
    /// The length of the network that an IPv6 address is counted by.
    pub ipv6_prefix: u8,
    /// More identifiers, each with where it stands.
    pub identifiers: Vec<(String, Source)>,
    /// Whether a request keeps its line and its user agent.
    pub keeps_lines: bool,
}

impl Default for LogOptions {
    fn default() -> Self {
        let identifiers = Vec::new();
        Self { unit: None, line_time: None, ipv6_prefix: 64, identifiers, keeps_lines: false }
    }
}

impl LogOptions {
    /// Refuses the options that say something of the lines of logs, for a trace.
    pub(super) fn of_trace(&self) -> Result<(), BadLine> {
        let (option, what) = if !self.identifiers.is_empty() {
            ("--identifier", "identifiers")
        } else if self.line_time.is_some() {
            ("--line-time", "times")
        } else if self.unit.is_some() {
            ("--duration-unit", "durations")
        } else {
            return Ok(());
        };
        Err(format!("begins a trace, which tells its {what} itself; leave {option} out"))
    }
}

/// Where an identifier stands.
#[derive(Clone, Debug)]
pub enum Source {
    /// In a field of the line, by the name that the format has for it.
    Field(String),
    /// In the first group of an expression that matches the path.
    InPath(Regex),
}

/// What a field of a log says of its request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    /// Who asked: an address, with or without a port.
    Client,
    /// The client and its proxies, of which the first asked, unless the line has a client.
    Forwarded,
    User,
    Time,
    /// A day and a time of day, as W3C writes them.
    Date,
    Clock,
    /// What stands behind a time of day, and is its zone if it looks like one.
    Zone,
    /// The first line of the request.
    Request,
    Method,
    /// The path, with or without a query, or an absolute URI.
    Target,
    Host,
    Agent,
    /// How long the request took, or a part of it, in this unit.
    Duration(UnitArg),
    /// How long the request took, in seconds if it has decimals, and otherwise in this unit.
    DurationOr(UnitArg),
    /// Nothing by itself.
    Other,
}

/// What a line says of its request.
#[derive(Debug, Default)]
pub(super) struct Found<'l> {
    client: Option<Cow<'l, str>>,
    forwarded: Option<Cow<'l, str>>,
    user: Option<Cow<'l, str>>,
    time: Option<Cow<'l, str>>,
    date: Option<Cow<'l, str>>,
    clock: Option<Cow<'l, str>>,
    /// Behind a blank; empty if none stands there.
    zone: String,
    request: Option<Cow<'l, str>>,
    method: Option<Cow<'l, str>>,
    target: Option<Cow<'l, str>>,
    host: Option<Cow<'l, str>>,
    pub(super) agent: Option<Cow<'l, str>>,
    pub(super) duration_us: Option<u64>,
    /// Whether the duration is a number of seconds with decimals.
    pub(super) has_decimals: bool,
    /// Whether the duration is a whole number of seconds other than 0, and tells no unit.
    pub(super) is_in_whole_seconds: bool,
    /// A duration that can be none, as it stands there: in its unit, it is longer than a day.
    pub(super) too_long: Option<String>,
    /// The identifiers that the user asks for, by their place among them.
    pub(super) identifiers: Vec<(usize, Cow<'l, str>)>,
}

impl<'l> Found<'l> {
    /// Notes what a field says. One that says nothing is absent.
    pub(super) fn set(&mut self, role: Role, text: Cow<'l, str>) {
        if is_nothing(&text) {
            return;
        }
        let place = match role {
            Role::Client => &mut self.client,
            Role::Forwarded => &mut self.forwarded,
            Role::User => &mut self.user,
            Role::Time => &mut self.time,
            Role::Date => &mut self.date,
            Role::Clock => &mut self.clock,
            Role::Zone => {
                if let Some(zone) = zone(&text).filter(|_| self.zone.is_empty()) {
                    self.zone = format!(" {zone}");
                }
                return;
            }
            Role::Request => &mut self.request,
            Role::Method => &mut self.method,
            Role::Target => &mut self.target,
            Role::Host => &mut self.host,
            Role::Agent => &mut self.agent,
            Role::Duration(unit) => return self.took(&text, unit),
            Role::DurationOr(unit) => {
                let unit = if text.contains('.') { UnitArg::S } else { unit };
                return self.took(&text, unit);
            }
            Role::Other => return,
        };
        place.get_or_insert(text);
    }

    /// Decodes `#22`, as `HAProxy` writes a quote and other characters of a request.
    pub(super) fn decode_request(&mut self) {
        let Some(request) = self.request.as_deref().filter(|text| text.contains('#')) else {
            return;
        };
        let mut parts = request.split('#');
        let mut bytes = parts.next().unwrap_or_default().as_bytes().to_vec();
        for part in parts {
            let byte = part.get(..2).and_then(|hex| u8::from_str_radix(hex, 16).ok());
            match byte {
                Some(byte) => {
                    bytes.push(byte);
                    bytes.extend(&part.as_bytes()[2..]);
                }
                None => bytes.extend([b"#", part.as_bytes()].concat()),
            }
        }
        self.request = Some(Cow::Owned(String::from_utf8_lossy(&bytes).into_owned()));
    }

    /// Whether an address stands where the client does. In a format that the user describes, it may
    /// be the name of a host, or absent.
    pub(super) fn check_client(&self, is_own: bool) -> Result<(), BadLine> {
        let client = self.client.as_deref().or(self.forwarded.as_deref());
        let Some(client) = client else {
            return if is_own { Ok(()) } else { Err("names no client".to_owned()) };
        };
        let is_address = client.rsplit(',').next().and_then(address).is_some();
        if is_address || is_own && client.split(',').all(|one| is_host(one.trim().as_bytes())) {
            return Ok(());
        }
        Err(format!("has {} in the place of the client's address", quote(client, 40)))
    }

    /// Whether what stands where the user does may be one.
    pub(super) fn check_user(&self) -> Result<(), BadLine> {
        self.user.as_deref().map_or(Ok(()), check_user)
    }

    /// Adds a part of the time that the request took. A text with a unit has that one.
    fn took(&mut self, text: &str, unit: UnitArg) {
        let named = UnitArg::ALL.iter().map(|unit| (unit.name(), *unit));
        let mut named = iter::once(("µs", UnitArg::Us)).chain(named);
        let with_unit = named.find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)));
        let (number, unit) = with_unit.unwrap_or((text, unit));
        // A part that was never reached, such as -1, took no time.
        let Some((whole, millionths)) = decimal(number) else { return };
        let unit_ns = u128::from(unit as u64);
        let ns =
            u128::from(whole) * unit_ns + u128::from(millionths.unwrap_or(0)) * unit_ns / 1_000_000;
        let us = u64::try_from(ns / 1_000).unwrap_or(u64::MAX);
        if us > DAY_US {
            self.too_long = Some(text.to_owned());
        }
        self.is_in_whole_seconds |=
            with_unit.is_none() && millionths.is_none() && unit == UnitArg::S && whole > 0;
        self.has_decimals |= millionths.is_some() && unit == UnitArg::S;
        self.duration_us = Some(self.duration_us.unwrap_or(0).saturating_add(us));
    }

    /// The request of the line, whose time is its end unless something else says when it came.
    pub(super) fn entry(
        self,
        moments: &mut Moments,
        options: &LogOptions,
        line_time: LineTimeArg,
    ) -> Result<InputEntry, BadLine> {
        if let Some(text) = &self.too_long {
            return Err(format!("the duration is {}, which is more than a day", quote(text, 40)));
        }
        if self.request.as_deref().is_some_and(|request| request.starts_with("- ")) {
            return Err("tells of a connection without a request".to_owned());
        }
        let mut at = match (&self.time, &self.date, &self.clock) {
            (Some(time), ..) => moments.read(time)?,
            (None, Some(date), Some(clock)) => {
                let between = if date.contains('/') { ":" } else { " " };
                moments.read(&format!("{date}{between}{clock}{}", self.zone))?
            }
            _ => return Err("has no time".to_owned()),
        };
        if options.line_time.unwrap_or(line_time) == LineTimeArg::End {
            let before = at.as_us().checked_sub(self.duration_us.unwrap_or(0));
            at = before.and_then(Timestamp::from_us).ok_or("came before the year 1970")?;
        }
        let ip = self.client.or(self.forwarded);
        let ip = ip.map(|text| client(&text, options.ipv6_prefix));
        let text = |bytes: &[u8]| {
            str::from_utf8(bytes)
                .map_or_else(|_| CompactString::from_utf8_lossy(bytes), CompactString::from)
        };
        let (target, request) = (self.target.as_deref(), self.request.as_deref());
        let of_request = request.unwrap_or_default().as_bytes();
        let path = match target {
            Some(target) => super::request::target_path(target.as_bytes()),
            None => path(of_request),
        };
        let authority = target.map(str::as_bytes).or_else(|| super::request::target(of_request));
        let authority = authority.and_then(super::request::authority).map(text);
        let method = match &self.method {
            Some(name) => Some(name.as_bytes()),
            None => method(of_request),
        };
        let named = [
            ("ip", ip.clone()),
            ("user", self.user.map(CompactString::from)),
            ("path", path.map(text)),
            ("method", method.map(text)),
            ("host", self.host.map(CompactString::from).or(authority)),
        ];
        let named = named.into_iter().filter_map(|(name, value)| Some((name.into(), value?)));
        let mut named = Named { list: named.collect(), bare_only: true };
        for (place, (name, source)) in options.identifiers.iter().enumerate() {
            let value = match source {
                Source::Field(_) => self
                    .identifiers
                    .iter()
                    .find(|(of, value)| *of == place && !is_nothing(value))
                    .map(|(_, value)| CompactString::from(&**value)),
                Source::InPath(expression) => named
                    .list
                    .iter()
                    .find(|(name, _)| name == "path")
                    .and_then(|(_, path)| expression.captures(path)?.get(1))
                    .map(|part| CompactString::from(part.as_str())),
            };
            // A line that does not have it keeps what the format says, as of a client that no proxy
            // has forwarded.
            if let Some(value) = value {
                named.list.retain(|(known, _)| known != name);
                let value = if name == "ip" { client(&value, options.ipv6_prefix) } else { value };
                named.list.push((name.clone().into(), value));
            }
        }
        let bare = named.list.iter().find(|(name, _)| name == "ip").map(|(_, ip)| ip.clone());
        if named.list.iter().all(|(name, _)| ["path", "method", "host"].contains(&&**name)) {
            return Err("names no client".to_owned());
        }
        let caller = Caller { bare, named };
        let (costs, op, duration_us) = (1.into(), Op::Acquire, self.duration_us);
        Ok(InputEntry { at, caller, costs, op, duration_us, ..InputEntry::default() })
    }
}

/// Refuses what is no user: in a format with more fields, others stand in this place.
pub(super) fn check_user(user: &str) -> Result<(), BadLine> {
    if is_nothing(user) {
        return Ok(());
    }
    let mut words = user.split([' ', ',']).map(|word| word.trim_matches(['[', ']', '"']));
    let unquoted = user.strip_prefix('"').and_then(|user| user.strip_suffix('"'));
    let is_other = unquoted.unwrap_or(user).contains([',', '"'])
        || user.starts_with("- ")
        || user.contains(" - ")
        || user.contains("HTTP/")
        || user.ends_with(" -")
        || words.any(|word| address(word).is_some());
    if !is_other {
        return Ok(());
    }
    let user = quote(user, 40);
    Err(format!(
        "has {user} in the place of the user; if the format has more fields there, tell it by --log-format"
    ))
}

/// The zone at the end of a text, behind nothing but the decimals of a second.
fn zone(text: &str) -> Option<&str> {
    let zone = text.trim().trim_start_matches(|c: char| c.is_ascii_digit());
    let digits = zone.strip_prefix(['+', '-'])?.replacen(':', "", 1);
    (digits.len() == 4 && digits.bytes().all(|b| b.is_ascii_digit())).then_some(zone)
}

/// Whether a field says that there is nothing.
pub(super) fn is_nothing(text: &str) -> bool {
    matches!(text.trim(), "" | "-" | "\"-\"" | "\"\"")
}
