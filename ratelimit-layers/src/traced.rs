//! [`Traced`]: a store that reports its decisions to the crate `tracing`.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ratelimit_core::{
    Algorithm, Batch, Check, EntryStore, KeepsEntries, Limit, Now, SnapshotStore, Store,
    StoreError, SyncStore, Verdict, WindowEntry, WithSnapshot,
};
use tracing::field::Empty;
use tracing::{Instrument as _, Span, debug_span, info, warn};

use crate::fallback::BreakerState;
use crate::pace::Pace;
use crate::source_name;

/// The circuit breaker of this store is now in this state.
pub(crate) fn breaker(store: &str, state: BreakerState) {
    match state {
        BreakerState::Open => {
            warn!(store, "the circuit breaker is open: requests are decided without the store");
        }
        BreakerState::HalfOpen => {
            info!(store, "the circuit breaker is half-open: one call probes the store");
        }
        BreakerState::Closed => info!(store, "the circuit breaker is closed: the store decides"),
    }
}

/// A store over any other that traces its decisions by the crate `tracing`.
///
/// Each call is a span `ratelimit` of level `DEBUG`. Its fields are `op`, `limits` (names, separated by commas), `allowed`,
/// `denied_by` (the names of the limits that denied), `retry_after_us` and `source`. An error is an event of level `WARN`
/// within the span, with `kind`, `error` and `requests`: at most once per second, and for so many requests. Keys are not recorded: they identify callers.
///
/// ```
/// use ratelimit_core::{Gcra, Limit, Limits, RateLimiter};
/// use ratelimit_layers::Traced;
/// use ratelimit_memory::MemoryStore;
///
/// let limits = Limits::new([Limit::new("login", Gcra::new("5/m".parse()?, 5)?)?])?;
/// let limiter = RateLimiter::new(limits, Traced::new(MemoryStore::new()));
/// assert!(limiter.check_now("alice")?.allowed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct Traced<S> {
    store: S,
    warns: Pace,
    /// Errors that no event has told of.
    untold: AtomicU64,
}

impl<S> Traced<S> {
    /// Traces the decisions of this store.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self { store, warns: Pace::new(), untold: AtomicU64::new(0) }
    }

    /// Returns the wrapped store.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }

    /// Records what was said of a batch.
    fn note<A: Algorithm, E: StoreError>(
        &self,
        span: &Span,
        batch: &Batch<'_, A>,
        said: Result<&Verdict, &E>,
    ) {
        match said {
            Ok(verdict) if !span.is_disabled() => {
                span.record("allowed", verdict.allowed());
                span.record("source", source_name(verdict.source()));
                if !verdict.allowed() {
                    let denied = verdict.denied_by().filter_map(|place| batch.checks().get(place));
                    span.record("denied_by", names(denied));
                    if let Some(wait_us) = verdict.summary().retry_after_us {
                        span.record("retry_after_us", wait_us);
                    }
                }
            }
            Ok(_) => {}
            Err(error) => {
                self.untold.fetch_add(1, Ordering::Relaxed);
                if self.warns.is_due(Instant::now()) {
                    let requests = self.untold.swap(0, Ordering::Relaxed);
                    let kind = error.kind();
                    span.in_scope(|| warn!(?kind, %error, requests, "the request was not decided"));
                }
            }
        }
    }
}

fn names<'a, A: Algorithm + 'a>(checks: impl Iterator<Item = &'a Check<'a, A>>) -> String {
    checks.map(|check| check.limit.name()).collect::<Vec<_>>().join(",")
}

fn span_of<A: Algorithm>(batch: &Batch<'_, A>) -> Span {
    let span = debug_span!(
        "ratelimit",
        op = %batch.operation(),
        limits = Empty,
        allowed = Empty,
        denied_by = Empty,
        retry_after_us = Empty,
        source = Empty,
    );
    if !span.is_disabled() {
        span.record("limits", names(batch.checks().iter()));
    }
    span
}

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm, S: Store<A>> Store<A> for Traced<S> {
    type Error = S::Error;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, S::Error> {
        let span = span_of(batch);
        let said = self.store.apply(batch).instrument(span.clone()).await;
        self.note(&span, batch, said.as_ref());
        said
    }

    fn report_counts(&self, report: &mut dyn FnMut(&'static str, u64)) {
        self.store.report_counts(report);
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm, S: SnapshotStore<A>> SnapshotStore<A> for Traced<S> {
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, A>,
    ) -> Result<WithSnapshot<A::State>, S::Error> {
        let span = span_of(batch);
        let said = self.store.apply_with_snapshot(batch).instrument(span.clone()).await;
        self.note(&span, batch, said.as_ref().map(|(verdict, _)| verdict));
        said
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm, S: SyncStore<A>> SyncStore<A> for Traced<S> {
    fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, S::Error> {
        let span = span_of(batch);
        let said = span.in_scope(|| self.store.apply_now(batch));
        self.note(&span, batch, said.as_ref());
        said
    }

    fn acquire_now(&self, limit: &Limit<A>, key: &str, cost: u64) -> Result<Verdict, S::Error> {
        let check = Check { limit, key, cost };
        let batch = Batch::one(&check);
        let span = span_of(&batch);
        let said = span.in_scope(|| self.store.acquire_now(limit, key, cost));
        self.note(&span, &batch, said.as_ref());
        said
    }

    /// The span of each key begins when the store has decided it.
    fn acquire_each_now(
        &self,
        limit: &Limit<A>,
        keys: &[&str],
        cost: u64,
        mut told: impl FnMut(usize, Result<Verdict, S::Error>),
    ) {
        self.store.acquire_each_now(limit, keys, cost, |place, said| {
            let check = Check { limit, key: keys.get(place).copied().unwrap_or_default(), cost };
            let batch = Batch::one(&check);
            self.note(&span_of(&batch), &batch, said.as_ref());
            told(place, said);
        });
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: KeepsEntries, S: EntryStore<A>> EntryStore<A> for Traced<S> {
    fn entries(
        &self,
        limit: &Limit<A>,
        key: &str,
        now: Now,
    ) -> impl Future<Output = Result<Vec<WindowEntry>, S::Error>> + Send {
        self.store.entries(limit, key, now)
    }
}
