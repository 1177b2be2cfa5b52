//! [`Detector`]: finds the format of an input from the first line that is a request in one, so that
//! a broken line before it affects nothing else.

use std::sync::Arc;

use serde::de::IgnoredAny;

use super::csv::{self, Csv};
use super::entry::{BadLine, NAMED_BAD_LINES, TOO_LONG, kept_line};
use super::found::LogOptions;
use super::jsonl;
use super::lines::Line;
use super::parser::{FormatArg, OwnFormat, Parser, Reader};
use super::w3c;
use crate::named::Named as _;

/// The number of lines after which the format counts as unknown.
pub(crate) const LINES: u64 = 1_000;

/// How many directives are kept until one names the fields.
const DIRECTIVES: usize = 16;

/// The bad lines before the line that decided the format, each with its number.
type BadLines = Vec<(u64, BadLine)>;

/// Searches for the first line of a known format.
pub(crate) struct Detector {
    /// What the user declared. Even an input declared as CSV needs a header.
    pub(crate) format: FormatArg,
    /// The format that the user describes, in place of a name.
    own: Option<OwnFormat>,
    options: Arc<LogOptions>,
    /// The first line, or its beginning.
    pub(crate) first: Option<Box<[u8]>>,
    /// The format that the lines so far resemble.
    likely: FormatArg,
    /// The directives above the one that names the fields.
    directives: Vec<Vec<u8>>,
    /// The bad lines so far, each with the format that it resembles. Those behind the first
    /// [`NAMED_BAD_LINES`] are only counted, so their bytes are not kept.
    bad: Vec<(u64, Option<Vec<u8>>, FormatArg)>,
}

impl Detector {
    pub(crate) fn new(format: FormatArg, own: Option<OwnFormat>, options: Arc<LogOptions>) -> Self {
        let likely = if format == FormatArg::Auto { FormatArg::Combined } else { format };
        Self { format, own, options, first: None, likely, directives: Vec::new(), bad: Vec::new() }
    }

    /// Examines a line that is not blank: the parser of its format, and the bad lines before it. A
    /// header is consumed. One that cannot be used is an error.
    pub(crate) fn look(&mut self, line: Line<'_>) -> Result<Option<(Parser, BadLines)>, BadLine> {
        let bytes = line.bytes.unwrap_or_default();
        if let Some(own) = &self.own {
            let parser = Parser::own(own, bytes, &self.options)?;
            return Ok(Some((parser, Vec::new())));
        }
        let is_auto = self.format == FormatArg::Auto;
        let with = |reader, format| Some(Parser::new(reader, format, None, &self.options));
        // The order matters: a request in a log may contain commas, and so may text in JSON.
        let found = if let FormatArg::Jsonl | FormatArg::Csv = self.format {
            None
        } else {
            Parser::find(self.format, bytes, &self.options)?
        };
        let is_csv = self.format == FormatArg::Csv;
        let found = if found.is_some() {
            found
        } else if self.format == FormatArg::Jsonl || is_auto && jsonl::is_record(bytes) {
            // A record with errors belongs to a trace, too.
            with(Reader::Jsonl, FormatArg::Jsonl)
        } else if (is_auto || is_csv)
            && let Some(csv) = Csv::under(bytes)?
        {
            with(Reader::Csv(csv), FormatArg::Csv)
        } else {
            None
        };
        if found.as_ref().is_some_and(|parser| !parser.is_log()) {
            self.options.of_trace()?;
        }
        let Some(mut parser) = found else {
            if w3c::is_directive(bytes) && !is_csv {
                if self.directives.len() < DIRECTIVES {
                    self.directives.push(kept_line(bytes).into());
                }
                return Ok(None);
            }
            if is_auto && bytes.trim_ascii_start().starts_with(b"{") {
                // An object without a time of a trace is of another log.
                if serde_json::from_slice::<IgnoredAny>(bytes).is_err() {
                    self.likely = FormatArg::Jsonl;
                }
            } else if is_auto && bytes.windows(5).any(|five| five == b"at_us") {
                self.likely = FormatArg::Csv;
            }
            self.first.get_or_insert_with(|| kept_line(bytes).into());
            let kept = line.bytes.filter(|_| (self.bad.len() as u64) < NAMED_BAD_LINES);
            self.bad.push((line.number, kept.map(<[u8]>::to_vec), self.likely));
            return Ok(None);
        };
        for directive in self.directives.drain(..) {
            parser.directive(&directive)?;
        }
        let before = self.before(Some(&mut parser));
        Ok(Some((parser, before)))
    }

    /// Whether the detector has examined enough lines to give up.
    pub(crate) const fn is_at_a_loss(&self) -> bool {
        self.bad.len() as u64 >= LINES
    }

    /// The lines so far, each with the error for the format that it resembles; and how many
    /// resemble none, unless each is to be `named`.
    pub(crate) fn give_up(&mut self, named: bool) -> (BadLines, u64) {
        let is_named = named || self.format != FormatArg::Auto;
        let resembles = |likely: &FormatArg| is_named || *likely != FormatArg::Combined;
        let all = self.bad.len();
        self.bad.retain(|(.., likely)| resembles(likely));
        let others = all - self.bad.len();
        (self.before(None), others as u64)
    }

    /// The lines so far, each with its error in a format.
    fn before(&mut self, mut found: Option<&mut Parser>) -> BadLines {
        let options = Arc::clone(&self.options);
        let mut judged = |(number, bytes, likely): (u64, Option<Vec<u8>>, _)| {
            let Some(bytes) = bytes else { return Some((number, TOO_LONG.to_owned())) };
            let bad = match &mut found {
                Some(parser) => parser.explain(&bytes),
                None => match Parser::to_explain(likely, &options) {
                    Some(mut parser) => Some(parser.explain(&bytes).unwrap_or_else(|| {
                        format!("is in another format than was asked for: {}", parser.name())
                    })),
                    None if likely == FormatArg::Csv => Some(csv::no_header(&bytes)),
                    None => Some(format!("is not in the format {}", likely.name())),
                },
            };
            Some((number, bad?))
        };
        std::mem::take(&mut self.bad).into_iter().filter_map(&mut judged).collect()
    }
}
