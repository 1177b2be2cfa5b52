//! [`Fallback`]: a store around a store that keeps deciding while the inner store is away.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use ratelimit_core::{
    Batch, Check, Clock, ConfigError, EntryStore, ErrorKind, InMemory, KeepsEntries, Limit, Limits,
    Now, OnOutage, Op, Policy, Share, SnapshotStore, Source, Store, StoreError, SyncStore, Verdict,
    WindowEntry, WithSnapshot,
};
use ratelimit_memory::PreciseClock;
use tokio::runtime::Handle;
use tokio::time::timeout;

mod breaker;
mod builder;
pub(crate) mod counts;
mod error;
mod journal;
mod known_ids;
mod outage;
mod report;

pub use breaker::BreakerState;
use breaker::{Breaker, Call};
pub use builder::{Builder, OnRecovery};
pub use counts::OutageCount;
pub use error::FallbackError;
use outage::{Cause, Outage, choice};

/// A store around a store that keeps deciding while the inner store is away: each limit says whether it is open, closed or
/// decided locally then.
///
/// ```
/// use std::num::NonZeroU64;
/// use ratelimit_core::{Gcra, Limit, Limits, OnOutage, Policy, RateLimiter};
/// use ratelimit_layers::Fallback;
/// use ratelimit_memory::MemoryStore;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let burst = Limit::<Policy>::new("burst", Gcra::new("12/s".parse()?, 12)?.into())?;
/// let limits = Limits::new([burst.on_outage(OnOutage::Local)])?;
/// let shared = MemoryStore::new(); // a store on Redis, in a service
/// let nodes = NonZeroU64::new(3).ok_or("none")?;
/// let store = Fallback::builder().nodes(nodes).build(shared, &limits)?;
/// let limiter = RateLimiter::new(limits, store);
/// assert!(limiter.check("alice").await?.allowed());
/// # Ok(())
/// # }
/// ```
///
/// # When the store is away
///
/// A call fails if it takes longer than the [deadline](Builder::deadline) or ends with an error of the kinds
/// [`Unavailable`](ErrorKind::Unavailable) and [`Indeterminate`](ErrorKind::Indeterminate). Errors of all other kinds come
/// from a store that is there, and are returned as they are. After [some consecutive failures](Builder::failures) a
/// *circuit breaker* (Nygard, "Release It!", 2007) opens, and the store is not asked any more. After a
/// [pause](Builder::probe_after) one call at a time, the probe, tries the store again; the first that is answered closes the
/// breaker.
///
/// Each request that the store did not decide is decided by the choices of its limits:
///
/// - [`OnOutage::Closed`]: the request is denied. Its `retry_after` is the time until the next probe.
/// - [`OnOutage::Local`]: a bounded limiter in memory decides by this node's share of the limit. It keeps no more than
///   [so many keys](Builder::capacity).
/// - [`OnOutage::Open`]: the request is allowed.
///
/// A batch is denied if one of its limits is closed, else decided by its local limits, and allowed if all are open. Each of
/// these decisions is [counted](Self::outage_counts), and its verdict says that it comes from the fallback
/// ([`Source::Fallback`](ratelimit_core::Source)).
///
/// # What it costs
///
/// - **Local.** In every window the store admits at most the limit, and all nodes together at most the limit, because the
///   sum of their shares is no more. A caller therefore gets at most twice its limit in a window that an outage begins or
///   ends in, and at most its limit in a window within the outage. A caller whose requests all reach one node gets
///   that node's share.
/// - **Forgotten or charged.** With [`OnRecovery::Forget`] the store knows nothing of what was admitted during the outage.
///   With [`OnRecovery::Charge`] each key is charged what it was admitted locally, as far as that still counts, in one
///   forced charge ([`Op::Force`]) per key and limit, one after the other. Until its charge arrives, a key has what the store
///   knows of it. The charge is lost if the store fails after it was sent, if the algorithm has no forced charges, for
///   requests with an id, above [so many keys](Builder::capacity), and when the process ends. It never charges more than was
///   admitted, and never twice.
/// - **Unknown outcomes.** A request that was sent and got no answer may have been charged by the store, and is decided
///   once more without it. Each such request costs the caller at most its own cost in the store, and
///   [`OutageCount::undetermined`] counts it. Their number is bounded by the calls in flight when the breaker opens, and one
///   probe per pause. It never admits more.
///
/// # Operations other than a check
///
/// | operation | while the store is away |
/// |---|---|
/// | acquire, peek | decided by the choices |
/// | force, refund | on the local limits; nothing for open ones; an error if a limit is closed, or if the store may have done it |
/// | reset | an error: only the store can do it |
/// | settle, renew | an error, unless the reservation was made without the store |
///
/// Whatever was done under an id without the store stays with the local limits, also when the store is back: a repeated
/// request is done once, and a reservation settles where it was made. An id that was reserved in the store settles there
/// only: repeat the settlement when the store is back. Until then, and if it never comes, the estimate stays charged. The
/// same holds for a reservation whose outcome is unknown: the store may keep its estimate charged beside the local one,
/// once per id.
///
/// # Without waiting
///
/// Over a [`SyncStore`] it is a [`SyncStore`]. Such a call has no deadline; the store's errors count.
pub struct Fallback<S, A: InMemory = Policy, C = PreciseClock> {
    inner: Arc<Inner<S, A, C>>,
}

