//! What is reported to the crate `metrics` is what happened, and what the documents and the dashboard say.
#![cfg(feature = "metrics")]
#![allow(clippy::expect_used, clippy::panic, missing_docs, reason = "tests")]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;

use common::{Mode, checks, layered, limit};
use metrics_util::debugging::{DebugValue, DebuggingRecorder};
use ratelimit_core::{
    Batch, DynStore, ErrorKind, Limit, Limits, OnOutage, Op, Policy, RateLimiter, Store,
};
use ratelimit_layers::{Allotments, DenialCache, Fallback, Metrics, TopDenied};
use ratelimit_memory::MemoryStore;
use serde_json::Value;

/// Every series by its name and labels, and its value: of a histogram how often it was recorded.
fn recorded(run: impl AsyncFnOnce()) -> BTreeMap<(String, BTreeMap<String, String>), u64> {
    let recorder = DebuggingRecorder::new();
    let snapshotter = recorder.snapshotter();
    metrics::with_local_recorder(&recorder, || {
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
        runtime.block_on(run());
    });
    let value = |value| match value {
        DebugValue::Counter(count) => count,
        #[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "0, 1 or 2")]
        DebugValue::Gauge(level) => level.into_inner() as u64,
        DebugValue::Histogram(values) => values.len() as u64,
    };
    let all = snapshotter.snapshot().into_vec().into_iter();
    all.map(|(key, _, _, told)| {
        let key = key.key();
        let labels = key.labels().map(|label| (label.key().into(), label.value().into()));
        ((key.name().to_owned(), labels.collect()), value(told))
    })
    .collect()
}

/// One of everything: allowed, denied and spared decisions of both sources, errors, an outage and its end.
async fn one_of_everything() {
    let limits = [
        limit("narrow", "fixed-window 1/d", OnOutage::Open),
        limit("wide", "fixed-window 9/d", OnOutage::Local),
        limit("strict", "fixed-window 5/d", OnOutage::Closed),
    ];
    let (store, _) = layered(&limits);
    let store = Metrics::new(store);
    let ask = async |cost| {
        let checks = checks(&limits[..2], cost);
        let _decided = store.apply(&Batch::new(&checks).expect("distinct")).await;
    };
    ask(1).await;
    ask(1).await; // `narrow` denies, and spares `wide`
    store.store().store().set(Mode::Fails(ErrorKind::Corrupt));
    ask(1).await;
    store.store().store().set(Mode::Fails(ErrorKind::Unavailable));
    for _ in 0..5 {
        ask(1).await; // three times allowed by the share of `wide`
    }
    let refused = checks(&limits, 1);
    let _ = store.apply(&Batch::new(&refused).expect("distinct")).await.expect("decides");
    store.store().store().set(Mode::Answers);
    tokio::time::advance(std::time::Duration::from_secs(1)).await;
    let peek = checks(&limits[1..2], 1);
    let _ = store.apply(&Batch::one(&peek[0]).op(Op::Peek)).await.expect("decides");
}

#[test]
fn decisions_are_counted_by_limit_outcome_and_source() {
    let recorded = recorded(one_of_everything);
    let of = |name: &str, labels: &[(&str, &str)]| -> u64 {
        let has = |all: &BTreeMap<String, String>| {
            labels.iter().all(|(key, value)| all.get(*key).is_some_and(|told| told == value))
        };
        let same = recorded.iter().filter(|((told, all), _)| told == name && has(all));
        same.map(|(_, value)| value).sum()
    };
    let limit_of = |name: &str, choice| limit(name, "fixed-window 1/d", choice).name().to_owned();
    let (narrow, wide) = (limit_of("narrow", OnOutage::Open), limit_of("wide", OnOutage::Local));
    let decided = |limit: &str, source, outcome| {
        let labels =
            [("limit", limit), ("source", source), ("outcome", outcome), ("store", "store")];
        of("ratelimit_decisions_total", &labels)
    };
    for (limit, source, [allowed, denied, spared]) in [
        (&narrow, "store", [1, 1, 0]),
        (&wide, "store", [1, 0, 1]),
        (&narrow, "fallback", [3, 0, 3]),
        (&wide, "fallback", [3, 3, 0]),
    ] {
        let told = ["allowed", "denied", "spared"].map(|outcome| decided(limit, source, outcome));
        assert_eq!(told, [allowed, denied, spared], "{limit} by {source}");
    }
    let errors = [("op", "acquire"), ("kind", "corrupt")];
    assert_eq!(of("ratelimit_errors_total", &errors), 1);
    let took = |op, source| of("ratelimit_duration_seconds", &[("op", op), ("source", source)]);
    assert_eq!((took("acquire", "store"), took("acquire", "fallback")), (2, 6));
    assert_eq!(took("peek", "store"), 1);
    let outage = [("choice", "local"), ("outcome", "denied")];
    assert_eq!(of("ratelimit_outage_decisions_total", &outage), 3);
    assert_eq!(of("ratelimit_breaker_state", &[]), 0);
    for (to, count) in [("open", 1), ("half-open", 1), ("closed", 2)] {
        assert_eq!(of("ratelimit_breaker_transitions_total", &[("to", to)]), count, "{to}");
    }
}

