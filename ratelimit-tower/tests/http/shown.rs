//! What clients and handlers see if the service opts in: a limit of another name, none, abnormal
//! usage, waits that differ, decisions, refusals.

use std::collections::BTreeSet;
use std::time::Duration;

use axum::extract::Extension;
use axum::{Router, routing::get};
use http::StatusCode;
use ratelimit_core::{ErrorKind, Limits, ManualClock, RateLimiter, Timestamp};
use ratelimit_tower::{
    Charge, Choice, Decisions, Fields, Grpc, IdentifyError, ModelFields, OnStoreError,
    RateLimitLayer, XRateLimit, from_fn, header, optional,
};
use tonic::{Code, Status};

use crate::harness::{
    API_KEY, BURST, Faulty, Manual, Rows, by_ip, hello, layer, limiter, limits, request, send,
    store,
};

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
    assert_eq!(send(&both, request("/")).await.violated_limits(), ["tokens"]);
    let hidden = hello().layer(layer(&ROWS[..1]).fields(fields.clone()));
    let first = send(&hidden, request("/")).await;
    assert_eq!((first.status, &*first.field("ratelimit")), (200, ""));

    let away = Faulty::new(&ManualClock::default(), |_, _| Some(ErrorKind::Unavailable));
    let app = hello().layer(by_ip(RateLimiter::new(limits(ROWS), away)).fields(fields));
    assert_eq!(send(&app, request("/")).await.violated_limits(), ["tokens"]);
    assert!(Fields::new().rename("money", "two words").is_err());
}

