//! Layers around each other: in the order that the guide shows, with and without each of them, and
//! what an answer of one says to another.

use std::sync::Arc;

use ratelimit_core::store::DynSnapshotStore;
use ratelimit_core::{AnyAlgorithm, DynStore, Limit, ManualClock, OnOutage, Source};
use ratelimit_layers::{BreakerState, Fallback, Metrics, TopDenied, Traced};

use crate::common::{
    BEGIN, Fake, Mode, PAUSE, UNAVAILABLE, allotments, ask, cache, fallback, limit, memory,
    paused_runtime, record_metrics,
};

fn daily() -> Limit<AnyAlgorithm> {
    limit("daily", "fixed-window 100/d").on_outage(OnOutage::Open)
}

/// How many of 1,000 requests in a row are admitted, decided by the store, by a cache, and served
/// from allotments.
async fn drain(store: &dyn DynStore<AnyAlgorithm>) -> [u64; 4] {
    let [mut admitted, mut stored, mut cached, mut served] = [0; 4];
    for _ in 0..1_000 {
        let verdict = ask(&store, &daily(), "alice", 1).await;
        admitted += u64::from(verdict.allowed());
        *match verdict.source() {
            Source::Cache => &mut cached,
            Source::Allotment => &mut served,
            _ => &mut stored,
        } += 1;
    }
    [admitted, stored, cached, served]
}

#[tokio::test(start_paused = true)]
async fn each_layer_does_its_part_wherever_it_stands() {
    let clock = ManualClock::new(BEGIN);
    let within = || memory(&clock);
    let drains = async |what: &str, store: &dyn DynStore<AnyAlgorithm>, due| {
        assert_eq!(drain(store).await, due, "{what}");
    };
    let due = [100, 101, 899, 0];
    drains("a cache", &cache(within(), &clock), due).await;
    let chosen: Arc<dyn DynSnapshotStore<AnyAlgorithm>> = Arc::new(within());
    drains("a cache of a store that is chosen at run time", &cache(chosen, &clock), due).await;
    let observed = Traced::new(Metrics::new(within()));
    drains("a cache of those that observe", &cache(observed, &clock), due).await;
    // 1, and draws of 2, 4, 8, 16 and 32, of which the last takes what is left: six calls, and a
    // denial.
    drains("allotments", &allotments(within(), &clock), [100, 907, 0, 93]).await;
    let (saving, due) = (|| allotments(cache(within(), &clock), &clock), [100, 8, 899, 93]);
    drains("allotments of a cache", &saving(), due).await;
    let around = TopDenied::new(fallback(Fallback::builder(), saving(), &clock, &[daily()]), 16);
    drains("all", &Metrics::new(Traced::new(around)), due).await;
}

#[test]
fn metrics_tell_apart_what_reaches_the_store_and_what_does_not() {
    let clock = ManualClock::new(BEGIN);
    let seen = record_metrics(|| {
        let inner = Traced::new(Metrics::named(memory(&clock), "inner"));
        let all = allotments(cache(TopDenied::new(inner, 16), &clock), &clock);
        let store = TopDenied::new(Metrics::named(Traced::new(all), "outer"), 16);
        paused_runtime().block_on(drain(&store));
        assert_eq!(store.top(1)[0].count, 900);
        assert_eq!(store.store().store().store().store().store().top(1)[0].count, 1);
    });
    let decided = seen.iter().filter(|((name, _), _)| name == "ratelimit_decisions_total");
    let mut seen: Vec<_> = decided
        .map(|((_, labels), count)| {
            (["store", "outcome", "source"].map(|label| &*labels[label]).join(" "), *count)
        })
        .collect();
    seen.sort();
    let due = [
        ("inner allowed store", 7),
        ("inner denied store", 1),
        ("outer allowed allotment", 93),
        ("outer allowed store", 7),
        ("outer denied cache", 899),
        ("outer denied store", 1),
    ];
    assert_eq!(seen, due.map(|(labels, count)| (labels.to_owned(), count)));
}

/// The fallback also answers a draw that is in flight when the store fails.
#[tokio::test(start_paused = true)]
async fn around_a_fallback_nothing_is_spent_that_the_store_has_not_charged() {
    let clock = ManualClock::new(BEGIN);
    let limit = limit("daily", "fixed-window 900/d").on_outage(OnOutage::Local);
    let within =
        fallback(Fallback::builder(), Fake::new(&clock), &clock, std::slice::from_ref(&limit));
    let store = allotments(within, &clock);
    assert_eq!(ask(&store, &limit, "alice", 1).await.source(), Source::Store);
    store.store().store().set(UNAVAILABLE);
    for _ in 0..20 {
        assert_eq!(ask(&store, &limit, "alice", 1).await.source(), Source::Fallback);
    }
    assert!(store.counts().draws > 0);
}

/// What is decided within says nothing of the store: between two failures it does not make up for
/// the first one, as an answer of the store does, nor does it close the breaker in the place of a
/// probe.
#[tokio::test(start_paused = true)]
async fn within_a_fallback_what_a_layer_decides_says_nothing_of_the_store() {
    let clock = ManualClock::new(BEGIN);
    let few = [limit("daily", "fixed-window 8/d").on_outage(OnOutage::Open)];
    for (source, requests) in [(Source::Allotment, 5), (Source::Cache, 10)] {
        let store = allotments(cache(Fake::new(&clock), &clock), &clock);
        let store = fallback(Fallback::builder().failures(2), store, &clock, &few);
        let ask = async |key| ask(&store, &few[0], key, 1).await.source();
        for _ in 0..requests {
            let _ = ask("alice").await;
        }
        let fake = store.store().store().store();
        for key in ["carol", "dave"] {
            for (mode, due) in [(UNAVAILABLE, Source::Fallback), (Mode::Answers, Source::Store)] {
                fake.set(mode);
                assert_eq!((ask(key).await, store.breaker()), (due, BreakerState::Closed));
            }
        }
        fake.set(UNAVAILABLE);
        assert_eq!(ask("bob").await, Source::Fallback);
        assert_eq!(ask("alice").await, source);
        assert_eq!(ask("bob").await, Source::Fallback);
        assert_eq!(store.breaker(), BreakerState::Open);
        tokio::time::advance(PAUSE).await;
        assert_eq!(ask("alice").await, source);
        assert_eq!(store.breaker(), BreakerState::Open);
        fake.set(Mode::Answers);
        assert_eq!(ask("bob").await, Source::Store);
        assert_eq!(store.breaker(), BreakerState::Closed);
    }
}
