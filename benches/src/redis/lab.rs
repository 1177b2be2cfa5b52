//! [`Lab`]: a server, a connection to it, and a proxy that records the commands sent to it.

use std::fs;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use ratelimit_core::{AnyAlgorithm, Store};
use ratelimit_servers::RedisServer;
use redis::{Connection, ConnectionLike, InfoDict, Value};

use crate::measure::Fallible;
use crate::report::{BenchReport, Effort};

use super::recorder::{RecordedCommand, RecordingProxy, command};
use super::replay::{RecordedDecision, StoredKeys, recorded_caller, warming_up};
use super::situation::InStore;

/// The longest wait for the server's thread to go to sleep; its time is read afterwards in any
/// case.
const PATIENCE: Duration = Duration::from_millis(100);

/// How often requests are sent until they share a command.
const MOST_TRIES: usize = 16;

/// A server of the benchmark's own, the connections to it, and where measurements go.
pub(super) struct Lab {
    pub(super) quick: bool,
    pub(super) report: BenchReport,
    pub(super) server: RedisServer,
    pub(super) wire: Connection,
    recorder: RecordingProxy,
}

impl Lab {
    pub(super) fn new(effort: &Effort) -> Fallible<Self> {
        let server = RedisServer::start()?;
        let wire = redis::Client::open(server.url())?.get_connection()?;
        let recorder = RecordingProxy::start(server.port())?;
        Ok(Self { quick: effort.quick, report: BenchReport::new(effort)?, server, wire, recorder })
    }

    /// The URL of the recording proxy in front of the server.
    pub(super) fn recorded_url(&self) -> String {
        self.recorder.url()
    }

    /// The name and version of the server, such as `redis 7.0.15`.
    pub(super) fn version(&mut self) -> Fallible<String> {
        let info: InfoDict = redis::cmd("INFO").arg("server").query(&mut self.wire)?;
        let version = |name: &str| {
            Some(format!("{name} {}", info.get::<String>(&format!("{name}_version"))?))
        };
        Ok(version("valkey").or(version("redis")).unwrap_or_else(|| "an unknown server".into()))
    }

    /// Sends a command and returns its reply, or the error in it.
    pub(super) fn ask(&mut self, command: &RecordedCommand) -> Fallible<Value> {
        Ok(self.wire.req_packed_command(&redis::pack_command(command))?.extract_error()?)
    }

    /// Removes every key. Scripts stay loaded.
    pub(super) fn flush(&mut self) -> Fallible {
        self.ask(&command(&["FLUSHALL", "SYNC"])).map(drop)
    }

    /// Loads a script and returns its hash.
    pub(super) fn load(&mut self, script: &str) -> Fallible<String> {
        Ok(redis::cmd("SCRIPT").arg("LOAD").arg(script).query(&mut self.wire)?)
    }

    /// Records a decision, after one for another caller, which loads its scripts.
    pub(super) async fn record<S: Store<AnyAlgorithm>>(
        &mut self,
        subject: &InStore<S>,
        admits: bool,
    ) -> Fallible<RecordedDecision> {
        let (first, caller) = (warming_up(), recorded_caller());
        for caller in [&first, &caller] {
            subject.prepare(caller).await?;
        }
        subject.decide(&first).await?;
        let before = StoredKeys::read(&mut self.wire, &caller)?;
        self.recorder.take()?;
        if subject.decide(&caller).await? != admits {
            let (is, due) = if admits { ("denied", "admitted") } else { ("admitted", "denied") };
            return Err(format!("the decision is {is} and should be {due}").into());
        }
        let (commands, replies) = self.recorder.take()?.into_iter().unzip();
        let after = StoredKeys::read(&mut self.wire, &caller)?;
        Ok(RecordedDecision { commands, replies, before, after })
    }

    /// Records the one command that decides so many requests of a caller at once: those that come
    /// while as many other calls are out as may be.
    pub(super) async fn record_merged<S: Store<AnyAlgorithm>>(
        &mut self,
        subject: &InStore<S>,
        requests: u32,
    ) -> Fallible<RecordedDecision> {
        let (first, caller) = (warming_up(), recorded_caller());
        let shared = usize::try_from(requests)?;
        for caller in [&first, &caller] {
            subject.prepare(caller).await?;
        }
        subject.decide(&first).await?;
        self.recorder.take()?;
        // How many go alone is learnt by trying.
        let mut alone = 2;
        for _ in 0..MOST_TRIES {
            let all = (0..shared + alone).map(|_| subject.decide(&caller));
            if !try_join_all(all).await?.into_iter().all(|admitted| admitted) {
                return Err("a request is denied and should be admitted".into());
            }
            let mut commands = self.recorder.take()?;
            if commands.len() == alone + 1
                && let Some((command, _)) = commands.pop()
            {
                // Once more, with the keys before and after it.
                return self.replay_commands(&[], vec![command]);
            }
            alone = commands.len().saturating_sub(1);
        }
        Err(format!("{requests} requests do not share a command").into())
    }

    /// Commands that are given instead of recorded, after these others have been sent.
    pub(super) fn replay_commands(
        &mut self,
        prepare: &[RecordedCommand],
        commands: Vec<RecordedCommand>,
    ) -> Fallible<RecordedDecision> {
        for command in prepare {
            self.ask(command)?;
        }
        let before = StoredKeys::read(&mut self.wire, &recorded_caller())?;
        let replies = commands.iter().map(|command| self.ask(command));
        let replies = replies.collect::<Result<_, _>>()?;
        let after = StoredKeys::read(&mut self.wire, &recorded_caller())?;
        Ok(RecordedDecision { commands, replies, before, after })
    }
}

/// The time that a server's main thread has been on a processor; `None` where there is no /proc.
pub(super) fn cpu_of(server: &RedisServer) -> Option<Duration> {
    let pid = server.pid()?;
    let thread = format!("/proc/{pid}/task/{pid}");
    // While a thread runs, /proc has its time up to the last tick of the clock; once it sleeps, all
    // of it.
    let deadline = Instant::now() + PATIENCE;
    while is_running(&thread)? && Instant::now() < deadline {
        std::thread::yield_now();
    }
    let schedstat = fs::read_to_string(format!("{thread}/schedstat")).ok()?;
    let ns = schedstat.split_whitespace().next()?.parse().ok()?;
    Some(Duration::from_nanos(ns))
}

/// Whether a thread runs or waits for a processor; `None` where there is no /proc.
fn is_running(thread: &str) -> Option<bool> {
    let stat = fs::read_to_string(format!("{thread}/stat")).ok()?;
    let (_, state) = stat.rsplit_once(") ")?;
    Some(state.starts_with('R'))
}

/// How often clients have called scripts and functions on a server since its counters were reset,
/// by its own `INFO commandstats`.
pub(super) fn script_calls(server: &RedisServer) -> Result<u64, String> {
    ["eval", "evalsha", "fcall"].map(|command| server.calls(command)).into_iter().sum()
}
