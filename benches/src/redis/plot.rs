//! Figures as SVG, for light and for dark screens.

use std::error::Error;
use std::fs;
use std::path::Path;

use plotters::coord::Shift;
use plotters::coord::combinators::{BindKeyPoints, IntoLogRange};
use plotters::prelude::{
    ChartBuilder, Circle, DrawingArea, IntoDrawingArea, IntoFont, LineSeries, PathElement,
    RGBColor, SVGBackend, SeriesLabelPosition, ShapeStyle, TextStyle,
};
use plotters::style::Color;

const SIZE: (u32, u32) = (980, 430);
/// The height of the figure's title and note.
const HEADING: i32 = 52;
const FONT: &str = "system-ui, sans-serif";

const PAPER: RGBColor = RGBColor(0xFF, 0xFF, 0xFF);
const INK: RGBColor = RGBColor(0x1F, 0x29, 0x33);
const QUIET: RGBColor = RGBColor(0x52, 0x60, 0x6D);
const RULE: RGBColor = RGBColor(0xCB, 0xD2, 0xD9);
/// Of lines, in their order. Lines of the same hue belong together.
const HUES: [RGBColor; 4] = [
    RGBColor(0x1D, 0x5F, 0xA8),
    RGBColor(0x8F, 0xB4, 0xDC),
    RGBColor(0xB8, 0x32, 0x00),
    RGBColor(0xE3, 0xA4, 0x8A),
];

/// The colours of the figure, each with its counterpart on a dark screen.
const ON_DARK: [(RGBColor, RGBColor); 8] = [
    (PAPER, RGBColor(0x17, 0x1B, 0x21)),
    (INK, RGBColor(0xE4, 0xE7, 0xEB)),
    (QUIET, RGBColor(0xA3, 0xB0, 0xBD)),
    (RULE, RGBColor(0x3A, 0x45, 0x52)),
    (HUES[0], RGBColor(0x6C, 0xB2, 0xF5)),
    (HUES[1], RGBColor(0x41, 0x66, 0x8C)),
    (HUES[2], RGBColor(0xFF, 0x94, 0x66)),
    (HUES[3], RGBColor(0x94, 0x57, 0x3F)),
];

/// Panels side by side under one title.
pub(super) struct Figure {
    pub(super) title: String,
    /// Where and how it was measured.
    pub(super) note: String,
    pub(super) panels: Vec<Panel>,
}

/// Lines over one axis. The horizontal axis is logarithmic and has a label at each point.
pub(super) struct Panel {
    pub(super) title: &'static str,
    /// What the axes show, and its unit.
    pub(super) x: &'static str,
    pub(super) y: &'static str,
    pub(super) scale: Scale,
    pub(super) lines: Vec<Line>,
}

/// The scale of the vertical axis.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Scale {
    /// From zero.
    Linear,
    Logarithmic,
}

/// The points of one line, in the order of x.
pub(super) struct Line {
    pub(super) name: String,
    pub(super) points: Vec<(f64, f64)>,
}

impl Figure {
    /// Writes the figure to this file.
    pub(super) fn write(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        fs::write(path, self.draw()?).map_err(|error| {
            format!("cannot write {}: {error}; choose another folder for --plots", path.display())
                .into()
        })
    }

    /// The figure as SVG.
    pub(super) fn draw(&self) -> Result<String, Box<dyn Error>> {
        let mut svg = String::new();
        let whole = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        whole.fill(&PAPER)?;
        whole.draw_text(&self.title, &text(17, INK), (16, 12))?;
        whole.draw_text(&self.note, &text(12, QUIET), (16, 34))?;
        let (_, below) = whole.split_vertically(HEADING);
        for (panel, area) in self.panels.iter().zip(below.split_evenly((1, self.panels.len()))) {
            panel.draw(&area)?;
        }
        whole.present()?;
        drop((below, whole));
        let end = svg.find('>').ok_or("an SVG without an element")? + 1;
        svg.insert_str(end, &self.inside());
        Ok(svg)
    }

    /// What the figure says without being seen, and its colours on a dark screen.
    fn inside(&self) -> String {
        let rule = |(light, dark): &(RGBColor, RGBColor)| {
            let (light, dark) = (hex(*light), hex(*dark));
            format!("[fill=\"{light}\"]{{fill:{dark}}}[stroke=\"{light}\"]{{stroke:{dark}}}\n")
        };
        let dark: String = ON_DARK.iter().map(rule).collect();
        format!(
            "\n<title>{}</title>\n<desc>{}</desc>\n<style>@media (prefers-color-scheme: dark) {{\n{dark}}}</style>\n",
            self.title, self.note
        )
    }
}

