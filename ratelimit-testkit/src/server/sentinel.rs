//! [`RedisSentinels`]: a master, its replica, and three sentinels that fail over.

use std::thread;
use std::time::Duration;

use super::keeper::{Recipe, new_directory};
use super::port::Port;
use super::{Door, RedisServer, RespValue, on_free_ports, password, wait_until};

const SENTINELS: usize = 3;
const SERVICE: &str = "mymaster";
/// How long to come up, or to fail over, may take: an election that nobody wins is held again after some
/// seconds.
const START_DEADLINE: Duration = Duration::from_secs(30);

/// After how many milliseconds each sentinel takes a silent server for dead. The last one is slow to stand for
/// election itself, so that it votes for one of the others: three who stand at once all lose.
const PATIENCE_MS: [u16; SENTINELS] = [1000, 1000, 2000];
/// How long an election, or a promotion, may take; half as long as until the next attempt.
const FAILOVER_TIMEOUT_MS: u16 = 2000;

/// Milliseconds between what sentinels do of themselves: less than in earnest, so that a test need not wait.
const PACE: [&str; 6] = ["INFO-PERIOD", "500", "PUBLISH-PERIOD", "250", "PING-PERIOD", "200"];

/// A master, a replica and three sentinels, in processes of their own, that end with the test.
///
/// What is said below of running ones is said of those that are neither killed nor
/// [paused](RedisServer::pause).
///
/// A server is named by its number: 0 is the master that it begins with, 1 its replica. A server that does
/// not answer is taken for dead after a second.
#[derive(Debug)]
pub struct RedisSentinels {
    servers: Vec<RedisServer>,
    sentinels: Vec<RedisServer>,
}

impl RedisSentinels {
    /// Starts the first of the [`binaries`](RedisServer::binaries).
    ///
    /// # Errors
    /// Why it did not come up, and what the servers said.
    pub fn start() -> Result<Self, String> {
        Self::start_with(&RedisServer::binaries()[0], &[])
    }

