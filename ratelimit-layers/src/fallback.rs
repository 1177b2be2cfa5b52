//! [`Fallback`]: wraps a store and keeps making decisions while that store is unreachable.
//!
//! - Each decision reads a limit's [`OnOutage`](ratelimit_core::OnOutage) from the limit itself, so
//!   a reloaded policy needs no second registration.
//! - After an outage, the store is charged only the part of the local charges that still counts:
//!   the sum over an outage of an hour would lock a key whose limit is per minute. A call can fail
//!   while the breaker is still closed, so any answer of the store starts this, not only that of a
//!   probe.
//! - An unreachable server leaves the charges of its keys where they are, so those of other servers
//!   wait for none.
//! - An answer from a [`DenialCache`](crate::DenialCache) or an allotment says nothing about the
//!   health of the store. The fallback reads the [source](ratelimit_core::Source) of a verdict, and
//!   a probe answered by a cache leaves the next call to probe.

use std::collections::HashSet;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use derive_where::derive_where;
use ratelimit_core::algorithm::{InMemory, LoggedRequest, Share};
use ratelimit_core::store::{Batch, Check, LogStore, Now, Op, RecordStore};
use ratelimit_core::{
    AnyAlgorithm, Clock, ConfigError, ErrorKind, Limit, Limits, OnOutage, Source, Store,
    StoreError as _, Verdict,
};
use ratelimit_memory::PreciseClock;
use tokio::time::{Instant, timeout};

mod breaker;
mod builder;
mod cancel;
mod counts;
mod error;
mod journal;
mod known_ids;
mod outage;

use crate::observed::BreakerState;
use crate::{OnDrop, lock};
use breaker::Breakers;
pub use builder::{FallbackBuilder, OnRecovery};
pub use counts::OutageCount;
pub use error::FallbackError;
use known_ids::KnownBy;
use outage::Outage;

/// Wraps a store and keeps making decisions while that store is unreachable. Each limit declares
/// whether it is then open, closed or decided locally.
///
/// ```
/// use std::num::NonZeroU64;
/// use ratelimit_core::{Gcra, Limits, OnOutage, RateLimiter};
/// use ratelimit_layers::Fallback;
/// use ratelimit_memory::MemoryStore;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let limits = Limits::builder()
///     .limit("burst", Gcra::per_second(12)).on_outage(OnOutage::Local)
///     .build()?;
/// let shared = MemoryStore::new(); // a store on Redis, in a service
/// let nodes = NonZeroU64::new(3).ok_or("none")?;
/// let store = Fallback::builder().nodes(nodes).build(shared, &limits)?;
/// let limiter = RateLimiter::new(limits, store);
/// assert!(limiter.check("alice").await?.allowed());
/// # Ok(())
/// # }
/// ```
///
/// # While the store is unreachable
///
/// A call fails if it takes longer than the [deadline](FallbackBuilder::deadline) or ends with an
/// error of the kinds [`Unavailable`](ratelimit_core::ErrorKind::Unavailable) and
/// [`Indeterminate`](ratelimit_core::ErrorKind::Indeterminate). Errors of all other kinds come from
/// a store that works, and are returned as they are. After [some consecutive
/// failures](FallbackBuilder::failures) a *circuit breaker* (Nygard, "Release It!", 2007) opens,
/// and the store is not asked any more. After a [pause](FallbackBuilder::probe_after) one call at a
/// time, the probe, tries the store again; the first that is answered closes the breaker. Each
/// server that the store [tells](Store::server_of), such as each master of a cluster, has a breaker
/// of its own: while one is unreachable, the store decides the keys of all others. The keys of
/// several masters in one batch have one together.
///
/// Each request that the store did not decide is decided by the choices of its limits:
///
/// - [`OnOutage::Closed`]: the request is denied. Its `retry_after` is the time until the next
///   probe.
/// - [`OnOutage::Local`]: a bounded limiter in memory decides by this node's share of the limit. It
///   keeps no more than [so many keys](FallbackBuilder::capacity).
/// - [`OnOutage::Open`]: the request is allowed.
///
/// A batch is denied if one of its limits is closed, else decided by its local limits, and allowed
/// if all are open. Each of these decisions is [counted](Self::outage_counts), and its verdict
/// names the fallback as its source ([`Source::Fallback`](ratelimit_core::Source)).
///
/// No record of a caller is known meanwhile: who is blocked, exempt or has other numbers is decided
/// by the policy, as all others are.
///
/// # What it costs
///
/// - **Local.** In every window the store admits at most the limit, and all nodes together at most
///   the limit, because the sum of their shares is no more. A caller therefore gets at most twice
///   its limit in a window that an outage begins or ends in, and at most its limit in a window
///   within the outage. A caller whose requests all reach one node gets that node's share. A
///   request with [numbers of its own](ratelimit_core::Numbers) has this node's share of those; if
///   so many nodes cannot share them, it is an error, unless each node admits [at least
///   one](FallbackBuilder::at_least_one).
/// - **Forgotten or charged.** With [`OnRecovery::Forget`] the store knows nothing of what was
///   admitted during the outage. With [`OnRecovery::Charge`] each key is charged what it was
///   admitted locally, as far as that still counts, in one forced charge ([`Op::Force`]) per key
///   and limit, one after the other. The first answer of the store starts this, whether the breaker
///   opened before or not. Until its charge arrives, a key has what the store knows of it. The
///   charge is lost if the store fails after it was sent, for requests whose outcome in the store
///   is unknown, if the algorithm has no forced charges, for requests with an id, above [so many
///   keys or bytes](FallbackBuilder::capacity), and when the process ends. It never charges more
///   than was admitted, and never twice. What does not count any more makes way for new keys.
/// - **Unknown outcomes.** A request that was sent and got no answer may have been charged by the
///   store, and is decided once more without it. Each such request costs the caller at most its own
///   cost in the store, and [`OutageCount::undetermined`] counts it. Their number is bounded by the
///   calls in flight when the breaker opens, and one probe per pause. It never admits more. An
///   estimate of `reserve`, or of an HTTP layer, is taken back from the store within ten
///   seconds, if the store is there by then.
///
/// # Operations other than a check
///
/// | operation | while the store is unreachable |
/// |---|---|
/// | acquire, peek | decided by the choices |
/// | force, refund | on the local limits; nothing for open ones; an error if a limit is closed, or if the store may have done it, also when it is repeated under its id |
/// | reset | an error: only the store can do it |
/// | adopt | on the local limits |
/// | settle, extend, renew | an error, unless the reservation was made without the store |
///
/// Whatever was done under an id without the store stays with the local limits, also when the store
/// is back: a repeated request is done once, and a reservation settles where it was made. An id
/// that was reserved in the store settles there only: repeat the settlement when the store is back.
/// Until then, and if it never comes, the estimate stays charged. The same holds for a reservation
/// whose outcome is unknown: the store may keep its estimate charged beside the local one, once per
/// id.
///
/// It needs a tokio runtime with the time driver enabled. Clones share everything.
#[derive_where(Clone)]
pub struct Fallback<S, A: InMemory = AnyAlgorithm, C = PreciseClock> {
    inner: Arc<SharedFallback<S, A, C>>,
}

