//! [`OwnedReservation`]: a charge that is settled when its value is dropped, wherever that is.

use alloc::boxed::Box;
use alloc::sync::Arc;
use core::future::Future;
use core::pin::Pin;
use core::task::{Context, Waker};
use core::time::Duration;
use core::{error, fmt};
use std::sync::OnceLock;

use derive_where::derive_where;
use tokio::runtime::Handle;
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use super::{LimitCosts, RateLimiter, Request};
use crate::algorithms::Algorithm;
use crate::decision::Verdict;
use crate::error::ErrorKind;
use crate::identifiers::Identifiers;
use crate::limit::{Limit, Limits};
use crate::numbers::Numbers;
use crate::reservation::{Reservation, ReservationId};
use crate::store_traits::{Store, StoreError};

/// How long a settlement waits for an unreachable store, at least: by then a store may have
/// forgotten one that arrived.
const PATIENCE: Duration = Duration::from_micros(Reservation::REPEAT_US);
/// The pause before a settlement is sent again. Each next one is twice as long, up to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(25);
const LAST_PAUSE: Duration = Duration::from_secs(1);
/// How often a store may say that it does not know a reservation whose request may still be on its
/// way.
const MOST_UNKNOWN: u32 = 3;

impl<S: Store<A> + 'static, A: Algorithm + 'static> RateLimiter<S, A> {
    /// Charges an estimate, or grants a lease of that size, and hands over a value that settles or
    /// releases it.
    ///
    /// The value owns what it needs. It can move into a spawned task or into the body of a
    /// response, and it can be dropped anywhere: see [`OwnedReservation`].
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # use std::sync::Arc;
    /// # async fn example<S: Store<AnyAlgorithm> + 'static>(limiter: Arc<RateLimiter<S>>) -> Result<(), ReserveError<S::Error>> {
    /// match limiter.reserve("alice", 4_000).await? {
    ///     Reserved::Granted(reservation) => {
    ///         tokio::spawn(async move {
    ///             let tokens_used = 1_234; // what the call turned out to cost
    ///             reservation.settle(tokens_used).await
    ///         });
    ///     }
    ///     Reserved::Denied(verdict) => println!("try again in {:?}", verdict.retry_after()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// If this future is dropped before it is done, or the store loses the answer, the charge is
    /// cancelled in the background, as soon as the store answers again: see [`OwnedReservation`].
    ///
    /// # Errors
    /// What the store could not do, with the [id](ReserveError::id); a limit without reservations.
    /// A denial is no error.
    pub async fn reserve<C: Identifiers + Send + Sync + 'static>(
        self: &Arc<Self>,
        caller: C,
        estimate: impl Into<LimitCosts>,
    ) -> Result<Reserved<S, A, C>, ReserveError<S::Error>> {
        self.reserve_owned(None, caller, estimate.into(), None).await
    }

    /// [Reserves](Self::reserve) by these [numbers](Numbers), if there are some: they decide the
    /// reservation, its extensions and its settlement.
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # use std::sync::Arc;
    /// # async fn example<S: Store<AnyAlgorithm> + 'static>(
    /// #     limiter: Arc<RateLimiter<S>>, gold: Arc<Numbers>,
    /// # ) -> Result<(), ReserveError<S::Error>> {
    /// let reserved = limiter.reserve_by(Some(gold), "alice", 4_000).await?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As for [`reserve`](Self::reserve), and numbers that a limit does not accept.
    pub async fn reserve_by<C: Identifiers + Send + Sync + 'static>(
        self: &Arc<Self>,
        numbers: Option<Arc<Numbers<A>>>,
        caller: C,
        estimate: impl Into<LimitCosts>,
    ) -> Result<Reserved<S, A, C>, ReserveError<S::Error>> {
        self.reserve_owned(numbers, caller, estimate.into(), None).await
    }

    /// [Reserves](Self::reserve) the estimate if it fits; else what is left, if that is no less
    /// than `least`. The value says what it [charged](OwnedReservation::costs). See
    /// [`Request::reserve_up_to`].
    ///
    /// ```
    /// # use ratelimit_core::*;
    /// # use std::sync::Arc;
    /// # async fn example<S: Store<AnyAlgorithm> + 'static>(limiter: Arc<RateLimiter<S>>) -> Result<(), ReserveError<S::Error>> {
    /// match limiter.reserve_up_to("alice", 4_000, 500).await? {
    ///     Reserved::Granted(reservation) => {
    ///         let most_tokens = reservation.costs().uniform(); // such as 1,234 of the 4,000
    ///         println!("answer in at most {most_tokens:?} tokens");
    ///     }
    ///     Reserved::Denied(verdict) => println!("500 are left in {:?}", verdict.retry_after()),
    /// }
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`reserve`](Self::reserve).
    pub async fn reserve_up_to<C: Identifiers + Send + Sync + 'static>(
        self: &Arc<Self>,
        caller: C,
        estimate: impl Into<LimitCosts>,
        least: impl Into<LimitCosts>,
    ) -> Result<Reserved<S, A, C>, ReserveError<S::Error>> {
        self.reserve_up_to_by(None, caller, estimate, least).await
    }

    /// [`reserve_up_to`](Self::reserve_up_to) by these [numbers](Numbers), if there are some, as
    /// [`reserve_by`](Self::reserve_by) reserves by them.
    ///
    /// # Errors
    /// As for [`reserve_by`](Self::reserve_by).
    pub async fn reserve_up_to_by<C: Identifiers + Send + Sync + 'static>(
        self: &Arc<Self>,
        numbers: Option<Arc<Numbers<A>>>,
        caller: C,
        estimate: impl Into<LimitCosts>,
        least: impl Into<LimitCosts>,
    ) -> Result<Reserved<S, A, C>, ReserveError<S::Error>> {
        self.reserve_owned(numbers, caller, estimate.into(), Some(least.into())).await
    }

    async fn reserve_owned<C: Identifiers + Send + Sync + 'static>(
        self: &Arc<Self>,
        numbers: Option<Arc<Numbers<A>>>,
        caller: C,
        estimate: LimitCosts,
        least: Option<LimitCosts>,
    ) -> Result<Reserved<S, A, C>, ReserveError<S::Error>> {
        let (limiter, id) = (self.clone(), ReservationId::random());
        let (report, settled) = Default::default();
        let charge = Arc::new(OwnedCharge { limiter, caller, numbers, id, report, settled });
        // Made before the request is sent, so that a future that is dropped meanwhile leaves no
        // charge behind.
        let settling = charge.clone();
        let mut settlement = Settlement {
            settle: Box::new(move |costs, charged, granted| {
                Box::pin(settling.clone().settle_detached(costs, charged, granted))
            }),
            runtime: Handle::try_current().ok(),
            costs: LimitCosts::default(),
            charged: LimitCosts::default(),
            granted: false,
            done: false,
        };
        let request = charge.request().costs(&estimate);
        let decided = match &least {
            None => request.check().await.map(|verdict| (verdict, None)),
            Some(least) => {
                let decided = request.reserve_up_to(least).await;
                decided.map(|(verdict, costs)| (verdict, Some(costs)))
            }
        };
        match decided {
            Ok((verdict, costs)) if verdict.allowed() => {
                let costs = costs.unwrap_or(estimate);
                settlement.charged = costs.clone();
                settlement.costs = costs;
                settlement.granted = true;
                settlement.done = verdict.is_unrecorded();
                Ok(Reserved::Granted(OwnedReservation { charge, settlement, verdict }))
            }
            Ok((verdict, _)) => {
                settlement.done = true;
                Ok(Reserved::Denied(verdict))
            }
            Err(error) => {
                settlement.done = error.kind() != ErrorKind::Indeterminate;
                Err(ReserveError { id, error })
            }
        }
    }
}

