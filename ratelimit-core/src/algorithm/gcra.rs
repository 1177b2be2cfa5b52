//! The generic cell rate algorithm (GCRA): a limiter that keeps a time instead of a count.
//!
//! Source: ITU-T Recommendation I.371, "virtual scheduling algorithm". Each token is work that takes one
//! *emission interval*, one token after the other. The *theoretical arrival time* (TAT) is when all admitted work
//! will be done. A request fits if the work still to do, with its own added, is at most what the burst allows:
//!
//! ```text
//!      at                    TAT                     at + full_us
//!       ├──────── used ────────┤───── what is left ──────┤
//! ```
//!
//! # In integers
//!
//! With `n` tokens per `p` refill ticks (in lowest terms) a token is `p` units of work, and a tick does `n` units. The
//! emission interval `p / n` is seldom a whole number of ticks. So the state keeps the TAT rounded up to a whole tick,
//! and the `surplus`: the units by which that is too much. At 3/s, `n = 3` and `p = 1,000,000`. One token admitted at 0
//! is done after 333,333⅓ µs; the state keeps a TAT of 333,334 µs and a surplus of `333,334 · 3 − 1,000,000 = 2` units.
//!
//! A tick lasts one microsecond for all but the largest numbers, and a millisecond or a second for those. [`Refill`]
//! chooses it so that the capacity in units and the time from empty to full stay below 2^52. The sum of a time and such
//! a span stays below 2^53, and so does every number here.
//!
//! `gcra.lua` in `ratelimit-redis` is the same algorithm in Lua, with the same names in the same order. `gcra/fast.rs`
//! is the fast path for stores in memory.

mod fast;
#[cfg(test)]
mod tests;

use crate::algorithm::{Algorithm, ChargesAttempts, Recovery, Step, Write};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::rate::{Rate, Refill};
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// The generic cell rate algorithm: `rate` in the long run, `burst` at once.
///
/// It decides exactly as [`TokenBucket`](crate::TokenBucket) with the same rate and burst does.
///
/// ```
/// use ratelimit_core::{Algorithm, Gcra, Timestamp, Write};
///
/// let gcra = Gcra::new("3/s".parse()?, 1)?;
/// let first = gcra.step(None, Timestamp::ZERO, 1);
/// assert!(first.decision.allowed);
///
/// let Write::Put { state, .. } = first.write else { unreachable!() };
/// let second = gcra.step(Some(&state), Timestamp::ZERO, 1);
/// assert_eq!(second.decision.retry_after_us, Some(333_334)); // a third of a second, rounded up
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gcra {
    refill: Refill,
    /// For the fast path, which serves limits whose tokens are whole microseconds.
    token: Option<fast::Token>,
}

/// What [`Gcra`] keeps for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GcraState {
    /// The theoretical arrival time: when all admitted work will be done. In microseconds since the Unix epoch; it may
    /// lie past [`Timestamp::MAX`], but below 2^53.
    pub tat_us: u64,
    /// Units of work by which `tat_us` is rounded up; less than what one refill tick does.
    pub surplus: u64,
    /// When the state was written. An earlier `now` counts as this time.
    pub timestamp: Timestamp,
}

/// A state as one moment sees it.
#[derive(Clone, Copy)]
struct Level {
    /// The moment: `now`, or the time of the state if that is later.
    at: Timestamp,
    /// The theoretical arrival time; `at` if that has passed.
    tat_us: u64,
    /// Refill ticks from `at` to `tat_us`, including the tick under way.
    ticks: u64,
    /// Units of admitted work still to do at `at`.
    used: u64,
}

impl Gcra {
    /// `rate` in the long run and up to `burst` at once.
    ///
    /// # Errors
    /// A burst of 0, or numbers too large to stay exact.
    pub fn new(rate: Rate, burst: u64) -> Result<Self, ConfigError> {
        let refill = Refill::new(rate, burst)?;
        Ok(Self { refill, token: fast::Token::of(&refill) })
    }

    /// The integers that this limit computes with.
    #[must_use]
    pub const fn refill(&self) -> &Refill {
        &self.refill
    }

    /// The level of a state at `now`.
    #[inline]
    fn level(&self, state: Option<&GcraState>, now: Timestamp) -> Level {
        let Refill { tick_units, tick_us, .. } = self.refill;
        let unused = |at: Timestamp| Level { at, tat_us: at.as_us(), ticks: 0, used: 0 };
        let Some(state) = state else { return unused(now) };
        // A time before the state's own counts as the state's.
        let at = now.max(state.timestamp);
        // A state written under a larger limit owes at most this limit's whole burst.
        let latest_us = state.timestamp.as_us() + self.refill.full_us();
        let (tat_us, surplus) = match state.tat_us {
            tat_us if tat_us > latest_us => (latest_us, 0),
            tat_us => (tat_us, state.surplus.min(tick_units - 1)),
        };
        if tat_us <= at.as_us() {
            return unused(at);
        }
        let (whole, is_under_way) = self.refill.ticks_in(tat_us - at.as_us());
        let ticks = whole + u64::from(is_under_way);
        // The last tick of a whole burst may do more than the burst needs.
        let surplus = if tat_us + tick_us > latest_us {
            surplus.max(self.refill.full_ticks() * tick_units - self.refill.capacity_units())
        } else {
            surplus
        };
        Level { at, tat_us, ticks, used: ticks * tick_units - surplus }
    }

