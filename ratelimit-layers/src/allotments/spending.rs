//! What [`Allotments`] does with a request: serves it, draws for it, or has the store asked.

use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use ratelimit_core::{
    Algorithm, Batch, Check, Clock, ErrorKind, Now, Op, Recovery, ReservationId, Source, Store,
    StoreError, Timestamp, Verdict,
};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::Inner;
use super::ledger::{Checks, EndedOf, Kept, Place};
use super::slot::{Answer, Draw, Ended, Ending, Slot};
use crate::plain::acquires_plainly;

/// How many settlements of one caller are under way at once.
const SETTLEMENTS_AT_ONCE: usize = 64;

/// How a request goes on.
pub(super) enum Begun<'b, S, A: Algorithm + Clone + PartialEq, C> {
    /// It is decided.
    Decided(Verdict),
    /// The store is asked.
    Asks(Asking<'b, S, A, C>),
}

/// A request for which the store is asked as for any.
pub(super) struct Asking<'b, S, A: Algorithm + Clone + PartialEq, C> {
    inner: Arc<Inner<S, A, C>>,
    batch: Batch<'b, A>,
    /// The slot of a request that could be served.
    place: Option<Place>,
    /// Whether it makes the store forget charges.
    resets: bool,
}

/// What follows from an answer of the store.
pub(super) enum Afterwards {
    /// It is the verdict.
    Stands,
    /// It was a denial, and the request was served from an allotment that came meanwhile.
    Served(Verdict),
    /// It was a denial, and budget was given back since.
    AsksAgain,
}

/// Whether requests like this one are served from allotments: see [`Allotments`](super::Allotments).
fn is_served<A: Algorithm>(batch: &Batch<'_, A>) -> bool {
    let can =
        |algorithm: &A| algorithm.reservation_us().is_some() && algorithm.recovery().is_some();
    acquires_plainly(batch)
        && !batch.is_without_store()
        && batch.checks().iter().all(|check| can(check.limit.algorithm()))
}

