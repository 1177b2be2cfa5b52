//! Policies read from a document. Every mistake is named with its limit and what is accepted.
//!
//! A limit is checked after each of its fields, while the format still knows where the field is: an
//! error has the position of the first field with which the limit is wrong, whatever follows. What
//! a later field can make right is an error only at the end, so the order of the fields decides
//! nothing. In a format that sorts the fields (the crate `toml` without its feature
//! `preserve_order`) the position may be that of another field of the same limit.
//!
//! The parser takes values of any type, so that an error can name the limit. Types therefore say
//! nothing about the schema, and `ratelimit-cli/ratelimit.schema.json` is written by hand. Property
//! tests compare it with this parser.

use alloc::borrow::ToOwned;
use alloc::collections::BTreeMap;
use alloc::format;
use alloc::string::{String, ToString};
use alloc::vec::Vec;
use core::fmt;

use serde::de::{Deserialize, DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};

use crate::algorithms::{Concurrency, FixedWindow};
use crate::any_algorithm::AnyAlgorithm;
use crate::any_algorithm::text::{algorithm_names, unknown};
use crate::builder::FromRate as _;
use crate::calendar::{Unit, check_anchor, check_zone};
use crate::error::{ConfigError, did_you_mean};
use crate::limit::{Limit, Limits, name_is_taken};
use crate::rate::{Period, Rate, period_us, whole_number};

mod given;

use given::{GivenValue, Then};

/// The whole document: `[[limit]]` tables.
#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct Document {
    /// Tells an editor where the schema of policies is.
    #[serde(default, rename = "$schema")]
    _schema: Option<String>,
    #[serde(default)]
    limit: Tables,
}

/// The `[[limit]]` tables, each already a limit.
#[derive(Default)]
struct Tables(Vec<Limit<AnyAlgorithm>>);

/// The fields of a `[[limit]]`.
const FIELDS: [&str; 22] = [
    "name",
    "key",
    "when",
    "algorithm",
    "rate",
    "zone",
    "anchor",
    "burst",
    "debt",
    "max",
    "overridable",
    "count",
    "required",
    "shadow",
    "on_outage",
    "warn",
    "bucket",
    "rates",
    "block",
    "factor",
    "longest",
    "forget",
];

/// What stands in `when` for the identifiers that must not have a value.
const NOT: &str = "not";

/// Those that only a lockout has.
const OF_LOCKOUT: [&str; 4] = ["block", "factor", "longest", "forget"];

/// The fields of one `[[limit]]` written so far, with values of any type, so that an error can name
/// its limit. `None` stands for a `null`: the field counts as absent.
#[derive(Default)]
struct LimitTable(BTreeMap<&'static str, Option<GivenValue>>);

/// Why an entry is no limit.
struct Fault {
    error: ConfigError,
    /// Whether a field that makes it right may follow; otherwise what is there is wrong.
    may_follow: bool,
}

impl From<ConfigError> for Fault {
    fn from(error: ConfigError) -> Self {
        Self { error, may_follow: false }
    }
}

impl Fault {
    fn missing(message: impl Into<String>) -> Self {
        Self { error: ConfigError::new(message), may_follow: true }
    }
}

impl<'de> Deserialize<'de> for Limits<AnyAlgorithm> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Self::new(Document::deserialize(deserializer)?.limit.0).map_err(D::Error::custom)
    }
}

impl<'de> Deserialize<'de> for Limit<AnyAlgorithm> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        After(None).deserialize(deserializer)
    }
}

/// Reads a limit that follows these, if it is one of a document.
struct After<'l>(Option<&'l [Limit<AnyAlgorithm>]>);

impl<'de> DeserializeSeed<'de> for After<'_> {
    type Value = Limit<AnyAlgorithm>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for After<'_> {
    type Value = Limit<AnyAlgorithm>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a [[limit]] with a name, an algorithm and a rate")
    }

    fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Self::Value, M::Error> {
        let mut entry = LimitTable::default();
        // A limit without a name so far is named by its number.
        let in_limit = |error: ConfigError| match (error.limit(), self.0) {
            (None, Some(limits)) => format!("limit {}: {error}", limits.len() + 1),
            _ => error.to_string(),
        };
        while let Some(Field(field)) = map.next_key()? {
            map.next_value_seed(Then(|given| {
                let given = Some(given).filter(|given| !matches!(given, GivenValue::Nothing));
                if entry.0.insert(field, given).is_some() {
                    return Err(in_limit(ConfigError::new(format!(
                        "{field} is there twice; write it once"
                    ))));
                }
                if let Err(Fault { error, may_follow: false }) = entry.build() {
                    return Err(in_limit(error));
                }
                let is_taken =
                    |name: &&str| self.0.into_iter().flatten().any(|limit| limit.name() == *name);
                match entry.text("name", "").ok().flatten().filter(is_taken) {
                    Some(name) => Err(name_is_taken(name).to_string()),
                    None => Ok(()),
                }
            }))?;
        }
        entry.build().map_err(|fault| M::Error::custom(in_limit(fault.error)))
    }
}

