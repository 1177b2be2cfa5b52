//! What is reported to the crate `metrics` is what happened, and what the documents and the
//! dashboard say.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use ratelimit_core::store::{Batch, DynSnapshotStore, Op};
use ratelimit_core::{AnyAlgorithm, DynStore, ErrorKind, ManualClock, OnOutage, Store};
use ratelimit_layers::{Allotments, DenialCache, Fallback, Metrics};

use crate::common::{
    BEGIN, ID, Labels, Mode, UNAVAILABLE, ask, ask_all, checks, limit, limits, memory,
    paused_runtime, record_metrics,
};
use crate::fallback::layered_with;

/// One of everything: allowed, denied and spared decisions of both sources, errors, an outage and
/// its end.
async fn one_of_everything() {
    let limits = [
        limit("narrow", "fixed-window 1/d").on_outage(OnOutage::Open),
        limit("wide", "fixed-window 9/d").on_outage(OnOutage::Local),
        limit("strict", "fixed-window 5/d").on_outage(OnOutage::Closed),
    ];
    let (store, _) = layered_with(&limits, |settings| settings);
    let store = Metrics::new(store);
    let asks = checks(&limits, "alice", 1);
    // `narrow` denies, and spares `wide`; without the store the share of `wide` allows three.
    for (mode, count) in
        [(Mode::Answers, 2), (Mode::Fails(ErrorKind::Corrupt), 1), (UNAVAILABLE, 5)]
    {
        store.store().store().set(mode);
        for _ in 0..count {
            let _decided = store.apply(&Batch::new(&asks[..2]).expect("distinct")).await;
        }
    }
    let _ = store.apply(&Batch::new(&asks).expect("distinct")).await.expect("decides");
    store.store().store().set(Mode::Answers);
    tokio::time::advance(Duration::from_secs(1)).await;
    let _ = store.apply(&Batch::one(&asks[1]).op(Op::Peek)).await.expect("decides");
    let shadow = [limit("shadow", "fixed-window 1/d").on_outage(OnOutage::Open).shadow()];
    for _ in 0..2 {
        let _counted = ask_all(&store, &shadow, "alice", 1).await;
    }
    let warning = limit("warning", "fixed-window 2/d").on_outage(OnOutage::Open);
    let warning = warning.warn_at_percent(50).expect("a percentage");
    assert!(ask(&store, &warning, "alice", 1).await.allowed());
    // The second of two forgives.
    let two = [("roomy", "fixed-window 99/d debt 2"), ("owing", "fixed-window 3/d debt 2")];
    let two = two.map(|(name, words)| limit(name, words).on_outage(OnOutage::Open));
    let asks = checks(&two, "alice", 9);
    let force = Batch::new(&asks).expect("distinct").op(Op::Force);
    let forced = store.apply(&force).await.expect("decides");
    assert_eq!((forced.owed(), forced.forgiven()), (2, 4));
}

#[test]
fn decisions_are_counted_by_limit_outcome_and_source() {
    let recorded = record_metrics(|| paused_runtime().block_on(one_of_everything()));
    // The sum of the series of this name that have all of these labels.
    let of = |name: &str, labels: &str| -> u64 {
        let has = |all: &Labels| {
            let mut wanted = labels.split_whitespace().filter_map(|label| label.split_once('='));
            wanted.all(|(key, value)| all.get(key).is_some_and(|told| told == value))
        };
        let same = recorded
            .iter()
            .filter(|((told, all), _)| *told == format!("ratelimit{name}") && has(all));
        same.map(|(_, value)| value).sum()
    };
    for (name, labels, due) in [
        ("_decisions_total", "limit=narrow source=store outcome=allowed store=store", 1),
        ("_decisions_total", "limit=narrow source=store outcome=denied", 1),
        ("_decisions_total", "limit=wide source=store outcome=allowed", 1),
        ("_decisions_total", "limit=wide source=store outcome=spared", 1),
        ("_decisions_total", "limit=narrow source=fallback outcome=allowed", 3),
        ("_decisions_total", "limit=narrow source=fallback outcome=spared", 3),
        ("_decisions_total", "limit=wide source=fallback outcome=allowed", 3),
        ("_decisions_total", "limit=wide source=fallback outcome=denied", 3),
        ("_decisions_total", "limit=shadow outcome=allowed", 1),
        ("_decisions_total", "limit=shadow outcome=shadow-denied", 1),
        ("_forgiven_total", "limit=owing", 4),
        ("_forgiven_total", "", 4),
        ("_warnings_total", "limit=warning store=store", 1),
        ("_warnings_total", "", 1),
        ("_errors_total", "op=acquire kind=corrupt", 1),
        ("_duration_seconds", "op=acquire source=store", 5),
        ("_duration_seconds", "op=acquire source=fallback", 6),
        ("_duration_seconds", "op=peek source=store", 1),
        ("_outage_decisions_total", "choice=local outcome=denied", 3),
        ("_breaker_state", "", 0),
        ("_breaker_transitions_total", "to=open", 1),
        ("_breaker_transitions_total", "to=half-open", 1),
        ("_breaker_transitions_total", "to=closed", 2),
    ] {
        assert_eq!(of(name, labels), due, "{name} {labels}");
    }
}

