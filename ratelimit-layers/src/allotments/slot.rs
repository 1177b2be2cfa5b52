//! [`AllotmentSlot`]: what a process knows of the requests that ask the same limits about the same
//! keys. A pure state machine, without I/O and without a clock.
//!
//! An *allotment* is a reservation that is spent locally. Drawing one charges the store for `m`
//! requests at once, under an id. The process serves requests from it until it is spent or ends,
//! and gives back what is left: it settles the id at the cost that was used. The size `m` follows
//! the demand, and a draw takes at most one part of so many of what remained (*guided
//! self-scheduling*: Polychronopoulos and Kuck, 1987), so that the last of a budget is drawn in
//! small pieces.
//!
//! An allotment ends with its window: budget spent in a later window than it was charged in would
//! exceed the limit there. [`Algorithm::recovery`](ratelimit_core::Algorithm::recovery) states
//! whether budget recovers gradually or at the reset; where that is unknown, nothing is drawn. The
//! lifetime counts from before the draw was sent, by the process's clock less a drift, so no clocks
//! are compared.
//!
//! A draw never denies. A draw that does not fit says nothing about its own request, so that
//! request goes to the store alone.

use std::ops::ControlFlow;

use ratelimit_core::algorithm::Recovery;
use ratelimit_core::{Decision, ReservationId, Timestamp};

const MILLION: u64 = 1_000_000;
/// By how much the local clock may be slower than the store's, in parts per million: far more than
/// the clocks of servers drift.
const DRIFT_PPM: u64 = 1_000;
/// The most units of one limit that a draw takes: what a crash forfeits at most per slot, until the
/// limit recovers.
const MOST: u64 = 10_000;

/// The settings that bound what is drawn and for how long it is spent.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    /// The longest time, by the store's clock, from the charge of a unit to the admission that
    /// spends it.
    pub(super) lifetime_us: u64,
    /// A draw takes at most one part of so many of what remained.
    pub(super) divisor: u64,
}

impl Terms {
    /// Whether `then` is no longer ago than a lifetime.
    fn is_recent(&self, then: Timestamp, now: Timestamp) -> bool {
        now.saturating_us_since(then) <= self.lifetime_us
    }
}

/// The allotment and the size of the next draw for requests of the same limits and keys.
#[derive(Clone, Debug, Default)]
pub(super) struct AllotmentSlot {
    /// For how many requests the next draw is, before it is capped; 0 before the first request.
    size: u64,
    /// When the store was last asked, by the local clock.
    asked: Option<Timestamp>,
    /// When the last allotment ended with something left, if no request has asked the store since.
    lapsed: Option<Timestamp>,
    /// What each check had left by the last answer of the store; empty if that is not known.
    remaining: Vec<u64>,
    /// No draw before this time, because the store refused one.
    rests_until: Option<Timestamp>,
    draw: Option<PendingDraw>,
    allotment: Option<Allotment>,
}

/// A draw whose answer is awaited.
#[derive(Clone, Debug)]
struct PendingDraw {
    id: ReservationId,
    since: Timestamp,
    /// How it ends, if it was to end since.
    ends: Option<EarlyEnd>,
}

impl PendingDraw {
    /// Whether its answer can still serve requests. A caller may keep the future of a draw and not
    /// poll it: the answer then comes to a slot that no longer knows of it, and its units stay
    /// charged.
    fn is_awaited(&self, terms: &Terms, now: Timestamp) -> bool {
        self.since <= now && now.saturating_us_since(self.since) < terms.lifetime_us
    }
}

/// What happens to the unused part of an allotment that ends early.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum EarlyEnd {
    /// It is given back.
    GivenBack,
    /// It stays charged, because the store no longer counts its charge: after a reset, or when the
    /// store has adopted what remains elsewhere, to give it back would create capacity.
    Forfeited,
}

/// Budget that the store has charged and this process spends.
#[derive(Clone, Debug)]
struct Allotment {
    id: ReservationId,
    sent: Timestamp,
    until: Timestamp,
    /// How many requests were served, the one that drew it included.
    served: u64,
    parts: Vec<AllotmentPart>,
}

/// What an allotment has of one limit.
#[derive(Clone, Copy, Debug)]
struct AllotmentPart {
    drawn: u64,
    used: u64,
    /// What the store said when it was drawn.
    told: Decision,
}

/// An allotment that has ended.
#[derive(Debug)]
pub(super) struct Ended {
    pub(super) id: ReservationId,
    /// The cost at which the id is to be settled, by check.
    pub(super) used: Vec<u64>,
    /// The units that were not used, over all checks.
    pub(super) unused: u64,
    pub(super) ending: EarlyEnd,
}

/// A draw to be made.
#[derive(Clone, Copy, Debug)]
pub(super) struct Draw {
    pub(super) id: ReservationId,
    /// For how many requests.
    pub(super) times: u64,
}

impl Allotment {
    /// Whether it may be spent. A clock that has gone back tells no age.
    fn is_live(&self, now: Timestamp) -> bool {
        self.sent <= now && now < self.until
    }

