//! What each algorithm makes of the same burst, decided by a store in memory on a given clock.

use std::collections::BTreeSet;
use std::error::Error;
use std::fmt::Write;
use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, Leased, Limits, ManualClock, RateLimiter, Timestamp};
use ratelimit_memory::MemoryStore;

use crate::Drawing;
use crate::svg::{Axis, MARGIN, NARROW, Svg, px, width};

/// The time axis.
const BEGIN_MS: u32 = 5_000;
const END_MS: u32 = 25_000;
/// How often the drawing reads what remains.
const SAMPLE_MS: u32 = 250;
/// How long a request keeps its lease of a concurrency limit.
const WORK_MS: u32 = 1_500;
/// Who sends requests. The marks of the second stand below those of the first. The reader's own are
/// the first caller's too, within rings.
const CALLERS: [&str; 3] = ["caller", "other", "caller"];
const OTHER: u8 = 1;
const BELOW: f64 = 6.0;

/// The name of a drawing, its title in two parts, and its rows: a limit as text, and what the
/// reader should see.
type Drawn = (&'static str, [&'static str; 2], &'static [(&'static str, &'static str)]);

const DRAWN: [Drawn; 2] = [
    (
        "algorithms",
        ["The same 40 requests under each", "algorithm, and how many it admits"],
        &[
            ("gcra 10/10s burst 10", "a burst of 10, then one per second"),
            ("gcra 10/10s burst 3", "the same rate with a small burst"),
            ("fixed-window 10/10s", "10 before the boundary, 10 after it"),
            ("first-request-window 10/10s", "10, then none until the window ends"),
            ("sliding-counter 10/10s", "an estimate without a boundary"),
            ("bucketed-window bucket 1s rates 10/10s", "slides by one bucket of 1 s"),
            ("sliding-log 10/10s", "never more than 10 in any 10 s"),
            ("concurrency 3/10s", "3 at a time, each works for 1.5 s"),
        ],
    ),
    (
        "attempts",
        ["The same 40 requests, if denied ones", "are free and if they are charged"],
        &[
            ("sliding-log 10/10s", "a denied request costs nothing"),
            ("sliding-log 10/10s count attempts", "a caller that keeps retrying stays out"),
        ],
    ),
];

/// The requests of a drawing, and the limits that decide them.
#[derive(Clone, Debug)]
pub struct Scene {
    /// The title, in two parts.
    pub title: [String; 2],
    /// When each request comes, in milliseconds up to 25,000, and who sends it: 0 for the caller, 1
    /// for another, or [`READER`](Self::READER).
    pub requests: Vec<(u32, u8)>,
    /// The limits as text, and what the reader should see of each.
    pub rows: Vec<(String, String)>,
}

/// The requests under one limit.
struct BurstRow {
    limit: String,
    note: String,
    /// The most that can remain.
    capacity: u32,
    /// The time of each request, who sent it, and whether it was admitted.
    requests: Vec<(u32, u8, bool)>,
    /// What remains to the first caller, every [`SAMPLE_MS`] and after each request.
    remaining: Vec<(u32, u32)>,
}

impl BurstRow {
    fn admitted(&self) -> usize {
        self.requests.iter().filter(|(.., is_admitted)| *is_admitted).count()
    }
}

/// When the requests come: four per second across the boundary at 10 s, and later two per second.
fn arrivals_ms() -> impl Iterator<Item = u32> {
    (7_000..13_000).step_by(250).chain((16_000..24_000).step_by(500))
}

/// Decides these requests under a limit.
fn decide(
    arrivals: &[(u32, u8)],
    (limit, note): &(String, String),
) -> Result<BurstRow, Box<dyn Error>> {
    let (algorithm, attempts) = match limit.strip_suffix(" count attempts") {
        Some(algorithm) => (algorithm, true),
        None => (&**limit, false),
    };
    let limits = Limits::<AnyAlgorithm>::builder().limit("drawn", algorithm);
    let limits = if attempts { limits.count_attempts() } else { limits }.build()?;
    let clock = ManualClock::default();
    let limiter = RateLimiter::new(limits, MemoryStore::builder().clock(clock.clone()).build());
    let is_lease = limit.starts_with("concurrency");
    let capacity = limiter.request(CALLERS[0]).cost(0).peek_now()?.limit().try_into()?;

    let (mut requests, mut remaining) = (Vec::new(), Vec::new());
    let mut leases = Vec::new();
    let samples = (0..=END_MS).step_by(usize::try_from(SAMPLE_MS)?);
    let times: BTreeSet<_> = samples.chain(arrivals.iter().map(|(at, _)| *at)).collect();
    for time_ms in times {
        clock.set(Timestamp::ZERO + Duration::from_millis(time_ms.into()));
        leases.retain(|(end_ms, _)| time_ms < *end_ms); // dropping a lease releases it
        for (_, caller) in arrivals.iter().filter(|(at, _)| *at == time_ms) {
            let key = CALLERS[usize::from(*caller.min(&Scene::READER))];
            let is_admitted = if is_lease {
                match limiter.request(key).lease_now()? {
                    Leased::Granted(lease) => {
                        leases.push((time_ms + WORK_MS, lease));
                        true
                    }
                    Leased::Denied(_) => false,
                }
            } else {
                limiter.check_now(key).as_ref().map_err(ToString::to_string)?.allowed()
            };
            requests.push((time_ms, *caller, is_admitted));
        }
        let verdict = limiter.request(CALLERS[0]).cost(0).peek_now()?;
        remaining.push((time_ms, verdict.remaining().try_into()?));
    }
    let (limit, note) = (limit.clone(), note.clone());
    Ok(BurstRow { limit, note, capacity, requests, remaining })
}

