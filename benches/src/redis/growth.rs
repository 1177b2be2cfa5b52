//! How decisions grow: over the number of tasks, and over the nodes of a cluster.
//!
//! Over tasks, as in [`throughput`]: each client's own plain loop over a script beside the store, one key
//! and many. Over nodes, with 256 tasks for each: one key per node, and many keys, of which all lie on the first one, two or three nodes
//! of a cluster of three. One thread asks, and the machine has to run all nodes, so decisions per second end where its processors do.
//! The servers' time per decision does not depend on that: if it stays the same from node to node, nodes share nothing.

use std::error::Error;
use std::fmt;
use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::try_join_all;
use ratelimit_redis::RedisStore;
use ratelimit_testkit::RedisCluster;
use serde::Serialize;

use crate::keys::Key;
use crate::measure::median;
use crate::report::Report;
use crate::table::rounded;

use super::lab::{Lab, Subject, cpu_of, script_calls};
use super::plain::{Decides, FRED, Fred, GCRA_SCRIPT, REDIS_RS, RedisRs, WIDE, key};
use super::plot::{Figure, Line, Panel, Scale};
use super::throughput::{self, Both, CHARGED, KEYS, Ours, Pace, turn};
use super::wire::Wire;

const TASKS: [usize; 6] = [1, 4, 16, 64, 256, 1_024];
/// The tasks that ask, for each node on which keys lie.
const TASKS_PER_NODE: usize = 256;
/// Many keys of a cluster, on all of its nodes together.
const MANY: usize = 9_000;
const SLOTS: usize = 16_384;

/// Measures, and draws what was measured into this folder.
pub(super) async fn run(
    quick: bool,
    lab: &mut Lab,
    report: &mut Report,
    plots: Option<&Path>,
) -> Result<(), Box<dyn Error>> {
    let pace = if quick {
        Pace { rounds: 3, length: Duration::from_millis(100) }
    } else {
        Pace::of(false)
    };
    let load = load();
    println!("\n{}", throughput::Row::heading());
    let both = Both::of(lab).await?;
    let mut over_tasks = Vec::new();
    for keys in KEYS {
        for tasks in TASKS {
            over_tasks.extend(both.measure("growth", pace, (tasks, keys), report).await?);
        }
    }
    let over_nodes = Cluster::start()?.measure(pace, report).await?;
    let Some(folder) = plots else { return Ok(()) };
    fs::create_dir_all(folder)
        .map_err(|error| format!("cannot make the folder {}: {error}", folder.display()))?;
    let processors = std::thread::available_parallelism()?;
    let note = format!(
        "{}; one client thread; {processors} processors with a load of {load} before and {} after; medians of {} rounds of {} ms",
        lab.version()?,
        self::load(),
        pace.rounds,
        pace.length.as_millis()
    );
    for (figure, file) in [
        (figure_over_tasks(&note, "one key", KEYS[0], &over_tasks), "redis-one-key.svg"),
        (figure_over_tasks(&note, "100,000 keys", KEYS[1], &over_tasks), "redis-many-keys.svg"),
        (figure_over_nodes(&note, &over_nodes), "redis-nodes.svg"),
    ] {
        let path = folder.join(file);
        figure.write(&path)?;
        println!("{}", path.display());
    }
    Ok(())
}

/// The load of the machine over the last minute, as Linux tells it.
fn load() -> String {
    let load = fs::read_to_string("/proc/loadavg").unwrap_or_default();
    load.split(' ').next().filter(|load| !load.is_empty()).unwrap_or("unknown").to_owned()
}

/// One measurement on a cluster; the fields are those of its JSON line.
#[derive(Debug, Serialize)]
struct Row {
    part: &'static str,
    client: &'static str,
    peer: &'static str,
    /// The nodes on which the keys lie.
    nodes: usize,
    tasks: usize,
    keys: usize,
    ours_per_s: f64,
    peer_per_s: f64,
    /// Ours over the peer's, the median over rounds.
    ratio: f64,
    ours_p99_us: f64,
    peer_p99_us: f64,
    /// The time of all servers' main threads on a processor, per decision.
    ours_server_ns: f64,
    peer_server_ns: f64,
    /// The part of our calls that went to the node with most of them.
    busiest: f64,
}

