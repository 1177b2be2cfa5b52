//! What [`Allotments`] does with a request: serves it, draws for it, or has the store asked.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;

use ratelimit_core::algorithm::Recovery;
use ratelimit_core::store::{Batch, Check, Now, Op};
use ratelimit_core::{
    Algorithm, Clock, Decision, ErrorKind, ReservationId, Source, Store, StoreError, Timestamp,
    Verdict,
};
use tokio::runtime::Handle;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout};

use super::SharedAllotments;
use super::ledger::{Checks, EndedOf, LedgerEntry, SlotKey};
use super::slot::{AllotmentSlot, Draw, EarlyEnd, Ended};
use crate::OnDrop;
use crate::plain::acquires_plainly;

/// How many settlements of one caller are in flight at once, on each server.
const SETTLEMENTS_AT_ONCE: usize = 64;

/// The most bytes of a batch's keys, which its slot keeps to give back what is left.
const MOST_KEY_BYTES: usize = 1_024;

/// Whether requests like this one are served from allotments: see
/// [`Allotments`](super::Allotments).
fn is_served<A: Algorithm>(batch: &Batch<'_, A>) -> bool {
    let can =
        |algorithm: &A| algorithm.reservation_us().is_some() && algorithm.recovery().is_some();
    let key_bytes: usize = batch.checks().iter().map(|check| check.key.len()).sum();
    acquires_plainly(batch)
        && !batch.is_without_store()
        && key_bytes <= MOST_KEY_BYTES
        && batch.checks().iter().all(|check| can(check.limit.algorithm()))
}

