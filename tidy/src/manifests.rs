//! Rules about every crate's `Cargo.toml`.

use toml::{Table, Value};

use crate::{File, assert_none, files};

/// What a crate takes from the workspace, so that it is said once.
const INHERITED: [&str; 5] = ["version", "edition", "rust-version", "license", "repository"];

fn inherits(value: Option<&Value>) -> bool {
    let inherited = |value: &Value| value.get("workspace").and_then(Value::as_bool);
    value.and_then(inherited) == Some(true)
}

/// Every table of dependencies of a manifest: those of all kinds, and of all targets.
fn dependency_tables(manifest: &Table) -> Vec<&Table> {
    let identifier_names = ["dependencies", "dev-dependencies", "build-dependencies"];
    let targets = manifest.get("target").and_then(Value::as_table);
    let targets = targets.into_iter().flat_map(Table::values).filter_map(Value::as_table);
    let all = std::iter::once(manifest).chain(targets);
    all.flat_map(|table| identifier_names.iter().filter_map(|kind| table.get(*kind)?.as_table()))
        .collect()
}

fn unlike_the_others(file: &File) -> Vec<String> {
    let path = &file.path;
    let manifest: Table = match file.text.parse() {
        Ok(manifest) => manifest,
        Err(error) => return vec![format!("{path}: {error}")],
    };
    let mut found = Vec::new();
    if !inherits(manifest.get("lints")) {
        found.push(format!("{path}: write [lints] workspace = true"));
    }
    for key in INHERITED {
        if !inherits(manifest.get("package").and_then(|package| package.get(key))) {
            found.push(format!("{path}: write {key}.workspace = true"));
        }
    }
    for (name, dependency) in dependency_tables(&manifest).into_iter().flatten() {
        // A crate may name itself, to have more of its features in its tests.
        let itself = dependency.get("path").and_then(Value::as_str) == Some(".");
        if !itself && !inherits(Some(dependency)) {
            found.push(format!(
                "{path}: {name}: put its version into the workspace's Cargo.toml and write \
                 {name}.workspace = true"
            ));
        }
    }
    found
}

#[test]
fn every_crate_inherits_from_the_workspace() {
    let manifests = files("", &["toml"]);
    let crates = manifests.iter().filter(|file| file.path.ends_with("/Cargo.toml"));
    let crates: Vec<_> = crates.collect();
    assert!(crates.len() >= 7, "the workspace has seven crates");
    assert_none(crates.into_iter().flat_map(unlike_the_others));
}

#[test]
fn each_rule_finds_what_breaks_it() {
    let package: String = INHERITED.map(|key| format!("{key}.workspace = true\n")).concat();
    let good = format!(
        "[package]\n{package}[dependencies]\na.workspace = true\n[lints]\nworkspace = true\n"
    );
    let count = |text: &str| unlike_the_others(&File::new("a/Cargo.toml", text)).len();
    assert_eq!(count(&good), 0);
    assert_eq!(count(&good.replace("[lints]", "[other]")), 1);
    assert_eq!(count(&good.replace("edition.workspace = true", "edition = \"2024\"")), 1);
    assert_eq!(count(&good.replace("a.workspace = true", "a = \"1\"")), 1);
    let of_a_target = "[target.'cfg(unix)'.dev-dependencies]\nb = { version = \"1\" }\n";
    assert_eq!(count(&format!("{good}{of_a_target}")), 1);
}
