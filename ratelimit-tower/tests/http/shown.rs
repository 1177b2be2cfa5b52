//! What clients see of a limit by choice: another name, nothing, abnormal usage, and waits that differ.

use std::collections::BTreeSet;
use std::time::Duration;

use ratelimit_core::{ErrorKind, ManualClock, RateLimiter};
use ratelimit_tower::{Fields, Grpc, ModelFields, XRateLimit};
use tonic::{Code, Status};

use crate::harness::{Faulty, Rows, by_ip, hello, layer, limiter, limits, request, send};

const ROWS: Rows = &[("money", "gcra 6/m burst 1", "ip"), ("tokens-v2", "gcra 60/m burst 4", "ip")];

fn fields() -> Fields {
    Fields::new().hide("money").rename("tokens-v2", "tokens").unwrap()
}

#[tokio::test]
async fn a_hidden_limit_is_in_no_field_and_no_problem_and_denies_as_before() {
    let fields = fields().x_ratelimit(XRateLimit::Seconds).model_fields(ModelFields::Anthropic);
    let app = hello().layer(layer(ROWS).fields(fields.clone()));
    let first = send(&app, request("/")).await;
    assert_eq!(first.field("ratelimit"), r#""tokens";r=3;t=1"#);
    assert_eq!(first.field("ratelimit-policy"), r#""tokens";q=4;w=4"#);
    assert_eq!(first.field("x-ratelimit-remaining"), "3"); // and not 0 of the hidden one
    assert_eq!(first.field("anthropic-ratelimit-tokens-limit"), "4");
    let denied = send(&app, request("/")).await;
    assert_eq!((denied.status, &*denied.field("retry-after")), (429, "10"));
    assert_eq!(denied.problem().get("violated-policies"), None);
    let all = format!("{:?} {:?}", denied.headers, denied.body);
    assert!(!all.contains("money") && !all.contains("v2"), "{all}");

    let both = hello().layer(layer(ROWS).cost(5).fields(fields.clone()));
    assert_eq!(send(&both, request("/")).await.violated(), ["tokens"]);
    let hidden = hello().layer(layer(&ROWS[..1]).fields(fields.clone()));
    let first = send(&hidden, request("/")).await;
    assert_eq!((first.status, &*first.field("ratelimit")), (200, ""));

    let away = Faulty::new(&ManualClock::default(), |_, _| Some(ErrorKind::Unavailable));
    let app = hello().layer(by_ip(RateLimiter::new(limits(ROWS), away)).fields(fields));
    assert_eq!(send(&app, request("/")).await.violated(), ["tokens"]);
    assert!(Fields::new().rename("money", "two words").is_err());
}

#[tokio::test]
async fn a_denial_that_means_abnormal_usage_has_the_problem_type_of_the_draft() {
    const KIND: &str = "https://iana.org/assignments/http-problem-types#";
    let rows: Rows = &[("logins", "gcra 6/m burst 1", "ip"), ("burst", "gcra 6/m burst 2", "ip")];
    for (limit, kind) in [("logins", "abnormal-usage-detected"), ("burst", "quota-exceeded")] {
        let layer = layer(rows).fields(Fields::new().abnormal_usage(limit));
        let app = hello().layer(layer.clone());
        send(&app, request("/")).await;
        let denied = send(&app, request("/")).await;
        assert_eq!((denied.status, denied.violated()), (429, vec!["logins".to_owned()]));
        assert_eq!(denied.problem()["type"], format!("{KIND}{kind}"));
        assert_eq!(denied.field("ratelimit"), r#""logins";r=0;t=10, "burst";r=1;t=10"#);
        let denied = send(&hello().layer(layer.answer(Grpc)), request("/")).await;
        let code = Status::from_header_map(&denied.headers).map(|status| status.code());
        assert_eq!(code, Some(Code::ResourceExhausted));
    }
}

#[tokio::test]
async fn clients_of_a_window_that_ends_return_at_different_times_and_never_too_early() {
    let fields = || Fields::new().jitter(Duration::from_secs(60));
    let waits = async |words, cost| {
        let limiter = limiter(&[("a", words, "ip"), ("b", "gcra 6/m burst 9", "ip")]);
        let app = hello().layer(by_ip(limiter).cost(cost).fields(fields()));
        send(&app, request("/")).await;
        let mut waits = BTreeSet::new();
        for _ in 0..50 {
            let denied = send(&app, request("/")).await;
            waits.insert(denied.field("retry-after").parse::<u64>().unwrap());
        }
        waits
    };
    let day = waits("first-request-window 9/d", 9).await;
    assert!(day.len() > 5 && day.iter().all(|s| (86_400..=86_460).contains(s)), "{day:?}");
    // A bucket's wait differs by itself, and is the longer one of the second.
    assert_eq!(waits("gcra 6/m burst 9", 5).await, [10].into());
    assert_eq!(waits("first-request-window 8/s", 8).await, [70].into());
}
