//! [`Parser`]: reads the lines of one format.

use clap::ValueEnum;

use super::access_log::{AccessLog, UnitArg};
use super::csv::Csv;
use super::entry::{BadLine, InputEntry};
use super::jsonl;

/// A format, as the command line names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum FormatArg {
    /// Decided by the first line of a known format.
    Auto,
    /// An access log in Common or Combined format.
    Combined,
    /// A trace, one JSON object per line.
    Jsonl,
    /// A trace as CSV with a header.
    Csv,
}

/// The parser of one format's lines.
pub(crate) enum Parser {
    AccessLog(AccessLog),
    Jsonl,
    Csv(Csv),
}

impl Parser {
    /// The parser of a format; `None` if the format depends on the input.
    pub(crate) fn for_format(format: FormatArg, unit: Option<UnitArg>) -> Option<Self> {
        match format {
            FormatArg::Jsonl => Some(Self::Jsonl),
            FormatArg::Combined => Some(Self::AccessLog(AccessLog::new(unit))),
            FormatArg::Csv | FormatArg::Auto => None,
        }
    }

    /// Parses a line.
    pub(crate) fn parse(&mut self, line: &[u8]) -> Result<InputEntry, BadLine> {
        match self {
            Self::AccessLog(parser) => parser.parse(line),
            Self::Jsonl => jsonl::parse(line),
            Self::Csv(parser) => parser.parse(line),
        }
    }

    /// The format's name, for the summary.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::AccessLog(_) => "access log",
            Self::Jsonl => "JSONL trace",
            Self::Csv(_) => "CSV trace",
        }
    }
}
