//! [`ReplayedRequests`]: the requests of all inputs, in the order of their times.
//!
//! A server writes a line when it has answered, with the time at which the request came. So a long
//! response puts its line behind those of later requests, and the lines of an access log are sorted
//! here, within a window of time. A trace is decided in the order of its lines: it says what a
//! store is asked, and a clock may go back.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::iter;
use std::path::Path;
use std::sync::Arc;
use std::vec;

use ratelimit_core::store::Op;
use ratelimit_core::{Algorithm, AnyAlgorithm, Limit, Limits, Timestamp};

use super::Trouble;
use crate::failure::Failure;
use crate::input::{
    Batch, Batches, Detector, FormatArg, InputEntry, LineFormat, Lines, LogOptions, NamedInput,
    OwnFormat, ReadLine, Text, guess, names_of,
};
use crate::summary::WARNING;
use crate::text::{count, plural};
use crate::watcher::Watcher;

/// How far behind an earlier line a line of an access log is sorted in.
const WINDOW_US: u64 = 5 * 60 * 1_000_000;
/// The most lines that wait in the window, of all inputs together.
const WINDOW_LINES: usize = 1_000_000;

/// How the lines of inputs are written.
#[derive(Clone, Debug)]
pub struct Format {
    /// The format, or that the lines tell it.
    pub named: FormatArg,
    /// The format that the user describes, in place of a name.
    pub own: Option<OwnFormat>,
    /// What else there is to say of the lines of logs.
    pub options: LogOptions,
    /// Whether lines in no order of time are decided all the same.
    pub unsorted: bool,
}

impl Default for Format {
    fn default() -> Self {
        let options = LogOptions::default();
        Self { named: FormatArg::Auto, own: None, options, unsorted: false }
    }
}

/// How inputs are read.
#[allow(clippy::struct_excessive_bools, reason = "each is chosen by itself")]
#[derive(Clone, Copy, Debug, Default)]
pub struct Reading {
    /// Whether the first bad line ends the replay.
    pub strict: bool,
    /// Whether no complaint about a line is made, as in a second pass.
    pub silent: bool,
    /// Whether a request keeps the text of its line.
    pub keeps_lines: bool,
    /// Whether the requests at one time count as spread evenly within the second that begins there.
    pub spread: bool,
}

/// One request, and where it stands.
pub struct ReplayedRequest {
    /// The name of its input.
    pub(super) input: Arc<Path>,
    /// The number of its line.
    pub(super) number: u64,
    /// The request.
    pub entry: Box<InputEntry>,
}

/// How far the inputs were out of order.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Order {
    /// Lines of access logs that were sorted in before an earlier one.
    pub(crate) sorted: u64,
    /// Lines of access logs that came too late to be sorted in.
    pub(crate) late: u64,
    /// Lines of traces behind an earlier one.
    pub(crate) back: u64,
    /// Requests that hold a lease for all of its time, because the input does not tell how long
    /// they took, though it does of others.
    pub(crate) endless: u64,
    /// Whether the times of all lines of access logs are whole seconds, as most servers write them.
    pub is_in_seconds: bool,
}

impl Order {
    /// Whether more than one request in a hundred came too late, so that the order says nothing.
    pub(crate) const fn is_shuffled(self, decisions: u64) -> bool {
        self.late > decisions / 100
    }

    /// How many lines came too late, and what helps.
    pub(crate) fn lateness(self) -> String {
        let (minutes, most) = (WINDOW_US / 60_000_000, count(WINDOW_LINES as u64));
        let late = plural(self.late, "line", "lines");
        format!(
            "{late} came more than {minutes} minutes or {most} lines late and were decided late, so the \
             numbers are not exact; name the logs of several servers as inputs of their own, or sort them"
        )
    }

    /// What a reader must know before trusting the rest.
    pub fn note(self) -> Option<String> {
        let lines = |number| plural(number, "line", "lines");
        let notes = [
            format!("{WARNING}{}", self.lateness()),
            lines(self.sorted) + " came after a later one and were sorted by time",
            lines(self.back)
                + " of a trace came after a later one; a trace is decided in the order of its lines",
            lines(self.endless)
                + " with no duration: such a request holds its place for the whole lease",
        ];
        let numbers = [self.late, self.sorted, self.back, self.endless];
        let told = numbers.into_iter().zip(notes).filter(|(number, _)| *number > 0);
        let note: Vec<_> = told.map(|(_, note)| note).collect();
        (!note.is_empty()).then(|| note.join(". "))
    }
}

