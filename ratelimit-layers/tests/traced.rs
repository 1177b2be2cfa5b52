//! What is reported to the crate `tracing`.
#![cfg(feature = "tracing")]
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod common;

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::sync::{Arc, Mutex};

use common::{BEGIN, Mode, Scripted, checks, layered, limit};
use ratelimit_core::{Batch, ErrorKind, ManualClock, OnOutage, Store, SyncStore};
use ratelimit_layers::Traced;
use ratelimit_testkit::block_on;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt as _};
use tracing_subscriber::registry::LookupSpan;

/// The fields of each span.
type Spans = Vec<(Id, BTreeMap<String, String>)>;

#[derive(Clone, Default)]
struct Log {
    /// Every span and its fields, in the order in which they began.
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

    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = BTreeMap::new();
        event.record(&mut Fields(&mut fields));
        let told = format!("{} {fields:?}", event.metadata().level());
        self.events.lock().expect("no panic").push(told);
    }
}

#[test]
fn each_decision_is_a_span_and_each_error_an_event() {
    let log = Log::default();
    let subscriber = tracing_subscriber::registry().with(log.clone());
    tracing::subscriber::with_default(subscriber, || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
        runtime.block_on(async {
            let limits = [
                limit("narrow", "fixed-window 1/d", OnOutage::Closed),
                limit("wide", "fixed-window 9/d", OnOutage::Local),
            ];
            let (store, _) = layered(&limits);
            let store = Traced::new(store);
            let checks = checks(&limits, 1);
            let batch = Batch::new(&checks).expect("distinct");
            let _ = store.apply(&batch).await.expect("decides");
            let _ = store.apply(&batch).await.expect("decides");
            store.store().store().set(Mode::Fails(ErrorKind::Config));
            assert!(store.apply(&batch).await.is_err());
            store.store().store().set(Mode::Fails(ErrorKind::Unavailable));
            for _ in 0..5 {
                let _ = store.apply(&batch).await.expect("decides");
            }
        });
    });
    let spans = log.spans.lock().expect("no panic");
    let names = |prefix: &str| {
        let limits = [("narrow", OnOutage::Closed), ("wide", OnOutage::Local)];
        let names =
            limits.map(|(name, choice)| limit(name, "fixed-window 1/d", choice).name().to_owned());
        names.into_iter().filter(|name| name.contains(prefix)).collect::<Vec<_>>().join(",")
    };
    let spans: Vec<_> = spans.iter().map(|(_, fields)| fields).collect();
    assert_eq!(spans.len(), 8);
    let of = |nth: usize, field: &str| spans[nth].get(field).map(String::as_str);
    let (all, narrow) = (names(""), names("narrow"));
    assert_eq!(of(0, "limits"), Some(&*all));
    assert_eq!(of(0, "op"), Some("acquire"));
    assert_eq!((of(0, "allowed"), of(0, "source")), (Some("true"), Some("store")));
    assert_eq!((of(1, "allowed"), of(1, "denied_by")), (Some("false"), Some(&*narrow)));
    assert!(of(1, "retry_after_us").is_some());
    assert_eq!(of(2, "allowed"), None);
    assert_eq!((of(7, "allowed"), of(7, "source")), (Some("false"), Some("fallback")));
    assert!(!format!("{spans:?}").contains("alice"), "a key is no field");

    let events = log.events.lock().expect("no panic");
    let warned: Vec<_> = events.iter().filter(|event| event.starts_with("WARN")).collect();
    assert!(warned[0].contains("Config") && warned[0].contains("not decided"), "{warned:?}");
    assert!(warned[1].contains("breaker is open"), "{warned:?}");
    assert_eq!(warned.len(), 2);
}

#[test]
fn each_of_several_keys_is_a_span() {
    let log = Log::default();
    let subscriber = tracing_subscriber::registry().with(log.clone());
    tracing::subscriber::with_default(subscriber, || {
        let limits = [limit("narrow", "fixed-window 1/d", OnOutage::Closed)];
        let (store, _) = layered(&limits);
        let keys = ["alice", "bob", "alice"];
        Traced::new(store).acquire_each_now(&limits[0], &keys, 1, |_, said| assert!(said.is_ok()));
    });
    let spans = log.spans.lock().expect("no panic");
    let allowed: Vec<_> = spans.iter().map(|(_, fields)| &*fields["allowed"]).collect();
    assert_eq!(allowed, ["true", "true", "false"]);
}

#[test]
fn errors_do_not_fill_the_log() {
    let log = Log::default();
    let subscriber = tracing_subscriber::registry().with(log.clone());
    let begin = std::time::Instant::now();
    tracing::subscriber::with_default(subscriber, || {
        let store = Traced::new(Scripted::new(&ManualClock::new(BEGIN)));
        store.store().set(Mode::Fails(ErrorKind::Config));
        let limits = [limit("narrow", "fixed-window 1/d", OnOutage::Closed)];
        for _ in 0..1_000 {
            let checks = checks(&limits, 1);
            assert!(block_on(store.apply(&Batch::one(&checks[0]))).is_err());
        }
    });
    let lines = log.events.lock().expect("no panic").len();
    assert!(lines >= 1 && lines as u64 <= 1 + begin.elapsed().as_secs(), "{lines}");
}
