//! JSONL traces, one JSON object per line: `{"at_us": 9500000, "key": "k", "cost": 5}`.

use std::collections::HashMap;
use std::fmt;

use compact_str::CompactString;
use ratelimit_core::LimitCosts;
use ratelimit_core::for_cli::did_you_mean;
use ratelimit_core::store::Op;
use serde::de::{self, Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::Value;

use super::entry::{BadLine, InputEntry, OTHERS, op, timestamp, whole_number};
use crate::caller::{Caller, Named};
use crate::text::{printable, quote};

/// A line as written, and the names of its fields. Those behind the semicolon say nothing here: a
/// decision line may be replayed, and has them besides.
macro_rules! record {
    ($($field:ident: $type:ty),+; $($besides:ident),+) => {
        #[derive(serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        #[allow(dead_code, reason = "what a decision line has besides")]
        struct Record {
            $($field: $type,)+
            $($besides: Option<IgnoredAny>,)+
        }

        const FIELDS: &[&str] = &[$(stringify!($field)),+];
        const OF_DECISIONS: &[&str] = &[$(stringify!($besides)),+];
    };
}

record! {
    at_us: Value,
    key: Option<CompactString>,
    keys: Option<Named>,
    cost: Option<Value>,
    op: Option<String>,
    duration_us: Option<Value>,
    numbers: Option<Value>;
    allowed, limit, remaining, retry_after_us, reset_after_us, warned, owed, forgiven, limits, shadow
}

/// Whether a line belongs to a trace, even if it is invalid: it has the field that no other object
/// has.
pub(crate) fn is_record(line: &[u8]) -> bool {
    let fields =
        serde_json::from_str::<HashMap<String, Option<IgnoredAny>>>(&String::from_utf8_lossy(line));
    fields.is_ok_and(|fields| fields.contains_key("at_us"))
}

pub(crate) fn parse(line: &[u8]) -> Result<InputEntry, BadLine> {
    let text = String::from_utf8_lossy(line);
    if !text.trim_start().starts_with('{') {
        return Err("is no JSON object, such as {\"at_us\": 5, \"key\": \"k\"}".to_owned());
    }
    let record: Record = serde_json::from_str(&text)
        .map_err(|error| unknown(&text).unwrap_or_else(|| reason(&error)))?;
    let named = record.keys.unwrap_or_default();
    if record.key.is_none() && named.list.is_empty() {
        let no_caller = "names no caller; add \"key\": \"…\" or \"keys\": {\"ip\": \"…\"}";
        return Err(no_caller.to_owned());
    }
    let number =
        |field: &str, value: &Value| whole_number(field, value.as_u64(), &value.to_string());
    let costs = match record.cost {
        Some(Value::Object(of_limits)) => {
            let mut costs = LimitCosts::from(1);
            for (limit, cost) in of_limits {
                let cost = number(&format!("cost of {}", quote(&limit, 40)), &cost)?;
                costs = if limit == OTHERS {
                    costs.with_others(cost)
                } else {
                    costs.with(&limit, cost)
                };
            }
            costs
        }
        Some(cost) => number("cost", &cost)?.into(),
        None => 1.into(),
    };
    let numbers = match record.numbers {
        Some(Value::Object(of_limits)) => {
            let text = |(limit, numbers): (String, Value)| match numbers {
                Value::String(numbers) => Ok((limit, numbers)),
                other => Err(wrong_numbers(&other)),
            };
            of_limits.into_iter().map(text).collect::<Result<_, _>>()?
        }
        Some(other) => return Err(wrong_numbers(&other)),
        None => Vec::new(),
    };
    Ok(InputEntry {
        at: timestamp(number("at_us", &record.at_us)?)?,
        caller: Caller { bare: record.key, named },
        costs,
        numbers,
        op: record.op.map_or(Ok(Op::Acquire), |name| op(&name))?,
        duration_us: record.duration_us.map(|us| number("duration_us", &us)).transpose()?,
        agent: None,
        line: None,
    })
}

/// The field of a line that a trace does not have, and what is meant by it: one that is lacking, if
/// the line lacks one.
fn unknown(text: &str) -> Option<BadLine> {
    let fields: serde_json::Map<_, _> = serde_json::from_str(text).ok()?;
    let is_known = |name: &str| FIELDS.contains(&name) || OF_DECISIONS.contains(&name);
    let has = |names: &[&str]| names.iter().any(|name| fields.contains_key(*name));
    let (lacks, wanted) = if !has(&["at_us"]) {
        ("has no at_us; ", &["at_us"][..])
    } else if !has(&["key", "keys"]) {
        ("has no key or keys; ", &["key", "keys"][..])
    } else {
        ("", FIELDS)
    };
    let unknown = fields.keys().filter(|name| !is_known(name));
    let meant = |name: &String| did_you_mean(name, wanted.iter().copied());
    let (name, meant) =
        unknown.map(|name| (name, meant(name))).min_by_key(|(_, meant)| meant.is_empty())?;
    Some(format!("{lacks}{} is no field of a trace{meant}", quote(name, 40)))
}

fn wrong_numbers(found: &Value) -> BadLine {
    let found = printable(&found.to_string(), 40);
    format!(
        "numbers is or has {found}, expected an object of texts: {{\"api\": \"100/s burst 200\"}}"
    )
}

/// The parser's message with its column but without its line, because the parser sees only one.
pub(crate) fn reason(error: &serde_json::Error) -> BadLine {
    let message = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    // The message may quote a text of the line.
    let message = printable(message.strip_suffix(&place).unwrap_or(&message), 200);
    match error.column() {
        0 => message,
        column => format!("{message} (column {column})"),
    }
}

/// A null identifier is absent.
impl<'de> Deserialize<'de> for Named {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeysVisitor;
        impl<'de> Visitor<'de> for KeysVisitor {
            type Value = Named;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("keys as an object of texts, such as {\"ip\": \"192.0.2.7\"}")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Named, M::Error> {
                let mut keys = Named::default();
                while let Some((name, value)) = map.next_entry::<String, Option<CompactString>>()? {
                    if keys.list.iter().any(|(known, _)| *known == name) {
                        let twice = format!("keys names {} twice", quote(&name, 40));
                        return Err(de::Error::custom(twice));
                    }
                    keys.list.extend(value.map(|value| (name.into(), value)));
                }
                Ok(keys)
            }
        }
        deserializer.deserialize_map(KeysVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratelimit_core::Timestamp;

    #[test]
    fn a_line_has_defaults_and_keeps_the_order_of_its_identifiers() {
        let (acquire, last) = (Op::Acquire, Timestamp::MAX.as_us());
        for (line, at_us, caller, cost, op) in [
            (r#"{"limits": [1, {}], "at_us": 0, "key": "a\nb"}"#, 0, "a\\u{a}b", 1, acquire),
            (r#"{"at_us":0,"key":"k","keys":null,"cost":null,"op":null}"#, 0, "k", 1, acquire),
            (r#"{"at_us":0,"key":"k","keys":{},"duration_us":null}"#, 0, "k", 1, acquire),
            (
                r#"{"at_us":4503599627370495,"keys":{"user":"b","path":null,"ip":"a"},"cost":18446744073709551615,"op":"peek"}"#,
                last,
                "user=b ip=a",
                u64::MAX,
                Op::Peek,
            ),
        ] {
            let entry = parse(line.as_bytes()).expect(line);
            let told = (entry.at.as_us(), entry.caller.display(), entry.costs, entry.op);
            assert_eq!(told, (at_us, caller.to_owned(), cost.into(), op), "{line}");
            assert_eq!(entry.duration_us, None);
        }
        let each = r#"{"at_us":0,"key":"k","cost":{"input":812,"*":2}}"#;
        let each = parse(each.as_bytes()).expect(each).costs;
        assert_eq!(each, LimitCosts::from(2).with("input", 812));
        let own = r#"{"at_us":0,"key":"k","numbers":{"api":"100/s burst 200"}}"#;
        let own = parse(own.as_bytes()).expect(own).numbers;
        assert_eq!(own, [("api".to_owned(), "100/s burst 200".to_owned())]);
        let entry = parse(b"{\"at_us\":0,\"key\":\"\xff\",\"op\":\"reset\"}").expect("a line");
        assert_eq!((entry.caller.display(), entry.op), ("\u{fffd}".to_owned(), Op::Reset));
    }

    #[test]
    fn bad_lines_say_which_field_is_wrong() {
        assert!(is_record(br#"{"x": 1e999, "at_us": null}"#) && !is_record(b"[5]"));
        for (line, says) in [
            ("", "no JSON object"),
            ("{", "EOF"),
            ("{}", "`at_us`"),
            (
                r#"{"at":5,"key":"k"}"#,
                "has no at_us; \"at\" is no field of a trace; did you mean \"at_us\"?",
            ),
            (r#"{"a":1,"at_uss":5,"b":1}"#, "\"at_uss\" is no field of a trace; did you mean"),
            (r#"{"time":5,"key":"k"}"#, "has no at_us; \"time\" is no field of a trace"),
            (
                r#"{"at_us":5,"kye":"k"}"#,
                "has no key or keys; \"kye\" is no field of a trace; did you mean \"key\"?",
            ),
            (
                r#"{"at_us":5,"key":"k","cots":500}"#,
                "\"cots\" is no field of a trace; did you mean \"cost\"?",
            ),
            ("[5, \"k\"]", "no JSON object"),
            (r#"{"at_us": 1}"#, "no caller"),
            (r#"{"at_us": 1, "keys": {"ip": null}}"#, "no caller"),
            (r#"{"at_us": null, "key": "k"}"#, "at_us is null, expected a whole number"),
            (r#"{"at_us": -1, "key": "k"}"#, "at_us is -1, expected a whole number"),
            (r#"{"at_us": "1", "key": "k"}"#, "at_us is \"1\""),
            (r#"{"at_us": 4503599627370496, "key": "k"}"#, "2112"),
            (r#"{"at_us": 1, "key": "k", "cost": 18446744073709551616}"#, "cost is 1.8"),
            (r#"{"at_us": 1, "key": "k", "cost": {"a": "1"}}"#, "cost of \"a\" is \"1\""),
            (r#"{"at_us": 1, "key": "k", "numbers": "1/s"}"#, "numbers is or has \"1/s\""),
            (r#"{"at_us": 1, "key": "k", "numbers": {"a": 5}}"#, "numbers is or has 5"),
            (r#"{"at_us": 1, "key": "k", "duration_us": 0.5}"#, "duration_us is 0.5"),
            (r#"{"at_us": 1, "key": 5}"#, "expected a string (column 21)"),
            (r#"{"at_us": 1, "keys": ["ip"]}"#, "keys as an object"),
            (r#"{"at_us": 1, "keys": {"ip": "a", "ip": "b"}}"#, "twice"),
            (r#"{"at_us": 1, "key": "k", "op": "steal"}"#, "acquire, peek, refund, reset"),
            (r#"{"at_us": 1, "key": "k"} x"#, "trailing"),
            (r#"{"at_us": 1, "key": "k", "op": "\u001b"}"#, "op is \"\\u{1b}\";"),
        ] {
            let reason = parse(line.as_bytes()).expect_err(line);
            assert!(reason.contains(says), "{line}\n→ {reason}\nlacks {says}");
            assert!(!reason.contains("at line 1"), "{reason}");
        }
    }
}
