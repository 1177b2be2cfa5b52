//! Rules about the documents: what they show runs, and what they link to is there.

use std::path::{Component, Path, PathBuf};

use crate::{File, assert_none, files, root};

/// The documents for users, whose snippets of Rust are parts of examples.
const FOR_USERS: [&str; 9] = [
    "README.md",
    "docs/",
    "ratelimit-core/README.md",
    "ratelimit-memory/README.md",
    "ratelimit-redis/README.md",
    "ratelimit-layers/README.md",
    "ratelimit-testkit/README.md",
    "ratelimit-cli/README.md",
    "ratelimit-tower/README.md",
];

/// The guide's own tests try its snippets and its links, as mdBook shows them.
const GUIDE: &str = "docs/guide/src/";

/// The crates that are published.
const PUBLISHED: [&str; 7] = [
    "ratelimit-core",
    "ratelimit-memory",
    "ratelimit-redis",
    "ratelimit-layers",
    "ratelimit-testkit",
    "ratelimit-cli",
    "ratelimit-tower",
];

/// What is in each published crate's folder, beside its code.
const IN_EACH: [&str; 3] = ["README.md", "LICENSE-MIT", "LICENSE-APACHE"];

/// All documents but the guide's.
fn documents() -> Vec<File> {
    let mut documents = files("", &["md"]);
    documents.retain(|file| !file.path.starts_with(GUIDE));
    documents
}

fn is_for_users(file: &File) -> bool {
    FOR_USERS.iter().any(|path| match path.strip_suffix('/') {
        Some(folder) => file.path.starts_with(folder) && file.path[folder.len()..].starts_with('/'),
        None => file.path == *path,
    })
}

/// The examples that `cargo run --example` knows.
fn examples() -> Vec<File> {
    let mut sources = files("", &["rs"]);
    sources.retain(|file| file.path.split('/').nth(1) == Some("examples"));
    sources
}

/// Lines without the indentation that all of them have.
fn dedented(text: &str) -> String {
    let indentation = |line: &str| line.len() - line.trim_start().len();
    let full = text.lines().filter(|line| !line.trim().is_empty());
    let common = full.map(indentation).min().unwrap_or(0);
    text.lines().map(|line| line.get(common..).unwrap_or("").trim_end().to_owned() + "\n").collect()
}

/// Whether these lines stand somewhere in a file, wherever they are indented.
fn is_part_of(snippet: &str, file: &str) -> bool {
    let snippet = dedented(snippet);
    let (count, lines): (usize, Vec<&str>) = (snippet.lines().count(), file.lines().collect());
    count > 0 && lines.windows(count).any(|window| dedented(&window.join("\n")) == snippet)
}

/// The blocks of Rust of a document, those in lists too: the line of each, and its text.
fn snippets(file: &File) -> Vec<(usize, String)> {
    let mut found = Vec::new();
    let mut block: Option<(usize, String)> = None;
    let mut inside_another = false;
    for (number, line) in file.lines() {
        match (&mut block, line.trim_start().strip_prefix("```")) {
            (Some(_), Some(_)) => found.extend(block.take()),
            (Some((_, text)), None) => text.extend([line, "\n"]),
            (None, Some(_)) if inside_another => inside_another = false,
            (None, Some(language)) if language.starts_with("rust") => {
                block = Some((number, String::new()));
            }
            (None, Some(_)) => inside_another = true,
            (None, None) => {}
        }
    }
    found
}

fn without_an_example(file: &File, examples: &[File]) -> Vec<String> {
    let alone = snippets(file)
        .into_iter()
        .filter(|(_, text)| !examples.iter().any(|example| is_part_of(text, &example.text)));
    alone
        .map(|(number, _)| {
            format!("{}:{number}: no example has these lines; quote one word for word", file.path)
        })
        .collect()
}

