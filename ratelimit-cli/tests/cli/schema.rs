//! The schema of policies accepts what the parser accepts, and refuses what it refuses, up to
//! [`UNSAYABLE`].

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;

use boon::{Compiler, SchemaIndex, Schemas};
use proptest::prelude::*;
use ratelimit_core::{AnyAlgorithm, Limits, OnOutage};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::common::{Scene, workspace};

/// What a schema cannot say: a document that it accepts, and a part of the error by which the
/// parser refuses it.
const UNSAYABLE: [(&str, &str); 17] = [
    (
        r#"[{"name":"a","algorithm":"gcra","rate":"1/s"},{"name":"a","algorithm":"gcra","rate":"1/s"}]"#,
        "two limits have this name",
    ),
    (r#"[{"name":"a","algorithm":"gcra","rate":"4503599627370496/s"}]"#, "must be below 2^52"),
    (r#"[{"name":"a","algorithm":"gcra","rate":"1/9999999999d"}]"#, "must be below 2^52"),
    (
        r#"[{"name":"a","algorithm":"gcra","rate":"1000000007/30d","burst":999999999999999}]"#,
        "needs integers above 2^52",
    ),
    (r#"[{"name":"a","algorithm":"window-log","rate":"10001/h"}]"#, "too large for a log"),
    (
        r#"[{"name":"a","algorithm":"concurrency","rate":"1000001/h"}]"#,
        "at the same time are too many",
    ),
    (
        r#"[{"name":"a","algorithm":"bucketed-window","bucket":"2s","rates":["1/3s"]}]"#,
        "is not a whole number of buckets",
    ),
    (
        r#"[{"name":"a","algorithm":"bucketed-window","bucket":"1s","rates":["1/2h"]}]"#,
        "more than 4096 buckets",
    ),
    (
        r#"[{"name":"a","algorithm":"gcra","rate":"1/s","when":{"p":"/a","not":{"p":"/*"}}}]"#,
        "it never applies",
    ),
    (
        r#"[{"name":"a","key":["ip"],"algorithm":"gcra","rate":"1/s","when":{"not":{"ip":"*"}}}]"#,
        "it never applies",
    ),
    (
        r#"[{"name":"a","algorithm":"lockout","rate":"1/s","block":"2s","factor":2,"longest":"1s"}]"#,
        "is shorter than the first",
    ),
    (
        r#"[{"name":"a","algorithm":"lockout","rate":"1/s","block":"2s","factor":2,"forget":"52124d"}]"#,
        "that is remembered, need integers above 2^52",
    ),
    (r#"[{"name":"a","algorithm":"gcra","rate":"1/s","max":"9 a second"}]"#, "max: "),
    (
        r#"[{"name":"a","algorithm":"fixed-window","rate":"1/d","max":"9/h"}]"#,
        "max is of another algorithm or window",
    ),
    (
        r#"[{"name":"a","algorithm":"fixed-window","rate":"1/month","zone":"Berlin"}]"#,
        "is not a time zone",
    ),
    (
        r#"[{"name":"a","algorithm":"fixed-window","rate":"1/month","debt":2}]"#,
        "a debt of at most 1",
    ),
    // JSON Schema knows no difference between 20 and 20.0.
    (r#"[{"name":"a","algorithm":"gcra","rate":"1/s","burst":20.0}]"#, "burst is 20.0"),
];

/// Besides, the parser accepts what the schema refuses: a field that is `null` in JSON, which
/// counts as absent, and white space other than spaces around the parts of a rate.
const MORE_THAN_THE_SCHEMA: [&str; 2] = [
    r#"[{"name":"a","algorithm":"gcra","rate":"1/s","burst":null}]"#,
    r#"[{"name":"a","algorithm":"gcra","rate":"1\t/s"}]"#,
];

const SCHEMA: &str = include_str!("../../ratelimit.schema.json");

fn schema() -> Value {
    serde_json::from_str(SCHEMA).expect("JSON")
}

struct Validator(Schemas, SchemaIndex);

impl Validator {
    fn validate(&self, document: &Value) -> Result<(), String> {
        self.0.validate(document, self.1).map_err(|error| format!("{error:#}"))
    }

    fn is_valid(&self, document: &Value) -> bool {
        self.validate(document).is_ok()
    }
}

/// Only a valid schema compiles.
fn validator() -> Validator {
    const NAME: &str = "https://localhost/ratelimit.schema.json";
    let (mut compiler, mut schemas) = (Compiler::new(), Schemas::new());
    compiler.add_resource(NAME, schema()).expect("JSON");
    let index = compiler.compile(NAME, &mut schemas).expect("a schema");
    Validator(schemas, index)
}

fn parse(document: &Value) -> Result<Limits<AnyAlgorithm>, String> {
    Limits::deserialize(document).map_err(|error| error.to_string())
}

fn of_limits(limits: &str) -> Value {
    json!({ "limit": serde_json::from_str::<Value>(limits).expect("JSON") })
}

/// Checks that schema and parser say the same of a document, up to [`UNSAYABLE`]. Returns whether
/// it is a policy.
fn agree(validator: &Validator, document: &Value) -> Result<bool, String> {
    match (validator.validate(document), parse(document)) {
        (Ok(()), Ok(_)) => Ok(true),
        (Err(_), Err(_)) => Ok(false),
        (Err(by_schema), Ok(_)) => Err(format!("only the schema refuses {document}: {by_schema}")),
        (Ok(()), Err(by_parser)) => {
            let known = UNSAYABLE.iter().any(|(_, says)| by_parser.contains(says));
            known.then_some(false).ok_or(format!("only the parser refuses {document}: {by_parser}"))
        }
    }
}

#[test]
fn the_command_prints_the_schema_that_is_in_the_tree() {
    assert_eq!(Scene::new("").run(&["schema"]).exits(0).out, SCHEMA);
}

#[test]
fn the_schema_has_the_parsers_fields_and_names_and_describes_each() {
    let schema = schema();
    let limit = &schema["definitions"]["limit"]["properties"];
    let error = parse(&of_limits(r#"[{"brust":1}]"#)).expect_err("an unknown field");
    let (_, expected) = error.split_once("expected one of ").expect("names the fields");
    let fields: BTreeSet<_> = expected.split('`').skip(1).step_by(2).collect();
    let described = limit.as_object().expect("fields");
    assert_eq!(described.keys().map(String::as_str).collect::<BTreeSet<_>>(), fields);
    for (field, is) in described.iter().chain(schema["properties"].as_object().expect("fields")) {
        let description = is["description"].as_str().unwrap_or_default();
        assert!(description.len() > 30, "{field}: {description}");
    }
    assert_eq!(limit["algorithm"]["enum"], json!(AnyAlgorithm::NAMES));
    for name in AnyAlgorithm::NAMES {
        let line = format!("\n- {name}: ");
        assert!(limit["algorithm"]["description"].as_str().is_some_and(|all| all.contains(&line)));
    }
    let mut outages = limit["on_outage"]["enum"].as_array().expect("names").clone();
    outages.sort_by_key(|name| OnOutage::NAMES.iter().position(|known| name == known));
    assert_eq!(json!(outages), json!(OnOutage::NAMES));
}

#[test]
fn what_the_schema_cannot_say_the_parser_refuses() {
    let validator = validator();
    for (limits, says) in UNSAYABLE {
        let document = of_limits(limits);
        assert!(validator.is_valid(&document), "{limits}: the schema can say it");
        let error = parse(&document).expect_err(limits);
        assert!(error.contains(says), "{limits}: {error:?} lacks {says:?}");
    }
    for limits in MORE_THAN_THE_SCHEMA {
        let document = of_limits(limits);
        assert!(!validator.is_valid(&document) && parse(&document).is_ok(), "{limits}");
    }
}

/// The texts in documents that have a `[[limit]]`, each with the path of its file.
fn in_the_workspace() -> Vec<(String, String)> {
    let (mut found, mut folders) = (Vec::new(), vec![workspace(".")]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).expect("a folder") {
            let path = entry.expect("an entry").path();
            let name = path.file_name().and_then(OsStr::to_str).unwrap_or_default();
            if path.is_dir() && !name.starts_with('.') && name != "target" && name != "book" {
                folders.push(path);
                continue;
            }
            let text = fs::read_to_string(&path).unwrap_or_default();
            let texts: Vec<&str> = match path.extension().and_then(OsStr::to_str) {
                Some("toml") => vec![&text],
                Some("md") => {
                    let blocks = text.split("```toml\n").skip(1);
                    blocks.filter_map(|rest| rest.split("```").next()).collect()
                }
                _ => continue,
            };
            let policies = texts.into_iter().filter(|text| text.contains("[[limit]]"));
            found.extend(policies.map(|text| (path.display().to_string(), text.to_owned())));
        }
    }
    found
}

#[test]
fn every_policy_of_the_repository_validates() {
    let validator = validator();
    let (mut policies, mut files) = (0, BTreeSet::new());
    for (path, text) in in_the_workspace() {
        let Ok(document) = toml::from_str::<Value>(&text) else { continue };
        let is_policy = agree(&validator, &document).expect(&path);
        assert_eq!(
            toml::from_str::<Limits<AnyAlgorithm>>(&text).is_ok(),
            is_policy,
            "{path}: {text}"
        );
        if is_policy {
            policies += 1;
            files.insert(path);
        }
    }
    for file in ["examples/policy.toml", "docs/guide/src/policies.md", "docs/guide/src/keys.md"] {
        assert!(files.iter().any(|path| path.ends_with(file)), "none in {file}: {files:?}");
    }
    assert!(policies >= 10 && files.len() >= 10, "{policies} policies in {files:?}");
}

/// Values of each field that some limit may have, and values that none may. `null` stands for a
/// field that is missing.
fn values() -> [Value; 2] {
    let long = |length: usize| "a".repeat(length);
    let rates = |number: usize| ["1/s", "2/s", "3/s", "4/s", "5/s"][..number].to_vec();
    let accepted = json!({
        "name": ["a", "A.b_c-9", long(64)],
        "algorithm": AnyAlgorithm::NAMES,
        "key": [null, [], ["ip"], ["ip", "path"], [long(64)]],
        "when": [
            null, { "path": "/a" }, { "path": ["/a", "/b*", "*"], "method": "é\n" },
            { "not": { "path": "/a" } }, { "path": "/*", "not": { "path": ["/a", "/b*"] } },
        ],
        "rate": [
            null, "1/s", "4096/2us", " 01 / 05 ms ", "0/s", " 00 / 05 ms ", "9/month", " 09 / day ", "9/week",
            "9/year", "0/month",
        ],
        "zone": [null, "Europe/Berlin", "Etc/GMT+5"],
        "anchor": [null, 0, 23, 31, "sunday"],
        "burst": [null, 1, 1_000],
        "debt": [null, 0, 2],
        "max": [null, "9/s", "9/s burst 3 debt 1", "bucket 1s rates 9/s"],
        "count": [null, "admitted", "attempts"],
        "required": [null, true, false],
        "shadow": [null, true, false],
        "overridable": [null, true, false],
        "on_outage": [null, "open", "closed", "local"],
        "warn": [null, "80%", "1%", "0100%"],
        "bucket": [null, "1s", " 05 ms "],
        "rates": [null, rates(1), rates(4), ["0/s", "1/2s"]],
        "block": [null, "1s", " 05 ms "],
        "factor": [null, 1, 2],
        "longest": [null, "1h", " 05 m "],
        "forget": [null, "7d", " 05 ms "],
    });
    let refused = json!({
        "name": [null, "", "a b", "é", long(65), 1],
        "algorithm": [null, "", "leaky", "GCRA", 1],
        "key": ["ip", ["ip", "ip"], [""], ["a b"], [long(65)], [1]],
        "when": [
            "/a", ["/a"], {}, { "path": [] }, { "path": "" }, { "path": 1 }, { "path": null },
            { "path": ["/a", "/a"] }, { "path": ["/a", ""] }, { "path": "/*/a" }, { "path": "**" },
            { "a b": "/a" }, { "": "/a" }, { "path": { "is": "/a" } }, { "not": "/a" }, { "not": {} },
            { "not": ["/a"] }, { "not": { "path": 1 } }, { "not": { "not": { "path": "/a" } } },
            { "not": { "a b": "/a" } },
        ],
        "rate": ["", "1/0s", "0/0s", "1", "1/w", "+1/s", "1.5/s", "1/2month", 1, ["1/s"]],
        "zone": ["", "Europe Berlin", 1],
        "anchor": [-1, 32, 1.5, "15", "Monday", "someday", true],
        "burst": [0, -1, 1.5, "1", 1_u64 << 52, u64::MAX],
        "debt": [-1, 1.5, "1", 1_u64 << 52],
        "max": ["", 1, ["9/s"]],
        "count": ["all", "", true],
        "required": ["true", 1],
        "shadow": ["true", 1],
        "overridable": ["true", 1],
        "on_outage": ["shut", "", true],
        "warn": ["0%", "101%", "80", "8.5%", " 80%", "%", "", 80],
        "bucket": ["", "0s", "1", 1],
        "rates": [[], rates(5), ["1/s", "1/0s"], ["1/s", 1], "1/s"],
        "block": ["", "0s", "1", 1],
        "factor": [0, -1, 1.5, "2", 1_u64 << 52],
        "longest": ["", "0s", "1", 1],
        "forget": ["", "0s", "1", 1],
        "brust": [1],
        "Name": ["a"],
    });
    [accepted, refused]
}

/// Each field with each of its values.
fn fields(values: &Value) -> Vec<(&str, &Value)> {
    let fields = values.as_object().expect("fields").iter();
    let each = fields.map(|(field, values)| (field, values.as_array().expect("values")));
    each.flat_map(|(field, values)| values.iter().map(|value| (field.as_str(), value))).collect()
}

#[test]
fn both_refuse_each_mistake_and_agree_on_any_two_options_of_each_algorithm() {
    let (validator, [accepted, refused], object) = (validator(), values(), json!({ "a": 1 }));
    let accepted = fields(&accepted);
    let mut refused = fields(&refused);
    refused.extend(accepted.iter().map(|(field, _)| (*field, &object)));
    let mut found = BTreeSet::new();
    for name in AnyAlgorithm::NAMES {
        let with = |changes: &[(&str, &Value)]| {
            let mut limit = match *name {
                "bucketed-window" => json!({ "bucket": "1s", "rates": ["1/s"] }),
                "lockout" => json!({ "rate": "1/s", "block": "1s", "factor": 2 }),
                _ => json!({ "rate": "1/s" }),
            };
            (limit["name"], limit["algorithm"]) = (json!("a"), json!(name));
            for (field, value) in changes {
                limit[field] = (*value).clone();
            }
            limit.as_object_mut().expect("fields").retain(|_, value| !value.is_null());
            json!({ "limit": [limit] })
        };
        for mistake in &refused {
            let document = with(&[*mistake]);
            let taken = (validator.is_valid(&document), parse(&document).is_ok());
            assert_eq!(taken, (false, false), "{document}");
        }
        for (place, one) in accepted.iter().enumerate() {
            let others = accepted[place..].iter().filter(|other| other == &one || other.0 != one.0);
            for other in others {
                let document = with(&[*one, *other]);
                if agree(&validator, &document).expect("one opinion") {
                    found.extend([one, other].map(|(field, value)| format!("{field} = {value}")));
                    let text = toml::to_string(&document).expect("TOML");
                    assert_eq!(toml::from_str(&text).ok(), parse(&document).ok(), "{document}");
                }
            }
        }
    }
    let due = accepted.iter().map(|(field, value)| format!("{field} = {value}"));
    assert_eq!(found, due.collect(), "each value is in a policy");
}

#[test]
fn both_refuse_a_document_without_a_list_of_limits() {
    let limit = |name: &str| json!({ "name": name, "algorithm": "gcra", "rate": "1/s" });
    for (document, is_policy) in [
        (json!({ "limit": [limit("a"), limit("b")], "$schema": "ratelimit.schema.json" }), true),
        (json!({ "limit": limit("a") }), false),
        (json!({ "limit": [limit("a")], "limits": [] }), false),
        (json!({ "limit": [] }), false),
        (json!({}), false),
    ] {
        assert_eq!(agree(&validator(), &document), Ok(is_policy), "{document}");
    }
}

/// Texts that are nearly rates, and rates.
fn rate_like() -> impl Strategy<Value = String> {
    let rate = (" ?0?[0-9][0-9]{0,16} ?/ ?(0?[1-9][0-9]{0,16})? ?(us|ms|s|m|h|d) ?")
        .prop_map(String::from);
    let by_calendar = " ?0?[1-9][0-9]{0,16} ?/ ?(day|week|month|year|days) ?";
    prop_oneof![rate, by_calendar, "[ 0-9/usmhd+.-]{0,9}"]
}

proptest! {
    #[test]
    fn both_agree_on_the_text_of_rates(rate in rate_like(), bucket in "[ 0-9usmhd]{0,6}") {
        let validator = validator();
        let gcra = json!({ "name": "a", "algorithm": "gcra", "rate": rate });
        let fixed = json!({ "name": "a", "algorithm": "fixed-window", "rate": rate });
        let steps = json!({ "name": "a", "algorithm": "bucketed-window", "bucket": bucket, "rates": ["4096/s"] });
        for limit in [gcra, fixed, steps] {
            agree(&validator, &json!({ "limit": [limit] })).map_err(TestCaseError::fail)?;
        }
    }
}
