//! What is asked, how often, and what every answer has to be.

use std::error::Error;
use std::num::NonZeroU32;
use std::time::Duration;

use crate::keys::{Draw, Key, Spread};
use crate::measure::Samples;
use crate::peers::{Allowance, Subject};

/// Which keys are asked about, and in which order.
#[derive(Clone, Copy)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    spread: Spread,
    pub(super) key_count: usize,
}

pub(super) const HOT: Scenario = Scenario { name: "hot", spread: Spread::Uniform, key_count: 1 };
pub(super) const THOUSAND: Scenario =
    Scenario { name: "1k-uniform", spread: Spread::Uniform, key_count: 1_000 };
pub(super) const MILLION: Scenario =
    Scenario { name: "1m-uniform", spread: Spread::Uniform, key_count: 1_000_000 };
pub(super) const ZIPF: Scenario =
    Scenario { name: "1m-zipf", spread: Spread::Zipf, key_count: 1_000_000 };

/// All of them; those with the same keys stand together, because a million take a while to charge.
pub(super) const SCENARIOS: [Scenario; 4] = [HOT, THOUSAND, MILLION, ZIPF];

/// The outcome that every decision of a measurement has, and the limit that makes it so. Every key is
/// charged `first_cost` beforehand, so that its state outlives the run: what is measured is a decision
/// on a held key.
#[derive(Clone, Copy)]
pub(super) struct Outcome {
    pub(super) name: &'static str,
    pub(super) allowed: bool,
    pub(super) allowance: Allowance,
    pub(super) first_cost: NonZeroU32,
}

const fn non_zero(n: u32) -> NonZeroU32 {
    match NonZeroU32::new(n) {
        Some(n) => n,
        None => NonZeroU32::MIN,
    }
}

/// What is charged flows back in hours, and one key's tens of millions of decisions in days: a state that takes
/// longer than twelve days to recover is kept otherwise in our store, and would be another measurement.
pub(super) const ALLOWED: Outcome = Outcome {
    name: "allowed",
    allowed: true,
    allowance: Allowance { period: Duration::from_millis(10), burst: non_zero(4_000_000_000) },
    first_cost: non_zero(1_000_000),
};
/// A burst of 2, because one of the peers holds no key with a burst of 1.
pub(super) const DENIED: Outcome = Outcome {
    name: "denied",
    allowed: false,
    allowance: Allowance { period: Duration::from_secs(10_000), burst: non_zero(2) },
    first_cost: non_zero(2),
};

pub(super) const OUTCOMES: [Outcome; 2] = [ALLOWED, DENIED];

impl Outcome {
    /// Charges every key beforehand.
    pub(super) fn charge(&self, subject: &dyn Subject, key_count: usize) -> Result<(), String> {
        let mut keys = (0..key_count).map(Key::new);
        if keys.all(|key| subject.charge(&key, self.first_cost)) {
            Ok(())
        } else {
            Err("a first charge was denied: the benchmark's limit is wrong".to_owned())
        }
    }
}

/// How much is measured.
#[derive(Clone, Copy)]
pub(super) struct Effort {
    /// Rounds that count, each with every limiter once.
    pub(super) rounds: u64,
    /// Decisions of each thread in a round: a multiple of the largest batch.
    pub(super) decisions: u32,
}

/// One limiter's place in a round.
#[derive(Clone, Copy)]
pub(super) struct Turn<'a> {
    pub(super) subject: &'a dyn Subject,
    /// Decisions asked for in one call.
    pub(super) batch: usize,
}

impl<'a> Turn<'a> {
    pub(super) fn single(subject: &'a dyn Subject) -> Self {
        Self { subject, batch: 1 }
    }
}

/// Gives each its turn in every round, forwards and backwards by turns, on the same keys; the first round
/// warms caches and code, and is not counted. Fails if a decision is another than it should be.
pub(super) fn take_turns(
    scenario: &Scenario,
    outcome: &Outcome,
    threads: usize,
    effort: Effort,
    turns: &[Turn<'_>],
) -> Result<Samples, Box<dyn Error>> {
    let mut draws: Vec<_> =
        (1..).take(threads).map(|n| Draw::new(scenario.spread, scenario.key_count, n)).collect();
    // Keys drawn anew for a round: they fit a cache where the keys of the scenario do.
    let fresh = if scenario.key_count > 1_000 { effort.decisions } else { 1 << 11 };
    let fresh = fresh.min(effort.decisions);
    let mut samples = Vec::new();
    for number in 0..=effort.rounds {
        let keys: Vec<_> = draws.iter_mut().map(|draw| draw.keys(fresh as usize)).collect();
        let mut round = vec![0.0; turns.len()];
        let mut order: Vec<_> = (0..turns.len()).collect();
        if number % 2 == 1 {
            order.reverse();
        }
        for place in order {
            let Turn { subject, batch } = turns[place];
            let measured = subject.round(&keys, effort.decisions / fresh, batch);
            let expected = if outcome.allowed { measured.decisions as usize } else { 0 };
            if measured.allowed != expected {
                return Err(format!(
                    "{} {}, number {place} of the turns: {} of {} decisions allowed, not {expected}",
                    scenario.name, outcome.name, measured.allowed, measured.decisions
                )
                .into());
            }
            round[place] = measured.ns;
        }
        if number > 0 {
            samples.push(round);
        }
    }
    Ok(Samples(samples))
}
