//! [`Metrics`]: a store that reports its decisions to the crate `metrics`. `docs/operations.md` lists the names and labels.

use std::sync::OnceLock;
use std::time::Instant;

use metrics::{Counter, Histogram, counter, gauge, histogram};
use ratelimit_core::{
    Algorithm, Batch, Check, EntryStore, ErrorKind, KeepsEntries, Limit, Now, OnOutage, Op,
    SnapshotStore, Source, Store, StoreError, SyncStore, Verdict, WindowEntry, WithSnapshot,
};

use crate::by_limit::ByLimit;
use crate::fallback::BreakerState;
use crate::fallback::counts::Outcome;
use crate::source_name;

const DECISIONS: &str = "ratelimit_decisions_total";
const ERRORS: &str = "ratelimit_errors_total";
const DURATION: &str = "ratelimit_duration_seconds";
const BREAKER_STATE: &str = "ratelimit_breaker_state";
const BREAKER_TRANSITIONS: &str = "ratelimit_breaker_transitions_total";
const OUTAGE_DECISIONS: &str = "ratelimit_outage_decisions_total";

/// In the order of the variants.
const OUTCOMES: [Outcome; 4] =
    [Outcome::Allowed, Outcome::Denied, Outcome::Spared, Outcome::ShadowDenied];
/// In the order of the variants.
const SOURCES: [Source; 4] = [Source::Store, Source::Fallback, Source::Cache, Source::Allotment];
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
/// the first decision: a limit's counters are looked up once.
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
    durations: [[OnceLock<Duration>; SOURCES.len()]; OPS],
}

/// The counters of one limit: by source, then by outcome.
#[derive(Debug)]
struct LimitCounters([[Cached<Counter>; OUTCOMES.len()]; SOURCES.len()]);

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
        let (by_limit, durations) = (ByLimit::default(), Default::default());
        Self { store, name: name.into(), by_limit, durations }
    }

    /// Returns the wrapped store.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }

    fn counters(&self, limit: &str) -> LimitCounters {
        let new = |source: Source, outcome: Outcome| {
            Cached(counter!(
                DECISIONS,
                "store" => String::from(&*self.name),
                "limit" => limit.to_owned(),
                "outcome" => outcome.name(),
                "source" => source_name(source),
            ))
        };
        LimitCounters(SOURCES.map(|source| OUTCOMES.map(|outcome| new(source, outcome))))
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

    fn note<A: Algorithm, E: StoreError>(
        &self,
        batch: &Batch<'_, A>,
        since: Instant,
        said: Result<&Verdict, &E>,
    ) {
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
            self.by_limit.with(
                limit,
                || self.counters(limit),
                |counters| counters.0[source as usize][outcome as usize].0.increment(1),
            );
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
