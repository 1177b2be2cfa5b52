//! One decision: ours with either clock, one and eight at a time, beside governor with either of its own
//! and beside a plain map.

use std::error::Error;
use std::hint::black_box;
use std::time::Instant;

use governor::clock::QuantaUpkeepClock;
use ratelimit_core::Clock;

use crate::clocks::{COARSE, COARSE_STEP, CoarseClock, PRECISE, precise};
use crate::keys::{Draw, Key, Spread};
use crate::measure::{median, round};
use crate::peers::{BATCH, Governor, Ours, Plain};
use crate::report::Report;
use crate::table::Row;

use super::scenario::{Effort, OUTCOMES, Outcome, SCENARIOS, Scenario, Turn, take_turns};

const THREADS: [usize; 2] = [1, 2];

/// The clocks of all limiters: a coarse one has a thread, and all limiters share it.
struct Clocks {
    coarse: CoarseClock,
    governor_coarse: QuantaUpkeepClock,
}

/// The limiters of one number of keys and one outcome, every key charged.
struct Limiters {
    precise: Ours,
    coarse: Ours<CoarseClock>,
    governor: Governor,
    governor_coarse: Governor<QuantaUpkeepClock>,
    plain: Plain,
}

// Their turns in a round. Governor stands among ours, so that none of them is far from it.
const OURS: usize = 0;
const OURS_BATCHED: usize = 1;
const GOVERNOR: usize = 2;
const OURS_COARSE: usize = 3;
const OURS_COARSE_BATCHED: usize = 4;
const GOVERNOR_COARSE: usize = 5;
const PLAIN: usize = 6;

impl Limiters {
    fn new(outcome: &Outcome, key_count: usize, clocks: &Clocks) -> Result<Self, Box<dyn Error>> {
        let allowance = outcome.allowance;
        let limiters = Self {
            precise: Ours::new(allowance, precise(), key_count)?,
            coarse: Ours::new(allowance, clocks.coarse.clone(), key_count)?,
            governor: Governor::new(allowance)?,
            governor_coarse: Governor::with_clock(allowance, clocks.governor_coarse.clone())?,
            plain: Plain::new(allowance),
        };
        for turn in limiters.turns() {
            if turn.batch == 1 {
                outcome.charge(turn.subject, key_count)?;
            }
        }
        Ok(limiters)
    }

    fn turns(&self) -> [Turn<'_>; 7] {
        [
            Turn::single(&self.precise),
            Turn { subject: &self.precise, batch: BATCH },
            Turn::single(&self.governor),
            Turn::single(&self.coarse),
            Turn { subject: &self.coarse, batch: BATCH },
            Turn::single(&self.governor_coarse),
            Turn::single(&self.plain),
        ]
    }
}

/// Measures every scenario, outcome and number of threads.
pub(super) fn run(quick: bool, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let clocks = Clocks {
        coarse: CoarseClock::new(),
        governor_coarse: QuantaUpkeepClock::from_interval(COARSE_STEP)?,
    };
    println!("\n{}", Row::heading());
    let mut held: Option<(usize, [Limiters; 2])> = None;
    for scenario in &SCENARIOS {
        let limiters = match held.take() {
            Some((key_count, limiters)) if key_count == scenario.key_count => limiters,
            _ => {
                let [allowed, denied] = &OUTCOMES;
                let new = |outcome| Limiters::new(outcome, scenario.key_count, &clocks);
                [new(allowed)?, new(denied)?]
            }
        };
        for (outcome, limiters) in OUTCOMES.iter().zip(&limiters) {
            for threads in THREADS {
                measure(scenario, outcome, threads, limiters, quick, report)?;
            }
        }
        held = Some((scenario.key_count, limiters));
    }
    println!("\n{}", floor(&clocks.coarse));
    Ok(())
}

fn measure(
    scenario: &Scenario,
    outcome: &Outcome,
    threads: usize,
    limiters: &Limiters,
    quick: bool,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    let effort = if quick {
        // Fewer of those that wait for memory, for there are as many to warm up.
        Effort { rounds: 7, decisions: if scenario.key_count > 1_000 { 1 << 14 } else { 1 << 15 } }
    } else {
        Effort { rounds: 31, decisions: 1 << 17 }
    };
    let samples = take_turns(scenario, outcome, threads, effort, &limiters.turns())?;
    if limiters.precise.overflowed() + limiters.coarse.overflowed() > 0 {
        return Err("the store overflowed: shared states were measured".into());
    }
    let row = |clock, batch, ours, (peer, at)| {
        let row = Row {
            scenario: scenario.name,
            outcome: outcome.name,
            threads,
            clock,
            batch,
            ours_ns: 0.0,
            peer,
            peer_ns: 0.0,
            ratio: 0.0,
        };
        row.measured(&samples, ours, at)
    };
    let governor = ("governor", GOVERNOR);
    let governor_coarse = ("governor-coarse", GOVERNOR_COARSE);
    for (clock, batch, ours, peer) in [
        (PRECISE, 1, OURS, governor),
        (PRECISE, BATCH, OURS_BATCHED, governor),
        (COARSE, 1, OURS_COARSE, governor),
        (COARSE, BATCH, OURS_COARSE_BATCHED, governor),
        (COARSE, 1, OURS_COARSE, governor_coarse),
        (COARSE, BATCH, OURS_COARSE_BATCHED, governor_coarse),
    ] {
        let row = row(clock, batch, ours, peer);
        println!("{row}");
        report.line(&row)?;
    }
    // No peer, and no place in the JSON.
    println!("{}", row(PRECISE, 1, OURS, ("(mutex<map>)", PLAIN)));
    Ok(())
}

/// The time of the loop around a decision and of the clocks inside it: no limiter that reads the time for
/// every decision can be faster.
fn floor(coarse: &CoarseClock) -> String {
    let keys = [Draw::new(Spread::Uniform, 1, 1).keys(1 << 11)];
    let clock = precise();
    let time = |check: &(dyn Fn(&Key) -> bool + Sync)| {
        let pass = |keys: &[Key]| keys.iter().filter(|key| check(key)).count();
        median((0..9).map(|_| round(&keys, 128, pass).ns))
    };
    let empty = time(&|key| black_box(key.as_str()).len() == 20);
    let begin = Instant::now();
    let instant = time(&|_| black_box(Instant::now()) >= begin);
    let system = time(&|_| black_box(clock.now()).as_us() > 0);
    let coarse = time(&|_| black_box(coarse.now()).as_us() > 0);
    format!(
        "floor: an empty loop {empty:.1} ns, Instant::now {instant:.1} ns, our clock {system:.1} ns, \
         the coarse one {coarse:.1} ns"
    )
}
