//! [`Work`]: the state of a bucket that refills, as the time at which all admitted work will be done.
//!
//! [`Gcra`](crate::Gcra) and [`TokenBucket`](crate::TokenBucket) keep it in two forms and decide by it alike. With `n`
//! tokens per `p` refill ticks (in lowest terms) a token is `p` units of work, and a tick does `n` units:
//!
//! ```text
//!      at                    TAT                     at + full_us
//!       ├──────── used ────────┤───── what is left ──────┤
//! ```
//!
//! # Side by side
//!
//! Another limit may have written the state, with more work than this limit can hold. Then this limit reads its own
//! whole burst. An acquire replaces the state by that reading and the charge. A refund or a forced charge moves the TAT
//! as it was written, by as much as it moves the reading: the other limit still counts the rest.

use crate::algorithm::{Step, Write};
use crate::decision::Decision;
use crate::rate::Refill;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// What a bucket keeps for a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Work {
    /// The theoretical arrival time (TAT): when all admitted work will be done, rounded up to a whole tick.
    pub(crate) tat_us: u64,
    /// Units of work by which `tat_us` is rounded up; less than what one refill tick does.
    pub(crate) surplus: u64,
    /// When the state was written. An earlier `now` counts as this time.
    pub(crate) timestamp: Timestamp,
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

impl Refill {
    /// The level of a state at `now`.
    #[inline]
    fn level(&self, work: Option<Work>, now: Timestamp) -> Level {
        let Self { tick_units, tick_us, .. } = *self;
        let unused = |at: Timestamp| Level { at, tat_us: at.as_us(), ticks: 0, used: 0 };
        let Some(work) = work else { return unused(now) };
        // A time before the state's own counts as the state's.
        let at = now.max(work.timestamp);
        // A state written under a larger limit owes at most this limit's whole burst.
        let latest_us = self.latest_us(work);
        let (tat_us, surplus) = match work.tat_us {
            tat_us if tat_us > latest_us => (latest_us, 0),
            tat_us => (tat_us, work.surplus.min(tick_units - 1)),
        };
        if tat_us <= at.as_us() {
            return unused(at);
        }
        let (whole, is_under_way) = self.ticks_in(tat_us - at.as_us());
        let ticks = whole + u64::from(is_under_way);
        // The last tick of a whole burst may do more than the burst needs.
        let surplus = if tat_us + tick_us > latest_us {
            surplus.max(self.full_ticks() * tick_units - self.capacity_units())
        } else {
            surplus
        };
        Level { at, tat_us, ticks, used: ticks * tick_units - surplus }
    }

    /// The latest TAT that this limit writes at the time of the state.
    #[inline]
    const fn latest_us(&self, work: Work) -> u64 {
        work.timestamp.as_us() + self.full_us()
    }

