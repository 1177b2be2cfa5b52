//! The arithmetic of GCRA, on the integers of a [`Refill`].
//!
//! With `n` tokens per `p` refill ticks (in lowest terms) a token is `p` units of work, and a tick
//! does `n` units:
//!
//! ```text
//!      at                    TAT                     at + full_us
//!       ├──────── used ────────┤───── what is left ──────┤
//! ```
//!
//! With a debt more than `full_us` of work may wait: what is used beyond the burst is owed, and
//! nothing fits until it is done.
//!
//! # Side by side
//!
//! Another limit may have written the state, with more work than this limit can hold. Then this
//! limit reads its own whole burst and debt. An acquire replaces the state by that reading and the
//! charge. A refund or a forced charge moves the TAT as it was written, by as much as it moves the
//! reading: the other limit still counts the rest.

use alloc::borrow::Cow;

use super::{Gcra, GcraState};
use crate::algorithms::{Algorithm, MaybeStep, Recovery, Step, Write};
use crate::decision::Decision;
use crate::rate::Refill;
use crate::reservation::Reservation;
use crate::timestamp::{MAX_INTEGER, Timestamp};

/// A state as one moment sees it.
#[derive(Clone, Copy)]
struct Level {
    /// The moment: `now`, or the time of the state if that is later.
    at: Timestamp,
    /// The theoretical arrival time; `at` if that has passed.
    tat_us: u64,
    /// Refill ticks from `at` to `tat_us`, including the current one.
    ticks: u64,
    /// Units of admitted work still to do at `at`.
    used: u64,
}

impl Refill {
    /// The level of a state at `now`.
    #[inline]
    fn level(&self, state: Option<GcraState>, now: Timestamp) -> Level {
        let Self { tick_units, tick_us, .. } = *self;
        let unused = |at: Timestamp| Level { at, tat_us: at.as_us(), ticks: 0, used: 0 };
        let Some(state) = state else { return unused(now) };
        // A time before the state's own counts as the state's.
        let at = now.max(state.timestamp);
        // A state written under a larger limit has at most this limit's whole burst and debt to do.
        let latest_us = self.latest_us(state);
        let (tat_us, surplus) = match state.tat_us {
            tat_us if tat_us > latest_us => (latest_us, 0),
            tat_us => (tat_us, state.surplus.min(tick_units - 1)),
        };
        if tat_us <= at.as_us() {
            return unused(at);
        }
        let (whole, is_under_way) = self.ticks_in(tat_us - at.as_us());
        let ticks = whole + u64::from(is_under_way);
        // The last tick of the most work may do more than that work needs.
        let surplus = if tat_us + tick_us > latest_us {
            let most = self.most_units();
            surplus.max(self.ticks_for(most) * tick_units - most)
        } else {
            surplus
        };
        Level { at, tat_us, ticks, used: ticks * tick_units - surplus }
    }

    /// The latest TAT that this limit writes at the time of the state.
    #[inline]
    const fn latest_us(&self, state: GcraState) -> u64 {
        state.timestamp.as_us() + self.recovery_us()
    }

    /// The state that follows a move from this level to `after` units: a charge or a refund that
    /// leaves some.
    #[inline]
    fn state_after(&self, mut level: Level, after: u64) -> GcraState {
        let Self { tick_units, tick_us, .. } = *self;
        // Work counts as done at the end of each tick, so the current tick may have run out of work
        // already. The rest of that tick must not do the work of a new charge: a new tick begins
        // with it. (A tick of a microsecond ends in the moment it begins: there this changes
        // nothing.)
        if after > level.used && level.used > 0 && level.used < tick_units {
            level = Level { tat_us: level.at.as_us() + tick_us, ticks: 1, ..level };
        }
        // The TAT moves by the difference in ticks.
        let ticks_after = self.ticks_for(after);
        GcraState {
            tat_us: level.tat_us + ticks_after * tick_us - level.ticks * tick_us,
            surplus: ticks_after * tick_units - after,
            timestamp: level.at,
        }
    }

    /// When at most `room` units will be used, at a level that uses more.
    #[inline]
    fn fits_us(&self, level: Level, room: u64) -> u64 {
        level.tat_us + self.ticks_for(level.used - room) * self.tick_us - level.ticks * self.tick_us
    }

