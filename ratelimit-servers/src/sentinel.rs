//! [`RedisSentinels`]: a master, its replica, and three sentinels that fail over.

use std::time::Duration;

use crate::keeper::{Recipe, new_directory};
use crate::port::Port;
use crate::{RedisServer, RespValue, START_DEADLINE, on_free_ports, password, wait_until};

const SERVICE: &str = "mymaster";

/// The milliseconds after which each sentinel considers a silent server dead. The last one is slow
/// to stand for election, so that it votes for one of the others: three simultaneous candidates all
/// lose.
const PATIENCE_MS: [u16; 3] = [1000, 1000, 2000];
/// How long an election or a promotion may take; half the time until the next attempt.
const FAILOVER_TIMEOUT_MS: u16 = 2000;

/// The periods of the sentinels' own activity in milliseconds: shorter than in production, to keep
/// tests fast. After a stall of two seconds or a jump of the clock, a sentinel only watches for the
/// tilt period, which is 30 s by default.
const PACE: [&str; 8] =
    ["INFO-PERIOD", "500", "PUBLISH-PERIOD", "250", "PING-PERIOD", "200", "TILT-PERIOD", "1000"];

/// A master, a replica and three sentinels, in processes of their own, which end with the test.
///
/// In the methods below, a running server is one that is neither killed nor
/// [paused](RedisServer::pause).
///
/// Servers are numbered: 0 is the initial master, 1 its replica. A server that does not answer
/// counts as dead after a second.
#[derive(Debug)]
pub struct RedisSentinels {
    servers: Vec<RedisServer>,
    sentinels: Vec<RedisServer>,
}

impl RedisSentinels {
    /// Starts the first of the [`binaries`](RedisServer::binaries).
    ///
    /// # Errors
    /// The servers did not start; the text includes what they said.
    pub fn start() -> Result<Self, String> {
        Self::start_with(&RedisServer::binaries()[0], &[])
    }

    /// Starts master and replica with additional arguments. If these set `--requirepass`, replica
    /// and sentinels use the password; the sentinels themselves demand none.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub fn start_with(binary: &str, args: &[&str]) -> Result<Self, String> {
        let (password, mut args) = (password(args), args.to_vec());
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
        let pace = [&["SENTINEL", "DEBUG"], &PACE[..]].concat();
        for sentinel in &started.sentinels {
            sentinel.command(&pace)?.ok()?;
        }
        started.wait_until_healthy(START_DEADLINE)?;
        Ok(started)
    }

    /// The URL of the sentinels, with the name of the master:
    /// `redis-sentinel://127.0.0.1:7000,127.0.0.1:7001,127.0.0.1:7002/mymaster`.
    pub fn url(&self) -> String {
        let addresses: Vec<String> =
            self.ports().iter().map(|port| format!("127.0.0.1:{port}")).collect();
        format!("redis-sentinel://{}/{SERVICE}", addresses.join(","))
    }

    /// The ports of the sentinels.
    pub fn ports(&self) -> Vec<u16> {
        self.sentinels.iter().map(RedisServer::port).collect()
    }

    /// The name under which the sentinels know the master, whichever server it is.
    pub const fn service(&self) -> &'static str {
        SERVICE
    }

    /// The servers that the sentinels watch.
    pub fn servers(&self) -> &[RedisServer] {
        &self.servers
    }

    /// The sentinels, which answer commands as well.
    pub fn sentinels(&self) -> &[RedisServer] {
        &self.sentinels
    }

    /// The number of the current master, according to the first sentinel.
    ///
    /// # Errors
    /// The error that it replied.
    pub fn master(&self) -> Result<usize, String> {
        let port = named_master(&self.sentinels[0])?;
        let found = self.servers.iter().position(|server| server.port() == port);
        found.ok_or_else(|| format!("the sentinels name port {port}, which is none of ours"))
    }

    /// Kills the master, as a crash would, and returns the port of the new one when all sentinels
    /// agree on it.
    ///
    /// # Errors
    /// No replica runs that could take over, or none took over in time.
    pub fn kill_master(&self) -> Result<u16, String> {
        let before = self.master()?;
        self.servers[before].stop();
        self.wait_for_another_than(before, || Ok(()))
    }

    /// Makes the sentinels fail over while the master is alive, and returns the port of the new one
    /// when the old one replicates it.
    ///
    /// # Errors
    /// There is no replica that could take over, or the error that a sentinel replied.
    pub fn fail_over(&self) -> Result<u16, String> {
        let before = self.master()?;
        let sentinel = &self.sentinels[0];
        let ask = || sentinel.command(&["SENTINEL", "FAILOVER", SERVICE])?.ok().map(drop);
        ask()?;
        let port = self.wait_for_another_than(before, || {
            // On a busy machine a promotion can take longer than the failover timeout. The sentinel
            // then abandons the failover, and does not repeat one that it was told to begin.
            if self.is_idle(sentinel, before)? { ask() } else { Ok(()) }
        })?;
        self.wait_until_healthy(START_DEADLINE)?;
        Ok(port)
    }

    /// Starts all killed servers again, as replicas of the current master. Returns when the group
    /// is healthy.
    ///
    /// # Errors
    /// A server did not start or was not accepted.
    pub fn restart_dead(&self) -> Result<(), String> {
        let master = named_master(&self.sentinels[0])?.to_string();
        for server in self.servers.iter().filter(|server| server.pid().is_none()) {
            server.restart()?;
            if server.port().to_string() != master {
                server.command(&["REPLICAOF", "127.0.0.1", &master])?.ok()?;
            }
        }
        self.wait_until_healthy(START_DEADLINE)
    }

    /// Waits until all sentinels name the same running master and could fail over, and every other
    /// running server is a connected replica of it that the sentinels know as such.
    ///
    /// # Errors
    /// What was still wrong at the deadline, in the servers' own words.
    pub fn wait_until_healthy(&self, deadline: Duration) -> Result<(), String> {
        wait_until(deadline, || self.ailment())
    }

    /// Whether a sentinel watches this master and fails nothing over, by one reply: a failover that
    /// ends in between is not repeated.
    fn is_idle(&self, sentinel: &RedisServer, master: usize) -> Result<bool, String> {
        let watched = sentinel.command(&["SENTINEL", "MASTER", SERVICE])?.ok()?;
        let flags = field(&watched, "flags").unwrap_or_default();
        Ok(field(&watched, "port") == Some(&*self.servers[master].port().to_string())
            && flags.split(',').all(|flag| flag != "failover_in_progress"))
    }

    /// Waits until the sentinels agree on another master. As long as they name this one, `urge` is
    /// called.
    fn wait_for_another_than(
        &self,
        before: usize,
        urge: impl Fn() -> Result<(), String>,
    ) -> Result<u16, String> {
        let port = wait_until(START_DEADLINE, || {
            let master = self.agreed_master()?;
            if master == before {
                urge()?;
                return Err(format!("the sentinels still name server {before}"));
            }
            self.is_master(master)?;
            Ok(self.servers[master].port())
        });
        port.map_err(|error| format!("no failover {error}"))
    }

    /// The master that all sentinels name.
    fn agreed_master(&self) -> Result<usize, String> {
        let master = self.master()?;
        for sentinel in &self.sentinels {
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

    /// Describes why the group is not healthy yet.
    fn ailment(&self) -> Result<(), String> {
        let master = self.agreed_master()?;
        self.is_master(master)?;
        let replica = &self.servers[1 - master];
        let (port, master_port) = (replica.port(), self.servers[master].port());
        let (port, master_port) = (port.to_string(), master_port.to_string());
        let due = [
            ("port", &*port),
            ("flags", "slave"),
            ("master-port", &master_port),
            ("master-link-status", "ok"),
        ];
        let fits = |reply: &RespValue| due.iter().all(|(n, v)| field(reply, n) == Some(*v));
        if replica.is_running() {
            replica.follows(0)?;
        }
        for sentinel in &self.sentinels {
            sentinel.command(&["SENTINEL", "CKQUORUM", SERVICE])?.ok()?;
            let known = sentinel.command(&["SENTINEL", "REPLICAS", SERVICE])?.ok()?;
            if replica.is_running() && !known.as_array().iter().any(fits) {
                return Err(format!("a sentinel does not trust the replica {port}: {known}"));
            }
        }
        Ok(())
    }
}

/// The port of the master, according to this sentinel.
fn named_master(sentinel: &RedisServer) -> Result<u16, String> {
    let reply = sentinel.command(&["SENTINEL", "GET-MASTER-ADDR-BY-NAME", SERVICE])?.ok()?;
    let port = reply.as_array().get(1).and_then(RespValue::as_text);
    port.and_then(|port| port.parse().ok()).ok_or_else(|| format!("a sentinel replied {reply}"))
}

/// A field of a reply that alternates names and values.
fn field<'a>(description: &'a RespValue, name: &str) -> Option<&'a str> {
    let mut pairs = description.as_array().chunks_exact(2);
    pairs.find(|pair| pair[0].as_text() == Some(name)).and_then(|pair| pair[1].as_text())
}

