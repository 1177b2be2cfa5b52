//! A layer whose policy is replaced: checked against the layer's identifiers, and shared by several layers.
#![cfg(all(feature = "reload", feature = "axum"))]
#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests")]

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::routing::get;
use http::header::{HeaderName, HeaderValue};
use http::{Request, Response};
use ratelimit_core::{Limits, ManualClock, Policy};
use ratelimit_layers::Reload;
use ratelimit_memory::MemoryStore;
use ratelimit_tower::{Choice, RateLimitLayer, header, optional};
use tower::ServiceExt;
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

type Manual = MemoryStore<Policy, ManualClock>;

const API_KEY: HeaderName = HeaderName::from_static("x-api-key");

fn store() -> Manual {
    MemoryStore::builder().clock(ManualClock::default()).build()
}

/// A limit of this many per day.
fn limit(name: &str, key: &str, burst: u64) -> String {
    format!(
        "[[limit]]\nname = '{name}'\nkey = ['{key}']\nalgorithm = 'gcra'\nrate = '1/d'\nburst = {burst}\n"
    )
}

fn limits(document: &str) -> Limits<Policy> {
    toml::from_str(document).unwrap()
}

fn app(layer: RateLimitLayer<Arc<Manual>>) -> Router {
    Router::new().route("/", get(|| async {})).route("/search", get(|| async {})).layer(layer)
}

async fn send(app: &Router, path: &str) -> Response<Body> {
    let request = Request::get(path).header(API_KEY, "alice").body(Body::empty()).unwrap();
    app.clone().oneshot(request).await.unwrap()
}

#[tokio::test]
async fn a_policy_with_an_identifier_that_no_source_has_is_refused_and_the_old_one_stays() {
    let reload = Reload::new(limits(&limit("burst", "key", 2)), store());
    let checked = RateLimitLayer::reloading(&reload).by("key", header(API_KEY)).checked();
    let app = app(checked.unwrap());
    assert_eq!(send(&app, "/").await.status(), 200);
    for misspelt in [
        limit("burst", "kye", 9),
        limit("burst", "key", 9) + &limit("x", "kye", 9) + "shadow = true",
    ] {
        let refused = reload.read(&misspelt).unwrap_err().to_string();
        assert!(
            refused.contains("\"kye\"") && refused.contains("did you mean \"key\""),
            "{refused}"
        );
    }
    assert_eq!(send(&app, "/").await.headers()["ratelimit-policy"], r#""burst";q=2;w=172800"#);

    reload.read(&limit("burst", "key", 3)).unwrap();
    assert_eq!(send(&app, "/").await.status(), 200);
    assert_eq!(send(&app, "/").await.status(), 429);

    // Without `checked`, from the time when the layer is before a service.
    let reload = Reload::new(limits(&limit("burst", "key", 2)), store());
    let _app = crate::app(RateLimitLayer::reloading(&reload).by("key", header(API_KEY)));
    assert!(reload.read(&limit("burst", "kye", 9)).is_err());
    let unwired = RateLimitLayer::reloading(&reload).by("ip", header(API_KEY)).checked();
    assert!(unwired.unwrap_err().to_string().contains("\"burst\""));
}

#[tokio::test]
async fn layers_inside_each_other_take_their_parts_of_one_policy() {
    let policy = |all, search| limit("all", "key", all) + &limit("search.burst", "key", search);
    let reload = Reload::new(limits(&policy(9, 1)), store());
    let by_key = |names: &str| {
        let layer = RateLimitLayer::reloading(reload.part([names]).unwrap());
        layer.by("key", header(API_KEY)).checked().unwrap()
    };
    let app = Router::new().route("/search", get(|| async {})).route_layer(by_key("search.*"));
    let app = app.route("/", get(|| async {})).layer(by_key("all"));
    assert_eq!(send(&app, "/search").await.status(), 200);
    assert_eq!(send(&app, "/search").await.status(), 429);
    assert_eq!(send(&app, "/").await.status(), 200);

    let refused = |policy: String| reload.read(&policy).unwrap_err().to_string();
    assert!(refused(limit("all", "key", 9)).contains("\"search.*\""));
    assert!(refused(policy(9, 1) + &limit("stray", "key", 1)).contains("\"stray\""));
    reload.read(&(policy(5, 2) + &limit("search.daily", "key", 9))).unwrap();
    let found = send(&app, "/search").await;
    assert_eq!(found.status(), 200);
    let told: Vec<_> = found.headers().get_all("ratelimit").iter().collect();
    assert!(told[0].to_str().unwrap().contains("\"search.daily\""), "{told:?}");
    assert_eq!(told[1], HeaderValue::from_static(r#""all";r=1;t=86400"#));
    assert!(reload.part(["serach.*"]).is_err());

    assert!(reload.check_parts().is_ok());
    let reload = Reload::new(limits(&policy(1, 1)), store());
    let _all = reload.part(["all"]).unwrap();
    assert!(reload.check_parts().unwrap_err().to_string().contains("\"search.burst\""));
}

/// The values of what was logged.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Visit for Log {
    fn record_debug(&mut self, _: &Field, value: &dyn Debug) {
        self.0.lock().unwrap().push(format!("{value:?}"));
    }
}

impl<S: Subscriber> Layer<S> for Log {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        event.record(&mut self.clone());
    }
}

#[tokio::test]
async fn a_shadow_limit_without_a_source_is_logged_once() {
    let log = Log::default();
    let subscriber = tracing_subscriber::registry().with(log.clone());
    let _guard = tracing::subscriber::set_default(subscriber);
    let shadow = limit("tried", "kye", 1) + "shadow = true\n";
    let limits = limits(&(limit("burst", "key", 9) + &shadow));
    let limiter = Arc::new(ratelimit_core::RateLimiter::new(limits, Arc::new(store())));
    let chosen = limiter.clone();
    for layer in [
        RateLimitLayer::new(limiter),
        RateLimitLayer::choosing(move |_| Choice::Limited(chosen.clone())),
    ] {
        let layer = layer.by("key", optional(header(API_KEY)));
        log.0.lock().unwrap().clear();
        let app = app(layer); // a service of its own for each route
        for path in ["/", "/search", "/"] {
            assert_eq!(send(&app, path).await.status(), 200);
        }
        let logged = log.0.lock().unwrap().clone();
        let of_the_limit = logged.iter().filter(|value| value.contains("\"tried\""));
        assert_eq!(of_the_limit.count(), 1, "{logged:?}");
    }
}
