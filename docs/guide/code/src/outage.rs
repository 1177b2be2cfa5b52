//! An outage of Redis in time, for each choice: answers per tenth of a second, how late they are,
//! and the circuit breaker.

use std::error::Error;

use serde_json::Value;

use crate::Drawing;
use crate::data::{measured, number};
use crate::svg::{Axis, MARGIN, Plot, Svg, closed, grouped, width};

/// The choices, and what they do.
const CHOICES: [(&str, &str); 3] =
    [("open", "admits all"), ("closed", "denies all"), ("local", "admits this node’s share")];
/// The answers that are counted together, and the end of the time axis.
const BIN_MS: f64 = 100.0;
const END_MS: f64 = 8_000.0;

/// The answers that came in a tenth of a second.
struct Bin {
    from_ms: f64,
    admitted: f64,
    denied: f64,
    p99_ms: f64,
}

/// What was measured for a choice.
struct Outage {
    bins: Vec<Bin>,
    /// When Redis hung and when it answered again.
    hung_ms: [f64; 2],
    /// When the breaker got into a state.
    breaker: Vec<(f64, String)>,
}

impl Outage {
    fn read(rows: &[Value], choice: &str) -> Result<Self, Box<dyn Error>> {
        let rows: Vec<&Value> = rows.iter().filter(|row| row["choice"] == choice).collect();
        let bins = rows.iter().filter(|row| row["what"].is_null()).map(|row| {
            let denied = number(row, "denied")? + number(row, "unavailable")?;
            let (from_ms, admitted) = (number(row, "from_ms")?, number(row, "admitted")?);
            Ok(Bin { from_ms, admitted, denied, p99_ms: number(row, "p99_ms")? })
        });
        let event = |what: &'static str| {
            rows.iter().filter(move |row| row["what"] == what).map(|row| {
                let state = row["state"].as_str().unwrap_or_default().to_owned();
                Ok::<_, Box<dyn Error>>((number(row, "at_ms")?, state))
            })
        };
        let redis = event("redis").collect::<Result<Vec<_>, _>>()?;
        let [(hangs, _), (answers, _)] = &redis[..] else {
            return Err(format!("{choice}: not one outage").into());
        };
        Ok(Self {
            bins: bins.collect::<Result<_, Box<dyn Error>>>()?,
            hung_ms: [*hangs, *answers],
            breaker: event("breaker").collect::<Result<_, _>>()?,
        })
    }

    /// Answers per second from here to there: admitted and denied.
    fn per_second(&self, from_ms: f64, to_ms: f64) -> [f64; 2] {
        let within = self.bins.iter().filter(|bin| (from_ms..to_ms).contains(&bin.from_ms));
        let [admitted, denied] = within.fold([0.0, 0.0], |[admitted, denied], bin| {
            [admitted + bin.admitted, denied + bin.denied]
        });
        [admitted, denied].map(|count| count * 1e3 / (to_ms - from_ms))
    }
}

/// The drawing, for a wide page and for a narrow one.
pub(crate) fn drawings() -> Result<[Drawing; 2], Box<dyn Error>> {
    let rows = measured("outage.jsonl")?;
    let outages = CHOICES.map(|(choice, _)| Outage::read(&rows, choice));
    let outages = outages.into_iter().collect::<Result<Vec<_>, _>>()?;
    let described = CHOICES.iter().zip(&outages).map(|((choice, _), outage)| {
        // Without the tenths in which it begins.
        let [from, to] = [outage.hung_ms[0] + 500.0, outage.hung_ms[1]];
        let [admitted, denied] = outage.per_second(from, to);
        format!(
            "{choice}: while Redis hangs, {} requests per second are admitted and {} denied.",
            grouped(admitted),
            grouped(denied)
        )
    });
    let described = described.collect::<Vec<_>>().join(" ");
    Drawing::both("outage", |is_wide| {
        let title =
            ["2,000 requests per second, twice what", "the limit admits, while Redis hangs"];
        let top = if is_wide { 70.0 } else { 112.0 };
        let height = top + if is_wide { BLOCK } else { 3.0 * BLOCK };
        let mut svg = Svg::new(is_wide, height, &title, &described);
        legend(&mut svg, is_wide);
        let most = outages.iter().flat_map(|outage| &outage.bins);
        let most = most.map(|bin| bin.admitted + bin.denied).fold(0.0, f64::max);
        let left = 44.0;
        let gap = 36.0;
        let column = (width(true) - left - MARGIN - 2.0 * gap) / 3.0;
        for ((choice, outage), nth) in CHOICES.iter().zip(&outages).zip([0.0, 1.0, 2.0]) {
            let (x, y, length) = if is_wide {
                (left + nth * (column + gap), top, column)
            } else {
                (left, top + nth * BLOCK, width(false) - left - MARGIN)
            };
            let is_first = nth < 1.0 || !is_wide;
            block(&mut svg, (x, y, length), *choice, outage, (most, is_first));
        }
        Ok(svg.finish())
    })
}

