//! [`Log`]: what a layer logs of requests, at most once per second for each limit, so that an
//! attack does not fill the log.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// The most names that have lines of their own; all others share one.
const MOST_NAMES: usize = 1_024;

/// Lines by the name of a limit. Each tells how many requests it stands for: its own, and those
/// since the line before.
#[derive(Default)]
pub(crate) struct Log {
    pub(crate) shadow: LogLines,
    /// The store could not decide by limits of which the named one is the first.
    pub(crate) undecided: LogLines,
    /// The store could not settle reservations of limits of which the named one is the first.
    #[cfg(feature = "tokio")]
    pub(crate) unsettled: LogLines,
    pub(crate) misconfigured: LogLines,
    pub(crate) unwired: LogLines,
    #[cfg(feature = "tokio")]
    pub(crate) expired: LogLines,
}

/// Lines by name: each at most once in a time, which is a second by default.
pub(crate) struct LogLines {
    every: Duration,
    lines: Mutex<HashMap<Box<str>, LogLine>>,
}

impl Default for LogLines {
    fn default() -> Self {
        Self::every(Duration::from_secs(1))
    }
}

struct LogLine {
    next: Instant,
    /// How many requests no line has reported.
    untold: u64,
}

impl LogLines {
    /// At most one line of each name in this time.
    pub(crate) fn every(every: Duration) -> Self {
        Self { every, lines: Mutex::default() }
    }

    /// Counts a request. Returns for how many a line stands, if one is due.
    pub(crate) fn count_request(&self, name: &str) -> Option<u64> {
        self.count_request_at(name, Instant::now())
    }

    fn count_request_at(&self, name: &str, now: Instant) -> Option<u64> {
        let mut lines = self.lines.lock().unwrap_or_else(PoisonError::into_inner);
        let has_own = lines.len() < MOST_NAMES || lines.contains_key(name);
        let name = if has_own { name } else { "" };
        let line = lines.entry(name.into()).or_insert(LogLine { next: now, untold: 0 });
        line.untold += 1;
        if now < line.next {
            return None;
        }
        line.next = now + self.every;
        Some(std::mem::take(&mut line.untold))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_limit_has_one_line_per_second_which_tells_for_how_many_requests_it_stands() {
        let (lines, begin) = (LogLines::default(), Instant::now());
        let told = (0..3_000)
            .filter_map(|ms| lines.count_request_at("login", begin + Duration::from_millis(ms)));
        assert_eq!(told.collect::<Vec<_>>(), [1, 1_000, 1_000]);
        assert_eq!(lines.count_request_at("search", begin), Some(1));
        assert_eq!(lines.count_request_at("login", begin + Duration::from_secs(60)), Some(1_000));
    }

    #[test]
    fn names_without_end_share_a_line() {
        let (lines, begin) = (LogLines::every(Duration::from_secs(60)), Instant::now());
        let told = (0..10_000).filter_map(|name| lines.count_request_at(&format!("{name}"), begin));
        assert_eq!(told.sum::<u64>(), MOST_NAMES as u64 + 1);
        let later = lines.count_request_at("10000", begin + Duration::from_secs(60));
        assert_eq!(later, Some(10_000 - MOST_NAMES as u64));
    }
}
