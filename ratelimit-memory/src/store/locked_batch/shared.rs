//! Checks of one batch that share a state, because the store has no room for states of their own.
//!
//! The checks of one limit are decided as one check of the sum of their costs: admitted together or not at all,
//! with a wait after which the sum fits. Where that is impossible, each check is decided on the state that
//! those before it would leave: a reservation is settled or renewed by itself, and two limits can have one
//! name.

use ratelimit_core::{
    Batch, Check, Clock, Decision, InMemory, Op, Refusal, Reservation, States, Timestamp, Verdict,
    Write, decide as decide_batch,
};
use smallvec::SmallVec;

use super::{LockedBatch, Place};

/// One check, or several that are decided as one.
struct Part<'b, A: InMemory> {
    /// Their positions in the batch.
    positions: SmallVec<[usize; 2]>,
    found: Found<A::State>,
    is_written: bool,
    /// The first check, with the sum of all costs.
    check: Check<'b, A>,
}

/// The state that a part is decided on.
enum Found<S> {
    Stored,
    /// The state that the earlier parts that share it would leave.
    Left(Option<S>),
}

/// The parts of a batch in which some checks share a state.
pub(super) struct Shared<'b, A: InMemory> {
    parts: Vec<Part<'b, A>>,
}

/// Decides a batch as [`decide_batch`] does, where `shared` tells which checks share a state.
pub(super) fn decide<A: InMemory>(
    shared: Option<Shared<'_, A>>,
    batch: &Batch<'_, A>,
    now: Timestamp,
    states: &mut impl States<A::State>,
) -> Result<Verdict, Refusal> {
    let Some(Shared { parts }) = shared else { return decide_batch(batch, now, states) };
    batch.validate()?;
    let checks: Vec<_> = parts.iter().map(|part| part.check).collect();
    let merged = batch.with_checks(&checks);
    let group = batch.reservation_group(|| states.fingerprint());
    let merged = group.as_ref().map_or(merged, |group| merged.in_group(group));
    let mut view = View { batch, parts, states };
    let verdict = decide_batch(&merged, now, &mut view)?;
    let mut decisions: Vec<Option<Decision>> = vec![None; batch.checks().len()];
    for (part, decision) in view.parts.iter().zip(verdict.decisions()) {
        for position in &part.positions {
            let cost = batch.checks()[*position].cost;
            decisions[*position] = Some(Decision { cost, ..*decision });
        }
    }
    Ok(Verdict::several(decisions.into_iter().flatten().collect()))
}

/// The states of a batch, by its parts.
struct View<'v, 'b, A: InMemory, T> {
    batch: &'v Batch<'b, A>,
    parts: Vec<Part<'b, A>>,
    states: &'v mut T,
}

impl<A: InMemory, T> View<'_, '_, A, T> {
    /// The position of a part's first check.
    fn first(&self, part: usize) -> usize {
        self.parts[part].positions[0]
    }
}

impl<A: InMemory, T: States<A::State>> States<A::State> for View<'_, '_, A, T> {
    fn get(&self, part: usize) -> Option<&A::State> {
        match &self.parts[part] {
            Part { found: Found::Left(left), is_written: false, .. } => left.as_ref(),
            _ => self.states.get(self.first(part)),
        }
    }

    fn put(&mut self, part: usize, write: Write<A::State>) {
        self.parts[part].is_written |= !matches!(write, Write::Keep);
        self.states.put(self.first(part), write);
    }

    fn reservation(&self, part: usize) -> Option<Reservation> {
        self.states.reservation(self.first(part))
    }

    fn fingerprint(&self) -> u64 {
        self.states.fingerprint()
    }

    fn put_reservation(&mut self, part: usize, reservation: Reservation, expires: Timestamp) {
        let positions = &self.parts[part].positions;
        for position in positions {
            let cost = self.batch.checks()[*position].cost;
            let mut reservation = reservation.clone();
            if positions.len() > 1 {
                // Each check's reservation has the check's own cost.
                reservation =
                    Reservation { cost, settled: reservation.settled.map(|_| cost), ..reservation };
            }
            self.states.put_reservation(*position, reservation, expires);
        }
    }
}

/// The state and reservation that one check leaves.
struct SingleCheck<S> {
    state: Option<S>,
    reservation: Option<Reservation>,
    op: Op,
    fingerprint: u64,
}

impl<S> States<S> for SingleCheck<S> {
    fn get(&self, _: usize) -> Option<&S> {
        self.state.as_ref()
    }

