//! The help of each command names every field of its JSON.
#![allow(missing_docs, clippy::expect_used)]

mod common;

use std::collections::BTreeSet;

use common::{Scene, json_lines, limit};
use ratelimit_core::Policy;
use ratelimit_servers::RedisServer;
use serde_json::Value;

/// The fields whose own fields are data: identifiers by name, and denials by limit.
const MAPS: [&str; 2] = ["keys", "by_limit"];

/// The names of all fields.
fn fields(value: &Value, found: &mut BTreeSet<String>) {
    match value {
        Value::Array(items) => items.iter().for_each(|item| fields(item, found)),
        Value::Object(object) => {
            for (name, value) in object {
                found.insert(name.clone());
                if !MAPS.contains(&&**name) {
                    fields(value, found);
                }
            }
        }
        _ => {}
    }
}

/// Checks that `--help` of a command names each field of these lines, and that these fields are among them.
fn is_described(scene: &Scene, command: &str, lines: &str, expected: &[&str]) {
    let help = scene.run(&[command, "--help"]).out;
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words: BTreeSet<_> = help.split(|c| !is_word(c)).collect();
    let mut found = BTreeSet::new();
    for line in &json_lines(lines) {
        fields(line, &mut found);
    }
    let missing: Vec<_> = found.iter().filter(|field| !words.contains(field.as_str())).collect();
    assert_eq!(missing, Vec::<&String>::new(), "{command}: fields that its help does not name");
    for field in expected {
        assert!(found.contains(*field), "{command}: no {field} in {lines}");
    }
}

/// A limit of every algorithm for each address, a shadow limit, and a limit of another identifier.
fn policy() -> String {
    let of_each = |name: &&str| match limit(name, "ip", &format!("{name} 3/h"), "") {
        limit if *name == "bucketed-window" => {
            limit.replace("rate = \"3/h\"", "bucket = \"1h\"\nrates = [\"3/h\"]")
        }
        limit => limit,
    };
    let policy: String = Policy::NAMES.iter().map(of_each).collect();
    policy
        + &limit("trial", "ip", "gcra 3/h", "shadow = true")
        + &limit("per-user", "user", "gcra 3/h", "")
}

#[test]
fn the_help_of_each_command_names_every_field_of_its_json() {
    let server = RedisServer::start().expect("a server");
    let scene = Scene::new(&policy());
    let line = |n: u64| {
        format!("{{\"at_us\":{},\"key\":\"k\",\"keys\":{{\"ip\":\"{}\"}}}}\n", n * 1_000, n % 2)
    };
    scene.write("input", (0..9).map(line).collect::<String>());
    scene.write("other.toml", policy().replace("3/h", "2/h"));
    let with_policy = |command: &str, more: &[&str]| {
        let ran = scene.command(command, more);
        assert!(ran.code <= 1, "{command}: {ran:?}");
        ran.out
    };

    let out = with_policy("replay", &["--json", "--compare", "other.toml", "input"]);
    is_described(
        &scene,
        "replay",
        &out,
        &["nearness", "spells", "differing_callers", "callers_denied"],
    );
    let out = with_policy("replay", &["--decisions", "-", "input"]);
    is_described(&scene, "replay", &out, &["at_us", "retry_after_us", "shadow", "limits"]);
    scene.write("wrong.toml", "[[limit]]\nname = \"a\"\nbrust = 1\n");
    let out = scene.run(&["lint", "wrong.toml", "--json"]).out;
    is_described(&scene, "lint", &out, &["line", "column", "message", "limits", "problems"]);
    let out = with_policy("suggest", &["--json", "--target", "0%", "input"]);
    is_described(&scene, "suggest", &out, &["now", "proposed", "callers_denied_together"]);

    let url = server.url();
    let store = ["--json", "--store", &url];
    for _ in 0..4 {
        let out = with_policy("check", &[&["ip=a", "user=b"][..], &store].concat());
        is_described(&scene, "check", &out, &["keys", "limits", "shadow"]);
    }
    let out = with_policy("inspect", &[&["ip=a", "user=b"][..], &store].concat());
    let states =
        ["tat_us", "tokens", "start_us", "buckets", "previous", "entries", "metadata", "leases"];
    is_described(&scene, "inspect", &out, &states);
    let out = with_policy("top", &store);
    is_described(&scene, "top", &out, &["value", "identifiers", "hidden_keys", "max_keys_reached"]);
    // A state from the future of the server's clock.
    common::write_gcra(
        &server,
        "rl:1::{a}",
        "gcra",
        [4_000_000_000_000_000, 0, 3_999_999_999_999_999],
    );
    let out = with_policy("heal", &store);
    is_described(&scene, "heal", &out, &["value", "stored_key", "ahead_us", "dry_run"]);
    let out = with_policy("reset", &[&["ip=a"][..], &store].concat());
    is_described(&scene, "reset", &out, &["reset", "keys"]);
}
