//! The committed drawings are those that the program writes, and can be read.

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

/// The relative luminance of a colour such as `#1d5fa8` (WCAG 2.2).
fn luminance(colour: &str) -> f64 {
    let channel = |at: usize| {
        let byte = u8::from_str_radix(&colour[at..at + 2], 16).expect("a colour in hexadecimal");
        let part = f64::from(byte) / 255.0;
        if part <= 0.04045 { part / 12.92 } else { ((part + 0.055) / 1.055).powf(2.4) }
    };
    0.2126 * channel(1) + 0.7152 * channel(3) + 0.0722 * channel(5)
}

fn contrast(a: &str, b: &str) -> f64 {
    let (a, b) = (luminance(a), luminance(b));
    (a.max(b) + 0.05) / (a.min(b) + 0.05)
}

#[test]
fn texts_and_marks_stand_out_from_what_is_behind_them() -> Result<(), Error> {
    let [drawing, ..] = guide::drawings()?;
    let screens = drawing.svg.lines().filter(|line| line.contains("--paper:"));
    let screens: Vec<&str> = screens.collect();
    assert_eq!(screens.len(), 2, "a light screen and a dark one");
    for screen in screens {
        let colour = |name: &str| {
            let (_, rest) = screen.split_once(&format!("--{name}: ")).expect("a colour");
            &rest[..7]
        };
        let pairs = [
            ("ink", "paper", 4.5),
            ("quiet", "paper", 4.5),
            ("yes", "paper", 3.0),
            ("no", "paper", 3.0),
            ("edge", "paper", 3.0),
            ("edge", "area", 3.0),
        ];
        for (front, back, least) in pairs {
            let contrast = contrast(colour(front), colour(back));
            assert!(contrast >= least, "{front} on {back} has {contrast:.2} in {screen}");
        }
    }
    Ok(())
}

#[test]
fn a_page_of_400_pixels_shows_the_narrow_drawings_in_their_size() -> Result<(), Error> {
    for drawing in guide::drawings()?.iter().filter(|drawing| drawing.file.contains("narrow")) {
        let (_, rest) = drawing.svg.split_once("viewBox=\"0 0 ").expect("a size");
        let width: u32 = rest.split(' ').next().unwrap_or_default().parse()?;
        assert!(width <= 400, "{}: {width}", drawing.file);
        let sizes = drawing.svg.split("px").filter_map(|before| before.rsplit([' ', ':']).next());
        let sizes: Vec<u32> = sizes.filter_map(|size| size.parse().ok()).collect();
        assert!(sizes.len() >= 3 && sizes.iter().all(|size| *size >= 12), "{sizes:?}");
    }
    Ok(())
}
