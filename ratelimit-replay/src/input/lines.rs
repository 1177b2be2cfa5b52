//! Numbered lines of bytes, each bounded in length so that no line exhausts the memory.

use std::io::{self, BufRead, BufReader, Read};

/// The longest accepted line, in bytes. A longer one is a bad line.
const MAX_LINE_BYTES: usize = 1 << 20;

/// The lines of an input.
pub(crate) struct Lines {
    input: BufReader<Box<dyn Read>>,
    buffer: Vec<u8>,
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

impl Lines {
    pub(crate) fn new(input: Box<dyn Read>) -> Self {
        Self { input: BufReader::new(input), buffer: Vec::new(), number: 0 }
    }

    /// The next line.
    pub(crate) fn next(&mut self) -> io::Result<Option<Line<'_>>> {
        self.buffer.clear();
        let limit = MAX_LINE_BYTES as u64 + 1;
        if self.input.by_ref().take(limit).read_until(b'\n', &mut self.buffer)? == 0 {
            return Ok(None);
        }
        self.number += 1;
        let ended = self.buffer.strip_suffix(b"\n");
        if ended.is_none() && self.buffer.len() > MAX_LINE_BYTES {
            self.input.skip_until(b'\n')?;
            return Ok(Some(Line { number: self.number, bytes: None }));
        }
        let mut line = ended.unwrap_or(&self.buffer);
        line = line.strip_suffix(b"\r").unwrap_or(line);
        if self.number == 1 {
            // Some editors and spreadsheets write a byte order mark.
            line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        }
        Ok(Some(Line { number: self.number, bytes: Some(line) }))
    }
}
