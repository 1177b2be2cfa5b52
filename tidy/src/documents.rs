//! Rules about the documents, the guide's chapters among them: what they show runs, and what they
//! link to is there. Rules about their words hold for rustdoc, too.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pulldown_cmark::{CodeBlockKind, Event, Options, Parser, Tag, TagEnd};

use crate::{File, assert_none, files, read, root, words};

/// The book, out of which no chapter can link by a path, and where the repository's files are on
/// the web.
pub(crate) const BOOK: &str = "docs/guide/src";
const REPOSITORY: &str = "https://github.com/ratelimit-rs/ratelimit/";

/// What the rules ask of a document.
#[derive(Default)]
struct MarkdownDocument {
    /// The names of its headings, as GitHub and mdBook derive them.
    anchors: Vec<String>,
    links: Vec<String>,
    /// The blocks of Rust.
    snippets: Vec<String>,
}

impl MarkdownDocument {
    fn parse(text: &str) -> Self {
        let (mut document, mut open) = (Self::default(), None::<String>);
        for event in Parser::new_ext(text, Options::ENABLE_TABLES | Options::ENABLE_FOOTNOTES) {
            match event {
                Event::Start(Tag::Heading { .. }) => open = Some(String::new()),
                Event::Start(Tag::CodeBlock(CodeBlockKind::Fenced(language))) => {
                    open = language.starts_with("rust").then(String::new);
                }
                Event::Start(Tag::Link { dest_url, .. } | Tag::Image { dest_url, .. }) => {
                    document.links.push(dest_url.into_string());
                }
                Event::Text(text) | Event::Code(text) => open.iter_mut().for_each(|o| *o += &text),
                Event::End(TagEnd::Heading(_)) => {
                    document.anchors.extend(open.take().map(|heading| anchor(&heading)));
                }
                Event::End(TagEnd::CodeBlock) => document.snippets.extend(open.take()),
                _ => {}
            }
        }
        document
    }
}

/// A snippet with the lines that mdBook hides: those behind a `#`.
fn unhidden(snippet: &str) -> String {
    let line = |line: &str| match line.strip_prefix('#') {
        Some("") => String::new(),
        Some(rest) => rest.strip_prefix(' ').unwrap_or(line).to_owned(),
        None => line.to_owned(),
    };
    snippet.lines().map(|text| line(text) + "\n").collect()
}

fn anchor(heading: &str) -> String {
    let kept = |c: &char| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_');
    heading.chars().filter(kept).collect::<String>().to_lowercase().replace(' ', "-")
}

/// All documents by their paths.
fn documents() -> BTreeMap<PathBuf, MarkdownDocument> {
    let documents = files("", &["md"]).into_iter();
    documents.map(|file| (root().join(&file.path), MarkdownDocument::parse(&file.text))).collect()
}

/// Phrases that no document and no rustdoc uses, and their replacements, a pair per line.
const BANNED: &str = include_str!("../phrases.txt");

/// The banned phrases of a text, however its lines are broken.
fn banned(text: &str) -> impl Iterator<Item = String> {
    let spaced = |text: &str| format!(" {} ", words(text).collect::<Vec<_>>().join(" "));
    let text = spaced(&text.to_lowercase());
    let pairs = BANNED.lines().filter_map(|line| line.split_once(" = "));
    let found = pairs.filter(move |(phrase, _)| text.contains(&spaced(phrase)));
    found.map(|(phrase, instead)| format!("instead of \"{phrase}\", write: {instead}"))
}

/// The doc comments of a source file, each as one text.
fn doc_comments(source: &str) -> Vec<String> {
    let line_of_doc = |line: &'_ str| {
        let line = line.trim_start();
        line.strip_prefix("///").or_else(|| line.strip_prefix("//!")).map(str::to_owned)
    };
    let lines: Vec<_> = source.lines().map(line_of_doc).collect();
    let comments = lines.split(Option::is_none).filter(|comment| !comment.is_empty());
    comments.map(|lines| lines.iter().flatten().cloned().collect::<Vec<_>>().join("\n")).collect()
}