impl<S: Store<A> + 'static, A: Algorithm + Clone + PartialEq + 'static, C: Clock + 'static>
    SharedAllotments<S, A, C>
{
    /// Serves a request, draws for it, or asks the store.
    pub(super) async fn decide(
        self: &Arc<Self>,
        batch: &Batch<'_, A>,
    ) -> Result<Verdict, S::Error> {
        let costs: Vec<u64> = batch.checks().iter().map(|check| check.cost).collect();
        let (mut slot_key, mut forgets) = (None, None);
        if is_served(batch) {
            let slot = self.ledger.slot_key(batch);
            if let Some(verdict) = self.serve(slot, batch, &costs).await? {
                return Ok(verdict);
            }
            slot_key = Some(slot);
        } else {
            // What is spent here already, and what a draw in flight will have. The store may charge
            // that before this.
            let endings = match batch.operation() {
                Op::Reset => Some([EarlyEnd::Forfeited; 2]),
                Op::Adopt => Some([EarlyEnd::GivenBack, EarlyEnd::Forfeited]),
                Op::Force | Op::Refund | Op::Settle => Some([EarlyEnd::GivenBack; 2]),
                Op::Acquire | Op::Peek | Op::Renew | Op::Extend => None,
            };
            if let Some([here, drawn]) = endings {
                let end = |slot: &mut AllotmentSlot| {
                    slot.end_draw(drawn);
                    slot.take(here)
                };
                self.settle(self.ledger.end_of(batch, end)).await;
            }
            // As what is drawn meanwhile.
            let forfeit = || {
                for (ended, _) in self.ledger.end_of(batch, |slot| slot.end(EarlyEnd::Forfeited)) {
                    self.tally.forfeited.fetch_add(ended.unused, Relaxed);
                }
            };
            let forfeits = matches!(batch.operation(), Op::Reset | Op::Adopt);
            forgets = forfeits.then(|| OnDrop(forfeit));
        }
        self.tally.asked.fetch_add(1, Relaxed);
        let verdict = self.store.apply(batch).await?;
        drop(forgets);
        if let Some(slot_key) = slot_key
            && verdict.source() != Source::Fallback
        {
            self.ledger.at(slot_key, |kept| kept.slot.tell(verdict.decisions().iter()));
        }
        if verdict.allowed() || !is_asked_once_more(batch) {
            return Ok(verdict);
        }
        // A denial is final once this process has nothing left of the limits that deny. What is
        // left of the others fits already, and may be other callers'.
        let now = self.clock.now();
        let spend =
            |slot_key| self.ledger.at(slot_key, |kept| kept.slot.spend(now, &costs)).flatten();
        if let Some(decisions) = slot_key.and_then(spend) {
            return Ok(self.verdict_from_slot(decisions));
        }
        let decided = batch.checks().iter().zip(verdict.decisions());
        let denying = decided.filter(|(_, decision)| !decision.allowed).map(|(check, _)| *check);
        let denying: Vec<_> = denying.collect();
        let take = |slot: &mut AllotmentSlot| slot.take(EarlyEnd::GivenBack);
        let all = self.ledger.end_of(&batch.with_checks(&denying), take);
        let keys = self.ledger.keys(&denying);
        let is_here = || !keys.iter().any(|key| self.returns.by_key.contains_key(key));
        if all.is_empty() && is_here() {
            return Ok(verdict);
        }
        self.settle(all).await;
        // Without a runtime, the caller that ended an allotment settles it.
        if Handle::try_current().is_ok() {
            let mut returns = self.returns.units.subscribe();
            let others = returns.wait_for(|_| is_here());
            let _is_late = timeout(Duration::from_micros(self.terms.lifetime_us), others).await;
        }
        self.store.apply(batch).await
    }

    fn verdict_from_slot(&self, decisions: Vec<Decision>) -> Verdict {
        self.tally.served.fetch_add(1, Relaxed);
        Verdict::several(decisions).with_source(Source::Allotment)
    }

    /// Serves a request from its slot, or draws for it. `None` if the store is to be asked about it
    /// alone.
    async fn serve(
        self: &Arc<Self>,
        slot_key: SlotKey,
        batch: &Batch<'_, A>,
        costs: &[u64],
    ) -> Result<Option<Verdict>, S::Error> {
        let now = self.clock.now();
        let request = |kept: &mut LedgerEntry<A>| {
            let asks = kept.slot.request(&self.terms, now, costs, ReservationId::random);
            asks.map_continue(|(ended, draw)| (ended.zip(kept.checks.clone()), draw))
        };
        let (asks, [mut own, others]) =
            self.ledger.with(slot_key, batch, (&self.terms, now), request);
        if Handle::try_current().is_ok() {
            for ended in others {
                self.settle_later(ended);
            }
        } else {
            own.extend(others);
        }
        let (ended, draw) = match asks {
            ControlFlow::Continue(asks) => asks,
            ControlFlow::Break(decisions) => return Ok(Some(self.verdict_from_slot(decisions))),
        };
        // From here on the draw ends with its guard.
        let drawing = draw.map(|draw| {
            let checks = self.ledger.checks(slot_key, batch);
            DrawGuard { inner: self, slot_key, draw, checks, units: None, refused: None }
        });
        // What was drawn under other numbers as well: the answer is then what the store would say
        // without it.
        own.extend(ended);
        self.settle(own).await;
        match drawing {
            Some(drawing) => drawing.draw(batch, costs).await,
            None => Ok(None),
        }
    }

    /// Settles allotments that have ended, some of each server at once, and waits for them. A
    /// caller that leaves does not end this.
    pub(super) async fn settle(self: &Arc<Self>, all: Vec<EndedOf<A>>) {
        if all.is_empty() {
            return;
        }
        let all: Vec<_> = all.into_iter().map(|ended| Returning::new(self, ended)).collect();
        let Ok(runtime) = Handle::try_current() else {
            for returning in all {
                returning.send().await;
            }
            return;
        };
        // An unreachable server holds up none of the others.
        let mut by_server: HashMap<Option<u64>, Vec<_>> = HashMap::new();
        for returning in all {
            by_server.entry(returning.server()).or_default().push(returning);
        }
        let settlements = by_server.into_values().map(|of_server| async move {
            let mut settlements = JoinSet::new();
            for returning in of_server {
                if settlements.len() >= SETTLEMENTS_AT_ONCE {
                    // Its panic is that of the store, and the units stay charged.
                    drop(settlements.join_next().await);
                }
                settlements.spawn(returning.send());
            }
            while settlements.join_next().await.is_some() {}
        });
        let settlements: Vec<_> = settlements.map(|settling| runtime.spawn(settling)).collect();
        for settling in settlements {
            drop(settling.await);
        }
    }

    /// Settles an allotment that has ended, in a task.
    fn settle_later(self: &Arc<Self>, ended: EndedOf<A>) {
        let returning = Returning::new(self, ended);
        if let Ok(runtime) = Handle::try_current() {
            drop(runtime.spawn(returning.send()));
        }
    }

    /// Gives back what is left of an allotment when its time is over, in a task.
    fn watch(self: &Arc<Self>, slot_key: SlotKey) {
        let Ok(runtime) = Handle::try_current() else { return };
        let ends = self.ledger.at(slot_key, |kept| kept.slot.ends()).flatten();
        let Some((id, until)) = ends else { return };
        // After a lifetime at the latest, also if the clock went back. Counted from now, and not
        // from when the task comes to run.
        let left_us = until.saturating_us_since(self.clock.now()).min(self.terms.lifetime_us);
        let (end, inner) = (Instant::now() + Duration::from_micros(left_us), Arc::downgrade(self));
        runtime.spawn(async move {
            tokio::time::sleep_until(end).await;
            let Some(inner) = inner.upgrade() else { return };
            let expire = |kept: &mut LedgerEntry<A>| kept.slot.expire(id).zip(kept.checks.clone());
            if let Some(ended) = inner.ledger.at(slot_key, expire).flatten() {
                Returning::new(&inner, ended).send().await;
            }
        });
    }
}

