//! [`Capability`]: the optional operations of a store.

use ratelimit_core::store::Op;
use ratelimit_core::{Algorithm, AnyAlgorithm};

use crate::harness::Harness;
use crate::seeds::AlgorithmKind;
use crate::trace::made::Instance;

/// An operation that a store may lack and still run the laws. A harness lists what its store lacks
/// in [`Harness::LACKS`].
///
/// The laws avoid what the store lacks. A test with nothing left to try reports itself as skipped
/// on standard error, by its name. The property `it_can_do_what_it_claims` checks the list: it uses
/// each capability once, and expects the store to refuse those that it lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Capability {
    /// Returning a charge: [`Op::Refund`].
    Refund,
    /// Charging a request that does not fit: [`Op::Force`].
    Force,
    /// Forgetting a key: [`Op::Reset`].
    Reset,
    /// Operations under an id: reservations and leases, which are settled and renewed.
    Reservations,
    /// Storing the caller's metadata, in limits that keep any.
    Metadata,
    /// Limits that count what they admit.
    Admissions,
    /// Limits that count attempts.
    Attempts,
    /// Reading what another limit of its name has left as the pure step does. A store that charges
    /// before it reads keeps no end of a window, and one that keeps no states reads none: a changed
    /// limit is safe there all the same.
    Changes,
    /// Batches of several checks.
    Batches,
    /// Batches over several keys.
    SeveralKeys,
    /// Charging at a time before an earlier charge. A store that only decides by its own clock
    /// discards expired states by that clock. Peeks may use any time.
    PastTimes,
    /// Reporting stored states: [`Harness::state`]. Only a store with a different representation of
    /// its states, such as the oracle, may lack it. Its states are compared by peeks.
    States,
    /// Reading its own clock once the key is locked, and showing nothing before it is decided. A
    /// transaction that sets times to live reads the clock before, and may decide a request at a
    /// time before the state's; one that charges first leaves what did not fit.
    TimesInOrder,
    /// Limits of this algorithm.
    Algorithm(AlgorithmKind),
    /// Limits whose windows are those of a calendar.
    Calendars,
}

impl Capability {
    /// What a store lacks that only charges attempts,
    /// [increment-first](AlgorithmKind::INCREMENT_FIRST): as in a transaction that cannot branch.
    pub const INCREMENT_FIRST: &'static [Self] = &[
        Self::Refund,
        Self::Force,
        Self::Reservations,
        Self::Admissions,
        Self::Changes,
        Self::TimesInOrder,
        Self::Algorithm(AlgorithmKind::Gcra),
        Self::Algorithm(AlgorithmKind::BucketedWindow),
        Self::Algorithm(AlgorithmKind::SlidingCounter),
        Self::Algorithm(AlgorithmKind::Concurrency),
        Self::Algorithm(AlgorithmKind::Lockout),
        Self::Calendars,
    ];

    /// What a store has to be able to do to keep this limit.
    pub(crate) fn needed_by(limit: &Instance<AnyAlgorithm>) -> impl Iterator<Item = Self> + use<> {
        let counts = if limit.counts_attempts { Self::Attempts } else { Self::Admissions };
        let kind = Self::Algorithm(AlgorithmKind::from_algorithm(&limit.algorithm));
        let by_calendar = match &limit.algorithm {
            AnyAlgorithm::FixedWindow(window) => window.calendar().map(|_| Self::Calendars),
            _ => None,
        };
        [kind, counts].into_iter().chain(by_calendar)
    }

    /// The capability that an operation needs; `None` if every store has it.
    #[must_use]
    pub const fn for_op(op: Op) -> Option<Self> {
        match op {
            Op::Acquire | Op::Peek => None,
            Op::Refund => Some(Self::Refund),
            Op::Force | Op::Adopt => Some(Self::Force),
            Op::Reset => Some(Self::Reset),
            Op::Settle | Op::Renew | Op::Extend => Some(Self::Reservations),
        }
    }
}

/// The capabilities of a harness's store.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Able(&'static [Capability]);

impl Able {
    /// Of a store that lacks nothing.
    pub(crate) const ALL: Self = Self(&[]);
    /// Of an algorithm alone: a step has one check, and no id.
    pub(crate) const ALONE: Self = Self(&[
        Capability::Batches,
        Capability::SeveralKeys,
        Capability::Reservations,
        Capability::Reset,
    ]);

    pub(crate) const fn for_store<A: Algorithm, H: Harness<A>>() -> Self {
        Self(H::LACKS)
    }

    pub(crate) fn can(self, capability: Capability) -> bool {
        !self.0.contains(&capability)
    }

    pub(crate) fn can_do(self, op: Op) -> bool {
        Capability::for_op(op).is_none_or(|needed| self.can(needed))
    }

    /// The first of these capabilities that the store lacks.
    pub(crate) fn lacks(self, needed: impl IntoIterator<Item = Capability>) -> Option<Capability> {
        needed.into_iter().find(|needed| !self.can(*needed))
    }

    /// Whether the store supports this limit.
    pub(crate) fn can_keep(self, limit: &Instance<AnyAlgorithm>) -> bool {
        self.lacks(Capability::needed_by(limit)).is_none()
    }

    /// All capabilities that the store lacks.
    pub(crate) const fn lacking(self) -> &'static [Capability] {
        self.0
    }
}
