//! The Grafana dashboard, drawn from what a Prometheus answered to its panels: a burst, and an
//! outage of Redis.

use std::error::Error;

use serde_json::{Map, Value};

use crate::Drawing;
use crate::data::{measured, number};
use crate::svg::{Axis, MARGIN, Plot, Svg, grouped, path, width};

const DASHBOARD: &str = include_str!("../../../../ratelimit-layers/dashboard.json");
/// What is shown behind the series: the benchmark's names, and the colours.
const SHADED: [(&str, &str); 2] = [("burst", "no faint"), ("Redis hangs", "back")];
/// The lines of the series of a panel; those beyond are dashed.
const LINES: [&str; 4] = ["yes", "no", "other", "ink"];
/// The states of a circuit breaker by their numbers.
const STATES: [(&str, &str); 3] = [("closed", "yes"), ("half-open", "other"), ("open", "no")];

/// The size of Grafana's grid, and of the room between panels.
const COLUMNS: f64 = 24.0;
const ROW: f64 = 23.0;
const GAP: f64 = 20.0;

/// A part of the story: its name, and from when until when.
type Part = (String, [f64; 2]);
/// The name of a series, and its values at each second.
type Series = (String, Vec<Option<f64>>);

struct Panel {
    title: String,
    unit: String,
    is_states: bool,
    is_log: bool,
    /// Its place in the grid: x, y and width.
    place: [f64; 3],
    series: Vec<Series>,
}

impl Panel {
    fn read(panel: &Value, rows: &[Value]) -> Result<Self, Box<dyn Error>> {
        let mut series = Vec::new();
        for target in panel["targets"].as_array().into_iter().flatten() {
            let row = rows.iter().find(|row| row["expr"] == target["expr"]);
            let row = row.ok_or_else(|| format!("not measured: {}", target["expr"]))?;
            for (name, values) in row["series"].as_object().into_iter().flat_map(Map::iter) {
                let values = values.as_array().into_iter().flatten().map(Value::as_f64).collect();
                series.push((name.clone(), values));
            }
        }
        let (grid, look) = (&panel["gridPos"], &panel["fieldConfig"]["defaults"]);
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(Self {
            title: text(&panel["title"]),
            unit: text(&look["unit"]),
            is_states: panel["type"] == "state-timeline",
            is_log: look["custom"]["scaleDistribution"]["type"] == "log" && !series.is_empty(),
            place: [number(grid, "x")?, number(grid, "y")?, number(grid, "w")?],
            series,
        })
    }

    /// The values on the left: from the least to the greatest of the axis.
    fn ticks(&self) -> Vec<f64> {
        let values = self.series.iter().flat_map(|(_, values)| values.iter().flatten().copied());
        let most = values.clone().fold(0.0, f64::max);
        if self.is_log {
            let least = values.filter(|value| *value > 0.0).fold(most, f64::min);
            let ticks = (-6..3).map(|power| 10_f64.powi(power));
            return ticks.filter(|tick| *tick > least / 10.0 && *tick < most * 10.0).collect();
        }
        let step = step(most);
        let ticks = [0.0, 1.0, 2.0, 3.0, 4.0].map(|n| n * step);
        ticks.into_iter().filter(|tick| *tick < most.max(step) + step * 0.999).collect()
    }

    /// The names below the panel, and their styles.
    fn names(&self) -> Vec<(&str, String)> {
        if self.is_states {
            return STATES.map(|(name, class)| (name, format!("{class}-line"))).into();
        }
        self.series.iter().map(|(name, _)| &**name).zip(styles()).collect()
    }

    /// Where they stand below a panel of this length.
    fn places_of_names(&self, length: f64) -> Vec<(f64, f64)> {
        let (mut x, mut y) = (0.0, NAMES.0);
        let place = |(name, _): (&str, String)| {
            let wide = 34.0 + 6.3 * f64::from(u32::try_from(name.len()).unwrap_or_default());
            if x > 0.0 && x + wide > length + 14.0 {
                (x, y) = (0.0, y + NAMES.1);
            }
            x += wide;
            (x - wide, y)
        };
        self.names().into_iter().map(place).collect()
    }
}

/// The drawing, for a wide page and for a narrow one.
pub(crate) fn drawings() -> Result<[Drawing; 2], Box<dyn Error>> {
    let rows = measured("dashboard.jsonl")?;
    let story = rows.iter().filter_map(|row| Some((row["what"].as_str()?.to_owned(), row)));
    let story = story.map(|(what, row)| Ok((what, [number(row, "from_s")?, number(row, "to_s")?])));
    let story = story.collect::<Result<Vec<Part>, Box<dyn Error>>>()?;
    let dashboard: Value = serde_json::from_str(DASHBOARD)?;
    let panels = dashboard["panels"].as_array().into_iter().flatten();
    let panels = panels.map(|panel| Panel::read(panel, &rows));
    let panels = panels.collect::<Result<Vec<_>, _>>()?;
    let described = panels.iter().map(|panel| {
        let names: Vec<_> = panel.series.iter().map(|(name, _)| &**name).collect();
        format!(
            "{}: {}.",
            panel.title,
            if names.is_empty() { "no data".into() } else { names.join(", ") }
        )
    });
    let described = described.collect::<Vec<_>>().join(" ");
    Drawing::both("dashboard", |is_wide| {
        let title = ["The dashboard, while a caller bursts", "and while Redis hangs"];
        let top = if is_wide { 66.0 } else { 86.0 };
        let column = (width(is_wide) - 2.0 * MARGIN + GAP) / COLUMNS;
        let mut places = Vec::new();
        let mut bottom = top;
        for panel in &panels {
            let [x, y, columns] = panel.place;
            let (x, y, columns) =
                if is_wide { (x, top + y * ROW, columns) } else { (0.0, bottom, COLUMNS) };
            let length = columns * column - GAP;
            places.push((MARGIN + x * column, y, length));
            let names = panel.places_of_names(length).last().map_or(NAMES.0, |(_, y)| *y);
            bottom = bottom.max(y + names + GAP);
        }
        let mut svg = Svg::new(is_wide, bottom, &title, &described);
        for ((name, class), x) in SHADED.iter().zip([MARGIN, 86.0]) {
            svg.rect(class, (x, top - 26.0), (12.0, 12.0));
            svg.text("quiet", (x + 18.0, top - 16.0), name);
        }
        for (panel, place) in panels.iter().zip(places) {
            draw(&mut svg, place, panel, &story);
        }
        Ok(svg.finish())
    })
}