impl<S, A, C> Inner<S, A, C>
where
    S: Store<A> + 'static,
    A: Algorithm + Clone + PartialEq + 'static,
    C: Clock + 'static,
{
    /// Serves a request, draws for it, or says that the store is asked.
    pub(super) async fn begin<'b>(
        self: &Arc<Self>,
        batch: &Batch<'b, A>,
    ) -> Result<Begun<'b, S, A, C>, S::Error> {
        let asking = |place, resets| {
            self.tally.asked.fetch_add(1, Relaxed);
            Begun::Asks(Asking { inner: self.clone(), batch: *batch, place, resets })
        };
        if !is_served(batch) {
            let (ending, resets) = match batch.operation() {
                Op::Reset => (Ending::Forfeited, true),
                Op::Force | Op::Refund | Op::Settle => (Ending::GivenBack, false),
                Op::Acquire | Op::Peek | Op::Renew => return Ok(asking(None, false)),
            };
            self.settle(self.ledger.end_of(batch, |slot| slot.end(ending))).await;
            return Ok(asking(None, resets));
        }
        let place = self.ledger.place(batch);
        let costs: Vec<u64> = batch.checks().iter().map(|check| check.cost).collect();
        let now = self.clock.now();
        let request = |kept: &mut Kept<A>| match kept.slot.request(
            &self.terms,
            now,
            &costs,
            ReservationId::random,
        ) {
            Answer::Serve(decisions) => ControlFlow::Break(decisions),
            Answer::Ask { ended, draw } => {
                ControlFlow::Continue((ended.zip(kept.checks.clone()), draw))
            }
        };
        let (asks, gone) = self.ledger.with(place, batch, (&self.terms, now), request);
        for ended in gone {
            self.settle_later(ended);
        }
        let (ended, draw) = match asks {
            ControlFlow::Continue(asks) => asks,
            ControlFlow::Break(decisions) => {
                self.tally.served.fetch_add(1, Relaxed);
                let verdict = Verdict::several(decisions);
                return Ok(Begun::Decided(verdict.with_source(Source::Allotment)));
            }
        };
        // From here on the draw ends with its guard.
        let drawing = draw.map(|draw| {
            let checks = self.ledger.checks(place, batch);
            Drawing { inner: self, place, draw, checks, units: None, is_over: false }
        });
        self.settle(ended.into_iter().collect()).await;
        if let Some(drawing) = drawing
            && let Some(verdict) = drawing.draw(batch, &costs).await?
        {
            return Ok(Begun::Decided(verdict));
        }
        Ok(asking(Some(place), false))
    }

    /// Settles allotments that have ended, some at once, and waits for them. A caller that goes away does not end this.
    pub(super) async fn settle(self: &Arc<Self>, all: Vec<EndedOf<A>>) {
        self.settle_counting(all, &Arc::default()).await;
    }

    /// [`settle`](Self::settle), which adds up how many units are back.
    pub(super) async fn settle_counting(
        self: &Arc<Self>,
        all: Vec<EndedOf<A>>,
        back: &Arc<AtomicU64>,
    ) {
        if all.is_empty() {
            return;
        }
        let Ok(runtime) = Handle::try_current() else {
            for ended in all {
                back.fetch_add(self.settle_here(ended).await, Relaxed);
            }
            return;
        };
        let (inner, back) = (self.clone(), back.clone());
        let settling = async move {
            let mut settlements = JoinSet::new();
            for ended in all {
                if settlements.len() >= SETTLEMENTS_AT_ONCE {
                    // Its panic is that of the store, and the units stay charged.
                    drop(settlements.join_next().await);
                }
                let (inner, back) = (inner.clone(), back.clone());
                settlements.spawn(async move {
                    back.fetch_add(inner.settle_here(ended).await, Relaxed);
                });
            }
            while settlements.join_next().await.is_some() {}
        };
        drop(runtime.spawn(settling).await);
    }

    /// Settles an allotment that has ended, in a task.
    fn settle_later(self: &Arc<Self>, ended: EndedOf<A>) {
        let Ok(runtime) = Handle::try_current() else {
            self.tally.forfeited.fetch_add(ended.0.unused, Relaxed);
            return;
        };
        let inner = self.clone();
        drop(runtime.spawn(async move { inner.settle_here(ended).await }));
    }

    /// Settles an allotment that has ended, and returns how many units are back. If it fails, they stay charged until the
    /// limit recovers.
    async fn settle_here(&self, (ended, checks): EndedOf<A>) -> u64 {
        let is_back = match ended.ending {
            Ending::Forfeited => false,
            Ending::GivenBack => {
                let checks = checks.costing(&ended.used);
                match Batch::new(&checks) {
                    Ok(batch) => {
                        let settling = batch.op(Op::Settle).id(ended.id).settled_once();
                        self.store.apply(&settling).await.is_ok()
                    }
                    Err(_) => false,
                }
            }
        };
        let tally = if is_back { &self.tally.given_back } else { &self.tally.forfeited };
        tally.fetch_add(ended.unused, Relaxed);
        if is_back { ended.unused } else { 0 }
    }

    /// Gives back what is left of an allotment when its time is over, in a task that watches the slot from then on.
    fn watch(self: &Arc<Self>, place: Place) {
        let Ok(runtime) = Handle::try_current() else { return };
        let unwatched = self.ledger.at(place, |kept| {
            let ends = kept.slot.ends().filter(|_| !kept.is_watched)?;
            kept.is_watched = true;
            Some(ends)
        });
        let Some(mut ends) = unwatched.flatten() else { return };
        let watching = Watching { inner: Arc::downgrade(self), place };
        // Counted from now, and not from when the task comes to run.
        let mut end = self.instant(ends.1);
        runtime.spawn(async move {
            loop {
                tokio::time::sleep_until(end).await;
                let Some(inner) = watching.inner.upgrade() else { return };
                let (ended, next) = inner.ledger.expire(place, ends.0);
                if let Some(ended) = ended {
                    inner.settle_later(ended);
                }
                let Some(next) = next else { return };
                (end, ends) = (inner.instant(next.1), next);
            }
        });
    }

    /// When this time of the local clock comes: after a lifetime at the latest, also if the clock went back.
    fn instant(&self, until: Timestamp) -> Instant {
        let left_us = until.saturating_us_since(self.clock.now());
        Instant::now() + Duration::from_micros(left_us.min(self.terms.lifetime_us))
    }
}

