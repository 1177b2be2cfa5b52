//! The generic cell rate algorithm: a limiter that keeps a time instead of a count.
//!
//! Source: ITU-T Recommendation I.371, "virtual scheduling algorithm". Think of every token as
//! work that takes one *emission interval* to do, one after the other. The *theoretical arrival
//! time* (TAT) is when all admitted work will be done. A request fits if the work that is still to
//! do, with its own added, is at most what the burst allows:
//!
//! ```text
//!      now                    TAT                    now + burst
//!       ├───── backlog ────────┤───── what is left ──────┤
//! ```
//!
//! # In integers
//!
//! With `n` tokens per `p` refill ticks (lowest terms) one token is `p` units of work, and `n` units
//! are done per timestamp. The emission interval `p / n` is seldom a whole number, so the state keeps
//! the TAT rounded up to a whole timestamp, and the `surplus` units by which that is too much. At 3/s,
//! `n = 3` and `p = 1,000,000`: one token admitted at 0 is done after 333,333⅓ µs, which is kept as a TAT of
//! 333,334 µs with a surplus of `333,334 · 3 − 1,000,000 = 2` units.
//!
//! A timestamp is one microsecond for all but the largest numbers, for which it is a millisecond or a
//! second. [`Refill`] chooses so that the capacity in units, and the time from empty to full, stay
//! below 2^52; a time and such a span together stay below 2^53, and every sum here is one of these.
//!
//! The Lua twin of this file is `gcra.lua` in `ratelimit-redis`.

#![allow(
    clippy::inline_always,
    reason = "a decision in memory is some fifty nanoseconds; calls that hand states and decisions over in \
              memory were measured to take twenty of them"
)]

use core::num::NonZeroU64;

use crate::algorithm::{Algorithm, ChargesAttempts, Compact, Step, Write, stepped_compact};
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
    /// One token, if it is a whole number of microseconds.
    whole: Option<Token>,
}

/// A token of so many microseconds, and what divides by it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Token {
    us: NonZeroU64,
    /// The limit's: here it is known not to be 0, so that a cost of 1 needs not be compared with it.
    burst: NonZeroU64,
    /// The reciprocal, in parts of which 2^64 are one, rounded down.
    reciprocal: u64,
}

impl Token {
    const fn of(refill: &Refill) -> Option<Self> {
        match (NonZeroU64::new(refill.token_units), NonZeroU64::new(refill.burst)) {
            (Some(us), Some(burst)) if refill.tick_units == 1 && refill.tick_us == 1 => {
                Some(Self { us, burst, reciprocal: u64::MAX / us.get() })
            }
            _ => None,
        }
    }

    /// Whole tokens in so many microseconds. A division takes a processor several times as long.
    #[inline(always)]
    const fn tokens_in(self, us: u64) -> u64 {
        // Too small by less than one: `us` times less than 2^-64, and what is rounded off.
        let tokens = ((us as u128 * self.reciprocal as u128) >> 64) as u64;
        let left_us = us - tokens * self.us.get();
        tokens + (left_us >= self.us.get()) as u64
    }
}

/// What [`Gcra`] keeps for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GcraState {
    /// The theoretical arrival time: when everything admitted will have flowed back. In
    /// microseconds since the Unix epoch; it may lie past [`Timestamp::MAX`], but below 2^53.
    pub tat_us: u64,
    /// Units of work by which `tat_us` is rounded up; less than what one refill tick does.
    pub surplus: u64,
    /// When the state was written. A request from before this counts as made at it.
    pub timestamp: Timestamp,
}

impl GcraState {
    #[inline(always)]
    const fn of_compact(Compact { at, span_us, extra }: Compact) -> Self {
        // Of numbers that no limit wrote, too.
        Self { tat_us: at.as_us().saturating_add(span_us), surplus: extra, timestamp: at }
    }
}

