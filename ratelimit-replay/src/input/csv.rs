//! CSV traces with a header: `at_us,key,cost,op`, and identifiers in columns of their own.
//!
//! The parser of the `csv` crate receives one line at a time. A bad line is therefore a single line
//! with its true number, and an unclosed quote does not consume the rest of the file. In exchange,
//! a field cannot contain a line break.

use compact_str::CompactString;
use csv_core::{ReadRecordResult, Reader};

use super::entry::{BadLine, InputEntry, op, timestamp, whole_number};
use crate::caller::BARE_NAME;
use crate::text::quote;

/// What begins the column of the cost under a limit: `cost:input`.
const COST_OF: &str = "cost:";

/// What begins the column of the numbers for a limit: `numbers:api`.
const NUMBERS_OF: &str = "numbers:";

/// Reads a CSV trace.
pub(crate) struct Csv {
    columns: Vec<String>,
    cells: Cells,
}

/// Why a line is not a header.
pub(crate) fn no_header(line: &[u8]) -> BadLine {
    for (separator, name) in [(b';', "semicolons"), (b'\t', "tabs"), (b'|', "bars")] {
        let mut cells = line.split(|&b| b == separator).map(<[u8]>::trim_ascii);
        let is_at_us = |cell| [&b"at_us"[..], b"\"at_us\""].contains(&cell);
        if line.contains(&separator) && cells.any(is_at_us) {
            return format!(
                "is a header separated by {name}; separate it and all lines by commas, as in \
                 at_us,key,cost,op"
            );
        }
    }
    "comes before a header that names at_us, such as at_us,key,cost,op".to_owned()
}

impl Csv {
    /// A parser for the lines under a header, which names `at_us`; `None` under any other line. A
    /// comment or a JSON object is no header, whatever stands between its commas.
    pub(crate) fn under(line: &[u8]) -> Result<Option<Self>, BadLine> {
        let mut cells = Cells::default();
        let is_other = matches!(line.trim_ascii_start(), [b'#' | b'{', ..]);
        if is_other || cells.read(line).is_err() {
            return Ok(None);
        }
        let name = |cell: &[u8]| String::from_utf8_lossy(cell.trim_ascii()).into_owned();
        let columns: Vec<_> = cells.iter().map(name).collect();
        if !columns.iter().any(|name| name == "at_us") {
            return Ok(None);
        }
        if columns.iter().any(|name| name == "duration") {
            let told =
                "the header names duration; name it duration_us, and write microseconds there";
            return Err(told.to_owned());
        }
        for (place, name) in columns.iter().enumerate() {
            if columns[..place].contains(name) {
                return Err(format!("the header names {} twice", quote(name, 40)));
            }
        }
        Ok(Some(Self { columns, cells }))
    }

    pub(crate) fn parse(&mut self, line: &[u8]) -> Result<InputEntry, BadLine> {
        self.cells.read(line)?;
        let (found, expected) = (self.cells.ends.len(), self.columns.len());
        if found != expected {
            return Err(format!("has {found} cells, and the header has {expected}"));
        }
        let mut at = None;
        let mut entry = InputEntry { costs: 1.into(), ..InputEntry::default() };
        for (column, cell) in self.columns.iter().zip(self.cells.iter()) {
            if cell.is_empty() {
                continue;
            }
            match column.as_str() {
                "at_us" => at = Some(timestamp(integer(column, cell)?)?),
                "cost" => entry.costs = entry.costs.with_others(integer(column, cell)?),
                "op" => entry.op = op(&String::from_utf8_lossy(cell.trim_ascii()))?,
                "duration_us" => entry.duration_us = Some(integer(column, cell)?),
                BARE_NAME => entry.caller.bare = Some(CompactString::from_utf8_lossy(cell)),
                _ if column.starts_with(COST_OF) => {
                    entry.costs.set(&column[COST_OF.len()..], integer(column, cell)?);
                }
                _ if column.starts_with(NUMBERS_OF) => {
                    let numbers = String::from_utf8_lossy(cell).into_owned();
                    entry.numbers.push((column[NUMBERS_OF.len()..].to_owned(), numbers));
                }
                _ => {
                    let value = CompactString::from_utf8_lossy(cell);
                    entry.caller.named.list.push((column.clone().into(), value));
                }
            }
        }
        if entry.caller.bare.is_none() && entry.caller.named.list.is_empty() {
            return Err("names no caller; fill in key or a column such as ip".to_owned());
        }
        entry.at = at.ok_or("has no at_us")?;
        Ok(entry)
    }
}

