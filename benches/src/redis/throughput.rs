//! Decisions per second, and their latency: the store beside each client's own plain loop over a script.
//!
//! All tasks share one connection and one thread, as the server has one. Both take turns on the same callers, all of
//! whom are admitted and have been charged before. A task asks for a decision when the one before is answered.

use std::error::Error;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use hdrhistogram::Histogram;
use ratelimit_core::{Gcra, Limit, Limits, Rate, RateLimiter, Store};
use ratelimit_redis::RedisStore;
use serde::Serialize;
use tokio::task::JoinSet;

use crate::keys::{Draw, Key, Spread};
use crate::measure::median;
use crate::report::Report;
use crate::table::rounded;

use super::floor::Floor;
use super::lab::{Lab, Subject};
use super::plain::{
    Decides, FRED, Failed, Fred, GCRA_SCRIPT, Numbers, REDIS_RS, RedisRs, WIDE, key,
};
use super::replay::{Template, recorded};

pub(super) const TASKS: [usize; 3] = [1, 16, 256];
pub(super) const KEYS: [usize; 2] = [1, 100_000];
/// Callers drawn for a run, which all tasks go through from different places.
const DRAWN: usize = 1 << 17;
/// The earlier charge of every caller, which takes hours to refill.
pub(super) const CHARGED: u64 = 1_000_000;
/// No call takes longer, as all have deadlines.
const LONGEST_NS: u64 = 60_000_000_000;

/// A store of ours that decides by GCRA.
pub(super) struct Ours<S = RedisStore>(RateLimiter<S, Gcra>);

impl<S: Store<Gcra>> Ours<S> {
    /// With a limit that admits every request of a run.
    pub(super) fn new(store: S) -> Result<Self, Box<dyn Error>> {
        Self::limited(WIDE, store)
    }

    pub(super) fn limited(numbers: Numbers, store: S) -> Result<Self, Box<dyn Error>> {
        let gcra = Gcra::new(Rate::per_us(1, numbers.interval_us)?, numbers.burst)?;
        Ok(Self(RateLimiter::new(Limits::new([Limit::new("limit", gcra)?])?, store)))
    }
}

impl<S: Store<Gcra> + 'static> Decides for Ours<S> {
    async fn decide(&self, caller: &str) -> Result<bool, Failed> {
        Ok(self.0.check(caller).await?.allowed())
    }
}

/// The earlier charge of every caller, for the recording.
impl<S: Store<Gcra>> Subject for Ours<S> {
    async fn prepare(&self, _: &Key) -> Result<(), Box<dyn Error>> {
        Ok(())
    }

    async fn decide(&self, caller: &Key) -> Result<bool, Box<dyn Error>> {
        Ok(self.0.check_n(caller.as_str(), CHARGED).await?.allowed())
    }
}

/// One measurement; the fields are those of its JSON line.
#[derive(Debug, Serialize)]
pub(super) struct Row {
    pub(super) part: &'static str,
    /// The client that the store uses.
    pub(super) client: &'static str,
    pub(super) peer: &'static str,
    pub(super) tasks: usize,
    pub(super) keys: usize,
    pub(super) ours_per_s: f64,
    pub(super) peer_per_s: f64,
    /// Ours over the peer's, the median over rounds: above 1, ratelimit is faster.
    pub(super) ratio: f64,
    pub(super) ours_p50_us: f64,
    pub(super) peer_p50_us: f64,
    pub(super) ours_p99_us: f64,
    pub(super) peer_p99_us: f64,
    /// Ours over the peer's: below 1, ratelimit is faster.
    pub(super) p50_ratio: f64,
    pub(super) p99_ratio: f64,
}

impl Row {
    pub(super) fn heading() -> String {
        format!(
            "{:<9} {:<13} {:>5} {:>7} {:>9} {:>9} {:>6} {:>9} {:>9} {:>6} {:>9} {:>9} {:>6}",
            "client",
            "beside",
            "tasks",
            "keys",
            "ours/s",
            "peer/s",
            "ratio",
            "p50 µs",
            "peer",
            "ratio",
            "p99 µs",
            "peer",
            "ratio"
        )
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<9} {:<13} {:>5} {:>7} {:>9.0} {:>9.0} {:>6.2} {:>9.1} {:>9.1} {:>6.2} {:>9.1} {:>9.1} {:>6.2}",
            self.client,
            self.peer,
            self.tasks,
            self.keys,
            self.ours_per_s,
            self.peer_per_s,
            self.ratio,
            self.ours_p50_us,
            self.peer_p50_us,
            self.p50_ratio,
            self.ours_p99_us,
            self.peer_p99_us,
            self.p99_ratio
        )
    }
}

