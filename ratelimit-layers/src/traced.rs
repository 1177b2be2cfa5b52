//! [`Traced`]: a store that reports its decisions to the crate `tracing`.

use std::num::NonZeroU8;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use ratelimit_core::store::{Batch, Check};
use ratelimit_core::{
    Algorithm, Decision, Limit, Record, Store, StoreError as _, Timestamp, Verdict,
};
use tracing::field::Empty;
use tracing::{Span, debug_span, info, warn};

use crate::observed::{BreakerState, Observed, Observer};
use crate::pace::Pace;

/// A store over any other that traces its decisions by the crate `tracing`.
///
/// Each call is a span `ratelimit` of level `DEBUG`. Its fields are `op`, `limits` (names,
/// separated by commas), `allowed`, `denied_by` (the names of the limits that denied),
/// `retry_after_us` and `source`. An error is an event of level `WARN` within the span, with
/// `kind`, `error` and `requests`: at most once per second, and for so many requests. So is a
/// request that crosses the threshold at which a limit [warns](Limit::warn_at_percent), with
/// `limit`, `percent`, `capacity`, `remaining` and `requests`. Keys are not recorded: they identify
/// callers.
///
/// Each change of a [record](Record) through this store is an event of level `INFO`, the line for
/// an audit, within the span of who changes it: `by` (see [`acting_as`](Self::acting_as)), `limit`,
/// `key`, `change` (`numbers`, `blocked` or `exempt`; none if it was cleared), `capacity` and
/// `full_after_us` of numbers (how long a caller that has used all takes to recover), `until_us`
/// (none for ever), and `before`, the change that stood. This event has the key: it says for whom.
/// A change that failed emits none, although one whose error is
/// [`Indeterminate`](ratelimit_core::ErrorKind::Indeterminate) may stand.
///
/// ```
/// use ratelimit_core::{Gcra, Limits, RateLimiter};
/// use ratelimit_layers::Traced;
/// use ratelimit_memory::MemoryStore;
///
/// let limits = Limits::builder().limit("login", Gcra::per_minute(5)).build()?;
/// let limiter = RateLimiter::new(limits, Traced::new(MemoryStore::new()));
/// assert!(limiter.check_now("alice")?.allowed());
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type Traced<S> = Observed<S, Spans>;

/// How a [`Traced`] reports requests.
#[derive(Debug)]
pub struct Spans {
    warns: Pace,
    /// Errors that no event has told of.
    untold: AtomicU64,
    /// When a line about a limit's warnings is due, and those that no event has told of.
    warnings: (Pace, AtomicU64),
    /// When a line about each state of a circuit breaker is due: a store that fails again and again
    /// fills no log.
    changes: [Pace; 3],
    /// Who changes records.
    by: Option<Box<str>>,
}

impl Spans {
    pub(crate) fn new() -> Self {
        let changes = std::array::from_fn(|_| Pace::new());
        let warnings = (Pace::new(), AtomicU64::new(0));
        Self { warns: Pace::new(), untold: AtomicU64::new(0), warnings, changes, by: None }
    }
}

impl<S> Traced<S> {
    /// Traces the decisions of this store.
    #[must_use]
    pub fn new(store: S) -> Self {
        Self::around(store, Spans::new())
    }

    /// The same, whose events of changed records name who changes them: a person or a program.
    ///
    /// ```
    /// use ratelimit_core::{Gcra, Limits, RateLimiter, Record};
    /// use ratelimit_layers::Traced;
    /// use ratelimit_memory::MemoryStore;
    ///
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let limits = Limits::builder().limit("api", Gcra::per_second(10)).overridable().build()?;
    /// let limiter = RateLimiter::new(limits, Traced::new(MemoryStore::new()).acting_as("billing"));
    /// // INFO a record was set by="billing" limit="api" key="alice" change="blocked"
    /// limiter.set_record("alice", "api", Record::blocked().forever()).await?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn acting_as(mut self, who: impl Into<Box<str>>) -> Self {
        self.observer.by = Some(who.into());
        self
    }
}

impl Observer for Spans {
    type Begun = Span;

    fn begin<A: Algorithm>(&self, batch: &Batch<'_, A>) -> Span {
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

    fn within<R>(span: &Span, part: impl FnOnce() -> R) -> R {
        span.in_scope(part)
    }

    fn end<A: Algorithm, S: Store<A>>(
        &self,
        _: &S,
        batch: &Batch<'_, A>,
        span: &Span,
        said: Result<&Verdict, &S::Error>,
    ) {
        match said {
            Ok(verdict) if !span.is_disabled() => {
                span.record("allowed", verdict.allowed());
                span.record("source", verdict.source().name());
                if !verdict.allowed() {
                    let denied =
                        verdict.denied_by().filter_map(|position| batch.checks().get(position));
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

    fn warned<A: Algorithm>(&self, limit: &Limit<A>, decision: &Decision) {
        let (pace, untold) = &self.warnings;
        untold.fetch_add(1, Ordering::Relaxed);
        if pace.is_due(Instant::now()) {
            let requests = untold.swap(0, Ordering::Relaxed);
            let percent = limit.warns_at_percent().map(NonZeroU8::get);
            let Decision { limit: capacity, remaining, .. } = *decision;
            let limit = limit.name();
            warn!(limit, percent, capacity, remaining, requests, "a limit is nearly used up");
        }
    }

    fn record_changed<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
        before: Option<&Record<A>>,
        now: Option<&Record<A>>,
    ) {
        let by = self.by.as_deref();
        let (change, before) = (now.map(change_of), before.map(change_of));
        let numbers = now.and_then(Record::algorithm);
        let capacity = numbers.map(Algorithm::capacity);
        let full_after_us = numbers.map(|numbers| {
            numbers.step(None, Timestamp::ZERO, numbers.capacity()).decision.reset_after_us
        });
        let until_us = now.and_then(Record::end).map(Timestamp::as_us);
        let limit = limit.name();
        let what = match (before, change) {
            (_, None) => "a record was cleared",
            (None, _) => "a record was set",
            _ => "a record was replaced",
        };
        info!(by, limit, key, change, capacity, full_after_us, until_us, before, "{what}");
    }

    fn breaker_changed(&self, store: &str, to: BreakerState, (_, away): (BreakerState, usize)) {
        if !self.changes[to as usize].is_due(Instant::now()) {
            return;
        }
        match to {
            BreakerState::Open => {
                warn!(
                    store,
                    away, "the circuit breaker is open: requests are decided without the store"
                );
            }
            BreakerState::HalfOpen => {
                info!(store, away, "the circuit breaker is half-open: one call probes the store");
            }
            BreakerState::Closed => {
                info!(store, away, "the circuit breaker is closed: the store decides");
            }
        }
    }
}

fn change_of<A>(record: &Record<A>) -> &'static str {
    if record.is_blocked() {
        "blocked"
    } else if record.is_exempt() {
        "exempt"
    } else {
        "numbers"
    }
}

fn names<'a, A: Algorithm + 'a>(checks: impl Iterator<Item = &'a Check<'a, A>>) -> String {
    checks.map(|check| check.limit.name()).collect::<Vec<_>>().join(",")
}
