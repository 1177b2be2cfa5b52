//! The replay: every request of the input decided at its own time, strictly one after another.

use std::collections::HashSet;
use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ratelimit_core::{Batch, Check, ErrorKind, Op, Policy, RateLimiter, Store, StoreError};

use crate::args::FormatArg;
use crate::decision_line::DecisionLine;
use crate::failure::Failure;
use crate::input::{BadLine, Line, Lines, Parser, Source};
use crate::interrupt::Interrupt;
use crate::progress::Bar;
use crate::tally::Tally;
use crate::text::plural;

/// How many bad lines are named; the rest are only counted.
const NAMED_BAD_LINES: u64 = 20;
/// How many keys are forgotten with one call.
const FORGOTTEN_AT_ONCE: usize = 32;

/// What is to be replayed, and how.
pub(crate) struct Replay<'r, S> {
    pub(crate) limiter: &'r RateLimiter<S>,
    pub(crate) name: &'r Path,
    pub(crate) lines: Lines<BufReader<Source>>,
    pub(crate) format: FormatArg,
    pub(crate) strict: bool,
    pub(crate) decisions: Option<Decisions>,
    pub(crate) interrupt: Interrupt,
    pub(crate) bar: Bar,
    /// The keys used so far, if they are to be forgotten in the end.
    pub(crate) touched: Option<Touched>,
}

/// Where decision lines go.
pub(crate) struct Decisions {
    pub(crate) name: PathBuf,
    pub(crate) out: Box<dyn Write>,
}

/// Limits by their position, each with a key that it may have a state for.
pub(crate) type Touched = HashSet<(usize, Box<str>)>;

/// What came of a replay.
pub(crate) struct Outcome {
    pub(crate) tally: Tally,
    /// The input's format; `None` if it had no line.
    pub(crate) format: Option<&'static str>,
    pub(crate) ending: Ending,
    pub(crate) elapsed: Duration,
    pub(crate) touched: Touched,
}

/// How a replay ended.
pub(crate) enum Ending {
    /// The whole input was decided.
    Complete,
    /// Somebody stopped it.
    Interrupted,
    /// It could not go on.
    Failed(Failure),
}

impl<S: Store<Policy>> Replay<'_, S> {
    /// Decides every request until the input ends or something stops it.
    pub(crate) async fn run(mut self) -> Outcome {
        let started = Instant::now();
        let mut decider = Decider {
            limiter: self.limiter,
            format: self.format,
            parser: None,
            tally: Tally::new(self.limiter.limits()),
            touched: self.touched.take(),
            applied: Vec::new(),
            line: self.decisions.is_some().then(Vec::new),
        };
        let mut ending = match self.decide_all(&mut decider).await {
            Ok(()) if self.interrupt.is_raised() => Ending::Interrupted,
            Ok(()) => Ending::Complete,
            Err(failure) => Ending::Failed(failure),
        };
        let elapsed = started.elapsed();
        let Decider { tally, parser, touched, .. } = decider;
        self.bar.finish();
        if tally.bad_lines > NAMED_BAD_LINES {
            let more = plural(tally.bad_lines - NAMED_BAD_LINES, "bad line", "bad lines");
            self.bar.say(&format!("… and {more} more"));
        }
        if let Some(decisions) = &mut self.decisions
            && let Err(error) = decisions.out.flush()
        {
            ending = Ending::Failed(Failure::writing(&decisions.name, &error));
        }
        Outcome {
            tally,
            format: parser.as_ref().map(Parser::name),
            ending,
            elapsed,
            touched: touched.unwrap_or_default(),
        }
    }

    async fn decide_all(&mut self, decider: &mut Decider<'_, S>) -> Result<(), Failure> {
        let name = self.name.display();
        loop {
            let line = match self.lines.next() {
                // An interrupted input may end within a line.
                _ if self.interrupt.is_raised() => return Ok(()),
                Ok(Some(line)) => line,
                Ok(None) => return Ok(()),
                Err(error) => {
                    let number = self.lines.number();
                    let what = format!("{name}: cannot be read after line {number}: {error}");
                    return Err(Failure::input(what));
                }
            };
            let number = line.number;
            self.bar.line(number);
            match decider.decide(line).await {
                Ok(Decided::Nothing) => {}
                Ok(Decided::Request) => {
                    if let Some((decisions, line)) =
                        self.decisions.as_mut().zip(decider.line.as_ref())
                    {
                        let written = decisions.out.write_all(line);
                        written.map_err(|error| Failure::writing(&decisions.name, &error))?;
                    }
                }
                Err(Refused::Line(bad)) if self.strict => {
                    return Err(Failure::input(format!(
                        "{name}: line {number}: {bad} (without --strict it would be skipped)"
                    )));
                }
                Err(Refused::Line(bad)) => {
                    decider.tally.bad_lines += 1;
                    if decider.tally.bad_lines <= NAMED_BAD_LINES {
                        self.bar.say(&format!("line {number}: {bad}"));
                    }
                }
                Err(Refused::Header(bad)) => {
                    return Err(Failure::input(format!("{name}: line {number}: {bad}")));
                }
                Err(Refused::ByStore(error)) => {
                    let what = format!("{name}: line {number}: the store failed");
                    return Err(Failure::store(&what, &error));
                }
            }
        }
    }
}

