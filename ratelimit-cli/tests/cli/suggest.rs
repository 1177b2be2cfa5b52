//! `suggest`: the policy that it writes. What it proposes, the oracle checks.

use serde_json::{Value, json};

use crate::common::{Scene, example, limit};

#[test]
fn the_written_policy_has_the_proposed_limits_and_all_else_as_it_was() {
    let (policy, log) = example();
    let policy = policy.replace("rate      = \"2/s\"\nburst     = 40", "rate = '2/s' # slow");
    let inline = "limit = [{ name = \"a\", algorithm = \"gcra\", rate = \"5/s\" }]\n";
    let scene = Scene::new(&policy);
    scene.write("inline.toml", inline);
    let suggest = ["suggest", "--target", "1%", "--write"];
    let ran = |more: &[&str]| scene.run(&[&suggest[..], more].concat());
    ran(&["out.toml", "--policy", "policy.toml", &log]).exits(0);
    let due = policy.replace("= 30", "= 5").replace("25/m", "3/m").replace("650/d", "170/d");
    assert_eq!(scene.read("out.toml"), due.replace("'2/s' #", "'2/s'\nburst = 84 #"));
    ran(&["inline-out.toml", "--policy", "inline.toml", &log]).exits(0);
    assert_eq!(scene.read("inline-out.toml"), inline.replace("\" }", "\", burst = 5 }"));
    // It overwrites nothing.
    ran(&["policy.toml", "--policy", "policy.toml", &log]).exits(2).says(&["policy.toml"]);
    assert_eq!(scene.read("policy.toml"), policy);
}

#[test]
fn of_a_limit_that_is_finer_than_the_times_of_the_log_both_ends_of_a_range_are_told() {
    // Ten requests of one caller in each second, or five of each of two.
    let line = |second: u64, caller: u64| {
        format!(
            "192.0.2.{caller} - - [17/May/2015:10:05:{second:02} +0000] \"GET / HTTP/1.1\" 200 5\n"
        )
    };
    let one = (0..30).flat_map(|second| (0..10).map(move |_| line(second, 1)));
    let two = (30..60).flat_map(|second| (0..10).map(move |nth| line(second, nth % 2)));
    let limits = [("fine", "gcra 20/s", "burst = 4"), ("slow", "gcra 1/s", "burst = 300")];
    let limits = limits.map(|(name, words, more)| limit(name, "ip", words, more));
    let scene = Scene::with(&limits.concat(), one.chain(two).collect::<String>());
    let suggest =
        |more: &[&str]| scene.command("suggest", &[&["--target", "0%", "input"], more].concat());
    let lines = suggest(&["--json"]).exits(0).json();
    assert_eq!(lines[0]["proposed"]["algorithm"], "gcra 20/s burst 10");
    assert_eq!(lines[0]["now"]["callers_denied"], 2);
    let spread = json!({
        "now": { "algorithm": "gcra 20/s burst 4", "callers_denied": 0 },
        "proposed": { "algorithm": "gcra 20/s burst 1", "callers_denied": 0 },
    });
    assert_eq!(lines[0]["spread"], spread);
    assert_eq!(lines[1]["spread"], Value::Null);
    suggest(&[]).exits(0).says(&[
        "write if spread",
        "burst = 10",
        "burst = 1\n",
        "between the two",
    ]);
    // Exact times need no range.
    scene.write("input", "{\"at_us\":250000,\"keys\":{\"ip\":\"a\"}}\n");
    suggest(&[]).exits(0).lacks("spread");
}
