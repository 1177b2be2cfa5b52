//! An attack on one key: how many calls reach the server, what they cost it, and how many requests are decided.
//!
//! All tasks ask for one key, whose limit admits ten requests at once and then one per tenth of a second. Each way decides as
//! long as the others, by turns. The server counts the calls (`INFO commandstats`); its time is that of its main thread on a processor.
//!
//! A turn begins when the ten are spent. A wait of the attacked key is a tenth of a second: a request that is denied is told to
//! retry after that time at most. A plain loop calls the server for each request. A cache of denials calls it when a wait ends,
//! once.

use std::error::Error;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ratelimit_layers::DenialCache;
use ratelimit_redis::RedisStore;
use serde::Serialize;
use tokio::task::JoinSet;
use tokio::task::coop::consume_budget;

use crate::measure::median;
use crate::report::Report;
use crate::table::rounded;

use super::lab::{Lab, script_calls};
use super::plain::{ATTACKED, Decides, Failed, Fred, GCRA_SCRIPT, RedisRs};
use super::throughput::Ours;

const TASKS: usize = 256;
/// The ways in which requests are decided. Each has a key of its own, by this name.
const WAYS: [&str; 4] = ["plain loop", "merge=off", "merged", "cached"];

/// One measurement; the fields are those of its JSON line.
#[derive(Debug, Serialize)]
struct Row {
    part: &'static str,
    client: &'static str,
    /// How requests are decided.
    way: &'static str,
    tasks: usize,
    per_s: f64,
    /// Requests of a turn, and those of them that were admitted.
    requests: f64,
    admitted: f64,
    /// Calls of scripts and functions that reached the server in a turn, and in each wait of a turn.
    calls: f64,
    calls_per_wait: f64,
    /// The server's processor time over that of the turn, and for each request.
    server_cpu: f64,
    server_ns: f64,
}

impl Row {
    fn heading() -> String {
        format!(
            "{:<9} {:<13} {:>5} {:>11} {:>10} {:>9} {:>10} {:>12} {:>9} {:>13}",
            "client",
            "way",
            "tasks",
            "decisions/s",
            "requests",
            "admitted",
            "calls",
            "calls/wait",
            "CPU",
            "CPU ns each"
        )
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<9} {:<13} {:>5} {:>11.0} {:>10.0} {:>9.0} {:>10.0} {:>12.1} {:>8.1}% {:>13.1}",
            self.client,
            self.way,
            self.tasks,
            self.per_s,
            self.requests,
            self.admitted,
            self.calls,
            self.calls_per_wait,
            100.0 * self.server_cpu,
            self.server_ns
        )
    }
}

/// What came of one way in one turn.
struct Turn {
    requests: u64,
    admitted: u64,
    calls: u64,
    took: Duration,
    cpu: Duration,
}

impl Turn {
    fn seconds(&self) -> f64 {
        self.took.as_secs_f64()
    }

    /// How many waits of the attacked key the turn lasted.
    fn waits(&self) -> f64 {
        self.seconds() * 1e6 / number(ATTACKED.interval_us)
    }
}

fn number(count: u64) -> f64 {
    f64::from(u32::try_from(count).unwrap_or(u32::MAX))
}

/// Attacks each way of deciding by each client.
pub(super) async fn run(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    println!("\n{}", Row::heading());
    lab.flush()?;
    let (url, sha) = (lab.url(), lab.load(GCRA_SCRIPT)?);
    let loop_by_redis = RedisRs::connect(&url, &sha).await?.limited(ATTACKED);
    by_client(quick, lab, report, "redis", loop_by_redis).await?;
    let loop_by_fred = Fred::connect(&url, &sha).await?.limited(ATTACKED);
    by_client(quick, lab, report, "fred", loop_by_fred).await
}

