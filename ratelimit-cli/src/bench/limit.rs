//! A limit as text on the command line: `gcra 10/s burst 20`.

use ratelimit_core::{Limits, Policy};
use serde_json::{Map, Value, json};

use crate::failure::Failure;

/// The name of the limit.
const NAME: &str = "bench";
const EXAMPLES: &str = "write it as in \"gcra 10/s burst 20\", \"fixed-window 100/m count attempts\" or \
                        \"bucketed-window bucket 1s rates 10/1s,20/5s\"";

/// Parses a limit: the algorithm, its rate, and the other fields of a policy document by name.
pub(crate) fn one_limit(words: &str) -> Result<Limits<Policy>, Failure> {
    let refused = |why: String| Failure::input(format!("--limit {words:?}: {why}; {EXAMPLES}"));
    let table = table(words).map_err(refused)?;
    serde_json::from_value(json!({ "limit": [table] })).map_err(|error| refused(error.to_string()))
}

/// The limit as a table of a policy document.
fn table(words: &str) -> Result<Map<String, Value>, String> {
    let mut table = Map::new();
    table.insert("name".into(), NAME.into());
    let mut words = words.split_whitespace().peekable();
    let algorithm = words.next().ok_or("there is no algorithm")?;
    table.insert("algorithm".into(), algorithm.into());
    if let Some(rate) = words.next_if(|word| word.contains('/')) {
        table.insert("rate".into(), rate.into());
    }
    while let Some(field) = words.next() {
        let value = words.next().ok_or_else(|| format!("nothing stands after {field:?}"))?;
        let value = match field {
            "burst" => value.parse::<u64>().map_or_else(|_| value.into(), Value::from),
            "bucket" | "count" => value.into(),
            "rates" => {
                // Rates may have blanks after their commas.
                let mut rates = value.to_owned();
                while let Some(more) = words.next_if(|word| word.contains('/')) {
                    rates.push_str(more);
                }
                rates.split(',').filter(|rate| !rate.is_empty()).map(Value::from).collect()
            }
            other => return Err(format!("{other:?} is no field of a limit")),
        };
        if table.insert(field.into(), value).is_some() {
            return Err(format!("{field:?} is given twice"));
        }
    }
    Ok(table)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_parses_from_its_displayed_text() {
        for words in [
            "gcra 10/s burst 20",
            "token-bucket 3/m burst 7",
            "gcra 10/s burst 20 count attempts",
            "fixed-window 100/m",
            "fixed-window 100/m count attempts",
            "sliding-log 5/h",
            "concurrency 20/30s",
            "bucketed-window bucket 1s rates 10/1s, 20/5s",
        ] {
            let limits = one_limit(words).unwrap_or_else(|failure| panic!("{words}: {failure}"));
            let shown: Vec<_> = limits.iter().map(|limit| limit.algorithm().to_string()).collect();
            assert_eq!(shown, [words]);
        }
        let without_blank = one_limit("bucketed-window bucket 1s rates 10/1s,20/5s");
        assert_eq!(without_blank.expect("a limit").as_slice().len(), 1);
    }

    #[test]
    fn an_invalid_limit_is_refused_with_the_reason_and_an_example() {
        for (words, says) in [
            ("", "no algorithm"),
            ("leaky 10/s", "leaky"),
            ("gcra", "rate"),
            ("gcra 10/s burst", "nothing stands after \"burst\""),
            ("gcra 10/s burst x", "burst"),
            ("gcra 10/s burst 0", "burst"),
            ("gcra 10/s burst 1 burst 2", "given twice"),
            ("gcra 10/s size 5", "\"size\" is no field"),
            ("fixed-window 10/fortnight", "fortnight"),
            ("concurrency 20/30s count attempts", "attempts"),
        ] {
            let failure = one_limit(words).expect_err(words);
            let message = failure.to_string();
            assert!(message.contains(says) && message.contains("gcra 10/s burst 20"), "{message}");
            assert_eq!(failure.exit_code(), 2);
        }
    }
}
