//! The token bucket: tokens flow in at a steady rate, requests take them out.
//!
//! Source: the "leaky bucket as a meter" of Turner, "New directions in communications" (1986), in the form for tokens
//! of RFC 2697. A bucket holds at most `burst` tokens and begins full. A request of cost `c` takes `c` tokens, or is
//! denied and takes none.
//!
//! # In integers
//!
//! With `n` tokens per `p` refill ticks (in lowest terms) a token is `p` units, and `n` units flow in per tick. The
//! state keeps whole tokens, the units beyond them, and the time, so nothing is ever rounded. A tick lasts one
//! microsecond for all but the largest numbers (see [`Refill`]). Where it lasts longer, the state also keeps how long
//! ago the last tick ended.
//!
//! `token_bucket.lua` in `ratelimit-redis` is the same algorithm in Lua.

use crate::algorithm::{Algorithm, ChargesAttempts, Recovery, Step, Write};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::{Rate, Refill};
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// A bucket of `burst` tokens that refills at `rate`.
///
/// It decides exactly as [`Gcra`](crate::Gcra) with the same rate and burst does, but its state shows the number of
/// tokens. [`force`](Algorithm::force) drains it.
///
/// ```
/// use ratelimit_core::{Algorithm, Timestamp, TokenBucket, Write};
///
/// let bucket = TokenBucket::new("1/s".parse()?, 5)?;
/// let forced = bucket.force(None, Timestamp::ZERO, 7).expect("a bucket can be drained");
/// assert!(forced.decision.allowed);
/// assert_eq!(forced.decision.remaining, 0);
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucket {
    refill: Refill,
}

/// What [`TokenBucket`] keeps for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenBucketState {
    /// Whole tokens in the bucket.
    pub tokens: u64,
    /// Units beyond the whole tokens; less than one token.
    pub remainder: u64,
    /// When the state was written. An earlier `now` counts as this time.
    pub timestamp: Timestamp,
    /// How long before `timestamp` the last tick ended, in microseconds: less than a tick, so 0 where a tick is a
    /// microsecond.
    pub since_us: u64,
}

/// A state as one moment sees it.
#[derive(Clone, Copy)]
struct Level {
    /// The moment: `now`, or the time of the state if that is later.
    at: Timestamp,
    /// When the last tick up to `at` ended.
    anchor: Timestamp,
    /// Units in the bucket.
    units: u64,
}

impl TokenBucket {
    /// A bucket of `burst` tokens that refills at `rate`.
    ///
    /// # Errors
    /// A burst of 0, or numbers too large to stay exact.
    pub fn new(rate: Rate, burst: u64) -> Result<Self, ConfigError> {
        Ok(Self { refill: Refill::new(rate, burst)? })
    }

    /// The integers that this limit computes with.
    #[must_use]
    pub const fn refill(&self) -> &Refill {
        &self.refill
    }

    fn level(&self, state: Option<&TokenBucketState>, now: Timestamp) -> Level {
        let Refill { burst, token_units, tick_units, tick_us } = self.refill;
        let capacity = self.refill.capacity_units();
        let Some(state) = state else { return Level { at: now, anchor: now, units: capacity } };
        let at = now.max(state.timestamp);
        // A state written under a larger limit holds at most this limit's burst.
        let kept = state.tokens.min(burst) * token_units + state.remainder.min(token_units - 1);
        let units = kept.min(capacity);
        let since_us = state.since_us.min(tick_us - 1).min(state.timestamp.as_us());
        let anchor_us = state.timestamp.as_us() - since_us;
        let (ticks, _) = self.refill.ticks_in(at.as_us() - anchor_us);
        if ticks >= self.refill.ticks_for(capacity - units) {
            return Level { at, anchor: at, units: capacity };
        }
        Level {
            at,
            anchor: Timestamp::saturating_from_us(anchor_us + ticks * tick_us),
            units: units + ticks * tick_units,
        }
    }

    /// The level that a charge down to `units` starts from.
    ///
    /// Units flow in at the end of each tick, so a bucket that lacks less than one tick's units may have been full for
    /// most of the tick under way. That part of the tick must not refill a new charge: a new tick begins with it. (A
    /// tick of a microsecond ends in the moment it begins: there this changes nothing.)
    fn before_charge(&self, level: Level, units: u64) -> Level {
        let missing = self.refill.capacity_units() - level.units;
        let charged = units < level.units;
        if !charged || missing >= self.refill.tick_units {
            return level;
        }
        Level { anchor: level.at, ..level }
    }

