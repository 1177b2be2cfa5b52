//! The book as a whole: `SUMMARY.md` names every chapter, and none is long. The tests of `tidy` try its links and snippets.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use crate::{chapter, chapters};

/// A longer chapter is split.
const MAX_LINES: usize = 260;

/// The files of a kind in a folder and below, by their paths from it.
pub(crate) fn files(folder: &Path, kind: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![folder.to_path_buf()];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).expect("a folder") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == kind) {
                let path = path.strip_prefix(folder).expect("below the folder");
                found.push(path.to_str().expect("UTF-8").replace('\\', "/"));
            }
        }
    }
    found.sort();
    found
}

#[test]
fn the_summary_names_every_chapter_once() {
    let summary = chapter("SUMMARY.md");
    let named = summary.split("](").skip(1).filter_map(|rest| rest.split(')').next());
    let named: Vec<_> = named.map(str::to_owned).collect();
    let distinct: BTreeSet<_> = named.iter().cloned().collect();
    assert_eq!(named.len(), distinct.len(), "a chapter is named twice");
    let mut there: BTreeSet<_> = files(&chapters(), "md").into_iter().collect();
    assert!(there.remove("SUMMARY.md"));
    assert_eq!(distinct, there);
}

#[test]
fn no_chapter_is_long() {
    let of_ours = files(&chapters(), "md");
    let long = of_ours.iter().filter(|path| chapter(path).lines().count() > MAX_LINES);
    assert_eq!(long.collect::<Vec<_>>(), Vec::<&String>::new());
}
