//! Several callers in one call are decided through a layer as without it, and reach the store in one call.
#![allow(clippy::expect_used, reason = "tests")]

use ratelimit_core::{
    Gcra, Limit, Limits, ManualClock, OnOutage, RateLimiter, SyncStore, Timestamp,
};
use ratelimit_layers::{Fallback, TopDenied};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::Doors;

type Counted = Doors<MemoryStore<Gcra, ManualClock>>;

fn doors() -> Counted {
    Doors::new(MemoryStore::builder().clock(ManualClock::new(Timestamp::ZERO)).build())
}

fn limits() -> Limits<Gcra> {
    let gcra = Gcra::new("1/h".parse().expect("a rate"), 1).expect("a limit");
    let limit = Limit::new("one", gcra).expect("a name").on_outage(OnOutage::Open);
    Limits::new([limit]).expect("limits")
}

/// Asks about ten callers in one call and about one more by itself: all are decided as without a layer, and reach the
/// store as they were asked.
fn forwards<S: SyncStore<Gcra>>(layer: S, doors: impl Fn(&S) -> &Counted) -> S {
    let limiter = RateLimiter::new(limits(), &layer);
    let callers = ["a", "b", "c", "a", "d", "e", "f", "a", "g", "b"];
    let mut allowed = [false; 10];
    limiter.check_each_now::<str>(&callers, |place, said| {
        allowed[place] = said.is_ok_and(|verdict| verdict.allowed());
    });
    assert_eq!(allowed, [true, true, true, false, true, true, true, false, true, false]);
    assert!(limiter.check_now("eleven").is_ok_and(|verdict| verdict.allowed()));
    assert_eq!((doors(&layer).several(), doors(&layer).single()), (10, 1));
    layer
}

#[test]
fn top_denied_forwards_several_keys_in_one_call() {
    let layer = forwards(TopDenied::new(doors(), 100), TopDenied::store);
    let mut denied: Vec<_> =
        layer.top(10).into_iter().map(|denied| (denied.key, denied.count)).collect();
    denied.sort();
    assert_eq!(denied, [("a".into(), 2), ("b".into(), 1)]);
}

#[test]
fn a_fallback_forwards_several_keys_in_one_call() {
    let fallback = Fallback::builder().build(doors(), &limits()).expect("choices");
    let fallback = forwards(fallback, Fallback::store);
    assert_eq!(fallback.outage_counts(), []);
}

#[cfg(feature = "metrics")]
#[test]
fn metrics_forward_several_keys_in_one_call() {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};
    use ratelimit_layers::Metrics;

    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        forwards(Metrics::new(doors()), Metrics::store);
    });
    let (mut allowed, mut denied) = (0, 0);
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let DebugValue::Counter(count) = value else { continue };
        match key.key().labels().find(|label| label.key() == "outcome").map(metrics::Label::value) {
            Some("allowed") => allowed += count,
            Some("denied") => denied += count,
            _ => {}
        }
    }
    assert_eq!((allowed, denied), (8, 3));
}

#[cfg(feature = "tracing")]
#[test]
fn traces_forward_several_keys_in_one_call() {
    forwards(ratelimit_layers::Traced::new(doors()), ratelimit_layers::Traced::store);
}