    /// Spends the costs of a request, if all of them fit what is left.
    fn spend(&mut self, costs: &[u64]) -> bool {
        let fits = |(part, cost): (&AllotmentPart, &u64)| *cost <= part.drawn - part.used;
        if !self.parts.iter().zip(costs).all(fits) {
            return false;
        }
        for (part, cost) in self.parts.iter_mut().zip(costs) {
            part.used += cost;
        }
        self.served += 1;
        true
    }

    /// The decisions about a request that was served at `now`.
    fn decisions(&self, now: Timestamp, costs: &[u64]) -> Vec<Decision> {
        let passed_us = now.saturating_us_since(self.sent);
        self.parts.iter().zip(costs).map(|(part, cost)| part.decision(passed_us, *cost)).collect()
    }

    fn end(self, ending: EarlyEnd) -> Ended {
        let unused = self.parts.iter().map(|part| part.drawn - part.used).sum();
        let used = self.parts.iter().map(|part| part.used).collect();
        Ended { id: self.id, used, unused, ending }
    }
}

impl AllotmentPart {
    /// What the store said, of a request of this cost, with what is left here counted as remaining.
    fn decision(&self, passed_us: u64, cost: u64) -> Decision {
        let told = self.told;
        // Something is missing until the store says otherwise.
        let less = |us: u64| if us == 0 { 0 } else { us.saturating_sub(passed_us).max(1) };
        Decision {
            allowed: true,
            cost,
            limit: told.limit,
            remaining: told.remaining.saturating_add(self.drawn - self.used).min(told.limit),
            retry_after_us: Some(0),
            replenish_after_us: less(told.replenish_after_us),
            reset_after_us: less(told.reset_after_us),
        }
    }
}

impl AllotmentSlot {
    /// Decides what to do about a request of these costs. It breaks off with the decisions of one
    /// that is admitted. Otherwise the store is asked: what is left of the allotment is given back
    /// first, then the draw is drawn. Without a draw, the request is asked alone. `id` makes the id
    /// of a draw.
    pub(super) fn request(
        &mut self,
        terms: &Terms,
        now: Timestamp,
        costs: &[u64],
        id: impl FnOnce() -> ReservationId,
    ) -> ControlFlow<Vec<Decision>, (Option<Ended>, Option<Draw>)> {
        if let Some(decisions) = self.spend(now, costs) {
            return ControlFlow::Break(decisions);
        }
        // No request waits for a draw of another.
        if self.draw.as_ref().is_some_and(|draw| draw.is_awaited(terms, now)) {
            return ControlFlow::Continue((None, None));
        }
        // The rest of the allotment does not serve the request.
        let is_live = self.allotment.as_ref().is_some_and(|allotment| allotment.is_live(now));
        let ended = if is_live { self.take(EarlyEnd::GivenBack) } else { self.lapse() };
        self.resize(terms, now);
        self.size = self.size.min(self.cap(terms, costs)).max(1);
        self.asked = Some(now);
        let may_draw = self.size > 1 && self.rests_until.is_none_or(|until| until <= now);
        let draw = may_draw.then(|| Draw { id: id(), times: self.size });
        self.draw = draw.map(|draw| PendingDraw { id: draw.id, since: now, ends: None });
        ControlFlow::Continue((ended, draw))
    }

    /// Admits a request of these costs from the allotment, if they fit what is left.
    pub(super) fn spend(&mut self, now: Timestamp, costs: &[u64]) -> Option<Vec<Decision>> {
        let allotment = self.allotment.as_mut().filter(|allotment| allotment.is_live(now))?;
        allotment.spend(costs).then(|| allotment.decisions(now, costs))
    }

    /// Ends the allotment and lets a draw that is in flight go on.
    pub(super) fn take(&mut self, ending: EarlyEnd) -> Option<Ended> {
        let ended = self.allotment.take()?.end(ending);
        (ended.unused > 0).then_some(ended)
    }

    /// Ends the allotment because its time is over. The next one is for as many requests as this
    /// one has served.
    fn lapse(&mut self) -> Option<Ended> {
        let allotment = self.allotment.as_ref()?;
        (self.size, self.lapsed) = (allotment.served.max(1), Some(allotment.until));
        self.take(EarlyEnd::GivenBack)
    }

    /// Sets the size of a draw at `now` by how long ago the store was asked.
    fn resize(&mut self, terms: &Terms, now: Timestamp) {
        self.size = match (self.lapsed.take(), self.asked) {
            (Some(lapsed), _) if terms.is_recent(lapsed, now) => self.size,
            (None, Some(asked)) if terms.is_recent(asked, now) => self.size.saturating_mul(2),
            _ => 1,
        };
    }