    /// The state that follows a move from this level to `after` units: a charge or a refund that leaves some.
    #[inline]
    fn moved(&self, mut level: Level, after: u64) -> GcraState {
        let Refill { tick_units, tick_us, .. } = self.refill;
        // Work counts as done at the end of each tick, so a tick under way may have run out of work already. The rest
        // of that tick must not do the work of a new charge: a new tick begins with it. (A tick of a microsecond ends
        // in the moment it begins: there this changes nothing.)
        if after > level.used && level.used > 0 && level.used < tick_units {
            level = Level { tat_us: level.at.as_us() + tick_us, ticks: 1, ..level };
        }
        // The TAT moves by the difference in ticks.
        let ticks_after = self.refill.ticks_for(after);
        GcraState {
            tat_us: level.tat_us + ticks_after * tick_us - level.ticks * tick_us,
            surplus: ticks_after * tick_units - after,
            timestamp: level.at,
        }
    }

    /// When at most `room` units will be used, at a level that uses more.
    #[inline]
    fn fits_us(&self, level: Level, room: u64) -> u64 {
        let Refill { tick_us, .. } = self.refill;
        level.tat_us + self.refill.ticks_for(level.used - room) * tick_us - level.ticks * tick_us
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
        let Refill { burst, token_units, tick_us, .. } = self.refill;
        let left = self.refill.capacity_units() - used;
        let remaining = left / token_units;
        // The tick under way began when the first of the used units was still to do.
        let grown_us = |missing| {
            tat_us + self.refill.ticks_for(missing) * tick_us
                - self.refill.ticks_for(used) * tick_us
        };
        let replenish_after_us = match used {
            0 => 0,
            _ => grown_us((remaining + 1) * token_units - left) - now.as_us(),
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
            let state = self.moved(level, after);
            let expires = Timestamp::saturating_from_us(state.tat_us);
            (state.tat_us, Write::Put { state, expires })
        };
        Step { decision: self.decision((now, cost), after, tat_us, Some(0)), write }
    }
}

impl Algorithm for Gcra {
    type State = GcraState;

    #[inline]
    fn capacity(&self) -> u64 {
        self.refill.burst
    }

    #[inline]
    fn step(&self, state: Option<&GcraState>, now: Timestamp, cost: u64) -> Step<GcraState> {
        let level = self.level(state, now);
        let capacity = self.refill.capacity_units();
        let denied = |retry_after_us| {
            let decision = self.decision((now, cost), level.used, level.tat_us, retry_after_us);
            Step { decision, write: Write::Keep }
        };
        if cost > self.refill.burst {
            return denied(None);
        }
        let charge = cost * self.refill.token_units;
        let after = level.used + charge;
        if after > capacity {
            return denied(Some(self.fits_us(level, capacity - charge) - now.as_us()));
        }
        self.step_to((now, cost), level, after)
    }

    fn refund(
        &self,
        state: Option<&GcraState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<GcraState>> {
        let level = self.level(state, now);
        let charge = cost.min(self.refill.burst) * self.refill.token_units;
        Some(self.step_to((now, cost), level, level.used.saturating_sub(charge)))
    }

    fn force(
        &self,
        state: Option<&GcraState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<GcraState>> {
        let level = self.level(state, now);
        let charge = cost.min(self.refill.burst) * self.refill.token_units;
        let after = (level.used + charge).min(self.refill.capacity_units());
        Some(self.step_to((now, cost), level, after))
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

    /// Charges what a higher cost adds. Returns what a lower cost leaves: all of it if nothing was charged since,
    /// otherwise less what can have refilled since, so that settling never creates capacity.
    fn settle(
        &self,
        state: Option<&GcraState>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<GcraState>> {
        if cost >= reservation.cost {
            return Some(self.force(state, now, cost - reservation.cost)?.costing(cost));
        }
        let level = self.level(state, now);
        let last_charged = state.map(|state| state.timestamp);
        let charge = self.refill.units_given_back(reservation, cost, now, last_charged);
        Some(self.step_to((now, cost), level, level.used.saturating_sub(charge)))
    }
}

impl ChargesAttempts for Gcra {}
