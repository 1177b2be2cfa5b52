//! [`Calendar`]: windows that tell when a store decided.

use std::time::SystemTime;

use ratelimit_core::{Decision, Rate, Timestamp};

/// Fixed windows of about a month. None of them ends while a test runs, and the wait of a decision
/// until the end of its window tells when the store decided. For stores that decide by the clock of
/// a server.
#[derive(Clone, Copy, Debug)]
pub struct Calendar {
    window_us: u64,
    ends_us: u64,
}

impl Calendar {
    /// The windows that contain the system's time.
    #[must_use]
    pub fn now() -> Self {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).expect("after 1970");
        // Of windows of this length, half of one has passed.
        let window_s = 2 * now.as_secs() / 1_401;
        let ends_s = (now.as_secs() / window_s + 1) * window_s;
        Self { window_us: window_s * 1_000_000, ends_us: ends_s * 1_000_000 }
    }

    /// So many requests per window.
    #[must_use]
    pub fn rate(&self, count: u64) -> Rate {
        Rate::per_us(count, self.window_us).expect("a rate")
    }

    /// When a store decided this about windows of the calendar. Without decisions, and if none of
    /// them knows a charge, the last moment of the window: any is as good.
    #[must_use]
    pub fn time_of(&self, decisions: &[Decision]) -> Timestamp {
        let until_us = decisions.iter().map(|decision| decision.reset_after_us).max();
        let until_us = until_us.filter(|us| *us > 0).unwrap_or(1);
        Timestamp::from_us(self.ends_us - until_us).expect("before the window ends")
    }
}
