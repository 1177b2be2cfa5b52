//! The laws by name, and what is said when one is broken.

use std::fmt;

/// A law that every algorithm keeps on every backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Law {
    /// 1: In every window that the algorithm speaks of, what is admitted never exceeds its bound.
    Safety,
    /// 2: A request is denied only if it does not fit.
    NoFalseDenial,
    /// 3: `retry_after` and `reset_after` come true at the microsecond, and not one before.
    HonestRetry,
    /// 4: A denial charges nothing, in any limit of the batch; where attempts are counted, each of
    /// them is charged.
    DenialChargesNothing,
    /// 5: A state that has expired decides as no state does.
    ExpiredIsAbsent,
    /// 6: A time before the state's tick mints nothing and panics never.
    TimeGoingBack,
    /// 7: A batch charges every limit or none; but one that counts attempts, always.
    AllOrNothing,
    /// 8: Cost 0 and a peek change nothing, and tell what the next request would see.
    CostZeroIsAPeek,
    /// 9: Whatever is written is gone by itself soon after it stops to matter.
    NothingLeaks,
    /// 10: The same trace gives the same decisions, field by field, and the same states.
    OneAnswerEverywhere,
    /// 11: A state written under an old limit mints no more than the new one's capacity, and locks
    /// for no longer than the new one takes to recover from empty.
    ChangingALimit,
    /// 12: The token bucket and the generic cell rate algorithm decide alike.
    TwoNamesOneMachine,
    /// 13: What is held under an id is charged once and settled once, however often it is sent; what is
    /// never settled stands as charged, and a lease ends by itself.
    SettledOnce,
    /// 14: All of these hold at the store's own time, too: its clock keeps time, and what was charged by it counts
    /// until it has expired by it.
    OwnClock,
}

impl Law {
    /// Its number in the list of laws.
    #[must_use]
    pub const fn number(self) -> u8 {
        self as u8 + 1
    }
}

impl fmt::Display for Law {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "law {} ({self:?})", self.number())
    }
}

/// A law that a store has broken, and how, for a person.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The law.
    pub law: Law,
    /// What was asked, what was answered, and what should have been.
    pub told: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} is broken: {}", self.law, self.told)
    }
}

impl std::error::Error for Violation {}
