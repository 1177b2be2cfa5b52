//! [`Batches`]: the requests in the lines of one input. It knows nothing of other inputs, so that a
//! thread may read ahead.

use std::path::Path;
use std::sync::Arc;
use std::vec;

use super::entry::{BadLine, InputEntry, TOO_LONG};
use super::format::{Detector, LINES as DETECTED_LINES};
use super::guess::guess;
use super::lines::Lines;
use super::parser::{FormatArg, Parser};
use crate::failure::Failure;
use crate::named::Named as _;
use crate::text::plural;

/// The most lines of a batch.
const LINES: usize = 1_024;

/// Reads the lines of one input, as many at once as it gives without waiting.
pub struct Batches {
    pub(crate) name: Arc<Path>,
    pub(crate) lines: Lines,
    /// `None` until a line tells the format.
    pub(crate) parser: Option<Parser>,
    pub(crate) detector: Detector,
    /// Whether the lines of an input in no known format are reported one by one.
    pub(crate) names_all: bool,
    pub(crate) is_over: bool,
}

/// What some lines of an input say.
pub struct Batch {
    pub(crate) lines: vec::IntoIter<ReadLine>,
    /// The format, once it is known.
    pub(crate) format: Option<LineFormat>,
    /// The first line of an input in no known format, or its beginning.
    pub(crate) first: Option<Box<[u8]>>,
}

/// What a line says.
pub(crate) enum ReadLine {
    /// A request, behind the number of the line.
    Request(u64, Box<InputEntry>),
    /// What keeps a line from being a request in the input's format.
    Bad(u64, BadLine),
    /// The same of an input in no known format.
    Unknown(u64, BadLine),
    /// So many lines that resemble no format.
    Untold(u64),
    /// Why the rest cannot be read.
    Failed(Failure),
}

/// What must be known of a format beside its requests.
pub(crate) struct LineFormat {
    /// The name, for the summary.
    pub(crate) name: String,
    /// Whether its lines are requests to a server, and not a trace.
    pub(crate) is_log: bool,
    /// Whether a number at the end of the lines may be a duration, and has no unit.
    pub(crate) lacks_unit: bool,
    /// What the lines leave open, and the options that tell it.
    pub(crate) hints: Vec<String>,
}

impl Iterator for Batches {
    type Item = Batch;

    fn next(&mut self) -> Option<Batch> {
        if self.is_over {
            return None;
        }
        let mut read = Vec::new();
        while !self.is_over && (read.is_empty() || read.len() < LINES && self.lines.has_next()) {
            if let Err(failure) = self.read(&mut read) {
                self.is_over = true;
                read.push(ReadLine::Failed(failure));
            }
        }
        let format = self.parser.as_ref().map(|parser| LineFormat {
            name: parser.name(),
            is_log: parser.is_log(),
            lacks_unit: parser.lacks_unit(),
            hints: parser.hints(),
        });
        let first = self.detector.first.clone().filter(|_| format.is_none());
        Some(Batch { lines: read.into_iter(), format, first })
    }
}

/// Whether a line has a carriage return within, as of a system whose lines end with one.
fn has_bare_return(line: &[u8]) -> bool {
    let line = line.trim_ascii_end();
    line.contains(&b'\r')
        && line.windows(2).any(|two| two[0] == b'\r' && two[1] != b'\r' && two[1] != b'\n')
}

impl Batches {
    /// Reads the next line.
    fn read(&mut self, read: &mut Vec<ReadLine>) -> Result<(), Failure> {
        let line = match self.lines.next() {
            Ok(Some(line)) => line,
            Ok(None) => return self.end(read),
            Err(error) => {
                self.give_up(read);
                let after = match self.lines.number {
                    0 => String::new(),
                    number => format!(" after line {number}"),
                };
                let name = self.name.display();
                return Err(Failure::input(format!("{name}: cannot be read{after}: {error}")));
            }
        };
        let number = line.number;
        if line.bytes.is_some_and(|bytes| bytes.trim_ascii().is_empty()) {
            return Ok(());
        }
        if line.bytes.is_some_and(has_bare_return) {
            let bad =
                "has carriage returns in place of line breaks; convert them, with tr '\\r' '\\n'";
            if self.parser.is_none() {
                let name = self.name.display();
                return Err(Failure::input(format!("{name}: line {number}: {bad}")));
            }
            read.push(ReadLine::Bad(number, bad.to_owned()));
            return Ok(());
        }
        let parser = match &mut self.parser {
            Some(parser) => parser,
            unknown => {
                let bad_header =
                    |bad| Failure::input(format!("{}: line {number}: {bad}", self.name.display()));
                let Some((found, before)) = self.detector.look(line).map_err(bad_header)? else {
                    return if self.detector.is_at_a_loss() { self.end(read) } else { Ok(()) };
                };
                let parser = unknown.insert(found);
                read.extend(before.into_iter().map(|(number, bad)| ReadLine::Bad(number, bad)));
                if parser.has_header() {
                    return Ok(());
                }
                parser
            }
        };
        match line.bytes.ok_or(TOO_LONG.to_owned()).and_then(|bytes| parser.parse(bytes)) {
            Ok(None) => {}
            Ok(Some(entry)) => read.push(ReadLine::Request(number, Box::new(entry))),
            Err(bad) => read.push(ReadLine::Bad(number, bad)),
        }
        Ok(())
    }

    /// Handles the end of the lines, or of those that may tell the format.
    fn end(&mut self, read: &mut Vec<ReadLine>) -> Result<(), Failure> {
        self.is_over = true;
        let gave_up = self.detector.is_at_a_loss();
        self.give_up(read);
        if !gave_up {
            return Ok(());
        }
        let lines = plural(DETECTED_LINES, "line", "lines");
        let remedy = match (self.detector.format, &self.detector.first) {
            (FormatArg::Csv, _) => {
                "is a CSV header; begin it with one such as at_us,key,cost,op".to_owned()
            }
            (FormatArg::Auto, Some(first)) => format!("is a request: {}", guess(first)),
            (format, _) => format!("is a request as {}; name another format", format.name()),
        };
        let name = self.name.display();
        Err(Failure::input(format!("{name}: none of its first {lines} {remedy}")))
    }

    /// Tells of the lines of an input in no known format.
    fn give_up(&mut self, read: &mut Vec<ReadLine>) {
        let (told, others) = self.detector.give_up(self.names_all);
        read.extend(told.into_iter().map(|(number, bad)| ReadLine::Unknown(number, bad)));
        read.push(ReadLine::Untold(others));
    }
}
