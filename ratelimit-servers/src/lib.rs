//! Redis servers for the tests of this workspace. Each belongs to one test and ends with it.
//!
//! | type | for |
//! |---|---|
//! | [`RedisServer`] | a server to test on |
//! | [`RedisCluster`] | a cluster whose slots migrate and whose nodes fail and return |
//! | [`RedisSentinels`] | a master that three sentinels replace when it dies |
//! | `TlsServer` (feature `tls`) | a server with certificates of its own |
//! | [`ServerClock`] | a server whose clock the test sets |
//! | [`FaultProxy`] | a network that fails on purpose |
//! | `chromium`, `contrast` (feature `browser`) | a browser that looks at pages |
//! | [`RespClient`] | commands to a server, without a client crate |
//!
//! A server that does not start panics, or returns the reason and the remedy.

#![allow(
    clippy::panic,
    clippy::expect_used,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    clippy::unused_self,
    reason = "this crate runs in tests, where a panic reports a failure"
)]

#[cfg(feature = "browser")]
pub mod chromium;
mod clock;
mod cluster;
#[cfg(feature = "browser")]
pub mod contrast;
mod keeper;
mod port;
mod proxy;
mod resp;
mod sentinel;
#[cfg(feature = "tls")]
mod tls;

use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

pub use clock::ServerClock;
pub use cluster::{RedisCluster, slot_of};
pub use proxy::FaultProxy;
pub use resp::{RespClient, RespValue};
pub use sentinel::RedisSentinels;
#[cfg(feature = "tls")]
pub use tls::TlsServer;

use keeper::{Keeper, Recipe};
use port::Port;

/// The environment variable that names the servers to test on.
pub const SERVERS_VARIABLE: &str = "RATELIMIT_TEST_SERVERS";

/// How long a server may take to answer.
const DEADLINE: Duration = Duration::from_secs(10);
/// How long a cluster or sentinels may take to start or to fail over. A cluster refuses writes for
/// about two seconds, and an election without a winner is repeated after some.
const START_DEADLINE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(2);
const LONGEST_PAUSE: Duration = Duration::from_millis(32);
/// How often another port is tried when another process took the first one.
const ATTEMPTS: usize = 5;

/// A standalone Redis, or a server that speaks its protocol, on a port of its own.
///
/// The server persists nothing. It ends when the value is dropped, and also when the test process
/// is killed: a small shell runs between the two and kills the server when its own input ends.
#[derive(Debug)]
pub struct RedisServer {
    recipe: Recipe,
    args: Vec<String>,
    port: Port,
    /// Where the tests talk to it in plain text, if clients use TLS on its port.
    side_door: Option<Port>,
    /// The port on which it talks to other nodes of its cluster.
    bus: Option<Port>,
    paused: AtomicBool,
    /// `None` only until the server is started.
    keeper: Mutex<Option<Keeper>>,
}

impl RedisServer {
    /// The binaries to test on: those named in `RATELIMIT_TEST_SERVERS`, separated by colons or
    /// commas, or else `redis-server`.
    pub fn binaries() -> Vec<String> {
        let named = std::env::var(SERVERS_VARIABLE).unwrap_or_default();
        let binaries = named.split([':', ',']).map(str::trim).filter(|name| !name.is_empty());
        let mut binaries: Vec<String> = binaries.map(str::to_owned).collect();
        if binaries.is_empty() {
            binaries.push("redis-server".to_owned());
        }
        binaries
    }

    /// Starts the first of the [`binaries`](Self::binaries).
    ///
    /// # Errors
    /// The server did not start; the text gives the reason and the remedy.
    pub fn start() -> Result<Self, String> {
        Self::start_with(&Self::binaries()[0], &[])
    }

    /// Starts a server with additional arguments, such as `["--maxmemory", "1mb"]`.
    ///
    /// # Errors
    /// The server did not start; the text gives the reason and the remedy.
    pub fn start_with(binary: &str, args: &[&str]) -> Result<Self, String> {
        on_free_ports(|| Self::start_on(Port::claim()?, binary, args))
    }

