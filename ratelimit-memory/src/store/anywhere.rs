//! Any batch, decided with all that it touches locked: its lines, its shards, the overflow states, what is
//! held under its id. Everybody locks these in this order, and lines and shards among themselves in one.

use ratelimit_core::{
    Algorithm, Batch, Clock, Hold, Now, Op, States, Tick, Verdict, Write, decide, fingerprint,
};
use smallvec::SmallVec;

use super::{Key, MemoryError, MemoryStore};
use crate::holds::{HeldHolds, sweep_at};
use crate::lines::{self, Address, Entry, Lines, Packed};
use crate::shard::{Freed, Locked, Shard, shard_of};
use crate::sync::{MutexGuard, Ordering, lock};

/// How many slots a call sweeps in passing: more than the one that it can add.
pub(super) const SWEEP_SLOTS: usize = 2;
/// How many lines a call sweeps in passing: all of the smallest table in 171 calls. Models of whole stores
/// sweep none: it is the difference between seconds and minutes, and `loom_lines.rs` sweeps beside a charge.
pub(super) const SWEEP_LINES: usize = if cfg!(loom) { 0 } else { 3 };
/// How many slots of a shard a call sweeps when it needs a place and the store is full.
const SWEEP_SLOTS_WHEN_FULL: usize = 64;
/// How many lines at the most: some microseconds.
pub(super) const MOST_LINES_WHEN_FULL: usize = if cfg!(loom) { 1 } else { 256 };
/// And at the least. In models it is one of four.
const FEWEST_LINES_WHEN_FULL: usize = if cfg!(loom) { 1 } else { 8 };
/// How many other shards a call looks into when it needs a place and the store is full.
const SWEEP_SHARDS_WHEN_FULL: usize = 4;

/// The keys of overflow states: nothing for the first of a limit in a batch, then one dot more for
/// each.
const NTH_OVERFLOW: &str = "................................................................";

mod room;

/// Where the state of a check lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In this line of those that are held, in this slot.
    Line(usize, usize),
    /// In its shard, in this slot.
    Shard(usize),
    /// Nowhere yet.
    New,
    /// Nowhere yet, and a place is reserved.
    Reserved,
    /// Nowhere, and there is no room: the limit's overflow state.
    Overflow,
}

/// What a check has been given to be decided on.
struct Placed<'k, S> {
    key: Key<'k>,
    place: Place,
    /// Whether the key is that of a shared state.
    is_diverted: bool,
    /// The state, if it lies in a line.
    state: Option<S>,
}

/// The states of a batch, held still.
struct Held<'s, 'k, A: Algorithm, C> {
    store: &'s MemoryStore<A, C>,
    lines: Option<(&'s Lines, lines::Held<'s>)>,
    /// The shards of all its keys, once they are needed.
    shards: Option<Locked<'s, A::State>>,
    overflow: Option<MutexGuard<'s, Shard<A::State>>>,
    holds: Option<HeldHolds<'s>>,
    placed: SmallVec<[Placed<'k, A::State>; 2]>,
    own: Tick,
    time: Now,
    /// Entries that are counted already, and that no state keeps yet, or any more.
    spare_entries: usize,
    /// Whether what is needed of them is still to be found out.
    is_tight: bool,
    /// Keys whose lines had no place for them.
    crowded: SmallVec<[Address; 1]>,
}

impl<A: Algorithm, C: Clock> MemoryStore<A, C> {
    /// Decides any batch.
    #[cold]
    #[inline(never)]
    pub(super) fn decide_anywhere(&self, batch: &Batch<'_, A>) -> Result<Verdict, MemoryError> {
        let keys = batch.checks().iter().map(|check| self.key_of(check));
        let new = |key| Placed { key, place: Place::New, is_diverted: false, state: None };
        let placed: SmallVec<[_; 2]> = keys.map(new).collect();
        let addresses = placed.iter().map(|placed| Address::new(placed.key.hash));
        let lines = self.lines.as_ref().map(|lines| (lines, lines.lock_all(&addresses)));
        let mut held = Held {
            store: self,
            lines,
            shards: None,
            overflow: None,
            holds: None,
            placed,
            own: self.clock.now(),
            time: batch.time(),
            spare_entries: 0,
            is_tight: false,
            crowded: SmallVec::new(),
        };
        held.find_in_lines();
        if !held.lines_suffice(batch) {
            held.lock_shards();
        }
        held.reserve_places(batch);
        held.divert_overflow();
        held.reserve_most_entries(batch);
        let decided = held.lock_holds(batch).and_then(|()| {
            // Read with all locks held: somebody whose time is later may have freed what was waited for.
            held.own = self.clock.now();
            let now = Self::time_of(batch, held.own);
            held.reserve_exact_entries(batch, now)?;
            Ok(decide(batch, now, &mut held)?)
        });
        held.end();
        decided
    }

