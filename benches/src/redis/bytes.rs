//! The server's memory per key: its allocation for many keys, divided by their number.
//!
//! The names of callers have twenty bytes. The share of the server's own tables is included.

use std::error::Error;
use std::fmt;

use ratelimit_core::{Policy, Store};
use ratelimit_redis::{Cas, Lua, Mode, Multi, RedisStore};
use serde::Serialize;

use crate::keys::Key;
use crate::report::Report;
use crate::table::rounded;

use super::lab::Lab;
use super::plain::{GCRA_SCRIPT, WIDE, key};
use super::replay::{Kept, Recorded, Template, recorded};
use super::situation::{ALGORITHMS, Situation};
use super::throughput::CHARGED;

/// One measurement; the fields are those of its JSON line.
#[derive(Debug, Serialize)]
struct Row {
    part: &'static str,
    mode: &'static str,
    decision: &'static str,
    /// Admitted for each caller.
    decisions: usize,
    keys: usize,
    bytes_per_key: f64,
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<12} {:<22} {:>9} {:>9} {:>14.0}",
            self.mode, self.decision, self.decisions, self.keys, self.bytes_per_key
        )
    }
}

/// The heads of the columns that a row displays as.
pub(super) fn heading() -> String {
    format!(
        "{:<12} {:<22} {:>9} {:>9} {:>14}",
        "mode", "decision", "decisions", "keys", "bytes per key"
    )
}

/// Measures every algorithm in every mode, after one decision for each caller and, where a state grows with every
/// decision, after ten.
pub(super) async fn run(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    println!("\n{}", heading());
    let sha = lab.load(GCRA_SCRIPT)?;
    let by_hand = WIDE.command(&sha, &[&key("hand", recorded().as_str())], CHARGED);
    let by_hand = lab.given(&[], vec![by_hand])?;
    tell(quick, lab, report, ("floor", "gcra by hand", 1), &by_hand)?;
    let url = lab.recorded_url();
    let lua = RedisStore::connect(&url).await?;
    let cas = RedisStore::builder().cas().connect(&url).await?;
    let multi = RedisStore::builder().multi().connect(&url).await?;
    for algorithm in ALGORITHMS {
        let grows = matches!(algorithm, "sliding-log" | "window-log" | "concurrency");
        let situation = || Situation::one(algorithm, true).map(Situation::afresh);
        in_store(quick, lab, report, (Lua::NAME, 1), situation()?, lua.clone()).await?;
        if grows {
            in_store(quick, lab, report, (Lua::NAME, 10), situation()?, lua.clone()).await?;
        }
        // What is compared is the first state: a second decision would not be the recorded one.
        in_store(quick, lab, report, (Cas::NAME, 1), situation()?, cas.clone()).await?;
        let attempts = Situation::by_attempts(algorithm, true)?.map(Situation::afresh);
        let Some(attempts) = attempts else { continue };
        if RedisStore::<Multi>::supports(&attempts.limits).is_ok() {
            in_store(quick, lab, report, (Multi::NAME, 1), attempts, multi.clone()).await?;
        }
    }
    Ok(())
}

async fn in_store<S: Store<Policy>>(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
    (mode, decisions): (&'static str, usize),
    situation: Situation,
    store: S,
) -> Result<(), Box<dyn Error>> {
    let name = situation.name;
    let message = |error| format!("{mode}, {name}: {error}");
    lab.flush()?;
    let decision = lab.record(&situation.in_store(store), true).await.map_err(message)?;
    tell(quick, lab, report, (mode, name, decisions), &decision)
}

/// Sends a decision for so many callers, and prints what they take.
pub(super) fn tell(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
    (mode, decision, decisions): (&'static str, &'static str, usize),
    recorded: &Recorded,
) -> Result<(), Box<dyn Error>> {
    let keys = if quick { 20_000 } else { 100_000 };
    let template = Template::new(&recorded.commands)?;
    lab.flush()?;
    let before = lab.used_memory()?;
    for _ in 0..decisions {
        template.send(&mut lab.wire, 0..keys)?;
    }
    // A key that has expired by now would look cheap.
    for caller in [0, keys - 1] {
        if Kept::read(&mut lab.wire, &Key::new(caller))?.is_empty() {
            return Err(
                format!("{mode}, {decision}: a key has expired before it was measured").into()
            );
        }
    }
    let used = u32::try_from(lab.used_memory()?.saturating_sub(before))?;
    let bytes_per_key = rounded(f64::from(used) / f64::from(u32::try_from(keys)?), 1.0);
    let row = Row { part: "bytes", mode, decision, decisions, keys, bytes_per_key };
    println!("{row}");
    report.line(&row)
}