struct Inner<S, A: InMemory, C> {
    store: S,
    deadline: Duration,
    breaker: Breaker,
    outage: Outage<A, C>,
    /// Whether a task charges what was admitted locally.
    is_charging: AtomicBool,
}

impl<S, A: InMemory, C> Clone for Fallback<S, A, C> {
    /// The clone shares everything.
    fn clone(&self) -> Self {
        Self { inner: Arc::clone(&self.inner) }
    }
}

impl<S: std::fmt::Debug, A: InMemory, C> std::fmt::Debug for Fallback<S, A, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fallback")
            .field("store", &self.inner.store)
            .field("breaker", &self.breaker())
            .finish_non_exhaustive()
    }
}

impl Fallback<()> {
    /// The settings of a store around another.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::new()
    }
}

impl<S, A: InMemory, C> Fallback<S, A, C> {
    /// The wrapped store.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.inner.store
    }

    /// The state of the circuit breaker.
    #[must_use]
    pub fn breaker(&self) -> BreakerState {
        self.inner.breaker.state()
    }

    /// How many decisions were made without the store, by limit and choice; none that are zero.
    #[must_use]
    pub fn outage_counts(&self) -> Vec<OutageCount> {
        self.inner.outage.counts.read()
    }
}

impl<S, A: InMemory + Share + Clone, C: Clock> Fallback<S, A, C> {
    /// Checks that these limits can be decided without the store, as [`Builder::build`] does: for limits that
    /// replace those of the beginning.
    ///
    /// # Errors
    /// As [`Builder::build`].
    pub fn validate(&self, limits: &Limits<A>) -> Result<(), ConfigError> {
        builder::validate(limits, self.inner.outage.nodes)
    }

    /// How many keys have charges that the store does not know of yet: see [`OnRecovery::Charge`].
    #[must_use]
    pub fn pending_charges(&self) -> usize {
        self.inner.outage.journal.as_ref().map_or(0, journal::Journal::len)
    }

    /// How many charges the store will never know of, with [`OnRecovery::Charge`].
    #[must_use]
    pub fn forgotten_charges(&self) -> u64 {
        self.inner.outage.journal.as_ref().map_or(0, journal::Journal::forgotten)
    }
}

/// Whether an error of this kind means that the store is away.
const fn is_outage(kind: ErrorKind) -> bool {
    matches!(kind, ErrorKind::Unavailable | ErrorKind::Indeterminate)
}

/// What a store says.
trait Said {
    /// Whether a cache within the store says it, so that it tells nothing of the store.
    fn is_cached(&self) -> bool;
}

impl Said for Verdict {
    fn is_cached(&self) -> bool {
        self.source() == Source::Cache
    }
}

impl<S> Said for WithSnapshot<S> {
    fn is_cached(&self) -> bool {
        self.0.is_cached()
    }
}

impl Said for Vec<WindowEntry> {
    fn is_cached(&self) -> bool {
        false
    }
}

impl<S, A: InMemory + Share + Clone, C: Clock> Inner<S, A, C> {
    /// Decides a batch whose id was decided without the store.
    fn known<E>(&self, batch: &Batch<'_, A>) -> Option<Result<Verdict, FallbackError<E>>> {
        let known = self.outage.ids.knows(batch);
        known.then(|| self.outage.decide(batch, Cause::KnownId, self.breaker.report()))
    }

    /// Decides a batch without the store, after a call that failed or was not admitted.
    fn without_store<E>(
        &self,
        batch: &Batch<'_, A>,
        cause: Cause<E>,
    ) -> Result<Verdict, FallbackError<E>> {
        self.outage.decide(batch, cause, self.breaker.report())
    }

    /// What a call that failed means.
    fn failed<E: StoreError>(&self, error: E) -> Cause<E> {
        let undetermined = error.kind() == ErrorKind::Indeterminate;
        Cause::Failed { error, undetermined, retry_after: self.breaker.pause() }
    }

