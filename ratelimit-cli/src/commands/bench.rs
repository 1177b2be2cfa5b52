//! `ratelimit bench`.

use std::fs::File;
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use ratelimit_core::{Limits, Policy, RateLimiter, Store};
use ratelimit_memory::MemoryStore;
use ratelimit_redis::{Lua, Mode};

use crate::args::BenchArgs;
use crate::bench::{Context, CpuTime, Load, Row, Servers, callers, one_limit, to_text};
use crate::failure::Failure;
use crate::files::{self, FileId};
use crate::interrupt::{self, Interrupt};
use crate::policy;
use crate::store::{self, Keys, Redis, StoreUrl};

pub(super) fn run(args: &BenchArgs) -> Result<u8, Failure> {
    let limits = match &args.policy {
        Some(path) => policy::read(path)?,
        None => one_limit(&args.limit)?,
    };
    let store = StoreUrl::parse(&args.store)?;
    let mode = mode(args, &store)?;
    let mut json = args.json.as_deref().map(|path| Json::open(args, path)).transpose()?;
    let interrupt = Interrupt::catch()?;
    let context = Context {
        store: store.display(),
        mode,
        limits: limits.iter().map(|limit| limit.algorithm().to_string()).collect(),
    };
    let bar = bar(args);
    let mut bench = Bench { args, limits, interrupt, bar, rows: Vec::new(), notes: Vec::new() };
    let done = match &store {
        StoreUrl::Memory => super::block_on(bench.in_memory(&store)),
        StoreUrl::Redis(url) => super::block_on(bench.on_redis(url, mode)),
    };
    bench.bar.finish_and_clear();
    bench.tell(&context, json.as_mut())?;
    done?;
    Ok(if bench.interrupt.is_raised() { interrupt::EXIT_CODE } else { 0 })
}

/// The mode of the store; the URL may not contradict the argument.
fn mode(args: &BenchArgs, store: &StoreUrl) -> Result<Option<&'static str>, Failure> {
    let asked = args.mode.map(crate::args::ModeArg::name);
    match (asked, store) {
        (Some(_), StoreUrl::Memory) => Err(Failure::input(
            "--mode is for Redis; leave it out, or name a store such as redis://host:port",
        )),
        (None, StoreUrl::Memory) => Ok(None),
        (asked, StoreUrl::Redis(url)) => match (asked, url.mode()) {
            (Some(asked), Some(given)) if asked != given => Err(Failure::input(format!(
                "--mode {asked} and mode={given} in --store {url} contradict each other; write one of them"
            ))),
            (asked, given) => Ok(Some(asked.or(given).unwrap_or(Lua::NAME))),
        },
    }
}

/// The destination of the JSON lines.
enum Json {
    StandardOutput,
    File(File, PathBuf),
}

impl Json {
    /// Opens the file, which keeps its contents until there is something to write.
    fn open(args: &BenchArgs, path: &Path) -> Result<Self, Failure> {
        if path.as_os_str() == "-" {
            return Ok(Self::StandardOutput);
        }
        let read = args.policy.as_deref().and_then(FileId::of);
        if read.is_some() && read == FileId::of(path) {
            return Err(Failure::input(format!(
                "--json {} would overwrite the policy; name another file",
                path.display()
            )));
        }
        Ok(Self::File(files::open(path)?, path.to_owned()))
    }

    fn write(&mut self, lines: &str) -> Result<(), Failure> {
        match self {
            Self::StandardOutput => super::print(lines.as_bytes()),
            Self::File(file, path) => {
                let written = files::empty(file).and_then(|()| file.write_all(lines.as_bytes()));
                written.map_err(|error| Failure::writing(path, &error))
            }
        }
    }
}

/// A progress bar over all runs, only on a terminal.
fn bar(args: &BenchArgs) -> ProgressBar {
    if !io::stderr().is_terminal() {
        return ProgressBar::hidden();
    }
    let runs = args.tasks.len() * args.keys.len();
    let length = args.duration.saturating_mul(u32::try_from(runs).unwrap_or(u32::MAX));
    let bar = ProgressBar::new(millis(length));
    match ProgressStyle::with_template("{bar:40} {percent:>3}%  {msg}") {
        Ok(style) => bar.with_style(style),
        Err(_) => bar,
    }
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

/// A benchmark and its results so far.
struct Bench<'a> {
    args: &'a BenchArgs,
    limits: Limits<Policy>,
    interrupt: Interrupt,
    bar: ProgressBar,
    rows: Vec<Row>,
    notes: Vec<String>,
}

