//! The lockout: too many charges in a window block the key for a while, and longer each time.
//!
//! Source: the account lockout of operating systems and login forms (NIST SP 800-63B, section
//! 5.2.2, "Rate Limiting"), with waits that grow as in the *binary exponential backoff* of Ethernet
//! (Metcalfe and Boggs, 1976). A charge is a failed login, a wrong code or another misuse.
//!
//! A window begins with the first charge, as that of a
//! [`FirstRequestWindow`](crate::FirstRequestWindow). The charge that reaches the count is
//! admitted, and begins a block: nothing is admitted until it ends. Then the count starts again at
//! 0. The first block has the length `block`. Each further one is `factor` times as long as the one
//! before, at most `longest`. Blocks are remembered until `forget` has passed without a charge,
//! counted from the newest charge or from the end of its block.
//!
//! A denied request changes nothing, so a caller that retries prolongs no block. A cost that does
//! not fit in what is left of a window is denied until the window ends, and blocks nothing.
//!
//! `lockout.lua` in `ratelimit-redis` is the same algorithm in Lua.

use alloc::borrow::Cow;
use core::num::NonZeroU64;

use crate::algorithms::{Algorithm, MaybeStep, Step, Write};
use crate::decision::Decision;
use crate::error::ConfigError;
use crate::in_memory::InMemory;
use crate::quota::Quota;
use crate::rate::{Rate, kind_of_window};
use crate::reservation::Reservation;
use crate::share::{Share, window};
use crate::timestamp::Timestamp;

mod builder;
#[cfg(test)]
mod tests;

pub use builder::LockoutBuilder;

/// The most lockouts that are counted. From any length, so many blocks reach the longest.
const MOST_LOCKOUTS: u64 = 64;

/// So many charges per window block a key, for longer each time.
///
/// ```
/// use core::time::Duration;
/// use ratelimit_core::{Algorithm, Lockout, Timestamp};
///
/// // Three failed logins in five minutes block for a minute, then for two, and so on up to an hour.
/// let minutes = |minutes: u64| Duration::from_secs(60 * minutes);
/// let logins = Lockout::new("3/5m".parse()?, minutes(1)).factor(2).longest(minutes(60)).build()?;
///
/// let third = logins.step(None, Timestamp::ZERO, 3);
/// assert!(third.decision.allowed && third.decision.remaining == 0);
/// let next = logins.step(third.write.after(None), Timestamp::ZERO, 1);
/// assert_eq!(next.decision.retry_after_us, Some(60_000_000));
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lockout {
    limit: u64,
    window_us: u64,
    block_us: u64,
    factor: u64,
    longest_us: u64,
    forget_us: u64,
}

/// What [`Lockout`] keeps for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LockoutState {
    /// When the window began, with its first charge.
    pub start: Timestamp,
    /// What has been charged in the window.
    pub count: u64,
    /// When the newest charge was made: of a blocked key, when the block began.
    pub newest: Timestamp,
    /// How often the key has been blocked, the current block included; at most 64.
    pub lockouts: u64,
    /// When the block ends by the limit that began it, in microseconds since the Unix epoch; 0 if
    /// the window has begun no block.
    pub until_us: u64,
    /// When everything is forgotten by the limit that wrote the state, in microseconds since the
    /// Unix epoch; below 2^53.
    pub ends_us: u64,
}

impl Lockout {
    /// The length of a window in microseconds.
    #[must_use]
    pub const fn window_us(&self) -> u64 {
        self.window_us
    }

    /// The length of the first block in microseconds.
    #[must_use]
    pub const fn block_us(&self) -> u64 {
        self.block_us
    }

    /// How many times as long as the one before a further block is.
    #[must_use]
    pub const fn factor(&self) -> u64 {
        self.factor
    }

    /// The length of the longest block in microseconds.
    #[must_use]
    pub const fn longest_us(&self) -> u64 {
        self.longest_us
    }

    /// How long blocks are remembered without a charge, in microseconds; 0 if all are equal.
    #[must_use]
    pub const fn forget_us(&self) -> u64 {
        self.forget_us
    }

    /// The length of the block of this number, from 1.
    const fn length_us(&self, nth: u64) -> u64 {
        let (mut us, mut further) = (self.block_us, if self.factor == 1 { 1 } else { nth });
        // At most 52 times: the length doubles at least.
        while further > 1 && us < self.longest_us {
            us =
                if us > self.longest_us / self.factor { self.longest_us } else { us * self.factor };
            further -= 1;
        }
        us
    }

