//! `suggest`: its proposal, replayed, denies as few callers as it says, and anything smaller denies
//! too many.

use crate::common::{Scene, example};

#[test]
fn the_proposal_for_several_limits_is_replayed_together() {
    let (policy, log) = example();
    let scene = Scene::new(&policy);
    let suggest = ["--target", "0.3%", "--write", "out.toml", &log];
    let rows = scene.command("suggest", &[&suggest[..], &["--json"]].concat()).exits(0).json();
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["burst", "same-page", "per-user", "daily"]);
    // Replayed, the proposals together deny as many callers as they say.
    let replayed = &scene.run(&["replay", "--policy", "out.toml", "--json", &log]).json()[0];
    for (row, limit) in rows.iter().zip(replayed["limits"].as_array().expect("limits")) {
        let told = &row["proposed"]["callers_denied_together"];
        assert_eq!(told, &limit["nearness"]["callers_denied"], "{row}");
    }
    for row in &rows {
        let [callers, alone, together] = [
            &row["callers"],
            &row["proposed"]["callers_denied"],
            &row["proposed"]["callers_denied_together"],
        ]
        .map(|number| number.as_u64().expect("a number"));
        assert!(together <= alone && alone * 1_000 <= callers * 3, "{row}");
    }
    let ran = scene.command("suggest", &["--target", "0.3%", &log]).exits(0);
    ran.says(&["with the others", "gcra 5/s burst"]);
}

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
fn the_cost_under_a_limit_is_that_of_all_of_its_windows() {
    let steps = "[[limit]]\nname = \"steps\"\nalgorithm = \"bucketed-window\"\nbucket = \"1s\"\nrates = [\"4/1s\", \"6/10s\"]\n";
    let line = |(at, cost)| {
        format!("{{\"at_us\":{at}000000,\"key\":\"k\",\"cost\":{{\"steps\":{cost}}}}}\n")
    };
    let scene = Scene::with(steps, [(100, 4), (101, 4), (102, 4)].map(line).concat());
    let row = &scene.command("suggest", &["--target", "0%", "--json", "input"]).exits(0).json()[0];
    assert_eq!(row["proposed"]["algorithm"], "bucketed-window bucket 1s rates 8/1s, 12/10s");
}