impl Bench<'_> {
    async fn in_memory(&mut self, store: &StoreUrl) -> Result<(), Failure> {
        let keys = self.args.keys.iter().copied().max().unwrap_or(1);
        // Each limit keeps a state per caller.
        let states = self.limits.as_slice().len().saturating_mul(keys as usize).max(1_000);
        let memory = MemoryStore::builder().capacity(states.saturating_mul(2)).build();
        self.all(memory, &store.display(), None).await
    }

    async fn on_redis(&mut self, url: &Redis, mode: Option<&'static str>) -> Result<(), Failure> {
        let prefix = store::own_prefix("rl:bench-");
        // Refuse what this mode cannot decide before the first request.
        store::supports(mode, url, &self.limits)?;
        let keys = Keys { prefix: &prefix, secret: None };
        let (plain, _) = store::split_tag(&self.args.store)?;
        let servers = Servers::connect(url, &plain, &prefix).await?;
        let store = store::connect_in(mode, url, keys, &self.limits).await?;
        let done = self.all(store, &url.to_string(), Some(&servers)).await;
        self.bar.set_message("removing the keys");
        self.bar.tick();
        if let Err(reason) = servers.remove(&prefix).await {
            self.notes.push(format!(
                "not all keys of this benchmark were removed: {reason}. They begin with {prefix} and expire by \
                 themselves"
            ));
        }
        done
    }

    /// Runs every number of tasks with every number of keys.
    async fn all<S: Store<Policy> + 'static>(
        &mut self,
        store: S,
        name: &str,
        servers: Option<&Servers>,
    ) -> Result<(), Failure> {
        let limiter = Arc::new(RateLimiter::new(self.limits.clone(), store));
        let mut done = Duration::ZERO;
        for &keys in &self.args.keys {
            let callers = Arc::new(callers(&self.limits, keys));
            for &tasks in &self.args.tasks {
                if self.interrupt.is_raised() {
                    return Ok(());
                }
                let load = Load {
                    limiter: Arc::clone(&limiter),
                    callers: Arc::clone(&callers),
                    tasks,
                    length: self.args.duration,
                    interrupt: self.interrupt.clone(),
                    store: name.to_owned(),
                };
                let task = if tasks == 1 { "task" } else { "tasks" };
                let key = if keys == 1 { "key" } else { "keys" };
                self.bar.set_message(format!("{tasks} {task}, {keys} {key}"));
                self.one(load, (tasks, keys), done, servers).await?;
                done += self.args.duration;
            }
        }
        Ok(())
    }

    async fn one<S: Store<Policy> + 'static>(
        &mut self,
        load: Load<S>,
        (tasks, keys): (u32, u32),
        done: Duration,
        servers: Option<&Servers>,
    ) -> Result<(), Failure> {
        let before = self.cpu(servers).await;
        let ran = load.run(|elapsed| self.bar.set_position(millis(done + elapsed))).await?;
        let cpu = match before {
            Some(before) => self.cpu(servers).await.map(|after| after.since(before)),
            None => None,
        };
        let complete = ran.failure.is_none() && !self.interrupt.is_raised();
        self.rows.push(Row::new(tasks, keys, &ran, cpu, complete));
        match ran.failure {
            Some(failure) => Err(failure),
            None => Ok(()),
        }
    }

    /// The servers' processor time; adds a note if they do not report it.
    async fn cpu(&mut self, servers: Option<&Servers>) -> Option<CpuTime> {
        match servers?.cpu().await {
            Ok(time) => Some(time),
            Err(reason) => {
                let note = format!("the servers' processor time is left out: {reason}");
                if !self.notes.contains(&note) {
                    self.notes.push(note);
                }
                None
            }
        }
    }

    /// Prints the table, and writes the JSON lines.
    fn tell(&mut self, context: &Context, json: Option<&mut Json>) -> Result<(), Failure> {
        if self.interrupt.is_raised() {
            self.notes.push("interrupted: this is what was measured so far".to_owned());
        }
        // Without rows there is nothing to show, and the error explains why.
        if self.rows.is_empty() && self.notes.is_empty() {
            return Ok(());
        }
        let text = to_text(context, &self.rows, &self.notes);
        let Some(json) = json else { return super::print(text.as_bytes()) };
        let lines = self.rows.iter().map(|row| row.to_json(context)).collect::<Result<String, _>>();
        let lines = lines.map_err(|error| Failure::Store(format!("no JSON: {error}")))?;
        json.write(&lines)?;
        if matches!(json, Json::StandardOutput) {
            // With standard error closed, notes have nowhere to go.
            let _ = io::stderr().write_all(text.as_bytes());
            return Ok(());
        }
        super::print(text.as_bytes())
    }
}