    /// When a state is forgotten: with its window, or once its blocks are.
    fn ends_us(&self, state: &LockoutState) -> u64 {
        let counts = state.until_us == 0 && state.count > 0;
        let window_us = if counts { state.start.as_us() + self.window_us } else { 0 };
        let quiet_us = state.newest.as_us().max(state.until_us);
        if state.lockouts == 0 { window_us } else { window_us.max(quiet_us + self.forget_us) }
    }

    /// The state as this limit sees it at `now`: a window with its count, a block that lasts
    /// (`until_us` is not 0), or a window that begins now.
    ///
    /// Another limit may have written it. The block then lasts no longer than this limit blocks
    /// for so many lockouts, nor than that limit did, and is remembered no longer than by either.
    fn standing(&self, state: Option<&LockoutState>, now: Timestamp) -> LockoutState {
        let new = LockoutState {
            start: now,
            count: 0,
            newest: now,
            lockouts: 0,
            until_us: 0,
            ends_us: now.as_us(),
        };
        let Some(state) = state else { return new };
        let own_us = state.newest.as_us() + self.length_us(state.lockouts);
        let known = LockoutState { until_us: state.until_us.min(own_us), ..*state };
        let known = LockoutState { ends_us: self.ends_us(&known).min(state.ends_us), ..known };
        let window_is_over = now.as_us() >= state.start.as_us() + self.window_us;
        if now.as_us() >= known.ends_us {
            new
        } else if now.as_us() < known.until_us {
            LockoutState { count: known.count.max(self.limit), ..known }
        } else if known.until_us > 0 || known.count == 0 || window_is_over {
            LockoutState { start: now.max(known.newest), count: 0, until_us: 0, ..known }
        } else {
            known
        }
    }

    /// The state after a charge that fits.
    fn charged(&self, before: LockoutState, now: Timestamp, charge: u64) -> LockoutState {
        let (newest, count) = (now.max(before.newest), before.count + charge);
        let mut after = LockoutState { count, newest, ..before };
        if count >= self.limit {
            after.lockouts = MOST_LOCKOUTS.min(before.lockouts + 1);
            after.until_us = newest.as_us() + self.length_us(after.lockouts);
        }
        LockoutState { ends_us: self.ends_us(&after), ..after }
    }

    const fn remaining(&self, standing: &LockoutState) -> u64 {
        self.limit.saturating_sub(standing.count)
    }

    /// The decision that leaves this standing.
    fn decision(&self, (now, cost): (Timestamp, u64), standing: &LockoutState) -> Decision {
        let remaining = self.remaining(standing);
        let window_us = standing.start.as_us() + self.window_us;
        let free_us = if standing.until_us > 0 { standing.until_us } else { window_us };
        let wait_us = free_us.min(standing.ends_us).saturating_sub(now.as_us());
        Decision {
            allowed: true,
            cost,
            limit: self.limit,
            remaining,
            retry_after_us: Some(0),
            // The whole count comes back at once.
            replenish_after_us: if remaining < self.limit { wait_us } else { 0 },
            reset_after_us: standing.ends_us - now.as_us().min(standing.ends_us),
        }
    }

    /// The step of an operation that is always allowed.
    fn allowed(
        &self,
        state: Option<&LockoutState>,
        asked: (Timestamp, u64),
        write: Write<LockoutState>,
    ) -> Step<LockoutState> {
        let standing = self.standing(write.after(state), asked.0);
        Step { decision: self.decision(asked, &standing), write }
    }

    /// The state with `cost` taken off its count. Of a charge that is taken back, the block that it
    /// began ends.
    fn lowered(&self, state: LockoutState, now: Timestamp, cost: u64) -> Write<LockoutState> {
        let mut after = LockoutState { count: state.count.saturating_sub(cost), ..state };
        if state.until_us > 0 {
            (after.lockouts, after.until_us) = (state.lockouts.saturating_sub(1), 0);
            after.ends_us = self.ends_us(&after);
        } else if after.count == 0 {
            after.ends_us = self.ends_us(&after).min(state.ends_us);
        }
        if (after.count, after.lockouts) == (0, 0) || after.ends_us <= now.as_us() {
            return Write::Remove;
        }
        Write::until(after, after.ends_us)
    }
}