impl Row {
    fn heading() -> String {
        format!(
            "{:<9} {:<13} {:>5} {:>5} {:>7} {:>9} {:>9} {:>6} {:>9} {:>9} {:>12} {:>9} {:>8}",
            "client",
            "beside",
            "nodes",
            "tasks",
            "keys",
            "ours/s",
            "peer/s",
            "ratio",
            "p99 µs",
            "peer",
            "server ns",
            "peer",
            "busiest"
        )
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<9} {:<13} {:>5} {:>5} {:>7} {:>9.0} {:>9.0} {:>6.2} {:>9.1} {:>9.1} {:>12.0} {:>9.0} {:>7.0}%",
            self.client,
            self.peer,
            self.nodes,
            self.tasks,
            self.keys,
            self.ours_per_s,
            self.peer_per_s,
            self.ratio,
            self.ours_p99_us,
            self.peer_p99_us,
            self.ours_server_ns,
            self.peer_server_ns,
            100.0 * self.busiest
        )
    }
}

/// A cluster of the benchmark's own.
struct Cluster(RedisCluster);

/// What came of either in a round.
struct Round {
    per_s: f64,
    p99_us: f64,
    server_ns: f64,
    busiest: f64,
}

impl Cluster {
    fn start() -> Result<Self, String> {
        RedisCluster::start().map(Self)
    }

    /// Measures by each client, on one node and then on more.
    async fn measure(&self, pace: Pace, report: &mut Report) -> Result<Vec<Row>, Box<dyn Error>> {
        println!("\n{}", Row::heading());
        let sha = self.load(GCRA_SCRIPT)?;
        let ports = self.0.client_ports();
        let node = |port: &u16| format!("redis://127.0.0.1:{port}");
        let ours = async |client: &str| {
            let store = RedisStore::connect(&format!("{}?client={client}", self.0.url())).await?;
            Ours::new(store).map(Arc::new)
        };
        let by_redis = ours("redis").await?;
        let loop_by_redis =
            RedisRs::connect_to_cluster(ports.iter().map(node).collect(), &sha).await?;
        let loop_by_redis = Arc::new(loop_by_redis);
        let by_fred = ours("fred").await?;
        let others: Vec<_> =
            ports[1..].iter().map(|port| format!("node=127.0.0.1:{port}")).collect();
        let url = format!("redis-cluster://127.0.0.1:{}?{}", ports[0], others.join("&"));
        let loop_by_fred = Arc::new(Fred::connect(&url, &sha).await?);
        let mut rows = Vec::new();
        for many in [false, true] {
            for nodes in 1..=self.0.nodes().len() {
                let names = ("redis", "redis-rs loop", REDIS_RS);
                let about = (nodes, many, pace, sha.as_str());
                rows.push(self.beside(names, about, &by_redis, &loop_by_redis, report).await?);
                let names = ("fred", "fred loop", FRED);
                rows.push(self.beside(names, about, &by_fred, &loop_by_fred, report).await?);
            }
        }
        Ok(rows)
    }

