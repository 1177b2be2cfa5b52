//! Two requests whose cost is known when they end, decided by a store in memory on a given clock:
//! one is extended and settled below its reservation, the other above it, into debt.

use std::error::Error;
use std::time::Duration;

use ratelimit_core::{
    AnyAlgorithm, Gcra, Limits, ManualClock, RateLimiter, ReservationId, Timestamp, Verdict,
};
use ratelimit_memory::MemoryStore;

use crate::Drawing;
use crate::svg::{Axis, MARGIN, Plot, Svg, closed, grouped, width};

/// The limit, in tokens.
const BURST: u32 = 1_000;
const PER_SECOND: u32 = 50;
const DEBT: u32 = 500;
const END_MS: u32 = 20_000;
/// How often the drawing reads what remains.
const SAMPLE_MS: u32 = 100;

/// A call of the first request or of the second, with its cost.
#[derive(Clone, Copy)]
enum Call {
    Reserve(usize, u32),
    Extend(usize, u32),
    Settle(usize, u32),
    /// A plain request beside them.
    Check(u32),
}

const CALLS: [(u32, Call); 6] = [
    (1_000, Call::Reserve(0, 400)),
    (5_000, Call::Extend(0, 700)),
    (8_000, Call::Settle(0, 560)),
    (10_000, Call::Reserve(1, 600)),
    (13_000, Call::Settle(1, 1_240)),
    (15_000, Call::Check(50)),
];

/// The run: what remains at each moment, less what is owed, and what each call did in words.
struct Run {
    levels: Vec<(f64, f64)>,
    calls: Vec<(u32, Call, String)>,
}

/// What remains, less what is owed.
fn level(verdict: &Verdict) -> Result<f64, Box<dyn Error>> {
    Ok(f64::from(u32::try_from(verdict.remaining())?) - f64::from(u32::try_from(verdict.owed())?))
}

fn run() -> Result<Run, Box<dyn Error>> {
    let limit = Gcra::per_second(PER_SECOND.into()).burst(BURST.into()).debt(DEBT.into());
    let limits = Limits::<AnyAlgorithm>::builder().limit("tokens", limit).build()?;
    let clock = ManualClock::default();
    let limiter = RateLimiter::new(limits, MemoryStore::builder().clock(clock.clone()).build());
    let ids = [ReservationId::random(), ReservationId::random()];
    let mut pending = CALLS.to_vec();
    let (mut levels, mut calls) = (Vec::new(), Vec::new());
    for time_ms in (0..=END_MS).step_by(usize::try_from(SAMPLE_MS)?) {
        clock.set(Timestamp::ZERO + Duration::from_millis(time_ms.into()));
        let read = || level(&limiter.request("alice").cost(0).peek_now()?);
        let before = read()?;
        levels.push((f64::from(time_ms), before));
        let Some((_, call)) = pending.first().copied().filter(|(at, _)| *at == time_ms) else {
            continue;
        };
        pending.remove(0);
        let request = |id: usize, cost: u32| limiter.request("alice").id(ids[id]).cost(cost.into());
        let verdict = match call {
            Call::Reserve(id, cost) => request(id, cost).check_now()?,
            Call::Extend(id, cost) => request(id, cost).extend_now()?,
            Call::Settle(id, cost) => request(id, cost).settle_now()?,
            Call::Check(cost) => limiter.check_n_now("alice", cost.into())?,
        };
        let after = read()?;
        levels.push((f64::from(time_ms), after));
        let words = match call {
            Call::Reserve(_, cost) => format!("reserve {cost}, an estimate"),
            Call::Extend(_, cost) => format!("the answer is longer: extend to {cost}"),
            Call::Settle(_, cost) if after > before => {
                format!("settle at {cost}: {} come back", after - before)
            }
            Call::Settle(_, cost) => {
                let (cost, more) = (grouped(cost.into()), before - after);
                format!("settle at {cost}: {more} more, {} owed", verdict.owed())
            }
            Call::Check(cost) if verdict.allowed() => format!("the request of {cost} is admitted"),
            Call::Check(cost) => {
                let wait = verdict.retry_after().ok_or("no wait")?;
                // Once more, as soon as it may.
                pending.push((time_ms + u32::try_from(wait.as_millis())?, call));
                format!("a request of {cost} is denied: wait {} s", wait.as_secs_f64())
            }
        };
        if matches!(call, Call::Reserve(..) | Call::Extend(..)) && !verdict.allowed() {
            return Err(format!("denied: {words}").into());
        }
        calls.push((time_ms, call, words));
    }
    Ok(Run { levels, calls })
}

/// The drawing, for a wide page and for a narrow one.
pub(crate) fn drawings() -> Result<[Drawing; 2], Box<dyn Error>> {
    let run = run()?;
    let described =
        run.calls.iter().map(|(time_ms, _, words)| format!("{}: {words}.", seconds(*time_ms)));
    let described = described.collect::<Vec<_>>().join(" ");
    Drawing::both("reservation", |is_wide| {
        let list = if is_wide { 4.0 } else { 7.0 };
        let height = LIST + 20.0 * list + 2.0;
        let title = ["A budget of 1,000 tokens, 50 more per", "second, while two requests use it"];
        let mut svg = Svg::new(is_wide, height + shift(is_wide), &title, &described);
        draw(&mut svg, &run, is_wide);
        Ok(svg.finish())
    })
}

