//! What one client makes a layer log leaves the log to its neighbours.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use http::Response;
use ratelimit_core::store::Op;
use ratelimit_core::{ErrorKind, ManualClock, RateLimiter};
use ratelimit_tower::{WaitLayer, Waiter};
use tower::{Layer, ServiceExt, service_fn};

use crate::harness::{Faulty, by_ip, hello, limits, request, send};
use crate::reloading::Log;

#[tokio::test]
async fn what_is_not_decided_or_adopted_is_logged_once_per_second() {
    let (log, begin) = (Log::default(), Instant::now());
    let _guards = log.listens();
    let never = Faulty::new(&ManualClock::default(), |nth, _| {
        Some(if nth.is_multiple_of(2) { ErrorKind::Unavailable } else { ErrorKind::Unsupported })
    });
    let limiter = RateLimiter::new(limits(&[("requests", "gcra 1000/h", "ip")]), never);
    let app = hello().layer(by_ip(limiter));
    for _ in 0..1_000 {
        send(&app, request("/")).await;
    }

    // As by MULTI.
    let never_adopts = Faulty::new(&ManualClock::default(), |_, op| {
        (op == Op::Adopt).then_some(ErrorKind::Unsupported)
    });
    let limits = limits(&[("requests", "gcra 1000/h", "key")]);
    let waiter = Waiter::new(RateLimiter::new(limits, never_adopts));
    let layer = WaitLayer::new(waiter, |(): &()| [("key", "mallory")], Duration::ZERO);
    let client = layer.adopt_answers().layer(service_fn(|(): ()| async {
        let response = Response::builder().header("x-ratelimit-remaining-requests", "3");
        Ok::<_, Infallible>(response.body(()).unwrap())
    }));
    for _ in 0..1_000 {
        client.clone().oneshot(()).await.unwrap();
    }
    for line in ["cannot decide", "configured wrongly", "is not adopted"] {
        let lines = log.count(line) as u64;
        assert!(lines >= 1 && lines <= 1 + begin.elapsed().as_secs(), "{line}: {lines}");
    }
}
