//! The CPU time of the server's main thread per decision, divided by that per INCR, and the memory
//! of its keys.
//!
//! The benchmark records the commands of one decision on the wire and replays them for 50,000
//! callers, a hundred decisions in one piece, in turns with as many INCRs. Before each decision it
//! restores the keys of every caller, so that each is the same decision: on a full window, on a log
//! of ten entries. Where one decision takes several round trips, all of its commands count.

use std::ops::Range;
use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, Store};
use ratelimit_redis::{Cas, Lua, Multi, RedisStore};

use crate::keys::CallerKey;
use crate::measure::{Fallible, median};
use crate::report::digits;

use super::lab::{Lab, cpu_of};
use super::plain::{GATHERING_SCRIPT, GCRA_SCRIPT, NARROW, ScriptNumbers, WIDE, key};
use super::recorder::{RecordedCommand, command};
use super::replay::{RecordedDecision, StoredKeys, Template, incr, recorded_caller};
use super::situation::{ALGORITHMS, Situation};

/// Requests that share a call, of one key or of different ones.
const MERGED: u32 = 100;
const CALLERS: usize = 50_000;
/// As many decisions, and then as many INCRs, are measured as a pair.
const CHUNK: usize = 1_000;
/// Every so many callers one is looked at whether its decision was the recorded one.
const VERIFIED_EVERY: usize = 5_003;

/// A decision that is replayed, as its row is called.
#[derive(Clone, Copy)]
pub(super) struct ReplayedDecision {
    pub(super) part: &'static str,
    /// The store's mode, or `floor`.
    pub(super) mode: &'static str,
    pub(super) decision: &'static str,
    pub(super) admits: bool,
    /// Requests that one call decides; the row is that of each.
    pub(super) requests: u32,
    /// Keys that one call uses: so many fewer callers have as many keys.
    pub(super) keys: usize,
}

impl ReplayedDecision {
    const fn new(mode: &'static str, decision: &'static str, admits: bool) -> Self {
        Self { part: "cpu", mode, decision, admits, requests: 1, keys: 1 }
    }

    fn outcome(self) -> &'static str {
        if self.admits { "admitted" } else { "denied" }
    }

    /// Replays the decision in turns with INCR.
    pub(super) fn measure(self, lab: &mut Lab, decision: &RecordedDecision) -> Fallible {
        let rounds = if lab.quick { 1 } else { 4 };
        let (incr, replay, restore) = (incr()?, decision.replaying()?, decision.restoring()?);
        // As many keys as INCRs, so that neither finds more of them in the processor's caches.
        let calls = |keys: Range<usize>| keys.start / self.keys..keys.end / self.keys;
        lab.flush()?;
        let mut pairs = Vec::new();
        for round in 0..rounds {
            restore.send(&mut lab.wire, calls(0..CALLERS))?;
            // Not counted: with these commands the server finishes growing its tables.
            incr.send(&mut lab.wire, 0..CALLERS)?;
            for (number, begin) in (0..CALLERS).step_by(CHUNK).enumerate() {
                let chunk = begin..begin + CHUNK;
                let first = (round + number) % 2;
                let mut pair = [0.0; 2];
                for way in [first, 1 - first] {
                    pair[way] = if way == 0 {
                        time_per_caller(lab, &incr, chunk.clone())?
                    } else {
                        time_per_caller(lab, &replay, calls(chunk.clone()))?
                            / f64::from(self.requests)
                    };
                }
                pairs.push(pair);
            }
            for caller in (0..CALLERS).step_by(VERIFIED_EVERY) {
                decision.verify(&mut lab.wire, caller / self.keys)?;
            }
        }
        let kept = StoredKeys::read(&mut lab.wire, &CallerKey::new(0))?;
        let mut ratios: Vec<_> = pairs.iter().map(|[incr, decision]| decision / incr).collect();
        ratios.sort_by(f64::total_cmp);
        let decimals = if ratios[ratios.len() / 2] < 1.0 { 3 } else { 2 };
        lab.report.row(&[
            ("part", self.part.into()),
            ("mode", self.mode.into()),
            ("decision", self.decision.into()),
            ("outcome", self.outcome().into()),
            ("commands", decision.commands.len().into()),
            ("bytes_sent", replay.len().into()),
            ("bytes_kept", kept.bytes().into()),
            ("server_ns", digits(0, median(pairs.iter().map(|[_, decision]| *decision)))),
            ("incr_ns", digits(0, median(pairs.iter().map(|[incr, _]| *incr)))),
            // The server's time for the decision over that for an INCR, the median over pairs; a
            // quarter of the pairs lie below the next, and a quarter above the last.
            ("ratio", digits(decimals, ratios[ratios.len() / 2])),
            ("ratio_low", digits(decimals, ratios[ratios.len() / 4])),
            ("ratio_high", digits(decimals, ratios[ratios.len() * 3 / 4])),
        ])
    }
}

