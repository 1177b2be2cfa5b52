//! Flaws that show only at the store's own time.

use ratelimit_core::{Clock, ManualClock, Op, SystemClock, Timestamp};

/// The clock that a wrong store reads.
pub(super) enum OwnClock {
    Manual(ManualClock),
    System(SystemClock),
}

impl OwnClock {
    pub(super) fn now(&self) -> Timestamp {
        match self {
            Self::Manual(clock) => clock.now(),
            Self::System(clock) => clock.now(),
        }
    }
}

/// The flaw of a store that is wrong at its own time, and right at given times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OwnTimeFlaw {
    /// All keys share one state.
    OneKey,
    /// Every request is charged 1, although the answer repeats the requested cost.
    EveryCostIsOne,
    /// A batch is charged to its first check only.
    OnlyTheFirst,
    /// A refund gives nothing back.
    RefundsNothing,
    /// A reset forgets nothing.
    ResetsNothing,
    /// Every 40th call first forgets the states of its keys.
    ForgetsNowAndThen,
    /// A denied request that costs more than 1 is forced through.
    ForcesTheDenied,
    /// GET, decide, SET for requests without an id: another client does the same in between.
    ReadThenWrite,
}

/// The number of calls between two that forget, for [`OwnTimeFlaw::ForgetsNowAndThen`].
pub(super) const FORGETS_EVERY: u64 = 40;

impl OwnTimeFlaw {
    /// The cost that the store charges.
    pub(super) fn cost(self, asked: u64) -> u64 {
        if self == Self::EveryCostIsOne { asked.min(1) } else { asked }
    }

    /// Whether the store drops the write of the operation at this position of its batch.
    pub(super) fn skips(self, op: Op, position: usize) -> bool {
        match self {
            Self::OnlyTheFirst => position > 0,
            Self::RefundsNothing => op == Op::Refund,
            Self::ResetsNothing => op == Op::Reset,
            _ => false,
        }
    }
}
