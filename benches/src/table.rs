//! What was measured, as a table for people and as JSON lines for programs.

use std::fmt;

use serde::Serialize;

/// One measurement of ours beside a peer, in the words of its JSON line.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) scenario: &'static str,
    pub(crate) outcome: &'static str,
    pub(crate) threads: usize,
    /// How our store tells the time.
    pub(crate) clock: &'static str,
    /// Decisions asked for in one call.
    pub(crate) batch: usize,
    pub(crate) ours_ns: f64,
    pub(crate) peer: &'static str,
    pub(crate) peer_ns: f64,
    /// The peer's time over ours, the median over pairs: above 1 we are faster.
    pub(crate) ratio: f64,
    /// The plain map under one lock. It is no peer, and has no place in the JSON.
    #[serde(skip)]
    pub(crate) plain_ns: f64,
}

impl Row {
    /// The heads of the columns that a row displays as.
    pub(crate) fn heading() -> String {
        format!(
            "{:<12} {:<8} {:>7} {:>9} {:>12} {:>7} {:>15}",
            "scenario", "outcome", "threads", "ours ns", "governor ns", "ratio", "mutex<map> ns"
        )
    }

    /// The row with its numbers rounded to what was measured.
    pub(crate) fn rounded(self) -> Self {
        let to = |digits: f64, value: f64| (value * digits).round() / digits;
        Self {
            ours_ns: to(10.0, self.ours_ns),
            peer_ns: to(10.0, self.peer_ns),
            plain_ns: to(10.0, self.plain_ns),
            ratio: to(1000.0, self.ratio),
            ..self
        }
    }
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<12} {:<8} {:>7} {:>9.1} {:>12.1} {:>7.2} {:>15.1}",
            self.scenario,
            self.outcome,
            self.threads,
            self.ours_ns,
            self.peer_ns,
            self.ratio,
            self.plain_ns
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_json_line_has_the_fields_in_their_order() -> Result<(), serde_json::Error> {
        let row = Row {
            scenario: "1m-uniform",
            outcome: "allowed",
            threads: 1,
            clock: "precise",
            batch: 1,
            ours_ns: 100.04,
            peer: "governor",
            peer_ns: 250.06,
            ratio: 2.49951,
            plain_ns: 90.0,
        };
        let line = r#"{"scenario":"1m-uniform","outcome":"allowed","threads":1,"clock":"precise","batch":1,"ours_ns":100.0,"peer":"governor","peer_ns":250.1,"ratio":2.5}"#;
        assert_eq!(serde_json::to_string(&row.rounded())?, line);
        Ok(())
    }
}
