//! Rows of decisions as SVG. All numbers are integers, in tenths of a unit, so that each machine
//! writes the same text.

use std::fmt::Write;

use crate::{BEGIN_MS, BurstRow, END_MS};

/// Where things stand: a row's words beside its plot on a wide page, above it on a telephone.
pub(crate) struct Layout {
    width: u64,
    /// The time axis: where it begins, and how long it is. The scale of what remains stands after
    /// it.
    left: u64,
    plot: u64,
    /// The end of the heading, and the height of a row.
    top: u64,
    row: u64,
    /// The title's lines.
    title: fn([&str; 2]) -> Vec<String>,
    /// Within the heading: the marks of the legend, and the explanation of a window's boundary.
    legend: u64,
    boundary: (u64, u64),
    /// Within a row: the numbers of the limit, with their anchor, and the note.
    numbers: (u64, u64, &'static str),
    note: u64,
    /// Within a row: where its plot begins, the requests with half the size of a mark in tenths,
    /// and the levels at which everything and nothing remains.
    begin: u64,
    marks: u64,
    mark: u64,
    full: u64,
    empty: u64,
}

pub(crate) const WIDE: Layout = Layout {
    width: 796,
    left: 250,
    plot: 510,
    top: 64,
    row: 66,
    title: |lines| vec![lines.join(" ")],
    legend: 47,
    boundary: (284, 47),
    numbers: (16, 36, "start"),
    note: 53,
    begin: 0,
    marks: 12,
    mark: 24,
    full: 24,
    empty: 56,
};

pub(crate) const NARROW: Layout = Layout {
    width: 390,
    left: 16,
    plot: 340,
    top: 100,
    row: 98,
    title: |lines| lines.map(str::to_owned).to_vec(),
    legend: 67,
    boundary: (16, 87),
    numbers: (374, 19, "end"),
    note: 36,
    begin: 42,
    marks: 50,
    mark: 19,
    full: 60,
    empty: 88,
};

/// The colours, and their counterparts on a dark screen.
const STYLE: &str = "
  svg { --paper: #ffffff; --ink: #1f2933; --quiet: #52606d; --line: #cbd2d9; --edge: #66788a; --area: #d9e2ec; --yes: #1d5fa8; --no: #b83200; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #171b21; --ink: #e4e7eb; --quiet: #a3b0bd; --line: #3a4552; --edge: #8fa1b3; --area: #2c3947; --yes: #6cb2f5; --no: #ff9466; }
  }
  .paper { fill: var(--paper); }
  text { fill: var(--ink); font: 13px system-ui, sans-serif; }
  .title { font-size: 15px; font-weight: 600; }
  .limit { font-weight: 600; }
  .quiet { fill: var(--quiet); font-size: 12px; }
  .line { stroke: var(--line); fill: none; }
  .window { stroke: var(--edge); stroke-dasharray: 4 3; }
  .area { fill: var(--area); stroke: var(--edge); }
  .yes { fill: var(--yes); }
  .no { stroke: var(--no); stroke-width: 1.7; fill: none; }
";

/// A number of tenths as SVG writes it.
fn tenths(n: u64) -> String {
    if n.is_multiple_of(10) { format!("{}", n / 10) } else { format!("{}.{}", n / 10, n % 10) }
}

/// The moments that the time axis names.
fn seconds() -> impl Iterator<Item = u64> {
    (BEGIN_MS / 1_000..=END_MS / 1_000).step_by(5)
}

impl Layout {
    fn x(&self, time_ms: u64) -> String {
        tenths(10 * self.left + 10 * (time_ms - BEGIN_MS) * self.plot / (END_MS - BEGIN_MS))
    }

    /// The drawing of these rows, each under its own limit, on one time axis.
    pub(crate) fn draw(&self, title: [&str; 2], rows: &[BurstRow]) -> String {
        let Self { width, top, .. } = self;
        let height = top + self.row * u64::try_from(rows.len()).unwrap_or(0) + 26;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-labelledby=\"t d\">\n\
             <title id=\"t\">{}</title>\n<desc id=\"d\">{}</desc>\n<style>{STYLE}</style>\n\
             <rect class=\"paper\" width=\"{width}\" height=\"{height}\" rx=\"6\"/>\n",
            title.join(" "),
            described(rows)
        );
        for (line, y) in (self.title)(title).into_iter().zip([24, 44]) {
            let _ = writeln!(out, "<text class=\"title\" x=\"16\" y=\"{y}\">{line}</text>");
        }
        self.draw_legend(&mut out);
        for second in seconds() {
            let at = self.x(second * 1_000);
            let _ = writeln!(
                out,
                "<text class=\"quiet\" x=\"{at}\" y=\"{}\" text-anchor=\"middle\">{second} s</text>",
                height - 9
            );
        }
        for (row, top) in rows.iter().zip((*top..).step_by(usize::try_from(self.row).unwrap_or(1)))
        {
            self.draw_row(&mut out, row, top);
        }
        out.push_str("</svg>\n");
        out
    }