/// An allotment that has ended and is on its way back. However that ends, its units are counted: as
/// given back once the store has settled them, else as forfeited, and then they stay charged until
/// the limit recovers.
struct Returning<
    S: Store<A> + 'static,
    A: Algorithm + Clone + PartialEq + 'static,
    C: Clock + 'static,
> {
    inner: Arc<SharedAllotments<S, A, C>>,
    ended: Ended,
    checks: Arc<Checks<A>>,
    keys: Vec<u128>,
    is_back: bool,
}

impl<S: Store<A> + 'static, A: Algorithm + Clone + PartialEq + 'static, C: Clock + 'static>
    Returning<S, A, C>
{
    fn new(inner: &Arc<SharedAllotments<S, A, C>>, (ended, checks): EndedOf<A>) -> Self {
        let keys = inner.ledger.keys(&checks.costing(&ended.used));
        for key in &keys {
            *inner.returns.by_key.entry(*key).or_default() += 1;
        }
        inner.returns.units.send_modify(|units| *units = units.saturating_add(ended.unused));
        Self { inner: inner.clone(), ended, checks, keys, is_back: false }
    }

    /// Which server settles it.
    fn server(&self) -> Option<u64> {
        let checks = self.checks.costing(&self.ended.used);
        self.inner.store.server_of(&Batch::new(&checks).ok()?)
    }

    /// Settles it.
    async fn send(mut self) {
        let checks = self.checks.costing(&self.ended.used);
        self.is_back = match Batch::new(&checks) {
            Ok(batch) if self.ended.ending == EarlyEnd::GivenBack => {
                let settling = batch.op(Op::Settle).id(self.ended.id).settled_once();
                self.inner.store.apply(&settling).await.is_ok()
            }
            _ => false,
        };
    }
}

impl<S: Store<A> + 'static, A: Algorithm + Clone + PartialEq + 'static, C: Clock + 'static> Drop
    for Returning<S, A, C>
{
    fn drop(&mut self) {
        let (tally, unused) = (&self.inner.tally, self.ended.unused);
        let tally = if self.is_back { &tally.given_back } else { &tally.forfeited };
        tally.fetch_add(unused, Relaxed);
        for key in &self.keys {
            self.inner.returns.by_key.remove_if_mut(key, |_, settlements| {
                *settlements -= 1;
                *settlements == 0
            });
        }
        // After that: it wakes those who wait.
        self.inner.returns.units.send_modify(|units| *units = units.saturating_sub(unused));
    }
}