/// What [`RateLimiter::reserve`] answers.
#[derive_where(Debug)]
#[must_use = "a reservation that is dropped is settled, and a denial limits nothing by itself"]
pub enum Reserved<S, A, C> {
    /// The estimate is charged, or the lease granted, until the value is dropped.
    Granted(OwnedReservation<S, A, C>),
    /// It is not.
    Denied(Verdict),
}

/// Why [`RateLimiter::reserve`] failed.
///
/// It displays as the store's own error does, with the same [kind](StoreError::kind) and source.
#[derive(Debug)]
#[non_exhaustive]
pub struct ReserveError<E> {
    /// Under which id the estimate may be charged, if the kind is
    /// [`Indeterminate`](ErrorKind::Indeterminate). It is being cancelled; a program that ends
    /// before can settle it later, at 0.
    pub id: ReservationId,
    /// What the store could not do.
    pub error: E,
}

impl<E: fmt::Display> fmt::Display for ReserveError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

impl<E: error::Error> error::Error for ReserveError<E> {
    fn source(&self) -> Option<&(dyn error::Error + 'static)> {
        self.error.source()
    }
}

impl<E: StoreError> StoreError for ReserveError<E> {
    fn kind(&self) -> ErrorKind {
        self.error.kind()
    }
}

/// A charge under an id of its own, or a lease, that is settled or released when the value is
/// dropped.
///
/// # Dropping
///
/// - A lease of a [`Concurrency`](crate::Concurrency) limit is released.
/// - A reservation is settled at its [`costs`](Self::costs): the estimate, unless
///   [`set_cost`](Self::set_cost) has changed it. So a client that disconnects pays for what it
///   got, and a task that panics pays its estimate. [Settling](Self::settle) at 0 gives all of it
///   back.
///
/// Dropping never waits. On its runtime, a store that decides without waiting has settled when the
/// value is dropped. Otherwise dropping spawns a task on the tokio runtime on which the value was
/// made or, if that was outside of any, on the one in which it is dropped. Where there is neither,
/// where the runtime has shut down, or where the store cannot be reached, it expires by itself: a
/// lease after its time, and a reservation after an hour, at its estimate.
///
/// An unreachable store is asked again, after pauses that grow to a second, until [ten
/// seconds](crate::store::Reservation::REPEAT_US) have passed. Sent again, a settlement changes
/// nothing. The pauses take a runtime with its time driver enabled. Its errors reach no caller;
/// [`on_error`](Self::on_error) receives them.
///
/// # Held for long
///
/// A store forgets a reservation that no request touches for an hour, and a lease after its length.
/// [`renew`](Self::renew) and [`extend`](Self::extend) keep a reservation for another hour, and
/// `renew` keeps a lease, so renew what lives for longer, at a third of that time.
///
/// ```
/// # use ratelimit_core::*;
/// # use std::time::Duration;
/// # async fn example<S: Store<AnyAlgorithm> + 'static>(
/// #     reservation: OwnedReservation<S, AnyAlgorithm, &'static str>,
/// #     mut work: impl Future<Output = u64> + Unpin,
/// # ) -> Result<Verdict, S::Error> {
/// let tokens_used = loop {
///     match tokio::time::timeout(Duration::from_secs(20 * 60), &mut work).await {
///         Ok(tokens_used) => break tokens_used,
///         Err(_) => _ = reservation.renew().await?,
///     }
/// };
/// reservation.settle(tokens_used).await
/// # }
/// ```
///
/// A settlement that comes too late cannot give back what was too much. It still charges what was
/// too little, as [`force`](Request::force) does, once however often it is sent, and its error
/// is [`Ended`](ErrorKind::Ended).
///
/// # Without a record
///
/// A store that has no room for another reservation charges the estimate all the same, and its
/// verdict [reports it](Verdict::is_unrecorded). The charge is then final: [`settle`](Self::settle)
/// sends nothing and returns that verdict. A lease holds its place until it expires.
#[derive_where(Debug)]
#[must_use = "a reservation that is dropped is settled, and a lease released"]
pub struct OwnedReservation<S, A, C> {
    charge: Arc<OwnedCharge<S, A, C>>,
    settlement: Settlement,
    verdict: Verdict,
}

