//! [`OpenReservation`]: what a request has reserved, until the last of its holders is dropped.

use std::borrow::Cow;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use derive_where::derive_where;
use ratelimit_core::algorithm::Quota;
use ratelimit_core::{
    ErrorKind, Identifiers, LimitCosts, OwnedReservation, Store, StoreError as _, Verdict,
};
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep};
use tokio_util::task::AbortOnDropHandle;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::Meter;
use crate::BoxFuture;
use crate::caller::{Sources, Values};
use crate::config::HoldTime;
use crate::decisions::Decisions;
use crate::log::Log;

/// A caller that outlives its request, counted among the settlements until its reservation is
/// settled.
pub(super) struct Counted {
    pub(super) sources: Sources,
    pub(super) values: Values,
    pub(super) _token: TaskTrackerToken,
}

impl Identifiers for Counted {
    fn bare(&self) -> Option<Cow<'_, str>> {
        self.sources.value(&self.values, None)
    }

    fn identifier(&self, name: &str) -> Option<Cow<'_, str>> {
        self.sources.value(&self.values, Some(name))
    }
}

/// The error of any store.
pub(super) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Hears of what limits say to a settlement.
pub(super) type Settled = dyn Fn(&Decisions) + Send + Sync;

/// What became of a renewal.
pub(super) enum Renewed {
    Lives,
    /// The store could not do it. It may be back in time.
    Failed,
    /// There is nothing left to renew.
    Expired,
}

/// A reservation of any store, which is settled at its cost when it is dropped.
pub(super) trait Settle: Send + Sync {
    /// Sets the cost under all limits, if there is one, and then that under those which `each`
    /// names.
    fn set_costs(&mut self, all: Option<u64>, each: &LimitCosts);

    /// Whether it is charged under the limit of this name.
    fn knows(&self, limit: &str) -> bool;

    /// Grows it to this total, if that fits.
    fn extend(&mut self, total: LimitCosts) -> BoxFuture<'_, Result<Verdict, BoxError>>;

    /// Keeps it from expiring.
    fn renew(&self) -> BoxFuture<'_, Renewed>;
}

impl<S: Store<A> + 'static, A: Quota + 'static> Settle for OwnedReservation<S, A, Counted> {
    fn set_costs(&mut self, all: Option<u64>, each: &LimitCosts) {
        let mut costs = all.map_or_else(|| self.costs().clone(), LimitCosts::from);
        for (limit, cost) in each.parts().0 {
            costs.set(limit, cost);
        }
        self.set_cost(costs);
    }

    fn knows(&self, limit: &str) -> bool {
        self.limits().has(limit)
    }

    fn extend(&mut self, total: LimitCosts) -> BoxFuture<'_, Result<Verdict, BoxError>> {
        Box::pin(async { self.extend(total).await.map_err(BoxError::from) })
    }

    fn renew(&self) -> BoxFuture<'_, Renewed> {
        Box::pin(async {
            match self.renew().await {
                Ok(_) => Renewed::Lives,
                Err(error) if error.kind() == ErrorKind::Ended => Renewed::Expired,
                Err(_) => Renewed::Failed,
            }
        })
    }
}

/// What a request has reserved. It is settled when the last of its holders is dropped: at what the
/// handler says, or else at what the response costs, or else at the estimate.
#[derive_where(Debug)]
pub(super) struct OpenReservation {
    #[derive_where(skip)]
    pub(super) settles: Mutex<Box<dyn Settle>>,
    pub(super) by_handler: OnceLock<Meter>,
    pub(super) by_response: Meter,
    /// Hears of the settlement.
    #[derive_where(skip)]
    pub(super) told: Arc<OnceLock<Box<Settled>>>,
    pub(super) is_lease: bool,
    /// Since when it is held, and where to tell that.
    #[derive_where(skip)]
    pub(super) since: Option<(Instant, Arc<HoldTime>)>,
    /// Keeps it from expiring. It ends with this value; there is none outside of a runtime.
    pub(super) _renewals: Option<AbortOnDropHandle<()>>,
}

impl OpenReservation {
    /// Renews it at half of its life, until it is dropped. After a failure there are three more
    /// attempts before it ends.
    pub(super) async fn renewals(this: Weak<Self>, life: Duration, log: Arc<Log>) {
        let mut wait = life / 2;
        loop {
            sleep(wait.max(Duration::from_millis(1))).await;
            let Some(this) = this.upgrade() else { return };
            wait = match this.settles.lock().await.renew().await {
                Renewed::Lives => life / 2,
                Renewed::Failed => life / 8,
                Renewed::Expired => {
                    if let Some(requests) = log.expired.count_request("") {
                        tracing::warn!(
                            requests,
                            "a reservation has expired while its request was underway"
                        );
                    }
                    return;
                }
            };
        }
    }
}

impl Drop for OpenReservation {
    fn drop(&mut self) {
        if let Some((since, hold_time)) = &self.since {
            hold_time.add(since.elapsed());
        }
        let by_handler = self.by_handler.get();
        let all = by_handler.and_then(Meter::cost).or_else(|| self.by_response.cost());
        let each = by_handler.map(|meter| meter.each().clone()).unwrap_or_default();
        self.settles.get_mut().set_costs(all, &each);
    }
}