/// The fields of a choice from its top on, each from its top to its bottom, and its height.
const ANSWERS: (f64, f64) = (52.0, 142.0);
const LATE: (f64, f64) = (172.0, 232.0);
const BREAKER: (f64, f64) = (258.0, 270.0);
const BLOCK: f64 = 312.0;

fn legend(svg: &mut Svg, is_wide: bool) {
    let second = if is_wide { (270.0, 50.0) } else { (MARGIN, 90.0) };
    let first = (MARGIN, if is_wide { 50.0 } else { 70.0 });
    let entries = [
        (first, 0.0, "yes", "admitted"),
        (first, 84.0, "no", "denied"),
        (first, 154.0, "back", "Redis hangs"),
        (second, 0.0, "other", "breaker open"),
        (second, 106.0, "half", "half-open: one request tries Redis"),
    ];
    for ((x, y), shift, class, words) in entries {
        svg.rect(class, (x + shift, y - 10.0), (12.0, 12.0));
        svg.text("quiet", (x + shift + 17.0, y), words);
    }
}

fn block(
    svg: &mut Svg,
    (left, top, length): (f64, f64, f64),
    (choice, does): (&str, &str),
    outage: &Outage,
    (most, is_first): (f64, bool),
) {
    let x = Axis { begin: left, length, from: 0.0, to: END_MS, is_log: false };
    let answers = Plot { x, y: Axis::up(top, ANSWERS, (0.0, most), false) };
    let late = Plot { x, y: Axis::up(top, LATE, (0.1, 100.0), true) };
    let [hangs, ends] = outage.hung_ms.map(|at| x.at(at));
    let hung = (ANSWERS.0, BREAKER.1);
    svg.rect("back", (hangs, top + hung.0), (ends - hangs, hung.1 - hung.0));
    svg.text("strong", (left, top + 14.0), choice);
    svg.text("quiet", (left + 58.0, top + 14.0), does);

    let numbers = |values: &[f64], name: fn(f64) -> String| -> Vec<(f64, String)> {
        values
            .iter()
            .map(|value| (*value, if is_first { name(*value) } else { String::new() }))
            .collect()
    };
    answers.rows(
        svg,
        &numbers(
            &[0.0, 100.0, 200.0, 300.0].into_iter().filter(|n| *n <= most).collect::<Vec<_>>(),
            grouped,
        ),
    );
    late.rows(svg, &numbers(&[0.1, 1.0, 10.0, 100.0], |ms| ms.to_string()));
    if is_first {
        svg.text("quiet", (left, top + ANSWERS.0 - 10.0), "answers per 0.1 s");
        svg.text("quiet", (left, top + LATE.0 - 9.0), "99 of 100 answers within (ms)");
        svg.text("quiet", (left, top + BREAKER.0 - 7.0), "circuit breaker");
    }
    for (class, from, to) in [
        ("yes", (|_| 0.0) as fn(&Bin) -> f64, (|bin| bin.admitted) as fn(&Bin) -> f64),
        ("no", |bin| bin.admitted, |bin| bin.admitted + bin.denied),
    ] {
        let upper = outage.bins.iter().flat_map(|bin| stair(bin, to(bin)));
        let lower = outage.bins.iter().flat_map(|bin| stair(bin, from(bin)));
        let lower = lower.collect::<Vec<_>>().into_iter().rev();
        svg.path(class, &closed(upper.chain(lower).map(|point| answers.at(point))));
    }
    let p99 = outage.bins.iter().flat_map(|bin| stair(bin, bin.p99_ms));
    svg.line("ink-line", p99.map(|point| late.at(point)));

    let (from, to) = (top + BREAKER.0, top + BREAKER.1);
    let ends = outage.breaker.iter().skip(1).map(|(at, _)| *at).chain([END_MS]);
    for ((at, state), end) in outage.breaker.iter().zip(ends) {
        let class = match &**state {
            "open" => "other",
            "half-open" => "half",
            _ => continue,
        };
        svg.rect(class, (x.at(*at), from), (x.at(end) - x.at(*at), to - from));
    }
    svg.line("edge", [(left, to), (left + length, to)]);
    let ticks = [0_u32, 2, 4, 6, 8].map(|n| (f64::from(n) * 1e3, format!("{n} s")));
    Plot { x, y: Axis { begin: to, ..late.y } }.columns(svg, &ticks, false);
}

/// A level for as long as a tenth of a second.
fn stair(bin: &Bin, level: f64) -> [(f64, f64); 2] {
    [(bin.from_ms, level), (bin.from_ms + BIN_MS, level)]
}
