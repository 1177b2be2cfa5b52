//! The queues of a [`Waiter`](super::Waiter), and until when they are held back.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// The longest time for which a queue is held back.
const LONGEST_HOLD: Duration = Duration::from_secs(24 * 60 * 60);

/// The key of a caller under each limit, if that applies.
pub(super) type QueueKey = Vec<Option<String>>;

/// Held by the caller that may ask the store. It is fair: others get it in the order in which they came.
type TurnLock = tokio::sync::Mutex<()>;

/// The queues of the callers that wait now, or are held back.
#[derive(Default)]
pub(super) struct WaitQueues(Mutex<QueueState>);

#[derive(Default)]
pub(super) struct QueueState {
    pub(super) queues: HashMap<QueueKey, WaitQueue>,
    /// The number of queues at which those that are over are removed.
    sweep_at: usize,
}

#[derive(Default)]
pub(super) struct WaitQueue {
    turn: Arc<TurnLock>,
    held_until: Option<Instant>,
}

impl WaitQueue {
    /// Whether the queue has no other positions than so many, and is not held back.
    fn is_over(&self, positions: usize) -> bool {
        // One is the queue's own; others are made under the lock.
        Arc::strong_count(&self.turn) <= 1 + positions
            && self.held_until.is_none_or(|until| until <= Instant::now())
    }
}

impl WaitQueues {
    pub(super) fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn with<T>(&self, name: QueueKey, then: impl FnOnce(&mut WaitQueue) -> T) -> T {
        let QueueState { queues, sweep_at } = &mut *self.lock();
        if queues.len() >= *sweep_at {
            queues.retain(|_, queue| !queue.is_over(0));
            // Twice as many, so that sweeping takes a constant time per queue.
            *sweep_at = (2 * queues.len()).max(64);
        }
        then(queues.entry(name).or_default())
    }

    pub(super) fn enter(&self, name: QueueKey) -> QueuePosition<'_> {
        let turn = self.with(name.clone(), |queue| queue.turn.clone());
        QueuePosition { queues: self, name, turn }
    }

    pub(super) fn hold_back(&self, name: QueueKey, wait: Duration) {
        // A clock that cannot tell the time of tomorrow holds nothing back. Answers come in any order: the longest counts.
        let until = Instant::now().checked_add(wait.min(LONGEST_HOLD));
        self.with(name, |queue| queue.held_until = queue.held_until.max(until));
    }
}

/// A position in a queue. The queue is removed with its last one, unless it is held back.
pub(super) struct QueuePosition<'a> {
    queues: &'a WaitQueues,
    name: QueueKey,
    pub(super) turn: Arc<TurnLock>,
}

impl QueuePosition<'_> {
    /// Until when the queue is held back, if it is. The error is the time, if it lies beyond the deadline.
    pub(super) fn held_until(
        &self,
        deadline: Option<Instant>,
    ) -> Result<Option<Instant>, Duration> {
        let now = Instant::now();
        let until = self.queues.lock().queues.get(&self.name).and_then(|queue| queue.held_until);
        match (until.filter(|until| *until > now), deadline) {
            (Some(until), Some(deadline)) if until > deadline => Err(until - now),
            (until, _) => Ok(until),
        }
    }
}

impl Drop for QueuePosition<'_> {
    fn drop(&mut self) {
        let queues = &mut self.queues.lock().queues;
        if queues.get(&self.name).is_some_and(|queue| queue.is_over(1)) {
            queues.remove(&self.name);
        }
    }
}
