//! Unit tests of policies in a document.

use super::*;
use crate::algorithms::Algorithm;
use crate::timestamp::Timestamp;
use alloc::borrow::ToOwned;
use alloc::string::ToString;
use proptest::prelude::*;
use proptest::sample::{Index, select};

fn read(text: &str) -> Result<Limits<AnyAlgorithm>, String> {
    toml::from_str(text).map_err(|error: toml::de::Error| error.to_string())
}

#[test]
fn every_algorithm_is_read_by_its_name_and_counts_attempts_if_it_can() {
    for name in AnyAlgorithm::NAMES {
        let numbers = match *name {
            "bucketed-window" => "bucket = '1s'\nrates = ['7/5m', '9/10m']",
            "lockout" => "rate = '7/5m'\nblock = '5m'",
            _ => "rate = '7/5m'",
        };
        let text = format!("[[limit]]\nname = \"a\"\nalgorithm = {name:?}\n{numbers}");
        let limit = read(&text).expect(name).as_slice()[0].clone();
        let admitted = *limit.algorithm();
        assert_eq!((admitted.name(), admitted.capacity()), (*name, 7));
        let attempts = read(&format!("{text}\ncount = \"attempts\"")).ok();
        let counts = attempts.map(|limits| limits.as_slice()[0].counts_attempts());
        let due = admitted.fill(None, Timestamp::ZERO, 0).map(|_| true);
        assert!(!limit.counts_attempts() && counts == due, "{name}");
    }
}

#[test]
fn a_policy_keeps_the_order_the_burst_and_the_identifiers() {
    let limits = read(
        "[[limit]]\nname = 'b'\nkey = ['ip', 'path']\nalgorithm = 'gcra'\nrate = '10/s'\nburst = 20\n\
         count = 'admitted'\nrequired = true\n\
         [[limit]]\nname = 'a'\nalgorithm = 'sliding-log'\nrate = '3/s'\n",
    )
    .expect("a policy");
    let [b, a] = limits.as_slice() else { panic!("two limits") };
    assert_eq!((b.name(), a.name()), ("b", "a"));
    assert_eq!(b.identifier_names().collect::<Vec<_>>(), ["ip", "path"]);
    assert_eq!((b.is_required(), a.is_required()), (true, false));
    assert_eq!(b.algorithm().capacity(), 20);
}

/// What the limits of release 0.1 are: their state names, under which stores keep their states, and
/// all that is not a default.
const RELEASED: &str = "\
burst/gcra: gcra 10/s burst 20 debt 5, by ip user, required, outage open
tokens/gcra: token-bucket 7/5m burst 9 count attempts, max token-bucket 14/m burst 90, when method = \"POST\" and not path = \"/health\" or \"/assets/*\", shadow, outage closed
daily/fixed-window/1d: fixed-window 1000/d debt 100, overridable, by user, outage local, warns at 80%
monthly/fixed-window/month(Europe.Berlin.15): fixed-window 1000/month zone Europe/Berlin anchor 15 debt 100
weekly/fixed-window/week(UTC.sunday): fixed-window 50/week anchor sunday
first/first-request-window/1h: first-request-window 5/h
log/window-log/90s: window-log 5/90s
buckets/bucketed-window/250ms/10s: bucketed-window bucket 250ms rates 100/1s, 500/10s
counter/sliding-counter/1m: sliding-counter 100/m
exact/sliding-log/1s: sliding-log 3/s count attempts
jobs/concurrency/30s: concurrency 20/30s
login/lockout/15m: lockout 5/15m block 15m factor 2 longest 1d forget 7d";