    /// The state that follows a move from this level to `after` units: a charge or a refund that leaves some.
    #[inline]
    fn moved(&self, mut level: Level, after: u64) -> Work {
        let Self { tick_units, tick_us, .. } = *self;
        // Work counts as done at the end of each tick, so a tick under way may have run out of work already. The rest
        // of that tick must not do the work of a new charge: a new tick begins with it. (A tick of a microsecond ends
        // in the moment it begins: there this changes nothing.)
        if after > level.used && level.used > 0 && level.used < tick_units {
            level = Level { tat_us: level.at.as_us() + tick_us, ticks: 1, ..level };
        }
        // The TAT moves by the difference in ticks.
        let ticks_after = self.ticks_for(after);
        Work {
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
        let left = self.capacity_units() - used;
        let remaining = left / token_units;
        // The tick under way began when the first of the used units was still to do.
        let grown_us =
            |missing| tat_us + self.ticks_for(missing) * tick_us - self.ticks_for(used) * tick_us;
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
    fn step_to(&self, (now, cost): (Timestamp, u64), level: Level, after: u64) -> Step<Work> {
        let (tat_us, write) = if after == level.used {
            (level.tat_us, Write::Keep)
        } else if after == 0 {
            (level.tat_us, Write::Remove)
        } else {
            let work = self.moved(level, after);
            (work.tat_us, written(work))
        };
        Step { decision: self.decision((now, cost), after, tat_us, Some(0)), write }
    }

    /// [`step_to`](Self::step_to) for a refund or a forced charge.
    fn step_beside(
        &self,
        work: Option<Work>,
        asked: (Timestamp, u64),
        level: Level,
        after: u64,
    ) -> Step<Work> {
        let is_beyond = |work: &Work| work.tat_us > self.latest_us(*work).max(level.at.as_us());
        let Some(other) = work.filter(|work| after != level.used && is_beyond(work)) else {
            return self.step_to(asked, level, after);
        };
        let (up_us, down_us) = (self.ticks_for(after) * self.tick_us, level.ticks * self.tick_us);
        // At the time of the write a forced charge leaves this limit's burst at most. A refund must not move that time:
        // the reading would be full again.
        let timestamp = if after > level.used { level.at } else { other.timestamp };
        let tat_us = other.tat_us.saturating_add(up_us).saturating_sub(down_us);
        let write = if tat_us > level.at.as_us() {
            written(Work { tat_us, surplus: 0, timestamp })
        } else {
            Write::Remove
        };
        let (now, cost) = asked;
        let level = self.level(write.after(work.as_ref()).copied(), now);
        let decision = self.decision((now, cost), level.used, level.tat_us, Some(0));
        Step { decision, write }
    }

    #[inline]
    pub(crate) fn step(&self, work: Option<Work>, now: Timestamp, cost: u64) -> Step<Work> {
        let level = self.level(work, now);
        let capacity = self.capacity_units();
        let denied = |retry_after_us| {
            let decision = self.decision((now, cost), level.used, level.tat_us, retry_after_us);
            Step { decision, write: Write::Keep }
        };
        if cost > self.burst {
            return denied(None);
        }
        let charge = cost * self.token_units;
        let after = level.used + charge;
        if after > capacity {
            return denied(Some(self.fits_us(level, capacity - charge) - now.as_us()));
        }
        self.step_to((now, cost), level, after)
    }

    pub(crate) fn refund(&self, work: Option<Work>, now: Timestamp, cost: u64) -> Step<Work> {
        let level = self.level(work, now);
        let charge = cost.min(self.burst) * self.token_units;
        self.step_beside(work, (now, cost), level, level.used.saturating_sub(charge))
    }

    pub(crate) fn force(&self, work: Option<Work>, now: Timestamp, cost: u64) -> Step<Work> {
        let level = self.level(work, now);
        let charge = cost.min(self.burst) * self.token_units;
        let after = (level.used + charge).min(self.capacity_units());
        self.step_beside(work, (now, cost), level, after)
    }

    /// Charges what a higher cost adds. Returns what a lower cost leaves: all of it if nothing was charged since,
    /// otherwise less what can have refilled since, so that settling never creates capacity.
    pub(crate) fn settle(
        &self,
        work: Option<Work>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Step<Work> {
        if cost >= reservation.cost {
            return self.force(work, now, cost - reservation.cost).costing(cost);
        }
        let level = self.level(work, now);
        let last_charged = work.map(|work| work.timestamp);
        let charge = self.units_given_back(reservation, cost, now, last_charged);
        self.step_beside(work, (now, cost), level, level.used.saturating_sub(charge))
    }

    /// The units of the capacity that are left at the time of the state.
    pub(crate) fn units_left(&self, work: Work) -> u64 {
        let (whole, is_under_way) =
            self.ticks_in(work.tat_us.saturating_sub(work.timestamp.as_us()));
        // More than a whole burst may be to do for another limit.
        let ticks = (whole + u64::from(is_under_way)).min(self.full_ticks());
        (self.capacity_units() + work.surplus).saturating_sub(ticks * self.tick_units)
    }

    /// The work of a bucket that has so many units left at the time of the state and is full at `tat_us`. Where the two
    /// contradict each other, because another limit wrote them, the time counts.
    pub(crate) fn work_of(&self, units: u64, tat_us: u64, timestamp: Timestamp) -> Work {
        let missing = self.capacity_units().saturating_sub(units);
        let (whole, is_under_way) = self.ticks_in(tat_us.saturating_sub(timestamp.as_us()));
        let ticks = whole + u64::from(is_under_way);
        let surplus = match self.ticks_for(missing) {
            same if same == ticks => ticks * self.tick_units - missing,
            _ => 0,
        };
        Work { tat_us, surplus, timestamp }
    }
}

#[inline]
fn written(work: Work) -> Write<Work> {
    Write::Put { state: work, expires: Timestamp::saturating_from_us(work.tat_us) }
}
