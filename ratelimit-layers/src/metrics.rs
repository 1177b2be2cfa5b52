//! [`Metrics`]: a store that reports its decisions to the crate `metrics`. `docs/metrics.md` of
//! this crate lists the names and labels.

use std::collections::BTreeMap;
use std::ops::Deref;
use std::sync::OnceLock;
use std::time::Instant;

use dashmap::DashMap;
use metrics::{Counter, Histogram, counter, gauge, histogram};
use ratelimit_core::store::{Batch, Op};
use ratelimit_core::{
    Algorithm, Decision, ErrorKind, Limit, OnOutage, Source, Store, StoreError as _, Verdict,
};

use crate::observed::{BreakerState, LimitOutcome, Observed, Observer};
use crate::pace::Pace;

const OUTCOMES: usize = LimitOutcome::ShadowDenied as usize + 1;
const SOURCES: usize = Source::Allotment as usize + 1;
const OPS: usize = Op::ALL.len();
const CHOICES: usize = OnOutage::NAMES.len();

/// A store over any other that reports its decisions to the crate `metrics`: by limit and outcome,
/// with their latency and source.
///
/// A limit that would have allowed a request that another limit denied is counted as `spared`, not
/// as `denied`, and a shadow limit that would have denied as `shadow-denied`. Only [`Op::Acquire`]
/// counts as a decision; latency, errors and the warnings of a limit that
/// [warns](Limit::warn_at_percent) are reported of every operation. Install the recorder
/// before the first decision: a limit's counters are looked up once. A series begins when what it
/// counts has happened.
///
/// It also reports what the stores within it [count](Store::report_counts) of their own work, from
/// 0 on, at most once per second, with a request: [`record_counts`](Self::record_counts) does it at
/// once.
///
/// ```
/// use ratelimit_core::{Gcra, Limits, RateLimiter};
/// use ratelimit_layers::Metrics;
/// use ratelimit_memory::MemoryStore;
///
/// let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
/// let limiter = RateLimiter::new(limits, Metrics::new(MemoryStore::new()));
/// assert!(limiter.check_now("alice")?.allowed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// Put it around a [`Fallback`](crate::Fallback), so that the decisions without the store are
/// counted too. The state of a fallback's circuit breaker is reported by the fallback itself.
pub type Metrics<S> = Observed<S, Recorded>;

/// What a [`Metrics`] has looked up and recorded.
pub struct Recorded {
    name: Box<str>,
    /// By the limit's name. There are as many as limits were ever asked for.
    by_limit: DashMap<Box<str>, LimitCounters>,
    /// By operation and source.
    durations: [[OnceLock<Histogram>; SOURCES]; OPS],
    counts_due: Pace,
}

/// The counters of one limit.
#[derive(Default)]
struct LimitCounters {
    /// By source, then by outcome.
    decisions: [[OnceLock<Counter>; OUTCOMES]; SOURCES],
    /// By what the limit chose for outages, then by outcome.
    outage: [[OnceLock<Counter>; OUTCOMES]; CHOICES],
    /// Of a limit that warns.
    warnings: OnceLock<Counter>,
}

impl<S> Metrics<S> {
    /// Reports the decisions of this store, under the name `store`.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self::named(store, "store")
    }

    /// Reports the decisions of this store under this name, the label `store`, which distinguishes
    /// several in one process.
    #[must_use]
    pub fn named(store: S, name: &str) -> Self {
        Self::around(store, Recorded::new(name))
    }

    /// Records what the stores within this one count of their own work, now: before a program ends,
    /// or when an exporter asks while there are no requests.
    pub fn record_counts<A: Algorithm>(&self)
    where
        S: Store<A>,
    {
        self.observer.record_counts(self.store());
    }
}

impl Recorded {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.into(),
            by_limit: DashMap::new(),
            durations: Default::default(),
            counts_due: Pace::new(),
        }
    }

    /// The counters of the limit of this name.
    fn counters(&self, limit: &str) -> impl Deref<Target = LimitCounters> {
        let known = self.by_limit.get(limit);
        known.unwrap_or_else(|| self.by_limit.entry(limit.into()).or_default().downgrade())
    }

    /// The warnings of this limit, which begin at 0.
    fn warnings<'c>(&self, counters: &'c LimitCounters, limit: &str) -> &'c Counter {
        counters.warnings.get_or_init(|| {
            counter!(
                "ratelimit_warnings_total",
                "store" => String::from(&*self.name),
                "limit" => limit.to_owned(),
            )
        })
    }

    fn record_counts<A: Algorithm>(&self, store: &impl Store<A>) {
        // Two stores of one type count together.
        let mut counts: BTreeMap<&'static str, u64> = BTreeMap::new();
        store.report_counts(&mut |name, count| {
            let sum = counts.entry(name).or_default();
            *sum = sum.saturating_add(count);
        });
        for (name, count) in counts {
            let store = String::from(&*self.name);
            if name.ends_with("_total") {
                counter!(name, "store" => store).absolute(count);
            } else {
                gauge!(name, "store" => store).set(u32::try_from(count).unwrap_or(u32::MAX));
            }
        }
    }
}