/// Decides lines, and keeps what is used again from line to line.
struct Decider<'r, S> {
    limiter: &'r RateLimiter<S>,
    format: FormatArg,
    /// `None` before the first line that is not blank.
    parser: Option<Parser>,
    tally: Tally,
    touched: Option<Touched>,
    /// The positions of the limits that applied to the last request.
    applied: Vec<usize>,
    /// The last request's decision line, if anybody wants them.
    line: Option<Vec<u8>>,
}

/// What a line was.
enum Decided {
    /// Blank, or a header.
    Nothing,
    Request,
}

/// Why a line was not decided.
enum Refused<E> {
    Line(BadLine),
    /// Without its header no line can be read.
    Header(BadLine),
    ByStore(E),
}

impl<S: Store<Policy>> Decider<'_, S> {
    async fn decide(&mut self, line: Line<'_>) -> Result<Decided, Refused<S::Error>> {
        let Some(bytes) = line.bytes else {
            return Err(Refused::Line(BadLine("is longer than 1 MiB".to_owned())));
        };
        if bytes.trim_ascii().is_empty() {
            return Ok(Decided::Nothing);
        }
        if self.parser.is_none() {
            let (parser, used_up) = Parser::new(self.format, bytes).map_err(Refused::Header)?;
            self.parser = Some(parser);
            if used_up {
                return Ok(Decided::Nothing);
            }
        }
        let Some(parser) = &mut self.parser else { return Ok(Decided::Nothing) };
        let entry = parser.parse(bytes).map_err(Refused::Line)?;

        let limits = self.limiter.limits().as_slice();
        let request = self.limiter.request(&entry.caller).cost(entry.cost).at(entry.at);
        self.applied.clear();
        self.applied.extend(request.applicable());
        if let Some(touched) = &mut self.touched {
            for &place in &self.applied {
                if let Some(key) = limits[place].key_for(&entry.caller) {
                    touched.insert((place, key.into()));
                }
            }
        }
        let verdict = request.apply(entry.op).await.map_err(|error| match entry.op {
            // The line asks for what the algorithm of a limit does not have.
            Op::Refund | Op::Force if error.kind() == ErrorKind::Unsupported => {
                Refused::Line(BadLine(error.to_string()))
            }
            _ => Refused::ByStore(error),
        })?;
        self.tally.count(&entry, &verdict, &self.applied);
        if let Some(line) = &mut self.line {
            line.clear();
            let (at, cost) = (Some(entry.at.as_us()), entry.cost);
            let writer = DecisionLine::new(limits);
            writer.write(line, at, &entry.caller, cost, &verdict, &self.applied);
        }
        Ok(Decided::Request)
    }
}

