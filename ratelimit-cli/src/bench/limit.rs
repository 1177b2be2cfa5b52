//! A limit as text on the command line: `gcra 10/s burst 20`.

use ratelimit_core::{Limits, Policy};

use crate::failure::Failure;

/// The name of the limit.
const NAME: &str = "bench";
const EXAMPLES: &str = "write it as in \"gcra 10/s burst 20\", \"fixed-window 100/m count attempts\" or \
                        \"bucketed-window bucket 1s rates 10/1s,20/5s\"";

/// Parses a limit: the algorithm and its numbers, as [`Policy`] displays them.
pub(crate) fn one_limit(text: &str) -> Result<Limits<Policy>, Failure> {
    let limits = Limits::builder().limit(NAME, text).build();
    limits.map_err(|error| Failure::input(format!("--limit {text:?}: {error}; {EXAMPLES}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_parses_from_its_displayed_text() {
        for text in [
            "gcra 10/s burst 20",
            "token-bucket 3/m burst 7",
            "gcra 10/s burst 20 count attempts",
            "fixed-window 100/m",
            "fixed-window 100/m count attempts",
            "sliding-log 5/h",
            "concurrency 20/30s",
            "bucketed-window bucket 1s rates 10/1s, 20/5s",
        ] {
            let limits = one_limit(text).unwrap_or_else(|failure| panic!("{text}: {failure}"));
            let shown: Vec<_> = limits.iter().map(|limit| limit.algorithm().to_string()).collect();
            assert_eq!(shown, [text]);
        }
        let without_blank = one_limit("bucketed-window bucket 1s rates 10/1s,20/5s");
        assert_eq!(without_blank.expect("a limit").as_slice().len(), 1);
    }

    #[test]
    fn an_invalid_limit_is_refused_with_the_reason_and_an_example() {
        for (text, says) in [
            ("", "unknown algorithm"),
            ("leaky 10/s", "leaky"),
            ("gcra", "rate"),
            ("gcra 10/s burst", "\"10/s burst\" is not a rate"),
            ("gcra 10/s burst x", "burst"),
            ("gcra 10/s burst 0", "burst"),
            ("gcra 10/s burst 1 burst 2", "burst is"),
            ("gcra 10/s size 5", "size"),
            ("fixed-window 10/fortnight", "fortnight"),
            ("concurrency 20/30s count attempts", "attempts"),
        ] {
            let failure = one_limit(text).expect_err(text);
            let message = failure.to_string();
            assert!(message.contains(says) && message.contains("gcra 10/s burst 20"), "{message}");
            assert_eq!(failure.exit_code(), 2);
        }
    }
}
