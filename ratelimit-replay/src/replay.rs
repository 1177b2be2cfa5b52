//! The replay: decides every request of the input at its own time, strictly in sequence.

use std::io::{BufWriter, Write};
use std::iter;
use std::path::{Path, PathBuf};

use ratelimit_core::store::Op;
use ratelimit_core::{AnyAlgorithm, Limits, Store};

use crate::compare::Comparison;
use crate::decision_line::{DecisionLine, json_line};
use crate::failure::Failure;
use crate::input::{BadLine, FormatArg, NAMED_BAD_LINES};
use crate::named::Named as _;
use crate::suggest::finer_than_a_second;
use crate::summary::{WARNING, idle_records};
use crate::tally::{Decided, Tally};
use crate::text::plural;
use crate::watcher::Watcher;

mod judge;
mod requests;

pub use judge::Judge;
pub use requests::ReplayedRequest;
pub use requests::{Format, Order, Reading, ReplayedRequests};

/// Who decides the requests of a replay, and what is written of their decisions.
pub struct Replay<'r, S> {
    /// The policy.
    pub this: Judge<'r, S>,
    /// The policy to compare with.
    pub other: Option<Judge<'r, S>>,
    /// What is decided.
    pub requests: ReplayedRequests,
    /// Where the decisions are written to.
    pub decisions: Option<Decisions>,
}

/// The destination of decision lines.
pub struct Decisions {
    /// The name, for errors.
    pub name: PathBuf,
    /// The writer.
    pub out: BufWriter<Box<dyn Write>>,
}

/// The result of a replay.
pub struct ReplayOutcome {
    /// The counts.
    pub tally: Tally,
    /// The input's format; `None` if no line decided it.
    pub format: Option<String>,
    /// Whether an input is a log, and no trace.
    pub(crate) reads_logs: bool,
    /// How far the inputs were out of order.
    pub order: Order,
    /// What the lines of the input leave open, and the options that tell it.
    pub hints: Vec<String>,
    /// What ended the replay, or is wrong with its result.
    pub ended: Result<(), Failure>,
    /// Whether the whole input was decided.
    pub is_whole: bool,
    /// Why keys were left behind that were to be reset; empty if the store had failed before.
    pub left_behind: Option<String>,
    /// Whether nothing was decided, or so little that no number says anything.
    pub is_void: bool,
    /// The other policy's result.
    pub comparison: Option<Comparison>,
}

impl ReplayOutcome {
    /// What was replayed, against which policy.
    #[must_use]
    pub fn title(&self, inputs: &[String], policy: &str) -> String {
        let unknown = if self.tally.bad_lines > 0 { "unknown format" } else { "no lines" };
        let format = self.format.as_deref().unwrap_or(unknown);
        format!("{} ({format}) against {policy}", inputs.join(", "))
    }

    /// Why the policies of these names may not fit the input.
    #[must_use]
    pub fn warnings(&self, policy: &str, other: Option<&str>) -> Vec<String> {
        let other = other.zip(self.comparison.as_ref().map(|comparison| &comparison.tally));
        let mut warnings = Vec::new();
        for (name, tally) in iter::once((policy, &self.tally)).chain(other) {
            if tally.nothing_applied() {
                warnings.push(format!("{WARNING}{name}: no limit applied to any request"));
            }
            warnings.extend(tally.left_out().map(|left_out| format!("{name}: {left_out}")));
            warnings.extend(tally.unmet().map(|(unmet, is_missing)| {
                let by_option = is_missing && self.reads_logs;
                let option = if by_option {
                    " (--identifier NAME=FIELD reads another from the log)"
                } else {
                    ""
                };
                format!("{WARNING}{name}: {unmet}{option}")
            }));
        }
        warnings.extend(self.comparison.as_ref().and_then(Comparison::left_out));
        warnings
    }

    /// What there is to say of its times and its lines, and these notes in between.
    #[must_use]
    pub fn notes(
        &self,
        limits: &Limits<AnyAlgorithm>,
        others: impl IntoIterator<Item = String>,
    ) -> Vec<String> {
        let is_coarse = self.order.is_in_seconds;
        let fine = is_coarse.then(|| finer_than_a_second(limits)).flatten();
        let idle = idle_records(&self.tally);
        let notes = self.order.note().into_iter().chain(fine).chain(idle).chain(others);
        notes.chain(self.hints.iter().cloned()).collect()
    }

    /// What there is to say of its end.
    #[must_use]
    pub fn ending(&self) -> Option<String> {
        match &self.ended {
            Ok(()) => (self.tally.decisions() == 0).then(|| "the input has no requests".to_owned()),
            Err(Failure::BrokenPipe) => None,
            Err(Failure::Interrupted) => {
                Some("interrupted: this is what was decided so far".to_owned())
            }
            Err(failure) if self.is_void || self.is_whole => Some(failure.to_string()),
            Err(_) => Some("stopped by an error: this is what was decided so far".to_owned()),
        }
    }
}

