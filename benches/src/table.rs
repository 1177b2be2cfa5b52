//! The measurements, as tables for people and as JSON lines for programs.

use std::fmt;

use serde::Serialize;

use crate::measure::Samples;

/// One measurement of `MemoryStore` beside a peer; the fields are those of its JSON line.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Row {
    pub(crate) scenario: &'static str,
    pub(crate) outcome: &'static str,
    pub(crate) threads: usize,
    /// The clock of our store.
    pub(crate) clock: &'static str,
    /// Decisions per call.
    pub(crate) batch: usize,
    pub(crate) ours_ns: f64,
    pub(crate) peer: &'static str,
    pub(crate) peer_ns: f64,
    /// The peer's time over ours, as a median over rounds: above 1, ratelimit is faster.
    pub(crate) ratio: f64,
}

impl Row {
    /// The row of our limiter and the peer at these turns.
    pub(crate) fn measured(self, samples: &Samples, ours: usize, peer: usize) -> Self {
        Self {
            ours_ns: rounded(samples.ns(ours), 10.0),
            peer_ns: rounded(samples.ns(peer), 10.0),
            ratio: rounded(samples.ratio(ours, peer), 1000.0),
            ..self
        }
    }

    /// The column headers of a row.
    pub(crate) fn heading() -> String {
        format!(
            "{:<24} {:<8} {:>7} {:<8} {:>5} {:>9}   {:<18} {:>9} {:>7}",
            "scenario",
            "outcome",
            "threads",
            "clock",
            "batch",
            "ours ns",
            "peer",
            "peer ns",
            "ratio"
        )
    }
}

/// Rounds to a tenth with 10, to a hundredth with 100.
pub(crate) fn rounded(value: f64, parts: f64) -> f64 {
    (value * parts).round() / parts
}

impl fmt::Display for Row {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:<24} {:<8} {:>7} {:<8} {:>5} {:>9.1}   {:<18} {:>9.1} {:>7.2}",
            self.scenario,
            self.outcome,
            self.threads,
            self.clock,
            self.batch,
            self.ours_ns,
            self.peer,
            self.peer_ns,
            self.ratio
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
            ours_ns: 0.0,
            peer: "governor",
            peer_ns: 0.0,
            ratio: 0.0,
        };
        let row = row.measured(&Samples(vec![vec![100.04, 250.06]]), 0, 1);
        let line = r#"{"scenario":"1m-uniform","outcome":"allowed","threads":1,"clock":"precise","batch":1,"ours_ns":100.0,"peer":"governor","peer_ns":250.1,"ratio":2.5}"#;
        assert_eq!(serde_json::to_string(&row)?, line);
        Ok(())
    }
}