impl<S, A, C> OwnedReservation<S, A, C>
where
    S: Store<A> + 'static,
    A: Algorithm + 'static,
    C: Identifiers + Send + Sync + 'static,
{
    /// The verdict with which the limiter granted the reservation.
    pub const fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    /// The id of the reservation.
    #[must_use]
    pub fn id(&self) -> ReservationId {
        self.charge.id
    }

    /// What it is settled at when it is dropped.
    #[must_use]
    pub const fn costs(&self) -> &LimitCosts {
        &self.settlement.costs
    }

    /// The limits under which it is charged.
    #[must_use]
    pub fn limits(&self) -> &Limits<A> {
        self.charge.limiter.limits()
    }

    /// Sets what it is settled at when it is dropped, such as the bytes of a response that have
    /// been sent so far. The cost of a name that no limit has is left out, so that the rest is
    /// settled.
    pub fn set_cost(&mut self, cost: impl Into<LimitCosts>) {
        self.settlement.costs = cost.into().only(|name| self.limits().has(name));
    }

    /// Calls this with an error of the settlement that no caller receives, because the value was
    /// dropped. The first call of this method counts.
    pub fn on_error(&self, report: impl Fn(&dyn StoreError) + Send + Sync + 'static) {
        let _is_set = self.charge.report.set(Box::new(report));
    }

    /// Calls this with the verdict of a settlement that no caller receives, because the value was
    /// dropped: it says which limits [warn](crate::NamedDecisions::warned). The first call of this
    /// method counts.
    pub fn on_settled(&self, told: impl Fn(&Verdict) + Send + Sync + 'static) {
        let _is_set = self.charge.settled.set(Box::new(told));
    }

    /// Grows the reservation to this total, if what is added fits: a stream that is longer than its
    /// estimate asks before it goes on. Then it lives for another hour. After a denial the
    /// reservation is what it was. A lease beside it keeps its places and is not renewed, and one
    /// that has ended is left out: [`renew`](Self::renew) tells.
    ///
    /// # Errors
    /// What the store could not do; the reservation has expired, or has [no
    /// record](Self#without-a-record). After an error the settlement is at the cost before.
    pub async fn extend(&mut self, total: impl Into<LimitCosts>) -> Result<Verdict, S::Error> {
        let mut total = total.into();
        let has_leases = |limit: &&Limit<A>| limit.algorithm().has_leases();
        if !self.limits().iter().all(|limit| has_leases(&limit)) {
            for name in self.limits().iter().filter(has_leases).map(Limit::name) {
                if total.parts().0.all(|(named, _)| named != name) {
                    total.set(name, self.settlement.charged.get(name));
                }
            }
        }
        let verdict = self.charge.request().costs(&total).extend().await?;
        if verdict.allowed() {
            self.settlement.charged = total.clone().max(&self.settlement.charged);
            self.settlement.costs = total.max(&self.settlement.costs);
        }
        Ok(verdict)
    }

    /// Settles the reservation at what it did cost: gives back what was too much, or charges what
    /// was missing, down to nothing left. A cost of 0 gives all of it back. A lease ends at any
    /// cost.
    ///
    /// If this future is dropped before it is done, or the store could not be reached, the
    /// settlement is sent once more in the background.
    ///
    /// # Errors
    /// What the store could not do. [`Ended`](ErrorKind::Ended) if the reservation had expired: it
    /// is [settled late](Self#held-for-long). After the cost of a name that no limit has, the
    /// reservation is settled at its [`costs`](Self::costs) before.
    pub async fn settle(mut self, cost: impl Into<LimitCosts>) -> Result<Verdict, S::Error> {
        if self.verdict.is_unrecorded() {
            return Ok(self.verdict.clone());
        }
        let costs = cost.into();
        self.charge.request().costs(&costs).validate()?;
        self.settlement.costs = costs;
        let Settlement { costs, charged, .. } = &self.settlement;
        let answer = self.charge.settle(costs, charged).await;
        self.settlement.done = match &answer {
            Ok(_) => true,
            Err(error) => matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Ended),
        };
        answer
    }

    /// Renews a lease for its whole length, and keeps a reservation for another hour.
    ///
    /// # Errors
    /// The store's error. [`Ended`](ErrorKind::Ended) if it had expired: then another caller may
    /// have the place of the lease.
    pub async fn renew(&self) -> Result<Verdict, S::Error> {
        self.charge.request().renew().await
    }
}

