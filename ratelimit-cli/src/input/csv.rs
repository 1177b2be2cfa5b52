//! CSV traces with a header: `at_us,key,cost,op`, and identifiers in columns of their own.
//!
//! The parser of the `csv` crate receives one line at a time. A bad line is therefore a single line with its
//! true number, and an unclosed quote does not consume the rest of the file. In exchange, a field cannot
//! contain a line break.

use std::borrow::Cow;

use csv_core::{ReadRecordResult, Reader};
use ratelimit_core::Op;

use super::{BadLine, Entry, op, timestamp};
use crate::caller::{BARE_NAME, Caller};
use crate::text::quoted;

/// Reads a CSV trace.
#[derive(Debug)]
pub(crate) struct Csv {
    columns: Vec<Column>,
    cells: Cells,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Column {
    AtUs,
    Key,
    Cost,
    Op,
    Duration,
    Identifier(String),
}

/// Whether a line is the header of a trace. A comment or a JSON object is not, whatever stands between its
/// commas.
pub(crate) fn is_header(line: &[u8]) -> bool {
    if line.trim_ascii_start().starts_with(b"#") || line.trim_ascii_start().starts_with(b"{") {
        return false;
    }
    let mut cells = Cells::default();
    cells.read(line).is_ok() && cells.iter().any(|cell| cell.trim_ascii() == b"at_us")
}

/// Why a line is not a header.
pub(crate) fn no_header(line: &[u8]) -> BadLine {
    for (separator, name) in [(b';', "semicolons"), (b'\t', "tabs"), (b'|', "bars")] {
        let cells = line.split(|&b| b == separator).map(<[u8]>::trim_ascii);
        if line.contains(&separator) && cells.map(unquoted).any(|cell| cell == b"at_us") {
            return BadLine::new(format!(
                "is a header separated by {name}; separate it and all lines by commas, as in \
                 at_us,key,cost,op"
            ));
        }
    }
    BadLine::new("comes before a header that names at_us, such as at_us,key,cost,op")
}

fn unquoted(cell: &[u8]) -> &[u8] {
    cell.strip_prefix(b"\"").and_then(|cell| cell.strip_suffix(b"\"")).unwrap_or(cell)
}

impl Csv {
    /// A parser for lines under this header.
    pub(crate) fn new(header: &[u8]) -> Result<Self, BadLine> {
        let mut cells = Cells::default();
        cells.read(header)?;
        let mut columns = Vec::new();
        for name in cells.iter() {
            let name = String::from_utf8_lossy(name.trim_ascii());
            let column = match &*name {
                "at_us" => Column::AtUs,
                BARE_NAME => Column::Key,
                "cost" => Column::Cost,
                "op" => Column::Op,
                "duration_us" => Column::Duration,
                name => Column::Identifier(name.to_owned()),
            };
            if columns.contains(&column) {
                let name = quoted(&name, 40);
                return Err(BadLine::new(format!("the header names {name} twice")));
            }
            columns.push(column);
        }
        if !columns.contains(&Column::AtUs) {
            return Err(BadLine::new(
                "the header names no at_us; begin the file with one such as at_us,key,cost,op",
            ));
        }
        Ok(Self { columns, cells })
    }

    pub(crate) fn parse<'l>(&'l mut self, line: &[u8]) -> Result<Entry<'l>, BadLine> {
        self.cells.read(line)?;
        let (found, expected) = (self.cells.ends.len(), self.columns.len());
        if found != expected {
            return Err(BadLine::new(format!("has {found} cells, and the header has {expected}")));
        }
        let (mut at, mut cost, mut operation) = (None, 1, Op::Acquire);
        let mut duration_us = None;
        let mut caller = Caller::default();
        for (column, cell) in self.columns.iter().zip(self.cells.iter()) {
            if cell.is_empty() {
                continue;
            }
            match column {
                Column::AtUs => at = Some(timestamp(integer("at_us", cell)?)?),
                Column::Cost => cost = integer("cost", cell)?,
                Column::Op => operation = op(&String::from_utf8_lossy(cell.trim_ascii()))?,
                Column::Duration => duration_us = Some(integer("duration_us", cell)?),
                Column::Key => caller.bare = Some(String::from_utf8_lossy(cell)),
                Column::Identifier(name) => {
                    caller.named.push((Cow::Borrowed(name), String::from_utf8_lossy(cell)));
                }
            }
        }
        if caller.bare.is_none() && caller.named.is_empty() {
            return Err(BadLine::new("names no caller; fill in key or a column such as ip"));
        }
        let at = at.ok_or_else(|| BadLine::new("has no at_us"))?;
        Ok(Entry { at, caller, cost, op: operation, duration_us })
    }
}