/// The requests of all inputs, in the order of their times.
pub struct ReplayedRequests {
    inputs: Vec<Input>,
    /// What ended the reading before the first request was asked for.
    failed: Option<Failure>,
    /// Whether a limit has leases that end with their requests.
    has_leases: bool,
    /// Whether lines in no order of time are decided all the same.
    pub(super) unsorted: bool,
    /// The names of all inputs, and the format that the user asked for.
    names: String,
    pub(super) asked: FormatArg,
    /// Whether the user describes the format, in place of a name.
    pub(super) has_own: bool,
    pub(super) trouble: Trouble,
    /// Requests of one time that are spread within its second, and the first one behind them.
    second: VecDeque<ReplayedRequest>,
    behind: Option<ReplayedRequest>,
}

impl ReplayedRequests {
    /// The requests of these inputs.
    pub fn new(
        inputs: Vec<NamedInput>,
        format: &Format,
        watcher: Box<dyn Watcher>,
        how: Reading,
    ) -> Self {
        let options = LogOptions { keeps_lines: how.keeps_lines, ..format.options.clone() };
        let (options, own) = (Arc::new(options), &format.own);
        let paths: Vec<_> = inputs.iter().map(|input| input.name.clone()).collect();
        let (several, mut failed) = (inputs.len() > 1, None);
        let input = |NamedInput { name, bytes }: NamedInput| {
            let name = Arc::<Path>::from(name);
            let batches = watcher.read(Batches {
                name: Arc::clone(&name),
                lines: Lines::new(Box::new(Text::new(bytes))),
                parser: None,
                detector: Detector::new(format.named, own.clone(), Arc::clone(&options)),
                // Nothing else may name an input.
                names_all: how.strict || several,
                is_over: false,
            });
            let batches = batches.unwrap_or_else(|error| {
                let what = format!("{}: cannot be read: {error}", name.display());
                failed = Some(Failure::input(what));
                Box::new(iter::empty())
            });
            Input::new(name, batches, WINDOW_LINES / paths.len().max(1))
        };
        let inputs: Vec<_> = inputs.into_iter().map(input).collect();
        let order = Order::default();
        let trouble = Trouble {
            watcher,
            how,
            several,
            bad_lines: 0,
            first_bad: None,
            untold: 0,
            refused: 0,
            order,
            waiting: 0,
        };
        let (names, asked, unsorted) = (names_of(&paths), format.named, format.unsorted);
        let has_own = own.is_some();
        let has_leases = false;
        let (second, behind) = (VecDeque::new(), None);
        Self {
            inputs,
            failed,
            has_leases,
            unsorted,
            names,
            asked,
            has_own,
            trouble,
            second,
            behind,
        }
    }

    /// The limits that can be tried on these inputs, and what must be said of the others.
    ///
    /// How many requests are in flight follows from how long each takes, which few access logs
    /// tell.
    pub fn applicable(
        &mut self,
        limits: Limits<AnyAlgorithm>,
    ) -> Result<(Limits<AnyAlgorithm>, Option<String>), Failure> {
        let (leases, others): (Vec<_>, Vec<_>) =
            limits.iter().partition(|limit| limit.algorithm().has_leases());
        if leases.is_empty() {
            return Ok((limits, None));
        }
        let names = leases.into_iter().map(Limit::name).collect::<Vec<_>>().join(", ");
        // The format of each input is known once its first request is. The replay reports a
        // failure, with what was read before.
        let mut peeked = self.inputs.iter_mut().map(|input| input.peek(&mut self.trouble));
        self.failed = self.failed.take().or_else(|| peeked.find_map(Result::err));
        let is_told = |input: &Input| input.has_durations || !input.is_access_log();
        if self.inputs.iter().any(is_told) {
            self.has_leases = true;
            return Ok((limits, None));
        }
        let lacks_unit =
            |input: &Input| input.format.as_ref().is_some_and(|format| format.lacks_unit);
        let why = if self.inputs.iter().any(lacks_unit) {
            "the number at the end of the lines has no unit; if it is the duration of the request, add --duration-unit \
             us, ms or s"
        } else {
            "the log has no durations"
        };
        let note = format!("{names}: a concurrency limit cannot be replayed, because {why}");
        if others.is_empty() {
            return Err(Failure::input(format!("{note}; name a policy with other limits as well")));
        }
        let others = Limits::new(others.into_iter().cloned());
        let others = others.map_err(|error| Failure::input(error.to_string()))?;
        Ok((others, Some(note + ". It is left out here")))
    }

