//! [`DenialStates`]: the states of denied keys, at most so many, by a hash of the limit and the
//! key.
//!
//! The cache counts the store's time from when the request was sent. Its estimate is therefore
//! never behind the store's clock, and at most a round trip ahead: a denial ends up to a round trip
//! early, never late.
//!
//! A request that was in flight while its key was reset returns a state from before the reset. So
//! each key has a generation, shared with other keys, and a state that was requested in an earlier
//! generation is not kept. A request that is admitted while no state of its key is kept also starts
//! a new generation, because tasks may read replies in another order than the store decided.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use dashmap::Entry;
use ratelimit_core::store::{Batch, Snapshot};
use ratelimit_core::{Algorithm, Timestamp};

use crate::bounded::{BoundedMap, WideKeyHasher};

/// How many groups of keys have a generation of their own: enough that few requests which are in
/// flight at the same time share one.
const GROUPS: usize = 4_096;

/// A key under a limit, and the generation of its group when the request began.
#[derive(Clone, Copy, Debug)]
pub(super) struct KeyGeneration {
    pub(super) hash: u128,
    generation: u64,
}

/// The state of a key as the store saw it.
pub(super) struct KeptState<A: Algorithm> {
    /// `None` for a new key.
    pub(super) state: Option<A::State>,
    /// The time of the store when it saw the state.
    pub(super) now: Timestamp,
    /// The local time when the request was sent that saw it.
    pub(super) sent: Timestamp,
}

impl<A: Algorithm> KeptState<A> {
    fn remaining(&self, algorithm: &A) -> u64 {
        algorithm.step(self.state.as_ref(), self.now, 0).decision.remaining
    }

    /// The time of the store at a local time, or up to a round trip later. It is never before the
    /// store saw the state.
    const fn now_at(&self, local: Timestamp) -> Timestamp {
        self.now.saturating_add_us(local.saturating_us_since(self.sent))
    }

    /// Whether it counts at a local time. Another thread may have sent its request since that time
    /// was read.
    fn is_fresh(&self, local: Timestamp, max_age_us: u64) -> bool {
        local.checked_since(self.sent).is_some_and(|age| age.as_us() <= max_age_us)
    }
}

/// The states of denied keys, and of those that requests wait for.
pub(super) struct DenialStates<A: Algorithm> {
    /// `None` for a key that was dropped: its place goes as a stale one does.
    states: BoundedMap<Option<KeptState<A>>>,
    /// How many there are, without those that were dropped.
    len: AtomicUsize,
    max_age_us: u64,
    hasher: WideKeyHasher,
    /// Changes when an operation may have ended the waits of the group's keys, and when a request
    /// was admitted of which no state is kept: what a request saw that was in flight then may be
    /// from before.
    generations: Box<[AtomicU64]>,
    /// Whether the store said nothing of what it saw when it was last asked about limits of the
    /// group.
    silent: Box<[AtomicBool]>,
}

