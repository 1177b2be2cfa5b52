//! The shard path: one check of a limit whose state lies in its shard, or belongs there. It locks the key's
//! buckets if the shard has no state of the key, the shard, and the reservation of a request with an id, in
//! this order. Frequent requests step the state in its place.
//!
//! A key's state lies in a bucket or in its shard, never in both. A state that is found in its shard therefore
//! lies in no bucket, and stays while the shard is locked: a thread that moves it locks both.

use ratelimit_core::{
    Batch, Check, Clock, Decision, InMemory, Now, Op, Reservation, States, Step, Timestamp,
    Verdict, Write, decide,
};

use super::sweep::{SWEEP_BUCKETS, SWEEP_SLOTS};
use super::{MemoryError, MemoryStore, adds_entries, adds_reservations};
use crate::capacity::Reserved;
use crate::cuckoo::{Address, LockedPair};
use crate::reservations::{ReservationGuard, sweep_at};
use crate::shard::{Shard, counted_entries, shard_of};
use crate::sync::{MutexGuard, lock};

/// The state and the reservation of one check, locked.
struct LockedCheck<'s, A: InMemory, C> {
    store: &'s MemoryStore<A, C>,
    batch: &'s Batch<'s, A>,
    hash: u64,
    /// The key's buckets, unless the first look found a state in the shard.
    buckets: Option<LockedPair<'s>>,
    shard: MutexGuard<'s, Shard<A::State>>,
    slot: Option<usize>,
    /// The reservation under the batch's id, if it has one.
    reservation: Option<ReservationGuard<'s>>,
    own: Timestamp,
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
    /// Decides one check on the state in its shard. Returns `None` if the state lies in a bucket or belongs
    /// there, if there is no room for all that the operation may need, or at the end of time.
    pub(super) fn decide_in_shard(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
        hash: u64,
    ) -> Option<Result<Verdict, MemoryError>> {
        let is_compact = check.limit.algorithm().is_compact();
        if is_compact && batch.reservation_id().is_some() {
            return None;
        }
        let place = &self.shards[shard_of(hash, self.shards.len())];
        let mut shard = lock(place);
        let mut slot = shard.find(hash);
        let mut buckets = None;
        if is_compact {
            if self.belongs_in_the_table(batch, shard.state(slot?)) {
                return None;
            }
        } else if let (None, Some(table)) = (slot, &self.table) {
            drop(shard);
            let mut pair = table.lock(Address::new(hash));
            if pair.state().is_some() {
                return None;
            }
            buckets = Some(pair);
            shard = lock(place);
            slot = shard.find(hash);
        }
        if let Some(slot) = slot
            && batch.is_plain()
        {
            let decision = self.decide_in_place(batch, check, &mut shard, slot)?;
            return Some(Ok(Verdict::one(decision)));
        }
        let id = batch.reservation_id();
        let reservation =
            id.map(|id| ReservationGuard::lock(&self.reservations, self.id_hasher, id, hash));
        // Read with all locks held: a thread that locks them later must not decide by an earlier time.
        let own = self.clock.now();
        if own == Timestamp::MAX {
            return None;
        }
        let mut locked = LockedCheck {
            store: self,
            batch,
            hash,
            buckets,
            shard,
            slot,
            reservation,
            own,
            reserved: self.capacity.reserve(),
            next: None,
            next_reservation: None,
            replaced: None,
        };
        let is_new = slot.is_none();
        if is_new {
            // Before a place is reserved, because it may free one.
            self.capacity.sweep(&mut locked.shard, own, SWEEP_SLOTS);
        }
        if !locked.reserve(check) {
            return None;
        }
        let now = Self::time_of(batch, own);
        let verdict = match locked.decide_frequent(check, now) {
            Some(decision) => Verdict::one(decision),
            None => match decide(batch, now, &mut locked) {
                Ok(verdict) => verdict,
                Err(refusal) => return Some(Err(refusal.into())),
            },
        };
        locked.commit();
        locked.sweep(verdict.allowed());
        drop(locked);
        if is_new {
            if id.is_none() {
                self.sweep_reservations_in_passing(own);
            }
            if let Some(table) = &self.table {
                self.capacity.release(table.sweep(SWEEP_BUCKETS, own));
            }
        }
        Some(Ok(verdict))
    }

    /// Decides a request without an id and metadata on the state in a slot, and steps it in place. Returns
    /// `None` if there may be no room for the entries that the step adds, or at the end of time.
    #[inline]
    fn decide_in_place(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
        shard: &mut Shard<A::State>,
        slot: usize,
    ) -> Option<Decision> {
        let algorithm = check.limit.algorithm();
        let state = shard.state(slot)?;
        // Reading the time waits for all earlier reads.
        let own = self.clock.now();
        if own == Timestamp::MAX {
            return None;
        }
        let now = Self::time_of(batch, own);
        if batch.operation() == Op::Peek {
            return Some(algorithm.decision(Some(state), now, check.cost));
        }
        let mut reserved = self.capacity.reserve();
        if !reserved.add_entries(algorithm.entries_per_step()) {
            return None;
        }
        let step = |state: &mut A::State| Some(algorithm.step_in_place(state, now, check.cost));
        let Step { decision, write } =
            in_place::<A>(shard, slot, (batch.time(), own), &mut reserved, step)?;
        if matches!(write, Write::Remove)
            && let Some((state, entries)) = shard.clear(slot)
        {
            reserved.keep_entries(entries, 0);
            self.capacity.release_from_shard(1);
            drop(state);
        }
        if decision.allowed {
            self.capacity.sweep(shard, own, 1);
        }
        Some(decision)
    }

    /// Whether a state of a compact limit fits into a bucket again: then it is to be moved there.
    fn belongs_in_the_table(&self, batch: &Batch<'_, A>, state: Option<&A::State>) -> bool {
        let Some(table) = &self.table else { return false };
        let fits =
            |state| A::to_compact(state).is_some_and(|compact| table.pack(compact).is_some());
        batch.time() == Now::Store && state.is_some_and(fits)
    }
}