/// The two that take turns, and the name of their row.
#[derive(Clone, Copy)]
pub(super) struct Names {
    pub(super) part: &'static str,
    pub(super) client: &'static str,
    pub(super) peer: &'static str,
}

/// Measures the store by each client beside that client's loop.
pub(super) async fn run(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
) -> Result<(), Box<dyn Error>> {
    println!("\n{}", Row::heading());
    let all = Both::of(lab).await?;
    for keys in KEYS {
        for tasks in TASKS {
            all.measure("throughput", Pace::of(quick), (tasks, keys), report).await?;
        }
    }
    let floor = Floor::new(RedisRs::connect(&lab.url(), &lab.load(GCRA_SCRIPT)?).await?);
    let (floor, names) =
        (Arc::new(floor), Names { part: "throughput", client: "redis", peer: "floor" });
    for tasks in TASKS {
        beside(Pace::of(quick), names, (tasks, 1), &all.by_redis.0, &floor, report).await?;
    }
    Ok(())
}

/// The store by each client, and that client's loop.
pub(super) struct Both {
    by_redis: (Arc<Ours>, Arc<RedisRs>),
    by_fred: (Arc<Ours>, Arc<Fred>),
}

impl Both {
    /// All of them on the server of the lab, where each caller has been charged.
    pub(super) async fn of(lab: &mut Lab) -> Result<Self, Box<dyn Error>> {
        lab.flush()?;
        let (url, sha) = (lab.url(), lab.load(GCRA_SCRIPT)?);
        let store = RedisStore::connect(&lab.recorded_url()).await?;
        let charge = lab.record(&Ours::new(store)?, true).await?;
        Template::new(&charge.commands)?.send(&mut lab.wire, 0..most(&KEYS))?;
        for client in [REDIS_RS, FRED] {
            let by_hand = WIDE.command(&sha, &[&key(client, recorded().as_str())], CHARGED);
            Template::new(&[by_hand])?.send(&mut lab.wire, 0..most(&KEYS))?;
        }
        let ours = async |client| {
            let store = RedisStore::connect(&format!("{url}?client={client}")).await?;
            Ours::new(store).map(Arc::new)
        };
        Ok(Self {
            by_redis: (ours("redis").await?, Arc::new(RedisRs::connect(&url, &sha).await?)),
            by_fred: (ours("fred").await?, Arc::new(Fred::connect(&url, &sha).await?)),
        })
    }

    /// Measures by each client, with so many tasks and keys.
    pub(super) async fn measure(
        &self,
        part: &'static str,
        pace: Pace,
        (tasks, keys): (usize, usize),
        report: &mut Report,
    ) -> Result<[Row; 2], Box<dyn Error>> {
        let names = Names { part, client: "redis", peer: "redis-rs loop" };
        let (ours, plain) = &self.by_redis;
        let by_redis = beside(pace, names, (tasks, keys), ours, plain, report).await?;
        let names = Names { part, client: "fred", peer: "fred loop" };
        let (ours, plain) = &self.by_fred;
        Ok([by_redis, beside(pace, names, (tasks, keys), ours, plain, report).await?])
    }
}

/// How often the two take turns, and for how long.
#[derive(Clone, Copy)]
pub(super) struct Pace {
    pub(super) rounds: usize,
    pub(super) length: Duration,
}

impl Pace {
    pub(super) const fn of(quick: bool) -> Self {
        let (rounds, length_ms) = if quick { (5, 300) } else { (11, 1_000) };
        Self { rounds, length: Duration::from_millis(length_ms) }
    }
}

fn most(numbers: &[usize]) -> usize {
    numbers.iter().copied().max().unwrap_or(1)
}

