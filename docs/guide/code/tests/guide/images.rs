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

/// The times, in milliseconds, at which the drawing of a limit admits.
fn admitted_ms(limit: &str) -> Vec<u64> {
    let row = guide::decide(limit, "").expect("a policy");
    row.requests.iter().filter(|(_, is_admitted)| *is_admitted).map(|(time, _)| *time).collect()
}

/// What the chapter says of the drawing.
#[test]
fn the_drawing_shows_what_the_chapter_says() {
    let within = |times: &[u64], from, to| times.iter().filter(|t| (from..to).contains(*t)).count();
    let most_in_10_s = |times: &[u64]| {
        times.iter().map(|from| within(times, *from, from + 10_000)).max().unwrap_or(0)
    };
    let fixed = admitted_ms("fixed-window 10/10s");
    assert_eq!((within(&fixed, 7_000, 10_000), within(&fixed, 10_000, 13_000)), (10, 10));
    assert_eq!(most_in_10_s(&admitted_ms("sliding-log 10/10s")), 10);
    let first = admitted_ms("first-request-window 10/10s");
    assert_eq!((within(&first, 7_000, 17_000), first[10]), (10, 17_000));
    assert_eq!(admitted_ms("gcra 10/10s burst 10"), admitted_ms("token-bucket 1/s burst 10"));
    assert!(most_in_10_s(&admitted_ms("gcra 10/10s burst 10")) > 10);
    let attempts = admitted_ms("sliding-log 10/10s count attempts");
    assert!(attempts.len() < admitted_ms("sliding-log 10/10s").len());
}