impl<A: Algorithm> DenialStates<A> {
    pub(super) fn new(capacity: usize, max_age_us: u64) -> Self {
        Self {
            states: BoundedMap::new(capacity),
            len: AtomicUsize::new(0),
            max_age_us,
            hasher: WideKeyHasher::default(),
            generations: (0..GROUPS).map(|_| AtomicU64::default()).collect(),
            silent: (0..GROUPS).map(|_| AtomicBool::default()).collect(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.len.load(Ordering::Relaxed)
    }

    /// Counts a change of a place, which its caller has locked.
    fn change(&self, place: &mut Option<KeptState<A>>, to: Option<KeptState<A>>) {
        match (place.is_some(), to.is_some()) {
            (false, true) => self.len.fetch_add(1, Ordering::Relaxed),
            (true, false) => self.len.fetch_sub(1, Ordering::Relaxed),
            _ => 0,
        };
        *place = to;
    }

    /// The keys of a batch.
    pub(super) fn keys(&self, batch: &Batch<'_, A>) -> Vec<KeyGeneration> {
        let key = |limit: u64, key: &str| {
            let hash = self.hasher.hash((limit, key));
            let generation = self.generations[group(hash)].load(Ordering::Acquire);
            KeyGeneration { hash, generation }
        };
        batch.checks().iter().map(|check| key(check.limit.fingerprint(), check.key)).collect()
    }

    /// Whether the store says nothing of a batch's limits, as far as is known.
    pub(super) fn silent(&self, batch: &Batch<'_, A>) -> &AtomicBool {
        let limits = batch.checks().iter().map(|check| check.limit.fingerprint());
        let hash = limits.fold(0, |hash: u128, limit| hash.rotate_left(1) ^ u128::from(limit));
        &self.silent[group(hash)]
    }

    /// What is known of a batch at this local time, if all of its states are kept; and whether all
    /// are fresh, so that they count as an answer. Where a limit has changed since, its step takes
    /// the kept state for the same as the store's step does.
    pub(super) fn snapshot(
        &self,
        keys: &[KeyGeneration],
        local: Timestamp,
    ) -> Option<(Snapshot<A::State>, bool)> {
        let states = Vec::with_capacity(keys.len());
        let (mut known, mut is_fresh) = (Snapshot { now: Timestamp::ZERO, states }, true);
        for key in keys {
            let place = self.states.values.get(&key.hash)?;
            let kept = place.as_ref()?;
            // None that is fresh is before its server's time of now, because the server read its
            // clock after the request was sent. The latest is before no server's: states of a batch
            // across slots may come from several.
            known.now = known.now.max(kept.now_at(local));
            known.states.push(kept.state.clone());
            is_fresh &= kept.is_fresh(local, self.max_age_us);
        }
        Some((known, is_fresh))
    }

    /// Notes the state that a decision left: it replaces an earlier one that is kept. Where none is
    /// kept, this one is if requests are to be answered by it.
    pub(super) fn note(
        &self,
        algorithm: &A,
        key: KeyGeneration,
        kept: KeptState<A>,
        allowed: bool,
        is_wanted: bool,
    ) {
        let sent = kept.sent;
        let place = self.states.values.entry(key.hash);
        let before = match &place {
            Entry::Occupied(place) => place.get().as_ref(),
            Entry::Vacant(_) => None,
        };
        let is_later = before.map_or(is_wanted, |before| self.is_newer(algorithm, before, &kept));
        // An invalidation drops the key after it has changed the generation: either it is seen
        // here, or the invalidation waits for this place and empties it.
        if is_later && self.is_current(key) {
            let is_new = matches!(place, Entry::Vacant(_));
            self.change(&mut *place.or_insert(None), Some(kept));
            if is_new {
                let is_fresh = |kept: &KeptState<A>| kept.is_fresh(sent, self.max_age_us);
                let gone =
                    self.states.make_room(key.hash, |kept| !kept.as_ref().is_some_and(is_fresh));
                for (_, mut kept) in gone.into_iter().flatten() {
                    self.change(&mut kept, None);
                }
            }
        } else if allowed && (before.is_none() || !self.is_current(key)) {
            // Which of two states is from before an invalidation, no time tells. What requests saw
            // that are in flight may be from before the charge, and is not kept either: they wait
            // for this place, and then find another generation.
            self.advance(key);
            if let Entry::Occupied(mut place) = place {
                self.change(place.get_mut(), None);
            }
        }
    }

    /// From here on, what requests saw that are in flight does not count.
    fn advance(&self, key: KeyGeneration) {
        self.generations[group(key.hash)].fetch_add(1, Ordering::AcqRel);
    }

    fn is_current(&self, key: KeyGeneration) -> bool {
        self.generations[group(key.hash)].load(Ordering::Acquire) == key.generation
    }

    /// Whether the store saw `kept` after `before`, as far as that can be told. Of two states of
    /// one time, that with less left is the later one, as no refund lies between them.
    fn is_newer(&self, algorithm: &A, before: &KeptState<A>, kept: &KeptState<A>) -> bool {
        let age = kept.sent.checked_since(before.sent);
        let is_too_old = age.is_some_and(|age| age.as_us() > self.max_age_us);
        let is_later = before.now < kept.now
            || (before.now == kept.now && kept.remaining(algorithm) <= before.remaining(algorithm));
        is_later || is_too_old
    }

    /// Drops keys.
    pub(super) fn remove(&self, keys: &[KeyGeneration]) {
        for key in keys {
            if let Some(mut place) = self.states.values.get_mut(&key.hash) {
                self.change(&mut place, None);
            }
        }
    }

    /// Drops keys, and what requests that are in flight see of them.
    pub(super) fn invalidate(&self, keys: &[KeyGeneration]) {
        for key in keys {
            self.advance(*key);
        }
        self.remove(keys);
    }

    /// Drops all keys, and what requests that are in flight see.
    pub(super) fn clear(&self) {
        for generation in &self.generations {
            generation.fetch_add(1, Ordering::AcqRel);
        }
        for mut place in self.states.values.iter_mut() {
            self.change(&mut place, None);
        }
    }
}

fn group(hash: u128) -> usize {
    usize::try_from(hash % GROUPS as u128).unwrap_or_default()
}
