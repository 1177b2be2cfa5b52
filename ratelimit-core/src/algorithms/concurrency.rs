//! The concurrency limit: a semaphore whose permits are leases.
//!
//! Source: Gray and Cheriton, "Leases: An Efficient Fault-Tolerant Mechanism for Distributed File Cache Consistency"
//! (1989). A lease ends by itself, so a caller that dies frees its place. A request with a
//! [`ReservationId`](crate::ReservationId) gets a lease under that id: [renewing](Algorithm::renew) extends it, and
//! [settling](Algorithm::settle) releases it. A request without an id gets a lease that ends with its time, or by a
//! refund.
//!
//! A lease granted or renewed at `t` counts until just before `t + lease`, and no longer at `t + lease`. The wait of a
//! denied request assumes that no lease is released early.
//!
//! `concurrency.lua` in `ratelimit-redis` is the same algorithm in Lua.

use alloc::format;
use alloc::vec::Vec;

use crate::algorithms::{Algorithm, MaybeStep, Step};
use crate::entries::{Entries, Log, LogEntry};
use crate::error::ConfigError;
use crate::in_memory::{InMemory, counts_entries};
use crate::rate::Rate;
use crate::reservation::Reservation;
use crate::timestamp::Timestamp;

/// The largest limit: each step reads all leases.
const MAX_LIMIT: u64 = 10_000;

/// At most a number of requests at the same time, each for at most the length of a lease.
///
/// A step takes time and memory in proportion to the live leases.
///
/// ```
/// use ratelimit_core::{Algorithm, Concurrency, Timestamp};
/// use ratelimit_core::algorithm::Write;
/// use ratelimit_core::store::Reservation;
///
/// // Two at once, each for half a minute at most.
/// let downloads = Concurrency::new("2/30s".parse()?)?;
/// let Write::Put { state, .. } = downloads.step(None, Timestamp::ZERO, 2).write else { unreachable!() };
/// assert!(!downloads.step(Some(&state), Timestamp::ZERO, 1).decision.allowed);
///
/// let lease = Reservation::new(Timestamp::ZERO, 2);
/// let released = downloads.settle(Some(&state), Timestamp::ZERO, &lease, 0).expect("leases can be");
/// assert_eq!(released.decision.remaining, 2);
/// # Ok::<(), ratelimit_core::ConfigError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Concurrency {
    leases: Entries,
}

/// What [`Concurrency`] keeps for a key: its leases, oldest first, one entry per moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConcurrencyState {
    /// The leases, their times strictly ascending, none of cost 0. Leases of the same moment share one entry; their
    /// [`Reservation`]s tell them apart.
    pub leases: Vec<LogEntry>,
}

impl Concurrency {
    /// The count of the rate at the same time, with leases of the rate's period: `20/30s` is 20 at the same time, each
    /// for at most half a minute.
    ///
    /// # Errors
    /// A count above 10,000, because each step reads all leases.
    pub fn new(rate: Rate) -> Result<Self, ConfigError> {
        let (limit, window_us) = (rate.count(), rate.period_us());
        if limit > MAX_LIMIT {
            return Err(ConfigError::new(format!(
                "{limit} at the same time are too many, because each step reads all leases; write at \
                 most {MAX_LIMIT}"
            )));
        }
        Ok(Self { leases: Entries { limit, window_us } })
    }

    /// The length of a lease in microseconds.
    #[must_use]
    pub const fn lease_us(&self) -> u64 {
        self.leases.window_us
    }
}

fn leases(state: Option<&ConcurrencyState>) -> &[LogEntry] {
    state.map_or(&[], |state| &state.leases)
}

fn kept(leases: Log) -> ConcurrencyState {
    ConcurrencyState { leases }
}

impl Algorithm for Concurrency {
    type State = ConcurrencyState;

    fn capacity(&self) -> u64 {
        self.leases.limit
    }

