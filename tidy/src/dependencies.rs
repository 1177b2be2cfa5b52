//! Rules about what the crates depend on, as cargo resolves it.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use serde_json::Value;

use crate::{assert_none, root};

/// The arrows between the crates: what each may depend on, tests apart. The core may use nothing but
/// what is named here; the others whatever is not a crate of this workspace.
const ARROWS: [(&str, &[&str]); 10] = [
    ("ratelimit-core", &["async-trait", "serde", "tokio"]),
    ("ratelimit-memory", &["ratelimit-core"]),
    ("ratelimit-redis", &["ratelimit-core"]),
    ("ratelimit-layers", &["ratelimit-core", "ratelimit-memory"]),
    ("ratelimit-testkit", &["ratelimit-core", "ratelimit-memory", "ratelimit-redis"]),
    ("ratelimit-cli", &["ratelimit-core", "ratelimit-memory", "ratelimit-redis"]),
    ("ratelimit-tower", &["ratelimit-core", "ratelimit-layers"]),
    (
        "benches",
        &[
            "ratelimit-core",
            "ratelimit-layers",
            "ratelimit-memory",
            "ratelimit-redis",
            "ratelimit-testkit",
            "ratelimit-tower",
        ],
    ),
    ("tidy", &[]),
    ("guide", &["ratelimit-core", "ratelimit-memory"]),
];

/// What only tests need. A published crate's dependencies of every target and `cfg` are in the lock files of its
/// users, and its dev-dependencies are not.
const FOR_TESTS_ALONE: [&str; 5] = ["loom", "proptest", "stateright", "tempfile", "log"];
/// The crates that are themselves for tests.
const FOR_TESTS: [&str; 3] = ["ratelimit-testkit", "benches", "tidy"];

/// All packages that a build on this machine can need, tests included.
fn packages() -> Vec<Value> {
    let output = |command: &mut Command| {
        let output = command.current_dir(root()).output().expect("cargo and rustc run");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).expect("UTF-8")
    };
    let rustc = output(Command::new("rustc").arg("-vV"));
    let host = rustc.lines().find_map(|line| line.strip_prefix("host: ")).expect("a host");
    // Only this machine's, so that nothing has to be downloaded that the build has not.
    let metadata = output(Command::new(env!("CARGO")).args([
        "metadata",
        "--locked",
        "--format-version=1",
        "--filter-platform",
        host,
    ]));
    let mut metadata: Value = serde_json::from_str(&metadata).expect("cargo writes JSON");
    serde_json::from_value(metadata["packages"].take()).expect("a list of packages")
}

fn text<'a>(value: &'a Value, key: &str) -> &'a str {
    value[key].as_str().unwrap_or_default()
}

/// `1.88` or `1.88.0` as numbers that compare.
fn version(text: &str) -> Vec<u64> {
    let mut parts: Vec<u64> = text.split('.').map(|part| part.parse().unwrap_or(0)).collect();
    parts.resize(3, 0);
    parts
}

/// Whether one of the choices of this licence expression asks for nothing that is not accepted.
fn accepted(licence: &str, accept: &BTreeSet<&str>) -> bool {
    let licence = licence.replace('/', " OR ");
    // `(A OR B) AND C`, the one form with brackets that is in use.
    if let Some((choices, rest)) = licence.strip_prefix('(').and_then(|l| l.split_once(") AND ")) {
        return accepted(choices, accept) && accepted(rest, accept);
    }
    let all = |choice: &str| choice.split(" AND ").all(|licence| accept.contains(licence.trim()));
    licence.split(" OR ").any(all)
}

fn too_new(packages: &[Value], ours: &str) -> Vec<String> {
    let newer = |package: &&Value| version(text(package, "rust_version")) > version(ours);
    let found = packages.iter().filter(newer).map(|package| {
        format!(
            "{} {} needs Rust {}, above the workspace's {ours}: take an older one (cargo update -p {0} \
             --precise …) or raise rust-version",
            text(package, "name"),
            text(package, "version"),
            text(package, "rust_version"),
        )
    });
    found.collect()
}

fn wrong_arrows(package: &Value) -> Vec<String> {
    let name = text(package, "name");
    let Some((_, allowed)) = ARROWS.iter().find(|(known, _)| *known == name) else {
        return vec![format!("{name}: give it a place among the ARROWS of this test")];
    };
    let dependencies = package["dependencies"].as_array().expect("a list of dependencies");
    let used = dependencies.iter().filter(|used| used["kind"].is_null()).map(|d| text(d, "name"));
    let ours = |used: &str| ARROWS.iter().any(|(known, _)| *known == used);
    let watched = used.filter(|used| name == "ratelimit-core" || ours(used));
    let wrong = watched.filter(|used| !allowed.contains(used));
    wrong.map(|used| format!("{name} depends on {used}, which is none of its arrows")).collect()
}