/// Lets the store and a peer take turns, and prints and writes the results.
pub(super) async fn beside<O: Decides, P: Decides>(
    pace: Pace,
    names: Names,
    (tasks, keys): (usize, usize),
    ours: &Arc<O>,
    peer: &Arc<P>,
    report: &mut Report,
) -> Result<Row, Box<dyn Error>> {
    let callers = Arc::new(Draw::new(Spread::Uniform, keys, 1).keys(DRAWN));
    let Pace { rounds, length } = pace;
    // The first turns are not counted: connections and processors warm up.
    turn(ours, tasks, &callers, length / 4).await?;
    turn(peer, tasks, &callers, length / 4).await?;
    let mut turns = Vec::new();
    for round in 0..rounds {
        turns.push(if round % 2 == 0 {
            let ours = turn(ours, tasks, &callers, length).await?;
            (ours, turn(peer, tasks, &callers, length).await?)
        } else {
            let peer = turn(peer, tasks, &callers, length).await?;
            (turn(ours, tasks, &callers, length).await?, peer)
        });
    }
    let of_ours = |of: fn(&Turn) -> f64| median(turns.iter().map(|(ours, _)| of(ours)));
    let of_peer = |of: fn(&Turn) -> f64| median(turns.iter().map(|(_, peer)| of(peer)));
    let ratio = |of: fn(&Turn) -> f64| {
        rounded(median(turns.iter().map(|(ours, peer)| of(ours) / of(peer))), 1000.0)
    };
    let row = Row {
        part: names.part,
        client: names.client,
        peer: names.peer,
        tasks,
        keys,
        ours_per_s: rounded(of_ours(|turn| turn.per_s), 1.0),
        peer_per_s: rounded(of_peer(|turn| turn.per_s), 1.0),
        ratio: ratio(|turn| turn.per_s),
        ours_p50_us: rounded(of_ours(|turn| turn.p50_us), 10.0),
        peer_p50_us: rounded(of_peer(|turn| turn.p50_us), 10.0),
        p50_ratio: ratio(|turn| turn.p50_us),
        ours_p99_us: rounded(of_ours(|turn| turn.p99_us), 10.0),
        peer_p99_us: rounded(of_peer(|turn| turn.p99_us), 10.0),
        p99_ratio: ratio(|turn| turn.p99_us),
    };
    println!("{row}");
    report.line(&row)?;
    Ok(row)
}

/// The result of either in a round.
pub(super) struct Turn {
    pub(super) decisions: u64,
    pub(super) per_s: f64,
    pub(super) p50_us: f64,
    pub(super) p99_us: f64,
}

/// Runs this many tasks for this long.
pub(super) async fn turn<D: Decides>(
    subject: &Arc<D>,
    tasks: usize,
    callers: &Arc<Vec<Key>>,
    length: Duration,
) -> Result<Turn, Box<dyn Error>> {
    let histogram = Histogram::<u64>::new_with_bounds(1, LONGEST_NS, 3)?;
    let histogram = Arc::new(Mutex::new(histogram));
    let begin = Instant::now();
    let mut set = JoinSet::new();
    for task in 0..tasks {
        let (subject, callers) = (Arc::clone(subject), Arc::clone(callers));
        let histogram = Arc::clone(&histogram);
        let first = task * callers.len() / tasks;
        set.spawn(async move {
            for caller in callers.iter().cycle().skip(first) {
                let asked = Instant::now();
                if !subject.decide(caller.as_str()).await? {
                    return Err("a decision was denied: the benchmark's limit is wrong".into());
                }
                let answered = Instant::now();
                let ns = u64::try_from((answered - asked).as_nanos()).unwrap_or(LONGEST_NS);
                histogram.lock().unwrap_or_else(PoisonError::into_inner).saturating_record(ns);
                if answered - begin >= length {
                    break;
                }
            }
            Ok::<(), Failed>(())
        });
    }
    while let Some(ended) = set.join_next().await {
        ended?.map_err(|error| error.to_string())?;
    }
    let taken = begin.elapsed();
    let histogram = histogram.lock().unwrap_or_else(PoisonError::into_inner);
    let us =
        |quantile| Duration::from_nanos(histogram.value_at_quantile(quantile)).as_secs_f64() * 1e6;
    let decisions = histogram.len();
    let per_s = f64::from(u32::try_from(decisions)?) / taken.as_secs_f64();
    Ok(Turn { decisions, per_s, p50_us: us(0.5), p99_us: us(0.99) })
}
