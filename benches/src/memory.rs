//! One decision in memory: ours beside governor and beside a plain map, in turns.

use std::error::Error;
use std::fs::File;
use std::hint::black_box;
use std::io::Write;
use std::num::NonZeroU32;
use std::path::Path;
use std::time::{Duration, Instant};

use ratelimit_core::{Clock, SystemClock};

use crate::Options;
use crate::keys::{Draw, Key, Spread};
use crate::measure::{Round, median, round};
use crate::peers::{Allowance, Governor, Ours, Plain, Subject};
use crate::table::Row;

/// What is asked, and in which order.
struct Scenario {
    name: &'static str,
    spread: Spread,
    key_count: usize,
}

const SCENARIOS: [Scenario; 4] = [
    Scenario { name: "hot", spread: Spread::Uniform, key_count: 1 },
    Scenario { name: "1k-uniform", spread: Spread::Uniform, key_count: 1_000 },
    Scenario { name: "1m-uniform", spread: Spread::Uniform, key_count: 1_000_000 },
    Scenario { name: "1m-zipf", spread: Spread::Zipf, key_count: 1_000_000 },
];

/// The outcome that every decision of a measurement has, and the limit that makes it so. Every key is
/// charged `first_cost` beforehand, so that its state outlives the run: what is measured is a decision
/// on a held key.
#[derive(Clone, Copy)]
struct Outcome {
    name: &'static str,
    allowed: bool,
    allowance: Allowance,
    first_cost: NonZeroU32,
}

const fn non_zero(n: u32) -> NonZeroU32 {
    match NonZeroU32::new(n) {
        Some(n) => n,
        None => NonZeroU32::MIN,
    }
}

const OUTCOMES: [Outcome; 2] = [
    Outcome {
        name: "allowed",
        allowed: true,
        allowance: Allowance { period: Duration::from_secs(1), burst: non_zero(4_000_000_000) },
        first_cost: non_zero(10_000),
    },
    Outcome {
        name: "denied",
        allowed: false,
        allowance: Allowance { period: Duration::from_secs(10_000), burst: non_zero(1) },
        first_cost: non_zero(1),
    },
];

const THREADS: [usize; 2] = [1, 2];

/// How much is measured.
struct Effort {
    /// Rounds of a measurement, each with every limiter once.
    rounds: u64,
    /// Decisions of each thread in a round.
    decisions: u32,
    /// Keys drawn anew for a round: they fit a cache where the keys of the scenario do.
    fresh_keys: u32,
}

impl Effort {
    const fn new(quick: bool, scenario: &Scenario) -> Self {
        let rounds = if quick { 7 } else { 31 };
        let decisions = 1 << 18;
        let fresh_keys = if scenario.key_count > 1_000 { decisions } else { 1 << 11 };
        Self { rounds, decisions, fresh_keys }
    }
}

/// The limiters of one number of keys and one outcome, every key charged.
struct Limiters {
    ours: Ours,
    governor: Governor,
    plain: Plain,
}

impl Limiters {
    fn new(outcome: &Outcome, key_count: usize) -> Result<Self, Box<dyn Error>> {
        let limiters = Self {
            ours: Ours::new(outcome.allowance)?,
            governor: Governor::new(outcome.allowance)?,
            plain: Plain::new(outcome.allowance),
        };
        let subjects: [&dyn Subject; 3] = [&limiters.ours, &limiters.governor, &limiters.plain];
        for subject in subjects {
            let mut keys = (0..key_count).map(Key::new);
            if !keys.all(|key| subject.charge(&key, outcome.first_cost)) {
                return Err("a first charge was denied: the benchmark's limit is wrong".into());
            }
        }
        Ok(limiters)
    }

    /// One round of each, in the order of the list or against it.
    fn rounds(&self, threads: &[Vec<Key>], passes: u32, backwards: bool) -> [Round; 3] {
        let ours = || round(threads, passes, |key| self.ours.check(key));
        let governor = || round(threads, passes, |key| self.governor.check(key));
        let plain = || round(threads, passes, |key| self.plain.check(key));
        if backwards {
            let (plain, governor) = (plain(), governor());
            [ours(), governor, plain]
        } else {
            [ours(), governor(), plain()]
        }
    }
}

