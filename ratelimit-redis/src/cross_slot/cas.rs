//! Decides a batch across slots of a cluster, with compare-and-set in each slot.
//!
//! 1. Read all states in all slots, and decide. If the batch is denied, nothing is written.
//! 2. Compare and set in every slot concurrently. If another client was faster in one slot, the store
//!    takes back the charges in the others and starts again, a bounded number of times.

use futures_util::future::try_join3;
use ratelimit_core::algorithm::Write;
use ratelimit_core::store::{Check, Reservation};
use ratelimit_core::{Algorithm, Timestamp, Verdict};

use super::{Across, InSlot, worst};
use crate::cas_mode::{CasRequest, CasValue, Reads};
use crate::codec::Codec;
use crate::concurrent::all;
use crate::connection::Connection;
use crate::error::Result;
use crate::mode::Cas;

impl<A: Algorithm<State: Codec>, C: Connection> Across<'_, A, Cas, C> {
    /// Acquires or extends, all or nothing.
    pub(crate) async fn acquire(&self) -> Result<Verdict> {
        let Self { store, whole, parts, deadline } = self;
        let request = store.request(whole.time(), deadline.to_charge());
        let turn = request.turn(whole).await;
        // Whether a charge of an earlier round may remain.
        let mut charged = false;
        let mut attempts = request.attempts(&turn);
        loop {
            let decided = request.decided(whole, true, true).await;
            let decided = decided.map_err(|error| attempts.rounds.explain(error).after(charged));
            let (verdict, now, reads) = decided?;
            if !verdict.allowed() {
                // Charging the attempts takes the turn itself.
                drop(turn);
                let denied = self.charge_attempts(verdict).await;
                return denied.map_err(|error| error.after(charged));
            }
            if !reads.changes() {
                return Ok(verdict);
            }
            attempts.next(&reads.slots).map_err(|error| error.after(charged))?;
            let slots: Vec<_> = parts.iter().map(|part| reads.of(part)).collect();
            let written = all(slots.iter().map(|slots| request.write(slots, now))).await;
            if written.iter().all(|written| matches!(written, Ok(true))) {
                return Ok(verdict);
            }
            let done = parts.iter().zip(&written).filter(|(_, done)| matches!(done, Ok(true)));
            let done = done.flat_map(|(part, _)| &part.positions);
            let back = store.request(whole.time(), deadline.to_give_back());
            let take_back =
                |place: &usize| back.take_back(&whole.checks()[*place], *place, &reads, now);
            let undone = all(done.map(take_back)).await;
            charged |= undone.iter().any(|undone| !matches!(undone, Ok(true)));
            if let Some(error) = worst(&written) {
                return Err(attempts.rounds.explain(error).after(charged));
            }
            if let Some(error) = worst(&undone) {
                return Err(error.in_part());
            }
            attempts.pause().await;
        }
    }
}

impl<C: Connection> CasRequest<'_, C> {
    /// Takes the charge of the check at this position back. If the state is unchanged since, the old state is restored; otherwise the
    /// algorithm subtracts the charge. If it cannot, or if another caller learned meanwhile that the id has
    /// the reservation, the charge stays and the limit admits less. Returns whether the charge was
    /// taken back.
    async fn take_back<A: Algorithm<State: Codec>>(
        &self,
        check: &Check<'_, A>,
        position: usize,
        reads: &Reads<A::State>,
        now: Timestamp,
    ) -> Result<bool> {
        let slot = &reads.slots[position];
        let before = reads.states[position].as_ref();
        let Write::Put { state: left, .. } = &slot.change else { return Ok(true) };
        // Together with the reservation: a caller that stops before this still has the charge under its
        // id.
        let own = reads.slots.get(reads.states.len() + position).map(CasValue::undone);
        let both = |slot| [slot].into_iter().chain(own.clone()).collect::<Vec<_>>();
        if self.write(&both(slot.undone()), now).await? {
            return Ok(true);
        }
        let Some(left) = A::State::decode(left) else { return Ok(false) };
        let algorithm = check.limit.algorithm();
        let at = algorithm.charged_at(before, now);
        let known = reads.reservations.get(position).and_then(Option::as_ref);
        let cost = check.cost.saturating_sub(known.map_or(0, |reservation| reservation.cost));
        let reservation = Reservation::new(at, cost);
        let mut attempts = self.attempts(&[]);
        loop {
            let of_reservation = async {
                match &own {
                    None => Ok(true),
                    Some(own) => Ok(self.get(check.limit, &own.key).await? == own.read),
                }
            };
            let of_state = self.found(check.limit, slot.key.clone(), true);
            let (is_ours, (mut slot, state), now) =
                try_join3(of_reservation, of_state, self.now(&slot.key)).await?;
            if !is_ours {
                return Ok(false);
            }
            attempts.next(std::slice::from_ref(&slot))?;
            let Some(step) = algorithm.undo(state.as_ref(), now, &reservation, &left) else {
                return Ok(false);
            };
            slot.change = step.write.map(|state| state.encode());
            let taken = slot.changes();
            if self.write(&both(slot), now).await? {
                return Ok(taken);
            }
        }
    }
}

impl<S> Reads<S> {
    /// The slots of a part: its states, then its reservations.
    fn of<A: Algorithm>(&self, part: &InSlot<'_, A>) -> Vec<CasValue> {
        let states = part.positions.iter().copied();
        let reservations = part.positions.iter().map(|position| self.states.len() + position);
        states.chain(reservations).filter_map(|place| self.slots.get(place).cloned()).collect()
    }
}

impl CasValue {
    /// The change that restores the value that was read, if the value that was written is still there.
    fn undone(&self) -> Self {
        let (written, until) = match &self.change {
            Write::Put { state, expires } => (Some(state.clone()), *expires),
            Write::Keep | Write::Remove => (None, Timestamp::ZERO),
        };
        let change = match (&self.read, &written) {
            (_, None) => Write::Keep,
            (Some(before), _) if !before.is_empty() => {
                Write::Put { state: before.clone(), expires: until }
            }
            _ => Write::Remove,
        };
        Self { key: self.key.clone(), read: written, change }
    }
}
