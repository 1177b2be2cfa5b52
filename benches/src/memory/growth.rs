//! What a single call can take: while keys come that were never seen before, and after many have
//! expired.
//!
//! A call is timed by the CPU time of the thread, so that it is not the neighbours on the machine
//! who make the worst one.

use std::num::NonZeroU32;
use std::ops::Range;
use std::time::Duration;

use governor::clock::FakeRelativeClock;
use ratelimit_core::{FixedWindow, ManualClock, Rate, RateLimiter, Timestamp};
use ratelimit_memory::{MemoryStore, PreciseClock};

use crate::keys::CallerKey;
use crate::measure::{Fallible, thread_time};
use crate::peers::{Allowance, ByFunction, Governor, MeasuredLimiter, Ours, limits};
use crate::report::{BenchReport, Cell, digits};

use super::scenario::{ALLOWED, ScenarioOutcome, non_zero};

/// A store that is too small has room for one key in so many.
const CROWD: usize = 10;
/// Keys are made so many at a time, between calls that are timed.
const BLOCK: usize = 1 << 12;

/// Room for every call even on the shared state of a full store, and no key expires while others
/// come.
const LONG_LIVED: Allowance =
    Allowance { period: Duration::from_secs(400), burst: non_zero(11_000_000) };

/// How often keys come to a limiter made anew. A pause of the limiter's own comes every time; what
/// else runs on the machine comes once or twice, so the best of them is reported.
const TRIES: usize = 3;

/// What calls took.
#[derive(Clone, Copy, Default)]
struct CallTimes {
    worst: Duration,
    total: Duration,
}

impl CallTimes {
    /// Calls the limiter once with every key of this range.
    fn with(subject: &dyn MeasuredLimiter, numbers: Range<usize>) -> Result<Self, String> {
        let mut calls = Self::default();
        for first in numbers.clone().step_by(BLOCK) {
            let keys: Vec<_> =
                (first..(first + BLOCK).min(numbers.end)).map(CallerKey::new).collect();
            let mut time = thread_time();
            for key in &keys {
                if !subject.check(key) {
                    return Err("a new key was denied: the benchmark's limit is wrong".to_owned());
                }
                let now = thread_time();
                calls.add(now.saturating_sub(time));
                time = now;
            }
        }
        Ok(calls)
    }

    fn add(&mut self, taken: Duration) {
        self.worst = self.worst.max(taken);
        self.total += taken;
    }
}

fn us(time: Duration) -> Cell {
    digits(1, time.as_secs_f64() * 1e6)
}

/// The worst call while keys come that were never seen: into a store with room for all of them, and
/// into one with room for a tenth of them.
pub(super) fn run(quick: bool, report: &mut BenchReport) -> Fallible {
    let keys = if quick { 500_000 } else { 10_000_000 };
    println!("\nthe worst call while {keys} new keys come, the best of {TRIES} times");
    let worst = |calls: &dyn Fn() -> Fallible<CallTimes>| {
        let all = (0..TRIES).map(|_| calls()).collect::<Result<Vec<_>, _>>()?;
        Fallible::Ok(us(all.iter().map(|calls| calls.worst).min().unwrap_or_default()))
    };
    let nothing = ByFunction(|key: &CallerKey| !key.as_str().is_empty());
    let timing = worst(&|| Ok(CallTimes::with(&nothing, 0..keys)?))?;
    // One after the other, and each dropped before the next: ten million keys are gigabytes.
    let ours = |room: usize| {
        let ours = Ours::new(LONG_LIVED, PreciseClock::new(), room)?;
        let calls = CallTimes::with(&ours, 0..keys)?;
        // If a key found no place although there was one, or a full store forgot others for it,
        // something else was measured.
        let overflowed = ours.overflowed();
        if (overflowed > 0) == (room < keys) {
            Ok(calls)
        } else {
            Err(format!("{overflowed} of {keys} keys found no place in a store of {room}").into())
        }
    };
    let governor = worst(&|| Ok(CallTimes::with(&Governor::new(LONG_LIVED)?, 0..keys)?))?;
    for (scenario, ours) in [
        ("growth-10m", worst(&|| ours(keys))?),
        ("growth-10m-capped", worst(&|| ours(keys / CROWD))?),
        ("growth-10m-windows", worst(&|| windows(keys))?),
    ] {
        report.row(&[
            ("scenario", scenario.into()),
            ("ours_worst_us", ours),
            ("peer", "governor".into()),
            ("peer_worst_us", governor),
            ("timing_alone_us", timing),
        ])?;
    }
    Ok(())
}

/// A year: no window ends while keys come.
const WINDOW_US: u64 = 365 * 24 * 3_600_000_000;

/// The calls of a limit whose states take more than a bucket's slot has room for.
fn windows(keys: usize) -> Fallible<CallTimes> {
    let window = FixedWindow::new(Rate::per_us(2, WINDOW_US)?)?;
    let store = MemoryStore::builder().capacity(keys).build();
    let limiter = RateLimiter::new(limits([window])?, store);
    let check = |key: &CallerKey| limiter.check_now(key.as_str()).is_ok_and(|said| said.allowed());
    let calls = CallTimes::with(&ByFunction(check), 0..keys)?;
    match limiter.store().overflowed() {
        0 => Ok(calls),
        overflowed => Err(format!("{overflowed} of {keys} windows found no place").into()),
    }
}

/// One token a second: held now, and expired an hour later.
const SHORT_LIVED: ScenarioOutcome = ScenarioOutcome {
    allowance: Allowance { period: Duration::from_secs(1), burst: NonZeroU32::MIN },
    first_cost: NonZeroU32::MIN,
    ..ALLOWED
};
const LATER: Duration = Duration::from_secs(3_600);

/// What it costs that a million keys have expired: the worst call, and all calls, until a million
/// others have taken their place. governor frees nothing without `retain_recent`, which is one of
/// its calls here.
pub(super) fn expiry(quick: bool, report: &mut BenchReport) -> Fallible {
    let keys = if quick { 250_000 } else { 1_000_000 };
    let others = keys..2 * keys;
    println!("\n{keys} keys have expired, and as many others come");
    let timing =
        CallTimes::with(&ByFunction(|key: &CallerKey| !key.as_str().is_empty()), others.clone())?;
    let ours = {
        let clock = ManualClock::new(Timestamp::saturating_from_us(1_000_000));
        let ours = Ours::new(SHORT_LIVED.allowance, clock.clone(), keys)?;
        SHORT_LIVED.charge(&ours, keys)?;
        clock.advance(LATER);
        CallTimes::with(&ours, others.clone())?
    };
    let clock = FakeRelativeClock::default();
    let governor = Governor::with_clock(SHORT_LIVED.allowance, clock.clone())?;
    SHORT_LIVED.charge(&governor, keys)?;
    clock.advance(LATER);
    let begin = thread_time();
    governor.retain_recent();
    let retained = thread_time().saturating_sub(begin);
    let mut peer = CallTimes::with(&governor, others)?;
    peer.add(retained);
    // Without what it took to time the calls. Of a single one that is next to nothing.
    let total = |calls: CallTimes| us(calls.total.saturating_sub(timing.total));
    report.row(&[
        ("scenario", "expiry-1m".into()),
        ("ours_worst_us", us(ours.worst)),
        ("ours_total_us", total(ours)),
        ("peer", "governor".into()),
        ("peer_worst_us", us(peer.worst)),
        ("peer_total_us", total(peer)),
    ])
}