    /// Sweeps the next lines, and a little of what no line holds, if there is any: the next shard, and the next
    /// of holds, unless somebody is using them just now.
    pub(super) fn sweep_in_passing(&self, lines: &Lines, now: Tick) {
        self.release(lines.sweep(SWEEP_LINES, now));
        let (in_shards, holding) =
            (self.in_shards.load(Ordering::Relaxed), self.holding.load(Ordering::Relaxed));
        if in_shards + holding == 0 {
            return;
        }
        let next = self.next_to_sweep.fetch_add(1, Ordering::Relaxed) % self.shards.len();
        if in_shards > 0
            && let Ok(mut shard) = self.shards[next].try_lock()
        {
            self.release_swept(shard.sweep(now, SWEEP_SLOTS, A::entries_in));
        }
        if holding > 0
            && let Ok(mut holds) = self.holds[next].try_lock()
        {
            self.release_holds(holds.sweep(now, SWEEP_SLOTS, |_| 0).slots);
        }
    }

    /// Sweeps a little of what is held under ids, unless somebody is using it just now.
    pub(super) fn sweep_holds_in_passing(&self, now: Tick) {
        if self.holding.load(Ordering::Relaxed) == 0 {
            return;
        }
        let next = self.next_to_sweep.fetch_add(1, Ordering::Relaxed) % self.holds.len();
        // Never waits.
        if let Ok(mut holds) = self.holds[next].try_lock() {
            self.release_holds(holds.sweep(now, SWEEP_SLOTS, |_| 0).slots);
        }
    }

    /// Sweeps a few other shards, a few of holds, and some lines: those that nobody is using just now.
    fn sweep_elsewhere(&self, now: Tick) {
        let (mut freed, mut freed_holds) = (Freed::default(), 0);
        for _ in 0..SWEEP_SHARDS_WHEN_FULL {
            let next = self.next_to_sweep.fetch_add(1, Ordering::Relaxed) % self.shards.len();
            // Never waits, and passes over those that this very thread holds.
            if let Ok(mut shard) = self.shards[next].try_lock() {
                freed += shard.sweep(now, SWEEP_SLOTS_WHEN_FULL, A::entries_in);
            }
            if self.holding.load(Ordering::Relaxed) > 0
                && let Ok(mut holds) = self.holds[next].try_lock()
            {
                freed_holds += holds.sweep(now, SWEEP_SLOTS_WHEN_FULL, |_| 0).slots;
            }
        }
        self.release_swept(freed);
        self.release_holds(freed_holds);
        if let Some(lines) = &self.lines {
            self.sweep_lines_when_full(lines, now);
        }
    }

    /// Sweeps the next lines: twice as many as the last time if that freed something, half as many if it did not. So
    /// strangers who come to a full store where nothing is idle are soon told so. All of them, if they are few.
    fn sweep_lines_when_full(&self, lines: &Lines, now: Tick) {
        if lines.count() <= MOST_LINES_WHEN_FULL {
            self.release(lines.sweep(MOST_LINES_WHEN_FULL, now));
            return;
        }
        let count = self.lines_when_full.load(Ordering::Relaxed);
        let freed = lines.sweep(count, now);
        self.release(freed);
        let next = if freed > 0 { count * 2 } else { count / 2 };
        let next = next.clamp(FEWEST_LINES_WHEN_FULL, MOST_LINES_WHEN_FULL);
        if next != count {
            self.lines_when_full.store(next, Ordering::Relaxed);
        }
    }

    pub(super) fn is_full(&self, new_keys: usize) -> bool {
        self.len().saturating_add(new_keys) > self.capacity
    }
}

impl<A: Algorithm, C: Clock> Held<'_, '_, A, C> {
    /// Frees what has expired in the lines, and notes what is left of the batch's own.
    fn find_in_lines(&mut self) {
        let Some((lines, held)) = &mut self.lines else { return };
        let now_us = lines.since_epoch_us(self.own);
        let freed = held.lines.iter_mut().map(|line| line.clear_expired(now_us)).sum();
        self.store.release(freed);
        for (key, placed) in self.placed.iter_mut().enumerate() {
            if let Some((line, slot)) = held.find(key) {
                let small = lines.unpack(held.lines[line].get(slot).state());
                (placed.place, placed.state) = (Place::Line(line, slot), A::from_small(small));
            }
        }
    }