/// The name of a field.
struct Field(&'static str);

impl<'de> Deserialize<'de> for Field {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let name = String::deserialize(deserializer)?;
        FIELDS.into_iter().find(|field| *field == name).map(Field).ok_or_else(|| {
            let (fields, meant) = (FIELDS.join("`, `"), did_you_mean(&name, FIELDS));
            D::Error::custom(format!("unknown field `{name}`, expected one of `{fields}`{meant}"))
        })
    }
}

impl<'de> Deserialize<'de> for Tables {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_seq(Self::default())
    }
}

impl<'de> Visitor<'de> for Tables {
    type Value = Self;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("each limit under [[limit]], with two brackets")
    }

    fn visit_seq<S: SeqAccess<'de>>(mut self, mut seq: S) -> Result<Self, S::Error> {
        while let Some(limit) = seq.next_element_seed(After(Some(&self.0)))? {
            self.0.push(limit);
        }
        Ok(self)
    }
}

impl LimitTable {
    fn get(&self, field: &str) -> Option<&GivenValue> {
        self.0.get(field)?.as_ref()
    }

    /// The text of a field, if it is there.
    fn text(&self, field: &str, such_as: &str) -> Result<Option<&str>, ConfigError> {
        match self.get(field) {
            None => Ok(None),
            Some(GivenValue::Text(text)) => Ok(Some(text)),
            Some(wrong) => Err(ConfigError::new(format!(
                "{field} is {wrong}; write it in quotes, such as {field} = {such_as}"
            ))),
        }
    }

    /// The texts of a field that is a list, if it is there.
    fn texts(&self, field: &str, such_as: &str) -> Result<Option<Vec<&str>>, ConfigError> {
        let wrong = |wrong: &GivenValue| {
            ConfigError::new(format!(
                "{field} is or contains {wrong}; write a list of texts, such as {field} = {such_as}"
            ))
        };
        match self.get(field) {
            None => Ok(None),
            Some(GivenValue::List(items)) => items
                .iter()
                .map(|item| match item {
                    GivenValue::Text(text) => Ok(text.as_str()),
                    other => Err(wrong(other)),
                })
                .collect::<Result<_, _>>()
                .map(Some),
            Some(other) => Err(wrong(other)),
        }
    }

    /// Whether a field is true; one that is not there is false.
    fn truth(&self, field: &str) -> Result<bool, ConfigError> {
        match self.get(field) {
            None => Ok(false),
            Some(GivenValue::Truth(truth)) => Ok(*truth),
            Some(wrong) => Err(ConfigError::new(format!(
                "{field} is {wrong}; write {field} = true, or leave it out"
            ))),
        }
    }

    /// The limit of what is there so far.
    fn build(&self) -> Result<Limit<AnyAlgorithm>, Fault> {
        let name = self.text("name", "\"burst\"")?;
        let in_limit = |error: ConfigError| match name {
            Some(name) => error.in_limit(name),
            None => error.unnamed(),
        };
        // What is missing keeps nothing else from being checked.
        let (algorithm, mut missing) = match self.algorithm() {
            Ok(algorithm) => (algorithm, None),
            Err(Fault { error, may_follow: true }) => {
                (AnyAlgorithm::of_numbers("gcra", "1/s")?, Some(in_limit(error)))
            }
            Err(fault) => return Err(in_limit(fault.error).into()),
        };
        if name.is_none() {
            missing = Some(ConfigError::new("a [[limit]] has no name; add name = \"…\""));
        }
        let name = name.unwrap_or("unnamed");
        let mut limit = self.limit(name, algorithm).map_err(in_limit)?;
        let max = self.text("max", "\"1000/s burst 2000\"").map_err(in_limit)?;
        // An algorithm that is not known yet may accept it.
        if let Some(max) = max.filter(|_| missing.is_none()) {
            let max = algorithm.at_numbers(max);
            let max = max.map_err(|error| ConfigError::new(format!("max: {error}")));
            limit = max.and_then(|max| limit.accepts_up_to(max)).map_err(in_limit)?;
        }
        missing.map_or(Ok(limit), |error| Err(Fault { error, may_follow: true }))
    }