/// Starts sentinels that know each other and all servers, the master first, from the beginning:
/// discovery would take seconds.
fn start_sentinels(
    binary: &str,
    [master, replica]: [u16; 2],
    password: Option<&str>,
) -> Result<Vec<RedisServer>, String> {
    let ports = PATIENCE_MS.map(|_| Port::claim()).into_iter().collect::<Result<Vec<_>, _>>()?;
    let known: Vec<_> = (1..).zip(&ports).map(|(id, port)| (port.number(), id)).collect();
    let start = |((port, own), patience_ms): ((Port, usize), u16)| {
        let directory = new_directory();
        let mut lines = vec![
            // The directory's name may contain spaces.
            format!("dir \"{}\"", directory.display()),
            format!("port {}\nbind 127.0.0.1", port.number()),
            format!("sentinel myid {own:040x}"),
            format!("sentinel monitor {SERVICE} 127.0.0.1 {master} 2"),
            format!("sentinel down-after-milliseconds {SERVICE} {patience_ms}"),
            format!("sentinel failover-timeout {SERVICE} {FAILOVER_TIMEOUT_MS}"),
            format!("sentinel known-replica {SERVICE} 127.0.0.1 {replica}"),
        ];
        lines.extend(password.map(|word| format!("sentinel auth-pass {SERVICE} {word}")));
        for (port, id) in known.iter().filter(|(_, id)| *id != own) {
            lines.push(format!("sentinel known-sentinel {SERVICE} 127.0.0.1 {port} {id:040x}"));
        }
        // Sentinels read their state from this file only.
        let file = directory.join("sentinel.conf").to_string_lossy().into_owned();
        let words = vec![file, "--sentinel".to_owned()];
        let files = vec![("sentinel.conf", lines.join("\n") + "\n")];
        let recipe = Recipe { binary: binary.to_owned(), words, directory, files };
        RedisServer::start_recipe(recipe, &[], port, None)
    };
    ports.into_iter().zip(1..).zip(PATIENCE_MS).map(start).collect()
}