fn in_lock_files_of_users(package: &Value) -> Vec<String> {
    let name = text(package, "name");
    if FOR_TESTS.contains(&name) {
        return Vec::new();
    }
    let dependencies = package["dependencies"].as_array().expect("a list of dependencies");
    let for_users = dependencies.iter().filter(|used| used["kind"] != "dev");
    let wrong = for_users.filter(|used| FOR_TESTS_ALONE.contains(&text(used, "name")));
    let told =
        |used| format!("{name}: {} is for tests: make it a dev-dependency", text(used, "name"));
    wrong.map(told).collect()
}

#[test]
fn no_dependency_needs_a_newer_rust_than_we_state() {
    assert_none(too_new(&packages(), env!("CARGO_PKG_RUST_VERSION")));
}

#[test]
fn every_licence_is_one_that_deny_toml_accepts() {
    let deny = fs::read_to_string(root().join("deny.toml")).expect("deny.toml");
    let deny: toml::Table = deny.parse().expect("deny.toml is TOML");
    let allow = deny["licenses"]["allow"].as_array().expect("licenses.allow");
    let allow: BTreeSet<&str> = allow.iter().filter_map(toml::Value::as_str).collect();
    let packages = packages();
    let refused = packages.iter().filter(|package| !accepted(text(package, "license"), &allow));
    let told = |package: &Value| {
        format!("{}: {:?} is not in deny.toml", text(package, "name"), text(package, "license"))
    };
    assert_none(refused.map(told));
}

#[test]
fn the_arrows_between_the_crates_point_one_way() {
    let packages = packages();
    let ours: Vec<_> = packages.iter().filter(|package| package["source"].is_null()).collect();
    assert_eq!(ours.len(), ARROWS.len(), "the crates of the workspace");
    assert_none(ours.into_iter().flat_map(wrong_arrows));
}

#[test]
fn users_get_nothing_that_only_tests_need() {
    let packages = packages();
    let ours = packages.iter().filter(|package| package["source"].is_null());
    assert_none(ours.flat_map(in_lock_files_of_users));
}

#[test]
fn each_rule_finds_what_breaks_it() {
    let package = |rust: &str| serde_json::json!({"name": "a", "rust_version": rust});
    assert_eq!(too_new(&[package("1.89")], "1.88").len(), 1);
    assert_eq!(too_new(&[package("1.88.1")], "1.88").len(), 1);
    assert_eq!(too_new(&[package("1.88.0"), package("1.9"), package("")], "1.88").len(), 0);

    let accept = BTreeSet::from(["MIT", "Unicode-3.0"]);
    for licence in ["MIT", "GPL-3.0 OR MIT", "MIT/Apache-2.0", "(MIT OR BSD) AND Unicode-3.0"] {
        assert!(accepted(licence, &accept), "{licence}");
    }
    for licence in ["", "GPL-3.0", "MIT AND GPL-3.0", "(MIT OR BSD) AND GPL-3.0"] {
        assert!(!accepted(licence, &accept), "{licence}");
    }

    let crate_with = |name: &str, used: &str, kind: Option<&str>| {
        let dependencies = serde_json::json!([{"name": used, "kind": kind}]);
        wrong_arrows(&serde_json::json!({"name": name, "dependencies": dependencies})).len()
    };
    assert_eq!(crate_with("ratelimit-core", "regex", None), 1);
    assert_eq!(crate_with("ratelimit-core", "toml", Some("dev")), 0);
    assert_eq!(crate_with("ratelimit-memory", "ratelimit-redis", None), 1);
    assert_eq!(crate_with("ratelimit-memory", "hashbrown", None), 0);
    assert_eq!(crate_with("ratelimit-new", "hashbrown", None), 1);

    let of_users = |name: &str, kind: Option<&str>| {
        let loom = serde_json::json!({"name": "loom", "kind": kind, "target": "cfg(loom)"});
        in_lock_files_of_users(&serde_json::json!({"name": name, "dependencies": [loom]})).len()
    };
    assert_eq!(of_users("ratelimit-memory", None), 1);
    assert_eq!(of_users("ratelimit-memory", Some("dev")), 0);
    assert_eq!(of_users("ratelimit-testkit", None), 0);
}
