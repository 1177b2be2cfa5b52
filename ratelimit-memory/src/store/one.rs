//! One check at the store's own time, decided on the lines alone: nothing is allocated, and a decision
//! that writes nothing locks nothing, unless somebody else is writing there.

#![allow(
    clippy::inline_always,
    reason = "whatever is not inlined here copies the answer once more: measured, each some nanoseconds"
)]

use ratelimit_core::{Algorithm, Batch, Check, Clock, Decision, Limit, Now, Op, Step, Tick, Write};

use super::MemoryStore;
use crate::lines::{Address, Begun, Entry, Lines, Route};
use crate::sync::{Ordering, wait};

/// Why a check was not decided at once. Nothing has been done.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Missed {
    /// Somebody else was writing.
    Busy,
    /// There is more to it.
    More,
}

/// How often to try again at once, waiting longer each time.
const TRIES: u32 = if cfg!(loom) { 1 } else { 8 };

/// How an attempt with the key's lines held ends.
enum Attempt {
    Decided(Decision),
    /// For a key that had no state.
    New(Decision),
    /// It takes more than the lines.
    Elsewhere,
    /// The key's lines are full.
    Crowded,
}

/// Whether a batch charges or looks at the store's own time, and there is no more to it.
#[inline(always)]
pub(super) fn is_plain<A: Algorithm>(batch: &Batch<'_, A>) -> bool {
    matches!(batch.operation(), Op::Acquire | Op::Peek)
        && batch.time() == Now::Store
        && batch.hold_id().is_none()
        && batch.metadata_given().is_empty()
}

/// The lines that a state may lie in.
#[derive(Clone, Copy)]
pub(super) struct Sought<'l> {
    lines: &'l Lines,
    route: Route<'l>,
}

impl<'l> Sought<'l> {
    #[inline(always)]
    pub(super) fn new(lines: &'l Lines, address: Address) -> Self {
        Self { lines, route: lines.route(address) }
    }

    /// Begins to look at them: from here on they are on their way.
    #[inline(always)]
    pub(super) fn begun(&self) -> Begun {
        self.route.begun()
    }

    /// Decides on the state that is found, unless somebody is writing there or there is more to it.
    #[inline(always)]
    pub(super) fn decide<A: Algorithm>(
        self,
        begun: Begun,
        algorithm: &A,
        now: Tick,
        cost: u64,
        charges: bool,
    ) -> Result<Decision, Missed> {
        let Self { lines, route } = self;
        let (line, seen) = route.find(begun).ok_or(Missed::More)?;
        let state = lines.unpack(seen.entry.state());
        let step = algorithm.step_quick(state, now, cost);
        let Step { decision, write } = step.ok_or(Missed::More)?;
        let entry = match write {
            Write::Put { state, .. } if charges => {
                Entry::new(route.tag(), lines.pack(state).ok_or(Missed::More)?)
            }
            Write::Remove if charges => return Err(Missed::More),
            _ => {
                let is_still = line.is_still(&seen);
                return if is_still { Ok(decision) } else { Err(Missed::Busy) };
            }
        };
        let mut held = line.try_lock_seen(&seen).ok_or(Missed::Busy)?;
        if !held.is_still(&seen) {
            return Err(Missed::Busy);
        }
        held.set(seen.slot, entry);
        Ok(decision)
    }
}

impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// Decides one check on a state that a line holds, unless somebody is writing there or there is more to
    /// it.
    ///
    /// This is all that nearly all decisions run, without a call and in one piece: so what the step says goes
    /// straight into the answer, and is not handed from one to another in memory.
    #[inline(always)]
    pub(super) fn decide_at_once(
        &self,
        check: Check<'_, A>,
        charges: bool,
    ) -> Result<Decision, Missed> {
        let lines = self.lines_for(check.limit).ok_or(Missed::More)?;
        let sought = Sought::new(lines, self.address_of(check.limit, check.key));
        // What reads the time waits until what was read before it has come.
        let begun = sought.begun();
        let now = self.clock.now();
        sought.decide(begun, check.limit.algorithm(), now, check.cost, charges)
    }

    /// The same once more, a few times.
    pub(super) fn decide_after_others(
        &self,
        check: Check<'_, A>,
        charges: bool,
    ) -> Result<Decision, Missed> {
        let (mut waited, mut decided) = (0, Err(Missed::Busy));
        while decided == Err(Missed::Busy) && waited < TRIES {
            wait(&mut waited);
            decided = self.decide_at_once(check, charges);
        }
        decided
    }

    /// The lines, if states of this limit lie there as a rule.
    #[inline(always)]
    pub(super) fn lines_for(&self, limit: &Limit<A>) -> Option<&Lines> {
        self.lines.as_ref().filter(|_| limit.algorithm().is_small())
    }

    #[inline(always)]
    pub(super) fn address_of(&self, limit: &Limit<A>, key: &str) -> Address {
        Address::new(self.key(limit.name(), limit.fingerprint(), key).hash)
    }

    /// Decides one check with the key's lines held, if the lines suffice.
    pub(super) fn decide_in_lines(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
    ) -> Option<Decision> {
        let lines = self.lines_for(check.limit).filter(|_| is_plain(batch))?;
        let address = self.address_of(check.limit, check.key);
        let charges = batch.operation() == Op::Acquire;
        loop {
            match self.attempt(lines, address, check, charges) {
                Attempt::Decided(decision) => return Some(decision),
                Attempt::New(decision) => {
                    self.sweep_in_passing(lines, self.clock.now());
                    return Some(decision);
                }
                Attempt::Elsewhere => return None,
                Attempt::Crowded => {
                    let way = lines.make_way(address, self.clock.now());
                    self.release(way.freed);
                    if !way.made {
                        return None;
                    }
                }
            }
        }
    }

    /// One attempt; it writes only if the check charges.
    fn attempt(
        &self,
        lines: &Lines,
        address: Address,
        check: &Check<'_, A>,
        charges: bool,
    ) -> Attempt {
        let mut pair = lines.lock(address);
        // Not before: whoever holds the line after another is not to be earlier.
        let now = self.clock.now();
        let place = pair.find();
        if place.is_none()
            && pair.lines[0].has_spilled()
            && self.in_shards.load(Ordering::Relaxed) > 0
        {
            return Attempt::Elsewhere;
        }
        let state = place.map(|(line, slot)| lines.unpack(pair.lines[line].get(slot).state()));
        let step = check.limit.algorithm().step_small(state, now, check.cost);
        let Some(Step { decision, write }) = step else { return Attempt::Elsewhere };
        let entry = match write {
            Write::Put { state, .. } if charges => match lines.pack(state) {
                Some(state) => Entry::new(pair.route.tag(), state),
                None => return Attempt::Elsewhere,
            },
            Write::Remove if charges => {
                if let Some((line, slot)) = place {
                    pair.lines[line].clear(slot);
                    self.release(1);
                }
                return Attempt::Decided(decision);
            }
            _ if place.is_some() => return Attempt::Decided(decision),
            // What a full store says of a new key is what the shared state says.
            _ if self.is_full(1) => return Attempt::Elsewhere,
            _ => return Attempt::New(decision),
        };
        let now_us = lines.since_epoch_us(now);
        if let Some((line, slot)) = place.or_else(|| pair.expired_place(now_us)) {
            pair.lines[line].set(slot, entry);
        } else if let Some((line, slot)) = pair.free_place() {
            if !self.reserve() {
                return Attempt::Elsewhere;
            }
            pair.lines[line].set(slot, entry);
        } else {
            return Attempt::Crowded;
        }
        if place.is_some() { Attempt::Decided(decision) } else { Attempt::New(decision) }
    }
}
