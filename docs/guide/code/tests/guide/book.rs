//! The book as a whole: `SUMMARY.md` names every chapter, links lead somewhere in the rendered book, and every snippet of
//! Rust is part of a program that runs.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use crate::{blocks, chapter, chapters};

/// Where the repository's files are on the web. A chapter cannot link to a file outside of the book by its path.
const REPOSITORY: &str = "https://github.com/ratelimit-rs/ratelimit/";

/// A chapter has no more lines than about two screens.
const MAX_LINES: usize = 120;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../..")
}

/// The documents in a folder and below, by their paths from it.
pub(crate) fn files(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "md") {
                let path = path.strip_prefix(folder).expect("below the folder");
                found.push(path.to_str().expect("UTF-8").replace('\\', "/"));
            }
        }
    }
    found.sort();
    found
}

/// A chapter as mdBook shows it: with what it includes.
fn shown(path: &str) -> String {
    let folder = chapters().join(path).parent().expect("a folder").to_path_buf();
    let mut text = String::new();
    for line in chapter(path).lines() {
        match line.strip_prefix("{{#include ").and_then(|rest| rest.strip_suffix("}}")) {
            Some(included) => {
                let included = folder.join(included);
                text += &fs::read_to_string(&included)
                    .unwrap_or_else(|error| panic!("{path}: {}: {error}", included.display()));
            }
            None => text.extend([line, "\n"]),
        }
    }
    text
}

/// The targets of links and images, outside of code.
fn links(text: &str) -> Vec<String> {
    let mut in_code = false;
    let mut found = Vec::new();
    for line in text.lines() {
        in_code ^= line.starts_with("```");
        if !in_code {
            let inline = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            let attributes = line.split("src=\"").skip(1).filter_map(|rest| rest.split('"').next());
            found.extend(inline.chain(attributes).map(str::to_owned));
        }
    }
    found
}

/// Whether a heading is known by this name, as mdBook and GitHub derive it.
fn has_anchor(text: &str, name: &str) -> bool {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    let anchor = |line: &str| {
        let text: String = line.trim_start_matches('#').trim().chars().filter(kept).collect();
        text.to_lowercase().replace(' ', "-")
    };
    text.lines().any(|line| line.starts_with('#') && anchor(line) == name)
}

/// What is wrong with a link of a chapter, if anything is.
fn fault(from: &str, target: &str) -> Option<String> {
    if let Some(path) = target.strip_prefix(REPOSITORY) {
        let path = path.strip_prefix("blob/main/").or(path.strip_prefix("tree/main/"))?;
        let (file, anchor) = path.split_once('#').unwrap_or((path, ""));
        let there = root().join(file);
        let text = fs::read_to_string(&there).unwrap_or_default();
        let holds = there.exists() && (anchor.is_empty() || has_anchor(&text, anchor));
        return (!holds).then(|| format!("{from}: {path} is not in the repository"));
    }
    if target.contains("://") {
        return None;
    }
    let (path, anchor) = target.split_once('#').unwrap_or((target, ""));
    let mut parts: Vec<&str> = from.split('/').collect();
    parts.pop();
    for part in path.split('/') {
        match part {
            ".." if parts.pop().is_none() => {
                return Some(format!(
                    "{from}: {target} leaves the book; write {REPOSITORY}blob/main/…"
                ));
            }
            ".." => {}
            part => parts.push(part),
        }
    }
    let there = if path.is_empty() { from.to_owned() } else { parts.join("/") };
    if !chapters().join(&there).is_file() {
        return Some(format!("{from}: {target} leads nowhere"));
    }
    let is_known = anchor.is_empty() || has_anchor(&shown(&there), anchor);
    (!is_known).then(|| format!("{from}: {there} has no heading {anchor}"))
}

