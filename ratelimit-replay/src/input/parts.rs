//! [`Parts`]: puts together the lines that a container's runtime has cut into parts of 16 KiB.
//!
//! Kubernetes' runtimes flag a part by `P` in the place of `F`. Docker's json-file ends a line with
//! a line break within its text, and a part has none. What the container writes to its other stream
//! may stand between two parts.

use super::lines::MAX_LINE_BYTES;

/// From this length on, a text of Docker's without a line break is a part. Other programs leave the
/// line break out of every line.
const DOCKER_PART_BYTES: usize = 16 * 1024;

/// What has come of a line.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Taken {
    /// It is whole by itself.
    Whole,
    /// It is a part, and waits for the rest.
    Kept,
    /// It was the last part of this line.
    Joined(Vec<u8>),
    /// It was the last part of a line that is longer than one may be.
    TooLong,
}

/// The parts that wait for the rest of their line, of each stream.
#[derive(Default)]
pub(super) struct Parts {
    open: [Open; 2],
}

#[derive(Default)]
struct Open {
    line: Vec<u8>,
    /// What stands behind the text of the last part.
    tail: Vec<u8>,
    is_long: bool,
}

/// A line with its parts: before its text, the text, and behind it.
struct Part<'l> {
    stream: usize,
    head: &'l [u8],
    text: &'l [u8],
    tail: &'l [u8],
    is_last: bool,
}

impl Parts {
    /// Takes the next line of an input.
    pub(super) fn take(&mut self, line: &[u8]) -> Taken {
        let Some(part) = cri(line).or_else(|| docker(line)) else { return Taken::Whole };
        let open = &mut self.open[part.stream];
        if open.line.is_empty() {
            if part.is_last {
                return Taken::Whole;
            }
            open.line.extend(part.head);
        }
        open.is_long |= open.line.len() + part.text.len() > MAX_LINE_BYTES;
        if !open.is_long {
            open.line.extend(part.text);
        }
        open.tail = part.tail.to_vec();
        if part.is_last { open.close() } else { Taken::Kept }
    }

    /// A line that has no last part, at the end of the input.
    pub(super) fn rest(&mut self) -> Option<Taken> {
        self.open.iter_mut().find(|open| !open.line.is_empty()).map(Open::close)
    }
}

impl Open {
    fn close(&mut self) -> Taken {
        let Self { mut line, tail, is_long } = std::mem::take(self);
        line.extend(tail);
        if is_long { Taken::TooLong } else { Taken::Joined(line) }
    }
}

/// The position of a stream, and what follows its name.
fn stream(text: &[u8]) -> Option<(usize, &[u8])> {
    let mut streams = [&b"stdout"[..], b"stderr"].into_iter().enumerate();
    streams.find_map(|(place, name)| Some((place, text.strip_prefix(name)?)))
}

/// `2016-10-06T00:17:09.66Z stdout P …`.
fn cri(line: &[u8]) -> Option<Part<'_>> {
    if !line.first()?.is_ascii_digit() {
        return None;
    }
    let time_end = line.iter().take(40).position(|&b| b == b' ')?;
    let (stream, rest) = stream(&line[time_end + 1..])?;
    let rest = rest.strip_prefix(b" ")?;
    let is_last = match rest.first()? {
        b'F' => true,
        b'P' => false,
        _ => return None,
    };
    let (text, tail) = (rest.get(2..).unwrap_or_default(), &line[..0]);
    let head = &line[..line.len() - text.len()];
    Some(Part { stream, head, text, tail, is_last })
}

