//! Replays by records of single callers.

use serde_json::json;

use crate::common::{Scene, limit};

/// Ten per hour for each address, of which one record may say otherwise; and another policy.
fn scene() -> Scene {
    let api = limit("api", "ip", "gcra 10/h", "burst = 2\noverridable = true");
    let other = limit("fixed", "ip", "gcra 10/h", "");
    let scene = Scene::new(&(api.clone() + &other));
    scene.write("other.toml", api.replace("overridable = true", ""));
    scene.write("window.toml", api.replace("gcra", "fixed-window").replace("burst = 2", ""));
    let line = |n: u64| {
        let ip =
            ["many", "blocked", "exempt", "none", "ended"][usize::try_from(n % 5).expect("small")];
        format!("{{\"at_us\":{},\"keys\":{{\"ip\":\"{ip}\"}}}}\n", n * 1_000_000)
    };
    scene.write("input", (0..15).map(line).collect::<String>());
    scene.write("records.jsonl", RECORDS);
    scene
}

const RECORDS: &str = r#"{"value":"many","identifiers":["ip"],"limit":"api","record":{"numbers":"gcra 10/h burst 9","blocked":false,"exempt":false,"until_us":null}}
{"value":"blocked","limit":"api","record":{"blocked":true}}

{"value":"exempt","limit":"api","record":{"exempt":true,"until_us":10000000}}
{"value":"ended","limit":"api","record":{"numbers":"1/h","until_us":4000000}}
{"value":"absent","limit":"api","record":{"numbers":"1/h"}}
{"records":5,"max_keys_reached":false}
"#;

#[test]
fn a_replay_decides_by_records_until_they_end_and_shows_whom_they_decided() {
    let scene = scene();
    let by = ["--records", "records.jsonl", "--report", "out.html", "input"];
    let data = &scene.replay(&[&["--json"], &by[..]].concat()).exits(0).json()[0];
    let row = |value: &str, requests: u64, denied: u64, record: serde_json::Value| json!({ "value": value, "identifiers": ["ip"], "limit": "api", "record": record, "requests": requests, "denied": denied });
    let record = |numbers: Option<&str>, is: &str, until_us: Option<u64>| json!({ "numbers": numbers, "blocked": is == "blocked", "exempt": is == "exempt", "until_us": until_us });
    let due = [
        row("blocked", 3, 3, record(None, "blocked", None)),
        row("many", 3, 0, record(Some("gcra 1/6m burst 9"), "", None)),
        // It ends before the third request, which is charged.
        row("exempt", 2, 0, record(None, "exempt", Some(10_000_000))),
        row("absent", 0, 0, record(Some("gcra 1/h burst 1"), "", None)),
        row("ended", 0, 0, record(Some("gcra 1/h burst 1"), "", Some(4_000_000))),
    ];
    assert_eq!(data["records"], json!(due));
    // Each of the third requests beyond the burst of two, and all of the blocked caller.
    assert_eq!(data["limits"][0]["denied"], json!(5));
    assert!(scene.read("out.html").contains("<h2>Whom records decided</h2>"));
    let ran = scene.replay(&by).exits(0);
    ran.says(&[
        "Decided by records",
        "ip=blocked",
        "blocked for ever",
        "gcra 1/6m burst 9 for ever",
        "note: 2 of 5 records decided no request, such as ip=absent under api\n",
    ]);
    // Some editors write a mark first. An address is counted by its network.
    let line = RECORDS.lines().next().expect("a line").replace("many", "2001:db8::1");
    scene.write("marked.jsonl", format!("\u{feff}{line}"));
    let ran = scene.replay(&["--records", "marked.jsonl", "input"]).exits(0);
    ran.says(&["such as ip=2001:db8::1 under api; a log counts 2001:db8::1 as 2001:db8::/64\n"]);
    // Without the file nothing is said of records.
    let ran = scene.replay(&["--report", "plain.html", "input"]).exits(0);
    ran.lacks("ecords");
    assert!(!scene.read("plain.html").contains("ecords decided"));
    assert_eq!(scene.replay(&["--json", "input"]).json()[0]["records"], json!([]));
}

#[test]
fn another_policy_decides_by_the_records_that_suit_its_limits() {
    let scene = scene();
    let of = |other: &str| {
        let by = ["--json", "--records", "records.jsonl", "--compare", other, "input"];
        let data = scene.replay(&by).exits(0).json().remove(0);
        (data["comparison"]["denied"].clone(), data["comparison"]["denied_only_by_this"].clone())
    };
    // No record: the third request of each of the five callers is denied.
    assert_eq!(of("other.toml"), (json!(5), json!(2)));
    // Numbers of another algorithm are none; the block and the exemption stand, of ten in an hour.
    assert_eq!(of("window.toml"), (json!(3), json!(2)));
}

