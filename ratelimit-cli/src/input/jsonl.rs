//! JSONL traces, one JSON object per line: `{"at_us": 9500000, "key": "k", "cost": 5}`.

use std::borrow::Cow;
use std::fmt;

use ratelimit_core::Op;
use serde::de::{self, Deserialize, Deserializer, MapAccess, Visitor};

use super::{BadLine, Entry, op, timestamp};
use crate::caller::Caller;
use crate::text::{printable, quoted};

/// Reads a JSONL trace.
#[derive(Debug, Default)]
pub(crate) struct Jsonl {
    /// A line that is not UTF-8, converted to text.
    lossy: String,
}

/// A line as written. Fields that are not listed here are ignored.
#[derive(serde::Deserialize)]
struct Record<'l> {
    #[serde(deserialize_with = "at_us")]
    at_us: u64,
    #[serde(borrow, default)]
    key: Option<Text<'l>>,
    #[serde(borrow, default)]
    keys: Option<Keys<'l>>,
    #[serde(default)]
    cost: Option<Cost>,
    #[serde(borrow, default)]
    op: Option<Text<'l>>,
    #[serde(default)]
    duration_us: Option<Duration>,
}

impl Jsonl {
    /// Whether a line belongs to a trace, even if it is invalid.
    pub(crate) fn is_record(line: &[u8]) -> bool {
        serde_json::from_slice::<Dated>(line).is_ok()
    }

    pub(crate) fn parse<'l>(&'l mut self, line: &'l [u8]) -> Result<Entry<'l>, BadLine> {
        let text = match String::from_utf8_lossy(line) {
            Cow::Borrowed(text) => text,
            Cow::Owned(text) => {
                self.lossy = text;
                &self.lossy
            }
        };
        if !text.trim_start().starts_with('{') {
            return Err(BadLine::new("is no JSON object, such as {\"at_us\": 5, \"key\": \"k\"}"));
        }
        let record: Record<'l> = serde_json::from_str(text).map_err(|error| reason(&error))?;
        let named = record.keys.map_or_else(Vec::new, |keys| keys.0);
        if record.key.is_none() && named.is_empty() {
            return Err(BadLine::new(
                "names no caller; add \"key\": \"…\" or \"keys\": {\"ip\": \"…\"}",
            ));
        }
        Ok(Entry {
            at: timestamp(record.at_us)?,
            caller: Caller { bare: record.key.map(|key| key.0), named, bare_only: false },
            cost: record.cost.map_or(1, |cost| cost.0),
            op: record.op.map_or(Ok(Op::Acquire), |name| op(&name.0))?,
            duration_us: record.duration_us.map(|duration| duration.0),
        })
    }
}

/// The field that distinguishes a trace line from any other object.
#[derive(serde::Deserialize)]
struct Dated {
    #[serde(rename = "at_us")]
    _at_us: de::IgnoredAny,
}

/// The parser's message with its column but without its line, because the parser sees only one.
fn reason(error: &serde_json::Error) -> BadLine {
    let message = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let message = message.strip_suffix(&place).unwrap_or(&message);
    // The message may quote a text of the line.
    let message = printable(message, 200);
    match error.column() {
        0 => BadLine::new(message),
        column => BadLine::new(format!("{message} (column {column})")),
    }
}

fn at_us<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    deserializer.deserialize_any(Integer("at_us as a whole number of microseconds, 0 or more"))
}

struct Cost(u64);

impl<'de> Deserialize<'de> for Cost {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let integer = Integer("cost as a whole number, 0 or more");
        deserializer.deserialize_any(integer).map(Cost)
    }
}

struct Duration(u64);

impl<'de> Deserialize<'de> for Duration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let integer = Integer("duration_us as a whole number of microseconds, 0 or more");
        deserializer.deserialize_any(integer).map(Duration)
    }
}

/// An integer; the text names the field that expects it.
struct Integer(&'static str);

impl Visitor<'_> for Integer {
    type Value = u64;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }

    fn visit_u64<E: de::Error>(self, n: u64) -> Result<u64, E> {
        Ok(n)
    }

    /// Receives fractions, and integers out of range, which the parser delivers as floats.
    #[allow(clippy::cast_precision_loss, reason = "compared only")]
    fn visit_f64<E: de::Error>(self, n: f64) -> Result<u64, E> {
        if n >= u64::MAX as f64 {
            return Err(E::custom(format!("a number above {}, expected {}", u64::MAX, self.0)));
        }
        Err(E::invalid_value(de::Unexpected::Float(n), &self))
    }
}

/// A text that borrows from the line unless it has escapes.
struct Text<'l>(Cow<'l, str>);

impl<'de: 'l, 'l> Deserialize<'de> for Text<'l> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextVisitor;
        impl<'de> Visitor<'de> for TextVisitor {
            type Value = Text<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a text in quotes")
            }

            fn visit_borrowed_str<E: de::Error>(self, text: &'de str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Borrowed(text)))
            }

            fn visit_str<E: de::Error>(self, text: &str) -> Result<Text<'de>, E> {
                Ok(Text(Cow::Owned(text.to_owned())))
            }
        }
        deserializer.deserialize_str(TextVisitor)
    }
}

/// Named identifiers in the order of the input. A null identifier is absent.
struct Keys<'l>(Vec<(Cow<'l, str>, Cow<'l, str>)>);

