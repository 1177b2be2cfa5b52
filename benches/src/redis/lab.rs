//! [`Lab`]: a server, a connection to it, and a proxy that records the commands sent to it.

use std::error::Error;
use std::fs;
use std::future::Future;
use std::time::{Duration, Instant};

use futures_util::future::try_join_all;
use ratelimit_testkit::RedisServer;
use redis::Value;

use crate::keys::Key;

use super::replay::{Kept, Recorded, recorded, warming_up};
use super::wire::{Command, Recorder, Wire, command};

/// The longest wait for the server's thread to go to sleep; its time is read afterwards in any case.
const PATIENCE: Duration = Duration::from_millis(100);

/// A limiter that decides through the recorder.
pub(super) trait Subject {
    /// Makes the earlier charges of the caller.
    fn prepare(&self, caller: &Key) -> impl Future<Output = Result<(), Box<dyn Error>>>;

    /// Decides, and returns whether the request is admitted.
    fn decide(&self, caller: &Key) -> impl Future<Output = Result<bool, Box<dyn Error>>>;
}

/// A server of the benchmark's own, and the connections to it.
pub(super) struct Lab {
    server: RedisServer,
    pub(super) wire: Wire,
    recorder: Recorder,
}

impl Lab {
    pub(super) fn new() -> Result<Self, Box<dyn Error>> {
        let server = RedisServer::start()?;
        let wire = Wire::connect(server.port())?;
        let recorder = Recorder::start(server.port())?;
        Ok(Self { server, wire, recorder })
    }

    /// Where the server listens.
    pub(super) fn url(&self) -> String {
        self.server.url()
    }

    /// The server's port.
    #[cfg(test)]
    pub(super) fn port(&self) -> u16 {
        self.server.port()
    }

    /// The URL of the recording proxy in front of the server.
    pub(super) fn recorded_url(&self) -> String {
        self.recorder.url()
    }

    /// The name and version of the server, such as `redis 7.0.15`.
    pub(super) fn version(&mut self) -> Result<String, Box<dyn Error>> {
        let info = self.info("server")?;
        let field = |name: &str| {
            let line = info.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.map(|value| value.trim().to_owned())
        };
        let valkey = field("valkey_version").map(|version| format!("valkey {version}"));
        let redis = field("redis_version").map(|version| format!("redis {version}"));
        Ok(valkey.or(redis).unwrap_or_else(|| "a server that does not tell its version".into()))
    }

    /// Removes every key. Scripts stay loaded.
    pub(super) fn flush(&mut self) -> Result<(), Box<dyn Error>> {
        self.wire.ask(&command(&["FLUSHALL", "SYNC"])).map(drop)
    }

    /// Loads a script and returns its hash.
    pub(super) fn load(&mut self, script: &str) -> Result<String, Box<dyn Error>> {
        match self.wire.ask(&command(&["SCRIPT", "LOAD", script]))? {
            Value::BulkString(sha) => Ok(String::from_utf8(sha)?),
            other => Err(format!("SCRIPT LOAD: {other:?}").into()),
        }
    }

    /// The memory that the server has allocated, in bytes.
    pub(super) fn used_memory(&mut self) -> Result<u64, Box<dyn Error>> {
        let info = self.info("memory")?;
        let used = info.lines().find_map(|line| line.strip_prefix("used_memory:"));
        Ok(used.ok_or("INFO memory: no used_memory")?.trim().parse()?)
    }

    fn info(&mut self, section: &str) -> Result<String, Box<dyn Error>> {
        match self.wire.ask(&command(&["INFO", section]))? {
            Value::BulkString(text) => Ok(String::from_utf8(text)?),
            Value::VerbatimString { text, .. } => Ok(text),
            other => Err(format!("INFO {section}: {other:?}").into()),
        }
    }

    /// The server.
    pub(super) fn server(&self) -> &RedisServer {
        &self.server
    }

    /// The time that the server's main thread has been on a processor; `None` where there is no /proc.
    pub(super) fn cpu(&self) -> Option<Duration> {
        cpu_of(&self.server)
    }

