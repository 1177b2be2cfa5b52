//! The replay: decides every request of the input at its own time, strictly in sequence.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use ratelimit_core::{Policy, RateLimiter, Store};

use crate::args::FormatArg;
use crate::compare::Comparison;
use crate::failure::Failure;
use crate::input::Before;
use crate::progress::Bar;
use crate::tally::Tally;
use crate::text::plural;

mod decider;
mod judge;
mod leases;
mod requests;

use decider::{Decider, Refused, Skipped};
pub(crate) use judge::Touched;
#[cfg(feature = "_servers")]
pub(crate) use judge::forget;
pub(crate) use requests::{Order, Requests};

/// The number of bad lines that are reported one by one; the rest are only counted.
const NAMED_BAD_LINES: u64 = 20;

/// The input of a replay and its options.
pub(crate) struct Replay<'r, S> {
    pub(crate) limiter: &'r RateLimiter<S>,
    /// The limits to compare with.
    pub(crate) other: Option<&'r RateLimiter<S>>,
    pub(crate) requests: Requests,
    pub(crate) trouble: Trouble,
    pub(crate) decisions: Option<Decisions>,
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
    pub(crate) order: Order,
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
        let mut trouble = self.trouble;
        let decisions = &mut self.decisions;
        let ended = decide_all(&mut self.requests, &mut decider, decisions, &mut trouble).await;
        let mut ending = match ended {
            Ok(()) if self.requests.interrupt.is_raised() => Ending::Interrupted,
            Ok(()) => Ending::Complete,
            Err(failure) => Ending::Failed(failure),
        };
        let elapsed = started.elapsed();
        let (format, order) = (self.requests.format(), self.requests.order());
        let (mut tally, touched, other) = decider.finish();
        (tally.bad_lines, tally.refused_operations) = (trouble.bad_lines, trouble.refused);
        let skipped = trouble.skipped();
        if matches!(ending, Ending::Complete) && tally.decisions() == 0 && skipped > 0 {
            let name = self.requests.names();
            ending = Ending::Failed(match tally.refused_operations {
                0 => no_request(&name, self.requests.asked, format, tally.bad_lines),
                refused => all_refused(&name, refused, tally.bad_lines),
            });
        }
        let bar = trouble.bar;
        bar.finish();
        if skipped > NAMED_BAD_LINES {
            let lines = match tally.refused_operations {
                0 => ["bad line", "bad lines"],
                _ => ["skipped line", "skipped lines"],
            };
            let more = plural(skipped - NAMED_BAD_LINES, lines[0], lines[1]);
            bar.say(&format!("… and {more} more"));
        }
        if let Some(decisions) = &mut self.decisions
            && let Err(error) = decisions.out.flush()
        {
            ending = Ending::Failed(Failure::writing(&decisions.name, &error));
        }
        Outcome { tally, format, order, ending, elapsed, touched, other }
    }
}

/// The error of an input without a request: it is not a log, or it was read in the wrong format.
fn no_request(name: &str, asked: FormatArg, format: Option<&str>, bad_lines: u64) -> Failure {
    let bad_lines = plural(bad_lines, "bad line", "bad lines");
    let (as_format, remedy) = match (asked, format) {
        (FormatArg::Auto, None) => {
            (String::new(), "its format is not known; name it with --format combined, jsonl or csv")
        }
        (_, Some(format)) => (
            format!(" as {format}"),
            "mend them, or name its format with --format if it is another",
        ),
        (_, None) => (" as CSV trace".to_owned(), "begin it with a header: at_us,key,cost,op"),
    };
    Failure::input(format!("{name}: no line of it is a request{as_format} ({bad_lines}); {remedy}"))
}