    /// What the store says within the deadline, or why it does not.
    async fn awaited<T: Said, E: StoreError>(
        &self,
        call: Call<'_>,
        asked: impl Future<Output = Result<T, E>>,
        recovered: impl FnOnce(),
    ) -> Result<Result<T, E>, Cause<E>> {
        if let Ok(said) = timeout(self.deadline, asked).await {
            return self.told(call, said, recovered);
        }
        call.failed();
        Err(Cause::TimedOut { deadline: self.deadline, retry_after: self.breaker.pause() })
    }

    /// What the store said, or why it did not.
    fn told<T: Said, E: StoreError>(
        &self,
        call: Call<'_>,
        said: Result<T, E>,
        recovered: impl FnOnce(),
    ) -> Result<Result<T, E>, Cause<E>> {
        match said {
            Err(error) if is_outage(error.kind()) => {
                call.failed();
                Err(self.failed(error))
            }
            Ok(said) if said.is_cached() => {
                call.not_sent();
                Ok(Ok(said))
            }
            said => {
                if call.answered() {
                    recovered();
                }
                Ok(said)
            }
        }
    }
}

impl<S, A, C> Fallback<S, A, C>
where
    S: Store<A> + 'static,
    A: InMemory + Share + Clone + 'static,
    C: Clock + 'static,
{
    /// Starts a task that charges what was admitted locally, if there is something, and a runtime to do it on.
    fn recover(&self) {
        if self.pending_charges() == 0 || self.inner.is_charging.load(Ordering::Relaxed) {
            return;
        }
        if let Ok(runtime) = Handle::try_current() {
            let fallback = self.clone();
            runtime.spawn(async move { fallback.charge_pending().await });
        }
    }

    /// Charges to the store what was admitted locally, until nothing is left or the breaker opens. A task does this by
    /// itself when the store is back; a program without a runtime calls it.
    pub async fn charge_pending(&self) {
        if self.inner.is_charging.swap(true, Ordering::AcqRel) {
            return;
        }
        let _charging = Charging(&self.inner.is_charging);
        while self.breaker() == BreakerState::Closed && !self.charge_some().await {
            tokio::time::sleep(self.inner.breaker.pause()).await;
        }
    }

    /// Charges until nothing is left, which returns `true`, or the store fails.
    async fn charge_some(&self) -> bool {
        let inner = &*self.inner;
        let Some(journal) = &inner.outage.journal else { return true };
        while let Some(mut pending) = journal.pop() {
            let still = inner.outage.counts_still(&pending.limit, &pending.key, pending.now);
            pending.cost = pending.cost.min(still);
            if pending.cost == 0 {
                continue;
            }
            let Ok(call) = inner.breaker.admit() else {
                journal.put_back(&pending);
                return false;
            };
            let check = Check { limit: &*pending.limit, key: &pending.key, cost: pending.cost };
            let batch = Batch::one(&check).op(Op::Force).now(pending.now);
            match inner.awaited(call, inner.store.apply(&batch), || {}).await {
                Ok(Ok(_)) => {}
                // The store is there, and its algorithm cannot do this.
                Ok(Err(_)) => journal.forget(1),
                Err(Cause::Failed { undetermined: false, .. }) => {
                    journal.put_back(&pending);
                    return false;
                }
                // It may have been charged, and is not charged twice.
                Err(_) => {
                    journal.forget(1);
                    return false;
                }
            }
        }
        true
    }
}

/// Ends [`Fallback::charge_pending`], also if its future is dropped.
struct Charging<'c>(&'c AtomicBool);