/// Each store that counts, around each other, and around stores that are chosen at run time.
fn counting() -> Arc<dyn DynStore<AnyAlgorithm>> {
    let daily = limit("daily", "fixed-window 3/d").on_outage(OnOutage::Open);
    let chosen: Arc<dyn DynSnapshotStore<AnyAlgorithm>> =
        Arc::new(memory(&ManualClock::new(BEGIN)));
    let within = Allotments::new(DenialCache::<_, AnyAlgorithm>::new(chosen));
    Arc::new(Fallback::builder().build(within, &limits(&[daily])).expect("choices"))
}

#[test]
fn the_counts_of_the_stores_within_are_recorded_from_0_on() {
    let recorded = record_metrics(|| {
        let store = Metrics::new(counting());
        let daily = limit("daily", "fixed-window 3/d").on_outage(OnOutage::Open);
        let runtime = paused_runtime();
        let is_allowed = || runtime.block_on(ask(&store, &daily, "alice", 1)).allowed();
        while is_allowed() {}
        assert!(!is_allowed());
        let reserved = checks(std::slice::from_ref(&daily), "bob", 1);
        let reserve = Batch::one(&reserved[0]).id(ID);
        assert!(runtime.block_on(store.apply(&reserve)).expect("decides").allowed());
        store.record_counts();
    });
    let told: BTreeMap<_, _> =
        recorded.iter().map(|((name, labels), value)| (&**name, (labels.len(), *value))).collect();
    assert_eq!(told["ratelimit_cache_asked_total"], (1, 5));
    assert_eq!(told["ratelimit_cache_answered_total"], (1, 1));
    assert_eq!(told["ratelimit_cache_keys"], (1, 1));
    // Of the store in the middle, and not of the fallback's own one.
    assert_eq!(told["ratelimit_reservations"], (1, 1));
    // Nothing was forgotten yet: the rate of a series that began later would miss its first value.
    assert_eq!(told["ratelimit_journal_keys"], (1, 0));
    assert_eq!(told["ratelimit_journal_forgotten_total"], (1, 0));
}

#[test]
fn the_transitions_of_a_breaker_are_recorded_from_0_on() {
    let recorded = record_metrics(|| drop(counting()));
    let transitions = recorded.iter().filter(|((name, _), _)| name.contains("transitions"));
    let told: BTreeMap<_, _> =
        transitions.map(|((_, labels), value)| (&*labels["to"], *value)).collect();
    assert_eq!(told, [("closed", 1), ("half-open", 0), ("open", 0)].into());
}

