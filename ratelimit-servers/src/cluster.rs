//! [`RedisCluster`]: a cluster that belongs to one test, made of plain servers, without
//! `redis-cli`.

mod migration;
mod view;

use std::sync::{Mutex, OnceLock};
use std::thread;
use std::time::Duration;

use crc::{CRC_16_XMODEM, Crc};

use crate::port::Port;
use crate::proxy::FaultProxy;
use crate::{RedisServer, START_DEADLINE, on_free_ports, password, wait_until};
use view::ClusterView;

/// The masters of a new cluster: the fewest that can hold an election.
const MASTERS: usize = 3;
/// The first and the last slot of each.
const SHARES: [[&str; 2]; MASTERS] = [["0", "5460"], ["5461", "10921"], ["10922", "16383"]];
const SLOTS: u16 = 16_384;

/// Three masters and their replicas, in processes of their own, which end with the test.
///
/// In the methods below, a running node is one that is neither killed nor
/// [paused](RedisServer::pause).
///
/// Nodes are numbered: 0 to 2 are the initial masters, then comes the first replica of each, in the
/// same order, then the second. A node keeps its number whatever happens to it.
///
/// Nodes keep their role: a master that has lost its last slot does not become a replica
/// (`--cluster-allow-replica-migration no`). A node that does not answer counts as dead after a
/// second. Arguments can change either.
#[derive(Debug)]
pub struct RedisCluster {
    nodes: Vec<RedisServer>,
    /// The node ids.
    ids: Vec<String>,
    /// The proxy in front of each node, if there are any.
    proxies: Vec<FaultProxy>,
    plan: ClusterPlan,
    /// See [`alone`](Self::alone).
    one_at_a_time: Mutex<()>,
}

/// The nodes to start.
#[derive(Clone, Debug)]
struct ClusterPlan {
    binary: String,
    args: Vec<String>,
    behind_proxies: bool,
}

impl RedisCluster {
    /// Starts three masters, which share all slots evenly, from the first of the
    /// [`binaries`](RedisServer::binaries).
    ///
    /// # Errors
    /// The cluster did not start; the text includes what the servers said.
    pub fn start() -> Result<Self, String> {
        Self::start_with(&RedisServer::binaries()[0], 0, &[])
    }

