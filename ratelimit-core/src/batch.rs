//! [`Batch`]: several checks that are decided together, all or nothing.
//!
//! A batch carries its operation and its time, so a store implements one method and a layer that
//! wraps a store forwards one.

mod compact;
mod decide;
mod parts;
mod standing;

use alloc::format;
use alloc::sync::Arc;

use derive_where::derive_where;

use crate::algorithms::Algorithm;
use crate::decision::{Decision, Verdict};
use crate::error::ConfigError;
use crate::limit::Limit;
use crate::op::{Now, Op};
use crate::record::Standing;
use crate::refusal::Refusal;
use crate::reservation::{ReservationGroup, ReservationId};

pub use compact::{CompactStates, decide_compact};
pub use decide::{States, decide};

/// One limit and the key that it checks.
#[derive(Debug)]
#[derive_where(Clone, Copy)]
pub struct Check<'a, A> {
    /// The limit.
    pub limit: &'a Limit<A>,
    /// The key: the caller's identifier.
    pub key: &'a str,
    /// The cost of the request under this limit.
    pub cost: u64,
}

/// Several checks that are decided together: all are charged, or none.
///
/// ```
/// use ratelimit_core::{Gcra, Limit};
/// use ratelimit_core::store::{Batch, Check};
/// let limit = Limit::new("burst", Gcra::new("10/s".parse()?, 20)?)?;
/// let check = Check { limit: &limit, key: "alice", cost: 1 };
/// assert_eq!(Batch::one(&check).checks().len(), 1);
/// assert!(Batch::new(&[check, check]).is_err()); // a key named twice
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Debug)]
#[derive_where(Clone, Copy)]
pub struct Batch<'a, A> {
    checks: &'a [Check<'a, A>],
    op: Op,
    now: Now,
    id: Option<ReservationId>,
    settled_once: bool,
    metadata: &'a [u8],
    denied_elsewhere: bool,
    without_store: bool,
    group: Option<&'a Arc<ReservationGroup>>,
    /// How each check stands; empty if the policy decides all.
    standings: &'a [Standing<A>],
}

impl<'a, A: Algorithm> Batch<'a, A> {
    /// A batch that acquires these checks at the store's time.
    ///
    /// # Errors
    /// The same limit and key twice: the second check would not see what the first charged.
    pub fn new(checks: &'a [Check<'a, A>]) -> Result<Self, ConfigError> {
        let named = |check: &Check<'a, A>| (check.key, check.limit.name());
        for (position, check) in checks.iter().enumerate() {
            if checks[..position].iter().any(|other| named(other) == named(check)) {
                return Err(ConfigError::new(format!(
                    "a batch names the key {:?} twice; name it once, with the cost of both",
                    check.key
                ))
                .in_limit(check.limit.name()));
            }
        }
        Ok(Self::distinct(checks))
    }

    /// A batch that acquires a single check at the store's time.
    #[must_use]
    pub const fn one(check: &'a Check<'a, A>) -> Self {
        Self::distinct(core::slice::from_ref(check))
    }

    /// A batch of checks whose limits are known to have different names.
    pub(crate) const fn distinct(checks: &'a [Check<'a, A>]) -> Self {
        Self {
            checks,
            op: Op::Acquire,
            now: Now::Store,
            id: None,
            settled_once: false,
            metadata: &[],
            denied_elsewhere: false,
            without_store: false,
            group: None,
            standings: &[],
        }
    }

    /// The same checks for another operation.
    #[must_use]
    pub const fn op(mut self, op: Op) -> Self {
        self.op = op;
        self
    }

    /// The same checks at another time.
    #[must_use]
    pub const fn now(mut self, now: Now) -> Self {
        self.now = now;
        self
    }

    /// The same checks under an id. The store applies them once, however often they are sent, and
    /// an acquired charge can be settled and renewed under the id.
    #[must_use]
    pub const fn id(mut self, id: ReservationId) -> Self {
        self.id = Some(id);
        self
    }

    /// The same checks under an id that was drawn for this one charge: no client chose it, its
    /// acquire is charged once, and its settlement at most a few times, within seconds. Every batch
    /// under the id must declare it.
    ///
    /// A store then forgets the settled reservation after
    /// [`REPEAT_US`](crate::store::Reservation::REPEAT_US). A store that has no room for another
    /// reservation charges the batch [without a record](crate::Verdict::is_unrecorded), where it
    /// refuses an id of a caller.
    #[must_use]
    pub const fn settled_once(mut self) -> Self {
        self.settled_once = true;
        self
    }

    /// The same checks with metadata of the caller, for algorithms that keep it.
    #[must_use]
    pub const fn metadata(mut self, metadata: &'a [u8]) -> Self {
        self.metadata = metadata;
        self
    }

    /// The checks.
    #[must_use]
    pub const fn checks(&self) -> &'a [Check<'a, A>] {
        self.checks
    }

    /// The operation.
    #[must_use]
    pub const fn operation(&self) -> Op {
        self.op
    }

    /// The time, or the clock, that decides.
    #[must_use]
    pub const fn time(&self) -> Now {
        self.now
    }

    /// The id of the batch.
    #[must_use]
    pub const fn reservation_id(&self) -> Option<ReservationId> {
        self.id
    }

    /// Whether its id is [settled once](Self::settled_once).
    #[must_use]
    pub const fn is_settled_once(&self) -> bool {
        self.settled_once
    }

    /// The caller's metadata.
    #[must_use]
    pub const fn metadata_given(&self) -> &[u8] {
        self.metadata
    }

    /// The checks that the request brought over the threshold at which their limits
    /// [warn](Limit::warn_at_percent), by this verdict on the batch, each with its decision. None
    /// of a peek.
    pub fn warned<'v>(
        &self,
        verdict: &'v Verdict,
    ) -> impl Iterator<Item = (&'a Check<'a, A>, &'v Decision)> + use<'a, 'v, A> {
        let checks = if self.op == Op::Peek { &[] } else { self.checks };
        let decided = checks.iter().zip(verdict.decisions()).enumerate();
        let warned = decided.filter(|(position, (check, decision))| {
            let account = || verdict.account(*position);
            check.limit.is_crossed(decision, account, verdict.allowed())
        });
        warned.map(|(_, decided)| decided)
    }

    /// Refuses requests that no state could satisfy. [`decide`] calls it; a store that decides
    /// elsewhere calls it first.
    ///
    /// # Errors
    /// What is wrong with the request.
    #[inline]
    pub fn validate(&self) -> Result<(), Refusal> {
        if self.op.needs_id() && self.id.is_none() {
            return Err(Refusal::NoId { op: self.op });
        }
        if self.id.is_none() && self.metadata.is_empty() {
            return Ok(());
        }
        self.validate_more()
    }

    /// The part of [`validate`](Self::validate) for batches with an id or metadata.
    fn validate_more(&self) -> Result<(), Refusal> {
        let reservations = self.op == Op::Acquire || self.op.needs_id();
        for check in self.checks {
            let (algorithm, limit) = (check.limit.algorithm(), || check.limit.name().into());
            let bytes = self.metadata.len();
            if let Some(most) = algorithm.metadata_bytes()
                && most < bytes
            {
                return Err(Refusal::Metadata { limit: limit(), bytes, most });
            }
            if self.id.is_some() && reservations {
                if check.limit.reservation_us().is_none() {
                    return Err(Refusal::CannotReserve { limit: limit() });
                }
                if self.op == Op::Acquire && check.cost == 0 {
                    return Err(Refusal::ReservesNothing { limit: limit() });
                }
            }
        }
        Ok(())
    }
}