    /// When the tick ends that brings `missing` more units.
    fn refilled_us(&self, level: Level, missing: u64) -> u64 {
        level.anchor.as_us() + self.refill.ticks_for(missing) * self.refill.tick_us
    }

    fn decision(&self, now: Timestamp, cost: u64, level: Level, retry_us: Option<u64>) -> Decision {
        let Refill { burst, token_units, .. } = self.refill;
        let remaining = level.units / token_units;
        let wait_us = |missing| self.refilled_us(level, missing).saturating_sub(now.as_us());
        let (replenish_after_us, reset_after_us) = match self.refill.capacity_units() - level.units
        {
            0 => (0, 0),
            missing => (wait_us((remaining + 1) * token_units - level.units), wait_us(missing)),
        };
        Decision {
            allowed: retry_us == Some(0),
            cost,
            limit: burst,
            remaining,
            retry_after_us: retry_us,
            replenish_after_us,
            reset_after_us,
        }
    }

    /// An allowed step to other units: a charge, a refund, or neither.
    fn step_to(
        &self,
        now: Timestamp,
        cost: u64,
        level: Level,
        units: u64,
    ) -> Step<TokenBucketState> {
        let after = Level { units, ..level };
        let missing = self.refill.capacity_units() - units;
        let write = if units == level.units {
            Write::Keep
        } else if missing == 0 {
            Write::Remove
        } else {
            let state = TokenBucketState {
                tokens: units / self.refill.token_units,
                remainder: units % self.refill.token_units,
                timestamp: level.at,
                since_us: level.at.saturating_us_since(level.anchor),
            };
            let expires = Timestamp::saturating_from_us(self.refilled_us(level, missing));
            Write::Put { state, expires }
        };
        Step { decision: self.decision(now, cost, after, Some(0)), write }
    }
}

impl Algorithm for TokenBucket {
    type State = TokenBucketState;

    fn capacity(&self) -> u64 {
        self.refill.burst
    }

    fn step(
        &self,
        state: Option<&TokenBucketState>,
        now: Timestamp,
        cost: u64,
    ) -> Step<TokenBucketState> {
        let level = self.level(state, now);
        if cost > self.refill.burst {
            let decision = self.decision(now, cost, level, None);
            return Step { decision, write: Write::Keep };
        }
        let wanted = cost * self.refill.token_units;
        if wanted > level.units {
            let retry_us = self.refilled_us(level, wanted - level.units) - now.as_us();
            let decision = self.decision(now, cost, level, Some(retry_us));
            return Step { decision, write: Write::Keep };
        }
        let units = level.units - wanted;
        self.step_to(now, cost, self.before_charge(level, units), units)
    }

    fn refund(
        &self,
        state: Option<&TokenBucketState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<TokenBucketState>> {
        let level = self.level(state, now);
        let given = cost.min(self.refill.burst) * self.refill.token_units;
        let units = (level.units + given).min(self.refill.capacity_units());
        Some(self.step_to(now, cost, level, units))
    }

    fn force(
        &self,
        state: Option<&TokenBucketState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<TokenBucketState>> {
        let level = self.level(state, now);
        let wanted = cost.min(self.refill.burst) * self.refill.token_units;
        let units = level.units.saturating_sub(wanted);
        Some(self.step_to(now, cost, self.before_charge(level, units), units))
    }

    fn recovery(&self) -> Option<Recovery> {
        Some(Recovery::Gradual)
    }

    /// One hour.
    fn reservation_us(&self) -> Option<u64> {
        Some(Reservation::LIFE_US)
    }

    /// At the time of the last charge, if that is later.
    fn charged_at(&self, state: Option<&TokenBucketState>, now: Timestamp) -> Timestamp {
        state.map_or(now, |state| now.max(state.timestamp))
    }

    /// Charges what a higher cost adds. Returns what a lower cost leaves: all of it if nothing was charged since,
    /// otherwise less what can have refilled since, so that settling never creates capacity.
    fn settle(
        &self,
        state: Option<&TokenBucketState>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<TokenBucketState>> {
        if cost >= reservation.cost {
            return Some(self.force(state, now, cost - reservation.cost)?.costing(cost));
        }
        let level = self.level(state, now);
        let last_charged = state.map(|state| state.timestamp);
        let units = self.refill.units_given_back(reservation, cost, now, last_charged);
        let units = (level.units + units).min(self.refill.capacity_units());
        Some(self.step_to(now, cost, level, units))
    }
}

impl InMemory for TokenBucket {}

impl ChargesAttempts for TokenBucket {}