/// A task that watches a slot. When its runtime ends, the next draw has the slot watched again.
struct Watching<S, A: Algorithm + Clone + PartialEq, C> {
    inner: std::sync::Weak<Inner<S, A, C>>,
    place: Place,
}

impl<S, A: Algorithm + Clone + PartialEq, C> Drop for Watching<S, A, C> {
    fn drop(&mut self) {
        if let Some(inner) = self.inner.upgrade() {
            inner.ledger.at(self.place, |kept| kept.is_watched = false);
        }
    }
}

/// A draw under way. If its future is dropped, the slot is free for the next draw; if the units may have been charged, the
/// id is settled at 0.
struct Drawing<'d, S, A, C>
where
    S: Store<A> + 'static,
    A: Algorithm + Clone + PartialEq + 'static,
    C: Clock + 'static,
{
    inner: &'d Arc<Inner<S, A, C>>,
    place: Place,
    draw: Draw,
    checks: Arc<Checks<A>>,
    /// What may be charged, from when it was sent.
    units: Option<Vec<u64>>,
    is_over: bool,
}

impl<S, A, C> Drawing<'_, S, A, C>
where
    S: Store<A> + 'static,
    A: Algorithm + Clone + PartialEq + 'static,
    C: Clock + 'static,
{
    /// Draws for this request and those that follow. `None` if the request is to be asked alone.
    async fn draw(
        mut self,
        batch: &Batch<'_, A>,
        costs: &[u64],
    ) -> Result<Option<Verdict>, S::Error> {
        let (inner, draw) = (self.inner, self.draw);
        let mut checks = batch.checks().to_vec();
        for check in &mut checks {
            check.cost = check.cost.saturating_mul(draw.times);
        }
        self.units = Some(checks.iter().map(|check| check.cost).collect());
        inner.tally.draws.fetch_add(1, Relaxed);
        let sent = inner.clock.now();
        match inner.store.apply(&batch.with_checks(&checks).id(draw.id).settled_once()).await {
            Ok(verdict) if verdict.allowed() => {
                Ok(Some(self.drawn(batch, costs, sent, &verdict).await))
            }
            Ok(_) => {
                self.over(None);
                Ok(None)
            }
            // Its guard settles it.
            Err(error) if error.kind() == ErrorKind::Indeterminate => Err(error),
            Err(error) if error.kind() == ErrorKind::Unavailable => {
                self.over(None);
                Err(error)
            }
            Err(error) => {
                let refuses = error.kind() != ErrorKind::Contended;
                self.over(refuses.then_some(sent));
                Ok(None)
            }
        }
    }

    /// The verdict of a request whose draw was admitted.
    async fn drawn(
        mut self,
        batch: &Batch<'_, A>,
        costs: &[u64],
        sent: Timestamp,
        verdict: &Verdict,
    ) -> Verdict {
        let (inner, draw) = (self.inner, self.draw);
        let recovery = |check: &Check<'_, A>| check.limit.algorithm().recovery();
        let told =
            verdict.decisions().iter().copied().zip(
                batch.checks().iter().map(|check| recovery(check).unwrap_or(Recovery::AtReset)),
            );
        let told: Vec<_> = told.collect();
        let (decisions, ended) = inner
            .ledger
            .at(self.place, |kept| {
                if verdict.source() != Source::Store {
                    // Another limiter has charged it, such as a fallback.
                    kept.slot.end(Ending::GivenBack);
                }
                kept.slot.drawn(&inner.terms, (draw, sent), costs, &told)
            })
            .unwrap_or_else(|| Slot::default().drawn(&inner.terms, (draw, sent), costs, &told));
        self.is_over = true;
        match ended {
            Some(ended) => inner.settle(vec![(ended, self.checks.clone())]).await,
            None => inner.watch(self.place),
        }
        inner.tally.asked.fetch_add(1, Relaxed);
        Verdict::several(decisions).with_source(verdict.source())
    }

    /// Ends a draw that has charged nothing.
    fn over(&mut self, refuses: Option<Timestamp>) {
        self.is_over = true;
        self.not_drawn(refuses);
    }

    fn not_drawn(&self, refuses: Option<Timestamp>) {
        let (inner, id) = (self.inner, self.draw.id);
        inner.ledger.at(self.place, |kept| kept.slot.not_drawn(&inner.terms, id, refuses));
    }
}