impl<'de: 'l, 'l> Deserialize<'de> for Keys<'l> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeysVisitor;
        impl<'de> Visitor<'de> for KeysVisitor {
            type Value = Keys<'de>;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("keys as an object of texts, such as {\"ip\": \"192.0.2.7\"}")
            }

            fn visit_map<M: MapAccess<'de>>(self, mut map: M) -> Result<Keys<'de>, M::Error> {
                let mut keys: Vec<(Cow<'_, str>, Cow<'_, str>)> = Vec::new();
                while let Some((name, value)) = map.next_entry::<Text<'_>, Option<Text<'_>>>()? {
                    if keys.iter().any(|(known, _)| *known == name.0) {
                        let twice = format!("keys names {} twice", quoted(&name.0, 40));
                        return Err(de::Error::custom(twice));
                    }
                    if let Some(value) = value {
                        keys.push((name.0, value.0));
                    }
                }
                Ok(Keys(keys))
            }
        }
        deserializer.deserialize_map(KeysVisitor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratelimit_core::{Identifiers, Timestamp};

    #[test]
    fn absent_fields_have_defaults_and_unknown_fields_are_ignored() {
        let mut parser = Jsonl::default();
        let entry = parser.parse(br#"{"x": [1, {}], "at_us": 0, "key": "a\nb"}"#).expect("a line");
        assert_eq!((entry.at, entry.cost, entry.op), (Timestamp::ZERO, 1, Op::Acquire));
        assert_eq!(entry.caller.bare(), Some("a\nb"));
    }

    #[test]
    fn null_is_absent_everywhere_but_in_at_us() {
        let line = br#"{"at_us":5,"key":"k","keys":null,"cost":null,"op":null}"#;
        let mut parser = Jsonl::default();
        let entry = parser.parse(line).expect("a line");
        assert_eq!((entry.cost, entry.op, entry.caller.named.len()), (1, Op::Acquire, 0));
        assert!(Jsonl::default().parse(br#"{"at_us":null,"key":"k"}"#).is_err());
    }

    #[test]
    fn every_operation_parses_from_its_name() {
        for op in [Op::Acquire, Op::Peek, Op::Refund, Op::Reset, Op::Force] {
            let line = format!("{{\"at_us\":1,\"key\":\"k\",\"op\":\"{op}\"}}");
            assert_eq!(Jsonl::default().parse(line.as_bytes()).expect("a line").op, op);
        }
    }

    #[test]
    fn identifiers_keep_their_order_and_null_is_absent() {
        let mut parser = Jsonl::default();
        let line = br#"{"at_us":4503599627370495,"keys":{"user":"b","path":null,"ip":"a"},"cost":18446744073709551615}"#;
        let entry = parser.parse(line).expect("a line");
        let names: Vec<_> = entry.caller.named.iter().map(|(name, _)| &**name).collect();
        assert_eq!(names, ["user", "ip"]);
        assert_eq!((entry.at, entry.cost), (Timestamp::MAX, u64::MAX));
        assert_eq!((entry.caller.bare(), entry.caller.identifier("ip")), (None, Some("a")));
    }

    #[test]
    fn bad_lines_say_which_field_is_wrong() {
        for (line, says) in [
            ("", "no JSON object"),
            ("{", "EOF"),
            ("{}", "`at_us`"),
            ("[5, \"k\"]", "no JSON object"),
            ("5", "no JSON object"),
            (r#"{"at_us": 1}"#, "no caller"),
            (r#"{"at_us": 1, "keys": {}}"#, "no caller"),
            (r#"{"at_us": 1, "keys": {"ip": null}}"#, "no caller"),
            (r#"{"at_us": -1, "key": "k"}"#, "at_us as a whole number"),
            (r#"{"at_us": 1.5, "key": "k"}"#, "at_us as a whole number"),
            (r#"{"at_us": "1", "key": "k"}"#, "at_us as a whole number"),
            (r#"{"at_us": 4503599627370496, "key": "k"}"#, "2112"),
            (r#"{"at_us": 1, "key": "k", "cost": -1}"#, "cost as a whole number"),
            (r#"{"at_us": 1, "key": "k", "cost": 18446744073709551616}"#, "cost as a whole number"),
            (
                r#"{"at_us": 1, "key": "k", "cost": 99999999999999999999}"#,
                "above 18446744073709551615",
            ),
            (r#"{"at_us": 1, "key": "k", "cost": 2.5}"#, "cost as a whole number"),
            (r#"{"at_us": 1, "key": "k", "duration_us": 0.5}"#, "duration_us as a whole number"),
            (r#"{"at_us": 1, "key": 5}"#, "a text in quotes"),
            (r#"{"at_us": 1, "keys": ["ip"]}"#, "keys as an object"),
            (r#"{"at_us": 1, "keys": {"ip": "a", "ip": "b"}}"#, "twice"),
            (r#"{"at_us": 1, "key": "k", "op": "steal"}"#, "acquire, peek, refund, reset"),
            (r#"{"at_us": 1, "key": "k"} x"#, "trailing"),
            (r#"{"at_us": 1, "key": "k", "op": "\u001b"}"#, "op is \"\\u{1b}\";"),
        ] {
            let reason = Jsonl::default().parse(line.as_bytes()).expect_err(line).to_string();
            assert!(reason.contains(says), "{line}\n→ {reason}\nlacks {says}");
            assert!(!reason.contains("at line 1"), "{reason}");
        }
    }

    #[test]
    fn invalid_utf8_is_replaced_not_refused() {
        let mut parser = Jsonl::default();
        let entry = parser.parse(b"{\"at_us\":1,\"key\":\"\xff\"}").expect("a line");
        assert_eq!(entry.caller.bare(), Some("\u{fffd}"));
    }
}
