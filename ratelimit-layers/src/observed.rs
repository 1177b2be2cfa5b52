//! [`Observed`]: wraps a store and observes its decisions, without changing them. [`Observer`]:
//! what hears of them, and of what a [`Fallback`](crate::Fallback) reports.

use std::fmt;
use std::future::poll_fn;
use std::pin::pin;

use derive_where::derive_where;
use ratelimit_core::store::{Batch, Check, LogStore, RecordStore, SnapshotStore, WithSnapshot};
use ratelimit_core::{Algorithm, Decision, Limit, OnOutage, Record, Store, SyncStore, Verdict};

/// Wraps a store and reports each request to an observer: `Metrics`, `Traced` and
/// [`TopDenied`](crate::TopDenied). Decisions are those of the store.
#[derive_where(Debug; S)]
pub struct Observed<S, O> {
    store: S,
    #[derive_where(skip)]
    pub(crate) observer: O,
}

/// Watches requests, and what a [`Fallback`](crate::Fallback) reports beside them.
pub trait Observer: Send + Sync {
    /// What belongs to a request from its begin to its end.
    type Begun: Send + Sync
    where
        Self: Sized;

    /// A request begins.
    fn begin<A: Algorithm>(&self, batch: &Batch<'_, A>) -> Self::Begun
    where
        Self: Sized;

    /// Runs a part of the request: a call of the store, or a poll of its future.
    fn within<R>(begun: &Self::Begun, part: impl FnOnce() -> R) -> R
    where
        Self: Sized,
    {
        let _ = begun;
        part()
    }

    /// The store has decided a request, or failed.
    fn end<A: Algorithm, S: Store<A>>(
        &self,
        store: &S,
        batch: &Batch<'_, A>,
        begun: &Self::Begun,
        said: Result<&Verdict, &S::Error>,
    ) where
        Self: Sized;

    /// A request that was decided crosses the threshold at which a limit
    /// [warns](Limit::warn_at_percent).
    fn warned<A: Algorithm>(&self, limit: &Limit<A>, decision: &Decision)
    where
        Self: Sized,
    {
        let _ = (limit, decision);
    }

    /// The record of a key under a limit has changed: set, replaced or cleared.
    fn record_changed<A: Algorithm>(
        &self,
        limit: &Limit<A>,
        key: &str,
        before: Option<&Record<A>>,
        now: Option<&Record<A>>,
    ) where
        Self: Sized,
    {
        let _ = (limit, key, before, now);
    }

    /// A circuit breaker of the store of this name changes to this state. Of all its breakers, one
    /// per server, one is now `furthest` from closed, and so many are not closed.
    fn breaker_changed(
        &self,
        store: &str,
        to: BreakerState,
        (furthest, not_closed): (BreakerState, usize),
    ) {
        let _ = (store, to, furthest, not_closed);
    }

    /// A limit was decided without the store of this name, by this choice.
    fn decided_without_store(
        &self,
        store: &str,
        limit: &str,
        choice: OnOutage,
        outcome: LimitOutcome,
    ) {
        let _ = (store, limit, choice, outcome);
    }
}

/// The state of the circuit breaker of a [`Fallback`](crate::Fallback): where a store has several
/// servers, and so several breakers, the one that is furthest from closed.
///
/// As a number, it is the value of the gauge `ratelimit_breaker_state`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum BreakerState {
    /// The store is asked.
    Closed = 0,
    /// One call, the probe, asks the store; all others are decided without it.
    HalfOpen = 1,
    /// The store is not asked.
    Open = 2,
}

impl fmt::Display for BreakerState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Closed => "closed",
            Self::HalfOpen => "half-open",
            Self::Open => "open",
        })
    }
}

/// What a limit did with a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum LimitOutcome {
    /// It allowed the request, as all limits of the batch did.
    Allowed,
    /// It denied the request.
    Denied,
    /// It would have allowed the request, which another limit of the batch denied.
    Spared,
    /// It would have denied the request, and is a shadow limit.
    ShadowDenied,
}

impl LimitOutcome {
    pub(crate) fn new<A: Algorithm>(
        limit: &Limit<A>,
        decision: &Decision,
        all_allowed: bool,
    ) -> Self {
        match (decision.allowed, all_allowed) {
            (true, true) => Self::Allowed,
            (true, false) => Self::Spared,
            (false, _) if limit.is_shadow() => Self::ShadowDenied,
            (false, _) => Self::Denied,
        }
    }
}

