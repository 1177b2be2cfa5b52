//! [`Fallback`]: a store around a store that keeps deciding while the inner store is away.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use ratelimit_core::{
    Batch, Check, Clock, ConfigError, EntryStore, ErrorKind, InMemory, KeepsEntries, Limit, Limits,
    Now, OnOutage, Op, Policy, Share, SnapshotStore, Source, Store, StoreError, SyncStore, Verdict,
    WindowEntry, WithSnapshot,
};
use ratelimit_memory::PreciseClock;
use tokio::runtime::Handle;
use tokio::time::{Instant, timeout};

mod breaker;
mod builder;
pub(crate) mod counts;
mod error;
mod journal;
mod known_ids;
mod outage;
mod report;

use crate::lock;
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
///   forced charge ([`Op::Force`]) per key and limit, one after the other. The first answer of the store starts this, whether
///   the breaker opened before or not. Until its charge arrives, a key has what the store knows of it. The charge is lost if
///   the store fails after it was sent, for requests whose outcome in the store is unknown, if the algorithm has no forced
///   charges, for requests with an id, above [so many keys](Builder::capacity), and when the process ends. It never charges
///   more than was admitted, and never twice.
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
    /// The task that charges what was admitted locally.
    charging: Mutex<Charger>,
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
    /// Checks that these limits can be decided without the store, as [`Builder::build`] does: for limits of another limiter
    /// over this store, and for those that replace them. A request whose limits do not say what an outage means is an error
    /// from the first one on, whether there is an outage or not.
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

impl<S, A: InMemory + Share + Clone, C: Clock> Inner<S, A, C> {
    /// Why this batch is not for the store: its id was decided without it, or its request was.
    fn not_for_store<E>(&self, batch: &Batch<'_, A>) -> Option<Cause<E>> {
        if self.outage.ids.knows(batch) {
            Some(Cause::KnownId)
        } else if batch.is_without_store() {
            Some(Cause::BreakerOpen { retry_after: self.breaker.pause() })
        } else {
            None
        }
    }

    /// Refuses a limit that could not be decided during an outage, so that it is known before there is one.
    fn validate(&self, batch: &Batch<'_, A>) -> Result<(), ConfigError> {
        for check in batch.checks() {
            if choice(check.limit)? == OnOutage::Local && self.outage.nodes.is_none() {
                let _share = self.outage.share_of(check.limit)?;
            }
        }
        Ok(())
    }

    /// Decides a batch without the store.
    fn without_store<E>(
        &self,
        batch: &Batch<'_, A>,
        cause: Cause<E>,
    ) -> Result<Verdict, FallbackError<E>> {
        self.outage.decide(batch, cause, self.breaker.report())
    }

    /// Decides a batch by what the store says, or without it.
    fn decided<E>(
        &self,
        batch: &Batch<'_, A>,
        told: Told<Verdict, E>,
    ) -> Result<Verdict, FallbackError<E>> {
        match told {
            Ok(said) => said.map_err(FallbackError::Store),
            Err(cause) => self.without_store(batch, cause),
        }
    }

    /// A call to the store, or why there is none.
    fn call<E>(&self) -> Result<Call<'_>, Cause<E>> {
        self.breaker.admit().map_err(|retry_after| Cause::BreakerOpen { retry_after })
    }
}

/// What a store says.
trait Said {
    /// Whether a cache or an allotment within the store says it, so that it tells nothing of the store.
    fn is_cached(&self) -> bool;
}

