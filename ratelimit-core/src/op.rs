//! [`Op`] and [`Now`]: what is to be done, and when.

use core::fmt;

use crate::timestamp::Timestamp;

/// What is to be done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Op {
    /// Charge the cost if it fits every limit, and nothing otherwise.
    #[default]
    Acquire,
    /// Say what [`Op::Acquire`] would say, and charge nothing.
    Peek,
    /// Charge the cost whether it fits or not, down to nothing left.
    Force,
    /// Give the cost back, never above the capacity.
    Refund,
    /// Forget the key: full capacity. What is held under an id stays held: settled at less, it gives
    /// back once more what was given back already.
    Reset,
    /// Settle the charge that is held under the batch's id: the cost is what it turned out to be. A
    /// lease ends.
    Settle,
    /// Make the charge that is held under the batch's id count as made now: a lease begins anew.
    Renew,
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Acquire => "acquire",
            Self::Peek => "peek",
            Self::Force => "force",
            Self::Refund => "refund",
            Self::Reset => "reset",
            Self::Settle => "settle",
            Self::Renew => "renew",
        })
    }
}

/// Whose clock decides.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Now {
    /// The store's own: one clock for everybody who asks it. For production.
    #[default]
    Store,
    /// This time, for tests and for replay. The store still sweeps by its own clock, and keeps what
    /// was written this way for an hour longer than needed, so that a slow run loses nothing.
    At(Timestamp),
}

impl Now {
    /// How much longer than needed a store keeps what was written with [`Now::At`]: an hour.
    pub const PADDING_US: u64 = 3_600_000_000;

    /// How much longer than needed a store keeps what is written at this time: none by its own clock.
    #[must_use]
    pub const fn padding_us(self) -> u64 {
        match self {
            Self::Store => 0,
            Self::At(_) => Self::PADDING_US,
        }
    }
}
