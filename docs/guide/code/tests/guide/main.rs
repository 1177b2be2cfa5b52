//! The guide, tested: its scripts do on Redis what it says of them, and its drawings are those that
//! the program writes. Its snippets are parts of these tests and of the examples.

#![allow(clippy::expect_used, clippy::unwrap_used, clippy::panic)]

mod clocks;
mod cookbook;
mod images;
mod keys;
mod moving;
mod on_redis;
mod pages;
mod policies;
mod scripts;

use std::path::PathBuf;

/// What a snippet can end with.
type Error = Box<dyn std::error::Error>;

/// The folder of the chapters.
fn chapters() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../src")
}

/// The text of a chapter.
fn chapter(path: &str) -> String {
    let path = chapters().join(path);
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The blocks of a language in a document.
fn blocks(document: &str, language: &str) -> Vec<String> {
    let (begin, end) = (format!("\n```{language}\n"), "\n```");
    let blocks = document.split(&begin).skip(1).filter_map(|rest| rest.split(end).next());
    blocks.map(|block| format!("{block}\n")).collect()
}