/// Where the fields end, and where the list begins, under a title of one line.
const BUDGET: (f64, f64) = (84.0, 224.0);
const REQUESTS: (f64, f64) = (278.0, 348.0);
const LIST: f64 = 392.0;

/// How much a title of two lines shifts all that is below.
const fn shift(is_wide: bool) -> f64 {
    if is_wide { 0.0 } else { 20.0 }
}

fn seconds(time_ms: u32) -> String {
    format!("{} s", f64::from(time_ms) / 1e3)
}

fn draw(svg: &mut Svg, run: &Run, is_wide: bool) {
    let shift = shift(is_wide);
    let left = 58.0;
    let x = Axis {
        begin: left,
        length: width(is_wide) - left - 1.5 * MARGIN,
        from: 0.0,
        to: END_MS.into(),
        is_log: false,
    };
    let plot = |field, ends| Plot { x, y: Axis::up(shift, field, ends, false) };
    let budget = plot(BUDGET, (-f64::from(DEBT), BURST.into()));
    let requests = plot(REQUESTS, (0.0, 1_240.0));

    svg.text("quiet", (left, BUDGET.0 + shift - 34.0), "tokens left, and owed below 0");
    let ticks =
        [1_000.0, 500.0, 0.0, -500.0].map(|value| (value, grouped(value).replace('-', "−")));
    budget.rows(svg, &ticks);
    let left_over = run.levels.iter().map(|(at, level)| (*at, level.max(0.0)));
    let ends = [(0.0, 0.0)].into_iter().chain(left_over).chain([(END_MS.into(), 0.0)]);
    svg.path("area", &closed(ends.map(|point| budget.at(point))));
    let owed = run.levels.iter().copied().filter(|(_, level)| *level < 0.0);
    let first = owed.clone().next().map(|(at, _)| (at, 0.0));
    let last = owed.clone().next_back().map(|(at, _)| (at + f64::from(SAMPLE_MS), 0.0));
    let owed = first.into_iter().chain(owed).chain(last);
    svg.path("debt", &closed(owed.map(|point| budget.at(point))));
    let end = budget.x.begin + budget.x.length;
    svg.text("quiet end", (end, budget.y.at(-500.0) + 14.0), "the most that may be owed");

    let heading = REQUESTS.0 + shift - 12.0;
    svg.text("quiet", (left, heading), "tokens per request:");
    for (x, class, words) in [(120.0, "area", "reserved"), (198.0, "used", "used so far")] {
        svg.rect(class, (left + x, heading - 10.0), (12.0, 12.0));
        svg.text("quiet", (left + x + 17.0, heading), words);
    }
    requests.rows(svg, &[0.0, 600.0, 1_200.0].map(|value| (value, grouped(value))));
    for id in [0, 1] {
        draw_request(svg, &requests, run, id);
    }
    let ticks = [0, 5, 10, 15, 20].map(|n: u32| (f64::from(n) * 1e3, format!("{n} s")));
    requests.columns(svg, &ticks, false);

    let half = if is_wide { run.calls.len().div_ceil(2) } else { run.calls.len() };
    for (nth, (time_ms, call, words)) in (1_u32..).zip(&run.calls) {
        let at = x.at((*time_ms).into());
        let both = [(BUDGET, true), (REQUESTS, !matches!(call, Call::Check(_)))];
        for ((top, bottom), _) in both.into_iter().filter(|(_, is_concerned)| *is_concerned) {
            svg.line("edge dashed", [(at, top + shift), (at, bottom + shift)]);
        }
        mark(svg, (at, BUDGET.0 + shift - 10.0), nth);
        let row = usize::try_from(nth - 1).unwrap_or_default();
        let column = f64::from(u8::from(row >= half));
        let y = LIST + shift + 20.0 * f64::from(u32::try_from(row % half).unwrap_or_default());
        let x = MARGIN + 8.0 + column * (width(is_wide) / 2.0);
        mark(svg, (x, y - 4.0), nth);
        svg.text("", (x + 16.0, y), &format!("{}: {words}", seconds(*time_ms)));
    }
}

/// A number in a circle.
fn mark(svg: &mut Svg, (x, y): (f64, f64), number: u32) {
    svg.circle("area", (x, y), 8.0);
    svg.text("small middle", (x, y + 4.0), &number.to_string());
}

/// A request from its first call to its last: what is reserved, and what it has used so far.
fn draw_request(svg: &mut Svg, plot: &Plot, run: &Run, of: usize) {
    let (mut reserved, mut used): (Vec<(f64, f64)>, Vec<_>) = (Vec::new(), Vec::new());
    for (time_ms, call, _) in &run.calls {
        let at = f64::from(*time_ms);
        let before = reserved.last().map_or(0.0, |(_, cost)| *cost);
        match *call {
            Call::Reserve(id, cost) if id == of => {
                reserved.extend([(at, 0.0), (at, cost.into())]);
                used.push((at, 0.0));
            }
            Call::Extend(id, cost) if id == of => {
                reserved.extend([(at, before), (at, cost.into())]);
            }
            Call::Settle(id, cost) if id == of => {
                reserved.extend([(at, before), (at, 0.0)]);
                used.extend([(at, cost.into()), (at, 0.0)]);
            }
            _ => {}
        }
    }
    svg.path("area", &closed(reserved.iter().map(|point| plot.at(*point))));
    svg.path("used", &closed(used.iter().map(|point| plot.at(*point))));
}
