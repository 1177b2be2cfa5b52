//! One decision: ours with either clock, one and eight at a time, beside governor with either of
//! its own.

use std::time::Duration;

use governor::clock::QuantaUpkeepClock;
use ratelimit_memory::{CoarseClock, PreciseClock};

use crate::measure::Fallible;
use crate::peers::{BATCH, Governor, Ours};
use crate::report::BenchReport;

use super::scenario::{
    ALLOWED, DENIED, LimiterTurn, SCENARIOS, ScenarioEffort, ScenarioOutcome, take_turns,
};
use super::{COARSE, PRECISE};

/// The longest lag of our coarse clock, for governor too.
const COARSE_STEP: Duration = Duration::from_millis(1);

/// The limiters of one number of keys and one outcome, every key charged.
struct LimiterSet {
    outcome: ScenarioOutcome,
    precise: Ours,
    coarse: Ours<CoarseClock>,
    governor: Governor,
    governor_coarse: Governor<QuantaUpkeepClock>,
}

/// The clocks of all limiters: a coarse one has a thread, and all limiters share it.
type CoarseClocks = (CoarseClock, QuantaUpkeepClock);

// Their turns in a round. Governor stands among ours, so that none of them is far from it.
const OURS: usize = 0;
const OURS_BATCHED: usize = 1;
const GOVERNOR: (&str, usize) = ("governor", 2);
const OURS_COARSE: usize = 3;
const OURS_COARSE_BATCHED: usize = 4;
const GOVERNOR_COARSE: (&str, usize) = ("governor-coarse", 5);

impl LimiterSet {
    fn new(outcome: ScenarioOutcome, key_count: usize, clocks: &CoarseClocks) -> Fallible<Self> {
        let allowance = outcome.allowance;
        let limiters = Self {
            outcome,
            precise: Ours::new(allowance, PreciseClock::new(), key_count)?,
            coarse: Ours::new(allowance, clocks.0.clone(), key_count)?,
            governor: Governor::new(allowance)?,
            governor_coarse: Governor::with_clock(allowance, clocks.1.clone())?,
        };
        for turn in limiters.turns().into_iter().filter(|turn| turn.batch == 1) {
            outcome.charge(turn.subject, key_count)?;
        }
        Ok(limiters)
    }

    fn turns(&self) -> [LimiterTurn<'_>; 6] {
        [
            LimiterTurn::single(&self.precise),
            LimiterTurn { subject: &self.precise, batch: BATCH },
            LimiterTurn::single(&self.governor),
            LimiterTurn::single(&self.coarse),
            LimiterTurn { subject: &self.coarse, batch: BATCH },
            LimiterTurn::single(&self.governor_coarse),
        ]
    }
}

/// Measures every scenario, outcome and number of threads.
pub(super) fn run(quick: bool, report: &mut BenchReport) -> Fallible {
    let governor_coarse = QuantaUpkeepClock::from_interval(COARSE_STEP)?;
    let clocks = (CoarseClock::new(), governor_coarse);
    for same_keys in SCENARIOS.chunk_by(|one, other| one.key_count == other.key_count) {
        let key_count = same_keys[0].key_count;
        let limiters = |outcome| LimiterSet::new(outcome, key_count, &clocks);
        let both = [limiters(ALLOWED)?, limiters(DENIED)?];
        let effort = if quick {
            // Fewer of those that wait for memory, for there are as many to warm up.
            let decisions = if key_count > 1_000 { 1 << 14 } else { 1 << 15 };
            ScenarioEffort { rounds: 7, decisions }
        } else {
            ScenarioEffort { rounds: 31, decisions: 1 << 17 }
        };
        for scenario in same_keys {
            for limiters in &both {
                for threads in [1, 2] {
                    let turns = limiters.turns();
                    let measured =
                        take_turns(scenario, &limiters.outcome, threads, effort, &turns)?;
                    if limiters.precise.overflowed() + limiters.coarse.overflowed() > 0 {
                        return Err("the store overflowed: shared states were measured".into());
                    }
                    for (ours, peer) in [
                        ((PRECISE, 1, OURS), GOVERNOR),
                        ((PRECISE, BATCH, OURS_BATCHED), GOVERNOR),
                        ((COARSE, 1, OURS_COARSE), GOVERNOR),
                        ((COARSE, BATCH, OURS_COARSE_BATCHED), GOVERNOR),
                        ((COARSE, 1, OURS_COARSE), GOVERNOR_COARSE),
                        ((COARSE, BATCH, OURS_COARSE_BATCHED), GOVERNOR_COARSE),
                    ] {
                        measured.tell(report, ours, peer)?;
                    }
                }
            }
        }
    }
    Ok(())
}