/// The server's nanoseconds for each of these callers.
fn time_per_caller(lab: &mut Lab, template: &Template, callers: Range<usize>) -> Fallible<f64> {
    let count = u32::try_from(callers.len())?;
    let begin = cpu(lab)?;
    template.send(&mut lab.wire, callers)?;
    Ok(cpu(lab)?.saturating_sub(begin).as_secs_f64() * 1e9 / f64::from(count))
}

fn cpu(lab: &Lab) -> Result<Duration, &'static str> {
    cpu_of(&lab.server).ok_or(
        "no /proc/PID/task/PID/schedstat here, which has the server's CPU time: Linux has it",
    )
}

/// Measures the floors, and every algorithm in every mode.
pub(super) async fn run(lab: &mut Lab) -> Fallible {
    floors(lab)?;
    let url = lab.recorded_url();
    let lua = RedisStore::connect(&url).await?;
    let cas = RedisStore::builder().cas().connect(&url).await?;
    let multi = RedisStore::builder().multi().connect(&url).await?;
    let each =
        || ALGORITHMS.into_iter().flat_map(|name| [true, false].map(|admits| (name, admits)));
    for (algorithm, admits) in each() {
        in_store(lab, Lua::NAME, Situation::one(algorithm, admits)?, &lua).await?;
    }
    for (name, algorithms) in [
        ("3 limits, gcra", ["gcra"; 3]),
        ("3 limits, mixed", ["gcra", "fixed-window", "sliding-counter"]),
    ] {
        for admits in [true, false] {
            in_store(lab, Lua::NAME, Situation::three(name, algorithms, admits)?, &lua).await?;
        }
    }
    in_store(lab, Lua::NAME, Situation::lease_by_id()?, &lua).await?;
    in_store(lab, Lua::NAME, Situation::reserved("gcra, settled", 1, true)?, &lua).await?;
    in_store(lab, Lua::NAME, Situation::reserved("5 limits", 5, false)?, &lua).await?;
    in_store(lab, Lua::NAME, Situation::reserved("5 limits, settled", 5, true)?, &lua).await?;
    measure_overridable(lab, &lua).await?;
    measure_merged(lab, &lua).await?;
    for (algorithm, admits) in each() {
        in_store(lab, Cas::NAME, Situation::one(algorithm, admits)?, &cas).await?;
        let Some(attempts) = Situation::by_attempts(algorithm, admits)? else { continue };
        // What a transaction cannot decide it refuses.
        if RedisStore::<Multi>::supports(&attempts.limits).is_ok() {
            in_store(lab, Multi::NAME, attempts, &multi).await?;
        }
    }
    Ok(())
}

async fn in_store<S: Store<AnyAlgorithm> + Clone>(
    lab: &mut Lab,
    mode: &'static str,
    situation: Situation,
    store: &S,
) -> Fallible {
    let trial = ReplayedDecision::new(mode, situation.name, situation.admits);
    let message = |error| format!("{mode}, {}, {}: {error}", trial.decision, trial.outcome());
    lab.flush()?;
    let recorded = lab.record(&situation.in_store(store.clone()), trial.admits).await;
    trial.measure(lab, &recorded.map_err(message)?).map_err(|error| message(error).into())
}