impl Said for Verdict {
    fn is_cached(&self) -> bool {
        matches!(self.source(), Source::Cache | Source::Allotment)
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

/// What the store says, or why it does not. Its own errors are those of a store that is there.
type Told<T, E> = Result<Result<T, E>, Cause<E>>;

impl<S, A, C> Fallback<S, A, C>
where
    S: Store<A> + 'static,
    A: InMemory + Share + Clone + 'static,
    C: Clock + 'static,
{
    /// Asks the store within the deadline, if the breaker admits it.
    async fn ask<T: Said, F: Future<Output = Result<T, S::Error>>>(
        &self,
        asked: impl FnOnce() -> F,
    ) -> Told<T, S::Error> {
        let inner = &*self.inner;
        let call = inner.call()?;
        if let Ok(said) = timeout(inner.deadline, asked()).await {
            return self.told(call, said);
        }
        call.failed();
        Err(Cause::TimedOut { deadline: inner.deadline, retry_after: inner.breaker.pause() })
    }

    /// Asks the store without waiting, if the breaker admits it.
    fn ask_now<T: Said>(&self, asked: impl FnOnce() -> Result<T, S::Error>) -> Told<T, S::Error> {
        let call = self.inner.call()?;
        self.told(call, asked())
    }

    /// Tells the breaker how a call ended. Any answer starts the recovery.
    fn told<T: Said>(&self, call: Call<'_>, said: Result<T, S::Error>) -> Told<T, S::Error> {
        match said {
            Err(error) if error.kind().is_outage() => {
                call.failed();
                let undetermined = error.kind() == ErrorKind::Indeterminate;
                let retry_after = self.inner.breaker.pause();
                Err(Cause::Failed { error, undetermined, retry_after })
            }
            Ok(said) if said.is_cached() => {
                call.not_sent();
                Ok(Ok(said))
            }
            said => {
                call.answered();
                self.recover();
                Ok(said)
            }
        }
    }

    /// Starts a task that charges what was admitted locally, if there is something, and a runtime to do it on.
    fn recover(&self) {
        if self.pending_charges() == 0 || lock(&self.inner.charging).is_under_way() {
            return;
        }
        if let Ok(runtime) = Handle::try_current() {
            let fallback = self.clone();
            runtime.spawn(async move { fallback.charge_pending().await });
        }
    }

    /// Charges to the store what was admitted locally, until nothing is left or the breaker opens. A task does this by
    /// itself when the store answers; a program without a runtime calls it.
    pub async fn charge_pending(&self) {
        let inner = &*self.inner;
        // An answer that finds a task starts none. What was noted after the task's last look is therefore looked for once
        // more when the task has ended: both sides take the lock between, so that one sees the other's.
        while self.pending_charges() > 0 && self.breaker() == BreakerState::Closed {
            let Some(charging) = Charging::begin(inner) else { return };
            while self.breaker() == BreakerState::Closed && !self.charge_some(&charging).await {
                if !charging.goes_on(inner.breaker.pause()) {
                    return;
                }
                tokio::time::sleep(inner.breaker.pause()).await;
            }
        }
    }

    /// Charges until nothing is left, which returns `true`, or the store fails.
    async fn charge_some(&self, charging: &Charging<'_>) -> bool {
        let inner = &*self.inner;
        let Some(journal) = &inner.outage.journal else { return true };
        while charging.goes_on(Duration::ZERO)
            && let Some(mut pending) = journal.pop()
        {
            let still = inner.outage.counts_still(&pending.limit, &pending.key, pending.now);
            pending.cost = pending.cost.min(still);
            if pending.cost == 0 {
                continue;
            }
            let check = Check { limit: &*pending.limit, key: &pending.key, cost: pending.cost };
            let batch = Batch::one(&check).op(Op::Force).now(pending.now);
            match self.ask(|| inner.store.apply(&batch)).await {
                Ok(Ok(_)) => {}
                // The store is there, and its algorithm cannot do this.
                Ok(Err(_)) => journal.forget(1),
                // It may have been charged, and is not charged twice.
                Err(cause) if cause.undetermined() => {
                    journal.forget(1);
                    return false;
                }
                Err(_) => {
                    journal.put_back(&pending);
                    return false;
                }
            }
        }
        true
    }
}

/// Which task charges what was admitted locally, and until when another leaves it to that. A program may keep the future of
/// [`Fallback::charge_pending`] and not poll it, and no thread may drive a task's runtime.
#[derive(Debug, Default)]
struct Charger {
    task: u64,
    until: Option<Instant>,
}

impl Charger {
    fn is_under_way(&self) -> bool {
        self.until.is_some_and(|until| Instant::now() < until)
    }
}

/// The turn of a task, which ends with it, also if its future is dropped.
struct Charging<'c> {
    charger: &'c Mutex<Charger>,
    task: u64,
    /// How long a charge may take.
    deadline: Duration,
}

impl<'c> Charging<'c> {
    fn begin<S, A: InMemory, C>(inner: &'c Inner<S, A, C>) -> Option<Self> {
        let mut charger = lock(&inner.charging);
        if charger.is_under_way() {
            return None;
        }
        charger.task = charger.task.wrapping_add(1);
        let charging =
            Self { charger: &inner.charging, task: charger.task, deadline: inner.deadline };
        drop(charger);
        charging.goes_on(Duration::ZERO);
        Some(charging)
    }

