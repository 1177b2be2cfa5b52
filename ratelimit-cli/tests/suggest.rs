//! `suggest`: its proposal, replayed, denies as few callers as it says, and anything smaller denies too many.
#![allow(missing_docs, clippy::expect_used)]

mod common;

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

#[test]
fn the_proposal_for_several_limits_is_replayed_together() {
    let policy = std::fs::read_to_string(workspace("examples/policy.toml")).expect("reads");
    let scene = Scene::new(&policy);
    let rows = suggested(&scene, "0.3%");
    let names: Vec<_> = rows.iter().map(|row| row["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["burst", "same-page", "per-user", "daily"]);
    // Replayed, the proposals together deny as many callers as they say.
    let proposed = |(row, limit): (&Value, &str)| {
        let policy = row["proposed"]["policy"].as_str().expect("a proposal");
        let (algorithm, rate) = policy.split_once(' ').expect("a name and a rate");
        let (rate, burst) = rate.split_once(" burst ").unwrap_or((rate, ""));
        let burst = if burst.is_empty() { String::new() } else { format!("burst = {burst}\n") };
        let key = limit.lines().find(|line| line.starts_with("key")).expect("a key");
        format!(
            "[[limit]]\nname = {}\n{key}\nalgorithm = \"{algorithm}\"\nrate = \"{rate}\"\n{burst}",
            row["name"]
        )
    };
    let tables = policy.split("[[limit]]").skip(1);
    let together = Scene::new(&rows.iter().zip(tables).map(proposed).collect::<String>());
    let log = workspace("examples/access.log");
    let ran = together.replay(&["--json", log.to_str().expect("a name")]);
    let replayed: Value = serde_json::from_str(&ran.out).expect("JSON");
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
