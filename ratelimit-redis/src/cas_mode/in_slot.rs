//! A part of a batch across slots: decided, then compared and set, and taken back if another part
//! changed meanwhile.

use futures_util::future::try_join3;
use ratelimit_core::algorithm::Write;
use ratelimit_core::store::{Batch, Check, Op, Reservation, decide};
use ratelimit_core::{Algorithm, Timestamp, Verdict};

use super::{CasRequest, CasValue, Reads};
use crate::codec::{Codec, RecordText};
use crate::concurrent::all;
use crate::connection::Connection;
use crate::deadline::Deadline;
use crate::error::Result;
use crate::records::Looked;
use crate::store::InSlot;

/// What a part read, and what follows from that.
pub struct CasInSlot<'s, A: Algorithm, C> {
    request: CasRequest<'s, C>,
    batch: &'s Batch<'s, A>,
    /// How its checks stand.
    looked: Looked<A>,
    verdict: Verdict,
    reads: Reads<A::State>,
    is_charged: bool,
}

impl<'s, A: RecordText<State: Codec>, C: Connection> CasInSlot<'s, A, C> {
    /// Reads and decides. If that `prepares` a charge, the reservations to write may be taken back.
    pub(super) async fn of(
        request: CasRequest<'s, C>,
        batch: &'s Batch<'s, A>,
        prepares: bool,
    ) -> Result<Self> {
        let writes = prepares && batch.operation() != Op::Peek;
        let (verdict, reads, looked) = request.decided(batch, writes, writes).await?;
        Ok(Self { request, batch, looked, verdict, reads, is_charged: false })
    }
}

impl<A: RecordText<State: Codec>, C: Connection> InSlot for CasInSlot<'_, A, C> {
    fn verdict(&self) -> &Verdict {
        &self.verdict
    }

    fn denied(&mut self) -> Result<Verdict> {
        let checks = self.looked.checks(self.batch);
        let ruled = self.looked.ruled(self.batch, &checks);
        Ok(decide(&ruled.denied_elsewhere(), self.reads.now, &mut self.reads)?)
    }

    fn has_changed_since(&self, before: &Self) -> bool {
        let mut both = self.reads.slots.iter().zip(&before.reads.slots);
        let has_changed = both
            .any(|(slot, before)| slot.written().is_some() && slot.written() != before.written());
        has_changed || self.looked.premises != before.looked.premises
    }

    async fn charge(&mut self) -> Result<bool> {
        let Self { looked, reads, .. } = self;
        self.is_charged = self.request.write(&reads.slots, &looked.premises, reads.now).await?;
        Ok(self.is_charged)
    }

    async fn take_back(&mut self, deadline: Deadline) -> Result<bool> {
        if !self.is_charged {
            return Ok(true);
        }
        let back = self.request.until(deadline);
        let checks = self.looked.checks(self.batch);
        let ruled = self.looked.ruled(self.batch, &checks);
        let checks = ruled.checks().iter().enumerate();
        let undone = checks.map(|(place, check)| back.take_back(check, place, &self.reads));
        let undone = all(undone).await.into_iter().collect::<Result<Vec<_>>>()?;
        Ok(!undone.contains(&false))
    }
}

impl<C: Connection> CasRequest<'_, C> {
    /// Takes the charge of the check at this position back. If the state is unchanged since, the
    /// old state is restored; otherwise the algorithm subtracts the charge. If it cannot, or if
    /// another caller learned meanwhile that the id has the reservation, the charge stays and the
    /// limit admits less. Returns whether the charge was taken back.
    async fn take_back<A: Algorithm<State: Codec>>(
        &self,
        check: &Check<'_, A>,
        position: usize,
        reads: &Reads<A::State>,
    ) -> Result<bool> {
        let now = reads.now;
        let slot = &reads.slots[position];
        let before = reads.states[position].as_ref();
        let own = reads.slots.get(reads.states.len() + position).map(CasValue::undone);
        let Write::Put { state: left, .. } = &slot.change else {
            // An exempt caller's has charged nothing, and is under the id all the same.
            let own: Vec<_> = own.into_iter().collect();
            return Ok(own.is_empty() || self.write(&own, &[], now).await?);
        };
        // Together with the reservation: a caller that stops before this still has the charge under
        // its id.
        let both = |slot| [slot].into_iter().chain(own.clone()).collect::<Vec<_>>();
        if self.write(&both(slot.undone()), &[], now).await? {
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
            if self.write(&both(slot), &[], now).await? {
                return Ok(taken);
            }
        }
    }
}

impl CasValue {
    /// The change that restores the value that was read, if the value that was written is still
    /// there.
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
