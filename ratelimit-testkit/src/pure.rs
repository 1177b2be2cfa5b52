//! [`PureStore`]: a map of states and the pure step, and nothing else.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use ratelimit_core::{
    Batch, Check, Limit, Policy, PolicyState, States, Store, Verdict, Write, decide,
};

use crate::oracle::{Never, time_of};

type Key = (String, String);

/// The smallest store there can be: what the others are to agree with, field by field and state by
/// state. Its own clock stands still at the epoch, and it keeps what has expired.
#[derive(Debug, Default)]
pub struct PureStore(Mutex<HashMap<Key, PolicyState>>);

impl PureStore {
    /// An empty store.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The state of a key of a limit.
    #[must_use]
    pub fn state(&self, limit: &Limit<Policy>, key: &str) -> Option<PolicyState> {
        let states = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        states.get(&(limit.name().to_owned(), key.to_owned())).cloned()
    }

    /// Decides a batch.
    #[must_use]
    pub fn decide(&self, batch: &Batch<'_, Policy>) -> Verdict {
        let now = time_of(batch);
        let mut states = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let mut held = Held { keys: keys(batch), states: &mut states };
        decide(batch, now, &mut held).expect("every built-in has every operation")
    }
}

fn keys(batch: &Batch<'_, Policy>) -> Vec<Key> {
    let key = |check: &Check<'_, Policy>| (check.limit.name().to_owned(), check.key.to_owned());
    batch.checks().iter().map(key).collect()
}

struct Held<'a> {
    keys: Vec<Key>,
    states: &'a mut HashMap<Key, PolicyState>,
}

impl States<PolicyState> for Held<'_> {
    fn get(&self, position: usize) -> Option<&PolicyState> {
        self.states.get(&self.keys[position])
    }

    fn put(&mut self, position: usize, write: Write<PolicyState>) {
        let key = self.keys[position].clone();
        match write {
            Write::Keep => {}
            Write::Put { state, .. } => {
                self.states.insert(key, state);
            }
            Write::Remove => {
                self.states.remove(&key);
            }
        }
    }
}

impl Clone for PureStore {
    fn clone(&self) -> Self {
        Self(Mutex::new(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()))
    }
}

impl Store<Policy> for PureStore {
    type Error = Never;

    async fn apply(&self, batch: &Batch<'_, Policy>) -> Result<Verdict, Never> {
        Ok(self.decide(batch))
    }
}
