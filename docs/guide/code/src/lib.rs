//! What each algorithm makes of the same burst, decided by a store in memory on a given clock.

use std::error::Error;
use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, Leased, Limits, ManualClock, RateLimiter, Timestamp};
use ratelimit_memory::MemoryStore;

mod svg;

use svg::{NARROW, WIDE};

/// The time axis.
const BEGIN_MS: u64 = 5_000;
const END_MS: u64 = 25_000;
/// How often the drawing reads what remains.
const SAMPLE_MS: u64 = 250;
/// How long a request keeps its lease of a concurrency limit.
const WORK_MS: u64 = 1_500;

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

/// A drawing, and the name of its file.
#[derive(Debug)]
pub struct Drawing {
    /// The file below `docs/guide/src/images`.
    pub file: String,
    /// The text of the file.
    pub svg: String,
}

/// The burst under one limit.
struct BurstRow {
    limit: &'static str,
    note: &'static str,
    /// The most that can remain.
    capacity: u64,
    /// The time of each request, and whether it was admitted.
    requests: Vec<(u64, bool)>,
    /// What remains, every [`SAMPLE_MS`]: after a request of that moment.
    remaining: Vec<(u64, u64)>,
}

/// When the requests come: four per second across the boundary at 10 s, and later two per second.
fn arrivals_ms() -> impl Iterator<Item = u64> {
    (7_000..13_000).step_by(250).chain((16_000..24_000).step_by(500))
}

/// Decides the burst under a limit.
fn decide(limit: &'static str, note: &'static str) -> Result<BurstRow, Box<dyn Error>> {
    let (algorithm, attempts) = match limit.strip_suffix(" count attempts") {
        Some(algorithm) => (algorithm, true),
        None => (limit, false),
    };
    let limits = Limits::<AnyAlgorithm>::builder().limit("drawn", algorithm);
    let limits = if attempts { limits.count_attempts() } else { limits }.build()?;
    let clock = ManualClock::default();
    let limiter = RateLimiter::new(limits, MemoryStore::builder().clock(clock.clone()).build());
    let is_lease = limit.starts_with("concurrency");
    let capacity = limiter.request("caller").cost(0).peek_now()?.limit();

    let (mut requests, mut remaining) = (Vec::new(), Vec::new());
    let mut leases = Vec::new();
    for time_ms in (0..=END_MS).step_by(usize::try_from(SAMPLE_MS)?) {
        clock.set(Timestamp::ZERO + Duration::from_millis(time_ms));
        leases.retain(|(end_ms, _)| time_ms < *end_ms); // dropping a lease releases it
        if arrivals_ms().any(|arrival_ms| arrival_ms == time_ms) {
            let is_admitted = if is_lease {
                match limiter.request("caller").lease_now()? {
                    Leased::Granted(lease) => {
                        leases.push((time_ms + WORK_MS, lease));
                        true
                    }
                    Leased::Denied(_) => false,
                }
            } else {
                limiter.check_now("caller").as_ref().map_err(ToString::to_string)?.allowed()
            };
            requests.push((time_ms, is_admitted));
        }
        remaining.push((time_ms, limiter.request("caller").cost(0).peek_now()?.remaining()));
    }
    Ok(BurstRow { limit, note, capacity, requests, remaining })
}

/// All drawings of the guide, each for a wide page and for a narrow one.
///
/// # Errors
/// None, unless a limit is not a policy.
pub fn drawings() -> Result<Vec<Drawing>, Box<dyn Error>> {
    let mut drawings = Vec::new();
    for (name, title, limits) in DRAWN {
        let rows = limits.iter().map(|(words, note)| decide(words, note));
        let rows = rows.collect::<Result<Vec<_>, _>>()?;
        for (file, layout) in
            [(format!("{name}.svg"), WIDE), (format!("{name}-narrow.svg"), NARROW)]
        {
            drawings.push(Drawing { file, svg: layout.draw(title, &rows) });
        }
    }
    Ok(drawings)
}
