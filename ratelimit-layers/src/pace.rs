//! [`Pace`]: what is due at most once per second.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

const EVERY_MS: u64 = 1_000;

#[derive(Debug)]
pub(crate) struct Pace {
    begin: Instant,
    /// From the beginning.
    due_ms: AtomicU64,
}

impl Pace {
    pub(crate) fn new() -> Self {
        Self { begin: Instant::now(), due_ms: AtomicU64::new(0) }
    }

    /// Whether it is due. If it is, it is not for a second from now on.
    pub(crate) fn is_due(&self, now: Instant) -> bool {
        let since = now.saturating_duration_since(self.begin).as_millis();
        let now_ms = u64::try_from(since).unwrap_or(u64::MAX);
        let due_ms = self.due_ms.load(Relaxed);
        let next_ms = now_ms.saturating_add(EVERY_MS);
        due_ms <= now_ms && self.due_ms.compare_exchange(due_ms, next_ms, Relaxed, Relaxed).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn it_is_due_once_per_second() {
        let pace = Pace::new();
        let due = (0..3_000).filter(|ms| pace.is_due(pace.begin + Duration::from_millis(*ms)));
        assert_eq!(due.collect::<Vec<_>>(), [0, 1_000, 2_000]);
    }
}
