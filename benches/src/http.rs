//! What a layer adds to an HTTP request: ours in memory beside `tower_governor`, in turns in one
//! run.
//!
//! Each round also measures the request without a layer and subtracts its time, which leaves the
//! time of the layer alone. The requests come from a thousand addresses in a fixed order.

use std::net::SocketAddr;

use http::StatusCode;

use crate::measure::{Fallible, median, thread_time, turns};
use crate::report::{BenchReport, Effort, NamedCell, digits};
use crate::requests::{OUTCOMES, RequestOutcome, bare, governor, ours};

const CALLERS: u16 = 1_000;

/// Measures every outcome, with fields and without.
pub(crate) fn run(effort: &Effort) -> Fallible {
    let mut report = BenchReport::new(effort)?;
    let rounds = if effort.quick { 11 } else { 51 };
    println!(
        "What a layer adds to a request, in nanoseconds of CPU time: medians over {rounds} rounds in which\n\
         all take turns. Below 1, ours adds less than tower_governor. Only ratios inside one run mean anything."
    );
    for outcome in &OUTCOMES {
        for tells in [true, false] {
            for row in measure(outcome, tells, rounds)? {
                report.row(&row)?;
            }
        }
    }
    Ok(())
}

// The turns of a round.
const BARE: usize = 0;
const IMMEDIATE: usize = 1;
const GOVERNOR: usize = 2;
const AWAITED: usize = 3;

fn measure(outcome: &RequestOutcome, tells: bool, rounds: usize) -> Fallible<[[NamedCell; 6]; 2]> {
    let mut all = [
        bare(),
        ours(outcome, tells, true)?,
        governor(outcome, tells)?,
        ours(outcome, tells, false)?,
    ];
    let caller = |[high, low]: [u8; 2]| SocketAddr::from(([198, 51, high, low], 4711));
    let callers: Vec<_> = (0..CALLERS).map(u16::to_be_bytes).map(caller).collect();
    // The first request of each caller makes its state, and is admitted.
    for send in &mut all {
        for caller in &callers {
            let _admitted = send(*caller);
        }
    }
    let mut samples = vec![[0.0; 4]; rounds + 1];
    for (round, turn) in turns(rounds, all.len()) {
        let wanted = if turn == BARE { StatusCode::OK } else { outcome.status };
        let begin = thread_time();
        let mut right = 0_u32;
        for _ in 0..20 {
            for caller in &callers {
                right += u32::from(all[turn](*caller) == Some(wanted));
            }
        }
        let taken = thread_time().saturating_sub(begin);
        if right != 20 * u32::from(CALLERS) {
            return Err(format!("turn {turn}: {right} requests were {}", outcome.name).into());
        }
        samples[round][turn] = taken.as_secs_f64() * 1e9 / f64::from(right);
    }
    let added = |turn: usize| samples[1..].iter().map(move |round| round[turn] - round[BARE]);
    let row = |(mode, turn): (&'static str, usize)| {
        let overhead = added(turn).zip(added(GOVERNOR)).map(|(ours, peer)| ours / peer);
        [
            ("outcome", outcome.name.into()),
            ("fields", if tells { "yes" } else { "no" }.into()),
            ("mode", mode.into()),
            ("ours_ns", digits(1, median(added(turn)))),
            ("tower_governor_ns", digits(1, median(added(GOVERNOR)))),
            ("overhead", digits(3, median(overhead))),
        ]
    };
    Ok([("immediate", IMMEDIATE), ("awaited", AWAITED)].map(row))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_layers_decide_as_each_outcome_says() -> Fallible {
        for outcome in &OUTCOMES {
            for tells in [true, false] {
                measure(outcome, tells, 1)?;
            }
        }
        Ok(())
    }
}
