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
            "bucketed-window" => "bucket = \"1s\"\nrates = [\"7/5m\", \"9/10m\"]",
            _ => "rate = \"7/5m\"",
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
        "[[limit]]\nname = \"b\"\nkey = [\"ip\", \"path\"]\nalgorithm = \"gcra\"\nrate = \"10/s\"\n\
         burst = 20\ncount = \"admitted\"\nrequired = true\n[[limit]]\nname = \"a\"\nalgorithm = \"sliding-log\"\n\
         rate = \"3/s\"\n",
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
    let limit = "[[limit]]\nname = \"a\"\nalgorithm = \"gcra\"\nrate = \"1/s\"";
    let with = |schema: &str| read(&format!("\"$schema\" = {schema}\n{limit}"));
    assert_eq!(
        with("\"ratelimit.schema.json\"").expect("a policy"),
        read(limit).expect("a policy")
    );
    assert!(with("1").is_err_and(|error| error.contains("line 1")));
}

/// What is wrong with a limit that is right without this line, and what the error says.
const WRONG_LINES: &[(&str, &[&str])] = &[
    ("burst = 0", &["\"burst\"", "burst of 0", "at least 1"]),
    ("burst = -1", &["\"burst\"", "burst is -1", "at least 1", "line 5, column 9"]),
    ("burst = 1.5", &["\"burst\"", "burst is 1.5", "whole number"]),
    ("burst = 20.0", &["\"burst\"", "burst is 20.0", "whole number"]),
    ("burst = \"5\"", &["\"burst\"", "without quotes"]),
    ("burst = 99999999999999999999", &["\"burst\"", "whole number"]),
    ("key = \"ip\"", &["\"burst\"", "key = [\"ip\"]"]),
    ("key = [1]", &["\"burst\"", "key = [\"ip\"]", "line 5, column 7"]),
    ("required = \"yes\"", &["\"burst\"", "required = true"]),
    ("bucket = \"1s\"", &["\"burst\"", "bucket has no meaning for gcra"]),
    ("brust = 3", &["brust", "line 5, column 1", "did you mean \"burst\"?"]),
    ("key = [\"\"]", &["\"burst\"", "identifier"]),
    ("count = \"all\"", &["\"burst\"", "\"admitted\"", "\"attempts\""]),
];

#[test]
fn mistakes_name_the_limit_the_line_and_what_is_accepted() {
    let gcra = "name = \"burst\"\nalgorithm = \"gcra\"\n";
    let steps = "name = \"steps\"\nalgorithm = \"bucketed-window\"\n";
    for (text, says) in [
        (String::new(), &["at least one limit"][..]),
        ("[[limit]]\nalgorithm = \"gcra\"\nrate = \"1/s\"".into(), &["no name", "line 1"]),
        (
            "[[limit]]\nname = \"burst\"\nrate = \"1/s\"".into(),
            &["\"burst\"", "no algorithm", "gcra, "],
        ),
        (format!("[[limit]]\n{gcra}"), &["\"burst\"", "no rate", "\"10/s\""]),
        (format!("[[limit]]\n{gcra}rate = \"0/s\""), &["\"burst\"", "a rate of 0", "at least 1"]),
        (
            format!("[[limit]]\n{gcra}rate = \"1000000007/30d\"\nburst = 999999999999999"),
            &["\"burst\"", "2^52", "smaller"],
        ),
        (
            "[[limit]]\nname = \"burst\"\nalgorithm = \"leaky\"\nrate = \"1/s\"".into(),
            &[
                "\"burst\"",
                "unknown algorithm \"leaky\"",
                "gcra, token-bucket",
                "line 3, column 13",
            ],
        ),
        (
            "[[limit]]\nname = \"burst\"\nalgorithm = \"sliding-log\"\nrate = \"1/s\"\nburst = 2"
                .into(),
            &["\"burst\"", "burst has no meaning", "line 5, column 9"],
        ),
        (format!("[[limit]]\n{gcra}rate = 5"), &["\"burst\"", "rate is 5", "rate = \"10/s\""]),
        (format!("[limit]\n{gcra}rate = \"1/s\""), &["[[limit]]", "two brackets"]),
        (format!("[[limit]]\n{steps}rates = [\"1/s\"]"), &["\"steps\"", "bucket = \"1s\""]),
        (
            format!("[[limit]]\n{steps}bucket = \"2s\"\nrates = [\"1/s\"]"),
            &["\"steps\"", "not a whole number of buckets", "such as 1s"],
        ),
        (
            format!("[[limit]]\n{steps}bucket = \"1s\"\nrates = [\"3/1500ms\", \"9/6s\"]"),
            &["\"steps\"", "3/1500ms is not a whole number of buckets", "such as 1500ms"],
        ),
        (
            format!("[[limit]]\n{steps}bucket = \"soon\"\nrates = [\"1/s\"]"),
            &["\"steps\"", "\"soon\" is not a length of time", "250ms"],
        ),
        (
            format!("[[limit]]\n{gcra}rate = \"1/s\"\n[[limit]]\n{gcra}rate = \"2/s\""),
            &["\"burst\"", "two limits have this name", "line 6, column 8"],
        ),
        (
            "[[limit]]\nname = \"busy\"\nalgorithm = \"concurrency\"\nrate = \"1/s\"\n\
             count = \"attempts\""
                .into(),
            &["\"busy\"", "no meaning for concurrency"],
        ),
        // The second limit is wrong, and a field before its algorithm.
        (
            format!(
                "[[limit]]\n{gcra}rate = \"1/s\"\n[[limit]]\nname = \"b\"\nkey = [\"i p\"]\nalgorithm = \"gcra\"\n\
                 rate = \"1/s\""
            ),
            &["\"b\"", "identifier", "line 7, column 7"],
        ),
        (
            format!("[[limit]]\n{gcra}rate = \"1/s\"\n\n[[limit]]\nname = \"b\""),
            &["\"b\"", "no algorithm", "line 6"],
        ),
        (
            "[[limit]]\nname = \"who\"\nalgorithm = \"window-log\"\nrate = \"10001/h\"".into(),
            &["\"who\"", "10000", "first-request-window"],
        ),
    ] {
        says_all(&text, says);
    }
    for (line, says) in WRONG_LINES {
        says_all(&format!("[[limit]]\n{gcra}rate = \"1/s\"\n{line}"), says);
    }
}

fn says_all(text: &str, says: &[&str]) {
    let error = read(text).expect_err(text);
    for part in says {
        assert!(error.contains(part), "{text}\n→ {error}\nlacks {part}");
    }
}
