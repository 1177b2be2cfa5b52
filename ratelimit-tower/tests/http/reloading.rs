//! A layer whose policy is replaced: checked against the layer's identifiers, and shared by several
//! layers.

use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::routing::get;
use ratelimit_core::{AnyAlgorithm, Limits, ManualClock, RateLimiter};
use ratelimit_layers::Reload;
use ratelimit_tower::{Charge, Choice, RateLimitLayer, header, optional};
use tracing::field::{Field, Visit};
use tracing::subscriber::{DefaultGuard, NoSubscriber};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};

use crate::harness::{API_KEY, Manual, hello, limits, send, statuses, store, with_key};

fn reload(limits: Limits<AnyAlgorithm>) -> Reload<Manual> {
    Reload::new(limits, store(&ManualClock::default()))
}

fn by_key(name: &str, words: &str) -> Limits<AnyAlgorithm> {
    limits(&[(name, words, "key")])
}

fn with_misspelt_shadow() -> Limits<AnyAlgorithm> {
    let limits = Limits::builder().limit("burst", "gcra 1/d burst 9").by(["key"]);
    limits.limit("tried", "gcra 1/d").by(["kye"]).shadow().build().unwrap()
}

#[tokio::test]
async fn a_policy_with_an_identifier_that_no_source_has_is_refused_and_the_old_one_stays() {
    let reloaded = reload(by_key("burst", "gcra 1/d burst 2"));
    let layer = RateLimitLayer::reloading(&reloaded).by("key", header(API_KEY)).checked();
    let app = hello().layer(layer.unwrap());
    assert_eq!(statuses(&app, [with_key("a")]).await, [200]);
    for misspelt in [limits(&[("burst", "gcra 1/d", "kye")]), with_misspelt_shadow()] {
        let refused = reloaded.replace(misspelt).unwrap_err().to_string();
        assert!(refused.contains("did you mean \"key\""), "{refused}");
    }
    let policy = send(&app, with_key("a")).await.field("ratelimit-policy");
    assert_eq!(policy, r#""burst";q=2;w=172800"#);
    reloaded.replace(by_key("burst", "gcra 1/d burst 3")).unwrap();
    assert_eq!(statuses(&app, [with_key("a"), with_key("a")]).await, [200, 429]);

    // Without `checked`, from the time when the layer is before a service.
    let reloaded = reload(by_key("burst", "gcra 1/d"));
    let _app = hello().layer(RateLimitLayer::reloading(&reloaded).by("key", header(API_KEY)));
    assert!(reloaded.replace(limits(&[("burst", "gcra 1/d", "kye")])).is_err());
    let unwired = RateLimitLayer::reloading(&reloaded).by("ip", header(API_KEY)).checked();
    assert!(unwired.unwrap_err().to_string().contains("\"burst\""));
}

#[tokio::test]
async fn layers_inside_each_other_take_their_parts_of_one_policy() {
    let policy =
        |all: &str, search: &str| limits(&[("all", all, "key"), ("search.burst", search, "key")]);
    let reloaded = reload(policy("gcra 1/d burst 9", "gcra 1/d burst 1"));
    let part = |names: &str| {
        let layer = RateLimitLayer::reloading(reloaded.part([names]).unwrap());
        layer.by("key", header(API_KEY)).checked().unwrap()
    };
    let app = Router::new().route("/", get(|| async {})).route_layer(part("search.*"));
    let app = app.layer(part("all"));
    assert_eq!(statuses(&app, [with_key("a"), with_key("a")]).await, [200, 429]);
    let refused = |policy| reloaded.replace(policy).unwrap_err().to_string();
    assert!(refused(by_key("all", "gcra 1/d burst 9")).contains("\"search.*\""));
    let rows = [("all", "gcra 1/d"), ("search.burst", "gcra 1/d"), ("stray", "gcra 1/d")];
    assert!(refused(limits(&rows.map(|(name, words)| (name, words, "key")))).contains("\"stray\""));
    assert!(reloaded.part(["serach.*"]).is_err());
    assert!(reloaded.check_parts().is_ok());
    reloaded.replace(policy("gcra 1/d burst 9", "gcra 1/d burst 2")).unwrap();
    let told = send(&app, with_key("a")).await.field("ratelimit");
    assert!(told.contains("\"search.burst\";r=0") && told.contains("\"all\";r=6"), "{told}");

    let reloaded = reload(policy("gcra 1/d", "gcra 1/d"));
    let _all = reloaded.part(["all"]).unwrap();
    assert!(reloaded.check_parts().unwrap_err().to_string().contains("\"search.burst\""));
}

#[test]
fn a_policy_that_does_not_suit_how_its_layer_charges_is_refused() {
    let (counted, leased) = (by_key("a", "sliding-counter 9/m"), by_key("a", "concurrency 9/m"));
    for (fits, not, reserves) in [(&leased, &counted, true), (&counted, &leased, false)] {
        let reloaded = reload(fits.clone());
        let layer = RateLimitLayer::reloading(&reloaded).by("key", header(API_KEY));
        let refused = if reserves {
            layer.reserve(Charge::estimate()).checked().unwrap().check(not)
        } else {
            layer.checked().unwrap().check(not)
        };
        let refused = refused.unwrap_err().to_string();
        assert!(refused.contains("reserve"), "{refused}");
        let refused = reloaded.replace(not.clone()).unwrap_err().to_string();
        assert!(refused.contains("reserve"), "{refused}");
    }
}

/// The values of what was logged.
#[derive(Clone, Default)]
pub(crate) struct Log(Arc<Mutex<Vec<String>>>);

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

impl Log {
    /// Hears what this thread logs until the guards are dropped.
    pub(crate) fn listens(&self) -> (tracing::Dispatch, DefaultGuard) {
        let subscriber = tracing_subscriber::registry().with(self.clone());
        // Beside a single subscriber, `tracing` keeps for good what the thread that met a line
        // first hears of it.
        let other = tracing::Dispatch::new(NoSubscriber::new());
        (other, tracing::subscriber::set_default(subscriber))
    }

    /// How many of the values contain this.
    pub(crate) fn count(&self, what: &str) -> usize {
        self.0.lock().unwrap().iter().filter(|value| value.contains(what)).count()
    }
}

#[tokio::test]
async fn a_shadow_limit_without_a_source_is_logged() {
    let log = Log::default();
    let _guards = log.listens();
    let store = store(&ManualClock::default());
    let limiter = Arc::new(RateLimiter::new(with_misspelt_shadow(), store));
    let chosen = limiter.clone();
    for layer in [
        RateLimitLayer::new(limiter),
        RateLimitLayer::choosing(move |_| Choice::Limited(chosen.clone())),
    ] {
        log.0.lock().unwrap().clear();
        let app = hello().layer(layer.by("key", optional(header(API_KEY))));
        assert_eq!(statuses(&app, [with_key("a"), with_key("a")]).await, [200, 200]);
        assert!(log.count("\"tried\"") > 0);
    }
}