    fn limit(
        &self,
        name: &str,
        algorithm: AnyAlgorithm,
    ) -> Result<Limit<AnyAlgorithm>, ConfigError> {
        let identifier_names = self.texts("key", "[\"ip\"]")?;
        let limit = Limit::new(name, algorithm)?.by(identifier_names.unwrap_or_default())?;
        let mut limit = self.with_conditions(limit)?;
        match self.text("count", "\"admitted\"")? {
            None | Some("admitted") => {}
            Some("attempts") => limit = limit.count_attempts()?,
            Some(count) => {
                let expected = "write count = \"admitted\" or count = \"attempts\"";
                let message = format!("count = {count:?} is not known; {expected}");
                return Err(ConfigError::new(message));
            }
        }
        if self.truth("required")? {
            limit = limit.required();
        }
        if self.truth("shadow")? {
            limit = limit.shadow();
        }
        if self.truth("overridable")? {
            limit = limit.overridable();
        }
        if let Some(on_outage) = self.text("on_outage", "\"closed\"")? {
            limit = limit.on_outage(on_outage.parse()?);
        }
        match self.text("warn", SUCH_AS_WARN)? {
            None => Ok(limit),
            Some(warn) => limit.warn_at_percent(percent(warn)?),
        }
    }

    /// The limit under the conditions of `when`.
    fn with_conditions(
        &self,
        mut limit: Limit<AnyAlgorithm>,
    ) -> Result<Limit<AnyAlgorithm>, ConfigError> {
        let Some(when) = self.get("when") else { return Ok(limit) };
        for (identifier, given) in when.entries("when", "{ path = \"/login\" }")? {
            if identifier != NOT {
                let values = given.values(&format!("when.{identifier}"))?;
                limit = limit.when(identifier, values)?;
                continue;
            }
            for (identifier, given) in given.entries("when.not", "{ path = \"/health\" }")? {
                let values = given.values(&format!("when.not.{identifier}"))?;
                limit = limit.when_not(identifier, values)?;
            }
        }
        Ok(limit)
    }

    fn algorithm(&self) -> Result<AnyAlgorithm, Fault> {
        // Each field by itself first: nothing that follows makes it right.
        let algorithm = self.text("algorithm", "\"gcra\"")?;
        if let Some(algorithm) = algorithm.filter(|name| !AnyAlgorithm::NAMES.contains(name)) {
            return Err(unknown(algorithm).into());
        }
        let rate = self.text("rate", "\"10/s\"")?;
        let rate = rate.map(|rate| checked_rate(algorithm, rate)).transpose()?;
        let (zone, anchor) = (self.zone()?, self.anchor()?);
        let (burst, debt) = (self.number("burst", 1)?, self.number("debt", 0)?);
        let bucket = self.text("bucket", "\"1s\"")?.map(period_us).transpose()?;
        let rates = self.texts("rates", "[\"1000/1s\", \"5000/10s\"]")?.unwrap_or_default();
        let rates = rates.iter().map(|rate| rate.parse::<Rate>().map(|rate| rate.to_string()));
        let rates = rates.collect::<Result<Vec<_>, _>>()?.join(",");
        let (block, factor) = (self.length("block", "15m")?, self.number("factor", 1)?);
        let (longest, forget) = (self.length("longest", "1d")?, self.length("forget", "7d")?);

        let algorithm = algorithm.ok_or_else(|| {
            Fault::missing(format!("no algorithm; add algorithm = one of {}", algorithm_names()))
        })?;
        if algorithm != "lockout" {
            self.without(&OF_LOCKOUT, algorithm, "leave it out, or use lockout")?;
        }
        if algorithm != "fixed-window" {
            let instead = "leave it out, or use fixed-window with a rate such as \"1000/month\"";
            self.without(&["zone", "anchor"], algorithm, instead)?;
        }
        if algorithm == "bucketed-window" {
            let instead = "leave it out, or use gcra or token-bucket";
            self.without(&["burst", "debt"], algorithm, instead)?;
            self.without(&["rate"], algorithm, "write rates = [\"1000/1s\", \"5000/10s\"]")?;
            let bucket = bucket.filter(|_| !rates.is_empty()).ok_or_else(|| {
                Fault::missing(
                    "a bucketed-window needs bucket = \"1s\" and rates = [\"1000/1s\", \"5000/10s\"]",
                )
            })?;
            let bucket = Period { us: bucket, times_one: true };
            Ok(AnyAlgorithm::of_numbers(algorithm, &format!("bucket {bucket} rates {rates}"))?)
        } else {
            self.without(&["bucket", "rates"], algorithm, "leave it out, or use bucketed-window")?;
            let rate = rate.ok_or_else(|| {
                Fault::missing("no rate; add one such as rate = \"10/s\" or rate = \"100/5m\"")
            })?;
            if algorithm == "lockout" {
                self.without(&["burst", "debt"], algorithm, "leave it out")?;
                if block.is_empty() {
                    return Err(Fault::missing("a lockout needs block = \"15m\""));
                }
                let of = |factor: &str, longest: &str, forget: &str| {
                    let numbers = format!("{rate}{block}{factor}{longest}{forget}");
                    AnyAlgorithm::of_numbers(algorithm, &numbers)
                };
                // Fields that follow may make it right.
                let or = |given: &str, other: &str| {
                    if given.is_empty() { other.to_owned() } else { given.to_owned() }
                };
                let least = block.replace("block", "longest");
                return of(&factor, &longest, &forget).map_err(|error| Fault {
                    error,
                    may_follow: of(
                        &or(&factor, " factor 2"),
                        &or(&longest, &least),
                        &or(&forget, " forget 1us"),
                    )
                    .is_ok(),
                });
            }
            let of = |burst: &str, debt: &str| {
                let numbers = format!("{rate}{zone}{anchor}{burst}{debt}");
                AnyAlgorithm::of_numbers(algorithm, &numbers)
            };
            of(&burst, &debt).map_err(|error| Fault {
                // What the algorithm says of a limit that is right without its debt may begin with
                // another number.
                error: match of(&burst, "") {
                    Ok(_) if !error.to_string().starts_with("debt ") => {
                        ConfigError::new(format!("debt: {error}"))
                    }
                    _ => error,
                },
                // A burst that follows may fit where the count of the rate, which is its default,
                // does not.
                may_follow: burst.is_empty() && of(" burst 1", &debt).is_ok(),
            })
        }
    }

