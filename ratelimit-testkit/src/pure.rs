//! [`PureStore`]: a map of states and the pure step, and nothing else.

use std::collections::HashMap;
use std::hash::{BuildHasher, BuildHasherDefault, DefaultHasher, Hash};
use std::sync::{Mutex, PoisonError};

use ratelimit_core::{
    Batch, Check, ErrorKind, Hold, HoldId, Limit, Policy, PolicyState, Refusal, States, Store,
    StoreError, Tick, Verdict, Write, decide,
};

use crate::oracle::time_of;

type Key = (String, String);

/// The smallest store there can be: what the others are to agree with, field by field and state by
/// state. Its own clock stands still at the epoch, and it keeps what has expired.
#[derive(Debug, Default)]
pub struct PureStore(Mutex<Kept>);

/// All that is kept.
#[derive(Clone, Debug, Default)]
struct Kept {
    states: HashMap<Key, PolicyState>,
    holds: HashMap<(Key, HoldId), Hold>,
}

impl PureStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The state of a key of a limit.
    #[must_use]
    pub fn state(&self, limit: &Limit<Policy>, key: &str) -> Option<PolicyState> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.states.get(&(limit.name().to_owned(), key.to_owned())).cloned()
    }

    /// What is held for a key of a limit under an id.
    #[must_use]
    pub fn hold(&self, limit: &Limit<Policy>, key: &str, id: HoldId) -> Option<Hold> {
        let kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        kept.holds.get(&((limit.name().to_owned(), key.to_owned()), id)).cloned()
    }

    /// Decides a batch.
    ///
    /// # Errors
    /// A request that cannot be.
    pub fn decide(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Refusal> {
        let now = time_of(batch);
        let mut kept = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut held = Held { keys: keys(batch), id: batch.hold_id(), kept: &mut kept };
        decide(batch, now, &mut held)
    }
}

fn keys(batch: &Batch<'_, Policy>) -> Vec<Key> {
    let key = |check: &Check<'_, Policy>| (check.limit.name().to_owned(), check.key.to_owned());
    batch.checks().iter().map(key).collect()
}

/// A number that stands for these, in any order.
pub(crate) fn fingerprint<T: Hash>(all: &[T]) -> u64 {
    let hasher = BuildHasherDefault::<DefaultHasher>::default();
    all.iter().map(|one| hasher.hash_one(one)).fold(0, u64::wrapping_add)
}

struct Held<'a> {
    keys: Vec<Key>,
    id: Option<HoldId>,
    kept: &'a mut Kept,
}

impl States<PolicyState> for Held<'_> {
    fn get(&self, position: usize) -> Option<&PolicyState> {
        self.kept.states.get(&self.keys[position])
    }

    fn put(&mut self, position: usize, write: Write<PolicyState>) {
        let key = self.keys[position].clone();
        match write {
            Write::Keep => {}
            Write::Put { state, .. } => {
                self.kept.states.insert(key, state);
            }
            Write::Remove => {
                self.kept.states.remove(&key);
            }
        }
    }

    fn hold(&self, position: usize) -> Option<Hold> {
        self.kept.holds.get(&(self.keys[position].clone(), self.id?)).cloned()
    }

    fn fingerprint(&self) -> u64 {
        fingerprint(&self.keys)
    }

    fn put_hold(&mut self, position: usize, hold: Hold, _expires: Tick) {
        if let Some(id) = self.id {
            self.kept.holds.insert((self.keys[position].clone(), id), hold);
        }
    }
}

impl Clone for PureStore {
    fn clone(&self) -> Self {
        Self(Mutex::new(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()))
    }
}

impl Store<Policy> for PureStore {
    type Error = Refused;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Refused> {
        self.decide(batch).map_err(Refused)
    }
}

/// All that can go wrong in a map: a request that cannot be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused(pub Refusal);

impl std::fmt::Display for Refused {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

impl std::error::Error for Refused {}

impl From<Refusal> for Refused {
    fn from(refusal: Refusal) -> Self {
        Self(refusal)
    }
}

impl StoreError for Refused {
    fn kind(&self) -> ErrorKind {
        self.0.kind()
    }
}
