//! What those that only observe hear, and that they pass on everything.

use std::collections::{BTreeMap, HashMap};
use std::num::NonZeroU64;
use std::sync::LazyLock;

use proptest::collection::vec;
use proptest::prelude::*;
use ratelimit_core::store::{Batch, Check, LogStore, Now, Op, SnapshotStore};
use ratelimit_core::{
    AnyAlgorithm, ErrorKind, Limit, ManualClock, OnOutage, RateLimiter, Record, Store, SyncStore,
};
use ratelimit_layers::{Fallback, Metrics, TopDenied, Traced};
use ratelimit_testkit::block_on;
use tracing::subscriber::NoSubscriber;
use tracing::{Dispatch, Level};
use tracing_subscriber::fmt::format::FmtSpan;

use crate::common::{
    BEGIN, Fake, Memory, Mode, UNAVAILABLE, checks, fallback, limit, limits, memory,
    paused_runtime, record_metrics,
};

type Counting = TopDenied<Memory>;

fn counting(keys: usize) -> Counting {
    TopDenied::new(memory(&ManualClock::new(BEGIN)), keys)
}

fn is_denied(store: &Counting, limit: &Limit<AnyAlgorithm>, key: &str) -> bool {
    !store.acquire_now(limit, key, 1).expect("decides").allowed()
}

/// Each way to ask reaches the store within in the same way and is heard once.
#[test]
fn an_observer_forwards_every_call_and_hears_of_each_decision() {
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
            let entries = block_on(store.logged(&limit, "alice", Now::Store)).expect("lists");
            assert_eq!(entries.len(), 4);
        }
        let (mut counts, mut due) = (Vec::new(), Vec::new());
        Store::<AnyAlgorithm>::report_counts(&store, &mut |name, count| counts.push((name, count)));
        Store::<AnyAlgorithm>::report_counts(&alone, &mut |name, count| due.push((name, count)));
        assert!(counts == due && !due.is_empty());
        assert_eq!(store.store().store().top(2)[0].count, 4);
    };
    let mut lines = Vec::new();
    let recorded = record_metrics(|| lines = record_trace(run));
    assert_eq!(lines.iter().filter(|line| line.ends_with("}: close")).count(), 8);
    let durations = recorded.iter().filter(|((name, _), _)| name == "ratelimit_duration_seconds");
    assert_eq!(durations.map(|(_, heard)| *heard).collect::<Vec<_>>(), [8]);
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

proptest! {
    #[test]
    fn a_count_is_never_too_low_and_too_high_by_at_most_over(
        keys in vec(prop_oneof![Just(0), 0..60_u8], 0..600),
    ) {
        let (store, limit) = (counting(32), limit("l", "fixed-window 1/h"));
        let mut due = HashMap::new();
        for key in keys {
            let key = format!("k{key}");
            if is_denied(&store, &limit, &key) {
                *due.entry(key).or_insert(0_u64) += 1;
            }
        }
        let top = store.top(usize::MAX);
        prop_assert!(top.len() <= 32);
        for denied in &top {
            let count = due.get(&*denied.key).copied().unwrap_or(0);
            prop_assert!(denied.count - denied.over <= count && count <= denied.count, "{:?}", denied);
        }
        // Of a flood of keys, the one that is denied more often than all others is there: each part
        // has room for two.
        let all: u64 = due.values().sum();
        let is_there = |key: &str| top.iter().any(|denied| &*denied.key == key);
        prop_assert!(due.iter().all(|(key, count)| count * 2 <= all || is_there(key)), "{:?}", top);
        // While there is room, every denial is counted, and no other.
        if due.len() <= 2 {
            prop_assert_eq!(top.iter().map(|d| d.count).sum::<u64>(), all);
        }
    }
}

/// A subscriber that hears nothing and stays. Beside a single one, `tracing` keeps for good what
/// the thread that met a span first hears of it: nothing, in a test that does not listen.
static SILENT: LazyLock<Dispatch> = LazyLock::new(|| Dispatch::new(NoSubscriber::new()));

/// What is traced while this runs, by line: a span when it ends, and each event within its span.
fn record_trace(run: impl FnOnce()) -> Vec<String> {
    LazyLock::force(&SILENT);
    let file = tempfile::NamedTempFile::new().expect("a file");
    let lines = tracing_subscriber::fmt().with_max_level(Level::DEBUG).without_time();
    let lines = lines.with_span_events(FmtSpan::CLOSE).with_target(false).with_ansi(false);
    let lines = lines.with_writer(file.reopen().expect("a file"));
    tracing::subscriber::with_default(lines.finish(), run);
    let lines = std::fs::read_to_string(file.path()).expect("text");
    lines.lines().map(|line| line.trim().to_owned()).collect()
}

