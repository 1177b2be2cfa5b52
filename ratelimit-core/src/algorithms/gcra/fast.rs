//! The fast path of GCRA: how a store in memory steps it in few instructions.
//!
//! It serves limits whose tokens each take a whole number of microseconds, as most do. A unit of
//! work is then a microsecond, so a span of time *is* the work still to do: nothing is rounded, no
//! tick is ever unfinished, and the surplus is 0.

#![allow(
    clippy::inline_always,
    reason = "a decision in memory takes some fifty nanoseconds; calls that pass states and decisions through memory \
              were measured to take twenty of them"
)]

use core::num::NonZeroU64;

use super::{Gcra, GcraState};
use crate::algorithms::{Step, Write};
use crate::decision::Decision;
use crate::in_memory::{Compact, InMemory};
use crate::rate::Refill;
use crate::timestamp::Timestamp;

/// A token that takes a whole number of microseconds, and its reciprocal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Token {
    us: NonZeroU64,
    /// The limit's burst. Known not to be 0, so that the compiler compares a cost of 1 with
    /// nothing.
    burst: NonZeroU64,
    /// 2^64 divided by `us`, rounded down.
    reciprocal: u64,
}

impl Token {
    pub(super) const fn from_refill(refill: &Refill) -> Option<Self> {
        match (NonZeroU64::new(refill.token_units), NonZeroU64::new(refill.burst)) {
            // A state may owe more than the burst.
            _ if refill.most > refill.burst => None,
            (Some(us), Some(burst)) if refill.tick_units == 1 && refill.tick_us == 1 => {
                Some(Self { us, burst, reciprocal: u64::MAX / us.get() })
            }
            _ => None,
        }
    }

    /// The whole tokens in so many microseconds, and the microseconds left over, by a
    /// multiplication: a division takes a processor several times as long.
    #[inline(always)]
    const fn tokens_in(self, us: u64) -> (u64, u64) {
        // Rounding makes this at most 1 too small.
        let tokens = ((us as u128 * self.reciprocal as u128) >> 64) as u64;
        let left_us = us - tokens * self.us.get();
        if left_us >= self.us.get() {
            (tokens + 1, left_us - self.us.get())
        } else {
            (tokens, left_us)
        }
    }
}

impl InMemory for Gcra {
    #[inline(always)]
    fn is_compact(&self) -> bool {
        true
    }

    #[inline(always)]
    fn to_compact(state: &GcraState) -> Option<Compact> {
        let span_us = state.tat_us.checked_sub(state.timestamp.as_us())?;
        Some(Compact { at: state.timestamp, span_us, extra: state.surplus })
    }

    #[inline(always)]
    fn from_compact(Compact { at, span_us, extra }: Compact) -> Option<GcraState> {
        // The sum of numbers that no limit wrote may overflow.
        let tat_us = at.as_us().saturating_add(span_us);
        Some(GcraState { tat_us, surplus: extra, timestamp: at })
    }

    #[inline(always)]
    fn has_fast_step(&self) -> bool {
        self.token.is_some()
    }

    /// Returns `None` for limits of other tokens, for a cost of 0 or above the burst, and for a
    /// clock behind the state.
    #[inline(always)]
    fn step_fast(&self, state: Compact, now: Timestamp, cost: u64) -> Option<Step<Compact>> {
        let token = self.token?;
        let burst = token.burst.get();
        if cost == 0 || cost > burst {
            return None;
        }
        let token_us = token.us.get();
        let capacity = burst * token_us;
        // A state written under a larger limit owes at most this limit's whole burst; a surplus
        // that another limit left counts for nothing.
        let owed = state.span_us.min(capacity);
        let used = owed.saturating_sub(now.checked_since(state.at)?.as_us());
        let after = used + cost * token_us;
        let allowed = after <= capacity;
        let (used, retry_after_us, write) = if allowed {
            let state = Compact { at: now, span_us: after, extra: 0 };
            (after, 0, Write::Put { state, expires: now.saturating_add_us(after) })
        } else {
            (used, after - capacity, Write::Keep)
        };
        let (remaining, rest_us) = token.tokens_in(capacity - used);
        let decision = Decision {
            allowed,
            cost,
            limit: burst,
            remaining,
            retry_after_us: Some(retry_after_us),
            // Neither is 0: a charge leaves some, and only a used bucket denies a cost within the
            // burst.
            replenish_after_us: token_us - rest_us,
            reset_after_us: used,
        };
        Some(Step { decision, write })
    }
}
