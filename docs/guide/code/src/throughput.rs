//! Decisions per second on Redis and how long one takes, of the store, whose calls are merged, and
//! of a plain loop over a script: medians, with ranges over the rounds.

use std::error::Error;

use serde_json::Value;

use crate::Drawing;
use crate::data::{measured, number};
use crate::svg::{Axis, MARGIN, Plot, Svg, closed, grouped, px, width};

/// How many keys the requests are for.
const KEYS: [(u32, &str); 2] = [(1, "one key"), (100_000, "100,000 keys")];
/// The figures, and whose they are: the benchmark's names.
const FIGURES: [&str; 2] = ["per_s", "p99_us"];
const WAYS: [(&str, &str, &str); 2] =
    [("peer", "other", "a script per request"), ("ours", "yes", "ratelimit, merged calls")];

/// A figure at so many tasks: its median, its least and its greatest.
type Point = (f64, [f64; 3]);

fn points(
    rows: &[Value],
    keys: u32,
    way: &str,
    figure: &str,
) -> Result<Vec<Point>, Box<dyn Error>> {
    let wanted = rows.iter().filter(|row| {
        row["part"] == "throughput"
            && row["client"] == "redis"
            && row["peer"] == "redis-rs loop"
            && row["keys"] == keys
    });
    let point = |row: &Value| {
        let range = &row[format!("{way}_{figure}_range")];
        let [least, greatest] = [0, 1].map(|end| range[end].as_f64().ok_or("no range"));
        let median = number(row, &format!("{way}_{figure}"))?;
        Ok((number(row, "tasks")?, [median, least?, greatest?]))
    };
    wanted.map(point).collect()
}

/// The drawing, for a wide page and for a narrow one.
pub(crate) fn drawings() -> Result<[Drawing; 2], Box<dyn Error>> {
    let rows = measured("throughput.jsonl")?;
    let mut described = Vec::new();
    for (keys, name) in KEYS {
        for (way, _, whose) in WAYS {
            let [per_s, p99_us] = FIGURES.map(|figure| points(&rows, keys, way, figure));
            let (per_s, p99_us) = (per_s?, p99_us?);
            let (Some((tasks, [per_s, ..])), Some((_, [p99_us, ..]))) =
                (per_s.last(), p99_us.last())
            else {
                return Err(format!("nothing measured for {name}").into());
            };
            described.push(format!(
                "{name}, {tasks} tasks, {whose}: {} decisions per second, p99 {:.1} ms.",
                grouped(*per_s),
                p99_us / 1e3
            ));
        }
    }
    let described = described.join(" ");
    Drawing::both("throughput", |is_wide| {
        let title = ["Decisions on Redis, by the number", "of tasks that wait for one"];
        let top = if is_wide { 68.0 } else { 108.0 };
        let height = top + if is_wide { BLOCK } else { 2.0 * BLOCK };
        let mut svg = Svg::new(is_wide, height, &title, &described);
        legend(&mut svg, is_wide);
        let (left, gap) = (78.0, 78.0);
        let column = (width(true) - left - gap - 1.5 * MARGIN) / 2.0;
        for ((keys, name), nth) in KEYS.into_iter().zip([0.0, 1.0]) {
            let (x, y, length) = if is_wide {
                (left + nth * (column + gap), top, column)
            } else {
                (left, top + nth * BLOCK, width(false) - left - 1.5 * MARGIN)
            };
            svg.text("strong", (x, y + 12.0), name);
            block(&mut svg, (x, y, length), &rows, keys)?;
        }
        Ok(svg.finish())
    })
}

/// The fields from their top on, and the height of all.
const PER_S: (f64, f64) = (44.0, 154.0);
const P99: (f64, f64) = (186.0, 286.0);
const BLOCK: f64 = 340.0;

fn legend(svg: &mut Svg, is_wide: bool) {
    let y = if is_wide { 47.0 } else { 67.0 };
    let (range_x, range_y) = if is_wide { (362.0, y) } else { (MARGIN, y + 20.0) };
    for ((_, class, name), x) in WAYS.into_iter().rev().zip([MARGIN, 190.0]) {
        svg.path(&format!("{class}-line"), &format!("M{} {}h18", px(x), px(y - 4.0)));
        svg.text("quiet", (x + 24.0, y), name);
    }
    svg.rect("yes faint", (range_x, range_y - 10.0), (18.0, 12.0));
    svg.text("quiet", (range_x + 24.0, range_y), "from the slowest round to the fastest");
}

fn block(
    svg: &mut Svg,
    (left, top, length): (f64, f64, f64),
    rows: &[Value],
    keys: u32,
) -> Result<(), Box<dyn Error>> {
    let x = Axis { begin: left, length, from: 1.0, to: 1_024.0, is_log: true };
    let per_s = Plot { x, y: Axis::up(top, PER_S, (2_500.0, 1_000_000.0), true) };
    let p99 = Plot { x, y: Axis::up(top, P99, (0.03, 300.0), true) };
    svg.text("quiet", (left, top + PER_S.0 - 10.0), "decisions per second");
    svg.text("quiet", (left, top + P99.0 - 10.0), "99 of 100 decisions within (ms)");
    let ticks = [10_000.0, 100_000.0, 1_000_000.0].map(|value| (value, grouped(value)));
    per_s.rows(svg, &ticks);
    p99.rows(svg, &[0.1, 1.0, 10.0, 100.0].map(|ms: f64| (ms, ms.to_string())));
    let ticks = [1_u32, 16, 256, 1_024].map(|tasks| (tasks.into(), grouped(tasks.into())));
    p99.columns(svg, &ticks, true);
    svg.text("quiet middle", (left + length / 2.0, top + P99.1 + 34.0), "tasks");
    for (plot, figure, scale) in [(per_s, FIGURES[0], 1.0), (p99, FIGURES[1], 1e3)] {
        for (way, class, _) in WAYS {
            let points = points(rows, keys, way, figure)?;
            let line = |of: usize| {
                points.iter().map(move |(tasks, all)| plot.at((*tasks, all[of] / scale)))
            };
            svg.path(&format!("{class} faint"), &closed(line(1).chain(line(2).rev())));
            svg.line(&format!("{class}-line"), line(0));
            for point in line(0) {
                svg.circle(class, point, 2.6);
            }
        }
    }
    Ok(())
}
