//! Decisions per second, their latency, and the servers' CPU time: the store beside each client's
//! own plain loop over a script.
//!
//! All tasks share one connection and one thread, as the server has one. Both take turns on the
//! same callers, all of whom are admitted and have been charged before. A task asks for a decision
//! when the one before is answered.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use hdrhistogram::Histogram;
use ratelimit_core::{Gcra, Limit, Limits, Rate, RateLimiter, Store};
use ratelimit_redis::RedisStore;
use ratelimit_servers::RedisServer;
use tokio::task::JoinSet;

use crate::keys::{CallerKey, KeyDraw, Spread};
use crate::measure::{Fallible, Samples, turns};
use crate::report::{BenchReport, digits, range};

use super::floor::Floor;
use super::lab::{Lab, cpu_of, script_calls};
use super::plain::{
    Decides, Fred, GCRA_SCRIPT, LIMITS_SCRIPT, PlainScript, RedisRs, ScriptNumbers, WIDE,
};

const TASKS: [usize; 4] = [1, 16, 256, 1_024];
/// Of so many keys, and how they are drawn.
const KEYS: [(usize, Spread); 3] =
    [(1, Spread::Uniform), (10_000, Spread::TenHot), (100_000, Spread::Uniform)];
/// Callers drawn for a run, which all tasks go through from different places.
pub(super) const DRAWN: usize = 1 << 17;
/// The earlier charge of every caller, which takes hours to refill.
const CHARGED: u64 = 1_000_000;
/// So many are charged at the same time.
const CHARGED_AT_ONCE: usize = 256;
/// No call takes longer, as all have deadlines.
const LONGEST_NS: u64 = 60_000_000_000;

/// A store of ours that decides by GCRA.
pub(super) struct OurStore<S = RedisStore>(RateLimiter<S, Gcra>);

impl<S: Store<Gcra>> OurStore<S> {
    pub(super) fn new(numbers: ScriptNumbers, store: S) -> Fallible<Self> {
        Self::of_limits(numbers, store, &ONE)
    }

    /// Decides by limits of these names, each for an identifier, or for the only one.
    pub(super) fn of_limits(
        numbers: ScriptNumbers,
        store: S,
        limits: &[NamedLimit],
    ) -> Fallible<Self> {
        let gcra = Gcra::new(Rate::per_us(1, numbers.interval_us)?, numbers.burst)?;
        let limit = |(name, by): &NamedLimit| Limit::new(name, gcra)?.by(*by);
        let limits = limits.iter().map(limit).collect::<Result<Vec<_>, _>>()?;
        Ok(Self(RateLimiter::new(Limits::new(limits)?, store)))
    }
}

impl<S: Store<Gcra> + 'static> Decides for OurStore<S> {
    async fn charge(&self, caller: &str, cost: u64) -> Fallible<bool> {
        if self.0.limits().as_slice().len() == ONE.len() {
            return Ok(self.0.check_n(caller, cost).await?.allowed());
        }
        Ok(self.0.check_n(&[("caller", caller), ("all", "everyone")], cost).await?.allowed())
    }
}

/// A limit's name, and the identifier that it is kept for.
pub(super) type NamedLimit = (&'static str, Option<&'static str>);

pub(super) const ONE: [NamedLimit; 1] = [("limit", None)];
/// One of them is for all callers.
pub(super) const THREE: [NamedLimit; 3] =
    [("first", Some("all")), ("second", Some("caller")), ("third", Some("caller"))];

/// Measures the store by each client beside that client's loop.
pub(super) async fn run(lab: &mut Lab) -> Fallible {
    of_limits(lab, "throughput", &KEYS, GCRA_SCRIPT, &ONE).await?;
    let mut three = THREE;
    for part in ["three limits, first for all", "three limits, last for all"] {
        of_limits(lab, part, &KEYS[2..], LIMITS_SCRIPT, &three).await?;
        three.reverse();
    }
    Ok(())
}