    /// That nothing tells the format of the inputs, and what their first line seems to be.
    pub fn unknown(&self) -> Failure {
        let of_input = |input: &Input| {
            let name = input.name.display();
            Some(format!("{name}: {}", guess(input.first.as_deref()?)))
        };
        let guess = self.inputs.iter().find_map(of_input);
        Failure::input(guess.unwrap_or_else(|| format!("{}: no line is there", self.names)))
    }

    /// That fewer lines of an input are requests in its format than are not: then the format is
    /// another, or the file is no log.
    pub(super) fn mostly_unread(&self) -> Option<Failure> {
        let input = self.inputs.iter().find(|input| input.unread > input.read)?;
        let lines = plural(input.read + input.unread, "line", "lines");
        let format = input.format.as_ref().map(|format| format!(" as {}", format.name));
        let remedy = if self.has_own {
            "correct what --log-format or --fields tells"
        } else {
            "name the format with --format or --log-format if it is another"
        };
        Some(Failure::input(format!(
            "{}: only {} of {lines} can be read{}; mend the others, or {remedy}",
            input.name.display(),
            count(input.read),
            format.unwrap_or_default()
        )))
    }

    /// The names of the inputs.
    pub fn names(&self) -> &str {
        &self.names
    }

    /// The format of the inputs, as far as they are known: of the first that has one.
    pub fn format(&self) -> Option<String> {
        self.inputs.iter().find_map(|input| input.format.as_ref()).map(|format| format.name.clone())
    }

    /// Whether an input is a log, and no trace.
    pub(super) fn reads_logs(&self) -> bool {
        self.inputs.iter().any(Input::is_access_log)
    }

    /// What the lines of the inputs leave open, and the options that tell it.
    pub(super) fn hints(&self) -> Vec<String> {
        let formats = self.inputs.iter().filter_map(|input| input.format.as_ref());
        let hints: BTreeSet<_> = formats.flat_map(|format| format.hints.iter().cloned()).collect();
        hints.into_iter().collect()
    }

    pub(super) fn order(&self) -> Order {
        let order = self.trouble.order;
        let endless = if self.has_leases { order.endless } else { 0 };
        let is_in_seconds =
            self.inputs.iter().all(|input| input.is_access_log() && !input.has_fractions);
        Order { endless, is_in_seconds, ..order }
    }

    /// The earliest request that no input has given yet; `None` at the end.
    pub fn next_request(&mut self) -> Result<Option<ReplayedRequest>, Failure> {
        if !self.trouble.how.spread {
            return self.next_in_order();
        }
        if self.second.is_empty() {
            self.second.extend(self.behind.take());
            while let Some(next) = self.next_in_order()? {
                let is_later = self.second.front().is_some_and(|one| one.entry.at != next.entry.at);
                if is_later || self.second.len() >= WINDOW_LINES {
                    self.behind = Some(next);
                    break;
                }
                self.second.push_back(next);
            }
            let all = self.second.len().max(1) as u64;
            for (nth, request) in (0..).zip(&mut self.second) {
                let at_us = request.entry.at.as_us() + nth * 1_000_000 / all;
                request.entry.at = Timestamp::saturating_from_us(at_us);
            }
        }
        Ok(self.second.pop_front())
    }

    fn next_in_order(&mut self) -> Result<Option<ReplayedRequest>, Failure> {
        if let Some(failure) = self.failed.take() {
            return Err(failure);
        }
        let mut earliest: Option<(Timestamp, usize)> = None;
        for (place, input) in self.inputs.iter_mut().enumerate() {
            let at = input.peek(&mut self.trouble)?;
            self.trouble.check()?;
            earliest = earliest.into_iter().chain(at.map(|at| (at, place))).min();
        }
        Ok(earliest.and_then(|(_, place)| {
            let input = &mut self.inputs[place];
            let (_, (number, entry)) = input.window.pop_first()?;
            self.trouble.waiting -= 1;
            Some(ReplayedRequest { input: Arc::clone(&input.name), number, entry })
        }))
    }
}

