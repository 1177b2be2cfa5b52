//! The queues of a [`Waiter`](super::Waiter), and until when they are held back.

use std::collections::HashMap;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::OwnedMutexGuard;
use tokio::time::{Instant, timeout, timeout_at};

/// The longest time for which a queue is held back.
pub(super) const LONGEST_HOLD: Duration = Duration::from_secs(24 * 60 * 60);

/// How much later than it means to the caller whose turn it is may go on, until the others no
/// longer wait for it: its future may be kept, and not polled again.
const PATIENCE: Duration = Duration::from_secs(1);

/// What a queue is for.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum QueueKey {
    /// A caller: its key under each limit, if that applies.
    Caller(Vec<Option<String>>),
    /// Callers that the limit of this position has denied under this key.
    Limit(usize, String),
}

/// Held by the caller that may ask the store. It is fair: others get it in the order in which they
/// came.
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
    /// When the others no longer wait for the caller whose turn it is.
    overdue_at: Option<Instant>,
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

    /// Whether callers wait in this queue.
    pub(super) fn is_waited_in(&self, name: &QueueKey) -> bool {
        self.lock().queues.contains_key(name)
    }

    pub(super) fn hold_back(&self, name: QueueKey, wait: Duration) {
        // A clock that cannot tell the time of tomorrow holds nothing back. Answers come in any
        // order: the longest counts.
        let until = Instant::now().checked_add(wait.min(LONGEST_HOLD));
        self.with(name, |queue| queue.held_until = queue.held_until.max(until));
    }
}

/// A position in a queue. The queue is removed with its last one, unless it is held back.
pub(super) struct QueuePosition<'a> {
    queues: &'a WaitQueues,
    name: QueueKey,
    turn: Arc<TurnLock>,
}

/// The turn in a queue, until it is dropped.
pub(super) struct Turn<'a> {
    /// Dropped first, so that the last position removes its queue.
    _lock: OwnedMutexGuard<()>,
    pub(super) position: QueuePosition<'a>,
}

impl<'a> QueuePosition<'a> {
    /// Waits for the turn in another queue, while the caller keeps its turn in this one; `None` if
    /// the deadline is over first.
    pub(super) async fn turn_in(
        &self,
        other: QueueKey,
        deadline: Option<Instant>,
    ) -> Option<Turn<'a>> {
        let mut position = self.queues.enter(other);
        let lock = {
            let mut turn = pin!(position.take_turn(deadline));
            loop {
                self.goes_on_by(Instant::now());
                if let Ok(lock) = timeout(PATIENCE / 2, turn.as_mut()).await {
                    break lock?;
                }
            }
        };
        Some(Turn { _lock: lock, position })
    }

    /// Waits for the caller's turn; `None` if the deadline is over first. Where the caller whose
    /// turn it is does not go on, the others form another queue.
    pub(super) async fn take_turn(
        &mut self,
        deadline: Option<Instant>,
    ) -> Option<OwnedMutexGuard<()>> {
        'queue: loop {
            let mut turn = pin!(self.turn.clone().lock_owned());
            loop {
                let until = self.looks_at();
                let until = deadline.map_or(until, |deadline| until.min(deadline));
                if let Ok(turn) = timeout_at(until, turn.as_mut()).await {
                    self.goes_on_by(Instant::now());
                    return Some(turn);
                }
                if deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                    return None;
                }
                if self.moves_to_another_queue() {
                    continue 'queue;
                }
            }
        }
    }

    /// The caller has its turn, and goes on by then.
    pub(super) fn goes_on_by(&self, at: Instant) {
        if let Some(queue) = self.queues.lock().queues.get_mut(&self.name)
            && Arc::ptr_eq(&queue.turn, &self.turn)
        {
            queue.overdue_at = at.checked_add(PATIENCE);
        }
    }

    /// When to look whether the caller whose turn it is goes on.
    fn looks_at(&self) -> Instant {
        let soon = Instant::now() + PATIENCE;
        let queues = &self.queues.lock().queues;
        let overdue_at = queues.get(&self.name).and_then(|queue| queue.overdue_at);
        overdue_at.map_or(soon, |at| if at > Instant::now() { at } else { soon })
    }

    /// Moves to the queue that others have formed, or forms it if the caller whose turn it is is
    /// overdue.
    fn moves_to_another_queue(&mut self) -> bool {
        let queues = &mut self.queues.lock().queues;
        let queue = queues.entry(self.name.clone()).or_default();
        if Arc::ptr_eq(&queue.turn, &self.turn) {
            if queue.overdue_at.is_some_and(|at| at > Instant::now()) {
                return false;
            }
            (queue.turn, queue.overdue_at) = Default::default();
        }
        self.turn = queue.turn.clone();
        true
    }

    pub(super) fn hold_back(&self, wait: Duration) {
        self.queues.hold_back(self.name.clone(), wait);
    }

    /// Until when the queue is held back, if it is. The error is the time, if it lies beyond the
    /// deadline.
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
