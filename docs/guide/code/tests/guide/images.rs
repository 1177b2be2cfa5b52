//! The committed drawings are those that the program writes, and can be read.

use std::collections::BTreeSet;

use crate::{Error, chapters};
use ratelimit_servers::contrast::stand_out;

#[test]
fn the_committed_drawings_are_those_that_the_program_writes() -> Result<(), Error> {
    let folder = chapters().join("images");
    let drawings = guide::drawings()?;
    for drawing in &drawings {
        let committed = std::fs::read_to_string(folder.join(&drawing.file))?;
        assert!(committed == drawing.svg, "{}: run `cargo run -p guide`", drawing.file);
        // The colours of a dark screen, and words for readers who do not see it.
        for part in ["prefers-color-scheme: dark", "role=\"img\"", "<title id=", "<desc id="] {
            assert!(committed.contains(part), "{}: no {part}", drawing.file);
        }
    }
    let there = std::fs::read_dir(folder)?.map(|entry| Ok(entry?.file_name().into_string()));
    let there: Vec<_> = there.collect::<Result<_, Error>>()?;
    let there: BTreeSet<_> = there.into_iter().map(|name| name.expect("UTF-8")).collect();
    let drawn: BTreeSet<_> = drawings.iter().map(|drawing| drawing.file.clone()).collect();
    assert_eq!(there, drawn, "every file in images is a drawing");
    Ok(())
}

#[test]
fn texts_and_marks_stand_out_from_what_is_behind_them() -> Result<(), Error> {
    let drawing = &guide::drawings()?[0];
    let screens = drawing.svg.lines().filter(|line| line.contains("--paper:"));
    let screens: Vec<&str> = screens.collect();
    assert_eq!(screens.len(), 2, "a light screen and a dark one");
    for screen in screens {
        let pairs = [
            ("ink", "paper", 4.5),
            ("quiet", "paper", 4.5),
            ("yes", "paper", 3.0),
            ("no", "paper", 3.0),
            ("edge", "paper", 3.0),
            ("edge", "area", 3.0),
        ];
        stand_out(screen, &pairs);
    }
    Ok(())
}

#[test]
fn a_page_of_360_pixels_shows_the_narrow_drawings_in_their_size() -> Result<(), Error> {
    for drawing in guide::drawings()?.iter().filter(|drawing| drawing.file.contains("narrow")) {
        let (_, rest) = drawing.svg.split_once("viewBox=\"0 0 ").expect("a size");
        let width: u32 = rest.split(' ').next().unwrap_or_default().parse()?;
        assert!(width <= 360, "{}: {width}", drawing.file);
        let sizes = drawing.svg.split("px").filter_map(|before| before.rsplit([' ', ':']).next());
        let sizes: Vec<u32> = sizes.filter_map(|size| size.parse().ok()).collect();
        assert!(sizes.len() >= 3 && sizes.iter().all(|size| *size >= 12), "{sizes:?}");
    }
    Ok(())
}