    /// Starts three masters with one replica each.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with_replicas() -> Result<Self, String> {
        Self::start_with(&RedisServer::binaries()[0], 1, &[])
    }

    /// Starts three masters with this many replicas each and additional arguments for every node.
    /// If the arguments set `--requirepass`, the nodes also use that password among themselves.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(binary: &str, replicas: usize, args: &[&str]) -> Result<Self, String> {
        Self::start_plan(&ClusterPlan::new(binary, args, false), replicas)
    }

    /// Starts three masters, each behind a proxy of its own. Clients see only the proxies'
    /// addresses, also in redirections. The nodes' gossip does not pass through the proxies.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_behind_proxies() -> Result<Self, String> {
        Self::start_plan(&ClusterPlan::new(&RedisServer::binaries()[0], &[], true), 0)
    }

    /// One cluster of three masters shared by all tests of a binary, started on first use.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn shared() -> Result<&'static Self, String> {
        static SHARED: OnceLock<Result<RedisCluster, String>> = OnceLock::new();
        SHARED.get_or_init(Self::start).as_ref().map_err(Clone::clone)
    }

    /// The URL of the first three nodes, or of their proxies:
    /// `redis-cluster://127.0.0.1:7000,127.0.0.1:7001,127.0.0.1:7002`.
    pub fn url(&self) -> String {
        let addresses: Vec<String> =
            self.client_ports().iter().take(MASTERS).map(|p| format!("127.0.0.1:{p}")).collect();
        format!("redis-cluster://{}", addresses.join(","))
    }

    /// The port of every node, or of its proxy, as clients see it.
    pub fn client_ports(&self) -> Vec<u16> {
        let of_proxies = self.proxies.iter().map(FaultProxy::port);
        let of_nodes = self.nodes.iter().map(RedisServer::port);
        if self.plan.behind_proxies { of_proxies.collect() } else { of_nodes.collect() }
    }

    /// The nodes, reached without a proxy.
    pub fn nodes(&self) -> &[RedisServer] {
        &self.nodes
    }

    /// The proxies in front of the nodes, in the same order; empty if the cluster was started
    /// without.
    pub fn proxies(&self) -> &[FaultProxy] {
        &self.proxies
    }

    /// A node's id, for `CLUSTER` commands.
    pub fn id(&self, node: usize) -> &str {
        &self.ids[node]
    }

    /// The slot of a key.
    pub fn slot_of(&self, key: &str) -> u16 {
        slot_of(key.as_bytes())
    }

    /// The node that serves a slot, in the view of the running nodes: of those that claim it, the
    /// one with the highest epoch.
    ///
    /// # Errors
    /// No node claims the slot, or none answers.
    pub fn master_of(&self, slot: u16) -> Result<usize, String> {
        let claims = self.running().filter_map(|(node, _)| {
            let view = self.view(node).ok()?;
            let myself = view.node(self.id(node))?;
            let claims = myself.is_master() && myself.slots.contains(slot);
            claims.then_some((myself.epoch, node))
        });
        let owner = claims.max().map(|(_, node)| node);
        owner.ok_or_else(|| format!("no running node has slot {slot}"))
    }

    /// The master of a replica; `None` if the node is a master.
    ///
    /// # Errors
    /// The node does not answer.
    pub fn master_of_replica(&self, node: usize) -> Result<Option<usize>, String> {
        let view = self.view(node)?;
        let master = view.node(self.id(node)).and_then(|myself| myself.master.clone());
        Ok(master.and_then(|id| self.ids.iter().position(|known| *known == id)))
    }

    /// Flushes all scripts on every running node.
    ///
    /// # Errors
    /// The error that a node replied.
    pub fn flush_scripts(&self) -> Result<(), String> {
        self.running()
            .try_for_each(|(_, node)| node.command(&["SCRIPT", "FLUSH", "SYNC"])?.ok().map(drop))
    }

    /// Adds a master without slots, and returns its number when all running nodes know it.
    ///
    /// # Errors
    /// The node did not start or could not join.
    pub fn add_empty_master(&mut self) -> Result<usize, String> {
        let (node, proxy) = on_free_ports(|| self.plan.start_node())?;
        let number = self.nodes.len();
        self.ids.push(my_id(&node)?);
        self.nodes.push(node);
        self.proxies.extend(proxy);
        for (known, _) in self.running().filter(|(known, _)| *known != number) {
            self.meet(number, known)?;
        }
        self.wait_until_healthy(START_DEADLINE)?;
        Ok(number)
    }

    /// Waits until every running node accepts commands, all of them agree on the owner of each slot
    /// and the master of each replica, a running node owns every slot, and the running replicas are
    /// connected to their masters.
    ///
    /// # Errors
    /// What was still wrong at the deadline, in the nodes' own words.
    pub fn wait_until_healthy(&self, deadline: Duration) -> Result<(), String> {
        wait_until(deadline, || self.ailment())
    }

    fn start_plan(plan: &ClusterPlan, replicas: usize) -> Result<Self, String> {
        let count = MASTERS * (1 + replicas);
        let started: Vec<_> = thread::scope(|scope| {
            let start = || on_free_ports(|| plan.start_node());
            let starting: Vec<_> = (0..count).map(|_| scope.spawn(start)).collect();
            starting.into_iter().map(thread::ScopedJoinHandle::join).collect()
        });
        let mut cluster = Self {
            nodes: Vec::new(),
            ids: Vec::new(),
            proxies: Vec::new(),
            plan: plan.clone(),
            one_at_a_time: Mutex::new(()),
        };
        for node in started {
            let (node, proxy) = node.map_err(|_| "a thread that starts a node panicked")??;
            cluster.ids.push(my_id(&node)?);
            cluster.nodes.push(node);
            cluster.proxies.extend(proxy);
        }
        cluster.join()?;
        Ok(cluster)
    }

    /// Joins nodes that do not know each other into one cluster.
    fn join(&self) -> Result<(), String> {
        for (number, node) in self.nodes.iter().enumerate() {
            let epoch = (number + 1).to_string();
            node.command(&["CLUSTER", "SET-CONFIG-EPOCH", &epoch])?.ok()?;
            if let Some([first, last]) = SHARES.get(number) {
                node.command(&["CLUSTER", "ADDSLOTSRANGE", first, last])?.ok()?;
            }
        }
        // Every node meets every other: waiting for gossip would take longer.
        for number in 0..self.nodes.len() {
            (0..number).try_for_each(|known| self.meet(number, known))?;
        }
        for (number, node) in self.nodes.iter().enumerate().skip(MASTERS) {
            let master = self.id(number % MASTERS);
            // The node refuses until the handshake is complete.
            wait_until(START_DEADLINE, || node.command(&["CLUSTER", "REPLICATE", master])?.ok())?;
        }
        self.wait_until_healthy(START_DEADLINE)
    }

    fn meet(&self, node: usize, known: usize) -> Result<(), String> {
        let ports = self.client_ports();
        let (port, bus) = (ports[known].to_string(), self.bus_port(known)?.to_string());
        self.nodes[node].command(&["CLUSTER", "MEET", "127.0.0.1", &port, &bus])?.ok().map(drop)
    }

    fn bus_port(&self, node: usize) -> Result<u16, String> {
        let port = self.nodes[node].bus.as_ref().map(Port::number);
        port.ok_or_else(|| format!("node {node} has no bus"))
    }

    /// The nodes that are neither killed nor paused, with their numbers.
    fn running(&self) -> impl Iterator<Item = (usize, &RedisServer)> {
        self.nodes.iter().enumerate().filter(|(_, node)| node.is_running())
    }

    fn view(&self, node: usize) -> Result<ClusterView, String> {
        let reply = self.nodes[node].command(&["CLUSTER", "NODES"])?.ok()?;
        view::parse(&reply.to_string()).map_err(|error| format!("node {node}: {error}: {reply}"))
    }

    /// Describes why the cluster is not healthy yet.
    fn ailment(&self) -> Result<(), String> {
        let mut views = Vec::new();
        for (number, node) in self.running() {
            let state = node.command(&["CLUSTER", "INFO"])?.ok()?.to_string();
            if !state.contains("cluster_state:ok") {
                return Err(format!("node {number}: {state}"));
            }
            views.push((number, self.view(number)?));
        }
        let mut covered = 0;
        for (number, view) in &views {
            let own = view.node(self.id(*number)).ok_or("a node does not know itself")?;
            for (other, theirs) in &views {
                theirs.agrees(own).map_err(|error| format!("node {other}: {error}"))?;
            }
            match &own.master {
                None => covered += own.slots.len(),
                Some(_) => self.nodes[*number].follows(0)?,
            }
        }
        if covered == usize::from(SLOTS) {
            return Ok(());
        }
        Err(format!("{covered} slots are with running nodes"))
    }
}

