//! The committed drawings are those that the program writes.

use std::collections::BTreeSet;

use crate::{Error, chapters};

#[test]
fn the_committed_drawings_are_those_that_the_program_writes() -> Result<(), Error> {
    let folder = chapters().join("images");
    let drawings = guide::drawings()?;
    for drawing in &drawings {
        let committed = std::fs::read_to_string(folder.join(drawing.file))?;
        assert!(committed == drawing.svg, "{}: run `cargo run -p guide`", drawing.file);
        // The colours of a dark screen, a legend, and words for readers who do not see it.
        for part in ["prefers-color-scheme: dark", ">admitted<", ">denied<", "<desc id="] {
            assert!(committed.contains(part), "{}: no {part}", drawing.file);
        }
    }
    let there = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().into_string()));
    let there: Vec<_> = there.collect::<Result<_, Error>>()?;
    let there: BTreeSet<_> = there.into_iter().map(|name| name.expect("UTF-8")).collect();
    let drawn: BTreeSet<_> = drawings.iter().map(|drawing| drawing.file.to_owned()).collect();
    assert_eq!(there, drawn, "every file in images is a drawing");
    Ok(())
}
