//! `ratelimit replay`.

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Write};
use std::path::Path;

use ratelimit_core::{Limits, Policy, RateLimiter, Store};
use ratelimit_memory::MemoryStore;

use crate::args::ReplayArgs;
use crate::caller::wanted;
use crate::failure::Failure;
use crate::input::{Lines, Source};
use crate::interrupt::{self, Interrupt};
use crate::progress::Bar;
use crate::replay::{Decisions, Ending, Outcome, Replay, Touched, forget};
use crate::store::{self, StoreUrl};
use crate::summary::{Context, Summary};
use crate::{policy, report, text};

/// How many keys the memory store of a replay may hold. A bound that no log reaches by right: at
/// some hundred bytes a key the machine's memory ends first.
const MEMORY_KEYS: usize = 64 << 20;
/// How much is written at once.
const BUFFER_BYTES: usize = 64 * 1024;

pub(super) fn run(args: &ReplayArgs) -> Result<u8, Failure> {
    let limits = policy::read(&args.policy)?;
    let store = StoreUrl::parse(&args.store)?;
    keep_inputs(args)?;
    let interrupt = Interrupt::catch()?;
    let (source, progress) = Source::open(&args.input, interrupt.clone())?;
    let lines = Lines::new(BufReader::new(source));
    let decisions = args.decisions.as_deref().map(open_decisions).transpose()?;
    // Opened now: to learn after an hour that it cannot be written would be late.
    let report = args.report.as_deref().map(create).transpose()?;

    let bar = Bar::new(progress);
    let job = Job { args, limits: limits.clone(), lines, interrupt, bar, decisions };
    let (outcome, notes) = match &store {
        StoreUrl::Memory => super::block_on(job.on_memory())?,
        StoreUrl::Redis(url) => super::block_on(job.on_redis(url))?,
    };
    finish(args, &limits, &store, outcome, notes, report)
}

/// Everything but the store.
struct Job<'a> {
    args: &'a ReplayArgs,
    limits: Limits<Policy>,
    lines: Lines<BufReader<Source>>,
    interrupt: Interrupt,
    bar: Bar,
    decisions: Option<Decisions>,
}

impl Job<'_> {
    async fn on_memory(self) -> Result<(Outcome, Vec<String>), Failure> {
        let store = MemoryStore::builder().capacity(MEMORY_KEYS).build();
        let limiter = RateLimiter::new(self.limits.clone(), store);
        let mut outcome = self.replay(&limiter, None).await;
        let overflowed = limiter.store().overflowed();
        if overflowed > 0 {
            outcome.ending = Ending::Failed(Failure::input(format!(
                "{} were decided on a bucket shared with others, because the memory store was \
                 full; replay a shorter log, or with --store redis://host:port",
                text::plural(overflowed, "check", "checks")
            )));
        }
        Ok((outcome, Vec::new()))
    }

    async fn on_redis(self, url: &str) -> Result<(Outcome, Vec<String>), Failure> {
        let prefix = store::replay_prefix();
        let limiter = RateLimiter::new(self.limits.clone(), store::connect(url, &prefix).await?);
        let mut notes = Vec::new();
        let outcome = self.replay(&limiter, Some(Touched::new())).await;
        // A store that has just failed would only make us wait for its next failure.
        let left = match &outcome.ending {
            Ending::Failed(Failure::Store(_)) if !outcome.touched.is_empty() => Some(String::new()),
            _ => forget(&limiter, &outcome.touched).await.err().map(|error| format!(": {error}")),
        };
        if let Some(why) = left {
            notes.push(format!(
                "the keys of this replay were not removed{why}. They begin with {prefix} and \
                 expire by themselves"
            ));
        }
        Ok((outcome, notes))
    }

    async fn replay<S: Store<Policy>>(
        self,
        limiter: &RateLimiter<S>,
        touched: Option<Touched>,
    ) -> Outcome {
        let replay = Replay {
            limiter,
            name: &self.args.input,
            lines: self.lines,
            format: self.args.format,
            strict: self.args.strict,
            decisions: self.decisions,
            interrupt: self.interrupt,
            bar: self.bar,
            touched,
        };
        replay.run().await
    }
}

