//! Fleets of limiters on a model of Redis, in virtual time, by seeds.
//!
//! `RATELIMIT_SIMULATION_SEEDS=7`, `=1,5,9` or `=0..500` chooses other seeds.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod conformance;
mod exact;
mod fleet;

use std::fmt::Debug;
use std::ops::{AddAssign, Range};
use std::time::Duration;

use tokio::runtime::{Builder, Runtime};

const BEGIN_US: u64 = 1_795_218_392_123_456;
/// How exactly tokio's timers keep time.
const TICK: Duration = Duration::from_millis(2);
/// The seeds of a run without a choice.
const SEEDS: Range<u64> = 0..200;

/// A runtime whose clock stands still while tasks run.
fn paused() -> Runtime {
    Builder::new_current_thread().enable_time().start_paused(true).build().expect("a runtime")
}

/// Whether something of so many chances in a thousand happens.
fn chance(random: &mut fastrand::Rng, per_mille: u64) -> bool {
    random.u64(..1_000) < per_mille
}

fn seeds() -> Vec<u64> {
    let number = |text: &str| text.trim().parse::<u64>().expect("a seed, a list, or a..b");
    let Ok(text) = std::env::var("RATELIMIT_SIMULATION_SEEDS") else { return SEEDS.collect() };
    match text.split_once("..") {
        Some((first, end)) => (number(first)..number(end)).collect(),
        None => text.split(',').map(number).collect(),
    }
}

/// Runs the plans of all seeds, and adds up what they show. A plan that breaks a bound fails with its seed.
fn run_all<P: Debug, O: Default + AddAssign + Debug>(
    plan: impl Fn(u64) -> P,
    run: impl Fn(&P) -> Result<O, String>,
) -> O {
    let mut all = O::default();
    for seed in seeds() {
        let plan = plan(seed);
        match run(&plan) {
            Ok(outcome) => all += outcome,
            Err(broken) => {
                panic!("{broken}\nrun it again with RATELIMIT_SIMULATION_SEEDS={seed}: {plan:?}")
            }
        }
    }
    println!("{all:?}");
    all
}

#[test]
fn some_order_explains_all_answers_of_nodes_without_layers() {
    run_all(exact::Plan::of, exact::run);
}

#[test]
fn the_bounds_hold_for_fleets_with_all_layers() {
    run_all(fleet::Plan::of, fleet::run);
}

/// The same seed gives the same run, so that one that fails can be tried again.
#[test]
fn a_seed_decides_the_whole_run() {
    for seed in [1, 2, 5, 99] {
        let runs = [0; 2].map(|_| {
            format!(
                "{:?} {:?}",
                exact::run(&exact::Plan::of(seed)),
                fleet::run(&fleet::Plan::of(seed))
            )
        });
        assert_eq!(runs[0], runs[1], "{seed}");
    }
}

/// Whether some of these seeds break a bound.
fn is_caught(is_broken: impl Fn(u64) -> bool) -> bool {
    (0..60).any(is_broken)
}

#[test]
fn a_server_that_forgets_what_it_wrote_is_caught() {
    assert!(is_caught(|seed| {
        let mut plan = exact::Plan::of(seed);
        plan.forgets = true;
        exact::run(&plan).is_err()
    }));
    assert!(is_caught(|seed| {
        let mut plan = fleet::Plan::of(seed);
        plan.forgets = true;
        fleet::run(&plan).is_err()
    }));
}
