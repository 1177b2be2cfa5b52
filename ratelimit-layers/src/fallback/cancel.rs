//! Takes an estimate back whose answer was lost: the request was decided without the store, which
//! may have charged it.

use ratelimit_core::algorithm::{InMemory, Share};
use ratelimit_core::store::{Batch, Check, Op, repeat_settlement};
use ratelimit_core::{Clock, Limit, Store};
use tokio::time::timeout;

use super::{Fallback, FallbackError, SharedFallback};

impl<S: Store<A> + 'static, A: InMemory + Share + Clone + PartialEq + 'static, C: Clock + 'static>
    Fallback<S, A, C>
{
    /// Starts a task that settles the estimates of this batch at 0 in the store. The breaker does
    /// not hear of it, so that the next request is the probe.
    pub(super) fn cancel(&self, batch: &Batch<'_, A>) {
        let Some(id) = batch.reservation_id() else { return };
        let own = |check: &Check<'_, A>| (check.limit.clone(), check.key.to_owned());
        let estimates: Vec<(Limit<A>, String)> = batch.checks().iter().map(own).collect();
        let (fallback, now) = (self.clone(), batch.time());
        tokio::spawn(async move {
            let checks = estimates.iter().map(|(limit, key)| Check { limit, key, cost: 0 });
            let checks: Vec<_> = checks.collect();
            let Ok(batch) = Batch::new(&checks) else { return };
            let batch = batch.op(Op::Settle).id(id).now(now).settled_once();
            let SharedFallback { store, deadline, .. } = &*fallback.inner;
            // Without an answer, the estimate stays charged: no caller waits for it.
            let _ = repeat_settlement(false, async || {
                match timeout(*deadline, store.apply(&batch)).await {
                    Ok(said) => said.map_err(FallbackError::Store),
                    Err(_) => Err(FallbackError::TimedOut { deadline: *deadline }),
                }
            })
            .await;
        });
    }
}
