//! The CPU time of the server's main thread per decision, divided by that per INCR.
//!
//! The benchmark records the commands of one decision on the wire and replays them for 50,000 callers, a hundred
//! decisions in one piece, in turns with as many INCRs. Before each decision it restores the keys of every caller, so
//! that each is the same decision: on a full window, on a log of ten entries. Where one decision takes several round
//! trips, all of its commands count.

use std::error::Error;
use std::fmt;
use std::ops::Range;
use std::time::Duration;

use ratelimit_core::{Policy, Store};
use ratelimit_redis::{Cas, Lua, Mode, Multi, RedisStore};
use serde::Serialize;

use crate::measure::median;
use crate::report::Report;
use crate::table::rounded;

use super::lab::Lab;
use super::plain::{GATHERING_SCRIPT, GCRA_SCRIPT, NARROW, Numbers, WIDE, key};
use super::replay::{Recorded, Template, incr, recorded};
use super::situation::{ALGORITHMS, Situation};
use super::wire::{Command, command};

/// Requests that share a call, of one key or of different ones.
const MERGED: u32 = 100;
const CALLERS: usize = 50_000;
/// As many decisions, and then as many INCRs, are measured as a pair.
const CHUNK: usize = 1_000;
/// Every so many callers one is looked at whether its decision was the recorded one.
const VERIFIED_EVERY: usize = 5_003;

/// One measurement; the fields are those of its JSON line.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) part: &'static str,
    /// The store's mode, `floor`, or the peer's name.
    pub(super) mode: &'static str,
    pub(super) decision: &'static str,
    pub(super) outcome: &'static str,
    /// Commands of one decision.
    pub(super) commands: usize,
    /// Bytes that one decision sends.
    pub(super) bytes: usize,
    pub(super) server_ns: f64,
    pub(super) incr_ns: f64,
    /// The server's time for the decision over that for an INCR, the median over pairs.
    pub(super) ratio: f64,
    /// A quarter of the pairs lie below this, and a quarter above the next.
    pub(super) ratio_low: f64,
    pub(super) ratio_high: f64,
}

impl Row {
    /// The row of each decision, of several that were measured as one.
    fn each(self, decisions: u32) -> Self {
        let part = |whole: f64, unit| rounded(whole / f64::from(decisions), unit);
        Self {
            server_ns: part(self.server_ns, 1.0),
            ratio: part(self.ratio, 1_000.0),
            ratio_low: part(self.ratio_low, 1_000.0),
            ratio_high: part(self.ratio_high, 1_000.0),
            ..self
        }
    }

    pub(super) fn heading() -> String {
        format!(
            "{:<12} {:<22} {:<9} {:>8} {:>6} {:>9} {:>9} {:>7}   {}",
            "mode",
            "decision",
            "outcome",
            "commands",
            "bytes",
            "µs",
            "INCR µs",
            "× INCR",
            "middle half"
        )
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = if self.ratio < 1.0 { 3 } else { 2 };
        write!(
            f,
            "{:<12} {:<22} {:<9} {:>8} {:>6} {:>9.2} {:>9.2} {:>7.digits$}   {:.digits$} to {:.digits$}",
            self.mode,
            self.decision,
            self.outcome,
            self.commands,
            self.bytes,
            self.server_ns / 1e3,
            self.incr_ns / 1e3,
            self.ratio,
            self.ratio_low,
            self.ratio_high
        )
    }
}

/// What a row is called.
#[derive(Clone, Copy)]
pub(super) struct Names {
    pub(super) part: &'static str,
    pub(super) mode: &'static str,
    pub(super) decision: &'static str,
}

pub(super) fn outcome(admits: bool) -> &'static str {
    if admits { "admitted" } else { "denied" }
}

/// Whether the server reports its processor time; prints a line if it does not.
pub(super) fn is_told(lab: &Lab) -> bool {
    let reported = lab.cpu().is_some();
    if !reported {
        println!(
            "\nno /proc/PID/task/PID/schedstat here: the server's CPU is left out; Linux has it"
        );
    }
    reported
}

