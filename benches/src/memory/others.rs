//! One decision beside limiters other than governor: those that build and decide by key in memory.

use std::error::Error;

use crate::clocks::{PRECISE, precise};
use crate::peers::{GcraCrate, Limitador, Ours, Subject, ThrottleCrab, ThrottleKit, Trypema};
use crate::report::Report;
use crate::table::Row;

use super::scenario::{Effort, OUTCOMES, Outcome, SCENARIOS, Scenario, Turn, take_turns};

const THREADS: [usize; 2] = [1, 2];
/// Above so many keys, `--quick` has no time to charge them all.
const MOST_KEYS_WHEN_QUICK: usize = 1_000;

/// Ours, and then the peers with their names.
type Limiters = (Ours, Vec<(&'static str, Box<dyn Subject>)>);

fn limiters(outcome: &Outcome, key_count: usize) -> Result<Limiters, Box<dyn Error>> {
    let allowance = outcome.allowance;
    let peers: Vec<(_, Box<dyn Subject>)> = vec![
        ("limitador", Box::new(Limitador::new(allowance, key_count)?)),
        ("throttle-kit", Box::new(ThrottleKit::new(allowance))),
        ("trypema", Box::new(Trypema::new(allowance)?)),
        ("gcra", Box::new(GcraCrate::new(allowance))),
        ("throttlecrab", Box::new(ThrottleCrab::new(allowance, key_count)?)),
    ];
    let ours = Ours::new(allowance, precise(), key_count)?;
    outcome.charge(&ours, key_count)?;
    for (name, peer) in &peers {
        outcome.charge(&**peer, key_count).map_err(|error| format!("{name}: {error}"))?;
    }
    Ok((ours, peers))
}

/// Measures every scenario, outcome and number of threads.
pub(super) fn run(quick: bool, report: &mut Report) -> Result<(), Box<dyn Error>> {
    println!("\n{}", Row::heading());
    for outcome in &OUTCOMES {
        let mut held: Option<(usize, Limiters)> = None;
        for scenario in &SCENARIOS {
            if quick && scenario.key_count > MOST_KEYS_WHEN_QUICK {
                continue;
            }
            let limiters = match held.take() {
                Some((key_count, limiters)) if key_count == scenario.key_count => limiters,
                _ => limiters(outcome, scenario.key_count)?,
            };
            for threads in THREADS {
                measure(scenario, outcome, threads, &limiters, quick, report)?;
            }
            held = Some((scenario.key_count, limiters));
        }
    }
    Ok(())
}

fn measure(
    scenario: &Scenario,
    outcome: &Outcome,
    threads: usize,
    (ours, peers): &Limiters,
    quick: bool,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    let effort = if quick {
        Effort { rounds: 5, decisions: 1 << 12 }
    } else {
        Effort { rounds: 21, decisions: 1 << 14 }
    };
    let mut turns = vec![Turn::single(ours)];
    turns.extend(peers.iter().map(|(_, peer)| Turn::single(&**peer)));
    let samples = take_turns(scenario, outcome, threads, effort, &turns)?;
    for (at, (peer, _)) in (1..).zip(peers) {
        let row = Row {
            scenario: scenario.name,
            outcome: outcome.name,
            threads,
            clock: PRECISE,
            batch: 1,
            ours_ns: 0.0,
            peer,
            peer_ns: 0.0,
            ratio: 0.0,
        };
        let row = row.measured(&samples, 0, at);
        println!("{row}");
        report.line(&row)?;
    }
    Ok(())
}