    /// Starts master and replica with more arguments. If they set `--requirepass`, replica and sentinels
    /// know the password; the sentinels themselves ask for none.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(binary: &str, args: &[&str]) -> Result<Self, String> {
        let mut args = args.to_vec();
        let owned: Vec<String> = args.iter().map(|arg| (*arg).to_owned()).collect();
        let password = password(&owned);
        if let Some(password) = password {
            args.extend(["--masterauth", password]);
        }
        let master = RedisServer::start_with(binary, &args)?;
        let master_port = master.port().to_string();
        args.extend(["--replicaof", "127.0.0.1", &master_port]);
        let replica = RedisServer::start_with(binary, &args)?;
        let ports = [master.port(), replica.port()];
        let sentinels = on_free_ports(|| start_sentinels(binary, ports, password))?;
        let started = Self { servers: vec![master, replica], sentinels };
        started.set_pace()?;
        started.wait_until_healthy(START_DEADLINE)?;
        Ok(started)
    }

    /// Where the sentinels listen, and the name of what they watch:
    /// `redis-sentinel://127.0.0.1:7000,127.0.0.1:7001,127.0.0.1:7002/mymaster`.
    #[must_use]
    pub fn url(&self) -> String {
        let addresses: Vec<String> =
            self.ports().iter().map(|port| format!("127.0.0.1:{port}")).collect();
        format!("redis-sentinel://{}/{SERVICE}", addresses.join(","))
    }

    /// The ports of the sentinels.
    #[must_use]
    pub fn ports(&self) -> Vec<u16> {
        self.sentinels.iter().map(RedisServer::port).collect()
    }

    /// The name of the master, whichever server it is.
    #[must_use]
    #[allow(clippy::unused_self, reason = "reads like a question to the sentinels")]
    pub const fn service(&self) -> &'static str {
        SERVICE
    }

    /// The servers that are watched.
    #[must_use]
    pub fn servers(&self) -> &[RedisServer] {
        &self.servers
    }

    /// The sentinels, which understand commands as well.
    #[must_use]
    pub fn sentinels(&self) -> &[RedisServer] {
        &self.sentinels
    }

    /// The port of the master, as the first running sentinel knows it.
    ///
    /// # Errors
    /// None runs, or what it replied instead.
    pub fn master_port(&self) -> Result<u16, String> {
        let first = self.running_sentinels().next();
        named_master(first.ok_or("no sentinel runs")?)
    }

    /// The number of the server that is the master.
    ///
    /// # Errors
    /// As [`master_port`](Self::master_port).
    pub fn master(&self) -> Result<usize, String> {
        let port = self.master_port()?;
        let found = self.servers.iter().position(|server| server.port() == port);
        found.ok_or_else(|| format!("the sentinels name port {port}, which is none of ours"))
    }

    /// Kills the master, as a crash would, and returns the port of the new one when all running sentinels
    /// have agreed on it.
    ///
    /// # Errors
    /// No replica runs that could take over, or none has in time.
    pub fn kill_master(&self) -> Result<u16, String> {
        let before = self.master()?;
        self.servers[before].kill();
        self.wait_for_another_than(before)
    }

    /// Makes the sentinels fail over while the master lives, and returns the port of the new one when the old
    /// one follows it.
    ///
    /// # Errors
    /// There is no replica that could take over, or what a sentinel replied instead.
    pub fn fail_over(&self) -> Result<u16, String> {
        let before = self.master()?;
        let sentinel = self.running_sentinels().next().ok_or("no sentinel runs")?;
        sentinel.command(&["SENTINEL", "FAILOVER", SERVICE])?.ok()?;
        let port = self.wait_for_another_than(before)?;
        self.wait_until_healthy(START_DEADLINE)?;
        Ok(port)
    }

    /// Kills a sentinel, as a crash would.
    pub fn kill_sentinel(&self, sentinel: usize) {
        self.sentinels[sentinel].kill();
    }

    /// Starts again whatever has been killed: sentinels as themselves, servers as replicas of the
    /// master of now. Returns when all is well.
    ///
    /// # Errors
    /// Why it did not start or is not taken in.
    pub fn restart_dead(&self) -> Result<(), String> {
        for sentinel in self.sentinels.iter().filter(|sentinel| sentinel.pid().is_none()) {
            sentinel.revive()?;
        }
        self.set_pace()?;
        let master = self.master_port()?.to_string();
        for server in self.servers.iter().filter(|server| server.pid().is_none()) {
            server.revive()?;
            if server.port().to_string() != master {
                server.command(&["REPLICAOF", "127.0.0.1", &master])?.ok()?;
            }
        }
        self.wait_until_healthy(START_DEADLINE)
    }

    /// Waits until all running sentinels name the same running master and could fail over, and every other
    /// running server is a replica of it that is in touch, and known as such.
    ///
    /// # Errors
    /// What was still wrong when the time was over, in the servers' own words.
    pub fn wait_until_healthy(&self, deadline: Duration) -> Result<(), String> {
        wait_until(deadline, || self.ailment())
    }

    fn running_sentinels(&self) -> impl Iterator<Item = &RedisServer> {
        self.sentinels.iter().filter(|sentinel| sentinel.is_running())
    }

    fn set_pace(&self) -> Result<(), String> {
        let words = [&["SENTINEL", "DEBUG"], &PACE[..]].concat();
        self.running_sentinels().try_for_each(|sentinel| sentinel.command(&words)?.ok().map(drop))
    }

    fn wait_for_another_than(&self, before: usize) -> Result<u16, String> {
        let port = wait_until(START_DEADLINE, || {
            let master = self.agreed_master()?;
            if master == before {
                return Err(format!("the sentinels still name server {before}"));
            }
            self.is_master(master)?;
            Ok(self.servers[master].port())
        });
        port.map_err(|told| format!("no failover {told}"))
    }

    /// The master that all running sentinels name.
    fn agreed_master(&self) -> Result<usize, String> {
        let master = self.master()?;
        for sentinel in self.running_sentinels() {
            let named = named_master(sentinel)?;
            if named != self.servers[master].port() {
                return Err(format!("one sentinel names server {master}, another port {named}"));
            }
        }
        Ok(master)
    }

    fn is_master(&self, server: usize) -> Result<(), String> {
        if !self.servers[server].is_running() {
            return Err(format!("the sentinels name server {server}, which does not run"));
        }
        let role = self.servers[server].command(&["ROLE"])?;
        if role.as_array().first().and_then(RespValue::as_text) == Some("master") {
            return Ok(());
        }
        Err(format!("server {server} is not a master: {role}"))
    }

    /// What keeps it from being well, if anything.
    fn ailment(&self) -> Result<(), String> {
        let master = self.agreed_master()?;
        self.is_master(master)?;
        let master_port = self.servers[master].port().to_string();
        let replicas: Vec<&RedisServer> = self
            .servers
            .iter()
            .filter(|server| server.is_running() && server.port().to_string() != master_port)
            .collect();
        for replica in &replicas {
            replica.follows(0)?;
        }
        for sentinel in self.running_sentinels() {
            sentinel.command(&["SENTINEL", "CKQUORUM", SERVICE])?.ok()?;
            let known = sentinel.command(&["SENTINEL", "REPLICAS", SERVICE])?.ok()?;
            for replica in &replicas {
                let port = replica.port().to_string();
                let due = [
                    ("port", port.as_str()),
                    ("flags", "slave"),
                    ("master-port", &master_port),
                    ("master-link-status", "ok"),
                ];
                let fits = |told: &RespValue| due.iter().all(|(n, v)| field(told, n) == Some(*v));
                if !known.as_array().iter().any(fits) {
                    return Err(format!("a sentinel does not trust the replica {port}: {known}"));
                }
            }
        }
        Ok(())
    }
}

