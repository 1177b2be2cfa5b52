//! The queues of a [`Waiter`](super::Waiter), and until when they are held back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The longest time for which a queue is held back.
const LONGEST_HOLD: Duration = Duration::from_secs(24 * 60 * 60);

/// The queues of the callers that wait now.
#[derive(Default)]
pub(super) struct Queues(Mutex<State>);

#[derive(Default)]
pub(super) struct State {
    pub(super) turns: HashMap<String, Arc<Turn>>,
    pub(super) holds: Holds,
}

/// Held by the caller that may ask the store. It is fair: others get it in the order in which they came.
type Turn = tokio::sync::Mutex<()>;

impl Queues {
    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn enter(&self, name: String) -> Place<'_> {
        let turn = self.lock().turns.entry(name.clone()).or_default().clone();
        Place { queues: self, name, turn }
    }

    pub(super) fn hold_back(&self, name: String, wait: Duration) {
        let now = Instant::now();
        // A clock that cannot tell the time of tomorrow holds nothing back.
        if let Some(until) = now.checked_add(wait.min(LONGEST_HOLD)) {
            self.lock().holds.hold_back(name, until, now);
        }
    }
}

/// A place in a queue. The queue is removed with its last place.
pub(super) struct Place<'a> {
    queues: &'a Queues,
    name: String,
    pub(super) turn: Arc<Turn>,
}

impl Place<'_> {
    /// Until when the queue is held back, if it is. The error is the time, if it lies beyond the deadline.
    pub(super) fn held_until(
        &self,
        deadline: Option<Instant>,
    ) -> Result<Option<Instant>, Duration> {
        let now = Instant::now();
        let until = self.queues.lock().holds.until(&self.name, now);
        match (until, deadline) {
            (Some(until), Some(deadline)) if until > deadline => Err(until - now),
            _ => Ok(until),
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut state = self.queues.lock();
        // One is the map's and one is this place's; others are made under this lock.
        if Arc::strong_count(&self.turn) <= 2 {
            state.turns.remove(&self.name);
        }
    }
}

/// Until when queues are held back. Most queues never are.
#[derive(Default)]
pub(super) struct Holds {
    until: HashMap<String, Instant>,
    /// The number of holds at which those that are over are removed.
    sweep_at: usize,
}

impl Holds {
    fn hold_back(&mut self, name: String, until: Instant, now: Instant) {
        if self.until.len() >= self.sweep_at {
            self.until.retain(|_, until| *until > now);
            // Twice as many, so that sweeping takes a constant time per hold.
            self.sweep_at = (2 * self.until.len()).max(64);
        }
        // Answers come in any order: the longest counts.
        let held = self.until.entry(name).or_insert(until);
        *held = until.max(*held);
    }

    fn until(&mut self, name: &str, now: Instant) -> Option<Instant> {
        let until = *self.until.get(name)?;
        if until <= now {
            self.until.remove(name);
            return None;
        }
        Some(until)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.until.len()
    }
}