/// The field of a panel from its top on, the room beside it, and the lines of names below.
const FIELD: (f64, f64) = (26.0, 104.0);
const BESIDE: (f64, f64) = (66.0, 14.0);
const NAMES: (f64, f64) = (138.0, 16.0);

fn draw(svg: &mut Svg, (left, top, length): (f64, f64, f64), panel: &Panel, story: &[Part]) {
    svg.text("strong", (left, top + 14.0), &panel.title);
    let end = story.last().map_or(1.0, |(_, [_, to])| *to);
    let (begin, room) = (left + BESIDE.0, length - BESIDE.0 - BESIDE.1);
    let x = Axis { begin, length: room, from: 0.0, to: end, is_log: false };
    let ticks = panel.ticks();
    let range = (ticks[0], ticks[ticks.len() - 1]);
    let plot = Plot { x, y: Axis::up(top, FIELD, range, panel.is_log) };
    for (what, [from, to]) in story {
        if let Some((_, class)) = SHADED.iter().find(|(name, _)| name == what) {
            let size = (x.at(*to) - x.at(*from), FIELD.1 - FIELD.0);
            svg.rect(class, (x.at(*from), top + FIELD.0), size);
        }
    }
    let seconds = [0_u32, 60, 120].map(|s| (f64::from(s), format!("{s} s")));
    plot.columns(svg, &seconds, false);
    let is_plain = panel.is_states || panel.series.is_empty();
    let ticks = ticks.into_iter().take(if is_plain { 1 } else { usize::MAX });
    let name = |tick| if is_plain { String::new() } else { in_unit(tick, &panel.unit) };
    plot.rows(svg, &ticks.map(|tick| (tick, name(tick))).collect::<Vec<_>>());
    if panel.series.is_empty() {
        svg.text("quiet middle", (x.at(end / 2.0), top + 70.0), "No data");
    }
    for ((_, values), style) in panel.series.iter().zip(styles()) {
        if panel.is_states {
            states(svg, &plot, values);
            continue;
        }
        // A second without a value leaves a gap.
        let seconds: Vec<_> = values.iter().zip(0_u32..).collect();
        let point = |(value, at): &(&Option<f64>, u32)| Some(plot.at((f64::from(*at), (**value)?)));
        let runs = seconds.split(|(value, _)| value.is_none());
        svg.path(&style, &runs.map(|run| path(run.iter().filter_map(point))).collect::<String>());
    }
    for ((name, style), (x, y)) in panel.names().into_iter().zip(panel.places_of_names(length)) {
        let (x, y) = (left + x, top + y);
        svg.line(&style, [(x, y - 4.0), (x + 16.0, y - 4.0)]);
        svg.text("quiet", (x + 20.0, y), name);
    }
}

/// The styles of lines, one after the other. Every second one is dashed, so that it does not hide
/// the one below it.
fn styles() -> impl Iterator<Item = String> {
    (0..2 * LINES.len()).map(|nth| {
        let (round, place) = (nth / LINES.len(), nth % LINES.len());
        let dash = if (round + place).is_multiple_of(2) { "" } else { " dashed" };
        format!("{}-line{dash}", LINES[place])
    })
}

/// A bar for as long as a state lasts.
fn states(svg: &mut Svg, plot: &Plot, values: &[Option<f64>]) {
    let mut from = 0_u32;
    for run in values.chunk_by(|one, next| one == next) {
        let to = from + u32::try_from(run.len()).unwrap_or_default();
        let state = STATES.iter().zip([0.0, 1.0, 2.0]).find(|(_, number)| run[0] == Some(*number));
        if let Some(((_, class), _)) = state {
            let [from, to] = [from, to].map(|at| plot.x.at(at.into()));
            svg.rect(class, (from, plot.y.begin - 50.0), (to - from, 24.0));
        }
        from = to;
    }
}

/// The least 1, 2 or 5, times a power of ten, that reaches the value in four steps.
fn step(most: f64) -> f64 {
    if most <= 0.0 {
        return 1.0;
    }
    let power = 10_f64.powf((most / 4.0).log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|step| step * power);
    steps.into_iter().find(|step| most <= 4.0 * step).unwrap_or(10.0 * power)
}

/// A value as Grafana writes it.
fn in_unit(value: f64, unit: &str) -> String {
    let (factor, name) = match unit {
        "percentunit" => (1e2, " %"),
        "s" => (1e3, " ms"),
        "reqps" => (1.0, " req/s"),
        "ops" => (1.0, " ops/s"),
        "cps" => (1.0, " c/s"),
        _ => (1.0, ""),
    };
    let value = (value * factor * 1e3).round() / 1e3;
    let text = if value.fract() == 0.0 { grouped(value) } else { value.to_string() };
    text + name
}