async fn of_limits(
    lab: &mut Lab,
    part: &'static str,
    all: &[(usize, Spread)],
    script: &str,
    limits: &[NamedLimit],
) -> Fallible {
    lab.flush()?;
    let (url, sha) = (lab.server.url(), lab.load(script)?);
    let ours = async |client| {
        let store = RedisStore::connect(&format!("{url}?client={client}")).await?;
        OurStore::of_limits(WIDE, store, limits).map(Arc::new)
    };
    let (by_redis, by_fred) = (ours("redis").await?, ours("fred").await?);
    let script = PlainScript { sha, numbers: WIDE, limits: limits.len() };
    let loop_by_redis = Arc::new(RedisRs::connect(&url, &script).await?);
    let loop_by_fred = Arc::new(Fred::connect(&url, &script).await?);
    // It charges all of its keys.
    let gathers = PlainScript { sha: lab.load(LIMITS_SCRIPT)?, ..script };
    let floor_by_redis = Arc::new(Floor::new(RedisRs::connect(&url, &gathers).await?));
    let floor_by_fred = Arc::new(Floor::new(Fred::connect(&url, &gathers).await?));
    let callers: Vec<_> = (0..KEYS[2].0).map(CallerKey::new).collect();
    charge(&by_redis, &callers).await?;
    charge(&loop_by_redis, &callers).await?;
    charge(&loop_by_fred, &callers).await?;
    for (keys, spread) in all.iter().copied() {
        for tasks in TASKS {
            let callers = Arc::new(KeyDraw::new(spread, keys, 1).keys(DRAWN)?);
            let load = |client, peer| Workload {
                part,
                client,
                peer,
                servers: std::slice::from_ref(&lab.server),
                nodes: 1,
                tasks,
                keys,
                callers: [&callers, &callers],
            };
            let (quick, report) = (lab.quick, &mut lab.report);
            load("redis", "redis-rs loop")
                .measure(quick, report, &by_redis, &loop_by_redis)
                .await?;
            load("fred", "fred loop").measure(quick, report, &by_fred, &loop_by_fred).await?;
            load("redis", "floor").measure(quick, report, &by_redis, &floor_by_redis).await?;
            load("fred", "floor").measure(quick, report, &by_fred, &floor_by_fred).await?;
        }
    }
    Ok(())
}

/// Makes the earlier charge of each caller.
pub(super) async fn charge(subject: &Arc<impl Decides>, callers: &[CallerKey]) -> Fallible {
    for callers in callers.chunks(CHARGED_AT_ONCE) {
        let charges = callers.iter().map(|caller| subject.charge(caller.as_str(), CHARGED));
        try_join_all(charges).await?;
    }
    Ok(())
}

/// What two limiters are asked, and how their row is called.
pub(super) struct Workload<'a> {
    pub(super) part: &'static str,
    pub(super) client: &'static str,
    pub(super) peer: &'static str,
    pub(super) servers: &'a [RedisServer],
    /// So many of the servers have keys, the first ones.
    pub(super) nodes: usize,
    pub(super) tasks: usize,
    pub(super) keys: usize,
    /// Ours, and the peer's.
    pub(super) callers: [&'a Arc<Vec<CallerKey>>; 2],
}

/// The result of either in a round.
struct ThroughputResult {
    per_s: f64,
    p50_us: f64,
    p99_us: f64,
    /// The time of all servers' main threads on a processor, per decision.
    server_ns: f64,
    /// Calls of scripts per decision, and the part of them that went to the node with most of them.
    calls: f64,
    busiest: f64,
}