#[test]
fn an_error_of_a_record_names_the_file_the_line_and_the_remedy() {
    let scene = scene();
    let right = "{\"value\":\"a\",\"limit\":\"api\",\"record\":{\"blocked\":true}}\n";
    for (line, says) in [
        ("[]", "invalid type"),
        ("{\"value\":\"b\"}", "names no limit; add"),
        (
            &right.replace("api", "apy"),
            "the policy has no limit \"apy\"; it has api, fixed; did you mean \"api\"?",
        ),
        (&right.replace("api", "fixed"), "overridable = true in a document"),
        (&right.replace("\"a\"", "null"), "; add \"value\""),
        ("{\"value\":\"b\",\"limit\":\"api\"}", "has no record, such as"),
        (&right.replace("true", "false"), "or exempt true; say one"),
        (&right.replace("true", "true,\"exempt\":true"), "or exempt true; say one"),
        (&right.replace("blocked", "bloked"), "unknown field `bloked`, expected one of `numbers`"),
        (&right.replace("\"blocked\":true", "\"numbers\":\"fast\""), "numbers: \"fast\""),
        (
            &right.replace("\"blocked\":true", "\"numbers\":\"fixed-window 1/h\""),
            "the limit's algorithm is gcra",
        ),
        (right, "\"a\" has two records under api; leave one out"),
        (&right.replace("\"limit\"", "\"value\":\"b\",\"limit\""), "duplicate field `value`"),
        (
            "{\"records\":9,\"max_keys_reached\":true}",
            "list the records again with a larger --max-keys",
        ),
    ] {
        scene.write("wrong.jsonl", format!("{right}{line}"));
        let ran = scene.replay(&["--records", "wrong.jsonl", "input"]).exits(2);
        ran.says(&["--records wrong.jsonl: line 2: ", says]);
    }
    scene
        .replay(&["--records", "none", "input"])
        .exits(2)
        .says(&["--records none: cannot be read", "record list --json"]);
}

#[test]
fn a_wrong_argument_of_a_record_is_told_with_one_that_is_right() {
    let scene = scene();
    let record = |command: &str, caller: &str, limit: &str, change: &[&str]| {
        let of = ["record", command, caller, "--limit", limit, "--policy", "policy.toml"];
        scene.run(&[&of[..], &["--store", "redis://127.0.0.1:1"], change].concat()).exits(2)
    };
    let blocked = ["--blocked", "--forever"];
    let unknown =
        "--limit: the policy has no limit \"apy\"; it has api, fixed; did you mean \"api\"?";
    record("set", "ip=bob", "apy", &blocked).says(&[unknown]);
    record("set", "ip=bob", "apy", &["--numbers", "1/s", "--forever"]).says(&[unknown]);
    record("clear", "ip=bob", "apy", &[]).says(&[unknown]);
    record("set", "key=bob", "api", &blocked).says(&["such as ip=bob"]).lacks("ip=key");
    record("set", "ip=bob", "api", &["--blocked", "--until", "tomorrow"])
        .says(&["--until", "such as 2027-01-31T00:00:00Z"]);
    record("set", "ip=bob", "api", &["--blocked", "--until", "2020-01-31T00:00:00Z"])
        .says(&["ended already", "take a later end"]);
    for end in [["--until", "9999-01-01T00:00:00Z"], ["--for", "1000y"]] {
        let last = "the last end that a record can have is 2112-09-";
        record("set", "ip=bob", "api", &[&["--blocked"], &end[..]].concat()).says(&[
            end[0],
            last,
            "or --forever",
        ]);
    }
}

#[test]
fn an_exempt_caller_holds_no_lease() {
    let scene = Scene::new(&limit("jobs", "ip", "concurrency 2/30s", "overridable = true"));
    scene.write(
        "records.jsonl",
        "{\"value\":\"a\",\"limit\":\"jobs\",\"record\":{\"exempt\":true,\"until_us\":2500000}}",
    );
    // Two hold both places. The exempt request, of an earlier time, has none to give back.
    let line = |(s, took): (u64, u64)| {
        format!("{{\"at_us\":{s}000000,\"keys\":{{\"ip\":\"a\"}},\"duration_us\":{took}000000}}\n")
    };
    scene.write("input", [(3, 20), (3, 20), (1, 4), (6, 1)].map(line).concat());
    let decided = scene.decision_lines(&["--records", "records.jsonl", "input"]);
    let allowed: Vec<_> = decided.lines().map(|line| line.contains("\"allowed\":true")).collect();
    assert_eq!(allowed, [true, true, true, false], "{decided}");
}
