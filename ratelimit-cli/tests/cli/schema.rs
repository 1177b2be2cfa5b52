//! The schema of policies accepts what the parser accepts, and refuses what it refuses, up to [`UNSAYABLE`].

use std::collections::BTreeSet;

use jsonschema::Validator;
use proptest::prelude::*;
use ratelimit_core::{Limits, OnOutage, Policy};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::common::Scene;
use crate::documents;

/// What a schema cannot say: a document that it accepts, and a part of the error by which the parser refuses it.
const UNSAYABLE: [(&str, &str); 9] = [
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
    // JSON Schema knows no difference between 20 and 20.0.
    (r#"[{"name":"a","algorithm":"gcra","rate":"1/s","burst":20.0}]"#, "burst is 20.0"),
];

/// Besides, the parser accepts what the schema refuses: a field that is `null` in JSON, which counts as absent, and
/// white space other than spaces around the parts of a rate.
const MORE_THAN_THE_SCHEMA: [&str; 2] = [
    r#"[{"name":"a","algorithm":"gcra","rate":"1/s","burst":null}]"#,
    r#"[{"name":"a","algorithm":"gcra","rate":"1\t/s"}]"#,
];

const SCHEMA: &str = include_str!("../../ratelimit.schema.json");

fn schema() -> Value {
    serde_json::from_str(SCHEMA).expect("JSON")
}

fn validator() -> Validator {
    jsonschema::validator_for(&schema()).expect("a schema")
}

fn parsed(document: &Value) -> Result<Limits<Policy>, String> {
    Limits::deserialize(document).map_err(|error| error.to_string())
}

fn of_limits(limits: &str) -> Value {
    json!({ "limit": serde_json::from_str::<Value>(limits).expect("JSON") })
}

/// Checks that schema and parser say the same of a document, up to [`UNSAYABLE`]. Returns whether it is a policy.
fn agree(validator: &Validator, document: &Value) -> Result<bool, String> {
    match (validator.validate(document), parsed(document)) {
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
    assert!(jsonschema::meta::is_valid(&schema));
    let limit = &schema["definitions"]["limit"]["properties"];
    let error = parsed(&of_limits(r#"[{"brust":1}]"#)).expect_err("an unknown field");
    let (_, expected) = error.split_once("expected one of ").expect("names the fields");
    let fields: BTreeSet<_> = expected.split('`').skip(1).step_by(2).collect();
    let described = limit.as_object().expect("fields");
    assert_eq!(described.keys().map(String::as_str).collect::<BTreeSet<_>>(), fields);
    for (field, is) in described.iter().chain(schema["properties"].as_object().expect("fields")) {
        let description = is["description"].as_str().unwrap_or_default();
        assert!(description.len() > 30, "{field}: {description}");
    }
    assert_eq!(limit["algorithm"]["enum"], json!(Policy::NAMES));
    for name in Policy::NAMES {
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
        let error = parsed(&document).expect_err(limits);
        assert!(error.contains(says), "{limits}: {error:?} lacks {says:?}");
    }
    for limits in MORE_THAN_THE_SCHEMA {
        let document = of_limits(limits);
        assert!(!validator.is_valid(&document) && parsed(&document).is_ok(), "{limits}");
    }
}

#[test]
fn every_policy_of_the_repository_validates() {
    let validator = validator();
    let (mut policies, mut files) = (0, BTreeSet::new());
    for (path, text) in documents::in_the_workspace() {
        let Ok(document) = toml::from_str::<Value>(&text) else { continue };
        let is_policy = agree(&validator, &document).expect(&path);
        assert_eq!(toml::from_str::<Limits<Policy>>(&text).is_ok(), is_policy, "{path}: {text}");
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

#[test]
fn both_draw_each_boundary_in_the_same_place() {
    let validator = validator();
    let gcra = json!({ "name": "a", "algorithm": "gcra", "rate": "1/s" });
    let steps =
        json!({ "name": "a", "algorithm": "bucketed-window", "bucket": "1s", "rates": ["1/s"] });
    // A limit with this field, or with null without it.
    let with = |limit: &Value, field: &str, value: Value| {
        let mut limit = limit.clone();
        limit[field] = value;
        limit.as_object_mut().expect("fields").retain(|_, value| !value.is_null());
        limit
    };
    let mut cases = vec![
        (with(&gcra, "name", json!("a".repeat(64))), true),
        (with(&gcra, "name", json!("a".repeat(65))), false),
        (with(&gcra, "name", json!("")), false),
        (with(&gcra, "name", Value::Null), false),
        (with(&gcra, "algorithm", Value::Null), false),
        (with(&gcra, "key", json!([])), true),
        (with(&gcra, "key", json!(["ip", "path"])), true),
        (with(&gcra, "key", json!(["ip", "ip"])), false),
        (with(&gcra, "key", json!(["a".repeat(65)])), false),
        (with(&gcra, "burst", json!(0)), false),
        (with(&gcra, "burst", json!(1)), true),
        (with(&gcra, "bucket", json!("1s")), false),
        (with(&gcra, "rates", json!(["1/s"])), false),
        (with(&gcra, "rate", Value::Null), false),
        (with(&gcra, "rate", json!("0/s")), false),
        (with(&gcra, "rate", json!("1/0s")), false),
        (with(&gcra, "rate", json!(" 01 / 05 ms ")), true),
        (with(&gcra, "debt", json!("1")), false),
        (with(&steps, "bucket", Value::Null), false),
        (with(&steps, "rate", json!("1/s")), false),
        (with(&steps, "burst", json!(1)), false),
        (with(&steps, "debt", json!(1)), false),
        (with(&steps, "rates", Value::Null), false),
        (with(&steps, "rates", json!([])), false),
        (with(&steps, "rates", json!(["1/s", "2/s", "3/s", "4/s"])), true),
        (with(&steps, "rates", json!(["1/s", "2/s", "3/s", "4/s", "5/s"])), false),
    ];
    for name in Policy::NAMES.iter().filter(|name| **name != "bucketed-window") {
        let limit = with(&gcra, "algorithm", json!(name));
        let in_debt = with(&limit, "debt", json!(2));
        let has_burst = ["gcra", "token-bucket"].contains(name);
        let owes = has_burst || *name == "fixed-window";
        cases.extend([
            (with(&limit, "burst", json!(2)), has_burst),
            (with(&limit, "debt", json!(0)), owes),
            (with(&in_debt, "count", json!("attempts")), false),
            (in_debt, owes),
            (with(&limit, "count", json!("admitted")), true),
            (with(&limit, "count", json!("attempts")), *name != "concurrency"),
            (limit, true),
        ]);
    }
    let of_one = |(limit, is_policy)| (json!({ "limit": [limit] }), is_policy);
    let documents = [
        (json!({ "limit": gcra }), false),
        (json!({ "limit": [gcra], "limits": [] }), false),
        (json!({ "limit": [] }), false),
        (json!({}), false),
    ];
    for (document, is_policy) in cases.into_iter().map(of_one).chain(documents) {
        let told = (validator.is_valid(&document), parsed(&document).is_ok());
        assert_eq!(told, (is_policy, is_policy), "{document}");
    }
}

proptest! {
    #[test]
    fn every_policy_that_can_be_built_validates(document in documents::built()) {
        let validator = validator();
        prop_assert_eq!(agree(&validator, &document), Ok(true));
        let text = toml::to_string(&document).expect("TOML");
        prop_assert_eq!(toml::from_str::<Limits<Policy>>(&text).ok(), parsed(&document).ok());
    }

    #[test]
    fn schema_and_parser_agree_on_documents_with_mistakes(document in documents::with_mistakes()) {
        agree(&validator(), &document).map_err(TestCaseError::fail)?;
    }

    #[test]
    fn schema_and_parser_agree_on_the_text_of_rates(
        rate in documents::rate_like(),
        bucket in "[ 0-9usmhd]{0,6}",
    ) {
        let validator = validator();
        let gcra = json!({ "name": "a", "algorithm": "gcra", "rate": rate });
        let steps = json!({ "name": "a", "algorithm": "bucketed-window", "bucket": bucket, "rates": ["4096/s"] });
        for limit in [gcra, steps] {
            agree(&validator, &json!({ "limit": [limit] })).map_err(TestCaseError::fail)?;
        }
    }
}