/// A draw in flight. If its future is dropped, the slot is free for the next draw; if the units may
/// have been charged, the id is settled at 0.
struct DrawGuard<
    'd,
    S: Store<A> + 'static,
    A: Algorithm + Clone + PartialEq + 'static,
    C: Clock + 'static,
> {
    inner: &'d Arc<SharedAllotments<S, A, C>>,
    slot_key: SlotKey,
    draw: Draw,
    checks: Arc<Checks<A>>,
    /// What may be charged, from when it was sent until it is known.
    units: Option<Vec<u64>>,
    /// When it was sent, if the store refuses draws.
    refused: Option<Timestamp>,
}

impl<S: Store<A> + 'static, A: Algorithm + Clone + PartialEq + 'static, C: Clock + 'static>
    DrawGuard<'_, S, A, C>
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
                Ok(Some(self.apply_draw(batch, costs, sent, &verdict).await))
            }
            // Its guard settles it.
            Err(error) if error.kind() == ErrorKind::Indeterminate => Err(error),
            said => {
                self.units = None;
                match said.map_err(|error| (error.kind(), error)) {
                    Err((ErrorKind::Unavailable, error)) => return Err(error),
                    Ok(_) | Err((ErrorKind::Contended, _)) => {}
                    Err(_) => self.refused = Some(sent),
                }
                Ok(None)
            }
        }
    }

    /// The verdict of a request whose draw was admitted.
    async fn apply_draw(
        mut self,
        batch: &Batch<'_, A>,
        costs: &[u64],
        sent: Timestamp,
        verdict: &Verdict,
    ) -> Verdict {
        let (inner, draw) = (self.inner, self.draw);
        let recovery = |check: &Check<'_, A>| check.limit.algorithm().recovery();
        let recoveries =
            batch.checks().iter().map(|check| recovery(check).unwrap_or(Recovery::AtReset));
        let told: Vec<_> = verdict.decisions().iter().copied().zip(recoveries).collect();
        let drawn = |slot: &mut AllotmentSlot| {
            if verdict.source() != Source::Store {
                // Another limiter has charged it, such as a fallback.
                slot.end(EarlyEnd::GivenBack);
            }
            slot.apply_draw(&inner.terms, (draw, sent), costs, &told)
        };
        let known = inner.ledger.at(self.slot_key, |kept| drawn(&mut kept.slot));
        let (decisions, ended) = known.unwrap_or_else(|| drawn(&mut AllotmentSlot::default()));
        self.units = None;
        match ended {
            Some(ended) => {
                inner.settle(vec![(ended, self.checks.clone())]).await;
            }
            None => inner.watch(self.slot_key),
        }
        inner.tally.asked.fetch_add(1, Relaxed);
        Verdict::several(decisions).with_accounts(verdict.accounts()).with_source(verdict.source())
    }
}

impl<S: Store<A> + 'static, A: Algorithm + Clone + PartialEq + 'static, C: Clock + 'static> Drop
    for DrawGuard<'_, S, A, C>
{
    fn drop(&mut self) {
        let Self { inner, slot_key, draw, refused, .. } = self;
        // One that was drawn is not in flight any more.
        let not_drawn =
            |kept: &mut LedgerEntry<A>| kept.slot.not_drawn(&inner.terms, draw.id, *refused);
        let ending = inner.ledger.at(*slot_key, not_drawn).unwrap_or(EarlyEnd::Forfeited);
        if let Some(units) = self.units.take() {
            let (unused, used) = (units.iter().sum(), vec![0; units.len()]);
            let ended = Ended { id: draw.id, used, unused, ending };
            inner.settle_later((ended, self.checks.clone()));
        }
    }
}

/// Whether a denied request may be asked again, because nothing was charged for it.
fn is_asked_once_more<A: Algorithm>(batch: &Batch<'_, A>) -> bool {
    matches!(batch.operation(), Op::Acquire | Op::Peek)
        && batch.time() == Now::Store
        && !batch.is_part()
        && !batch.checks().iter().any(|check| check.limit.counts_attempts())
}