    /// Announces a pause and a charge. Returns `false` if another task has taken over.
    fn goes_on(&self, pause: Duration) -> bool {
        let mut charger = lock(self.charger);
        let is_its = charger.task == self.task;
        if is_its {
            // A pause that never ends is none: then nothing is charged either.
            charger.until = Instant::now().checked_add(pause.saturating_add(2 * self.deadline));
        }
        is_its
    }
}

impl Drop for Charging<'_> {
    fn drop(&mut self) {
        let mut charger = lock(self.charger);
        if charger.task == self.task {
            charger.until = None;
        }
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
        inner.validate(batch)?;
        if let Some(cause) = inner.not_for_store(batch) {
            return inner.without_store(batch, cause);
        }
        inner.decided(batch, self.ask(|| inner.store.apply(batch)).await)
    }

    fn report_counts(&self, report: &mut dyn FnMut(&'static str, u64)) {
        report("ratelimit_journal_keys", self.pending_charges() as u64);
        report("ratelimit_journal_forgotten_total", self.forgotten_charges());
        self.inner.outage.local.report_counts(report);
        self.inner.store.report_counts(report);
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
        inner.validate(batch)?;
        let cause = match inner.not_for_store(batch) {
            Some(cause) => cause,
            None => match self.ask(|| inner.store.apply_with_snapshot(batch)).await {
                Ok(said) => return said.map_err(FallbackError::Store),
                Err(cause) => cause,
            },
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
        inner.validate(batch)?;
        if let Some(cause) = inner.not_for_store(batch) {
            return inner.without_store(batch, cause);
        }
        inner.decided(batch, self.ask_now(|| inner.store.apply_now(batch)))
    }

    fn acquire_now(&self, limit: &Limit<A>, key: &str, cost: u64) -> Result<Verdict, Self::Error> {
        let inner = &*self.inner;
        let check = Check { limit, key, cost };
        let batch = Batch::one(&check);
        inner.validate(&batch)?;
        let told = self.ask_now(|| inner.store.acquire_now(limit, key, cost));
        inner.decided(&batch, told)
    }

    fn acquire_each_now(
        &self,
        limit: &Limit<A>,
        keys: &[&str],
        cost: u64,
        mut report: impl FnMut(usize, Result<Verdict, Self::Error>),
    ) {
        let inner = &*self.inner;
        let check = Check { limit, key: "", cost };
        let is_valid = inner.validate(&Batch::one(&check)).is_ok();
        let Some(call) = inner.breaker.admit_several().filter(|_| is_valid) else {
            for (place, key) in keys.iter().enumerate() {
                report(place, self.acquire_now(limit, key, cost));
            }
            return;
        };
        inner.store.acquire_each_now(limit, keys, cost, |place, said| {
            let key = keys.get(place).copied().unwrap_or_default();
            let told = self.told(call(), said);
            report(place, inner.decided(&Batch::one(&Check { limit, key, cost }), told));
        });
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
        let cause = match self.ask(|| inner.store.entries(limit, key, now)).await {
            Ok(said) => return said.map_err(FallbackError::Store),
            Err(cause) => cause,
        };
        if choice(limit)? != OnOutage::Local {
            return Err(cause.into_error(Op::Peek));
        }
        let share = inner.outage.share_of(limit)?;
        let entries: Result<_, _> = inner.outage.local.entries(&share, key, now).await;
        entries.map_err(FallbackError::Local)
    }
}