#[test]
fn the_documents_of_a_release_mean_what_they_meant() {
    let text = include_str!("released-0.1.toml");
    let limits = read(text).expect("a policy");
    let json = serde_json::from_str::<Limits<AnyAlgorithm>>(include_str!("released-0.1.json"));
    assert_eq!(json.expect("a policy"), limits);
    let told = limits.iter().map(|limit| {
        let algorithm = limit.algorithm().to_string();
        assert_eq!(algorithm.parse::<AnyAlgorithm>().as_ref(), Ok(limit.algorithm()));
        let attempts = if limit.counts_attempts() { " count attempts" } else { "" };
        let max = limit.max().map_or(String::new(), |max| format!(", max {max}"));
        let overridable = if limit.is_overridable() { ", overridable" } else { "" };
        let names: Vec<_> = limit.identifier_names().collect();
        let by = if names.is_empty() { String::new() } else { format!(", by {}", names.join(" ")) };
        let when = limit.describe_conditions();
        let when = if when.is_empty() { when } else { format!(", {when}") };
        let required = if limit.is_required() { ", required" } else { "" };
        let shadow = if limit.is_shadow() { ", shadow" } else { "" };
        let outage = limit.outage().map_or(String::new(), |to| format!(", outage {}", to.name()));
        let warns = limit.warns_at_percent();
        let warns = warns.map_or(String::new(), |percent| format!(", warns at {percent}%"));
        let settings = format!("{max}{overridable}{by}{when}{required}{shadow}{outage}{warns}");
        format!("{}: {algorithm}{attempts}{settings}", limit.state_name())
    });
    assert_eq!(told.collect::<Vec<_>>().join("\n"), RELEASED);
    // It has all that this version reads, or the next release adds a file.
    for field in FIELDS {
        assert!(text.contains(&format!("\n{field} = ")), "{field}");
    }
    for name in AnyAlgorithm::NAMES {
        assert!(text.contains(&format!("\"{name}\"")), "{name}");
    }
}

#[test]
fn a_document_may_name_its_schema() {
    let limit = "[[limit]]\nname = 'a'\nalgorithm = 'gcra'\nrate = '1/s'";
    let with = |schema: &str| read(&format!("'$schema' = {schema}\n{limit}"));
    assert_eq!(with("'ratelimit.schema.json'").expect("a policy"), read(limit).expect("a policy"));
    assert!(with("1").is_err_and(|error| error.contains("line 1")));
}

#[test]
fn conditions_are_one_value_or_alternatives_and_exclude_inside_not() {
    let with = |when: &str| {
        read(&format!(
            "[[limit]]\nname = 'a'\nkey = ['ip']\nalgorithm = 'gcra'\nrate = '1/s'\n{when}"
        ))
    };
    let inline = "when = { method = 'POST', path = ['/a', '/b/*'], not = { user = 'admin*' } }";
    let tables =
        "[limit.when]\nmethod = 'POST'\npath = ['/a', '/b/*']\n[limit.when.not]\nuser = ['admin*']";
    let limits = with(inline).expect("a policy");
    assert_eq!(with(tables).expect("a policy"), limits);
    let limit = Limit::new("a", "gcra 1/s".parse::<AnyAlgorithm>().expect("an algorithm"))
        .and_then(|limit| {
            let limit = limit.by(["ip"])?.when("method", "POST")?;
            limit.when("path", ["/a", "/b/*"])?.when_not("user", "admin*")
        });
    assert_eq!(limits.as_slice(), [limit.expect("a limit")]);
    let twice =
        r#"{"limit":[{"name":"a","algorithm":"gcra","rate":"1/s","when":{"p":"a","p":"b"}}]}"#;
    let twice = serde_json::from_str::<Limits<AnyAlgorithm>>(twice).expect_err("twice").to_string();
    assert!(twice.contains("when.p is there twice"), "{twice}");
}

