//! The guide as a headless Chromium shows it, if there is one: nothing overflows, light and dark,
//! wide and narrow. The pages are those that mdBook writes, if it is installed, and otherwise the
//! same chapters in a plain page of the same width.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use pulldown_cmark::{Options, Parser, html};
use serde_json::json;
use walkdir::WalkDir;

use crate::{Error, chapter, chapters};
use ratelimit_servers::chromium::{self, Chromium};

/// Tables and programs scroll in their boxes, as in mdBook.
const PLAIN: &str = "<!doctype html><meta charset=utf-8><style>
    :root { color-scheme: light dark; font: 16px sans-serif }
    main { max-width: 880px; margin: auto; padding: 0 15px; overflow-wrap: anywhere }
    pre, table { display: block; overflow-x: auto }
    img { max-width: 100% }
    </style><main>";

/// What overflows the page, and pictures that it lacks. Tables and programs may be wider than their
/// boxes.
const WRONG: &str = "[...document.querySelectorAll('html, main, main *')]
    .filter(e => e.clientWidth && e.scrollWidth > e.clientWidth + 1 && !e.closest('pre, table, .table-wrapper'))
    .concat([...document.images].filter(e => !e.complete || !e.naturalWidth))
    .map(e => e.tagName + ': ' + (e.currentSrc || e.textContent.slice(0, 80)))";

/// The files of a kind in a folder and below, by their paths from it.
fn files(folder: &Path, kind: &str) -> Vec<String> {
    let all = WalkDir::new(folder).into_iter().map(|entry| entry.expect("an entry").into_path());
    let of_kind = all.filter(|path| path.extension().is_some_and(|extension| extension == kind));
    let below = of_kind.map(|path| path.strip_prefix(folder).expect("below").to_path_buf());
    below.map(|path| path.to_str().expect("UTF-8").replace('\\', "/")).collect()
}

/// Writes the pages of all chapters to this folder.
fn build(folder: &Path) -> Result<(), Error> {
    let book = chapters().join("..").canonicalize()?;
    let mut mdbook = Command::new("mdbook");
    mdbook.args(["build", "--dest-dir"]).args([folder, &book]).stderr(Stdio::null());
    if mdbook.status().is_ok_and(|status| status.success()) {
        return Ok(());
    }
    for path in files(&chapters(), "md") {
        let base = book.join("src").join(&path);
        let mut page = format!("{PLAIN}<base href='file://{}'>", base.display());
        html::push_html(&mut page, Parser::new_ext(&chapter(&path), Options::ENABLE_TABLES));
        fs::write(folder.join(path.replace('/', "-")).with_extension("html"), page)?;
    }
    Ok(())
}

#[test]
fn no_page_overflows_light_and_dark_wide_and_narrow() -> Result<(), Error> {
    let Some(program) = chromium::find_browser() else { return Ok(()) };
    let folder = tempfile::tempdir()?;
    build(folder.path())?;
    let mut pages = files(folder.path(), "html");
    pages.retain(|page| !["404.html", "print.html", "toc.html"].contains(&page.as_str()));
    assert!(pages.len() >= files(&chapters(), "md").len(), "{pages:?}");
    let mut browser = Chromium::start(&program);
    for page in pages {
        let url = format!("file://{}", folder.path().join(&page).display());
        browser.open_each_way(&url, |browser, shown| {
            assert_eq!(browser.evaluate(WRONG), json!([]), "{shown}");
            let failed = browser.events.iter().find(|event| {
                event["method"] == "Network.loadingFailed" && event["params"]["canceled"] != true
            });
            assert_eq!(failed, None, "{shown}");
            browser.evaluate("document.images.length > 0") == true
        });
    }
    Ok(())
}
