//! [`Metrics`]: a store that reports its decisions to the crate `metrics`. `docs/operations.md` lists the names and labels.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, OnceLock};
use std::time::Instant;

use metrics::{Counter, Histogram, counter, gauge, histogram};
use ratelimit_core::{
    Algorithm, Batch, Check, EntryStore, ErrorKind, KeepsEntries, Limit, Now, OnOutage, Op,
    SnapshotStore, Source, Store, StoreError, SyncStore, Verdict, WindowEntry, WithSnapshot,
};

use crate::by_limit::ByLimit;
use crate::fallback::BreakerState;
use crate::fallback::counts::Outcome;
use crate::pace::Pace;
use crate::{lock, source_name};

const DECISIONS: &str = "ratelimit_decisions_total";
const ERRORS: &str = "ratelimit_errors_total";
const DURATION: &str = "ratelimit_duration_seconds";
const BREAKER_STATE: &str = "ratelimit_breaker_state";
const BREAKER_TRANSITIONS: &str = "ratelimit_breaker_transitions_total";
const OUTAGE_DECISIONS: &str = "ratelimit_outage_decisions_total";

const OUTCOMES: usize = Outcome::ShadowDenied as usize + 1;
const SOURCES: usize = Source::Allotment as usize + 1;
const OPS: usize = 7;

/// The circuit breaker of this store is now in this state.
pub(crate) fn breaker(store: &str, state: BreakerState) {
    let store = store.to_owned();
    gauge!(BREAKER_STATE, "store" => store.clone()).set(state.level());
    counter!(BREAKER_TRANSITIONS, "store" => store, "to" => state.to_string()).increment(1);
}

/// A limit was decided without this store.
pub(crate) fn outage(store: &str, limit: &str, choice: OnOutage, outcome: Outcome) {
    counter!(
        OUTAGE_DECISIONS,
        "store" => store.to_owned(),
        "limit" => limit.to_owned(),
        "choice" => choice.name(),
        "outcome" => outcome.name(),
    )
    .increment(1);
}

/// A store over any other that reports its decisions to the crate `metrics`: by limit and outcome, with their latency and
/// source.
///
/// A limit that would have allowed a request that another limit denied is counted as `spared`, not as `denied`, and a shadow limit that would have
/// denied as `shadow-denied`. Only
/// [`Op::Acquire`] counts as a decision; latency and errors are reported of every operation. Install the recorder before
/// the first decision: a limit's counters are looked up once. A series begins when what it counts has happened.
///
/// It also reports what the stores within it [count](Store::report_counts) of their own work, at most once per second, with
/// a request: [`record_counts`](Self::record_counts) does it at once.
///
/// ```
/// use ratelimit_core::{Gcra, Limit, Limits, RateLimiter};
/// use ratelimit_layers::Metrics;
/// use ratelimit_memory::MemoryStore;
///
/// let limits = Limits::new([Limit::new("login", Gcra::new("5/m".parse()?, 5)?)?])?;
/// let limiter = RateLimiter::new(limits, Metrics::new(MemoryStore::new()));
/// assert!(limiter.check_now("alice")?.allowed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Put it around a [`Fallback`](crate::Fallback), so that the decisions without the store are counted too. The state of a
/// fallback's circuit breaker is reported by the fallback itself.
#[derive(Debug)]
pub struct Metrics<S> {
    store: S,
    name: Box<str>,
    by_limit: ByLimit<LimitCounters>,
    /// By operation and source.
    durations: [[OnceLock<Duration>; SOURCES]; OPS],
    /// The names of the counts that were ever more than 0.
    counted: Mutex<BTreeSet<&'static str>>,
    counts_due: Pace,
}

/// The counters of one limit: by source, then by outcome.
type LimitCounters = [[OnceLock<Cached<Counter>>; OUTCOMES]; SOURCES];

type Duration = Cached<Histogram>;

/// A handle of the recorder, which does not all show what they are.
struct Cached<T>(T);

impl<T> std::fmt::Debug for Cached<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Cached")
    }
}