    /// Whether the shards need not be looked at, as far as can be known before the decision.
    fn lines_suffice(&self, batch: &Batch<'_, A>) -> bool {
        let Some((_, held)) = &self.lines else { return false };
        let is_known = |key: usize| {
            self.placed[key].place != Place::New
                || (!held.has_spilled(key) && batch.checks()[key].limit.algorithm().is_small())
        };
        batch.time() == Now::Store
            && batch.hold_id().is_none()
            && (0..self.placed.len()).all(is_known)
    }

    /// Locks the batch's shards, sweeps a little, and notes what is found. Sweeping comes before slots are
    /// noted: a noted slot must stay its key's own.
    fn lock_shards(&mut self) {
        let (all, own) = (&self.store.shards, self.own);
        let places = self.placed.iter().map(|placed| shard_of(placed.key.hash, all.len()));
        let mut locked = Locked::lock(all, places);
        let shards = locked.shards.iter_mut();
        let freed = shards.map(|shard| shard.sweep(own, SWEEP_SLOTS, A::entries_in)).sum();
        self.store.release_swept(freed);
        if let Some(lines) = &self.store.lines {
            self.store.release(lines.sweep(SWEEP_LINES, own));
        }
        self.store.sweep_holds_in_passing(own);
        self.shards = Some(locked);
        self.find_in_shards();
    }

    /// Notes the slots of the keys that the shards hold.
    fn find_in_shards(&mut self) {
        let Some(locked) = &self.shards else { return };
        let count = self.store.shards.len();
        let elsewhere = |placed: &&mut Placed<'_, A::State>| {
            matches!(placed.place, Place::New | Place::Shard(_))
        };
        for placed in self.placed.iter_mut().filter(elsewhere) {
            let shard = locked.position(shard_of(placed.key.hash, count));
            let found = locked.shards[shard].find(placed.key.hash);
            placed.place = found.map_or(Place::New, Place::Shard);
        }
    }

    /// The shard of a key; its lock is taken if nothing that comes after it is held yet.
    fn shard(&mut self, key: usize) -> Option<&mut Shard<A::State>> {
        if self.shards.is_none() && self.overflow.is_none() && self.holds.is_none() {
            self.lock_shards();
        }
        let place = shard_of(self.placed[key].key.hash, self.store.shards.len());
        let locked = self.shards.as_mut()?;
        let position = locked.position(place);
        locked.shards.get_mut(position).map(|shard| &mut **shard)
    }

    /// Reserves a place for every new key, or notes that there is none.
    fn reserve_places(&mut self, batch: &Batch<'_, A>) {
        let is_new = |placed: &Placed<'_, A::State>| placed.place == Place::New;
        let new_keys = self.placed.iter().filter(|placed| is_new(placed)).count();
        if (new_keys > 0 && self.store.is_full(new_keys)) || self.lacks_entries(batch) {
            self.make_room(batch);
        }
        for placed in self.placed.iter_mut().filter(|placed| is_new(placed)) {
            let reserved = self.store.reserve();
            placed.place = if reserved { Place::Reserved } else { Place::Overflow };
        }
    }

