//! The reservation path: one check with an id, of a limit whose states lie in shards. A lease is granted,
//! renewed or released, or a charge is made once. It does for one key what `locked_batch.rs` does: it locks the
//! key's buckets if it needs them, its shard, and its reservation, in this order.

use ratelimit_core::{
    Batch, Check, Clock, Decision, InMemory, Op, Reservation, States, Timestamp, Verdict, Write,
    decide,
};

use super::sweep::SWEEP_SLOTS;
use super::{MemoryError, MemoryStore};
use crate::capacity::Reserved;
use crate::cuckoo::{Address, Pair};
use crate::reservations::{ReservationGuard, sweep_at};
use crate::shard::{Shard, counted_entries, shard_of};
use crate::sync::{MutexGuard, lock};

/// The state and the reservation of one check, locked.
struct One<'s, A: InMemory, C> {
    store: &'s MemoryStore<A, C>,
    batch: &'s Batch<'s, A>,
    hash: u64,
    /// The key's buckets, if the first look found no state in its shard.
    table: Option<Pair<'s>>,
    shard: MutexGuard<'s, Shard<A::State>>,
    slot: Option<usize>,
    held: ReservationGuard<'s>,
    own: Timestamp,
    /// Whether the operation can add a reservation.
    may_add: bool,
    reserved: Reserved<'s>,
    /// The next state, unless the state was stepped in place, and the next reservation: written once no foreign
    /// code is left to run.
    next: Option<Next<A::State>>,
    next_reservation: Option<(Reservation, Timestamp)>,
    /// The state that was replaced. It is dropped last: dropping it is foreign code, too.
    replaced: Option<A::State>,
}

/// A write that is to follow.
enum Next<S> {
    Put { state: S, entries: usize, sweep_at: Timestamp },
    Removed,
}

impl<A: InMemory, C: Clock> MemoryStore<A, C> {
    /// Decides one check with an id, if its state lies in a shard or belongs there, and if there is room for
    /// all that it may need.
    pub(super) fn decide_held(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
    ) -> Option<Result<Verdict, MemoryError>> {
        let id = batch.reservation_id()?;
        if check.limit.algorithm().is_compact() {
            return None;
        }
        let hash = self.key_of(check).hash;
        let all = &self.shards;
        let mut shard = lock(&all[shard_of(hash, all.len())]);
        let mut slot = shard.find(hash);
        let mut pair = None;
        if let (None, Some(table)) = (slot, &self.table) {
            drop(shard);
            let mut locked = table.lock(Address::new(hash));
            if locked.state().is_some() {
                return None;
            }
            pair = Some(locked);
            shard = lock(&all[shard_of(hash, all.len())]);
            slot = shard.find(hash);
        }
        let held = ReservationGuard::lock(&self.reservations, self.id_hasher, id, hash);
        let own = self.clock.now();
        let may_add = !matches!(batch.operation(), Op::Settle | Op::Renew | Op::Peek);
        let mut one = One {
            store: self,
            batch,
            hash,
            table: pair,
            shard,
            slot,
            held,
            own,
            may_add,
            reserved: self.capacity.reserve(),
            next: None,
            next_reservation: None,
            replaced: None,
        };
        let now = Self::time_of(batch, own);
        let decided = one.reserve(check).then(|| match one.decide_usual(check, now) {
            Some(decision) => Ok(Verdict::one(decision)),
            None => Ok(decide(batch, now, &mut one)?),
        });
        if let Some(Ok(_)) = &decided {
            one.commit();
        }
        one.sweep();
        decided
    }
}

