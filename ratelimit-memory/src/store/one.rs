//! One check at the store's own time, decided on the lines alone: nothing is allocated, and a decision
//! that writes nothing locks nothing.

#![allow(
    clippy::inline_always,
    reason = "whatever is not inlined here copies the answer once more: measured, each some nanoseconds"
)]

use ratelimit_core::{
    Algorithm, Batch, Check, Clock, Decision, Now, Op, Small, Step, Tick, Write,
};

use super::MemoryStore;
use crate::lines::{Address, Entry, Line, Lines, Packed, Route, Seen};
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
    /// Decides one check on a state that a line holds, unless somebody is writing there or there is more to
    /// it: then, and if it is no such check, `None`, and nothing has been done.
    ///
    /// This is all that nearly all decisions run, without a call and in one piece: so what the step says goes
    /// straight into the answer, and is not handed from one to another in memory.
    #[inline(always)]
    pub(super) fn decide_at_once(&self, batch: &Batch<'_, A>) -> Option<Decision> {
        let [check] = batch.checks() else { return None };
        let lines = self.lines_for(batch, check)?;
        let route = lines.route(self.address_of(check));
        // What reads the time waits until what was read before it has come.
        route.touch();
        let now = self.clock.now();
        let (line, seen) = route.find()?;
        let state = lines.unpack(seen.entry.state());
        let Step { decision, write } =
            check.limit.algorithm().step_small(Some(state), now, check.cost)?;
        let entry = match write {
            Write::Put { state, .. } if batch.operation() == Op::Acquire => {
                Entry::new(route.tag(), lines.pack(state)?)
            }
            Write::Remove if batch.operation() == Op::Acquire => return None,
            _ => {
                let is_still = line.is_still(&seen) && lines.is_still(route);
                return is_still.then_some(decision);
            }
        };
        let mut held = line.try_lock_seen(&seen)?;
        if held.get(seen.slot) != seen.entry || !lines.is_still(route) {
            return None;
        }
        held.set(seen.slot, entry);
        Some(decision)
    }

    /// The lines, if the check can be decided there and nowhere else has to be looked at before.
    #[inline(always)]
    fn lines_for(&self, batch: &Batch<'_, A>, check: &Check<'_, A>) -> Option<&Lines> {
        let lines = self.lines.as_ref()?;
        let is_simple = matches!(batch.operation(), Op::Acquire | Op::Peek)
            && batch.time() == Now::Store
            && batch.hold_id().is_none()
            && batch.metadata_given().is_empty()
            && check.limit.algorithm().is_small();
        is_simple.then_some(lines)
    }

    #[inline(always)]
    fn address_of(&self, check: &Check<'_, A>) -> Address {
        Address::new(self.key_of(check).hash)
    }

    /// Decides one check, if the lines suffice.
    pub(super) fn decide_in_lines(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
    ) -> Option<Decision> {
        let lines = self.lines_for(batch, check)?;
        let address = self.address_of(check);
        let charges = batch.operation() == Op::Acquire;
        let mut waited = 0;
        loop {
            let route = lines.route(address);
            route.touch();
            let now = self.clock.now();
            let attempted = Attempted { store: self, check, charges, lines, address, now };
            let attempt = match route.find() {
                Some((line, seen)) => attempted.found(route, line, &seen),
                None => attempted.missing(),
            };
            match attempt {
                Attempt::Decided(decision) => return Some(decision),
                Attempt::Again => wait(&mut waited),
                Attempt::Elsewhere => return None,
            }
        }
    }
}

impl<A: Algorithm, C: Clock> Attempted<'_, A, C> {
    /// What [`ratelimit_core::decide`] says of a single check without an id: its step.
    fn step(&self, state: Option<Packed>) -> Option<Step<Small>> {
        let state = state.map(|state| self.lines.unpack(state));
        self.check.limit.algorithm().step_small(state, self.now, self.check.cost)
    }

    /// The entry that a state is written as.
    fn entry(&self, route: Route<'_>, state: Small) -> Option<Entry> {
        Some(Entry::new(route.tag(), self.lines.pack(state)?))
    }

    /// The decision on the state that was found, with its line held if it writes.
    fn found(&self, route: Route<'_>, line: &Line, seen: &Seen) -> Attempt {
        let Some(Step { decision, write }) = self.step(Some(seen.entry.state())) else {
            return Attempt::Elsewhere;
        };
        if matches!(write, Write::Keep) || !self.charges {
            let is_still = line.is_still(seen) && self.lines.is_still(route);
            return if is_still { Attempt::Decided(decision) } else { Attempt::Again };
        }
        // Whoever was quicker has written another state: what counts is what is there now.
        let mut held = line.lock();
        let entry = held.get(seen.slot);
        if !entry.is(route.tag()) || !self.lines.is_still(route) {
            return Attempt::Again;
        }
        let Some(Step { decision, write }) = self.step(Some(entry.state())) else {
            return Attempt::Elsewhere;
        };
        match write {
            Write::Put { state, .. } => match self.entry(route, state) {
                Some(entry) => held.set(seen.slot, entry),
                None => return Attempt::Elsewhere,
            },
            Write::Remove => {
                held.clear(seen.slot);
                self.store.release(1);
            }
            Write::Keep => {}
        }
        Attempt::Decided(decision)
    }

    /// The decision on a key that seems to have no state, with both of its lines held: only so it can be
    /// told from one that is just being moved.
    fn missing(&self) -> Attempt {
        self.store.sweep_in_passing(self.lines, self.now);
        let mut pair = self.lines.lock(self.address);
        if pair.state().is_some() {
            return Attempt::Again;
        }
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