impl<S: Store<AnyAlgorithm>> Replay<'_, S> {
    /// Decides every request until the input ends or something stops the replay.
    pub async fn run(mut self) -> ReplayOutcome {
        let mut comparison = Comparison::default();
        let mut ended = self.decide_all(&mut comparison).await;
        let is_whole = ended.is_ok();
        let Self { mut this, other, requests, decisions } = self;
        let (format, order, hints) = (requests.format(), requests.order(), requests.hints());
        let reads_logs = requests.reads_logs();
        let trouble = &requests.trouble;
        (this.tally.bad_lines, this.tally.refused_operations) =
            (trouble.bad_lines, trouble.refused);
        this.tally.end_spells();
        let skipped = trouble.skipped();
        let mut is_void = this.tally.decisions() == 0;
        if ended.is_ok() && this.tally.decisions() == 0 && skipped > 0 {
            let (name, asked) = (requests.names(), requests.asked);
            let own = requests.has_own.then_some(trouble.first_bad.as_deref()).flatten();
            ended = Err(match trouble.refused {
                0 if asked == FormatArg::Auto && format.is_none() => requests.unknown(),
                0 => no_request(name, asked, format.as_deref(), (trouble.bad_lines, own)),
                refused => all_refused(name, refused, trouble.bad_lines),
            });
        } else if let Some(failure) = requests.mostly_unread().filter(|_| ended.is_ok()) {
            is_void = true;
            ended = Err(failure);
        } else if ended.is_ok() && order.is_shuffled(this.tally.decisions()) && !requests.unsorted {
            ended = Err(shuffled(requests.names()));
        }
        let told = skipped - trouble.untold;
        if told > NAMED_BAD_LINES {
            let [one, many] = match trouble.refused {
                0 => ["bad line", "bad lines"],
                _ => ["skipped line", "skipped lines"],
            };
            let more = plural(told - NAMED_BAD_LINES, one, many);
            trouble.say(&format!("… and {more} more"));
        }
        drop(requests);
        if let Some(mut decisions) = decisions
            && let Err(error) = decisions.out.flush()
        {
            ended = Err(Failure::writing(&decisions.name, &error));
        }
        let mut left_behind = None;
        for judge in iter::once(&this).chain(&other) {
            left_behind = left_behind.or(match &ended {
                // A store that has just failed would only time out again.
                Err(Failure::Store(_)) => judge.has_touched().then(String::new),
                _ => judge.forget().await.err().map(|error| format!(": {error}")),
            });
        }
        let comparison = other.map(|other| Comparison { tally: other.into_tally(), ..comparison });
        let tally = this.into_tally();
        ReplayOutcome {
            tally,
            format,
            reads_logs,
            order,
            hints,
            ended,
            is_whole,
            left_behind,
            is_void,
            comparison,
        }
    }

    /// Decides all requests, one after the other.
    async fn decide_all(&mut self, comparison: &mut Comparison) -> Result<(), Failure> {
        let Self { this, other, requests, decisions } = self;
        while let Some(ReplayedRequest { input, number, entry }) = requests.next_request()? {
            let (name, trouble) = (&*input, &mut requests.trouble);
            let failed = |error: S::Error| {
                let what = format!("{}: line {number}: the store failed", name.display());
                Failure::store(&what, &error)
            };
            let valid = this.validate(&entry).and_then(|numbers| match other {
                Some(other) => match other.validate(&entry) {
                    Ok(others) => Ok((numbers, others)),
                    Err(bad) => Err(format!("--compare: {bad}")),
                },
                None => Ok((numbers, None)),
            });
            let (numbers, others) = match &valid {
                Ok((numbers, others)) => (numbers.as_ref(), others.as_ref()),
                Err(bad) => {
                    trouble.bad(name, number, bad)?;
                    continue;
                }
            };
            let verdict = match this.decide(&entry, numbers).await.map_err(failed)? {
                Ok(verdict) => verdict,
                Err(refused) => {
                    trouble.report(name, number, &refused)?;
                    trouble.refused += 1;
                    continue;
                }
            };
            if other.is_none() && decisions.is_none() {
                continue;
            }
            let decided = Decided::new((this.limiter, numbers), &entry, &verdict);
            // An operation that the algorithms of the other policy lack has no effect there.
            if let Some(other) = other
                && let Ok(verdict) = other.decide(&entry, others).await.map_err(failed)?
                && entry.op == Op::Acquire
            {
                let by_other = Decided::new((other.limiter, others), &entry, &verdict);
                comparison.count((&this.tally, &decided), (&other.tally, &by_other));
            }
            if let Some(Decisions { name, out }) = decisions {
                let line = json_line(&DecisionLine::new(&decided));
                out.write_all(line.as_bytes()).map_err(|error| Failure::writing(name, &error))?;
            }
        }
        Ok(())
    }
}

