//! What one client makes a layer log leaves the log to its neighbours.

use std::convert::Infallible;
use std::time::{Duration, Instant};

use http::{HeaderName, Response};
use ratelimit_core::store::Op;
use ratelimit_core::{ErrorKind, ManualClock, RateLimiter};
use ratelimit_tower::{ClientAddress, ProxyHeader, RateLimitLayer, WaitLayer, Waiter};
use tower::{Layer, ServiceExt, service_fn};

use crate::harness::{BURST, Faulty, by_ip, hello, limiter, limits, request, send};
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

#[tokio::test]
async fn a_trusted_proxy_that_reports_nothing_readable_is_named_once_per_minute() {
    let log = Log::default();
    let _guards = log.listens();
    let behind = |header| ClientAddress::behind(["192.0.2.0/24", "10.0.0.0/8"], header).unwrap();
    let single = ProxyHeader::Single(HeaderName::from_static("x-real-ip"));
    for (header, line, proxy) in [
        (ProxyHeader::XForwardedFor, None, "192.0.2.7"),
        (ProxyHeader::XForwardedFor, Some(("x-forwarded-for", "")), "192.0.2.7"),
        (ProxyHeader::XForwardedFor, Some(("x-forwarded-for", "unknown, 10.1.1.1")), "10.1.1.1"),
        (ProxyHeader::Forwarded, Some(("forwarded", "for=_hidden")), "192.0.2.7"),
        (single, Some(("x-forwarded-for", "203.0.113.1")), "192.0.2.7"),
    ] {
        let layer = RateLimitLayer::new(limiter(BURST)).by("ip", behind(header));
        let app = hello().layer(layer);
        let before = log.count("reports no client address");
        for _ in 0..3 {
            let mut request = request("/");
            if let Some((name, value)) = line {
                request.headers_mut().insert(name, value.parse().unwrap());
            }
            send(&app, request).await;
        }
        assert_eq!(log.count("reports no client address"), before + 1, "{line:?}");
        assert!(log.count(proxy) > 0, "{line:?}");
    }
    let before = log.count("reports no client address");
    let layer = RateLimitLayer::new(limiter(BURST)).by("ip", behind(ProxyHeader::XForwardedFor));
    let mut request = request("/");
    // Clients of one's own network are proxies to others.
    request.headers_mut().insert("x-forwarded-for", "10.1.1.1, 10.1.1.2".parse().unwrap());
    send(&hello().layer(layer), request).await;
    assert_eq!(log.count("reports no client address"), before);
}
