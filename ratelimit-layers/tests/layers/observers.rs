//! What those that only observe hear, and that they pass on everything.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use metrics_util::debugging::DebuggingRecorder;
use proptest::collection::vec;
use proptest::prelude::*;
use ratelimit_core::{
    Batch, Check, EntryStore, ErrorKind, Limit, ManualClock, Now, OnOutage, Op, Policy,
    RateLimiter, SnapshotStore, Store, SyncStore,
};
use ratelimit_layers::{Metrics, TopDenied, Traced};
use ratelimit_testkit::block_on;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

use crate::common::{BEGIN, Fake, Memory, Mode, UNAVAILABLE, checks, limit, limits, memory};

type Counting = TopDenied<Memory>;

fn counting(keys: usize) -> Counting {
    TopDenied::new(memory(&ManualClock::new(BEGIN)), keys)
}

fn is_denied(store: &Counting, limit: &Limit<Policy>, key: &str) -> bool {
    !store.acquire_now(limit, key, 1).expect("decides").allowed()
}

/// Each way to ask reaches the store within in the same way and is heard once.
#[test]
fn an_observer_forwards_every_call_and_hears_of_each_decision() {
    let log = Log::default();
    let subscriber = tracing_subscriber::registry().with(log.clone());
    let recorder = DebuggingRecorder::new();
    let run = || {
        let clock = ManualClock::new(BEGIN);
        let (alone, within) = (memory(&clock), TopDenied::new(memory(&clock), 16));
        let store = Metrics::new(Traced::new(within));
        let limit = limit("log", "window-log 4/d");
        let check = Check { limit: &limit, key: "alice", cost: 1 };
        let batch = Batch::one(&check);
        for _ in 0..2 {
            assert_eq!(block_on(store.apply(&batch)).ok(), block_on(alone.apply(&batch)).ok());
            let seen = block_on(store.apply_with_snapshot(&batch)).expect("decides");
            assert_eq!(seen, block_on(alone.apply_with_snapshot(&batch)).expect("decides"));
            assert_eq!(store.apply_now(&batch).ok(), alone.apply_now(&batch).ok());
            let said = store.acquire_now(&limit, "alice", 1).ok();
            assert_eq!(said, alone.acquire_now(&limit, "alice", 1).ok());
            let entries = block_on(store.entries(&limit, "alice", Now::Store)).expect("lists");
            assert_eq!(entries.len(), 4);
        }
        let (mut counts, mut due) = (Vec::new(), Vec::new());
        Store::<Policy>::report_counts(&store, &mut |name, count| counts.push((name, count)));
        Store::<Policy>::report_counts(&alone, &mut |name, count| due.push((name, count)));
        assert!(counts == due && !due.is_empty());
        assert_eq!(store.store().store().top(2)[0].count, 4);
        assert_eq!(log.spans.lock().expect("no panic").len(), 8);
    };
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        tracing::subscriber::with_default(subscriber, run);
    });
    let durations = snapshotter.snapshot().into_vec().into_iter().map(|(_, _, _, value)| value);
    let heard: Vec<_> = durations
        .filter_map(|value| match value {
            metrics_util::debugging::DebugValue::Histogram(all) => Some(all.len()),
            _ => None,
        })
        .collect();
    assert_eq!(heard, [8]);
}

#[test]
fn only_denials_are_counted_and_only_for_the_limit_that_denied() {
    let both = [limit("strict", "fixed-window 1/h"), limit("wide", "fixed-window 100/h")];
    let store = counting(100);
    for _ in 0..4 {
        let checks = checks(&both, "bob", 1);
        let _ = store.apply_now(&Batch::new(&checks).expect("distinct")).expect("decides");
        let _ = store.apply_now(&Batch::one(&checks[0]).op(Op::Peek)).expect("decides");
    }
    let top = store.top(10);
    assert_eq!(top.len(), 1);
    assert_eq!((&*top[0].limit, &*top[0].key, top[0].count, top[0].over), ("strict", "bob", 3, 0));
    store.forget();
    assert!(store.top(10).is_empty());

    // What only a shadow limit would have denied was allowed.
    let both = [limit("shadow", "fixed-window 1/h").shadow(), limit("live", "fixed-window 3/h")];
    let limiter = RateLimiter::new(limits(&both), counting(100));
    for nth in 0..5 {
        assert_eq!(limiter.check_now("bob").expect("decides").allowed(), nth < 3);
    }
    let top = limiter.store().top(10);
    assert_eq!((top.len(), &*top[0].limit, top[0].count), (1, "live", 2));
}

#[test]
fn a_flood_of_other_keys_does_not_hide_the_most_denied_one() {
    let (store, limit) = (counting(160), limit("l", "fixed-window 1/h"));
    for n in 0..20_000_u32 {
        let other = format!("other-{n}");
        let key = if n % 20 == 0 { "mallory" } else { &other };
        for _ in 0..2 {
            is_denied(&store, &limit, key);
        }
    }
    let top = store.top(1_000);
    assert!(top.len() <= 160 && &*top[0].key == "mallory", "{}", top.len());
    // Denied at every second request but the first, twice each time.
    let denied = 2 * 1_000 - 1;
    assert!(top[0].count - top[0].over <= denied && denied <= top[0].count, "{:?}", top[0]);
}

