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

use crate::algorithm::{Algorithm, Step};
use crate::decision::Decision;
use crate::entries::{Entries, LogEntry};
use crate::error::ConfigError;
use crate::in_memory::InMemory;
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
/// use ratelimit_core::{Algorithm, Concurrency, Reservation, Timestamp, Write};
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

fn kept(leases: Vec<LogEntry>) -> ConcurrencyState {
    ConcurrencyState { leases }
}

impl Algorithm for Concurrency {
    type State = ConcurrencyState;

    fn capacity(&self) -> u64 {
        self.leases.limit
    }

    fn step(
        &self,
        state: Option<&ConcurrencyState>,
        now: Timestamp,
        cost: u64,
    ) -> Step<ConcurrencyState> {
        self.leases.step(leases(state), now, cost).map(kept)
    }

    /// Ends the newest leases.
    fn refund(
        &self,
        state: Option<&ConcurrencyState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<ConcurrencyState>> {
        Some(self.leases.refund(leases(state), now, cost).map(kept))
    }

    fn force(
        &self,
        state: Option<&ConcurrencyState>,
        now: Timestamp,
        cost: u64,
    ) -> Option<Step<ConcurrencyState>> {
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
        state: Option<&ConcurrencyState>,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<ConcurrencyState>> {
        let taken =
            self.leases.take(leases(state), (now, reservation.timestamp), reservation.cost, false);
        Some(taken.costing(cost).map(kept))
    }

    /// Starts the lease again at `now`, if it is still there.
    fn renew(
        &self,
        state: Option<&ConcurrencyState>,
        now: Timestamp,
        reservation: &Reservation,
    ) -> Step<ConcurrencyState> {
        self.leases
            .take(leases(state), (now, reservation.timestamp), reservation.cost, true)
            .map(kept)
    }
}

impl InMemory for Concurrency {
    fn decision(&self, state: Option<&ConcurrencyState>, now: Timestamp, cost: u64) -> Decision {
        self.leases.decision(leases(state), now, cost)
    }

    fn step_in_place(&self, state: &mut ConcurrencyState, now: Timestamp, cost: u64) -> Step<()> {
        self.leases.step_in_place(&mut state.leases, now, cost)
    }

    fn settle_in_place(
        &self,
        state: &mut ConcurrencyState,
        now: Timestamp,
        reservation: &Reservation,
        cost: u64,
    ) -> Option<Step<()>> {
        let taken = self.leases.take_in_place(
            &mut state.leases,
            (now, reservation.timestamp),
            reservation.cost,
        );
        Some(taken.costing(cost))
    }

    fn entries_in(state: &ConcurrencyState) -> usize {
        state.leases.len()
    }

    fn entries_per_step(&self) -> usize {
        1
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Write;

    fn timestamp(us: u64) -> Timestamp {
        Timestamp::from_us(us).expect("a test's time")
    }

    fn entry(us: u64, cost: u64) -> LogEntry {
        LogEntry { timestamp: timestamp(us), cost }
    }

    fn reservation(us: u64, cost: u64) -> Reservation {
        Reservation::new(timestamp(us), cost)
    }

    /// Settles by copy and in place, which must agree.
    fn settled(
        limit: &Concurrency,
        state: &ConcurrencyState,
        now: u64,
        reservation: &Reservation,
    ) -> Step<ConcurrencyState> {
        let step = limit.settle(Some(state), timestamp(now), reservation, 0).expect("a lease");
        let mut own = state.clone();
        let placed =
            limit.settle_in_place(&mut own, timestamp(now), reservation, 0).expect("a lease");
        assert_eq!(placed.decision, step.decision);
        assert_eq!(placed.write, step.write.clone().map(drop));
        assert_eq!(
            own.leases,
            step.write.after(Some(state)).map_or(Vec::new(), |state| state.leases.clone())
        );
        step
    }

    fn left_by(step: Step<ConcurrencyState>) -> Vec<LogEntry> {
        match step.write {
            Write::Put { state, .. } => state.leases,
            Write::Remove => Vec::new(),
            Write::Keep => panic!("nothing was written"),
        }
    }

    #[test]
    fn a_release_takes_the_lease_at_its_time_and_a_renewal_moves_it_to_the_end() {
        let limit = Concurrency::new("9/10us".parse().expect("a rate")).expect("a limit");
        let state = ConcurrencyState { leases: [entry(1, 2), entry(3, 1), entry(5, 4)].into() };
        let released = settled(&limit, &state, 6, &reservation(3, 1));
        assert_eq!(released.decision.remaining, 3);
        assert_eq!(left_by(released), [entry(1, 2), entry(5, 4)]);
        let renewed = limit.renew(Some(&state), timestamp(6), &reservation(1, 2));
        assert_eq!((renewed.decision.remaining, renewed.decision.reset_after_us), (2, 10));
        assert_eq!(left_by(renewed), [entry(3, 1), entry(5, 4), entry(6, 2)]);
    }

    #[test]
    fn a_release_frees_its_part_of_a_moment_and_the_last_one_removes_the_state() {
        let limit = Concurrency::new("9/10us".parse().expect("a rate")).expect("a limit");
        let state = ConcurrencyState { leases: [entry(5, 4)].into() };
        let released = settled(&limit, &state, 6, &reservation(5, 3));
        assert_eq!(left_by(released), [entry(5, 1)]);
        let released = settled(&limit, &state, 6, &reservation(5, 4));
        assert_eq!(left_by(released), []);
    }

    #[test]
    fn releasing_a_forgotten_lease_frees_no_other_lease() {
        let limit = Concurrency::new("9/10us".parse().expect("a rate")).expect("a limit");
        let state = ConcurrencyState { leases: [entry(5, 4)].into() };
        // A reset forgot the lease of time 2, and another was granted since.
        let released = settled(&limit, &state, 6, &reservation(2, 4));
        assert_eq!((released.decision.remaining, released.write), (5, Write::Keep));
        assert_eq!(limit.renew(Some(&state), timestamp(6), &reservation(2, 4)).write, Write::Keep);
        // If the clock has gone back, a lease counts as granted with the newest one, and is released there.
        assert_eq!(limit.charged_at(Some(&state), timestamp(3)), timestamp(5));
        let granted = limit.step(Some(&state), timestamp(3), 1);
        assert_eq!(left_by(granted), [entry(5, 5)]);
    }

    #[test]
    fn a_lease_that_has_ended_is_neither_released_nor_renewed() {
        let limit = Concurrency::new("9/10us".parse().expect("a rate")).expect("a limit");
        let state = ConcurrencyState { leases: [entry(5, 4)].into() };
        let late = settled(&limit, &state, 15, &reservation(5, 4));
        assert_eq!((late.decision.remaining, late.write), (9, Write::Keep));
        assert_eq!(limit.renew(Some(&state), timestamp(15), &reservation(5, 4)).write, Write::Keep);
        assert!(Concurrency::new("10001/s".parse().expect("a rate")).is_err());
    }
}