/// Whether a link of a document leads somewhere.
fn leads(documents: &BTreeMap<PathBuf, MarkdownDocument>, from: &Path, link: &str) -> bool {
    let (target, anchor) = link.split_once('#').unwrap_or((link, ""));
    // Such as `blob/main/README.md`, or `tree/main/docs`.
    let ours = target.strip_prefix(REPOSITORY).and_then(|ours| Some(ours.split_once("/main/")?.1));
    if ours.is_none() && (target.contains("://") || target.starts_with("mailto:")) {
        return true;
    }
    let there = match (ours, target) {
        (Some(path), _) => root().join(path),
        (None, "") => from.to_path_buf(),
        (None, path) => from.with_file_name(path),
    };
    let Ok(there) = there.canonicalize() else { return false };
    let book = root().join(BOOK);
    let stays = ours.is_some() || !from.starts_with(&book) || there.starts_with(&book);
    let has_anchor =
        |document: &MarkdownDocument| document.anchors.iter().any(|name| name == anchor);
    stays && (anchor.is_empty() || documents.get(&there).is_none_or(has_anchor))
}

/// Whether these lines stand in a program one after the other, wherever they are indented. Hidden
/// imports may come first; the program imports the same.
fn is_part_of(snippet: &str, program: &str) -> bool {
    let is_import = |line: &&str| line.trim().starts_with("# use ") && line.ends_with(';');
    let hidden = imports(&snippet.lines().take_while(is_import).collect::<String>());
    let shown: String = snippet.lines().skip_while(is_import).flat_map(|l| [l, "\n"]).collect();

    let lines = |text: &str| text.lines().map(|line| line.trim().to_owned()).collect::<Vec<_>>();
    let (shown, imported) = (lines(&unhidden(&shown)), imports(program));
    let has = |import: &Vec<String>| {
        let of_crate = imported.iter().filter(|words| words.first() == import.first());
        let words: Vec<_> = of_crate.flatten().collect();
        import.iter().all(|word| words.contains(&word))
    };
    !shown.is_empty()
        && hidden.iter().all(has)
        && lines(program).windows(shown.len()).any(|window| window == shown)
}

/// The words of each import of a program.
fn imports(program: &str) -> Vec<Vec<String>> {
    let statements = program.split(';').filter_map(|text| Some(text.rsplit_once("use ")?.1));
    statements.map(|text| words(text).map(str::to_owned).collect()).collect()
}

/// The examples of the libraries, which `cargo test` runs.
fn examples() -> Vec<File> {
    let is_of_a_library = |file: &File| {
        let owner = file.path.split_once("/examples/").map(|(owner, _)| owner);
        let others = ["benches", "ratelimit-cli", "ratelimit-simulation"];
        owner.is_some_and(|owner| !others.contains(&owner))
    };
    files("", &["rs"]).into_iter().filter(is_of_a_library).collect()
}

/// Whether a test program of its crate includes an example.
fn is_tested(name: &str, text: &str, tests: &str) -> bool {
    let path = format!("#[path = \"../../examples/{name}.rs\"]\n");
    text.contains("test]\n") && tests.contains(&path)
}

#[test]
fn every_snippet_is_part_of_a_program_that_runs() {
    let mut programs = examples();
    programs.extend(files("ratelimit-cli/examples", &["rs"]));
    programs.extend(files("docs/guide/code/tests", &["rs"]));
    assert_none(documents().into_iter().flat_map(|(path, document)| {
        let is_quoted = |text: &String| programs.iter().any(|file| is_part_of(text, &file.text));
        let alone = document.snippets.into_iter().filter(|text| !is_quoted(text));
        let path = path.display();
        alone.map(|text| format!("{path}: no example has these lines:\n{text}")).collect::<Vec<_>>()
    }));
}

#[test]
fn every_link_leads_somewhere() {
    let documents = documents();
    assert_none(documents.iter().flat_map(|(path, document)| {
        let broken = document.links.iter().filter(|link| !leads(&documents, path, link));
        broken.map(move |link| format!("{}: {link} leads nowhere", path.display()))
    }));
}

#[test]
fn the_summary_names_every_chapter_once() {
    let mut named = MarkdownDocument::parse(&read(&format!("{BOOK}/SUMMARY.md"))).links;
    let chapters = files(BOOK, &["md"]).into_iter().map(|file| file.path[BOOK.len() + 1..].into());
    let mut chapters: Vec<_> = chapters.filter(|path: &String| path != "SUMMARY.md").collect();
    named.sort();
    chapters.sort();
    assert_eq!(named, chapters);
}

