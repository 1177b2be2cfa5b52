//! [`Capability`]: what a store can do, for one that cannot do all of it.

use std::fmt;

use ratelimit_core::{Algorithm, Op, Policy};

use crate::harness::Harness;
use crate::seeds::AlgorithmKind;

/// Something that a store need not be able to do to be held to the laws. A harness names what its store lacks in
/// [`Harness::LACKS`].
///
/// The laws then do without it, and a test of which nothing is left says so on standard error, by its name. What
/// is claimed is tested too: the property `it_can_do_what_it_claims` uses each capability once, and asks that the
/// store refuses what it is said to lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Capability {
    /// Giving back: [`Op::Refund`].
    Refund,
    /// Charging what does not fit: [`Op::Force`].
    Force,
    /// Forgetting a key: [`Op::Reset`].
    Reset,
    /// Operations under an id: reservations and leases, settled and renewed.
    Reservations,
    /// Keeping what a caller says of itself, in limits that keep any.
    Metadata,
    /// Limits that count attempts.
    Attempts,
    /// Batches of several checks.
    Batches,
    /// Batches over several keys.
    SeveralKeys,
    /// Charging at a time before those it has charged at already. A store that is only ever asked by its own clock
    /// forgets by it what has expired. A peek may be at any time.
    PastTimes,
    /// Telling what is stored: [`Harness::state`]. Only a store that represents its states in another way, as the
    /// oracle does, may lack it. Such a store may also read in its own way what was written under another limit, as
    /// long as that is safe.
    States,
    /// Limits of this algorithm.
    Algorithm(AlgorithmKind),
}

impl Capability {
    /// What a store needs for an operation; `None` if every store has it.
    #[must_use]
    pub const fn of(op: Op) -> Option<Self> {
        match op {
            Op::Acquire | Op::Peek => None,
            Op::Refund => Some(Self::Refund),
            Op::Force => Some(Self::Force),
            Op::Reset => Some(Self::Reset),
            Op::Settle | Op::Renew => Some(Self::Reservations),
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refund => f.write_str("refund"),
            Self::Force => f.write_str("force"),
            Self::Reset => f.write_str("reset"),
            Self::Reservations => f.write_str("reservations"),
            Self::Metadata => f.write_str("metadata"),
            Self::Attempts => f.write_str("attempts"),
            Self::Batches => f.write_str("batches"),
            Self::SeveralKeys => f.write_str("batches over several keys"),
            Self::PastTimes => f.write_str("past times"),
            Self::States => f.write_str("a look at its states"),
            Self::Algorithm(kind) => write!(f, "{kind}"),
        }
    }
}

/// What the store of a harness can do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Able(&'static [Capability]);

impl Able {
    pub(crate) const fn of<A: Algorithm, H: Harness<A>>() -> Self {
        Self(H::LACKS)
    }

    pub(crate) fn can(self, capability: Capability) -> bool {
        !self.0.contains(&capability)
    }

    pub(crate) fn can_do(self, op: Op) -> bool {
        Capability::of(op).is_none_or(|needed| self.can(needed))
    }

    /// The first of these that the store lacks.
    pub(crate) fn lacks(self, needed: impl IntoIterator<Item = Capability>) -> Option<Capability> {
        needed.into_iter().find(|needed| !self.can(*needed))
    }

    /// Whether the store can keep this limit.
    pub(crate) fn can_keep(self, policy: &Policy) -> bool {
        self.can(Capability::Algorithm(AlgorithmKind::of(policy)))
            && (self.can(Capability::Attempts) || !policy.charges_denials())
    }

    /// Everything that it lacks.
    pub(crate) const fn lacking(self) -> &'static [Capability] {
        self.0
    }
}