impl Algorithm for Lockout {
    type State = LockoutState;

    fn capacity(&self) -> u64 {
        self.limit
    }

    /// The count is no larger, and no block is shorter or forgotten earlier.
    fn is_within(&self, max: &Self) -> bool {
        let blocks = |of: &Self| [of.block_us, of.factor, of.longest_us, of.forget_us];
        let mut each = blocks(self).into_iter().zip(blocks(max));
        self.window_us == max.window_us
            && self.limit <= max.limit
            && each.all(|(own, max)| own >= max)
    }

    fn state_kind(&self) -> Cow<'static, str> {
        kind_of_window("lockout", self.window_us)
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        let standing = self.standing(state, now);
        let decision = self.decision((now, cost), &standing);
        if cost > decision.remaining {
            let retry_after_us = (cost <= self.limit).then_some(decision.replenish_after_us);
            let denied = Decision { allowed: false, retry_after_us, ..decision };
            return Step { decision: denied, write: Write::Keep };
        }
        if cost == 0 {
            return Step { decision, write: Write::Keep };
        }
        let after = self.charged(standing, now, cost);
        let decision = self.decision((now, cost), &after);
        Step { decision, write: Write::until(after, after.ends_us) }
    }

    /// Takes the cost off the window. A block stays, and has nothing to give back: only a reset
    /// ends it.
    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let standing = self.standing(state, now);
        let write = match state {
            Some(state) if standing.until_us == 0 && standing.count.min(cost) > 0 => {
                self.lowered(*state, now, cost)
            }
            _ => Write::Keep,
        };
        Some(self.allowed(state, (now, cost), write))
    }

    /// Charges as much as is left, which begins a block. Charges nothing while a key is blocked,
    /// also by another limit whose block this one counts as over.
    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        let standing = self.standing(state, now);
        let charge = cost.min(self.remaining(&standing));
        let written = state.filter(|state| now.as_us() < state.ends_us);
        let is_blocked = written.is_some_and(|written| now.as_us() < written.until_us);
        let write = if charge == 0 || is_blocked {
            Write::Keep
        } else {
            let after = self.charged(standing, now, charge);
            // The other limit may remember it for longer.
            let longer = written.filter(|written| standing.ends_us < written.ends_us);
            let ends_us = longer.map_or(0, |written| written.ends_us).max(after.ends_us);
            Write::until(LockoutState { ends_us, ..after }, ends_us)
        };
        Some(self.allowed(state, (now, cost), write))
    }

    /// Takes the charge off its window, if that is still the current one. The block that the window
    /// has begun ends.
    fn undo(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        charged: &Self::State,
    ) -> MaybeStep<Self> {
        let standing = self.standing(state, now);
        let (state, written) = (state?, LockoutState { count: standing.count, ..*state? });
        let same = standing.start == charged.start && standing.count.min(reservation.cost) > 0;
        let write = same.then(|| self.lowered(written, now, reservation.cost))?;
        Some(self.allowed(Some(state), (now, reservation.cost), write))
    }

    /// Blocks a new key for the longest time; or uses a window up that is remembered for longer.
    fn filled(&self, now: Timestamp) -> Step<Self::State> {
        let often = LockoutState { lockouts: MOST_LOCKOUTS, ..self.standing(None, now) };
        let blocked = self.charged(often, now, self.limit);
        let used_up = LockoutState { until_us: 0, ..blocked };
        let used_up = LockoutState { ends_us: self.ends_us(&used_up), ..used_up };
        let after = if blocked.ends_us < used_up.ends_us { used_up } else { blocked };
        self.allowed(None, (now, self.limit), Write::until(after, after.ends_us))
    }

    fn denies_abnormal_usage(&self) -> bool {
        true
    }
}

impl InMemory for Lockout {}

impl Quota for Lockout {
    fn rate(&self) -> Option<Rate> {
        Some(Rate::of_built(self.limit, self.window_us))
    }

    fn window_us(&self, _decision: &Decision) -> Option<u64> {
        Some(self.window_us)
    }
}

/// The count is divided, and a block lasts as long.
impl Share for Lockout {
    fn share(&self, nodes: NonZeroU64) -> Result<Self, ConfigError> {
        Ok(Self { limit: window(self.limit, self.window_us, nodes)?.count(), ..*self })
    }
}