impl<S, O> Observed<S, O> {
    pub(crate) const fn around(store: S, observer: O) -> Self {
        Self { store, observer }
    }

    /// Returns the wrapped store.
    #[must_use]
    pub const fn store(&self) -> &S {
        &self.store
    }
}

impl<S, O: Observer> Observed<S, O> {
    /// Asks the store about a request, and awaits an answer with a verdict in it.
    async fn observe<A: Algorithm, T, F: Future<Output = Result<T, S::Error>>>(
        &self,
        batch: &Batch<'_, A>,
        ask: impl FnOnce() -> F,
        verdict: fn(&T) -> &Verdict,
    ) -> F::Output
    where
        S: Store<A>,
    {
        let begun = self.observer.begin(batch);
        let mut answer = pin!(ask());
        let said = poll_fn(|context| O::within(&begun, || answer.as_mut().poll(context))).await;
        self.end(batch, &begun, said.as_ref().map(verdict));
        said
    }

    fn observe_now<A: Algorithm>(
        &self,
        batch: &Batch<'_, A>,
        ask: impl FnOnce() -> Result<Verdict, S::Error>,
    ) -> Result<Verdict, S::Error>
    where
        S: Store<A>,
    {
        let begun = self.observer.begin(batch);
        let said = O::within(&begun, ask);
        self.end(batch, &begun, said.as_ref());
        said
    }

    fn end<A: Algorithm>(
        &self,
        batch: &Batch<'_, A>,
        begun: &O::Begun,
        said: Result<&Verdict, &S::Error>,
    ) where
        S: Store<A>,
    {
        self.observer.end(&self.store, batch, begun, said);
        for (check, decision) in said.into_iter().flat_map(|verdict| batch.warned(verdict)) {
            O::within(begun, || self.observer.warned(check.limit, decision));
        }
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm, S: Store<A>, O: Observer> Store<A> for Observed<S, O> {
    type Error = S::Error;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, S::Error> {
        self.observe(batch, || self.store.apply(batch), |verdict| verdict).await
    }

    fn report_counts(&self, report: &mut dyn FnMut(&'static str, u64)) {
        self.store.report_counts(report);
    }

    fn server_of(&self, batch: &Batch<'_, A>) -> Option<u64> {
        self.store.server_of(batch)
    }
}

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm, S: SnapshotStore<A>, O: Observer> SnapshotStore<A> for Observed<S, O> {
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, A>,
    ) -> Result<WithSnapshot<A::State>, S::Error> {
        self.observe(batch, || self.store.apply_with_snapshot(batch), |(verdict, _)| verdict).await
    }
}

/// Of several keys at once, each is a request of its own.
impl<A: Algorithm, S: SyncStore<A>, O: Observer> SyncStore<A> for Observed<S, O> {
    fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, S::Error> {
        self.observe_now(batch, || self.store.apply_now(batch))
    }

    #[inline]
    fn acquire_now(&self, limit: &Limit<A>, key: &str, cost: u64) -> Result<Verdict, S::Error> {
        let check = Check { limit, key, cost };
        self.observe_now(&Batch::one(&check), || self.store.acquire_now(limit, key, cost))
    }
}

lists_logged!(Observed<S, O>, [A: Algorithm, S: LogStore<A>, O: Observer], store);

#[deny(clippy::missing_trait_methods)]
impl<A: Algorithm, S: RecordStore<A>, O: Observer> RecordStore<A> for Observed<S, O> {
    async fn record(&self, limit: &Limit<A>, key: &str) -> Result<Option<Record<A>>, Self::Error> {
        self.store.record(limit, key).await
    }

    async fn exchange_record(
        &self,
        limit: &Limit<A>,
        key: &str,
        standing: Option<&Record<A>>,
        next: Option<&Record<A>>,
    ) -> Result<bool, Self::Error> {
        let exchanged = self.store.exchange_record(limit, key, standing, next).await?;
        if exchanged && (standing.is_some() || next.is_some()) {
            self.observer.record_changed(limit, key, standing, next);
        }
        Ok(exchanged)
    }
}
