//! [`Detector`]: finds the format of an input from the first line that parses in one, so that a
//! broken line before it affects nothing else.

use super::access_log::{AccessLog, UnitArg};
use super::csv::{self, Csv};
use super::entry::{BadLine, NAMED_BAD_LINES, TOO_LONG};
use super::jsonl;
use super::lines::Line;
use super::parser::{FormatArg, Parser};

/// The number of lines after which the format counts as unknown.
pub(crate) const LINES: u64 = 1_000;

/// The bad lines before the line that decided the format, each with its number.
type BadLines = Vec<(u64, BadLine)>;

/// Searches for the first line of a known format.
pub(crate) struct Detector {
    /// What the user declared. Even an input declared as CSV needs a header.
    pub(crate) format: FormatArg,
    /// The unit of an access log's durations.
    unit: Option<UnitArg>,
    /// The format that the lines so far resemble.
    likely: FormatArg,
    /// The bad lines so far, each with the format that it resembles. Those behind the first
    /// [`NAMED_BAD_LINES`] are only counted, so their bytes are not kept.
    bad: Vec<(u64, Option<Vec<u8>>, FormatArg)>,
}

impl Detector {
    pub(crate) fn new(format: FormatArg, unit: Option<UnitArg>) -> Self {
        let is_csv = format == FormatArg::Csv;
        let likely = if is_csv { FormatArg::Csv } else { FormatArg::Combined };
        Self { format, unit, likely, bad: Vec::new() }
    }

    /// Examines a line that is not blank: the parser of its format, and the bad lines before it. Of
    /// a CSV trace it is the header, which is consumed. A header that cannot be used is an error.
    pub(crate) fn look(&mut self, line: Line<'_>) -> Result<Option<(Parser, BadLines)>, BadLine> {
        let (bytes, is_csv) = (line.bytes.unwrap_or_default(), self.format == FormatArg::Csv);
        // The order matters: a request in a log may contain commas, and so may text in JSON.
        let found = if !is_csv && AccessLog::new(self.unit).parse(bytes).is_ok() {
            (FormatArg::Combined, Parser::AccessLog(AccessLog::new(self.unit)))
        } else if !is_csv && jsonl::is_record(bytes) {
            // A record with errors belongs to a trace, too.
            (FormatArg::Jsonl, Parser::Jsonl)
        } else if let Some(csv) = Csv::under(bytes)? {
            (FormatArg::Csv, Parser::Csv(csv))
        } else {
            if bytes.trim_ascii_start().starts_with(b"{") && !is_csv {
                self.likely = FormatArg::Jsonl;
            } else if bytes.windows(5).any(|five| five == b"at_us") {
                self.likely = FormatArg::Csv;
            }
            let kept = line.bytes.filter(|_| (self.bad.len() as u64) < NAMED_BAD_LINES);
            self.bad.push((line.number, kept.map(<[u8]>::to_vec), self.likely));
            return Ok(None);
        };
        Ok(Some((found.1, self.before(Some(found.0)))))
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
    fn before(&mut self, format: Option<FormatArg>) -> BadLines {
        let judged = |(number, bytes, likely): (u64, Option<Vec<u8>>, _)| {
            let bad = match (bytes, Parser::for_format(format.unwrap_or(likely), self.unit)) {
                (None, _) => TOO_LONG.to_owned(),
                (Some(bytes), Some(mut parser)) => parser.parse(&bytes).err()?,
                (Some(bytes), None) => csv::no_header(&bytes),
            };
            Some((number, bad))
        };
        std::mem::take(&mut self.bad).into_iter().filter_map(judged).collect()
    }
}