/// A limit that looks for records: of a caller without one, and of one whose record has other
/// numbers.
async fn measure_overridable(lab: &mut Lab, store: &RedisStore) -> Fallible {
    for (decision, has_record) in [("gcra, overridable", false), ("gcra, by a record", true)] {
        lab.flush()?;
        let situation = Situation::one("gcra", true)?.overridable(decision)?;
        let subject = situation.in_store(store.clone());
        if has_record {
            subject.raise(&recorded_caller()).await?;
        }
        let recorded = lab.record(&subject, true).await?;
        ReplayedDecision::new(Lua::NAME, decision, true).measure(lab, &recorded)?;
    }
    Ok(())
}

/// A hundred requests of one key that share a call: of one limit at one cost, at costs that change
/// from one request to the next, and of three limits.
async fn measure_merged(lab: &mut Lab, store: &RedisStore) -> Fallible {
    for (decision, situation) in [
        ("gcra, 100 merged", Situation::one("gcra", true)?),
        ("gcra, 100 of 3 costs", Situation::one("gcra", true)?.with_costs(3)),
        ("3 limits, 100 merged", Situation::three("", ["gcra"; 3], true)?),
    ] {
        lab.flush()?;
        let recorded = lab.record_merged(&situation.in_store(store.clone()), MERGED).await?;
        let trial = ReplayedDecision {
            requests: MERGED,
            ..ReplayedDecision::new(Lua::NAME, decision, true)
        };
        trial.measure(lab, &recorded)?;
    }
    Ok(())
}

/// The least that a decision can cost, and what it costs in a script written by hand, alone and of
/// a hundred different keys in a call.
fn floors(lab: &mut Lab) -> Fallible {
    let nothing = lab.load("return 1")?;
    let gcra = lab.load(GCRA_SCRIPT)?;
    let gathering = lab.load(GATHERING_SCRIPT)?;
    let caller = recorded_caller();
    let key = key("floor", caller.as_str());
    let by_hand = |numbers: ScriptNumbers, cost| vec![numbers.command(&gcra, &[&key], cost)];
    let keys: Vec<_> = (0..MERGED).map(|n| format!("{key}:{n}")).collect();
    let keys: Vec<_> = keys.iter().map(String::as_str).collect();
    let gathered = |cost| vec![WIDE.command(&gathering, &keys, cost)];
    let incr = command(&["INCR", &key]);
    let pexpire = command(&["PEXPIRE", &key, "60000", "NX"]);
    let transaction = vec![command(&["MULTI"]), incr.clone(), pexpire.clone(), command(&["EXEC"])];
    let floors: [(_, _, Vec<RecordedCommand>, Vec<RecordedCommand>); 6] = [
        ("return 1", true, vec![], vec![command(&["EVALSHA", &nothing, "1", &key])]),
        ("INCR, PEXPIRE NX", true, vec![], vec![incr, pexpire]),
        ("the same in MULTI", true, vec![], transaction),
        ("gcra by hand", true, by_hand(WIDE, 1_000_000), by_hand(WIDE, 1)),
        ("gcra by hand", false, by_hand(NARROW, 2), by_hand(NARROW, 1)),
        ("100 gathered by hand", true, gathered(1_000_000), gathered(1)),
    ];
    for (decision, admits, prepare, commands) in floors {
        lab.flush()?;
        let mut trial = ReplayedDecision::new("floor", decision, admits);
        if decision.starts_with("100") {
            trial = ReplayedDecision { requests: MERGED, keys: keys.len(), ..trial };
        }
        let recorded = lab.replay_commands(&prepare, commands)?;
        trial.measure(lab, &recorded)?;
    }
    Ok(())
}
