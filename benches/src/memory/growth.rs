//! What a single call can take: while keys come that were never seen before, and after many have expired.
//!
//! A call is timed by the CPU time of the thread, so that it is not the neighbours on the machine who
//! make the worst one; what the wall says is printed beside it.

use std::error::Error;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

use governor::clock::FakeRelativeClock;
use ratelimit_core::{FixedWindow, Limit, Limits, ManualClock, Rate, RateLimiter};
use ratelimit_memory::MemoryStore;
use serde::Serialize;

use crate::clocks::precise;
use crate::keys::Key;
use crate::measure::thread_time;
use crate::peers::{Allowance, Governor, Ours, Subject};
use crate::report::Report;
use crate::table::rounded;

use super::scenario::{ALLOWED, Outcome};

/// How many keys come, in full and with `--quick`.
pub(super) const fn key_count(quick: bool) -> usize {
    if quick { 500_000 } else { 10_000_000 }
}

/// How many keys expire.
const fn expiring_key_count(quick: bool) -> usize {
    if quick { 250_000 } else { 1_000_000 }
}

/// A store that is too small has room for one key in so many.
const CROWD: usize = 10;
/// Keys are made so many at a time, between calls that are timed.
const BLOCK: usize = 1 << 12;

/// Room for every call even on the shared state of a full store, and no key expires while others come.
const LONG_LIVED: Allowance = Allowance {
    period: Duration::from_secs(400),
    burst: NonZeroU32::MIN.saturating_add(10_999_999),
};

/// How often keys come to a limiter made anew. A pause of the limiter's own comes every time; what else
/// runs on the machine comes once or twice, so that the best of them is told.
const TRIES: usize = 3;

/// The worst single call on the way to ten million keys, in the words of its JSON line.
#[derive(Serialize)]
struct Growth {
    scenario: &'static str,
    ours_worst_us: f64,
    peer: &'static str,
    peer_worst_us: f64,
}

/// What it costs that a million keys have expired: the worst call, and all calls, until a million others
/// have taken their place. governor frees nothing without `retain_recent`, which is one of its calls here.
#[derive(Serialize)]
struct Expiry {
    scenario: &'static str,
    ours_worst_us: f64,
    ours_total_us: f64,
    peer: &'static str,
    peer_worst_us: f64,
    peer_total_us: f64,
}

/// What calls took.
#[derive(Clone, Copy, Default)]
struct Calls {
    worst: Duration,
    /// By the wall.
    worst_wall: Duration,
    total: Duration,
}

impl Calls {
    /// Calls the limiter once with every key of this range.
    fn with(subject: &dyn Subject, numbers: std::ops::Range<usize>) -> Result<Self, String> {
        Self::each(numbers, |key| subject.check(key))
    }

    fn each(
        numbers: std::ops::Range<usize>,
        mut call: impl FnMut(&Key) -> bool,
    ) -> Result<Self, String> {
        let mut calls = Self::default();
        for first in numbers.clone().step_by(BLOCK) {
            let keys: Vec<_> = (first..(first + BLOCK).min(numbers.end)).map(Key::new).collect();
            let (mut time, mut wall) = (thread_time(), Instant::now());
            for key in &keys {
                if !call(key) {
                    return Err("a new key was denied: the benchmark's limit is wrong".to_owned());
                }
                let (now, wall_now) = (thread_time(), Instant::now());
                calls.add(now.saturating_sub(time), wall_now - wall);
                (time, wall) = (now, wall_now);
            }
        }
        Ok(calls)
    }

    /// All calls without what it took to time them. Of a single one that is next to nothing.
    fn less(self, timing: Self) -> Self {
        Self { total: self.total.saturating_sub(timing.total), ..self }
    }

    fn add(&mut self, taken: Duration, wall: Duration) {
        self.worst = self.worst.max(taken);
        self.worst_wall = self.worst_wall.max(wall);
        self.total += taken;
    }
}

/// Microseconds, to a tenth.
fn us(time: Duration) -> f64 {
    rounded(time.as_secs_f64() * 1e6, 10.0)
}