#[test]
fn a_shadow_limit_that_would_have_denied_is_counted_as_such() {
    let recorded = recorded(async || {
        let shadow = limit("shadow", "fixed-window 1/d", OnOutage::Open).shadow();
        let limits = Limits::new([limit("live", "fixed-window 9/d", OnOutage::Open), shadow]);
        let store = Metrics::named(MemoryStore::<Policy>::new(), "other");
        let limiter = RateLimiter::new(limits.expect("limits"), store);
        for _ in 0..2 {
            assert!(limiter.check("alice").await.expect("decides").allowed());
        }
    });
    let outcomes: BTreeMap<_, _> = recorded
        .iter()
        .filter(|((_, labels), _)| labels.get("limit").is_some_and(|limit| limit == "open.shadow"))
        .filter(|((_, labels), value)| labels["store"] == "other" && **value > 0)
        .map(|((_, labels), value)| (labels["outcome"].as_str(), *value))
        .collect();
    assert_eq!(outcomes, BTreeMap::from([("allowed", 1), ("shadow-denied", 1)]));
}

fn daily() -> Limit<Policy> {
    limit("daily", "fixed-window 3/d", OnOutage::Open)
}

/// Each store that counts, around each other.
fn counting() -> impl Store<Policy> {
    let limits = Limits::new([daily()]).expect("limits");
    let fallback = Fallback::builder().build(MemoryStore::<Policy>::new(), &limits);
    DenialCache::new(Allotments::new(fallback.expect("choices")))
}

/// The name of each count, also of what has not happened.
fn counts() -> BTreeMap<&'static str, u64> {
    let mut counts = BTreeMap::new();
    counting().report_counts(&mut |name, count| {
        counts.insert(name, count);
    });
    counts
}

#[test]
fn what_the_stores_within_count_is_recorded_once_it_has_happened() {
    let recorded = recorded(async || {
        let store: Arc<dyn DynStore<Policy>> = Arc::new(counting());
        let store = Metrics::new(TopDenied::new(store, 10));
        let ask = async || {
            let limits = [daily()];
            let checks = checks(&limits, 1);
            store.apply(&Batch::one(&checks[0])).await.expect("decides")
        };
        while ask().await.allowed() {}
        assert!(!ask().await.allowed());
        store.record_counts();
    });
    let told: BTreeMap<_, _> =
        recorded.iter().map(|((name, labels), value)| (&**name, (labels.len(), *value))).collect();
    assert_eq!(told["ratelimit_cache_asked_total"], (1, 4));
    assert_eq!(told["ratelimit_cache_answered_total"], (1, 1));
    assert_eq!(told["ratelimit_cache_keys"], (1, 1));
    assert!(!told.contains_key("ratelimit_journal_keys"));
}

#[test]
fn a_series_begins_when_what_it_counts_has_happened() {
    let recorded = recorded(async || {
        let limits = Limits::new([daily()]).expect("limits");
        let limiter = RateLimiter::new(limits, Metrics::new(MemoryStore::<Policy>::new()));
        assert!(limiter.check("alice").await.expect("decides").allowed());
    });
    let names: Vec<_> = recorded.keys().map(|(name, _)| &**name).collect();
    assert_eq!(names, ["ratelimit_decisions_total", "ratelimit_duration_seconds"]);
}

/// The names that the code emits, with their labels.
fn emitted() -> BTreeMap<String, BTreeSet<String>> {
    let mut emitted: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for ((name, labels), _) in recorded(one_of_everything) {
        emitted.entry(name).or_default().extend(labels.into_keys());
    }
    emitted.extend(counts().into_keys().map(|name| (name.to_owned(), ["store".to_owned()].into())));
    emitted
}