#[test]
fn long_keys_are_cut_but_counted_apart() {
    let (store, limit) = (counting(100), limit("l", "fixed-window 1/h"));
    for end in ["a", "b"] {
        let key = "ä".repeat(100_000) + end;
        assert!(!is_denied(&store, &limit, &key) && is_denied(&store, &limit, &key));
    }
    let top = store.top(10);
    assert_eq!(top.len(), 2);
    assert!(top.iter().all(|denied| denied.key.len() == 128 && denied.count == 1));
}

#[test]
fn denials_of_one_key_by_several_threads_are_all_counted() {
    let (store, limit) = (counting(16), limit("l", "fixed-window 1/h"));
    assert!(!is_denied(&store, &limit, "a"));
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..250).for_each(|_| assert!(is_denied(&store, &limit, "a"))));
        }
    });
    let top = store.top(2);
    assert_eq!((top.len(), top[0].count, top[0].over), (1, 1_000, 0));
}

proptest! {
    #[test]
    fn a_count_is_never_too_low_and_too_high_by_at_most_over(keys in vec(0..60_u8, 0..600)) {
        let (store, limit) = (counting(32), limit("l", "fixed-window 1/h"));
        let mut due = HashMap::new();
        for key in keys {
            let key = format!("k{key}");
            if is_denied(&store, &limit, &key) {
                *due.entry(key).or_insert(0_u64) += 1;
            }
        }
        let top = store.top(usize::MAX);
        for denied in &top {
            let count = due.get(&*denied.key).copied().unwrap_or(0);
            prop_assert!(denied.count - denied.over <= count && count <= denied.count, "{:?}", denied);
        }
        // While there is room, every denial is counted, and no other.
        if due.len() <= 2 {
            prop_assert_eq!(top.iter().map(|d| d.count).sum::<u64>(), due.values().sum::<u64>());
        }
    }
}

/// The fields of each span, in the order in which they began.
type Spans = Vec<(Id, BTreeMap<String, String>)>;

#[derive(Clone, Default)]
struct Log {
    spans: Arc<Mutex<Spans>>,
    events: Arc<Mutex<Vec<String>>>,
}

struct Fields<'f>(&'f mut BTreeMap<String, String>);

impl Visit for Fields<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.0.insert(field.name().into(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

impl<S: Subscriber + for<'l> LookupSpan<'l>> Layer<S> for Log {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _: Context<'_, S>) {
        let mut fields = BTreeMap::new();
        attributes.record(&mut Fields(&mut fields));
        self.spans.lock().expect("no panic").push((id.clone(), fields));
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, _: Context<'_, S>) {
        let mut spans = self.spans.lock().expect("no panic");
        let span = spans.iter_mut().rev().find(|(known, _)| known == id).expect("a span");
        values.record(&mut Fields(&mut span.1));
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = BTreeMap::new();
        event.record(&mut Fields(&mut fields));
        let within = if context.event_span(event).is_some() { "within" } else { "alone" };
        let told = format!("{} {within} {fields:?}", event.metadata().level());
        self.events.lock().expect("no panic").push(told);
    }
}

#[test]
fn each_decision_is_a_span_and_each_error_an_event_at_most_once_per_second() {
    let log = Log::default();
    let subscriber = tracing_subscriber::registry().with(log.clone());
    let begin = std::time::Instant::now();
    tracing::subscriber::with_default(subscriber, || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
        runtime.block_on(async {
            let clock = ManualClock::new(BEGIN);
            let both = [
                limit("narrow", "fixed-window 1/d").on_outage(OnOutage::Closed),
                limit("wide", "fixed-window 9/d").on_outage(OnOutage::Local),
            ];
            let within = crate::common::fallback(Fake::new(&clock), &clock, &both);
            let store = Traced::new(within);
            let checks = checks(&both, "alice", 1);
            let batch = Batch::new(&checks).expect("distinct");
            for (mode, requests) in
                [(Mode::Answers, 2), (Mode::Fails(ErrorKind::Config), 1_000), (UNAVAILABLE, 3)]
            {
                store.store().store().set(mode);
                for _ in 0..requests {
                    assert_eq!(store.apply(&batch).await.is_ok(), requests < 1_000);
                }
            }
        });
    });
    let spans = log.spans.lock().expect("no panic");
    assert_eq!(spans.len(), 1_005);
    let fields = |nth: usize| {
        let (_, fields) = &spans[nth];
        fields.iter().map(|(name, value)| format!("{name}={value}")).collect::<Vec<_>>().join(" ")
    };
    let asked = "limits=narrow,wide op=acquire";
    assert_eq!(fields(0), format!("allowed=true {asked} source=store"));
    let denied = format!("allowed=false denied_by=narrow {asked} retry_after_us=");
    assert!(fields(1).starts_with(&denied) && fields(1).ends_with("source=store"), "{}", fields(1));
    assert_eq!(fields(2), asked);
    let last = fields(1_004);
    assert!(last.starts_with(&denied) && last.ends_with("source=fallback"), "{last}");
    assert!(!format!("{spans:?}").contains("alice"), "a key is no field");

    let events = log.events.lock().expect("no panic");
    let warned = |what: &str| events.iter().filter(|event| event.contains(what)).count() as u64;
    let errors = warned("Config");
    assert_eq!((errors, warned("WARN alone")), (warned("not decided"), 0), "{events:?}");
    assert!(errors >= 1 && errors <= 1 + begin.elapsed().as_secs(), "{events:?}");
    assert_eq!(warned("breaker is open"), 1);
}