#[test]
fn every_example_of_the_libraries_is_a_test_and_has_its_row() {
    let (examples, list) = (examples(), read("examples/README.md"));
    assert!(examples.len() >= 9, "the libraries have examples");
    assert_none(examples.iter().flat_map(|example| {
        let path = &example.path;
        let (folder, name) = path.split_once("/examples/").expect("a crate's example");
        let name = name.split(['.', '/']).next().unwrap_or_default();
        let tests = files(&format!("{folder}/tests"), &["rs"]);
        let tests: String = tests.into_iter().map(|file| file.text).collect();
        let untested = (!is_tested(name, &example.text, &tests)).then(|| {
            format!("{path}: give it a test, and a line in the examples.rs of the crate's tests")
        });
        let row = format!("[`{name}`](../{path})");
        let unnamed =
            (!list.contains(&row)).then(|| format!("examples/README.md: a row for {row}"));
        untested.into_iter().chain(unnamed)
    }));
}

#[test]
fn no_document_and_no_rustdoc_has_a_banned_phrase() {
    let found = |path: &str, text: &str| {
        banned(text).map(|advice| format!("{path}: {advice}")).collect::<Vec<_>>()
    };
    let documents = files("", &["md"]).into_iter().filter(|file| file.path != "CHANGELOG.md");
    assert_none(documents.flat_map(|file| found(&file.path, &file.text)));
    assert_none(files("", &["rs"]).into_iter().flat_map(|file| {
        let comments = doc_comments(&file.text);
        comments.iter().flat_map(|text| found(&file.path, text)).collect::<Vec<_>>()
    }));
}

#[test]
fn each_rule_finds_what_breaks_it() {
    assert_eq!(banned("While Redis is\n  away, and nobody else").count(), 2);
    assert_eq!(banned("It is awayward; Redis is unreachable.").count(), 0);
    let source =
        "//! One.\n\n    /// Nobody\n    /// asks.\n    // nobody\nfn nobody() {}\n/// Two\n";
    assert_eq!(doc_comments(source), [" One.", " Nobody\n asks.", " Two"]);
    assert_eq!(doc_comments(source).iter().flat_map(|text| banned(text)).count(), 1);

    assert!(is_part_of("one();\n\ntwo();\n", "fn f() {\n    one();\n\n    two();\n}\n"));
    assert!(!is_part_of("one();\ntwo();\n", "fn f() {\n    one();\n\n    two();\n}\n"));
    assert!(!is_part_of("", "fn f() {}\n"));
    let program = "use a::{\n    B, c::D,\n};\nuse e::F;\n\nfn f() {\n    g(B);\n}\n";
    assert!(is_part_of("# use a::{B, c::D};\n# use e::F;\ng(B);\n", program));
    assert!(!is_part_of("# use a::{B, F};\ng(B);\n", program), "F is not of a");
    assert!(!is_part_of("# use a::B;\n", program), "nothing is shown");

    assert_eq!(unhidden("# use a;\n#\n#[b]\nc\n"), "use a;\n\n#[b]\nc\n");

    let documents = documents();
    let leads = |from: &str, link: &str| leads(&documents, &root().join(from), link);
    assert!(leads("README.md", "docs") && leads("docs/compare.md", "../Cargo.toml"));
    assert!(!leads("README.md", "nowhere.md") && !leads("README.md", "#nothing"));
    let chapter = "docs/guide/src/keys.md";
    assert!(leads(chapter, "policies.md#documents"));
    assert!(!leads(chapter, "policies.md#nothing"));
    assert!(!leads(chapter, "../../compare.md"), "it leaves the book");
    assert!(leads(chapter, &format!("{REPOSITORY}blob/main/README.md")));
    assert!(!leads(chapter, &format!("{REPOSITORY}blob/main/NOTHING.md")));

    let listed = "#[path = \"../../examples/b.rs\"]\nmod b;\n";
    assert!(is_tested("b", "#[test]\n", listed) && !is_tested("b", "", listed));
    assert!(!is_tested("b", "#[test]\n", &listed.replace("b.rs", "a.rs")));
}