/// The targets of the links of a document.
fn links(file: &File) -> Vec<(usize, &str)> {
    let mut found = Vec::new();
    for (number, line) in file.lines() {
        let inline = line.split("](").skip(1).filter_map(|rest| rest.split(')').next());
        found.extend(inline.map(|target| (number, target)));
    }
    found
}

/// A heading as a link names it.
fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    let text: String = heading.trim_start_matches('#').trim().chars().filter(kept).collect();
    text.to_lowercase().replace(' ', "-")
}

fn has_anchor(text: &str, name: &str) -> bool {
    text.lines().any(|line| line.starts_with('#') && anchor(line) == name)
}

/// Resolves `..` without asking the disk.
fn normal(path: &Path) -> PathBuf {
    let mut normal = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                normal.pop();
            }
            part => normal.push(part),
        }
    }
    normal
}

fn broken_links(file: &File) -> Vec<String> {
    let mut found = Vec::new();
    for (number, target) in links(file) {
        if target.contains("://") || target.starts_with("mailto:") {
            continue;
        }
        let (path, name) = target.split_once('#').unwrap_or((target, ""));
        let here = root().join(&file.path);
        let there = match path {
            "" => here,
            path => normal(&here.parent().expect("a folder").join(path)),
        };
        let text =
            if path.is_empty() { Ok(file.text.clone()) } else { std::fs::read_to_string(&there) };
        let broken = match text {
            Ok(text) => !name.is_empty() && !has_anchor(&text, name),
            Err(_) => !there.is_dir(),
        };
        if broken {
            found.push(format!("{}:{number}: {target} leads nowhere", file.path));
        }
    }
    found
}

/// Lines that only a doctest needs, and that a reader of a document sees.
fn scaffolding(file: &File) -> Vec<String> {
    let hidden = |line: &str| line.starts_with("# ") || line.trim() == "#";
    let shows = snippets(file).into_iter().filter(|(_, text)| text.lines().any(hidden));
    shows.map(|(number, _)| format!("{}:{number}: doctest scaffolding shows", file.path)).collect()
}

/// Examples that `cargo test` does not run.
fn not_tested(example: &File, manifest: &str) -> Option<String> {
    let manifest: toml::Table = manifest.parse().expect("a manifest is TOML");
    let entries = manifest.get("example").and_then(toml::Value::as_array);
    let tested = |entry: &toml::Value| {
        entry.get("name").and_then(toml::Value::as_str) == Some(example.stem())
            && entry.get("test").and_then(toml::Value::as_bool) == Some(true)
    };
    let runs = example.text.contains("#[test]") || example.text.contains("#[tokio::test]");
    let listed = entries.is_some_and(|entries| entries.iter().any(tested));
    (!listed || !runs).then(|| {
        format!(
            "{}: give it a test, and [[example]] name = \"{}\", test = true in the crate's Cargo.toml",
            example.path,
            example.stem()
        )
    })
}

#[test]
fn every_snippet_is_part_of_an_example() {
    let (documents, examples) = (documents(), examples());
    let for_users: Vec<_> = documents.iter().filter(|file| is_for_users(file)).collect();
    assert!(for_users.iter().any(|file| !snippets(file).is_empty()), "README.md has snippets");
    assert_none(for_users.iter().flat_map(|file| without_an_example(file, &examples)));
    assert_none(for_users.iter().flat_map(|file| scaffolding(file)));
}

#[test]
fn every_link_leads_somewhere() {
    assert_none(documents().iter().flat_map(broken_links));
}

#[test]
fn every_example_of_the_libraries_is_a_test() {
    let libraries = examples().into_iter().filter(|file| {
        !file.path.starts_with("benches/") && !file.path.starts_with("ratelimit-cli/")
    });
    let libraries: Vec<_> = libraries.collect();
    assert!(libraries.len() >= 9, "the libraries have examples");
    assert_none(libraries.iter().filter_map(|example| {
        let folder = example.path.split('/').next().expect("a crate");
        let manifest = std::fs::read_to_string(root().join(folder).join("Cargo.toml"));
        not_tested(example, &manifest.expect("a manifest"))
    }));
}

