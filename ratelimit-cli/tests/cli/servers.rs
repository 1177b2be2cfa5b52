//! `check`, `inspect`, `top`, `heal` and `reset` on a server, of two limits that differ in one
//! thing: a row per algorithm, and one per field of a limit. What each says of a limit is that
//! limit's.

use std::time::{SystemTime, UNIX_EPOCH};

use ratelimit_core::AnyAlgorithm;
use ratelimit_servers::RedisServer;
use serde_json::{Value, json};

use crate::common::{Scene, limit, write_gcra};

/// Windows of this length begin in 1970, 2024 and 2079, so none ends while a test runs.
const AGE: &str = "20000d";

/// A limit of this name, by these identifiers, of this algorithm, with room for so many per window.
fn document(
    (name, key): (&str, &str),
    algorithm: &str,
    (room, window): (u64, &str),
    more: &str,
) -> String {
    let block = if algorithm == "lockout" { "block = \"1h\"\n" } else { "" };
    let rate = format!("{room}/{window}");
    let document = limit(name, key, &format!("{algorithm} {rate}"), &(block.to_owned() + more));
    if algorithm != "bucketed-window" {
        return document;
    }
    let rates = format!("bucket = \"{window}\"\nrates = [\"{rate}\"]");
    document.replace(&format!("rate = \"{rate}\""), &rates)
}

/// The fields of the limit of this name in a list.
fn limit_named<'v>(list: &'v Value, name: &str) -> &'v Value {
    let mut all = list.as_array().expect("a list").iter();
    all.find(|one| one["name"] == name).unwrap_or(&Value::Null)
}