/// Tells what came of it, on standard output and in the report.
fn finish(
    args: &ReplayArgs,
    limits: &Limits<Policy>,
    store: &StoreUrl,
    outcome: Outcome,
    mut notes: Vec<String>,
    report: Option<File>,
) -> Result<u8, Failure> {
    let Outcome { tally, format, ending, elapsed, .. } = outcome;
    if tally.nothing_applied() {
        let kinds: Vec<_> = tally.unlimited_kinds.iter().map(String::as_str).collect();
        notes.push(format!(
            "WARNING: no limit applied to any request, so all were admitted. {} This input has: \
             {}. Change `key` in {}, or the input",
            wanted(limits),
            kinds.join(", "),
            args.policy.display()
        ));
    }
    let ended = match ending {
        Ending::Complete => {
            notes.extend((tally.decisions() == 0).then(|| "the input has no requests".to_owned()));
            Ok(0)
        }
        Ending::Interrupted => {
            notes.push("interrupted: this is what was decided so far".to_owned());
            Ok(interrupt::EXIT_CODE)
        }
        Ending::Failed(Failure::BrokenPipe) => return Err(Failure::BrokenPipe),
        // Nothing to sum up; only a note of what was left behind.
        Ending::Failed(failure) if tally.decisions() + tally.bad_lines == 0 => {
            for note in notes {
                let _ = writeln!(io::stderr(), "note: {note}");
            }
            return Err(failure);
        }
        Ending::Failed(failure) if tally.decisions() == 0 => {
            notes.push(failure.to_string());
            Err(failure)
        }
        Ending::Failed(failure) => {
            notes.push("stopped by an error: this is what was decided so far".to_owned());
            Err(failure)
        }
    };
    let context = Context {
        input: text::printable(&args.input.display().to_string(), 200),
        format: format.unwrap_or(if tally.bad_lines > 0 { "unknown format" } else { "no lines" }),
        policy: text::printable(&args.policy.display().to_string(), 200),
        store: store.display(),
        elapsed,
        notes,
    };
    let summary = Summary::new(&tally, limits, context);
    if let (Some(path), Some(mut file)) = (&args.report, report) {
        let page = report::page(&summary, &tally.timeline);
        file.write_all(page.as_bytes()).map_err(|error| Failure::writing(path, &error))?;
    }
    let text = summary.to_text();
    if args.decisions.as_deref().is_some_and(is_stdout) {
        let _ = io::stderr().write_all(text.as_bytes());
    } else {
        super::print(text.as_bytes())?;
    }
    ended
}

fn is_stdout(path: &Path) -> bool {
    path.as_os_str() == "-"
}

fn open_decisions(path: &Path) -> Result<Decisions, Failure> {
    let out: Box<dyn Write> = if is_stdout(path) {
        Box::new(BufWriter::with_capacity(BUFFER_BYTES, io::stdout()))
    } else {
        Box::new(BufWriter::with_capacity(BUFFER_BYTES, create(path)?))
    };
    let name = if is_stdout(path) { Path::new("standard output") } else { path };
    Ok(Decisions { name: name.to_owned(), out })
}

fn create(path: &Path) -> Result<File, Failure> {
    File::create(path).map_err(|error| Failure::writing(path, &error))
}

/// Refuses to write over what is to be read.
fn keep_inputs(args: &ReplayArgs) -> Result<(), Failure> {
    let same = |a: &Path, b: &Path| match (fs::canonicalize(a), fs::canonicalize(b)) {
        (Ok(a), Ok(b)) => a == b && a.is_file(),
        _ => false,
    };
    for (option, output) in [("--decisions", &args.decisions), ("--report", &args.report)] {
        let Some(output) = output else { continue };
        for input in [&args.input, &args.policy] {
            if same(output, input) {
                return Err(Failure::input(format!(
                    "{option} {} would overwrite what is to be read; name another file",
                    output.display()
                )));
            }
        }
    }
    Ok(())
}