/// Measures the floors, and every algorithm in every mode.
pub(super) async fn run(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    if !is_told(lab) {
        return Ok(());
    }
    println!("\n{}", Row::heading());
    floors(quick, lab, report)?;
    let url = lab.recorded_url();
    let lua = RedisStore::connect(&url).await?;
    let mut situations = Vec::new();
    for algorithm in ALGORITHMS {
        for admits in [true, false] {
            situations.push(Situation::one(algorithm, admits)?);
        }
    }
    for (name, algorithms) in [
        ("3 limits, gcra", ["gcra"; 3]),
        ("3 limits, mixed", ["gcra", "fixed-window", "sliding-counter"]),
    ] {
        for admits in [true, false] {
            situations.push(Situation::three(name, algorithms, admits)?);
        }
    }
    situations.push(Situation::lease_by_id()?);
    for situation in situations {
        in_store(quick, lab, report, Lua::NAME, situation, lua.clone()).await?;
    }
    merged(quick, lab, report, &lua).await?;
    let cas = RedisStore::builder().cas().connect(&url).await?;
    for algorithm in ALGORITHMS {
        for admits in [true, false] {
            let situation = Situation::one(algorithm, admits)?;
            in_store(quick, lab, report, Cas::NAME, situation, cas.clone()).await?;
        }
    }
    let multi = RedisStore::builder().multi().connect(&url).await?;
    for algorithm in ALGORITHMS {
        for admits in [true, false] {
            let Some(situation) = Situation::by_attempts(algorithm, admits)? else { continue };
            // What a transaction cannot decide it refuses.
            if RedisStore::<Multi>::supports(&situation.limits).is_ok() {
                in_store(quick, lab, report, Multi::NAME, situation, multi.clone()).await?;
            }
        }
    }
    Ok(())
}

async fn in_store<S: Store<Policy>>(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
    mode: &'static str,
    situation: Situation,
    store: S,
) -> Result<(), Box<dyn Error>> {
    let names = Names { part: "cpu", mode, decision: situation.name };
    let admits = situation.admits;
    let message = |error| format!("{mode}, {}, {}: {error}", names.decision, outcome(admits));
    lab.flush()?;
    let decision = lab.record(&situation.in_store(store), admits).await.map_err(message)?;
    let row = measure(quick, lab, names, admits, &decision).map_err(message)?;
    println!("{row}");
    report.line(&row)
}

/// A hundred requests of one key that share a call: of one limit at one cost, at costs that change from one request to
/// the next, and of three limits.
async fn merged(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
    store: &RedisStore,
) -> Result<(), Box<dyn Error>> {
    let three = Situation::three("3 limits, 100 merged", ["gcra"; 3], true)?;
    for (decision, situation) in [
        ("gcra, 100 merged", Situation::one("gcra", true)?),
        ("gcra, 100 of 3 costs", Situation::one("gcra", true)?.with_costs(3)),
        ("3 limits, 100 merged", three),
    ] {
        lab.flush()?;
        let recorded = lab.record_merged(&situation.in_store(store.clone()), MERGED).await?;
        let names = Names { part: "cpu", mode: Lua::NAME, decision };
        let row = measure(quick, lab, names, true, &recorded)?.each(MERGED);
        println!("{row}");
        report.line(&row)?;
    }
    Ok(())
}

/// The least that a decision can cost, and what it costs in a script written by hand.
fn floors(quick: bool, lab: &mut Lab, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let nothing = lab.load("return 1")?;
    let gcra = lab.load(GCRA_SCRIPT)?;
    let caller = recorded();
    let key = key("floor", caller.as_str());
    let by_hand = |numbers: Numbers, cost| numbers.command(&gcra, &[&key], cost);
    let incr = command(&["INCR", &key]);
    let pexpire = command(&["PEXPIRE", &key, "60000", "NX"]);
    let transaction = vec![command(&["MULTI"]), incr.clone(), pexpire.clone(), command(&["EXEC"])];
    let floors: [(_, _, Vec<Command>, Vec<Command>); 5] = [
        ("return 1", true, vec![], vec![command(&["EVALSHA", &nothing, "1", &key])]),
        ("INCR, PEXPIRE NX", true, vec![], vec![incr, pexpire]),
        ("the same in MULTI", true, vec![], transaction),
        ("gcra by hand", true, vec![by_hand(WIDE, 1_000_000)], vec![by_hand(WIDE, 1)]),
        ("gcra by hand", false, vec![by_hand(NARROW, 2)], vec![by_hand(NARROW, 1)]),
    ];
    for (decision, admits, prepare, commands) in floors {
        lab.flush()?;
        let recorded = lab.given(&prepare, commands)?;
        let names = Names { part: "cpu", mode: "floor", decision };
        let row = measure(quick, lab, names, admits, &recorded)?;
        println!("{row}");
        report.line(&row)?;
    }
    gathered(quick, lab, report)
}