#[test]
fn the_readme_names_every_example_of_the_libraries() {
    let readme = std::fs::read_to_string(root().join("README.md")).expect("README.md");
    let libraries = examples().into_iter().filter(|file| {
        !file.path.starts_with("benches/") && !file.path.starts_with("ratelimit-cli/")
    });
    let libraries: Vec<_> = libraries.collect();
    let row = |file: &File| format!("[`{}`]({})", file.stem(), file.path);
    let unnamed = libraries.iter().filter(|file| !readme.contains(&row(file)));
    assert_none(unnamed.map(|file| format!("README.md: a row for {}", row(file))));
    // The README runs each as `--example NAME`.
    let is_twice = |file: &&File| libraries.iter().filter(|f| f.stem() == file.stem()).count() > 1;
    let twice = libraries.iter().filter(is_twice);
    assert_none(twice.map(|file| format!("{}: another example has this name", file.path)));
}

#[test]
fn every_published_crate_has_a_readme_and_its_licences() {
    for name in PUBLISHED {
        for file in IN_EACH {
            let path = root().join(name).join(file);
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            assert!(!text.is_empty(), "{} is missing", path.display());
            if let Ok(original) = std::fs::read_to_string(root().join(file)) {
                assert!(file == "README.md" || text == original, "{} differs", path.display());
            }
        }
        let manifest = std::fs::read_to_string(root().join(name).join("Cargo.toml"));
        let manifest: toml::Table = manifest.expect("a manifest").parse().expect("TOML");
        let all = &manifest["package"]["metadata"]["docs"]["rs"]["all-features"];
        assert_eq!(all.as_bool(), Some(true), "{name}: docs.rs builds all features");
    }
}

#[test]
fn each_rule_finds_what_breaks_it() {
    let document = |text: &str| File::new("README.md", text);
    let example = |text: &str| [File::new("a/examples/b.rs", text)];
    let with = |text: &str| document(&format!("```rust\n{text}```\n"));
    let alone = |text: &str, code: &str| without_an_example(&with(text), &example(code)).len();
    assert_eq!(alone("one();\n\ntwo();\n", "fn main() {\n    one();\n\n    two();\n}\n"), 0);
    assert_eq!(alone("one();\ntwo();\n", "fn main() {\n    one();\n\n    two();\n}\n"), 1);
    assert_eq!(alone("one();\n", "fn main() {\n    one(2);\n}\n"), 1);
    assert_eq!(alone("", "fn main() {}\n"), 1);
    assert_eq!(snippets(&document("```sh\n```rust\n```\n")).len(), 0);
    let in_a_list = document("1. One:\n\n   ```rust\n   one();\n   ```\n");
    assert_eq!(without_an_example(&in_a_list, &example("two();")).len(), 1);
    assert_eq!(without_an_example(&in_a_list, &example("one();")).len(), 0);

    assert_eq!(scaffolding(&with("one();\n# Ok::<(), ()>(())\n")).len(), 1);
    assert_eq!(scaffolding(&with("#[test]\nfn one() {}\n")).len(), 0);

    let broken = |text: &str| broken_links(&document(text)).len();
    assert_eq!(broken("[a](Cargo.toml) [b](https://example.org) [c](#d)\n# D\n"), 0);
    assert_eq!(broken("[a](docs) [b](benches/../Cargo.toml)"), 0);
    assert_eq!(broken("[a](nowhere.md) [b](#nothing)"), 2);
    assert_eq!(anchor("## What works, where?"), "what-works-where");

    let file = |text: &str| File::new("a/examples/b.rs", text);
    let listed = "[[example]]\nname = \"b\"\ntest = true\n";
    assert!(not_tested(&file("#[test]"), listed).is_none());
    assert!(not_tested(&file(""), listed).is_some());
    assert!(not_tested(&file("#[test]"), &listed.replace("true", "false")).is_some());
    assert!(not_tested(&file("#[test]"), "").is_some());
}