/// Forgets every key that a replay used.
pub(crate) async fn forget<S: Store<Policy>>(
    limiter: &RateLimiter<S>,
    touched: &Touched,
) -> Result<(), S::Error> {
    let limits = limiter.limits().as_slice();
    let checks: Vec<Check<'_, Policy>> = touched
        .iter()
        .filter_map(|(place, key)| Some(Check { limit: limits.get(*place)?, key, cost: 0 }))
        .collect();
    for checks in checks.chunks(FORGOTTEN_AT_ONCE) {
        // A set names no key twice.
        if let Ok(batch) = Batch::new(checks) {
            limiter.store().apply(&batch.op(Op::Reset)).await?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::sync::atomic::{AtomicU64, Ordering};

    use ratelimit_core::{Limits, Verdict};
    use ratelimit_memory::{MemoryError, MemoryStore};

    use super::*;

    const POLICY: &str = r#"
        [[limit]]
        name = "bare"
        algorithm = "gcra"
        rate = "1/d"
        burst = 100
        [[limit]]
        name = "both"
        key = ["ip", "user"]
        algorithm = "sliding-log"
        rate = "100/d"
    "#;

    /// A memory store whose server goes away after so many calls.
    struct Failing {
        store: MemoryStore,
        calls_left: AtomicU64,
    }

    #[derive(Debug)]
    enum FailingError {
        Away,
        Memory(MemoryError),
    }

    impl fmt::Display for FailingError {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            match self {
                Self::Away => f.write_str("the server went away"),
                Self::Memory(error) => error.fmt(f),
            }
        }
    }

    impl std::error::Error for FailingError {}

    impl StoreError for FailingError {
        fn kind(&self) -> ErrorKind {
            match self {
                Self::Away => ErrorKind::Indeterminate,
                Self::Memory(error) => error.kind(),
            }
        }
    }

    impl Store<Policy> for Failing {
        type Error = FailingError;

        async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, FailingError> {
            if self.calls_left.load(Ordering::Relaxed) == 0 {
                return Err(FailingError::Away);
            }
            self.calls_left.fetch_sub(1, Ordering::Relaxed);
            self.store.apply(batch).await.map_err(FailingError::Memory)
        }
    }

    fn limits() -> Limits<Policy> {
        toml::from_str(POLICY).expect("a policy")
    }

    fn block_on<T>(future: impl Future<Output = T>) -> T {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        runtime.expect("a runtime").block_on(future)
    }

    /// Replays a hundred requests of as many callers.
    fn replay<S: Store<Policy>>(limiter: &RateLimiter<S>) -> (Outcome, String) {
        let scene = tempfile::TempDir::new().expect("a directory");
        let (input, output) = (scene.path().join("input"), scene.path().join("output"));
        let line = |n| {
            format!(
                "{{\"at_us\":{n},\"key\":\"k{n}\",\"keys\":{{\"ip\":\"a\",\"user\":\"{n}\"}}}}\n"
            )
        };
        std::fs::write(&input, (0..100).map(line).collect::<String>()).expect("writes");
        let interrupt = Interrupt::default();
        let (source, progress) = Source::open(&input, interrupt.clone()).expect("opens");
        let out = Box::new(std::fs::File::create(&output).expect("creates"));
        let outcome = block_on(
            Replay {
                limiter,
                name: &input,
                lines: Lines::new(BufReader::new(source)),
                format: FormatArg::Auto,
                strict: false,
                decisions: Some(Decisions { name: output.clone(), out }),
                interrupt,
                bar: Bar::new(progress),
                touched: Some(Touched::new()),
            }
            .run(),
        );
        (outcome, std::fs::read_to_string(&output).expect("reads"))
    }

    #[test]
    fn every_key_that_a_replay_touched_is_forgotten() {
        let limiter = RateLimiter::new(limits(), MemoryStore::new());
        let (outcome, decisions) = replay(&limiter);
        assert!(matches!(outcome.ending, Ending::Complete));
        assert_eq!((outcome.tally.requests, decisions.lines().count()), (100, 100));
        assert_eq!((limiter.store().len(), outcome.touched.len()), (200, 200));
        block_on(forget(&limiter, &outcome.touched)).expect("forgets");
        assert!(limiter.store().is_empty());
    }

    #[test]
    fn a_store_that_fails_ends_the_replay_with_the_line_and_what_was_decided() {
        let failing = Failing { store: MemoryStore::new(), calls_left: AtomicU64::new(41) };
        let (outcome, decisions) = replay(&RateLimiter::new(limits(), failing));
        assert_eq!(decisions.lines().count(), 41);
        let Ending::Failed(failure) = outcome.ending else { panic!("it failed") };
        assert_eq!(failure.exit_code(), 3);
        let message = failure.to_string();
        assert!(message.contains("line 42: the store failed: the server went away"), "{message}");
    }
}
