//! [`Rounds`]: bounds how often a decision starts again.

use crate::deadline::Deadline;
use crate::error::RedisError;

/// Bounds how often a decision starts again because other clients changed its keys.
pub(crate) struct Rounds {
    begun: usize,
    most: usize,
    deadline: Deadline,
    /// The rounds that an expired state caused, without another client's write.
    expiries: usize,
}

impl Rounds {
    /// Allows `most` rounds, the first included, and none once the deadline is over.
    pub(crate) fn new(most: usize, deadline: Deadline) -> Self {
        Self { begun: 1, most, deadline, expiries: 0 }
    }

    /// Whether another round may begin.
    pub(crate) fn another(&mut self) -> bool {
        let another = !self.deadline.is_over() && self.begun < self.most;
        self.begun += usize::from(another);
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

    /// The error to return for one that a later round met. If the deadline ended before that round could
    /// send anything, contention is the cause.
    pub(crate) fn explain(&self, error: RedisError) -> RedisError {
        let has_charged_nothing = matches!(error, RedisError::Unreachable { .. });
        if self.begun > 1 && has_charged_nothing && self.deadline.is_over() {
            return self.contended();
        }
        error
    }
}