#[test]
fn a_warning_is_an_event_at_most_once_per_second_and_an_unlimited_request_warns_of_nothing() {
    let begin = std::time::Instant::now();
    let run = || {
        let runtime = paused_runtime();
        let warning = |name: &str, words, on_outage| {
            let limit = limit(name, words).on_outage(on_outage);
            limit.warn_at_percent(80).expect("a percentage")
        };
        let store = Traced::new(memory(&ManualClock::new(BEGIN)));
        let own = warning("own", "fixed-window 5/d", OnOutage::Open);
        for _ in 0..5 {
            let _ = store.acquire_now(&own, "alice", 1).expect("decides");
            let check = Check { limit: &own, key: "alice", cost: 9 };
            let _ = store.apply_now(&Batch::one(&check).op(Op::Peek)).expect("decides");
        }
        let clock = ManualClock::new(BEGIN);
        // This node's share is a third.
        let limits = [
            warning("open", "fixed-window 5/d", OnOutage::Open),
            warning("local", "fixed-window 15/d", OnOutage::Local),
        ];
        let store = fallback(Fallback::builder(), Fake::new(&clock), &clock, &limits);
        store.store().set(UNAVAILABLE);
        let store = Traced::new(store);
        for limit in limits.iter().flat_map(|limit| [limit; 5]) {
            let check = Check { limit, key: "alice", cost: 4 };
            let _ = runtime.block_on(store.apply(&Batch::one(&check))).expect("decides");
        }
    };
    let lines = record_trace(run);
    let told: Vec<_> = lines.iter().filter(|line| line.contains("nearly used up")).collect();
    let is_slow = begin.elapsed() > std::time::Duration::from_secs(1);
    assert!(told.len() == 2 || is_slow, "{told:?}");
    for (line, name) in told.iter().zip(["own", "local"]) {
        assert!(line.contains(&format!("limit=\"{name}\" percent=80 capacity=")), "{line}");
        assert!(line.contains("WARN") && line.contains("remaining=1 requests=1"), "{line}");
    }
}

#[test]
fn each_change_of_a_record_is_one_event_that_says_who_for_whom_and_until_when() {
    let run = || {
        block_on(async {
            let limits = limits(&[limit("api", "gcra 10/s burst 20").overridable()]);
            let store = Traced::new(memory(&ManualClock::new(BEGIN))).acting_as("ops");
            // Those who observe hear of it wherever they stand.
            let limiter = RateLimiter::new(limits, Metrics::new(TopDenied::new(store, 16)));
            let until = BEGIN.saturating_add_us(7);
            let double = Record::numbers("gcra 20/s burst 40".parse().expect("numbers"));
            let of = |record| limiter.set_record("alice", "api", record);
            let _ = of(double.until(until)).await.expect("set");
            // It would lower what stands, and is refused.
            let _ = of(Record::blocked().forever()).await.expect_err("refused");
            let blocked = Record::blocked().forever();
            let _ = limiter.replace_record("alice", "api", blocked.clone()).await.expect("set");
            // What was seen does not stand any more.
            let unchanged = limiter.set_record_if_unchanged("alice", "api", None, blocked).await;
            assert!(!unchanged.expect("asked"));
            let _ = limiter.clear_record("alice", "api").await.expect("cleared");
            // There is nothing to clear.
            let _ = limiter.clear_record("alice", "api").await.expect("cleared");
            let _ = limiter.clear_record("bob", "api").await.expect("cleared");
        });
    };
    let told: Vec<_> = record_trace(run);
    let until_us = BEGIN.as_us() + 7;
    let of_alice = "by=\"ops\" limit=\"api\" key=\"alice\"";
    let due = [
        format!(
            "INFO a record was set {of_alice} change=\"numbers\" capacity=40 full_after_us=2000000 until_us={until_us}"
        ),
        format!("INFO a record was replaced {of_alice} change=\"blocked\" before=\"numbers\""),
        format!("INFO a record was cleared {of_alice} before=\"blocked\""),
    ];
    assert_eq!(told, due);
}