/// Whose charge, and under which id.
#[derive_where(Debug)]
struct OwnedCharge<S, A, C> {
    #[derive_where(skip)]
    limiter: Arc<RateLimiter<S, A>>,
    #[derive_where(skip)]
    caller: C,
    /// The numbers that decide, if they are not those of the limits.
    #[derive_where(skip)]
    numbers: Option<Arc<Numbers<A>>>,
    id: ReservationId,
    /// Receives the errors that reach no caller.
    #[derive_where(skip)]
    report: OnceLock<Box<Report>>,
    /// Receives the verdict that reaches no caller.
    #[derive_where(skip)]
    settled: OnceLock<Box<Settled>>,
}

/// Hears of an error.
type Report = dyn Fn(&dyn StoreError) + Send + Sync;

/// Hears of a settlement.
type Settled = dyn Fn(&Verdict) + Send + Sync;

/// Marks the id of what a reservation cost more than was charged, once it has ended.
const LATE: u128 = 0x6c61_7465 << 96;

impl<S: Store<A>, A: Algorithm, C: Identifiers + Sync> OwnedCharge<S, A, C> {
    fn request(&self) -> Request<'_, S, A, C> {
        self.request_under(self.id)
    }

    fn request_under(&self, id: ReservationId) -> Request<'_, S, A, C> {
        let request = self.limiter.request(&self.caller).with_drawn_id(id);
        match &self.numbers {
            Some(numbers) => request.numbers(numbers),
            None => request,
        }
    }

    /// Settles it at these costs, of which so much was charged. If the store has forgotten it, the
    /// rest is charged under an id of its own, once, and the error stands.
    async fn settle(&self, costs: &LimitCosts, charged: &LimitCosts) -> Result<Verdict, S::Error> {
        let answer = self.request().costs(costs).settle().await;
        if answer.as_ref().is_err_and(|error| error.kind() == ErrorKind::Ended) {
            let mut more = LimitCosts::from(0);
            // A lease ends at any cost.
            for limit in self.limiter.limits().iter().filter(|it| !it.algorithm().has_leases()) {
                let name = limit.name();
                more.set(name, costs.get(name).saturating_sub(charged.get(name)));
            }
            if more.parts().0.any(|(_, cost)| cost > 0) {
                let id = ReservationId::new(self.id.as_u128() ^ LATE);
                let _charged = self.request_under(id).costs(&more).force().await?;
            }
        }
        answer
    }

    /// Settles it for no caller that could receive an error.
    async fn settle_detached(
        self: Arc<Self>,
        costs: LimitCosts,
        charged: LimitCosts,
        granted: bool,
    ) {
        // Under its id, a further attempt changes nothing if the first arrived. After the last one,
        // the reservation expires.
        let settle = || async {
            let verdict = self.settle(&costs, &charged).await?;
            self.settled.get().inspect(|told| told(&verdict));
            Ok::<_, S::Error>(())
        };
        let settled = repeat_settlement(granted, settle).await;
        if let (Err(error), Some(report)) = (settled, self.report.get()) {
            report(&error);
        }
    }
}

