//! Turns a file into requests: the bytes, their lines, and the requests in the lines.

use ratelimit_core::store::Op;
use ratelimit_core::{LimitCosts, Timestamp};

use crate::args::{FormatArg, UnitArg};
use crate::caller::Caller;
use crate::text::{printable, quoted};

mod access_log;
mod csv;
mod format;
mod jsonl;
mod lines;
mod source;

pub(crate) use access_log::agent;
pub(crate) use format::{Detector, LINES as DETECTED_LINES};
pub(crate) use lines::{Line, Lines};
pub(crate) use source::InputSource;

/// The request in one line of the input.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct InputEntry {
    pub(crate) at: Timestamp,
    pub(crate) caller: Caller,
    pub(crate) costs: LimitCosts,
    pub(crate) op: Op,
    /// How long the request took, if the input tells.
    pub(crate) duration_us: Option<u64>,
    /// Its line, if it is to be shown.
    pub(crate) line: Option<String>,
}

/// In place of a limit's name: all limits whose costs are not told.
pub(crate) const OTHERS: &str = "*";

/// Why a line cannot be replayed: the fault, and what would be accepted.
pub(crate) type BadLine = String;

/// The number of bad lines that are reported one by one; the rest are only counted.
pub(crate) const NAMED_BAD_LINES: u64 = 20;

/// The parser of one format's lines.
pub(crate) enum Parser {
    AccessLog(access_log::AccessLog),
    Jsonl,
    Csv(csv::Csv),
}

impl Parser {
    /// The parser of a format; `None` if the format depends on the input.
    pub(crate) fn of(format: FormatArg, unit: Option<UnitArg>) -> Option<Self> {
        match format {
            FormatArg::Jsonl => Some(Self::Jsonl),
            FormatArg::Combined => Some(Self::AccessLog(access_log::AccessLog::new(unit))),
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

/// The error of a line that was too long to keep.
pub(crate) const TOO_LONG: &str = "is longer than 1 MiB";

/// The number of a field, if it was one, and otherwise what stands there.
fn whole_number(field: &str, number: Option<u64>, shown: &str) -> Result<u64, BadLine> {
    number.ok_or_else(|| {
        let shown = printable(shown, 40);
        format!("{field} is {shown}, expected a whole number from 0 to {}", u64::MAX)
    })
}

/// The moment `at_us`, if it is in the range of the algorithms.
fn timestamp(at_us: u64) -> Result<Timestamp, BadLine> {
    Timestamp::from_us(at_us).ok_or_else(|| {
        let last = Timestamp::MAX.as_us();
        format!("at_us is {at_us}, and {last} (in the year 2112) is the last time there is")
    })
}

/// The operation of this name.
fn op(name: &str) -> Result<Op, BadLine> {
    const OPS: [Op; 5] = [Op::Acquire, Op::Peek, Op::Refund, Op::Reset, Op::Force];
    OPS.into_iter().find(|op| op.to_string() == name).ok_or_else(|| {
        format!("op is {}; accepted are acquire, peek, refund, reset, force", quoted(name, 40))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Anything between noise and a line that is nearly right.
    fn bytes() -> impl Strategy<Value = Vec<u8>> {
        let near = prop::sample::select(
            &[
                "192.0.2.7 - - [17/May/2015:10:05:03 +0000] \"GET /a?b HTTP/1.1\" 200 1 \"-\" \"x",
                "{\"at_us\": 5, \"key\": \"k\", \"keys\": {\"ip\": null}, \"cost\": 3}",
                "5,\"k\"\"k\",3,peek",
            ][..],
        );
        prop_oneof![
            prop::collection::vec(any::<u8>(), 0..200),
            (near, any::<prop::sample::Index>(), any::<u8>(), any::<bool>()).prop_map(
                |(line, at, byte, cut)| {
                    let mut line = line.as_bytes().to_vec();
                    let at = at.index(line.len());
                    line[at] = byte;
                    if cut {
                        line.truncate(at);
                    }
                    line
                }
            ),
        ]
    }

    proptest! {
        #[test]
        fn no_bytes_panic_a_parser(lines in prop::collection::vec(bytes(), 1..4)) {
            for format in [FormatArg::Combined, FormatArg::Jsonl] {
                let mut parser = Parser::of(format, None).expect("no header");
                for line in &lines {
                    let _ = parser.parse(line);
                }
            }
            for format in [FormatArg::Auto, FormatArg::Csv] {
                let mut detector = Detector::new(format, None);
                for (number, line) in (1..).zip(&lines) {
                    let _ = detector.look(Line { number, bytes: Some(line) });
                }
                let _ = detector.give_up(false);
            }
            let mut csv = csv::Csv::under(b"at_us,key,cost,op").unwrap().expect("a header");
            for line in &lines {
                let _ = csv.parse(line);
            }
        }
    }
}