impl Panel {
    fn draw(&self, area: &DrawingArea<SVGBackend<'_>, Shift>) -> Result<(), Box<dyn Error>> {
        let all = || self.lines.iter().flat_map(|line| &line.points);
        let mut labels: Vec<f64> = all().map(|point| point.0).collect();
        labels.sort_by(f64::total_cmp);
        labels.dedup();
        let (least, most) = bounds(labels.iter().copied());
        let x = least / 1.15..most * 1.15;
        let (least, most) = bounds(all().map(|point| point.1));
        // Room above for the legend.
        let y = match self.scale {
            Scale::Linear => 0.0..most * 1.6,
            Scale::Logarithmic => least / 1.25..most * 1.25 * (most / least).powf(0.3),
        };
        let mut builder = ChartBuilder::on(area);
        builder
            .margin(14)
            .x_label_area_size(44)
            .y_label_area_size(64)
            .caption(self.title, text(14, INK));
        // Each scale has a type of its own.
        macro_rules! draw {
            ($y:expr) => {{
                let x = x.log_scale().with_key_points(labels);
                let mut chart = builder.build_cartesian_2d(x, $y)?;
                chart
                    .configure_mesh()
                    .x_desc(self.x)
                    .y_desc(self.y)
                    .y_labels(6)
                    .x_label_formatter(&|value| short(*value))
                    .y_label_formatter(&|value| short(*value))
                    .label_style(text(12, QUIET))
                    .axis_desc_style(text(13, INK))
                    .axis_style(RULE)
                    .bold_line_style(RULE)
                    .light_line_style(RULE.mix(0.0))
                    .draw()?;
                for (place, line) in self.lines.iter().enumerate() {
                    let (hue, marker) = style(place);
                    let points = line.points.iter().copied();
                    let series = LineSeries::new(points.clone(), hue.stroke_width(2));
                    chart.draw_series(series)?.label(&line.name).legend(move |(x, y)| {
                        PathElement::new(vec![(x, y), (x + 18, y)], hue.stroke_width(3))
                    });
                    chart.draw_series(points.map(|point| Circle::new(point, 4, marker)))?;
                }
                chart
                    .configure_series_labels()
                    .position(SeriesLabelPosition::UpperLeft)
                    .background_style(PAPER)
                    .border_style(RULE)
                    .label_font(text(12, INK))
                    .draw()?;
            }};
        }
        match self.scale {
            Scale::Linear => draw!(y),
            Scale::Logarithmic => draw!(y.log_scale()),
        }
        Ok(())
    }
}

/// The hue of a line and its marks: every other line has hollow marks, to be told apart without colours.
fn style(place: usize) -> (RGBColor, ShapeStyle) {
    let hue = HUES[place % HUES.len()];
    (hue, if place.is_multiple_of(2) { hue.filled() } else { hue.stroke_width(2) })
}

fn text(size: i32, colour: RGBColor) -> TextStyle<'static> {
    (FONT, size).into_font().color(&colour)
}

fn hex(RGBColor(red, green, blue): RGBColor) -> String {
    format!("#{red:02X}{green:02X}{blue:02X}")
}

/// The least and the most of these values.
fn bounds(values: impl Iterator<Item = f64>) -> (f64, f64) {
    values.fold((f64::MAX, f64::MIN), |(least, most), value| (least.min(value), most.max(value)))
}

/// A number as a label of an axis has it: 250, 16 k, 1.5 M.
fn short(value: f64) -> String {
    let (scaled, unit) = match value {
        1e6.. => (value / 1e6, " M"),
        1e4.. => (value / 1e3, " k"),
        _ => (value, ""),
    };
    let digits = format!("{scaled:.1}");
    format!("{}{unit}", digits.strip_suffix(".0").unwrap_or(&digits))
}

#[cfg(test)]
#[allow(clippy::expect_used)]
mod tests {
    use super::*;

    fn figure() -> Figure {
        let points = |most: f64| (0..6).map(|n| (4_f64.powi(n), most * 1.5_f64.powi(n))).collect();
        let lines =
            || ["ours", "loop"].map(|name| Line { name: name.into(), points: points(9e3) }).into();
        let panel = |title, scale| Panel {
            title,
            x: "tasks",
            y: "decisions per second",
            scale,
            lines: lines(),
        };
        let panels = vec![panel("one", Scale::Logarithmic), panel("two", Scale::Linear)];
        Figure { title: "How it grows".into(), note: "by a test".into(), panels }
    }

    #[test]
    fn a_figure_has_names_units_and_a_counterpart_of_each_colour_on_dark_screens() {
        let svg = figure().draw().expect("draws");
        for word in ["How it grows", "by a test", "ours", "loop", "tasks", "decisions per second"] {
            assert!(svg.contains(word), "{word}");
        }
        for (attribute, quoted) in [("fill", "fill=\""), ("stroke", "stroke=\"")] {
            let used = svg.split(quoted).skip(1).filter_map(|rest| rest.split('"').next());
            for colour in used.filter(|colour| colour.starts_with('#')) {
                let rule = format!("[{attribute}=\"{colour}\"]{{{attribute}:#");
                assert!(svg.contains(&rule), "{rule}");
            }
        }
    }

    #[test]
    fn labels_are_short() {
        let labels = [1.0, 256.0, 1_024.0, 16_000.0, 250_000.0, 1_500_000.0].map(short);
        assert_eq!(labels, ["1", "256", "1024", "16 k", "250 k", "1.5 M"]);
    }
}
