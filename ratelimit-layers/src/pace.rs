//! [`Pace`]: what is due at most once per second.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

const EVERY_MS: u64 = 1_000;

#[derive(Debug)]
pub(crate) struct Pace {
    begin: Instant,
    /// From the beginning.
    due_ms: AtomicU64,
    passed_over: AtomicU64,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self { begin: Instant::now(), due_ms: AtomicU64::new(0), passed_over: AtomicU64::new(0) }
    }

    /// If it is due, how often it was asked for since it was due before, this time included.
    pub(crate) fn due(&self, now: Instant) -> Option<u64> {
        let since = now.saturating_duration_since(self.begin).as_millis();
        let now_ms = u64::try_from(since).unwrap_or(u64::MAX);
        let due_ms = self.due_ms.load(Relaxed);
        let next_ms = now_ms.saturating_add(EVERY_MS);
        if now_ms < due_ms
            || self.due_ms.compare_exchange(due_ms, next_ms, Relaxed, Relaxed).is_err()
        {
            self.passed_over.fetch_add(1, Relaxed);
            return None;
        }
        Some(self.passed_over.swap(0, Relaxed).saturating_add(1))
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn it_is_due_once_per_second_and_counts_what_it_passed_over() {
        let pace = Pace::new();
        let due = (0..3_000).filter_map(|ms| pace.due(pace.begin + Duration::from_millis(ms)));
        assert_eq!(due.collect::<Vec<_>>(), [1, 1_000, 1_000]);
    }
}
