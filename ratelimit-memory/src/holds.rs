//! The holds of a batch with an id: kept beside the states, and locked after them.

use std::fmt::Write as _;

use ratelimit_core::{Algorithm, Batch, Hold, Now, Tick};

use crate::hash::KeyHasher;
use crate::shard::{Freed, Key, Locked, Shard, shard_of};
use crate::sync::{Mutex, MutexGuard};

/// How many places a call that looks at a shard of holds sweeps in it.
const SWEEP_SLOTS: usize = 2;

/// The holds of one batch, held still.
pub(crate) struct HeldHolds<'s> {
    locked: Locked<'s, Hold>,
    /// For each check the position of its shard, and its key.
    keys: Vec<(usize, HoldKey)>,
    /// Places reserved for holds that are new.
    pub(crate) reserved: usize,
}

/// What a hold is kept under. The id comes first and is always as long, so that two never meet.
struct HoldKey {
    hash: u64,
    limit: String,
    text: String,
}

impl HoldKey {
    fn as_key(&self) -> Key<'_> {
        Key { hash: self.hash, limit: &self.limit, caller: &self.text }
    }
}

impl<'s> HeldHolds<'s> {
    /// Locks what a batch needs; `None` if it has no id.
    pub(crate) fn lock<A: Algorithm>(
        all: &'s [Mutex<Shard<Hold>>],
        hasher: &KeyHasher,
        batch: &Batch<'_, A>,
    ) -> Option<Self> {
        let id = batch.hold_id()?;
        let keys: Vec<_> = batch
            .checks()
            .iter()
            .map(|check| {
                let mut text = String::with_capacity(32 + check.key.len());
                // Writing to a string cannot fail.
                let _ = write!(text, "{id}{}", check.key);
                let hash = hasher.hash(check.limit.name(), &text);
                (
                    shard_of(hash, all.len()),
                    HoldKey { hash, limit: check.limit.name().into(), text },
                )
            })
            .collect();
        let locked = Locked::lock(all, keys.iter().map(|(place, _)| *place));
        let keys = keys.into_iter().map(|(place, key)| (locked.position(place), key)).collect();
        Some(Self { locked, keys, reserved: 0 })
    }

    /// Sweeps a little in passing, and says how many places became free.
    pub(crate) fn sweep(&mut self, now: Tick) -> usize {
        let sweep = |shard: &mut MutexGuard<'_, Shard<Hold>>| shard.sweep(now, SWEEP_SLOTS, |_| 0);
        self.locked.shards.iter_mut().map(sweep).sum::<Freed>().slots
    }

    /// How many checks of the batch have no hold yet.
    pub(crate) fn new_keys(&self) -> usize {
        let is_new = |(shard, key): &&(usize, HoldKey)| {
            self.locked.shards[*shard].find(key.as_key()).is_none()
        };
        self.keys.iter().filter(is_new).count()
    }

    pub(crate) fn get(&self, position: usize) -> Option<Hold> {
        let (shard, key) = &self.keys[position];
        let shard = &self.locked.shards[*shard];
        shard.state(shard.find(key.as_key())?).copied()
    }

    pub(crate) fn put(&mut self, position: usize, hold: Hold, sweep_at: Tick) {
        let (shard, key) = &self.keys[position];
        let shard = &mut self.locked.shards[*shard];
        if let Some(slot) = shard.find(key.as_key()) {
            shard.replace(slot, hold, sweep_at);
        } else if let Some(left) = self.reserved.checked_sub(1) {
            self.reserved = left;
            shard.insert(key.as_key(), hold, sweep_at);
        }
    }
}

/// When something that expires may be swept, by the store's own clock: as Redis does with a time to
/// live. A time that was given for the decision says nothing about when the next one comes.
pub(crate) fn sweep_at(time: Now, own: Tick, expires: Tick) -> Tick {
    match time {
        Now::Store => expires,
        Now::At(now) => own
            .saturating_add_us(expires.saturating_us_since(now))
            .saturating_add_us(Now::PADDING_US),
    }
}