/// What a Prometheus exporter makes of a histogram.
fn series_of(names: &BTreeMap<String, BTreeSet<String>>) -> BTreeMap<String, BTreeSet<String>> {
    let mut series = names.clone();
    if let Some(labels) = names.get("ratelimit_duration_seconds") {
        for end in ["_bucket", "_sum", "_count"] {
            let mut labels = labels.clone();
            if end == "_bucket" {
                labels.insert("le".into());
            }
            series.insert(format!("ratelimit_duration_seconds{end}"), labels);
        }
    }
    series
}

/// Every string under a key of this name, wherever it is.
fn texts<'v>(value: &'v Value, key: &str, found: &mut Vec<&'v str>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text) if name == key => found.push(text),
                    value => texts(value, key, found),
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| texts(value, key, found)),
        _ => {}
    }
}

fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

/// The labels that a query names: in selectors, and after `by`. Without what stands in quotes.
fn labels_of(query: &str) -> BTreeSet<String> {
    let unquoted: String = query.split('"').step_by(2).collect::<Vec<_>>().join("\"");
    let inside = |open: &str, close: char| -> Vec<String> {
        let parts = unquoted.split(open).skip(1).filter_map(|rest| rest.split(close).next());
        parts.map(str::to_owned).collect()
    };
    let selectors = inside("{", '}');
    let selected = selectors.iter().flat_map(|selector| selector.split(','));
    let selected = selected.filter_map(|matcher| words(matcher).next());
    let grouped = inside("by (", ')');
    let grouped = grouped.iter().flat_map(|labels| words(labels));
    selected.chain(grouped).map(str::to_owned).collect()
}

/// What a dashboard asks for that nothing reports.
fn wrong_queries(dashboard: &Value, emitted: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let series = series_of(emitted);
    let mut queries = Vec::new();
    texts(dashboard, "expr", &mut queries);
    texts(dashboard, "query", &mut queries);
    queries.retain(|query| query.contains("ratelimit"));
    let mut wrong = Vec::new();
    let mut asked = BTreeSet::new();
    for query in queries {
        let names: Vec<_> = words(query).filter(|word| word.starts_with("ratelimit_")).collect();
        let mut labels = labels_of(query);
        if query.starts_with("label_values(") {
            labels.extend(words(query).last().map(str::to_owned));
        }
        for name in names {
            match series.get(name) {
                None => wrong.push(format!("{name} is not reported: {query}")),
                Some(known) => wrong.extend(
                    labels.difference(known).map(|label| format!("{name} has no label {label}")),
                ),
            }
            asked.insert(name.to_owned());
        }
    }
    for name in emitted.keys() {
        if !asked.iter().any(|asked| asked.starts_with(name)) {
            wrong.push(format!("no panel shows {name}"));
        }
    }
    wrong
}

fn file(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect(path)
}

#[test]
fn the_dashboard_asks_for_what_is_reported() {
    let emitted = emitted();
    let text = file("dashboard.json");
    let dashboard: Value = serde_json::from_str(&text).expect("JSON");
    assert_eq!(wrong_queries(&dashboard, &emitted), Vec::<String>::new());

    // A name or a label that is not reported is found.
    for (right, wrong) in [
        ("ratelimit_decisions_total", "ratelimit_decision_total"),
        ("by (limit", "by (limits"),
        ("{source=", "{sources="),
    ] {
        assert!(text.contains(right), "{right}");
        let broken = serde_json::from_str(&text.replace(right, wrong)).expect("JSON");
        assert!(!wrong_queries(&broken, &emitted).is_empty(), "{wrong}");
    }
}

#[test]
fn the_documents_name_every_metric_and_its_labels() {
    let documents = file("../docs/operations.md");
    let rows = documents.lines().filter(|line| line.starts_with("| `ratelimit_"));
    let documented: BTreeMap<String, BTreeSet<String>> = rows
        .map(|row| {
            let columns: Vec<_> = row.split('|').map(str::trim).collect();
            let labels = columns[3].split('`').skip(1).step_by(2).map(str::to_owned);
            (columns[1].trim_matches('`').to_owned(), labels.collect())
        })
        .collect();
    assert_eq!(documented, emitted());
}