    /// Records a decision of the subject, after one for another caller, which loads its scripts.
    pub(super) async fn record(
        &mut self,
        subject: &impl Subject,
        admits: bool,
    ) -> Result<Recorded, Box<dyn Error>> {
        let (first, caller) = (warming_up(), recorded());
        for caller in [&first, &caller] {
            subject.prepare(caller).await?;
        }
        subject.decide(&first).await?;
        let before = Kept::read(&mut self.wire, &caller)?;
        self.recorder.take()?;
        if subject.decide(&caller).await? != admits {
            let (is, due) = if admits { ("denied", "admitted") } else { ("admitted", "denied") };
            return Err(format!("the decision is {is} and should be {due}").into());
        }
        let (commands, replies) = self.recorder.take()?.into_iter().unzip();
        let after = Kept::read(&mut self.wire, &caller)?;
        Ok(Recorded { commands, replies, before, after })
    }

    /// Records the one command that decides so many requests of a caller at once: those that come while another
    /// request of the caller is under way.
    pub(super) async fn record_merged(
        &mut self,
        subject: &impl Subject,
        requests: u32,
    ) -> Result<Recorded, Box<dyn Error>> {
        let (first, caller) = (warming_up(), recorded());
        for caller in [&first, &caller] {
            subject.prepare(caller).await?;
        }
        let all =
            async |caller: &Key| try_join_all((0..=requests).map(|_| subject.decide(caller))).await;
        all(&first).await?;
        self.recorder.take()?;
        if !all(&caller).await?.into_iter().all(|admitted| admitted) {
            return Err("a request is denied and should be admitted".into());
        }
        let [_, (command, _)] = &self.recorder.take()?[..] else {
            return Err(format!("{requests} requests behind one do not share a command").into());
        };
        // Once more, with the keys before and after it.
        self.given(&[], vec![command.clone()])
    }

    /// Commands that are given instead of recorded, after these others have been sent.
    pub(super) fn given(
        &mut self,
        prepare: &[Command],
        commands: Vec<Command>,
    ) -> Result<Recorded, Box<dyn Error>> {
        for command in prepare {
            self.wire.ask(command)?;
        }
        let before = Kept::read(&mut self.wire, &recorded())?;
        let replies = commands.iter().map(|command| self.wire.ask(command));
        let replies = replies.collect::<Result<_, _>>()?;
        let after = Kept::read(&mut self.wire, &recorded())?;
        Ok(Recorded { commands, replies, before, after })
    }
}

/// The time that a server's main thread has been on a processor; `None` where there is no /proc.
pub(super) fn cpu_of(server: &RedisServer) -> Option<Duration> {
    let pid = server.pid()?;
    let thread = format!("/proc/{pid}/task/{pid}");
    // While a thread runs, /proc has its time up to the last tick of the clock; once it sleeps, all of it.
    let deadline = Instant::now() + PATIENCE;
    while is_running(&thread)? && Instant::now() < deadline {
        std::thread::yield_now();
    }
    let schedstat = fs::read_to_string(format!("{thread}/schedstat")).ok()?;
    let ns = schedstat.split_whitespace().next()?.parse().ok()?;
    Some(Duration::from_nanos(ns))
}

/// How often clients have called scripts and functions on a server since its counters were reset, by its own
/// `INFO commandstats`.
pub(super) fn script_calls(server: &RedisServer) -> Result<u64, Box<dyn Error>> {
    let calls = ["eval", "evalsha", "fcall"].map(|command| server.calls(command));
    Ok(calls.into_iter().sum::<Result<u64, _>>()?)
}

/// Whether a thread runs or waits for a processor; `None` where there is no /proc.
fn is_running(thread: &str) -> Option<bool> {
    let stat = fs::read_to_string(format!("{thread}/stat")).ok()?;
    let (_, state) = stat.rsplit_once(") ")?;
    Some(state.starts_with('R'))
}
