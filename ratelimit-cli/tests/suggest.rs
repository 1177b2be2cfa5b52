//! `suggest`: its proposal, replayed, denies as few callers as it says, and anything smaller denies too many.
#![allow(missing_docs, clippy::expect_used)]

mod common;

use std::collections::BTreeSet;

use common::{Ran, Scene, workspace};
use serde_json::Value;

fn suggested(scene: &Scene, target: &str) -> Vec<Value> {
    let log = workspace("examples/access.log");
    let log = log.to_str().expect("a name");
    let arguments = ["suggest", "--policy", "policy.toml", "--target", target, "--json", log];
    let ran = scene.run(&arguments);
    assert_eq!(ran.code, 0, "{ran:?}");
    ran.out.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// The callers that a policy of one limit denies at least once, by a replay.
fn denied(policy: &str) -> usize {
    let scene = Scene::new(policy);
    let log = workspace("examples/access.log");
    let ran = scene.replay(&["--decisions", "out.jsonl", log.to_str().expect("a name")]);
    assert_eq!(ran.code, 0, "{ran:?}");
    let lines = scene.read("out.jsonl");
    let lines = lines.lines().map(|line| serde_json::from_str::<Value>(line).expect("JSON"));
    let denied = lines.filter(|line| line["allowed"] == false);
    denied.map(|line| line["key"].to_string()).collect::<BTreeSet<_>>().len()
}

#[test]
fn a_proposal_denies_as_few_as_it_says_and_one_less_denies_too_many() {
    let limit = |fields: &str| format!("[[limit]]\nname = \"a\"\nkey = [\"ip\"]\n{fields}\n");
    for (now, with) in [
        (
            "algorithm = \"gcra\"\nrate = \"5/s\"\nburst = 2",
            "algorithm = \"gcra\"\nrate = \"5/s\"\nburst = N",
        ),
        (
            "algorithm = \"sliding-log\"\nrate = \"900/m\"",
            "algorithm = \"sliding-log\"\nrate = \"N/m\"",
        ),
    ] {
        for (target, most) in [("0%", 0), ("0.5%", 1), ("2%", 6)] {
            let row = &suggested(&Scene::new(&limit(now)), target)[0];
            assert_eq!(row["callers"], 325);
            let policy = row["proposed"]["policy"].as_str().expect("a proposal");
            let digits = |text: &str| text.chars().filter(char::is_ascii_digit).collect::<String>();
            let found = match policy.split_once("burst ") {
                Some((_, burst)) => digits(burst),
                None => digits(policy.split('/').next().expect("a count")),
            };
            let found: u64 = found.parse().expect("a number");
            let at = |n: u64| denied(&limit(&with.replace('N', &n.to_string())));
            assert!(at(found) <= most, "{policy} for {target}");
            assert!(found == 1 || at(found - 1) > most, "{policy} for {target}");
            assert_eq!(row["proposed"]["callers_denied"], at(found));
            assert_eq!(row["proposed"]["callers_denied_together"], at(found));
        }
    }
}

#[test]
fn the_proposal_for_several_limits_is_replayed_together() {
    let policy = std::fs::read_to_string(workspace("examples/policy.toml")).expect("reads");
    let scene = Scene::new(&policy);
    let rows = suggested(&scene, "0.3%");
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["burst", "same-page", "per-user", "daily"]);
    for row in &rows {
        let [callers, alone, together] = [
            &row["callers"],
            &row["proposed"]["callers_denied"],
            &row["proposed"]["callers_denied_together"],
        ]
        .map(|number| number.as_u64().expect("a number"));
        assert!(together <= alone && alone * 1_000 <= callers * 3, "{row}");
    }
    let log = workspace("examples/access.log");
    let arguments = ["suggest", "--policy", "policy.toml", "--target", "0.3%"];
    let Ran { code, out, .. } =
        scene.run(&[&arguments[..], &[log.to_str().expect("a name")]].concat());
    assert!(
        code == 0 && out.contains("with the others") && out.contains("gcra 5/s burst"),
        "{out}"
    );
}

#[test]
fn a_target_that_is_no_share_and_a_log_that_cannot_be_read_twice_are_refused() {
    let scene = Scene::new(common::BUCKET);
    for (target, input, says) in [
        ("0.1", "input", "such as 0.1%"),
        ("101%", "input", "0% to 100%"),
        ("1%", "-", "name a file"),
        ("1%", "none", "none"),
    ] {
        let ran = scene.run(&["suggest", "--policy", "policy.toml", "--target", target, input]);
        assert!(ran.code == 2 && ran.err.contains(says), "{ran:?}");
    }
}