async fn by_client<P: Decides>(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
    client: &'static str,
    plain: P,
) -> Result<(), Box<dyn Error>> {
    let store = async |merge: &str| {
        let url = format!("{}?client={client}&merge={merge}", lab.url());
        RedisStore::connect(&url).await
    };
    let plain = Arc::new(plain);
    let alone = Arc::new(Ours::limited(ATTACKED, store("off").await?)?);
    let merged = Arc::new(Ours::limited(ATTACKED, store("on").await?)?);
    let cached = DenialCache::new(store("on").await?);
    let cached = Arc::new(Ours::limited(ATTACKED, cached)?);

    let (rounds, length_ms) = if quick { (3, 1_000) } else { (9, 5_000) };
    let length = Duration::from_millis(length_ms);
    let mut turns = [const { Vec::new() }; 4];
    for round in 0..=rounds {
        // In the first round, connections and processors warm up, and the server learns the scripts.
        let length = if round == 0 { length / 8 } else { length };
        let all = [
            turn(lab, &plain, WAYS[0], length).await?,
            turn(lab, &alone, WAYS[1], length).await?,
            turn(lab, &merged, WAYS[2], length).await?,
            turn(lab, &cached, WAYS[3], length).await?,
        ];
        for (turns, turn) in turns.iter_mut().zip(all).filter(|_| round > 0) {
            turns.push(turn);
        }
    }
    for (way, turns) in WAYS.into_iter().zip(&turns) {
        let of = |of: fn(&Turn) -> f64| median(turns.iter().map(of));
        let row = Row {
            part: "attack",
            client,
            way,
            tasks: TASKS,
            per_s: rounded(of(|turn| number(turn.requests) / turn.seconds()), 1.0),
            requests: of(|turn| number(turn.requests)),
            admitted: of(|turn| number(turn.admitted)),
            calls: of(|turn| number(turn.calls)),
            calls_per_wait: rounded(of(|turn| number(turn.calls) / turn.waits()), 100.0),
            server_cpu: rounded(of(|turn| turn.cpu.as_secs_f64() / turn.seconds()), 1_000.0),
            server_ns: rounded(
                of(|turn| turn.cpu.as_secs_f64() * 1e9 / number(turn.requests)),
                10.0,
            ),
        };
        println!("{row}");
        report.line(&row)?;
    }
    Ok(())
}

/// Spends what is left of the limit, then lets all tasks attack for this long. Fails if more was admitted than the limit says.
async fn turn<D: Decides>(
    lab: &mut Lab,
    subject: &Arc<D>,
    key: &'static str,
    length: Duration,
) -> Result<Turn, Box<dyn Error>> {
    while subject.decide(key).await.map_err(|error| error.to_string())? {}
    lab.server().command(&["CONFIG", "RESETSTAT"])?.ok()?;
    let cpu = || lab.cpu().unwrap_or_default();
    let (requests, admitted) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (begin, cpu_before) = (Instant::now(), cpu());
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let subject = Arc::clone(subject);
        let (requests, admitted) = (Arc::clone(&requests), Arc::clone(&admitted));
        tasks.spawn(async move {
            while begin.elapsed() < length {
                if subject.decide(key).await? {
                    admitted.fetch_add(1, Ordering::Relaxed);
                }
                requests.fetch_add(1, Ordering::Relaxed);
                // A decision without a call never waits, and other tasks have to run as well.
                consume_budget().await;
            }
            Ok::<(), Failed>(())
        });
    }
    while let Some(ended) = tasks.join_next().await {
        ended?.map_err(|error| error.to_string())?;
    }
    let (took, cpu) = (begin.elapsed(), cpu().saturating_sub(cpu_before));
    let calls = script_calls(lab.server())?;
    let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let turn = Turn { requests: count(&requests), admitted: count(&admitted), calls, took, cpu };
    let most = turn.waits() + 1.0;
    if number(turn.admitted) > most {
        return Err(
            format!("{} requests were admitted, at most {most:.0} fit", turn.admitted).into()
        );
    }
    Ok(turn)
}
