//! One check with an id, of a limit whose states lie in shards: a lease granted, renewed or released, or a
//! charge that is done once. What `anywhere.rs` does, for one key: its lines if they are needed, its shard,
//! and what is held under the id are locked, in this order.

use ratelimit_core::{
    Algorithm, Batch, Check, Clock, Decision, Hold, Op, States, Step, Tick, Verdict, Write, decide,
};

use super::anywhere::SWEEP_SLOTS;
use super::{MemoryError, MemoryStore};
use crate::holds::{HeldHold, sweep_at};
use crate::lines::{Address, Pair};
use crate::shard::{Freed, Shard, shard_of};
use crate::sync::{MutexGuard, Ordering, lock};

/// The state of one check, and what is held for it, held still.
struct One<'s, A: Algorithm, C> {
    store: &'s MemoryStore<A, C>,
    batch: &'s Batch<'s, A>,
    hash: u64,
    /// The key's lines, if it had no state in its shard.
    lines: Option<Pair<'s>>,
    shard: MutexGuard<'s, Shard<A::State>>,
    slot: Option<usize>,
    held: HeldHold<'s>,
    own: Tick,
    /// Whether the operation is one that can leave something.
    may_add: bool,
    reserved: Reserved,
}

/// What is counted already and not used yet.
#[derive(Default)]
struct Reserved {
    key: bool,
    hold: bool,
    entries: usize,
}

impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// Decides one check with an id, if its state lies in a shard or can be put there, and if there is
    /// room for all that it may need.
    pub(super) fn decide_held(
        &self,
        batch: &Batch<'_, A>,
        check: &Check<'_, A>,
    ) -> Option<Result<Verdict, MemoryError>> {
        let id = batch.hold_id()?;
        if check.limit.algorithm().is_small() {
            return None;
        }
        let hash = self.key_of(check).hash;
        let all = &self.shards;
        let mut shard = lock(&all[shard_of(hash, all.len())]);
        let mut slot = shard.find(hash);
        let mut pair = None;
        if let (None, Some(lines)) = (slot, &self.lines) {
            drop(shard);
            let mut locked = lines.lock(Address::new(hash));
            if locked.state().is_some() {
                return None;
            }
            pair = Some(locked);
            shard = lock(&all[shard_of(hash, all.len())]);
            slot = shard.find(hash);
        }
        let held = HeldHold::lock(&self.holds, self.id_hasher, id, hash);
        let own = self.clock.now();
        let reserved = Reserved::default();
        let may_add = !matches!(batch.operation(), Op::Settle | Op::Renew | Op::Peek);
        let mut one = One {
            store: self,
            batch,
            hash,
            lines: pair,
            shard,
            slot,
            held,
            own,
            may_add,
            reserved,
        };
        let now = Self::time_of(batch, own);
        let decided = one.reserve(check).then(|| match one.decide_usual(check, now) {
            Some(decision) => Ok(Verdict::one(decision)),
            None => Ok(decide(batch, now, &mut one)?),
        });
        one.end();
        decided
    }
}

