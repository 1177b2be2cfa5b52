use std::error::Error;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::{AnyAlgorithm, RateLimiter, Reserved, Store};
use tokio::time::timeout;

/// Runs a job, or says after which time to try it again.
async fn run<S: Store<AnyAlgorithm> + 'static>(
    limiter: &Arc<RateLimiter<S>>,
    tenant: String,
    job: impl Future<Output = ()>,
) -> Result<Option<Duration>, Box<dyn Error + Send + Sync>> {
    let lease = match limiter.reserve(tenant, 1).await? {
        Reserved::Granted(lease) => lease,
        Reserved::Denied(_) => return Ok(Some(Duration::from_secs(1))), // jobs end unforeseen
    };
    let mut job = pin!(job);
    while timeout(Duration::from_secs(10), &mut job).await.is_err() {
        let _ = lease.renew().await?; // an error ends the job: its place may be taken
    }
    Ok(None) // dropping the lease gives the place back
}

mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use ratelimit_core::TokioClock;
    use ratelimit_memory::MemoryStore;
    use tokio::task::JoinSet;
    use tokio::time::{Instant, sleep};

    use super::*;
    use crate::cookbook::policy;

    #[tokio::test(start_paused = true)]
    async fn a_tenant_has_two_jobs_at_once_and_six_per_minute()
    -> Result<(), Box<dyn Error + Send + Sync>> {
        let store = MemoryStore::builder().clock(TokioClock::default()).build();
        let limits = policy("cookbook/outgoing.md", "Job queue");
        let limiter = Arc::new(RateLimiter::new(limits, store));
        let (running, most) = (Arc::<AtomicU32>::default(), Arc::<AtomicU32>::default());
        let begin = Instant::now();
        let mut jobs = JoinSet::new();
        // Longer than a lease, and then short ones.
        for seconds in [90, 90, 1, 1, 1, 1, 1, 1, 1] {
            let (limiter, running, most) = (limiter.clone(), running.clone(), most.clone());
            jobs.spawn(async move {
                let work = async || {
                    let now = running.fetch_add(1, Ordering::SeqCst) + 1;
                    most.fetch_max(now, Ordering::SeqCst);
                    sleep(Duration::from_secs(seconds)).await;
                    running.fetch_sub(1, Ordering::SeqCst);
                };
                while let Some(wait) = run(&limiter, "acme".to_owned(), work()).await? {
                    sleep(wait).await;
                }
                Ok::<_, Box<dyn Error + Send + Sync>>(begin.elapsed().as_secs())
            });
        }
        let mut ended = Vec::new();
        for end_s in jobs.join_all().await {
            ended.push(end_s?);
        }
        ended.sort_unstable();
        assert_eq!(most.load(Ordering::SeqCst), 2);
        // The first two keep their places for longer than a lease. Six begin after them, and the
        // seventh when a start has come back.
        assert!(ended.len() == 9 && ended[0] == 90 && ended[8] >= 101, "{ended:?}");
        Ok(())
    }
}
