//! Records of single callers: in words, as JSON, and from a file of the lines that `record list
//! --json` prints.

use std::collections::HashSet;

use ratelimit_core::for_cli::did_you_mean;
use ratelimit_core::store::Standing;
use ratelimit_core::{AnyAlgorithm, Limit, Limits, Record, Timestamp};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::failure::Failure;
use crate::input::reason;
use crate::text::{quote, time};

/// A line as written. Fields that are not listed here are ignored.
#[derive(Deserialize)]
struct Line {
    limit: Option<String>,
    value: Option<String>,
    record: Option<Change>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Change {
    numbers: Option<String>,
    #[serde(default)]
    blocked: bool,
    #[serde(default)]
    exempt: bool,
    until_us: Option<u64>,
}

/// A record, and the key of its caller under the limit of this name.
pub struct GivenRecord {
    limit: String,
    key: String,
    record: Record<AnyAlgorithm>,
}

/// The records of a file, which are all of these limits. Errors begin with its name.
///
/// # Errors
///
/// A line is no record, or its limit has none; the message tells which.
pub fn read(
    name: &str,
    text: &str,
    limits: &Limits<AnyAlgorithm>,
) -> Result<Vec<GivenRecord>, Failure> {
    let (mut records, mut seen) = (Vec::new(), HashSet::new());
    // Some editors write a mark before it.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    for (line, number) in text.lines().zip(1_u64..).filter(|(line, _)| !line.trim().is_empty()) {
        let wrong = |why| Failure::input(format!("{name}: line {number}: {why}"));
        let Some(one) = parse(line, limits).map_err(wrong)? else { continue };
        if !seen.insert((one.limit.clone(), one.key.clone())) {
            let (key, limit) = (quote(&one.key, 60), &one.limit);
            return Err(wrong(format!("{key} has two records under {limit}; leave one out")));
        }
        records.push(one);
    }
    Ok(records)
}

/// The record of a line; `None` for the totals of a list.
fn parse(line: &str, limits: &Limits<AnyAlgorithm>) -> Result<Option<GivenRecord>, String> {
    let fields: Map<String, Value> = serde_json::from_str(line).map_err(|error| reason(&error))?;
    if !fields.contains_key("limit")
        && let Some(is_cut) = fields.get("max_keys_reached")
    {
        return if is_cut == true {
            Err("the list is cut: there are more keys; list the records again with a larger --max-keys".into())
        } else {
            Ok(None)
        };
    }
    let line: Line = serde_json::from_str(line).map_err(|error| reason(&error))?;
    let name = line.limit.ok_or("names no limit; add \"limit\": \"…\"")?;
    let limit = limit_named(limits, &name)?;
    limit.takes_records().map_err(|refusal| refusal.to_string())?;
    let key = line.value.ok_or(
        "tells no caller, because the server has only a hash of an identifier that is longer than 128 bytes or \
         hidden with a secret; add \"value\": \"…\", or leave the line out",
    )?;
    let Change { numbers, blocked, exempt, until_us } =
        line.record.ok_or("has no record, such as \"record\": {\"numbers\": \"100/s\"}")?;
    let change = match (numbers, blocked, exempt) {
        (Some(numbers), false, false) => {
            let numbers = limit.algorithm().at_numbers(&numbers);
            Record::numbers(numbers.map_err(|error| format!("numbers: {error}"))?)
        }
        (None, true, false) => Record::blocked(),
        (None, false, true) => Record::exempt(),
        _ => return Err("a record has numbers, or blocked true, or exempt true; say one".into()),
    };
    let record = match until_us {
        Some(until_us) => change.until(Timestamp::saturating_from_us(until_us)),
        None => change.forever(),
    };
    if !suits(limit, &record) {
        return Err(format!(
            "the numbers are of another window than limit {name:?}, or have a debt where it counts attempts; only rate, \
             burst, count and debt may differ"
        ));
    }
    Ok(Some(GivenRecord { limit: name, key, record }))
}

/// The limit of this name.
pub fn limit_named<'l>(
    limits: &'l Limits<AnyAlgorithm>,
    name: &str,
) -> Result<&'l Limit<AnyAlgorithm>, String> {
    limits.iter().find(|limit| limit.name() == name).ok_or_else(|| {
        let names: Vec<_> = limits.iter().map(Limit::name).collect();
        let (all, meant) = (names.join(", "), did_you_mean(name, names));
        format!("the policy has no limit {}; it has {all}{meant}", quote(name, 60))
    })
}

/// Whether a limit decides by a record, at some time.
fn suits(limit: &Limit<AnyAlgorithm>, record: &Record<AnyAlgorithm>) -> bool {
    let forever = match record.algorithm() {
        Some(numbers) => Record::numbers(*numbers).forever(),
        None => return true,
    };
    !matches!(limit.standing(Some(&forever), Timestamp::ZERO), Standing::Policy)
}

/// Those of the records by which this limit decides, each with the key of its caller.
pub fn of<'r>(
    records: &'r [GivenRecord],
    limit: &'r Limit<AnyAlgorithm>,
) -> impl Iterator<Item = (&'r str, &'r Record<AnyAlgorithm>)> {
    let of_limit = records.iter().filter(|one| one.limit == limit.name());
    let of_limit = of_limit.filter(|one| limit.is_overridable() && suits(limit, &one.record));
    of_limit.map(|one| (&*one.key, &one.record))
}

/// A record for people: `blocked until 2027-01-31T00:00:00Z`.
pub fn described(record: &Record<AnyAlgorithm>) -> String {
    let change = match record.algorithm() {
        Some(numbers) => numbers.to_string(),
        None if record.is_blocked() => "blocked".to_owned(),
        None => "exempt".to_owned(),
    };
    match record.end() {
        Some(end) => format!("{change} until {}", time(end)),
        None => format!("{change} for ever"),
    }
}

/// The same for programs.
pub fn fields(record: &Record<AnyAlgorithm>) -> Value {
    json!({
        "numbers": record.algorithm().map(ToString::to_string), "blocked": record.is_blocked(),
        "exempt": record.is_exempt(), "until_us": record.end().map(Timestamp::as_us),
    })
}