/// Measures all scenarios, prints the table, and writes the JSON lines if they are asked for.
pub(crate) fn run(options: &Options) -> Result<(), Box<dyn Error>> {
    let mut json = options.json.as_deref().map(create).transpose()?;
    println!("One decision in memory, medians. One thread: its CPU time; two: wall time over all");
    println!("decisions. Ratio is governor's time over ours: above 1 we are faster.\n");
    println!("{}", Row::heading());
    let mut held: Option<(usize, [Limiters; 2])> = None;
    for scenario in &SCENARIOS {
        // Scenarios with the same keys share them: a million take a while to charge.
        let limiters = match held.take() {
            Some((key_count, limiters)) if key_count == scenario.key_count => limiters,
            _ => {
                let [allowed, denied] = &OUTCOMES;
                let new = |outcome| Limiters::new(outcome, scenario.key_count);
                [new(allowed)?, new(denied)?]
            }
        };
        for (outcome, limiters) in OUTCOMES.iter().zip(&limiters) {
            for threads in THREADS {
                let row = measure(scenario, outcome, threads, limiters, options.quick)?;
                println!("{row}");
                if let Some(json) = &mut json {
                    writeln!(json, "{}", serde_json::to_string(&row)?)?;
                }
            }
        }
        held = Some((scenario.key_count, limiters));
    }
    println!("\n{}", floor());
    Ok(())
}

fn create(path: &Path) -> Result<File, String> {
    File::create(path).map_err(|error| {
        format!("cannot write {}: {error}; choose another file for --json", path.display())
    })
}

fn measure(
    scenario: &Scenario,
    outcome: &Outcome,
    threads: usize,
    limiters: &Limiters,
    quick: bool,
) -> Result<Row, Box<dyn Error>> {
    let effort = Effort::new(quick, scenario);
    let mut draws: Vec<_> =
        (1..).take(threads).map(|n| Draw::new(scenario.spread, scenario.key_count, n)).collect();
    let mut all = Vec::new();
    // The first round warms caches and code, and is not counted.
    for number in 0..=effort.rounds {
        let keys: Vec<_> =
            draws.iter_mut().map(|draw| draw.keys(effort.fresh_keys as usize)).collect();
        let passes = effort.decisions / effort.fresh_keys;
        let rounds = limiters.rounds(&keys, passes, number % 2 == 1);
        for round in &rounds {
            let expected = if outcome.allowed { round.decisions as usize } else { 0 };
            if round.allowed != expected {
                return Err(format!(
                    "{} {}: {} of {} decisions allowed, not {expected}",
                    scenario.name, outcome.name, round.allowed, round.decisions
                )
                .into());
            }
        }
        if number > 0 {
            all.push(rounds.map(|round| round.ns));
        }
    }
    if limiters.ours.overflowed() > 0 {
        return Err("the store overflowed: shared states were measured".into());
    }
    let row = Row {
        scenario: scenario.name,
        outcome: outcome.name,
        threads,
        clock: "precise",
        batch: 1,
        ours_ns: median(all.iter().map(|[ours, ..]| *ours)),
        peer: "governor",
        peer_ns: median(all.iter().map(|[_, governor, _]| *governor)),
        ratio: median(all.iter().map(|[ours, governor, _]| governor / ours)),
        plain_ns: median(all.iter().map(|[.., plain]| *plain)),
    };
    Ok(row.rounded())
}

/// What the loop around a decision takes, and the clocks inside one: nobody who reads the time for
/// every decision can be faster.
fn floor() -> String {
    let keys = [Draw::new(Spread::Uniform, 1, 1).keys(1 << 11)];
    let clock = SystemClock::new();
    let time =
        |check: &(dyn Fn(&Key) -> bool + Sync)| median((0..9).map(|_| round(&keys, 128, check).ns));
    let empty = time(&|key| black_box(key.as_str()).len() == 20);
    let begin = Instant::now();
    let instant = time(&|_| black_box(Instant::now()) >= begin);
    let system = time(&|_| black_box(clock.now()).as_us() > 0);
    format!(
        "floor: an empty loop {empty:.1} ns, Instant::now {instant:.1} ns, our clock {system:.1} ns"
    )
}
