//! How long a decision in memory takes, and how many bytes it needs per key, beside governor.

use std::error::Error;

use serde_json::Value;

use crate::Drawing;
use crate::data::{measured, number, table};
use crate::svg::{Axis, MARGIN, NARROW, Svg, WIDE, grouped, px};

/// A number of keys, and the figures of ratelimit and of governor.
type Pair = (String, [f64; 2]);

/// The benchmark's names of its scenarios, and the reader's.
const SCENARIOS: [(&str, &str); 3] =
    [("hot", "one key"), ("1k-uniform", "1,000 keys"), ("1m-uniform", "1,000,000 keys")];
/// The numbers of keys whose heap is drawn.
const SIZES: [&str; 3] = ["100000", "1000000", "10000000"];

/// Nanoseconds of an allowed decision on one thread, one at a time, each with its default clock.
fn nanoseconds() -> Result<Vec<Pair>, Box<dyn Error>> {
    let rows = measured("speed.jsonl")?;
    let pair = |(scenario, keys): (&str, &str)| {
        let is_wanted = |row: &&Value| {
            row["scenario"] == scenario
                && row["outcome"] == "allowed"
                && row["threads"] == 1
                && row["clock"] == "precise"
                && row["batch"] == 1
                && row["peer"] == "governor"
        };
        let row = rows.iter().find(is_wanted).ok_or_else(|| format!("no row of {scenario}"))?;
        Ok((keys.to_owned(), [number(row, "ours_ns")?, number(row, "peer_ns")?]))
    };
    SCENARIOS.into_iter().map(pair).collect()
}

/// Bytes of the heap for each key.
fn bytes() -> Result<Vec<Pair>, Box<dyn Error>> {
    let rows = table("heap.txt")?;
    let figure = |name: &str, keys: &str| -> Result<f64, Box<dyn Error>> {
        let row =
            rows.iter().find(|row| row.first().is_some_and(|is| is == name) && row[1] == keys);
        Ok(row.ok_or_else(|| format!("no row of {name} for {keys} keys"))?[2].parse()?)
    };
    let pair = |keys: &str| {
        let name = format!("{} keys", grouped(keys.parse()?));
        Ok((name, [figure("gcra", keys)?, figure("governor", keys)?]))
    };
    SIZES.into_iter().map(pair).collect()
}

/// The drawing, for a wide page and for a narrow one.
pub(crate) fn drawings() -> Result<[Drawing; 2], Box<dyn Error>> {
    let (nanoseconds, bytes) = (&nanoseconds()?[..], &bytes()?[..]);
    let described = [("ns per decision", nanoseconds), ("bytes of heap per key", bytes)];
    let described = described.into_iter().flat_map(|(unit, pairs)| {
        pairs.iter().map(move |(keys, [ours, peer])| {
            format!("{keys}: ratelimit {ours:.0} {unit}, governor {peer:.0}.")
        })
    });
    let described = described.collect::<Vec<_>>().join(" ");
    Drawing::both("speed", |is_wide| {
        let (top, panel) = if is_wide {
            (68.0, (WIDE - 3.0 * MARGIN) / 2.0)
        } else {
            (88.0, NARROW - 2.0 * MARGIN)
        };
        let height = if is_wide { top + PANEL } else { top + 2.0 * PANEL };
        let title = ["Time per decision and memory per key,", "beside governor"];
        let mut svg = Svg::new(is_wide, height, &title, &described);
        for (x, class, name) in [(MARGIN, "yes", "ratelimit"), (106.0, "other", "governor")] {
            svg.rect(class, (x, top - 30.0), (12.0, 12.0));
            svg.text("quiet", (x + 18.0, top - 20.0), name);
        }
        let second = if is_wide { (2.0 * MARGIN + panel, top) } else { (MARGIN, top + PANEL) };
        let time = ("Nanoseconds per decision", "ns", nanoseconds);
        bars(&mut svg, (MARGIN, top), panel, time);
        bars(&mut svg, second, panel, ("Bytes of heap per key", "B", bytes));
        Ok(svg.finish())
    })
}

/// The height of a pair of bars with its name, and of all of them with their heading and axis.
const PAIR: f64 = 56.0;
const PANEL: f64 = 24.0 + 3.0 * PAIR + 30.0;

fn bars(
    svg: &mut Svg,
    (x, y): (f64, f64),
    width: f64,
    (title, unit, pairs): (&str, &str, &[Pair]),
) {
    svg.text("strong", (x, y + 12.0), title);
    let most = pairs.iter().flat_map(|(_, pair)| *pair).fold(0.0, f64::max);
    let steps = [10.0, 20.0, 25.0, 50.0, 100.0, 200.0, 500.0, 1_000.0];
    let step = steps.into_iter().find(|step| most / step <= 4.0).unwrap_or(most);
    // Behind the longest bar stands its number.
    let axis = Axis { begin: x, length: width - 60.0, from: 0.0, to: most, is_log: false };
    let (top, bottom) = (y + 24.0, y + 24.0 + 3.0 * PAIR);
    for tick in (0..=4).map(|n| f64::from(n) * step).filter(|tick| *tick <= most) {
        let at = axis.at(tick);
        svg.path("line", &format!("M{} {}V{}", px(at), px(top), px(bottom)));
        let class = if tick > 0.0 { "quiet middle" } else { "quiet" };
        svg.text(class, (at, bottom + 16.0), &format!("{} {unit}", grouped(tick)));
    }
    for ((keys, pair), top) in pairs.iter().zip([0.0, PAIR, 2.0 * PAIR].map(|row| top + row)) {
        svg.text("quiet", (x, top + 14.0), keys);
        for ((figure, class), at) in pair.iter().zip(["yes", "other"]).zip([top + 19.0, top + 33.0])
        {
            let length = axis.at(*figure) - x;
            svg.rect(class, (x, at), (length, 12.0));
            svg.text("", (x + length + 5.0, at + 10.5), &format!("{figure:.0} {unit}"));
        }
    }
}
