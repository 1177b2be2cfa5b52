//! [`Allotments`]: wraps a store and spends budget that the store has charged in advance.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use dashmap::DashMap;
use derive_where::derive_where;
use ratelimit_core::store::{Batch, LogStore, RecordStore};
use ratelimit_core::{Algorithm, AnyAlgorithm, Clock, Store, Verdict};
use ratelimit_memory::PreciseClock;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::time::timeout;

mod builder;
mod ledger;
mod slot;
mod spending;

pub use builder::AllotmentsBuilder;
use ledger::Ledger;
use slot::Terms;

/// Programs that end have some seconds: Kubernetes gives them 30, `docker stop` 10.
const LONGEST_GIVE_BACK: Duration = Duration::from_secs(5);

/// Wraps a store and spends budget that the store has charged in advance, without a call per
/// request.
///
/// ```
/// use ratelimit_core::{Gcra, Limits, RateLimiter};
/// use ratelimit_layers::Allotments;
/// use ratelimit_redis::RedisStore;
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let server = ratelimit_servers::RedisServer::start()?;
/// # let url = server.url();
/// let redis = RedisStore::connect(&url).await?;
/// let limits = Limits::builder().limit("api", Gcra::per_second(100_000).burst(50_000)).build()?;
/// let limiter = RateLimiter::new(limits, Allotments::new(redis));
///
/// for _ in 0..10_000 {
///     assert!(limiter.check("alice").await?.allowed());
/// }
/// let counts = limiter.store().counts();
/// assert!(counts.served > 9_000 && counts.asked < 1_000);
/// // Before the process ends:
/// limiter.store().give_back().await;
/// # Ok(())
/// # }
/// ```
///
/// # What it does
///
/// An *allotment* is a part of a limit's budget that the store charges at once, as a reservation,
/// and that this process spends by itself. Other limiters call it a lease or a quota bucket. Each
/// combination of limits and keys has its own.
///
/// - The first request goes to the store. One that comes within a
///   [lifetime](AllotmentsBuilder::lifetime) of it *draws*: it charges the store for two requests,
///   the next draw for four, and so on. An allotment that ends with something left sets the size of
///   the next one to what was used. Draws are small where little is left: at most an
///   [eighth](AllotmentsBuilder::divisor) of it.
/// - Requests are served from the allotment while their costs fit what is left. While a draw is in
///   flight, other requests go to the store by themselves; none waits for it.
/// - What is left goes back to the store when the allotment ends: after a lifetime, at the end of a
///   window, when a cost no longer fits, or by [`give_back`](Self::give_back).
/// - A draw that is denied denies nothing: its request goes to the store alone. A denial by the
///   store is final once this process has given back what it has left of the limits that deny and
///   their keys; it waits a lifetime at most for what is on its way. What a draw in flight will
///   have left comes too late for it.
///
/// It serves requests at the store's time under limits whose charges can be
/// [settled](Algorithm::settle) and that [recover](Algorithm::recovery) in a known way: GCRA, token
/// buckets and fixed windows, and batches of these. All other requests and operations go to the
/// store: logs, other windows, leases, limits that count attempts or [look for
/// records](ratelimit_core::Limit::overridable), peeks, requests under an id, with metadata or at a
/// given time, and those whose keys have more than 1,024 bytes. A batch with one such limit goes to
/// the store as a whole.
///
/// # How far it exceeds a limit
///
/// What a process admits from an allotment at a time `t`, the store has charged in `(t − L, t]`,
/// where `L` is the lifetime. So all processes together, however many there are, admit in an
/// interval of length `x` at most what the algorithm allows in an interval of length `x + L`:
///
/// - a bucket at most `burst + rate · (x + L)`;
/// - a fixed window exactly its limit, because an allotment ends with the window that it was drawn
///   in.
///
/// This holds through lost requests and replies, crashes, and settlements that come late or never:
/// each of them admits less, never more. It assumes that the clock of this process is slower than
/// the store's by no more than 1,000 parts per million, which is far more than the clocks of
/// servers drift, and that the store's clock does not jump. Budget that is drawn and not used is
/// back in the store `L` and a call later. `docs/allotments-proof.md` of this crate derives both.
///
/// # The verdict
///
/// The [source](Verdict::source) of a request that was served is
/// [`Source::Allotment`](ratelimit_core::Source::Allotment). `allowed`, `cost` and `limit` are
/// exact. `remaining` is what the store had left at the last draw, with what is left of the
/// allotment; it does not know what other processes have charged since, nor what has refilled.
/// `replenish_after` and `reset_after` count down from the last draw, as if all of it were used.
///
/// # Resets, refunds and changed limits
///
/// A reset through this store ends the allotments of its keys. What is left of them is not given
/// back, because the reset has returned it; other limits of the same batches stay charged until
/// they recover. A refund, a forced charge or a settlement gives them back first. So does the
/// adoption of what remains elsewhere; a draw in flight then stays charged, because what is adopted
/// counts it. Resets by other processes are not seen: until an allotment ends, it is spent on top
/// of the new budget, at most one per slot and process. Changed parameters of a limit end its
/// allotments: what is left of them goes back before the store is asked under the new ones. So do
/// [numbers of a request](ratelimit_core::Numbers) that differ from those before them on the same
/// key: a customer keeps its numbers, and so its allotment.
///
/// # With other stores
///
/// It wraps a store on one server or on a cluster, or a [`DenialCache`](crate::DenialCache) around
/// one. Wrap it in a [`Fallback`](crate::Fallback), `Metrics`, `Traced` and
/// [`TopDenied`](crate::TopDenied). While the store is unreachable, the rest of each allotment is
/// still spent. Each draw leaves a reservation in the store, which forgets it ten seconds after the
/// rest was given back, and after an hour if nothing was left.
///
/// It needs a tokio runtime with the time driver enabled. Without one, the rest goes back with the
/// next request that asks about the same keys.
///
/// Clones share everything.
#[derive_where(Clone)]
pub struct Allotments<S, A: Algorithm = AnyAlgorithm, C = PreciseClock> {
    inner: Arc<SharedAllotments<S, A, C>>,
}

