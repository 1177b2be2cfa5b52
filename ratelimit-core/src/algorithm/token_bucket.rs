//! The token bucket: tokens flow in at a steady rate, requests take them out.
//!
//! Source: the "leaky bucket as a meter" of Turner, "New directions in communications" (1986), in the form for tokens
//! of RFC 2697. A bucket holds at most `burst` tokens and begins full. A request of cost `c` takes `c` tokens, or is
//! denied and takes none.
//!
//! # In integers
//!
//! With `n` tokens per `p` refill ticks (in lowest terms) a token is `p` units, and `n` units flow in per tick. The
//! state keeps whole tokens, the units beyond them, the time, and when the bucket will be full, so nothing is ever
//! rounded. A tick lasts one microsecond for all but the largest numbers (see [`Refill`]).
//!
//! The steps are in `work.rs`, which GCRA shares. `token_bucket.lua` in `ratelimit-redis` is the same algorithm in Lua.

use crate::algorithm::{Algorithm, ChargesAttempts, Recovery, Step};
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::rate::{Rate, Refill};
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;
use crate::work::Work;

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
    /// When the bucket will be full, in microseconds since the Unix epoch; it may lie past [`Timestamp::MAX`], but below
    /// 2^53.
    pub full_at_us: u64,
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

    fn work(&self, state: Option<&TokenBucketState>) -> Option<Work> {
        let Refill { burst, token_units, .. } = self.refill;
        let TokenBucketState { tokens, remainder, timestamp, full_at_us } = *state?;
        // Of another limit there may be more.
        let units = tokens.min(burst) * token_units + remainder.min(token_units - 1);
        Some(self.refill.work_of(units, full_at_us, timestamp))
    }

    fn state(&self, work: Work) -> TokenBucketState {
        let units = self.refill.units_left(work);
        TokenBucketState {
            tokens: units / self.refill.token_units,
            remainder: units % self.refill.token_units,
            timestamp: work.timestamp,
            full_at_us: work.tat_us,
        }
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
        self.refill.step(self.work(state), now, cost).map(|work| self.state(work))
    }

    fn refund(
        &self,
        state: Option<&TokenBucketState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<TokenBucketState>> {
        let step = self.refill.refund(self.work(state), now, cost);
        Some(step.map(|work| self.state(work)))
    }

    fn force(
        &self,
        state: Option<&TokenBucketState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<TokenBucketState>> {
        let step = self.refill.force(self.work(state), now, cost);
        Some(step.map(|work| self.state(work)))
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
        let step = self.refill.settle(self.work(state), now, reservation, cost);
        Some(step.map(|work| self.state(work)))
    }
}

impl InMemory for TokenBucket {}

impl ChargesAttempts for TokenBucket {}