fn integer(column: &str, cell: &[u8]) -> Result<u64, BadLine> {
    let text = String::from_utf8_lossy(cell.trim_ascii());
    let digits = !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten().ok_or_else(|| {
        let text = quoted(&text, 40);
        BadLine::new(format!("{column} is {text}, expected a whole number from 0 to {}", u64::MAX))
    })
}

/// The cells of one line.
#[derive(Debug, Default)]
struct Cells {
    text: Vec<u8>,
    ends: Vec<usize>,
}

impl Cells {
    fn read(&mut self, line: &[u8]) -> Result<(), BadLine> {
        let mut reader = Reader::new();
        // A line has at most as many bytes of cells as bytes, and at most one cell more than bytes.
        self.text.resize(line.len() + 1, 0);
        self.ends.resize(line.len() + 2, 0);
        let (result, used, written, mut count) =
            reader.read_record(line, &mut self.text, &mut self.ends);
        let complete = match result {
            ReadRecordResult::Record => used == line.len(),
            // Only the end of the line completes the last cell.
            ReadRecordResult::InputEmpty => {
                let (result, _, _, more) =
                    reader.read_record(b"\n", &mut self.text[written..], &mut self.ends[count..]);
                count += more;
                matches!(result, ReadRecordResult::Record)
            }
            _ => false,
        };
        self.ends.truncate(count);
        if complete { Ok(()) } else { Err(BadLine::new("has a quote that is not closed")) }
    }

    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| &self.text[start..*end])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ratelimit_core::Identifiers;

    fn csv(header: &str) -> Csv {
        Csv::new(header.as_bytes()).expect("a header")
    }

    #[test]
    fn columns_may_come_in_any_order_and_empty_cells_are_absent() {
        let mut csv = csv("op, user ,at_us,\"ip\",key,cost");
        let entry = csv.parse(b"peek,\"b \"\"x\"\", c\", 5 ,a,k,7").expect("a line");
        assert_eq!((entry.at.as_us(), entry.cost, entry.op), (5, 7, Op::Peek));
        assert_eq!(entry.caller.identifier("user"), Some("b \"x\", c"));
        assert_eq!(entry.caller.identifier("ip"), Some("a"));
        assert_eq!(entry.caller.bare(), Some("k"));
        let entry = csv.parse(b",,5,,k,").expect("a line");
        assert_eq!((entry.cost, entry.op, entry.caller.named.len()), (1, Op::Acquire, 0));
    }

    #[test]
    fn bad_lines_say_which_cell_is_wrong() {
        for (line, says) in [
            ("5,k,1", "3 cells, and the header has 4"),
            ("5,k,1,peek,x", "5 cells"),
            (",k,1,peek", "no at_us"),
            ("-5,k,1,peek", "at_us is \"-5\""),
            ("4503599627370496,k,1,peek", "2112"),
            ("5,k,+1,peek", "cost is \"+1\""),
            ("5,k,18446744073709551616,", "cost is"),
            ("5,k,1,steal", "acquire, peek"),
            ("5,,1,peek", "no caller"),
            ("5,\"k,1,peek", "quote that is not closed"),
        ] {
            let reason = csv("at_us,key,cost,op").parse(line.as_bytes()).expect_err(line).0;
            assert!(reason.contains(says), "{line}\n→ {reason}\nlacks {says}");
        }
    }

    #[test]
    fn a_bad_line_does_not_spoil_the_next() {
        let mut csv = csv("at_us,key");
        assert!(csv.parse(b"5,\"k").is_err());
        assert_eq!(csv.parse(b"6,\"k\"").expect("a line").at.as_us(), 6);
    }

    #[test]
    fn a_header_names_every_column_once_and_at_us() {
        assert!(is_header(b"key,at_us") && !is_header(b"key,cost"));
        assert!(Csv::new(b"key,cost").is_err());
        assert!(Csv::new(b"at_us,ip,ip").is_err());
        assert!(Csv::new(b"at_us,\"ip").is_err());
    }
}