#[test]
fn each_command_tells_two_limits_apart_whatever_differs() {
    let server = RedisServer::start().expect("a server");
    let url = server.url();
    let mut rows: Vec<_> = AnyAlgorithm::NAMES
        .iter()
        .map(|name| {
            (
                *name,
                document(("one", "ip"), name, (3, AGE), ""),
                document(("two", "ip"), name, (9, AGE), ""),
            )
        })
        .collect();
    let gcra = |more| document(("two", "ip"), "gcra", (9, AGE), more);
    rows.extend([
        ("shadow", document(("one", "ip"), "gcra", (3, AGE), ""), gcra("shadow = true")),
        ("attempts", document(("one", "ip"), "gcra", (3, AGE), ""), gcra("count = \"attempts\"")),
        (
            "identifier",
            document(("one", "ip"), "gcra", (3, AGE), ""),
            document(("two", "user"), "gcra", (9, AGE), ""),
        ),
        (
            "identifiers",
            document(("one", "ip"), "gcra", (3, AGE), ""),
            document(("two", "user ip"), "gcra", (9, AGE), ""),
        ),
        ("algorithm", document(("one", "ip"), "fixed-window", (3, AGE), ""), gcra("")),
        ("required", document(("one", "ip"), "gcra", (3, AGE), ""), gcra("required = true")),
        ("debt", document(("one", "ip"), "gcra", (3, AGE), ""), gcra("debt = 5")),
    ]);
    for (place, (row, one, two)) in rows.iter().enumerate() {
        for (order, policy) in [[one, two], [two, one]].iter().enumerate() {
            let scene = Scene::new(&(policy[0].clone() + policy[1]));
            scene.write("secret", "open sesame");
            let prefix = format!("p{place}-{order}");
            // Every other row hides its identifiers.
            let hides = place % 2 == order;
            let on = ["--store", &url, "--prefix", &prefix];
            let secret: &[&'static str] = if hides { &["--secret-file", "secret"] } else { &[] };
            let run = |command: &str, more: &[&str], code: i32| {
                let ran = scene.command(command, &[&on[..], more, &["--json"]].concat());
                ran.exits(code).json()
            };
            let caller: &[&'static str] = match *row {
                "identifier" | "identifiers" => &["ip=192.0.2.7", "user=bob-smith"],
                _ => &["ip=192.0.2.7"],
            };
            let asked = |more: &[&'static str]| [caller, secret, more].concat();
            let line = &run("check", &asked(&["--cost", "3"]), 0)[0];
            let list = |line: &Value, name: &str| {
                let shadow = *row == "shadow" && name == "two";
                limit_named(&line[if shadow { "shadow" } else { "limits" }], name).clone()
            };
            for (name, limit, left) in [("one", 3, 0), ("two", 9, 6)] {
                let found = list(line, name);
                let found = [&found["allowed"], &found["limit"], &found["remaining"]];
                assert_eq!(found, [&json!(true), &json!(limit), &json!(left)], "{row}: {line}");
            }
            let line = &run("check", &asked(&["--peek"]), 1)[0];
            assert_eq!(list(line, "one")["allowed"], json!(false), "{row}: {line}");
            assert!(line["retry_after_us"].as_u64() > Some(0), "{row}: {line}");

            let found = &run("inspect", &asked(&[]), 0)[0]["limits"];
            for (name, left) in [("one", 0), ("two", 6)] {
                let found = limit_named(found, name);
                assert_eq!(found["remaining"], json!(left), "{row}: {found}");
                assert!(found["state"].is_object(), "{row}: {found}");
                let is_shadow = *row == "shadow" && name == "two";
                assert_eq!(found["shadow"], json!(is_shadow), "{row}: {found}");
            }

            // No key and no list shows what is hidden.
            let keys = server.command(&["KEYS", &format!("{prefix}*")]).expect("it answers");
            let keys: String = keys.as_array().iter().filter_map(|key| key.as_text()).collect();
            for value in caller.iter().map(|given| given.split('=').nth(1).expect("a value")) {
                assert_eq!(keys.contains(value), !hides, "{row}: {keys}");
            }
            let lines = run("top", &[], 0);
            let (totals, listed) = lines.split_last().expect("totals");
            let told: Vec<_> = listed.iter().map(|line| (&line["name"], &line["limit"])).collect();
            let due = if hides { vec![] } else { vec![(json!("one"), json!(3))] };
            assert_eq!(
                told,
                due.iter().map(|(a, b)| (a, b)).collect::<Vec<_>>(),
                "{row}: {lines:?}"
            );
            assert_eq!(totals["hidden_keys"].as_u64() > Some(0), hides, "{row}: {totals}");
            assert_eq!(run("heal", &[], 0)[0]["states"], 0, "{row}");

            // What is reset without the secret is another caller's.
            if hides {
                let reset = &run("reset", caller, 0)[0];
                assert_eq!(reset["reset"], json!([]), "{row}: {reset}");
            }
            let reset = &run("reset", &asked(&[]), 0)[0];
            let due = if order == 0 { ["one", "two"] } else { ["two", "one"] };
            assert_eq!((&reset["reset"], &reset["absent"]), (&json!(due), &json!([])), "{row}");
            let line = &run("check", &asked(&["--peek", "--cost", "3"]), 0)[0];
            for (name, left) in [("one", 0), ("two", 6)] {
                assert_eq!(list(line, name)["remaining"], json!(left), "{row}: {line}");
            }
        }
    }
}

#[test]
fn what_a_limit_is_owed_is_told_of_that_limit() {
    let server = RedisServer::start().expect("a server");
    let url = server.url();
    let named = |name: &str, more| document((name, "ip"), "gcra", (9, "h"), more);
    // Of two limits with a debt one is owed three of nine an hour, the other nothing; the third can
    // be owed nothing.
    let policy = [named("plain", ""), named("one", "debt = 5"), named("two", "debt = 5")];
    let scene = Scene::new(&policy.concat());
    let now_us = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_micros();
    let now_us = u64::try_from(now_us).expect("before 2112");
    for owing in ["one", "two"] {
        let key = format!("rl:1::{{{owing}}}");
        write_gcra(&server, &key, owing, [now_us + 12 * 400_000_000, 0, now_us]);
        let caller = format!("ip={owing}");
        let on = [&*caller, "--store", &url];
        let found = &scene.command("inspect", &[&on[..], &["--json"]].concat()).exits(0).json()[0];
        let words = scene.command("inspect", &on).exits(0).out;
        for name in ["plain", "one", "two"] {
            let is_owed = name == owing;
            let owed = limit_named(&found["limits"], name)["owed"].as_u64();
            assert_eq!(owed, is_owed.then_some(3), "{owing}: {found}");
            let line = words.lines().find(|line| line.trim().starts_with(&format!("{name} ")));
            assert_eq!(line.expect("a line").contains("owe"), is_owed, "{owing}: {words}");
        }
    }
}

#[test]
fn heal_frees_every_algorithm_and_each_of_two_limits() {
    const AHEAD: i64 = 100 * 86_400;
    let (server, clock) = RedisServer::start_with_clock().expect("a server and cc");
    let url = server.url();
    for (place, algorithm) in AnyAlgorithm::NAMES.iter().enumerate() {
        let [one, two] = [("one", 3), ("two", 9)]
            .map(|(name, room)| document((name, "ip"), algorithm, (room, "h"), ""));
        let scene = Scene::new(&if place % 2 == 0 { one + &two } else { two + &one });
        scene.write("secret", "open sesame");
        let prefix = format!("p{place}");
        let run = |command: &str, more: &[&str], code: i32| {
            let on = ["--store", &url, "--prefix", &prefix, "--json"];
            scene.command(command, &[&on[..], more].concat()).exits(code).json()
        };
        clock.set_ahead(AHEAD).expect("sets");
        run("check", &["ip=a", "--cost", "3"], 0);
        run("check", &["ip=hidden", "--secret-file", "secret"], 0);
        clock.set_ahead(0).expect("sets");
        let peek =
            || run("check", &["ip=a", "--peek"], 1)[0]["retry_after_us"].as_u64().expect("a wait");
        assert!(peek() > 90 * 86_400_000_000, "{algorithm}");
        for more in [&["--dry-run"][..], &[]] {
            let lines = run("heal", more, 0);
            assert_eq!(lines.last().expect("totals")["states"], 4, "{algorithm}: {lines:?}");
            for name in ["one", "two"] {
                let of_name = lines.iter().filter(|line| line["name"] == name);
                let mut values: Vec<_> = of_name.map(|line| line["value"].to_string()).collect();
                values.sort();
                assert_eq!(values, ["\"a\"", "null"], "{algorithm}: {lines:?}");
            }
        }
        assert_eq!(run("heal", &[], 0)[0]["states"], 0, "{algorithm}");
        assert!(peek() <= 2 * 3_600_000_000, "{algorithm}");
    }
}
