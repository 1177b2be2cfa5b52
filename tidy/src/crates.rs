//! Rules about the crates' manifests: the arrows between the crates, and what each inherits from
//! the workspace.

use toml::{Table, Value};

use crate::{assert_none, files, read, words};

/// What the core may use beside the standard library; the others use whatever is not a crate of
/// this workspace.
const OF_CORE: [&str; 7] =
    ["async-trait", "derive-where", "jiff", "once_cell", "serde", "thiserror", "tokio"];

/// What only tests need. A published crate's dependencies of every target and `cfg` are in the lock
/// files of its users, and its dev-dependencies are not.
const FOR_TESTS: [&str; 4] = ["loom", "proptest", "tempfile", "log"];

/// What a crate takes from the workspace, so that it is said once; a version of its own is found as
/// any other.
const INHERITED: [&str; 5] = ["edition.", "rust-version.", "license.", "repository.", "[lints]\n"];

/// The dependencies of a manifest for all targets, tests apart.
fn dependencies(manifest: &Table) -> impl Iterator<Item = &str> {
    let targets = manifest.get("target").and_then(Value::as_table);
    let targets = targets.into_iter().flat_map(Table::values).filter_map(Value::as_table);
    let tables = std::iter::once(manifest).chain(targets).flat_map(|table| {
        ["dependencies", "build-dependencies"].map(|kind| table.get(kind).and_then(Value::as_table))
    });
    tables.flatten().flat_map(Table::keys).map(String::as_str)
}

/// The arrows between the crates: each row of the table in `ARCHITECTURE.md` names a crate, and
/// then those that it knows.
fn arrows() -> Vec<(String, String)> {
    let text = read("ARCHITECTURE.md");
    let rows = text.lines().filter_map(|line| line.strip_prefix("| `")?.split_once('`'));
    let knows = |row: &str| row.split('|').nth(1).unwrap_or_default().to_owned();
    rows.map(|(name, row)| (name.to_owned(), knows(row))).collect()
}

fn wrong(text: &str, arrows: &[(String, String)]) -> Vec<String> {
    let manifest: Table = text.parse().expect("a manifest is TOML");
    let package = &manifest["package"];
    let name = package["name"].as_str().unwrap_or_default();
    let Some((_, known)) = arrows.iter().find(|(row, _)| row == name) else {
        return vec![format!("{name}: give it a row in ARCHITECTURE.md")];
    };
    let mut found = Vec::new();
    for used in dependencies(&manifest) {
        let is_ours = arrows.iter().any(|(row, _)| row == used);
        let short = used.trim_start_matches("ratelimit-");
        let is_known =
            if is_ours { words(known).any(|w| w == short) } else { OF_CORE.contains(&used) };
        if (is_ours || name == "ratelimit-core") && !is_known {
            found.push(format!("{name} depends on {used}, which is none of its arrows"));
        }
        let is_published = package.get("publish").is_none() && name != "ratelimit-testkit";
        if is_published && FOR_TESTS.contains(&used) {
            found.push(format!("{name}: {used} is for tests: make it a dev-dependency"));
        }
    }
    let inherited = INHERITED.map(|key| format!("{key}workspace = true"));
    for line in inherited.iter().filter(|line| !text.contains(*line)) {
        found.push(format!("{name}: write {line}"));
    }
    // No other text begins with a digit.
    if text.split("= \"").skip(1).any(|value| value.starts_with(|c: char| c.is_ascii_digit())) {
        found.push(format!("{name}: put versions into the workspace's Cargo.toml"));
    }
    found
}

#[test]
fn every_crate_has_its_arrows_and_inherits_the_rest() {
    let manifests = files("", &["toml"]);
    let crates: Vec<_> = manifests.iter().filter(|f| f.path.ends_with("/Cargo.toml")).collect();
    assert_eq!(crates.len(), arrows().len(), "the crates of the workspace");
    assert_none(crates.into_iter().flat_map(|file| wrong(&file.text, &arrows())));
}

#[test]
fn each_rule_finds_what_breaks_it() {
    let good = read("ratelimit-memory/Cargo.toml");
    let count = |from: &str, to: &str| wrong(&good.replace(from, to), &arrows()).len();
    assert_eq!(count("hashbrown", "ratelimit-redis"), 1);
    assert_eq!(count("hashbrown", "loom"), 1);
    assert_eq!(count("quanta", "loom"), 1, "of some targets");
    assert_eq!(count("ratelimit-memory", "ratelimit-new"), 1);
    assert_eq!(count("version.workspace = true", "version = \"0.1.0\""), 2, "also of Rust");
    assert_eq!(count("edition.workspace = true", "edition = \"2024\""), 2);
    assert_eq!(count("hashbrown.workspace = true", "hashbrown = \"0.17\""), 1);
}