    /// The decision that leaves `used` units, which are done at `tat_us`.
    #[inline]
    fn decision(
        &self,
        (now, cost): (Timestamp, u64),
        used: u64,
        tat_us: u64,
        retry_after_us: Option<u64>,
    ) -> Decision {
        let Self { burst, token_units, tick_us, .. } = *self;
        let capacity = self.capacity_units();
        let remaining = capacity.saturating_sub(used) / token_units;
        // The current tick began when the first of the used units was still to do.
        let grown_us =
            |missing| tat_us + self.ticks_for(missing) * tick_us - self.ticks_for(used) * tick_us;
        let replenish_after_us = match used {
            0 => 0,
            _ => grown_us(used + (remaining + 1) * token_units - capacity) - now.as_us(),
        };
        Decision {
            allowed: retry_after_us == Some(0),
            cost,
            limit: burst,
            remaining,
            retry_after_us,
            replenish_after_us,
            reset_after_us: if used == 0 { 0 } else { tat_us - now.as_us() },
        }
    }

    /// An allowed step from this level to `after` units.
    #[inline]
    fn step_to(&self, (now, cost): (Timestamp, u64), level: Level, after: u64) -> Step<GcraState> {
        let (tat_us, write) = if after == level.used {
            (level.tat_us, Write::Keep)
        } else if after == 0 {
            (level.tat_us, Write::Remove)
        } else {
            let state = self.state_after(level, after);
            (state.tat_us, Write::until(state, state.tat_us))
        };
        Step { decision: self.decision((now, cost), after, tat_us, Some(0)), write }
    }

    /// [`step_to`](Self::step_to) for a refund or a forced charge.
    fn step_beside(
        &self,
        state: Option<GcraState>,
        asked: (Timestamp, u64),
        level: Level,
        after: u64,
    ) -> Step<GcraState> {
        let is_beyond =
            |state: &GcraState| state.tat_us > self.latest_us(*state).max(level.at.as_us());
        let Some(other) = state.filter(|state| after != level.used && is_beyond(state)) else {
            return self.step_to(asked, level, after);
        };
        let (up_us, down_us) = (self.ticks_for(after) * self.tick_us, level.ticks * self.tick_us);
        // At the time of the write a forced charge leaves at most what this limit can hold. A
        // refund must not move that time: the reading would be full again.
        let timestamp = if after > level.used { level.at } else { other.timestamp };
        // No store reads a number from 2^53 on.
        let tat_us = other.tat_us.saturating_add(up_us).saturating_sub(down_us);
        let tat_us = tat_us.min(2 * MAX_INTEGER + 1);
        let write = if tat_us > level.at.as_us() {
            Write::until(GcraState { tat_us, surplus: 0, timestamp }, tat_us)
        } else {
            Write::Remove
        };
        let (now, cost) = asked;
        let level = self.level(write.after(state.as_ref()).copied(), now);
        let decision = self.decision((now, cost), level.used, level.tat_us, Some(0));
        Step { decision, write }
    }

    /// The units of a cost, at most all.
    fn units_of(&self, cost: u64) -> u64 {
        cost.min(self.most) * self.token_units
    }

    /// The step of a request of this time and cost that gives so many units back.
    fn given_back(
        &self,
        state: Option<GcraState>,
        asked: (Timestamp, u64),
        units: u64,
    ) -> Step<GcraState> {
        let level = self.level(state, asked.0);
        self.step_beside(state, asked, level, level.used.saturating_sub(units))
    }

    /// What a token is in time: so many microseconds of work, divided by so many.
    const fn token_us(&self) -> [u64; 2] {
        [self.token_units * self.tick_us, self.tick_units]
    }

    /// The units of refill ticks that begin within this time.
    const fn flow(&self, us: u64) -> u64 {
        us.div_ceil(self.tick_us) * self.tick_units
    }

    /// The units that `cost` of what a reservation charged still is: all of it if nothing was
    /// charged since, otherwise less what may have refilled.
    ///
    /// It is worth no more than it was when it was charged. If another limit charged it, that one's
    /// work may have been more than this one can hold: what lay beyond is lost, and counts for
    /// nothing. So is all of it once the state holds less than it, after a reset or an acquire of a
    /// limit that recovers sooner.
    fn units_left(
        &self,
        reservation: &Reservation,
        cost: u64,
        now: Timestamp,
        state: Option<GcraState>,
    ) -> u64 {
        let Some(state) = state else { return 0 };
        let cost = cost.min(reservation.counts).min(self.most);
        let ([level_us, token_us, divided_by], made) = (reservation.terms, reservation.timestamp);
        let whole_us = token_us.checked_div(divided_by).unwrap_or_default();
        let mut units = cost * self.token_units;
        if divided_by > 0 && [token_us, divided_by] != self.token_us() {
            let ticks = cost.saturating_mul(whole_us) / self.tick_us;
            units = units.min(ticks.saturating_mul(self.tick_units));
        }
        if state.timestamp == made {
            return units;
        }
        let ago_us = now.saturating_us_since(made);
        let own_us = reservation.counts.saturating_mul(whole_us);
        let until_us = state.tat_us.saturating_add(self.tick_us);
        if ago_us >= self.recovery_us() || until_us < made.as_us().saturating_add(own_us) {
            return 0;
        }
        let lost_us = level_us.saturating_sub(self.recovery_us());
        units.saturating_sub(self.flow(ago_us)).saturating_sub(self.flow(lost_us))
    }
}

