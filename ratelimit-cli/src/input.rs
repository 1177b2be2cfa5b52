//! Turns a file into requests: the bytes, their lines, and the requests in the lines.

mod access_log;
mod csv;
mod entry;
mod format;
mod jsonl;
mod lines;
mod parser;
mod source;

pub(crate) use access_log::{UnitArg, agent};
pub(crate) use entry::{BadLine, InputEntry, NAMED_BAD_LINES, OTHERS, TOO_LONG};
pub(crate) use format::{Detector, LINES as DETECTED_LINES};
pub(crate) use jsonl::reason;
pub(crate) use lines::Lines;
pub(crate) use parser::{FormatArg, Parser};
pub(crate) use source::{InputSource, is_dash};

#[cfg(test)]
mod tests {
    use super::lines::Line;
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
                let mut parser = Parser::for_format(format, None).expect("no header");
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