impl Observer for Recorded {
    type Begun = Instant;

    fn begin<A: Algorithm>(&self, _: &Batch<'_, A>) -> Instant {
        Instant::now()
    }

    fn end<A: Algorithm, S: Store<A>>(
        &self,
        store: &S,
        batch: &Batch<'_, A>,
        since: &Instant,
        said: Result<&Verdict, &S::Error>,
    ) {
        if self.counts_due.is_due(*since) {
            self.record_counts(store);
        }
        let op = batch.operation();
        let verdict = match said {
            Ok(verdict) => verdict,
            Err(error) => {
                counter!(
                    "ratelimit_errors_total",
                    "store" => String::from(&*self.name),
                    "op" => op.to_string(),
                    "kind" => kind_name(error.kind()),
                )
                .increment(1);
                return;
            }
        };
        let source = verdict.source();
        let duration = self.durations[op as usize][source as usize].get_or_init(|| {
            histogram!(
                "ratelimit_duration_seconds",
                "store" => String::from(&*self.name),
                "op" => op.to_string(),
                "source" => source.name(),
            )
        });
        duration.record(since.elapsed());
        for (position, account) in verdict.accounts().filter(|(_, account)| account.forgiven > 0) {
            let Some(check) = batch.checks().get(position) else { continue };
            counter!(
                "ratelimit_forgiven_total",
                "store" => String::from(&*self.name),
                "limit" => check.limit.name().to_owned(),
            )
            .increment(account.forgiven);
        }
        if op != Op::Acquire {
            return;
        }
        for (check, decision) in batch.checks().iter().zip(verdict.decisions()) {
            let outcome = LimitOutcome::new(check.limit, decision, verdict.allowed());
            let limit = check.limit.name();
            let counters = self.counters(limit);
            let counter = counters.decisions[source as usize][outcome as usize].get_or_init(|| {
                counter!(
                    "ratelimit_decisions_total",
                    "store" => String::from(&*self.name),
                    "limit" => limit.to_owned(),
                    "outcome" => outcome_name(outcome),
                    "source" => source.name(),
                )
            });
            counter.increment(1);
            if check.limit.warns_at_percent().is_some() {
                // Before the first one, which a rate would miss.
                self.warnings(&counters, limit);
            }
        }
    }

    fn warned<A: Algorithm>(&self, limit: &Limit<A>, _: &Decision) {
        self.warnings(&self.counters(limit.name()), limit.name()).increment(1);
    }

    fn breaker_changed(&self, store: &str, to: BreakerState, (furthest, _): (BreakerState, usize)) {
        let store = store.to_owned();
        gauge!("ratelimit_breaker_state", "store" => store.clone()).set(furthest as u32);
        // All three begin with the breaker: `increase` sees no series' first value as one.
        for state in [BreakerState::Closed, BreakerState::HalfOpen, BreakerState::Open] {
            let transitions = "ratelimit_breaker_transitions_total";
            counter!(transitions, "store" => store.clone(), "to" => state.to_string())
                .increment(u64::from(state == to));
        }
    }

    fn decided_without_store(
        &self,
        store: &str,
        limit: &str,
        choice: OnOutage,
        outcome: LimitOutcome,
    ) {
        let counters = self.counters(limit);
        let counter = counters.outage[choice as usize][outcome as usize].get_or_init(|| {
            counter!(
                "ratelimit_outage_decisions_total",
                "store" => store.to_owned(),
                "limit" => limit.to_owned(),
                "choice" => choice.name(),
                "outcome" => outcome_name(outcome),
            )
        });
        counter.increment(1);
    }
}

const fn outcome_name(outcome: LimitOutcome) -> &'static str {
    match outcome {
        LimitOutcome::Allowed => "allowed",
        LimitOutcome::Denied => "denied",
        LimitOutcome::Spared => "spared",
        LimitOutcome::ShadowDenied => "shadow-denied",
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
        ErrorKind::Ended => "ended",
        ErrorKind::Config => "config",
        _ => "other",
    }
}
