//! The report as a headless Chromium shows it: the one that `RATELIMIT_CHROMIUM` names, or one on `PATH`. Without one,
//! the tests say that they are skipped; `scripts/test` installs one.
//!
//! `RATELIMIT_PICTURE=docs/guide/src/report.png cargo test --test report_in_browser` makes the picture of the README anew.
#![allow(missing_docs, clippy::expect_used)]

#[path = "../common/mod.rs"]
mod common;

mod chromium;

use std::io::Write as _;
use std::path::PathBuf;
use std::process::Command;

use chromium::Chromium;
use common::{Scene, example, workspace};
use serde_json::{Value, json};

/// What is wrong with the page for someone who does not see it.
const INACCESSIBLE: &str = r#"(() => {
  const wrong = [];
  for (const svg of document.querySelectorAll("figure svg:not([aria-hidden])")) {
    if (!svg.getAttribute("aria-label")) wrong.push("a chart without a name");
    const beside = svg.closest("figure").nextElementSibling;
    if (!beside || !beside.querySelector("table")) wrong.push("a chart without a table");
  }
  for (const th of document.querySelectorAll("th")) if (!th.scope) wrong.push("a header cell without a scope");
  for (const table of document.querySelectorAll("table")) if (!table.caption) wrong.push("a table without a caption");
  let last = 0;
  for (const heading of document.querySelectorAll("h1, h2, h3, h4")) {
    const level = Number(heading.tagName[1]);
    if (level > last + 1) wrong.push("a heading that skips a level: " + heading.textContent);
    last = level;
  }
  if (!document.documentElement.lang || !document.title) wrong.push("no language or no title");
  return wrong;
})()"#;

/// The browser, or a line on standard error that the test is skipped.
fn browser() -> Option<PathBuf> {
    let browser = chromium::installed();
    if browser.is_none() {
        // A test that passes shows nothing that is printed by a macro.
        let skipped =
            "skipped: no chromium here to look at the report (set RATELIMIT_CHROMIUM to one)";
        writeln!(std::io::stderr(), "{skipped}").expect("writes");
    }
    browser
}

#[test]
fn the_report_fits_and_asks_for_nothing_light_and_dark_wide_and_narrow() {
    let Some(program) = browser() else { return };
    let (policy, log) = example();
    let shadow = "\n[[limit]]\nname = \"stricter\"\nkey = [\"ip\"]\nalgorithm = \"gcra\"\nrate = \"1/s\"\nshadow = true\n";
    let scene = Scene::new(&(policy.clone() + shadow));
    scene.write("other.toml", policy.replace("650/d", "300/d").replace("= 30", "= 60"));
    scene.replay(&["--report", "out.html", "--compare", "other.toml", &log]).exits(0);

    let url = format!("file://{}", scene.path("out.html").display());
    let mut browser = Chromium::start(&program);
    for (scheme, width) in [("light", 360), ("light", 1_280), ("dark", 360), ("dark", 1_280)] {
        let shown = format!("{scheme}, {width} px");
        browser.open(&url, width, scheme);
        let size = browser.evaluate(
            "[document.documentElement.scrollWidth, innerWidth, document.querySelectorAll('rect').length]",
        );
        let [scrolled, inner, bars] = [0, 1, 2].map(|n| size[n].as_u64().expect("a number"));
        assert_eq!(inner, width, "{shown}");
        assert!(scrolled <= inner, "{shown}: the page scrolls sideways, {scrolled} px");
        assert!(bars > 50, "{shown}: {bars} bars");
        // Nor does a part of it that is not folded away.
        let cut = "[...document.querySelectorAll('.scroll:not(details *), figure, section')]\
                   .filter(e => e.scrollWidth > e.clientWidth).map(e => e.ariaLabel)";
        assert_eq!(browser.evaluate(cut), json!([]), "{shown}");
        assert_eq!(browser.evaluate(INACCESSIBLE), json!([]), "{shown}");

        let of = |method: &'static str| {
            browser.events.iter().filter(move |event| event["method"] == method)
        };
        let asked = of("Network.requestWillBeSent").map(|event| &event["params"]["request"]["url"]);
        let is_foreign = |asked: &&Value| {
            **asked != *url && !asked.as_str().is_some_and(|asked| asked.starts_with("data:"))
        };
        let asked: Vec<&Value> = asked.filter(is_foreign).collect();
        assert!(asked.is_empty(), "{shown}: the page asks for {asked:?}");
        let told = ["Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"];
        let errors: Vec<&Value> = told.into_iter().flat_map(of).collect();
        assert!(errors.is_empty(), "{shown}: {errors:?}");

        let [wide, colours, lightness] = browser.seen();
        assert_eq!(wide, width, "{shown}");
        assert!(colours > 20, "{shown}: blank, of {colours} colours");
        let as_wanted = if scheme == "dark" { lightness < 90 } else { lightness > 190 };
        assert!(as_wanted, "{shown}: a lightness of {lightness}");
    }
}

#[test]
fn the_picture_of_the_report_is_small() {
    let Some(program) = browser() else { return };
    let (policy, log) = example();
    let scene = Scene::new(&policy);
    scene.write("access.log", std::fs::read(log).expect("reads"));
    scene.replay(&["--report", "out.html", "access.log"]).exits(0);
    let picture = std::env::var_os("RATELIMIT_PICTURE").map(|name| workspace("").join(name));
    let picture = picture.unwrap_or_else(|| scene.path("report.png"));
    let made = Command::new(program)
        .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
        .args(["--blink-settings=preferredColorScheme=1", "--window-size=960,1066"])
        .arg(format!("--screenshot={}", picture.display()))
        .arg(format!("file://{}", scene.path("out.html").display()))
        .output();
    assert!(made.expect("chromium runs").status.success());
    let bytes = std::fs::metadata(picture).expect("a picture").len();
    assert!((10_000..150_000).contains(&bytes), "{bytes} bytes");
}