    fn put(&mut self, _: usize, write: Write<S>) {
        match write {
            Write::Put { state, .. } => self.state = Some(state),
            // As `LockedBatch::put` does.
            Write::Remove if self.op == Op::Settle => self.state = None,
            Write::Keep | Write::Remove => {}
        }
    }

    fn reservation(&self, _: usize) -> Option<Reservation> {
        self.reservation.clone()
    }

    fn fingerprint(&self) -> u64 {
        self.fingerprint
    }

    fn put_reservation(&mut self, _: usize, reservation: Reservation, _: Timestamp) {
        self.reservation = Some(reservation);
    }
}

impl<A: InMemory, C: Clock> LockedBatch<'_, '_, A, C> {
    /// The parts of the batch, if some of its checks share a state.
    pub(super) fn shared<'b>(&self, batch: &Batch<'b, A>, now: Timestamp) -> Option<Shared<'b, A>> {
        self.overflow.as_ref()?;
        let sharing = self.placed.iter().filter(|placed| placed.place == Place::Overflow);
        let mut hashes: Vec<u64> = sharing.map(|placed| placed.hash).collect();
        let checks = hashes.len();
        hashes.sort_unstable();
        hashes.dedup();
        if hashes.len() == checks {
            return None;
        }
        let mut parts = self.parts(batch, now);
        for hash in hashes {
            self.chain(hash, batch, now, &mut parts);
        }
        Some(Shared { parts })
    }

    /// The checks of the batch, with those merged that can be decided as one.
    fn parts<'b>(&self, batch: &Batch<'b, A>, now: Timestamp) -> Vec<Part<'b, A>> {
        let mut parts: Vec<Part<'b, A>> = Vec::new();
        let mut merged: SmallVec<[usize; 2]> = SmallVec::new();
        for (position, check) in batch.checks().iter().enumerate() {
            let can_merge = self.can_merge(position, batch, check, now);
            let same = |part: &&usize| std::ptr::eq(parts[**part].check.limit, check.limit);
            if can_merge && let Some(part) = merged.iter().find(same).copied() {
                let part = &mut parts[part];
                part.positions.push(position);
                part.check.cost = part.check.cost.saturating_add(check.cost);
                continue;
            }
            if can_merge {
                merged.push(parts.len());
            }
            let positions = SmallVec::from_elem(position, 1);
            parts.push(Part { positions, found: Found::Stored, is_written: false, check: *check });
        }
        parts
    }

    /// Whether a check uses a shared state and does nothing but charge it, or give back to it, a cost.
    fn can_merge(
        &self,
        position: usize,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
        now: Timestamp,
    ) -> bool {
        let life_us = check.limit.algorithm().reservation_us().unwrap_or(Reservation::LIFE_US);
        // A check that was made before is decided by its reservation.
        let is_reserved = || {
            self.reservation(position).is_some_and(|reservation| reservation.is_live(now, life_us))
        };
        let is_settled = matches!(batch.operation(), Op::Settle | Op::Renew);
        self.placed[position].place == Place::Overflow && !is_settled && !is_reserved()
    }

    /// Decides each of the parts that share a state on what those before it would leave.
    fn chain<'b>(
        &self,
        hash: u64,
        batch: &Batch<'b, A>,
        now: Timestamp,
        parts: &mut [Part<'b, A>],
    ) {
        let placed = |part: &Part<'b, A>| &self.placed[part.positions[0]];
        let shares = |part: &&mut Part<'b, A>| {
            placed(part).place == Place::Overflow && placed(part).hash == hash
        };
        let mut sharing = parts.iter_mut().filter(shares).peekable();
        while let Some(part) = sharing.next() {
            let Some(next) = sharing.peek_mut() else { return };
            let position = part.positions[0];
            let state = match &part.found {
                Found::Stored => self.get(position).cloned(),
                Found::Left(left) => left.clone(),
            };
            let (reservation, fingerprint) = (self.reservation(position), self.fingerprint());
            let mut single = SingleCheck { state, reservation, op: self.op, fingerprint };
            // A peek reports what an acquire would.
            let op = if batch.operation() == Op::Peek { Op::Acquire } else { batch.operation() };
            let group = batch.reservation_group(|| fingerprint);
            let one_check =
                batch.with_checks(std::slice::from_ref(&part.check)).op(op).metadata(&[]);
            let one_check = group.as_ref().map_or(one_check, |group| one_check.in_group(group));
            // An error recurs, and is returned, when the whole batch is decided.
            drop(decide_batch(&one_check, now, &mut single));
            next.found = Found::Left(single.state);
        }
    }
}