    /// The time zone as an algorithm reads it from text, if it is there.
    fn zone(&self) -> Result<String, ConfigError> {
        let Some(zone) = self.text("zone", "\"Europe/Berlin\"")? else { return Ok(String::new()) };
        check_zone(zone)?;
        Ok(format!(" zone {zone}"))
    }

    /// The anchor as an algorithm reads it from text, if it is there.
    fn anchor(&self) -> Result<String, ConfigError> {
        let anchor = match self.get("anchor") {
            None => return Ok(String::new()),
            Some(GivenValue::Number(number)) => number.to_string(),
            Some(GivenValue::Text(text)) if text.bytes().all(|byte| !byte.is_ascii_digit()) => {
                text.clone()
            }
            Some(wrong) => {
                return Err(ConfigError::new(format!(
                    "anchor is {wrong}; write a number without quotes, or a day of the week in quotes, such as \
                     anchor = 15 or anchor = \"monday\""
                )));
            }
        };
        check_anchor(&anchor)?;
        Ok(format!(" anchor {anchor}"))
    }

    /// A whole number as an algorithm reads it from text, if it is there.
    fn number(&self, field: &str, least: u64) -> Result<String, ConfigError> {
        match self.get(field) {
            None => Ok(String::new()),
            Some(GivenValue::Number(number)) if *number >= least => {
                Ok(format!(" {field} {number}"))
            }
            Some(wrong) => Err(ConfigError::new(format!(
                "{field} is {wrong}; write a whole number of at least {least}, without quotes"
            ))),
        }
    }

    /// A length of time as an algorithm reads it from text, if it is there.
    fn length(&self, field: &str, such_as: &str) -> Result<String, ConfigError> {
        let Some(text) = self.text(field, &format!("{such_as:?}"))? else {
            return Ok(String::new());
        };
        Ok(format!(" {field} {}", Period { us: period_us(text)?, times_one: true }))
    }

    /// Refuses fields that say nothing of this algorithm.
    fn without(&self, fields: &[&str], algorithm: &str, instead: &str) -> Result<(), ConfigError> {
        match fields.iter().find(|field| self.get(field).is_some()) {
            None => Ok(()),
            Some(field) => {
                Err(ConfigError::new(format!("{field} has no meaning for {algorithm}; {instead}")))
            }
        }
    }
}

/// An example of the field `warn`.
const SUCH_AS_WARN: &str = "\"80%\"";

/// The number of a percentage such as `80%`.
fn percent(text: &str) -> Result<u8, ConfigError> {
    let number = text.strip_suffix('%').and_then(whole_number);
    let number = number.map(|number| u8::try_from(number).unwrap_or(u8::MAX));
    number.ok_or_else(|| {
        let wrong =
            format!("warn is {text:?}; write 1 to 100 percent, such as warn = {SUCH_AS_WARN}");
        ConfigError::new(wrong)
    })
}

/// A rate as this algorithm reads it from text.
fn checked_rate(algorithm: Option<&str>, rate: &str) -> Result<String, ConfigError> {
    if Unit::of_rate(rate).is_some() {
        return FixedWindow::of_words(rate, None, None, None).map(|_| rate.into());
    }
    let rate = match algorithm {
        Some("concurrency") => Concurrency::read_rate(rate),
        _ => rate.parse(),
    };
    rate.map(|rate: Rate| rate.to_string())
}

#[cfg(test)]
mod tests;
