//! One client fills what a layer bounds. Its neighbours notice no more than the guide's table of bounds says, and get no refusal.

use std::convert::Infallible;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::body::Body;
use http::{Request, Response};
use ratelimit_core::store::{Batch, Op};
use ratelimit_core::{
    ErrorKind, ManualClock, Policy, RateLimiter, Refusal, Store, StoreError, Verdict,
};
use ratelimit_memory::MemoryError;
use ratelimit_tower::{CostEstimates, WaitLayer, Waiter};
use tower::{Layer, ServiceExt, service_fn};

use crate::harness::{Manual, by_ip, limiter, limits, request, store};
use crate::reloading::Log;

const HOUR: Duration = Duration::from_secs(3_600);

#[tokio::test(start_paused = true)]
async fn a_caller_whose_requests_all_wait_makes_no_other_wait() {
    let waiter = Waiter::new(limiter(&[("api", "gcra 1/m burst 1", "key")]));
    for _ in 0..10_000 {
        let waiter = waiter.clone();
        tokio::spawn(async move { waiter.until_allowed(&[("key", "mallory")], HOUR).await });
    }
    tokio::task::yield_now().await;
    waiter.until_allowed(&[("key", "alice")], Duration::ZERO).await.unwrap();
}

#[test]
fn a_client_that_invents_classes_moves_no_estimate_of_others() {
    let estimates = CostEstimates::new(0.9, 256).unwrap();
    estimates.learn("known", 1_000);
    let known = estimates.of("known");
    for nth in 0..3_000 {
        estimates.learn(&format!("invented {nth}"), u64::MAX);
    }
    assert_eq!((estimates.of("known"), estimates.of("new")), (known, 256));
}

/// A store that cannot adopt, as by MULTI.
struct NeverAdopts(Manual);

impl Store<Policy> for NeverAdopts {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        if batch.operation() == Op::Adopt {
            let limit = batch.checks()[0].limit.name().to_owned();
            return Err(Refusal::Unsupported { limit, op: Op::Adopt }.into());
        }
        self.0.apply(batch).await
    }
}

/// A store of which each error is another.
#[derive(Default)]
struct NeverDecides(AtomicU64);

#[derive(Debug, thiserror::Error)]
#[error("call {nth} failed")]
struct Failed {
    nth: u64,
    kind: ErrorKind,
}

impl From<Refusal> for Failed {
    fn from(refusal: Refusal) -> Self {
        Self { nth: 0, kind: StoreError::kind(&refusal) }
    }
}

impl StoreError for Failed {
    fn kind(&self) -> ErrorKind {
        self.kind
    }
}

impl Store<Policy> for NeverDecides {
    type Error = Failed;

    async fn apply(&self, _: &Batch<'_, Policy>) -> Result<Verdict, Failed> {
        let nth = self.0.fetch_add(1, Ordering::Relaxed);
        let kinds = [ErrorKind::Unavailable, ErrorKind::Unsupported];
        Err(Failed { nth, kind: kinds[usize::from(nth % 2 == 1)] })
    }
}

#[tokio::test]
async fn requests_that_are_not_decided_leave_the_log_to_others() {
    let (log, begin) = (Log::default(), Instant::now());
    let _guards = log.listens();
    let limits = limits(&[("requests", "gcra 1000/h", "ip")]);
    let layer = by_ip(RateLimiter::<_, Policy>::new(limits, NeverDecides::default()));
    let service = layer.layer(service_fn(|_: Request<Body>| async {
        Ok::<_, Infallible>(Response::new(Body::empty()))
    }));
    for _ in 0..1_000 {
        let _answer = service.clone().oneshot(request("/")).await.unwrap();
    }
    for line in ["cannot decide", "configured wrongly"] {
        let lines = log.count(line);
        assert!(lines >= 1 && lines as u64 <= 1 + begin.elapsed().as_secs(), "{line}: {lines}");
    }
}

/// A store that cannot adopt what the answers say is logged once per second, and each line says of how many answers.
#[tokio::test]
async fn answers_that_are_not_adopted_leave_the_log_to_others() {
    let (log, begin) = (Log::default(), Instant::now());
    let _guards = log.listens();
    let limits = limits(&[("requests", "gcra 1000/h", "key")]);
    let store = NeverAdopts(store(&ManualClock::default()));
    let waiter = Waiter::<_, Policy>::new(RateLimiter::new(limits, store));
    let layer = WaitLayer::new(waiter, |(): &()| [("key", "mallory")], HOUR).adopt_answers();
    let answer = service_fn(|(): ()| async {
        Ok::<_, Infallible>(
            Response::builder().header("x-ratelimit-remaining-requests", "3").body(()).unwrap(),
        )
    });
    let client = layer.layer(answer);
    for _ in 0..1_000 {
        client.clone().oneshot(()).await.unwrap();
    }
    let lines = log.count("is not adopted");
    assert!(lines >= 1 && lines as u64 <= 1 + begin.elapsed().as_secs(), "{lines}");
}
