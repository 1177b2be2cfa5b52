//! What the stores and layers of this workspace ask of a [`Batch`] that they decide in parts, or
//! without their store. Other crates do without, so it is no part of the documented interface.

use alloc::sync::Arc;
use alloc::vec::Vec;

use super::{Batch, Check};
use crate::algorithms::Algorithm;
use crate::op::Op;
use crate::reservation::ReservationGroup;

impl<'a, A: Algorithm> Batch<'a, A> {
    /// The same operation on other checks, all of them distinct: a part of these, or a merger of
    /// several. For stores that decide a batch in parts.
    #[doc(hidden)]
    #[must_use]
    pub const fn with_checks<'p>(&self, checks: &'p [Check<'p, A>]) -> Batch<'p, A>
    where
        'a: 'p,
    {
        Batch { checks, ..*self }
    }

    /// The same checks as a part of a larger batch that another part denies: only limits that
    /// charge attempts are charged. For stores that decide a batch in parts.
    #[doc(hidden)]
    #[must_use]
    pub const fn denied_elsewhere(mut self) -> Self {
        self.denied_elsewhere = true;
        self
    }

    /// The same checks of a request that the store has just failed to decide: a fallback decides
    /// them without asking it again. Other stores decide them as usual.
    #[doc(hidden)]
    #[must_use]
    pub const fn without_store(mut self) -> Self {
        self.without_store = true;
        self
    }

    /// The same checks as a part of a larger batch with an id, with its
    /// [group](Self::reservation_group). For stores that decide a batch in parts.
    #[doc(hidden)]
    #[must_use]
    pub const fn in_group(mut self, group: &'a Arc<ReservationGroup>) -> Self {
        self.group = Some(group);
        self
    }

    /// The group that a reservation of this batch keeps: `None` for a single check or without an
    /// id. `fingerprint` returns [`States::fingerprint`](crate::store::States::fingerprint).
    #[doc(hidden)]
    #[must_use]
    pub fn reservation_group(
        &self,
        fingerprint: impl FnOnce() -> u64,
    ) -> Option<Arc<ReservationGroup>> {
        if let Some(group) = self.group {
            return Some(group.clone());
        }
        if self.id.is_none() || self.checks.len() < 2 {
            return None;
        }
        let names: Vec<_> = self.checks.iter().map(|check| check.limit.name()).collect();
        let limits = names.join(",").into();
        Some(Arc::new(ReservationGroup { limits, fingerprint: fingerprint() }))
    }

    /// Whether another part of a larger batch [denies](Self::denied_elsewhere) it.
    #[doc(hidden)]
    #[must_use]
    pub const fn is_denied_elsewhere(&self) -> bool {
        self.denied_elsewhere
    }

    /// Whether it is a part of a larger batch: [denied elsewhere](Self::denied_elsewhere) or [in a
    /// group](Self::in_group).
    #[doc(hidden)]
    #[inline]
    #[must_use]
    pub const fn is_part(&self) -> bool {
        self.denied_elsewhere || self.group.is_some()
    }

    /// Whether it only acquires or peeks: without an id and metadata, and not as a part of a larger
    /// batch.
    #[doc(hidden)]
    #[inline]
    #[must_use]
    pub const fn is_plain(&self) -> bool {
        matches!(self.op, Op::Acquire | Op::Peek)
            && self.id.is_none()
            && self.metadata.is_empty()
            && !self.is_part()
    }

    /// Whether a fallback decides it [without the store](Self::without_store).
    #[doc(hidden)]
    #[must_use]
    pub const fn is_without_store(&self) -> bool {
        self.without_store
    }
}