impl Scene {
    /// Sends the reader's own requests, in the caller's name.
    pub const READER: u8 = 2;

    /// The drawing, for a wide page or for a telephone.
    ///
    /// # Errors
    ///
    /// A limit is not a policy.
    pub fn draw(&self, is_wide: bool) -> Result<String, Box<dyn Error>> {
        let rows = self.rows.iter().map(|row| decide(&self.requests, row));
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        Layout::of(is_wide).draw([&self.title[0], &self.title[1]], &rows)
    }

    /// The time at this distance from the left of a drawing, in milliseconds; `None` outside of the
    /// time axis.
    #[must_use]
    pub fn time_ms(is_wide: bool, x: f64) -> Option<f64> {
        let Layout { left, plot, .. } = Layout::of(is_wide);
        let [begin, end] = [BEGIN_MS, END_MS].map(f64::from);
        let time_ms = begin + (x - left) / plot * (end - begin);
        (begin..end).contains(&time_ms).then_some(time_ms)
    }
}

/// The drawings, each for a wide page and for a narrow one.
pub(crate) fn drawings() -> Result<Vec<Drawing>, Box<dyn Error>> {
    let mut drawings = Vec::new();
    for (name, title, limits) in DRAWN {
        let rows = limits.iter().map(|(words, note)| ((*words).to_owned(), (*note).to_owned()));
        let requests = arrivals_ms().map(|at| (at, 0)).collect();
        let scene = Scene { title: title.map(str::to_owned), requests, rows: rows.collect() };
        drawings.extend(Drawing::both(name, |is_wide| scene.draw(is_wide))?);
    }
    Ok(drawings)
}

/// Where things stand: a row's words beside its plot on a wide page, above it on a telephone.
struct Layout {
    is_wide: bool,
    /// The time axis: where it begins, and how long it is. The scale of what remains stands after
    /// it.
    left: f64,
    plot: f64,
    /// The end of the heading, and the height of a row.
    top: f64,
    row: f64,
    /// Within the heading: the marks of the legend, and the explanation of a window's boundary.
    legend: f64,
    boundary: (f64, f64),
    /// Within a row: the numbers of the limit, with their class, and the note.
    numbers: (f64, f64, &'static str),
    note: f64,
    /// Within a row: where its plot begins, the requests with half the size of a mark, and the
    /// levels at which everything and nothing remains.
    begin: f64,
    marks: f64,
    mark: f64,
    full: f64,
    empty: f64,
}

const AT_WIDE: Layout = Layout {
    is_wide: true,
    left: 250.0,
    plot: 510.0,
    top: 64.0,
    row: 66.0,
    legend: 47.0,
    boundary: (346.0, 47.0),
    numbers: (MARGIN, 36.0, "quiet"),
    note: 53.0,
    begin: 0.0,
    marks: 12.0,
    mark: 2.4,
    full: 24.0,
    empty: 56.0,
};

const AT_NARROW: Layout = Layout {
    is_wide: false,
    left: MARGIN,
    plot: 310.0,
    top: 100.0,
    row: 98.0,
    legend: 67.0,
    boundary: (MARGIN, 87.0),
    numbers: (NARROW - MARGIN, 19.0, "quiet end"),
    note: 36.0,
    begin: 42.0,
    marks: 50.0,
    mark: 1.8,
    full: 60.0,
    empty: 88.0,
};

/// The moments that the time axis names.
fn seconds() -> impl Iterator<Item = u32> {
    (BEGIN_MS / 1_000..=END_MS / 1_000).step_by(5)
}

impl Layout {
    const fn of(is_wide: bool) -> Self {
        if is_wide { AT_WIDE } else { AT_NARROW }
    }

    fn x(&self, time_ms: u32) -> f64 {
        let (from, to) = (BEGIN_MS.into(), END_MS.into());
        let axis = Axis { begin: self.left, length: self.plot, from, to, is_log: false };
        axis.at(time_ms.into())
    }