    /// One server shared by all tests of a binary, started on first use.
    ///
    /// # Errors
    /// As [`RedisServer::start`].
    pub fn shared() -> Result<&'static Self, String> {
        static SHARED: OnceLock<Result<RedisServer, String>> = OnceLock::new();
        SHARED.get_or_init(Self::start).as_ref().map_err(Clone::clone)
    }

    /// Starts a replica of a running master and returns when it is in sync. The replica runs the
    /// same binary and uses the password that the master's arguments set.
    ///
    /// # Errors
    /// The replica did not start or did not get in sync; the text includes what it said.
    pub fn replica_of(master: &Self) -> Result<Self, String> {
        let port = master.port().to_string();
        let mut args = vec!["--replicaof", "127.0.0.1", &port];
        if let Some(password) = password(&master.args) {
            args.extend(["--masterauth", password, "--requirepass", password]);
        }
        let replica = Self::start_with(&master.recipe.binary, &args)?;
        let written = master.counter("replication", "master_repl_offset:")?;
        wait_until(DEADLINE, || replica.follows(written))?;
        Ok(replica)
    }

    /// The server's URL, for clients.
    pub fn url(&self) -> String {
        let scheme = if self.side_door.is_some() { "rediss" } else { "redis" };
        format!("{scheme}://127.0.0.1:{}", self.port())
    }

    /// The server's port, which stays the same across restarts.
    pub const fn port(&self) -> u16 {
        self.port.number()
    }

    /// The server's process id, for signals; `None` while it is stopped.
    pub fn pid(&self) -> Option<u32> {
        self.keeper().as_ref().and_then(Keeper::pid)
    }

    /// Kills the server, as a crash would. Its data is lost.
    pub fn stop(&self) {
        if let Some(keeper) = self.keeper().as_mut() {
            keeper.stop();
        }
    }

    /// Starts the server again, empty, on the same port and in the same directory. A node of a
    /// cluster keeps its id, its slots and the other nodes; a master accepts writes about two
    /// seconds later ([`wait_until_healthy`](RedisCluster::wait_until_healthy)).
    ///
    /// # Errors
    /// The server did not start.
    pub fn restart(&self) -> Result<(), String> {
        let mut kept = self.keeper();
        if let Some(keeper) = kept.as_mut() {
            keeper.stop();
        }
        self.paused.store(false, Ordering::Relaxed);
        let keeper = Keeper::start(&self.recipe)?;
        match self.wait_until_it_answers(&keeper) {
            Ok(()) => {
                kept.replace(keeper).map(Keeper::leave);
                Ok(())
            }
            Err(message) if kept.is_some() => Err(self.why(&message, &keeper.leave())),
            Err(message) => Err(self.why(&message, &keeper.end())),
        }
    }

    /// Sends a command on a new connection, with the password that the server's arguments set, and
    /// waits for the reply. For tests that use no client crate.
    ///
    /// # Errors
    /// The server is stopped, or did not reply within 10 seconds. An error reply is not an error
    /// here but [`RespValue::Error`].
    pub fn command(&self, words: &[&str]) -> Result<RespValue, String> {
        let message = |error| format!("{} on port {}: {error}", self.recipe.binary, self.port());
        self.client().and_then(|mut client| client.command(words)).map_err(message)
    }

    /// How often clients have called a command, such as `evalsha` or `cluster|slots`, since the
    /// server's counters were reset: by its `INFO commandstats`.
    ///
    /// # Errors
    /// The server is stopped, did not reply within 10 seconds, or replied with an error or with
    /// something else than a count.
    pub fn calls(&self, command: &str) -> Result<u64, String> {
        self.counter("commandstats", &format!("cmdstat_{command}:calls="))
    }

    /// How often the server has replied with an error of this code, such as `MOVED`: by its `INFO
    /// errorstats`.
    ///
    /// # Errors
    /// As [`calls`](Self::calls).
    pub fn errors(&self, code: &str) -> Result<u64, String> {
        self.counter("errorstats", &format!("errorstat_{code}:count="))
    }

    /// Opens a connection, with the password that the server's arguments set.
    ///
    /// # Errors
    /// The server is stopped.
    pub fn client(&self) -> Result<RespClient, String> {
        let door = self.side_door.as_ref().unwrap_or(&self.port);
        let mut client = RespClient::connect(door.number())?;
        if let Some(password) = password(&self.args) {
            client.command(&["AUTH", password])?.ok()?;
        }
        Ok(client)
    }

    /// Suspends the server's process, like a machine that hangs: connections stay open, and the
    /// operating system still accepts new ones.
    ///
    /// # Errors
    /// The server is stopped, or the signal could not be sent.
    pub fn pause(&self) -> Result<(), String> {
        let pid = self.signal("-STOP")?;
        self.paused.store(true, Ordering::Relaxed);
        // The signal takes effect a moment after it is sent.
        let stat = format!("/proc/{pid}/stat");
        if !Path::new(&stat).exists() {
            return Ok(());
        }
        wait_until(DEADLINE, || {
            let stat = std::fs::read_to_string(&stat).map_err(|error| error.to_string())?;
            let state = stat.rsplit(") ").next().unwrap_or_default();
            if state.starts_with('T') { Ok(()) } else { Err(format!("still runs: {stat}")) }
        })
    }

    /// Resumes the process after a [`pause`](Self::pause).
    ///
    /// # Errors
    /// The server is stopped, or the signal could not be sent.
    pub fn resume(&self) -> Result<(), String> {
        self.signal("-CONT")?;
        self.paused.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Whether the server is neither stopped nor paused.
    pub fn is_running(&self) -> bool {
        self.pid().is_some() && !self.paused.load(Ordering::Relaxed)
    }

    fn signal(&self, signal: &str) -> Result<u32, String> {
        let pid = self.pid().ok_or_else(|| format!("port {}: it is stopped", self.port()))?;
        let mut kill = Command::new("sh");
        kill.args(["-c", r#"kill "$1" "$2""#, "sh", signal, &pid.to_string()]);
        let message = match kill.output() {
            Ok(output) if output.status.success() => return Ok(pid),
            Ok(output) => String::from_utf8_lossy(&output.stderr).into_owned(),
            Err(error) => error.to_string(),
        };
        Err(format!("kill {signal} {pid}: {message}"))
    }

    fn start_on(port: Port, binary: &str, args: &[&str]) -> Result<Self, String> {
        let recipe = Recipe::of_a_server(port.number(), binary, args);
        Self::start_recipe(recipe, args, port, None)
    }

    fn start_recipe(
        recipe: Recipe,
        args: &[&str],
        port: Port,
        side_door: Option<Port>,
    ) -> Result<Self, String> {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        let (paused, keeper) = (AtomicBool::new(false), Mutex::new(None));
        let server = Self { recipe, args, port, side_door, bus: None, paused, keeper };
        server.restart()?;
        Ok(server)
    }

    fn keeper(&self) -> MutexGuard<'_, Option<Keeper>> {
        self.keeper.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_until_it_answers(&self, keeper: &Keeper) -> Result<(), String> {
        wait_until(DEADLINE, || match self.answers(keeper) {
            Err(message) if keeper.has_ended() => Ok(Err(message)),
            answer => answer.map(Ok),
        })?
    }

    /// Checks that this keeper's server answers, not another process on the same port.
    fn answers(&self, keeper: &Keeper) -> Result<(), String> {
        let mut client = self.client()?;
        let reply = client.command(&["INFO", "server"])?;
        let due = format!("process_id:{}\r\n", keeper.pid().unwrap_or_default());
        match &reply {
            RespValue::Text(text) if String::from_utf8_lossy(text).contains(&due) => {
                client.command(&["PING"])?.ok().map(drop)
            }
            // A server that demands another password or restricts commands cannot be identified
            // further.
            RespValue::Error(message)
                if message.starts_with("NOAUTH") || message.starts_with("NOPERM") =>
            {
                Ok(())
            }
            _ => Err(format!("it replied {reply}")),
        }
    }

    /// Why the server does not run, with the remedy if the binary is missing.
    fn why(&self, message: &str, log: &str) -> String {
        let (binary, port) = (&self.recipe.binary, self.port());
        match Command::new(binary).arg("--version").output() {
            Err(error) => format!(
                "the server {binary:?} could not be started: {error}. Install one (apt-get install \
                 redis-server, dnf install redis, brew install redis), or name it in {SERVERS_VARIABLE}"
            ),
            Ok(_) => format!("{binary} did not answer on port {port}: {message}. It said: {log}"),
        }
    }

    /// A number from the server's `INFO`, after this prefix of its line; 0 if there is none.
    fn counter(&self, section: &str, prefix: &str) -> Result<u64, String> {
        let reply = self.command(&["INFO", section])?.ok()?.to_string();
        let Some(rest) = reply.lines().find_map(|line| line.strip_prefix(prefix)) else {
            return Ok(0);
        };
        let number = rest.split(',').next().unwrap_or_default().trim();
        number.parse().map_err(|error| format!("{prefix}{rest}: {error}"))
    }

    /// Checks that the server is a replica with everything that its master had written up to this
    /// offset.
    fn follows(&self, written: u64) -> Result<(), String> {
        let role = self.command(&["ROLE"])?;
        let offset = role.as_array().get(4).and_then(RespValue::as_integer).unwrap_or(-1);
        let linked = role.as_array().get(3).is_some_and(|link| link.as_text() == Some("connected"));
        if linked && u64::try_from(offset).is_ok_and(|offset| offset >= written) {
            return Ok(());
        }
        Err(format!("the replica on port {} is not in sync: {role}", self.port()))
    }
}

/// Retries on other ports when another process took one.
fn on_free_ports<T>(start: impl Fn() -> Result<T, String>) -> Result<T, String> {
    let mut attempt = 1;
    loop {
        match start() {
            Err(message) if message.contains("in use") && attempt < ATTEMPTS => attempt += 1,
            outcome => return outcome,
        }
    }
}

/// Repeats the question until the answer is `Ok`.
///
/// # Errors
/// The last error, when the deadline has passed.
fn wait_until<T>(limit: Duration, mut ask: impl FnMut() -> Result<T, String>) -> Result<T, String> {
    let deadline = Instant::now() + limit;
    let mut pause = PAUSE;
    loop {
        match ask() {
            Err(message) if Instant::now() > deadline => {
                return Err(format!("not within {limit:?}: {message}"));
            }
            Err(_) => thread::sleep(pause),
            found => return found,
        }
        pause = LONGEST_PAUSE.min(pause * 2);
    }
}

/// The password that these arguments set.
fn password(args: &[impl AsRef<str>]) -> Option<&str> {
    let at = args.iter().rposition(|arg| arg.as_ref() == "--requirepass")?;
    args.get(at + 1).map(AsRef::as_ref)
}
