//! [`ModelServer`]: a server that runs the store's scripts, with a clock that may be wrong, and a
//! replica that lags.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ratelimit_redis::Reply;
use tokio::time::Instant;

use crate::keyspace::{Keyspace, Refused};
use crate::script;

/// A model of a Redis server. It executes one command at a time, at tokio's time.
#[derive(Debug)]
pub struct ModelServer {
    begin: Instant,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    keyspace: Keyspace,
    /// What a replica knows.
    replica: Keyspace,
    scripts: HashMap<String, Arc<str>>,
    /// The server's clock at the beginning.
    offset_us: u64,
    drift_ppm: i64,
    stands_us: Option<u64>,
    /// The error that it answers instead of executing anything.
    refuses: Option<&'static str>,
    /// How long each command takes, by the server's clock.
    command_us: u64,
    /// Forgets every so many writes, as a wrong server does.
    forgets_every: Option<u64>,
    executed: u64,
    /// When it executed commands.
    times_us: Vec<u64>,
}

impl ModelServer {
    /// A server whose clock shows this time now, and drifts.
    #[must_use]
    pub fn new(now_us: u64, drift_ppm: i64) -> Self {
        let state = State { offset_us: now_us, drift_ppm, ..State::default() };
        Self { begin: Instant::now(), state: Mutex::new(state) }
    }

    /// What its clock shows.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        self.time_of(&self.state())
    }

    /// Sets its clock, which stands still from then on.
    pub fn set(&self, now_us: u64) {
        self.state().stands_us = Some(now_us);
    }

    /// Sets how long each command takes, by the server's clock: at first no time passes.
    pub fn set_command_us(&self, command_us: u64) {
        self.state().command_us = command_us;
    }

    /// Sets its clock forward, or back.
    pub fn jump(&self, by_us: i64) {
        let mut state = self.state();
        state.offset_us = state.offset_us.saturating_add_signed(by_us);
    }

    /// Answers every command with this error, which begins with its code, until there is none.
    pub fn refuse(&self, error: Option<&'static str>) {
        self.state().refuses = error;
    }

    /// Forgets every so many scripts' writes.
    pub fn forget_every(&self, writes: u64) {
        self.state().forgets_every = Some(writes);
    }

    /// Its replica catches up.
    pub fn replicate(&self) {
        let mut state = self.state();
        state.replica = state.keyspace.clone();
    }

    /// Its replica takes over, without what it does not know yet. It knows no script.
    pub fn fail_over(&self) {
        let mut state = self.state();
        state.keyspace = state.replica.clone();
        state.scripts.clear();
    }

    /// It starts again, and has lost everything.
    pub fn restart(&self) {
        let mut state = self.state();
        (state.keyspace, state.replica) = Default::default();
        state.scripts.clear();
    }

    /// `SCRIPT FLUSH`.
    pub fn flush_scripts(&self) {
        self.state().scripts.clear();
    }

    /// What its clock showed when it executed each command.
    #[must_use]
    pub fn times_us(&self) -> Vec<u64> {
        self.state().times_us.clone()
    }

    /// Executes a command.
    ///
    /// # Errors
    /// The error that a server answers, from its code on.
    pub fn execute(&self, words: &[Vec<u8>]) -> Result<Reply, Refused> {
        let mut state = self.state();
        state.offset_us += state.command_us;
        let now_us = self.time_of(&state);
        state.times_us.push(now_us);
        if let Some(error) = state.refuses {
            return Err(error.to_owned());
        }
        let is_script = words.first().is_some_and(|name| name.starts_with(b"EVAL"));
        if !is_script {
            return state.keyspace.execute(now_us, words);
        }
        state.executed += 1;
        let is_forgotten =
            state.forgets_every.is_some_and(|every| state.executed.is_multiple_of(every));
        let before = is_forgotten.then(|| state.keyspace.clone());
        let reply = state.eval(now_us, words);
        if let Some(before) = before {
            state.keyspace = before;
        }
        reply
    }

    fn time_of(&self, state: &State) -> u64 {
        let passed_us = i128::try_from(self.begin.elapsed().as_micros()).unwrap_or(i128::MAX);
        let drifted_us = passed_us * i128::from(1_000_000 + state.drift_ppm) / 1_000_000;
        let runs_us = state.offset_us.saturating_add(u64::try_from(drifted_us).unwrap_or(0));
        state.stands_us.unwrap_or(runs_us)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// `EVAL text count key… argument…`, or `EVALSHA` with the text's hash.
    fn eval(&mut self, now_us: u64, words: &[Vec<u8>]) -> Result<Reply, Refused> {
        let [name, script, count, rest @ ..] = words else {
            return Err("ERR wrong number of arguments".into());
        };
        let script = String::from_utf8_lossy(script).into_owned();
        let (sha, text) = if name == b"EVAL" {
            let sha = sha1_smol::Sha1::from(&script).digest().to_string();
            (sha.clone(), self.scripts.entry(sha).or_insert_with(|| script.into()).clone())
        } else {
            let Some(text) = self.scripts.get(&script) else {
                return Err("NOSCRIPT No matching script. Please use EVAL.".into());
            };
            (script, Arc::clone(text))
        };
        let count =
            String::from_utf8_lossy(count).parse().ok().filter(|count| *count <= rest.len());
        let (keys, arguments) = rest.split_at(count.ok_or("ERR Number of keys is out of range")?);
        script::run(&mut self.keyspace, now_us, (&sha, &text), keys, arguments)
    }
}