    fn step(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> Step<Self::State> {
        self.leases.step(leases(state), now, cost).map(kept)
    }

    /// Ends the newest leases.
    fn refund(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        Some(self.leases.refund(leases(state), now, cost).map(kept))
    }

    fn force(&self, state: Option<&Self::State>, now: Timestamp, cost: u64) -> MaybeStep<Self> {
        Some(self.leases.force(leases(state), now, cost).map(kept))
    }

    fn has_leases(&self) -> bool {
        true
    }

    /// The length of a lease.
    fn reservation_us(&self) -> Option<u64> {
        Some(self.lease_us())
    }

    /// At the time of the newest lease, if that is later.
    fn charged_at(&self, state: Option<&ConcurrencyState>, now: Timestamp) -> Timestamp {
        leases(state).last().map_or(now, |newest| now.max(newest.timestamp))
    }

    /// Releases the lease, whatever the cost.
    fn settle(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> MaybeStep<Self> {
        let taken =
            self.leases.take(leases(state), (now, reservation.timestamp), reservation.cost, false);
        Some(taken.costing(cost).map(kept))
    }

    /// Starts the lease again at `now`, if it is still there.
    fn renew(
        &self,
        state: Option<&Self::State>,
        now: Timestamp,
        reservation: &Reservation,
    ) -> Step<Self::State> {
        self.leases
            .take(leases(state), (now, reservation.timestamp), reservation.cost, true)
            .map(kept)
    }
}

impl InMemory for Concurrency {
    fn step_in_place(&self, state: &mut ConcurrencyState, now: Timestamp, cost: u64) -> Step<()> {
        self.leases.step_in_place(&mut state.leases, now, cost)
    }

    counts_entries!(leases);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn timestamp(us: u64) -> Timestamp {
        Timestamp::from_us(us).expect("a test's time")
    }

    fn entry((us, cost): (u64, u64)) -> LogEntry {
        LogEntry { timestamp: timestamp(us), cost }
    }

    #[test]
    fn a_release_and_a_renewal_take_the_lease_at_its_time_alone() {
        let limit = Concurrency::new("9/10us".parse().expect("a rate")).expect("a limit");
        let state =
            |leases: &[_]| ConcurrencyState { leases: leases.iter().copied().map(entry).collect() };
        let there = state(&[(1, 2), (3, 1), (5, 4)]);
        // The moment, the lease, and what is there after it was released or renewed.
        for (now, (us, cost), released, renewed) in [
            (6, (3, 1), &[(1, 2), (5, 4)][..], &[(1, 2), (5, 4), (6, 1)][..]),
            (6, (1, 2), &[(3, 1), (5, 4)], &[(3, 1), (5, 4), (6, 2)]),
            // Its part of a moment.
            (6, (5, 3), &[(1, 2), (3, 1), (5, 1)], &[(1, 2), (3, 1), (5, 1), (6, 3)]),
            // A reset forgot it, and others were granted since; it has ended.
            (6, (2, 4), &[(1, 2), (3, 1), (5, 4)], &[(1, 2), (3, 1), (5, 4)]),
            (15, (5, 4), &[(1, 2), (3, 1), (5, 4)], &[(1, 2), (3, 1), (5, 4)]),
        ] {
            let lease = Reservation::new(timestamp(us), cost);
            let settled = limit.settle(Some(&there), timestamp(now), &lease, 0).expect("a lease");
            assert_eq!(settled.write.after(Some(&there)), Some(&state(released)), "{lease:?}");
            let step = limit.renew(Some(&there), timestamp(now), &lease);
            assert_eq!(step.write.after(Some(&there)), Some(&state(renewed)), "{lease:?}");
        }
        // If the clock has gone back, a lease counts as granted with the newest one, and is released there.
        assert_eq!(limit.charged_at(Some(&there), timestamp(3)), timestamp(5));
        let granted = limit.step(Some(&there), timestamp(3), 1).write;
        assert_eq!(granted.after(None), Some(&state(&[(1, 2), (3, 1), (5, 5)])));
        assert!(Concurrency::new("10001/s".parse().expect("a rate")).is_err());
    }
}