impl ClusterPlan {
    fn new(binary: &str, args: &[&str], behind_proxies: bool) -> Self {
        let login = password(args).map(|password| ["--masterauth", password]);
        let args = login.iter().flatten().chain(args).map(|arg| (*arg).to_owned()).collect();
        Self { binary: binary.to_owned(), args, behind_proxies }
    }

    fn start_node(&self) -> Result<(RedisServer, Option<FaultProxy>), String> {
        let (port, bus) = (Port::claim()?, Port::claim()?);
        let proxy =
            if self.behind_proxies { Some(FaultProxy::start(port.number())?) } else { None };
        let announced = proxy.as_ref().map_or(port.number(), FaultProxy::port).to_string();
        let bus_text = bus.number().to_string();
        let mut args = vec!["--cluster-enabled", "yes", "--cluster-config-file", "nodes.conf"];
        args.extend(["--cluster-port", &bus_text, "--cluster-announce-bus-port", &bus_text]);
        args.extend(["--cluster-announce-ip", "127.0.0.1", "--cluster-announce-port", &announced]);
        args.extend(["--cluster-node-timeout", "1000"]);
        args.extend(["--cluster-allow-replica-migration", "no"]);
        args.extend(self.args.iter().map(String::as_str));
        let mut node = RedisServer::start_on(port, &self.binary, &args)?;
        node.bus = Some(bus);
        Ok((node, proxy))
    }
}

fn my_id(node: &RedisServer) -> Result<String, String> {
    let reply = node.command(&["CLUSTER", "MYID"])?.ok()?;
    let id = reply.as_text().map(str::to_owned);
    id.ok_or_else(|| format!("no name for a node: {reply}"))
}

/// The slot of a key: CRC-16 of the key, or of its hash tag, modulo the number of slots.
pub fn slot_of(key: &[u8]) -> u16 {
    let tag = || {
        let open = key.iter().position(|byte| *byte == b'{')?;
        let inside = &key[open + 1..];
        let close = inside.iter().position(|byte| *byte == b'}')?;
        (close > 0).then_some(&inside[..close])
    };
    Crc::<u16>::new(&CRC_16_XMODEM).checksum(tag().unwrap_or(key)) % SLOTS
}
