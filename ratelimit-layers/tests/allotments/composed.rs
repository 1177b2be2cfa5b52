//! Allotments with other stores around them and within them.

use std::time::Duration;

use ratelimit_core::{
    Batch, Check, Clock, ErrorKind, Limit, Limits, ManualClock, OnOutage, Policy, PolicyState,
    Snapshot, SnapshotStore, Source, Store, SyncStore, Verdict, WithSnapshot,
};
use ratelimit_layers::{Allotments, BreakerState, DenialCache, Fallback, TopDenied};
use ratelimit_memory::{MemoryError, MemoryStore};
use ratelimit_testkit::block_on;

use crate::endings::common::{Mode, Scripted, UNAVAILABLE};
use crate::{BEGIN, ask, greedy, limit};

const PAUSE: Duration = Duration::from_secs(1);

fn daily() -> Limit<Policy> {
    limit("daily", "fixed-window 100/d").on_outage(OnOutage::Open)
}

fn settings(clock: &ManualClock) -> ratelimit_layers::Builder<ManualClock> {
    Fallback::builder().failures(2).probe_after(PAUSE).clock(clock.clone())
}

fn limits() -> Limits<Policy> {
    Limits::new([daily()]).expect("limits")
}

/// Asks until eight are drawn and one of them is used.
async fn one_of_eight<S: Store<Policy>>(store: &S) {
    for _ in 0..8 {
        assert!(ask(store, &daily(), "alice", 1).await.allowed());
    }
}

#[tokio::test(start_paused = true)]
async fn within_a_fallback_what_they_serve_says_nothing_of_the_store() {
    let clock = ManualClock::new(BEGIN);
    let store = greedy(&clock).build(Scripted::new(&clock));
    let store = settings(&clock).build(store, &limits()).expect("choices");
    one_of_eight(&store).await;
    let scripted = store.store().store();
    scripted.set(UNAVAILABLE);
    // What is served between two failures does not make up for the first one.
    assert_eq!(ask(&store, &daily(), "bob", 1).await.source(), Source::Fallback);
    assert_eq!(ask(&store, &daily(), "alice", 1).await.source(), Source::Allotment);
    assert_eq!(ask(&store, &daily(), "bob", 1).await.source(), Source::Fallback);
    assert_eq!(store.breaker(), BreakerState::Open);
    // Nor does it close the breaker in the place of a probe.
    tokio::time::advance(PAUSE).await;
    assert_eq!(ask(&store, &daily(), "alice", 1).await.source(), Source::Allotment);
    assert_eq!(store.breaker(), BreakerState::Open);
    scripted.set(Mode::Answers);
    assert_eq!(ask(&store, &daily(), "bob", 1).await.source(), Source::Store);
    assert_eq!(store.breaker(), BreakerState::Closed);
}

#[tokio::test(start_paused = true)]
async fn around_a_fallback_nothing_is_spent_that_the_store_has_not_charged() {
    let clock = ManualClock::new(BEGIN);
    let fallback = settings(&clock).build(Scripted::new(&clock), &limits()).expect("choices");
    let store = greedy(&clock).build(fallback);
    store.store().store().set(Mode::Fails(ErrorKind::Unavailable));
    for _ in 0..20 {
        assert_eq!(ask(&store, &daily(), "alice", 1).await.source(), Source::Fallback);
    }
    assert_eq!(store.counts().served, 0);
}

/// A store that says what it saw.
struct Seen(MemoryStore<Policy, ManualClock>, ManualClock);

impl Store<Policy> for Seen {
    type Error = MemoryError;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, MemoryError> {
        self.0.apply_now(batch)
    }
}

impl SnapshotStore<Policy> for Seen {
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, Policy>,
    ) -> Result<WithSnapshot<PolicyState>, MemoryError> {
        let verdict = self.0.apply_now(batch)?;
        let state = |check: &Check<'_, Policy>| self.0.state(check.limit.name(), check.key);
        let states = batch.checks().iter().map(state).collect();
        Ok((verdict, Some(Snapshot { now: self.1.now(), states })))
    }
}

fn seen(clock: &ManualClock) -> Seen {
    Seen(MemoryStore::builder().clock(clock.clone()).build(), clock.clone())
}

/// What 1,000 requests in a row get: how many are admitted, and by what each is decided.
fn drained<S: Store<Policy>>(store: &S) -> (u64, [u64; 3]) {
    let (mut admitted, mut sources) = (0, [0; 3]);
    for _ in 0..1_000 {
        let verdict = block_on(ask(store, &daily(), "alice", 1));
        admitted += u64::from(verdict.allowed());
        sources[match verdict.source() {
            Source::Store => 0,
            Source::Cache => 1,
            _ => 2,
        }] += 1;
    }
    (admitted, sources)
}

#[test]
fn with_a_denial_cache_within_or_around_few_requests_reach_the_store() {
    let clock = ManualClock::new(BEGIN);
    let cache = || DenialCache::builder().clock(clock.clone());
    let within = greedy(&clock).build(cache().build(seen(&clock)));
    let (admitted, [store, cached, served]) = drained(&within);
    assert_eq!((admitted, cached), (100, 899));
    assert!(store < 20 && served > 80, "{store} by the store, {served} served");
    let around = cache().build(greedy(&clock).build(seen(&clock)));
    let (admitted, [store, cached, served]) = drained(&around);
    assert_eq!((admitted, cached), (100, 899));
    assert!(store < 20 && served > 80, "{store} by the store, {served} served");
}

#[test]
fn who_is_denied_most_is_counted_around_them() {
    let clock = ManualClock::new(BEGIN);
    let store = TopDenied::new(greedy(&clock).build(seen(&clock)), 16);
    assert_eq!(drained(&store).0, 100);
    assert_eq!(store.top(1)[0].count, 900);
    let inner: &Allotments<Seen, Policy, ManualClock> = store.store();
    assert!(inner.counts().served > 80);
}

#[cfg(all(feature = "metrics", feature = "tracing"))]
#[test]
fn metrics_tell_what_was_served_apart() {
    use metrics_util::debugging::{DebugValue, DebuggingRecorder};
    use ratelimit_layers::{Metrics, Traced};

    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let clock = ManualClock::new(BEGIN);
        let store = Metrics::new(Traced::new(greedy(&clock).build(seen(&clock))));
        for _ in 0..8 {
            assert!(block_on(ask(&store, &daily(), "alice", 1)).allowed());
        }
    });
    let mut found = Vec::new();
    for (key, _, _, value) in snapshotter.snapshot().into_vec() {
        let DebugValue::Counter(count @ 1..) = value else { continue };
        let source = key.key().labels().find(|label| label.key() == "source");
        found.extend(source.map(|label| (label.value().to_owned(), count)));
    }
    found.sort();
    // 1, and draws of 2, 4 and 8.
    assert_eq!(found, [("allotment".to_owned(), 4), ("store".to_owned(), 4)]);
}
