//! [`KnownIds`] remembers two sets of reservation ids: those decided locally, which stay local when
//! the store is back, and those whose outcome at the store is unknown, which only the store can
//! settle.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, RandomState};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ratelimit_core::store::{Batch, Op, Reservation};
use ratelimit_core::{Algorithm, ReservationId, Timestamp};
use tokio::time::Instant;

use crate::lock;

/// An id, and a hash of the limits and keys for which it was used: an id is unique per key only.
type KnownId = (ReservationId, u64);

#[derive(Debug)]
pub(super) struct KnownIds {
    pub(super) most: usize,
    hasher: RandomState,
    ids: Mutex<HashMap<KnownId, Known>>,
    /// How many there are, so that no lock is needed while there are none.
    len: AtomicUsize,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    ends: Instant,
    by: KnownBy,
}

/// Who did what came under an id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KnownBy {
    Local,
    /// The store, perhaps: it did not say.
    Store,
}

/// Whether an id could be noted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Noted {
    New,
    Known,
    Full,
}

impl KnownIds {
    pub(super) fn new(most: usize) -> Self {
        Self { most, hasher: RandomState::new(), ids: Mutex::default(), len: AtomicUsize::new(0) }
    }

    fn entry<A: Algorithm>(&self, batch: &Batch<'_, A>) -> Option<KnownId> {
        let id = batch.reservation_id()?;
        let checks = batch.checks().iter().map(|check| (check.limit.state_name(), check.key));
        Some((id, self.hasher.hash_one(checks.collect::<Vec<_>>())))
    }

    /// Who did something under the id of this batch, in an outage.
    pub(super) fn known_by<A: Algorithm>(&self, batch: &Batch<'_, A>) -> Option<KnownBy> {
        if self.len.load(Ordering::Acquire) == 0 {
            return None;
        }
        let entry = self.entry(batch)?;
        let known = lock(&self.ids).get(&entry).copied();
        known.filter(|known| Instant::now() < known.ends).map(|known| known.by)
    }

    /// Notes the id of this batch, for at least as long as a store remembers it from now.
    pub(super) fn note<A: Algorithm>(&self, batch: &Batch<'_, A>, by: KnownBy) -> Noted {
        let Some(entry) = self.entry(batch) else { return Noted::Known };
        let lives = batch.checks().iter().filter_map(|check| check.limit.reservation_us());
        let life_us = if batch.is_settled_once() && batch.operation() == Op::Settle {
            Reservation::REPEAT_US
        } else {
            lives.fold(Reservation::LIFE_US, u64::max)
        };
        let now = Instant::now();
        let ends = now + Duration::from_micros(life_us.min(Timestamp::MAX.as_us()));
        let mut ids = lock(&self.ids);
        let is_known = ids.remove(&entry).is_some_and(|known| now < known.ends && known.by == by);
        if ids.len() >= self.most {
            ids.retain(|_, known| now < known.ends);
        }
        if ids.len() >= self.most {
            return Noted::Full;
        }
        ids.insert(entry, Known { ends, by });
        self.len.store(ids.len(), Ordering::Release);
        if is_known { Noted::Known } else { Noted::New }
    }

    /// Forgets the id of this batch, under which nothing was charged.
    pub(super) fn forget<A: Algorithm>(&self, batch: &Batch<'_, A>) {
        let Some(entry) = self.entry(batch) else { return };
        let mut ids = lock(&self.ids);
        ids.remove(&entry);
        self.len.store(ids.len(), Ordering::Release);
    }
}
