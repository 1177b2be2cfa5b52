//! [`Kept`]: the states of denied keys, at most so many, by a hash of the limit and the key.

use std::collections::VecDeque;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use dashmap::{DashMap, Entry};
use ratelimit_core::{Algorithm, Batch, Timestamp};

use crate::lock;

/// How many groups of keys have a generation of their own: enough that few requests which are under way at the same time
/// share one.
const GENERATIONS: usize = 4_096;

/// A key under a limit, and the generation of its group when the request began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    /// Two keyed hashes: two keys of `n` meet with a chance of n² / 2¹²⁹.
    hash: u128,
    generation: u64,
}

/// The state of a key as the store saw it.
pub(super) struct KeptState<A: Algorithm> {
    /// The limit's, when the state was kept.
    algorithm: A,
    /// `None` for a new key.
    state: Option<A::State>,
    /// The time of the store when it saw the state.
    now: Timestamp,
    /// The local time when the request was sent that saw it.
    sent: Timestamp,
}

impl<A: Algorithm> KeptState<A> {
    pub(super) fn new(
        algorithm: A,
        state: Option<A::State>,
        now: Timestamp,
        sent: Timestamp,
    ) -> Self {
        Self { algorithm, state, now, sent }
    }

    /// The time of the store at a local time, or up to a round trip later.
    const fn now_at(&self, local: Timestamp) -> Timestamp {
        self.now.saturating_add_us(local.saturating_us_since(self.sent))
    }

    /// Whether it counts at a local time. A local clock that has gone back tells no age.
    fn is_fresh(&self, local: Timestamp, max_age_us: u64) -> bool {
        local.checked_since(self.sent).is_some_and(|age| age.as_us() <= max_age_us)
    }
}

/// The states of denied keys.
pub(super) struct Kept<A: Algorithm> {
    states: DashMap<u128, KeptState<A>>,
    /// The keys in the order in which they came. A key that was removed and came again stands here twice.
    order: Mutex<VecDeque<u128>>,
    capacity: usize,
    max_age_us: u64,
    hashers: [RandomState; 2],
    /// Changes when an operation may have ended the waits of the group's keys, and when a request was admitted of which no
    /// state is kept: what a request saw that was under way then may be from before.
    generations: Box<[AtomicU64]>,
}

impl<A: Algorithm> fmt::Debug for Kept<A> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kept")
            .field("keys", &self.len())
            .field("capacity", &self.capacity)
            .field("max_age_us", &self.max_age_us)
            .finish_non_exhaustive()
    }
}

impl<A: Algorithm> Kept<A> {
    pub(super) fn new(capacity: usize, max_age_us: u64) -> Self {
        Self {
            states: DashMap::new(),
            order: Mutex::default(),
            capacity,
            max_age_us,
            hashers: [RandomState::new(), RandomState::new()],
            generations: (0..GENERATIONS).map(|_| AtomicU64::new(0)).collect(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.states.len()
    }

    /// The keys of a batch.
    pub(super) fn keys(&self, batch: &Batch<'_, A>) -> Vec<Key> {
        let key = |limit: u64, key: &str| {
            let [high, low] = self.hashers.each_ref().map(|hasher| hasher.hash_one((limit, key)));
            let hash = u128::from(high) << 64 | u128::from(low);
            Key { hash, generation: self.generation(hash).load(Ordering::Acquire) }
        };
        batch.checks().iter().map(|check| key(check.limit.fingerprint(), check.key)).collect()
    }

    fn generation(&self, hash: u128) -> &AtomicU64 {
        let group = hash % GENERATIONS as u128;
        &self.generations[usize::try_from(group).unwrap_or_default()]
    }

    /// The store's time at this local time and the state of a key, if it counts then and is of a limit with these
    /// parameters.
    pub(super) fn get(
        &self,
        key: Key,
        algorithm: &A,
        local: Timestamp,
    ) -> Option<(Timestamp, Option<A::State>)>
    where
        A: PartialEq,
    {
        let kept = self.states.get(&key.hash)?;
        let counts = kept.is_fresh(local, self.max_age_us) && kept.algorithm == *algorithm;
        counts.then(|| (kept.now_at(local), kept.state.clone()))
    }

    /// Keeps a state.
    pub(super) fn put(&self, key: Key, kept: KeptState<A>) {
        let sent = kept.sent;
        match self.states.entry(key.hash) {
            Entry::Occupied(mut entry) => {
                if self.is_newer(key, entry.get(), &kept) {
                    entry.insert(kept);
                }
                return;
            }
            // An invalidation removes the key after it has changed the generation: either it is seen here, or the
            // invalidation waits for this entry and removes it.
            Entry::Vacant(entry) => {
                if !self.is_current(key) {
                    return;
                }
                entry.insert(kept);
            }
        }
        self.make_room(key.hash, sent);
    }

    /// Notes the state that an admitted request left: it replaces an earlier one that is kept. Where none is kept, nor will be
    /// what requests saw that are under way: it may be from before the charge.
    pub(super) fn refresh(&self, key: Key, kept: KeptState<A>) {
        match self.states.entry(key.hash) {
            Entry::Occupied(mut entry) => {
                if self.is_newer(key, entry.get(), &kept) {
                    entry.insert(kept);
                } else if !self.is_current(key) {
                    // Which of the two is from before an invalidation, no time tells.
                    self.advance(key);
                    entry.remove();
                }
            }
            // Whatever is put later waits for this entry, and then finds another generation.
            Entry::Vacant(_) => self.advance(key),
        }
    }

    /// From here on, what requests saw that are under way does not count.
    fn advance(&self, key: Key) {
        self.generation(key.hash).fetch_add(1, Ordering::AcqRel);
    }

    fn is_current(&self, key: Key) -> bool {
        self.generation(key.hash).load(Ordering::Acquire) == key.generation
    }

    /// Whether the store saw `kept` after `before`, as far as that can be told.
    fn is_newer(&self, key: Key, before: &KeptState<A>, kept: &KeptState<A>) -> bool {
        let age = kept.sent.checked_since(before.sent);
        let is_too_old = age.is_some_and(|age| age.as_us() > self.max_age_us);
        (before.now <= kept.now || is_too_old) && self.is_current(key)
    }

    /// Notes that a key came, and drops another one if there are too many. For each key that comes, it looks at two, so that
    /// keys which are too old go faster than new ones come.
    fn make_room(&self, hash: u128, local: Timestamp) {
        let mut order = lock(&self.order);
        order.push_back(hash);
        for _ in 0..2 {
            let Some(oldest) = order.pop_front() else { return };
            let fresh = |_: &u128, kept: &KeptState<A>| kept.is_fresh(local, self.max_age_us);
            let is_full = order.len() >= self.capacity;
            let removed = self.states.remove_if(&oldest, |key, kept| is_full || !fresh(key, kept));
            if removed.is_none() && self.states.contains_key(&oldest) {
                order.push_back(oldest);
            }
        }
    }

    /// Drops keys.
    pub(super) fn remove(&self, keys: &[Key]) {
        for key in keys {
            self.states.remove(&key.hash);
        }
    }

    /// Drops keys, and what requests that are under way see of them.
    pub(super) fn invalidate(&self, keys: &[Key]) {
        for key in keys {
            self.advance(*key);
        }
        self.remove(keys);
    }

    /// Drops all keys, and what requests that are under way see.
    pub(super) fn clear(&self) {
        for generation in &self.generations {
            generation.fetch_add(1, Ordering::AcqRel);
        }
        self.states.clear();
    }
}
