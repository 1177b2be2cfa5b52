//! The replay: decides every request of the input at its own time, strictly in sequence.

use std::io::{BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ratelimit_core::{Policy, RateLimiter, Store};

use crate::args::FormatArg;
use crate::compare::Comparison;
use crate::failure::Failure;
use crate::input::{BadLine, Before, DETECTED_LINES, Detector, Found, Lines, Parser, Source};
use crate::interrupt::Interrupt;
use crate::progress::Bar;
use crate::tally::Tally;
use crate::text::plural;

mod decider;
mod judge;

use decider::{Decider, Refused};
pub(crate) use judge::{Touched, forget};

/// The number of bad lines that are reported one by one; the rest are only counted.
const NAMED_BAD_LINES: u64 = 20;

/// The input of a replay and its options.
pub(crate) struct Replay<'r, S> {
    pub(crate) limiter: &'r RateLimiter<S>,
    /// The limits to compare with.
    pub(crate) other: Option<&'r RateLimiter<S>>,
    pub(crate) name: &'r Path,
    pub(crate) lines: Lines<BufReader<Source>>,
    pub(crate) format: FormatArg,
    pub(crate) strict: bool,
    pub(crate) decisions: Option<Decisions>,
    pub(crate) interrupt: Interrupt,
    pub(crate) bar: Bar,
    /// Whether the keys are to be reset at the end.
    pub(crate) forgets: bool,
    /// Whether to count how near callers came to each limit.
    pub(crate) nearness: bool,
}

/// The destination of decision lines.
pub(crate) struct Decisions {
    pub(crate) name: PathBuf,
    pub(crate) out: Box<dyn Write>,
}

/// The result of a replay.
pub(crate) struct Outcome {
    pub(crate) tally: Tally,
    /// The input's format; `None` if no line decided it.
    pub(crate) format: Option<&'static str>,
    pub(crate) ending: Ending,
    pub(crate) elapsed: Duration,
    pub(crate) touched: Touched,
    /// The other policy's result, with the keys that it used.
    pub(crate) other: Option<(Comparison, Touched)>,
}

/// How a replay ended.
pub(crate) enum Ending {
    /// The replay decided the whole input.
    Complete,
    /// The user interrupted the replay.
    Interrupted,
    /// The replay could not continue.
    Failed(Failure),
}

