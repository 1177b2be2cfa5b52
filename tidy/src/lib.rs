//! What holds for the workspace as a whole and no other tool checks: the architecture's arrows,
//! what documents quote and link to, and what crates inherit. Every rule is tried on a text that
//! breaks it, too.

#![cfg(test)]
#![allow(clippy::expect_used, clippy::panic)]

mod crates;
mod documents;
mod layers;
mod sources;

use std::fs;
use std::path::{Path, PathBuf};

use walkdir::{DirEntry, WalkDir};

/// The workspace's folder.
fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().expect("the workspace")
}

/// The text of a file of the workspace; an empty one if it is not there.
fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_default()
}

/// A file of the workspace.
struct File {
    /// Its path from the root, with forward slashes.
    path: String,
    text: String,
}

impl File {
    fn new(path: &str, text: &str) -> Self {
        Self { path: path.to_owned(), text: text.to_owned() }
    }

    /// The lines of code, counted from 1: no comments, and nothing from `mod tests` on, which
    /// stands last.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let code = (1..).zip(self.text.lines());
        let code = code.take_while(|(_, line)| !line.starts_with("mod tests"));
        code.map(|(number, line)| (number, line.split("//").next().unwrap_or_default()))
    }
}

/// The identifiers and keywords of a line.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

/// The text files in a folder of the workspace and below that have one of these extensions; build
/// results and hidden folders are left out.
fn files(folder: &str, extensions: &[&str]) -> Vec<File> {
    let root = root();
    let is_source = |entry: &DirEntry| {
        let name = entry.file_name().to_string_lossy();
        let is_build = name == "target" || entry.path().join("CACHEDIR.TAG").exists();
        entry.depth() == 0 || !(is_build || name.starts_with('.'))
    };
    let walk = WalkDir::new(root.join(folder)).sort_by_file_name().into_iter();
    let paths = walk.filter_entry(is_source).map(|entry| entry.expect("an entry").into_path());
    let is_wanted = |path: &PathBuf| {
        let extension = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
        path.is_file() && extensions.contains(&extension)
    };
    let file = |path: PathBuf| {
        let below = path.strip_prefix(&root).expect("below the root").to_string_lossy();
        File::new(&below.replace('\\', "/"), &fs::read_to_string(&path).expect("a text file"))
    };
    paths.filter(is_wanted).map(file).collect()
}

/// Fails with everything that was found, a line each.
#[track_caller]
fn assert_none(found: impl IntoIterator<Item = String>) {
    let found: Vec<_> = found.into_iter().collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}
