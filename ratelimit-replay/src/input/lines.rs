//! Numbered lines of bytes, each bounded in length so that no line exhausts the memory.
//!
//! A line that was shipped in parts is put together. Where an input is an array of JSON, or has
//! objects that stand on several lines, each object is a line.

use std::io::{self, BufRead, BufReader, Cursor, Read};
use std::mem;

use super::parts::{Parts, Taken};

/// The longest accepted line, in bytes. A longer one is a bad line.
pub(super) const MAX_LINE_BYTES: usize = 1 << 20;
const CHUNK_BYTES: usize = 128 * 1024;

/// A byte order mark, which some editors and spreadsheets write.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// The lines of an input.
pub(crate) struct Lines {
    input: BufReader<Box<dyn Read + Send>>,
    buffer: Vec<u8>,
    parts: Parts,
    /// Whether its lines are objects of JSON; `None` until the first line tells.
    has_objects: Option<bool>,
    /// The number of the last line read.
    pub(crate) number: u64,
}

/// One line, without its end.
#[derive(Clone, Copy)]
pub(crate) struct Line<'a> {
    /// The line number, counted from 1.
    pub(crate) number: u64,
    /// `None` if the line is longer than [`MAX_LINE_BYTES`].
    pub(crate) bytes: Option<&'a [u8]>,
}

/// Whether a line is in the buffer, or is longer than one may be.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Fit {
    Whole,
    TooLong,
}

impl Lines {
    pub(crate) fn new(input: Box<dyn Read + Send>) -> Self {
        let input = BufReader::with_capacity(CHUNK_BYTES, input);
        let (buffer, parts) = (Vec::new(), Parts::default());
        Self { input, buffer, parts, has_objects: None, number: 0 }
    }

    /// Whether the next line is there without a wait for the input.
    pub(crate) fn has_next(&self) -> bool {
        self.input.buffer().contains(&b'\n')
    }

    /// The next line.
    pub(crate) fn next(&mut self) -> io::Result<Option<Line<'_>>> {
        let fit = loop {
            let is_object = self.has_objects == Some(true);
            let read = if is_object { self.read_object()? } else { self.read_line()? };
            let taken = match read {
                Some(Fit::Whole) => self.parts.take(&self.buffer),
                Some(Fit::TooLong) => Taken::TooLong,
                None => match self.parts.rest() {
                    Some(rest) => rest,
                    None => return Ok(None),
                },
            };
            match taken {
                Taken::Whole => break Fit::Whole,
                Taken::Joined(line) => {
                    self.buffer = line;
                    break Fit::Whole;
                }
                Taken::TooLong => break Fit::TooLong,
                Taken::Kept => {}
            }
        };
        let bytes = Some(&*self.buffer).filter(|_| fit == Fit::Whole);
        // An object may end before its line does.
        let is_within = self.has_objects == Some(true) && !self.buffer.ends_with(b"\n");
        Ok(Some(Line { number: self.number + u64::from(is_within), bytes }))
    }

    /// Reads a line into the buffer, without its end. `None` at the end of the input.
    fn read_line(&mut self) -> io::Result<Option<Fit>> {
        self.buffer.clear();
        let limit = MAX_LINE_BYTES as u64 + 1;
        if self.input.by_ref().take(limit).read_until(b'\n', &mut self.buffer)? == 0 {
            return Ok(None);
        }
        if self.number == 0 && self.buffer.starts_with(MARK) {
            self.buffer.drain(..MARK.len());
        }
        if self.has_objects.is_none() && !self.buffer.trim_ascii().is_empty() {
            let has_objects = begins_objects(&self.buffer);
            self.has_objects = Some(has_objects);
            if has_objects {
                // Its first line is read again, as a part of an object.
                let begin = Cursor::new(mem::take(&mut self.buffer));
                let rest = mem::replace(&mut self.input, BufReader::new(Box::new(io::empty())));
                self.input = BufReader::new(Box::new(begin.chain(rest)));
                return self.read_object();
            }
        }
        self.number += 1;
        if self.buffer.pop_if(|last| *last == b'\n').is_none() && self.buffer.len() > MAX_LINE_BYTES
        {
            self.input.skip_until(b'\n')?;
            return Ok(Some(Fit::TooLong));
        }
        self.buffer.pop_if(|last| *last == b'\r');
        Ok(Some(Fit::Whole))
    }

    /// Reads the next object of JSON into the buffer. What stands between two objects is left out,
    /// as far as it belongs to an array; anything else is read to the end of its line.
    fn read_object(&mut self) -> io::Result<Option<Fit>> {
        self.buffer.clear();
        let (mut depth, mut length) = (0_usize, 0_usize);
        let (mut is_in_string, mut is_escaped, mut is_other) = (false, false, false);
        // The line that ends with the next line break.
        let mut is_over = false;
        while !is_over {
            let bytes = self.input.fill_buf()?;
            if bytes.is_empty() {
                break;
            }
            let mut used = 0;
            for &byte in bytes {
                used += 1;
                self.number += u64::from(byte == b'\n');
                match byte {
                    b'\n' if is_other => is_over = true,
                    _ if is_other => {}
                    _ if is_in_string => {
                        is_in_string = is_escaped || byte != b'"';
                        is_escaped = byte == b'\\' && !is_escaped;
                    }
                    b'{' => depth += 1,
                    b'[' if depth > 0 => depth += 1,
                    b'}' | b']' if depth > 0 => {
                        depth -= 1;
                        is_over = depth == 0;
                    }
                    b'"' if depth > 0 => is_in_string = true,
                    b'[' | b']' | b',' if depth == 0 => continue,
                    _ if depth == 0 && byte.is_ascii_whitespace() => continue,
                    _ => is_other = depth == 0,
                }
                length += 1;
                if length <= MAX_LINE_BYTES {
                    self.buffer.push(byte);
                }
                if is_over {
                    break;
                }
            }
            self.input.consume(used);
        }
        Ok(match length {
            0 => None,
            1..=MAX_LINE_BYTES => Some(Fit::Whole),
            _ => Some(Fit::TooLong),
        })
    }
}

