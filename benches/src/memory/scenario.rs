//! What is asked, how often, and what every answer has to be.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::keys::{CallerKey, KeyDraw, Spread};
use crate::measure::{Fallible, Samples, turns};
use crate::peers::{Allowance, MeasuredLimiter};
use crate::report::{BenchReport, digits};

/// Which keys are asked about, and in which order.
#[derive(Clone, Copy)]
pub(super) struct Scenario {
    pub(super) name: &'static str,
    spread: Spread,
    pub(super) key_count: usize,
}

impl Scenario {
    const fn new(name: &'static str, spread: Spread, key_count: usize) -> Self {
        Self { name, spread, key_count }
    }
}

pub(super) const THOUSAND: Scenario = Scenario::new("1k-uniform", Spread::Uniform, 1_000);

/// Each key a customer.
pub(super) const CUSTOMERS: Scenario = Scenario::new("10k-customers", Spread::Uniform, 10_000);

/// All of them; those with the same keys stand together, because a million take a while to charge.
pub(super) const SCENARIOS: [Scenario; 4] = [
    Scenario::new("hot", Spread::Uniform, 1),
    THOUSAND,
    Scenario::new("1m-uniform", Spread::Uniform, 1_000_000),
    Scenario::new("1m-zipf", Spread::Zipf, 1_000_000),
];

/// The outcome that every decision of a measurement has, and the limit that makes it so. Every key
/// is charged `first_cost` beforehand, so its state outlives the run, and a run measures decisions
/// on held keys.
#[derive(Clone, Copy)]
pub(super) struct ScenarioOutcome {
    pub(super) name: &'static str,
    pub(super) allowed: bool,
    pub(super) allowance: Allowance,
    pub(super) first_cost: NonZeroU32,
}

/// This number, which is above zero.
pub(super) const fn non_zero(n: u32) -> NonZeroU32 {
    NonZeroU32::MIN.saturating_add(n - 1)
}

/// What is charged flows back in hours, and one key's tens of millions of decisions in days: a
/// state that takes longer than twelve days to recover is kept otherwise in our store, and would be
/// another measurement.
pub(super) const ALLOWED: ScenarioOutcome = ScenarioOutcome {
    name: "allowed",
    allowed: true,
    allowance: Allowance { period: Duration::from_millis(10), burst: non_zero(4_000_000_000) },
    first_cost: non_zero(1_000_000),
};
pub(super) const DENIED: ScenarioOutcome = ScenarioOutcome {
    name: "denied",
    allowed: false,
    allowance: Allowance { period: Duration::from_secs(10_000), burst: non_zero(2) },
    first_cost: non_zero(2),
};

impl ScenarioOutcome {
    /// Charges every key beforehand.
    pub(super) fn charge(
        &self,
        subject: &dyn MeasuredLimiter,
        key_count: usize,
    ) -> Result<(), String> {
        let mut keys = (0..key_count).map(CallerKey::new);
        if keys.all(|key| subject.charge(&key, self.first_cost)) {
            Ok(())
        } else {
            Err("a first charge was denied: the benchmark's limit is wrong".to_owned())
        }
    }
}

/// How much is measured.
#[derive(Clone, Copy)]
pub(super) struct ScenarioEffort {
    /// Rounds that count, each with every limiter once.
    pub(super) rounds: usize,
    /// Decisions of each thread in a round: a multiple of the largest batch.
    pub(super) decisions: u32,
}

/// One limiter's place in a round.
#[derive(Clone, Copy)]
pub(super) struct LimiterTurn<'a> {
    pub(super) subject: &'a dyn MeasuredLimiter,
    /// Decisions asked for in one call.
    pub(super) batch: usize,
}

impl<'a> LimiterTurn<'a> {
    pub(super) fn single(subject: &'a dyn MeasuredLimiter) -> Self {
        Self { subject, batch: 1 }
    }
}

/// Nanoseconds per decision of each that took turns.
pub(super) struct Measured {
    scenario: &'static str,
    outcome: &'static str,
    threads: usize,
    samples: Samples<f64>,
}

/// Gives each its turn in every round on the same keys. Fails if a decision is another than it
/// should be.
pub(super) fn take_turns(
    scenario: &Scenario,
    outcome: &ScenarioOutcome,
    threads: usize,
    effort: ScenarioEffort,
    all: &[LimiterTurn<'_>],
) -> Fallible<Measured> {
    let mut draws: Vec<_> =
        (1..).take(threads).map(|n| KeyDraw::new(scenario.spread, scenario.key_count, n)).collect();
    // Keys drawn anew for a round: they fit a cache where the keys of the scenario do.
    let fresh = if scenario.key_count > 1_000 { effort.decisions } else { 1 << 11 };
    let fresh = fresh.min(effort.decisions);
    let (mut samples, mut keys, mut keys_of) = (Samples::new(all.len()), Vec::new(), None);
    for (round, way) in turns(effort.rounds, all.len()) {
        if keys_of.replace(round) != Some(round) {
            keys = draws.iter_mut().map(|d| d.keys(fresh as usize)).collect::<Result<_, _>>()?;
        }
        let LimiterTurn { subject, batch } = all[way];
        let measured = subject.round(&keys, effort.decisions / fresh, batch);
        let expected = if outcome.allowed { measured.decisions as usize } else { 0 };
        if measured.allowed != expected {
            return Err(format!(
                "{} {}, number {way} of the turns: {} of {} decisions allowed, not {expected}",
                scenario.name, outcome.name, measured.allowed, measured.decisions
            )
            .into());
        }
        samples.add((round, way), measured.ns);
    }
    Ok(Measured { scenario: scenario.name, outcome: outcome.name, threads, samples })
}

impl Measured {
    /// A row of its own for what was measured beside others, such as one algorithm of many.
    pub(super) fn named(&mut self, scenario: &'static str) -> &Self {
        self.scenario = scenario;
        self
    }

    /// Tells of ours, at its place among the turns, beside a peer. The ratio is the peer's time
    /// over ours: above 1, ratelimit is faster.
    pub(super) fn tell(
        &self,
        report: &mut BenchReport,
        (clock, batch, ours): (&'static str, usize, usize),
        (peer, at): (&'static str, usize),
    ) -> Fallible {
        let ns = |way| digits(1, self.samples.median(way, |ns| *ns));
        report.row(&[
            ("scenario", self.scenario.into()),
            ("outcome", self.outcome.into()),
            ("threads", self.threads.into()),
            ("clock", clock.into()),
            ("batch", batch.into()),
            ("ours_ns", ns(ours)),
            ("peer", peer.into()),
            ("peer_ns", ns(at)),
            ("ratio", digits(2, self.samples.ratio(at, ours, |ns| *ns))),
        ])
    }
}