/// Sends a settlement for which no caller waits, again after pauses that grow to a second, until
/// the store has answered or [ten seconds](Reservation::REPEAT_US) have passed. For layers that
/// settle by themselves; a settlement has an id, so that sending it again changes nothing.
/// `granted` is whether the store has answered the request that it settles: otherwise that may come
/// later, and a store that does not know it is asked a few times more.
///
/// It needs a tokio runtime with its time driver enabled, unless the first attempt succeeds.
///
/// # Errors
/// Of the last attempt.
pub async fn repeat_settlement<T, E: StoreError, F: Future<Output = Result<T, E>>>(
    granted: bool,
    mut attempt: impl FnMut() -> F,
) -> Result<(), E> {
    let (mut begin, mut pause, mut unknown) = (None, FIRST_PAUSE, 0);
    loop {
        let sent = begin.is_some();
        let Err(error) = attempt().await else { return Ok(()) };
        let is_again = match error.kind() {
            kind if kind.is_outage() => true,
            // The request that it cancels may come later, as by another connection.
            ErrorKind::Ended if !granted => {
                unknown += 1;
                if unknown > MOST_UNKNOWN {
                    return Ok(());
                }
                true
            }
            _ => false,
        };
        // A store that takes long to fail is asked twice.
        let is_late = begin.get_or_insert_with(Instant::now).elapsed() >= PATIENCE && sent;
        if is_late || !is_again {
            return Err(error);
        }
        // In a task, and not while the value is dropped.
        yield_now().await;
        sleep(pause).await;
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

/// Settles a charge at the first costs, of which the second were charged, and which was granted or
/// may not have been. It shares the charge with its task, which outlives it.
type Settle =
    dyn Fn(LimitCosts, LimitCosts, bool) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync;

/// The settlement that is to come of a charge. It is sent when this is dropped, unless it is done.
#[derive_where(Debug)]
struct Settlement {
    #[derive_where(skip)]
    settle: Box<Settle>,
    /// The runtime in which it was made.
    runtime: Option<Handle>,
    costs: LimitCosts,
    charged: LimitCosts,
    /// The store has answered: no request is in flight that a settlement could overtake.
    granted: bool,
    done: bool,
}

impl Drop for Settlement {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let Some(runtime) = self.runtime.take().or_else(|| Handle::try_current().ok()) else {
            return;
        };
        let (costs, charged) = (std::mem::take(&mut self.costs), std::mem::take(&mut self.charged));
        let mut settling = (self.settle)(costs, charged, self.granted);
        // A store that need not be waited for settles at once, so that the next request finds the
        // capacity. Elsewhere that runtime may have ended, where timers panic; a panic of the store
        // while this thread panics already would end the process.
        let is_there = Handle::try_current().is_ok_and(|current| current.id() == runtime.id());
        if self.granted && is_there && !std::thread::panicking() {
            let mut context = Context::from_waker(Waker::noop());
            if settling.as_mut().poll(&mut context).is_ready() {
                return;
            }
        }
        runtime.spawn(settling);
    }
}
