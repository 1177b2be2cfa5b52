//! [`Detector`]: finds the format of an input from the first line that parses in one, so that a broken line
//! before it affects nothing else.

use super::access_log::AccessLog;
use super::csv::{self, Csv};
use super::jsonl::Jsonl;
use super::{BadLine, Line, Parser, too_long};
use crate::args::{FormatArg, UnitArg};

/// The number of lines after which the format counts as unknown.
pub(crate) const LINES: u64 = 1_000;

/// Searches for the first line of a known format.
#[derive(Debug)]
pub(crate) struct Detector {
    /// Whether the input is declared as CSV, which still needs a header.
    csv_only: bool,
    /// The unit of an access log's durations.
    unit: Option<UnitArg>,
    access_log: AccessLog,
    jsonl: Jsonl,
    /// The format that the lines so far resemble, if any.
    likely: Likely,
    /// The bad lines so far that are to be reported, with their errors in each format.
    bad: Vec<Undecided>,
    bad_lines: u64,
    /// How many bad lines are reported.
    named: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Likely {
    AccessLog,
    Jsonl,
    Csv,
}

#[derive(Debug)]
struct Undecided {
    number: u64,
    access_log: BadLine,
    jsonl: BadLine,
    csv: BadLine,
    likely: Likely,
}

/// What the detector knows once it has found the format.
#[derive(Debug)]
pub(crate) struct Found {
    pub(crate) parser: Parser,
    /// Whether the line that decided the format is a header and therefore consumed.
    pub(crate) header: bool,
    pub(crate) before: Before,
}

/// The bad lines before the line that decided the format.
#[derive(Debug, Default)]
pub(crate) struct Before {
    /// The first of them, each with its number.
    pub(crate) named: Vec<(u64, BadLine)>,
    /// The number of all of them.
    pub(crate) count: u64,
}

impl Detector {
    /// A detector that keeps the errors of this many bad lines.
    pub(crate) fn new(
        format: FormatArg,
        unit: Option<UnitArg>,
        named: u64,
    ) -> Result<Self, BadLine> {
        Ok(Self {
            csv_only: format == FormatArg::Csv,
            unit,
            access_log: AccessLog::new(unit)?,
            jsonl: Jsonl::default(),
            likely: if format == FormatArg::Csv { Likely::Csv } else { Likely::AccessLog },
            bad: Vec::new(),
            bad_lines: 0,
            named,
        })
    }

    /// Examines a line that is not blank. A header that cannot be used is an error.
    pub(crate) fn look(&mut self, line: Line<'_>) -> Result<Option<Found>, BadLine> {
        let Some(bytes) = line.bytes else {
            let [access_log, jsonl, csv] = [too_long(), too_long(), too_long()];
            let likely = self.likely;
            self.keep(Undecided { number: line.number, access_log, jsonl, csv, likely });
            return Ok(None);
        };
        // The order matters: a request in a log may contain commas, and so may text in JSON.
        let access_log = match self.access_log.parse(bytes) {
            Ok(_) if !self.csv_only => {
                return Ok(Some(self.found(Parser::AccessLog(AccessLog::new(self.unit)?), false)));
            }
            parsed => parsed.err(),
        };
        let jsonl = match self.jsonl.parse(bytes) {
            // A record with errors belongs to a trace, too.
            parsed if !self.csv_only && (parsed.is_ok() || Jsonl::is_record(bytes)) => {
                return Ok(Some(self.found(Parser::Jsonl(Jsonl::default()), false)));
            }
            parsed => parsed.err(),
        };
        if csv::is_header(bytes) {
            let parser = Parser::Csv(Csv::new(bytes)?);
            return Ok(Some(self.found(parser, true)));
        }
        if !self.csv_only {
            let looks = if bytes.trim_ascii_start().starts_with(b"{") {
                Some(Likely::Jsonl)
            } else if bytes.windows(5).any(|five| five == b"at_us") {
                Some(Likely::Csv)
            } else {
                None
            };
            self.likely = looks.unwrap_or(self.likely);
        }
        let csv = csv::no_header(bytes);
        let [access_log, jsonl] = [access_log, jsonl].map(|bad| bad.unwrap_or_else(|| csv.clone()));
        let likely = self.likely;
        self.keep(Undecided { number: line.number, access_log, jsonl, csv, likely });
        Ok(None)
    }

    /// Whether the detector has examined enough lines to give up.
    pub(crate) const fn is_at_a_loss(&self) -> bool {
        self.bad_lines >= LINES
    }

    /// The lines so far, each with the error for the format that it resembles.
    pub(crate) fn give_up(&mut self) -> Before {
        self.before(None)
    }

