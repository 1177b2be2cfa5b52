//! [`Turns`]: one writer per key and process at a time.

use std::collections::HashMap;
use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::{Mutex as Turn, OwnedMutexGuard};
use tokio::time::timeout_at;

use crate::deadline::Deadline;

const SHARDS: usize = 16;

type TurnsByKey = HashMap<Arc<str>, Arc<Turn<()>>>;

/// A fair queue per key among the callers of this process. If all of them compare and set at once, all
/// but one fail; one after the other, they fail only because of other processes.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    hasher: RandomState,
    shards: [Mutex<TurnsByKey>; SHARDS],
}

impl Turns {
    /// Waits for the caller's turn at all of these keys, first come, first served, for a quarter of the time at most:
    /// another runtime may need half of it to take over the connection. By then the caller whose turn it is may be a future that is
    /// kept and no longer polled: this caller goes without a turn, and later ones form another queue.
    pub(crate) async fn take(&self, mut keys: Vec<Arc<str>>, deadline: Deadline) -> Vec<Taken<'_>> {
        // One global order, so no two callers wait for each other.
        keys.sort_unstable();
        keys.dedup();
        let mut taken = Vec::with_capacity(keys.len());
        for key in keys {
            let mut next = self.queue(key);
            if let Ok(guard) = Arc::clone(&next.turn).try_lock_owned() {
                next.guard = Some(guard);
            } else {
                next.has_waited = true;
                let turn = Arc::clone(&next.turn).lock_owned();
                match timeout_at(deadline.quarter_time(), turn).await {
                    Ok(guard) => next.guard = Some(guard),
                    Err(_) => next.leave_queue(&mut self.shard(&next.key)),
                }
            }
            taken.push(next);
        }
        taken
    }

    fn queue(&self, key: Arc<str>) -> Taken<'_> {
        let turn = Arc::clone(self.shard(&key).entry(Arc::clone(&key)).or_default());
        Taken { turns: self, key, turn, guard: None, has_waited: false }
    }

    fn shard(&self, key: &str) -> MutexGuard<'_, TurnsByKey> {
        // A few bits suffice.
        #[allow(clippy::cast_possible_truncation, reason = "any of its bits do")]
        let place = self.hasher.hash_one(key) as usize % SHARDS;
        self.shards[place].lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A turn at a key, or a place in its queue. Dropping it passes the turn on.
pub(crate) struct Taken<'t> {
    turns: &'t Turns,
    key: Arc<str>,
    turn: Arc<Turn<()>>,
    guard: Option<OwnedMutexGuard<()>>,
    has_waited: bool,
}

impl Taken<'_> {
    /// Whether other callers went first.
    pub(crate) const fn has_waited(&self) -> bool {
        self.has_waited
    }

    /// Lets no further caller queue here.
    fn leave_queue(&self, shard: &mut TurnsByKey) {
        if shard.get(&self.key).is_some_and(|turn| Arc::ptr_eq(turn, &self.turn)) {
            shard.remove(&self.key);
        }
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut shard = self.turns.shard(&self.key);
        self.guard = None;
        // The map's reference and this one: no other caller waits, and none can arrive meanwhile.
        if Arc::strong_count(&self.turn) <= 2 {
            self.leave_queue(&mut shard);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use futures_util::future::join;
    use tokio::task::{JoinSet, yield_now};
    use tokio::time::{Instant, timeout};

    use super::*;

    fn keys(names: &[&str]) -> Vec<Arc<str>> {
        names.iter().map(|name| Arc::from(*name)).collect()
    }

    fn patience() -> Deadline {
        Deadline::within(Duration::from_secs(20))
    }

    fn is_idle(turns: &Turns) -> bool {
        turns.shards.iter().all(|shard| shard.lock().expect("no panic").is_empty())
    }

    #[tokio::test]
    async fn one_caller_at_a_time_has_a_key_and_none_leaves_a_trace() {
        let turns = Arc::new(Turns::default());
        let at_it = Arc::new(AtomicUsize::new(0));
        let mut tasks = JoinSet::new();
        for n in 0..64 {
            let (turns, at_it) = (Arc::clone(&turns), Arc::clone(&at_it));
            tasks.spawn(async move {
                // In either order: no caller waits forever.
                let names = if n % 2 == 0 { ["a", "b"] } else { ["b", "a"] };
                let taken = turns.take(keys(&names), patience()).await;
                assert_eq!(at_it.fetch_add(1, Ordering::SeqCst), 0);
                yield_now().await;
                at_it.fetch_sub(1, Ordering::SeqCst);
                drop(taken);
            });
        }
        tasks.join_all().await;
        assert!(is_idle(&turns));
    }

    #[tokio::test(start_paused = true)]
    async fn a_turn_that_does_not_end_is_waited_for_a_quarter_of_the_time_by_each_and_leaves_nothing()
     {
        let turns = Turns::default();
        let kept = turns.take(keys(&["a"]), patience()).await;
        let begin = Instant::now();
        // The second one queues behind the first.
        let both =
            join(turns.take(keys(&["a"]), patience()), turns.take(keys(&["b", "a"]), patience()));
        drop(both.await);
        assert_eq!(begin.elapsed(), Duration::from_secs(5));
        let next = turns.take(keys(&["a"]), patience()).await;
        assert_eq!(begin.elapsed(), Duration::from_secs(5), "in another queue");
        drop(kept);
        assert!(!is_idle(&turns), "the other queue stays");
        let waits = timeout(Duration::from_millis(10), turns.take(keys(&["a"]), patience())).await;
        assert!(waits.is_err(), "it is given up");
        drop(next);
        assert!(is_idle(&turns));
    }
}