impl Algorithm for Gcra {
    type State = GcraState;

    #[inline]
    fn capacity(&self) -> u64 {
        self.refill.burst
    }

    fn is_within(&self, max: &Self) -> bool {
        let refill = &self.refill;
        refill.is_at_most(&max.refill)
            && refill.burst <= max.refill.burst
            && self.debt() <= max.debt()
    }

    /// The same for both names.
    fn state_kind(&self) -> Cow<'static, str> {
        Cow::Borrowed("gcra")
    }

    #[inline]
    fn step(&self, state: Option<&GcraState>, now: Timestamp, cost: u64) -> Step<GcraState> {
        let refill = &self.refill;
        let level = refill.level(state.copied(), now);
        let capacity = refill.capacity_units();
        let denied = |retry_after_us| {
            let decision = refill.decision((now, cost), level.used, level.tat_us, retry_after_us);
            Step { decision, write: Write::Keep }
        };
        if cost > refill.burst {
            return denied(None);
        }
        let charge = cost * refill.token_units;
        let after = level.used + charge;
        if after > capacity && cost > 0 {
            return denied(Some(refill.fits_us(level, capacity - charge) - now.as_us()));
        }
        refill.step_to((now, cost), level, after)
    }

    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        Some(self.refill.given_back(state.copied(), (now, cost), self.refill.units_of(cost)))
    }

    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let (refill, state) = (&self.refill, state.copied());
        let level = refill.level(state, now);
        let after = (level.used + refill.units_of(cost)).min(refill.most_units());
        Some(refill.step_beside(state, (now, cost), level, after))
    }

    /// As a forced charge.
    fn fill(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        self.force(state, now, cost)
    }

    fn debt(&self) -> u64 {
        self.refill.most - self.refill.burst
    }

    fn owed(&self, state: Option<&Self::State>, now: Timestamp) -> u64 {
        let used = self.refill.level(state.copied(), now).used;
        used.saturating_sub(self.refill.capacity_units()).div_ceil(self.refill.token_units)
    }

    fn recovery(&self) -> Option<Recovery> {
        Some(Recovery::Gradual)
    }

    /// One hour.
    fn reservation_us(&self) -> Option<u64> {
        Some(Reservation::LIFE_US)
    }

    /// At the time of the last charge, if that is later.
    fn charged_at(&self, state: Option<&GcraState>, now: Timestamp) -> Timestamp {
        state.map_or(now, |state| now.max(state.timestamp))
    }

    /// The level that the charge leaves, and what a token is in time: work is time, whatever the
    /// limit's numbers are.
    fn record(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        cost: u64,
        before: Option<&Reservation>,
    ) -> Reservation {
        let (refill, state) = (&self.refill, state.copied());
        let level = refill.level(state, now);
        let left = before.map_or(0, |before| refill.units_left(before, before.counts, now, state));
        let counts = left.min(level.used) / refill.token_units + cost;
        let after = (level.used + refill.units_of(cost)).min(refill.most_units());
        let level_us = refill.state_after(level, after).tat_us - level.at.as_us();
        let [token_us, divided_by] = refill.token_us();
        let terms = [level_us, token_us, divided_by];
        Reservation { counts, terms, ..Reservation::new(level.at, cost) }
    }

    /// Charges what a higher cost adds. Returns what a lower cost leaves: all of it if nothing was
    /// charged since, otherwise less what can have refilled since, so that settling never creates
    /// capacity.
    fn settle(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> MaybeStep<Self> {
        if let Some(missing) = cost.checked_sub(reservation.cost) {
            return Some(self.force(state, now, missing)?.costing(cost));
        }
        let excess = reservation.cost - cost;
        let units = self.refill.units_left(reservation, excess, now, state.copied());
        Some(self.refill.given_back(state.copied(), (now, cost), units))
    }
}
