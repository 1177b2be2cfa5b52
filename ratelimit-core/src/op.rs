//! [`Op`] and [`Now`]: the operation of a batch and its time.
//!
//! An explicit time ([`Now::At`]) never triggers expiry, because the times of a replay go back and
//! forth.

use core::fmt;

use crate::timestamp::Timestamp;

/// Writes the enum of operations, with a name for each.
macro_rules! operations {
    ($( $(#[$doc:meta])+ $op:ident = $name:literal, )+) => {
        /// The operation of a batch.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub enum Op {
            $( $(#[$doc])+ $op, )+
        }

        impl Op {
            /// All operations.
            pub const ALL: &'static [Self] = &[$(Self::$op),+];
        }

        impl fmt::Display for Op {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $( Self::$op => $name, )+ })
            }
        }
    };
}

operations! {
    /// Charge the cost if it fits every limit, and nothing otherwise.
    #[default]
    Acquire = "acquire",
    /// Decide as [`Op::Acquire`] does, and charge nothing.
    Peek = "peek",
    /// Charge the cost even if it does not fit, down to nothing left, or into
    /// [debt](crate::Algorithm::debt).
    Force = "force",
    /// Give the cost back, up to the capacity. Without an id, a repetition gives it back once more.
    Refund = "refund",
    /// Forget the key: full capacity. Without an id, a repetition also forgets what was charged in
    /// between. Reservations stay: settling one below its cost may return capacity that the reset
    /// has already returned.
    Reset = "reset",
    /// Settle the reservation under the batch's id at the cost of the checks. A lease ends.
    Settle = "settle",
    /// Renew the reservation under the batch's id: it lives longer, and a lease starts again.
    /// Refused if a lease of the batch has ended, because another caller may have its place.
    Renew = "renew",
    /// Grow the reservation under the batch's id to the cost of the checks, if what is added fits
    /// every limit; otherwise nothing changes. A reservation of that cost or more stays as it is,
    /// so a repetition charges nothing more. It lives longer, as after [`Op::Renew`]. Leases do not
    /// grow, and are not renewed by it: one that has ended is left out.
    Extend = "extend",
    /// Charge until no more remains than the cost of the checks, for a limit of another service,
    /// which says what remains there. Where less remains, nothing changes.
    Adopt = "adopt",
}

impl Op {
    /// Whether the operation changes a reservation, and needs its id.
    #[must_use]
    pub const fn needs_id(self) -> bool {
        matches!(self, Self::Settle | Self::Renew | Self::Extend)
    }
}

/// The time of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Now {
    /// The store's own clock, which all of its clients share. For production.
    #[default]
    Store,
    /// This time, for tests and replay. The store still removes expired states by its own clock. It
    /// keeps states written at a given time for one more hour, so that a slow run loses none.
    At(Timestamp),
}

impl Now {
    /// How long after its expiry a store keeps a state written with [`Now::At`]: one hour, in
    /// microseconds.
    pub const PADDING_US: u64 = 3_600_000_000;

    /// How long after its expiry a store keeps a state written at this time, in microseconds: 0 for
    /// its own clock.
    #[must_use]
    pub const fn padding_us(self) -> u64 {
        match self {
            Self::Store => 0,
            Self::At(_) => Self::PADDING_US,
        }
    }
}
