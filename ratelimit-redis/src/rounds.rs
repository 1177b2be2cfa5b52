//! [`Rounds`]: bounds how often a decision starts again.

use std::time::Duration;

use tokio::time::Instant;

use crate::deadline::Deadline;
use crate::error::RedisError;

/// Bounds how often a decision starts again because other clients changed its keys.
pub(crate) struct Rounds {
    begun: usize,
    most: usize,
    deadline: Deadline,
    /// When the last exchange with the servers began, and how long the longest before it took.
    began: Instant,
    longest: Duration,
    /// Whether it waited for other callers of this store.
    has_waited: bool,
    /// The rounds that an expired state caused, without another client's write.
    expiries: usize,
}

impl Rounds {
    /// Allows `most` rounds, the first included.
    pub(crate) fn new(most: usize, deadline: Deadline) -> Self {
        let (began, longest) = (Instant::now(), Duration::ZERO);
        Self { begun: 1, most, deadline, began, longest, has_waited: false, expiries: 0 }
    }

    /// Notes that other callers of this store had to go first.
    pub(crate) fn waited(&mut self) {
        self.has_waited = true;
    }

    /// An exchange with the servers begins.
    pub(crate) fn begin(&mut self) {
        self.longest = self.longest.max(self.began.elapsed());
        self.began = Instant::now();
    }

    /// Whether another exchange ends by the deadline, even if it takes twice as long as the longest so far. Otherwise its charge
    /// could be without an answer, as in an outage, where contention is the cause.
    pub(crate) fn is_in_time(&self) -> bool {
        self.deadline.remaining() > 2 * self.longest.max(self.began.elapsed())
    }

    /// Whether the first round may charge: a caller that had to wait for others may have too little time left.
    pub(crate) fn may_charge(&self) -> bool {
        !self.has_waited || self.is_in_time()
    }

    /// Whether another round may begin.
    pub(crate) fn another(&mut self) -> bool {
        let another = self.begun < self.most && self.is_in_time();
        self.begun += usize::from(another);
        self.begin();
        another
    }

    /// Whether another round may begin after a state that the last one read has expired. Each of the
    /// `states` can expire once, so these rounds are bounded without counting against `most`.
    pub(crate) fn another_after_expiry(&mut self, states: usize) -> bool {
        let free = self.expiries < states;
        self.expiries += usize::from(free);
        free || self.another()
    }

    /// The error when no round is left.
    pub(crate) fn contended(&self) -> RedisError {
        RedisError::Contended { attempts: self.begun }
    }

    /// The error to return for one that a later round met, or one that waited for others. If the deadline ended before it could
    /// charge anything, contention is the cause.
    pub(crate) fn explain(&self, error: RedisError) -> RedisError {
        let has_charged_nothing = matches!(error, RedisError::Unreachable { .. });
        if (self.begun > 1 || self.has_waited) && has_charged_nothing && self.deadline.is_over() {
            return self.contended();
        }
        error
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_round_that_would_end_after_the_deadline_does_not_begin() {
        let ms = Duration::from_millis;
        for (round_ms, due) in [(0, 8), (20, 3), (33, 2), (34, 1), (60, 1)] {
            let mut rounds = Rounds::new(8, Deadline::within(ms(100)));
            advance(ms(round_ms)).await;
            while rounds.another() {
                advance(ms(round_ms)).await;
            }
            assert_eq!(rounds.begun, due, "{round_ms} ms each");
        }
    }
}
