//! What the simulations share: seeds, clocks that are off, and limits that are widened by a
//! lifetime of allotments.

use std::num::NonZero;
use std::ops::Range;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use ratelimit_core::{AnyAlgorithm, Clock, Gcra, Timestamp};
use tokio::time::Instant;

/// When simulated time begins.
pub const BEGIN: Timestamp = Timestamp::saturating_from_us(1_795_218_392_123_456);

/// Runs something by each seed that the environment chooses, on each processor some of them.
pub fn by_each_seed(otherwise: Range<u64>, run: impl Fn(u64) + Sync) {
    let (seeds, next) = (&seeds(otherwise), &AtomicUsize::new(0));
    let runs = || {
        while let Some(seed) = seeds.get(next.fetch_add(1, Ordering::Relaxed)) {
            run(*seed);
        }
    };
    thread::scope(|scope| {
        let processors = thread::available_parallelism().map_or(1, NonZero::get);
        let threads: Vec<_> = (0..processors).map(|_| scope.spawn(runs)).collect();
        for thread in threads {
            thread.join().unwrap_or_else(|panic| resume_unwind(panic));
        }
    });
}

/// The seeds that the environment chooses: one, a list, or a range.
fn seeds(otherwise: Range<u64>) -> Vec<u64> {
    let number = |text: &str| text.trim().parse::<u64>().expect("a seed, a list, or a..b");
    let Ok(text) = std::env::var("RATELIMIT_SIMULATION_SEEDS") else { return otherwise.collect() };
    match text.split_once("..") {
        Some((first, end)) => (number(first)..number(end)).collect(),
        None => text.split(',').map(number).collect(),
    }
}

/// A clock over tokio's time, which may be off and drift.
#[derive(Clone, Copy, Debug)]
pub struct SimulatedClock {
    /// When it showed [`BEGIN`], but for its offset.
    pub base: Instant,
    /// By how much it is fast.
    pub offset_us: u64,
    /// By how many millionths it runs faster.
    pub drift_ppm: i64,
}

impl Clock for SimulatedClock {
    fn now(&self) -> Timestamp {
        let passed_us = i128::try_from(self.base.elapsed().as_micros()).expect("a short run");
        let drifted = passed_us * i128::from(1_000_000 + self.drift_ppm) / 1_000_000;
        let passed_us = u64::try_from(drifted).expect("it does not go back");
        BEGIN.saturating_add_us(self.offset_us + passed_us)
    }
}

/// The limit that admits in an interval of length `x` what this one admits in one of length `x +
/// L`.
#[must_use]
pub fn widen(limit: &AnyAlgorithm, lifetime_us: u64) -> AnyAlgorithm {
    match limit {
        AnyAlgorithm::Gcra(gcra) => {
            let refill = gcra.refill();
            let more = more(refill.rate(), lifetime_us);
            Gcra::new(refill.rate(), refill.burst + more).expect("a bucket").into()
        }
        other => *other,
    }
}

/// What flows back in a lifetime, rounded up.
fn more(rate: ratelimit_core::Rate, lifetime_us: u64) -> u64 {
    (rate.count() * lifetime_us).div_ceil(rate.period_us())
}