/// From 29 November, 19:00, until 1 December, in Berlin. A decision does not tell in which month it
/// was made, so clients see the mean one.
#[tokio::test]
async fn clients_see_when_a_window_of_a_calendar_ends() {
    let clock = ManualClock::new(Timestamp::saturating_from_us(1_795_975_200_000_000));
    let rows: Rows = &[("plan", "fixed-window 5/month zone Europe/Berlin", "ip")];
    let app = hello().layer(by_ip(RateLimiter::new(limits(rows), store(&clock))));
    let first = send(&app, request("/")).await;
    assert_eq!(first.field("ratelimit"), r#""plan";r=4;t=104400"#);
    assert_eq!(first.field("ratelimit-policy"), r#""plan";q=5;w=2629746"#);
    for _ in 0..4 {
        send(&app, request("/")).await;
    }
    clock.advance(Duration::from_secs(104_399));
    let denied = send(&app, request("/")).await;
    assert_eq!((denied.status, &*denied.field("retry-after")), (429, "1"));
    clock.advance(Duration::from_secs(1));
    assert_eq!(send(&app, request("/")).await.status, 200);
}

#[tokio::test]
async fn a_lockout_means_abnormal_usage_until_its_block_ends() {
    let rows = [("login", "lockout 2/5m block 15m factor 2", "ip"), ("all", "gcra 9/m", "ip")];
    for (fields, problem) in [
        (Fields::new(), "#abnormal-usage-detected"),
        (Fields::new().exceeded_quota("login"), "#quota-exceeded"),
    ] {
        let app = hello().layer(layer(&rows).fields(fields));
        for _ in 0..2 {
            assert_eq!(send(&app, request("/")).await.status, 200);
        }
        let denied = send(&app, request("/")).await;
        assert_eq!((denied.status, &*denied.field("retry-after")), (429, "900"));
        assert_eq!(denied.field("ratelimit"), r#""login";r=0;t=900, "all";r=7;t=7"#);
        assert_eq!(denied.violated_limits(), ["login"]);
        let kind = denied.problem()["type"].as_str().unwrap().to_owned();
        assert!(kind.ends_with(problem), "{kind}");
    }
}

#[tokio::test]
async fn a_limit_at_a_rate_of_0_shows_no_quota_and_no_wait() {
    let rows: Rows = &[("off", "fixed-window 0/m", "ip"), ("shut", "gcra 0/s", "ip")];
    let denied = send(&hello().layer(layer(rows)), request("/")).await;
    assert_eq!((denied.status, &*denied.field("retry-after")), (429, ""));
    assert_eq!(denied.field("ratelimit-policy"), r#""off";q=0;w=60, "shut";q=0"#);
    assert_eq!(denied.field("ratelimit"), r#""off";r=0, "shut";r=0"#);
    assert_eq!(denied.violated_limits(), ["off", "shut"]);
    let peeked = send(&hello().layer(layer(rows).cost(0)), request("/")).await;
    assert_eq!(peeked.status, 200);
}

#[tokio::test]
async fn clients_of_a_window_that_ends_return_at_different_times_and_never_too_early() {
    let fields = || Fields::new().jitter(Duration::from_secs(60));
    let waits = async |rows: Rows<'_>, cost| {
        let app = hello().layer(by_ip(limiter(rows)).cost(cost).fields(fields()));
        send(&app, request("/")).await;
        let mut waits = BTreeSet::new();
        for _ in 0..50 {
            let denied = send(&app, request("/")).await;
            waits.insert(denied.field("retry-after").parse::<u64>().unwrap());
        }
        waits
    };
    for order in [[0, 1], [1, 0]] {
        let waits = async |words, cost| {
            let rows = [("a", words, "ip"), ("b", "gcra 6/m burst 9", "ip")];
            waits(&order.map(|place: usize| rows[place]), cost).await
        };
        let day = waits("first-request-window 9/d", 9).await;
        assert!(day.len() > 5 && day.iter().all(|s| (86_400..=86_460).contains(s)), "{day:?}");
        // A bucket's wait differs by itself, and is the longer one of the other.
        assert_eq!(waits("gcra 6/m burst 9", 5).await, [10].into());
        assert_eq!(waits("first-request-window 8/s", 8).await, [70].into());
    }
}

#[tokio::test]
async fn handlers_see_what_each_limit_decided_of_all_layers_and_nothing_where_none_did() {
    async fn handler(Extension(decisions): Extension<Decisions>) -> String {
        let left =
            decisions.iter().map(|(name, decision)| format!("{name} {}", decision.remaining));
        left.collect::<Vec<_>>().join(", ")
    }
    let shadow = Limits::builder().limit("tried", "gcra 6/m burst 9").by(["ip"]).shadow();
    let shadow = shadow.limit("key", "gcra 6/m burst 7").by(["key"]);
    let shadow = shadow.limit("all", "gcra 6/m burst 5").build().unwrap();
    let limiter = RateLimiter::new(shadow, store(&ManualClock::default()));
    let outer = by_ip(limiter).by("key", optional(header(API_KEY)));
    let outer = outer.key(from_fn(|_| Ok(Some("all".into()))));
    let exempt = RateLimitLayer::<Manual>::choosing(|_| Choice::Exempt);
    let away = Faulty::new(&ManualClock::default(), |_, _| Some(ErrorKind::Unavailable));
    let away = by_ip(RateLimiter::new(limits(ROWS), away)).on_store_error(OnStoreError::Admit);
    let app = || Router::new().route("/", get(handler));
    let inner = || layer(ROWS).fields(fields()).tell_handlers();
    for (app, seen) in [
        (app().layer(inner().immediate()), "money 0, tokens-v2 3"),
        (app().layer(inner().reserve(Charge::estimate())), "money 0, tokens-v2 3"),
        (app().layer(inner()).layer(outer.tell_handlers()), "all 4, money 0, tokens-v2 3"),
        (app().layer(exempt.tell_handlers()), ""),
        (app().layer(away.tell_handlers()), ""),
    ] {
        let answer = send(&app, request("/")).await;
        assert_eq!((answer.status, &*answer.body), (200, seen.as_bytes()));
    }
    // By choice.
    assert_eq!(send(&app().layer(layer(ROWS)), request("/")).await.status, 500);
}

#[tokio::test]
async fn handlers_see_which_limit_warns() {
    async fn handler(Extension(decisions): Extension<Decisions>) -> String {
        decisions.warned().collect::<Vec<_>>().join(", ")
    }
    let limits = Limits::builder().limit("a", "fixed-window 5/d").by(["ip"]).warn_at_percent(80);
    let limits = limits.limit("b", "fixed-window 9/d").by(["ip"]).build().unwrap();
    let limiter = RateLimiter::new(limits, store(&ManualClock::default()));
    let app = Router::new().route("/", get(handler)).layer(by_ip(limiter).tell_handlers());
    for warned in ["", "", "", "a", ""] {
        assert_eq!(&*send(&app, request("/")).await.body, warned.as_bytes());
    }
}

#[tokio::test]
async fn a_choice_can_be_refused_with_any_status_and_says_why() {
    for (status, code) in [
        (StatusCode::PAYMENT_REQUIRED, Code::PermissionDenied),
        (StatusCode::FORBIDDEN, Code::PermissionDenied),
        (StatusCode::UNAUTHORIZED, Code::Unauthenticated),
        (StatusCode::GONE, Code::InvalidArgument),
        (StatusCode::BAD_GATEWAY, Code::Internal),
    ] {
        let layer = RateLimitLayer::<Manual>::choosing(move |_| {
            Choice::Refused(IdentifyError::refused(status, "the subscription has ended"))
        });
        let refused = send(&hello().layer(layer.clone()), request("/")).await;
        assert_eq!(refused.status, status.as_u16());
        let problem = refused.problem();
        assert_eq!(problem["detail"], "the subscription has ended");
        assert_eq!(problem["title"], status.canonical_reason().unwrap());
        let refused = send(&hello().layer(layer.answer(Grpc)), request("/")).await;
        let said = Status::from_header_map(&refused.headers).map(|status| status.code());
        assert_eq!((refused.status, said), (200, Some(code)));
        // A source can refuse, too, also one that may be lacking.
        let blocked = from_fn(move |_| Err(IdentifyError::refused(status, "blocked")));
        let layer = RateLimitLayer::new(limiter(BURST)).by("ip", optional(blocked));
        assert_eq!(send(&hello().layer(layer), request("/")).await.status, status.as_u16());
    }
}