impl Drop for Charging<'_> {
    fn drop(&mut self) {
        self.0.store(false, Ordering::Release);
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S, A, C> Store<A> for Fallback<S, A, C>
where
    S: Store<A> + 'static,
    A: InMemory + Share + Clone + 'static,
    C: Clock + 'static,
{
    type Error = FallbackError<S::Error>;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, Self::Error> {
        let inner = &*self.inner;
        if let Some(decided) = inner.known(batch) {
            return decided;
        }
        let cause = match inner.breaker.admit() {
            Err(retry_after) => Cause::BreakerOpen { retry_after },
            Ok(call) => {
                match inner.awaited(call, inner.store.apply(batch), || self.recover()).await {
                    Ok(said) => return said.map_err(FallbackError::Store),
                    Err(cause) => cause,
                }
            }
        };
        inner.without_store(batch, cause)
    }
}

/// What is decided without the store has no snapshot.
#[deny(clippy::missing_trait_methods)]
impl<S, A, C> SnapshotStore<A> for Fallback<S, A, C>
where
    S: SnapshotStore<A> + 'static,
    A: InMemory + Share + Clone + 'static,
    C: Clock + 'static,
{
    async fn apply_with_snapshot(
        &self,
        batch: &Batch<'_, A>,
    ) -> Result<WithSnapshot<A::State>, Self::Error> {
        let inner = &*self.inner;
        if let Some(decided) = inner.known(batch) {
            return decided.map(|verdict| (verdict, None));
        }
        let cause = match inner.breaker.admit() {
            Err(retry_after) => Cause::BreakerOpen { retry_after },
            Ok(call) => {
                let asked = inner.store.apply_with_snapshot(batch);
                match inner.awaited(call, asked, || self.recover()).await {
                    Ok(said) => return said.map_err(FallbackError::Store),
                    Err(cause) => cause,
                }
            }
        };
        inner.without_store(batch, cause).map(|verdict| (verdict, None))
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S, A, C> SyncStore<A> for Fallback<S, A, C>
where
    S: SyncStore<A> + 'static,
    A: InMemory + Share + Clone + 'static,
    C: Clock + 'static,
{
    fn apply_now(&self, batch: &Batch<'_, A>) -> Result<Verdict, Self::Error> {
        let inner = &*self.inner;
        if let Some(decided) = inner.known(batch) {
            return decided;
        }
        self.decided(batch, || inner.store.apply_now(batch))
    }

    fn acquire_now(&self, limit: &Limit<A>, key: &str, cost: u64) -> Result<Verdict, Self::Error> {
        let store = &self.inner.store;
        self.decided(&Batch::one(&Check { limit, key, cost }), || {
            store.acquire_now(limit, key, cost)
        })
    }

    fn acquire_each_now(
        &self,
        limit: &Limit<A>,
        keys: &[&str],
        cost: u64,
        mut told: impl FnMut(usize, Result<Verdict, Self::Error>),
    ) {
        let inner = &*self.inner;
        // A probe is one call, of one key.
        if self.breaker() != BreakerState::Closed {
            for (place, key) in keys.iter().enumerate() {
                told(place, self.acquire_now(limit, key, cost));
            }
            return;
        }
        inner.store.acquire_each_now(limit, keys, cost, |place, said| {
            let check = Check { limit, key: keys.get(place).copied().unwrap_or_default(), cost };
            // The store has already decided, whether the breaker is still closed or not.
            told(
                place,
                match (said, inner.breaker.admit()) {
                    (Err(error), call) if is_outage(error.kind()) => {
                        let _reported = call.map(Call::failed);
                        inner.without_store(&Batch::one(&check), inner.failed(error))
                    }
                    (said, call) => {
                        let _closed = call.map(Call::answered);
                        said.map_err(FallbackError::Store)
                    }
                },
            );
        });
    }
}

impl<S, A, C> Fallback<S, A, C>
where
    S: Store<A> + 'static,
    A: InMemory + Share + Clone + 'static,
    C: Clock + 'static,
{
    /// Decides a batch by what a store says without waiting, or without it.
    fn decided(
        &self,
        batch: &Batch<'_, A>,
        ask: impl FnOnce() -> Result<Verdict, S::Error>,
    ) -> Result<Verdict, FallbackError<S::Error>> {
        let inner = &*self.inner;
        let cause = match inner.breaker.admit() {
            Err(retry_after) => Cause::BreakerOpen { retry_after },
            Ok(call) => match inner.told(call, ask(), || self.recover()) {
                Ok(said) => return said.map_err(FallbackError::Store),
                Err(cause) => cause,
            },
        };
        inner.without_store(batch, cause)
    }
}

/// While the store is away, the entries of a local limit are those in memory. For any other limit the error is returned.
#[deny(clippy::missing_trait_methods)]
impl<S, A, C> EntryStore<A> for Fallback<S, A, C>
where
    S: EntryStore<A> + 'static,
    A: KeepsEntries + InMemory + Share + Clone + 'static,
    C: Clock + 'static,
{
    async fn entries(
        &self,
        limit: &Limit<A>,
        key: &str,
        now: Now,
    ) -> Result<Vec<WindowEntry>, Self::Error> {
        let inner = &*self.inner;
        let cause = match inner.breaker.admit() {
            Err(retry_after) => Cause::BreakerOpen { retry_after },
            Ok(call) => match inner
                .awaited(call, inner.store.entries(limit, key, now), || self.recover())
                .await
            {
                Ok(said) => return said.map_err(FallbackError::Store),
                Err(cause) => cause,
            },
        };
        if choice(limit)? != OnOutage::Local {
            return Err(cause.into_error(Op::Peek));
        }
        let share = inner.outage.share_of(limit)?;
        let entries: Result<_, _> = inner.outage.local.entries(&share, key, now).await;
        entries.map_err(FallbackError::Local)
    }
}