/// A hundred requests of different keys that share a call, by hand.
fn gathered(quick: bool, lab: &mut Lab, report: &mut Report) -> Result<(), Box<dyn Error>> {
    let script = lab.load(GATHERING_SCRIPT)?;
    let caller = recorded();
    let keys: Vec<_> = (0..MERGED).map(|n| format!("floor:{}:{n}", caller.as_str())).collect();
    let keys: Vec<_> = keys.iter().map(String::as_str).collect();
    lab.flush()?;
    let prepare = [WIDE.command(&script, &keys, 1_000_000)];
    let recorded = lab.given(&prepare, vec![WIDE.command(&script, &keys, 1)])?;
    let names = Names { part: "cpu", mode: "floor", decision: "100 gathered by hand" };
    let row = measure_gathered(quick, lab, names, (true, MERGED), &recorded)?;
    println!("{row}");
    report.line(&row)
}

/// Replays a decision in turns with INCR.
pub(super) fn measure(
    quick: bool,
    lab: &mut Lab,
    names: Names,
    admits: bool,
    decision: &Recorded,
) -> Result<Row, Box<dyn Error>> {
    measure_gathered(quick, lab, names, (admits, 1), decision)
}

/// The same for so many decisions about different keys that are one call.
fn measure_gathered(
    quick: bool,
    lab: &mut Lab,
    names: Names,
    (admits, gathered): (bool, u32),
    decision: &Recorded,
) -> Result<Row, Box<dyn Error>> {
    let rounds = if quick { 1 } else { 4 };
    let incr = incr()?;
    let replay = decision.replaying()?;
    let restore = decision.restoring()?;
    // As many keys as INCRs, so that neither finds more of them in the processor's caches.
    let each = usize::try_from(gathered)?;
    let calls = |keys: Range<usize>| keys.start / each..keys.end / each;
    lab.flush()?;
    let mut pairs = Vec::new();
    for round in 0..rounds {
        restore.send(&mut lab.wire, calls(0..CALLERS))?;
        // Not counted: with these commands the server finishes growing its tables.
        incr.send(&mut lab.wire, 0..CALLERS)?;
        for (number, begin) in (0..CALLERS).step_by(CHUNK).enumerate() {
            let chunk = begin..begin + CHUNK;
            // First the one and then the other by turns.
            let pair = if (round + number) % 2 == 0 {
                let incr_time = timed(lab, &incr, chunk.clone())?;
                (incr_time, timed(lab, &replay, calls(chunk))?)
            } else {
                let replay_time = timed(lab, &replay, calls(chunk.clone()))?;
                (timed(lab, &incr, chunk)?, replay_time)
            };
            pairs.push(pair);
        }
        for caller in (0..CALLERS).step_by(VERIFIED_EVERY) {
            decision.verify(&mut lab.wire, caller / each)?;
        }
    }
    let mut ratios: Vec<_> = pairs.iter().map(|(incr, decision)| decision / incr).collect();
    ratios.sort_by(f64::total_cmp);
    Ok(Row {
        part: names.part,
        mode: names.mode,
        decision: names.decision,
        outcome: outcome(admits),
        commands: decision.commands.len(),
        bytes: replay.len(),
        server_ns: rounded(median(pairs.iter().map(|(_, decision)| *decision)), 1.0),
        incr_ns: rounded(median(pairs.iter().map(|(incr, _)| *incr)), 1.0),
        ratio: rounded(median(ratios.iter().copied()), 100.0),
        ratio_low: rounded(ratios[ratios.len() / 4], 100.0),
        ratio_high: rounded(ratios[ratios.len() * 3 / 4], 100.0),
    }
    .each(gathered))
}

/// The server's nanoseconds for each of these callers.
fn timed(lab: &mut Lab, template: &Template, callers: Range<usize>) -> Result<f64, Box<dyn Error>> {
    let count = u32::try_from(callers.len())?;
    let begin = cpu(lab)?;
    template.send(&mut lab.wire, callers)?;
    Ok(cpu(lab)?.saturating_sub(begin).as_secs_f64() * 1e9 / f64::from(count))
}

fn cpu(lab: &Lab) -> Result<Duration, &'static str> {
    lab.cpu().ok_or("the server's /proc/PID/task/PID/schedstat is gone: has the server ended?")
}