/// `{"log":"…\n","stream":"stdout","time":"…"}`.
fn docker(line: &[u8]) -> Option<Part<'_>> {
    let text = line.strip_prefix(b"{\"log\":")?.trim_ascii_start().strip_prefix(b"\"")?;
    let (mut is_escaped, mut ends_line) = (false, false);
    let end = text.iter().position(|&b| {
        let is_end = b == b'"' && !is_escaped;
        if !is_end {
            ends_line = is_escaped && b == b'n';
        }
        is_escaped = b == b'\\' && !is_escaped;
        is_end
    })?;
    let (text, tail) = text.split_at(end);
    let head = &line[..line.len() - text.len() - tail.len()];
    let name = b"\"stream\":";
    let at = tail.windows(name.len()).position(|window| window == name)?;
    let (stream, _) = stream(tail[at + name.len()..].trim_ascii_start().strip_prefix(b"\"")?)?;
    Some(Part { stream, head, text, tail, is_last: ends_line || text.len() < DOCKER_PART_BYTES })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cri_line(stream: &str, flag: &str, text: &str) -> String {
        format!("2016-10-06T00:17:09.669794202Z {stream} {flag} {text}")
    }

    fn docker_line(stream: &str, text: &str) -> String {
        format!("{{\"log\":\"{text}\",\"stream\":\"{stream}\",\"time\":\"2016-10-06T00:17:09Z\"}}")
    }

    fn joined(line: &str) -> Taken {
        Taken::Joined(line.as_bytes().to_vec())
    }

    #[test]
    fn parts_of_a_line_are_joined_whatever_the_other_stream_says_in_between() {
        let mut parts = Parts::default();
        let mut take = |line: &str| parts.take(line.as_bytes());
        assert_eq!(take(&cri_line("stdout", "F", "whole")), Taken::Whole);
        assert_eq!(take(&cri_line("stdout", "P", "one ")), Taken::Kept);
        assert_eq!(take(&cri_line("stderr", "P", "other ")), Taken::Kept);
        assert_eq!(take("no container's"), Taken::Whole);
        assert_eq!(take(&cri_line("stdout", "P", "two ")), Taken::Kept);
        assert_eq!(
            take(&cri_line("stderr", "F", "x")),
            joined(&cri_line("stderr", "P", "other x"))
        );
        let due = joined(&cri_line("stdout", "P", "one two three"));
        assert_eq!(take(&cri_line("stdout", "F", "three")), due);
        assert_eq!(take(&cri_line("stdout", "F", "whole")), Taken::Whole);

        let part = "a".repeat(DOCKER_PART_BYTES);
        assert_eq!(take(&docker_line("stdout", "whole\\n")), Taken::Whole);
        assert_eq!(take(&docker_line("stdout", "no end")), Taken::Whole);
        assert_eq!(take(&docker_line("stdout", &format!("{part}\\n"))), Taken::Whole);
        assert_eq!(take(&docker_line("stdout", &part)), Taken::Kept);
        assert_eq!(take(&docker_line("stderr", "other\\n")), Taken::Whole);
        // A backslash before an n is no line break.
        assert_eq!(take(&docker_line("stdout", &format!("{part}\\\\n"))), Taken::Kept);
        let due = joined(&docker_line("stdout", &format!("{part}{part}\\\\nb\\n")));
        assert_eq!(take(&docker_line("stdout", "b\\n")), due);

        assert_eq!(take(&cri_line("stdout", "P", "cut")), Taken::Kept);
        assert_eq!(parts.rest(), Some(joined(&cri_line("stdout", "P", "cut"))));
        assert_eq!(parts.rest(), None);
    }

    #[test]
    fn what_is_put_together_is_bounded() {
        let mut parts = Parts::default();
        let part = cri_line("stdout", "P", &"a".repeat(DOCKER_PART_BYTES));
        for _ in 0..=MAX_LINE_BYTES / DOCKER_PART_BYTES {
            assert_eq!(parts.take(part.as_bytes()), Taken::Kept);
        }
        assert!(parts.open[0].line.len() <= MAX_LINE_BYTES);
        assert_eq!(parts.take(cri_line("stdout", "F", "").as_bytes()), Taken::TooLong);
        assert_eq!(parts.take(cri_line("stdout", "F", "x").as_bytes()), Taken::Whole);
    }
}
