//! What holds for the workspace as a whole: the architecture's arrows, the style that a compiler
//! cannot see, what dependencies ask for. Every rule is tried on a text that breaks it, too.

#![cfg(test)]
#![allow(clippy::expect_used, clippy::panic)]

mod dependencies;
mod documents;
mod layers;
mod manifests;
mod redis_layers;
mod sources;

use std::fs;
use std::path::{Path, PathBuf};

/// The workspace's folder.
fn root() -> PathBuf {
    let here = Path::new(env!("CARGO_MANIFEST_DIR"));
    here.parent().expect("tidy lies in the workspace").to_path_buf()
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

    /// The name without folder and extension.
    fn stem(&self) -> &str {
        let name = self.path.rsplit('/').next().unwrap_or_default();
        name.split('.').next().unwrap_or_default()
    }

    /// The lines, counted from 1.
    fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        (1..).zip(self.text.lines())
    }

    /// The lines of code: no comments, and nothing from `mod tests` on, which stands last.
    fn code(&self) -> impl Iterator<Item = (usize, &str)> {
        let code = self.lines().take_while(|(_, line)| !line.starts_with("mod tests"));
        code.map(|(number, line)| (number, line.split("//").next().unwrap_or_default()))
    }
}

/// The identifiers and keywords of a line.
fn words(line: &str) -> impl Iterator<Item = &str> {
    line.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

/// The text files in a folder of the workspace and below that have one of these extensions; build
/// results and hidden folders are left out. A folder that is not there has none.
fn files(folder: &str, extensions: &[&str]) -> Vec<File> {
    let root = root();
    let mut found = Vec::new();
    let mut folders = vec![root.join(folder)];
    while let Some(folder) = folders.pop() {
        let Ok(entries) = fs::read_dir(&folder) else { continue };
        for entry in entries {
            let path = entry.expect("a folder's entry").path();
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let extension = path.extension().and_then(|end| end.to_str()).unwrap_or_default();
            if path.is_dir() {
                let build = name == "target" || path.join("CACHEDIR.TAG").exists();
                if !build && !name.starts_with('.') {
                    folders.push(path);
                }
            } else if extensions.contains(&extension) {
                let text = fs::read_to_string(&path).expect("a text file");
                let path = path.strip_prefix(&root).expect("below the root");
                let path = path.to_str().expect("a path in UTF-8").replace('\\', "/");
                found.push(File { path, text });
            }
        }
    }
    found.sort_by(|a, b| a.path.cmp(&b.path));
    found
}

/// Fails with everything that was found, a line each.
#[track_caller]
fn assert_none(found: impl IntoIterator<Item = String>) {
    let found: Vec<_> = found.into_iter().collect();
    assert!(found.is_empty(), "\n{}\n", found.join("\n"));
}