    /// The drawing of these rows, each under its own limit, on one time axis.
    fn draw(&self, title: [&str; 2], rows: &[BurstRow]) -> Result<String, Box<dyn Error>> {
        let height = self.top + self.row * f64::from(u32::try_from(rows.len())?) + 26.0;
        let mut svg = Svg::new(self.is_wide, height, &title, &described(rows));
        let of_two =
            rows.iter().flat_map(|row| &row.requests).any(|(_, caller, _)| *caller == OTHER);
        self.draw_legend(&mut svg, of_two);
        for second in seconds() {
            let at = (self.x(second * 1_000), height - 9.0);
            svg.text("quiet middle", at, &format!("{second} s"));
        }
        let mut top = self.top;
        for row in rows {
            self.draw_row(&mut svg, row, top);
            top += self.row;
        }
        Ok(svg.finish())
    }

    /// The marks as they stand in the rows.
    fn draw_legend(&self, svg: &mut Svg, of_two_callers: bool) {
        let (y, (x, boundary)) = (self.legend, self.boundary);
        svg.circle("yes", (22.0, y - 4.0), 4.2);
        svg.text("quiet", (32.0, y), "admitted");
        svg.path("no-line", &cross((101.5, y - 4.0), 3.5));
        svg.text("quiet", (112.0, y), "denied");
        svg.rect("area", (164.0, y - 10.0), (16.0, 12.0));
        let whose = if of_two_callers { " to the first" } else { "" };
        svg.text("quiet", (186.0, y), &format!("what remains{whose}"));
        svg.path("edge dashed", &format!("M{} {}h22", px(x), px(boundary - 4.0)));
        let words = "boundary of a window of 10 s, aligned to the clock";
        svg.text("quiet", (x + 28.0, boundary), words);
    }

    fn draw_row(&self, svg: &mut Svg, row: &BurstRow, top: f64) {
        // A long limit in two parts.
        let (name, numbers) = row.limit.split_once(' ').unwrap_or((&row.limit, ""));
        let (numbers_x, numbers_y, class) = self.numbers;
        let (full, empty, scale) = (top + self.full, top + self.empty, self.left + self.plot + 6.0);
        svg.path("line", &format!("M{MARGIN} {}H{}", px(top), px(width(self.is_wide) - MARGIN)));
        svg.text("strong", (MARGIN, top + 19.0), name);
        let told = format!("{numbers}: {} of {}", row.admitted(), row.requests.len());
        svg.text(class, (numbers_x, top + numbers_y), &told);
        svg.text("quiet", (MARGIN, top + self.note), &row.note);
        svg.text("quiet", (scale, full + 6.0), &row.capacity.to_string());
        svg.text("quiet", (scale, empty + 3.0), "0");

        for second in seconds() {
            let class = if second.is_multiple_of(10) { "edge dashed" } else { "line" };
            let (x, begin, end) = (self.x(second * 1_000), top + self.begin, top + self.row);
            svg.line(class, [(x, begin), (x, end)]);
        }

        let (from, to, length) = (0.0, row.capacity.into(), full - empty);
        let left = Axis { begin: empty, length, from, to, is_log: false };
        let mut area = format!("M{} {}", px(self.x(BEGIN_MS)), px(empty));
        for (time_ms, remaining) in
            row.remaining.iter().filter(|(time_ms, _)| (BEGIN_MS..END_MS).contains(time_ms))
        {
            let _ = write!(area, "H{}V{}", px(self.x(*time_ms)), px(left.at((*remaining).into())));
        }
        svg.path("area", &format!("{area}H{}V{}Z", px(self.x(END_MS)), px(empty)));
        for (time_ms, caller, is_admitted) in &row.requests {
            let below = if *caller == OTHER { BELOW } else { 0.0 };
            let at = (self.x(*time_ms), top + self.marks + below);
            if *caller == Scene::READER {
                svg.circle("ink-line", at, self.mark + 3.0);
            }
            if *is_admitted {
                svg.circle("yes", at, self.mark);
            } else {
                svg.path("no-line", &cross(at, self.mark - 0.3));
            }
        }
    }
}

/// A cross with arms of this length in each direction.
fn cross((x, y): (f64, f64), arm: f64) -> String {
    let (x, y, stroke) = (px(x - arm), px(y - arm), px(2.0 * arm));
    format!("M{x} {y}l{stroke} {stroke}m0-{stroke}l-{stroke} {stroke}")
}

/// The drawing in words, for readers who do not see it.
fn described(rows: &[BurstRow]) -> String {
    let told = rows.iter().map(|row| {
        let (admitted, all) = (row.admitted(), row.requests.len());
        format!("{}: {admitted} of {all} requests admitted.", row.limit)
    });
    told.collect::<Vec<_>>().join(" ")
}