/// What the state says at a moment.
#[derive(Clone, Copy)]
struct Level {
    /// The moment: `now`, or the state's tick if that is later.
    at: Timestamp,
    /// The theoretical arrival time; `at` if that has passed.
    tat_us: u64,
    /// Refill ticks from `at` to then, the one under way included.
    ticks: u64,
    /// Units of admitted work still to do.
    backlog: u64,
}

impl Gcra {
    /// `rate` in the long run and up to `burst` at once.
    ///
    /// # Errors
    /// A burst of 0, or numbers too large to stay exact.
    pub fn new(rate: Rate, burst: u64) -> Result<Self, ConfigError> {
        let refill = Refill::new(rate, burst)?;
        Ok(Self { refill, whole: Token::of(&refill) })
    }

    /// The integers that this limit computes with.
    #[must_use]
    pub const fn refill(&self) -> &Refill {
        &self.refill
    }

    #[inline(always)]
    fn level(&self, state: Option<&GcraState>, now: Timestamp) -> Level {
        let Refill { tick_units, tick_us, .. } = self.refill;
        let full = |at: Timestamp| Level { at, tat_us: at.as_us(), ticks: 0, backlog: 0 };
        let Some(state) = state else { return full(now) };
        let at = now.max(state.timestamp);
        // A state written under a larger limit owes no more than this limit's whole burst.
        let latest_us = state.timestamp.as_us() + self.refill.full_ticks() * tick_us;
        let tat_us = state.tat_us.min(latest_us);
        if tat_us <= at.as_us() {
            return full(at);
        }
        let (whole, begun) = self.refill.ticks_in(tat_us - at.as_us());
        let ticks = whole + u64::from(begun);
        let owes_all = tat_us + tick_us > latest_us;
        let surplus = self.surplus(state.surplus, state.tat_us > latest_us, owes_all);
        Level { at, tat_us, ticks, backlog: ticks * tick_units - surplus }
    }

    /// The surplus that counts of a state's: of one that `owes_all`, and would owe more than the burst by what its
    /// ticks are rounded up, as much as makes it owe the burst; and no other of one that `owed_more`.
    #[inline(always)]
    fn surplus(&self, kept: u64, owed_more: bool, owes_all: bool) -> u64 {
        let Refill { tick_units, .. } = self.refill;
        let kept = kept.min(tick_units - 1);
        if !owes_all {
            return kept;
        }
        let rounded = self.refill.full_ticks() * tick_units - self.refill.capacity_units();
        if owed_more { rounded } else { kept.max(rounded) }
    }

    /// The level that a charge up to this backlog starts from.
    ///
    /// Work is counted as done at the end of each tick, so a tick under way may have run out of work
    /// already: with 2 units to do in a tick that does 385, the bucket has been full for most of it. A
    /// charge now must not be worked off by the part of the tick that is over, so a new tick begins
    /// with it. (Ticks of a microsecond end with the moment they begin in: there this changes nothing.)
    #[inline(always)]
    fn before_charge(&self, level: Level, backlog: u64) -> Level {
        let Refill { tick_units, tick_us, .. } = self.refill;
        let charged = backlog > level.backlog;
        if !charged || level.backlog == 0 || level.backlog >= tick_units {
            return level;
        }
        Level { tat_us: level.at.as_us() + tick_us, ticks: 1, ..level }
    }

    /// When this backlog will be done: a whole number of ticks before or after the TAT of the level, at
    /// which the level's own `ticks` will have done its backlog. Not for a backlog of 0, which is done
    /// already.
    #[inline(always)]
    fn tat_us(&self, level: Level, backlog: u64) -> u64 {
        let Refill { tick_us, .. } = self.refill;
        level.tat_us + self.refill.ticks_for(backlog) * tick_us - level.ticks * tick_us
    }