    /// Lets the store and a client's loop take turns on keys of the first nodes.
    async fn beside<P: Decides>(
        &self,
        (client, peer, prefix): (&'static str, &'static str, &'static str),
        (nodes, many, pace, sha): (usize, bool, Pace, &str),
        ours: &Arc<Ours>,
        plain: &Arc<P>,
        report: &mut Report,
    ) -> Result<Row, Box<dyn Error>> {
        let (callers, others) = (
            self.callers(nodes, many, |caller| format!("{{{}}}", caller.as_str())),
            self.callers(nodes, many, |caller| key(prefix, caller.as_str())),
        );
        for callers in callers.chunks(TASKS_PER_NODE) {
            try_join_all(callers.iter().map(|caller| Subject::decide(&**ours, caller))).await?;
        }
        self.charge(&others, prefix, sha)?;
        let mut rounds = Vec::new();
        for round in 0..=pace.rounds {
            // The first round is not counted: connections and processors warm up.
            let length = if round == 0 { pace.length / 4 } else { pace.length };
            let pair = if round % 2 == 0 {
                let ours = self.round(ours, &callers, nodes, length).await?;
                (ours, self.round(plain, &others, nodes, length).await?)
            } else {
                let plain = self.round(plain, &others, nodes, length).await?;
                (self.round(ours, &callers, nodes, length).await?, plain)
            };
            if round > 0 {
                rounds.push(pair);
            }
        }
        let of_ours = |of: fn(&Round) -> f64| median(rounds.iter().map(|(ours, _)| of(ours)));
        let of_peer = |of: fn(&Round) -> f64| median(rounds.iter().map(|(_, peer)| of(peer)));
        let row = Row {
            part: "growth",
            client,
            peer,
            nodes,
            tasks: nodes * TASKS_PER_NODE,
            keys: callers.len(),
            ours_per_s: rounded(of_ours(|round| round.per_s), 1.0),
            peer_per_s: rounded(of_peer(|round| round.per_s), 1.0),
            ratio: rounded(
                median(rounds.iter().map(|(ours, peer)| ours.per_s / peer.per_s)),
                1_000.0,
            ),
            ours_p99_us: rounded(of_ours(|round| round.p99_us), 10.0),
            peer_p99_us: rounded(of_peer(|round| round.p99_us), 10.0),
            ours_server_ns: rounded(of_ours(|round| round.server_ns), 1.0),
            peer_server_ns: rounded(of_peer(|round| round.server_ns), 1.0),
            busiest: rounded(of_ours(|round| round.busiest), 1_000.0),
        };
        println!("{row}");
        report.line(&row)?;
        Ok(row)
    }

    /// Runs all tasks for this long. Fails if a node takes part on which no key lies.
    async fn round<D: Decides>(
        &self,
        subject: &Arc<D>,
        callers: &Arc<Vec<Key>>,
        nodes: usize,
        length: Duration,
    ) -> Result<Round, Box<dyn Error>> {
        let cpu = || -> Option<Duration> { self.0.nodes().iter().map(cpu_of).sum() };
        for node in self.0.nodes() {
            node.command(&["CONFIG", "RESETSTAT"])?.ok()?;
        }
        let before = cpu();
        let turn = turn(subject, nodes * TASKS_PER_NODE, callers, length).await?;
        let taken = cpu().zip(before).map(|(after, before)| after.saturating_sub(before));
        let calls: Vec<_> = self.0.nodes().iter().map(script_calls).collect::<Result<_, _>>()?;
        if calls[nodes..].iter().any(|calls| *calls > 0) {
            return Err(format!("keys of {nodes} nodes, and calls of {calls:?}").into());
        }
        let float = |count: u64| u32::try_from(count).map(f64::from);
        let busiest = calls.iter().copied().max().unwrap_or(0);
        Ok(Round {
            per_s: turn.per_s,
            p99_us: turn.p99_us,
            server_ns: taken.map_or(f64::NAN, |taken| taken.as_secs_f64() * 1e9)
                / float(turn.decisions)?,
            busiest: float(busiest)? / float(calls.iter().sum::<u64>().max(1))?,
        })
    }

    /// Callers whose keys lie on the first nodes: one per node, or many.
    fn callers(&self, nodes: usize, many: bool, key: impl Fn(&Key) -> String) -> Arc<Vec<Key>> {
        let per_node = if many { MANY / nodes } else { 1 };
        let mut left = vec![per_node; nodes];
        let is_wanted = |caller: &Key| {
            let Some(left) = left.get_mut(self.node_of(&key(caller))).filter(|left| **left > 0)
            else {
                return false;
            };
            *left -= 1;
            true
        };
        Arc::new((0..).map(Key::new).filter(is_wanted).take(per_node * nodes).collect())
    }

    /// Loads a script on every node, and returns its hash.
    fn load(&self, script: &str) -> Result<String, Box<dyn Error>> {
        let mut sha = String::new();
        for node in self.0.nodes() {
            sha = node.command(&["SCRIPT", "LOAD", script])?.ok()?.to_string();
        }
        Ok(sha)
    }

    /// Makes the earlier charge of each caller of a loop.
    fn charge(&self, callers: &[Key], prefix: &str, sha: &str) -> Result<(), Box<dyn Error>> {
        let mut requests = vec![(Vec::new(), 0); self.0.nodes().len()];
        for caller in callers {
            let name = key(prefix, caller.as_str());
            let (bytes, count) = &mut requests[self.node_of(&name)];
            bytes.extend(redis::pack_command(&WIDE.command(sha, &[&name], CHARGED)));
            *count += 1;
        }
        for (node, (bytes, count)) in self.0.nodes().iter().zip(requests) {
            Wire::connect(node.port())?.exchange(&bytes, count, |_, _| Ok(()))?;
        }
        Ok(())
    }

    /// The node on which a key lies: the nodes share the slots evenly.
    fn node_of(&self, key: &str) -> usize {
        let (slot, nodes) = (usize::from(self.0.slot_of(key)), self.0.nodes().len());
        (1..nodes).filter(|node| slot >= node * SLOTS / nodes).count()
    }
}

/// Lines of ours and the loop's, by each client.
fn lines<R>(
    rows: &[R],
    client: fn(&R) -> (&'static str, &'static str),
    x: fn(&R) -> f64,
    ours: fn(&R) -> f64,
    peer: fn(&R) -> f64,
) -> Vec<Line> {
    let mut lines = Vec::new();
    for name in ["redis", "fred"] {
        let rows = || rows.iter().filter(|row| client(row).0 == name);
        let points = |y: fn(&R) -> f64| rows().map(|row| (x(row), y(row))).collect();
        lines.push(Line { name: format!("ratelimit by {name}"), points: points(ours) });
        let peer_name = rows().map(|row| client(row).1).next().unwrap_or_default();
        lines.push(Line { name: peer_name.to_owned(), points: points(peer) });
    }
    lines
}

/// A small number of tasks or nodes.
fn small(number: usize) -> f64 {
    f64::from(u32::try_from(number).unwrap_or(u32::MAX))
}

fn figure_over_tasks(note: &str, what: &str, keys: usize, rows: &[throughput::Row]) -> Figure {
    let rows: Vec<_> = rows.iter().filter(|row| row.keys == keys).collect();
    let lines =
        |ours, peer| lines(&rows, |row| (row.client, row.peer), |row| small(row.tasks), ours, peer);
    let panel = |title, y, lines| Panel {
        title,
        x: "tasks that ask at the same time",
        y,
        scale: Scale::Logarithmic,
        lines,
    };
    let panels = vec![
        panel(
            "Throughput",
            "decisions per second",
            lines(|row| row.ours_per_s, |row| row.peer_per_s),
        ),
        panel(
            "Latency, 99th percentile",
            "microseconds",
            lines(|row| row.ours_p99_us, |row| row.peer_p99_us),
        ),
    ];
    Figure { title: format!("Decisions on one Redis, {what}"), note: note.to_owned(), panels }
}

fn figure_over_nodes(note: &str, rows: &[Row]) -> Figure {
    let hot: Vec<_> = rows.iter().filter(|row| row.keys == row.nodes).collect();
    let many: Vec<_> = rows.iter().filter(|row| row.keys > row.nodes).collect();
    let panel = |title, rows: &[&Row]| Panel {
        title,
        x: "nodes on which the keys lie",
        y: "servers' microseconds per decision",
        scale: Scale::Linear,
        lines: lines(
            rows,
            |row| (row.client, row.peer),
            |row| small(row.nodes),
            |row| row.ours_server_ns / 1e3,
            |row| row.peer_server_ns / 1e3,
        ),
    };
    let panels = vec![panel("One key per node", &hot), panel("9,000 keys", &many)];
    let title = "Processor time of all servers per decision, 256 tasks per node".to_owned();
    Figure { title, note: note.to_owned(), panels }
}

#[cfg(test)]
#[allow(clippy::expect_used)]
mod tests {
    use super::*;

    #[test]
    fn callers_lie_on_the_first_nodes_as_many_on_each() {
        let cluster = Cluster::start().expect("a cluster");
        for nodes in 1..=3 {
            for many in [false, true] {
                let callers = cluster.callers(nodes, many, |caller| key(REDIS_RS, caller.as_str()));
                let mut counts = [0; 3];
                for caller in callers.iter() {
                    let slot = cluster.0.slot_of(&key(REDIS_RS, caller.as_str()));
                    let node = cluster.node_of(&key(REDIS_RS, caller.as_str()));
                    counts[node] += 1;
                    if !many {
                        assert_eq!(cluster.0.master_of(slot), Ok(node));
                    }
                }
                let each = if many { MANY / nodes } else { 1 };
                assert_eq!(counts[..nodes], vec![each; nodes]);
                assert_eq!(counts[nodes..], vec![0; 3 - nodes]);
            }
        }
    }
}