/// The requests of one input; those of an access log by their times.
struct Input {
    name: Arc<Path>,
    batches: Box<dyn Iterator<Item = Batch>>,
    /// What is left of a batch.
    lines: vec::IntoIter<ReadLine>,
    /// `None` until a line tells the format.
    format: Option<LineFormat>,
    /// The first line of an input in no known format, or its beginning.
    first: Option<Box<[u8]>>,
    /// Whether a request tells how long it took.
    has_durations: bool,
    /// What was read, each behind the number of its line: of an access log by time, of a trace in
    /// the order of its lines. A line may have several requests, as an array of JSON does.
    window: BTreeMap<(Timestamp, u64), (u64, Box<InputEntry>)>,
    /// How many lines may wait even if those of other inputs fill the window.
    share: usize,
    /// The latest time that was read.
    latest: Timestamp,
    /// The time of the last request that left the window.
    left: Timestamp,
    ended: bool,
    /// What ended it, until all that was read before is decided.
    failed: Option<Failure>,
    /// Whether a request came at a fraction of a second.
    has_fractions: bool,
    /// How many lines are requests in its format, and how many are not.
    read: u64,
    unread: u64,
}

impl Input {
    fn new(name: Arc<Path>, batches: Box<dyn Iterator<Item = Batch>>, share: usize) -> Self {
        Self {
            name,
            batches,
            lines: Vec::new().into_iter(),
            format: None,
            first: None,
            has_durations: false,
            window: BTreeMap::new(),
            share,
            latest: Timestamp::ZERO,
            left: Timestamp::ZERO,
            ended: false,
            failed: None,
            has_fractions: false,
            read: 0,
            unread: 0,
        }
    }

    const fn is_access_log(&self) -> bool {
        matches!(&self.format, Some(format) if format.is_log)
    }

    /// The time of the next request.
    fn peek(&mut self, trouble: &mut Trouble) -> Result<Option<Timestamp>, Failure> {
        loop {
            if let Some(((at, _), (_, entry))) = self.window.first_key_value() {
                let is_full = self.ended
                    || trouble.waiting >= WINDOW_LINES && self.window.len() >= self.share;
                let is_due = is_full || self.latest.saturating_us_since(*at) > WINDOW_US;
                if is_due || !self.is_access_log() {
                    self.left = self.left.max(entry.at);
                    return Ok(Some(entry.at));
                }
            } else if self.ended {
                return self.failed.take().map_or(Ok(None), Err);
            }
            let read = self.read(trouble).unwrap_or_else(|failure| {
                self.failed = Some(failure);
                None
            });
            let Some((number, entry)) = read else {
                self.ended = true;
                continue;
            };
            let (is_behind, is_late) = (entry.at < self.latest, entry.at < self.left);
            self.latest = self.latest.max(entry.at);
            let mut place = Timestamp::ZERO;
            if self.is_access_log() {
                place = entry.at;
                trouble.order.late += u64::from(is_late);
                trouble.order.sorted += u64::from(is_behind && !is_late);
            } else {
                trouble.order.back += u64::from(is_behind);
            }
            self.window.insert((place, self.read), (number, entry));
            trouble.waiting += 1;
        }
    }

    /// The request of the next line that is one. Others are reported.
    fn read(&mut self, trouble: &mut Trouble) -> Result<Option<(u64, Box<InputEntry>)>, Failure> {
        loop {
            // An interrupted input may end within a line.
            if trouble.watcher.is_interrupted() {
                return Ok(None);
            }
            let Some(line) = self.lines.next() else {
                let Some(batch) = self.batches.next() else { return Ok(None) };
                let Batch { lines, format, first } = batch;
                (self.lines, self.format, self.first) = (lines, format, first);
                continue;
            };
            match line {
                ReadLine::Request(number, entry) => {
                    self.read += 1;
                    self.has_fractions |= entry.at.as_us() % 1_000_000 > 0;
                    if entry.op == Op::Acquire {
                        self.has_durations |= entry.duration_us.is_some();
                        trouble.order.endless += u64::from(entry.duration_us.is_none());
                    }
                    return Ok(Some((number, entry)));
                }
                ReadLine::Bad(number, bad) => {
                    trouble.bad(&self.name, number, &bad)?;
                    self.unread += 1;
                }
                ReadLine::Unknown(number, bad) => trouble.bad(&self.name, number, &bad)?,
                ReadLine::Untold(lines) => trouble.untold(lines),
                ReadLine::Failed(failure) => return Err(failure),
            }
        }
    }
}