/// Lines without the indentation that all of them have.
fn dedented(lines: &[&str]) -> Vec<String> {
    let full = lines.iter().filter(|line| !line.trim().is_empty());
    let common = full.map(|line| line.len() - line.trim_start().len()).min().unwrap_or(0);
    lines.iter().map(|line| line.get(common..).unwrap_or("").trim_end().to_owned()).collect()
}

fn is_part_of(snippet: &str, source: &str) -> bool {
    let wanted = dedented(&snippet.lines().collect::<Vec<_>>());
    let lines: Vec<&str> = source.lines().collect();
    !wanted.is_empty() && lines.windows(wanted.len()).any(|window| dedented(window) == wanted)
}

/// The programs that snippets are quoted from: examples, which `cargo test` runs, and the tests of this crate.
fn programs() -> Vec<String> {
    let crates = fs::read_dir(root()).expect("the workspace").flatten().map(|entry| entry.path());
    let examples = crates.map(|path| path.join("examples"));
    let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/guide");
    let folders = examples.chain([here]).filter_map(|folder| fs::read_dir(folder).ok());
    let files = folders.flat_map(|entries| entries.flatten().map(|entry| entry.path()));
    files
        .filter(|path| path.extension().is_some_and(|extension| extension == "rs"))
        .map(|path| fs::read_to_string(path).expect("a source"))
        .collect()
}

#[test]
fn the_summary_names_every_chapter_once() {
    let named = links(&chapter("SUMMARY.md"));
    let distinct: BTreeSet<_> = named.iter().cloned().collect();
    assert_eq!(named.len(), distinct.len(), "a chapter is named twice");
    let mut there: BTreeSet<_> = files(&chapters()).into_iter().collect();
    assert!(there.remove("SUMMARY.md"));
    assert_eq!(distinct, there);
}

#[test]
fn every_link_leads_somewhere_in_the_book() {
    let faults = files(&chapters()).into_iter().flat_map(|path| {
        let links = links(&shown(&path));
        links.into_iter().filter_map(move |link| fault(&path, &link)).collect::<Vec<_>>()
    });
    assert_eq!(faults.collect::<Vec<_>>(), Vec::<String>::new());
}

#[test]
fn every_snippet_is_part_of_a_program_that_runs() {
    let programs = programs();
    let mut found = Vec::new();
    for path in files(&chapters()) {
        for snippet in blocks(&chapter(&path), "rust") {
            if !programs.iter().any(|program| is_part_of(&snippet, program)) {
                found.push(format!("{path}: no example or test has these lines:\n{snippet}"));
            }
        }
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
fn a_chapter_is_at_most_two_screens() {
    let of_ours = files(&chapters());
    let long = of_ours.iter().filter(|path| chapter(path).lines().count() > MAX_LINES);
    assert_eq!(long.collect::<Vec<_>>(), Vec::<&String>::new());
}

#[test]
fn each_rule_finds_what_breaks_it() {
    assert!(fault("keys.md", "clocks.md").is_none());
    assert!(fault("scripts/list.md", "../keys.md").is_none());
    assert!(fault("keys.md", "reference/policies.md#documents").is_none());
    assert!(fault("keys.md", "reference/policies.md#nothing").is_some());
    assert!(fault("keys.md", "nowhere.md").is_some());
    assert!(fault("keys.md", "../../policies.md").is_some());
    assert!(fault("keys.md", &format!("{REPOSITORY}blob/main/README.md")).is_none());
    assert!(fault("keys.md", &format!("{REPOSITORY}blob/main/NOTHING.md")).is_some());
    assert_eq!(links("[a](b.md) ![c](d.svg)\n```\n[e](f.md)\n```\n"), ["b.md", "d.svg"]);
    assert!(is_part_of("a();\nb();\n", "fn f() {\n    a();\n    b();\n}\n"));
    assert!(!is_part_of("a();\nb();\n", "fn f() {\n    a();\n\n    b();\n}\n"));
    assert!(!is_part_of("", "fn f() {}\n"));
}
