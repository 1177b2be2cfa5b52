//! A job queue with a concurrency limit: each tenant has at most two jobs in flight, however many
//! workers there are. On Redis the same limit holds for the workers of all processes.
//!
//! `cargo run -p ratelimit-memory --example job_queue`

use std::collections::VecDeque;
use std::error::Error;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ratelimit_core::{AnyAlgorithm, Concurrency, Limits, RateLimiter, ReservationId};
use ratelimit_memory::MemoryStore;
use tokio::task::JoinSet;

/// A job of a tenant.
struct Job {
    tenant: &'static str,
}

/// How many jobs of a tenant are in flight, and the most that there were.
#[derive(Default)]
struct UnderWay {
    now: AtomicU32,
    most: AtomicU32,
}

impl UnderWay {
    async fn work(&self) {
        let now = self.now.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(now, Ordering::SeqCst);
        for _ in 0..3 {
            tokio::task::yield_now().await; // the work itself
        }
        self.now.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Takes jobs until the queue is empty. A job whose tenant is busy goes back to the end.
async fn worker(
    queue: Arc<Mutex<VecDeque<Job>>>,
    limiter: Arc<RateLimiter<MemoryStore<AnyAlgorithm>>>,
    under_way: Arc<UnderWay>,
) -> Result<u32, Box<dyn Error + Send + Sync>> {
    let next = || queue.lock().unwrap_or_else(PoisonError::into_inner).pop_front();
    let mut done = 0;
    while let Some(job) = next() {
        let id = ReservationId::random();
        if limiter.request(job.tenant).id(id).check().await?.allowed() {
            // If the worker dies, the lease ends by itself after half a minute.
            under_way.work().await;
            let _released = limiter.request(job.tenant).id(id).cost(0).settle().await?;
            done += 1;
        } else {
            queue.lock().unwrap_or_else(PoisonError::into_inner).push_back(job);
            tokio::task::yield_now().await;
        }
    }
    Ok(done)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error + Send + Sync>> {
    let two_at_once = Concurrency::new("2/30s".parse()?)?;
    let limits = Limits::<AnyAlgorithm>::builder().limit("jobs", two_at_once).build()?;
    let limiter = Arc::new(RateLimiter::new(limits, MemoryStore::new()));
    let queue: VecDeque<_> = (0..50).map(|_| Job { tenant: "acme" }).collect();
    let (queue, under_way) = (Arc::new(Mutex::new(queue)), Arc::<UnderWay>::default());

    let mut workers = JoinSet::new();
    for _ in 0..8 {
        workers.spawn(worker(queue.clone(), limiter.clone(), under_way.clone()));
    }
    let mut done = 0;
    for worker in workers.join_all().await {
        done += worker?;
    }
    let most = under_way.most.load(Ordering::SeqCst);
    println!("{done} jobs are done, at most {most} at once");
    assert!(done == 50 && most <= 2);
    Ok(())
}

#[test]
fn a_tenant_never_has_more_jobs_under_way_than_its_limit()
-> Result<(), Box<dyn Error + Send + Sync>> {
    main()
}