/// The lines of a limit after its name, and what the error says besides that name.
const WRONG_LIMITS: &[(&str, &[&str])] = &[
    ("rate = '1/s'", &["no algorithm", "gcra, "]),
    ("algorithm = 'gcra'", &["no rate", "\"10/s\""]),
    ("algorithm = 'gcra'\nrate = 5", &["rate is 5", "rate = \"10/s\""]),
    (
        "algorithm = 'gcra'\nrate = '0/s'\nburst = 5",
        &["a rate of 0 denies", "a burst beside it", "line 5"],
    ),
    (
        "algorithm = 'fixed-window'\nrate = '0/s'\ndebt = 5",
        &["a rate of 0 denies", "a debt beside it"],
    ),
    ("algorithm = 'gcra'\nrate = '1000000007/30d'\nburst = 999999999999999", &["2^52", "smaller"]),
    (
        "algorithm = 'leaky'\nrate = '1/s'",
        &["unknown algorithm \"leaky\"", "gcra, token-bucket", "line 3, column 13"],
    ),
    (
        "algorithm = 'sliding-log'\nrate = '1/s'\nburst = 2",
        &["burst has no meaning", "line 5, column 9"],
    ),
    (
        "algorithm = 'sliding-log'\nrate = '1/s'\ndebt = 2",
        &["limit \"burst\": debt has no meaning", "line 5, column 8"],
    ),
    ("algorithm = 'window-log'\nrate = '10001/h'", &["10000", "first-request-window"]),
    ("algorithm = 'concurrency'\nrate = '3'", &["write \"3/30s\"", "line 4, column 8"]),
    (
        "algorithm = 'concurrency'\nrate = '1/s'\ncount = 'attempts'",
        &["no meaning for concurrency"],
    ),
    (
        "algorithm = 'lockout'\nrate = '1/s'\nblock = '1s'\ncount = 'attempts'",
        &["no meaning for lockout"],
    ),
    ("algorithm = 'lockout'\nrate = '1/s'", &["block = \"15m\""]),
    ("algorithm = 'lockout'\nrate = '1/s'\nblock = 15", &["block is 15", "in quotes"]),
    ("algorithm = 'lockout'\nrate = '1/s'\nblock = '1s'\nburst = 2", &["burst has no meaning"]),
    (
        "algorithm = 'lockout'\nrate = '1/s'\nblock = '1s'\nlongest = '1m'",
        &["longest has no meaning", "factor of at least 2"],
    ),
    (
        "algorithm = 'lockout'\nfactor = 3\nrate = '1/s'\nblock = '1m'\nlongest = '1s'",
        &["shorter than the first", "at least 1m", "line 7, column 11"],
    ),
    ("algorithm = 'gcra'\nrate = '1/s'\nblock = '1s'", &["block has no meaning for gcra"]),
    ("algorithm = 'bucketed-window'\nrates = ['1/s']", &["bucket = \"1s\""]),
    (
        "algorithm = 'fixed-window'\nrate = '5/month'\nzone = 'Berlin'",
        &["\"Berlin\" is not a time zone", "line 5, column 8"],
    ),
    (
        "algorithm = 'fixed-window'\nrate = '5/month'\nanchor = 'monday'",
        &["a day of the month from 1 to 31", "line 5, column 10"],
    ),
    (
        "algorithm = 'fixed-window'\nrate = '5/d'\nzone = 'Europe/Berlin'",
        &["zone has no meaning for a rate of 5/d", "line 5, column 8"],
    ),
    ("algorithm = 'gcra'\nrate = '5/month'", &["only fixed-window does", "line 4, column 8"]),
    (
        "algorithm = 'bucketed-window'\nbucket = '2s'\nrates = ['1/s']",
        &["not a whole number of buckets", "such as 1s"],
    ),
    (
        "algorithm = 'bucketed-window'\nbucket = '1s'\nrates = ['3/1500ms', '9/6s']",
        &["3/1500ms is not a whole number of buckets", "such as 1500ms"],
    ),
    (
        "algorithm = 'fixed-window'\nrate = '1/d'\nmax = '9/h'",
        &["max is of another algorithm or window", "line 5, column 7"],
    ),
    (
        "algorithm = 'bucketed-window'\nbucket = 'soon'\nrates = ['1/s']",
        &["\"soon\" is not a length of time", "250ms"],
    ),
];