/// The worst call while keys come that were never seen: into a store with room for all of them, and into
/// one with room for a tenth of them.
pub(super) fn run(quick: bool, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let keys = key_count(quick);
    println!(
        "\nthe worst call while {keys} new keys come, {TRIES} times: CPU time (wall time), us"
    );
    let measure = |name: &str, calls: &dyn Fn() -> Result<Calls, Box<dyn Error>>| {
        let all = (0..TRIES).map(|_| calls()).collect::<Result<Vec<_>, _>>()?;
        let shown = all.iter().map(|all| format!("{} ({})", us(all.worst), us(all.worst_wall)));
        println!("{name:<40} {}", shown.collect::<Vec<_>>().join("   "));
        let best = all.iter().map(|calls| calls.worst).min();
        Ok::<_, Box<dyn Error>>(us(best.unwrap_or_default()))
    };
    measure("(nothing: what timing itself shows)", &|| {
        Ok(Calls::each(0..keys, |key| !key.as_str().is_empty())?)
    })?;
    // One after the other, and each dropped before the next: ten million keys are gigabytes.
    let ours = |room: usize| {
        let ours = Ours::new(LONG_LIVED, precise(), room)?;
        let calls = Calls::with(&ours, 0..keys)?;
        // If a key found no place although there was one, or a full store forgot others for it,
        // something else was measured.
        let overflowed = ours.overflowed();
        if (overflowed > 0) == (room < keys) {
            Ok(calls)
        } else {
            Err(format!("{overflowed} of {keys} keys found no place in a store of {room}").into())
        }
    };
    let compact = keys / CROWD;
    let fits = measure("ours", &|| ours(keys))?;
    let capped = measure(&format!("ours, with room for {compact}"), &|| ours(compact))?;
    let windows = measure("ours, fixed windows", &|| windows(keys))?;
    let governor = measure("governor", &|| Ok(Calls::with(&Governor::new(LONG_LIVED)?, 0..keys)?))?;
    for (scenario, ours) in
        [("growth-10m", fits), ("growth-10m-capped", capped), ("growth-10m-windows", windows)]
    {
        report.line(&Growth {
            scenario,
            ours_worst_us: ours,
            peer: "governor",
            peer_worst_us: governor,
        })?;
    }
    Ok(())
}

/// A year: no window ends while keys come.
const WINDOW_US: u64 = 365 * 24 * 3_600_000_000;

/// The calls of a limit whose states take more than a line has room for.
fn windows(keys: usize) -> Result<Calls, Box<dyn Error>> {
    let window = FixedWindow::new(Rate::per_us(2, WINDOW_US)?)?;
    let store = MemoryStore::builder().capacity(keys).build();
    let limiter = RateLimiter::new(Limits::new([Limit::new("bench", window)?])?, store);
    let check = |key: &Key| limiter.check_now(key.as_str()).is_ok_and(|said| said.allowed());
    let calls = Calls::each(0..keys, check)?;
    match limiter.store().overflowed() {
        0 => Ok(calls),
        overflowed => Err(format!("{overflowed} of {keys} windows found no place").into()),
    }
}

/// One token a second: held now, and expired an hour later.
const SHORT_LIVED: Outcome = Outcome {
    allowance: Allowance { period: Duration::from_secs(1), burst: NonZeroU32::MIN },
    first_cost: NonZeroU32::MIN,
    ..ALLOWED
};
const LATER: Duration = Duration::from_secs(3_600);

/// What it costs that a million keys have expired, until a million others have taken their place.
pub(super) fn expiry(quick: bool, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let keys = expiring_key_count(quick);
    let others = keys..2 * keys;
    let timing = Calls::each(others.clone(), |key| !key.as_str().is_empty())?;
    let clock = ManualClock::new(ratelimit_core::Timestamp::saturating_from_us(1_000_000));
    let (ours, overflowed) = {
        let ours = Ours::new(SHORT_LIVED.allowance, clock.clone(), keys)?;
        SHORT_LIVED.charge(&ours, keys)?;
        clock.advance(LATER);
        (Calls::with(&ours, others.clone())?, ours.overflowed())
    };
    let clock = FakeRelativeClock::default();
    let governor = Governor::with_clock(SHORT_LIVED.allowance, clock.clone())?;
    SHORT_LIVED.charge(&governor, keys)?;
    clock.advance(LATER);
    let (time, wall) = (thread_time(), Instant::now());
    governor.retain_recent();
    let mut retain = Calls::default();
    retain.add(thread_time().saturating_sub(time), wall.elapsed());
    let after = Calls::with(&governor, others)?;

    let [ours, after] = [ours, after].map(|calls| calls.less(timing));
    println!("\n{keys} keys have expired, and as many others come: us");
    println!("{:<42} {:>10} {:>12}", "", "worst call", "all calls");
    let tell = |name: &str, calls: Calls| {
        println!("{name:<42} {:>10.1} {:>12.0}", us(calls.worst), us(calls.total));
    };
    tell("ours, in passing", ours);
    if overflowed > 0 {
        println!("  {overflowed} of the calls found no place, although all were free");
    }
    tell("governor, retain_recent", retain);
    tell("governor, the calls after it", after);
    report.line(&Expiry {
        scenario: "expiry-1m",
        ours_worst_us: us(ours.worst),
        ours_total_us: us(ours.total),
        peer: "governor",
        peer_worst_us: us(retain.worst.max(after.worst)),
        peer_total_us: us(retain.total + after.total),
    })
}
