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
    ran(&["policy.toml", "--policy", "policy.toml", &log])
        .exits(2)
        .says(&["policy.toml: the file exists"]);
    assert_eq!(scene.read("policy.toml"), policy);
}

#[test]
fn a_lockout_that_is_large_enough_locks_out_nobody() {
    let lockout = |rate: &str| limit("login", "ip", &format!("lockout {rate}"), "block = \"2m\"");
    let scene = Scene::new(&lockout("3/m"));
    // The third locks out, and the fourth finds that; another caller comes twice.
    let line = |(second, ip): (u64, u64)| {
        format!("{{\"at_us\":{},\"keys\":{{\"ip\":\"{ip}\"}}}}\n", second * 1_000_000)
    };
    let all = [(0, 1), (0, 2), (1, 1), (2, 1), (3, 2), (70, 1)];
    scene.write("input", all.map(line).concat());
    let of = |command: &str, more: &[&str]| {
        scene.command(command, &[&["--json"], more, &["input"]].concat()).exits(0).json().remove(0)
    };
    let proposed = of("suggest", &["--target", "0%"]);
    assert_eq!(proposed["now"]["callers_denied"], 1, "{proposed}");
    assert!(
        proposed["proposed"]["algorithm"].as_str().is_some_and(|text| text.contains("4/m")),
        "{proposed}"
    );
    assert_eq!(proposed["proposed"]["callers_denied_together"], 0, "{proposed}");
    scene
        .command("suggest", &["--target", "0%", "input"])
        .exits(0)
        .says(&["callers that it locks out"]);
    scene.replay(&["--report", "out.html", "input"]).exits(0);
    let says = "Alone it would lock out 1 of them; the busiest caller that fits needed 3 of 3 at once; \
                <code>rate = \"4/m\"</code> locks out none.";
    let page = scene.read("out.html").replace("&quot;", "\"");
    assert!(page.contains(says), "{page}");
    scene.write("policy.toml", lockout("4/m"));
    assert_eq!(of("replay", &[])["denied"], 0);
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