    /// The marks as they stand in the rows.
    fn draw_legend(&self, out: &mut String) {
        let (y, (x, boundary)) = (self.legend, self.boundary);
        let _ = writeln!(
            out,
            "<circle class=\"yes\" cx=\"22\" cy=\"{}\" r=\"4.2\"/><text class=\"quiet\" x=\"32\" y=\"{y}\">admitted</text>\n\
             <path class=\"no\" d=\"M98 {}.5l7 7m0-7l-7 7\"/><text class=\"quiet\" x=\"112\" y=\"{y}\">denied</text>\n\
             <rect class=\"area\" x=\"164\" y=\"{}\" width=\"16\" height=\"12\"/>\
             <text class=\"quiet\" x=\"186\" y=\"{y}\">what remains</text>\n\
             <path class=\"line window\" d=\"M{x} {}h22\"/>\
             <text class=\"quiet\" x=\"{}\" y=\"{boundary}\">boundary of a window of 10 s, aligned to the clock</text>",
            y - 4,
            y - 8,
            y - 10,
            boundary - 4,
            x + 28
        );
    }

    fn draw_row(&self, out: &mut String, row: &BurstRow, top: u64) {
        let admitted = row.requests.iter().filter(|(_, is_admitted)| *is_admitted).count();
        // A long limit in two parts.
        let (name, numbers) = row.limit.split_once(' ').unwrap_or((row.limit, ""));
        let (numbers_x, numbers_y, anchor) = self.numbers;
        let (full, empty, scale) = (top + self.full, top + self.empty, self.left + self.plot + 6);
        let _ = writeln!(
            out,
            "<path class=\"line\" d=\"M16 {top}H{}\"/>\n\
             <text class=\"limit\" x=\"16\" y=\"{}\">{name}</text>\n\
             <text class=\"quiet\" x=\"{numbers_x}\" y=\"{}\" text-anchor=\"{anchor}\">{numbers}: {admitted} of {}</text>\n\
             <text class=\"quiet\" x=\"16\" y=\"{}\">{}</text>\n\
             <text class=\"quiet\" x=\"{scale}\" y=\"{}\">{}</text>\n\
             <text class=\"quiet\" x=\"{scale}\" y=\"{}\">0</text>",
            self.width - 16,
            top + 19,
            top + numbers_y,
            row.requests.len(),
            top + self.note,
            row.note,
            full + 6,
            row.capacity,
            empty + 3,
        );

        for second in seconds() {
            let window = if second.is_multiple_of(10) { " window" } else { "" };
            let (at, begin, end) = (self.x(second * 1_000), top + self.begin, top + self.row);
            let _ = writeln!(out, "<path class=\"line{window}\" d=\"M{at} {begin}V{end}\"/>");
        }

        let y = |left: u64| {
            tenths(10 * empty - 10 * (empty - full) * left.min(row.capacity) / row.capacity)
        };
        let mut area = format!("M{} {empty}", self.x(BEGIN_MS));
        for (time_ms, left) in
            row.remaining.iter().filter(|(time_ms, _)| (BEGIN_MS..END_MS).contains(time_ms))
        {
            let _ = write!(area, "H{}V{}", self.x(*time_ms), y(*left));
        }
        let _ = writeln!(out, "<path class=\"area\" d=\"{area}H{}V{empty}Z\"/>", self.x(END_MS));
        let (marks, radius, arm) = (top + self.marks, tenths(self.mark), tenths(self.mark - 3));
        let stroke = tenths(2 * (self.mark - 3));
        for (time_ms, is_admitted) in &row.requests {
            let at = self.x(*time_ms);
            let _ = if *is_admitted {
                writeln!(out, "<circle class=\"yes\" cx=\"{at}\" cy=\"{marks}\" r=\"{radius}\"/>")
            } else {
                writeln!(
                    out,
                    "<path class=\"no\" d=\"M{at} {marks}m-{arm}-{arm}l{stroke} {stroke}m0-{stroke}l-{stroke} {stroke}\"/>"
                )
            };
        }
    }
}

/// The drawing in words, for readers who do not see it.
fn described(rows: &[BurstRow]) -> String {
    let told = rows.iter().map(|row| {
        let admitted = row.requests.iter().filter(|(_, is_admitted)| *is_admitted).count();
        format!("{}: {admitted} of {} requests admitted.", row.limit, row.requests.len())
    });
    told.collect::<Vec<_>>().join(" ")
}
