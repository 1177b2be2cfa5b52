//! Numbered lines of bytes, each bounded in length so that no line exhausts the memory.

use std::io::{self, BufRead, Read};

/// The longest accepted line, in bytes. A longer one is a bad line.
pub(crate) const MAX_LINE_BYTES: usize = 1 << 20;

/// The lines of an input.
#[derive(Debug)]
pub(crate) struct Lines<R> {
    input: R,
    buffer: Vec<u8>,
    number: u64,
}

/// One line, without its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    /// The line number, counted from 1.
    pub(crate) number: u64,
    /// `None` if the line is longer than [`MAX_LINE_BYTES`].
    pub(crate) bytes: Option<&'a [u8]>,
}

impl<R: BufRead> Lines<R> {
    pub(crate) fn new(input: R) -> Self {
        Self { input, buffer: Vec::new(), number: 0 }
    }

    /// The number of the last line read.
    pub(crate) const fn number(&self) -> u64 {
        self.number
    }

    /// The next line.
    pub(crate) fn next(&mut self) -> io::Result<Option<Line<'_>>> {
        self.buffer.clear();
        let limit = MAX_LINE_BYTES as u64 + 1;
        if self.input.by_ref().take(limit).read_until(b'\n', &mut self.buffer)? == 0 {
            return Ok(None);
        }
        self.number += 1;
        let ended = self.buffer.last() == Some(&b'\n');
        if !ended && self.buffer.len() > MAX_LINE_BYTES {
            self.input.skip_until(b'\n')?;
            return Ok(Some(Line { number: self.number, bytes: None }));
        }
        let mut line = self.buffer.as_slice();
        if ended {
            line = &line[..line.len() - 1];
        }
        line = line.strip_suffix(b"\r").unwrap_or(line);
        if self.number == 1 {
            // Some editors and spreadsheets write a byte order mark.
            line = line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line);
        }
        Ok(Some(Line { number: self.number, bytes: Some(line) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(input: &[u8]) -> Vec<(u64, Option<Vec<u8>>)> {
        let mut lines = Lines::new(input);
        let mut all = Vec::new();
        while let Some(line) = lines.next().expect("reads") {
            all.push((line.number, line.bytes.map(<[u8]>::to_vec)));
        }
        all
    }

    #[test]
    fn lines_lose_their_ends_and_keep_their_numbers() {
        let line = |number, bytes: &[u8]| (number, Some(bytes.to_vec()));
        assert_eq!(
            all(b"\xef\xbb\xbfa\r\n\n\xffb\nc"),
            [line(1, b"a"), line(2, b""), line(3, b"\xffb"), line(4, b"c")]
        );
        assert_eq!(all(b""), []);
    }
}
