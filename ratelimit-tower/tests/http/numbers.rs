//! Customers with numbers of their own: requests are decided by them, and the fields tell them.

use std::sync::Arc;

use ratelimit_core::{AnyAlgorithm, Limits, ManualClock, Numbers, RateLimiter, Record};
use ratelimit_tower::{Charge, RateLimitLayer, header};

use crate::harness::{API_KEY, Answer, Manual, hello, limits, send, statuses, store, with_key};

/// Ten a second, and up to a hundred times as much.
fn layer() -> RateLimitLayer<Manual> {
    let limits = Limits::builder()
        .limit("api", "gcra 10/s burst 20")
        .by(["key"])
        .accepts_up_to("gcra 1000/s burst 2000")
        .limit("daily", "fixed-window 5000/d")
        .by(["key"]);
    let limiter = RateLimiter::new(limits.build().unwrap(), store(&ManualClock::default()));
    let numbers = |words: &str| {
        let numbers = limiter.limits().parse_numbers([("api", words)]).unwrap();
        Arc::new(numbers)
    };
    let (gold, slow) = (numbers("100/s burst 600"), numbers("1/m burst 2"));
    RateLimitLayer::new(limiter).by("key", header(API_KEY)).numbers_of(move |request| match request
        .headers
        .get(API_KEY)?
        .to_str()
        .ok()?
    {
        "gold" => Some(gold.clone()),
        "slow" => Some(slow.clone()),
        _ => None,
    })
}

fn told(answer: &Answer) -> [String; 2] {
    ["ratelimit", "ratelimit-policy"].map(|field| answer.field(field))
}

#[tokio::test]
async fn each_customer_is_limited_by_its_numbers_and_told_them_in_every_mode() {
    let all = [
        hello().layer(layer()),
        hello().layer(layer().immediate()),
        hello().layer(layer().reserve(Charge::estimate())),
        hello().layer(layer().cost_of(|_| ratelimit_core::LimitCosts::from(1).with("daily", 1))),
    ];
    for app in &all {
        let gold = send(app, with_key("gold")).await;
        assert_eq!(
            told(&gold),
            [
                r#""api";r=599;t=1, "daily";r=4999;t=86400"#,
                r#""api";q=600;w=6, "daily";q=5000;w=86400"#
            ]
        );
        let other = send(app, with_key("other")).await;
        assert_eq!(
            told(&other),
            [
                r#""api";r=19;t=1, "daily";r=4999;t=86400"#,
                r#""api";q=20;w=2, "daily";q=5000;w=86400"#
            ]
        );
        let slow = || with_key("slow");
        assert_eq!(statuses(app, [slow(), slow(), slow()]).await, [200, 200, 429]);
        let denied = send(app, slow()).await;
        assert_eq!(denied.field("retry-after"), "60");
        assert_eq!(denied.violated_limits(), ["api"]);
        assert!(denied.field("ratelimit-policy").contains(r#""api";q=2;w=120"#));
    }
}

#[tokio::test]
async fn numbers_that_no_limit_accepts_are_the_fault_of_the_service() {
    let other = Limits::builder().limit("burst", "gcra 6/m burst 2").by(["key"]);
    let other = other.accepts_up_to("gcra 60/m burst 60").build().unwrap();
    let numbers: Arc<Numbers> = Arc::new(other.parse_numbers([("burst", "60/m")]).unwrap());
    let limits = limits(&[("burst", "gcra 6/m burst 2", "key")]);
    let limiter = RateLimiter::new(limits, store(&ManualClock::default()));
    let layer = RateLimitLayer::new(limiter).by("key", header(API_KEY));
    let layer = layer.numbers_of(move |_| Some(numbers.clone()));
    let refused = send(&hello().layer(layer), with_key("alice")).await;
    assert_eq!(refused.status, 500);
    assert!(!format!("{:?}", refused.body).contains("max"), "clients do not see why");
}

#[tokio::test]
async fn under_a_record_the_fields_tell_its_quota_and_the_window_of_the_limit() {
    let limits = Limits::builder()
        .limit("api", "gcra 10/s burst 20")
        .by(["key"])
        .overridable()
        .limit("daily", "fixed-window 5000/d")
        .by(["key"])
        .overridable();
    let limiter = RateLimiter::new(limits.build().unwrap(), store(&ManualClock::default()));
    let limiter = Arc::new(limiter);
    for (limit, numbers) in [("api", "gcra 20/s burst 80"), ("daily", "fixed-window 9000/d")] {
        let numbers: AnyAlgorithm = numbers.parse().unwrap();
        let caller = [("key", "alice")];
        limiter.set_record(&caller, limit, Record::numbers(numbers).forever()).await.unwrap();
    }
    let app = hello().layer(RateLimitLayer::new(limiter).by("key", header(API_KEY)));
    // Its own bucket would take 4 s to fill.
    assert_eq!(
        told(&send(&app, with_key("alice")).await),
        [r#""api";r=79;t=1, "daily";r=8999;t=86400"#, r#""api";q=80;w=2, "daily";q=9000;w=86400"#]
    );
}