struct SharedFallback<S, A: InMemory, C> {
    store: S,
    deadline: Duration,
    breakers: Breakers,
    outage: Outage<A, C>,
    charging: Mutex<Charging>,
}

/// Which task charges to the store what was admitted locally, and when.
#[derive(Debug, Default)]
struct Charging {
    /// Until when the others leave it to one.
    leased_until: Option<Instant>,
    /// Until when none begins if no breaker [closes](Breakers::closings) before, because what is
    /// left waits for unreachable servers.
    rests_until: Option<(Instant, u64)>,
}

/// How a look at all pending charges ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Pass {
    /// All are charged.
    Done,
    /// Those that are left wait for unreachable servers.
    Away,
    /// A server failed, and its breaker is closed still.
    Failed,
}

impl<S: std::fmt::Debug, A: InMemory, C> std::fmt::Debug for Fallback<S, A, C> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fallback")
            .field("store", &self.inner.store)
            .field("breaker", &self.breaker())
            .finish_non_exhaustive()
    }
}

impl<S, A: InMemory, C> Fallback<S, A, C> {
    /// The wrapped store.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.inner.store
    }

    /// The state of the circuit breaker: of several, the one that is furthest from closed.
    #[must_use]
    pub fn breaker(&self) -> BreakerState {
        self.inner.breakers.state()
    }

    /// How many circuit breakers are open or half-open. There is one per server that the store
    /// [tells](Store::server_of), and per combination of servers.
    #[must_use]
    pub fn open_breakers(&self) -> usize {
        self.inner.breakers.not_closed()
    }

    /// How many decisions were made without the store, by limit and choice; none that are zero.
    #[must_use]
    pub fn outage_counts(&self) -> Vec<OutageCount> {
        self.inner.outage.counts.read()
    }
}

