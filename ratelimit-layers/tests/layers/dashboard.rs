//! The dashboard, asked as Prometheus would: `promtool`, the program that `RATELIMIT_PROMTOOL`
//! names or the one on `PATH`. Without one, the test says that it is skipped.

use std::env;
use std::fmt::Write as _;
use std::fs;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

/// The expressions of the panels, each with the panel's title and unit.
fn expressions() -> Vec<(String, String, String)> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("dashboard.json");
    let dashboard: Value =
        serde_json::from_str(&fs::read_to_string(path).expect("reads")).expect("JSON");
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut expressions = Vec::new();
    for panel in dashboard["panels"].as_array().expect("panels") {
        for target in panel["targets"].as_array().expect("targets") {
            let unit = &panel["fieldConfig"]["defaults"]["unit"];
            expressions.push((text(&panel["title"]), text(unit), text(&target["expr"])));
        }
    }
    expressions
}

/// A limit that has denied nothing yet, one that denies a quarter of its requests, and a shadow
/// limit that would.
const SERIES: &str = r#"
    input_series:
      - series: 'ratelimit_decisions_total{store="a",limit="quiet",outcome="allowed",source="store"}'
        values: '0+60x10'
      - series: 'ratelimit_decisions_total{store="a",limit="busy",outcome="allowed",source="store"}'
        values: '0+45x10'
      - series: 'ratelimit_decisions_total{store="a",limit="busy",outcome="denied",source="store"}'
        values: '0+15x10'
      - series: 'ratelimit_decisions_total{store="a",limit="tried",outcome="allowed",source="store"}'
        values: '0+45x10'
      - series: 'ratelimit_decisions_total{store="a",limit="tried",outcome="shadow-denied",source="store"}'
        values: '0+15x10'
"#;

#[test]
fn a_share_of_nothing_is_0_and_not_no_data() {
    let shares: Vec<_> =
        expressions().into_iter().filter(|(_, unit, _)| unit == "percentunit").collect();
    let [denied, fallback] = &shares[..] else { panic!("two shares: {shares:?}") };
    for (title, _, expression) in [denied, fallback] {
        let (part, whole) = expression.rsplit_once(" / ").expect("a share");
        assert!(part.ends_with(&format!(" or 0 * {whole})")), "{title}: {expression}");
    }

    let Some(promtool) = promtool() else { return };
    let (mut rules, mut tests) =
        ("groups:\n- name: dashboard\n  rules:\n".to_owned(), String::new());
    for (place, (title, _, expression)) in expressions().iter().enumerate() {
        // As Grafana fills in its variables.
        let expression = expression.replace("$__rate_interval", "5m");
        let expression = expression.replace("$store", ".*").replace("$limit", ".*");
        assert!(!expression.contains(['$', '\'']), "{expression}");
        writeln!(rules, "  - record: panel_{place}\n    expr: '{expression}'").expect("a text");
        let samples = match () {
            () if *title == denied.0 => {
                "\n      - {labels: '{limit=\"busy\"}', value: 0.25}\n      - {labels: '{limit=\"quiet\"}', value: 0}\n      - {labels: '{limit=\"tried\"}', value: 0.25}"
            }
            () if *title == fallback.0 => "\n      - {labels: '{}', value: 0}",
            () => continue,
        };
        writeln!(
            tests,
            "    - expr: '{expression}'\n      eval_time: 10m\n      exp_samples:{samples}"
        )
        .expect("a text");
    }
    let folder = TempDir::new().expect("a folder");
    let file = |name: &str| folder.path().join(name);
    fs::write(file("rules.yml"), rules).expect("writes");
    let tests = format!(
        "rule_files: [rules.yml]\nevaluation_interval: 1m\ntests:\n  - interval: 1m{SERIES}    promql_expr_test:\n{tests}"
    );
    fs::write(file("tests.yml"), tests).expect("writes");
    let told = Command::new(promtool)
        .args(["test", "rules"])
        .arg(file("tests.yml"))
        .output()
        .expect("runs");
    assert!(told.status.success(), "{}", String::from_utf8_lossy(&told.stderr));
}

/// The program that evaluates expressions of Prometheus. Without one, a line says that the test is
/// skipped.
fn promtool() -> Option<PathBuf> {
    let told = env::var_os("RATELIMIT_PROMTOOL").map(PathBuf::from);
    let path = env::var_os("PATH").unwrap_or_default();
    let mut places = env::split_paths(&path).map(|folder| folder.join("promtool"));
    let promtool = told.or_else(|| places.find(|place| place.is_file()));
    if promtool.is_none() {
        // A test that passes shows nothing that is printed by a macro.
        writeln!(io::stderr(), "skipped: no promtool here (set RATELIMIT_PROMTOOL to one)")
            .expect("writes");
    }
    promtool
}