    /// Sweeps more.
    fn make_room(&mut self, batch: &Batch<'_, A>) {
        let own = self.own;
        if let Some(locked) = &mut self.shards {
            let shards = locked.shards.iter_mut();
            let sweep = |shard: &mut MutexGuard<'_, Shard<A::State>>| {
                shard.sweep(own, SWEEP_SLOTS_WHEN_FULL, A::entries_in)
            };
            self.store.release_swept(shards.map(sweep).sum());
            // Slots that were noted may be among them.
            self.find_in_shards();
        }
        let is_new = |placed: &&Placed<'_, A::State>| placed.place == Place::New;
        let new_keys = self.placed.iter().filter(is_new).count();
        if self.store.is_full(new_keys) || self.lacks_entries(batch) {
            self.store.sweep_elsewhere(own);
        }
    }

    /// Gives shared states to the checks that have no place, and locks these.
    fn divert_overflow(&mut self) {
        if self.placed.iter().all(|placed| placed.place != Place::Overflow) {
            return;
        }
        if self.shards.is_none() {
            // Another check's state may have to go there, and then it would be too late.
            self.lock_shards();
        }
        let mut overflow = lock(&self.store.overflow);
        overflow.sweep(self.own, SWEEP_SLOTS, A::entries_in);
        self.overflow = Some(overflow);
        for position in 0..self.placed.len() {
            if self.placed[position].place == Place::Overflow {
                self.divert(position);
            }
        }
    }

    /// Gives a check that has no state its limit's shared one, and counts it. The shared states are locked.
    fn divert(&mut self, position: usize) {
        let limit = self.placed[position].key.limit;
        // Two keys of one limit in one batch must not be charged to one state unseen.
        let same = |p: &&Placed<'_, A::State>| p.is_diverted && p.key.limit == limit;
        let nth = self.placed.iter().filter(same).count();
        let key =
            self.store.key(limit, fingerprint(limit), &NTH_OVERFLOW[..nth.min(NTH_OVERFLOW.len())]);
        let was_reserved = self.placed[position].place == Place::Reserved;
        self.store.release(usize::from(was_reserved));
        self.store.overflowed.fetch_add(1, Ordering::Relaxed);
        let state = None;
        self.placed[position] = Placed { key, place: Place::Overflow, is_diverted: true, state };
    }

    /// Locks what is held under the batch's id, with places for what may be new.
    fn lock_holds(&mut self, batch: &Batch<'_, A>) -> Result<(), MemoryError> {
        let store = self.store;
        let Some(id) = batch.hold_id() else { return Ok(()) };
        // By the checks' own keys, also of those that share an overflow state.
        let keys = batch.checks().iter().map(|check| store.key_of(check).hash);
        let mut holds = HeldHolds::lock(&store.holds, store.id_hasher, id, keys);
        store.release_holds(holds.sweep(self.own));
        if !matches!(batch.operation(), Op::Settle | Op::Renew | Op::Peek) {
            let new_keys = holds.new_keys();
            if store.is_full(new_keys) {
                store.sweep_elsewhere(self.own);
            }
            for _ in 0..new_keys {
                if !store.reserve() {
                    store.release_holds(holds.reserved);
                    return Err(MemoryError::Full { capacity: store.capacity });
                }
                store.holding.fetch_add(1, Ordering::Relaxed);
                holds.reserved += 1;
            }
        }
        self.holds = Some(holds);
        Ok(())
    }

    /// Puts a state into a line, if the key has a place there.
    fn put_in_line(&mut self, key: usize, packed: Packed) -> bool {
        let Some((_, held)) = &mut self.lines else { return false };
        let place = match self.placed[key].place {
            Place::Line(line, slot) => Some((line, slot)),
            _ => held.free_place(key),
        };
        let Some((line, slot)) = place else {
            self.crowded.push(Address::new(self.placed[key].key.hash));
            return false;
        };
        held.lines[line].set(slot, Entry::new(held.routes[key].tag(), packed));
        if let Place::Shard(slot) = self.placed[key].place
            && let Some(shard) = self.shard(key)
        {
            let freed = shard.clear(slot).map_or(0, |state| A::entries_in(&state));
            self.spare_entries += freed;
            self.store.in_shards.fetch_sub(1, Ordering::Relaxed);
        }
        self.placed[key].place = Place::Line(line, slot);
        true
    }

    /// Puts a state into the key's shard, and takes it from its line.
    fn put_in_shard(&mut self, key: usize, state: A::State, sweep_at: Tick) {
        let (of, store) = (self.placed[key].key, self.store);
        let entries = A::entries_in(&state);
        let Some(shard) = self.shard(key) else { return };
        let (slot, before) = if let Some(slot) = shard.find(of.hash) {
            (slot, shard.replace(slot, state, sweep_at))
        } else {
            store.in_shards.fetch_add(1, Ordering::Relaxed);
            (shard.insert(of.hash, state, sweep_at), None)
        };
        self.keep_entries(before.map_or(0, |state| A::entries_in(&state)), entries);
        if let Some((_, held)) = &mut self.lines {
            held.spill(key);
            if let Place::Line(line, slot) = self.placed[key].place {
                held.lines[line].clear(slot);
            }
        }
        self.placed[key].place = Place::Shard(slot);
    }

    /// Notes that a state keeps so many entries now.
    fn keep_entries(&mut self, before: usize, now: usize) {
        let spare = self.spare_entries + before;
        // An algorithm that has more than it said is counted all the same.
        self.store.entries.fetch_add(now.saturating_sub(spare), Ordering::Relaxed);
        self.spare_entries = spare.saturating_sub(now);
    }

    fn put_in_overflow(&mut self, key: usize, state: A::State, sweep_at: Tick) {
        let of = self.placed[key].key;
        let Some(overflow) = &mut self.overflow else { return };
        match overflow.find(of.hash) {
            Some(slot) => drop(overflow.replace(slot, state, sweep_at)),
            None => _ = overflow.insert(of.hash, state, sweep_at),
        }
    }

    fn remove(&mut self, key: usize) {
        match self.placed[key].place {
            // Another check of the batch may have been there before, if the two meet: then nothing is
            // freed once more.
            Place::Line(line, slot) => {
                if let Some((_, held)) = &mut self.lines
                    && !held.lines[line].get(slot).is_free()
                {
                    held.lines[line].clear(slot);
                    self.store.release(1);
                }
            }
            Place::Shard(slot) => {
                if let Some(state) = self.shard(key).and_then(|shard| shard.clear(slot)) {
                    self.spare_entries += A::entries_in(&state);
                    self.store.release_in_shards(1);
                }
            }
            // One caller's reset or refund must not free all who share an overflow state.
            Place::New | Place::Reserved | Place::Overflow => return,
        }
        self.placed[key].place = Place::New;
    }

    /// Gives back what was reserved and not needed, lets go of all that is locked, and then makes way for
    /// those whose lines were full, so that they find a place there when they are written next.
    fn end(self) {
        let Self { store, placed, holds, overflow, shards, lines, own, crowded, .. } = self;
        store.release_entries(self.spare_entries);
        let unused = placed.iter().filter(|placed| placed.place == Place::Reserved).count();
        store.release(unused);
        if let Some(holds) = &holds {
            store.release_holds(holds.reserved);
        }
        drop((holds, overflow, shards, lines));
        if let Some(lines) = &store.lines {
            let freed = crowded.into_iter().map(|address| lines.make_way(address, own).freed).sum();
            store.release(freed);
        }
    }
}

