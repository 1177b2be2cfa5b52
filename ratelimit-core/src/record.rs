//! [`Record`]: what an operator has decided for one caller under one limit.

use crate::algorithms::Algorithm;
use crate::decision::Decision;
use crate::limit::Limit;
use crate::refusal::Refusal;
use crate::timestamp::Timestamp;

/// What an operator has decided for one caller under one limit: other numbers, blocked, or exempt,
/// until a time or for ever.
///
/// A store keeps records beside the states, and reads a caller's in the same atomic step that
/// decides, for limits that [look for one](Limit::overridable). A record goes before the
/// [numbers](crate::Numbers) of a request, and these before those of the policy.
///
/// | record | what it does |
/// |---|---|
/// | numbers | the limit decides at these numbers, on the same state; its `max` does not bind them |
/// | blocked | acquires, peeks and extensions are denied and charge nothing, not even an attempt, until the record ends; all other operations act on the state |
/// | exempt | acquires, peeks, forced charges and extensions are allowed and charge nothing, and a settlement charges no more than was reserved; all other operations act on the state |
///
/// From its end on a record is as none, by the clock that decides.
///
/// ```
/// use ratelimit_core::{Gcra, Limits, RateLimiter, Record, Timestamp};
/// use ratelimit_memory::MemoryStore;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limits = Limits::builder().limit("api", Gcra::per_second(10).burst(20)).overridable().build()?;
/// let limiter = RateLimiter::new(limits, MemoryStore::new());
///
/// let double: Record<_> = Record::numbers("gcra 20/s burst 40".parse()?).forever();
/// limiter.set_record("alice", "api", double).await?;
/// assert_eq!(limiter.check("alice").await?.limit(), 40);
///
/// limiter.replace_record("alice", "api", Record::blocked().forever()).await?;
/// assert!(!limiter.check("alice").await?.allowed());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct Record<A> {
    change: Change<A>,
    until: Option<Timestamp>,
}

/// A [`Record`] that does not say yet how long it stands.
#[derive(Debug)]
#[must_use = "say how long it stands: until() or forever()"]
pub struct UnendedRecord<A>(Change<A>);

/// What a [`Record`] changes.
#[derive(Debug)]
enum Change<A> {
    /// The numbers; and how a store copies them, whose algorithms need not be `Clone`.
    Numbers(A, fn(&A) -> A),
    Blocked,
    Exempt,
}

impl<A> Clone for Record<A> {
    fn clone(&self) -> Self {
        let change = match &self.change {
            Change::Numbers(numbers, copy) => Change::Numbers(copy(numbers), *copy),
            Change::Blocked => Change::Blocked,
            Change::Exempt => Change::Exempt,
        };
        Self { change, until: self.until }
    }
}

impl<A: PartialEq> PartialEq for Record<A> {
    fn eq(&self, other: &Self) -> bool {
        let same = match (&self.change, &other.change) {
            (Change::Numbers(numbers, _), Change::Numbers(other, _)) => numbers == other,
            (Change::Blocked, Change::Blocked) | (Change::Exempt, Change::Exempt) => true,
            _ => false,
        };
        same && self.until == other.until
    }
}

impl<A: Eq> Eq for Record<A> {}

impl<A> Record<A> {
    /// Decides by the numbers of this algorithm, which has the kind and window of the limit's.
    pub const fn numbers(algorithm: A) -> UnendedRecord<A>
    where
        A: Clone,
    {
        UnendedRecord(Change::Numbers(algorithm, A::clone))
    }

    /// Denies.
    pub const fn blocked() -> UnendedRecord<A> {
        UnendedRecord(Change::Blocked)
    }

    /// Allows, and charges nothing.
    pub const fn exempt() -> UnendedRecord<A> {
        UnendedRecord(Change::Exempt)
    }

    /// The numbers, if it has some.
    #[must_use]
    pub const fn algorithm(&self) -> Option<&A> {
        if let Change::Numbers(algorithm, _) = &self.change { Some(algorithm) } else { None }
    }

    /// Whether it blocks the caller.
    #[must_use]
    pub const fn is_blocked(&self) -> bool {
        matches!(self.change, Change::Blocked)
    }

    /// Whether it exempts the caller.
    #[must_use]
    pub const fn is_exempt(&self) -> bool {
        matches!(self.change, Change::Exempt)
    }

    /// When it ends; `None` if it stands for ever.
    #[must_use]
    pub const fn end(&self) -> Option<Timestamp> {
        self.until
    }

    /// Whether it stands at this time.
    #[must_use]
    pub fn stands_at(&self, now: Timestamp) -> bool {
        self.until.is_none_or(|until| now < until)
    }
}

