//! The help of each command names every field of its JSON.

use std::collections::BTreeSet;

use ratelimit_core::AnyAlgorithm;
use ratelimit_servers::RedisServer;
use serde_json::Value;

use crate::common::{Scene, limit, write_gcra};

/// The fields whose own fields are data: identifiers by name, denials by limit, and conditions.
const MAPS: [&str; 3] = ["keys", "by_limit", "when"];

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

/// Runs a command. Checks that its `--help` names each field of its JSON, and that these fields are
/// among them.
fn is_described(scene: &Scene, command: &[&str], expected: &[&str]) {
    let (name, more) = (command[0], &command[1..]);
    let policy = if name == "lint" { &[][..] } else { &["--policy", "policy.toml"] };
    let ran = scene.run(&[&[name], policy, more].concat());
    let help = scene.run(&[name, "--help"]).out;
    let is_word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let words: BTreeSet<_> = help.split(|c| !is_word(c)).collect();
    let mut found = BTreeSet::new();
    ran.json().iter().for_each(|line| fields(line, &mut found));
    let missing: Vec<_> = found.iter().filter(|field| !words.contains(field.as_str())).collect();
    assert_eq!(missing, Vec::<&String>::new(), "{name}: fields that its help does not name");
    for field in expected {
        assert!(found.contains(*field), "{name}: no {field} in {ran:?}");
    }
}

/// A limit of every algorithm for each address, a shadow limit, and a limit of another identifier.
fn policy() -> String {
    let of_each = |name: &&str| match limit(name, "ip", &format!("{name} 3/h"), "") {
        limit if *name == "bucketed-window" => {
            limit.replace("rate = \"3/h\"", "bucket = \"1h\"\nrates = [\"3/h\"]")
        }
        limit if *name == "lockout" => {
            limit.replace("rate = \"3/h\"", "rate = \"3/h\"\nblock = \"1h\"")
        }
        limit => limit,
    };
    let policy: String = AnyAlgorithm::NAMES.iter().map(of_each).collect();
    policy
        + &limit("trial", "ip", "gcra 3/h", "shadow = true\nwarn = \"80%\"\noverridable = true")
        + &limit("per-user", "user", "gcra 3/h", "when = { user = \"*\" }")
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
    scene.write("wrong.toml", "[[limit]]\nname = \"a\"\nbrust = 1\n");
    let url = server.url();
    let described = |command: &[&str], expected: &[&str]| is_described(&scene, command, expected);
    let on_server = |command: &[&str], expected: &[&str]| {
        described(&[command, &["--json", "--store", &url]].concat(), expected);
    };

    described(
        &["replay", "--json", "--compare", "other.toml", "input"],
        &["nearness", "spells", "differing_callers", "callers_denied", "when"],
    );
    let record = "{\"value\":\"0\",\"limit\":\"trial\",\"record\":{\"blocked\":true}}";
    scene.write("records.jsonl", record);
    described(
        &["replay", "--json", "--records", "records.jsonl", "input"],
        &["records", "record", "numbers", "blocked", "exempt", "until_us"],
    );
    described(
        &["replay", "--decisions", "-", "input"],
        &["at_us", "retry_after_us", "shadow", "limits"],
    );
    described(
        &["lint", "wrong.toml", "--json"],
        &["line", "column", "message", "note", "limits", "problems", "notes"],
    );
    described(
        &["suggest", "--json", "--target", "0%", "input"],
        &["now", "proposed", "callers_denied_together"],
    );
    let policy = ["--policy", "policy.toml", "--store", &url];
    let set = ["record", "set", "ip=a", "--limit", "trial", "--blocked", "--forever"];
    scene.run(&[&set[..], &policy].concat()).exits(0);
    for _ in 0..4 {
        on_server(&["check", "ip=a", "user=b"], &["keys", "limits", "shadow"]);
    }
    let states =
        ["tat_us", "tokens", "start_us", "buckets", "previous", "entries", "metadata", "leases"];
    on_server(
        &["inspect", "ip=a", "user=b"],
        &[&states[..], &["locked_out_until_us", "record"]].concat(),
    );
    on_server(&["top"], &["value", "record", "until_us", "locked_out", "skipped", "records"]);
    // A state from the future of the server's clock.
    let future = [4_000_000_000_000_000, 0, 3_999_999_999_999_999];
    write_gcra(&server, "rl:1::{a}", "gcra", future);
    on_server(&["heal"], &["value", "stored_key", "ahead_us", "dry_run"]);
    on_server(&["reset", "ip=a"], &["reset", "keys"]);
}