    /// The most requests of these costs that a draw may take.
    fn cap(&self, terms: &Terms, costs: &[u64]) -> u64 {
        if self.remaining.len() != costs.len() {
            return 1;
        }
        let part = |remaining: u64| (remaining / terms.divisor.max(1)).min(MOST);
        let parts = self.remaining.iter().zip(costs);
        // A reservation of nothing is refused.
        let each = parts.map(|(remaining, cost)| part(*remaining).checked_div(*cost));
        each.map(|times| times.unwrap_or(1)).min().unwrap_or(1)
    }

    /// Installs what was drawn for `times` requests of these costs, the one that asked included.
    /// Returns the decisions about that request, and what is to be settled at once because the
    /// allotment was to end meanwhile.
    pub(super) fn apply_draw(
        &mut self,
        terms: &Terms,
        (draw, sent): (Draw, Timestamp),
        costs: &[u64],
        told: &[(Decision, Recovery)],
    ) -> (Vec<Decision>, Option<Ended>) {
        let part = |((told, _), cost): (&(Decision, Recovery), &u64)| AllotmentPart {
            drawn: cost.saturating_mul(draw.times),
            used: *cost,
            told: *told,
        };
        let mut life_us = terms.lifetime_us;
        for (decision, recovery) in told {
            if *recovery == Recovery::AtReset {
                life_us = life_us.min(decision.reset_after_us);
            }
        }
        let allotment = Allotment {
            id: draw.id,
            sent,
            // When so much has passed on a slow local clock, no more has passed on the store's.
            until: sent.saturating_add_us(life_us.saturating_mul(MILLION - DRIFT_PPM) / MILLION),
            served: 1,
            parts: told.iter().zip(costs).map(part).collect(),
        };
        self.tell(told.iter().map(|(decision, _)| decision));
        let decisions = allotment.decisions(sent, costs);
        let ends = match self.draw.take_if(|under_way| under_way.id == draw.id) {
            Some(PendingDraw { ends: None, .. }) => {
                self.allotment = Some(allotment);
                return (decisions, None);
            }
            Some(PendingDraw { ends: Some(ending), .. }) => ending,
            // The slot was dropped meanwhile, so it does not know of a reset.
            None => EarlyEnd::Forfeited,
        };
        (decisions, Some(allotment.end(ends)))
    }

    /// Ends a draw that was not admitted, or not answered. The next request is asked alone. If the
    /// store `refuses` draws, there is none for a lifetime from `now`. Returns how to end what
    /// may be charged.
    pub(super) fn not_drawn(
        &mut self,
        terms: &Terms,
        id: ReservationId,
        refuses: Option<Timestamp>,
    ) -> EarlyEnd {
        if let Some(now) = refuses {
            self.rests_until = Some(now.saturating_add_us(terms.lifetime_us));
        }
        // A slot that does not know of the draw does not know of a reset.
        self.draw.take_if(|under_way| under_way.id == id).map_or(EarlyEnd::Forfeited, |draw| {
            self.size = 1;
            draw.ends.unwrap_or(EarlyEnd::GivenBack)
        })
    }

    /// Notes what the store said about a request of this slot.
    pub(super) fn tell<'d>(&mut self, decisions: impl Iterator<Item = &'d Decision>) {
        self.remaining.clear();
        self.remaining.extend(decisions.map(|decision| decision.remaining));
    }

    /// Ends the allotment now, and a draw that is in flight when its answer comes.
    pub(super) fn end(&mut self, ending: EarlyEnd) -> Option<Ended> {
        self.end_draw(ending);
        self.take(ending)
    }

    /// Ends a draw that is in flight when its answer comes.
    pub(super) fn end_draw(&mut self, ending: EarlyEnd) {
        if let Some(draw) = &mut self.draw {
            draw.ends = draw.ends.max(Some(ending));
        }
    }

    /// Ends the allotment because the numbers of its limits have changed: what the store said of
    /// the old ones says nothing now.
    pub(super) fn change(&mut self) -> Option<Ended> {
        self.remaining.clear();
        self.rests_until = None;
        self.end(EarlyEnd::GivenBack)
    }

    /// The allotment's id and end.
    pub(super) fn ends(&self) -> Option<(ReservationId, Timestamp)> {
        self.allotment.as_ref().map(|allotment| (allotment.id, allotment.until))
    }

    /// Ends the allotment of this id, if it is still there, because its time is over.
    pub(super) fn expire(&mut self, id: ReservationId) -> Option<Ended> {
        if self.allotment.as_ref()?.id == id { self.lapse() } else { None }
    }

    /// Whether it has neither an allotment nor a draw in flight.
    pub(super) const fn is_empty(&self) -> bool {
        self.allotment.is_none() && self.draw.is_none()
    }

    /// Whether nothing would be lost if it were forgotten at `now`.
    pub(super) fn is_idle(&self, terms: &Terms, now: Timestamp) -> bool {
        let is_awaited = self.draw.as_ref().is_some_and(|draw| draw.is_awaited(terms, now));
        let mut last = self.asked.into_iter().chain(self.lapsed);
        self.allotment.is_none() && !is_awaited && !last.any(|then| terms.is_recent(then, now))
    }
}

#[cfg(test)]
mod tests;
