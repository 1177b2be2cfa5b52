//! [`Reservation`]: what a request has reserved, until the last of its holders is dropped.

use std::borrow::Borrow;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use ratelimit_core::{ErrorKind, OwnedReservation, Quota, Store, StoreError as _};
use tokio::time::{Instant, sleep};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Meter;
use crate::BoxFuture;
use crate::caller::{Caller, Sources};
use crate::config::HoldTime;

/// The sources of a caller, counted among the [`Settlements`](super::Settlements): a reservation owns its caller until it is settled.
#[derive(Clone)]
pub(super) struct Counted {
    sources: Sources,
    _counted: TaskTrackerToken,
}

impl Counted {
    pub(super) const fn new(sources: Sources, counted: TaskTrackerToken) -> Self {
        Self { sources, _counted: counted }
    }
}

impl Borrow<Sources> for Counted {
    fn borrow(&self) -> &Sources {
        &self.sources
    }
}

pub(super) type Owned<S, A> = OwnedReservation<S, A, Caller<Counted>>;

/// A reservation without the types of its limiter. It is settled when the last of its holders is dropped.
pub(crate) trait Open: Send + Sync {
    /// These bytes of the body were handed to the connection.
    fn sent(&self, bytes: usize);

    /// Keeps it from expiring for as long as it is held.
    fn renewals(self: Arc<Self>) -> BoxFuture<()>;
}

/// How long a reservation lives without a renewal, and whether it is a lease.
#[derive(Clone, Copy)]
pub(super) struct Life {
    pub(super) length: Duration,
    pub(super) is_lease: bool,
}

pub(super) struct Reservation<S, A>
where
    S: Store<A> + 'static,
    A: Quota + 'static,
{
    /// It settles itself when it is dropped.
    owned: Owned<S, A>,
    cost: AtomicU64,
    counts_bytes: AtomicBool,
    meter: Option<Meter>,
    life: Life,
    since: Option<(Instant, Arc<HoldTime>)>,
}

impl<S: Store<A> + 'static, A: Quota + 'static> Reservation<S, A> {
    pub(super) fn new(
        owned: Owned<S, A>,
        meter: Option<Meter>,
        life: Life,
        hold_time: Option<Arc<HoldTime>>,
    ) -> Self {
        let since = hold_time.map(|hold_time| (Instant::now(), hold_time));
        let (cost, counts_bytes) = (owned.cost().into(), false.into());
        Self { owned, cost, counts_bytes, meter, life, since }
    }

    /// The cost when the request arrived.
    pub(super) const fn estimate(&self) -> u64 {
        self.owned.cost()
    }

    pub(super) const fn is_lease(&self) -> bool {
        self.life.is_lease
    }

    /// Sets the cost, and whether the bytes of the body add to it.
    pub(super) fn set_cost(&self, (cost, counts_bytes): (u64, bool)) {
        self.cost.store(cost, Ordering::Relaxed);
        self.counts_bytes.store(counts_bytes, Ordering::Relaxed);
    }
}

impl<S: Store<A> + 'static, A: Quota + 'static> Open for Reservation<S, A> {
    fn sent(&self, bytes: usize) {
        if self.counts_bytes.load(Ordering::Relaxed) {
            let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
            let added = |cost: u64| Some(cost.saturating_add(bytes));
            // The function always has an answer.
            let _before = self.cost.fetch_update(Ordering::Relaxed, Ordering::Relaxed, added);
        }
    }

    fn renewals(self: Arc<Self>) -> BoxFuture<()> {
        let every = (self.life.length / 3).max(Duration::from_millis(1));
        let open: Weak<Self> = Arc::downgrade(&self);
        Box::pin(async move {
            loop {
                sleep(every).await;
                let Some(open) = open.upgrade() else { return };
                match open.owned.renew().await {
                    Err(error) if error.kind() == ErrorKind::Invalid => {
                        tracing::warn!(%error, "a reservation that is held has expired");
                        return;
                    }
                    // A store that is away may be back in time.
                    _ => {}
                }
            }
        })
    }
}

impl<S: Store<A> + 'static, A: Quota + 'static> Drop for Reservation<S, A> {
    fn drop(&mut self) {
        if let Some((since, hold_time)) = &self.since {
            hold_time.add(since.elapsed());
        }
        let metered = self.meter.as_ref().and_then(Meter::cost);
        self.owned.set_cost(metered.unwrap_or_else(|| *self.cost.get_mut()));
    }
}
