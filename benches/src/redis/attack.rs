//! An attack on one key: how many calls reach the server, what they cost it, and how many requests
//! are decided.
//!
//! All tasks ask for one key, whose limit admits ten requests at once and then one per tenth of a
//! second. Each way decides as long as the others, by turns. The server counts the calls (`INFO
//! commandstats`); its time is that of its main thread on a processor.
//!
//! A turn begins when the ten are spent. A wait of the attacked key is a tenth of a second: a
//! denied request reads a retry time of at most that. A plain loop calls the server
//! for each request. A cache of denials calls it when a wait ends, once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use ratelimit_layers::DenialCache;
use ratelimit_redis::RedisStore;
use tokio::task::JoinSet;
use tokio::task::coop::consume_budget;

use crate::measure::{Fallible, Samples, turns};
use crate::report::digits;

use super::lab::{Lab, cpu_of, script_calls};
use super::plain::{ATTACKED, Decides, Fred, GCRA_SCRIPT, PlainScript, RedisRs};
use super::throughput::OurStore;

const TASKS: usize = 256;
/// The ways in which requests are decided. Each has a key of its own, by this name.
const WAYS: [&str; 4] = ["plain loop", "merge=off", "merged", "cached"];

/// What came of one way in one turn.
struct AttackResult {
    requests: u64,
    admitted: u64,
    calls: u64,
    took: Duration,
    cpu: Duration,
}

impl AttackResult {
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
pub(super) async fn run(lab: &mut Lab) -> Fallible {
    lab.flush()?;
    let (url, sha) = (lab.server.url(), lab.load(GCRA_SCRIPT)?);
    let script = PlainScript { sha, numbers: ATTACKED, limits: 1 };
    by_client(lab, "redis", RedisRs::connect(&url, &script).await?).await?;
    by_client(lab, "fred", Fred::connect(&url, &script).await?).await
}

async fn by_client<P: Decides>(lab: &mut Lab, client: &'static str, plain: P) -> Fallible {
    let store = async |merge: &str| {
        let url = format!("{}?client={client}&merge={merge}", lab.server.url());
        RedisStore::connect(&url).await
    };
    let plain = Arc::new(plain);
    let alone = Arc::new(OurStore::new(ATTACKED, store("off").await?)?);
    let merged = Arc::new(OurStore::new(ATTACKED, store("on").await?)?);
    let cached = Arc::new(OurStore::new(ATTACKED, DenialCache::new(store("on").await?))?);

    let (rounds, length_ms) = if lab.quick { (3, 1_000) } else { (9, 5_000) };
    let mut samples = Samples::new(WAYS.len());
    for (round, way) in turns(rounds, WAYS.len()) {
        // In the first round, connections and processors warm up, and the server learns the
        // scripts.
        let length = Duration::from_millis(if round == 0 { length_ms / 8 } else { length_ms });
        let turn = match way {
            0 => turn(lab, &plain, WAYS[0], length).await?,
            1 => turn(lab, &alone, WAYS[1], length).await?,
            2 => turn(lab, &merged, WAYS[2], length).await?,
            _ => turn(lab, &cached, WAYS[3], length).await?,
        };
        samples.add((round, way), turn);
    }
    for (at, way) in WAYS.into_iter().enumerate() {
        let of = |decimals, of: fn(&AttackResult) -> f64| digits(decimals, samples.median(at, of));
        lab.report.row(&[
            ("part", "attack".into()),
            ("client", client.into()),
            ("way", way.into()),
            ("tasks", TASKS.into()),
            ("per_s", of(0, |turn| number(turn.requests) / turn.seconds())),
            // Requests of a turn, those of them that were admitted, and the calls of scripts and
            // functions that reached the server, in all and in each wait of the turn.
            ("requests", of(0, |turn| number(turn.requests))),
            ("admitted", of(0, |turn| number(turn.admitted))),
            ("calls", of(0, |turn| number(turn.calls))),
            ("calls_per_wait", of(2, |turn| number(turn.calls) / turn.waits())),
            // The server's processor time over that of the turn, and for each request.
            ("server_cpu", of(3, |turn| turn.cpu.as_secs_f64() / turn.seconds())),
            ("server_ns", of(1, |turn| turn.cpu.as_secs_f64() * 1e9 / number(turn.requests))),
        ])?;
    }
    Ok(())
}

/// Spends what is left of the limit, then lets all tasks attack for this long. Fails if more was
/// admitted than the limit says.
async fn turn<D: Decides>(
    lab: &Lab,
    subject: &Arc<D>,
    key: &'static str,
    length: Duration,
) -> Fallible<AttackResult> {
    while subject.charge(key, 1).await? {}
    lab.server.command(&["CONFIG", "RESETSTAT"])?.ok()?;
    let cpu = || cpu_of(&lab.server).unwrap_or_default();
    let (requests, admitted) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let (begin, cpu_before) = (Instant::now(), cpu());
    let mut tasks = JoinSet::new();
    for _ in 0..TASKS {
        let subject = Arc::clone(subject);
        let (requests, admitted) = (Arc::clone(&requests), Arc::clone(&admitted));
        tasks.spawn(async move {
            while begin.elapsed() < length {
                if subject.charge(key, 1).await? {
                    admitted.fetch_add(1, Ordering::Relaxed);
                }
                requests.fetch_add(1, Ordering::Relaxed);
                // A decision without a call never waits, and other tasks have to run as well.
                consume_budget().await;
            }
            Fallible::Ok(())
        });
    }
    tasks.join_all().await.into_iter().collect::<Fallible>()?;
    let (took, cpu) = (begin.elapsed(), cpu().saturating_sub(cpu_before));
    let calls = script_calls(&lab.server)?;
    let count = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let turn =
        AttackResult { requests: count(&requests), admitted: count(&admitted), calls, took, cpu };
    let most = turn.waits() + 1.0;
    if number(turn.admitted) > most {
        return Err(
            format!("{} requests were admitted, at most {most:.0} fit", turn.admitted).into()
        );
    }
    Ok(turn)
}