    fn keep(&mut self, line: Undecided) {
        if self.bad_lines < self.named {
            self.bad.push(line);
        }
        self.bad_lines += 1;
    }

    fn found(&mut self, parser: Parser, header: bool) -> Found {
        let format = match parser {
            Parser::AccessLog(_) => Likely::AccessLog,
            Parser::Jsonl(_) => Likely::Jsonl,
            Parser::Csv(_) => Likely::Csv,
        };
        Found { parser, header, before: self.before(Some(format)) }
    }

    fn before(&mut self, format: Option<Likely>) -> Before {
        let judged = |line: Undecided| {
            let bad = match format.unwrap_or(line.likely) {
                Likely::AccessLog => line.access_log,
                Likely::Jsonl => line.jsonl,
                Likely::Csv => line.csv,
            };
            (line.number, bad)
        };
        let named = std::mem::take(&mut self.bad).into_iter().map(judged).collect();
        Before { named, count: std::mem::take(&mut self.bad_lines) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str =
        "192.0.2.7 - - [17/May/2015:10:05:03 +0000] \"GET /?a,at_us,b HTTP/1.1\" 200 1";

    /// Examines these lines: the format found, and the errors of the lines before.
    fn look(format: FormatArg, lines: &[&str]) -> (Option<&'static str>, Vec<(u64, String)>) {
        let mut detector = Detector::new(format, None, 20).expect("a regex");
        let said = |before: Before| {
            assert_eq!(before.count, before.named.len() as u64);
            before.named.into_iter().map(|(number, bad)| (number, bad.0)).collect()
        };
        for (number, line) in (1..).zip(lines) {
            let line = Line { number, bytes: Some(line.as_bytes()) };
            if let Some(found) = detector.look(line).expect("no bad header") {
                assert_eq!(number, lines.len() as u64, "an earlier line decides the format");
                assert_eq!(found.header, found.parser.name() == "CSV trace");
                return (Some(found.parser.name()), said(found.before));
            }
        }
        (None, said(detector.give_up()))
    }

    #[test]
    fn the_first_line_that_parses_decides_the_format() {
        for (line, name) in [
            ("{\"at_us\": 1, \"key\": \"k\"}", "JSONL trace"),
            ("  {\"at_us\": 1, \"key\": \"k,at_us,\"}", "JSONL trace"),
            ("{\"at_us\": 1, \"key\": \"k\", \"op\": \"settle\"}", "JSONL trace"),
            ("at_us,key", "CSV trace"),
            ("key,\"at_us\"", "CSV trace"),
            (LOG, "access log"),
        ] {
            let (found, before) = look(FormatArg::Auto, &[line]);
            assert_eq!((found, before.len()), (Some(name), 0), "{line}");
            let noise = ["{ garbage", "# at_us, key, cost", "{\"a\": \"b,at_us,c\"}", "key,cost"];
            let (found, before) = look(FormatArg::Auto, &[&noise[..], &[line]].concat());
            assert_eq!(found, Some(name), "{line}");
            assert_eq!(before.iter().map(|(number, _)| *number).collect::<Vec<_>>(), [1, 2, 3, 4]);
            let says = match name {
                "JSONL trace" => "column",
                "CSV trace" => "header",
                _ => "ADDRESS",
            };
            assert!(before[0].1.contains(says), "{before:?}");
        }
    }

    #[test]
    fn without_a_known_format_each_line_gets_the_error_of_the_format_it_resembles() {
        let (found, before) = look(FormatArg::Auto, &["hello", "{", "at_us;key", "5;k"]);
        assert_eq!(found, None);
        for ((_, reason), says) in
            before.iter().zip(["ADDRESS", "EOF", "separated by semicolons", "header"])
        {
            assert!(reason.contains(says), "{reason}\nlacks {says}");
        }
    }

    #[test]
    fn an_input_declared_as_csv_is_nothing_else() {
        let (found, before) =
            look(FormatArg::Csv, &[&LOG.replace(',', ";"), "{\"at_us\": 1, \"key\": \"k\"}"]);
        assert_eq!((found, before.len()), (None, 2));
        assert_eq!(look(FormatArg::Csv, &["# x", "at_us,key"]).0, Some("CSV trace"));
    }

    #[test]
    fn an_unusable_header_is_refused_at_once() {
        let mut detector = Detector::new(FormatArg::Auto, None, 20).expect("a regex");
        let line = Line { number: 1, bytes: Some(b"at_us,ip,ip") };
        assert!(detector.look(line).expect_err("twice").0.contains("twice"));
    }
}
