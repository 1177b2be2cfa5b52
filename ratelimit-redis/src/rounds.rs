//! [`Rounds`]: bounds how often a decision starts again.

use std::time::Duration;

use tokio::time::Instant;

use crate::connection::Peer;
use crate::deadline::Deadline;
use crate::error::RedisError;

/// The longest first pause before another round. Each next pause is twice as long, up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(1);
const LAST_PAUSE: Duration = Duration::from_millis(16);

/// Bounds how often a decision starts again because other clients changed its keys.
pub(crate) struct Rounds {
    begun: usize,
    most: usize,
    deadline: Deadline,
    /// The server, for messages.
    peer: Peer,
    /// When the last exchange with the servers began, and how long the longest before it took.
    began: Instant,
    longest: Duration,
    /// Whether it waited for other callers of this store.
    has_waited: bool,
    /// The rounds that an expired state caused, without another client's write.
    expiries: usize,
    pause: Duration,
}

impl Rounds {
    /// Allows `most` rounds, the first included.
    pub(crate) fn new(most: usize, deadline: Deadline, peer: &Peer) -> Self {
        let (began, longest, peer) = (Instant::now(), Duration::ZERO, peer.clone());
        Self {
            begun: 1,
            most,
            deadline,
            peer,
            began,
            longest,
            has_waited: false,
            expiries: 0,
            pause: FIRST_PAUSE,
        }
    }

    /// Whether other callers of this store had to go first.
    pub(crate) fn after_others(self, has_waited: bool) -> Self {
        Self { has_waited, ..self }
    }

    /// An exchange with the servers begins.
    pub(crate) fn begin(&mut self) {
        self.longest = self.longest.max(self.began.elapsed());
        self.began = Instant::now();
    }

    /// Pauses for a random time, so that callers which collided do not collide again.
    pub(crate) async fn pause(&mut self) {
        let pause = self.pause.mul_f64(fastrand::f64()).min(self.remaining());
        self.pause = (self.pause * 2).min(LAST_PAUSE);
        tokio::time::sleep(pause).await;
        self.begin();
    }

    /// Whether another exchange ends by the deadline, even if it takes half as long again as the
    /// longest so far. Otherwise its charge could be without an answer, as in an outage, where
    /// contention is the cause. A slow server is an outage, so it is asked as long as there is
    /// time.
    pub(crate) fn is_in_time(&self) -> bool {
        let needed = if self.is_slow() { Duration::ZERO } else { self.slowest() * 3 / 2 };
        self.remaining() > needed
    }

    /// How much time is left.
    pub(crate) fn remaining(&self) -> Duration {
        self.deadline.remaining()
    }

    /// The longest exchange, with the one that is in flight.
    fn slowest(&self) -> Duration {
        self.longest.max(self.began.elapsed())
    }

    /// Whether an exchange took so much of the time that others are not the cause if the time ends:
    /// the server may hang.
    fn is_slow(&self) -> bool {
        self.slowest() > self.deadline.given() / 4
    }

    /// Whether the first round may charge: a caller that had to wait for others may have too little
    /// time left.
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

    /// Whether another round may begin after a state that the last one read has expired. Each of
    /// the `states` can expire once, so these rounds are bounded without counting against `most`.
    pub(crate) fn another_after_expiry(&mut self, states: usize) -> bool {
        let free = self.expiries < states;
        self.expiries += usize::from(free);
        free || self.another()
    }

    /// The error when no round is left, or no time for one. Nothing is charged.
    pub(crate) fn contended(&self) -> RedisError {
        if self.begun < self.most && self.is_slow() {
            let given = self.deadline.given();
            let reason = format!(
                "it answers so slowly that {given:?} are not enough to decide; nothing was charged"
            );
            return self.peer.unreachable(reason);
        }
        RedisError::Contended { attempts: self.begun }
    }

    /// The error to return for one that a later round met, or one that waited for others. If the
    /// deadline ended before it could charge anything, contention is the cause, unless the server
    /// is slow.
    pub(crate) fn explain(&self, error: RedisError) -> RedisError {
        let has_charged_nothing = matches!(error, RedisError::Unreachable { .. });
        let others = self.begun > 1 || self.has_waited;
        if others && has_charged_nothing && self.deadline.is_over() && !self.is_slow() {
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
    async fn a_round_that_would_end_after_the_deadline_does_not_begin_unless_the_server_is_slow() {
        let ms = Duration::from_millis;
        for (round_ms, due) in [(0, 8), (20, 4), (25, 3), (33, 4), (34, 3), (60, 2)] {
            let mut rounds = Rounds::new(8, Deadline::within(ms(100)), &Peer::new("it"));
            advance(ms(round_ms)).await;
            while rounds.another() {
                advance(ms(round_ms)).await;
            }
            assert_eq!(rounds.begun, due, "{round_ms} ms each");
        }
    }
    #[tokio::test(start_paused = true)]
    async fn a_caller_that_waited_for_a_turn_and_a_new_connection_may_charge() {
        let ms = Duration::from_millis;
        // A quarter of the time for the turn, and until half of it another runtime takes the
        // connection over.
        for late_ms in 0..5 {
            let deadline = Deadline::within(ms(100));
            advance(ms(25)).await;
            let rounds = Rounds::new(8, deadline, &Peer::new("it")).after_others(true);
            advance(ms(25 + late_ms)).await;
            assert!(rounds.may_charge(), "{late_ms}");
        }
    }
}