#[test]
fn each_decision_is_a_span_and_each_error_an_event_at_most_once_per_second() {
    let begin = std::time::Instant::now();
    let run = async {
        let clock = ManualClock::new(BEGIN);
        let both = [
            limit("narrow", "fixed-window 1/d").on_outage(OnOutage::Closed),
            limit("wide", "fixed-window 9/d").on_outage(OnOutage::Local),
        ];
        let settings = Fallback::builder().failures(2);
        let within = fallback(settings, Fake::new(&clock), &clock, &both);
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
    };
    let lines = record_trace(|| paused_runtime().block_on(run));
    let spans: Vec<_> = lines.iter().filter_map(|line| line.strip_suffix("}: close")).collect();
    assert_eq!(spans.len(), 1_005);
    let asked = r#"DEBUG ratelimit{op=acquire limits="narrow,wide""#;
    assert_eq!(spans[0], format!(r#"{asked} allowed=true source="store""#));
    assert_eq!(spans[2], asked);
    for (nth, source) in [(1, "store"), (1_004, "fallback")] {
        let denied = format!(r#"{asked} allowed=false source="{source}" denied_by="narrow" "#);
        assert!(spans[nth].starts_with(&(denied + "retry_after_us=")), "{}", spans[nth]);
    }
    let told = |what: &str| lines.iter().filter(|line| line.contains(what)).count() as u64;
    assert_eq!(told("alice"), 0, "a key is no field");
    let errors = told("kind=Config");
    assert_eq!((errors, told(&asked.replace("DEBUG", "WARN"))), (told("not decided"), errors + 1));
    assert!(errors >= 1 && errors <= 1 + begin.elapsed().as_secs(), "{errors}");
    assert_eq!(told("breaker is open"), 1);
}

/// What is due of each limit, by its name: how often it allowed, denied, and so on, and which keys
/// it denied how often.
#[derive(Debug, Default, PartialEq, Eq)]
struct ByName {
    outcomes: BTreeMap<(String, String), u64>,
    denied: BTreeMap<(String, String), u64>,
    /// Of each request with its limits: which limits it had, and which denied.
    spans: Vec<(String, String)>,
}

/// Limits that differ in all: rate, identifiers, and whether they are enforced.
fn differing() -> [Limit<AnyAlgorithm>; 4] {
    [
        limit("address", "fixed-window 4/h").by(["ip"]).expect("a name"),
        limit("user", "gcra 3/h burst 3").by(["user"]).expect("a name"),
        limit("both", "sliding-log 2/h").by(["ip", "user"]).expect("names"),
        limit("watched", "fixed-window 2/h").by(["ip"]).expect("a name").shadow(),
    ]
    .map(|limit| limit.on_outage(OnOutage::Local))
}

/// The requests of a seed: who, with or without a user, and at what cost.
fn callers(seed: u64) -> Vec<(Vec<(&'static str, &'static str)>, u64)> {
    let mut random = fastrand::Rng::with_seed(seed);
    (0..40)
        .map(|_| {
            let ip = ("ip", ["192.0.2.1", "192.0.2.2"][random.usize(..2)]);
            let user = ("user", ["alice", "bob"][random.usize(..2)]);
            (if random.u8(..4) == 0 { vec![ip] } else { vec![ip, user] }, random.u64(1..3))
        })
        .collect()
}

/// What the verdicts of a limiter over a store without layers say, by name.
fn expected_by_name(all: &[Limit<AnyAlgorithm>], seed: u64) -> ByName {
    let limiter = RateLimiter::new(limits(all), memory(&ManualClock::new(BEGIN)));
    let mut due = ByName::default();
    for (caller, cost) in callers(seed) {
        let verdict = limiter.check_n_now(&caller[..], cost).expect("decides");
        let mut count = |name: &str, outcome: &str| {
            *due.outcomes.entry((name.to_owned(), outcome.to_owned())).or_default() += 1;
        };
        let (mut asked, mut denied) = (Vec::new(), Vec::new());
        for one in limiter.named(&verdict) {
            asked.push(one.name().to_owned());
            count(
                one.name(),
                match (one.allowed, verdict.allowed()) {
                    (true, true) => "allowed",
                    (true, false) => "spared",
                    (false, _) => "denied",
                },
            );
            if !one.allowed {
                denied.push(one.name().to_owned());
                let key = one.configured().key_for(&caller[..]).expect("it applies");
                *due.denied.entry((one.name().to_owned(), key.into())).or_default() += 1;
            }
        }
        due.spans.push((asked.join(","), denied.join(",")));
        for one in limiter.named(&verdict).shadow() {
            count(one.name(), if one.allowed { "allowed" } else { "shadow-denied" });
            let denied = if one.allowed { "" } else { one.name() };
            due.spans.push((one.name().to_owned(), denied.to_owned()));
        }
    }
    due
}

/// What the observers of the same requests tell.
fn observe_by_name(all: &[Limit<AnyAlgorithm>], seed: u64, is_away: bool) -> ByName {
    let mut told = ByName::default();
    let (mut lines, mut sums) = (Vec::new(), BTreeMap::new());
    let recorded = record_metrics(|| {
        lines = record_trace(|| {
            paused_runtime().block_on(async {
                let clock = ManualClock::new(BEGIN);
                let settings = Fallback::builder().nodes(NonZeroU64::MIN).clock(clock.clone());
                let within = settings.build(Fake::new(&clock), &limits(all)).expect("choices");
                within.store().set(if is_away { UNAVAILABLE } else { Mode::Answers });
                let store = Metrics::new(Traced::new(TopDenied::new(within, 1_000)));
                let limiter = RateLimiter::new(limits(all), store);
                for (caller, cost) in callers(seed) {
                    let _ = limiter.check_n(&caller[..], cost).await.expect("decides");
                }
                let top = limiter.store().store().store();
                for denied in top.top(1_000) {
                    let key = (denied.limit.into_string(), denied.key.into_string());
                    told.denied.insert(key, denied.count);
                }
                for count in top.store().outage_counts() {
                    let all = count.allowed + count.denied + count.spared;
                    assert!(sums.insert(count.limit.to_string(), all).is_none());
                }
            });
        });
    });
    let source = if is_away { "fallback" } else { "store" };
    let mut outages = BTreeMap::new();
    for ((name, labels), count) in recorded {
        let key = || (labels["limit"].clone(), labels["outcome"].clone());
        match &*name {
            "ratelimit_decisions_total" => {
                assert_eq!(labels["source"], source);
                told.outcomes.insert(key(), count);
            }
            "ratelimit_outage_decisions_total" => _ = outages.insert(key(), count),
            _ => {}
        }
    }
    // The fallback tells the same in two ways, and nothing of what the store decides.
    let decided = if is_away { told.outcomes.clone() } else { BTreeMap::new() };
    assert_eq!(outages, decided);
    let mut due: BTreeMap<String, u64> = BTreeMap::new();
    for ((limit, _), count) in decided {
        *due.entry(limit).or_default() += count;
    }
    assert_eq!(sums, due);
    let field = |line: &str, name: &str| {
        let value = line.split_once(&format!(" {name}=\"")).map(|(_, rest)| rest);
        value.and_then(|rest| rest.split('"').next()).unwrap_or_default().to_owned()
    };
    let spans = lines.iter().filter(|line| line.ends_with("}: close"));
    told.spans = spans.map(|line| (field(line, "limits"), field(line, "denied_by"))).collect();
    told
}

/// Of limits that differ, in every order, each denies in its turn, and some do not apply: all that
/// observers tell has the name that the verdict has.
#[test]
fn whatever_is_told_of_a_limit_has_the_name_that_the_verdict_has() {
    let all = differing();
    for (seed, order) in (0..).zip(orders(&all)) {
        let due = expected_by_name(&order, seed);
        for limit in &all {
            let denies = |((name, outcome), _): (&(String, String), &u64)| {
                name == limit.name() && outcome.ends_with("denied")
            };
            assert!(due.outcomes.iter().any(denies), "{} denies: {due:?}", limit.name());
        }
        for is_away in [false, true] {
            assert_eq!(observe_by_name(&order, seed, is_away), due, "{order:?}, away: {is_away}");
        }
    }
}

/// These limits in every order.
fn orders(all: &[Limit<AnyAlgorithm>]) -> Vec<Vec<Limit<AnyAlgorithm>>> {
    let [first, rest @ ..] = all else { return vec![Vec::new()] };
    let inserted = |order: &Vec<Limit<AnyAlgorithm>>, at: usize| {
        let mut order = order.clone();
        order.insert(at, first.clone());
        order
    };
    let orders = orders(rest);
    let each = orders.iter().flat_map(|order| (0..=order.len()).map(move |at| (order, at)));
    each.map(|(order, at)| inserted(order, at)).collect()
}