    #[inline(always)]
    fn decision(&self, now: Timestamp, cost: u64, level: Level, retry_us: Option<u64>) -> Decision {
        let left = self.refill.capacity_units() - level.backlog;
        let reset_us = if level.backlog == 0 { 0 } else { self.tat_us(level, level.backlog) };
        Decision {
            allowed: retry_us == Some(0),
            cost,
            limit: self.refill.burst,
            remaining: left / self.refill.token_units,
            retry_after_us: retry_us,
            reset_after_us: reset_us.saturating_sub(now.as_us()),
        }
    }

    /// The step to another backlog: of a charge, a refund, or nothing.
    #[inline(always)]
    fn moved_to(&self, now: Timestamp, cost: u64, level: Level, backlog: u64) -> Step<GcraState> {
        let after = Level { backlog, ..level };
        let write = if backlog == level.backlog {
            Write::Keep
        } else if backlog == 0 {
            Write::Remove
        } else {
            let ticks = self.refill.ticks_for(backlog);
            let tat_us = self.tat_us(level, backlog);
            let surplus = ticks * self.refill.tick_units - backlog;
            let state = GcraState { tat_us, surplus, timestamp: level.at };
            Write::Put { state, expires: Timestamp::saturating_from_us(tat_us) }
        };
        Step { decision: self.decision(now, cost, after, Some(0)), write }
    }

    /// [`step`](Algorithm::step) where a tick is a microsecond: then none is ever under way, and every moment
    /// is so many ticks after the level's. The same in half of the instructions, of states told in few numbers.
    #[inline(always)]
    fn stepped_by_microseconds(&self, state: Compact, now: Timestamp, cost: u64) -> Step<Compact> {
        let Refill { burst, token_units, tick_units, .. } = self.refill;
        let capacity = self.refill.capacity_units();
        // How far the clock is behind the state.
        let behind_us = state.at.saturating_us_since(now);
        // A state written under a larger limit owes no more than this limit's whole burst.
        let full_ticks = self.refill.full_ticks();
        let ticks = state.span_us.min(full_ticks);
        let ticks = ticks.saturating_sub(now.saturating_us_since(state.at));
        let backlog = if tick_units == 1 {
            ticks
        } else {
            let owes_all = state.span_us >= full_ticks;
            let surplus = self.surplus(state.extra, state.span_us > full_ticks, owes_all);
            if ticks == 0 { 0 } else { ticks * tick_units - surplus }
        };
        let mut left = backlog;
        let mut write = Write::Keep;
        let retry_after_us = if cost > burst {
            None
        } else {
            let charged = backlog + cost * token_units;
            if charged > capacity {
                Some(self.refill.ticks_for(charged - capacity) + behind_us)
            } else {
                left = charged;
                if cost > 0 {
                    let at = now.max(state.at);
                    let span_us = self.refill.ticks_for(charged);
                    let state = Compact { at, span_us, extra: span_us * tick_units - charged };
                    write = Write::Put { state, expires: at.saturating_add_us(span_us) };
                }
                Some(0)
            }
        };
        let decision = Decision {
            allowed: retry_after_us == Some(0),
            cost,
            limit: burst,
            remaining: (capacity - left) / token_units,
            retry_after_us,
            reset_after_us: match left {
                0 => 0,
                left => self.refill.ticks_for(left) + behind_us,
            },
        };
        Step { decision, write }
    }

    /// See [`step`](Algorithm::step).
    #[inline(always)]
    fn stepped(&self, state: Option<&GcraState>, now: Timestamp, cost: u64) -> Step<GcraState> {
        let Refill { burst, token_units, .. } = self.refill;
        let level = self.level(state, now);
        if cost > burst {
            let decision = self.decision(now, cost, level, None);
            return Step { decision, write: Write::Keep };
        }
        let backlog = level.backlog + cost * token_units;
        let excess = backlog.saturating_sub(self.refill.capacity_units());
        if excess > 0 {
            // It fits as soon as the excess has been worked off.
            let retry_us = self.tat_us(level, excess) - now.as_us();
            let decision = self.decision(now, cost, level, Some(retry_us));
            return Step { decision, write: Write::Keep };
        }
        self.moved_to(now, cost, self.before_charge(level, backlog), backlog)
    }
}

