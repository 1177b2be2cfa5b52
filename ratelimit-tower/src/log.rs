//! [`Log`]: what a layer logs of requests, at most once per second for each limit, so that an attack does not fill the log.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

const EVERY: Duration = Duration::from_secs(1);

/// Lines by the name of a limit. Each tells how many requests it stands for: its own, and those since the line before.
#[derive(Default)]
pub(crate) struct Log {
    pub(crate) shadow: LogLines,
    /// The store could not decide by limits of which the named one is the first.
    pub(crate) undecided: LogLines,
    pub(crate) misconfigured: LogLines,
    pub(crate) unwired: LogLines,
}

#[derive(Default)]
pub(crate) struct LogLines(Mutex<HashMap<Box<str>, LogLine>>);

struct LogLine {
    next: Instant,
    /// How many requests no line has reported.
    untold: u64,
}

impl LogLines {
    /// Counts a request. Returns for how many a line stands, if one is due.
    pub(crate) fn due(&self, limit: &str) -> Option<u64> {
        self.due_at(limit, Instant::now())
    }

    fn due_at(&self, limit: &str, now: Instant) -> Option<u64> {
        let mut lines = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let line = lines.entry(limit.into()).or_insert(LogLine { next: now, untold: 0 });
        line.untold += 1;
        if now < line.next {
            return None;
        }
        line.next = now + EVERY;
        Some(std::mem::take(&mut line.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_has_one_line_per_second_which_tells_for_how_many_requests_it_stands() {
        let (lines, begin) = (LogLines::default(), Instant::now());
        let told =
            (0..3_000).filter_map(|ms| lines.due_at("login", begin + Duration::from_millis(ms)));
        assert_eq!(told.collect::<Vec<_>>(), [1, 1_000, 1_000]);
        assert_eq!(lines.due_at("search", begin), Some(1));
        assert_eq!(lines.due_at("login", begin + Duration::from_secs(60)), Some(1_000));
    }
}
