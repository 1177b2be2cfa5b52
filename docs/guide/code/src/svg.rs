//! Rows of decisions as SVG. All numbers are integers, in tenths of a unit, so that each machine writes the same text.

use std::fmt::Write;

use crate::{BEGIN_MS, END_MS, Row};

const WIDTH: u64 = 780;
const LEFT: u64 = 250;
const PLOT: u64 = 510;
const TOP: u64 = 64;
const ROW: u64 = 66;
/// Within a row: where the requests stand, and where the area of what remains begins and ends.
const MARKS: u64 = 12;
const FULL: u64 = 24;
const EMPTY: u64 = 56;

/// The colours, and their counterparts on a dark screen.
const STYLE: &str = "
  svg { --paper: #ffffff; --ink: #1f2933; --quiet: #52606d; --line: #cbd2d9; --area: #d9e2ec; --yes: #1d5fa8; --no: #b83200; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #171b21; --ink: #e4e7eb; --quiet: #a3b0bd; --line: #3a4552; --area: #2c3947; --yes: #6cb2f5; --no: #ff9466; }
  }
  .paper { fill: var(--paper); }
  text { fill: var(--ink); font: 13px system-ui, sans-serif; }
  .title { font-size: 15px; font-weight: 600; }
  .limit { font-weight: 600; }
  .quiet { fill: var(--quiet); font-size: 12px; }
  .line { stroke: var(--line); fill: none; }
  .window { stroke-dasharray: 4 3; }
  .area { fill: var(--area); }
  .yes { fill: var(--yes); }
  .no { stroke: var(--no); stroke-width: 1.7; fill: none; }
";

/// A number of tenths as SVG writes it.
fn tenths(n: u64) -> String {
    if n.is_multiple_of(10) { format!("{}", n / 10) } else { format!("{}.{}", n / 10, n % 10) }
}

fn x(time_ms: u64) -> String {
    tenths(10 * LEFT + 10 * (time_ms - BEGIN_MS) * PLOT / (END_MS - BEGIN_MS))
}

/// The drawing of these rows, each under its own limit, on one time axis.
pub(crate) fn draw(title: &str, rows: &[Row]) -> String {
    let height = TOP + ROW * u64::try_from(rows.len()).unwrap_or(0) + 26;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" role=\"img\" aria-labelledby=\"t d\">\n\
         <title id=\"t\">{title}</title>\n<desc id=\"d\">{}</desc>\n<style>{STYLE}</style>\n\
         <rect class=\"paper\" width=\"{WIDTH}\" height=\"{height}\" rx=\"6\"/>\n\
         <text class=\"title\" x=\"16\" y=\"24\">{title}</text>\n",
        described(rows)
    );
    legend(&mut out);
    let bottom = height - 26;
    for second in (BEGIN_MS / 1_000..=END_MS / 1_000).step_by(5) {
        let (at, window) = (x(second * 1_000), if second % 10 == 0 { " window" } else { "" });
        let _ = writeln!(
            out,
            "<path class=\"line{window}\" d=\"M{at} {TOP}V{bottom}\"/>\n\
             <text class=\"quiet\" x=\"{at}\" y=\"{}\" text-anchor=\"middle\">{second} s</text>",
            bottom + 17
        );
    }
    let mut top = TOP;
    for row in rows {
        draw_row(&mut out, row, top);
        top += ROW;
    }
    out.push_str("</svg>\n");
    out
}

/// The marks as they stand in the rows.
fn legend(out: &mut String) {
    let _ = writeln!(
        out,
        "<circle class=\"yes\" cx=\"22\" cy=\"43\" r=\"4.2\"/><text class=\"quiet\" x=\"32\" y=\"47\">admitted</text>\n\
         <path class=\"no\" d=\"M98 39.5l7 7m0-7l-7 7\"/><text class=\"quiet\" x=\"112\" y=\"47\">denied</text>\n\
         <rect class=\"area\" x=\"164\" y=\"37\" width=\"16\" height=\"12\"/>\
         <text class=\"quiet\" x=\"186\" y=\"47\">what remains</text>\n\
         <path class=\"line window\" d=\"M284 43h22\"/>\
         <text class=\"quiet\" x=\"312\" y=\"47\">boundary of a window of 10 s that is aligned to the clock</text>"
    );
}

fn draw_row(out: &mut String, row: &Row, top: u64) {
    let admitted = row.requests.iter().filter(|(_, is_admitted)| *is_admitted).count();
    // A long limit in two lines.
    let (name, numbers) = row.limit.split_once(' ').unwrap_or((&row.limit, ""));
    let _ = writeln!(
        out,
        "<path class=\"line\" d=\"M16 {top}H{}\"/>\n\
         <text class=\"limit\" x=\"16\" y=\"{}\">{name}</text>\n\
         <text class=\"quiet\" x=\"16\" y=\"{}\">{numbers}: {admitted} of {}</text>\n\
         <text class=\"quiet\" x=\"16\" y=\"{}\">{}</text>",
        WIDTH - 16,
        top + 19,
        top + 36,
        row.requests.len(),
        top + 53,
        row.note
    );

    let y = |left: u64| {
        tenths(10 * (top + EMPTY) - 10 * (EMPTY - FULL) * left.min(row.capacity) / row.capacity)
    };
    let mut area = format!("M{} {}", x(BEGIN_MS), top + EMPTY);
    for (time_ms, left) in row.remaining.iter().filter(|(time_ms, _)| *time_ms >= BEGIN_MS) {
        let _ = write!(area, "H{}V{}", x(*time_ms), y(*left));
    }
    let _ = writeln!(out, "<path class=\"area\" d=\"{area}H{}V{}Z\"/>", x(END_MS), top + EMPTY);
    for (time_ms, is_admitted) in &row.requests {
        let at = x(*time_ms);
        let _ = if *is_admitted {
            writeln!(out, "<circle class=\"yes\" cx=\"{at}\" cy=\"{}\" r=\"2.6\"/>", top + MARKS)
        } else {
            writeln!(
                out,
                "<path class=\"no\" d=\"M{at} {}m-2.2-2.2l4.4 4.4m0-4.4l-4.4 4.4\"/>",
                top + MARKS
            )
        };
    }
}

/// The drawing in words, for readers who do not see it.
fn described(rows: &[Row]) -> String {
    let told = rows.iter().map(|row| {
        let admitted = row.requests.iter().filter(|(_, is_admitted)| *is_admitted).count();
        format!("{}: {admitted} of {} requests admitted.", row.limit, row.requests.len())
    });
    told.collect::<Vec<_>>().join(" ")
}
