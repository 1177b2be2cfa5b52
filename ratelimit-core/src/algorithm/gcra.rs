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
//! The steps are in `work.rs`, which the token bucket shares. `gcra.lua` in `ratelimit-redis` is the same algorithm in
//! Lua, with the same names in the same order. `gcra/fast.rs` is the fast path for stores in memory.

mod fast;
#[cfg(test)]
mod tests;

use crate::algorithm::{Algorithm, ChargesAttempts, Recovery, Step};
use crate::error::ConfigError;
use crate::rate::{Rate, Refill};
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;
use crate::work::Work;

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
}

impl From<GcraState> for Work {
    #[inline]
    fn from(GcraState { tat_us, surplus, timestamp }: GcraState) -> Self {
        Self { tat_us, surplus, timestamp }
    }
}

impl From<Work> for GcraState {
    #[inline]
    fn from(Work { tat_us, surplus, timestamp }: Work) -> Self {
        Self { tat_us, surplus, timestamp }
    }
}

fn work(state: Option<&GcraState>) -> Option<Work> {
    state.copied().map(Work::from)
}

impl Algorithm for Gcra {
    type State = GcraState;

    #[inline]
    fn capacity(&self) -> u64 {
        self.refill.burst
    }

    #[inline]
    fn step(&self, state: Option<&GcraState>, now: Timestamp, cost: u64) -> Step<GcraState> {
        self.refill.step(work(state), now, cost).map(GcraState::from)
    }

    fn refund(
        &self,
        state: Option<&GcraState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<GcraState>> {
        Some(self.refill.refund(work(state), now, cost).map(GcraState::from))
    }

    fn force(
        &self,
        state: Option<&GcraState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<GcraState>> {
        Some(self.refill.force(work(state), now, cost).map(GcraState::from))
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
        Some(self.refill.settle(work(state), now, reservation, cost).map(GcraState::from))
    }
}

impl ChargesAttempts for Gcra {}