/// Whether the first line of an input begins an array of objects, or an object that goes on in the
/// next line.
fn begins_objects(line: &[u8]) -> bool {
    match line.trim_ascii() {
        b"[" | b"{" => true,
        line => {
            line.strip_prefix(b"[").is_some_and(|inner| inner.trim_ascii_start().starts_with(b"{"))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The lines of an input, each with its number; `-` is one that is too long.
    fn lines(input: &[u8]) -> Vec<(u64, String)> {
        let mut lines = Lines::new(Box::new(Cursor::new(input.to_vec())));
        let mut all = Vec::new();
        while let Some(line) = lines.next().expect("reads") {
            let text = line.bytes.map_or("-".into(), String::from_utf8_lossy);
            all.push((line.number, text.into_owned()));
        }
        all
    }

    fn texts(input: &str) -> Vec<String> {
        lines(input.as_bytes()).into_iter().map(|(_, text)| text).collect()
    }

    #[test]
    fn lines_end_as_on_every_system_and_are_bounded() {
        let long = "x".repeat(MAX_LINE_BYTES);
        let input = format!("\u{feff}a\r\n\nb\n{long}\n{long}y\nc");
        let read = lines(input.as_bytes());
        let due = [(1, "a"), (2, ""), (3, "b"), (4, &*long), (5, "-"), (6, "c")];
        assert_eq!(read, due.map(|(number, text)| (number, text.to_owned())));
    }

    #[test]
    fn the_objects_of_an_array_and_those_on_several_lines_are_lines() {
        let objects = [r#"{"a":"]}\"{","b":[1,{"c":2}]}"#, "{}", r#"{"d":"\\"}"#];
        let array = format!("[{}]", objects.join(","));
        assert_eq!(lines(array.as_bytes()), objects.map(|object| (1, object.to_owned())));
        assert_eq!(texts(&format!("\u{feff}[\n  {}\n]\n", objects.join(",\n  "))), objects);
        let pretty = "{\n  \"a\": {\n    \"b\": 1\n  }\n}\n{\n  \"c\": 2\n}\n";
        let read = lines(pretty.as_bytes());
        let compact: Vec<_> =
            read.iter().map(|(at, text)| (*at, text.replace([' ', '\n'], ""))).collect();
        let due = [(5, "{\"a\":{\"b\":1}}"), (8, "{\"c\":2}")];
        assert_eq!(compact, due.map(|(at, text)| (at, text.to_owned())));
        // One whole line of many objects may be long, and each object is bounded.
        let many = vec!["{\"a\":1}"; 200_000].join(",");
        assert_eq!(texts(&format!("[{many}]")).len(), 200_000);
        let long = format!("[{{\"a\":\"{}\"}},{{}}]", "x".repeat(MAX_LINE_BYTES));
        assert_eq!(texts(&long), ["-", "{}"]);
        // What is cut off or between them is a line of its own.
        assert_eq!(
            texts("[{\"a\":1},\nhello, world\n{\"b\":"),
            ["{\"a\":1}", "hello, world\n", "{\"b\":"]
        );
        // Other lines may begin with brackets.
        for text in ["[pid: 1] a", "[2015-05-17T10:05:03.000Z] \"GET\"", "{\"a\":1}", "[1,2]"] {
            assert_eq!(texts(text), [text]);
        }
    }
}
