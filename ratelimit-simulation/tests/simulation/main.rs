//! Fleets of limiters on a model of Redis, in virtual time, by seeds.
//!
//! `RATELIMIT_SIMULATION_SEEDS=7`, `=1,5,9` or `=0..500` chooses other seeds.
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod allotments;
mod conformance;
mod exact;
mod fleet;
mod servers;
mod way;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::ops::Range;
use std::sync::Mutex;
use std::time::Duration;

use ratelimit_simulation::{BEGIN, ModelServer, Network, by_each_seed};
use tokio::runtime::Builder;
use tokio::time::sleep;

/// How exactly tokio's timers keep time.
const TICK: Duration = Duration::from_millis(2);
/// The seeds of a run without a choice.
const SEEDS: Range<u64> = 0..200;

/// Whether something of so many chances in a thousand happens.
fn chance(random: &mut fastrand::Rng, per_mille: u64) -> bool {
    random.u64(..1_000) < per_mille
}

/// What befalls a server for a while, without a loss of data.
async fn befall(network: &Network, number: usize, random: &mut fastrand::Rng) {
    const ERRORS: [&str; 3] =
        ["OOM command not allowed", "READONLY You can't write", "LOADING Redis is loading"];
    let (server, pause) = (&network.servers()[number], Duration::from_millis(random.u64(..500)));
    match random.u64(..4) {
        0 => network.hang(number, pause),
        1 => server.flush_scripts(),
        2 => {
            network.set_reachable(number, false);
            sleep(pause).await;
            network.set_reachable(number, true);
        }
        _ => {
            server.refuse(Some(ERRORS[random.usize(..3)]));
            sleep(pause).await;
            server.refuse(None);
        }
    }
}

/// What a run showed, by name.
#[derive(Clone, Debug, Default)]
struct Counts(BTreeMap<&'static str, u64>);

impl Counts {
    fn add(&mut self, name: &'static str, more: u64) {
        *self.0.entry(name).or_default() += more;
    }
}

/// Runs something by a seed, which decides all of it.
fn simulate<F: Future>(seed: u64, run: F) -> F::Output {
    fastrand::seed(seed);
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.expect("a runtime").block_on(run)
}

/// Runs the plans of all seeds, and prints what they show. A plan that breaks a bound fails with
/// its seed.
fn run_all<P: Debug>(
    plan: impl Fn(u64) -> P + Sync,
    run: impl Fn(&P) -> Result<Counts, String> + Sync,
) {
    let all = Mutex::new(Counts::default());
    by_each_seed(SEEDS, |seed| {
        let plan = plan(seed);
        let counts = run(&plan).unwrap_or_else(|broken| {
            panic!("{broken}\nrun it again with RATELIMIT_SIMULATION_SEEDS={seed}: {plan:?}")
        });
        let mut all = all.lock().expect("no panic");
        counts.0.into_iter().for_each(|(name, count)| all.add(name, count));
    });
    println!("{all:?}");
}

#[test]
fn some_order_explains_all_answers_of_nodes_without_layers() {
    run_all(exact::Plan::from_seed, exact::run);
}

#[test]
fn the_bounds_hold_for_fleets_with_all_layers() {
    run_all(fleet::Plan::from_seed, fleet::run);
}

/// The same seed gives the same run, so that one that fails can be tried again.
#[test]
fn a_seed_decides_the_whole_run() {
    for seed in [1, 2, 5] {
        let runs = [0; 2].map(|_| {
            let exact = exact::run(&exact::Plan::from_seed(seed));
            format!("{exact:?} {:?}", fleet::run(&fleet::Plan::from_seed(seed)))
        });
        assert_eq!(runs[0], runs[1], "{seed}");
    }
}

#[test]
fn a_server_that_forgets_what_it_wrote_is_caught() {
    let (exact, fleet) = (exact::Plan::from_seed, fleet::Plan::from_seed);
    assert!((0..60).any(|seed| exact::run(&exact(seed).forgetting()).is_err()));
    assert!((0..60).any(|seed| fleet::run(&fleet(seed).forgetting()).is_err()));
}

#[test]
fn a_server_that_is_away_takes_away_its_own_keys_only() {
    for away in 0..3 {
        let [its, others] = simulate(away as u64, async {
            let network =
                Network::new((0..3).map(|_| ModelServer::new(BEGIN.as_us(), 0)).collect(), 7);
            servers::run(&network, away).await
        });
        assert!(its > 50 && others > 150, "{its} {others}");
    }
}