impl<S> Metrics<S> {
    /// Reports the decisions of this store, under the name `store`.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self::named(store, "store")
    }

    /// Reports the decisions of this store under this name, the label `store`, which tells several in one process apart.
    #[must_use]
    pub fn named(store: S, name: &str) -> Self {
        Self {
            store,
            name: name.into(),
            by_limit: ByLimit::default(),
            durations: Default::default(),
            counted: Mutex::default(),
            counts_due: Pace::new(),
        }
    }

    /// Returns the wrapped store.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// Records what the stores within this one count of their own work, now: before a program ends, or when an exporter asks
    /// while there are no requests.
    pub fn record_counts<A: Algorithm>(&self)
    where
        S: Store<A>,
    {
        // Two stores of one type count together.
        let mut counts: BTreeMap<&'static str, u64> = BTreeMap::new();
        self.store.report_counts(&mut |name, count| {
            let sum = counts.entry(name).or_default();
            *sum = sum.saturating_add(count);
        });
        let mut counted = lock(&self.counted);
        for (name, count) in counts {
            if count > 0 {
                counted.insert(name);
            } else if !counted.contains(name) {
                continue;
            }
            let store = String::from(&*self.name);
            if name.ends_with("_total") {
                counter!(name, "store" => store).absolute(count);
            } else {
                gauge!(name, "store" => store).set(u32::try_from(count).unwrap_or(u32::MAX));
            }
        }
    }

    fn counter(&self, limit: &str, source: Source, outcome: Outcome) -> Cached<Counter> {
        Cached(counter!(
            DECISIONS,
            "store" => String::from(&*self.name),
            "limit" => limit.to_owned(),
            "outcome" => outcome.name(),
            "source" => source_name(source),
        ))
    }

    fn took(&self, op: Op, source: Source, since: Instant) {
        let duration = self.durations[op_place(op)][source as usize].get_or_init(|| {
            Cached(histogram!(
                DURATION,
                "store" => String::from(&*self.name),
                "op" => op.to_string(),
                "source" => source_name(source),
            ))
        });
        duration.0.record(since.elapsed());
    }

    fn note<A: Algorithm>(
        &self,
        batch: &Batch<'_, A>,
        since: Instant,
        said: Result<&Verdict, &S::Error>,
    ) where
        S: Store<A>,
    {
        if self.counts_due.is_due(since) {
            self.record_counts();
        }
        let op = batch.operation();
        let verdict = match said {
            Ok(verdict) => verdict,
            Err(error) => {
                counter!(
                    ERRORS,
                    "store" => String::from(&*self.name),
                    "op" => op.to_string(),
                    "kind" => kind_name(error.kind()),
                )
                .increment(1);
                return;
            }
        };
        let source = verdict.source();
        self.took(op, source, since);
        if op != Op::Acquire {
            return;
        }
        for (check, decision) in batch.checks().iter().zip(verdict.decisions()) {
            let outcome = Outcome::of(check.limit, decision, verdict.allowed());
            let limit = check.limit.name();
            self.by_limit.with(limit, LimitCounters::default, |counters| {
                let counter = &counters[source as usize][outcome as usize];
                counter.get_or_init(|| self.counter(limit, source, outcome)).0.increment(1);
            });
        }
    }
}

const fn op_place(op: Op) -> usize {
    match op {
        Op::Acquire => 0,
        Op::Peek => 1,
        Op::Force => 2,
        Op::Refund => 3,
        Op::Reset => 4,
        Op::Settle => 5,
        Op::Renew => 6,
    }
}

const fn kind_name(kind: ErrorKind) -> &'static str {
    match kind {
        ErrorKind::Unavailable => "unavailable",
        ErrorKind::Indeterminate => "indeterminate",
        ErrorKind::Contended => "contended",
        ErrorKind::CrossSlot => "cross-slot",
        ErrorKind::Unsupported => "unsupported",
        ErrorKind::Corrupt => "corrupt",
        ErrorKind::Invalid => "invalid",
        ErrorKind::Config => "config",
        _ => "other",
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm, S: Store<A>> Store<A> for Metrics<S> {
    type Error = S::Error;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, S::Error> {
        let since = Instant::now();
        let said = self.store.apply(batch).await;
        self.note(batch, since, said.as_ref());
        said
    }

    fn report_counts(&self, report: &mut dyn FnMut(&'static str, u64)) {
        self.store.report_counts(report);
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm, S: SnapshotStore<A>> SnapshotStore<A> for Metrics<S> {
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, A>,
    ) -> Result<WithSnapshot<A::State>, S::Error> {
        let since = Instant::now();
        let said = self.store.apply_with_snapshot(batch).await;
        self.note(batch, since, said.as_ref().map(|(verdict, _)| verdict));
        said
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm, S: SyncStore<A>> SyncStore<A> for Metrics<S> {
    fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, S::Error> {
        let since = Instant::now();
        let said = self.store.apply_now(batch);
        self.note(batch, since, said.as_ref());
        said
    }

    fn acquire_now(&self, limit: &Limit<A>, key: &str, cost: u64) -> Result<Verdict, S::Error> {
        let since = Instant::now();
        let said = self.store.acquire_now(limit, key, cost);
        self.note(&Batch::one(&Check { limit, key, cost }), since, said.as_ref());
        said
    }

    /// The latency of each key is counted from the key before it.
    fn acquire_each_now(
        &self,
        limit: &Limit<A>,
        keys: &[&str],
        cost: u64,
        mut told: impl FnMut(usize, Result<Verdict, S::Error>),
    ) {
        let mut since = Instant::now();
        self.store.acquire_each_now(limit, keys, cost, |place, said| {
            let key = keys.get(place).copied().unwrap_or_default();
            self.note(&Batch::one(&Check { limit, key, cost }), since, said.as_ref());
            told(place, said);
            since = Instant::now();
        });
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: KeepsEntries, S: EntryStore<A>> EntryStore<A> for Metrics<S> {
    fn entries(
        &self,
        limit: &Limit<A>,
        key: &str,
        now: Now,
    ) -> impl Future<Output = Result<Vec<WindowEntry>, S::Error>> + Send {
        self.store.entries(limit, key, now)
    }
}