#[test]
fn the_warnings_of_a_limit_are_recorded_from_its_first_decision_on() {
    let recorded = record_metrics(|| {
        let store = Metrics::new(memory(&ManualClock::new(BEGIN)));
        let warning = limit("warning", "fixed-window 9/d").warn_at_percent(80).expect("a share");
        assert!(paused_runtime().block_on(ask(&store, &warning, "alice", 1)).allowed());
        let silent = limit("silent", "fixed-window 9/d");
        assert!(paused_runtime().block_on(ask(&store, &silent, "alice", 1)).allowed());
    });
    let warnings = recorded.iter().filter(|((name, _), _)| name.contains("warnings"));
    let told: BTreeMap<_, _> =
        warnings.map(|((_, labels), value)| (&*labels["limit"], *value)).collect();
    assert_eq!(told, [("warning", 0)].into());
}

/// The names that the code emits, with their labels; of counts also what has not happened.
fn emitted_names() -> BTreeMap<String, BTreeSet<String>> {
    let mut emitted: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for ((name, labels), _) in record_metrics(|| paused_runtime().block_on(one_of_everything())) {
        emitted.entry(name).or_default().extend(labels.into_keys());
    }
    Store::<AnyAlgorithm>::report_counts(&counting(), &mut |name, _| {
        emitted.insert(name.to_owned(), ["store".to_owned()].into());
    });
    emitted
}

fn file(path: &str) -> String {
    std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join(path)).expect(path)
}

/// The words of a text: names, labels, and all else.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split(|c: char| !(c.is_alphanumeric() || c == '_')).filter(|word| !word.is_empty())
}

/// What a dashboard asks for that nothing reports, and what it does not show.
fn wrong_words(dashboard: &str, emitted: &BTreeMap<String, BTreeSet<String>>) -> Vec<String> {
    let mut wrong: BTreeSet<String> = emitted.keys().cloned().collect();
    // What a Prometheus exporter makes of a histogram.
    let known_as = |word: &str| {
        let ends = ["_bucket", "_sum", "_count"];
        let histogram = ends.iter().find_map(|end| word.strip_suffix(end));
        emitted.get_key_value(word).or_else(|| emitted.get_key_value(histogram?))
    };
    for line in dashboard.lines().filter(|line| line.contains("ratelimit_")) {
        let names: Vec<_> = words(line).filter(|word| word.starts_with("ratelimit_")).collect();
        let known: Vec<_> = names.iter().filter_map(|name| known_as(name)).collect();
        let unknown = names.iter().filter(|name| known_as(name).is_none());
        wrong.extend(unknown.map(|name| format!("{name} is not reported")));
        // A label stands before what it is compared with, and between the brackets after `by`.
        let by = line.split("by (").skip(1).filter_map(|rest| rest.split(')').next());
        let compared = line
            .split(['{', ','])
            .filter_map(|part| part.split_once("=~").or(part.split_once("=\\")));
        for label in by.flat_map(words).chain(compared.filter_map(|(label, _)| words(label).last()))
        {
            if label != "le" && !known.iter().all(|(_, labels)| labels.contains(label)) {
                wrong.insert(format!("no label {label}: {line}"));
            }
        }
        for (name, _) in known {
            wrong.remove(name);
        }
    }
    wrong.into_iter().collect()
}

#[test]
fn the_dashboard_asks_for_what_is_reported() {
    let (emitted, dashboard) = (emitted_names(), file("dashboard.json"));
    assert_eq!(wrong_words(&dashboard, &emitted), Vec::<String>::new());
    for (right, wrong) in [
        ("ratelimit_decisions_total", "ratelimit_decision_total"),
        ("by (limit", "by (limits"),
        ("{source=", "{sources="),
    ] {
        assert!(dashboard.contains(right), "{right}");
        assert!(!wrong_words(&dashboard.replace(right, wrong), &emitted).is_empty(), "{wrong}");
    }
}

#[test]
fn the_documents_name_every_metric_and_its_labels() {
    let documents = file("docs/metrics.md");
    let rows = documents.lines().filter(|line| line.starts_with("| `ratelimit_"));
    let documented: BTreeMap<String, BTreeSet<String>> = rows
        .map(|row| {
            let columns: Vec<_> = row.split('|').map(str::trim).collect();
            let labels = columns[3].split('`').skip(1).step_by(2).map(str::to_owned);
            (columns[1].trim_matches('`').to_owned(), labels.collect())
        })
        .collect();
    assert_eq!(documented, emitted_names());
}