/// Each the fifth line of a limit that is right without it.
const WRONG_LINES: &[(&str, &[&str])] = &[
    ("burst = 0", &["burst is 0", "at least 1"]),
    ("burst = -1", &["burst is -1", "at least 1", "line 5, column 9"]),
    ("burst = 1.5", &["burst is 1.5", "whole number"]),
    ("burst = 20.0", &["burst is 20.0", "whole number"]),
    ("burst = '5'", &["without quotes"]),
    ("burst = 99999999999999999999", &["whole number"]),
    ("key = 'ip'", &["key = [\"ip\"]"]),
    ("key = [1]", &["key = [\"ip\"]", "line 5, column 7"]),
    ("key = ['']", &["identifier"]),
    ("required = 'yes'", &["required = true"]),
    ("warn = 80", &["warn is 80", "warn = \"80%\"", "line 5, column 8"]),
    ("warn = '80'", &["warn is \"80\"", "warn = \"80%\""]),
    ("warn = '8.5%'", &["1 to 100 percent"]),
    ("warn = '0%'", &["at 0 %", "1 to 100 percent"]),
    ("warn = '101%'", &["at 101 %", "1 to 100 percent"]),
    ("bucket = '1s'", &["bucket has no meaning for gcra"]),
    ("anchor = 15", &["anchor has no meaning for gcra", "1000/month"]),
    ("anchor = 32", &["anchor is \"32\"", "from 1 to 31"]),
    ("anchor = '15'", &["anchor is \"15\"", "without quotes"]),
    ("zone = 1", &["zone = \"Europe/Berlin\""]),
    ("count = 'all'", &["\"admitted\"", "\"attempts\""]),
    ("when = 'POST'", &["when is \"POST\"", "when = { path = \"/login\" }", "line 5, column 8"]),
    ("when = {}", &["when is an empty table"]),
    ("when = { path = 7 }", &["when.path is or contains 7", "when.path = \"…\""]),
    ("when = { path = ['/a', 7] }", &["when.path is or contains 7"]),
    ("when = { path = [] }", &["\"path\" no value"]),
    ("when = { path = { is = '/a' } }", &["when.path is or contains a table"]),
    ("when = { 'a b' = 'x' }", &["an identifier in `when`"]),
    ("when = { path = '/a*b' }", &["\"/a*b\" of \"path\"", "before its end"]),
    ("when = { path = ['/a', '/a'] }", &["there twice"]),
    ("when = { not = 'x' }", &["when.not is \"x\"", "when.not = { path"]),
    ("when = { not = { path = 1.5 } }", &["when.not.path is or contains 1.5"]),
    ("when = { path = '/a', not = { path = '/*' } }", &["it never applies", "\"path\""]),
    ("max = 9", &["max is 9", "in quotes", "line 5, column 7"]),
    ("max = '9/w'", &["max: ", "\"10/s\"", "line 5, column 7"]),
    ("max = 'fixed-window 9/s'", &["max: ", "of fixed-window, and the limit's algorithm is gcra"]),
    ("debt = 4503599627370496", &["debt: ", "2^52", "line 5, column 8"]),
];

#[test]
fn mistakes_name_the_limit_the_line_and_what_is_accepted() {
    let named = |name: &str, lines: &str| format!("[[limit]]\nname = '{name}'\n{lines}\n");
    let gcra = "algorithm = 'gcra'\nrate = '1/s'";
    for (lines, says) in WRONG_LIMITS {
        says_all(&named("burst", lines), &[&["\"burst\""], *says].concat());
    }
    for (line, says) in WRONG_LINES {
        let lines = format!("{gcra}\n{line}");
        says_all(&named("burst", &lines), &[&["\"burst\""], *says].concat());
    }
    let right = named("burst", gcra);
    for (text, says) in [
        (String::new(), &["at least one limit"][..]),
        (format!("[[limit]]\n{gcra}"), &["no name", "line 1"]),
        (format!("[limit]\n{gcra}"), &["[[limit]]", "two brackets"]),
        (format!("{right}brust = 3"), &["brust", "line 5, column 1", "did you mean \"burst\"?"]),
        (
            format!("{right}{right}"),
            &["\"burst\"", "two limits have this name", "line 6, column 8"],
        ),
        // The second limit is wrong, and a field before its algorithm.
        (
            right.clone() + &named("b", &format!("key = ['i p']\n{gcra}")),
            &["\"b\"", "identifier", "line 7, column 7"],
        ),
        (format!("{right}\n{}", named("b", "")), &["\"b\"", "no algorithm", "line 6"]),
    ] {
        says_all(&text, says);
    }
}

fn says_all(text: &str, says: &[&str]) {
    let error = read(text).expect_err(text);
    for part in says {
        assert!(error.contains(part), "{text}\n→ {error}\nlacks {part}");
    }
}

