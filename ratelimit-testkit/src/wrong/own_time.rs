//! What is wrong only at the store's own time.

use ratelimit_core::Op;

/// What is wrong with a store that is asked at its own time, and right as soon as it is given one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum OwnTimeFlaw {
    /// All keys are one.
    OneKey,
    /// Every cost is 1, though the answer repeats the cost that was asked.
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
    /// GET, decide, SET, where the request has no id: another client does the same in between.
    ReadThenWrite,
}

/// How often [`OwnTimeFlaw::ForgetsNowAndThen`] forgets.
pub(super) const FORGETS_EVERY: u64 = 40;

impl OwnTimeFlaw {
    /// The cost that the store charges.
    pub(super) fn cost(self, asked: u64) -> u64 {
        if self == Self::EveryCostIsOne { asked.min(1) } else { asked }
    }

    /// Whether the store does not write what the operation leaves at this position of its batch.
    pub(super) fn skips(self, op: Op, position: usize) -> bool {
        match self {
            Self::OnlyTheFirst => position > 0,
            Self::RefundsNothing => op == Op::Refund,
            Self::ResetsNothing => op == Op::Reset,
            _ => false,
        }
    }
}