fn integer(column: &str, cell: &[u8]) -> Result<u64, BadLine> {
    let text = String::from_utf8_lossy(cell.trim_ascii());
    let is_number = text.bytes().all(|b| b.is_ascii_digit());
    let number = text.parse().ok().filter(|_| is_number);
    whole_number(column, number, &quote(&text, 40))
}

/// The cells of one line.
#[derive(Default)]
struct Cells {
    text: Vec<u8>,
    ends: Vec<usize>,
}

impl Cells {
    fn read(&mut self, line: &[u8]) -> Result<(), BadLine> {
        let line = [line, b"\n"].concat();
        // A line has at most as many bytes of cells as bytes, and at most one cell more than bytes.
        let length = line.len();
        self.text.resize(length, 0);
        self.ends.resize(length + 1, 0);
        let (result, used, _, count) =
            Reader::new().read_record(&line, &mut self.text, &mut self.ends);
        self.ends.truncate(count);
        // The end of the line completes the last cell, unless a carriage return has done so.
        let is_whole = matches!(result, ReadRecordResult::Record) && used + 1 >= length;
        if is_whole { Ok(()) } else { Err("has a quote that is not closed".to_owned()) }
    }

    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let starts = std::iter::once(0).chain(self.ends.iter().copied());
        starts.zip(&self.ends).map(|(start, end)| &self.text[start..*end])
    }
}

#[cfg(test)]
mod tests {
    use ratelimit_core::LimitCosts;
    use ratelimit_core::store::Op;

    use super::*;

    fn csv(header: &str) -> Csv {
        Csv::under(header.as_bytes()).expect("no fault").expect("a header")
    }

    #[test]
    fn columns_may_come_in_any_order_and_empty_cells_are_absent() {
        let mut csv = csv("op, user ,at_us,\"ip\",key,cost");
        let entry = csv.parse(b"peek,\"b \"\"x\"\", c\", 5 ,a,k,7").expect("a line");
        assert_eq!((entry.at.as_us(), entry.costs, entry.op), (5, 7.into(), Op::Peek));
        assert_eq!(entry.caller.identifier("user"), Some("b \"x\", c"));
        assert_eq!(entry.caller.identifier("ip"), Some("a"));
        assert_eq!(entry.caller.bare.as_deref(), Some("k"));
        let each = self::csv("at_us,key,cost:input,cost").parse(b"5,k,812,2").expect("a line");
        assert_eq!(each.costs, LimitCosts::from(2).with("input", 812));
        let entry = csv.parse(b",,5,,k,").expect("a line");
        assert_eq!(
            (entry.costs, entry.op, entry.caller.named.list.len()),
            (1.into(), Op::Acquire, 0)
        );
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
            let mut csv = csv("at_us,key,cost,op");
            let reason = csv.parse(line.as_bytes()).expect_err(line);
            assert!(reason.contains(says), "{line}\n→ {reason}\nlacks {says}");
            // It does not spoil the next.
            assert_eq!(csv.parse(b"6,\"k\",,").expect("a line").at.as_us(), 6);
        }
        for header in ["key,cost", "at_us,\"ip", "# at_us", " {at_us,b"] {
            assert!(Csv::under(header.as_bytes()).is_ok_and(|csv| csv.is_none()), "{header}");
        }
    }
}