impl<A> UnendedRecord<A> {
    /// The record, which is as none from this time on.
    #[must_use]
    pub fn until(self, end: Timestamp) -> Record<A> {
        Record { change: self.0, until: Some(end) }
    }

    /// The record, which stands until it is cleared.
    #[must_use]
    pub fn forever(self) -> Record<A> {
        Record { change: self.0, until: None }
    }
}

impl<A: Algorithm> Record<A> {
    /// A copy of its numbers.
    pub(crate) fn copied_numbers(&self) -> Option<A> {
        if let Change::Numbers(numbers, copy) = &self.change { Some(copy(numbers)) } else { None }
    }

    /// Whether it raises what the limit admits.
    fn raises(&self, limit: &Limit<A>) -> bool {
        match &self.change {
            Change::Numbers(numbers, _) => !numbers.is_within(limit.algorithm()),
            Change::Blocked => false,
            Change::Exempt => true,
        }
    }

    /// Whether it admits in no span less than another.
    fn admits_as_much_as(&self, other: &Self) -> bool {
        match (&self.change, &other.change) {
            (Change::Exempt, _) | (_, Change::Blocked) => true,
            (Change::Numbers(numbers, _), Change::Numbers(other, _)) => other.is_within(numbers),
            _ => false,
        }
    }

    /// Whether a decision at its numbers alone tells the right wait: the wait of a denial counts
    /// with the end of the record, which only a batch knows how to do.
    #[doc(hidden)]
    #[inline]
    #[must_use]
    pub const fn tells_wait(&self, decision: &Decision) -> bool {
        decision.allowed || self.until.is_none()
    }

    /// Whether it would take away what another one has raised, or end that earlier.
    pub(crate) fn lowers(&self, other: &Self, limit: &Limit<A>) -> bool {
        let ends_earlier =
            self.until.is_some_and(|end| other.until.is_none_or(|other| end < other));
        other.raises(limit) && (ends_earlier || !self.admits_as_much_as(other))
    }
}

/// How a check stands: what its caller's record makes of it.
#[derive(Debug)]
pub enum Standing<A> {
    /// There is no record: the check's own limit decides.
    Policy,
    /// This limit decides: the check's, at the numbers of the record. If that ends: when, and what
    /// decides from then on.
    Numbers(Limit<A>, Option<(Timestamp, A)>),
    /// The record denies, until this time or for ever.
    Blocked(Option<Timestamp>),
    /// The record allows, and charges nothing.
    Exempt,
}

impl<A: Algorithm> Limit<A> {
    /// Refuses records if it looks for none.
    #[doc(hidden)]
    pub fn takes_records(&self) -> Result<(), Refusal> {
        const NOT_OVERRIDABLE: &str =
            "it looks for none; say overridable = true in a document, overridable() in code";
        if self.is_overridable() {
            return Ok(());
        }
        Err(Refusal::Record { limit: self.name().into(), why: NOT_OVERRIDABLE })
    }

    /// Refuses a record that has ended already.
    #[doc(hidden)]
    pub fn takes_record(&self, record: Option<&Record<A>>, now: Timestamp) -> Result<(), Refusal> {
        self.takes_records()?;
        if record.is_some_and(|record| !record.stands_at(now)) {
            return Err(self.refuses_ended());
        }
        Ok(())
    }

    /// The refusal of a record that has ended already.
    #[doc(hidden)]
    #[must_use]
    pub fn refuses_ended(&self) -> Refusal {
        const ENDED: &str = "it has ended already by the store's clock; give a later end in microseconds, or \
                             clear_record() for none";
        Refusal::Record { limit: self.name().into(), why: ENDED }
    }

    /// How a caller with this record stands at `now`. Numbers that the limit could not decide by,
    /// because it has changed since, count as none.
    #[must_use]
    pub fn standing(&self, record: Option<&Record<A>>, now: Timestamp) -> Standing<A> {
        let Some(Record { change, until }) = record.filter(|record| record.stands_at(now)) else {
            return Standing::Policy;
        };
        match change {
            Change::Numbers(numbers, copy) => {
                let ends = until.map(|end| (end, copy(self.algorithm())));
                let own = self.at_numbers(copy(numbers));
                own.map_or(Standing::Policy, |own| Standing::Numbers(own, ends))
            }
            Change::Blocked => Standing::Blocked(*until),
            Change::Exempt => Standing::Exempt,
        }
    }

    /// Whether a caller with this record [stands](Self::standing) by it at `now`: for a store that
    /// has compared the [kinds](Algorithm::state_kind) of states when the record was set.
    #[doc(hidden)]
    #[inline]
    #[must_use]
    pub fn stands_by(&self, record: &Record<A>, now: Timestamp) -> bool {
        let owes = |numbers| self.would_owe_attempts(numbers);
        record.stands_at(now) && !record.algorithm().is_some_and(owes)
    }
}
