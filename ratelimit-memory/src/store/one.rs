//! One check at the store's own time, decided on the lines alone: nothing is allocated, and a decision
//! that writes nothing locks nothing.

#![allow(
    clippy::inline_always,
    reason = "whatever is not inlined here copies the answer once more: measured, each some nanoseconds"
)]

use ratelimit_core::{
    Algorithm, Batch, Check, Clock, Decision, Now, Op, Small, Step, Tick, Verdict, Write,
};

use super::MemoryStore;
use crate::lines::{Address, Entry, Line, Lines, Locked, Packed, Route, Seen};
use crate::sync::{Ordering, wait};

/// How an attempt at a decision ends.
enum Attempt {
    Decided(Decision),
    /// Somebody else was writing: once more.
    Again,
    /// It takes more than the lines.
    Elsewhere,
}

/// What an attempt goes by.
struct Attempted<'a, A: Algorithm, C> {
    store: &'a MemoryStore<A, C>,
    check: &'a Check<'a, A>,
    /// Whether what the step writes is written: not for a peek.
    charges: bool,
    lines: &'a Lines,
    address: Address,
    now: Tick,
}

impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// Decides one check, if the lines suffice.
    #[inline(always)]
    pub(super) fn decide_in_lines(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
    ) -> Option<Verdict> {
        let lines = self.lines.as_ref()?;
        let is_simple = matches!(batch.operation(), Op::Acquire | Op::Peek)
            && batch.time() == Now::Store
            && batch.hold_id().is_none()
            && batch.metadata_given().is_empty();
        if !is_simple || !check.limit.algorithm().is_small() {
            return None;
        }
        let address = Address::new(self.key_of(check).hash);
        let charges = batch.operation() == Op::Acquire;
        let mut waited = 0;
        loop {
            let route = lines.route(address);
            // What reads the time waits until what was read before it has come.
            route.touch();
            let now = self.clock.now();
            let attempted = Attempted { store: self, check, charges, lines, address, now };
            let attempt = match route.find() {
                Some((line, seen)) => {
                    let (decision, attempt) = attempted.found(route, line, &seen)?;
                    // The one way that nearly all decisions take: straight into the answer.
                    let Some(attempt) = attempt else { return Some(Verdict::one(decision)) };
                    attempt
                }
                None => attempted.missing(),
            };
            match attempt {
                Attempt::Decided(decision) => return Some(Verdict::one(decision)),
                Attempt::Again => wait(&mut waited),
                Attempt::Elsewhere => return None,
            }
        }
    }
}

impl<A: Algorithm, C: Clock> Attempted<'_, A, C> {
    /// What [`ratelimit_core::decide`] says of a single check without an id: its step.
    #[inline(always)]
    fn step(&self, state: Option<Packed>) -> Option<Step<Small>> {
        let state = state.map(|state| self.lines.unpack(state));
        self.check.limit.algorithm().step_small(state, self.now, self.check.cost)
    }

    /// The entry that a state is written as.
    #[inline(always)]
    fn entry(&self, route: Route<'_>, state: Small) -> Option<Entry> {
        Some(Entry::new(route.tag(), self.lines.pack(state)?))
    }

    /// The decision on the state that was found without a lock. If it writes nothing, and the state is
    /// still there, that is all; otherwise the line is locked. With the decision comes what is to be done
    /// instead, if it is not to be taken. `None` if it takes more than the lines.
    #[inline(always)]
    fn found(
        &self,
        route: Route<'_>,
        line: &Line,
        seen: &Seen,
    ) -> Option<(Decision, Option<Attempt>)> {
        let Seen { slot, entry, .. } = *seen;
        let Step { decision, write } = self.step(Some(entry.state()))?;
        let write = match write {
            Write::Put { state, .. } if self.charges => match self.entry(route, state) {
                Some(entry) => Some(entry),
                None => return None,
            },
            Write::Remove if self.charges => None,
            _ => {
                let is_still = line.is_still(seen) && self.lines.is_still(route);
                return Some((decision, if is_still { None } else { Some(Attempt::Again) }));
            }
        };
        let mut held = line.lock_seen(seen);
        if held.get(slot) != entry || !self.lines.is_still(route) {
            return Some((decision, Some(self.overtaken(route, held, slot))));
        }
        self.write(&mut held, slot, write);
        Some((decision, None))
    }

    /// The same once another request was quicker: now that the line is held, it is this one's turn.
    #[cold]
    #[inline(never)]
    fn overtaken(&self, route: Route<'_>, mut held: Locked<'_>, slot: usize) -> Attempt {
        let entry = held.get(slot);
        if !entry.is(route.tag()) || !self.lines.is_still(route) {
            return Attempt::Again;
        }
        let Some(Step { decision, write }) = self.step(Some(entry.state())) else {
            return Attempt::Elsewhere;
        };
        match write {
            Write::Put { state, .. } => match self.entry(route, state) {
                Some(entry) => self.write(&mut held, slot, Some(entry)),
                None => return Attempt::Elsewhere,
            },
            Write::Remove => self.write(&mut held, slot, None),
            Write::Keep => {}
        }
        Attempt::Decided(decision)
    }

    #[inline(always)]
    fn write(&self, held: &mut Locked<'_>, slot: usize, entry: Option<Entry>) {
        if let Some(entry) = entry {
            held.set(slot, entry);
        } else {
            held.clear(slot);
            self.store.release(1);
        }
    }

    /// The decision on a key that seems to have no state, with both of its lines held: only so it can be
    /// told from one that is just being moved.
    #[cold]
    #[inline(never)]
    fn missing(mut self) -> Attempt {
        self.store.sweep_in_passing(self.lines, self.now);
        let mut pair = self.lines.lock(self.address);
        if pair.state().is_some() {
            return Attempt::Again;
        }
        // Somebody whose time is later may have found the state expired and freed it: by an earlier one it
        // would have counted.
        self.now = self.store.clock.now();
        if pair.lines[0].has_spilled() && self.store.in_shards.load(Ordering::Relaxed) > 0 {
            return Attempt::Elsewhere;
        }
        let Some(Step { decision, write }) = self.step(None) else { return Attempt::Elsewhere };
        let state = match write {
            Write::Put { state, .. } if self.charges => state,
            _ => return Attempt::Decided(decision),
        };
        let Some(entry) = self.entry(pair.route, state) else { return Attempt::Elsewhere };
        let now_us = self.lines.since_epoch_us(self.now);
        for line in &mut pair.lines {
            if let Some(slot) = line.expired_slot(now_us) {
                line.set(slot, entry);
                return Attempt::Decided(decision);
            }
            if let Some(slot) = line.free_slot() {
                if !self.store.reserve() {
                    return Attempt::Elsewhere;
                }
                line.set(slot, entry);
                return Attempt::Decided(decision);
            }
        }
        drop(pair);
        let way = self.lines.make_way(self.address, self.now);
        self.store.release(way.freed);
        if way.made { Attempt::Again } else { Attempt::Elsewhere }
    }
}