impl<S, A, C> Drop for Drawing<'_, S, A, C>
where
    S: Store<A> + 'static,
    A: Algorithm + Clone + PartialEq + 'static,
    C: Clock + 'static,
{
    fn drop(&mut self) {
        if self.is_over {
            return;
        }
        self.not_drawn(None);
        if let Some(units) = self.units.take() {
            let (unused, used) = (units.iter().sum(), vec![0; units.len()]);
            let ended = Ended { id: self.draw.id, used, unused, ending: Ending::GivenBack };
            self.inner.settle_later((ended, self.checks.clone()));
        }
    }
}

impl<S, A, C> Asking<'_, S, A, C>
where
    S: Store<A> + 'static,
    A: Algorithm + Clone + PartialEq + 'static,
    C: Clock + 'static,
{
    /// Notes what the store said. A denial is final once this process has nothing left of the limits of the request.
    pub(super) async fn answered(&self, verdict: &Verdict) -> Afterwards {
        let (inner, batch) = (&self.inner, &self.batch);
        if let Some(place) = self.place
            && verdict.source() != Source::Fallback
        {
            inner.ledger.at(place, |kept| kept.slot.tell(verdict.decisions().iter()));
        }
        if verdict.allowed() || !is_asked_once_more(batch) {
            return Afterwards::Stands;
        }
        if let Some(place) = self.place {
            let costs: Vec<u64> = batch.checks().iter().map(|check| check.cost).collect();
            let now = inner.clock.now();
            let spent = inner.ledger.at(place, |kept| kept.slot.spend(now, &costs)).flatten();
            if let Some(decisions) = spent {
                inner.tally.served.fetch_add(1, Relaxed);
                return Afterwards::Served(
                    Verdict::several(decisions).with_source(Source::Allotment),
                );
            }
        }
        let all = inner.ledger.end_of(batch, Slot::end_allotment);
        if all.is_empty() {
            return Afterwards::Stands;
        }
        inner.settle(all).await;
        Afterwards::AsksAgain
    }
}

/// Whether a denied request may be asked again, because nothing was charged for it.
fn is_asked_once_more<A: Algorithm>(batch: &Batch<'_, A>) -> bool {
    let counts_attempts = |check: &Check<'_, A>| check.limit.algorithm().charges_denials();
    matches!(batch.operation(), Op::Acquire | Op::Peek)
        && batch.time() == Now::Store
        && !batch.is_part()
        && !batch.checks().iter().any(counts_attempts)
}

impl<S, A: Algorithm + Clone + PartialEq, C> Drop for Asking<'_, S, A, C> {
    /// What was drawn while a reset was under way may have been charged before it.
    fn drop(&mut self) {
        if !self.resets {
            return;
        }
        for (ended, _) in self.inner.ledger.end_of(&self.batch, |slot| slot.end(Ending::Forfeited))
        {
            self.inner.tally.forfeited.fetch_add(ended.unused, Relaxed);
        }
    }
}