impl<A: Algorithm, C: Clock> One<'_, A, C> {
    /// Counts all that the operation may need, if there is room for it.
    fn reserve(&mut self, check: &Check<'_, A>) -> bool {
        let (store, op) = (self.store, self.batch.operation());
        let adds_entries = matches!(op, Op::Acquire | Op::Force | Op::Renew);
        let entries = if adds_entries { check.limit.algorithm().entries_a_step() } else { 0 };
        if !store.reserve_entries(entries) {
            return false;
        }
        self.reserved.entries = entries;
        if self.slot.is_none() {
            self.reserved.key = store.reserve();
            if !self.reserved.key {
                return false;
            }
        }
        if self.may_add && self.held.is_new() {
            self.reserved.hold = store.reserve();
            return self.reserved.hold;
        }
        true
    }

    /// What nearly all calls with an id are: a charge under a new one, and its settlement. As
    /// [`decide`] decides them, without its allocations; all else is left to it.
    fn decide_usual(&mut self, check: &Check<'_, A>, now: Tick) -> Option<Decision> {
        let algorithm = check.limit.algorithm();
        let life_us = algorithm.hold_us()?;
        let is_usual = self.batch.metadata_given().is_empty() && !self.batch.is_part();
        if algorithm.charges_denials() || !is_usual {
            return None;
        }
        let known = self.held.get().filter(|hold| hold.is_live(now, life_us));
        if known.as_ref().is_some_and(|hold| hold.group.is_some()) {
            return None;
        }
        let (decision, hold) = match (self.batch.operation(), known) {
            (Op::Acquire, None) if check.cost > 0 => {
                let at = algorithm.charged_at(self.get(0), now);
                (self.step(check, now), Hold::new(at, check.cost))
            }
            (Op::Settle, Some(hold)) if hold.settled.is_none() => {
                let decision = self.settle(check, now, &hold)?;
                (decision, Hold { settled: Some(check.cost), ..hold })
            }
            _ => return None,
        };
        if decision.allowed {
            let expires = hold.since.saturating_add_us(life_us);
            self.put_hold(0, hold, expires);
        }
        Some(decision)
    }

    /// Settles what is held, in place if there is a state.
    fn settle(&mut self, check: &Check<'_, A>, now: Tick, hold: &Hold) -> Option<Decision> {
        let algorithm = check.limit.algorithm();
        let Some((state, until)) = self.slot.and_then(|slot| self.shard.state_mut(slot)) else {
            let step = algorithm.settle(None, now, hold, check.cost)?;
            self.put(0, step.write);
            return Some(step.decision);
        };
        let before = A::entries_in(state);
        let Step { decision, write } = algorithm.settle_in_place(state, now, hold, check.cost)?;
        let after = A::entries_in(state);
        if let Write::Put { expires, .. } = write {
            until.set(sweep_at(self.batch.time(), self.own, expires));
        }
        self.written(&write, before, after);
        Some(decision)
    }

    /// Acquires the cost, in place if there is a state.
    fn step(&mut self, check: &Check<'_, A>, now: Tick) -> Decision {
        let algorithm = check.limit.algorithm();
        let found = self.slot.and_then(|slot| self.shard.state_mut(slot));
        let Some((state, until)) = found else {
            let step = algorithm.step(None, now, check.cost);
            self.put(0, step.write);
            return step.decision;
        };
        let before = A::entries_in(state);
        let Step { decision, write } = algorithm.step_in_place(state, now, check.cost);
        let after = A::entries_in(state);
        if let Write::Put { expires, .. } = write {
            until.set(sweep_at(self.batch.time(), self.own, expires));
        }
        self.written(&write, before, after);
        decision
    }

    /// Notes how many entries a state had before it was written in place, and has after.
    fn written(&mut self, write: &Write<()>, before: usize, after: usize) {
        if !matches!(write, Write::Keep) {
            self.keep_entries(before, after);
        }
        if matches!(write, Write::Remove) {
            // The state has as many as it was left with.
            self.put(0, Write::Remove);
        }
    }

    /// Notes that the state keeps so many entries now.
    fn keep_entries(&mut self, before: usize, now: usize) {
        let spare = self.reserved.entries + before;
        // An algorithm that has more than it said is counted all the same.
        self.store.entries.fetch_add(now.saturating_sub(spare), Ordering::Relaxed);
        self.reserved.entries = spare.saturating_sub(now);
    }

    /// Gives back what was not needed, and sweeps a little where there may be one more.
    fn end(mut self) {
        let (store, own) = (self.store, self.own);
        let (mut swept, mut swept_holds) = (Freed::default(), 0);
        if self.may_add {
            swept = self.shard.sweep(own, SWEEP_SLOTS, A::entries_in);
            swept_holds = self.held.sweep(own);
        }
        let Reserved { key, hold, entries } = self.reserved;
        store.release_swept(swept);
        store.release_holds(swept_holds);
        store.release(usize::from(key) + usize::from(hold));
        store.release_entries(entries);
    }

    fn put_state(&mut self, state: A::State, sweep_at: Tick) {
        let entries = A::entries_in(&state);
        let before = if let Some(slot) = self.slot {
            self.shard.replace(slot, state, sweep_at)
        } else {
            if let Some(pair) = &mut self.lines {
                pair.lines[0].spill();
            }
            self.reserved.key = false;
            self.store.in_shards.fetch_add(1, Ordering::Relaxed);
            self.slot = Some(self.shard.insert(self.hash, state, sweep_at));
            None
        };
        self.keep_entries(before.map_or(0, |state| A::entries_in(&state)), entries);
    }
}

impl<A: Algorithm, C: Clock> States<A::State> for One<'_, A, C> {
    fn get(&self, _: usize) -> Option<&A::State> {
        self.shard.state(self.slot?)
    }

    fn put(&mut self, _: usize, write: Write<A::State>) {
        match write {
            Write::Keep => {}
            Write::Put { state, expires } => {
                let sweep_at = sweep_at(self.batch.time(), self.own, expires);
                self.put_state(state, sweep_at);
            }
            Write::Remove => {
                let Some(slot) = self.slot.take() else { return };
                let before = self.shard.clear(slot).map_or(0, |state| A::entries_in(&state));
                self.reserved.entries += before;
                self.store.release_in_shards(1);
            }
        }
    }

    fn hold(&self, _: usize) -> Option<Hold> {
        self.held.get()
    }

    /// Of one check alone, which belongs to no group.
    fn fingerprint(&self) -> u64 {
        0
    }

    fn put_hold(&mut self, _: usize, hold: Hold, expires: Tick) {
        let sweep_at = sweep_at(self.batch.time(), self.own, expires);
        if self.held.put(hold, sweep_at, self.reserved.hold) {
            self.reserved.hold = false;
            self.store.holding.fetch_add(1, Ordering::Relaxed);
        }
    }
}
