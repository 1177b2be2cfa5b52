//! Takes an estimate back whose answer was lost: the request was decided without the store, which may have charged it.

use std::time::Duration;

use ratelimit_core::store::{Batch, Check, Op, Reservation};
use ratelimit_core::{Clock, ErrorKind, Limit, Store, StoreError as _};
use tokio::time::{Instant, sleep, timeout};

use super::Fallback;
use crate::LocalAlgorithm;

/// For how long the store is asked, as for any settlement for no caller.
const PATIENCE: Duration = Duration::from_micros(Reservation::REPEAT_US);
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LAST_PAUSE: Duration = Duration::from_secs(1);
/// How often the store may not know the estimate, which may arrive later.
const MOST_UNKNOWN: u32 = 3;

impl<S: Store<A> + 'static, A: LocalAlgorithm, C: Clock + 'static> Fallback<S, A, C> {
    /// Starts a task that settles the estimates of this batch at 0 in the store. The breaker does not hear of it, so that the
    /// next request is the probe.
    pub(super) fn cancel(&self, batch: &Batch<'_, A>) {
        let Some(id) = batch.reservation_id() else { return };
        let own = |check: &Check<'_, A>| (check.limit.clone(), check.key.to_owned());
        let (estimates, now): (Vec<(Limit<A>, String)>, _) =
            (batch.checks().iter().map(own).collect(), batch.time());
        let fallback = self.clone();
        tokio::spawn(async move {
            let check = |(limit, key)| Check { limit, key, cost: 0 };
            let checks: Vec<_> =
                estimates.iter().map(|(limit, key)| check((limit, &**key))).collect();
            let Ok(batch) = Batch::new(&checks) else { return };
            let batch = batch.op(Op::Settle).id(id).now(now).settled_once();
            let (begin, mut pause, mut unknown) = (Instant::now(), FIRST_PAUSE, 0);
            let super::SharedFallback { store, deadline, .. } = &*fallback.inner;
            while begin.elapsed() < PATIENCE {
                sleep(pause).await;
                pause = (pause * 2).min(LAST_PAUSE);
                match timeout(*deadline, store.apply(&batch)).await {
                    Ok(Err(error)) if error.kind() == ErrorKind::Ended => unknown += 1,
                    Err(_) => {}
                    Ok(Err(error)) if error.kind().is_outage() => {}
                    Ok(_) => return,
                }
                if unknown > MOST_UNKNOWN {
                    return;
                }
            }
        });
    }
}
