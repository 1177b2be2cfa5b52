//! Drawings as SVG: one theme, text and shapes, and plots with axes.

use std::fmt::Write;

/// The widths of a drawing: of a page of the guide, and of a telephone.
pub(crate) const WIDE: f64 = 796.0;
pub(crate) const NARROW: f64 = 360.0;
pub(crate) const fn width(is_wide: bool) -> f64 {
    if is_wide { WIDE } else { NARROW }
}

/// The space at the sides.
pub(crate) const MARGIN: f64 = 16.0;

/// The colours, and their counterparts on a dark screen.
const STYLE: &str = "
  svg { --paper: #ffffff; --ink: #1f2933; --quiet: #52606d; --line: #cbd2d9; --edge: #66788a; --area: #d9e2ec; --yes: #1d5fa8; --no: #b83200; }
  @media (prefers-color-scheme: dark) {
    svg { --paper: #171b21; --ink: #e4e7eb; --quiet: #a3b0bd; --line: #3a4552; --edge: #8fa1b3; --area: #2c3947; --yes: #6cb2f5; --no: #ff9466; }
  }
  .paper { fill: var(--paper); }
  text { fill: var(--ink); font: 13px system-ui, sans-serif; }
  .title { font-size: 15px; font-weight: 600; }
  .strong { font-weight: 600; }
  .quiet { fill: var(--quiet); font-size: 12px; }
  .small { font-size: 12px; font-weight: 600; }
  .code { font: 12px ui-monospace, monospace; white-space: pre; }
  .middle { text-anchor: middle; }
  .end { text-anchor: end; }
  .line { stroke: var(--line); fill: none; }
  .edge { stroke: var(--edge); fill: none; }
  .dashed { stroke-dasharray: 4 3; }
  .area { fill: var(--area); stroke: var(--edge); }
  .back { fill: var(--area); }
  .used { fill: var(--yes); fill-opacity: .25; stroke: var(--yes); }
  .debt { fill: var(--no); fill-opacity: .25; stroke: var(--no); }
  .yes { fill: var(--yes); }
  .no { fill: var(--no); }
  .other { fill: var(--edge); }
  .faint { fill-opacity: .25; }
  .half { fill: var(--ink); }
  .ink-line { stroke: var(--ink); stroke-width: 1.5; fill: none; }
  .yes-line { stroke: var(--yes); stroke-width: 1.7; fill: none; }
  .no-line { stroke: var(--no); stroke-width: 1.7; fill: none; }
  .other-line { stroke: var(--edge); stroke-width: 1.7; fill: none; }
";

/// A length as SVG writes it: tenths of a unit, so that each machine writes the same text.
pub(crate) fn px(length: f64) -> String {
    let text = format!("{length:.1}");
    text.strip_suffix(".0").map_or(text.clone(), str::to_owned)
}

/// A whole number with commas.
pub(crate) fn grouped(number: f64) -> String {
    let digits = format!("{number:.0}");
    let mut text = String::new();
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) && !text.ends_with('-') {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// A path through these points.
pub(crate) fn path(points: impl IntoIterator<Item = (f64, f64)>) -> String {
    let mut text = String::new();
    for (x, y) in points {
        let letter = if text.is_empty() { 'M' } else { 'L' };
        let _ = write!(text, "{letter}{} {}", px(x), px(y));
    }
    text
}

/// A path around these points.
pub(crate) fn closed(points: impl IntoIterator<Item = (f64, f64)>) -> String {
    path(points) + "Z"
}

/// A drawing that is written from the back to the front.
pub(crate) struct Svg(String);

impl Svg {
    /// A drawing of this height, its title in parts that a narrow one breaks into lines, and its
    /// contents in words, for readers who do not see it.
    pub(crate) fn new(is_wide: bool, height: f64, title: &[&str], described: &str) -> Self {
        let (width, height) = (px(width(is_wide)), px(height));
        let all = escaped(&title.join(" "));
        let mut svg = Self(format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {width} {height}\" role=\"img\" aria-labelledby=\"t d\">\n\
             <title id=\"t\">{all}</title>\n<desc id=\"d\">{}</desc>\n<style>{STYLE}</style>\n\
             <rect class=\"paper\" width=\"{width}\" height=\"{height}\" rx=\"6\"/>\n",
            escaped(described)
        ));
        let whole = [title.join(" ")];
        let lines = title.iter().map(|line| (*line).to_owned()).collect::<Vec<_>>();
        let lines = if is_wide { &whole[..] } else { &lines[..] };
        for (line, y) in lines.iter().zip([24.0, 44.0, 64.0]) {
            svg.text("title", (MARGIN, y), line);
        }
        svg
    }

    pub(crate) fn text(&mut self, class: &str, (x, y): (f64, f64), text: &str) {
        let class = if class.is_empty() { String::new() } else { format!(" class=\"{class}\"") };
        let text = escaped(text);
        let _ = writeln!(self.0, "<text{class} x=\"{}\" y=\"{}\">{text}</text>", px(x), px(y));
    }

    pub(crate) fn path(&mut self, class: &str, d: &str) {
        let _ = writeln!(self.0, "<path class=\"{class}\" d=\"{d}\"/>");
    }

    /// A line through these points.
    pub(crate) fn line(&mut self, class: &str, points: impl IntoIterator<Item = (f64, f64)>) {
        self.path(class, &path(points));
    }

    pub(crate) fn rect(&mut self, class: &str, (x, y): (f64, f64), (width, height): (f64, f64)) {
        let [x, y, width, height] = [x, y, width, height].map(px);
        let _ = writeln!(
            self.0,
            "<rect class=\"{class}\" x=\"{x}\" y=\"{y}\" width=\"{width}\" height=\"{height}\"/>"
        );
    }

    pub(crate) fn circle(&mut self, class: &str, (x, y): (f64, f64), radius: f64) {
        let [x, y, radius] = [x, y, radius].map(px);
        let _ =
            writeln!(self.0, "<circle class=\"{class}\" cx=\"{x}\" cy=\"{y}\" r=\"{radius}\"/>");
    }

    pub(crate) fn finish(mut self) -> String {
        self.0.push_str("</svg>\n");
        self.0
    }
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}

/// Values along a line: where it begins in pixels and how long it is, negative if upwards.
#[derive(Clone, Copy)]
pub(crate) struct Axis {
    pub(crate) begin: f64,
    pub(crate) length: f64,
    pub(crate) from: f64,
    pub(crate) to: f64,
    /// Equal lengths are equal factors.
    pub(crate) is_log: bool,
}

impl Axis {
    /// Values from the bottom of a field to its top, both counted from `y` on.
    pub(crate) const fn up(
        y: f64,
        (top, bottom): (f64, f64),
        (from, to): (f64, f64),
        is_log: bool,
    ) -> Self {
        Self { begin: y + bottom, length: top - bottom, from, to, is_log }
    }

    /// Where a value stands, at an end if it is beyond.
    pub(crate) fn at(&self, value: f64) -> f64 {
        let scaled = |value: f64| if self.is_log { value.log10() } else { value };
        let [from, to] = [self.from, self.to].map(scaled);
        let value = scaled(value.clamp(self.from, self.to));
        self.begin + self.length * (value - from) / (to - from)
    }
}

/// The field between two axes.
#[derive(Clone, Copy)]
pub(crate) struct Plot {
    pub(crate) x: Axis,
    pub(crate) y: Axis,
}

impl Plot {
    pub(crate) fn at(&self, (x, y): (f64, f64)) -> (f64, f64) {
        (self.x.at(x), self.y.at(y))
    }

    /// Lines across the field at these values, with their names on the left.
    pub(crate) fn rows(&self, svg: &mut Svg, ticks: &[(f64, String)]) {
        let end = px(self.x.begin + self.x.length);
        for (value, name) in ticks {
            let y = self.y.at(*value);
            svg.path("line", &format!("M{} {}H{end}", px(self.x.begin), px(y)));
            svg.text("quiet end", (self.x.begin - 6.0, y + 4.0), name);
        }
    }

    /// The names of these values under the field, and lines up to its top if wanted.
    pub(crate) fn columns(&self, svg: &mut Svg, ticks: &[(f64, String)], lines: bool) {
        let bottom = self.y.begin;
        for (value, name) in ticks {
            let x = self.x.at(*value);
            if lines {
                svg.path("line", &format!("M{} {}v{}", px(x), px(bottom), px(self.y.length)));
            }
            svg.text("quiet middle", (x, bottom + 16.0), name);
        }
    }
}