struct SharedAllotments<S, A: Algorithm, C> {
    store: S,
    ledger: Ledger<A>,
    terms: Terms,
    clock: C,
    tally: AllotmentTally,
    returns: Returns,
}

/// What is on its way back to the store.
#[derive(Debug, Default)]
struct Returns {
    /// How many units. Changes whenever some have arrived, or are lost.
    units: watch::Sender<u64>,
    /// In how many settlements a limit and key is, by its hash.
    by_key: DashMap<u128, usize>,
}

#[derive(Debug, Default)]
struct AllotmentTally {
    asked: AtomicU64,
    served: AtomicU64,
    draws: AtomicU64,
    given_back: AtomicU64,
    forfeited: AtomicU64,
}

/// What [`Allotments`] have saved, and what became of what they drew.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllotmentCounts {
    /// How many requests the store decided, those that drew included.
    pub asked: u64,
    /// How many requests were served from allotments, without a call.
    pub served: u64,
    /// How many draws were sent.
    pub draws: u64,
    /// How many units went back to the store unused, over all limits.
    pub given_back: u64,
    /// How many units were, or may have been, charged and neither used nor given back: after a lost
    /// reply, a failed settlement or a reset.
    pub forfeited: u64,
    /// How many combinations of limits and keys have a slot.
    pub slots: usize,
}

impl<S: fmt::Debug, A: Algorithm, C> fmt::Debug for Allotments<S, A, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Allotments")
            .field("store", &self.inner.store)
            .field("counts", &self.counts())
            .finish_non_exhaustive()
    }
}

impl<S, A: Algorithm> Allotments<S, A> {
    /// Allotments of this store, each with a lifetime of 100 ms.
    #[must_use]
    pub fn new(store: S) -> Self {
        Allotments::builder().build(store)
    }
}

impl<S, A: Algorithm, C> Allotments<S, A, C> {
    /// The wrapped store.
    #[must_use]
    pub fn store(&self) -> &S {
        &self.inner.store
    }

    /// What it has saved so far.
    #[must_use]
    pub fn counts(&self) -> AllotmentCounts {
        let SharedAllotments { tally, ledger, .. } = &*self.inner;
        AllotmentCounts {
            asked: tally.asked.load(Relaxed),
            served: tally.served.load(Relaxed),
            draws: tally.draws.load(Relaxed),
            given_back: tally.given_back.load(Relaxed),
            forfeited: tally.forfeited.load(Relaxed),
            slots: ledger.len(),
        }
    }
}

impl<S: Store<A> + 'static, A: Algorithm + Clone + PartialEq + 'static, C: Clock + 'static>
    Allotments<S, A, C>
{
    /// Ends all allotments and gives back what is left of them, also of draws in flight when their
    /// answers come. Waits for what is on its way back already. Returns how many units, over all
    /// limits, did not go back meanwhile: the store failed, or did not answer within 5 seconds.
    /// What it has not answered by then still goes back if the runtime lives on. Draws in flight
    /// are not counted; [`AllotmentCounts::forfeited`] has what was lost before.
    ///
    /// For a program that ends: call it after the last request. Requests that come later draw
    /// again. Without a runtime it waits for as long as the store takes.
    pub async fn give_back(&self) -> u64 {
        let SharedAllotments { ledger, tally, returns, .. } = &*self.inner;
        let lost = tally.forfeited.load(Relaxed);
        let settling = async {
            self.inner.settle(ledger.end_all()).await;
            let mut others = returns.units.subscribe();
            drop(others.wait_for(|units| *units == 0).await);
        };
        if Handle::try_current().is_ok() {
            let _is_late = timeout(LONGEST_GIVE_BACK, settling).await;
        } else {
            settling.await;
        }
        let lost = tally.forfeited.load(Relaxed).saturating_sub(lost);
        lost.saturating_add(*returns.units.borrow())
    }
}

#[deny(clippy::missing_trait_methods)]
impl<S: Store<A> + 'static, A: Algorithm + Clone + PartialEq + 'static, C: Clock + 'static> Store<A>
    for Allotments<S, A, C>
{
    type Error = S::Error;

    async fn apply(&self, batch: &Batch<'_, A>) -> Result<Verdict, S::Error> {
        self.inner.decide(batch).await
    }

    fn report_counts(&self, report: &mut dyn FnMut(&'static str, u64)) {
        let AllotmentCounts { asked, served, draws, given_back, forfeited, slots } = self.counts();
        report("ratelimit_allotment_asked_total", asked);
        report("ratelimit_allotment_served_total", served);
        report("ratelimit_allotment_draws_total", draws);
        report("ratelimit_allotment_units_given_back_total", given_back);
        report("ratelimit_allotment_units_forfeited_total", forfeited);
        report("ratelimit_allotment_slots", slots as u64);
        self.inner.store.report_counts(report);
    }

    fn server_of(&self, batch: &Batch<'_, A>) -> Option<u64> {
        self.inner.store.server_of(batch)
    }
}

lists_logged!(
    Allotments<S, A, C>,
    [A: Algorithm + Clone + PartialEq + 'static, S: LogStore<A> + 'static, C: Clock + 'static],
    inner.store
);
keeps_records!(
    Allotments<S, A, C>,
    [A: Algorithm + Clone + PartialEq + 'static, S: RecordStore<A> + 'static, C: Clock + 'static],
    inner.store
);