/// A field of a limit that is right with any others, and its values; `None` leaves it out.
type Values = (&'static str, &'static [Option<&'static str>]);

const ANY: &[Values] = &[
    ("key", &[None, Some("['ip', 'path']")]),
    ("when", &[None, Some("{ path = '/a' }"), Some("{ not = { path = ['/a', '/b*'] } }")]),
    ("required", &[None, Some("true")]),
    ("shadow", &[None, Some("true")]),
    ("overridable", &[None, Some("true")]),
    ("on_outage", &[None, Some("'open'")]),
    ("warn", &[None, Some("'80%'")]),
    ("count", &[None, Some("'admitted'"), Some("'attempts'")]),
    // Alone, the second is too large for a bucket, whose burst is then the count.
    (
        "rate",
        &[
            Some("'7/5m'"),
            Some("'1125899906842624/30d'"),
            Some("'0/s'"),
            Some("'7/month'"),
            Some("'7/week'"),
        ],
    ),
    ("zone", &[None, None, Some("'Europe/Berlin'")]),
    ("anchor", &[None, None, Some("15"), Some("'sunday'")]),
    ("burst", &[None, Some("1"), Some("1073741824"), Some("1125899906842624")]),
    ("debt", &[None, Some("3"), Some("1125899906842624")]),
    // In one of the windows, of one of the algorithms.
    ("max", &[None, None, Some("'9/5m'"), Some("'bucket 1s rates 7/10m'")]),
    ("bucket", &[Some("'1s'")]),
    ("rates", &[Some("['7/5m', '9/10m']"), Some("['0/5m', '9/10m']")]),
    ("block", &[Some("'5m'"), Some("'2d'")]),
    ("factor", &[None, Some("1"), Some("3")]),
    ("longest", &[None, Some("'1h'"), Some("'3d'")]),
    ("forget", &[None, Some("'7d'"), Some("'52000d'"), Some("'52124d'")]),
];

/// Each field of which nothing that follows can make right.
const WRONG: &[(&str, &str)] = &[
    ("key", "['']"),
    ("when", "{ path = 1 }"),
    ("required", "1"),
    ("shadow", "'no'"),
    ("overridable", "'no'"),
    ("on_outage", "'shut'"),
    ("warn", "'0%'"),
    ("count", "'all'"),
    ("rate", "'1/0s'"),
    ("zone", "'Berlin'"),
    ("anchor", "32"),
    ("anchor", "'15'"),
    ("burst", "0"),
    ("debt", "-1"),
    ("max", "9"),
    ("bucket", "'soon'"),
    ("rates", "['1/0s']"),
    ("block", "'soon'"),
    ("factor", "0"),
    ("longest", "'0s'"),
    ("forget", "1"),
];

/// The fields of a limit with this algorithm, in any order.
fn limit_fields() -> impl Strategy<Value = (&'static str, Vec<(&'static str, &'static str)>)> {
    let of_algorithm = |name: &'static str| {
        let has = move |field: &str| match name {
            "lockout" => !["bucket", "rates", "zone", "anchor", "burst", "debt"].contains(&field),
            _ if OF_LOCKOUT.contains(&field) => false,
            "bucketed-window" => !["rate", "zone", "anchor", "burst", "debt"].contains(&field),
            "gcra" | "token-bucket" => !["zone", "anchor", "bucket", "rates"].contains(&field),
            "fixed-window" => !["bucket", "rates", "burst"].contains(&field),
            _ => !["zone", "anchor", "bucket", "rates", "burst", "debt"].contains(&field),
        };
        let fields: Vec<_> = ANY.iter().filter(|(field, _)| has(field)).collect();
        let values: Vec<_> = fields.iter().map(|(_, values)| select(*values)).collect();
        values.prop_map(move |values| {
            let given = fields.iter().zip(values);
            let given = given.filter_map(|((field, _), value)| Some((*field, value?)));
            let algorithm = ("algorithm", name);
            (name, given.chain([("name", "'a'"), algorithm]).collect::<Vec<_>>())
        })
    };
    let name = select(AnyAlgorithm::NAMES).prop_flat_map(of_algorithm);
    name.prop_flat_map(|(name, fields)| (Just(name), Just(fields).prop_shuffle()))
}

fn write_document(fields: &[(&str, &str)]) -> String {
    let line = |(field, value): &(&str, &str)| match *field {
        "algorithm" => format!("algorithm = {value:?}\n"),
        field => format!("{field} = {value}\n"),
    };
    "[[limit]]\n".to_owned() + &fields.iter().map(line).collect::<String>()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1_000))]
    #[test]
    fn the_order_of_the_fields_decides_nothing((algorithm, fields) in limit_fields()) {
        let of = |name: &str| fields.iter().find(|(field, _)| *field == name).map(|(_, value)| *value);
        let with = |name: &str| of(name).map_or(String::new(), |value| format!(" {name} {value}"));
        let plain = |name: &str| of(name).unwrap_or_default().replace(['\'', '[', ']'], "");
        let numbers = match algorithm {
            "bucketed-window" => format!("bucket {} rates {}", plain("bucket"), plain("rates")),
            "lockout" => {
                let lengths = ["block", "factor", "longest", "forget"].map(with);
                plain("rate") + &lengths.concat().replace('\'', "")
            }
            _ => ["zone", "anchor", "burst", "debt"].iter().fold(plain("rate"), |all, field| {
                all + &with(field).replace('\'', "")
            }),
        };
        // Text has one order.
        let due = format!("{algorithm} {numbers}").parse::<AnyAlgorithm>();
        let due = due.and_then(|algorithm| Limit::new("a", algorithm));
        let attempts = plain("count") == "attempts";
        let due = due.and_then(|limit| if attempts { limit.count_attempts() } else { Ok(limit) });
        let due = due.and_then(|limit| match of("max") {
            Some(_) => limit.accepts_up_to(format!("{algorithm} {}", plain("max")).parse()?),
            None => Ok(limit),
        });
        let text = write_document(&fields);
        match (read(&text), due) {
            (Ok(limits), Ok(due)) => {
                let limit = &limits.as_slice()[0];
                prop_assert_eq!(limit.algorithm(), due.algorithm());
                prop_assert_eq!(limit.counts_attempts(), attempts);
                prop_assert_eq!(limit.max(), due.max());
                let names: Vec<_> = limit.identifier_names().collect();
                prop_assert_eq!(names.len(), if of("key").is_some() { 2 } else { 0 });
                prop_assert_eq!(limit.conditions().len(), usize::from(of("when").is_some()));
                let warns = limit.warns_at_percent().is_some_and(|percent| percent.get() == 80);
                let looks = limit.is_overridable();
                let given = [limit.is_required(), limit.is_shadow(), looks, limit.outage().is_some(), warns];
                let names = ["required", "shadow", "overridable", "on_outage", "warn"];
                prop_assert_eq!(given, names.map(|name| of(name).is_some()));
            }
            (Err(_), Err(_)) => {}
            (found, due) => prop_assert!(false, "{text}\n{found:?}\n{due:?}"),
        }
    }

    #[test]
    fn a_wrong_field_is_named_by_its_line_wherever_it_stands(
        (algorithm, mut fields) in limit_fields(),
        wrong in any::<Index>(),
    ) {
        // What is too large in sum is another mistake, and so is a calendar where there is none.
        let has = |name: &str| fields.iter().any(|(field, _)| *field == name);
        let calendar = has("zone") || has("anchor");
        fields.retain(|(field, _)| !(calendar && *field == "max"));
        for (field, value) in &mut fields {
            match *field {
                "rate" if calendar => *value = "'7/month'",
                "rate" => *value = "'7/5m'",
                "anchor" => *value = "15",
                "burst" => *value = "1",
                "debt" | "factor" => *value = "3",
                "max" if algorithm == "bucketed-window" => *value = "'bucket 1s rates 9/10m'",
                "max" if algorithm == "lockout" => *value = "'9/5m block 5m'",
                "max" => *value = "'9/5m'",
                "count" => *value = "'admitted'",
                "block" => *value = "'5m'",
                "longest" => *value = "'1h'",
                "forget" => *value = "'7d'",
                _ => {}
            }
        }
        let may_be: Vec<_> = WRONG.iter().filter(|(field, _)| fields.iter().any(|(f, _)| f == field)).collect();
        let (field, value) = wrong.get(&may_be);
        let at = fields.iter().position(|(f, _)| f == field).expect("a field");
        fields[at].1 = value;
        let text = write_document(&fields);
        let error = read(&text).expect_err(&text);
        prop_assert!(error.contains(&format!("line {}, column ", at + 2)), "{text}\n{error}");
        let is_named = fields[..=at].contains(&("name", "'a'"));
        let limit = if is_named { "limit \"a\": " } else { "limit 1: " };
        prop_assert!(error.contains(limit), "{text}\n{error}");
    }
}