impl<S, A: InMemory + Share + Clone + PartialEq + 'static, C: Clock> Fallback<S, A, C> {
    /// Checks that these limits can be decided without the store, as [`FallbackBuilder::build`]
    /// does: for limits of another limiter over this store, and for those that replace them. A
    /// request whose limits declare no outage behaviour is always an error, whether there is an
    /// outage or not.
    ///
    /// # Errors
    /// As [`FallbackBuilder::build`].
    pub fn validate(&self, limits: &Limits<A>) -> Result<(), ConfigError> {
        self.inner.outage.validate(limits)
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

/// What the store says, or why it does not. Its own errors are those of a store that is there.
type StoreAnswer<T, E> = Result<Result<T, E>, FallbackError<E>>;

impl<S: Store<A> + 'static, A: InMemory + Share + Clone + PartialEq + 'static, C: Clock + 'static>
    Fallback<S, A, C>
{
    /// Asks the store about a batch within the deadline, if the breaker of its server admits it,
    /// and tells the breaker how that ended. What `is_cached` in a layer within tells nothing of
    /// the store; any other answer starts the recovery.
    async fn ask<T, F: Future<Output = Result<T, S::Error>>>(
        &self,
        batch: &Batch<'_, A>,
        asked: impl FnOnce() -> F,
        is_cached: fn(&T) -> bool,
    ) -> StoreAnswer<T, S::Error> {
        let SharedFallback { store, breakers, deadline, .. } = &*self.inner;
        let op = batch.operation();
        let is_open = |retry_after| FallbackError::BreakerOpen { op, retry_after };
        let call = breakers.for_server(store.server_of(batch)).admit().map_err(is_open)?;
        let error = match timeout(*deadline, asked()).await {
            Err(_) => FallbackError::TimedOut { deadline: *deadline },
            Ok(Err(error)) if error.kind().is_outage() => FallbackError::Store(error),
            Ok(said) => {
                if said.as_ref().is_ok_and(is_cached) {
                    call.not_sent();
                } else {
                    call.note_answer();
                    self.recover();
                }
                return Ok(said);
            }
        };
        call.note_failure();
        Err(error)
    }

    async fn ask_about(&self, batch: &Batch<'_, A>) -> StoreAnswer<Verdict, S::Error> {
        let is_cached =
            |verdict: &Verdict| matches!(verdict.source(), Source::Cache | Source::Allotment);
        self.ask(batch, || self.inner.store.apply(batch), is_cached).await
    }

    /// Starts a task that charges what was admitted locally, if there is something.
    fn recover(&self) {
        if self.pending_charges() == 0 {
            return;
        }
        let Charging { leased_until, rests_until } = *lock(&self.inner.charging);
        let closings = self.inner.breakers.closings();
        let rests = rests_until.filter(|(_, since)| *since == closings).map(|(until, _)| until);
        if !is_later(leased_until) && !is_later(rests) {
            let fallback = self.clone();
            tokio::spawn(async move { fallback.charge_pending().await });
        }
    }

    /// Charges to the store what was admitted locally, until nothing is left but what waits for
    /// unreachable servers.
    async fn charge_pending(&self) {
        let SharedFallback { breakers, charging, .. } = &*self.inner;
        // An answer that finds a task starts none. What was noted after the task's last look is
        // therefore looked for once more when the task has ended: both sides take the lock between,
        // so that one sees the other's.
        while self.pending_charges() > 0 {
            {
                // If no thread drives the runtime of another task that charges, this one takes over
                // when its time is over.
                let mut charging = lock(charging);
                if is_later(charging.leased_until) {
                    return;
                }
                charging.leased_until = self.inner.charges_until(Duration::ZERO);
            }
            let _ends = OnDrop(|| lock(charging).leased_until = None);
            loop {
                let closings = breakers.closings();
                match self.charge_all().await {
                    Pass::Done => break,
                    Pass::Failed => {
                        let pause = breakers.pause();
                        lock(charging).leased_until = self.inner.charges_until(pause);
                        tokio::time::sleep(pause).await;
                    }
                    Pass::Away if breakers.closings() == closings => {
                        let rests_until = Instant::now().checked_add(breakers.pause());
                        lock(charging).rests_until = rests_until.map(|until| (until, closings));
                        return;
                    }
                    Pass::Away => {}
                }
            }
        }
    }

    /// Tries to charge each key that has charges now. A server that fails is not asked about
    /// another one.
    async fn charge_all(&self) -> Pass {
        let SharedFallback { store, breakers, outage, charging, .. } = &*self.inner;
        let Some(journal) = &outage.journal else { return Pass::Done };
        let (mut begin, end) = (0, journal.end());
        let (mut pass, mut failed) = (Pass::Done, HashSet::new());
        while let Some((place, mut pending)) = journal.pop(begin..end) {
            begin = place + 1;
            // Code of others may panic, and the runtime of this task may end.
            let forgets = OnDrop(|| journal.forget());
            let still = outage.counts_still(&pending.limit, &pending.key, pending.now);
            pending.cost = pending.cost.min(still);
            if pending.cost == 0 {
                std::mem::forget(forgets);
                continue;
            }
            let check = Check { limit: &*pending.limit, key: &pending.key, cost: pending.cost };
            let batch = Batch::one(&check).op(Op::Force).now(pending.now);
            let server = store.server_of(&batch);
            let breaker = breakers.for_server(server);
            if !breaker.is_closed() || failed.contains(&server) {
                pass = pass.max(if breaker.is_closed() { Pass::Failed } else { Pass::Away });
                std::mem::forget(forgets);
                journal.put_back(place, pending);
                continue;
            }
            lock(charging).leased_until = self.inner.charges_until(Duration::ZERO);
            let said = self.ask_about(&batch).await;
            std::mem::forget(forgets);
            match said {
                Ok(Ok(_)) => continue,
                // The store is there, and its algorithm cannot do this.
                Ok(Err(_)) => {
                    journal.forget();
                    continue;
                }
                // It may have been charged, and is not charged twice.
                Err(error) if error.kind() == ErrorKind::Indeterminate => journal.forget(),
                Err(_) => journal.put_back(place, pending),
            }
            failed.insert(server);
            pass = pass.max(if breaker.is_closed() { Pass::Failed } else { Pass::Away });
        }
        pass
    }
}

impl<S, A: InMemory, C> SharedFallback<S, A, C> {
    /// The end of the time for a pause and a charge. A pause that never ends is none: then nothing
    /// is charged either.
    fn charges_until(&self, pause: Duration) -> Option<Instant> {
        Instant::now().checked_add(pause.saturating_add(2 * self.deadline))
    }
}

fn is_later(until: Option<Instant>) -> bool {
    until.is_some_and(|until| Instant::now() < until)
}

#[deny(clippy::missing_trait_methods)]
impl<S: Store<A> + 'static, A: InMemory + Share + Clone + PartialEq + 'static, C: Clock + 'static>
    Store<A> for Fallback<S, A, C>
{
    type Error = FallbackError<S::Error>;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, Self::Error> {
        let SharedFallback { outage, breakers, .. } = &*self.inner;
        // What could not be decided during an outage is refused before there is one.
        for check in batch.checks() {
            outage.choice(check.limit)?;
        }
        let is_known = outage.ids.known_by(batch) == Some(KnownBy::Local);
        let away = if is_known || batch.is_without_store() {
            FallbackError::BreakerOpen { op: batch.operation(), retry_after: breakers.pause() }
        } else {
            match self.ask_about(batch).await {
                Ok(said) => return said.map_err(FallbackError::Store),
                Err(away) => away,
            }
        };
        if away.kind() == ErrorKind::Indeterminate
            && batch.operation() == Op::Acquire
            && batch.is_settled_once()
        {
            self.cancel(batch);
        }
        outage.decide(batch, is_known, away, breakers)
    }

    fn report_counts(&self, report: &mut dyn FnMut(&'static str, u64)) {
        report("ratelimit_journal_keys", self.pending_charges() as u64);
        report("ratelimit_journal_forgotten_total", self.forgotten_charges());
        self.inner.outage.local.report_counts(report);
        self.inner.store.report_counts(report);
    }

    fn server_of(&self, batch: &Batch<'_, A>) -> Option<u64> {
        self.inner.store.server_of(batch)
    }
}

/// While the store is unreachable, the entries of a local limit are those in memory. For any other
/// limit the error is returned.
#[deny(clippy::missing_trait_methods)]
impl<
    S: LogStore<A> + 'static,
    A: InMemory + Share + Clone + PartialEq + 'static,
    C: Clock + 'static,
> LogStore<A> for Fallback<S, A, C>
{
    async fn logged(
        &self,
        limit: &Limit<A>,
        key: &str,
        now: Now,
    ) -> Result<Vec<LoggedRequest>, Self::Error> {
        let SharedFallback { store, outage, .. } = &*self.inner;
        let check = Check { limit, key, cost: 0 };
        let peek = Batch::one(&check).op(Op::Peek);
        let away = match self.ask(&peek, || store.logged(limit, key, now), |_| false).await {
            Ok(said) => return said.map_err(FallbackError::Store),
            Err(away) => away,
        };
        if outage.choice(limit)? != OnOutage::Local {
            return Err(away);
        }
        let entries = outage.local.logged(&outage.share_of(limit)?.limit, key, now).await;
        entries.map_err(FallbackError::Local)
    }
}

// While the store is unreachable, the policy decides, and no record can be read or changed.
keeps_records!(
    Fallback<S, A, C>,
    [S: RecordStore<A> + 'static, A: InMemory + Share + Clone + PartialEq + 'static, C: Clock + 'static],
    inner.store,
    FallbackError::Store
);
