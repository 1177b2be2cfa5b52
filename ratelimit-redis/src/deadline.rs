//! [`Deadline`]: one moment by which a whole decision ends.

use std::time::Duration;

use tokio::time::Instant;

/// The moment by which a decision has to end. All its commands share it, so each has the time that
/// the ones before it left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadline {
    at: Instant,
    given: Duration,
}

/// Longer than any caller waits, and short enough to add to any time.
pub(crate) const LONGEST: Duration = Duration::from_secs(3_600);

impl Deadline {
    /// This much time from now, at most one hour.
    #[must_use]
    pub fn within(given: Duration) -> Self {
        let given = given.min(LONGEST);
        Self { at: Instant::now() + given, given }
    }

    /// The moment.
    #[must_use]
    pub const fn at(self) -> Instant {
        self.at
    }

    /// The time that was given at first, for messages.
    #[must_use]
    pub const fn given(self) -> Duration {
        self.given
    }

    /// How much time is left.
    #[must_use]
    pub fn remaining(self) -> Duration {
        self.remaining_at(Instant::now())
    }

    /// How much time is left then.
    pub(crate) fn remaining_at(self, now: Instant) -> Duration {
        self.at.saturating_duration_since(now)
    }

    /// Whether no time is left.
    #[must_use]
    pub fn is_over(self) -> bool {
        self.remaining().is_zero()
    }

    /// When a quarter of the time that was given at first is over.
    pub(crate) fn quarter_time(self) -> Instant {
        self.at.checked_sub(self.given * 3 / 4).unwrap_or(self.at)
    }

    /// An earlier deadline that leaves half of the remaining time for later commands.
    pub(crate) fn half(self) -> Self {
        Self { at: self.at - self.remaining() / 2, ..self }
    }

    /// A deadline a little later: for what ends by this one, on another thread.
    pub(crate) fn extended(self) -> Self {
        Self { at: self.at + self.given / 16, ..self }
    }

    /// An earlier deadline that leaves a quarter of the whole for
    /// [`to_give_back`](Self::to_give_back).
    pub(crate) fn to_charge(self) -> Self {
        Self { at: self.at.checked_sub(self.given / 4).unwrap_or(self.at), ..self }
    }

    /// The deadline for returning charges: at least a quarter of the whole from now, even if the
    /// rest took too long.
    pub(crate) fn to_give_back(self) -> Self {
        Self { at: self.at.max(Instant::now() + self.given / 4), ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIVEN: Duration = Duration::from_secs(8);

    #[tokio::test(start_paused = true)]
    async fn later_commands_share_the_remaining_time() {
        let deadline = Deadline::within(GIVEN);
        tokio::time::advance(GIVEN / 4).await;
        assert_eq!(deadline.remaining(), GIVEN * 3 / 4);
        assert_eq!(deadline.half().remaining(), GIVEN * 3 / 8);
        assert_eq!(deadline.extended().remaining(), GIVEN * 13 / 16);
        assert_eq!(deadline.to_charge().remaining(), GIVEN / 2);
        assert_eq!(deadline.to_give_back(), deadline);
        tokio::time::advance(GIVEN).await;
        assert!(deadline.is_over() && deadline.half().is_over());
        assert_eq!(deadline.to_give_back().remaining(), GIVEN / 4);
        assert_eq!(Deadline::within(Duration::MAX).given(), LONGEST);
    }
}
