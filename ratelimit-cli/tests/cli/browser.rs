//! The report as a headless Chromium shows it: the one that `RATELIMIT_CHROMIUM` names, or one on
//! `PATH`. Without one, the tests say that they are skipped; `scripts/test` installs one.
//!
//! `RATELIMIT_PICTURES=docs/guide/src cargo test --test cli pictures` makes the pictures of the
//! README anew: the head of the report, light and dark.

use std::process::Command;

use serde_json::{Value, json};

use crate::common::{Scene, example, limit, workspace};
use ratelimit_servers::chromium::{self, Chromium};

/// What is wrong with the page: what scrolls sideways, unless it is folded away, and what someone
/// lacks who does not see it.
const WRONG: &str = r#"(() => {
  const wrong = [...document.querySelectorAll("html, .scroll:not(details *), figure, section")]
    .filter(e => e.scrollWidth > e.clientWidth).map(e => "scrolls: " + e.tagName + " " + e.ariaLabel);
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

/// The events of a page that has a mistake.
const ERRORS: [&str; 3] = ["Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"];

#[test]
fn the_report_fits_and_asks_for_nothing_light_and_dark_wide_and_narrow() {
    let Some(program) = chromium::find_browser() else { return };
    let (policy, log) = example();
    let scene =
        Scene::new(&(policy.clone() + &limit("stricter", "ip", "gcra 1/s", "shadow = true")));
    scene.write("other.toml", policy.replace("650/d", "300/d").replace("= 30", "= 60"));
    scene.replay(&["--report", "out.html", "--compare", "other.toml", &log]).exits(0);

    let url = format!("file://{}", scene.path("out.html").display());
    Chromium::start(&program).open_each_way(&url, |browser, shown| {
        assert_eq!(browser.evaluate(WRONG), json!([]), "{shown}");
        let bars = browser.evaluate("document.querySelectorAll('rect').length");
        assert!(bars.as_u64() > Some(50), "{shown}: {bars} bars");
        let asked_or_told = browser.events.iter().filter(|event| {
            let asked = event["params"]["request"]["url"].as_str().unwrap_or_default();
            match event["method"].as_str().unwrap_or_default() {
                "Network.requestWillBeSent" => asked != url && !asked.starts_with("data:"),
                method => ERRORS.contains(&method),
            }
        });
        assert_eq!(asked_or_told.collect::<Vec<_>>(), Vec::<&Value>::new(), "{shown}");
        true
    });
}

#[test]
fn the_pictures_of_the_report_are_small() {
    let Some(program) = chromium::find_browser() else { return };
    let (policy, log) = example();
    let scene = Scene::new(&policy);
    scene.write("access.log", std::fs::read(log).expect("reads"));
    scene.replay(&["--report", "out.html", "access.log"]).exits(0);
    let folder = std::env::var_os("RATELIMIT_PICTURES").map(|name| workspace("").join(name));
    let folder = folder.unwrap_or_else(|| scene.path(""));
    let pictures = [("report.png", "1"), ("report-dark.png", "0")].map(|(name, scheme)| {
        let made = Command::new(&program)
            .args(["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"])
            .arg(format!("--blink-settings=preferredColorScheme={scheme}"))
            .arg("--window-size=960,730")
            .arg(format!("--screenshot={}", folder.join(name).display()))
            .arg(format!("file://{}", scene.path("out.html").display()))
            .output();
        assert!(made.expect("chromium runs").status.success(), "{name}");
        let picture = std::fs::read(folder.join(name)).expect("a picture");
        assert!((10_000..150_000).contains(&picture.len()), "{name}: {} bytes", picture.len());
        picture
    });
    assert_ne!(pictures[0], pictures[1], "one is light and one dark");
}
