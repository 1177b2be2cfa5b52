//! A cache with other stores around it and within it.

use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::{
    Batch, Check, Clock, DynSnapshotStore, ErrorKind, Limit, Limits, ManualClock, OnOutage, Policy,
    Snapshot, SnapshotStore, Source, Store,
};
use ratelimit_layers::{BreakerState, DenialCache, Fallback, TopDenied};
use ratelimit_memory::MemoryStore;
use ratelimit_testkit::block_on;

use crate::noted::{BEGIN, Noted};
use crate::{lasting, limit};

#[path = "../common/mod.rs"]
mod common;

use common::{Mode, Scripted, ScriptedError};
use ratelimit_core::{PolicyState, Verdict, WithSnapshot};

fn daily() -> Limit<Policy> {
    limit("daily", "gcra 3/d burst 3").on_outage(OnOutage::Open)
}

async fn ask<S: Store<Policy>>(store: &S, key: &str) -> Verdict {
    let limit = daily();
    let check = Check { limit: &limit, key, cost: 1 };
    store.apply(&Batch::one(&check)).await.expect("decides")
}

/// A store that can fail and says what it saw.
struct Failing(Scripted, ManualClock);

impl Store<Policy> for Failing {
    type Error = ScriptedError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, ScriptedError> {
        self.0.apply(batch).await
    }
}

impl SnapshotStore<Policy> for Failing {
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, Policy>,
    ) -> Result<WithSnapshot<PolicyState>, ScriptedError> {
        let verdict = self.0.apply(batch).await?;
        let state = |check: &Check<'_, Policy>| self.0.store.state(check.limit.name(), check.key);
        let states = batch.checks().iter().map(state).collect();
        Ok((verdict, Some(Snapshot { now: self.1.now(), states })))
    }
}

fn failing(clock: &ManualClock) -> Failing {
    Failing(Scripted::new(clock), clock.clone())
}

const PAUSE: Duration = Duration::from_secs(1);

fn settings(clock: &ManualClock) -> ratelimit_layers::Builder<ManualClock> {
    Fallback::builder().failures(2).probe_after(PAUSE).clock(clock.clone())
}

fn limits() -> Limits<Policy> {
    Limits::new([daily()]).expect("limits")
}

#[tokio::test(start_paused = true)]
async fn within_a_fallback_its_answers_say_nothing_of_the_store() {
    let clock = ManualClock::new(BEGIN);
    let cache = lasting(&clock).build(failing(&clock));
    let store = settings(&clock).build(cache, &limits()).expect("choices");
    for _ in 0..4 {
        let _ = ask(&store, "alice").await;
    }
    let scripted = &store.store().store().0;
    scripted.set(Mode::Fails(ErrorKind::Unavailable));
    // Answers of the cache between two failures do not make up for the first one.
    assert_eq!(ask(&store, "bob").await.source(), Source::Fallback);
    assert_eq!(ask(&store, "alice").await.source(), Source::Cache);
    assert_eq!(ask(&store, "bob").await.source(), Source::Fallback);
    assert_eq!(store.breaker(), BreakerState::Open);
    // Nor does one in the place of a probe close the breaker: the next call probes.
    tokio::time::advance(PAUSE).await;
    assert_eq!(ask(&store, "alice").await.source(), Source::Cache);
    assert_eq!(store.breaker(), BreakerState::Open);
    scripted.set(Mode::Answers);
    assert_eq!(ask(&store, "bob").await.source(), Source::Store);
    assert_eq!(store.breaker(), BreakerState::Closed);
}

#[tokio::test(start_paused = true)]
async fn around_a_fallback_it_keeps_what_the_store_said_and_nothing_else() {
    let clock = ManualClock::new(BEGIN);
    let closed = daily().on_outage(OnOutage::Closed);
    let limits = Limits::new([closed.clone()]).expect("limits");
    let fallback = settings(&clock).build(failing(&clock), &limits).expect("choices");
    let store = lasting(&clock).build(fallback);
    let ask = async |key| {
        let check = Check { limit: &closed, key, cost: 1 };
        store.apply(&Batch::one(&check)).await.expect("decides")
    };
    for _ in 0..4 {
        let _ = ask("alice").await;
    }
    store.store().store().0.set(Mode::Fails(ErrorKind::Unavailable));
    assert_eq!(ask("alice").await.source(), Source::Cache);
    for _ in 0..4 {
        let verdict = ask("bob").await;
        assert!(!verdict.allowed() && verdict.source() == Source::Fallback);
    }
    assert_eq!(store.counts().keys, 1);
}

#[test]
fn stores_that_count_pass_on_what_the_store_saw() {
    let clock = ManualClock::new(BEGIN);
    let inner = TopDenied::new(Arc::new(Noted::new(&clock)), 16);
    let store = TopDenied::new(lasting(&clock).build(inner), 16);
    for _ in 0..10 {
        let _ = block_on(ask(&store, "alice"));
    }
    let cache: &DenialCache<_, Policy, _> = store.store();
    assert_eq!(cache.store().store().calls(), 4);
    assert_eq!((store.top(1)[0].count, cache.store().top(1)[0].count), (7, 1));
}

/// One that a program chooses when it starts, as in development and in production.
#[test]
fn around_a_store_that_is_chosen_at_run_time_it_answers() {
    let clock = ManualClock::new(BEGIN);
    let memory = MemoryStore::<Policy, _>::builder().clock(clock.clone()).build();
    let noted = Noted::new(&clock);
    let choices: [Arc<dyn DynSnapshotStore<Policy>>; 2] = [Arc::new(memory), Arc::new(noted)];
    for chosen in choices {
        let store: DenialCache<_, Policy, _> = lasting(&clock).build(chosen);
        let sources: Vec<_> = (0..6).map(|_| block_on(ask(&store, "alice")).source()).collect();
        assert_eq!(sources[..4], [Source::Store; 4]);
        assert_eq!(sources[4..], [Source::Cache; 2]);
        assert_eq!((store.counts().asked, store.counts().answered), (4, 2));
    }
}

#[cfg(all(feature = "metrics", feature = "tracing"))]
#[test]
fn metrics_tell_the_answers_of_the_cache_apart() {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};
    use ratelimit_layers::{Metrics, Traced};

    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let clock = ManualClock::new(BEGIN);
        let inner = Traced::new(Metrics::named(Noted::new(&clock), "inner"));
        let store = Metrics::named(Traced::new(lasting(&clock).build(inner)), "outer");
        for _ in 0..10 {
            let _ = block_on(ask(&store, "alice"));
        }
    });
    let mut seen = Vec::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let is_decision = key.key().name() == "ratelimit_decisions_total";
        let DebugValue::Counter(count) = value else { continue };
        if !is_decision {
            continue;
        }
        let label = |name| key.key().labels().find(|label| label.key() == name);
        let label = |name| label(name).map(|label| label.value().to_owned()).unwrap_or_default();
        seen.push((label("store"), label("outcome"), label("source"), count));
    }
    seen.sort();
    let due = [
        ("inner", "allowed", "store", 3),
        ("inner", "denied", "store", 1),
        ("outer", "allowed", "store", 3),
        ("outer", "denied", "cache", 6),
        ("outer", "denied", "store", 1),
    ];
    let due = due.map(|(store, outcome, source, count)| {
        (store.to_owned(), outcome.to_owned(), source.to_owned(), count)
    });
    assert_eq!(seen, due);
}