impl<A: InMemory, C: Clock> One<'_, A, C> {
    /// Reserves all the room that the operation may need. Returns `false` if there is not enough.
    fn reserve(&mut self, check: &Check<'_, A>) -> bool {
        let adds_entries = matches!(self.batch.operation(), Op::Acquire | Op::Force | Op::Renew);
        let entries = if adds_entries { check.limit.algorithm().entries_per_step() } else { 0 };
        self.reserved.add_entries(entries)
            && (self.slot.is_some() || self.reserved.add_key())
            && (!self.may_add || !self.held.is_new() || self.reserved.add_reservation())
    }

    /// Decides the two most frequent calls with an id, a charge under a new id and its settlement, as
    /// [`decide`] does but without its allocations. Returns `None` for all others.
    fn decide_usual(&mut self, check: &Check<'_, A>, now: Timestamp) -> Option<Decision> {
        let algorithm = check.limit.algorithm();
        let life_us = algorithm.reservation_us()?;
        let is_usual = self.batch.metadata_given().is_empty() && !self.batch.is_part();
        if algorithm.charges_denials() || !is_usual {
            return None;
        }
        let known = self.held.get().filter(|reservation| reservation.is_live(now, life_us));
        if known.as_ref().is_some_and(|reservation| reservation.group.is_some()) {
            return None;
        }
        let (decision, reservation) = match (self.batch.operation(), known) {
            (Op::Acquire, None) if check.cost > 0 => {
                let at = algorithm.charged_at(self.get(0), now);
                (self.step(check, now)?, Reservation::new(at, check.cost))
            }
            (Op::Settle, Some(reservation)) if reservation.settled.is_none() => {
                let decision = self.settle(check, now, &reservation)?;
                (decision, Reservation { settled: Some(check.cost), ..reservation })
            }
            _ => return None,
        };
        if decision.allowed {
            let expires = reservation.since.saturating_add_us(life_us);
            self.put_reservation(0, reservation, expires);
        }
        Some(decision)
    }

    /// Settles the reservation, in place if there is a state.
    fn settle(
        &mut self,
        check: &Check<'_, A>,
        now: Timestamp,
        reservation: &Reservation,
    ) -> Option<Decision> {
        let algorithm = check.limit.algorithm();
        let Some(slot) = self.slot else {
            let step = algorithm.settle(None, now, reservation, check.cost)?;
            self.put(0, step.write);
            return Some(step.decision);
        };
        let (state, _) = self.shard.state_mut(slot)?;
        let _ = A::entries_in(state);
        let step = algorithm.settle_in_place(state, now, reservation, check.cost)?;
        self.written_in_place(slot, &step.write);
        Some(step.decision)
    }

    /// Acquires the cost, in place if there is a state.
    fn step(&mut self, check: &Check<'_, A>, now: Timestamp) -> Option<Decision> {
        let algorithm = check.limit.algorithm();
        let Some(slot) = self.slot else {
            let step = algorithm.step(None, now, check.cost);
            self.put(0, step.write);
            return Some(step.decision);
        };
        let (state, _) = self.shard.state_mut(slot)?;
        // As in `shard_path.rs`: a panic here comes before anything is written.
        let _ = A::entries_in(state);
        let step = algorithm.step_in_place(state, now, check.cost);
        self.written_in_place(slot, &step.write);
        Some(step.decision)
    }

    /// Accounts for a state that a step has changed in place.
    fn written_in_place(&mut self, slot: usize, write: &Write<()>) {
        let Some((state, mut beside)) = self.shard.state_mut(slot) else { return };
        let (before, after) = (beside.entries(), counted_entries::<A>(state));
        beside.set_entries(after);
        self.reserved.keep_entries(before, after);
        match write {
            Write::Keep => {}
            Write::Put { expires, .. } => {
                beside.set_sweep_at(sweep_at(self.batch.time(), self.own, *expires));
            }
            Write::Remove => self.next = Some(Next::Removed),
        }
    }

    /// Writes the next state and the next reservation. No foreign code runs here.
    fn commit(&mut self) {
        let capacity = &self.store.capacity;
        match (self.next.take(), self.slot) {
            (None, _) | (Some(Next::Removed), None) => {}
            (Some(Next::Removed), Some(slot)) => {
                let removed = self.shard.clear(slot);
                self.reserved.keep_entries(removed.as_ref().map_or(0, |removed| removed.1), 0);
                self.replaced = removed.map(|removed| removed.0);
                self.slot = None;
                capacity.release_from_shard(1);
            }
            (Some(Next::Put { state, entries, sweep_at }), Some(slot)) => {
                let replaced = self.shard.replace(slot, state, entries, sweep_at);
                let before = replaced.as_ref().map_or(0, |replaced| replaced.1);
                self.reserved.keep_entries(before, entries);
                self.replaced = replaced.map(|replaced| replaced.0);
            }
            (Some(Next::Put { state, entries, sweep_at }), None) => {
                if let Some(pair) = &mut self.table {
                    pair.buckets[0].spill();
                }
                self.reserved.take_key();
                self.reserved.keep_entries(0, entries);
                capacity.enter_shard();
                self.slot = Some(self.shard.insert(self.hash, state, entries, sweep_at));
            }
        }
        if let Some((reservation, sweep_at)) = self.next_reservation.take() {
            self.held.put(reservation, sweep_at, &mut self.reserved);
        }
    }

    /// Sweeps a few slots where the operation may have added one.
    fn sweep(&mut self) {
        if self.may_add {
            self.store.capacity.sweep(&mut self.shard, self.own, SWEEP_SLOTS);
            self.held.sweep(&self.store.capacity, self.own);
        }
    }
}

impl<A: InMemory, C: Clock> States<A::State> for One<'_, A, C> {
    fn get(&self, _: usize) -> Option<&A::State> {
        match &self.next {
            None => self.shard.state(self.slot?),
            Some(Next::Put { state, .. }) => Some(state),
            Some(Next::Removed) => None,
        }
    }

    fn put(&mut self, _: usize, write: Write<A::State>) {
        self.next = match write {
            Write::Keep => return,
            Write::Put { state, expires } => Some(Next::Put {
                entries: counted_entries::<A>(&state),
                state,
                sweep_at: sweep_at(self.batch.time(), self.own, expires),
            }),
            Write::Remove => Some(Next::Removed),
        };
    }

    fn reservation(&self, _: usize) -> Option<Reservation> {
        self.next_reservation.as_ref().map(|next| next.0.clone()).or_else(|| self.held.get())
    }

    /// A single check belongs to no group.
    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_reservation(&mut self, _: usize, reservation: Reservation, expires: Timestamp) {
        self.next_reservation = Some((reservation, sweep_at(self.batch.time(), self.own, expires)));
    }
}