impl<S: Store<Policy>> Replay<'_, S> {
    /// Decides every request until the input ends or something stops the replay.
    pub(crate) async fn run(mut self) -> Outcome {
        let started = Instant::now();
        let (nearness, forgets) = (self.nearness, self.forgets);
        let mut decider = Decider::new(self.limiter, self.other, nearness, forgets);
        decider.line = self.decisions.is_some().then(Vec::new);
        let mut format = None;
        let mut ending = match self.decide_all(&mut decider, &mut format).await {
            Ok(()) if self.interrupt.is_raised() => Ending::Interrupted,
            Ok(()) => Ending::Complete,
            Err(failure) => Ending::Failed(failure),
        };
        let elapsed = started.elapsed();
        let (tally, touched, other) = decider.finish();
        let skipped = tally.bad_lines + tally.refused_operations;
        if matches!(ending, Ending::Complete) && tally.decisions() == 0 && skipped > 0 {
            ending = Ending::Failed(match tally.refused_operations {
                0 => self.no_request(format, tally.bad_lines),
                refused => self.all_refused(refused, tally.bad_lines),
            });
        }
        self.bar.finish();
        if skipped > NAMED_BAD_LINES {
            let lines = match tally.refused_operations {
                0 => ["bad line", "bad lines"],
                _ => ["skipped line", "skipped lines"],
            };
            let more = plural(skipped - NAMED_BAD_LINES, lines[0], lines[1]);
            self.bar.say(&format!("… and {more} more"));
        }
        if let Some(decisions) = &mut self.decisions
            && let Err(error) = decisions.out.flush()
        {
            ending = Ending::Failed(Failure::writing(&decisions.name, &error));
        }
        Outcome { tally, format, ending, elapsed, touched, other }
    }

    /// The error of an input without a request: it is not a log, or it was read in the wrong format.
    fn no_request(&self, format: Option<&str>, bad_lines: u64) -> Failure {
        let bad_lines = plural(bad_lines, "bad line", "bad lines");
        let (as_format, remedy) = match (self.format, format) {
            (FormatArg::Auto, None) => (
                String::new(),
                "its format is not known; name it with --format combined, jsonl or csv",
            ),
            (_, Some(format)) => (
                format!(" as {format}"),
                "mend them, or name its format with --format if it is another",
            ),
            (_, None) => (" as CSV trace".to_owned(), "begin it with a header: at_us,key,cost,op"),
        };
        let name = self.name.display();
        Failure::input(format!(
            "{name}: no line of it is a request{as_format} ({bad_lines}); {remedy}"
        ))
    }

    /// The error of an input whose operations the store refuses without exception.
    fn all_refused(&self, refused: u64, bad_lines: u64) -> Failure {
        let name = self.name.display();
        let refused = plural(refused, "operation", "operations");
        let bad_lines = match bad_lines {
            0 => String::new(),
            some => format!(", and {} skipped", plural(some, "bad line", "bad lines")),
        };
        Failure::input(format!(
            "{name}: no line of it was decided: the store refused {refused}{bad_lines}; choose a store that has \
             them, such as memory or ?mode=lua"
        ))
    }

    /// Decides all lines. `format` is set as soon as the input's format is known.
    async fn decide_all(
        &mut self,
        decider: &mut Decider<'_, S>,
        format: &mut Option<&'static str>,
    ) -> Result<(), Failure> {
        let name = self.name.display();
        let bad_parser = |bad: BadLine| Failure::input(bad.0);
        let mut parser = Parser::of(self.format).map_err(bad_parser)?;
        *format = parser.as_ref().map(Parser::name);
        let mut detector = Detector::new(self.format, NAMED_BAD_LINES).map_err(bad_parser)?;
        let trouble = Trouble { name: self.name, strict: self.strict };
        loop {
            let line = match self.lines.next() {
                // An interrupted input may end within a line.
                _ if self.interrupt.is_raised() => break,
                Ok(Some(line)) => line,
                Ok(None) => break,
                Err(error) => {
                    trouble.before(detector.give_up(), &mut decider.this.tally, &self.bar)?;
                    let number = self.lines.number();
                    let what = format!("{name}: cannot be read after line {number}: {error}");
                    return Err(Failure::input(what));
                }
            };
            let number = line.number;
            self.bar.line(number);
            if line.bytes.is_some_and(|bytes| bytes.trim_ascii().is_empty()) {
                continue;
            }
            let parser = match &mut parser {
                Some(parser) => parser,
                unknown => {
                    let bad_header = |bad| Failure::input(format!("{name}: line {number}: {bad}"));
                    let Some(found) = detector.look(line).map_err(bad_header)? else {
                        if detector.is_at_a_loss() {
                            break;
                        }
                        continue;
                    };
                    let Found { parser, header, before } = found;
                    *format = Some(parser.name());
                    let parser = unknown.insert(parser);
                    trouble.before(before, &mut decider.this.tally, &self.bar)?;
                    if header {
                        continue;
                    }
                    parser
                }
            };
            match decider.decide(parser, line.bytes).await {
                Ok(()) => {
                    if let Some((decisions, line)) =
                        self.decisions.as_mut().zip(decider.line.as_ref())
                    {
                        let written = decisions.out.write_all(line);
                        written.map_err(|error| Failure::writing(&decisions.name, &error))?;
                    }
                }
                Err(Refused::Line(bad)) => {
                    trouble.bad(number, &bad, &mut decider.this.tally, &self.bar)?;
                }
                Err(Refused::Operation(bad)) => {
                    trouble.skipped(number, &bad, &decider.this.tally, &self.bar)?;
                    decider.this.tally.refused_operations += 1;
                }
                Err(Refused::ByStore(error)) => {
                    let what = format!("{name}: line {number}: the store failed");
                    return Err(Failure::store(&what, &error));
                }
            }
        }
        let gave_up = detector.is_at_a_loss();
        trouble.before(detector.give_up(), &mut decider.this.tally, &self.bar)?;
        if gave_up {
            let lines = plural(DETECTED_LINES, "line", "lines");
            let remedy = match self.format {
                FormatArg::Csv => "is a CSV header; begin it with one such as at_us,key,cost,op",
                _ => "tells its format; name it with --format combined, jsonl or csv",
            };
            return Err(Failure::input(format!("{name}: none of its first {lines} {remedy}")));
        }
        Ok(())
    }
}

/// How bad lines are handled.
struct Trouble<'r> {
    name: &'r Path,
    strict: bool,
}

impl Trouble<'_> {
    /// Reports and counts a bad line; with `--strict` the replay ends.
    fn bad(&self, number: u64, bad: &BadLine, tally: &mut Tally, bar: &Bar) -> Result<(), Failure> {
        self.skipped(number, bad, tally, bar)?;
        tally.bad_lines += 1;
        Ok(())
    }

    /// Reports a skipped line; with `--strict` the replay ends.
    fn skipped(&self, number: u64, bad: &BadLine, tally: &Tally, bar: &Bar) -> Result<(), Failure> {
        if self.strict {
            return Err(Failure::input(format!(
                "{}: line {number}: {bad} (without --strict it would be skipped)",
                self.name.display()
            )));
        }
        if tally.bad_lines + tally.refused_operations < NAMED_BAD_LINES {
            bar.say(&format!("line {number}: {bad}"));
        }
        Ok(())
    }

    /// Handles the bad lines before the line that decided the format.
    fn before(&self, before: Before, tally: &mut Tally, bar: &Bar) -> Result<(), Failure> {
        let Before { named, count } = before;
        let unnamed = count - named.len() as u64;
        for (number, bad) in named {
            self.bad(number, &bad, tally, bar)?;
        }
        tally.bad_lines += unnamed;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::fmt;
    use std::sync::atomic::{AtomicU64, Ordering};

    use ratelimit_core::{Batch, ErrorKind, Limits, Refusal, StoreError, Verdict};
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

    /// A memory store that becomes unavailable after a number of calls.
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

    impl From<Refusal> for FailingError {
        fn from(refusal: Refusal) -> Self {
            Self::Memory(refusal.into())
        }
    }

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
                other: None,
                forgets: true,
                nearness: false,
            }
            .run(),
        );
        (outcome, std::fs::read_to_string(&output).expect("reads"))
    }

    #[test]
    fn every_key_that_a_replay_touched_is_reset() {
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