impl Algorithm for Gcra {
    type State = GcraState;

    #[inline(always)]
    fn capacity(&self) -> u64 {
        self.refill.burst
    }

    #[inline(always)]
    fn step(&self, state: Option<&GcraState>, now: Timestamp, cost: u64) -> Step<GcraState> {
        // Where there is a quick step it is the same, in half of the instructions and without a division.
        let compact = state.and_then(Self::to_compact);
        match compact.and_then(|compact| self.step_fast(compact, now, cost)) {
            Some(Step { decision, write }) => {
                Step { decision, write: write.map(GcraState::of_compact) }
            }
            None => self.stepped(state, now, cost),
        }
    }

    fn refund(
        &self,
        state: Option<&GcraState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<GcraState>> {
        let level = self.level(state, now);
        let units = cost.min(self.refill.burst) * self.refill.token_units;
        Some(self.moved_to(now, cost, level, level.backlog.saturating_sub(units)))
    }

    fn force(
        &self,
        state: Option<&GcraState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<GcraState>> {
        let level = self.level(state, now);
        let units = cost.min(self.refill.burst) * self.refill.token_units;
        let backlog = (level.backlog + units).min(self.refill.capacity_units());
        Some(self.moved_to(now, cost, self.before_charge(level, backlog), backlog))
    }

    /// An hour.
    fn reservation_us(&self) -> Option<u64> {
        Some(Reservation::LIFE_US)
    }

    /// At the time of the last charge, if that is later.
    fn charged_at(&self, state: Option<&GcraState>, now: Timestamp) -> Timestamp {
        state.map_or(now, |state| now.max(state.timestamp))
    }

    /// Charges what is missing. Gives back what is too much, if nothing was charged since; otherwise as
    /// much of it as cannot have flowed back by itself since, so that settling never mints.
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
        let units = self.refill.units_given_back(reservation, cost, now, last_charged);
        Some(self.moved_to(now, cost, level, level.backlog.saturating_sub(units)))
    }

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
    fn from_compact(compact: Compact) -> Option<GcraState> {
        Some(GcraState::of_compact(compact))
    }

    #[inline]
    fn step_compact(
        &self,
        state: Option<Compact>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<Compact>> {
        match state {
            Some(state) if self.refill.tick_us == 1 => {
                Some(self.stepped_by_microseconds(state, now, cost))
            }
            state => stepped_compact(self, state, now, cost),
        }
    }

    #[inline(always)]
    fn has_fast_step(&self) -> bool {
        self.whole.is_some()
    }

    /// Of rates of one token in so many whole microseconds, as most are; of costs that could ever fit, but
    /// not of nothing; and unless the clock is behind the state.
    #[inline(always)]
    fn step_fast(&self, state: Compact, now: Timestamp, cost: u64) -> Option<Step<Compact>> {
        let token = self.whole?;
        let burst = token.burst.get();
        if cost == 0 || cost > burst {
            return None;
        }
        // A unit is the work of a microsecond: spans are backlogs, nothing is rounded, and of a surplus that
        // another limit has left nothing counts.
        let token_us = token.us.get();
        let capacity = burst * token_us;
        // A state written under a larger limit owes no more than this limit's whole burst.
        let owed = state.span_us.min(capacity);
        let backlog = owed.saturating_sub(now.checked_since(state.at)?.as_us());
        let charged = backlog + cost * token_us;
        let allowed = charged <= capacity;
        let (left, retry_after_us, write) = if allowed {
            let state = Compact { at: now, span_us: charged, extra: 0 };
            (charged, 0, Write::Put { state, expires: now.saturating_add_us(charged) })
        } else {
            (backlog, charged - capacity, Write::Keep)
        };
        let decision = Decision {
            allowed,
            cost,
            limit: burst,
            remaining: token.tokens_in(capacity - left),
            retry_after_us: Some(retry_after_us),
            // Of a cost that could fit, and either did or does not, something is left to do.
            reset_after_us: left,
        };
        Some(Step { decision, write })
    }
}

impl ChargesAttempts for Gcra {}

#[cfg(test)]
mod tests {
    use super::*;

    fn gcra(rate: &str, burst: u64) -> Gcra {
        Gcra::new(rate.parse().expect(rate), burst).expect(rate)
    }

    fn timestamp(us: u64) -> Timestamp {
        Timestamp::from_us(us).expect("a test's time")
    }

    /// Acquires one after the other and says, for each, (allowed, remaining, retry, reset).
    fn run(gcra: &Gcra, requests: &[(u64, u64)]) -> alloc::vec::Vec<(bool, u64, Option<u64>, u64)> {
        let mut state = None;
        requests
            .iter()
            .map(|&(at_us, cost)| {
                let step = gcra.step(state.as_ref(), timestamp(at_us), cost);
                match step.write {
                    Write::Keep => {}
                    Write::Put { state: next, .. } => state = Some(next),
                    Write::Remove => state = None,
                }
                let d = step.decision;
                (d.allowed, d.remaining, d.retry_after_us, d.reset_after_us)
            })
            .collect()
    }

    #[test]
    fn a_burst_passes_and_then_the_rate_does() {
        assert_eq!(
            run(&gcra("1/s", 2), &[(0, 1), (0, 1), (0, 1), (999_999, 1), (1_000_000, 1)]),
            [
                (true, 1, Some(0), 1_000_000),
                (true, 0, Some(0), 2_000_000),
                (false, 0, Some(1_000_000), 2_000_000),
                (false, 0, Some(1), 1_000_001),
                (true, 0, Some(0), 2_000_000),
            ]
        );
    }

    #[test]
    fn thirds_of_a_second_never_drift() {
        let gcra = gcra("3/s", 1);
        let mut state = None;
        let mut at_us = 1_795_218_392_123_456;
        let begin_us = at_us;
        for _ in 0..3_000 {
            let step = gcra.step(state.as_ref(), timestamp(at_us), 1);
            assert!(step.decision.allowed);
            let Write::Put { state: next, .. } = step.write else { panic!("charged") };
            at_us +=
                gcra.step(Some(&next), timestamp(at_us), 1).decision.retry_after_us.expect("fits");
            state = Some(next);
        }
        assert_eq!(at_us - begin_us, 3_000 * 333_334); // each wait is rounded up on its own …
        let mut admitted = 0;
        let mut state = None;
        for us in (begin_us..begin_us + 1_000_000_000).step_by(1_000) {
            let step = gcra.step(state.as_ref(), timestamp(us), 1);
            if let Write::Put { state: next, .. } = step.write {
                state = Some(next);
                admitted += 1;
            }
        }
        assert_eq!(admitted, 2_995); // … and every millisecond asked: one per 334 ms
    }

    #[test]
    fn ten_million_a_second_are_ten_a_microsecond() {
        let fast = gcra("10000000/s", 10);
        let got = run(&fast, &[(0, 10), (0, 1), (1, 10), (1, 1)]);
        assert_eq!(got[0], (true, 0, Some(0), 1));
        assert_eq!(got[1], (false, 0, Some(1), 1));
        assert_eq!(got[2], (true, 0, Some(0), 1));
        assert_eq!(got[3], (false, 0, Some(1), 1));
    }

    #[test]
    fn a_clock_that_goes_back_finds_what_the_state_had() {
        let got = run(&gcra("1/s", 5), &[(10_000_000, 1), (9_000_000, 1), (9_000_000, 4)]);
        assert_eq!(got[1], (true, 3, Some(0), 3_000_000));
        // Two of four are missing one second after the state's tick, which is two from now.
        assert_eq!(got[2], (false, 3, Some(2_000_000), 3_000_000));
    }

    #[test]
    fn a_cost_above_the_burst_never_fits_and_charges_nothing() {
        let got = run(&gcra("1/s", 5), &[(0, 6), (0, u64::MAX), (0, 5)]);
        assert_eq!(got[0], (false, 5, None, 0));
        assert_eq!(got[1], (false, 5, None, 0));
        assert_eq!(got[2], (true, 0, Some(0), 5_000_000));
    }

    #[test]
    fn a_coarse_tick_brings_no_more_than_a_full_bucket_had_room_for() {
        let rate = Rate::per_us(1_000_000_007, 30 * 86_400_000_000).expect("a rate");
        let coarse = Gcra::new(rate, 1_000_000_007).expect("exact in seconds");
        let got = run(
            &coarse,
            &[(0, 1), (999_999, 1), (1_000_000, 1_000_000_007), (1_999_999, 1_000_000_007)],
        );
        // Of the second token next to nothing has flowed back a microsecond later.
        assert_eq!((got[2].0, got[2].1, got[2].2), (false, 1_000_000_005, Some(999_999)));
        assert!(got[3].0);
    }

    #[test]
    fn a_state_told_in_a_few_numbers_is_the_same_state() {
        let state = GcraState { tat_us: 1_333_334, surplus: 2, timestamp: timestamp(1_000_000) };
        let compact = Gcra::to_compact(&state).expect("a span");
        assert_eq!(compact, Compact { at: timestamp(1_000_000), span_us: 333_334, extra: 2 });
        assert_eq!(Gcra::from_compact(compact), Some(state));
        // Nobody writes such a state, but a store may be handed it.
        let backwards = GcraState { tat_us: 1, surplus: 0, timestamp: timestamp(2) };
        assert_eq!(Gcra::to_compact(&backwards), None);
    }

    /// Of limits that have a quick step, and of others.
    #[test]
    fn a_step_is_the_same_whichever_way_it_is_computed() {
        let mut tried = [0, 0];
        for (rate, burst) in [("1/s", 2), ("4/s", 60), ("3/s", 1), ("1/us", 2), ("1/30d", 1)] {
            let (limit, begin_us) = (gcra(rate, burst), 1 << 50);
            let full_us = limit.refill.full_ticks();
            let spans = [0, 1, full_us / 3, full_us - 1, full_us, full_us + 1, 2 * full_us];
            for (span_us, away_us) in spans.into_iter().flat_map(|s| spans.map(|away| (s, away))) {
                for (surplus, cost) in [(0, 0), (0, 1), (1, 1), (0, 2), (1, 60), (0, 61)] {
                    let tat_us = begin_us + span_us;
                    let state = GcraState { tat_us, surplus, timestamp: timestamp(begin_us) };
                    for now in [begin_us + away_us, begin_us - away_us].map(timestamp) {
                        let step = limit.step(Some(&state), now, cost);
                        assert_eq!(step, limit.stepped(Some(&state), now, cost));
                        tried[usize::from(step.decision.allowed)] += 1;
                    }
                }
            }
        }
        assert!(tried.iter().all(|tried| *tried > 500), "{tried:?}");
    }

    #[test]
    fn coarse_refill_ticks_hand_over_late_but_never_early() {
        // A billion and seven a month: one refill tick is a second and brings 386 tokens or so.
        let coarse = Gcra::new(
            Rate::per_us(1_000_000_007, 30 * 86_400_000_000).expect("a rate"),
            1_000_000_007,
        )
        .expect("exact in seconds");
        let half = 500_000;
        let got = run(
            &coarse,
            &[(half, 1_000_000_007), (1_000_000, 1), (half + 999_999, 1), (half + 1_000_000, 1)],
        );
        assert!(got[0].0);
        assert_eq!((got[1].0, got[1].2), (false, Some(half)));
        assert_eq!((got[2].0, got[2].2), (false, Some(1)));
        assert!(got[3].0);
        assert_eq!(got[3].1, 384);
    }
}