/// The error of an input whose operations the store refuses without exception.
fn all_refused(name: &str, refused: u64, bad_lines: u64) -> Failure {
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

/// Decides all requests, one after the other.
async fn decide_all<S: Store<Policy>>(
    requests: &mut Requests,
    decider: &mut Decider<'_, S>,
    decisions: &mut Option<Decisions>,
    trouble: &mut Trouble,
) -> Result<(), Failure> {
    while let Some(request) = requests.next(trouble)? {
        let (name, number) = (requests.name(request.input), request.number);
        match decider.decide(&request.entry).await {
            Ok(()) => {
                if let Some((decisions, line)) = decisions.as_mut().zip(decider.line.as_ref()) {
                    let written = decisions.out.write_all(line);
                    written.map_err(|error| Failure::writing(&decisions.name, &error))?;
                }
            }
            Err(Refused::Line(why)) => trouble.skip(name, number, &why)?,
            Err(Refused::ByStore(error)) => {
                let what = format!("{}: line {number}: the store failed", name.display());
                return Err(Failure::store(&what, &error));
            }
        }
    }
    Ok(())
}

/// The lines that were skipped, and how they are reported.
pub(crate) struct Trouble {
    bar: Bar,
    strict: bool,
    /// Whether a line is named together with its input.
    several: bool,
    bad_lines: u64,
    /// Operations that the store does not support.
    refused: u64,
}

impl Trouble {
    const fn new(bar: Bar, strict: bool, several: bool) -> Self {
        Self { bar, strict, several, bad_lines: 0, refused: 0 }
    }

    /// The same for a second pass, which repeats no complaint about a line.
    pub(crate) fn silent(self) -> Self {
        Self { bar: self.bar.silent(), ..self }
    }

    const fn skipped(&self) -> u64 {
        self.bad_lines + self.refused
    }

    /// Reports a line that is skipped, and counts it; with `--strict` the replay ends.
    fn skip(&mut self, name: &Path, number: u64, why: &Skipped) -> Result<(), Failure> {
        let (Skipped::Bad(bad) | Skipped::Refused(bad)) = why;
        let name = name.display();
        if self.strict {
            return Err(Failure::input(format!(
                "{name}: line {number}: {bad} (without --strict it would be skipped)",
            )));
        }
        if self.skipped() < NAMED_BAD_LINES {
            let name = if self.several { format!("{name}: ") } else { String::new() };
            self.bar.say(&format!("{name}line {number}: {bad}"));
        }
        match why {
            Skipped::Bad(_) => self.bad_lines += 1,
            Skipped::Refused(_) => self.refused += 1,
        }
        Ok(())
    }

    /// Handles the bad lines before the line that decided the format.
    fn before(&mut self, name: &Path, before: Before) -> Result<(), Failure> {
        let Before { named, count } = before;
        let unnamed = count - named.len() as u64;
        for (number, bad) in named {
            self.skip(name, number, &Skipped::Bad(bad))?;
        }
        self.bad_lines += unnamed;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use ratelimit_memory::MemoryStore;

    use super::*;
    use crate::args::LogArgs;
    use crate::interrupt::Interrupt;

    #[test]
    fn a_store_that_fails_ends_the_replay_with_the_line_and_what_was_decided() {
        // Each request needs an entry, for which this store has no room after 41 of them.
        let policy = "[[limit]]\nname = \"log\"\nalgorithm = \"sliding-log\"\nrate = \"100/d\"";
        let store = MemoryStore::builder().entries(41).build();
        let limiter = &RateLimiter::new(toml::from_str(policy).expect("a policy"), store);
        let scene = tempfile::TempDir::new().expect("a directory");
        let (input, name) = (scene.path().join("input"), scene.path().join("output"));
        let line = |n| format!("{{\"at_us\":{n},\"key\":\"k{n}\"}}\n");
        std::fs::write(&input, (0..100).map(line).collect::<String>()).expect("writes");
        let (policy, inputs) = (name.clone(), vec![input]);
        let log = LogArgs { policy, format: FormatArg::Auto, duration_unit: None, inputs };
        let opened = Requests::open(&log, &Interrupt::default(), false);
        let (requests, trouble) = opened.unwrap_or_else(|failure| panic!("{failure}"));
        let out = Box::new(std::fs::File::create(&name).expect("creates"));
        let decisions = Some(Decisions { name: name.clone(), out });
        let (other, forgets, nearness) = (None, false, false);
        let replay = Replay { limiter, other, requests, trouble, decisions, forgets, nearness };
        let outcome = pollster::block_on(replay.run());
        let written = std::fs::read_to_string(&name).expect("reads");
        assert_eq!(written.lines().count(), 41);
        let Ending::Failed(failure) = outcome.ending else { panic!("it failed") };
        assert!(failure.to_string().contains("line 42: the store failed: "), "{failure}");
    }
}