/// Steps the state in a slot in place, and accounts for what has changed. The caller frees the slot if the step
/// removes the state.
#[inline]
fn in_place<A: InMemory>(
    shard: &mut Shard<A::State>,
    slot: usize,
    (time, own): (Now, Timestamp),
    reserved: &mut Reserved<'_>,
    step: impl FnOnce(&mut A::State) -> Option<Step<()>>,
) -> Option<Step<()>> {
    let (state, mut header) = shard.state_mut(slot)?;
    // Also called before the step, so that a panic in it comes before anything is written.
    let _ = A::entries_in(state);
    let step = step(state)?;
    let (before, after) = (header.entries(), counted_entries::<A>(state));
    reserved.keep_entries(before, after);
    header.set_entries(after);
    if let Write::Put { expires, .. } = step.write {
        header.set_sweep_at(sweep_at(time, own, expires));
    }
    Some(step)
}

impl<A: InMemory, C: Clock> LockedCheck<'_, A, C> {
    /// Reserves all the room that the operation may need. Returns `false` if there is not enough.
    #[inline]
    fn reserve(&mut self, check: &Check<'_, A>) -> bool {
        let op = self.batch.operation();
        let entries = if adds_entries(op) { check.limit.algorithm().entries_per_step() } else { 0 };
        let adds_reservation = adds_reservations(op)
            && self.reservation.as_ref().is_some_and(ReservationGuard::is_new);
        self.reserved.add_entries(entries)
            && (self.slot.is_some() || self.reserved.add_key())
            && (!adds_reservation || self.reserved.add_reservation())
    }

    /// Decides the most frequent requests as [`decide`] does, but without its allocations and in place if there
    /// is a state. Returns `None` for all others.
    fn decide_frequent(&mut self, check: &Check<'_, A>, now: Timestamp) -> Option<Decision> {
        let (batch, algorithm) = (self.batch, check.limit.algorithm());
        if batch.is_plain() && batch.operation() == Op::Acquire && self.slot.is_none() {
            return Some(self.write_step(algorithm.step(None, now, check.cost)));
        }
        if batch.is_part() || !batch.metadata_given().is_empty() || algorithm.charges_denials() {
            return None;
        }
        let life_us = algorithm.reservation_us()?;
        let known = self.reservation.as_ref()?.get().filter(|known| known.is_live(now, life_us));
        if known.as_ref().is_some_and(|known| known.group.is_some()) {
            return None;
        }
        let (decision, reservation) = match (batch.operation(), known) {
            (Op::Acquire, None) if check.cost > 0 => {
                let at = algorithm.charged_at(self.get(0), now);
                let step = |state: &mut A::State| algorithm.step_in_place(state, now, check.cost);
                let decision = match self.step_in_place(|state| Some(step(state))) {
                    Some(decision) => decision,
                    None => self.write_step(algorithm.step(None, now, check.cost)),
                };
                (decision, Reservation::new(at, check.cost))
            }
            (Op::Settle, Some(known)) if known.settled.is_none() => {
                let settle = |state: &mut A::State| {
                    algorithm.settle_in_place(state, now, &known, check.cost)
                };
                let decision = match self.step_in_place(settle) {
                    Some(decision) => decision,
                    None if self.slot.is_some() => return None,
                    None => self.write_step(algorithm.settle(None, now, &known, check.cost)?),
                };
                let once = batch.is_settled_once();
                (decision, known.settled_at(check.cost, now, life_us, once))
            }
            _ => return None,
        };
        if decision.allowed {
            let expires = reservation.ends(life_us);
            self.put_reservation(0, reservation, expires);
        }
        Some(decision)
    }

    /// Steps the state in place. Returns `None` if there is none, or no such step.
    fn step_in_place(
        &mut self,
        step: impl FnOnce(&mut A::State) -> Option<Step<()>>,
    ) -> Option<Decision> {
        let times = (self.batch.time(), self.own);
        let Step { decision, write } =
            in_place::<A>(&mut self.shard, self.slot?, times, &mut self.reserved, step)?;
        if matches!(write, Write::Remove) {
            self.next = Some(Next::Removed);
        }
        Some(decision)
    }

    /// Notes the write of a step of a key that has no state.
    fn write_step(&mut self, Step { decision, write }: Step<A::State>) -> Decision {
        self.put(0, write);
        decision
    }

    /// Writes the next state and the next reservation. No foreign code runs here.
    #[inline]
    fn commit(&mut self) {
        if let Some(next) = self.next.take() {
            self.write(next);
        }
        if let Some((reservation, sweep_at)) = self.next_reservation.take()
            && let Some(guard) = &mut self.reservation
        {
            guard.put(reservation, sweep_at, &mut self.reserved);
        }
    }

    fn write(&mut self, next: Next<A::State>) {
        let capacity = &self.store.capacity;
        match (next, self.slot) {
            (Next::Removed, None) => {}
            (Next::Removed, Some(slot)) => {
                let removed = self.shard.clear(slot);
                self.reserved.keep_entries(removed.as_ref().map_or(0, |removed| removed.1), 0);
                self.replaced = removed.map(|removed| removed.0);
                self.slot = None;
                capacity.release_from_shard(1);
            }
            (Next::Put { state, entries, sweep_at }, Some(slot)) => {
                let replaced = self.shard.replace(slot, state, entries, sweep_at);
                let before = replaced.as_ref().map_or(0, |replaced| replaced.1);
                self.reserved.keep_entries(before, entries);
                self.replaced = replaced.map(|replaced| replaced.0);
            }
            (Next::Put { state, entries, sweep_at }, None) => {
                if let Some(pair) = &mut self.buckets {
                    pair.spill();
                }
                self.reserved.take_key();
                self.reserved.keep_entries(0, entries);
                capacity.enter_shard();
                self.slot = Some(self.shard.insert(self.hash, state, entries, sweep_at));
            }
        }
    }

    /// Sweeps a slot after a charge, and a few reservations where the operation may have added one.
    #[inline]
    fn sweep(&mut self, allowed: bool) {
        let (capacity, op) = (&self.store.capacity, self.batch.operation());
        if allowed && op != Op::Peek {
            capacity.sweep(&mut self.shard, self.own, 1);
        }
        if let Some(reservation) = &mut self.reservation
            && adds_reservations(op)
        {
            reservation.sweep(capacity, self.own);
        }
    }
}

impl<A: InMemory, C: Clock> States<A::State> for LockedCheck<'_, A, C> {
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
        let next = self.next_reservation.as_ref().map(|next| next.0.clone());
        next.or_else(|| self.reservation.as_ref()?.get())
    }

    /// A single check belongs to no group.
    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_reservation(&mut self, _: usize, reservation: Reservation, expires: Timestamp) {
        self.next_reservation = Some((reservation, sweep_at(self.batch.time(), self.own, expires)));
    }
}