/// The port of the master, as this sentinel knows it.
fn named_master(sentinel: &RedisServer) -> Result<u16, String> {
    let reply = sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE])?.ok()?;
    let port = reply.as_array().get(1).and_then(RespValue::as_text);
    port.and_then(|port| port.parse().ok()).ok_or_else(|| format!("a sentinel replied {reply}"))
}

/// A field of a description that lists names and values in turn.
fn field<'a>(description: &'a RespValue, name: &str) -> Option<&'a str> {
    let mut pairs = description.as_array().chunks_exact(2);
    pairs.find(|pair| pair[0].as_text() == Some(name)).and_then(|pair| pair[1].as_text())
}

/// Sentinels that know each other and all servers, the master first, from the beginning: to find each
/// other would take them seconds.
fn start_sentinels(
    binary: &str,
    servers: [u16; 2],
    password: Option<&str>,
) -> Result<Vec<RedisServer>, String> {
    let mut known = Vec::new();
    for number in 0..SENTINELS {
        known.push((Port::claim()?, format!("{:040x}", number + 1)));
    }
    let configurations: Vec<String> = (0..SENTINELS)
        .map(|own| {
            let others = known.iter().enumerate().filter(|(other, _)| *other != own);
            let others: Vec<_> = others.map(|(_, (port, id))| (port.number(), &id[..])).collect();
            let (port, id) = &known[own];
            let of_itself = format!("port {}\nbind 127.0.0.1\nsentinel myid {id}\n", port.number());
            of_itself + &configuration(PATIENCE_MS[own], servers, &others, password)
        })
        .collect();
    let starting = known.into_iter().zip(configurations);
    thread::scope(|scope| {
        let starting: Vec<_> = starting
            .map(|((port, _), text)| scope.spawn(move || start_sentinel(binary, port, &text)))
            .collect();
        let panicked = |_| Err("a thread that starts a sentinel panicked".to_owned());
        starting.into_iter().map(|sentinel| sentinel.join().unwrap_or_else(panicked)).collect()
    })
}

fn start_sentinel(binary: &str, port: Port, configuration: &str) -> Result<RedisServer, String> {
    let directory = new_directory();
    let file = directory.join("sentinel.conf").to_string_lossy().into_owned();
    // Sentinels take what they keep from their file only. The name may have spaces in it.
    let configuration = format!("dir \"{}\"\n{configuration}", directory.display());
    let words = vec![file, "--sentinel".to_owned()];
    let files = vec![("sentinel.conf", configuration)];
    let recipe = Recipe { binary: binary.to_owned(), words, directory, files };
    RedisServer::start_recipe(recipe, &[], port, Door::Open)
}

/// What a `sentinel.conf` says of the others.
fn configuration(
    patience_ms: u16,
    [master, replica]: [u16; 2],
    others: &[(u16, &str)],
    password: Option<&str>,
) -> String {
    let mut lines = vec![
        format!("sentinel monitor {SERVICE} 127.0.0.1 {master} 2"),
        format!("sentinel down-after-milliseconds {SERVICE} {patience_ms}"),
        format!("sentinel failover-timeout {SERVICE} {FAILOVER_TIMEOUT_MS}"),
        format!("sentinel known-replica {SERVICE} 127.0.0.1 {replica}"),
    ];
    if let Some(password) = password {
        lines.push(format!("sentinel auth-pass {SERVICE} {password}"));
    }
    for (port, id) in others {
        lines.push(format!("sentinel known-sentinel {SERVICE} 127.0.0.1 {port} {id}"));
    }
    lines.join("\n") + "\n"
}