impl<A: Algorithm, C: Clock> States<A::State> for Held<'_, '_, A, C> {
    fn get(&self, position: usize) -> Option<&A::State> {
        let placed = &self.placed[position];
        match placed.place {
            Place::Line(..) => placed.state.as_ref(),
            Place::Shard(slot) => {
                let locked = self.shards.as_ref()?;
                let shard = locked.position(shard_of(placed.key.hash, self.store.shards.len()));
                locked.shards[shard].state(slot)
            }
            Place::New | Place::Reserved => None,
            Place::Overflow => {
                let overflow = self.overflow.as_ref()?;
                overflow.state(overflow.find(placed.key.hash)?)
            }
        }
    }

    fn put(&mut self, position: usize, write: Write<A::State>) {
        let (state, expires) = match write {
            Write::Keep => return,
            Write::Remove => return self.remove(position),
            Write::Put { state, expires } => (state, expires),
        };
        let sweep_at = sweep_at(self.time, self.own, expires);
        if self.placed[position].place == Place::Overflow {
            return self.put_in_overflow(position, state, sweep_at);
        }
        // What is written at a given time has to outlive the store's own clock, by which lines forget.
        let small = if self.time == Now::Store { A::to_small(&state) } else { None };
        let packed = small.and_then(|small| self.store.lines.as_ref()?.pack(small));
        match packed {
            Some(packed) if self.put_in_line(position, packed) => {
                self.placed[position].state = Some(state);
            }
            _ => self.put_in_shard(position, state, sweep_at),
        }
    }

    fn hold(&self, position: usize) -> Option<Hold> {
        self.holds.as_ref()?.get(position)
    }

    fn fingerprint(&self) -> u64 {
        self.holds.as_ref().map_or(0, HeldHolds::fingerprint)
    }

    fn put_hold(&mut self, position: usize, hold: Hold, expires: Tick) {
        let sweep_at = sweep_at(self.time, self.own, expires);
        if let Some(holds) = &mut self.holds {
            holds.put(position, hold, sweep_at);
        }
    }
}