impl Workload<'_> {
    /// Lets the store and a peer take turns, and tells the results.
    pub(super) async fn measure<O: Decides, P: Decides>(
        &self,
        quick: bool,
        report: &mut BenchReport,
        ours: &Arc<O>,
        peer: &Arc<P>,
    ) -> Fallible {
        let (rounds, length_ms) = if quick { (5, 300) } else { (11, 1_000) };
        let mut samples = Samples::new(2);
        for (round, way) in turns(rounds, 2) {
            let length = Duration::from_millis(if round == 0 { length_ms / 4 } else { length_ms });
            let [callers, others] = self.callers;
            let turn = if way == 0 {
                self.turn(ours, callers, length).await?
            } else {
                self.turn(peer, others, length).await?
            };
            samples.add((round, way), turn);
        }
        let both = |decimals, of: fn(&ThroughputResult) -> f64| {
            [0, 1].map(|way| digits(decimals, samples.median(way, of)))
        };
        let ratio = |of: fn(&ThroughputResult) -> f64| digits(3, samples.ratio(0, 1, of));
        let ranges = |decimals, of: fn(&ThroughputResult) -> f64| {
            [0, 1].map(|way| range(decimals, samples.range(way, of)))
        };
        let [ours_per_s, peer_per_s] = both(0, |turn| turn.per_s);
        let [ours_per_s_range, peer_per_s_range] = ranges(0, |turn| turn.per_s);
        let [ours_p50_us, peer_p50_us] = both(1, |turn| turn.p50_us);
        let [ours_p99_us, peer_p99_us] = both(1, |turn| turn.p99_us);
        let [ours_p99_us_range, peer_p99_us_range] = ranges(1, |turn| turn.p99_us);
        let [ours_server_ns, peer_server_ns] = both(0, |turn| turn.server_ns);
        report.row(&[
            ("part", self.part.into()),
            ("client", self.client.into()),
            ("peer", self.peer.into()),
            ("nodes", self.nodes.into()),
            ("tasks", self.tasks.into()),
            ("keys", self.keys.into()),
            ("ours_per_s", ours_per_s),
            ("ours_per_s_range", ours_per_s_range),
            ("peer_per_s", peer_per_s),
            ("peer_per_s_range", peer_per_s_range),
            // Ours over the peer's: above 1, ratelimit is faster; below 1 in the other two.
            ("ratio", ratio(|turn| turn.per_s)),
            ("ours_p50_us", ours_p50_us),
            ("peer_p50_us", peer_p50_us),
            ("p50_ratio", ratio(|turn| turn.p50_us)),
            ("ours_p99_us", ours_p99_us),
            ("ours_p99_us_range", ours_p99_us_range),
            ("peer_p99_us", peer_p99_us),
            ("peer_p99_us_range", peer_p99_us_range),
            ("p99_ratio", ratio(|turn| turn.p99_us)),
            ("ours_server_ns", ours_server_ns),
            ("peer_server_ns", peer_server_ns),
            ("calls", both(3, |turn| turn.calls)[0]),
            ("busiest", both(3, |turn| turn.busiest)[0]),
        ])
    }

    /// Runs all tasks for this long. Fails if a server takes part that has no keys.
    async fn turn<D: Decides>(
        &self,
        subject: &Arc<D>,
        callers: &Arc<Vec<CallerKey>>,
        length: Duration,
    ) -> Fallible<ThroughputResult> {
        let histogram = Histogram::<u64>::new_with_bounds(1, LONGEST_NS, 3)?;
        let histogram = Arc::new(Mutex::new(histogram));
        for server in self.servers {
            server.command(&["CONFIG", "RESETSTAT"])?.ok()?;
        }
        let cpu = || self.servers.iter().map(cpu_of).sum::<Option<Duration>>();
        let (cpu_before, begin) = (cpu(), Instant::now());
        let mut set = JoinSet::new();
        for task in 0..self.tasks {
            let (subject, callers) = (Arc::clone(subject), Arc::clone(callers));
            let histogram = Arc::clone(&histogram);
            let first = task * callers.len() / self.tasks;
            set.spawn(async move {
                for caller in callers.iter().cycle().skip(first) {
                    let asked = Instant::now();
                    if !subject.charge(caller.as_str(), 1).await? {
                        return Err("a decision was denied: the benchmark's limit is wrong".into());
                    }
                    let answered = Instant::now();
                    let ns = u64::try_from((answered - asked).as_nanos()).unwrap_or(LONGEST_NS);
                    histogram.lock().unwrap_or_else(PoisonError::into_inner).saturating_record(ns);
                    if answered - begin >= length {
                        break;
                    }
                }
                Fallible::Ok(())
            });
        }
        set.join_all().await.into_iter().collect::<Fallible>()?;
        let taken = begin.elapsed();
        let cpu = cpu().zip(cpu_before).map(|(after, before)| after.saturating_sub(before));
        let calls: Vec<_> = self.servers.iter().map(script_calls).collect::<Result<_, _>>()?;
        if calls[self.nodes..].iter().any(|calls| *calls > 0) {
            return Err(format!("keys of {} nodes, and calls of {calls:?}", self.nodes).into());
        }
        let histogram = histogram.lock().unwrap_or_else(PoisonError::into_inner);
        let us = |at| Duration::from_nanos(histogram.value_at_quantile(at)).as_secs_f64() * 1e6;
        let float = |count: u64| u32::try_from(count).map(f64::from);
        let (decisions, all) = (float(histogram.len())?, float(calls.iter().sum())?);
        Ok(ThroughputResult {
            per_s: decisions / taken.as_secs_f64(),
            p50_us: us(0.5),
            p99_us: us(0.99),
            server_ns: cpu.map_or(f64::NAN, |cpu| cpu.as_secs_f64() * 1e9) / decisions,
            calls: all / decisions,
            busiest: float(calls.iter().copied().max().unwrap_or(0))? / all.max(1.0),
        })
    }
}