/// The error of an input without a request: it is not a log, or it was read in the wrong format. Of
/// a format that the user describes, with the first bad line.
fn no_request(
    name: &str,
    asked: FormatArg,
    format: Option<&str>,
    (bad_lines, own): (u64, Option<&str>),
) -> Failure {
    let bad_lines = plural(bad_lines, "bad line", "bad lines");
    if let Some(first) = own {
        return Failure::input(format!(
            "{name}: no line of it is a request in the format that --log-format or --fields tells ({bad_lines}); correct the \
             option: {first}"
        ));
    }
    let (as_format, remedy) = match (asked, format) {
        (_, Some(format)) => (
            format!(" as {format}"),
            "mend them, or name its format with --format if it is another",
        ),
        (FormatArg::Csv, None) => {
            (" as CSV trace".to_owned(), "begin it with a header: at_us,key,cost,op")
        }
        (asked, None) => (format!(" as {}", asked.name()), "name another format, or none"),
    };
    Failure::input(format!("{name}: no line of it is a request{as_format} ({bad_lines}); {remedy}"))
}

/// The error of a log whose lines are in no order of time.
fn shuffled(name: &str) -> Failure {
    Failure::input(format!(
        "{name}: its lines are in no order of time; name the logs of several servers as inputs of their own, sort the lines, \
         or accept that many are decided late, with --unsorted"
    ))
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

/// The lines that were skipped, and how they are reported.
pub(crate) struct Trouble {
    watcher: Box<dyn Watcher>,
    how: Reading,
    /// Whether a line is named together with its input.
    several: bool,
    bad_lines: u64,
    /// The first of them.
    first_bad: Option<String>,
    /// Those of them that are not told one by one.
    untold: u64,
    /// Operations that the store does not support.
    refused: u64,
    order: Order,
    /// The lines that wait to be sorted in, of all inputs.
    waiting: usize,
}

impl Trouble {
    const fn skipped(&self) -> u64 {
        self.bad_lines + self.refused
    }

    /// Tells the watcher.
    fn say(&self, line: &str) {
        if !self.how.silent {
            self.watcher.say(line);
        }
    }

    /// Fails if the replay is to end.
    fn check(&self) -> Result<(), Failure> {
        if self.watcher.is_interrupted() { Err(Failure::Interrupted) } else { Ok(()) }
    }

    /// Reports a line that is skipped; with `--strict` the replay ends.
    fn report(&self, name: &Path, number: u64, bad: &BadLine) -> Result<(), Failure> {
        let name = name.display();
        if self.how.strict {
            return Err(Failure::input(format!(
                "{name}: line {number}: {bad} (without --strict it would be skipped)",
            )));
        }
        if self.skipped() < NAMED_BAD_LINES {
            let name = if self.several { format!("{name}: ") } else { String::new() };
            self.say(&format!("{name}line {number}: {bad}"));
        }
        Ok(())
    }

    /// Reports and counts a line that is no request.
    fn bad(&mut self, name: &Path, number: u64, bad: &BadLine) -> Result<(), Failure> {
        self.report(name, number, bad)?;
        self.bad_lines += 1;
        self.first_bad.get_or_insert_with(|| format!("line {number} {bad}"));
        Ok(())
    }

    /// Counts lines that resemble no format.
    const fn untold(&mut self, lines: u64) {
        self.bad_lines += lines;
        self.untold += lines;
    }
}

#[cfg(test)]
mod tests {
    use ratelimit_core::RateLimiter;
    use ratelimit_memory::MemoryStore;

    use super::*;
    use crate::input::NamedInput;

    #[test]
    fn a_store_that_fails_ends_the_replay_with_the_line_and_what_was_decided() {
        // Each request needs an entry, for which this store has no room after 41 of them.
        let policy = "[[limit]]\nname = \"log\"\nalgorithm = \"sliding-log\"\nrate = \"100/d\"";
        let store = MemoryStore::builder().entries(41).build();
        let limiter = &RateLimiter::new(toml::from_str(policy).expect("a policy"), store);
        let line = |n| format!("{{\"at_us\":{n},\"key\":\"k{n}\"}}\n");
        let log: String = (0..100).map(line).collect();
        let bytes = Box::new(std::io::Cursor::new(log));
        let inputs = vec![NamedInput { name: "input".into(), bytes }];
        let (format, how) = (Format::default(), Reading::default());
        let requests = ReplayedRequests::new(inputs, &format, Box::new(()), how);
        let this = Judge::new(limiter, false, false);
        let replay = Replay { this, other: None, requests, decisions: None };
        let outcome = pollster::block_on(replay.run());
        assert_eq!(outcome.tally.decisions(), 41);
        let failure = outcome.ended.expect_err("it failed");
        assert!(failure.to_string().contains("line 42: the store failed: "), "{failure}");
    }
}
