//! Rules about source files.

use crate::documents::BOOK;
use crate::{File, assert_none, files};

/// No file is longer, and no chapter of the guide. A ratchet: they are only ever made smaller.
const MAX_LINES: usize = 600;
const MAX_LINES_OF_A_CHAPTER: usize = 260;

/// What marks work as not done, beside what clippy finds. In two pieces each, so that this file has none.
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
