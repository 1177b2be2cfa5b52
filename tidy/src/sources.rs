//! Rules about source files.

use crate::documents::BOOK;
use crate::{File, assert_none, files};

/// No file is longer, and no chapter of the guide. A ratchet: they are only ever made smaller.
const MAX_LINES: usize = 600;
const MAX_LINES_OF_A_CHAPTER: usize = 260;
/// No comment is wider; rustfmt keeps code to the same. Tables and examples are not wrapped.
const MAX_COLUMNS: usize = 100;

/// What marks work as not done, beside what clippy finds. In two pieces each, so that this file has
/// none.
const UNFINISHED: [&str; 3] = [concat!("TO", "DO"), concat!("FIX", "ME"), concat!("#[ign", "ore")];

fn unfit(file: &File) -> Vec<String> {
    let (path, count) = (&file.path, file.text.lines().count());
    let most = if path.starts_with(BOOK) { MAX_LINES_OF_A_CHAPTER } else { MAX_LINES };
    let long = (count > most).then(|| format!("{path}: {count} lines, above {most}"));
    let marks = UNFINISHED.into_iter().filter(|mark| file.text.contains(mark));
    long.into_iter().chain(marks.map(|mark| format!("{path}: {mark}: finish it"))).collect()
}

#[test]
fn no_file_is_too_long_or_unfinished() {
    assert_none(files("", &["rs", "lua", "toml"]).iter().flat_map(unfit));
    assert_none(files(BOOK, &["md"]).iter().flat_map(unfit));
    assert_none(files("scripts", &["", "sh"]).iter().flat_map(unfit));
    assert_eq!(unfit(&File::new("a.rs", &"\n".repeat(MAX_LINES + 1))).len(), 1);
    assert_eq!(unfit(&File::new("a.rs", &UNFINISHED.join("\n"))).len(), UNFINISHED.len());
}

fn too_wide(file: &File) -> Vec<String> {
    let mut in_example = false;
    let lines = (1..).zip(file.text.lines()).filter(|(_, line)| {
        in_example = match line.trim_start() {
            // An example for one feature begins with an attribute, or several.
            attribute if attribute.contains("doc = \"```") => true,
            text => in_example ^ text.contains("```"),
        };
        let begins = |words: &[&str]| words.iter().any(|word| line.trim_start().starts_with(word));
        let can_break = !in_example && !begins(&["/// |", "//! |"]) && !line.contains("](https://");
        begins(&["//", "-- "]) && can_break && line.chars().count() > MAX_COLUMNS
    });
    lines.map(|(number, _)| format!("{}:{number}: a comment wider than 100", file.path)).collect()
}

#[test]
fn comments_are_as_wide_as_code() {
    assert_none(files("", &["rs", "lua"]).iter().flat_map(too_wide));
    for (before, found) in [("/// ", 1), ("    // ", 1), ("-- ", 1), ("/// | ", 0), ("let ", 0)] {
        let text = format!("{before}{}", "a".repeat(MAX_COLUMNS));
        assert_eq!(too_wide(&File::new("a.rs", &text)).len(), found, "{before}");
    }
    let example = format!("/// ```\n/// {}\n/// ```", "a".repeat(MAX_COLUMNS));
    assert_eq!(too_wide(&File::new("a.rs", &example)).len(), 0);
}

/// The paths of modules that leave the folder of their crate.
fn through_a_wall(file: &File) -> Vec<String> {
    let folders_in_crate = file.path.matches('/').count() - 1;
    let paths = file.text.lines().filter_map(|line| line.trim().strip_prefix("#[path = \""));
    let leaves = paths.filter(|path| path.matches("../").count() > folders_in_crate);
    leaves.map(|path| format!("{}: {path} leaves its crate", file.path)).collect()
}

#[test]
fn no_crate_takes_a_file_of_another() {
    assert_none(files("", &["rs"]).iter().flat_map(through_a_wall));
    let file = |path: &str| File::new("a/tests/b/main.rs", &format!("#[path = \"{path}\"]"));
    assert_eq!(through_a_wall(&file("../../examples/c.rs")).len(), 0);
    assert_eq!(through_a_wall(&file("../../../b/c.rs")).len(), 1);
}
