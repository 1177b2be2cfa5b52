//! Unit tests of policies in a document.

use super::*;
use crate::algorithms::Algorithm;
use alloc::string::ToString;

fn read(text: &str) -> Result<Limits<Policy>, String> {
    toml::from_str(text).map_err(|error: toml::de::Error| error.to_string())
}

#[test]
fn every_algorithm_is_read_by_its_name_and_counts_attempts_if_it_can() {
    for name in Policy::NAMES {
        let numbers = match *name {
            "bucketed-window" => "bucket = '1s'\nrates = ['7/5m', '9/10m']",
            _ => "rate = '7/5m'",
        };
        let text = format!("[[limit]]\nname = \"a\"\nalgorithm = {name:?}\n{numbers}");
        let admitted = *read(&text).expect(name).as_slice()[0].algorithm();
        assert_eq!((admitted.name(), admitted.capacity()), (*name, 7));
        let attempts = read(&format!("{text}\ncount = \"attempts\"")).ok();
        let attempts = attempts.map(|limits| *limits.as_slice()[0].algorithm());
        assert!(!admitted.charges_denials() && attempts == admitted.by_attempts(), "{name}");
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

#[test]
fn a_document_may_name_its_schema() {
    let limit = "[[limit]]\nname = 'a'\nalgorithm = 'gcra'\nrate = '1/s'";
    let with = |schema: &str| read(&format!("'$schema' = {schema}\n{limit}"));
    assert_eq!(with("'ratelimit.schema.json'").expect("a policy"), read(limit).expect("a policy"));
    assert!(with("1").is_err_and(|error| error.contains("line 1")));
}

/// The lines of a limit after its name, and what the error says besides that name.
const WRONG_LIMITS: &[(&str, &[&str])] = &[
    ("rate = '1/s'", &["no algorithm", "gcra, "]),
    ("algorithm = 'gcra'", &["no rate", "\"10/s\""]),
    ("algorithm = 'gcra'\nrate = 5", &["rate is 5", "rate = \"10/s\""]),
    ("algorithm = 'gcra'\nrate = '0/s'", &["a rate of 0", "at least 1"]),
    ("algorithm = 'gcra'\nrate = '1000000007/30d'\nburst = 999999999999999", &["2^52", "smaller"]),
    (
        "algorithm = 'leaky'\nrate = '1/s'",
        &["unknown algorithm \"leaky\"", "gcra, token-bucket", "line 3, column 13"],
    ),
    (
        "algorithm = 'sliding-log'\nrate = '1/s'\nburst = 2",
        &["burst has no meaning", "line 5, column 9"],
    ),
    ("algorithm = 'window-log'\nrate = '10001/h'", &["10000", "first-request-window"]),
    (
        "algorithm = 'concurrency'\nrate = '1/s'\ncount = 'attempts'",
        &["no meaning for concurrency"],
    ),
    ("algorithm = 'bucketed-window'\nrates = ['1/s']", &["bucket = \"1s\""]),
    (
        "algorithm = 'bucketed-window'\nbucket = '2s'\nrates = ['1/s']",
        &["not a whole number of buckets", "such as 1s"],
    ),
    (
        "algorithm = 'bucketed-window'\nbucket = '1s'\nrates = ['3/1500ms', '9/6s']",
        &["3/1500ms is not a whole number of buckets", "such as 1500ms"],
    ),
    (
        "algorithm = 'bucketed-window'\nbucket = 'soon'\nrates = ['1/s']",
        &["\"soon\" is not a length of time", "250ms"],
    ),
];

/// Each the fifth line of a limit that is right without it.
const WRONG_LINES: &[(&str, &[&str])] = &[
    ("burst = 0", &["burst of 0", "at least 1"]),
    ("burst = -1", &["burst is -1", "at least 1", "line 5, column 9"]),
    ("burst = 1.5", &["burst is 1.5", "whole number"]),
    ("burst = 20.0", &["burst is 20.0", "whole number"]),
    ("burst = '5'", &["without quotes"]),
    ("burst = 99999999999999999999", &["whole number"]),
    ("key = 'ip'", &["key = [\"ip\"]"]),
    ("key = [1]", &["key = [\"ip\"]", "line 5, column 7"]),
    ("key = ['']", &["identifier"]),
    ("required = 'yes'", &["required = true"]),
    ("bucket = '1s'", &["bucket has no meaning for gcra"]),
    ("count = 'all'", &["\"admitted\"", "\"attempts\""]),
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
